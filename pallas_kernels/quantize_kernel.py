"""The quantize kernel's body: what one CTA does with a tile.

    wait full[slot] | zero padding rows | rows pass | columns pass | fence
    refill slot     | store data, store scale atoms

`quantize` holds the entry points and says what is computed; `stream` walks the
tiles; `tile_quantize` has the passes. Edges need no care here: loads past the
array give zeros and TMA drops stores past it. Linear scales are stored from
registers, so their arrays cover whole tiles and the entry points trim them.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic, mxfp8, stream, tile_quantize, tiles

ROWS = tiles.TILE_ROWS
CHUNK = tile_quantize.CHUNK


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
  """One output of the kernel.

  Attributes:
    axis: -1 for blocks along a row, -2 for blocks along a column.
    layout: "linear" or "blocked" scales.
    transposed: Columns only: data and scales of x^T, for operands that the
      tensor core wants contiguous along the contracted axis.
  """

  axis: int
  layout: mxfp8.Layout
  transposed: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of the kernel computes; static."""

  shape: tuple[int, ...]
  directions: tuple[Direction, ...]
  rounding: mxfp8.Rounding
  dtype: Any
  square: bool
  masked: bool
  tile: tiles.StreamTile
  rounded: bool = False  # data are the numbers that codes stand for, bf16

  @property
  def result(self) -> Any:
    """The dtype of the data."""
    return jnp.bfloat16 if self.rounded else self.dtype

  @property
  def grid(self) -> tuple[int, int, int]:
    """Matrices, tiles along rows, tiles along columns."""
    matrices, rows, columns = self.shape
    return matrices, -(-rows // ROWS), -(-columns // self.tile.columns)

  @property
  def chunks(self) -> int:
    """Chunks of 128 columns of a warpgroup's part of a tile."""
    return self.tile.part // CHUNK

  @property
  def copies(self) -> int:
    """Stores that a warpgroup starts for each tile."""
    blocked = sum(d.layout == "blocked" for d in self.directions)
    return len(self.directions) + blocked * self.chunks

  def outputs(self) -> list[jax.ShapeDtypeStruct]:
    """Data and scales of each direction; linear scales cover whole tiles."""
    matrices, rows, columns = self.shape
    out = []
    for d in self.directions:
      shape = (columns, rows) if d.transposed else (rows, columns)
      out.append(jax.ShapeDtypeStruct((matrices, *shape), self.result))
      down, across = self.grid[1], -(-columns // CHUNK)
      if d.layout == "linear":
        across = self.grid[2] * self.tile.columns // CHUNK
      first, second = (down, across) if d.axis == -1 else (across, down)
      scale = (first, second, mxfp8.ATOM_BYTES)
      if d.layout == "linear" and (d.axis == -1 or d.transposed):
        scale = (first * ROWS, second * mxfp8.ATOM_BLOCKS)
      elif d.layout == "linear":
        scale = (second * mxfp8.ATOM_BLOCKS, first * CHUNK)
      out.append(jax.ShapeDtypeStruct((matrices, *scale), jnp.uint8))
    return out

  def scratch(self, x_dtype: Any) -> list[Any]:
    """Barriers, the input ring, then output tiles and atoms by direction."""
    tile = self.tile
    slots, buffers = (
      tile.stages * tile.warpgroups,
      tile.buffers * tile.warpgroups,
    )
    ring = (slots, ROWS, tile.part)
    scratch = [
      plgpu.Barrier(num_barriers=slots),
      stream.release_barriers(tile.stages, tile.warpgroups),
      mosaic.swizzled(ring, x_dtype, self.shape[2]),
    ]
    for d in self.directions:
      shape = (tile.part, ROWS) if d.transposed else (ROWS, tile.part)
      width = self.shape[1 if d.transposed else 2]
      atoms = (buffers, self.chunks, mxfp8.ATOM_BYTES)
      scratch.append(mosaic.swizzled((buffers, *shape), self.result, width))
      scratch.append(plgpu.SMEM(atoms, jnp.uint8))
    return scratch


def _window(position, problem: Problem):
  """Indices of a warpgroup's part in a [matrix, row, column] array."""
  matrix, row, column = position
  columns = problem.tile.part
  return matrix, pl.ds(row * ROWS, ROWS), pl.ds(column * columns, columns)


def _store_scales(
  direction, words, outputs, chunk, position, problem, layout, interpret
):
  """Stores the scale words of a chunk: to the atom, or straight to memory."""
  scale_gmem, atom_smem = outputs
  matrix, row, column = position
  store = functools.partial(
    mosaic.store_words, words=words, layout=layout, interpret=interpret
  )
  if direction.layout == "blocked":
    store(atom_smem.at[chunk], blocked=True)
    return
  first, second = row, column * problem.chunks + chunk
  if direction.axis == -2:
    first, second = second, first
  if direction.axis == -1 or direction.transposed:
    window = (pl.ds(first * ROWS, ROWS), pl.ds(second * 4, 4))
    store(scale_gmem.at[(matrix, *window)], blocked=False)
  else:
    window = (pl.ds(second * 4, 4), pl.ds(first * CHUNK, CHUNK))
    tile_quantize.store_linear_columns(scale_gmem.at[(matrix, *window)], words)


def quantize_tile(x_smem, outputs, position, problem, interpret):
  """Both passes over one tile in shared memory."""
  for d, (_, scale_gmem, q_smem, atom_smem) in outputs:
    for chunk in range(problem.chunks):
      layout = tile_quantize.word_layout(d.axis, x_smem.dtype)
      if d.axis == -1:
        words = tile_quantize.quantize_row_chunk(
          x_smem,
          q_smem,
          chunk,
          dtype=problem.dtype,
          rounding=problem.rounding,
          square=problem.square,
          interpret=interpret,
        )
      else:
        words = tile_quantize.quantize_column_chunk(
          x_smem,
          q_smem,
          chunk,
          dtype=problem.dtype,
          rounding=problem.rounding,
          transposed=d.transposed,
          interpret=interpret,
        )
      _store_scales(
        d,
        words,
        (scale_gmem, atom_smem),
        chunk,
        position,
        problem,
        layout,
        interpret,
      )


def store_tile(outputs, position, problem):
  """Starts the stores of one tile's data and scale atoms."""
  matrix, row, column = position
  _, rows, columns = _window(position, problem)
  across = -(-problem.shape[2] // CHUNK)
  for d, (q_gmem, scale_gmem, q_smem, atom_smem) in outputs:
    window = (columns, rows) if d.transposed else (rows, columns)
    plgpu.copy_smem_to_gmem(q_smem, q_gmem.at[(matrix, *window)])
    if d.layout == "linear":
      continue
    for chunk in range(problem.chunks):
      second = column * problem.chunks + chunk
      where = (row, second) if d.axis == -1 else (second, row)
      whole = problem.shape[2] % problem.tile.columns == 0
      plgpu.copy_smem_to_gmem(
        atom_smem.at[chunk],
        scale_gmem.at[(matrix, *where)],
        predicate=None if whole else second < across,
      )


def kernel(*refs, problem: Problem, ctas: int, interpret: Any):
  """The body: input, valid rows if masked, outputs, then the scratch."""
  x_gmem, *refs = refs
  valid_gmem = refs.pop(0) if problem.masked else None
  count = 2 * len(problem.directions)
  gmem, (full, released, x_smem, *smem) = refs[:count], refs[count:]
  tile = problem.tile

  def load(position, slot):
    source = x_gmem.at[_window(position, problem)]
    plgpu.copy_gmem_to_smem(source, x_smem.at[slot], full.at[slot])

  def process(position, slot, refill, valid):
    buffer = slot if tile.buffers > 1 else lax.rem(slot, tile.warpgroups)
    outputs = [
      (d, (*gmem[i : i + 2], *(ref.at[buffer] for ref in smem[i : i + 2])))
      for d, i in zip(problem.directions, range(0, count, 2), strict=True)
    ]
    plgpu.barrier_wait(full.at[slot])
    plgpu.wait_smem_to_gmem(
      (tile.buffers - 1) * problem.copies, wait_read_only=True
    )
    if problem.masked:
      pl.when(valid < ROWS)(functools.partial(_mask, x_smem.at[slot], valid))
    quantize_tile(x_smem.at[slot], outputs, position, problem, interpret)
    plgpu.commit_smem()
    refill()
    store_tile(outputs, position, problem)

  stream.walk(
    problem.grid,
    ctas=ctas,
    stages=tile.stages,
    load=load,
    process=process,
    prefetch=lambda at: None if valid_gmem is None else valid_gmem[at[1]],
    warpgroups=tile.warpgroups,
    released=released,
  )
  plgpu.wait_smem_to_gmem(0)


def _mask(x_smem, valid):
  """Zeroes padding rows; the barrier lets other threads read the zeros."""
  tile_quantize.mask_rows(x_smem, valid)
  plgpu.commit_smem()
