"""Permute: rows to their experts in MXFP8, and the packed rows of the wire.

    take_rows        out[r] = x[source[r]], zeros where source[r] = -1
    permute          the same for an MxArray; scales come out blocked
    permute_wire     the same from packed rows, which carry weights too
    relayout_wire    packed rows that lie in place: their scales, blocked
    pack             packed row s = data | scales of row[s] | weight[s] | 0
                     (bf16 rows have no scales)

A packed (wire) row is data | linear scales | float32 weight, its length a
multiple of 128 bytes. Permuting rows commutes with 1x32 quantization exactly,
so results equal `reference.take_mx_rows` to the bit.

Schedule (`permute_kernel`, `stream`). Data and scales go by two kernels. Data
never enters a register: a bulk copy fetches each row into a ring in shared
memory and one stores each batch. Scales, 1/32 of the bytes, are read by the
thread that owns the row and written as 512-byte atoms. Neither needs the 4-row
gather of Blackwell's TMA, so Hopper and Blackwell run the same source. Bound by
memory bandwidth: 2.06 bytes an element.

Widths are multiples of 128 (bulk copies of 128 bytes, whole atoms).
"""

from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import (
  fold,
  groups,
  mosaic,
  mxfp8,
  permute_call,
  permute_kernel,
  quantize,
  tiles,
)

MxArray = mxfp8.MxArray
Piece = permute_kernel.Piece

SLOT_BYTES = permute_call.SLOT_BYTES
STAGES = permute_call.STAGES


def take_rows(
  x: jax.Array,
  source: jax.Array,
  *,
  slot_bytes: int = SLOT_BYTES,
  stages: int = STAGES,
  interpret: Any = False,
) -> jax.Array:
  """Rows of x by index; equal to `groups.take_rows`.

  Args:
    x: [n, width] of any dtype; rows a multiple of 128 bytes.
    source: [rows] int32 in -1..n-1; -1 gives zeros. An even number of rows,
      best a multiple of 32: rows are stored in batches that divide it.
    slot_bytes: Bytes of a ring slot, at most; at least one row.
    stages: Ring slots.
    interpret: Interpret parameters; False compiles.

  Returns:
    [rows, width] of the dtype of x.

  Raises:
    NotImplementedError: The kernel does not take this shape.
  """
  if x.ndim != 2:
    raise permute_call.refuse(f"x must be a matrix; got x{x.shape}")
  pieces = (Piece(width=x.shape[1]),)
  return permute_call.gather(
    [x], pieces, source, slot_bytes, stages, interpret
  )


def permute(
  x: MxArray,
  source: jax.Array,
  *,
  folded: bool = False,
  slot_bytes: int = SLOT_BYTES,
  stages: int = STAGES,
  interpret: Any = False,
) -> MxArray:
  """Rows of an MxArray by index, with blocked scales.

  Args:
    x: [n, K], 1x32 blocks along the row, linear scales; K a multiple of 128.
    source: [rows] int32 in -1..n-1, rows a multiple of 128; -1 gives zeros with
      scale byte 0.
    folded: Fold the rows on the way (`fold.take`); their scales, all alike,
      stay linear.
    slot_bytes: As in `take_rows`.
    stages: As in `take_rows`.
    interpret: As in `take_rows`.

  Raises:
    NotImplementedError: The kernel does not take this shape or layout.
  """
  permute_call.check_array(x)
  rows, width = source.shape[0], x.shape[1]
  permute_call.check_rows(rows, width)
  if folded:
    ring = dict(slot_bytes=slot_bytes, stages=stages)
    return fold.take(x, source, **ring, interpret=interpret)
  data = take_rows(
    x.data, source, slot_bytes=slot_bytes, stages=stages, interpret=interpret
  )
  (atoms,) = permute_call.scales(
    x.scale, source, width // mxfp8.BLOCK, 0, False, interpret
  )
  return MxArray(data, atoms, layout="blocked")


