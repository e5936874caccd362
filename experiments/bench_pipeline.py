"""Times dispatch, experts and combine, in three arms.

    python -m experiments.bench pipeline [--devices N] [--skew S]
        [--tokens N] [--top-k N] [--shapes D,F ...] [--json FILE]

    bf16         everything in bf16
    dequantized  MXFP8 on the wire, dequantized after it, bf16 experts
    mxfp8        a row stays MXFP8 from its token to the matmul

Forward, backward alone, and both in one program, of the layer without its
router: the ids are given. A shape is d_model and d_ff of the experts. On GPUs
"auto" decides what runs; `explain` says what, and the passes that XLA runs are
counted here.
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

from experiments import bench_exchange, exchange_legs
from mxmoe_jax import MoEConfig, QuantizedWeights, Recipe, explain, layer
from mxmoe_jax import sharding as sharding_lib
from pallas_kernels import timing

NAME = "pipeline"  # of the command
AXIS = exchange_legs.AXIS
ARMS = {
  "bf16": Recipe.bf16(),
  "dequantized": Recipe.mxfp8(
    forward="bf16", input_grad="bf16", weight_grad="bf16"
  ),
  "mxfp8": Recipe.mxfp8(),
}
SHAPES = ((8192, 5120), (7168, 2048), (2048, 1408))
SMALL_SHAPES = ((128, 64),)  # on a CPU
TOKENS, SMALL_TOKENS = 16384, 256


@dataclasses.dataclass(frozen=True)
class Case:
  """Times of one arm at one shape; medians.

  Attributes:
    shape: d_model and d_ff.
    arm: Of `ARMS`.
    forward_ms: Dispatch, experts, combine.
    backward_ms: Their gradients, from what the forward pass saved.
    both_ms: Forward and backward in one program.
    xla_passes: Passes that no kernel of ours runs, of all that explain lists.
    passes: All that it lists, wires apart.
  """

  shape: tuple[int, int]
  arm: str
  forward_ms: float
  backward_ms: float
  both_ms: float
  xla_passes: int
  passes: int


def config(
  shape: tuple[int, int], arm: str, asked: argparse.Namespace
) -> MoEConfig:
  """The layer of an arm."""
  return MoEConfig(
    d_model=shape[0],
    d_ff=shape[1],
    num_experts=exchange_legs.LOCAL_EXPERTS * asked.devices,
    top_k=asked.top_k,
    expert_axis=AXIS if asked.devices > 1 else None,
    recipe=ARMS[arm],
    buffer_factor=min(float(asked.devices), 1.1 * asked.skew),
  )


def arrays(
  made: MoEConfig, asked: argparse.Namespace, mesh: jax.sharding.Mesh
) -> tuple[Any, ...]:
  """(x, combine weights, ids, expert weights), sharded."""
  spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(AXIS))
  tokens = asked.tokens * asked.devices
  one = [
    exchange_legs.expert_ids(asked.tokens, made.num_experts, asked.skew)
  ] * asked.devices
  first = np.concatenate(one)
  others = np.arange(asked.top_k, dtype=np.int32)
  ids = (first + others) % made.num_experts
  key = jax.random.key(0)
  normal = functools.partial(jax.random.normal, key, dtype=jnp.bfloat16)
  shapes = {
    "gate_up": (made.num_experts, made.d_model, 2, made.d_ff),
    "down": (made.num_experts, made.d_ff, made.d_model),
  }
  params = {
    name: normal(shape) * shape[1] ** -0.5 for name, shape in shapes.items()
  }
  weights = jnp.full(ids.shape, 1 / asked.top_k, jnp.float32)
  x = normal((tokens, made.d_model))
  return jax.tree.map(
    lambda a: jax.device_put(a, spec), (x, weights, ids, params)
  )


def run_case(
  shape: tuple[int, int],
  arm: str,
  asked: argparse.Namespace,
  mesh: jax.sharding.Mesh,
) -> Case:
  """Times one arm."""
  made = config(shape, arm, asked)
  static = made, sharding_lib.resolve(made, mesh)
  x, weights, ids, params = arrays(made, asked, mesh)

  def forward(x, weights, params):
    out: Any = layer.mixture(
      static, x, weights, ids, params, QuantizedWeights()
    )
    return out[0]

  def both(x, weights, params):
    y, pull = jax.vjp(forward, x, weights, params)
    return y, pull(y)

  saving = jax.jit(functools.partial(jax.vjp, forward))
  y, pull = jax.block_until_ready(saving(x, weights, params))
  backward = jax.jit(lambda pull, y: pull(y))
  calls = [
    functools.partial(jax.jit(forward), x, weights, params),
    functools.partial(backward, pull, y),
    functools.partial(jax.jit(both), x, weights, params),
  ]
  found = timing.measure_in_turn(
    calls, samples=asked.samples, sample_seconds=asked.sample_seconds
  )
  told = explain(made, asked.tokens * asked.devices, mesh=mesh).passes
  ours = [p for p in told if p.implementation != "collective"]
  return Case(
    shape=shape,
    arm=arm,
    forward_ms=found[0].median_us / 1e3,
    backward_ms=found[1].median_us / 1e3,
    both_ms=found[2].median_us / 1e3,
    xla_passes=sum(p.implementation == "xla" for p in ours),
    passes=len(ours),
  )


def table(cases: Sequence[Case]) -> rich.table.Table:
  """The arms, with what each takes as a share of bf16."""
  made = rich.table.Table()
  times = "forward_ms", "backward_ms", "both_ms"
  heads = [head for time in times for head in (time, "x bf16")]
  for head in ("shape", "arm", *heads, "by XLA"):
    made.add_column(head, justify="right", no_wrap=True)
  base = {c.shape: c for c in cases if c.arm == "bf16"}
  for case in cases:
    bf16 = base[case.shape]
    cells = []
    for time in times:
      ms = getattr(case, time)
      cells += [f"{ms:.3f}", f"{getattr(bf16, time) / ms:.2f}"]
    made.add_row(
      str(case.shape),
      case.arm,
      *cells,
      f"{case.xla_passes} of {case.passes}",
    )
  return made


def _shape(text: str) -> tuple[int, int]:
  d_model, d_ff = (int(n) for n in text.split(","))
  return d_model, d_ff


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog=f"python -m experiments.bench {NAME}",
    description="Times dispatch, experts and combine in three arms.",
  )
  small = jax.devices()[0].platform == "cpu"
  parser.add_argument("name", choices=[NAME])
  parser.add_argument("--devices", type=int, default=len(jax.devices()))
  parser.add_argument("--skew", type=float, default=1.0)
  parser.add_argument(
    "--tokens",
    type=int,
    default=SMALL_TOKENS if small else TOKENS,
    help="of each device",
  )
  parser.add_argument("--top-k", type=int, default=1)
  parser.add_argument(
    "--shapes",
    type=_shape,
    nargs="+",
    metavar="D,F",
    default=SMALL_SHAPES if small else SHAPES,
  )
  parser.add_argument("--samples", type=int, default=2 if small else 10)
  parser.add_argument("--sample-seconds", type=float, default=0.01)
  parser.add_argument("--json", type=pathlib.Path, help="file to write")
  asked = parser.parse_args(arguments)
  bench_exchange.check_devices(parser, asked)
  return asked


def main(
  arguments: Sequence[str], origin: Callable[..., dict[str, Any]]
) -> int:
  """Runs the command; returns its exit status."""
  asked = _parse(arguments)
  mesh = jax.make_mesh(
    (asked.devices,), (AXIS,), devices=jax.devices()[: asked.devices]
  )
  console = rich.console.Console(width=None if sys.stdout.isatty() else 120)
  console.print(
    f"{asked.devices} devices, {asked.tokens} tokens each, top_k {asked.top_k}"
  )
  cases = [
    run_case(shape, arm, asked, mesh) for shape in asked.shapes for arm in ARMS
  ]
  console.print(table(cases))
  if asked.json:
    found = origin(arguments) | {
      "devices": asked.devices,
      "tokens": asked.tokens,
      "top_k": asked.top_k,
      "skew": asked.skew,
      "cases": [dataclasses.asdict(case) for case in cases],
    }
    asked.json.write_text(json.dumps(found, indent=2) + "\n")
  return 0
