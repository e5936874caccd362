"""The body of Hopper's grouped matmul: what one CTA does with its tiles.

    loader     tile -> (row tile, column tile, group)
               for each step:  acquire | TMA lhs[rows, k], rhs[group, k, cols]
    consumers  plain, folded:  await | wgmma | release the slot before
               converted:      wgmma | await, next lhs to bf16 | wait, release
               times scales, if folded | round | slab to shared memory | store

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

from pallas_kernels import mosaic, mxfp8
from pallas_kernels.hopper import common, tile

ROWS = common.ROWS
PART = common.PART
BLOCK = mxfp8.BLOCK

# plain: no scales. folded: one a row of lhs and one a column of rhs, float32.
# converted: lhs is MXFP8, with a scale byte a row and block of 32 of K.
WAYS = ("plain", "folded", "converted")


def step_length(way: str) -> int:
  """Elements that one step contracts: 128 bytes of a row of rhs."""
  return tile.STEP_BYTES // (1 if way == "folded" else 2)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of the kernel computes; static.

  Attributes:
    rows: R, a multiple of 128.
    depth: K, contracted.
    width: N.
    stride: Elements from one row of lhs to the next, K or more.
    lhs_dtype: bf16 or fp8.
    rhs_dtype: bf16, or fp8 with ``folded``.
    out_dtype: bf16 or float32.
    transposed: rhs is [G, N, K] instead of [G, K, N].
    way: How operands are scaled, one of `WAYS`.
    tile: The schedule.
  """

  rows: int
  depth: int
  width: int
  stride: int
  lhs_dtype: Any
  rhs_dtype: Any
  out_dtype: Any
  transposed: bool
  way: str
  tile: tile.MatmulTile

  @property
  def step(self) -> int:
    """Elements that one step contracts."""
    return step_length(self.way)

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
    lhs_span = common.span((self.stride, self.lhs_dtype))
    rhs_span = common.span((rhs_row, self.rhs_dtype))
    converted = self.way == "converted"
    if not converted:  # wgmma reads both from shared memory: one swizzle
      lhs_span = rhs_span = min(lhs_span, rhs_span)
    rhs = (columns, self.step) if self.transposed else (self.step, columns)
    scratch = [
      *common.ring_barriers(stages, copies=3 if converted else 2),
      common.slab_buffers(self.tile, self.out_dtype, self.width),
      common.operand((stages, ROWS, self.step), self.lhs_dtype, lhs_span),
      common.operand((stages, *rhs), self.rhs_dtype, rhs_span),
    ]
    if converted:
      scratch.append(plgpu.SMEM((stages, ROWS), jnp.uint16))
    return scratch


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


def load_tiles(count, tile_group, operands, ring, smem, problem: Problem):
  """The loader's role; ``operands`` are lhs, rhs and scales of lhs, if any."""

  def load_step(k, step, row, column, group):
    slot = ring.acquire(step)
    contracted = pl.ds(k * problem.step, problem.step)
    columns = pl.ds(column * problem.tile.columns, problem.tile.columns)
    window = (contracted, columns)
    if problem.transposed:
      window = (columns, contracted)
    windows = (pl.ds(row * ROWS, ROWS), contracted), (group, *window), (row, k)
    for source, window, target in zip(operands, windows, smem, strict=False):
      plgpu.copy_gmem_to_smem(
        source.at[window], target.at[slot], ring.full.at[slot]
      )
    return step + 1

  def load_tile(row, column, step):
    body = functools.partial(
      load_step, row=row, column=column, group=tile_group[row]
    )
    lax.fori_loop(0, problem.steps, body, step)

  ring.drain(each_tile(count, problem)(load_tile))


def convert(lhs_smem, scale_smem):
  """MXFP8 [64, step] to bf16 in registers, exact within bf16's range.

  Args:
    lhs_smem: [64, step] fp8.
    scale_smem: [64] uint16, the bytes of a row's two blocks.
  """
  layout = plgpu.Layout.WGMMA
  codes = plgpu.load(lhs_smem, layout=layout, optimized=False)
  pair = plgpu.load(scale_smem, layout=layout.reduce(1), optimized=False)
  pair = pair.astype(jnp.uint32)
  parts = []
  for block, byte in enumerate(
    (pair & jnp.uint32(0xFF), pair >> jnp.uint32(8))
  ):
    scale = mosaic.power_of_two(byte)
    part = codes[:, block * BLOCK : (block + 1) * BLOCK].astype(jnp.float32)
    part = part * lax.broadcast_in_dim(scale, part.shape, (0,))
    parts.append(part.astype(jnp.bfloat16))
  return lax.concatenate(parts, 1)


def product(ring, step, smem, consumer, problem: Problem, interpret):
  """The sums of one tile, [64, columns] float32."""
  lhs_smem, rhs_smem, *scale_smem = smem
  half = pl.ds(consumer * PART, PART)
  shape = (PART, problem.tile.columns)

  def rhs(slot):
    ref = rhs_smem.at[slot]
    return ref.transpose((1, 0)) if problem.transposed else ref

  if problem.way == "converted":
    return common.multiply_converted(
      ring,
      step,
      problem.steps,
      lambda slot: convert(
        lhs_smem.at[slot, half], scale_smem[0].at[slot, half]
      ),
      lambda sums, lhs, slot: plgpu.wgmma(sums, lhs, rhs(slot)),
      shape,
      interpret,
    )
  return common.multiply(
    ring,
    step,
    problem.steps,
    lambda sums, slot: plgpu.wgmma(sums, lhs_smem.at[slot, half], rhs(slot)),
    shape,
  )


def multiply_tiles(
  count,
  tile_group,
  scales,
  out,
  ring,
  smem,
  consumer,
  problem: Problem,
  interpret,
):
  """A consumer's role."""
  slabs, *smem = smem
  columns = problem.tile.columns

  def multiply_tile(row, column, step):
    rows = pl.ds(row * ROWS + consumer * PART, PART)

    def window(at):
      return pl.ds(column * columns + at, problem.tile.slab)

    def finish(slab, at):
      if problem.way == "folded":
        slab = rescale(slab, scales, rows, (tile_group[row], window(at)))
      return slab.astype(problem.out_dtype)

    sums = product(ring, step, smem, consumer, problem, interpret)
    common.store(
      sums,
      finish,
      lambda at: out.at[rows, window(at)],
      slabs.at[consumer],
      problem.tile,
    )

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


def kernel(*refs, problem: Problem, interpret: Any):
  """The body.

  Refs: tile count [1], tile group [tiles], lhs, rhs, then scales: folded, of
  rows [R] and columns [G, N]; converted, [R / 128, steps, 128] uint16. Then the
  result and the scratch.
  """
  count_gmem, tile_group, lhs, rhs, *refs = refs
  scales = {"plain": 0, "folded": 2, "converted": 1}[problem.way]
  scales, (out, full, empty, *smem) = refs[:scales], refs[scales:]
  ring = common.Ring(stages=problem.tile.stages, full=full, empty=empty)
  count = count_gmem[0]
  operands = (lhs, rhs, *scales) if problem.way == "converted" else (lhs, rhs)
  common.roles(
    lambda: load_tiles(count, tile_group, operands, ring, smem[1:], problem),
    lambda consumer: multiply_tiles(
      count, tile_group, scales, out, ring, smem, consumer, problem, interpret
    ),
  )
