"""How Hopper's wgrad kernels are launched, and in which order they work."""

import functools
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import groups, stream
from pallas_kernels.hopper import common, wgrad_kernel


def order_of_work(layout: groups.GroupLayout, step: int) -> jax.Array:
  """[3, G] int32: groups by falling size, their first rows, their steps.

  Sorted by counting, which XLA fuses to one small kernel.

  Args:
    layout: Of the rows.
    step: Rows of a step.
  """
  steps = -(-layout.sizes // step)
  group = jnp.arange(layout.groups, dtype=jnp.int32)
  longer = steps[None, :] > steps[:, None]
  equal = steps[None, :] == steps[:, None]
  earlier = longer | (equal & (group[None, :] < group[:, None]))
  place = jnp.sum(earlier, axis=1, dtype=jnp.int32)
  chosen = place[None, :] == group[:, None]  # [place, group]
  rows = jnp.stack([group, layout.starts, steps])
  picked = jnp.where(chosen[None], rows[:, None, :], 0)
  return jnp.sum(picked, axis=2, dtype=jnp.int32)


def call(
  problem: wgrad_kernel.Problem,
  layout: groups.GroupLayout,
  arrays: tuple[jax.Array, ...],
  interpret: Any,
) -> jax.Array:
  """Runs the kernel.

  Args:
    problem: What to compute.
    layout: Of the rows.
    arrays: lhs, rhs, their scales if folded, what to add to if anything.
    interpret: Interpret parameters; False compiles.

  Returns:
    [G, K, N].
  """
  shape = (problem.groups, problem.depth, problem.width)
  kernel = plgpu.kernel(
    functools.partial(wgrad_kernel.kernel, problem=problem),
    out_type=jax.ShapeDtypeStruct(shape, problem.out_dtype),
    scratch_types=problem.scratch(),
    **common.launch(stream.cta_count(problem.tiles, 1, interpret)),
    interpret=interpret,
  )
  return kernel(order_of_work(layout, problem.step), *arrays)
