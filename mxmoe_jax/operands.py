"""Operands of a grouped matmul: the one rule of how each gets its precision.

    operand         numbers or MXFP8, along the axis that is contracted
    weight_operand  the same for weights
    quantize_weight a weight in MXFP8, folded where Hopper asks for it
    multiply        a grouped matmul of the two

Legend: R rows, K contracted, N produced, G groups.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mxmoe_jax import backend as backend_lib
from mxmoe_jax import config as config_lib
from pallas_kernels import groups, mxfp8, wire

MxArray = mxfp8.MxArray
WireRows = wire.WireRows
Recipe = config_lib.Recipe


@dataclasses.dataclass(frozen=True)
class Form:
  """How MXFP8 that is made for a matmul lies; the numbers do not depend on it.

  Attributes:
    layout: of the scales, "linear" or "blocked".
    folded: one scale a row (`reference.fold`): this does round.
  """

  layout: mxfp8.Layout = "linear"
  folded: bool = False


LINEAR = Form()


def read_form(ops: backend_lib.Ops, axis: int, folded: bool = False) -> Form:
  """The form that the matmuls of these operations read without a copy.

  Blackwell's read blocked scales; Hopper's read rows with linear ones, and
  the kernels that prepare a weight gradient are faster with blocked ones.

  Args:
    ops: operations of the backend.
    axis: the axis that is contracted, -1 or -2.
    folded: whether the layer folds.
  """
  if ops.generation == "blackwell" or (ops.generation and axis == -2):
    return Form("blocked")
  return Form(folded=folded and axis == -1)


def operand(x: jax.Array | MxArray | WireRows, axis: int, precision: str,
            ops: backend_lib.Ops, recipe: Recipe, dtype: Any = mxfp8.E4M3,
            form: Form = LINEAR) -> Any:
  """A matmul operand in the precision that the recipe asks for.

  Args:
    x: what there is: bf16 or float32 numbers, MXFP8, or MXFP8 on the wire.
    axis: the axis that the matmul contracts.
    precision: "mxfp8" or "bf16".
    ops: operations of the backend.
    recipe: gives the scale rule.
    dtype: fp8 type if x has to be quantized here.
    form: of what is quantized here.

  Returns:
    bf16 numbers, or an MxArray (or rows on the wire) with blocks along `axis`.
    MXFP8 with blocks along another axis is quantized a second time.
  """
  if precision == "bf16":
    if isinstance(x, MxArray | WireRows):
      return ops.dequantize(x, jnp.bfloat16)
    return x.astype(jnp.bfloat16)
  if not isinstance(x, MxArray | WireRows):
    return ops.quantize(x, axis, rounding=recipe.rounding, dtype=dtype,
                        layout=form.layout, folded=form.folded)
  if isinstance(x, MxArray) and x.block == "32x32":
    return x.along(axis)
  if x.axis == axis:
    return x
  return ops.requantize(x, axis, rounding=recipe.rounding, layout=form.layout)


def quantize_weight(w: jax.Array, axis: int, ops: backend_lib.Ops,
                    recipe: Recipe, folded: bool = False) -> MxArray:
  """A weight [G, K, N] in MXFP8, for a matmul over `axis`.

  A folded weight is stored with the contracted axis last, so that of the
  forward pass is the transpose: Hopper's fp8 tensor cores read no other way.

  Args:
    w: numbers.
    axis: -2 (forward) or -1 (input gradient).
    ops: operations of the backend.
    recipe: gives the scale rule and the blocks.
    folded: whether it is folded.
  """
  if folded:
    return ops.quantize(w, axis, rounding=recipe.rounding, folded=True,
                        transposed=axis == -2)
  made = ops.quantize(w, axis, block=recipe.weight_block,
                      rounding=recipe.rounding)
  return made.along(axis) if made.block == "32x32" else made


def weight_operand(w: jax.Array | MxArray, axis: int, precision: str,
                   ops: backend_lib.Ops, recipe: Recipe,
                   folded: bool = False) -> jax.Array | MxArray:
  """A weight [G, K, N] as a matmul over `axis` reads it, for `multiply`.

  Hopper multiplies exact MXFP8 in bf16, so there a weight is only rounded.

  Args:
    w: numbers, or MXFP8 as `quantize_weight` makes it, or 32x32.
    axis: -2 (forward) or -1 (input gradient).
    precision: "mxfp8" or "bf16".
    ops: operations of the backend.
    recipe: gives the scale rule and the blocks.
    folded: whether weights that are quantized here are folded.
  """
  if precision == "mxfp8" and not isinstance(w, MxArray):
    if ops.generation == "hopper" and not folded:
      return ops.round_to_mxfp8(w, axis, block=recipe.weight_block,
                                rounding=recipe.rounding)
    return quantize_weight(w, axis, ops, recipe, folded)
  if isinstance(w, MxArray) and w.folded and precision == "mxfp8":
    return w
  return operand(w, axis, precision, ops, recipe)


def multiply(x: jax.Array | MxArray | WireRows, w: jax.Array | MxArray,
             layout: groups.GroupLayout, ops: backend_lib.Ops, *,
             transpose_rhs: bool = False, out_dtype: Any = jnp.bfloat16
             ) -> jax.Array:
  """x [R, K] times the weights of `weight_operand`, [R, N].

  Args:
    x: rows, as `operand` makes them.
    w: weights; folded ones have the contracted axis last in any case.
    layout: of the rows.
    ops: operations of the backend.
    transpose_rhs: contract the last axis of [G, K, N] (the input gradient).
    out_dtype: bfloat16 or float32.
  """
  last = transpose_rhs or (isinstance(w, MxArray) and w.folded)
  return ops.grouped_matmul(x, w, layout, transpose_rhs=last,
                            out_dtype=out_dtype)
