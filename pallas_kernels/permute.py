"""Permute: rows to their experts in MXFP8, and the packed rows of the wire.

    take_rows        out[r] = x[source[r]], zeros where source[r] = -1
    permute          the same for an MxArray; scales come out blocked
    permute_wire     the same from packed rows, which carry weights too
    relayout_wire    packed rows that lie in place: their scales, blocked
    pack             packed row s = data | scales of row[s] | weight[s] | 0

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

import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  groups,
  mosaic,
  mxfp8,
  permute_kernel,
  quantize,
  stream,
)
from pallas_kernels.tiles import TILE_ROWS

MxArray = mxfp8.MxArray
Piece = permute_kernel.Piece

BULK = 128  # bytes: Mosaic's bulk copies are multiples of it
SLOT_BYTES = 32768  # bytes of a ring slot, about
STAGES = 3
CTAS_PER_SM = 2
SCALE_CTAS_PER_SM = 4
WEIGHT_BYTES = 4


def _refuse(what: str) -> NotImplementedError:
  return NotImplementedError(f'permute kernel: {what}. Use backend="xla".')


def _gather(
  rows: int, sources, pieces, index: jax.Array, slot_bytes, stages, interpret
) -> jax.Array:
  """Calls `permute_kernel.gather_rows`.

  Raises:
    NotImplementedError: A width or a start is no multiple of 128 bytes, a
      source is empty, or a row is longer than a ring slot may be.
  """
  dtype = sources[0].dtype
  size = jnp.dtype(dtype).itemsize
  length = sum(p.width for p in pieces) * size
  for piece in pieces:
    if piece.width * size % BULK or piece.start * size % BULK:
      raise _refuse(
        f"rows are copied in multiples of {BULK} bytes; got {piece.width} "
        f"columns of {size} bytes from column {piece.start}"
      )
  if not rows or any(0 in s.shape for s in sources):
    raise _refuse(f"no rows: {rows} of {[s.shape for s in sources]}")
  if length * stages > 220_000:
    raise _refuse(f"{stages} rows of {length} bytes exceed shared memory")
  batch = math.gcd(rows, 2 ** max(0, int(math.log2(slot_bytes / length))))
  problem = permute_kernel.Rows(
    rows=rows, pieces=pieces, dtype=dtype, batch=batch, stages=stages
  )
  per_sm = max(1, min(CTAS_PER_SM, 220_000 // (batch * length * stages)))
  ctas = stream.cta_count(rows // batch, per_sm, interpret)
  widest = max(p.start + p.width for p in pieces)
  call = plgpu.kernel(
    functools.partial(permute_kernel.gather_rows, problem=problem, ctas=ctas),
    out_type=jax.ShapeDtypeStruct((rows, problem.width), dtype),
    scratch_types=problem.scratch(),
    grid=(ctas,),
    grid_names=(stream.AXIS,),
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )
  return call(*sources, index, jnp.zeros((1, widest), dtype))


def _scales(
  source: jax.Array, index: jax.Array, blocks: int, start: int,
  weighted: bool, interpret: Any,
) -> list[jax.Array]:
  """Calls `permute_kernel.relayout_scales`: atoms, and weights if wanted."""
  problem = permute_kernel.Scales(
    rows=index.shape[0], blocks=blocks, start=start, weighted=weighted
  )
  tiles_ = problem.rows // TILE_ROWS
  ctas = stream.cta_count(tiles_, SCALE_CTAS_PER_SM, interpret)
  call = plgpu.kernel(
    functools.partial(
      permute_kernel.relayout_scales,
      problem=problem,
      ctas=ctas,
      interpret=interpret,
    ),
    out_type=problem.outputs(),
    scratch_types=problem.scratch(),
    grid=(ctas,),
    grid_names=(stream.AXIS,),
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )
  return call(source, index)


def _check_rows(rows: int, width: int) -> None:
  """Refuses shapes that do not make whole atoms.

  Raises:
    NotImplementedError: Of a width or a number of rows.
  """
  if width % BULK or not width:
    raise _refuse(
      f"MXFP8 rows must be a positive multiple of {BULK} wide; got {width}"
    )
  if rows % TILE_ROWS or not rows:
    raise _refuse(
      f"the result must have a positive multiple of {TILE_ROWS} rows (aligned "
      f"groups); got {rows}"
    )


def _check_array(x: MxArray) -> None:
  if (x.axis, x.block, x.layout, x.ndim) != (-1, "1x32", "linear", 2):
    raise _refuse(
      "rows can be taken from matrices of 1x32 blocks along the row with linear "
      f"scales; got {x!r}"
    )


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
    raise _refuse(f"x must be a matrix; got x{x.shape}")
  pieces = (Piece(width=x.shape[1]),)
  return _gather(
    source.shape[0], [x], pieces, source, slot_bytes, stages, interpret
  )


def permute(
  x: MxArray,
  source: jax.Array,
  *,
  slot_bytes: int = SLOT_BYTES,
  stages: int = STAGES,
  interpret: Any = False,
) -> MxArray:
  """Rows of an MxArray by index, with blocked scales.

  Args:
    x: [n, K], 1x32 blocks along the row, linear scales; K a multiple of 128.
    source: [rows] int32 in -1..n-1, rows a multiple of 128; -1 gives zeros with
      scale byte 0.
    slot_bytes: As in `take_rows`.
    stages: As in `take_rows`.
    interpret: As in `take_rows`.

  Raises:
    NotImplementedError: The kernel does not take this shape or layout.
  """
  _check_array(x)
  rows, width = source.shape[0], x.shape[1]
  _check_rows(rows, width)
  data = take_rows(
    x.data, source, slot_bytes=slot_bytes, stages=stages, interpret=interpret
  )
  (atoms,) = _scales(
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
  rows = source.shape[0]
  _check_rows(rows, width)
  pieces = (Piece(width=width),)
  data = _gather(rows, [wire], pieces, source, slot_bytes, stages, interpret)
  atoms, weights = _wire_scales(wire, source, width, interpret)
  data = lax.bitcast_convert_type(data, dtype)
  return MxArray(data, atoms, layout="blocked"), weights


def relayout_wire(
  wire: jax.Array, layout: groups.GroupLayout, width: int, *,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """Blocked scales and weights of packed rows that lie in aligned groups.

  The data stays where it is: matmuls read it through column boxes of the wire
  buffer. Padding rows get scale byte 0 and weight 0, whatever they hold.

  Args:
    wire: [rows, stride] uint8.
    layout: Of the rows.
    width: K, a multiple of 128.
    interpret: As in `take_rows`.

  Returns:
    [rows / 128, K / 128, 512] uint8 atoms and [rows] float32.

  Raises:
    NotImplementedError: The kernel does not take this shape.
  """
  _check_rows(layout.rows, width)
  row = jnp.arange(layout.rows, dtype=jnp.int32)
  source = jnp.where(layout.row_valid(), row, -1)
  return _wire_scales(wire, source, width, interpret)


def _wire_scales(wire, source, width, interpret):
  blocks = width // mxfp8.BLOCK
  if wire.shape[1] < width + blocks + WEIGHT_BYTES or wire.shape[1] % BULK:
    raise ValueError(
      f"permute kernel: packed rows of {width} columns need a stride of at "
      f"least {width + blocks + WEIGHT_BYTES} bytes, a multiple of {BULK}; got "
      f"{wire.shape[1]}."
    )
  atoms, weights = _scales(wire, source, blocks, width, True, interpret)
  return atoms, weights


def pack(
  x: MxArray,
  row: jax.Array,
  weight: jax.Array,
  *,
  slot_bytes: int = SLOT_BYTES,
  stages: int = STAGES,
  interpret: Any = False,
) -> jax.Array:
  """Packed rows: data | linear scales | float32 weight | zeros.

  The last 3 % of each row (scales, weight, zeros) are put together by XLA; the
  kernel copies them beside the data, which it takes by index.

  Args:
    x: [T, K], 1x32 blocks along the row, linear scales; K a multiple of 128.
    row: [S] int32 in 0..T-1, the row of x that goes to each packed row.
    weight: [S] float32.
    slot_bytes: As in `take_rows`.
    stages: As in `take_rows`.
    interpret: As in `take_rows`.

  Returns:
    [S, stride] uint8, stride the next multiple of 128 bytes.

  Raises:
    NotImplementedError: The kernel does not take this shape or layout.
  """
  _check_array(x)
  width = x.shape[1]
  _check_rows(TILE_ROWS, width)
  used = width + x.scale.shape[1] + WEIGHT_BYTES
  stride = groups.round_up(used, BULK)
  tail = [
    groups.take_rows(x.scale, row),
    lax.bitcast_convert_type(weight.astype(jnp.float32), jnp.uint8),
    jnp.zeros((row.shape[0], stride - used), jnp.uint8),
  ]
  data = lax.bitcast_convert_type(x.data, jnp.uint8)
  pieces = (Piece(width=width), Piece(width=stride - width, indexed=False))
  sources = [data, jnp.concatenate(tail, axis=1)]
  return _gather(
    row.shape[0], sources, pieces, row, slot_bytes, stages, interpret
  )


def gather_quantize(
  x: jax.Array, source: jax.Array, *, interpret: Any = False, **options: Any
) -> tuple[MxArray, MxArray]:
  """Rows of bf16 x by index, quantized along rows and columns.

  Two kernels, one after the other: `take_rows`, then `quantize.quantize_both`.
  A fused one would save the gathered copy, 4 of 8 bytes an element.

  Args:
    x: [n, K] bf16.
    source: [rows] int32 in -1..n-1; -1 gives zeros.
    interpret: As in `take_rows`.
    **options: Of `quantize.quantize_both`.
  """
  rows = take_rows(x, source, interpret=interpret)
  return quantize.quantize_both(rows, interpret=interpret, **options)
