"""Times the exchange: MXFP8 beside bf16, forward and backward, phase by phase.

    python -m experiments.bench exchange [--devices N] [--skew S]
        [--rows N ...] [--width N] [--slices N ...] [--profile DIR]
        [--json FILE]

The table of torchao's pull request 3203: rows x width of bf16 of each device go
to the experts of other devices (forward), and gradients of the same size come
back (backward), each timed alone, without a loss. In MXFP8 rows are quantized,
packed and sent; nothing is dequantized after the wire: the matmul reads MXFP8.

Then the phases alone: quantize, pack, wire, dequantize, and the wire's bytes by
a dense `all_to_all` with equal splits, which uneven rows could not use (if rows
are a multiple of the devices). With ``--skew S``
the first device's experts get S times as many rows as the others'. ``--slices``
times the wire with other numbers of slices a peer. Rows are tokens (top_k 1).

On GPUs the wire is `ragged_all_to_all`, on a CPU its emulation by all_gather,
whose times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table

from experiments import exchange_legs
from mxmoe_jax import exchange
from pallas_kernels import timing, wire

NAME = "exchange"  # of the command
WIDTH = 5120
ROWS = tuple(8192 * n for n in (1, 2, 4, 8, 16))
SMALL_ROWS, SMALL_WIDTH = (256,), 128  # on a CPU
PRECISIONS = ("bf16", "mxfp8")
TABLE = ("fwd_bf16_ms", "fwd_mxfp8_ms", "bwd_bf16_ms", "bwd_mxfp8_ms")


@dataclasses.dataclass(frozen=True)
class Case:
  """Times of one size, in milliseconds; medians.

  Attributes:
    input_shape: Rows and width of one device.
    num_splits: Slices that a device sends: devices times slices a peer.
    skew: Rows for the first device's experts, as a multiple of the others'.
    slices_per_peer: At least; a slice per local expert at least.
    milliseconds: By name: `TABLE`, then the phases.
    wire_bytes: Bytes that a device sends, by precision.
  """

  input_shape: tuple[int, int]
  num_splits: int
  skew: float
  slices_per_peer: int
  milliseconds: dict[str, float]
  wire_bytes: dict[str, int]


def calls(
  precision: str,
  rows: int,
  asked: argparse.Namespace,
  slices: int,
  mesh: jax.sharding.Mesh,
) -> dict[str, Callable[[], Any]]:
  """What is timed of one precision, by name."""
  devices = mesh.shape[exchange_legs.AXIS]
  config = exchange_legs.layer(precision, asked.width, devices, asked.skew)
  legs = exchange_legs.Legs(config, mesh, slices)
  spec = jax.sharding.NamedSharding(
    mesh, jax.sharding.PartitionSpec(exchange_legs.AXIS)
  )
  one = exchange_legs.expert_ids(rows, config.num_experts, asked.skew)
  ids = jax.device_put(np.concatenate([one] * devices), spec)

  def normal(count: int) -> jax.Array:
    shape = devices * count, asked.width
    x = jax.random.normal(jax.random.key(0), shape, jnp.bfloat16)
    return jax.device_put(x, spec)

  x, grads = normal(rows), normal(config.buffer_rows(rows, devices))
  made: dict[str, tuple[Callable[..., Any], Any]] = {
    f"fwd_{precision}_ms": (legs.on_devices(legs.there), x),
    f"bwd_{precision}_ms": (legs.on_devices(legs.home), grads),
  }
  sent = x
  if precision == "mxfp8":
    quantize = legs.on_devices(legs.quantize)
    made["quantize_mxfp8_ms"] = quantize, x
    sent = jax.block_until_ready(quantize(x, ids))
  pack = legs.on_devices(legs.pack)
  made[f"pack_{precision}_ms"] = pack, sent
  packed = jax.block_until_ready(pack(sent, ids))
  made[f"wire_{precision}_ms"] = legs.on_devices(legs.wire), packed
  if rows % devices == 0:
    made[f"dense_{precision}_ms"] = legs.on_devices(legs.dense), packed
  if precision == "mxfp8":
    landed = jax.block_until_ready(made["fwd_mxfp8_ms"][0](x, ids))
    made["dequantize_mxfp8_ms"] = legs.on_devices(legs.dequantize), landed
  return {
    name: functools.partial(function, arrays, ids)
    for name, (function, arrays) in made.items()
  }


def run_case(
  rows: int, slices: int, asked: argparse.Namespace, mesh: jax.sharding.Mesh
) -> tuple[Case, dict[str, Callable[[], Any]]]:
  """Times one size in turn; also returns the calls, to be profiled."""
  named: dict[str, Callable[[], Any]] = {}
  for precision in PRECISIONS:
    named |= calls(precision, rows, asked, slices, mesh)
  found = timing.measure_in_turn(
    list(named.values()),
    samples=asked.samples,
    sample_seconds=asked.sample_seconds,
  )
  devices = mesh.shape[exchange_legs.AXIS]
  per_peer = exchange_legs.LOCAL_EXPERTS * exchange.slices_per_expert(
    exchange_legs.LOCAL_EXPERTS, slices
  )
  case = Case(
    input_shape=(rows, asked.width),
    num_splits=devices * per_peer,
    skew=asked.skew,
    slices_per_peer=per_peer,
    milliseconds={
      name: time.median_us / 1e3
      for name, time in zip(named, found, strict=True)
    },
    wire_bytes={p: rows * wire.stride(asked.width, p) for p in PRECISIONS},
  )
  return case, named


def profile(folder: pathlib.Path, named: dict[str, Callable[[], Any]]) -> None:
  """Writes a trace of a few forward legs, and one of backward legs."""
  for direction in ("fwd", "bwd"):
    legs = [call for name, call in named.items() if name.startswith(direction)]
    with jax.profiler.trace(str(folder / direction)):
      for call in legs * 3:
        jax.block_until_ready(call())


def table(cases: Sequence[Case], names: Sequence[str]) -> rich.table.Table:
  """The cases, a column for each of ``names``."""
  made = rich.table.Table()
  for head in ("input_shape", "num_splits", *names):
    made.add_column(head, justify="right", no_wrap=True)
  for case in cases:
    rows, width = case.input_shape
    made.add_row(
      f"({rows}, {width})",
      str(case.num_splits),
      *(_cell(case.milliseconds.get(name)) for name in names),
    )
  return made


def _cell(ms: float | None) -> str:
  return "" if ms is None else f"{ms:.3f}"


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog=f"python -m experiments.bench {NAME}",
    description="Times the exchange in MXFP8 beside bf16.",
  )
  small = jax.devices()[0].platform == "cpu"
  parser.add_argument("name", choices=[NAME])
  parser.add_argument("--devices", type=int, default=len(jax.devices()))
  parser.add_argument("--skew", type=float, default=1.0)
  parser.add_argument(
    "--rows", type=int, nargs="+", default=SMALL_ROWS if small else ROWS
  )
  parser.add_argument(
    "--width", type=int, default=SMALL_WIDTH if small else WIDTH
  )
  parser.add_argument(
    "--slices", type=int, nargs="+", default=[exchange.SLICES_PER_PEER]
  )
  parser.add_argument("--samples", type=int, default=2 if small else 10)
  parser.add_argument("--sample-seconds", type=float, default=0.01)
  parser.add_argument("--profile", type=pathlib.Path, help="folder for traces")
  parser.add_argument("--json", type=pathlib.Path, help="file to write")
  asked = parser.parse_args(arguments)
  check_devices(parser, asked)
  return asked


def check_devices(
  parser: argparse.ArgumentParser, asked: argparse.Namespace
) -> None:
  """Ends the command if it asks for what there is not."""
  if not 1 <= asked.devices <= len(jax.devices()):
    parser.error(
      f"--devices must be 1 to {len(jax.devices())}, the devices that JAX "
      f"finds; got {asked.devices}."
    )
  if asked.skew < 1:
    parser.error(f"--skew must be at least 1; got {asked.skew}.")


def main(
  arguments: Sequence[str], origin: Callable[..., dict[str, Any]]
) -> int:
  """Runs the command; returns its exit status."""
  asked = _parse(arguments)
  mesh = jax.make_mesh(
    (asked.devices,),
    (exchange_legs.AXIS,),
    devices=jax.devices()[: asked.devices],
  )
  console = rich.console.Console(width=None if sys.stdout.isatty() else 160)
  collective = exchange.describe(
    exchange_legs.layer("mxfp8", asked.width, asked.devices, asked.skew),
    asked.devices,
    jax.devices()[0].platform,
  )
  console.print(f"{asked.devices} devices, {collective}")
  if asked.devices == 1:
    console.print("one device: no wire, a leg is the pack and its way back")
  cases: list[Case] = []
  named: dict[str, Callable[[], Any]] = {}
  for slices in asked.slices:
    for rows in asked.rows:
      case, named = run_case(rows, slices, asked, mesh)
      cases.append(case)
  timed = dict.fromkeys(n for case in cases for n in case.milliseconds)
  phases = [name for name in timed if name not in TABLE]
  console.print(table(cases, TABLE))
  for precision in PRECISIONS:
    console.print(table(cases, [n for n in phases if precision in n]))
  if asked.profile:
    profile(asked.profile, named)
  if asked.json:
    found = origin(arguments) | {
      "devices": asked.devices,
      "collective": collective,
      "cases": [dataclasses.asdict(case) for case in cases],
    }
    asked.json.write_text(json.dumps(found, indent=2) + "\n")
  return 0
