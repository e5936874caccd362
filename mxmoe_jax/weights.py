"""Expert weights as matmuls read them: bf16, or MXFP8 along either axis.

    gate_up  [E, D, 2, F]   forward contracts D, the input gradient 2 F
    down     [E, F, D]      forward contracts F, the input gradient D

Blocks of 1x32 need a copy for each direction, 32x32 blocks one for both.
Weights that are split over a data axis (FSDP) are quantized where they lie and
gathered as MXFP8 bytes.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from mxmoe_jax import backend as backend_lib
from mxmoe_jax import config as config_lib
from mxmoe_jax import operands
from mxmoe_jax import stage as stage_lib
from pallas_kernels import mxfp8

MxArray = mxfp8.MxArray
MoEConfig = config_lib.MoEConfig
Recipe = config_lib.Recipe
Stage = stage_lib.Stage


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeights:
  """MXFP8 copies of expert weights, for reuse over microbatches.

  Made by `quantize_weights`, passed beside the master weights, which still
  get the gradients. A view that the recipe does not use is None.

  Attributes:
    gate_up: [E, D, 2 F], blocks along D, read by the forward matmul.
    gate_up_grad: [E, D, 2 F], blocks along 2 F, read by the input gradient.
    down: [E, F, D], blocks along F.
    down_grad: [E, F, D], blocks along D.

  Folded copies (Hopper) have the contracted axis last: gate_up [E, 2 F, D]
  and down [E, D, F], blocks along the last axis.
  """

  gate_up: MxArray | None = None
  gate_up_grad: MxArray | None = None
  down: MxArray | None = None
  down_grad: MxArray | None = None


def expert_params(params: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters of the experts alone."""
  names = ("gate_up", "down", "gate_up_bias", "down_bias")
  return {name: params[name] for name in names if name in params}


def flat_gate_up(w: jax.Array) -> jax.Array:
  """[E, D, 2, F] as [E, D, 2 F]: gate and up side by side."""
  return w.reshape(*w.shape[:-2], -1)


def quantize_weights(params: dict[str, jax.Array], config: MoEConfig, *,
                     device: Any = None) -> QuantizedWeights:
  """Quantizes the expert weights once, for several calls of the layer.

  Args:
    params: `gate_up` [E, D, 2, F] and `down` [E, F, D]; others are ignored.
    config: the layer; its recipe says which views are needed.
    device: the device that will read them, default the first; it decides
      the backend.

  Returns:
    QuantizedWeights; pass it to `moe` or `MoE` beside the master weights.

  Raises:
    ValueError: params lack the expert weights.
    NotImplementedError: the backend cannot run there.
  """
  missing = sorted({"gate_up", "down"} - set(params))
  if missing:
    raise ValueError(
        "quantize_weights: params must hold gate_up [E, d_model, 2, d_ff] and"
        f" down [E, d_ff, d_model]; missing {missing} in {sorted(params)}.")
  ops = backend_lib.select(config.backend, device)
  gate_up, down = flat_gate_up(params["gate_up"]), params["down"]
  gate_up, down = lax.stop_gradient((gate_up, down))
  recipe, folded = config.recipe, stage_lib.folds_on(config, device)
  views: dict[str, Any] = {}
  for name, w in (("gate_up", gate_up), ("down", down)):
    forward, backward = (
        operands.quantize_weight(w, axis, ops, recipe, folded)
        if precision == "mxfp8" else None
        for axis, precision in ((-2, recipe.forward),
                                (-1, recipe.input_grad)))
    if recipe.weight_block == "32x32" and forward is not None:
      backward = forward if backward is not None else None  # one copy
    views |= {name: forward, f"{name}_grad": backward}
  return QuantizedWeights(**views)


def check_quantized(quantized: QuantizedWeights, config: MoEConfig) -> None:
  """Checks that copies of weights are those of a layer.

  The scale rule leaves no trace in the copies and cannot be checked.

  Raises:
    ValueError: copies that the recipe reads are missing, or one has another
      shape, or other blocks.
  """
  recipe = config.recipe
  d, f, e = config.d_model, config.d_ff, config.num_experts
  for name, shape in (("gate_up", (e, d, 2 * f)), ("down", (e, f, d))):
    for view, axis, precision in ((name, -2, recipe.forward),
                                  (f"{name}_grad", -1, recipe.input_grad)):
      _check_view(view, getattr(quantized, view), shape, axis,
                  recipe.weight_block if precision == "mxfp8" else None)


def _check_view(name: str, mx: MxArray | None, shape: tuple[int, ...],
                axis: int, block: mxfp8.Block | None) -> None:
  """Raises ValueError unless mx has these blocks; a block of None: no mx."""
  if mx is None and block is None:
    return
  if mx is None or block is None:
    raise ValueError(
        f"moe: quantized.{name} must be {'given' if block else 'None'} under"
        f" the config's recipe; got {mx!r}. Make it by quantize_weights with"
        " the same config.")
  read_along = axis if block == "1x32" else mx.axis  # 32x32: along both
  if mx.folded and axis == -2:  # contracted axis last
    shape, read_along = (shape[0], shape[2], shape[1]), -1
  if (tuple(mx.shape), mx.block, mx.axis) != (shape, block, read_along):
    raise ValueError(
        f"moe: quantized.{name} must have shape {shape} and {block} blocks"
        f" along axis {axis}; got {mx!r}. Make it by quantize_weights with the"
        " same config.")


def operand(master: jax.Array, view: MxArray | None, axis: int,
            precision: str, stage: Stage) -> jax.Array | MxArray:
  """A weight as `operands.multiply` reads it: the quantized view if any.

  Raises:
    ValueError: the view is not folded where the layer folds.
  """
  if precision == "bf16":
    return _gather(master.astype(jnp.bfloat16), stage.fsdp_axis)
  if view is not None and stage.folded and not view.folded:
    raise ValueError(
        "moe: Recipe(hopper='folded') on Hopper reads folded copies of the"
        f" weights; got {view!r}. Make them by quantize_weights(params, config,"
        " device=the GPU).")
  w = master if view is None else view
  if view is None and stage.fsdp_axis is None:
    return operands.weight_operand(w, axis, precision, stage.ops, stage.recipe,
                                 stage.folded)
  if view is None:
    w = stage.ops.quantize(w, axis, block=stage.recipe.weight_block,
                           rounding=stage.recipe.rounding)
  w = _gather(w, stage.fsdp_axis)
  return operands.weight_operand(w, axis, precision, stage.ops, stage.recipe)


def _gather(w: jax.Array | MxArray | None, axis: str | None) -> Any:
  """Weights whose axis 1 is split over a mesh axis, whole; MXFP8 as bytes."""
  if axis is None:
    return w
  if not isinstance(w, MxArray):
    return lax.all_gather(w, axis, axis=1, tiled=True)
  data = lax.bitcast_convert_type(w.data, jnp.uint8)
  data, scale = lax.all_gather((data, w.scale), axis, axis=1, tiled=True)
  data = lax.bitcast_convert_type(data, w.data.dtype)
  return dataclasses.replace(w, data=data, scale=scale)


