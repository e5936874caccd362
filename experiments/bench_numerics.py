"""How many decibels each recipe leaves of each pass of a layer.

    python -m experiments.bench numerics [--recipes NAME ...] [--json FILE]

Signal to noise over whole arrays against the same layer in float64, with the
same routing: y, the gradient of x, and those of the weights. Inputs are normal,
or "outliers": likewise, but one column of x in 64 is 64 times as large. The
folded recipe folds here on every device, by the reference. Small enough for a
CPU; the numbers depend on the format, not on the machine.

Beside it, for the outliers, what `mxmoe_jax.debug` says of each tensor.
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

import mxmoe_jax
from mxmoe_jax import arguments, debug, layer, routing
from mxmoe_jax import stage as stage_lib
from mxmoe_jax import weights as weights_lib

NAME = "numerics"  # of the command
TOKENS, D_MODEL, D_FF, EXPERTS, TOP_K = 384, 128, 96, 4, 2
PASSES = ("y", "x", "gate_up", "down", "router")
INPUTS = ("normal", "outliers")
OUTLIER_EVERY, OUTLIER = 64, 64.0
MoEConfig = mxmoe_jax.MoEConfig
Recipe = mxmoe_jax.Recipe
RECIPES = {
  "bf16": Recipe.bf16(),
  "mxfp8": Recipe.mxfp8(),
  "mxfp8_bf16_wgrad": Recipe.mxfp8_bf16_wgrad(),
  "folded": Recipe.mxfp8(hopper="folded"),
  "mxfp8_small": Recipe.mxfp8(save_preactivations="mxfp8"),
  "32x32 weights": Recipe.mxfp8(weight_block="32x32"),
  "e5m2 gradients": Recipe.mxfp8(grad_dtype="e5m2"),
  "floor": Recipe.mxfp8(rounding="floor"),
}


def layer_config(name: str) -> MoEConfig:
  """The small layer under a recipe of `RECIPES`, on plain jnp."""
  return MoEConfig(
    d_model=D_MODEL,
    d_ff=D_FF,
    num_experts=EXPERTS,
    top_k=TOP_K,
    recipe=RECIPES[name],
    backend="xla",
  )


def inputs(config: MoEConfig, kind: str) -> tuple[Any, dict[str, Any], Any]:
  """x, params and dy; see the module for the two kinds."""
  rng = np.random.default_rng(0)

  def normal(shape: tuple[int, ...], scale: Any = 1.0) -> np.ndarray:
    return rng.standard_normal(shape) * scale

  fan_in = {"router": 0, "gate_up": 1, "down": 1}
  params = {
    name: jnp.asarray(
      normal(shape, shape[fan_in[name]] ** -0.5),
      jnp.float32 if name == "router" else jnp.bfloat16,
    )
    for name, shape in arguments.parameter_shapes(config).items()
  }
  x, dy = normal((TOKENS, D_MODEL)), normal((TOKENS, D_MODEL))
  if kind == "outliers":
    x[:, ::OUTLIER_EVERY] *= OUTLIER
  return jnp.asarray(x, jnp.bfloat16), params, jnp.asarray(dy, jnp.bfloat16)


@functools.partial(jax.jit, static_argnames="config")
def run(
  x: jax.Array, params: dict[str, jax.Array], dy: jax.Array, config: MoEConfig
) -> tuple[dict[str, jax.Array], jax.Array]:
  """(y and gradients by name, expert ids), folded if the recipe says so."""

  def weigh(x, router):
    routed = routing.route(x, router, config)
    return routed.weights, routed.experts

  weights, pull, ids = jax.vjp(weigh, x, params["router"], has_aux=True)
  stage = dataclasses.replace(
    stage_lib.make_stage(config, None), folded=config.recipe.hopper == "folded"
  )
  shared = (weights, ids, weights_lib.expert_params(params),
            weights_lib.QuantizedWeights())  # fmt: skip
  y, _, kept = layer.forward(stage, x, *shared)
  dx, dweights, grads = layer.backward(stage, dy, kept, *shared)
  routed_dx, router = pull(dweights)
  return dict(y=y, x=dx + routed_dx, router=router, **grads), ids


def exact(x: Any, params: Any, dy: Any, ids: Any) -> dict[str, np.ndarray]:
  """The layer in float64, every expert for every token, by autodiff."""

  def apply(x, params):
    scores = jax.nn.softmax(x @ params["router"], axis=-1)
    chosen = (ids[:, :, None] == jnp.arange(EXPERTS)).any(1)
    share = jnp.where(chosen, scores, 0.0)
    share = share / share.sum(-1, keepdims=True)
    pre = jnp.einsum("td,edcf->tecf", x, params["gate_up"])
    hidden = jax.nn.silu(pre[:, :, 0]) * pre[:, :, 1]
    return jnp.einsum("te,tef,efd->td", share, hidden, params["down"])

  wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, params, dy))
  ids = np.asarray(ids)
  with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
    y, pull = jax.vjp(apply, *wide[:2])
    dx, grads = pull(jnp.asarray(wide[2]))
    return jax.tree.map(np.asarray, dict(y=y, x=dx, **grads))


def decibels(name: str, kind: str) -> dict[str, float]:
  """Signal to noise in dB of each of `PASSES` under a recipe."""
  config = layer_config(name)
  data = inputs(config, kind)
  got, ids = run(*data, config)
  want = exact(*data, ids)
  return {name: _sqnr(got[name], want[name]) for name in PASSES}


def _sqnr(got: Any, want: np.ndarray) -> float:
  noise = np.sum(np.square(np.asarray(got, np.float64) - want))
  return float(10 * np.log10(np.sum(np.square(want)) / noise))


def tensors(kind: str) -> dict[str, dict[str, float]]:
  """What MXFP8 does to each tensor of the default recipe's layer."""
  config = layer_config("mxfp8")
  report = jax.jit(
    lambda x, params, dy: debug.layer_report(x, params, config, dy=dy)
  )
  found = report(*inputs(config, kind))
  return {
    name: {
      "sqnr": min(float(tensor.sqnr), 999.0),  # strict JSON has no infinity
      "saturated": float(tensor.saturated),
      "underflowed": float(tensor.underflowed),
      "largest_spread": int(np.flatnonzero(tensor.spread).max()),
      "fold_changed": float(tensor.fold_changed),
      "fold_lost": float(tensor.fold_lost),
      "fold_beyond": int(tensor.fold_beyond),
    }
    for name, tensor in found.items()
  }


