"""Slots in expert order and back, and the sum over a token's rows."""

import functools

import chex
import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np

from mxmoe_jax import permute
from pallas_kernels import groups, reference
from tests import tolerance

TOKENS, EXPERTS, WIDTH = 40, 5, 64
sort_slots = jax.jit(permute.sort_slots, static_argnums=1)
combine = jax.jit(permute.combine)


@functools.partial(jax.jit, static_argnames="top_k")
def there_and_home(x, slots, top_k):
  """(tokens, rows that went to their experts and home), bf16 and MXFP8."""
  out = []
  for rows in (x, reference.quantize(x)):
    there = reference.take_rows(rows, slots.order // top_k)
    home = reference.take_rows(there, slots.place)
    home = jax.tree.map(lambda a: a.reshape(TOKENS, top_k, -1), home)
    value = rows if rows is x else rows.dequantize()
    out.append((value.astype(jnp.float32), permute.combine(home)))
  return out


def random_ids(seed: int, top_k: int = 2):
  """[TOKENS, k] ids; about one slot in seven has no expert."""
  rng = np.random.default_rng(seed)
  ids = np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(TOKENS)])
  return np.where(rng.random(ids.shape) < 1 / 7, -1, ids).astype(np.int32)


@hypothesis.settings(max_examples=10)
@hypothesis.given(seed=strategies.integers(0, 2**20))
def test_slots_are_sorted_by_expert_and_stable(seed):
  ids = random_ids(seed)
  slots = jax.tree.map(np.asarray, sort_slots(ids, EXPERTS))
  flat = ids.reshape(-1)
  key = np.where(flat < 0, EXPERTS, flat)
  np.testing.assert_array_equal(slots.order, np.argsort(key, kind="stable"))
  np.testing.assert_array_equal(slots.place[slots.order], np.arange(flat.size))
  np.testing.assert_array_equal(
    slots.counts, np.bincount(key, minlength=EXPERTS + 1)[:EXPERTS]
  )


@hypothesis.settings(max_examples=10)
@hypothesis.given(
  seed=strategies.integers(0, 2**20), top_k=strategies.integers(1, 3)
)
def test_combine_of_permute_is_top_k_times_x(seed, top_k):
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.standard_normal((TOKENS, WIDTH)), jnp.bfloat16)
  ids = np.abs(random_ids(seed, top_k))
  slots = sort_slots(ids, EXPERTS)
  for value, total in there_and_home(x, slots, top_k):
    chex.assert_trees_all_equal(total, top_k * value)


def test_combine_adds_in_slot_order():
  rows = jax.random.normal(jax.random.key(0), (TOKENS, 4, WIDTH), jnp.bfloat16)
  got = np.asarray(combine(rows))
  assert got.dtype == np.float32
  want = np.zeros((TOKENS, WIDTH), np.float32)
  for j in range(4):
    want = want + np.asarray(rows[:, j]).astype(np.float32)
  np.testing.assert_array_equal(got, want)
  exact = np.asarray(rows).astype(np.float64).sum(1)
  magnitude = np.abs(np.asarray(rows).astype(np.float64)).sum(1)
  assert (np.abs(got - exact) <= tolerance.FLOAT32_SUM * magnitude).all()


def test_no_tokens():
  slots = sort_slots(np.zeros((0, 2), np.int32), EXPERTS)
  assert slots.counts.tolist() == [0] * EXPERTS
  assert groups.take_rows(jnp.zeros((0, 4)), slots.order).shape == (0, 4)
