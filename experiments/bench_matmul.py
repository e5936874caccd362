"""Times the grouped matmuls beside what others offer.

    python -m experiments.bench grouped_matmul [--peers] [--json FILE]
        [--shapes NAME ...] [--patterns NAME ...] [--precisions NAME ...]
    [--rows N --groups N --depth N --width N]

For each shape of `cases.TIMED_MATMULS` and each pattern of group sizes, every
product in every precision and every peer, in one process and in turn:

    in turn     median of samples of about 10 ms, one of each call after the
                other, so that a GPU that grows warm does so for all
    sustained   the second half of 0.8 s of one call without a break, with the
                SM clock and the power that nvidia-smi reads meanwhile; for the
                first pattern only
    error       relative Frobenius error on a sample of the result, against
                float64 on the same operands

TFLOP/s count rows that belong to a group. Then the same number of rows is given
to four times as many experts: the time may grow, by the bar of 1.35 at most.

On an NVIDIA GPU (Hopper) ours are the kernels, elsewhere plain jnp.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
import dataclasses
import json
import pathlib
import sys
from typing import Any

import jax
import rich.console
import rich.table

from experiments import matmul_peers, matmul_timing, matmul_ways
from pallas_kernels import cases, timing

NAME = "grouped_matmul"  # of the command
PATTERNS = ("even", "skewed", "one_hot")
MORE_EXPERTS = 4  # times as many at the same rows
MANY_EXPERTS = 16
EXPERTS_BAR = 1.35
WRONG = 0.01  # relative Frobenius error beyond fp8's short accumulation
SUSTAINED_SECONDS = 0.8
PEERS = tuple(matmul_peers.PEERS)
Case = matmul_timing.Case
Problem = matmul_ways.Problem


def run_problem(
  problem: Problem,
  asked: argparse.Namespace,
  first: bool,
  backend: matmul_ways.Backend,
  compile_: Callable[..., Any],
) -> tuple[list[Case], dict[str, str]]:
  """Everything about one problem.

  Args:
    problem: What to compute.
    asked: The command line.
    first: Of its shape: with all peers, and sustained.
    backend: Of ours.
    compile_: A `matmul_timing.Compiler`.

  Returns:
    The cases, and what was skipped with the reasons.
  """
  data = matmul_ways.arrays(problem)
  calls, skipped = matmul_ways.calls(
    problem, data, backend, compile_, asked.precisions
  )
  if asked.peers:
    names = PEERS if first else PEERS[:1]
    others, more = matmul_peers.calls(problem, data, names)
    calls, skipped = calls + others, skipped | more
  seconds = asked.seconds if first else 0.0
  found = matmul_timing.measure(problem, calls, asked.samples, seconds)
  return found, skipped


def experts(
  problem: Problem,
  backend: matmul_ways.Backend,
  compile_: Callable[..., Any],
  asked: argparse.Namespace,
) -> list[dict[str, Any]]:
  """Times ours at the same rows with few experts and with more."""
  few = dataclasses.replace(problem, groups=problem.groups // MORE_EXPERTS)
  kept = []
  for each in (few, problem):
    found, _ = matmul_ways.calls(
      *(each, matmul_ways.arrays(each), backend, compile_, asked.precisions)
    )
    kept.append({(c.who, c.way): c.run for c in found})
  names = [name for name in kept[0] if name in kept[1]]
  runs = [runs[name] for name in names for runs in kept]
  times = timing.measure_in_turn(runs, samples=asked.samples)
  found = []
  for (who, way), a, b in zip(names, times[::2], times[1::2], strict=True):
    medians = a.median_us, b.median_us
    found.append(
      {
        "who": who,
        "way": way,
        "rows": problem.rows,
        "depth": problem.depth,
        "width": problem.width,
        "experts": [few.groups, problem.groups],
        "median_us": medians,
        "ratio": medians[1] / medians[0],
        "bar": EXPERTS_BAR,
      }
    )
  return found


def table(problem: Problem, found: Sequence[Case]) -> rich.table.Table:
  """The cases of a problem side by side."""
  made = rich.table.Table(
    title=f"{problem.name}: {sum(problem.sizes)} rows, {problem.groups} groups "
    f"{problem.pattern}, K {problem.depth}, N {problem.width}"
  )
  peers = [p for p in PEERS if any(p in c.times for c in found)]
  made.add_column("product")
  made.add_column("in")
  columns = ("us", "quartiles", "TFLOP/s", "sustained", "MHz", "W")
  for name in (*columns, *(f"x {peer}" for peer in peers), "error"):
    made.add_column(name, justify="right")
  for case in sorted(found, key=lambda case: case.way):
    time_, s = case.time, case.sustained
    made.add_row(
      *(case.way, case.who, f"{time_.median_us:.1f}"),
      f"{time_.low_us:.1f}-{time_.high_us:.1f}",
      f"{case.teraflops:.0f}",
      f"{s.teraflops:.0f}" if s else "",
      f"{s.clock_mhz:.0f}" if s and s.clock_mhz else "",
      f"{s.watts:.0f}" if s and s.watts else "",
      *(f"{case.times[p]:.2f}" if p in case.times else "" for p in peers),
      "" if case.error is None else f"{case.error:.1e}",
    )
  return made


def problems(asked: argparse.Namespace) -> Iterator[list[Problem]]:
  """The problems of each shape, a pattern each."""
  shapes = {name: cases.TIMED_MATMULS[name] for name in asked.shapes}
  given = (asked.rows, asked.groups, asked.depth, asked.width)
  if any(given):
    usual = next(iter(shapes.values()))
    shapes = {"given": tuple(a or b for a, b in zip(given, usual, strict=True))}
  for name, (rows, count, depth, width) in shapes.items():
    yield [
      Problem(
        name=name,
        rows=rows,
        groups=count,
        depth=depth,
        width=width,
        pattern=pattern,
      )
      for pattern in asked.patterns
    ]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """The command line after ``grouped_matmul``."""
  parser = argparse.ArgumentParser(
    prog=f"python -m experiments.bench {NAME}",
    description="Times the grouped matmuls beside what others offer.",
  )
  parser.add_argument("--peers", action="store_true", help=", ".join(PEERS))
  parser.add_argument("--json", type=pathlib.Path, help="file to write")
  names = tuple(cases.TIMED_MATMULS)
  parser.add_argument("--shapes", nargs="+", choices=names, default=names)
  for field in ("rows", "groups", "depth", "width"):
    parser.add_argument(f"--{field}", type=int, help="instead of the usual")
  parser.add_argument(
    "--patterns", nargs="+", choices=cases.PATTERNS, default=PATTERNS
  )
  parser.add_argument(
    "--precisions",
    nargs="+",
    choices=matmul_ways.PRECISIONS,
    default=matmul_ways.PRECISIONS,
  )
  parser.add_argument("--samples", type=int, default=timing.SAMPLES // 2)
  parser.add_argument(
    "--seconds", type=float, default=SUSTAINED_SECONDS, help="sustained; 0: not"
  )
  return parser.parse_args(arguments)


def main(
  arguments: Sequence[str], origin: Callable[[Sequence[str]], dict[str, Any]]
) -> int:
  """Runs the command; returns its exit status, 1 if a result is wrong.

  Args:
    arguments: With ``grouped_matmul`` first.
    origin: `bench.origin`.
  """
  asked = parse(arguments[1:])
  backend = "mosaic" if jax.devices()[0].platform == "gpu" else "xla"
  console = rich.console.Console(width=None if sys.stdout.isatty() else 150)
  compile_, found, skipped, grown = matmul_timing.Compiler(), [], {}, []
  for same_shape in problems(asked):
    for i, problem in enumerate(same_shape):
      mine, reasons = run_problem(problem, asked, i == 0, backend, compile_)
      console.print(table(problem, mine))
      skipped |= {f"{problem.name}: {k}": v for k, v in reasons.items()}
      found += mine
    if same_shape[0].groups >= MANY_EXPERTS:
      grown += experts(same_shape[0], backend, compile_, asked)
    if asked.json:
      result = origin(arguments) | {
        "backend": backend,
        "skipped": skipped,
        "experts": grown,
        "cases": [dataclasses.asdict(case) for case in found],
      }
      asked.json.write_text(json.dumps(result, indent=2) + "\n")
  for name, reason in skipped.items():
    console.print(f"skipped {name}: {reason}", markup=False)
  for each in grown:
    few, many = each["experts"]
    console.print(
      f"{each['way']} {each['who']}: {many} experts take {each['ratio']:.2f} x "
      f"the time of {few} (bar {EXPERTS_BAR})",
      markup=False,
    )
  wrong = [c for c in found if c.error is not None and not c.error < WRONG]
  for case in wrong:
    name = f"{case.problem.name} {case.problem.pattern} {case.way} {case.who}"
    print(f"bench: wrong: {name}, {case.error:.1e}", file=sys.stderr)
  return 1 if wrong else 0
