"""Requantize: MXFP8 rows (1x32) to MXFP8 columns (32x1) in one pass.

    y = bf16(codes * 2^(scale - 127))      columns = quantize(y, axis=-2)

A weight gradient contracts over rows of the buffer and reads blocks of 32 rows;
tokens that came in MXFP8 have blocks along the row. 1x32 blocks cannot be read
as 32x1 blocks, so this rounds a second time, as `reference.requantize` does.

Legend: R rows and K columns, multiples of 128; a tile is 128 rows x `columns`.

Schedule (`stream`). A ring of input tiles; each warpgroup takes a part:

    wait full[slot] | rows to bf16 in shared memory | fence, refill slot
    columns pass | fence | store data, store scale atoms

The data may be columns of longer rows: packed rows as they came off the wire.
Runs on Hopper and Blackwell from one source; bound by memory bandwidth, 2.06
bytes an element where two kernels (`dequantize`, `quantize`) move 6.06.
"""

import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  dequantize,
  mosaic,
  mxfp8,
  quantize_kernel,
  stream,
  tile_quantize,
  tiles,
)

MxArray = mxfp8.MxArray
StreamTile = tiles.StreamTile
Direction = quantize_kernel.Direction

ROWS = tiles.TILE_ROWS
CHUNK = tile_quantize.CHUNK
TILE = StreamTile(columns=256, stages=3, ctas_per_sm=1, warpgroups=2)
NARROW_TILE = StreamTile(columns=128, stages=3, ctas_per_sm=2)


def _load_words(scale_gmem, position, chunks: int, interpret: Any):
  """The scale words of a part, [128] uint32 for each 128 columns."""
  _, row, column = position
  layout = tile_quantize.word_layout(-1, jnp.bfloat16)
  return [
    mosaic.load_words(
      scale_gmem.at[row, column * chunks + chunk],
      layout,
      interpret,
      blocked=True,
    )
    for chunk in range(chunks)
  ]


def _kernel(
  data_gmem,
  scale_gmem,
  q_gmem,
  atoms_gmem,
  full,
  released,
  data_smem,
  y_smem,
  q_smem,
  atoms_smem,
  *,
  problem: quantize_kernel.Problem,
  ctas: int,
  interpret: Any,
):
  """The body: what one CTA does with a tile."""
  tile, (direction,) = problem.tile, problem.directions

  def load(position, slot):
    _, row, column = position
    window = pl.ds(row * ROWS, ROWS), pl.ds(column * tile.part, tile.part)
    source = data_gmem.at[window]
    plgpu.copy_gmem_to_smem(source, data_smem.at[slot], full.at[slot])

  def process(position, slot, refill, words):
    part = lax.rem(slot, jnp.int32(tile.warpgroups))
    plgpu.barrier_wait(full.at[slot])
    y, refs = y_smem.at[part], (q_gmem, atoms_gmem)
    for chunk in range(problem.chunks):
      dequantize.dequantize_rows(data_smem.at[slot], y, words[chunk], chunk)
    plgpu.commit_smem()
    refill()
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    outputs = [(direction, (*refs, q_smem.at[part], atoms_smem.at[part]))]
    quantize_kernel.quantize_tile(y, outputs, position, problem, interpret)
    plgpu.commit_smem()
    quantize_kernel.store_tile(outputs, position, problem)

  stream.walk(
    problem.grid,
    ctas=ctas,
    stages=tile.stages,
    load=load,
    process=process,
    prefetch=lambda at: _load_words(scale_gmem, at, problem.chunks, interpret),
    warpgroups=tile.warpgroups,
    released=released,
  )
  plgpu.wait_smem_to_gmem(0)


def _scratch(problem: quantize_kernel.Problem, stride: int) -> list[Any]:
  """Barriers, input ring, bf16 parts, then the output's tile and atoms."""
  full, released, ring, q_smem, atoms = problem.scratch(problem.dtype)
  del ring
  tile = problem.tile
  slots = tile.stages * tile.warpgroups
  return [
    full,
    released,
    mosaic.swizzled((slots, ROWS, tile.part), problem.dtype, stride),
    mosaic.swizzled((tile.warpgroups, ROWS, tile.part), jnp.bfloat16, CHUNK),
    q_smem,
    atoms,
  ]


