"""The body of Blackwell's grouped wgrad: what a CTA, or a pair, does.

    load      acquire slot | TMA lhs, rhs and their scales       -> full[slot]
    multiply  await accumulator | for each 128 rows of the group:
              await slot | scales to TMEM | block-scaled MMA     -> empty[slot]
              all issued                                         -> done[turn]
    store     await done | for each chunk of columns: TMEM load | plus what was
              there | shared memory | TMA store                  -> free[turn]

The roles are a warp, a warp and a warpgroup. In a pair each CTA loads its half
of the columns of lhs and of rhs; the first one, the leader, multiplies for both
and counts the loads of both; each stores its half of the rows of the result.

Phases. Each role counts the steps of all its tiles in a number carried from
tile to tile, so that a slot's phase is right however many steps a group has. A
barrier's phase is known only to a waiter that sees each of them: ``done`` and
``free`` have a barrier for each accumulator, and no role can get two phases
behind on one. ``free`` is awaited by the multiplying warp of the leader; in the
other CTA the store role sees it, after ``done``, where it has long happened.

Scales have columns of tensor memory for each slot: the tensor core orders a
copy before the MMA that reads it, but not the MMA before the next copy. Where
accumulators overlap, the columns they share are read first.

Edges need no care: TMA loads zeros past K or N (data and scales) and drops
stores past them. `grouped_wgrad` is the entry point.
"""

from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.blackwell import wgrad_roles, wgrad_shared, wgrad_store
from pallas_kernels.blackwell.wgrad_problem import Problem

PAIR = wgrad_shared.PAIR
WARPGROUP = "warpgroup"  # the thread axis
LOAD, MULTIPLY = 0, 1  # warps of warpgroup 0
STORE = 1  # a warpgroup


def kernel(*refs, problem: Problem):
  """The body: schedule, sources, what is added to, result, scratch."""
  schedule, *refs = refs
  sources, refs = refs[:4], refs[4:]
  accumulate = refs.pop(0) if problem.accumulate else None
  out, slots, chunks, (sums, *scales), barriers = refs
  full, empty, done, free, loaded = barriers
  memory = wgrad_shared.Memory(
    schedule=schedule,
    sources=tuple(sources),
    accumulate=accumulate,
    out=out,
    slots=tuple(slots),
    chunks=chunks,
    sums=sums,
    scales=tuple(scales),
    full=full,
    empty=empty,
    done=done,
    free=free,
    loaded=loaded,
  )
  warpgroup, member = lax.axis_index(WARPGROUP), lax.axis_index(PAIR)

  def warps(warp):
    pl.when(warp == LOAD)(lambda: wgrad_roles.load_tiles(memory, problem))
    leads = (warp == MULTIPLY) & (member == 0)
    pl.when(leads)(lambda: wgrad_roles.multiply_tiles(memory, problem))

  pl.when(warpgroup == 0)(lambda: plgpu.warp_map(warps))
  pl.when(warpgroup == STORE)(lambda: wgrad_store.store_tiles(memory, problem))


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
    "grid_names": (wgrad_shared.CLUSTERS,),
    "cluster": (problem.tile.ctas,),
    "cluster_names": (PAIR,),
    "num_threads": 2,
    "thread_name": WARPGROUP,
    "kernel_name": "blackwell_grouped_wgrad",  # in profiles
    "compiler_params": mosaic.compiler_params(),
  }
