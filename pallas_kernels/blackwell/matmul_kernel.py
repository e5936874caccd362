"""The body of Blackwell's grouped matmul: what a CTA, or a pair, does.

    load      128 of K a step: rows of lhs, columns of rhs
    multiply  each step into the sums
    store     the sums of rows that are the group's

`roles` has the roles, their barriers and phases. A pair covers 256 rows of one
group. Where only the first 128 are the group's, the second CTA computes rows of
somebody else and stores nothing: it touches no buffer, because waiting for a
store counts stores, and one that was left out would let a later chunk overwrite
an earlier one that is still being read.

Edges need no care: TMA loads zeros past K or N (data; atoms of scales are
whole) and drops stores past N.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.blackwell import memory as memory_lib
from pallas_kernels.blackwell import roles
from pallas_kernels.blackwell.matmul_problem import Problem
from pallas_kernels.blackwell.memory import DEPTH, LANES, Memory


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
  """A tile of the result; indices are [] int32.

  Attributes:
    group: Its group.
    block: Its first 128 rows.
    valid: CTAs of the pair whose rows belong to the group, 1 or 2.
    column: Tile along N.
    before: Steps of the tiles before, of this cluster.
    steps: Its steps, the same for all tiles.
    turn: Tiles before, of this cluster.
  """

  group: jax.Array
  block: jax.Array
  valid: jax.Array
  column: jax.Array
  before: jax.Array
  steps: int
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
        steps=problem.steps,
        turn=turn,
      )
    )
    return turn + 1

  return plgpu.nd_loop(
    (grid[0] * grid[1],),
    collective_axes=memory_lib.CLUSTERS,
    init_carry=jnp.int32(0),
  )(visit)


def load_step(
  memory: Memory, tile: Tile, k: jax.Array, problem: Problem
) -> None:
  """Loads one step of a tile, when its slot is free."""
  schedule, part = problem.tile, plgpu.CopyPartition.PARTITIONED
  depth = pl.ds(k * DEPTH, DEPTH)
  columns = pl.ds(tile.column * schedule.rhs, schedule.rhs)
  atoms = schedule.rhs // LANES
  rhs = (tile.group, depth, columns), part(1)
  if problem.turned:
    rhs = (tile.group, columns, depth), part(0)
  windows = (
    ((pl.ds(tile.block * LANES, schedule.lhs), depth), part(0)),
    rhs,
    ((pl.ds(tile.block, schedule.ctas), pl.ds(k, 1)), part(0)),
    (
      (tile.group, pl.ds(tile.column * atoms, atoms), pl.ds(k, 1)),
      plgpu.CopyPartition.REPLICATED,
    ),
  )
  roles.load_slot(memory, tile.before + k, windows, problem)


def load_tiles(memory: Memory, problem: Problem) -> None:
  """The load role: a warp of every CTA."""

  def load_tile(tile):
    def step(k, _):
      load_step(memory, tile, k, problem)

    lax.fori_loop(0, problem.steps, step, None)

  tiles = each_tile(load_tile, memory.schedule, problem)
  roles.drain_slots(memory, tiles * problem.steps, problem)


def multiply_tiles(memory: Memory, problem: Problem) -> None:
  """The multiply role: a warp of the leader."""

  def multiply_tile(tile):
    roles.multiply_tile(memory, tile, problem)

  turns = each_tile(multiply_tile, memory.schedule, problem)
  roles.drain_turns(memory, turns, problem)


def store_rows(
  memory: Memory, tile: Tile, member: jax.Array, problem: Problem
) -> None:
  """Stores the 128 rows of one CTA, chunk by chunk."""
  rows = pl.ds((tile.block + member) * LANES, LANES)

  def window(chunk):
    first = tile.column * problem.tile.rhs + chunk * problem.chunk
    return rows, pl.ds(first, problem.chunk)

  roles.store_sums(memory, tile, window, problem)


def pass_over(
  memory: Memory, tile: Tile, member: jax.Array, problem: Problem
) -> None:
  """Gives up the sums of rows that are not the group's; touches no buffer."""
  del member
  _, turn = roles.accumulator(memory, tile.turn, problem)
  plgpu.barrier_arrive(memory.free.at[turn])


def store_tiles(memory: Memory, problem: Problem) -> None:
  """The store role: a warpgroup of every CTA."""
  member = lax.axis_index(memory_lib.PAIR)

  def store_tile(tile):
    roles.await_sums(memory, tile, member, problem)
    pl.when(member < tile.valid)(
      lambda: store_rows(memory, tile, member, problem)
    )
    pl.when(member >= tile.valid)(
      lambda: pass_over(memory, tile, member, problem)
    )

  turns = each_tile(store_tile, memory.schedule, problem)
  pl.when(member > 0)(lambda: roles.drain_turns(memory, turns, problem))
  plgpu.wait_smem_to_gmem(0)


def kernel(*refs, problem: Problem):
  """The body: `matmul_problem.schedule`, sources, result, scratch."""
  table, count, *refs = refs
  memory = memory_lib.take((table, count), refs, problem)
  memory_lib.run_roles(
    lambda: load_tiles(memory, problem),
    lambda: multiply_tiles(memory, problem),
    lambda: store_tiles(memory, problem),
  )
