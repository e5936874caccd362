"""The plain-jnp meaning of every kernel: specification, fallback, oracle.

  quantize         x -> MxArray                      1x32, 32x1 or 32x32 blocks
  requantize       MxArray 1x32 -> 32x1              a second rounding
  round_to_mxfp8   x -> bf16 that MXFP8 holds        quantize, dequantize
  fold             MxArray -> one scale per row      for Hopper's fp8 matmul
  grouped_matmul   y[r] = x[r] @ w[g(r)]             forward
                   y[r] = x[r] @ w[g(r)]^T           input gradient (dgrad)
  grouped_wgrad    dw[g] = sum over r in g of x[r]^T dy[r]
  swiglu           h[r] = weight[r] * silu(gate) * up, and its backward;
                   with `_quantize`, the views that matmuls read

Legend: r row, g group (`groups.GroupLayout`), K contracted, N produced.
Operands are bf16 or MXFP8, products are exact in float32 (both have at most 8
significant bits), sums are float32. A grouped product walks the 128-row tiles
that hold rows and costs by rows, not by rows times experts.

The parts that change the format are in `reference_format`, under the same
names. Not here: gradients, meshes, choice of backend (`mxmoe_jax`).
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import activation, groups, mxfp8, reference_format, wire

MxArray = mxfp8.MxArray
GroupLayout = groups.GroupLayout
Swiglu = activation.Swiglu
Views = reference_format.Views
dequantize = reference_format.dequantize
fold = reference_format.fold
quantize = reference_format.quantize
requantize = reference_format.requantize
round_to_mxfp8 = reference_format.round_to_mxfp8
views = reference_format.views


def _operand(operand: jax.Array | MxArray | wire.WireRows, axis: int
             ) -> jax.Array:
  """An operand as float32 numbers, after a check of its blocks."""
  x = wire.array(operand)
  if isinstance(x, MxArray):
    if x.block == "1x32" and x.axis != axis:
      raise ValueError(
          f"grouped matmul: an operand with blocks along axis {x.axis} cannot"
          f" be contracted along axis {axis}; quantize it along {axis}.")
    return x.dequantize(jnp.float32)
  return _round_bf16(x).astype(jnp.float32)


def _round_bf16(x: jax.Array) -> jax.Array:
  """x in bf16, rounded for certain.

  XLA drops a cast to bf16 and back as excess precision, which would make the
  reference differ from kernels that store bf16; it keeps reduce_precision.
  """
  exact = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
  return exact.astype(jnp.bfloat16)


def grouped_matmul(lhs: jax.Array | MxArray | wire.WireRows,
                   rhs: jax.Array | MxArray, layout: GroupLayout, *,
                   transpose_rhs: bool = False,
                   out_dtype: Any = jnp.bfloat16) -> jax.Array:
  """y[r] = lhs[r] @ rhs[group of r], float32 sums.

  Args:
    lhs: [rows, K] bf16, MxArray with blocks along axis -1, or wire rows.
    rhs: [groups, K, N] bf16, or MxArray with blocks along axis -2 (or 32x32).
      With transpose_rhs: [groups, N, K], blocks along axis -1.
    layout: of the rows of lhs.
    transpose_rhs: contract the last axis of rhs (the input gradient).
    out_dtype: bfloat16 or float32.

  Returns:
    [rows, N]; rows that belong to no group are 0, whatever lhs holds there.
  """
  contract = -1 if transpose_rhs else -2
  a, b = _operand(lhs, -1), _operand(rhs, contract)
  tile_group, tile_rows = layout.tile_group(), layout.tile_rows()
  width = b.shape[1] if transpose_rhs else b.shape[2]
  inside = jnp.arange(groups.ROW_ALIGN)[:, None]

  def multiply_tile(t, out):
    start = t * groups.ROW_ALIGN
    x = lax.dynamic_slice_in_dim(a, start, groups.ROW_ALIGN)
    w = lax.dynamic_index_in_dim(b, tile_group[t], keepdims=False)
    y = lax.dot_general(x, w, (((1,), (1 if transpose_rhs else 0,)), ((), ())))
    y = jnp.where(inside < tile_rows[t], y, 0.0).astype(out_dtype)
    return lax.dynamic_update_slice_in_dim(out, y, start, 0)

  out = jnp.zeros((layout.rows, width), out_dtype)
  return lax.fori_loop(0, layout.tile_count(), multiply_tile, out)


def grouped_wgrad(lhs: jax.Array | MxArray, rhs: jax.Array | MxArray,
                  layout: GroupLayout, *,
                  out_dtype: Any = jnp.float32) -> jax.Array:
  """dw[g] = sum over the rows r of group g of lhs[r]^T rhs[r].

  Args:
    lhs: [rows, K] bf16, or MxArray with blocks along axis -2 (32x1).
    rhs: [rows, N] likewise. Padding rows of both must be zero.
    layout: of the rows.
    out_dtype: float32 or bfloat16, rounded from float32 sums.

  Returns:
    [groups, K, N]; groups without rows are exactly 0.
  """
  a, b = _operand(lhs, -2), _operand(rhs, -2)
  tile_group = layout.tile_group()

  def add_tile(t, dw):
    start = t * groups.ROW_ALIGN
    x = lax.dynamic_slice_in_dim(a, start, groups.ROW_ALIGN)
    dy = lax.dynamic_slice_in_dim(b, start, groups.ROW_ALIGN)
    part = lax.dot_general(x, dy, (((0,), (0,)), ((), ())))
    return dw.at[tile_group[t]].add(part)

  dw = jnp.zeros((layout.groups, a.shape[1], b.shape[1]), jnp.float32)
  dw = lax.fori_loop(0, layout.tile_count(), add_tile, dw)
  return dw.astype(out_dtype)


def _gate_up(pre: jax.Array | MxArray, bias: jax.Array | None,
             layout: GroupLayout) -> tuple[jax.Array, jax.Array]:
  """Pre-activations [rows, 2 F] to (gate, up), float32, bias added."""
  if isinstance(pre, MxArray):
    pre = pre.dequantize(jnp.bfloat16)
  pre = pre.astype(jnp.float32)
  if bias is not None:
    pre = pre + bias.astype(jnp.float32)[layout.row_group()]
  gate, up = jnp.split(pre, 2, axis=-1)
  return gate, up


def swiglu(pre: jax.Array | MxArray, weight: jax.Array, layout: GroupLayout,
           *, form: Swiglu = Swiglu(),
           bias: jax.Array | None = None) -> jax.Array:
  """h[r] = weight[r] * act(gate[r], up[r]), rounded to bf16 once.

  Args:
    pre: [rows, 2 F] bf16 ([gate | up]), or MxArray.
    weight: [rows] float32, the combine weight of each row.
    layout: of the rows; rows of no group come out 0.
    form: the activation.
    bias: [groups, 2 F], added to pre in float32, or None.

  Returns:
    [rows, F] bf16.
  """
  gate, up = _gate_up(pre, bias, layout)
  hidden = form.apply(gate, up) * weight[:, None]
  hidden = jnp.where(layout.row_valid()[:, None], hidden, 0.0)
  return _round_bf16(hidden)


def swiglu_backward(pre: jax.Array | MxArray, dh: jax.Array,
                    weight: jax.Array, layout: GroupLayout, *,
                    form: Swiglu = Swiglu(), bias: jax.Array | None = None
                    ) -> tuple[jax.Array, jax.Array]:
  """The gradient of `swiglu` before its weight: dh' = dy W_down^T.

  Args:
    pre: as in `swiglu`.
    dh: [rows, F] bf16, the gradient with respect to act (not times weight).
    weight: as in `swiglu`, as the next three.
    layout: of the rows.
    form: the activation.
    bias: [groups, 2 F], or None.

  Returns:
    dpre: [rows, 2 F] bf16 ([dgate | dup]), weight included.
    dweight: [rows] float32, sum over F of dh * act.
  """
  gate, up = _gate_up(pre, bias, layout)
  inside_gate, inside_up = jnp.ones_like(gate), jnp.ones_like(up)
  if form.limit is not None:
    inside_gate = (gate <= form.limit).astype(jnp.float32)
    inside_up = (jnp.abs(up) <= form.limit).astype(jnp.float32)
    gate = jnp.minimum(gate, form.limit)
    up = jnp.clip(up, -form.limit, form.limit)
  sigmoid = jax.nn.sigmoid(form.alpha * gate)
  silu, up = gate * sigmoid, up + form.up_offset
  valid = layout.row_valid()
  dh = jnp.where(valid[:, None], dh.astype(jnp.float32), 0.0)
  dweight = jnp.sum(jnp.where(valid[:, None], dh * silu * up, 0.0), axis=-1)
  dact = dh * jnp.where(valid, weight, 0.0)[:, None]
  dsilu = sigmoid + form.alpha * silu * (1.0 - sigmoid)
  dgate = dact * up * dsilu * inside_gate
  dup = dact * silu * inside_up
  dpre = jnp.concatenate([dgate, dup], axis=-1)
  dpre = jnp.where(valid[:, None], dpre, 0.0)
  return _round_bf16(dpre), dweight


def swiglu_quantize(pre: jax.Array | MxArray, weight: jax.Array,
                    layout: GroupLayout, *, form: Swiglu = Swiglu(),
                    bias: jax.Array | None = None, **wanted: Any) -> Views:
  """`swiglu`, then `views` of it (`wanted` are their options)."""
  return views(swiglu(pre, weight, layout, form=form, bias=bias), **wanted)


def swiglu_backward_quantize(pre: jax.Array | MxArray, dh: jax.Array,
                             weight: jax.Array, layout: GroupLayout, *,
                             form: Swiglu = Swiglu(),
                             bias: jax.Array | None = None, **wanted: Any
                             ) -> tuple[Views, jax.Array]:
  """`swiglu_backward`, then `views` of dpre; and dweight [R] float32."""
  dpre, dweight = swiglu_backward(pre, dh, weight, layout, form=form,
                                  bias=bias)
  return views(dpre, **wanted), dweight


def take_mx_rows(x: MxArray, source: jax.Array) -> MxArray:
  """Rows of an MxArray with blocks along -1; -1 gives zeros, scale byte 0.

  A row permutation commutes with 1x32 quantization exactly.

  Args:
    x: [n, K], linear scales.
    source: [rows] int32 in -1..n-1.
  """
  if x.axis != -1 or x.layout != "linear" or x.block != "1x32":
    raise ValueError(
        "take_mx_rows: rows can be taken from 1x32 blocks along axis -1 with"
        f" linear scales; got {x!r}.")
  data = lax.bitcast_convert_type(x.data, jnp.uint8)
  data = lax.bitcast_convert_type(groups.take_rows(data, source),
                                  x.data.dtype)
  return dataclasses.replace(x, data=data,
                             scale=groups.take_rows(x.scale, source))


def take_rows(x: jax.Array | MxArray, source: jax.Array, *,
              folded: bool = False) -> jax.Array | MxArray:
  """Rows of x [n, ...] by index [rows]; zeros (scale byte 0) where -1.

  With folded the rows of an MxArray are folded on the way.
  """
  if isinstance(x, MxArray):
    rows = take_mx_rows(x, source)
    return fold(rows) if folded else rows
  return groups.take_rows(x, source)


def pack(x: jax.Array | MxArray, row: jax.Array, weight: jax.Array, *,
         folded: bool = False) -> jax.Array:
  """[S, stride] uint8 wire rows: row[s] of x [n, K], and weight[s].

  With folded the rows of an MxArray are folded on the way; the wire does not
  tell, whoever unpacks has to know.
  """
  return wire.pack(take_rows(x, row, folded=folded), weight)
