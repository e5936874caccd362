"""Field cases of the whole layer; FCnn is the number of the report.

Several cases share their shapes, so that they share a compilation.
"""

import numpy as np
import pytest

from tests import tolerance
from tests.field import inputs, reference

WEIGHTS = ("wg", "wu", "wd")


@pytest.fixture(scope="module")
def batch():
  """128 tokens of width 64, 4 experts: (x, p, dy)."""
  return inputs.layer(20, inputs.distinct(1, 128, 4), 64, 64, 4)


@pytest.fixture(scope="module")
def exact(batch):
  x, p, dy = batch
  return reference.layer(x, p, 2, dy)


@pytest.fixture(scope="module")
def alone(adapter, batch):
  """The batch on one device."""
  x, p, dy = batch
  return adapter.moe_vjp(x, p, 2, dy)


def test_fc11_gradients_do_not_scale_with_the_mesh(
  adapter, batch, exact, alone
):
  """github.com/databricks/megablocks/issues/86: ep times too large."""
  x, p, dy = batch
  inputs.assert_layer(alone, exact, tolerance.FIELD_LAYER)
  split = adapter.moe_vjp(x, p, 2, dy, ep=2)
  inputs.assert_layer(split, alone, tolerance.FIELD_MESH)


def test_fc18_backward_through_the_exchange(adapter):
  """github.com/jax-ml/jax/issues/26915: no transpose rule; uneven routing."""
  token = np.arange(128)
  wanted = np.stack(
    [np.where(token % 5 == 0, 3, 0), np.where(token % 3 == 0, 2, 1)], axis=1
  )
  x, p, dy = inputs.layer(22, wanted, 64, 64, 4)
  got = adapter.moe_vjp(x, p, 2, dy, ep=2)
  inputs.assert_layer(got, reference.layer(x, p, 2, dy), tolerance.FIELD_LAYER)


def test_fc09_four_devices_of_a_cpu(adapter):
  """github.com/jax-ml/jax/issues/34755: no ragged all-to-all on CPU."""
  x, p, dy = inputs.layer(21, inputs.distinct(2, 64, 8), 64, 64, 8)
  got = adapter.moe_vjp(x, p, 2, dy, ep=4)
  inputs.assert_layer(got, reference.layer(x, p, 2, dy), tolerance.FIELD_LAYER)


def test_fc16_remat_routes_the_same(adapter):
  """github.com/NVIDIA-NeMo/Automodel/pull/3247: recompute reroutes."""
  x, p, dy = inputs.layer(39, inputs.distinct(4, 96, 8), 64, 64, 8)
  kept = adapter.moe_vjp(x, p, 2, dy)
  again = adapter.moe_vjp(x, p, 2, dy, remat=True)
  inputs.assert_layer(again, kept, tolerance.FIELD_REMAT)
  inputs.assert_layer(kept, reference.layer(x, p, 2, dy), tolerance.FIELD_LAYER)


def test_fc28_every_microbatch_counts(adapter, batch):
  """github.com/AMD-AGI/Primus/pull/1046: only one reached the gradient."""
  x, p, dy = batch
  dy = dy * np.repeat(np.float32([1, 2, 3, 2]), 32)[:, None]
  parts = [slice(start, start + 32) for start in range(0, 128, 32)]
  got = adapter.accumulate(x, p, 2, dy, parts)
  inputs.assert_layer(
    got, reference.layer(x, p, 2, dy), tolerance.FIELD_LAYER, WEIGHTS
  )


def test_fc32_tokens_that_do_not_divide(adapter, batch):
  """github.com/pytorch/torchtitan/pull/3191: 63 tokens on 2 devices hang."""
  x, p, dy = batch
  with pytest.raises(ValueError, match="63 tokens over 2 devices.*to 64"):
    adapter.moe_vjp(x[:63], p, 2, dy[:63], ep=2)


def test_fc38_scales_travel_with_their_tokens(adapter):
  """github.com/pytorch/torchtitan/pull/1765: scales in another order."""
  token = np.arange(64)
  size = np.exp2(token * 7 % 40 - 20)[:, None].astype(np.float32)
  x = inputs.integers(54, (64, 64)) * size
  ids = np.stack([token % 8, (token * 3 + 1) % 8], axis=1)
  ids[ids[:, 0] == ids[:, 1], 1] ^= 1
  got = adapter.a2a_roundtrip(x, ids, 8, 4)
  np.testing.assert_array_equal(got, np.repeat(x[:, None], 2, axis=1))


def test_fc41_resume_continues_the_same_run(adapter, batch, alone):
  """github.com/NVIDIA/Megatron-LM/issues/1350: state missing, loss jumps."""
  del alone  # its compilation is reused
  x, p, dy = batch
  through = adapter.train(x, p, 2, dy, 6)
  resumed = adapter.train(x, p, 2, dy, 6, resume_at=3)
  for name in reference.LAYER_ARRAYS[2:]:
    np.testing.assert_array_equal(resumed[name], through[name])
    assert (through[name] != p[name]).any()


def test_fc54_no_tokens(adapter):
  """github.com/sgl-project/sglang/pull/25397: null pointer, reshape."""
  nothing = np.zeros((0, 2), int)
  x, p, dy = inputs.layer(23, nothing, 64, 64, 4)
  got = adapter.moe_vjp(x, p, 2, dy)
  assert got["y"].shape == got["dx"].shape == (0, 64)
  for name in reference.LAYER_ARRAYS[2:]:
    assert got[name].shape == p[name].shape
    assert not got[name].any()


def test_forced_ids_and_dropped_slots(adapter, batch):
  """An id of -1 is no expert: the others' weights are renormalised."""
  x, p, dy = batch
  ids = inputs.distinct(7, 128, 4)
  ids[::3, 1] = -1
  ids[::7] = -1
  got = adapter.moe_vjp(x, p, 2, dy, idx=ids)
  want = reference.layer(x, p, 2, dy, ids)
  inputs.assert_layer(got, want, tolerance.FIELD_LAYER)
  assert not got["y"][::7].any()
  assert not got["dx"][::7].any()
