"""How quantize calls its kernel, and what the kernel does not take.

`quantize` has the entry points, `quantize_kernel` the body.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic, mxfp8, quantize_kernel, stream, tiles

MxArray = mxfp8.MxArray
StreamTile = tiles.StreamTile
Direction = quantize_kernel.Direction

ROWS = tiles.TILE_ROWS
CHUNK = quantize_kernel.CHUNK
TMA_COLUMNS = 32  # columns: the narrowest swizzled tile, 32 bytes of fp8
TMA_ROWS = 8  # rows of a swizzled tile


def check(x: jax.Array) -> None:
  """Refuses what the kernel does not take.

  Raises:
    NotImplementedError: Another dtype or rank, or a shape that TMA tiles do
      not fit.
  """
  instead = 'Use backend="xla".'
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(
      f"quantize kernel: x must be bfloat16 or float32; got {x.dtype}. "
      f"{instead}"
    )
  if x.ndim not in (2, 3) or 0 in x.shape:
    raise NotImplementedError(
      "quantize kernel: x must be a matrix or a stack of matrices, not empty; "
      f"got x{x.shape}. {instead}"
    )
  if x.shape[-1] < CHUNK or x.shape[-1] % TMA_COLUMNS:
    raise NotImplementedError(
      f"quantize kernel: rows must hold at least {CHUNK} values and a multiple "
      f"of {TMA_COLUMNS} (TMA tiles); got x{x.shape}. {instead}"
    )
  if x.shape[-2] > ROWS and x.shape[-2] % TMA_ROWS:
    raise NotImplementedError(
      f"quantize kernel: beyond one tile of {ROWS} rows their number must be a "
      f"multiple of {TMA_ROWS} (TMA tiles); got x{x.shape}. {instead}"
    )


def run(
  x: jax.Array,
  directions: tuple[Direction, ...],
  *,
  rounding: mxfp8.Rounding,
  dtype: Any,
  square: bool = False,
  tile_rows: jax.Array | None,
  tile: StreamTile | None,
  interpret: Any,
) -> list[MxArray]:
  """`call_kernel`, and what it gives as arrays of the shape of x."""
  out = call_kernel(
    x, directions, rounding=rounding, dtype=dtype, square=square,
    tile_rows=tile_rows, tile=tile or default_tile(x, directions),
    interpret=interpret,
  )  # fmt: skip
  pairs = zip(directions, out[::2], out[1::2], strict=True)
  return [_as_mx(d, data, scale, x.shape) for d, data, scale in pairs]


def call_kernel(
  x: jax.Array,
  directions: tuple[Direction, ...],
  *,
  tile_rows: jax.Array | None,
  tile: StreamTile,
  interpret: Any,
  **options: Any,
) -> list[jax.Array]:
  """Calls the kernel; fewer rows than a tile's are padded to one tile."""
  check(x)
  stack = x if x.ndim == 3 else x[None]
  rows = stack.shape[1]
  if rows < ROWS:
    stack = jnp.pad(stack, ((0, 0), (0, ROWS - rows), (0, 0)))
  problem = quantize_kernel.Problem(
    shape=stack.shape,
    directions=directions,
    **options,
    masked=tile_rows is not None,
    tile=tile,
  )
  tiles_ = math.prod(problem.grid)
  ctas = stream.cta_count(tiles_, tile.ctas_per_sm, interpret)
  body = functools.partial(
    quantize_kernel.kernel, problem=problem, ctas=ctas, interpret=interpret
  )
  call = plgpu.kernel(
    body,
    out_type=problem.outputs(),
    scratch_types=problem.scratch(x.dtype),
    **stream.launch(ctas, tile.warpgroups),
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )
  return call(stack, *([] if tile_rows is None else [tile_rows]))


def default_tile(x: Any, directions: tuple[Direction, ...]) -> StreamTile:
  """The tile of these results of x; see `tiles.quantize_tile`."""
  axes = tuple(d.axis for d in directions)
  return tiles.quantize_tile(
    axes, x.shape[-1], x.dtype.itemsize, mosaic.device_kind()
  )


def _as_mx(direction, data, scale, shape) -> MxArray:
  """Trims what covers whole tiles only and drops the axis that was added."""
  rows, columns = shape[-2:]
  transposed, axis = direction.transposed, direction.axis
  kept = (columns, rows) if transposed else (rows, columns)
  axis = -1 if transposed else axis
  data = data[:, : kept[0], : kept[1]]
  if direction.layout == "linear":
    wanted = list(kept)
    wanted[axis] //= mxfp8.BLOCK
    scale = scale[:, : wanted[0], : wanted[1]]
  if len(shape) == 2:
    data, scale = data[0], scale[0]
  return MxArray(data, scale, axis=axis, layout=direction.layout)
