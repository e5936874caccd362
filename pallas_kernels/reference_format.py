"""The plain-jnp meaning of the kernels that change an array's format.

Quantize, dequantize, requantize and fold; `reference` repeats the names and
holds the rest.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import mxfp8, wire

MxArray = mxfp8.MxArray


def quantize(x: jax.Array, axis: int = -1, *, block: mxfp8.Block = "1x32",
             rounding: mxfp8.Rounding = "rceil", dtype: Any = mxfp8.E4M3,
             layout: mxfp8.Layout = "linear", transposed: bool = False,
             folded: bool = False) -> MxArray:
  """Quantizes to MXFP8.

  Args:
    x: [...] bf16 or float32; the blocked axes are multiples of 32.
    axis: the axis that one block runs along. -1 gives 1x32 blocks, -2 gives
      the 32x1 blocks of a weight gradient.
    block: "1x32", or "32x32" over the last two axes.
    rounding: scale rule, one of `mxfp8.RULES`.
    dtype: float8_e4m3fn or float8_e5m2.
    layout: "linear" or "blocked" scales.
    transposed: with axis -2, return x^T with blocks along its last axis.
    folded: `fold` it.

  Returns:
    MxArray of the shape of x, or of x^T when transposed. A block that holds
    NaN or Inf is all NaN.

  Raises:
    ValueError: if an option is unknown or an axis is no multiple of 32.
  """
  axis = axis - x.ndim if axis >= 0 else axis
  shape = mxfp8.scale_shape(x.shape, axis, block, "linear")
  axes = (-2, -1) if block == "32x32" else (axis,)
  bits = _split_blocks(mxfp8.float32_bits(x), axes)
  within = _within_axes(x.ndim, axes)
  amax = jnp.max(bits & jnp.uint32(0x7FFFFFFF), axis=within, keepdims=True)
  byte = mxfp8.scale_byte(amax, rounding, dtype)
  data = mxfp8.encode(bits, byte, dtype).reshape(x.shape)
  scale = byte.astype(jnp.uint8).reshape(shape)
  out = MxArray(data, scale, axis=axis, block=block)
  if transposed:
    out = _transpose(out)
  out = fold(out) if folded else out
  return out.with_layout(layout)


def _transpose(x: MxArray) -> MxArray:
  """The last two axes swapped, data and linear scales."""
  if x.axis != -2 or x.block != "1x32":
    raise ValueError(
        "quantize: transposed needs axis=-2 and block='1x32' (32x32 blocks are"
        f" read along either axis as they are); got {x!r}.")
  return MxArray(jnp.swapaxes(x.data, -1, -2), jnp.swapaxes(x.scale, -1, -2))


def _within_axes(ndim: int, axes: tuple[int, ...]) -> tuple[int, ...]:
  """The axes of 32 that `_split_blocks` makes."""
  first = ndim + axes[0]
  return tuple(first + 1 + 2 * i for i in range(len(axes)))


def _split_blocks(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  """Splits each of the (adjacent) axes n into (n / 32, 32)."""
  shape: list[int] = []
  for axis, n in enumerate(x.shape, start=-x.ndim):
    shape += [n // mxfp8.BLOCK, mxfp8.BLOCK] if axis in axes else [n]
  return x.reshape(shape)


def dequantize(x: MxArray | wire.WireRows, dtype: Any = jnp.bfloat16
               ) -> jax.Array:
  """The numbers of an MxArray in bf16 (rounded once) or float32 (exact)."""
  return wire.array(x).dequantize(dtype)


def round_to_mxfp8(x: jax.Array, axis: int = -1, *,
                   block: mxfp8.Block = "1x32",
                   rounding: mxfp8.Rounding = "rceil") -> jax.Array:
  """x in bf16, rounded to numbers that MXFP8 (e4m3) holds."""
  return dequantize(quantize(x, axis, block=block, rounding=rounding))


def requantize(x: MxArray | wire.WireRows, axis: int, *,
               rounding: mxfp8.Rounding = "rceil",
               layout: mxfp8.Layout = "linear") -> MxArray:
  """Quantizes an MxArray again, along another axis (a second rounding).

  1x32 blocks cannot be re-read as 32x1 blocks; a weight gradient that gets
  its rows in MXFP8 needs this.
  """
  return quantize(dequantize(x), axis, rounding=rounding,
                  dtype=x.data.dtype, layout=layout)


def fold(x: MxArray) -> MxArray:
  """Re-bases each row to one scale, the largest of its blocks.

      data'[i] = round(data[i] * 2^(scale[i // 32] - S)),  S = max of scale

  Exact while the shifted number stays normal; otherwise the error is at most
  half the smallest fp8 number: 2^-10 (e4m3) in units of 2^(S - 127), 2.2e-6 of
  what the row can hold. One NaN block makes its whole row NaN.

  Args:
    x: 1x32 blocks along any axis ("row" is a line along that axis).
  """
  linear = x.with_layout("linear")
  top = jnp.max(linear.scale, axis=x.axis, keepdims=True)
  shift = top.astype(jnp.int32) - linear.scale.astype(jnp.int32)
  shift = jnp.minimum(shift, 40)  # all codes are 0 from 35 (e5m2) on
  byte = jnp.where(top == mxfp8.SCALE_NAN, mxfp8.SCALE_NAN,
                   mxfp8.SCALE_BIAS + shift)
  bits = mxfp8.float32_bits(x.data.astype(jnp.float32))
  data = mxfp8.encode(bits, jnp.repeat(byte, mxfp8.BLOCK, x.axis),
                      x.data.dtype)
  scale = jnp.broadcast_to(top, linear.scale.shape)
  out = dataclasses.replace(linear, data=data, scale=scale, folded=True)
  return out.with_layout(x.layout)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Views:
  """The forms of one array that matmuls read; None where there is none.

  Attributes:
    rows: [R, N] MxArray, 1x32 blocks, or rows on the wire: for the next
      matmul.
    columns: [R, N] MxArray, 32x1 blocks: for a weight gradient.
    plain: [R, N] bf16.
  """

  rows: MxArray | wire.WireRows | None = None
  columns: MxArray | None = None
  plain: jax.Array | None = None


def views(x: jax.Array, *, rows: mxfp8.Layout | None = "linear",
          columns: mxfp8.Layout | None = "linear", plain: bool = False,
          rounding: mxfp8.Rounding = "rceil", dtype: Any = mxfp8.E4M3,
          folded: bool = False) -> Views:
  """Quantizes along rows and columns, in one read where a kernel does.

  Args:
    x: [R, N] bf16 or float32.
    rows: scale layout of the 1x32 view; None does not make it.
    columns: scale layout of the 32x1 view, or None.
    plain: keep x itself too.
    rounding: scale rule.
    dtype: fp8 type.
    folded: `fold` the rows; columns stay as they are.
  """

  def view(axis: int, layout: mxfp8.Layout | None) -> MxArray | None:
    if layout is None:
      return None
    return quantize(x, axis, rounding=rounding, dtype=dtype, layout=layout,
                    folded=folded and axis == -1)

  return Views(view(-1, rows), view(-2, columns), x if plain else None)
