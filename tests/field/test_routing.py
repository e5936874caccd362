"""Field cases of the router; FCnn is the number of the report.

Losses are of the Switch form: 1 when balanced.
"""

import ml_dtypes
import numpy as np
import pytest

from tests import tolerance
from tests.field import inputs, reference


def test_fc10_router_is_float32(adapter):
  """github.com/vllm-project/vllm/pull/14027: ties that only bf16 has."""
  x = np.ones((6, 32), ml_dtypes.bfloat16)
  x[3:] = 0.5
  w = np.zeros((32, 4), np.float32)
  w[:, 0], w[:, 2] = 4 / 32, (4 + 2.0**-7) / 32
  assert adapter.route_x(x, w, 1).reshape(-1).tolist() == [2] * 6


def test_fc14_padding_tokens_do_not_count(adapter):
  """github.com/huggingface/transformers/issues/28505: trained on padding."""
  logits = inputs.normal(13, (16, 4))
  logits[:, 2] += 1.5
  logits[10:] = [9, 5, 0, 0]
  mask = np.arange(16) < 10
  masked = adapter.aux_loss(logits, 2, mask)
  want = reference.balance_loss(logits, 2, mask)
  assert masked == pytest.approx(want, rel=tolerance.FLOAT32)
  alone = adapter.aux_loss(logits[:10], 2)
  assert masked == pytest.approx(alone, rel=tolerance.FLOAT32)
  everything = reference.balance_loss(logits, 2)
  assert abs(everything - want) > 0.05  # so that this case can tell


def test_fc26_ties_go_to_the_lower_id(adapter):
  """github.com/pytorch/torchtitan/pull/3600: other experts on each call."""
  logits = np.zeros((64, 8), np.float32)
  logits[32:, 4:] = 1.0
  want = np.repeat([[0, 1], [4, 5]], 32, axis=0)
  for _ in range(3):
    np.testing.assert_array_equal(adapter.route(logits, 2)[1], want)


def test_fc27_combine_is_deterministic(adapter):
  """github.com/pytorch/torchtitan/pull/1974: atomic adds in bf16."""
  y = inputs.normal(37, (128, 8, 64)).astype(ml_dtypes.bfloat16)
  w = reference.softmax(inputs.normal(38, (128, 8))).astype(np.float32)
  first = adapter.combine(y, w)
  for _ in range(4):
    np.testing.assert_array_equal(adapter.combine(y, w), first)
  want = (y.astype(np.float64) * w[..., None]).sum(1)
  bound = np.abs(want) * tolerance.BF16_ROUNDING + tolerance.FLOAT32
  assert (np.abs(first - want) <= bound).all()


@pytest.mark.parametrize("coef", [1.0, 0.01])
def test_fc29_balance_loss_reaches_the_router(adapter, coef):
  """github.com/NVIDIA-NeMo/Automodel/issues/1408: no gradient."""
  logits = inputs.normal(41, (32, 4))
  logits[:, 0] += 1
  got = adapter.aux_loss_grad(logits, 2, coef)
  want = coef * reference.balance_loss_gradient(logits, 2)
  assert np.abs(want).max() > 1e-3 * coef
  assert tolerance.frobenius(got, want) <= tolerance.FLOAT32


@pytest.mark.parametrize("normalize", [True, False])
def test_fc42_weights_are_renormalised_on_request(adapter, normalize):
  """github.com/pytorch/torchtitan/issues/1448: at the wrong place."""
  logits = inputs.normal(42, (32, 8), 2.0)
  weights, ids = adapter.route(logits, 3, normalize=normalize)
  p = reference.softmax(logits)
  np.testing.assert_array_equal(ids, reference.choose(p, 3))
  want = np.take_along_axis(p, ids, axis=1)
  if normalize:
    want = want / want.sum(1, keepdims=True)
  np.testing.assert_allclose(weights, want, rtol=tolerance.FLOAT32)


def test_fc49_balance_loss_takes_logits(adapter):
  """github.com/huggingface/transformers/pull/45315: softmax twice."""
  balanced = np.full((64, 8), -20, np.float32)
  balanced[np.arange(64), np.arange(64) % 8] = 20
  collapsed = np.full((64, 8), -20, np.float32)
  collapsed[:, 5] = 20
  losses = [adapter.aux_loss(logits, 1) for logits in (balanced, collapsed)]
  assert losses == pytest.approx([1.0, 8.0], rel=tolerance.FLOAT32)
