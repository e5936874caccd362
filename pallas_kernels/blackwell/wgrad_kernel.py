"""The body of Blackwell's grouped wgrad: what a CTA, or a pair, does.

    load      the group's rows, 128 a step, of some columns of lhs and of rhs
    multiply  each step into the sums; nothing where the group has no rows
    store     the sums plus what was there; zeros where the group has no rows

`roles` has the roles, their barriers and phases. Edges need no care: TMA loads
zeros past K or N (data and scales) and drops stores past them. `grouped_wgrad`
is the entry point.
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
from pallas_kernels.blackwell.memory import DEPTH, LANES, Memory
from pallas_kernels.blackwell.wgrad_problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
  """A tile of the result, as `each_tile` gives it; indices are [] int32.

  Attributes:
    group: Its group.
    start: First tile of 128 rows of the group.
    steps: Tiles of 128 rows of the group; 0 if it has none.
    row: Tile along K.
    column: Tile along N.
    before: Steps of the tiles before, of this cluster.
    turn: Tiles with steps before, of this cluster.
  """

  group: jax.Array
  start: jax.Array
  steps: jax.Array
  row: jax.Array
  column: jax.Array
  before: jax.Array
  turn: jax.Array


def each_tile(
  body: Callable[[Tile], None], schedule: Any, problem: Problem
) -> tuple[jax.Array, jax.Array]:
  """Calls ``body(tile)`` for each `Tile` of this cluster.

  Returns:
    [] int32 each: steps, and tiles that had any.
  """
  down, across = problem.grid

  def visit(info, carry):
    before, turn = carry
    (index,) = info.index
    place = lax.div(index, jnp.int32(down * across))
    inside = lax.rem(index, jnp.int32(down * across))
    order = problem.tile.along, problem.tile.band
    row, column = plgpu.planar_snake(inside, problem.grid, *order)
    tile = Tile(
      group=schedule[0, place],
      start=schedule[1, place],
      steps=schedule[2, place],
      row=row,
      column=column,
      before=before,
      turn=turn,
    )
    body(tile)
    return before + tile.steps, turn + jnp.minimum(tile.steps, 1)

  return plgpu.nd_loop(
    (problem.tiles,),
    collective_axes=memory_lib.CLUSTERS,
    init_carry=(jnp.int32(0), jnp.int32(0)),
  )(visit)


def load_tiles(memory: Memory, problem: Problem) -> None:
  """The load role: a warp of every CTA."""
  schedule, part = problem.tile, plgpu.CopyPartition.PARTITIONED

  def load_step(k, _, tile):
    block = tile.start + k
    rows = pl.ds(block * DEPTH, DEPTH)
    data, scales = [], []
    for index, size, division in (
      (tile.row, schedule.lhs, part(0)),
      (tile.column, schedule.rhs, plgpu.CopyPartition.REPLICATED),
    ):
      columns, atoms = pl.ds(index * size, size), size // LANES
      if schedule.transposed:
        data.append(((columns, rows), part(0)))
      else:
        data.append(((rows, columns), part(1)))
      window = (pl.ds(index * atoms, atoms), pl.ds(block, 1))
      scales.append((window, division))
    roles.load_slot(memory, tile.before + k, data + scales, problem)

  def load_tile(tile):
    def step(k, carry):
      return load_step(k, carry, tile)

    lax.fori_loop(0, tile.steps, step, None)

  steps, _ = each_tile(load_tile, memory.schedule, problem)
  roles.drain_slots(memory, steps, problem)


def multiply_tiles(memory: Memory, problem: Problem) -> None:
  """The multiply role: a warp of the leader."""

  def visit(tile):
    pl.when(tile.steps > 0)(lambda: roles.multiply_tile(memory, tile, problem))

  _, turns = each_tile(visit, memory.schedule, problem)
  roles.drain_turns(memory, turns, problem)


def window(tile: Tile, member, chunk, problem: Problem):
  """Where a chunk of a tile lies in the result."""
  row = (tile.row * problem.tile.ctas + member) * LANES
  column = tile.column * problem.tile.rhs + chunk * problem.chunk
  return tile.group, pl.ds(row, LANES), pl.ds(column, problem.chunk)


def store_tile(memory: Memory, tile: Tile, member, problem: Problem) -> None:
  """Stores a tile with steps; ``member`` is the CTA's place in its pair."""
  _, turn = roles.accumulator(memory, tile.turn, problem)

  def where(chunk):
    return window(tile, member, chunk, problem)

  for i in range(problem.tile.buffers // 2):
    chunk = roles.chunk_order(turn, i, problem)
    roles.fetch(memory, where(chunk), i, problem)
  roles.await_sums(memory, tile, member, problem)
  roles.store_sums(memory, tile, where, problem)


def store_zeros(memory: Memory, tile: Tile, member, problem: Problem) -> None:
  """Stores a tile of a group without rows: zeros, or what was there."""
  ahead = problem.tile.buffers // 2
  zeros = jnp.zeros((LANES, problem.chunk), jnp.float32)
  zeros = plgpu.layout_cast(zeros, plgpu.Layout.TCGEN05)
  where = [window(tile, member, i, problem) for i in range(problem.chunks)]
  for i in range(ahead):
    roles.fetch(memory, where[i], i, problem)
  for i in range(problem.chunks):
    roles.store_chunk(memory, zeros, where[i], i, problem)
    if i + ahead < problem.chunks:
      roles.fetch(memory, where[i + ahead], i + ahead, problem)


def store_tiles(memory: Memory, problem: Problem) -> None:
  """The store role: a warpgroup of every CTA."""
  member = lax.axis_index(memory_lib.PAIR)

  def visit(tile):
    has_rows, no_rows = tile.steps > 0, tile.steps == 0
    pl.when(has_rows)(lambda: store_tile(memory, tile, member, problem))
    pl.when(no_rows)(lambda: store_zeros(memory, tile, member, problem))

  _, turns = each_tile(visit, memory.schedule, problem)
  pl.when(member > 0)(lambda: roles.drain_turns(memory, turns, problem))
  plgpu.wait_smem_to_gmem(0)


def kernel(*refs, problem: Problem):
  """The body: schedule, sources, what is added to, result, scratch.

  The schedule is [3, G] int32: groups in the order of work, which group, its
  first tile of 128 rows, its tiles.
  """
  schedule, *refs = refs
  memory = memory_lib.take(schedule, refs, problem)
  memory_lib.run_roles(
    lambda: load_tiles(memory, problem),
    lambda: multiply_tiles(memory, problem),
    lambda: store_tiles(memory, problem),
  )
