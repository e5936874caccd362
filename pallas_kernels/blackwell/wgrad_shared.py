"""What the roles of Blackwell's grouped wgrad share: refs, tiles, order."""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels.blackwell.wgrad_problem import Problem, Tiled

PAIR = "cta"  # the cluster axis
CLUSTERS = "cluster"  # the grid axis


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
  """The refs of a CTA.

  Attributes:
    schedule: [3, G] int32: groups in the order of work, which group, its first
      tile of 128 rows, its tiles.
    sources: lhs, rhs, scales of lhs, scales of rhs, in global memory.
    accumulate: What is added to, [G, K, N] float32, or None.
    out: [G, K, N].
    slots: As ``sources``, in shared memory, a slot first.
    chunks: [buffers, 128, columns of a chunk] of the result.
    sums: Accumulators in tensor memory.
    scales: Scales of lhs and of rhs in tensor memory, see `scale_columns`.
    full: Barriers of loaded slots.
    empty: Barriers of slots that were multiplied.
    done: Barriers of finished accumulators.
    free: Barriers of accumulators that were read.
    loaded: Barriers of chunks of ``accumulate``.
  """

  schedule: Any
  sources: tuple[Any, ...]
  accumulate: Any
  out: Any
  slots: tuple[Any, ...]
  chunks: Any
  sums: Any
  scales: tuple[Any, Any]
  full: Any
  empty: Any
  done: Any
  free: Any
  loaded: Any


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
    collective_axes=CLUSTERS,
    init_carry=(jnp.int32(0), jnp.int32(0)),
  )(visit)


def previous_turn(memory: Memory, turn: jax.Array, problem: Tiled) -> None:
  """Waits until the tile whose columns ``turn`` overwrites has been read."""
  before = turn - problem.tile.lag

  @pl.when(before >= 0)
  def _():
    slot = lax.rem(before, jnp.int32(problem.tile.accumulators))
    plgpu.barrier_wait(memory.free.at[slot])


def drain_turns(memory: Memory, turns: jax.Array, problem: Tiled) -> None:
  """Waits until the last tiles have been read, in both CTAs."""
  for i in range(problem.tile.lag):
    previous_turn(memory, turns + i, problem)


def accumulator(memory: Memory, turn: jax.Array, problem: Tiled):
  """The sums of a tile, [128, rhs] float32 in tensor memory."""
  tile = problem.tile
  if tile.accumulators == 1:
    return memory.sums, jnp.int32(0)
  slot = lax.rem(turn, jnp.int32(tile.accumulators))
  first = slot * (tile.rhs - tile.shared)
  return memory.sums.at[:, pl.ds(first, tile.rhs)], slot
