"""Times the exchange: MXFP8 beside bf16, forward and backward, phase by phase.

    python -m experiments.bench exchange [--devices N] [--skew S]
        [--rows N ...] [--width N] [--slices N ...] [--profile DIR]
        [--json FILE]

The table of torchao's pull request 3203: rows x width of bf16 of each device go
to the experts of other devices (forward), and gradients of the same size come
back (backward), each timed alone, without a loss. In MXFP8 rows are quantized,
packed and sent; nothing is dequantized after the wire: the matmul reads MXFP8.

Then the phases alone: quantize (and pack), wire, dequantize. With ``--skew S``
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

from mxmoe_jax import MoEConfig, Recipe, exchange
from mxmoe_jax import sharding as sharding_lib
from mxmoe_jax import stage as stage_lib
from pallas_kernels import timing, wire

NAME = "exchange"  # of the command
AXIS = "expert"
LOCAL_EXPERTS = 8  # groups that rows are sorted into on each device
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


def expert_ids(rows: int, experts: int, skew: float) -> np.ndarray:
  """[rows, 1] int32 ids; the first device's experts get ``skew`` times."""
  share = np.ones(experts)
  share[:LOCAL_EXPERTS] *= skew
  ends = np.round(np.cumsum(share) / share.sum() * rows).astype(int)
  ids = np.searchsorted(ends, np.arange(rows), side="right")
  return np.random.default_rng(0).permutation(ids)[:, None].astype(np.int32)


def layer(precision: str, width: int, devices: int, skew: float) -> MoEConfig:
  """A layer whose legs there and back have one precision."""
  recipe = Recipe.bf16()
  if precision == "mxfp8":
    recipe = Recipe.mxfp8(dispatch="mxfp8", dispatch_grad="mxfp8")
  return MoEConfig(
    d_model=width,
    d_ff=width,
    num_experts=LOCAL_EXPERTS * devices,
    top_k=1,
    expert_axis=AXIS,
    recipe=recipe,
    buffer_factor=min(float(devices), 1.1 * skew),
  )


class Legs:
  """The exchange of one precision on a mesh; each method is a phase or a leg.

  Attributes:
    config: The layer.
    mesh: With the one axis `AXIS`.
    slices: Slices a peer, at least.
  """

  def __init__(self, config: MoEConfig, mesh: jax.sharding.Mesh, slices: int):
    self.config, self.mesh, self.slices = config, mesh, slices
    sharding = sharding_lib.resolve(config, mesh)
    self.stage = stage_lib.make_stage(config, sharding)
    self.precision = config.recipe.dispatch

  def on_devices(self, body: Callable[..., Any]) -> Callable[..., Any]:
    """``body(plan, arrays of one device)`` on every device, jitted."""
    spec = jax.sharding.PartitionSpec(AXIS)

    def local(arrays, ids):
      counts = exchange.gather_counts(ids, self.config, AXIS)
      plan = exchange.make_plan(ids, counts, self.config, AXIS, self.slices)
      return body(plan, arrays)

    return jax.jit(
      jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=(spec, spec),
        out_specs=spec,
        check_vma=False,
      )
    )

  def quantize(self, plan: exchange.Plan, x: jax.Array) -> Any:
    """bf16 to what the wire carries."""
    del plan
    return self.stage.quantize_leg(x, self.precision)

  def pack(self, plan: exchange.Plan, sent: Any) -> jax.Array:
    """Tokens to wire rows in the order of their experts."""
    row = plan.slots.order
    return self.stage.ops.pack(sent, row, jnp.ones(row.shape, jnp.float32))

  def wire(self, plan: exchange.Plan, packed: jax.Array) -> jax.Array:
    """The collective alone."""
    return exchange.send(packed, plan)

  def dequantize(self, plan: exchange.Plan, rows: Any) -> jax.Array:
    """What an exchange that does not keep MXFP8 adds after the wire."""
    del plan
    return self.stage.ops.dequantize(rows, jnp.bfloat16)

  def there(self, plan: exchange.Plan, x: jax.Array) -> Any:
    """The forward leg: quantize, pack, wire; rows as the matmul reads them."""
    with jax.named_scope("quantize"):
      sent = self.quantize(plan, x)
    with jax.named_scope("exchange"):
      weights = jnp.ones((x.shape[0], 1), jnp.float32)
      return exchange.to_experts(sent, weights, plan, self.stage.ops)[0]

  def home(self, plan: exchange.Plan, rows: jax.Array) -> Any:
    """The backward leg: gradients of rows to their tokens."""
    with jax.named_scope("quantize"):
      sent = self.quantize(plan, rows)
    with jax.named_scope("exchange"):
      extra = jnp.ones(rows.shape[0], jnp.float32)
      return exchange.to_tokens(sent, extra, plan, self.stage.ops)[0]


def calls(
  precision: str,
  rows: int,
  asked: argparse.Namespace,
  slices: int,
  mesh: jax.sharding.Mesh,
) -> dict[str, Callable[[], Any]]:
  """What is timed of one precision, by name."""
  devices = mesh.shape[AXIS]
  config = layer(precision, asked.width, devices, asked.skew)
  legs = Legs(config, mesh, slices)
  spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
  one = expert_ids(rows, config.num_experts, asked.skew)
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
  devices = mesh.shape[AXIS]
  per_peer = LOCAL_EXPERTS * exchange.slices_per_expert(LOCAL_EXPERTS, slices)
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
      *(f"{case.milliseconds[name]:.3f}" for name in names),
    )
  return made


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
    (asked.devices,), (AXIS,), devices=jax.devices()[: asked.devices]
  )
  console = rich.console.Console(width=None if sys.stdout.isatty() else 160)
  collective = exchange.describe(
    layer("mxfp8", asked.width, asked.devices, asked.skew),
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
  phases = [n for n in cases[0].milliseconds if n not in TABLE]
  console.print(table(cases, TABLE))
  console.print(table(cases, phases))
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
