"""Calls of the permute kernels' bodies, and what they do not take.

`permute` says what is computed; `permute_kernel` has the bodies.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic, mxfp8, permute_kernel, stream, tiles

MxArray = mxfp8.MxArray

BULK = 128  # bytes: Mosaic's bulk copies are multiples of it
SLOT_BYTES = 32768  # bytes of a ring slot, about
RING_BYTES = 220_000  # of an SM, for all its CTAs; Hopper and Blackwell
STAGES = 3
CTAS_PER_SM = 2
SCALE_CTAS_PER_SM = 4
WEIGHT_BYTES = 4


def refuse(what: str) -> NotImplementedError:
  """The error for what the kernels do not take."""
  return NotImplementedError(f'permute kernel: {what}. Use backend="xla".')


def gather(
  sources: list[jax.Array],
  pieces: tuple[permute_kernel.Piece, ...],
  index: jax.Array,
  slot_bytes: int,
  stages: int,
  interpret: Any,
) -> jax.Array:
  """Calls `permute_kernel.gather_rows`.

  Args:
    sources: [n, columns] of one dtype, for each piece.
    pieces: Of a row.
    index: [rows] int32, -1 for zeros.
    slot_bytes: Of a ring slot, at most, but one row at least.
    stages: Ring slots.
    interpret: Interpret parameters; False compiles.

  Raises:
    NotImplementedError: A width or a start is no multiple of 128 bytes, a
      source is empty, or a row is longer than a ring slot may be.
  """
  rows, dtype = index.shape[0], sources[0].dtype
  size = jnp.dtype(dtype).itemsize
  length = sum(p.width for p in pieces) * size
  for piece in pieces:
    if piece.width * size % BULK or piece.start * size % BULK:
      raise refuse(
        f"rows are copied in multiples of {BULK} bytes; got {piece.width} "
        f"columns of {size} bytes from column {piece.start}"
      )
  if not rows or any(0 in s.shape for s in sources):
    raise refuse(f"no rows: {rows} of {[s.shape for s in sources]}")
  if length * stages > RING_BYTES:
    raise refuse(f"{stages} rows of {length} bytes exceed shared memory")
  batch = math.gcd(rows, 2 ** max(0, int(math.log2(slot_bytes / length))))
  problem = permute_kernel.Rows(
    rows=rows, pieces=pieces, dtype=dtype, batch=batch, stages=stages
  )
  per_sm = max(1, min(CTAS_PER_SM, RING_BYTES // (batch * length * stages)))
  ctas = stream.cta_count(rows // batch, per_sm, interpret)
  widest = max(p.start + p.width for p in pieces)
  call = plgpu.kernel(
    functools.partial(permute_kernel.gather_rows, problem=problem, ctas=ctas),
    out_type=jax.ShapeDtypeStruct((rows, problem.width), dtype),
    scratch_types=problem.scratch(),
    **stream.launch(ctas),
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )
  return call(*sources, index, jnp.zeros((1, widest), dtype))


def scales(
  source: jax.Array,
  index: jax.Array,
  blocks: int,
  start: int,
  weighted: bool,
  interpret: Any,
) -> list[jax.Array]:
  """Calls `permute_kernel.relayout_scales`: atoms, and weights if wanted."""
  problem = permute_kernel.Scales(
    rows=index.shape[0], blocks=blocks, start=start, weighted=weighted
  )
  count = problem.rows // tiles.TILE_ROWS
  ctas = stream.cta_count(count, SCALE_CTAS_PER_SM, interpret)
  call = plgpu.kernel(
    functools.partial(
      permute_kernel.relayout_scales,
      problem=problem,
      ctas=ctas,
      interpret=interpret,
    ),
    out_type=problem.outputs(),
    scratch_types=problem.scratch(),
    **stream.launch(ctas),
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )
  return call(source, index)


def check_rows(rows: int, width: int) -> None:
  """Refuses shapes that do not make whole atoms.

  Raises:
    NotImplementedError: Of a width or a number of rows.
  """
  if width % BULK or not width:
    raise refuse(
      f"MXFP8 rows must be a positive multiple of {BULK} wide; got {width}"
    )
  if rows % tiles.TILE_ROWS or not rows:
    raise refuse(
      f"the result must have a positive multiple of {tiles.TILE_ROWS} rows "
      f"(aligned groups); got {rows}"
    )


def check_array(x: MxArray) -> None:
  """Refuses all but 1x32 blocks with linear scales.

  Raises:
    NotImplementedError: Of another kind of array.
  """
  if (x.axis, x.block, x.layout, x.ndim) != (-1, "1x32", "linear", 2):
    raise refuse(
      "rows can be taken from matrices of 1x32 blocks along the row with "
      f"linear scales; got {x!r}"
    )


def check_wire(wire: jax.Array, width: int) -> None:
  """Checks that rows of ``width`` columns fit in packed rows.

  Raises:
    ValueError: They do not.
  """
  least = width + width // mxfp8.BLOCK + WEIGHT_BYTES
  if wire.shape[1] < least or wire.shape[1] % BULK:
    raise ValueError(
      f"permute kernel: packed rows of {width} columns need a stride of at "
      f"least {least} bytes, a multiple of {BULK}; got {wire.shape[1]}."
    )