def table(cases: Sequence[dict[str, Any]]) -> rich.table.Table:
  """Recipes by passes."""
  made = rich.table.Table(title="dB against float64")
  made.add_column("recipe")
  made.add_column("inputs")
  for name in PASSES:
    made.add_column(name if name == "y" else f"d {name}", justify="right")
  for case in cases:
    values = (f"{case['decibels'][name]:.1f}" for name in PASSES)
    made.add_row(case["recipe"], case["inputs"], *values)
  return made


def main(
  arguments_: Sequence[str], origin: Callable[[Sequence[str]], dict[str, Any]]
) -> int:
  """Runs the command; returns its exit status.

  Args:
    arguments_: with ``numerics`` first.
    origin: `bench.origin`.
  """
  parser = argparse.ArgumentParser(
    prog=f"python -m experiments.bench {NAME}",
    description="Decibels of each recipe and pass against float64.",
  )
  names = list(RECIPES)
  parser.add_argument("--recipes", nargs="+", choices=names, default=names)
  parser.add_argument("--inputs", nargs="+", choices=INPUTS, default=INPUTS)
  parser.add_argument(
    "--tensors", action=argparse.BooleanOptionalAction, default=True
  )
  parser.add_argument("--json", type=pathlib.Path, help="file to write")
  asked = parser.parse_args(arguments_[1:])
  cases = [
    {"recipe": name, "inputs": kind, "decibels": decibels(name, kind)}
    for name in asked.recipes
    for kind in asked.inputs
  ]
  console = rich.console.Console(width=None if sys.stdout.isatty() else 120)
  console.print(table(cases))
  reports = (
    {kind: tensors(kind) for kind in asked.inputs} if asked.tensors else {}
  )
  for kind, by_name in reports.items():
    for name, told in sorted(by_name.items()):
      console.print(
        f"{kind} {name:<20} {told['sqnr']:6.1f} dB  spread"
        f" {told['largest_spread']:>2}  underflowed {told['underflowed']:.1e}"
        f"  folding changes {told['fold_changed']:.1e}",
        markup=False,
      )
  if asked.json:
    result = origin(arguments_) | {"cases": cases, "tensors": reports}
    asked.json.write_text(json.dumps(result, indent=2) + "\n")
  return 0
