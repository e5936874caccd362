"""How a memory-bound kernel walks its tiles: a ring of loads, several CTAs.

CTA n takes the tiles n, n + ctas, n + 2 ctas, ... of a grid, the last axis
fastest. Each CTA is one warpgroup and holds `stages` input tiles, loads in
flight included:

    load 0 .. stages - 1
    for each of its tiles:   prefetch next | wait, compute, refill slot, store

The kernel gives the parts as functions. All of them run in every thread.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
import jax.numpy as jnp

from pallas_kernels import mosaic

Position = tuple[jax.Array, ...]

AXIS = "cta"  # the name of the grid axis


def cta_count(tiles: int, ctas_per_sm: int, interpret: Any) -> int:
  """CTAs of the grid: those that fit the device, but at most one a tile."""
  sms = 1 if interpret else mosaic.sm_count()
  return min(tiles, sms * ctas_per_sm)


def walk(
  grid: tuple[int, ...],
  *,
  ctas: int,
  stages: int,
  load: Callable[[Position, jax.Array], None],
  process: Callable[..., None],
  prefetch: Callable[[Position], Any] = lambda _: None,
) -> None:
  """Runs ``process`` on every tile of this CTA.

  Args:
    grid: Tiles along each axis; static.
    ctas: CTAs of the launch, at most the number of tiles.
    stages: Slots of the ring.
    load: ``load(position, slot)`` starts the loads of a tile into a slot.
    process: ``process(position, slot, refill, ahead)`` waits for the slot,
      computes, calls ``refill()`` once when every thread has read the slot
      (after a barrier), and stores.
    prefetch: ``prefetch(position)`` reads into registers what the tile will
      need, one tile ahead; ``process`` gets it as ``ahead``.
  """
  cta = lax.axis_index(AXIS)
  last = lax.div(math.prod(grid) - 1 - cta, jnp.int32(ctas))

  def position(step: jax.Array) -> Position:
    tile, index = cta + step * ctas, []
    for size in reversed(grid):
      index.append(lax.rem(tile, jnp.int32(size)))
      tile = lax.div(tile, jnp.int32(size))
    return tuple(reversed(index))

  def load_step(step: jax.Array) -> None:
    load(position(step), lax.rem(step, jnp.int32(stages)))

  def refill(step: jax.Array) -> None:
    pl.when(step + stages <= last)(lambda: load_step(step + stages))

  def body(step: jax.Array, ahead: Any) -> Any:
    following = prefetch(position(jnp.minimum(step + 1, last)))
    slot = lax.rem(step, jnp.int32(stages))
    process(position(step), slot, functools.partial(refill, step), ahead)
    return following

  for step in range(stages):
    pl.when(step <= last)(functools.partial(load_step, jnp.int32(step)))
  lax.fori_loop(0, last + 1, body, prefetch(position(jnp.int32(0))))
