"""The body of Blackwell's grouped matmul: what a CTA, or a pair, does.

    load      acquire slot | TMA lhs, rhs and their scales       -> full[slot]
    multiply  await accumulator | for each 128 of K:
              await slot | scales to TMEM | block-scaled MMA     -> empty[slot]
              all issued                                         -> done[turn]
    store     await done | for each chunk of columns: TMEM load | shared memory
              | TMA store                                        -> free[turn]

The roles are a warp, a warp and a warpgroup. In a pair each CTA loads its half
of the rows of lhs and of the columns of rhs; the first one, the leader,
multiplies for both and counts the loads of both; each stores its rows.

A pair covers 256 rows of one group. Where only the first 128 are the group's,
the second CTA computes rows of somebody else and stores nothing: it touches no
buffer, because waiting for a store counts stores, and one that was left out
would let a later chunk overwrite an earlier one that is still being read.

Phases, columns of scales and overlapping accumulators are as in
`wgrad_kernel`. Edges need no care: TMA loads zeros past K or N (data; atoms of
scales are whole) and drops stores past N.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.blackwell import (
  matmul_problem,
  wgrad_roles,
  wgrad_shared,
  wgrad_store,
)
from pallas_kernels.blackwell.matmul_problem import Problem

DEPTH, LANES = matmul_problem.DEPTH, matmul_problem.LANES
PAIR, CLUSTERS = wgrad_shared.PAIR, wgrad_shared.CLUSTERS
WARPGROUP = "warpgroup"  # the thread axis
LOAD, MULTIPLY = 0, 1  # warps of warpgroup 0
STORE = 1  # a warpgroup

Memory = wgrad_shared.Memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
  """A tile of the result; indices are [] int32.

  Attributes:
    group: Its group.
    block: Its first 128 rows.
    valid: CTAs of the pair whose rows belong to the group, 1 or 2.
    column: Tile along N.
    before: Steps of the tiles before, of this cluster.
    turn: Tiles before, of this cluster.
  """

  group: jax.Array
  block: jax.Array
  valid: jax.Array
  column: jax.Array
  before: jax.Array
  turn: jax.Array


def each_tile(
  body: Callable[[Tile], None], schedule: tuple[Any, Any], problem: Problem
) -> jax.Array:
  """Calls ``body(tile)`` for each `Tile` of this cluster; returns how many."""
  table, count = schedule
  grid = count[0], problem.across_tiles

  def visit(info, carry):
    turn = carry
    order = problem.tile.along, problem.tile.band
    down, column = plgpu.planar_snake(info.index[0], grid, *order)
    body(
      Tile(
        group=table[0, down],
        block=table[1, down],
        valid=table[2, down],
        column=column,
        before=turn * problem.steps,
        turn=turn,
      )
    )
    return turn + 1

  return plgpu.nd_loop(
    (grid[0] * grid[1],), collective_axes=CLUSTERS, init_carry=jnp.int32(0)
  )(visit)


def load_step(
  memory: Memory, tile: Tile, k: jax.Array, problem: Problem
) -> None:
  """Loads one step of a tile, when its slot is free."""
  step, schedule = tile.before + k, problem.tile
  wgrad_roles.await_empty(memory, step, problem)
  slot = lax.rem(step, jnp.int32(schedule.stages))
  part = plgpu.CopyPartition.PARTITIONED
  depth = pl.ds(k * DEPTH, DEPTH)
  columns = pl.ds(tile.column * schedule.rhs, schedule.rhs)
  atoms = schedule.rhs // LANES
  windows = (
    ((pl.ds(tile.block * LANES, schedule.lhs), depth), part(0)),
    (
      (tile.group, depth, columns) if problem.across
      else (tile.group, columns, depth),
      part(1 if problem.across else 0),
    ),
    ((pl.ds(tile.block, schedule.ctas), pl.ds(k, 1)), part(0)),
    (
      (tile.group, pl.ds(tile.column * atoms, atoms), pl.ds(k, 1)),
      plgpu.CopyPartition.REPLICATED,
    ),
  )  # fmt: skip
  for source, target, (window, partition) in zip(
    memory.sources, memory.slots, windows, strict=True
  ):
    paired: dict[str, Any] = {}
    if schedule.ctas > 1:
      paired = dict(collective_axes=PAIR, leader_tracked=partition)
    plgpu.copy_gmem_to_smem(
      source.at[window], target.at[slot], memory.full.at[slot], **paired
    )


def load_tiles(memory: Memory, problem: Problem) -> None:
  """The load role: a warp of every CTA."""

  def load_tile(tile):
    def step(k, _):
      load_step(memory, tile, k, problem)

    lax.fori_loop(0, problem.steps, step, None)

  tiles = each_tile(load_tile, memory.schedule, problem)
  wgrad_roles.drain_slots(memory, tiles * problem.steps, problem)


def multiply_step(
  memory: Memory, slot: int, sums: Any, k: jax.Array, problem: Problem
) -> None:
  """Issues the MMAs of one slot."""
  axis = PAIR if problem.tile.ctas > 1 else None
  lhs, rhs, lhs_scale, rhs_scale = (x.at[slot] for x in memory.slots)
  columns = wgrad_roles.scale_columns(memory, slot, problem)
  for source, target in zip((lhs_scale, rhs_scale), columns, strict=True):
    atoms = source.reshape(source.shape[0], 1, 32, 16)
    plgpu.async_copy_scales_to_tmem(atoms, target, collective_axis=axis)
  plgpu.tcgen05_mma(
    sums,
    lhs,
    rhs if problem.across else rhs.transpose((1, 0)),
    memory.empty.at[slot],
    a_scale=columns[0],
    b_scale=columns[1],
    accumulate=k > 0,
    collective_axis=axis,
  )


def multiply_tiles(memory: Memory, problem: Problem) -> None:
  """The multiply role: a warp of the leader."""
  axis = PAIR if problem.tile.ctas > 1 else None
  stages = problem.tile.stages

  def multiply_tile(tile):
    wgrad_shared.previous_turn(memory, tile.turn, problem)
    sums, turn = wgrad_shared.accumulator(memory, tile.turn, problem)

    def step(k, _):
      slot = lax.rem(tile.before + k, jnp.int32(stages))
      plgpu.barrier_wait(memory.full.at[slot])
      for i in range(stages):
        pl.when(slot == i)(
          lambda i=i: multiply_step(memory, i, sums, k, problem)
        )

    lax.fori_loop(0, problem.steps, step, None)
    plgpu.tcgen05_commit_arrive(memory.done.at[turn], collective_axis=axis)

  turns = each_tile(multiply_tile, memory.schedule, problem)
  wgrad_shared.drain_turns(memory, turns, problem)


def store_rows(
  memory: Memory, tile: Tile, member: jax.Array, problem: Problem
) -> None:
  """Stores the 128 rows of one CTA, chunk by chunk."""
  sums, turn = wgrad_shared.accumulator(memory, tile.turn, problem)
  rows = pl.ds((tile.block + member) * LANES, LANES)
  for i in range(problem.chunks):
    first = wgrad_store.chunk_order(turn, i, problem) * problem.chunk
    value = plgpu.async_load_tmem(sums.at[:, pl.ds(first, problem.chunk)])
    if i == wgrad_store.release_after(problem):
      plgpu.wait_load_tmem()
      plgpu.barrier_arrive(memory.free.at[turn])
    columns = pl.ds(tile.column * problem.tile.rhs + first, problem.chunk)
    wgrad_store.store_chunk(memory, value, (rows, columns), i, problem)
  plgpu.wait_load_tmem()


def pass_over(
  memory: Memory, tile: Tile, member: jax.Array, problem: Problem
) -> None:
  """Gives up the sums of rows that are not the group's; touches no buffer."""
  del member
  _, turn = wgrad_shared.accumulator(memory, tile.turn, problem)
  plgpu.barrier_arrive(memory.free.at[turn])


