"""The store role of Blackwell's grouped wgrad: a warpgroup of every CTA."""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.blackwell import wgrad_shared, wgrad_tile
from pallas_kernels.blackwell.wgrad_problem import Problem, Tiled
from pallas_kernels.blackwell.wgrad_shared import Memory, Tile

LANES = wgrad_tile.LANES


def chunk_order(turn: jax.Array, i: int, problem: Tiled) -> jax.Array:
  """Which chunk of columns is stored as the i-th of a tile.

  The ones that both accumulators hold first: the last of the first accumulator,
  the first of the second.
  """
  last = problem.chunks - 1
  if not problem.tile.shared:
    return jnp.int32(i)
  return jnp.where(turn == 0, last - i, i)


def release_after(problem: Tiled) -> int:
  """The chunk after whose load another tile may overwrite what it must."""
  if problem.tile.shared:
    return problem.tile.shared // problem.chunk - 1
  return problem.chunks - 1


def window(tile: Tile, member, chunk, problem: Problem):
  """Where a chunk of a tile lies in the result."""
  row = (tile.row * problem.tile.ctas + member) * LANES
  column = tile.column * problem.tile.rhs + chunk * problem.chunk
  return tile.group, pl.ds(row, LANES), pl.ds(column, problem.chunk)


def fetch(memory: Memory, where: Any, i: int, problem: Problem) -> None:
  """Starts to load what the i-th chunk of a tile is added to."""
  slot, ahead = i % problem.tile.buffers, problem.tile.buffers // 2
  plgpu.wait_smem_to_gmem(problem.tile.buffers - ahead, wait_read_only=True)
  plgpu.copy_gmem_to_smem(
    memory.accumulate.at[where], memory.chunks.at[slot], memory.loaded.at[slot]
  )


def store_chunk(memory: Memory, value, where, i: int, problem: Tiled) -> None:
  """Stores the i-th chunk of a tile through its buffer."""
  slot = i % problem.tile.buffers
  chunk = memory.chunks.at[slot]
  if problem.accumulate:
    plgpu.barrier_wait(memory.loaded.at[slot])
    value += plgpu.load(chunk, layout=plgpu.Layout.TCGEN05)
  else:
    plgpu.wait_smem_to_gmem(problem.tile.buffers - 1, wait_read_only=True)
  chunk[...] = value.astype(problem.out_dtype)
  plgpu.commit_smem()
  plgpu.copy_smem_to_gmem(chunk, memory.out.at[where])


def store_tile(memory: Memory, tile: Tile, member, problem: Problem) -> None:
  """Stores a tile with steps; ``member`` is the CTA's place in its pair."""
  sums, turn = wgrad_shared.accumulator(memory, tile.turn, problem)

  def where(i):
    return window(tile, member, chunk_order(turn, i, problem), problem)

  ahead = problem.tile.buffers // 2 if problem.accumulate else 0
  for i in range(ahead):
    fetch(memory, where(i), i, problem)
  plgpu.barrier_wait(memory.done.at[turn])
  pl.when(member > 0)(
    lambda: wgrad_shared.previous_turn(memory, tile.turn, problem)
  )
  for i in range(problem.chunks):
    first = chunk_order(turn, i, problem) * problem.chunk
    value = plgpu.async_load_tmem(sums.at[:, pl.ds(first, problem.chunk)])
    if i == release_after(problem):
      plgpu.wait_load_tmem()
      plgpu.barrier_arrive(memory.free.at[turn])
    store_chunk(memory, value, where(i), i, problem)
    if ahead and i + ahead < problem.chunks:
      fetch(memory, where(i + ahead), i + ahead, problem)
  plgpu.wait_load_tmem()


def store_zeros(memory: Memory, tile: Tile, member, problem: Problem) -> None:
  """Stores a tile of a group without rows: zeros, or what was there."""
  ahead = problem.tile.buffers // 2 if problem.accumulate else 0
  zeros = jnp.zeros((LANES, problem.chunk), jnp.float32)
  zeros = plgpu.layout_cast(zeros, plgpu.Layout.TCGEN05)
  for i in range(ahead):
    fetch(memory, window(tile, member, i, problem), i, problem)
  for i in range(problem.chunks):
    where = window(tile, member, i, problem)
    store_chunk(memory, zeros, where, i, problem)
    if ahead and i + ahead < problem.chunks:
      where = window(tile, member, i + ahead, problem)
      fetch(memory, where, i + ahead, problem)


def store_tiles(memory: Memory, problem: Problem) -> None:
  """The store role: a warpgroup of every CTA."""
  member = lax.axis_index(wgrad_shared.PAIR)

  def visit(tile):
    has_rows, no_rows = tile.steps > 0, tile.steps == 0
    pl.when(has_rows)(lambda: store_tile(memory, tile, member, problem))
    pl.when(no_rows)(lambda: store_zeros(memory, tile, member, problem))

  _, turns = wgrad_shared.each_tile(visit, memory.schedule, problem)
  pl.when(member > 0)(lambda: wgrad_shared.drain_turns(memory, turns, problem))
  plgpu.wait_smem_to_gmem(0)
