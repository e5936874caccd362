"""How Hopper's wgrad kernels are launched."""

import functools
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import groups, stream
from pallas_kernels.hopper import common, wgrad_kernel


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
  return kernel(layout.by_size(problem.step), *arrays)
