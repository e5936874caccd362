"""The experts: up, SwiGLU, down on aligned rows, forward and backward.

    pre    = rows @ gate_up                      [R, 2 F] bf16
    hidden = weight * swiglu(pre)                [R, F]
    out    = hidden @ down                       [R, D] bf16

Combine weights are applied to hidden, before the down matmul: expert outputs
need not be kept for the backward pass, and dy is quantized per token. With
dh' = dy @ down^T the weight's own gradient is sum(dh' * swiglu(pre)).

Legend: R rows (128-aligned groups), D d_model, F d_ff, E local experts.
Precisions come from the recipe; `matmul.operand` is the rule.
"""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from mxmoe_jax import backend as backend_lib
from mxmoe_jax import config as config_lib
from mxmoe_jax import matmul
from mxmoe_jax import sharding as sharding_lib
from pallas_kernels import groups, mxfp8

MxArray = mxfp8.MxArray
MoEConfig = config_lib.MoEConfig
Recipe = config_lib.Recipe


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
  """

  gate_up: MxArray | None = None
  gate_up_grad: MxArray | None = None
  down: MxArray | None = None
  down_grad: MxArray | None = None


@dataclasses.dataclass(frozen=True)
class Stage:
  """What every step of one device needs: operations and options.

  Attributes:
    ops: the operations of the backend.
    config: the layer.
    sharding: the mesh and its axes, or None on one device.
  """

  ops: backend_lib.Ops
  config: MoEConfig
  sharding: sharding_lib.Sharding | None = None

  @property
  def recipe(self) -> Recipe:
    """The recipe of the layer."""
    return self.config.recipe

  @property
  def expert_axis(self) -> str | None:
    """Mesh axis of the exchange, None on one device."""
    return self.sharding.expert_axis if self.sharding else None

  @property
  def fsdp_axis(self) -> str | None:
    """Mesh axis that axis 1 of the expert weights is split over."""
    return self.sharding.fsdp_axis if self.sharding else None

  def sum_data(self, x: jax.Array) -> jax.Array:
    """The sum over the data axes."""
    axes = self.sharding.data_axes if self.sharding else ()
    return lax.psum(x, axes) if axes else x

  def reduce_gradients(self, grads: dict[str, jax.Array],
                       params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """float32 gradients summed over the data axes, shaped as params."""
    return {name: sharding_lib.reduce_gradient(grads[name], w, self.sharding)
            for name, w in params.items()}

  def operand(self, x: Any, axis: int, precision: str,
              grad: bool = False) -> Any:
    """An activation (or gradient) in the precision a matmul reads."""
    dtype = self.recipe.gradient_dtype if grad else mxfp8.E4M3
    return matmul.operand(x, axis, precision, self.ops, self.recipe, dtype)

  def quantize_leg(self, x: jax.Array, precision: str,
                   grad: bool = False) -> jax.Array | MxArray:
    """Tokens or rows in the precision that a wire leg carries."""
    return self.operand(x, -1, precision, grad)


def make_stage(config: MoEConfig,
               sharding: sharding_lib.Sharding | None) -> Stage:
  """The stage of a layer on the devices it runs on.

  Raises:
    NotImplementedError: the backend cannot run there.
  """
  device = sharding_lib.first_device(sharding)
  ops = backend_lib.select(config.backend, device)
  return Stage(ops, config, sharding)


def expert_params(params: Mapping[str, Any]) -> dict[str, Any]:
  """The parameters of the experts alone."""
  names = ("gate_up", "down", "gate_up_bias", "down_bias")
  return {name: params[name] for name in names if name in params}


def add_shared(y: jax.Array, tokens: jax.Array, params: dict[str, jax.Array],
               config: MoEConfig) -> jax.Array:
  """y plus the shared experts, bf16 matmuls, added in float32.

  Args:
    y: [T, D] bf16.
    tokens: [T, D].
    params: of the layer; shared_gate_up and shared_down are used.
    config: the layer.
  """
  if not config.d_ff_shared:
    return y
  x, gate_up, shared_down = (a.astype(config.dtype) for a in (
      tokens, params["shared_gate_up"], params["shared_down"]))
  pre = jnp.einsum("td,dcf->ctf", x, gate_up,
                   preferred_element_type=jnp.float32)
  hidden = config.swiglu.apply(pre[0], pre[1]).astype(config.dtype)
  out = jnp.matmul(hidden, shared_down, preferred_element_type=jnp.float32)
  return (y.astype(jnp.float32) + out).astype(y.dtype)


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
  """
  ops = backend_lib.select(config.backend, device)
  gate_up, down = flat_gate_up(params["gate_up"]), params["down"]
  gate_up, down = lax.stop_gradient((gate_up, down))
  recipe = config.recipe
  views: dict[str, MxArray | None] = {}
  for name, w in (("gate_up", gate_up), ("down", down)):
    forward = _quantize_weight(w, -2, recipe.forward, ops, recipe)
    backward = _quantize_weight(w, -1, recipe.input_grad, ops, recipe)
    if recipe.weight_block == "32x32" and forward is not None:
      backward = forward if backward is not None else None  # one copy
    views |= {name: forward, f"{name}_grad": backward}
  return QuantizedWeights(**views)


