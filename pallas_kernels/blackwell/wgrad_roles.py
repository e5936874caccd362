"""The load and the multiply roles of Blackwell's grouped wgrad: two warps."""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.blackwell import wgrad_shared, wgrad_tile
from pallas_kernels.blackwell.wgrad_problem import Problem, Tiled
from pallas_kernels.blackwell.wgrad_shared import Memory

DEPTH, LANES = wgrad_tile.DEPTH, wgrad_tile.LANES


def await_empty(memory: Memory, step: jax.Array, problem: Tiled) -> None:
  """Waits until the slot of ``step`` was multiplied, if it was ever loaded."""
  stages = problem.tile.stages

  @pl.when(step >= stages)
  def _():
    plgpu.barrier_wait(memory.empty.at[lax.rem(step, jnp.int32(stages))])


def drain_slots(memory: Memory, steps: jax.Array, problem: Tiled) -> None:
  """Waits until all slots were multiplied: the peer arrives at our barriers."""
  stages = problem.tile.stages
  first = jnp.maximum(steps - stages, 0)

  def wait(step, _):
    plgpu.barrier_wait(memory.empty.at[lax.rem(step, jnp.int32(stages))])

  lax.fori_loop(first, steps, wait, None)


def load_tiles(memory: Memory, problem: Problem) -> None:
  """The load role: a warp of every CTA."""
  tile_shape = problem.tile
  part = plgpu.CopyPartition.PARTITIONED

  def copy(which, slot, window, partition):
    paired: dict[str, Any] = {}
    if tile_shape.ctas > 1:
      paired = dict(collective_axes=wgrad_shared.PAIR, leader_tracked=partition)
    plgpu.copy_gmem_to_smem(
      memory.sources[which].at[window],
      memory.slots[which].at[slot],
      memory.full.at[slot],
      **paired,
    )

  def load_step(k, _, tile):
    step = tile.before + k
    await_empty(memory, step, problem)
    slot = lax.rem(step, jnp.int32(tile_shape.stages))
    block = tile.start + k
    rows = pl.ds(block * DEPTH, DEPTH)
    for which, index, size, scales in (
      (0, tile.row, tile_shape.lhs, part(0)),
      (1, tile.column, tile_shape.rhs, plgpu.CopyPartition.REPLICATED),
    ):
      columns = pl.ds(index * size, size)
      if tile_shape.transposed:
        copy(which, slot, (columns, rows), part(0))
      else:
        copy(which, slot, (rows, columns), part(1))
      atoms = size // LANES
      window = (pl.ds(index * atoms, atoms), pl.ds(block, 1))
      copy(2 + which, slot, window, scales)

  def load_tile(tile):
    def step(k, carry):
      return load_step(k, carry, tile)

    lax.fori_loop(0, tile.steps, step, None)

  steps, _ = wgrad_shared.each_tile(load_tile, memory.schedule, problem)
  drain_slots(memory, steps, problem)


def scale_columns(memory: Memory, slot: int, problem: Tiled):
  """The columns of a slot's scales: of lhs and of rhs.

  Columns of 128 rows are parts of one allocation, which is rounded up; those of
  256 rows cannot be sliced and are an allocation each.
  """
  lhs, rhs = memory.scales
  part = (slice(None), pl.ds(4 * slot, 4))
  return lhs.at[part], rhs.at[part] if problem.tile.rhs == 128 else rhs[slot]


def multiply_tiles(memory: Memory, problem: Problem) -> None:
  """The multiply role: a warp of the leader."""
  axis = wgrad_shared.PAIR if problem.tile.ctas > 1 else None

  def multiply(slot: int, sums, k):
    operands = [x.at[slot] for x in memory.slots]
    lhs, rhs, lhs_scale, rhs_scale = operands
    if problem.tile.transposed:
      rhs = rhs.transpose((1, 0))
    else:
      lhs = lhs.transpose((1, 0))
    columns = scale_columns(memory, slot, problem)
    for source, target in zip((lhs_scale, rhs_scale), columns, strict=True):
      atoms = source.reshape(source.shape[0], 1, 32, 16)
      plgpu.async_copy_scales_to_tmem(atoms, target, collective_axis=axis)
    plgpu.tcgen05_mma(
      sums,
      lhs,
      rhs,
      memory.empty.at[slot],
      a_scale=columns[0],
      b_scale=columns[1],
      accumulate=k > 0,
      collective_axis=axis,
    )

  def multiply_tile(tile):
    wgrad_shared.previous_turn(memory, tile.turn, problem)
    sums, turn = wgrad_shared.accumulator(memory, tile.turn, problem)

    def step(k, _):
      slot = lax.rem(tile.before + k, jnp.int32(problem.tile.stages))
      plgpu.barrier_wait(memory.full.at[slot])
      for i in range(problem.tile.stages):
        pl.when(slot == i)(lambda i=i: multiply(i, sums, k))

    lax.fori_loop(0, tile.steps, step, None)
    plgpu.tcgen05_commit_arrive(memory.done.at[turn], collective_axis=axis)

  def visit(tile):
    pl.when(tile.steps > 0)(lambda: multiply_tile(tile))

  _, turns = wgrad_shared.each_tile(visit, memory.schedule, problem)
  wgrad_shared.drain_turns(memory, turns, problem)
