"""How a memory-bound kernel walks its tiles: a ring of loads, several CTAs.

CTA n takes the tiles n, n + ctas, n + 2 ctas, ... of a grid, the last axis
fastest. Each CTA holds `stages` input tiles, loads in flight included:

    load 0 .. stages - 1
    for each of its tiles:   prefetch next | wait, compute, refill slot, store

With several warpgroups a tile is as many parts side by side along the last
axis, one for each warpgroup. The first one loads all parts at once, so that
memory sees long rows, and refills a slot when all have read it.

The kernel gives the pieces as functions. All of them run in every thread.
"""

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic

Position = tuple[jax.Array, ...]

AXIS = "cta"  # the name of the grid axis
WARPGROUP = "warpgroup"  # the name of the thread axis, if there are several


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
  warpgroups: int = 1,
  released: Any = None,
) -> None:
  """Runs ``process`` on every tile of this CTA.

  Slots: with several warpgroups the ring has ``stages * warpgroups`` of them,
  part p of stage s in slot ``s * warpgroups + p``.

  Args:
    grid: Tiles along each axis; static.
    ctas: CTAs of the launch, at most the number of tiles.
    stages: Tiles that the ring holds.
    load: ``load(position, slot)`` starts the loads of a part into a slot.
    process: ``process(position, slot, refill, ahead)`` waits for the slot,
      computes, calls ``refill()`` once when every thread of the warpgroup has
      read the slot (after a barrier), and stores.
    prefetch: ``prefetch(position)`` reads into registers what the part will
      need, one tile ahead; ``process`` gets it as ``ahead``.
    warpgroups: Warpgroups of the CTA, parts of a tile. Positions count parts
      along the last axis.
    released: With several warpgroups, `release_barriers`.
  """
  cta = lax.axis_index(AXIS)
  mine = lax.axis_index(WARPGROUP) if warpgroups > 1 else jnp.int32(0)
  last = lax.div(math.prod(grid) - 1 - cta, jnp.int32(ctas))

  def position(step: jax.Array, part: Any) -> Position:
    tile, index = cta + step * ctas, []
    for size in reversed(grid):
      index.append(lax.rem(tile, jnp.int32(size)))
      tile = lax.div(tile, jnp.int32(size))
    index[0] = index[0] * warpgroups + part
    return tuple(reversed(index))

  def load_step(step: jax.Array) -> None:
    first = lax.rem(step, jnp.int32(stages)) * warpgroups
    for part in range(warpgroups):
      load(position(step, part), first + part)

  def refill(step: jax.Array) -> None:
    def load_next() -> None:
      pl.when(step + stages <= last)(lambda: load_step(step + stages))

    if warpgroups == 1:
      load_next()
      return
    stage = released.at[lax.rem(step, jnp.int32(stages))]
    plgpu.barrier_arrive(stage)

    @pl.when(mine == 0)
    def _():
      plgpu.barrier_wait(stage)
      load_next()

  def body(step: jax.Array, ahead: Any) -> Any:
    following = prefetch(position(jnp.minimum(step + 1, last), mine))
    slot = lax.rem(step, jnp.int32(stages)) * warpgroups + mine
    refill_step = functools.partial(refill, step)
    process(position(step, mine), slot, refill_step, ahead)
    return following

  for step in range(stages):
    needed = step <= last
    if warpgroups > 1:
      needed = jnp.logical_and(needed, mine == 0)
    pl.when(needed)(functools.partial(load_step, jnp.int32(step)))
  lax.fori_loop(0, last + 1, body, prefetch(position(jnp.int32(0), mine)))


def release_barriers(stages: int, warpgroups: int) -> plgpu.Barrier:
  """Barriers by which the warpgroups give a stage back to the first one."""
  return plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages)


def launch(ctas: int, warpgroups: int = 1) -> dict[str, Any]:
  """Keyword arguments of ``plgpu.kernel`` that say how much is launched."""
  grid = {"grid": (ctas,), "grid_names": (AXIS,)}
  if warpgroups > 1:
    grid |= {"num_threads": warpgroups, "thread_name": WARPGROUP}
  return grid
