"""What the roles of Blackwell's grouped matmul and wgrad do with one tile.

    load      acquire slot | TMA lhs, rhs and their scales       -> full[slot]
    multiply  await accumulator | for each step of the tile:
              await slot | scales to TMEM | block-scaled MMA     -> empty[slot]
              all issued                                         -> done[turn]
    store     await done | for each chunk of columns: TMEM load | plus what was
              there | shared memory | TMA store                  -> free[turn]

In a pair each CTA loads its half of the result's rows and of its columns; the
first one, the leader, multiplies for both and counts the loads of both; each
stores its half of the rows.

Phases. Each role counts the steps of all its tiles in a number carried from
tile to tile, so that a slot's phase is right however many steps a tile has. A
barrier's phase is known only to a waiter that sees each of them: ``done`` and
``free`` have a barrier for each accumulator, and no role can get two phases
behind on one. ``free`` is awaited by the multiplying warp of the leader; in the
other CTA the store role sees it, after ``done``, where it has long happened.

Scales have columns of tensor memory for each slot: the tensor core orders a
copy before the MMA that reads it, but not the MMA before the next copy. Where
accumulators overlap, the columns they share are read first.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.blackwell import memory as memory_lib
from pallas_kernels.blackwell.memory import Memory, Problem

Window = Callable[[jax.Array], Any]  # chunk -> its indices in the result


class Tile(Protocol):
  """A tile of the result, as the kernels' ``each_tile`` give it."""

  @property
  def before(self) -> jax.Array:
    """Steps of the tiles before, of this cluster."""
    ...

  @property
  def steps(self) -> Any:
    """Steps of this tile."""
    ...

  @property
  def turn(self) -> jax.Array:
    """Tiles with steps before, of this cluster."""
    ...


def await_empty(memory: Memory, step: jax.Array, problem: Problem) -> None:
  """Waits until the slot of ``step`` was multiplied, if it was ever loaded."""
  stages = problem.tile.stages

  @pl.when(step >= stages)
  def _():
    plgpu.barrier_wait(memory.empty.at[lax.rem(step, jnp.int32(stages))])


def drain_slots(memory: Memory, steps: jax.Array, problem: Problem) -> None:
  """Waits until all slots were multiplied: the peer arrives at our barriers."""
  stages = problem.tile.stages
  first = jnp.maximum(steps - stages, 0)

  def wait(step, _):
    plgpu.barrier_wait(memory.empty.at[lax.rem(step, jnp.int32(stages))])

  lax.fori_loop(first, steps, wait, None)


def load_slot(
  memory: Memory,
  step: jax.Array,
  windows: Sequence[tuple[Any, Any]],
  problem: Problem,
) -> None:
  """Loads one step, when its slot is free.

  Args:
    memory: The refs.
    step: [] int32, steps before.
    windows: Of lhs, rhs and their scales: indices, and how a pair divides them.
    problem: What is computed.
  """
  await_empty(memory, step, problem)
  slot = lax.rem(step, jnp.int32(problem.tile.stages))
  for source, target, (window, partition) in zip(
    memory.sources, memory.slots, windows, strict=True
  ):
    paired: dict[str, Any] = {}
    if problem.tile.ctas > 1:
      paired = dict(collective_axes=memory_lib.PAIR, leader_tracked=partition)
    plgpu.copy_gmem_to_smem(
      source.at[window], target.at[slot], memory.full.at[slot], **paired
    )


def scale_columns(memory: Memory, slot: int, problem: Problem):
  """The columns of a slot's scales: of lhs and of rhs.

  Columns of 128 rows are parts of one allocation, which is rounded up; those of
  256 rows cannot be sliced and are an allocation each.
  """
  lhs, rhs = memory.scales
  part = (slice(None), pl.ds(4 * slot, 4))
  return lhs.at[part], rhs.at[part] if problem.tile.rhs == 128 else rhs[slot]


def previous_turn(memory: Memory, turn: jax.Array, problem: Problem) -> None:
  """Waits until the tile whose columns ``turn`` overwrites has been read."""
  before = turn - problem.tile.lag

  @pl.when(before >= 0)
  def _():
    slot = lax.rem(before, jnp.int32(problem.tile.accumulators))
    plgpu.barrier_wait(memory.free.at[slot])


def drain_turns(memory: Memory, turns: jax.Array, problem: Problem) -> None:
  """Waits until the last tiles have been read, in both CTAs."""
  for i in range(problem.tile.lag):
    previous_turn(memory, turns + i, problem)


