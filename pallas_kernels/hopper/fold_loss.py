"""What folding costs an array: how many of its numbers, and how much.

    y = fold(x),  one scale for each row: the largest S of its blocks

The error of a number is at most half the smallest fp8 number in units of
2^(S - 127) (`reference.fold`). That is nothing against the row's largest, but a
block far below it may lose more than its own rounding to fp8 had cost. These
numbers are counted here, so that a recipe that folds can be watched.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import mxfp8, reference

MxArray = mxfp8.MxArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FoldLoss:
  """Counts over all numbers of an array; NaN counts in none.

  Attributes:
    changed: [] int32, numbers that are not the same after folding.
    lost: [] int32, of these, numbers off by more than their rounding to fp8 may
      have cost: 2^-4 of the number (e4m3), 2^-3 (e5m2).
  """

  changed: jax.Array
  lost: jax.Array


def fold_loss(x: MxArray) -> FoldLoss:
  """Counts what `reference.fold` changes.

  Numbers are compared in units of 2^(S - 127), where both fit float32.

  Args:
    x: 1x32 blocks along any axis.
  """
  folded = reference.fold(x)
  scale = x.element_scales().astype(jnp.int32)
  shift = scale - folded.element_scales().astype(jnp.int32)
  shift = jnp.maximum(shift, -100)  # nothing is left of a number by then
  power = jax.lax.bitcast_convert_type((shift + 127) << 23, jnp.float32)
  before = x.data.astype(jnp.float32) * power
  error = jnp.abs(folded.data.astype(jnp.float32) - before)
  rounding = 2.0 ** -(jnp.finfo(x.data.dtype).nmant + 1)
  return FoldLoss(
    changed=jnp.sum(error > 0, dtype=jnp.int32),
    lost=jnp.sum(error > rounding * jnp.abs(before), dtype=jnp.int32),
  )
