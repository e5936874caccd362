"""Times the legal tiles of each kernel and keeps the best of them.

    python -m pallas_kernels.autotune [KERNEL ...] [--json FILE]

Writes ``tuned/<device>.json`` beside this file: for each workload that has a
name in the table (`workloads.Workload.tuned`), the tile with the least median
time, that time, and the times of the others. Every tile is checked, to the bit
against the first one, and timed at a glance; the best few are timed again, in
turn. `tiles.tuned` reads the table.

Only what was measured is in the table; a GPU without a table uses the defaults
of each kernel. Needs the GPU that it tunes for. The ring of the permute kernel
is not tuned: on an H200 ten sizes of it lay within 4 %.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
import itertools
import json
import os
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import swiglu, tiles, timing, workloads

MARGIN = 0.005  # of the time: below it the order of two tiles is noise
FINALISTS = 4  # tiles that are timed a second time, in full
GLANCE: dict[str, Any] = {"samples": 5, "sample_seconds": 0.005}
MAX_WARPGROUPS = 4  # of an SM: 128 registers are left to a thread
MIN_COLUMNS = 256  # of an SM's tiles in flight: with fewer memory is idle
SMEM_BYTES = 227 * 1024  # of an SM, for all its CTAs; Hopper and Blackwell
SCALE_BYTES = 3072  # kept free for scales and barriers of a CTA

StreamTile = tiles.StreamTile
SwigluTile = swiglu.SwigluTile
Workload = workloads.Workload
Tile = StreamTile | SwigluTile
KERNELS = ("quantize", "dequantize", "swiglu")


def stream_tiles(read: int, written: int) -> list[StreamTile]:
  """Schedules of a streaming kernel that fit in shared memory.

  Args:
    read: Bytes of an input element.
    written: Bytes of all results of an element.
  """
  found = []
  for columns, stages, ctas, warpgroups, many in itertools.product(
    (128, 256, 512), (2, 1, 3, 4), (1, 2, 3), (1, 2, 4), (False, True)
  ):
    buffers = stages if many else 1
    smem = tiles.TILE_ROWS * columns * (read * stages + written * buffers)
    parts = columns // warpgroups
    if ctas * (smem + SCALE_BYTES) > SMEM_BYTES or parts not in (128, 256):
      continue
    if (many and stages == 1) or ctas * warpgroups > MAX_WARPGROUPS:
      continue
    if ctas * stages * columns < MIN_COLUMNS:
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
  for stages, ctas, warpgroups in itertools.product(
    (3, 2, 1), (1, 2), (4, 2, 1)
  ):
    smem = tiles.TILE_ROWS**2 * (2 * streams * stages + others)
    fits = ctas * (smem + SCALE_BYTES) <= SMEM_BYTES
    if fits and ctas * warpgroups <= MAX_WARPGROUPS:
      tile = SwigluTile(stages=stages, ctas_per_sm=ctas, warpgroups=warpgroups)
      found.append(tile)
  return found


def choices(workload: Workload) -> Sequence[Tile]:
  """The tiles of a workload to time.

  Raises:
    ValueError: The workload is not one that is tuned.
  """
  kernel, name = workload.kernel, workload.tuned
  if kernel == "quantize" and name is not None:
    return stream_tiles(2, 2 if name == "both" else 1)
  if kernel == "dequantize" and name is not None:
    return stream_tiles(1, 2)
  if kernel == "swiglu" and name is not None:
    # forward: rows, columns; and gate, up; backward: dh, then four of fp8
    others = {"forward": 2, "forward mxfp8": 4, "backward": 6}[name]
    return swiglu_tiles(2, others)
  raise ValueError(f"autotune: {workload.name} has no tiles to choose from.")


def best(timed: Iterable[tuple[Tile, float]]) -> tuple[Tile, float]:
  """The fastest tile; an earlier one unless it loses by `MARGIN`."""
  found = list(timed)
  least = min(microseconds for _, microseconds in found)
  return next(x for x in found if x[1] * (1 - MARGIN) <= least)


@jax.jit
def _equal(got: Any, want: Any) -> jax.Array:
  """Whether two results hold the same bits, but for float32 sums."""
  unsigned = {1: jnp.uint8, 2: jnp.uint16}
  codes = [
    [
      x.view(unsigned[x.dtype.itemsize])
      for x in jax.tree.leaves(tree)
      if x.dtype != jnp.float32
    ]
    for tree in (got, want)
  ]
  same = [jnp.all(a == b) for a, b in zip(*codes, strict=True)]
  return jnp.stack(same).all()


def glance(
  workload: Workload, arguments: tuple[Any, ...], options: Sequence[Tile]
) -> list[tuple[Tile, Callable[..., Any], float]]:
  """Tiles that compile, their functions, and what a call of each takes in us.

  Raises:
    RuntimeError: Two tiles give different results.
  """
  found, first = [], None
  for tile in options:
    function = jax.jit(functools.partial(workload.run, tile=tile))
    try:
      result = jax.block_until_ready(function(*arguments))
    except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as e:
      print(f"{workload.name}: {tile.name}: {str(e)[:200]}", flush=True)
      continue
    first = result if first is None else first
    if not _equal(result, first):
      raise RuntimeError(
        f"autotune: {workload.name}: tile {tile.name} gives other results than "
        f"{found[0][0].name}; one of them is wrong. Run experiments.bench."
      )
    time = timing.time_function(function, arguments, **GLANCE)
    found.append((tile, function, time.median_us))
    print(f"{workload.name}: {tile.name}: {time.median_us:.1f} us", flush=True)
  return found


def tune(workload: Workload) -> dict[str, Any]:
  """Times every tile of a workload; returns its entry in the table."""
  arguments = jax.block_until_ready(jax.jit(workload.make)())
  timed = glance(workload, arguments, choices(workload))
  limit = sorted(us for _, _, us in timed)[:FINALISTS][-1]
  ahead = [(tile, function) for tile, function, us in timed if us <= limit]
  again = timing.measure_in_turn(
    [timing.rotation(function, arguments) for _, function in ahead]
  )
  final = [
    (tile, time.median_us) for (tile, _), time in zip(ahead, again, strict=True)
  ]
  tile, microseconds = best(final)
  print(
    f"{workload.name}: chose {tile.name}: {microseconds:.1f} us", flush=True
  )
  return {
    "kernel": workload.kernel,
    "case": workload.tuned,
    "rows": workload.rows,
    "width": workload.width,
    "tile": dataclasses.asdict(tile),
    "name": tile.name,
    "microseconds": round(microseconds, 1),
    "gigabytes_per_second": round(workload.bytes() / microseconds / 1e3),
    "finalists": {t.name: round(us, 1) for t, us in final},
    "glanced_at": {t.name: round(us, 1) for t, _, us in timed},
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
    description="Times the legal tiles of each kernel; keeps the best.",
  )
  names = list(KERNELS)
  parser.add_argument("kernels", nargs="*", metavar="KERNEL",
                      help=f"of {names}; all by default")  # fmt: skip
  parser.add_argument("--json", type=pathlib.Path, help="file to write")
  asked = parser.parse_args(arguments)
  if unknown := set(asked.kernels) - set(names):
    parser.error(f"KERNEL must be of {names}; got {sorted(unknown)}")
  device = jax.devices()[0]
  if device.platform != "gpu":
    print(
      "autotune: tiles are timed on the GPU that they are for (Hopper or "
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
    table["entries"].append(tune(workload))
    write(path, table)
  print(f"wrote {path}")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