def requantize_data(
  data: jax.Array,
  scale: jax.Array,
  width: int,
  *,
  rounding: mxfp8.Rounding = "rceil",
  layout: mxfp8.Layout = "blocked",
  tile: StreamTile | None = None,
  interpret: Any = False,
) -> MxArray:
  """`requantize` of the first columns of longer rows.

  Args:
    data: [R, stride] fp8, R a multiple of 128; packed rows viewed as fp8.
    scale: [R / 128, width / 128, 512] uint8, blocked scales of 1x32 blocks.
    width: Columns that hold data, a multiple of 128.
    rounding: One of `mxfp8.RULES`.
    layout: Of the result's scales.
    tile: The schedule; None for the default.
    interpret: Interpret parameters; False compiles.

  Raises:
    NotImplementedError: The kernel does not take this shape.
    ValueError: The scales do not fit.
  """
  rows, stride = data.shape
  if not rows or not width or rows % ROWS or width % CHUNK or stride % CHUNK:
    raise NotImplementedError(
      "requantize kernel: rows, width and stride must be positive multiples of "
      f"{ROWS} (whole scale atoms); got {rows} rows, width {width}, stride "
      f'{stride}. Use dequantize and quantize, or backend="xla".'
    )
  wanted = (rows // ROWS, width // CHUNK, mxfp8.ATOM_BYTES)
  if scale.shape != wanted:
    raise ValueError(
      f"requantize kernel: blocked scales of {rows} x {width} must be "
      f"{list(wanted)}; got {list(scale.shape)}."
    )
  default = TILE if width % TILE.columns == 0 else NARROW_TILE
  problem = quantize_kernel.Problem(
    shape=(1, rows, width),
    directions=(Direction(axis=-2, layout=layout),),
    rounding=rounding,
    dtype=data.dtype,
    square=False,
    masked=False,
    tile=tile or default,
  )
  if width % problem.tile.columns:
    raise ValueError(
      f"requantize kernel: the tile's {problem.tile.columns} columns must "
      f"divide the width; got {width}."
    )
  ctas = stream.cta_count(
    math.prod(problem.grid), problem.tile.ctas_per_sm, interpret
  )
  call = plgpu.kernel(
    functools.partial(_kernel, problem=problem, ctas=ctas, interpret=interpret),
    out_type=problem.outputs(),
    scratch_types=_scratch(problem, stride),
    **stream.launch(ctas, problem.tile.warpgroups),
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )
  codes, scales = (x[0] for x in call(data, scale))
  return MxArray(codes, scales, axis=-2, layout=layout)


def requantize(
  x: MxArray,
  axis: int = -2,
  *,
  rounding: mxfp8.Rounding = "rceil",
  layout: mxfp8.Layout = "linear",
  tile: StreamTile | None = None,
  interpret: Any = False,
) -> MxArray:
  """MXFP8 rows to columns; equal to `reference.requantize` to the bit.

  Args:
    x: [R, K], 1x32 blocks along the row; R and K multiples of 128. Scales are
      best blocked: linear ones are first laid out anew by XLA.
    axis: -2 (or 0).
    rounding: One of `mxfp8.RULES`.
    layout: Of the result's scales.
    tile: The schedule; None for the default.
    interpret: Interpret parameters; False compiles.

  Raises:
    NotImplementedError: The kernel does not take this shape or direction.
  """
  if x.ndim != 2 or (x.axis, x.block) != (-1, "1x32") or axis not in (-2, 0):
    raise NotImplementedError(
      "requantize kernel: it takes matrices of 1x32 blocks along the row to "
      f"blocks along axis -2; got {x!r} to axis {axis}. Use dequantize and "
      'quantize, or backend="xla".'
    )
  return requantize_data(
    x.data,
    x.with_layout("blocked").scale,
    x.shape[1],
    rounding=rounding,
    layout=layout,
    tile=tile,
    interpret=interpret,
  )


def variants(target: str) -> list[mosaic.Variant]:
  """Both tiles and both scale layouts; a packed row as the source of one."""
  del target
  return [
    _variant("blocked", 7168, 7424, mxfp8.E4M3),
    _variant("blocked", 1408, 1408, mxfp8.E4M3),
    _variant("linear", 7168, 7168, mxfp8.E5M2),
  ]


def _variant(
  layout: mxfp8.Layout, width: int, stride: int, dtype: Any
) -> mosaic.Variant:
  """One entry of `variants`."""
  rows = 4096
  tile = TILE if width % TILE.columns == 0 else NARROW_TILE
  scale = (rows // ROWS, width // CHUNK, mxfp8.ATOM_BYTES)
  return mosaic.Variant(
    kernel="requantize",
    variant=f"{layout} {jnp.dtype(dtype).name} {width} of {stride} {tile.name}",
    function=functools.partial(
      requantize_data, width=width, layout=layout, tile=tile
    ),
    arguments=(
      jax.ShapeDtypeStruct((rows, stride), dtype),
      jax.ShapeDtypeStruct(scale, jnp.uint8),
    ),
    promises=("bulk_tensor_load", "bulk_tensor_store", "cast_to_fp8"),
    ctas_per_sm=tile.ctas_per_sm,
  )
