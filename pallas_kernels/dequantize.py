"""Dequantize: MXFP8 to bf16, blocks along rows or columns, either scale layout.

    y[r, c] = data[r, c] * 2^(s - 127)       in float32, rounded once to bf16

Legend: [.., R, C]; a tile is 128 rows x `columns` of one matrix.

Schedule (`stream`). One warpgroup a CTA, a few CTAs an SM. Data comes by TMA
through a ring of `stages` tiles; scale words come straight into registers, one
tile ahead, because a row holds only 4 bytes of them.

    read the next tile's scale words | wait full[slot] | multiply | fence
    refill slot                      | store

Runs on Hopper and Blackwell from one source; bound by memory bandwidth.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic, mxfp8, stream, tile_quantize, tiles

ROWS = tiles.TILE_ROWS
CHUNK = tile_quantize.CHUNK
BLOCK = mxfp8.BLOCK
BLOCKS = tile_quantize.BLOCKS
TMA_COLUMNS = 32  # columns: the narrowest swizzled tile, 32 bytes of fp8
TMA_ROWS = 8  # rows of a swizzled tile

MxArray = mxfp8.MxArray
StreamTile = tiles.StreamTile


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of the kernel computes; static."""

  shape: tuple[int, ...]
  axis: int
  layout: mxfp8.Layout
  tile: StreamTile

  @property
  def grid(self) -> tuple[int, int, int]:
    """Matrices, tiles along rows, tiles along columns."""
    matrices, rows, columns = self.shape
    return matrices, -(-rows // ROWS), -(-columns // self.tile.columns)

  @property
  def chunks(self) -> int:
    """Chunks of 128 columns of a warpgroup's part of a tile."""
    return self.tile.part // CHUNK


def _scale_words(scale_gmem, position, problem, interpret):
  """The scale words of a tile, a [128] uint32 array for each chunk."""
  matrix, row, column = position
  across = -(-problem.shape[2] // CHUNK)
  layout = tile_quantize.word_layout(problem.axis, mxfp8.E4M3)
  words = []
  for chunk in range(problem.chunks):
    second = jnp.minimum(column * problem.chunks + chunk, across - 1)
    if problem.layout == "blocked":
      where = (row, second) if problem.axis == -1 else (second, row)
      source = scale_gmem.at[(matrix, *where)]
      words.append(mosaic.load_words(source, layout, interpret, blocked=True))
    elif problem.axis == -1:
      window = (pl.ds(row * ROWS, ROWS), pl.ds(second * BLOCKS, BLOCKS))
      source = scale_gmem.at[(matrix, *window)]
      words.append(mosaic.load_words(source, layout, interpret, blocked=False))
    else:
      lines = [
        plgpu.load(
          scale_gmem.at[matrix, row * BLOCKS + b, pl.ds(second * CHUNK, CHUNK)],
          layout=layout,
          optimized=False,
        )
        for b in range(BLOCKS)
      ]
      words.append(mosaic.pack([line.astype(jnp.uint32) for line in lines]))
  return words


def product(codes, words, block, axis, layout):
  """bf16 of a block's codes under byte ``block`` of each scale word."""
  byte = (words >> jnp.uint32(8 * block)) & jnp.uint32(0xFF)
  return tile_quantize.numbers(codes, byte, axis, layout)


def dequantize_rows(q_smem, y_smem, words, chunk):
  """128 columns of a tile whose blocks run along rows."""
  layout = mosaic.row_layout(q_smem.dtype)
  first = chunk * CHUNK
  codes = plgpu.load(q_smem.at[:, pl.ds(first, CHUNK)], layout=layout)
  for half in range(0, BLOCKS, 2):  # 64 bf16 columns are one swizzled tile
    parts = [
      product(codes[:, b * BLOCK : (b + 1) * BLOCK], words, b, -1, layout)
      for b in (half, half + 1)
    ]
    window = pl.ds(first + half * BLOCK, 2 * BLOCK)
    y_smem[:, window] = lax.concatenate(parts, 1)


def dequantize_columns(q_smem, y_smem, words, chunk):
  """128 columns of a tile whose blocks run along columns."""
  layout = mosaic.column_layout()
  for block in range(BLOCKS):
    window = (pl.ds(block * BLOCK, BLOCK), pl.ds(chunk * CHUNK, CHUNK))
    codes = plgpu.load(q_smem.at[window], layout=layout)
    y_smem[window] = product(codes, words, block, -2, layout)


def _kernel(
  q_gmem,
  scale_gmem,
  y_gmem,
  full,
  released,
  q_smem,
  y_smem,
  *,
  problem,
  ctas,
  interpret,
):
  """The body: what one CTA does with a tile."""
  tile = problem.tile

  def window(position):
    matrix, row, column = position
    columns = pl.ds(column * tile.part, tile.part)
    return matrix, pl.ds(row * ROWS, ROWS), columns

  def load(position, slot):
    source = q_gmem.at[window(position)]
    plgpu.copy_gmem_to_smem(source, q_smem.at[slot], full.at[slot])

  def process(position, slot, refill, words):
    buffer = slot if tile.buffers > 1 else lax.rem(slot, tile.warpgroups)
    plgpu.barrier_wait(full.at[slot])
    plgpu.wait_smem_to_gmem(tile.buffers - 1, wait_read_only=True)
    dequantize_chunk = (
      dequantize_rows if problem.axis == -1 else dequantize_columns
    )
    for chunk in range(problem.chunks):
      dequantize_chunk(q_smem.at[slot], y_smem.at[buffer], words[chunk], chunk)
    plgpu.commit_smem()
    refill()
    plgpu.copy_smem_to_gmem(y_smem.at[buffer], y_gmem.at[window(position)])

  stream.walk(
    problem.grid,
    ctas=ctas,
    stages=tile.stages,
    load=load,
    process=process,
    prefetch=lambda at: _scale_words(scale_gmem, at, problem, interpret),
    warpgroups=tile.warpgroups,
    released=released,
  )
  plgpu.wait_smem_to_gmem(0)


def _check(x: MxArray, dtype: Any) -> None:
  """Refuses what the kernel does not take.

  Raises:
    NotImplementedError: Another dtype or rank, or a shape that TMA tiles do
      not fit.
  """
  instead = 'Use backend="xla".'
  if dtype != jnp.bfloat16:
    raise NotImplementedError(
      "dequantize kernel: the result is bfloat16; got "
      f"dtype={jnp.dtype(dtype).name}. {instead}"
    )
  if x.ndim not in (2, 3) or 0 in x.shape or x.axis < -2:
    raise NotImplementedError(
      "dequantize kernel: x must be a matrix or a stack of matrices, not "
      f"empty, with blocks along one of its axes; got {x!r}. {instead}"
    )
  if x.shape[-1] % TMA_COLUMNS:
    raise NotImplementedError(
      f"dequantize kernel: rows must hold a multiple of {TMA_COLUMNS} values "
      f"(TMA tiles); got {x!r}. {instead}"
    )
  if x.shape[-2] > ROWS and x.shape[-2] % TMA_ROWS:
    raise NotImplementedError(
      f"dequantize kernel: beyond one tile of {ROWS} rows their number must be "
      f"a multiple of {TMA_ROWS} (TMA tiles); got {x!r}. {instead}"
    )


def _whole_tiles(x: MxArray, problem: Problem) -> tuple[jax.Array, jax.Array]:
  """Data of at least one tile; linear scales of whole tiles."""
  data, scale = x.data, x.scale
  if x.ndim == 2:
    data, scale = data[None], scale[None]
  if data.shape != problem.shape:
    more = [(0, w - n) for w, n in zip(problem.shape, data.shape, strict=True)]
    data = jnp.pad(lax.bitcast_convert_type(data, jnp.uint8), more)
    data = lax.bitcast_convert_type(data, x.data.dtype)
  if x.layout == "linear":
    _, tall, _ = problem.grid
    wide = -(-problem.shape[2] // CHUNK)
    whole = (tall * ROWS, wide * BLOCKS)
    if x.axis == -2:
      whole = (tall * BLOCKS, wide * CHUNK)
    missing = [(0, w - n) for w, n in zip(whole, scale.shape[1:], strict=True)]
    if any(n for _, n in missing):
      scale = jnp.pad(scale, ((0, 0), *missing))
  return data, scale


def dequantize(
  x: MxArray,
  dtype: Any = jnp.bfloat16,
  *,
  tile: StreamTile | None = None,
  interpret: Any = False,
) -> jax.Array:
  """The numbers of an MxArray; equal to `reference.dequantize` to the bit.

  Args:
    x: [R, C] or [G, R, C], blocks along either of the last two axes, linear or
      blocked scales; C a multiple of 32.
    dtype: bfloat16.
    tile: The schedule; None for the default.
    interpret: Interpret parameters; False compiles.

  Returns:
    bf16 of the shape of x.

  Raises:
    NotImplementedError: The kernel does not take this shape or dtype.
  """
  _check(x, dtype)
  x = x.along(x.axis)
  matrices = x.shape[0] if x.ndim == 3 else 1
  rows, columns = x.shape[-2:]
  width = max(columns, CHUNK)
  tile = tile or _default_tile(x.axis, width)
  problem = Problem(
    shape=(matrices, max(rows, ROWS), width),
    axis=x.axis,
    layout=x.layout,
    tile=tile,
  )
  ctas = stream.cta_count(math.prod(problem.grid), tile.ctas_per_sm, interpret)
  slots, buffers = (n * tile.warpgroups for n in (tile.stages, tile.buffers))
  body = functools.partial(
    _kernel, problem=problem, ctas=ctas, interpret=interpret
  )
  call = plgpu.kernel(
    body,
    out_type=jax.ShapeDtypeStruct(problem.shape, jnp.bfloat16),
    scratch_types=[
      plgpu.Barrier(num_barriers=slots),
      stream.release_barriers(tile.stages, tile.warpgroups),
      mosaic.swizzled((slots, ROWS, tile.part), x.data.dtype, width),
      mosaic.swizzled((buffers, ROWS, tile.part), jnp.bfloat16, width),
    ],
    **stream.launch(ctas, tile.warpgroups),
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )
  y = call(*_whole_tiles(x, problem))[:, :rows, :columns]
  return y if x.ndim == 3 else y[0]


def _default_tile(axis: int, width: int) -> StreamTile:
  return tiles.dequantize_tile(axis, width, mosaic.device_kind())


def variants(target: str) -> list[mosaic.Variant]:
  """Both directions in both layouts, e4m3 and e5m2, wide and narrow.

  Args:
    target: PTX target; the choices are the same on all.
  """
  del target
  found = [
    _variant(axis, layout, dtype, 2880)
    for dtype in mxfp8.DTYPES
    for axis in (-1, -2)
    for layout in mxfp8.LAYOUTS
  ]
  return found + [
    _variant(axis, "linear", mxfp8.E4M3, width)
    for width in (160, tiles.TUNED_WIDTH)
    for axis in (-1, -2)
  ]


def _variant(
  axis: int, layout: mxfp8.Layout, dtype: Any, width: int
) -> mosaic.Variant:
  """One entry of `variants`."""
  shape = (4096, width)
  scale = mxfp8.scale_shape(shape, axis, "1x32", layout)
  tile = _default_tile(axis, width)
  direction = "rows" if axis == -1 else "columns"

  def function(data, scale):
    x = MxArray(data, scale, axis=axis, layout=layout)
    return dequantize(x, tile=tile)

  return mosaic.Variant(
    kernel="dequantize",
    variant=f"{direction} {layout} {jnp.dtype(dtype).name} {width} {tile.name}",
    function=function,
    arguments=(
      jax.ShapeDtypeStruct(shape, dtype),
      jax.ShapeDtypeStruct(scale, jnp.uint8),
    ),
    promises=("bulk_tensor_load", "bulk_tensor_store", "cast_from_fp8"),
    ctas_per_sm=tile.ctas_per_sm,
  )
