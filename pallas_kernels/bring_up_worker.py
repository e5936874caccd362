"""The process in which `bring_up` runs checks, so that it may hang or die.

    python -m pallas_kernels.bring_up_worker TABLE REPORT

TABLE is a module with ``checks(capability) -> list[Check]``. Names come in on
standard input, one a line; REPORT gets a line of JSON for the device, for each
phase of a check and for what each check found. Nothing is caught but a kernel's
own refusal: any other error ends the process, its traceback is the report, and
`bring_up` goes on with a new process. A CUDA context that an error has
poisoned therefore never serves a second check.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
import importlib
import json
import pathlib
import sys
import time
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import bring_up_check, timing

REPEATS = 3  # more calls on the same inputs: a result that moves is a race
BASELINE_SAMPLES = 10
DRIVER = pathlib.Path("/proc/driver/nvidia/version")

Check = bring_up_check.Check
Finding = bring_up_check.Finding
Say = Callable[[str], None]


def device() -> dict[str, Any]:
  """The device that checks run on, as JSON values."""
  first = jax.devices()[0]
  found: dict[str, Any] = {
    "platform": first.platform,
    "kind": first.device_kind,
  }
  if first.platform == "gpu":
    found["capability"] = str(getattr(first, "compute_capability", ""))
    found["sms"] = getattr(first, "core_count", 0)
    found["runtime"] = first.client.platform_version.replace("\n", " ")
    if DRIVER.is_file():
      found["driver"] = DRIVER.read_text().splitlines()[0]
  return found


def run_check(check: Check, *, interpret: bool, say: Say) -> Finding:
  """Runs a kernel and its reference on every input, and compares.

  The kernel comes first, so that memory it forgets to write does not hold the
  reference's result.

  Args:
    check: What to run.
    interpret: Interpret the kernel on the CPU, and time nothing.
    say: Told what is about to happen.
  """
  options = {"interpret": plgpu.InterpretGPUParams()} if interpret else {}
  make = jax.jit(check.make)
  kernel = jax.jit(functools.partial(check.run, **options))
  meaning = jax.jit(check.meaning)
  specified = check.specified and jax.jit(check.specified)

  def call(function):
    result = function(*arguments)
    result = specified(result, *arguments) if specified else result
    return jax.block_until_ready(result)

  worst: dict[str, Any] = dict(unequal=0, frobenius=0.0, element=0.0)
  for label, values in check.inputs.items():
    on = f" on {label}" if label else ""
    say(f"making the inputs{on}")
    arguments = jax.block_until_ready(make(*values))
    say(f"running the kernel{on}")
    got = call(kernel)
    say(f"running the reference{on}")
    want = call(meaning)
    verdict = bring_up_check.compare(got, want, check.limits)
    del want
    for name, value in worst.items():
      worst[name] = bring_up_check.worse(value, getattr(verdict, name))
    if not verdict.ok:
      why = verdict.why + on
      return bring_up_check.finding(check, "wrong", why=why, **worst)
    say(f"repeating the kernel{on}")
    for _ in range(0 if interpret else REPEATS):
      if not bring_up_check.same_bits(call(kernel), got):
        why = f"results change from call to call{on}"
        return bring_up_check.finding(check, "wrong", why=why, **worst)
  if check.stage == "real" and not interpret:
    say("timing")
    worst |= times(check, kernel, make)
  return bring_up_check.finding(check, "passed", **worst)


def times(
  check: Check, kernel: Callable[..., Any], make: Callable[..., Any]
) -> dict[str, Any]:
  """Times a kernel on its first input, and its baselines beside it."""
  arguments = make(*next(iter(check.inputs.values())))
  timed = timing.time_function(kernel, jax.block_until_ready(arguments))
  moved = timing.nbytes((arguments, jax.eval_shape(kernel, *arguments)))
  del arguments
  baselines = {}
  for name, (function, maker) in check.baselines.items():
    inputs = jax.block_until_ready(jax.jit(maker)())
    baselines[name] = timing.time_function(
      jax.jit(function), inputs, samples=BASELINE_SAMPLES
    ).median_us
  return dict(
    microseconds=timed.median_us,
    flops=check.flops,
    bytes=moved,
    rate=check.rate,
    baselines=baselines,
  )


def serve(check: Check, *, interpret: bool, write: Callable[..., None]) -> None:
  """Runs one check and reports its phases and its finding."""
  start = time.perf_counter()

  def say(phase: str) -> None:
    write(name=check.name, phase=phase)

  try:
    found = run_check(check, interpret=interpret, say=say)
  except NotImplementedError as refusal:  # an answer, not an accident
    found = bring_up_check.finding(check, "skipped", why=str(refusal))
  seconds = round(time.perf_counter() - start, 2)
  found = dataclasses.replace(found, seconds=seconds)
  write(name=check.name, finding=dataclasses.asdict(found))


def main(arguments: list[str]) -> int:
  """Serves checks until standard input ends."""
  table, report = importlib.import_module(arguments[0]), arguments[1]
  with open(report, "a", buffering=1) as file:

    def write(**fields: Any) -> None:
      file.write(json.dumps(fields) + "\n")

    found = device()
    write(device=found)
    interpret = found["platform"] != "gpu"
    checks = {c.name: c for c in table.checks(found.get("capability"))}
    for line in sys.stdin:
      serve(checks[line.strip()], interpret=interpret, write=write)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