def accumulator(memory: Memory, turn: jax.Array, problem: Problem):
  """The sums of a tile, [128, rhs] float32 in tensor memory; which they are."""
  tile = problem.tile
  if tile.accumulators == 1:
    return memory.sums, jnp.int32(0)
  slot = lax.rem(turn, jnp.int32(tile.accumulators))
  first = slot * (tile.rhs - tile.shared)
  return memory.sums.at[:, pl.ds(first, tile.rhs)], slot


def multiply_slot(
  memory: Memory, slot: int, sums: Any, k: jax.Array, problem: Problem
) -> None:
  """Issues the MMAs of one slot; ``k`` counts the steps of the tile."""
  axis = memory_lib.PAIR if problem.tile.ctas > 1 else None
  lhs, rhs, lhs_scale, rhs_scale = (x.at[slot] for x in memory.slots)
  lhs_across, rhs_across = problem.across
  columns = scale_columns(memory, slot, problem)
  for source, target in zip((lhs_scale, rhs_scale), columns, strict=True):
    atoms = source.reshape(source.shape[0], 1, 32, 16)
    plgpu.async_copy_scales_to_tmem(atoms, target, collective_axis=axis)
  plgpu.tcgen05_mma(
    sums,
    lhs.transpose((1, 0)) if lhs_across else lhs,
    rhs if rhs_across else rhs.transpose((1, 0)),
    memory.empty.at[slot],
    a_scale=columns[0],
    b_scale=columns[1],
    accumulate=k > 0,
    collective_axis=axis,
  )


def multiply_tile(memory: Memory, tile: Tile, problem: Problem) -> None:
  """Multiplies a tile that has steps."""
  axis = memory_lib.PAIR if problem.tile.ctas > 1 else None
  stages = problem.tile.stages
  previous_turn(memory, tile.turn, problem)
  sums, turn = accumulator(memory, tile.turn, problem)

  def step(k, _):
    slot = lax.rem(tile.before + k, jnp.int32(stages))
    plgpu.barrier_wait(memory.full.at[slot])
    for i in range(stages):
      pl.when(slot == i)(lambda i=i: multiply_slot(memory, i, sums, k, problem))

  lax.fori_loop(0, tile.steps, step, None)
  plgpu.tcgen05_commit_arrive(memory.done.at[turn], collective_axis=axis)


def await_sums(
  memory: Memory, tile: Tile, member: jax.Array, problem: Problem
) -> None:
  """Store role: waits for a tile's sums; ``member`` is the CTA in its pair."""
  _, turn = accumulator(memory, tile.turn, problem)
  plgpu.barrier_wait(memory.done.at[turn])
  pl.when(member > 0)(lambda: previous_turn(memory, tile.turn, problem))


def chunk_order(turn: jax.Array, i: int, problem: Problem) -> jax.Array:
  """Which chunk of columns is stored as the i-th of a tile.

  The ones that both accumulators hold first: the last of the first accumulator,
  the first of the second.
  """
  last = problem.chunks - 1
  if not problem.tile.shared:
    return jnp.int32(i)
  return jnp.where(turn == 0, last - i, i)


def release_after(problem: Problem) -> int:
  """The chunk after whose load another tile may overwrite what it must."""
  if problem.tile.shared:
    return problem.tile.shared // problem.chunk - 1
  return problem.chunks - 1


def fetch(memory: Memory, where: Any, i: int, problem: Problem) -> None:
  """Starts to load what the i-th chunk of a tile is added to, if anything."""
  buffers = problem.tile.buffers
  if not problem.accumulate:
    return
  plgpu.wait_smem_to_gmem(buffers - buffers // 2, wait_read_only=True)
  slot = i % buffers
  plgpu.copy_gmem_to_smem(
    memory.accumulate.at[where], memory.chunks.at[slot], memory.loaded.at[slot]
  )


def store_chunk(memory: Memory, value, where, i: int, problem: Problem) -> None:
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


def store_sums(
  memory: Memory, tile: Tile, window: Window, problem: Problem
) -> None:
  """Stores a tile's sums, chunk by chunk; gives them up when they are read."""
  sums, turn = accumulator(memory, tile.turn, problem)
  ahead = problem.tile.buffers // 2
  order = [chunk_order(turn, i, problem) for i in range(problem.chunks)]
  for i, chunk in enumerate(order):
    columns = pl.ds(chunk * problem.chunk, problem.chunk)
    value = plgpu.async_load_tmem(sums.at[:, columns])
    if i == release_after(problem):
      plgpu.wait_load_tmem()
      plgpu.barrier_arrive(memory.free.at[turn])
    store_chunk(memory, value, window(chunk), i, problem)
    if i + ahead < problem.chunks:
      fetch(memory, window(order[i + ahead]), i + ahead, problem)
  plgpu.wait_load_tmem()
