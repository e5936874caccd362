"""The body of Hopper's grouped wgrad: what one CTA does with its tiles.

    loader     tile -> (group, columns of lhs, columns of rhs)
               for each step of the group:  acquire | TMA lhs, TMA rhs
    consumers  for each step:  await | wgmma | release the slot before
               sums | times scales | plus what was there | slab | TMA store

bf16 operands lie in shared memory as in global memory, rows of the group
outermost, 64 a step, and wgmma reads them across: its 16-bit forms take either
order. fp8 operands come transposed, 128 rows a step, because its 8-bit forms
want the contracted axis innermost; they have one scale a column and group.

Consumers that take tiles in turn have a set of ``full`` barriers each, because
a barrier's phase is known only to a warpgroup that awaits every one of its
phases. The ring itself keeps them in turn: a tile's slots are loaded only when
the tile before has been read.

`common` has the ring and the roles, `grouped_wgrad` the entry point. Edges need
no care: loads past K or N give zeros and TMA drops stores past them.
"""

import dataclasses
import functools
import itertools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.hopper import common, matmul_kernel, wgrad_tile

CONSUMERS = wgrad_tile.CONSUMERS
SLAB_ROWS = wgrad_tile.UNIT


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of the kernel computes; static.

  Attributes:
    groups: G.
    depth: K, columns of lhs.
    width: N, columns of rhs.
    out_dtype: float32 or bf16.
    accumulate: Adds to what an array holds.
    folded: Operands are transposed fp8, with scales; otherwise bf16.
    lhs_dtype: Of lhs.
    rhs_dtype: Of rhs.
    tile: The schedule.
  """

  groups: int
  depth: int
  width: int
  out_dtype: Any
  accumulate: bool
  folded: bool
  lhs_dtype: Any
  rhs_dtype: Any
  tile: wgrad_tile.WgradTile

  @property
  def step(self) -> int:
    """Rows of a step."""
    return wgrad_tile.STEP_BYTES // jnp.dtype(self.lhs_dtype).itemsize

  @property
  def grid(self) -> tuple[int, int]:
    """Tiles of a group along K and along N."""
    return -(-self.depth // self.tile.lhs), -(-self.width // self.tile.rhs)

  @property
  def tiles(self) -> int:
    """Tiles of all groups."""
    return self.groups * self.grid[0] * self.grid[1]

  @property
  def slab(self) -> int:
    """Columns that the epilogue stores at a time."""
    return wgrad_tile.SLAB_BYTES // jnp.dtype(self.out_dtype).itemsize

  def scratch(self) -> list[Any]:
    """Barriers, the rings of lhs and rhs, and the slabs of the epilogue."""
    tile, span = self.tile, wgrad_tile.STEP_BYTES
    turns = CONSUMERS if tile.alternate else 1
    slabs = (CONSUMERS, tile.buffers, SLAB_ROWS, self.slab)

    def ring(columns, dtype):
      shape = (columns, self.step) if self.folded else (self.step, columns)
      return common.operand((tile.stages, *shape), dtype, span)

    return [
      plgpu.Barrier(num_arrivals=2, num_barriers=turns * tile.stages),
      plgpu.Barrier(num_arrivals=CONSUMERS // turns, num_barriers=tile.stages),
      plgpu.Barrier(num_barriers=CONSUMERS * tile.buffers),
      ring(tile.lhs, self.lhs_dtype),
      ring(tile.rhs, self.rhs_dtype),
      mosaic.swizzled(slabs, self.out_dtype, self.width),
    ]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
  """A tile of the result, as `each_tile` gives it; indices are [] int32.

  Attributes:
    group: Its group.
    start: First row of the group.
    steps: Steps of the group; 0 if it has no rows.
    row: Tile along K.
    column: Tile along N.
    before: Steps of this CTA's tiles before.
    turn: The consumer whose turn it is.
  """

  group: jax.Array
  start: jax.Array
  steps: jax.Array
  row: jax.Array
  column: jax.Array
  before: jax.Array
  turn: jax.Array


def each_tile(body, schedule, problem: Problem) -> jax.Array:
  """Calls ``body(tile)`` for each `Tile` of this CTA.

  Args:
    body: Of a role.
    schedule: [3, G] int32 in global memory, groups in the order of work: which
      group, its first row, its steps.
    problem: What is computed.

  Returns:
    [] int32, the steps of all of them.
  """
  down, across = problem.grid

  def visit(info, carry):
    (index,) = info.index
    place = lax.div(index, jnp.int32(down * across))
    inside = lax.rem(index, jnp.int32(down * across))
    row, column = plgpu.planar_snake(inside, problem.grid, 1, problem.tile.band)
    tile = Tile(
      group=schedule[0, place],
      start=schedule[1, place],
      steps=schedule[2, place],
      row=row,
      column=column,
      before=carry,
      turn=lax.rem(info.local_index, jnp.int32(CONSUMERS)),
    )
    body(tile)
    return carry + tile.steps

  return plgpu.nd_loop(
    (problem.tiles,), collective_axes=common.AXIS, init_carry=jnp.int32(0)
  )(visit)


def full_barrier(ring: common.Ring, slot, turn, problem: Problem):
  """The barrier of a loaded slot that the consumer ``turn`` awaits."""
  if not problem.tile.alternate:
    return ring.full.at[slot]
  return ring.full.at[turn * ring.stages + slot]


def load_tiles(schedule, sources, ring, targets, problem: Problem):
  """The loader's role."""
  sizes = (problem.tile.lhs, problem.tile.rhs)

  def load_step(k, _, tile):
    slot = ring.acquire(tile.before + k)
    barrier = full_barrier(ring, slot, tile.turn, problem)
    rows = pl.ds(tile.start + k * problem.step, problem.step)
    for source, target, size, index in zip(
      sources, targets, sizes, (tile.row, tile.column), strict=True
    ):
      columns = pl.ds(index * size, size)
      window = (columns, rows) if problem.folded else (rows, columns)
      plgpu.copy_gmem_to_smem(source.at[window], target.at[slot], barrier)

  def load_tile(tile):
    step = functools.partial(load_step, tile=tile)
    lax.fori_loop(0, tile.steps, step, None)

  ring.drain(each_tile(load_tile, schedule, problem))


