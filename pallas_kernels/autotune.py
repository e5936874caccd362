"""Times the legal schedules of each kernel and keeps the best of them.

    python -m pallas_kernels.autotune [KERNEL ...] [--json FILE] [--samples N]

Writes ``tuned/<device>.json`` beside this file: for each workload that has a
name in the table (`workloads.Workload.tuned`), the schedule with the least
median time, that time, and what the runner-up took. `tiles.tuned` reads it. A
schedule that wins by less than `MARGIN` over one listed before it does not
replace it: the first of a list is the plainest.

Only what was measured is in the table; a GPU without a table uses the defaults
of each kernel. Needs the GPU that it tunes for.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import sys
from typing import Any

import jax

from pallas_kernels import swiglu_kernel, tiles, timing, workloads

MARGIN = 0.005  # of the time: below it the order of two schedules is noise
SAMPLES = 7
SMEM_BYTES = 227 * 1024  # of an SM, for all its CTAs; Hopper and Blackwell
SCALE_BYTES = 3072  # kept free for scales and barriers of a CTA

StreamTile = tiles.StreamTile
SwigluTile = swiglu_kernel.SwigluTile
Workload = workloads.Workload
Schedule = dict[str, Any]


def stream_tiles(read: int, written: int) -> list[StreamTile]:
  """Schedules of a streaming kernel that fit in shared memory.

  Args:
    read: Bytes of an input element.
    written: Bytes of all results of an element.
  """
  found = []
  for columns, stages, ctas, warpgroups, many in itertools.product(
    (128, 256, 512), (2, 1, 3), (1, 2), (1, 2), (False, True)
  ):
    buffers = stages if many else 1
    smem = tiles.TILE_ROWS * columns * (read * stages + written * buffers)
    parts = columns // warpgroups
    if ctas * (smem + SCALE_BYTES) > SMEM_BYTES or parts not in (128, 256):
      continue
    if (many and stages == 1) or ctas * warpgroups > 2:
      continue
    tile = StreamTile(
      columns=columns,
      stages=stages,
      ctas_per_sm=ctas,
      warpgroups=warpgroups,
      buffers=buffers,
    )
    found.append(tile)
  return found


def swiglu_tiles(streams: int, others: int) -> list[SwigluTile]:
  """Schedules of a SwiGLU kernel that fit in shared memory.

  Args:
    streams: bf16 tiles of a stage.
    others: fp8 tiles besides, a bf16 one counted twice.
  """
  found = []
  for stages, ctas, warpgroups in itertools.product((3, 2, 1), (1, 2), (2, 1)):
    smem = tiles.TILE_ROWS**2 * (2 * streams * stages + others)
    if ctas * (smem + SCALE_BYTES) <= SMEM_BYTES:
      tile = SwigluTile(stages=stages, ctas_per_sm=ctas, warpgroups=warpgroups)
      found.append(tile)
  return found


def schedules(workload: Workload) -> list[Schedule]:
  """Keyword arguments of the kernel, one set for each schedule to time.

  Raises:
    ValueError: The workload is not one that is tuned.
  """
  kernel, name = workload.kernel, workload.tuned
  if kernel == "quantize":
    options = stream_tiles(2, 2 if name == "both" else 1)
  elif kernel == "dequantize":
    options = stream_tiles(1, 2)
  elif kernel == "swiglu" and name is not None:
    # forward: rows, columns; and gate, up; backward: dh, then four of fp8
    others = {"forward": 2, "forward mxfp8": 4, "backward": 6}[name]
    options = swiglu_tiles(2, others)
  elif kernel == "permute":
    return [
      dict(slot_bytes=size, stages=stages)
      for size, stages in itertools.product((32768, 16384, 65536), (3, 2, 4, 6))
      if size * stages <= 3 * 65536
    ]
  else:
    raise ValueError(f"autotune: {workload.name} has no schedules to choose.")
  return [dict(tile=tile) for tile in options]


def fields(schedule: Schedule) -> dict[str, Any]:
  """A schedule as JSON values."""
  tile = schedule.get("tile")
  return dict(schedule) if tile is None else dataclasses.asdict(tile)


def best(timed: Iterable[tuple[Schedule, float]]) -> tuple[Schedule, float]:
  """The fastest schedule; an earlier one unless it loses by `MARGIN`."""
  found = list(timed)
  least = min(microseconds for _, microseconds in found)
  return next(x for x in found if x[1] * (1 - MARGIN) <= least)


def tune(workload: Workload, samples: int) -> dict[str, Any]:
  """Times every schedule of a workload; returns its entry in the table."""
  arguments = jax.block_until_ready(jax.jit(workload.make)())
  timed = []
  for schedule in schedules(workload):
    function = jax.jit(functools.partial(workload.run, **schedule))
    try:
      time = timing.time_function(function, arguments, samples=samples)
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as e:
      print(f"{workload.name} {fields(schedule)}: {str(e)[:200]}", flush=True)
      continue
    timed.append((schedule, time.median_us))
    print(f"{workload.name} {fields(schedule)}: {time.median_us:.1f} us",
          flush=True)  # fmt: skip
  schedule, microseconds = best(timed)
  return {
    "kernel": workload.kernel,
    "case": workload.tuned,
    "rows": workload.rows,
    "width": workload.width,
    "schedule": fields(schedule),
    "microseconds": round(microseconds, 1),
    "gigabytes_per_second": round(workload.bytes() / microseconds / 1e3),
    "tried": [[fields(s), round(t, 1)] for s, t in timed],
  }


def subjects(kernels: Sequence[str]) -> list[Workload]:
  """The workloads that are tuned, each kernel's at its first shape."""
  found = []
  for kernel in kernels:
    shape = workloads.shapes(kernel)[0]
    made = workloads.MAKERS[kernel](*shape)
    found += [workload for workload in made if workload.tuned]
  return found


def write(path: pathlib.Path, table: dict[str, Any]) -> None:
  """Writes JSON under a temporary name and renames it."""
  partial = path.with_name(path.name + ".partial")
  partial.write_text(json.dumps(table, indent=1) + "\n")
  os.replace(partial, path)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m pallas_kernels.autotune",
    description=__doc__.splitlines()[0],
  )
  names = list(workloads.MAKERS)
  parser.add_argument("kernels", nargs="*", metavar="KERNEL",
                      help=f"of {names}; all by default")  # fmt: skip
  parser.add_argument("--json", type=pathlib.Path, help="file to write")
  parser.add_argument("--samples", type=int, default=SAMPLES)
  asked = parser.parse_args(arguments)
  if unknown := set(asked.kernels) - set(names):
    parser.error(f"KERNEL must be of {names}; got {sorted(unknown)}")
  device = jax.devices()[0]
  if device.platform != "gpu":
    print(
      "autotune: schedules are timed on the GPU that they are for (Hopper or "
      f"newer); JAX found {device.platform}. Run it on such a machine.",
      file=sys.stderr,
    )
    return 2
  folder = pathlib.Path(__file__).parent / tiles.TUNED
  path = asked.json or folder / tiles.tuned_file(device.device_kind)
  path.parent.mkdir(exist_ok=True)
  table: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__}
  table["entries"] = []
  for workload in subjects(asked.kernels or names):
    table["entries"].append(tune(workload, asked.samples))
    write(path, table)
  print(f"wrote {path}")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