def store_tiles(memory: Memory, problem: Problem) -> None:
  """The store role: a warpgroup of every CTA."""
  member = lax.axis_index(PAIR)

  def store_tile(tile):
    _, turn = wgrad_shared.accumulator(memory, tile.turn, problem)
    plgpu.barrier_wait(memory.done.at[turn])
    pl.when(member > 0)(
      lambda: wgrad_shared.previous_turn(memory, tile.turn, problem)
    )
    pl.when(member < tile.valid)(
      lambda: store_rows(memory, tile, member, problem)
    )
    pl.when(member >= tile.valid)(
      lambda: pass_over(memory, tile, member, problem)
    )

  turns = each_tile(store_tile, memory.schedule, problem)
  pl.when(member > 0)(lambda: wgrad_shared.drain_turns(memory, turns, problem))
  plgpu.wait_smem_to_gmem(0)


def kernel(*refs, problem: Problem):
  """The body: schedule, sources, result, scratch."""
  table, count, *refs = refs
  sources, (out, slots, chunks, (sums, *scales), barriers) = refs[:4], refs[4:]
  full, empty, done, free = barriers
  memory = Memory(
    schedule=(table, count),
    sources=tuple(sources),
    accumulate=None,
    out=out,
    slots=tuple(slots),
    chunks=chunks,
    sums=sums,
    scales=tuple(scales),
    full=full,
    empty=empty,
    done=done,
    free=free,
    loaded=None,
  )
  warpgroup, member = lax.axis_index(WARPGROUP), lax.axis_index(PAIR)

  def warps(warp):
    pl.when(warp == LOAD)(lambda: load_tiles(memory, problem))
    leads = (warp == MULTIPLY) & (member == 0)
    pl.when(leads)(lambda: multiply_tiles(memory, problem))

  pl.when(warpgroup == 0)(lambda: plgpu.warp_map(warps))
  pl.when(warpgroup == STORE)(lambda: store_tiles(memory, problem))


def launch(problem: Problem, clusters: int) -> dict[str, Any]:
  """Keyword arguments of ``plgpu.kernel``.

  Args:
    problem: What is computed.
    clusters: CTAs, or pairs, that are resident.
  """
  return {
    "out_type": problem.out_type(),
    "scratch_types": [
      problem.operands(),
      problem.chunk_buffers(),
      problem.tensor_memory(),
      problem.barriers(PAIR),
    ],
    "grid": (clusters,),
    "grid_names": (CLUSTERS,),
    "cluster": (problem.tile.ctas,),
    "cluster_names": (PAIR,),
    "num_threads": 2,
    "thread_name": WARPGROUP,
    "kernel_name": "blackwell_grouped_matmul",  # in profiles
    "compiler_params": mosaic.compiler_params(),
  }