def multiply(ring, operands, tile, consumer, problem: Problem) -> jax.Array:
  """The sums of a consumer's part of a tile; zeros without steps.

  One wgmma is in flight while the next one is issued; a slot is released when
  its own has ended.

  Returns:
    [part, rhs] float32 in the layout ``plgpu.Layout.WGMMA``.
  """
  lhs_smem, rhs_smem = operands
  part = problem.tile.part
  half = pl.ds(0 if problem.tile.alternate else consumer * part, part)

  def scope(accumulator):
    def body(k, _):
      step = tile.before + k
      slot = ring.slot(step)
      plgpu.barrier_wait(full_barrier(ring, slot, consumer, problem))
      lhs, rhs = lhs_smem.at[slot], rhs_smem.at[slot]
      if problem.folded:
        lhs, rhs = lhs.at[half], rhs.transpose((1, 0))
      else:
        lhs = lhs.at[:, half].transpose((1, 0))
      plgpu.wgmma(accumulator, lhs, rhs)
      plgpu.wgmma_wait(1)
      pl.when(k > 0)(lambda: ring.release(step - 1))

    lax.fori_loop(0, tile.steps, body, None)
    plgpu.wgmma_wait(0)
    last = tile.before + tile.steps - 1
    pl.when(tile.steps > 0)(lambda: ring.release(last))
    return accumulator[...]

  shape = (part, problem.tile.rhs)
  return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def corners(problem: Problem) -> list[tuple[int, int]]:
  """Row and column of each slab of a consumer's part of a tile."""
  rows = range(0, problem.tile.part, SLAB_ROWS)
  columns = range(0, problem.tile.rhs, problem.slab)
  return list(itertools.product(rows, columns))


