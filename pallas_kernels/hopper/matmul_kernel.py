"""The body of Hopper's grouped matmul: what one CTA does with its tiles.

    loader     tile -> (row tile, column tile, group)
               for each step:  acquire | TMA lhs[rows, k], rhs[group, k, cols]
    consumers  for each step:  await | wgmma | release the slot before
               times scales, if any | round | slab to shared memory | TMA store

`common` has the ring and the roles, `grouped_matmul` the entry points. Edges
need no care: loads past K or N give zeros and TMA drops stores past N. Tiles
past the last group are not visited.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.hopper import common, tile

ROWS = common.ROWS
PART = common.PART


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of the kernel computes; static.

  Attributes:
    rows: R, a multiple of 128.
    depth: K, contracted.
    width: N.
    lhs_dtype: bf16, or fp8 with ``scaled``.
    rhs_dtype: Of the same size.
    out_dtype: bf16 or float32.
    transposed: rhs is [G, N, K] instead of [G, K, N].
    scaled: There are scales, one a row of lhs and one a column of rhs.
    tile: The schedule.
  """

  rows: int
  depth: int
  width: int
  lhs_dtype: Any
  rhs_dtype: Any
  out_dtype: Any
  transposed: bool
  scaled: bool
  tile: tile.MatmulTile

  @property
  def step(self) -> int:
    """Elements that one step contracts: 128 bytes of a row."""
    return 128 // jnp.dtype(self.lhs_dtype).itemsize

  @property
  def steps(self) -> int:
    """Steps of a tile."""
    return -(-self.depth // self.step)

  @property
  def column_tiles(self) -> int:
    """Tiles along N."""
    return -(-self.width // self.tile.columns)

  def scratch(self) -> list[Any]:
    """Barriers, the rings of lhs and rhs, and the slabs of the epilogue."""
    stages, columns = self.tile.stages, self.tile.columns
    rhs_row = self.depth if self.transposed else self.width
    span = common.span((self.depth, self.lhs_dtype), (rhs_row, self.rhs_dtype))
    rhs = (columns, self.step) if self.transposed else (self.step, columns)
    return [
      *common.ring_barriers(stages, copies=2),
      common.operand((stages, ROWS, self.step), self.lhs_dtype, span),
      common.operand((stages, *rhs), self.rhs_dtype, span),
      common.slab_buffers(self.out_dtype, self.width, self.tile.buffers),
    ]


def each_tile(count: jax.Array, problem: Problem):
  """Decorator: calls ``body(row_tile, column_tile, step)`` for this CTA's.

  ``step`` counts the steps of the tiles before. Returns the count of all.
  """
  tile_ = problem.tile
  shape = (count, problem.column_tiles)

  def run(body):
    def visit(info, carry):
      (index,) = info.index
      body(*plgpu.planar_snake(index, shape, tile_.along, tile_.band), carry)
      return carry + problem.steps

    return plgpu.nd_loop(
      (count * problem.column_tiles,),
      collective_axes=common.AXIS,
      init_carry=jnp.int32(0),
    )(visit)

  return run


def load_tiles(count, tile_group, operands, rings, problem: Problem):
  """The loader's role."""
  ring, *smem = rings

  def load_step(k, step, row, column, group):
    slot = ring.acquire(step)
    contracted = pl.ds(k * problem.step, problem.step)
    columns = pl.ds(column * problem.tile.columns, problem.tile.columns)
    window = (contracted, columns)
    if problem.transposed:
      window = (columns, contracted)
    sources = (
      operands[0].at[pl.ds(row * ROWS, ROWS), contracted],
      operands[1].at[(group, *window)],
    )
    for source, target in zip(sources, smem, strict=True):
      plgpu.copy_gmem_to_smem(source, target.at[slot], ring.full.at[slot])
    return step + 1

  def load_tile(row, column, step):
    body = functools.partial(
      load_step, row=row, column=column, group=tile_group[row]
    )
    lax.fori_loop(0, problem.steps, body, step)

  ring.drain(each_tile(count, problem)(load_tile))


def multiply_tiles(count, tile_group, scales, refs, consumer, problem: Problem):
  """A consumer's role."""
  ring, lhs_smem, rhs_smem, slabs, out = refs
  half = pl.ds(consumer * PART, PART)
  columns = problem.tile.columns

  def issue(accumulator, slot):
    rhs = rhs_smem.at[slot]
    if problem.transposed:
      rhs = plgpu.transpose_ref(rhs, (1, 0))
    plgpu.wgmma(accumulator, lhs_smem.at[slot, half], rhs)

  def multiply_tile(row, column, step):
    first = pl.ds(row * ROWS + consumer * PART, PART)
    y = common.multiply(ring, step, problem.steps, issue, (PART, columns))

    def finish(slab, at):
      if problem.scaled:
        window = pl.ds(column * columns + at, common.SLAB)
        slab = rescale(slab, scales, first, (tile_group[row], window))
      return slab.astype(problem.out_dtype)

    def target(at):
      return out.at[first, pl.ds(column * columns + at, common.SLAB)]

    common.store(y, finish, target, slabs.at[consumer], problem.tile.buffers)

  each_tile(count, problem)(multiply_tile)
  plgpu.wait_smem_to_gmem(0)


def rescale(slab, scales, rows, columns):
  """Times the scale of each row, then of each column; both float32."""
  row_scale, column_scale = scales
  layout = plgpu.Layout.WGMMA
  by_row = plgpu.load(
    row_scale.at[rows], layout=layout.reduce(1), optimized=False
  )
  by_column = plgpu.load(
    column_scale.at[columns], layout=layout.reduce(0), optimized=False
  )
  slab = slab * lax.broadcast_in_dim(by_row, slab.shape, (0,))
  return slab * lax.broadcast_in_dim(by_column, slab.shape, (1,))


def kernel(*refs, problem: Problem):
  """The body.

  Refs: tile count [1], tile group [tiles], lhs, rhs, scales if any, the result,
  then the scratch.
  """
  count_gmem, tile_group, lhs, rhs, *refs = refs
  scales, refs = (refs[:2], refs[2:]) if problem.scaled else ((), refs)
  out, full, empty, lhs_smem, rhs_smem, slabs = refs
  ring = common.Ring(stages=problem.tile.stages, full=full, empty=empty)
  count = count_gmem[0]

  def load():
    rings = (ring, lhs_smem, rhs_smem)
    load_tiles(count, tile_group, (lhs, rhs), rings, problem)

  def consume(consumer):
    memory = (ring, lhs_smem, rhs_smem, slabs, out)
    multiply_tiles(count, tile_group, scales, memory, consumer, problem)

  common.roles(load, consume)
