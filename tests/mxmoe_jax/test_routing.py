"""Routing against plain numpy: choices, weights, losses, balance."""

import chex
import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxmoe_jax import MoEConfig, routing, update_balance_bias
from tests import tolerance

TOKENS, WIDTH, EXPERTS, TOP_K = 64, 32, 16, 4
close = tolerance.FLOAT32


def config(**changes):
  sizes = dict(d_model=WIDTH, d_ff=32, num_experts=EXPERTS, top_k=TOP_K)
  return MoEConfig(**(sizes | changes))


@pytest.fixture(scope="module")
def batch():
  """(x, router), float32."""
  keys = jax.random.split(jax.random.key(0))
  x = jax.random.normal(keys[0], (TOKENS, WIDTH))
  return x, jax.random.normal(keys[1], (WIDTH, EXPERTS)) / 4


def float64(x):
  return np.asarray(x).astype(np.float64)


def scores_of(logits, score):
  if score == "sigmoid":
    return 1 / (1 + np.exp(-logits))
  e = np.exp(logits - logits.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def best(values, count):
  """Indices of the largest along the last axis, ties to the lower."""
  return np.argsort(-values, axis=-1, kind="stable")[..., :count]


def limited(scores, groups, keep):
  """-inf outside the groups with the largest sum of two best experts."""
  out = np.full(scores.shape, -np.inf)
  width = scores.shape[1] // groups
  for row, target in zip(scores, out, strict=True):
    parts = row.reshape(groups, width)
    total = np.sort(parts, axis=1)[:, -2:].sum(1)
    for g in best(total, keep):
      target[g * width : (g + 1) * width] = parts[g]
  return out


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
  "change",
  [
    {},
    dict(renormalise=False),
    dict(routed_scaling=2.5),
    dict(num_groups=4, groups_per_token=2),
  ],
)
@pytest.mark.parametrize("biased", [False, True])
def test_choice_and_weights(batch, score, change, biased):
  cfg = config(score=score, balance_bias=biased, **change)
  bias = 0.1 * jax.random.normal(jax.random.key(2), (EXPERTS,))
  got = jax.jit(routing.route, static_argnums=2)(
    *batch, cfg, balance_bias=bias if biased else None
  )
  scores = scores_of(float64(batch[0]) @ float64(batch[1]), score)
  keyed = scores + float64(bias) if biased else scores
  if cfg.num_groups > 1:
    keyed = limited(keyed, cfg.num_groups, cfg.groups_per_token)
  ids = best(keyed, TOP_K)
  np.testing.assert_array_equal(got.experts, ids)
  weights = np.take_along_axis(scores, ids, axis=1)  # without the bias
  if cfg.renormalise:
    weights = weights / weights.sum(1, keepdims=True)
  np.testing.assert_allclose(
    got.weights, weights * cfg.routed_scaling, rtol=close
  )
  np.testing.assert_array_equal(
    got.load, np.bincount(ids.reshape(-1), minlength=EXPERTS)
  )
  chex.assert_type([got.weights, got.aux_loss, got.z_loss], jnp.float32)
  chex.assert_type([got.experts, got.load], jnp.int32)


@hypothesis.settings(max_examples=10)
@hypothesis.given(
  levels=strategies.integers(1, 4), seed=strategies.integers(0, 2**20)
)
def test_ties_go_to_the_lower_id(levels, seed):
  rng = np.random.default_rng(seed)
  scores = (rng.integers(0, levels, (TOKENS, EXPERTS)) / 4).astype(np.float32)
  for cfg in (config(), config(num_groups=4, groups_per_token=2)):
    got = np.asarray(routing.choose(jnp.asarray(scores), cfg))
    keyed = scores
    if cfg.num_groups > 1:
      keyed = limited(scores, cfg.num_groups, cfg.groups_per_token)
    np.testing.assert_array_equal(got, best(keyed, TOP_K))


@pytest.mark.parametrize(("tokens", "top_k"), [(64, 4), (60, 4), (7, 3)])
def test_forced_balance_spreads_evenly(tokens, top_k):
  cfg = config(top_k=top_k, forced_balance=True)
  ids = np.asarray(routing.choose(jnp.ones((tokens, EXPERTS)), cfg))
  load = np.bincount(ids.reshape(-1), minlength=EXPERTS)
  assert load.max() - load.min() <= 1
  assert all(len(set(row)) == top_k for row in ids.tolist())


def test_forced_balance_still_weighs_by_score(batch):
  got = routing.route(*batch, config(forced_balance=True))
  scores = scores_of(float64(batch[0]) @ float64(batch[1]), "softmax")
  weights = np.take_along_axis(scores, np.asarray(got.experts), axis=1)
  weights = weights / weights.sum(1, keepdims=True)
  np.testing.assert_allclose(got.weights, weights, rtol=close)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("masked", [False, True])