def fetch(i, window, slabs, arrays, loaded, problem: Problem) -> None:
  """Starts the load of what slab ``i`` of a tile is added to, if it exists."""
  if arrays[0] is not None and i < len(corners(problem)):
    source = arrays[0].at[window(*corners(problem)[i])]
    buffer = i % problem.tile.buffers
    plgpu.copy_gmem_to_smem(source, slabs.at[buffer], loaded(buffer))


def store(
  sums, window, slabs, arrays, loaded, problem: Problem, scales: Any
) -> None:
  """Stores a consumer's sums, a slab at a time; the first are fetched.

  The fetch of a later slab waits for the store of an earlier one of the same
  buffer, half of the buffers ago.

  Args:
    sums: [part, rhs] float32.
    window: ``window(row, column)``: indices of the slab that starts there.
    slabs: [buffers, 64, slab] in shared memory.
    arrays: What to add to, or None, and the result, in global memory.
    loaded: ``loaded(buffer)``: barrier of the slab that is added to.
    problem: What is computed.
    scales: float32 [G, K] and [G, N], padded to tiles, or None.
  """
  accumulate, out = arrays
  buffers, width = problem.tile.buffers, problem.slab
  ago = buffers if accumulate is None else max(buffers // 2, 1)
  for i, (row, column) in enumerate(corners(problem)):
    slab = slabs.at[i % buffers]
    value = sums[row : row + SLAB_ROWS, column : column + width]
    if i >= ago:
      plgpu.wait_smem_to_gmem(ago - 1, wait_read_only=True)
      fetch(i - ago + buffers, window, slabs, arrays, loaded, problem)
    if scales is not None:
      group, rows, columns = window(row, column)
      value = matmul_kernel.rescale(
        value, scales, (group, rows), (group, columns)
      )
    if accumulate is not None:
      plgpu.barrier_wait(loaded(i % buffers))
      value += plgpu.load(slab, layout=plgpu.Layout.WGMMA)
    slab[...] = value.astype(problem.out_dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slab, out.at[window(row, column)])


def multiply_tiles(schedule, refs, consumer, problem: Problem):
  """A consumer's role."""
  ring, operands, slabs, arrays, loaded, scales = refs
  part, buffers = problem.tile.part, problem.tile.buffers

  def multiply_tile(tile):
    first = tile.row * problem.tile.lhs
    if not problem.tile.alternate:
      first += consumer * part

    def window(row, column):
      columns = pl.ds(tile.column * problem.tile.rhs + column, problem.slab)
      return tile.group, pl.ds(first + row, SLAB_ROWS), columns

    memory = (
      *(window, slabs.at[consumer], arrays),
      lambda buffer: loaded.at[consumer * buffers + buffer],
      problem,
    )
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the tile before
    for i in range(buffers):
      fetch(i, *memory)
    sums = multiply(ring, operands, tile, consumer, problem)
    store(sums, *memory, scales)

  def visit(tile):
    if problem.tile.alternate:
      pl.when(tile.turn == consumer)(lambda: multiply_tile(tile))
    else:
      multiply_tile(tile)

  each_tile(visit, schedule, problem)
  plgpu.wait_smem_to_gmem(0)


def kernel(*refs, problem: Problem):
  """The body.

  Refs: schedule, lhs, rhs, their scales if folded, what to add to if anything,
  the result, the scratch.
  """
  schedule, lhs, rhs, *refs = refs
  scales = (refs.pop(0), refs.pop(0)) if problem.folded else None
  accumulate = refs.pop(0) if problem.accumulate else None
  out, full, empty, loaded, lhs_smem, rhs_smem, slabs = refs
  ring = common.Ring(stages=problem.tile.stages, full=full, empty=empty)
  operands = (lhs_smem, rhs_smem)

  def consume(consumer):
    memory = (ring, operands, slabs, (accumulate, out), loaded, scales)
    multiply_tiles(schedule, memory, consumer, problem)

  common.roles(
    lambda: load_tiles(schedule, (lhs, rhs), ring, operands, problem), consume
  )