def permute_wire(
  wire: jax.Array,
  source: jax.Array,
  width: int,
  *,
  dtype: Any = mxfp8.E4M3,
  slot_bytes: int = SLOT_BYTES,
  stages: int = STAGES,
  interpret: Any = False,
) -> tuple[MxArray, jax.Array]:
  """Packed rows by index: MXFP8 rows with blocked scales, and weights.

  Args:
    wire: [n, stride] uint8 packed rows.
    source: As in `permute`.
    width: K, a multiple of 128.
    dtype: fp8 type of the data.
    slot_bytes: As in `take_rows`.
    stages: As in `take_rows`.
    interpret: As in `take_rows`.

  Returns:
    [rows, K] MxArray and [rows] float32; zeros where source is -1.

  Raises:
    NotImplementedError: The kernel does not take this shape.
  """
  permute_call.check_rows(source.shape[0], width)
  permute_call.check_wire(wire, width)
  pieces = (Piece(width=width),)
  data = permute_call.gather(
    [wire], pieces, source, slot_bytes, stages, interpret
  )
  atoms, weights = _wire_scales(wire, source, width, interpret)
  data = lax.bitcast_convert_type(data, dtype)
  return MxArray(data, atoms, layout="blocked"), weights


def relayout_wire(
  wire: jax.Array, width: int, layout: groups.GroupLayout | None = None, *,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Blocked scales and weights of packed rows that lie in aligned groups.

  The data stays where it is: matmuls read it through column boxes of the wire
  buffer. With a layout padding rows get scale byte 0 and weight 0, whatever
  they hold.

  Args:
    wire: [rows, stride] uint8.
    width: K, a multiple of 128.
    layout: Of the rows; None if padding rows are zeros already.
    interpret: As in `take_rows`.

  Returns:
    [rows / 128, K / 128, 512] uint8 atoms and [rows] float32.

  Raises:
    NotImplementedError: The kernel does not take this shape.
  """
  permute_call.check_rows(wire.shape[0], width)
  permute_call.check_wire(wire, width)
  source = jnp.arange(wire.shape[0], dtype=jnp.int32)
  if layout is not None:
    source = jnp.where(layout.row_valid(), source, -1)
  return _wire_scales(wire, source, width, interpret)


def _wire_scales(wire, source, width: int, interpret: Any):
  """Blocked scales and weights of packed rows by index."""
  blocks = width // mxfp8.BLOCK
  atoms, weights = permute_call.scales(
    wire, source, blocks, width, True, interpret
  )
  return atoms, weights


def pack(
  x: jax.Array | MxArray,
  row: jax.Array,
  weight: jax.Array,
  *,
  folded: bool = False,
  slot_bytes: int = SLOT_BYTES,
  stages: int = STAGES,
  interpret: Any = False,
) -> jax.Array:
  """Packed rows: data | linear scales | float32 weight | zeros.

  The last 3 % of each row (scales, weight, zeros) are put together by XLA; the
  kernel copies them beside the data, which it takes by index.

  Args:
    x: [T, K], 1x32 blocks along the row, linear scales; K a multiple of 128. Or
      bf16, K a multiple of 64: data | float32 weight | zeros.
    row: [S] int32 in 0..T-1, the row of x that goes to each packed row.
    weight: [S] float32.
    folded: Fold the rows of an MxArray on the way (`fold.take_wire`).
    slot_bytes: As in `take_rows`.
    stages: As in `take_rows`.
    interpret: As in `take_rows`.

  Returns:
    [S, stride] uint8, stride the next multiple of 128 bytes.

  Raises:
    NotImplementedError: The kernel does not take this shape or layout.
  """
  tail = [lax.bitcast_convert_type(weight.astype(jnp.float32), jnp.uint8)]
  if isinstance(x, MxArray):
    permute_call.check_array(x)
    permute_call.check_rows(tiles.TILE_ROWS, x.shape[1])
    data = lax.bitcast_convert_type(x.data, jnp.uint8)
    tail.insert(0, groups.take_rows(x.scale, row))
  else:
    data = _bf16_bytes(x, folded)
  width = data.shape[1]
  used = width + sum(part.shape[1] for part in tail)
  stride = groups.round_up(used, permute_call.BULK)
  if folded:
    assert isinstance(x, MxArray)
    ring = dict(slot_bytes=slot_bytes, stages=stages)
    return fold.take_wire(x, row, weight, stride, **ring, interpret=interpret)
  tail.append(jnp.zeros((row.shape[0], stride - used), jnp.uint8))
  pieces = (Piece(width=width), Piece(width=stride - width, indexed=False))
  sources = [data, jnp.concatenate(tail, axis=1)]
  return permute_call.gather(
    sources, pieces, row, slot_bytes, stages, interpret
  )


def _bf16_bytes(x: jax.Array, folded: bool) -> jax.Array:
  """bf16 rows [T, K] as bytes [T, 2 K], without a copy."""
  if x.ndim != 2 or x.dtype != jnp.bfloat16 or folded:
    raise permute_call.refuse(
      "rows to pack must be an MxArray, or a bf16 matrix that is not folded; "
      f"got {x.dtype}{list(x.shape)}, folded={folded}"
    )
  data = lax.bitcast_convert_type(x, jnp.uint8)
  return data.reshape(x.shape[0], -1)


def gather_quantize(
  x: jax.Array, source: jax.Array, *, interpret: Any = False, **options: Any
) -> tuple[MxArray, MxArray]:
  """Rows of bf16 x by index, quantized along rows and columns.

  Two kernels, one after the other: `take_rows`, then `quantize.quantize_both`.
  `gather_quantize` saves the gathered copy, 4 of 8 bytes an element.

  Args:
    x: [n, K] bf16.
    source: [rows] int32 in -1..n-1; -1 gives zeros.
    interpret: As in `take_rows`.
    **options: Of `quantize.quantize_both`.
  """
  rows = take_rows(x, source, interpret=interpret)
  return quantize.quantize_both(rows, interpret=interpret, **options)


def variants(target: str) -> list[mosaic.Variant]:
  """Every kind of row and of scale source, at DeepSeek-V3's width."""
  del target
  tokens, rows, width, stride = 512, 1024, 7168, 7424
  shape = jax.ShapeDtypeStruct
  index = shape((rows,), jnp.int32)
  weight = shape((rows,), jnp.float32)
  packed = shape((tokens, stride), jnp.uint8)
  data = shape((tokens, width), mxfp8.E4M3)
  scale = shape((tokens, width // mxfp8.BLOCK), jnp.uint8)
  narrow = shape((tokens, 1408 // mxfp8.BLOCK), jnp.uint8)

  def variant(name, function, arguments, per_sm=permute_call.CTAS_PER_SM):
    return mosaic.Variant(
      kernel="permute",
      variant=name,
      function=function,
      arguments=arguments,
      promises=("bulk_copy",),
      ctas_per_sm=per_sm,
    )

  def scales_of(blocks, start, weighted):
    return lambda source, index: permute_call.scales(
      source, index, blocks, start, weighted, False
    )

  return [
    variant("rows fp8", take_rows, (data, index)),
    variant("rows bf16", take_rows, (shape(data.shape, jnp.bfloat16), index)),
    variant(
      "pack",
      lambda d, s, i, w: pack(MxArray(d, s), i, w),
      (data, scale, index, weight),
    ),
    variant(
      "pack bf16", pack, (shape(data.shape, jnp.bfloat16), index, weight)
    ),
    variant(
      "scales packed", scales_of(width // mxfp8.BLOCK, width, True),
      (packed, index), permute_call.SCALE_CTAS_PER_SM,
    ),
    variant(
      "scales linear", scales_of(narrow.shape[1], 0, False), (narrow, index),
      permute_call.SCALE_CTAS_PER_SM,
    ),
  ]  # fmt: skip
