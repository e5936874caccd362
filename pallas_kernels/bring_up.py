"""Runs every kernel on the GPU at hand against its reference, then times it.

    python -m pallas_kernels.bring_up [--json FILE] [--quick]
        [--timeout SECONDS] [--kernels WORD ...] [--record FILE]

For whoever is the first with a GPU. Small shapes first, then real ones, which
are timed, beside a bf16 matmul of as many operations or beside a copy. Checks
run in a process of their own, with a timeout each: a kernel that hangs or
crashes is a line of the table, and the next check runs. The exit status is 0
only if nothing that ran failed.

``--json`` writes what to send back: device, driver, versions, and each check's
result or error text. A full run on a GPU also writes the record
(`bring_up_record`) by which ``backend="auto"`` takes kernels on a GPU that they
were not developed on; so does a run that finds a failure. ``--quick`` leaves
out the real shapes, ``--kernels`` what its words do not name.

On a CPU the kernels that JAX's own interpret mode takes run at small shapes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import dataclasses
import importlib
import importlib.util
import json
import os
import pathlib
import platform
import sys
from typing import Any

from pallas_kernels import (
  bring_up_check,
  bring_up_process,
  bring_up_record,
  bring_up_table,
  peaks,
)

TABLE = "pallas_kernels.bring_up_table"
TIMEOUT_SECONDS = 180.0
WHY_CHARACTERS = 160  # of an error in the table; the JSON has it all

Check = bring_up_check.Check
Finding = bring_up_check.Finding


def obstacle(check: Check, capability: str | None) -> str | None:
  """Why a check is skipped on a device, or None."""
  found = bring_up_table.obstacle(check, capability)
  if found is None and importlib.util.find_spec(check.module) is None:
    return f"not built: there is no {check.module} yet"
  return found


def share(finding: Finding, peak: peaks.Peak | None) -> float | None:
  """What a timed kernel reaches of the peak that bounds it, 0 to 1."""
  if finding.microseconds is None or peak is None:
    return None
  work = finding.bytes if finding.rate == "memory" else finding.flops
  return work / (finding.microseconds * 1e-6) / getattr(peak, finding.rate)


def rate(finding: Finding) -> str:
  """TFLOP/s or TB/s in words; empty without a time."""
  if finding.microseconds is None:
    return ""
  if finding.rate == "memory":
    return f"{finding.bytes / finding.microseconds / 1e6:.2f} TB/s"
  return f"{finding.flops / finding.microseconds / 1e6:.0f} TFLOP/s"


def row(finding: Finding, peak: peaks.Peak | None) -> str:
  """One line of the table."""
  microseconds, of_peak, against = "", "", ""
  if finding.microseconds is not None:
    microseconds = f"{finding.microseconds:.1f}"
    against = ", ".join(
      f"{us / finding.microseconds:.2f} x {name}"
      for name, us in finding.baselines.items()
    )
  if (part := share(finding, peak)) is not None:
    of_peak = f"{100 * part:.0f}% {finding.rate}"
  why = " ".join(finding.why.split())
  tail = f"  {why[-WHY_CHARACTERS:]}" if finding.bad else f"  {why}"
  line = (
    f"{finding.kernel:<38} {finding.shape:<36} {finding.outcome:<8} "
    f"{microseconds:>9} {rate(finding):>13} {of_peak:>11}  {against}"
  )
  return line.rstrip() + (tail if why else "")


def heading() -> str:
  """The first line of the table."""
  return (
    f"{'kernel':<38} {'shape':<36} {'works':<8} {'us':>9} {'rate':>13} "
    f"{'of peak':>11}  against bf16"
  )


def summary(findings: Sequence[Finding]) -> dict[str, int]:
  """How many checks came to each outcome."""
  outcomes = [finding.outcome for finding in findings]
  return {name: outcomes.count(name) for name in dict.fromkeys(outcomes)}


def report(
  device: dict[str, Any],
  findings: Sequence[Finding],
  command: str,
  planned: int,
) -> dict[str, Any]:
  """What is sent back, as JSON values.

  Args:
    device: What the worker said of it.
    findings: So far.
    command: That was run.
    planned: Checks of the whole run; an interrupted one has fewer findings.
  """
  peak = peaks.peak(device["kind"])
  return {
    "command": command,
    "device": device,
    "versions": bring_up_record.versions()
    | {"python": platform.python_version()},
    "peaks": dataclasses.asdict(peak) if peak else None,
    "planned": planned,
    "complete": len(findings) == planned,
    "summary": summary(findings),
    "checks": [
      dataclasses.asdict(f) | {"of_peak": share(f, peak)} for f in findings
    ],
  }


def write(path: pathlib.Path, content: dict[str, Any]) -> None:
  """Writes JSON under a temporary name and renames it."""
  partial = path.with_name(path.name + ".partial")
  partial.write_text(json.dumps(content, indent=1) + "\n")
  os.replace(partial, path)


def select(
  checks: Sequence[Check], words: Sequence[str], quick: bool
) -> list[Check]:
  """The checks that a run is asked for."""
  return [
    check
    for check in checks
    if (not words or any(word in check.name for word in words))
    and not (quick and check.stage == "real")
  ]


def run_all(
  asked: argparse.Namespace, table: str
) -> tuple[dict[str, Any], list[Finding]]:
  """Runs what was asked for; prints the table as it goes.

  Raises:
    WorkerError: Not even the first process can be started.
    TimeoutError: The last process cannot be ended.
  """
  findings: list[Finding] = []
  with bring_up_process.Runner(table, asked.timeout) as runner:
    device = dict(runner.device)
    capability = device.get("capability")
    peak = peaks.peak(device["kind"])
    module = importlib.import_module(table)
    checks = select(module.checks(capability), asked.kernels, asked.quick)
    command = command_of(asked)
    if device["platform"] != "gpu":
      print("JAX found no GPU: what it can interpret runs; nothing is proven.")
    print(f"{device}\n{heading()}", flush=True)

    def add(finding: Finding) -> None:
      findings.append(finding)
      print(row(finding, peak), flush=True)
      if asked.json:
        write(asked.json, report(device, findings, command, len(checks)))

    for check in checks:
      why = obstacle(check, capability)
      if why is None:
        add(runner.run(check))
      else:
        add(bring_up_check.finding(check, "skipped", why=why))
  return device, findings


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """Reads the command line."""
  parser = argparse.ArgumentParser(
    prog="python -m pallas_kernels.bring_up",
    description="Runs every kernel on the GPU at hand against its reference.",
  )
  parser.add_argument(
    "--json", type=pathlib.Path, metavar="FILE", help="report to send back"
  )
  parser.add_argument(
    "--quick", action="store_true", help="small shapes only, no times"
  )
  parser.add_argument(
    "--timeout", type=float, default=TIMEOUT_SECONDS, metavar="SECONDS",
    help="of one check, compilation included; %(default)s by default",
  )  # fmt: skip
  parser.add_argument(
    "--kernels", nargs="+", default=[], metavar="WORD",
    help="only checks whose name holds one of these",
  )  # fmt: skip
  parser.add_argument(
    "--record", type=pathlib.Path, metavar="FILE",
    help="where the record goes instead of the user's cache folder",
  )  # fmt: skip
  return parser.parse_args(arguments)


def command_of(asked: argparse.Namespace) -> str:
  """The command without the places of files, which are nobody's concern."""
  words = ["python -m pallas_kernels.bring_up"]
  words += ["--quick"] * asked.quick
  if asked.timeout != TIMEOUT_SECONDS:
    words.append(f"--timeout {asked.timeout:g}")
  if asked.kernels:
    words.append("--kernels " + " ".join(asked.kernels))
  return " ".join(words)


def keep_record(
  asked: argparse.Namespace,
  device: dict[str, Any],
  findings: Sequence[Finding],
) -> None:
  """Writes the record of a GPU, unless a partial run found no fault."""
  failed = [finding.name for finding in findings if finding.bad]
  partial = asked.quick or asked.kernels
  if device["platform"] != "gpu" or (partial and not failed):
    return
  file = bring_up_record.write(
    device["kind"],
    device.get("capability"),
    failed,
    checks=sum(finding.outcome == "passed" for finding in findings),
    file=asked.record,
  )
  print(f"wrote {file}")


def main(arguments: Sequence[str], table: str = TABLE) -> int:
  """Runs the command; returns its exit status."""
  asked = parse(arguments)
  # Interpreted kernels need more threads than most machines have cores.
  os.environ["NPROC"] = "32"
  try:
    device, findings = run_all(asked, table)
  except (bring_up_process.WorkerError, TimeoutError) as error:
    print(f"bring_up: {error}", file=sys.stderr)
    return 1
  keep_record(asked, device, findings)
  counts = summary(findings)
  print(", ".join(f"{number} {name}" for name, number in counts.items()))
  return 1 if any(finding.bad for finding in findings) else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
