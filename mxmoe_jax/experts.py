"""The experts: up, SwiGLU, down on aligned rows, forward and backward.

    pre    = rows @ gate_up                      [R, 2 F] bf16
    hidden = weight * swiglu(pre)                [R, F]
    out    = hidden @ down                       [R, D] bf16

Combine weights are applied to hidden, before the down matmul: expert outputs
need not be kept for the backward pass, and dy is quantized per token. With
dh' = dy @ down^T the weight's own gradient is sum(dh' * swiglu(pre)).

Legend: R rows (128-aligned groups), D d_model, F d_ff, E local experts.
Precisions come from the recipe; `Stage.read` is the rule.
"""

import jax
from jax import lax
import jax.numpy as jnp

from mxmoe_jax import config as config_lib
from mxmoe_jax import operands, weights
from mxmoe_jax import stage as stage_lib
from pallas_kernels import groups, mxfp8, reference

MxArray = mxfp8.MxArray
MoEConfig = config_lib.MoEConfig
QuantizedWeights = weights.QuantizedWeights
Stage = stage_lib.Stage
Views = reference.Views


def up(rows: Views, params: dict, quantized: QuantizedWeights,
       layout: groups.GroupLayout, stage: Stage) -> jax.Array:
  """pre = rows @ gate_up, [R, 2 F] bf16."""
  precision = stage.recipe.forward
  gate_up = weights.flat_gate_up(params["gate_up"])
  w = weights.operand(gate_up, quantized.gate_up, -2, precision, stage)
  return operands.multiply(stage.read(rows, -1, precision), w, layout,
                         stage.ops)


def activate(pre: jax.Array | MxArray, row_weights: jax.Array, params: dict,
             layout: groups.GroupLayout, stage: Stage, *, rows: bool,
             columns: bool) -> Views:
  """hidden = weight * swiglu(pre + bias), [R, F].

  Args:
    pre: [R, 2 F] bf16 or MxArray.
    row_weights: [R] float32.
    params: expert weights; gate_up_bias is used.
    layout: of the rows.
    stage: operations and options.
    rows: whether the next matmul reads hidden.
    columns: whether a weight gradient reads it.
  """
  recipe = stage.recipe
  precisions = (recipe.forward if rows else None,
                recipe.weight_grad if columns else None)
  return stage.ops.swiglu_quantize(
      pre, row_weights, layout, form=stage.config.swiglu,
      bias=_up_bias(params), rounding=recipe.rounding,
      **stage.wanted(*precisions, kept=rows))


def down(hidden: Views, row_weights: jax.Array, params: dict,
         quantized: QuantizedWeights, layout: groups.GroupLayout,
         stage: Stage) -> jax.Array:
  """out = hidden @ down + weight * bias, [R, D] bf16."""
  precision = stage.recipe.forward
  w = weights.operand(params["down"], quantized.down, -2, precision, stage)
  out = operands.multiply(stage.read(hidden, -1, precision), w, layout,
                        stage.ops)
  if "down_bias" in params:
    bias = params["down_bias"].astype(jnp.float32)[layout.row_group()]
    out = (out + row_weights[:, None] * bias).astype(jnp.bfloat16)
  return out


def down_backward(dy: Views, hidden: Views, row_weights: jax.Array,
                  params: dict, quantized: QuantizedWeights,
                  layout: groups.GroupLayout, stage: Stage
                  ) -> tuple[jax.Array, dict[str, jax.Array]]:
  """(dh' = dy @ down^T [R, F] bf16, float32 gradients of the weights).

  Args:
    dy: [R, D], each row its token's gradient, not weighted.
    hidden: [R, F] as kept, weighted.
    row_weights: [R] float32.
    params: expert weights.
    quantized: their MXFP8 copies, or empty.
    layout: of the rows.
    stage: operations and options.
  """
  recipe, ops = stage.recipe, stage.ops
  w = weights.operand(params["down"], quantized.down_grad, -1,
                      recipe.input_grad, stage)
  dh = operands.multiply(stage.read(dy, -1, recipe.input_grad, True), w, layout,
                       ops, transpose_rhs=True)
  grads = {"down": ops.grouped_wgrad(
      stage.read(hidden, -2, recipe.weight_grad),
      stage.read(dy, -2, recipe.weight_grad, True), layout)}
  if "down_bias" in params:
    grads["down_bias"] = sum_groups(
        row_weights[:, None] * stage.numbers(dy), layout)
  return dh, grads


def activate_backward(dh: jax.Array, dy: Views, pre: jax.Array | MxArray,
                      row_weights: jax.Array, params: dict,
                      layout: groups.GroupLayout, stage: Stage
                      ) -> tuple[Views, jax.Array]:
  """([dgate | dup] [R, 2 F], gradients of the row weights [R] float32)."""
  recipe = stage.recipe
  wanted = stage.wanted(recipe.input_grad, recipe.weight_grad,
                        plain="gate_up_bias" in params)
  dpre, dweight = stage.ops.swiglu_backward_quantize(
      pre, dh, row_weights, layout, form=stage.config.swiglu,
      bias=_up_bias(params), rounding=recipe.rounding,
      dtype=recipe.gradient_dtype, **wanted)
  if "down_bias" in params:
    bias = params["down_bias"].astype(jnp.float32)[layout.row_group()]
    dweight = dweight + jnp.sum(stage.numbers(dy) * bias, axis=-1)
  return dpre, dweight


def up_backward(dpre: Views, rows: Views, params: dict,
                quantized: QuantizedWeights, layout: groups.GroupLayout,
                stage: Stage) -> tuple[jax.Array, dict[str, jax.Array]]:
  """(dx = dpre @ gate_up^T [R, D] bf16, float32 gradients of the weights).

  Gradients of gate and up come side by side, [E, D, 2 F].
  """
  recipe, ops = stage.recipe, stage.ops
  gate_up = weights.flat_gate_up(params["gate_up"])
  w = weights.operand(gate_up, quantized.gate_up_grad, -1, recipe.input_grad,
                      stage)
  dx = operands.multiply(stage.read(dpre, -1, recipe.input_grad, True), w,
                       layout, ops, transpose_rhs=True)
  grads = {"gate_up": ops.grouped_wgrad(
      stage.read(rows, -2, recipe.weight_grad),
      stage.read(dpre, -2, recipe.weight_grad, True), layout)}
  if "gate_up_bias" in params:
    grads["gate_up_bias"] = sum_groups(stage.numbers(dpre), layout)
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