def test_losses_and_their_gradients(batch, score, masked):
  cfg = config(score=score, aux_loss_coef=0.5, z_loss_coef=0.25)
  mask = np.arange(TOKENS) % 3 > 0 if masked else np.ones(TOKENS, bool)
  logits = routing.router_logits(*batch)
  identity = jnp.eye(EXPERTS)

  def losses(logits):
    routed = routing.route(
      logits, identity, cfg, mask=jnp.asarray(mask) if masked else None
    )
    return jnp.stack([routed.aux_loss, routed.z_loss])

  got, gradient = jax.jit(lambda z: (losses(z), jax.jacrev(losses)(z)))(logits)
  z = float64(logits)[mask]
  s = scores_of(z, score)
  p = s / s.sum(1, keepdims=True)
  share = np.bincount(best(s, TOP_K).reshape(-1), minlength=EXPERTS)
  share = share / share.sum()
  lse = np.log(np.exp(z).sum(1))
  want = [0.5 * EXPERTS * (share * p.mean(0)).sum(), 0.25 * (lse**2).mean()]
  np.testing.assert_allclose(got, want, rtol=close)

  tokens = mask.sum()
  daux = 0.5 * EXPERTS / tokens * p * (share - (p * share).sum(1)[:, None])
  if score == "sigmoid":
    daux = daux * (1 - s)
  dz = 0.25 * 2 / tokens * lse[:, None] * scores_of(z, "softmax")
  for have, exact in zip(float64(gradient), (daux, dz), strict=True):
    assert tolerance.frobenius(have[mask], exact) <= close
    assert not have[~mask].any()


def test_losses_are_zero_without_coefficients(batch):
  routed = routing.route(*batch, config())
  assert routed.aux_loss == routed.z_loss == 0


def test_masked_tokens_are_neither_routed_nor_counted(batch):
  mask = jnp.arange(TOKENS) % 4 > 0
  cfg = config(aux_loss_coef=1.0, z_loss_coef=1.0)
  got = routing.route(*batch, cfg, mask=mask)
  alone = routing.route(batch[0][mask], batch[1], cfg)
  keep = np.asarray(mask)
  assert (np.asarray(got.experts)[~keep] == -1).all()
  assert not np.asarray(got.weights)[~keep].any()
  chex.assert_trees_all_equal(got.experts[keep], alone.experts)
  chex.assert_trees_all_equal(got.load, alone.load)
  assert got.load.sum() == keep.sum() * TOP_K
  for name in ("aux_loss", "z_loss"):
    have, want = getattr(got, name), getattr(alone, name)
    assert float(have) == pytest.approx(float(want), rel=close)


def test_garbage_in_masked_tokens_reaches_no_gradient(batch):
  mask = jnp.arange(TOKENS) % 4 > 0
  cfg = config(aux_loss_coef=1.0, z_loss_coef=1.0)

  def total(x, router):
    got = routing.route(x, router, cfg, mask=mask)
    return jnp.sum(got.weights[:, 0]) + got.aux_loss + got.z_loss

  garbage = jnp.where(mask[:, None], batch[0], jnp.nan)
  pull = jax.jit(jax.grad(total, (0, 1)))
  chex.assert_trees_all_equal(pull(garbage, batch[1]), pull(*batch))


def test_no_token_at_all_gives_finite_losses(batch):
  cfg = config(aux_loss_coef=1.0, z_loss_coef=1.0)
  nothing = jnp.zeros(TOKENS, bool)
  for got in (
    routing.route(*batch, cfg, mask=nothing),
    routing.route(batch[0][:0], batch[1], cfg),
  ):
    assert (float(got.aux_loss), float(got.z_loss)) == (0, 0)
    assert not got.load.any()


def test_dropped_ids_weigh_nothing():
  scores = jnp.asarray([[0.5, 0.25, 0.125, 0.125]])
  cfg = config(num_experts=4, top_k=2)
  weights = routing.weigh(scores, jnp.asarray([[0, -1]]), cfg)
  np.testing.assert_allclose(weights, [[1.0, 0.0]], rtol=close)
  both = routing.weigh(scores, jnp.asarray([[-1, -1]]), cfg)
  assert both.tolist() == [[0.0, 0.0]]
  assert routing.load_per_expert(
    jnp.asarray([[0, -1], [3, 0]]), 4
  ).tolist() == [
    2,
    0,
    0,
    1,
  ]


def test_underflowed_sigmoid_scores_stay_finite():
  cfg = config(num_experts=4, top_k=2, score="sigmoid")
  scores = routing.router_scores(jnp.full((1, 4), -200.0), "sigmoid")
  weights = routing.weigh(scores, jnp.asarray([[0, 1]]), cfg)
  assert np.isfinite(np.asarray(weights)).all()


def test_router_of_bf16_tokens_is_float32():
  x = jnp.ones((1, 32), jnp.bfloat16)
  router = jnp.full((32, 2), 4 / 32).at[:, 1].add(2.0**-7 / 32)
  logits = routing.router_logits(x, router)
  assert logits.dtype == jnp.float32
  assert logits[0, 1] > logits[0, 0]


class TestBalanceBias:
  """Raised below the mean load, lowered above it; state, not a parameter."""

  def test_one_step(self):
    bias = jnp.asarray([0.5, 0.0, 0.0, -0.5])
    load = jnp.asarray([4, 8, 12, 8], jnp.int32)
    got = update_balance_bias(bias, load, 0.25)
    assert got.tolist() == [0.75, 0.0, -0.25, -0.5]

  def test_no_gradient_reaches_it(self, batch):
    cfg = config(balance_bias=True, aux_loss_coef=1.0)

    def total(bias):
      routed = routing.route(*batch, cfg, balance_bias=bias)
      return routed.weights.sum() + routed.aux_loss

    assert not jax.grad(total)(jnp.zeros(EXPERTS)).any()

  def test_steps_even_out_the_load(self, batch):
    x, router = batch
    router = router.at[:, :3].multiply(4)
    cfg = config(balance_bias=True, score="sigmoid")
    route = jax.jit(routing.route, static_argnums=2)
    bias, spread = jnp.zeros(EXPERTS), []
    for _ in range(60):
      load = route(x, router, cfg, balance_bias=bias).load
      spread.append(float(load.std()))
      bias = update_balance_bias(bias, load, 0.02)
    assert np.mean(spread[-10:]) < 0.5 * spread[0]