def _quantize_weight(w: jax.Array, axis: int, precision: str,
                     ops: backend_lib.Ops, recipe: Recipe) -> MxArray | None:
  if precision == "bf16":
    return None
  return ops.quantize(w, axis, block=recipe.weight_block,
                      rounding=recipe.rounding)


def weight_operand(master: jax.Array, view: MxArray | None, axis: int,
                   precision: str, stage: Stage) -> jax.Array | MxArray:
  """A weight as a matmul reads it: the quantized view if there is one."""
  if precision == "bf16":
    return _gather(master.astype(jnp.bfloat16), stage.fsdp_axis)
  mx = view if view is not None else _quantize_weight(
      master, axis, precision, stage.ops, stage.recipe)
  return _gather(mx, stage.fsdp_axis).along(axis)


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


def up(rows, params: dict, quantized: QuantizedWeights,
       layout: groups.GroupLayout, stage: Stage) -> jax.Array:
  """pre = rows @ gate_up, [R, 2 F] bf16."""
  precision = stage.recipe.forward
  w = weight_operand(flat_gate_up(params["gate_up"]), quantized.gate_up, -2,
                     precision, stage)
  return stage.ops.grouped_matmul(stage.operand(rows, -1, precision), w,
                                  layout)


def activate(pre, row_weights: jax.Array, params: dict,
             layout: groups.GroupLayout, stage: Stage) -> jax.Array:
  """hidden = weight * swiglu(pre + bias), [R, F] bf16."""
  return stage.ops.swiglu(pre, row_weights, layout,
                          form=stage.config.swiglu, bias=_up_bias(params))


def down(hidden, row_weights: jax.Array, params: dict,
         quantized: QuantizedWeights, layout: groups.GroupLayout,
         stage: Stage) -> jax.Array:
  """out = hidden @ down + weight * bias, [R, D] bf16."""
  precision = stage.recipe.forward
  w = weight_operand(params["down"], quantized.down, -2, precision, stage)
  out = stage.ops.grouped_matmul(stage.operand(hidden, -1, precision), w,
                                 layout)
  if "down_bias" in params:
    bias = params["down_bias"].astype(jnp.float32)[layout.row_group()]
    out = (out + row_weights[:, None] * bias).astype(jnp.bfloat16)
  return out


