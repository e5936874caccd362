"""Permute: from token order to expert order and back, on one device.

    slot  s = t * top_k + j   the j-th expert of token t
    order                     slots sorted by expert id, ties in slot order;
                              slots without an expert (id -1) come last

A permutation of rows commutes with 1x32 quantization exactly, so a token is
quantized once and its top_k rows are copies of its bytes.

Legend: T tokens, k top_k, S = T * k slots, E experts.
"""

import dataclasses

import jax
import jax.numpy as jnp

from pallas_kernels import mxfp8

MxArray = mxfp8.MxArray


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class SlotOrder:
  """The slots of one device in expert order.

  Attributes:
    order: [S] int32, slot at each place.
    place: [S] int32, place of each slot; the inverse of `order`.
    counts: [E] int32, slots of each expert.
  """

  order: jax.Array
  place: jax.Array
  counts: jax.Array


def sort_slots(experts: jax.Array, num_experts: int) -> SlotOrder:
  """Sorts slots by expert, stable.

  Args:
    experts: [T, k] int32 expert ids, -1 for none.
    num_experts: E.
  """
  flat = experts.reshape(-1)
  key = jnp.where(flat < 0, num_experts, flat)
  order = jnp.argsort(key, stable=True).astype(jnp.int32)
  slots = jnp.arange(flat.shape[0], dtype=jnp.int32)
  place = jnp.zeros_like(slots).at[order].set(slots, unique_indices=True)
  counts = jnp.zeros(num_experts + 1, jnp.int32).at[key].add(1)
  return SlotOrder(order, place, counts[:num_experts])


def combine(rows: jax.Array | MxArray) -> jax.Array:
  """The sum over a token's rows, in float32 and in the order of its slots.

  The weights are in the rows already; the order is fixed, so equal inputs
  give equal bits.

  Args:
    rows: [T, k, d] bf16 or MxArray; zeros where a slot has no row.

  Returns:
    [T, d] float32.
  """
  if isinstance(rows, MxArray):
    rows = rows.dequantize(jnp.bfloat16)
  total = rows[:, 0].astype(jnp.float32)
  for j in range(1, rows.shape[1]):
    total = total + rows[:, j].astype(jnp.float32)
  return total
