"""The layers that `bench_moe_layer` compares, as compiled programs.

    jax            jax.lax.ragged_dot in bf16, as JAX users write the layer
    bf16           this library's pipeline, bf16 everywhere
    mxfp8          exact MXFP8, the default recipe
    mxfp8_small    likewise, with pre-activations kept in MXFP8
    folded         Hopper's folded MXFP8

All have the same router, the same parameters and evenly spread rows; shared
experts are left out, being equal in all. Weights are quantized in every call,
as in a training step with one microbatch.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import mxmoe_jax
from mxmoe_jax import arguments, routing
from mxmoe_jax import stage as stage_lib
from pallas_kernels import cases, reference, timing

MoEConfig = mxmoe_jax.MoEConfig
Recipe = mxmoe_jax.Recipe

# Experts of one device: of DeepSeek-V3 over 8 devices, and so on.
EXPERTS = {
  "deepseek_v3": 32,
  "llama4_scout": 8,
  "qwen3_30b": 16,
  "mixtral_8x7b": 8,
  "gpt_oss": 8,
}
_SHAPES = {"gpt_oss": "gpt_oss_20b"}  # names of `cases.MODELS` that differ
RECIPES = {
  "jax": Recipe.bf16(),
  "bf16": Recipe.bf16(),
  "mxfp8": Recipe.mxfp8(),
  "mxfp8_small": Recipe.mxfp8(save_preactivations="mxfp8"),
  "folded": Recipe.mxfp8(hopper="folded"),
}
# GPT-OSS clamps its SwiGLU and has biases.
_GPT_OSS: dict[str, Any] = dict(
  bias=True,
  swiglu=reference.Swiglu(alpha=1.702, limit=7.0, up_offset=1.0),
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
  """Bytes of the compiled forward and backward pass.

  Attributes:
    arguments: parameters, x and dy.
    outputs: y and all gradients.
    temporary: everything between, at its peak.
    peak: of all of it, as XLA tells; None if it does not.
    saved: what the forward pass hands to the backward pass beside its own
      arguments, router included; the outputs of `jax.vjp`.
  """

  arguments: int
  outputs: int
  temporary: int
  peak: int | None
  saved: int


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Program:
  """One arm, compiled.

  Attributes:
    name: of the arm.
    config: of the layer.
    forward: (x, params) -> y.
    step: (x, params, dy) -> (y, dx, gradients of params).
    memory: of the step.
    fallbacks: passes that run on XLA although kernels are wanted, with the
      reason.
    saved_bytes_per_row: as `explain` counts it; None for the arm "jax".
  """

  name: str
  config: MoEConfig
  forward: Callable[..., Any]
  step: Callable[..., Any]
  memory: Memory
  fallbacks: dict[str, str]
  saved_bytes_per_row: float | None


def layer_config(
  arm: str,
  model: str,
  experts: int,
  backend: Any,
  width: tuple[int, int] | None = None,
) -> MoEConfig:
  """The layer of one arm.

  Args:
    arm: one of `RECIPES`.
    model: one of `EXPERTS`.
    experts: of the device.
    backend: of `MoEConfig`.
    width: d_model and d_ff instead of the model's.
  """
  shape = cases.MODELS[_SHAPES.get(model, model)]
  d_model, d_ff = width or (shape.d_model, shape.d_ff)
  return MoEConfig(
    d_model=d_model,
    d_ff=d_ff,
    num_experts=experts,
    top_k=min(shape.top_k, experts),
    score="sigmoid" if shape.score == "sigmoid" else "softmax",
    forced_balance=True,
    recipe=RECIPES[arm],
    backend=backend,
    **(_GPT_OSS if model == "gpt_oss" else {}),
  )


def inputs(config: MoEConfig, rows: int) -> tuple[Any, dict[str, Any], Any]:
  """Random x, params and dy for a layer, bf16 (the router float32).

  Raises:
    ValueError: rows are no multiple of top_k.
  """
  if rows % config.top_k:
    raise ValueError(
      f"moe_layer: rows must be a multiple of top_k={config.top_k}; got {rows}."
    )

  @jax.jit
  def make():
    shapes = arguments.parameter_shapes(config)
    keys = jax.random.split(jax.random.key(0), len(shapes) + 2)
    params = {}
    for key, (name, shape) in zip(keys, shapes.items(), strict=False):
      value = jax.random.normal(key, shape) * shape[-1] ** -0.5
      kind = jnp.float32 if name == "router" else jnp.bfloat16
      params[name] = value.astype(kind)
    tokens = (rows // config.top_k, config.d_model)
    x, dy = (jax.random.normal(k, tokens, jnp.bfloat16) for k in keys[-2:])
    return x, params, dy

  return make()


def jax_default(x: jax.Array, params: dict[str, Any], config: MoEConfig):
  """y [T, d_model]: the layer with `jax.lax.ragged_dot`, no dropped rows."""
  routed = routing.route(x, params["router"], config)
  slot_expert = routed.experts.reshape(-1)
  order = jnp.argsort(slot_expert, stable=True)
  expert, sizes = slot_expert[order], routed.load
  gate_up = params["gate_up"].reshape(*params["gate_up"].shape[:2], -1)
  rows = x[order // config.top_k]
  pre = jax.lax.ragged_dot(rows, gate_up, sizes).astype(jnp.float32)
  if config.bias:
    bias = params["gate_up_bias"].astype(jnp.float32)
    pre = pre + bias.reshape(bias.shape[0], -1)[expert]
  hidden = config.swiglu.apply(*jnp.split(pre, 2, axis=-1))
  out = jax.lax.ragged_dot(hidden.astype(x.dtype), params["down"], sizes)
  out = out.astype(jnp.float32)
  if config.bias:
    out = out + params["down_bias"].astype(jnp.float32)[expert]
  out = out * routed.weights.reshape(-1)[order][:, None]
  y = jnp.zeros(x.shape, jnp.float32).at[order // config.top_k].add(out)
  return y.astype(x.dtype)


def build(name: str, config: MoEConfig, data: tuple[Any, Any, Any]) -> Program:
  """Compiles an arm.

  Args:
    name: one of `RECIPES`.
    config: its layer.
    data: x, params and dy.

  Raises:
    NotImplementedError: it cannot run here, with the reason.
  """
  if config.recipe.hopper == "folded" and not stage_lib.folds_on(config):
    raise NotImplementedError(
      "Recipe(hopper='folded') folds on Hopper alone; on this device it is the"
      " arm mxfp8."
    )
  x, params, dy = data

  def apply(x, params):
    if name == "jax":
      return jax_default(x, params, config)
    return mxmoe_jax.moe(x, params, config)[0]

  def step(x, params, dy):
    y, pull = jax.vjp(apply, x, params)
    return y, *pull(dy)

  forward = jax.jit(apply).lower(x, params).compile()
  compiled = jax.jit(step).lower(x, params, dy).compile()
  explained = (
    None if name == "jax" else mxmoe_jax.explain(config, tokens=x.shape[0])
  )
  fallbacks = {
    p.name: p.reason
    for p in (explained.passes if explained else ())
    if p.implementation == "xla"
  }
  return Program(
    name=name,
    config=config,
    forward=forward,
    step=compiled,
    memory=_memory(apply, compiled, x, params),
    fallbacks=fallbacks,
    saved_bytes_per_row=explained.saved_bytes_per_row if explained else None,
  )


def _memory(apply: Any, step: Any, x: Any, params: Any) -> Memory:
  found: Any = step.memory_analysis()
  keeping = jax.jit(lambda x, params: jax.vjp(apply, x, params))
  _, pull = jax.eval_shape(keeping, x, params)
  given = {(p.shape, p.dtype) for p in jax.tree.leaves((x, params))}
  kept = [k for k in jax.tree.leaves(pull) if (k.shape, k.dtype) not in given]
  return Memory(
    arguments=found.argument_size_in_bytes,
    outputs=found.output_size_in_bytes,
    temporary=found.temp_size_in_bytes,
    peak=getattr(found, "peak_memory_in_bytes", None) or None,
    saved=timing.nbytes(kept),
  )