def down_backward(dy, hidden, row_weights, params: dict,
                  quantized: QuantizedWeights, layout: groups.GroupLayout,
                  stage: Stage) -> tuple[jax.Array, dict[str, jax.Array]]:
  """(dh' = dy @ down^T [R, F] bf16, float32 gradients of the weights).

  Args:
    dy: [R, D] MxArray or bf16, each row its token's gradient, not weighted.
    hidden: [R, F] as kept, weighted.
    row_weights: [R] float32.
    params: expert weights.
    quantized: their MXFP8 copies, or empty.
    layout: of the rows.
    stage: operations and options.
  """
  recipe, ops = stage.recipe, stage.ops
  w = weight_operand(params["down"], quantized.down_grad, -1,
                     recipe.input_grad, stage)
  dh = ops.grouped_matmul(stage.operand(dy, -1, recipe.input_grad, True), w,
                          layout, transpose_rhs=True)
  grads = {"down": ops.grouped_wgrad(
      stage.operand(hidden, -2, recipe.weight_grad),
      stage.operand(dy, -2, recipe.weight_grad, True), layout)}
  if "down_bias" in params:
    weighted = row_weights[:, None] * _numbers(dy, stage)
    grads["down_bias"] = sum_groups(weighted, layout)
  return dh, grads


def activate_backward(dh: jax.Array, dy, pre, row_weights: jax.Array,
                      params: dict, layout: groups.GroupLayout, stage: Stage
                      ) -> tuple[jax.Array, jax.Array]:
  """([dgate | dup] [R, 2 F] bf16, gradients of the row weights [R] f32)."""
  dpre, dweight = stage.ops.swiglu_backward(
      pre, dh, row_weights, layout, form=stage.config.swiglu,
      bias=_up_bias(params))
  if "down_bias" in params:
    bias = params["down_bias"].astype(jnp.float32)[layout.row_group()]
    dweight = dweight + jnp.sum(_numbers(dy, stage) * bias, axis=-1)
  return dpre, dweight


def up_backward(dpre: jax.Array, rows, params: dict,
                quantized: QuantizedWeights, layout: groups.GroupLayout,
                stage: Stage) -> tuple[jax.Array, dict[str, jax.Array]]:
  """(dx = dpre @ gate_up^T [R, D] bf16, float32 gradients of the weights).

  Gradients of gate and up come side by side, [E, D, 2 F].
  """
  recipe, ops = stage.recipe, stage.ops
  w = weight_operand(flat_gate_up(params["gate_up"]), quantized.gate_up_grad,
                     -1, recipe.input_grad, stage)
  dx = ops.grouped_matmul(stage.operand(dpre, -1, recipe.input_grad, True), w,
                          layout, transpose_rhs=True)
  dw = ops.grouped_wgrad(stage.operand(rows, -2, recipe.weight_grad),
                         stage.operand(dpre, -2, recipe.weight_grad, True),
                         layout)
  grads = {"gate_up": dw}
  if "gate_up_bias" in params:
    grads["gate_up_bias"] = sum_groups(dpre.astype(jnp.float32), layout)
  return dx, grads


def sum_groups(rows: jax.Array, layout: groups.GroupLayout) -> jax.Array:
  """[G, N] float32 sums of the rows of each group; padding must be 0.

  By tiles, then by a one-hot product: the same bits in every run.
  """
  tiles = jnp.sum(rows.reshape(layout.tiles, groups.ROW_ALIGN, -1), axis=1)
  in_use = jnp.arange(layout.tiles) < layout.tile_count()
  tiles = jnp.where(in_use[:, None], tiles, 0.0)
  hot = (layout.tile_group()[None] == jnp.arange(layout.groups)[:, None])
  return jnp.matmul(hot.astype(jnp.float32), tiles,
                    precision=lax.Precision.HIGHEST)


def _up_bias(params: dict) -> jax.Array | None:
  if "gate_up_bias" not in params:
    return None
  bias = params["gate_up_bias"]
  return bias.reshape(bias.shape[0], -1)


def _numbers(x, stage: Stage) -> jax.Array:
  """float32 numbers of bf16 or MXFP8 rows."""
  return stage.operand(x, -1, "bf16").astype(jnp.float32)
