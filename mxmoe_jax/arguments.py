"""Checks of a layer's arguments.

Every check runs at trace time, before any work, and names what must hold,
what was got and what to do.
"""

import jax
import jax.numpy as jnp

from mxmoe_jax import config as config_lib
from mxmoe_jax import sharding as sharding_lib
from mxmoe_jax import stage as stage_lib
from mxmoe_jax import weights as weights_lib

MoEConfig = config_lib.MoEConfig


def parameter_shapes(config: MoEConfig) -> dict[str, tuple[int, ...]]:
  """Shapes of all parameters of a layer, by name."""
  d, f, e = config.d_model, config.d_ff, config.num_experts
  shapes = {"router": (d, e), "gate_up": (e, d, 2, f), "down": (e, f, d)}
  if config.bias:
    shapes |= {"gate_up_bias": (e, 2, f), "down_bias": (e, d)}
  if config.d_ff_shared:
    s = config.d_ff_shared
    shapes |= {"shared_gate_up": (d, 2, s), "shared_down": (s, d)}
  return shapes


def check(x: jax.Array, params: dict[str, jax.Array], config: MoEConfig,
          mask: jax.Array | None, balance_bias: jax.Array | None,
          quantized: weights_lib.QuantizedWeights | None,
          sharding: sharding_lib.Sharding | None) -> None:
  """Checks all arguments of `layer.moe`.

  Raises:
    ValueError: a shape, name or option does not fit.
    TypeError: a dtype or type does not fit.
    NotImplementedError: the backend cannot run here.
  """
  _check_input(x, config, mask)
  _check_params(params, config)
  _check_bias(balance_bias, config)
  if quantized is not None:
    _check_quantized(quantized, config)
  sharding_lib.check_tokens(x.size // config.d_model, config, sharding)
  if sharding is not None:
    _check_shardings(x, params, sharding)
  stage_lib.make_stage(config, sharding)


def _check_input(x: jax.Array, config: MoEConfig,
                 mask: jax.Array | None) -> None:
  if not hasattr(x, "shape") or x.ndim < 1 or x.shape[-1] != config.d_model:
    raise ValueError(
        "moe: the last axis of x must be d_model; got x"
        f"{tuple(getattr(x, 'shape', ()))} for d_model={config.d_model}.")
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f"moe: x must be floating; got {x.dtype}.")
  if mask is None:
    return
  if not hasattr(mask, "dtype"):
    raise TypeError(f"moe: mask must be a bool array; got {type(mask)}.")
  if mask.dtype != jnp.bool_ or mask.shape != x.shape[:-1]:
    raise ValueError(
        "moe: mask must be bool with x's leading shape"
        f" {tuple(x.shape[:-1])} (True for real tokens); got"
        f" {mask.dtype}{tuple(mask.shape)}.")


def _check_params(params: dict[str, jax.Array], config: MoEConfig) -> None:
  want = parameter_shapes(config)
  missing, extra = sorted(want.keys() - params), sorted(params - want.keys())
  if missing or extra:
    raise ValueError(
        f"moe: params must hold exactly {sorted(want)} for this config;"
        f" missing {missing}, unknown {extra}.")
  for name, shape in want.items():
    got = tuple(params[name].shape)
    if got != shape:
      raise ValueError(
          f"moe: params[{name!r}] must have shape {shape}; got {got}.")


def _check_bias(balance_bias: jax.Array | None, config: MoEConfig) -> None:
  if (balance_bias is not None) != config.balance_bias:
    raise ValueError(
        "moe: balance_bias is an argument exactly when config.balance_bias is"
        f" set; got config.balance_bias={config.balance_bias} and balance_bias"
        f" {'given' if balance_bias is not None else 'missing'}.")
  if balance_bias is not None and balance_bias.shape != (
      config.num_experts,):
    raise ValueError(
        f"moe: balance_bias must have shape ({config.num_experts},); got"
        f" {tuple(balance_bias.shape)}.")


def _check_quantized(quantized: weights_lib.QuantizedWeights,
                     config: MoEConfig) -> None:
  if not isinstance(quantized, weights_lib.QuantizedWeights):
    raise TypeError(
        "moe: quantized must be made by quantize_weights(params, config);"
        f" got {type(quantized)}.")
  weights_lib.check_quantized(quantized, config)


def _check_shardings(x: jax.Array, params: dict[str, jax.Array],
                     sharding: sharding_lib.Sharding) -> None:
  """Explicit meshes: leading axis of x over tokens, experts over theirs."""
  sharding_lib.check_explicit("x", x, sharding.tokens, sharding)
  local = weights_lib.expert_params(params)
  _, specs, _ = sharding_lib.specs(sharding, local)
  for name, spec in (specs or {}).items():
    sharding_lib.check_explicit(f"params[{name!r}]", local[name], spec,
                                sharding)
