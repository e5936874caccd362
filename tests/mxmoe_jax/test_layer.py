"""The whole layer against float64 with the same routing, and its laws."""

import functools
import re

import chex
import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxmoe_jax import Recipe, Swiglu, layer, moe
from tests import tolerance
from tests.mxmoe_jax import float64_layer, layers

GPT_OSS = Swiglu(limit=7.0, alpha=1.702, up_offset=1.0)
FORMS = {
  "sigmoid": dict(score="sigmoid", routed_scaling=2.5),
  "gpt_oss": dict(bias=True, swiglu=GPT_OSS),
  # A tight clamp would measure how often noise crosses its edge.
  "raw_and_clamped": dict(renormalise=False, swiglu=Swiglu(limit=3.0)),
}
RECIPES = {
  "mxfp8": Recipe.mxfp8(),
  "mxfp8_bf16_wgrad": Recipe.mxfp8_bf16_wgrad(),
  "bf16": Recipe.bf16(),
  "floor": Recipe.mxfp8(rounding="floor"),
  "e5m2": Recipe.mxfp8(grad_dtype="e5m2"),
  "square": Recipe.mxfp8(weight_block="32x32"),
  "recompute": Recipe.mxfp8(
    save_preactivations="recompute", save_hidden="recompute"
  ),
  "bf16_dispatch": Recipe.mxfp8(dispatch="bf16", combine_grad="bf16"),
}
KINDS = dict(y="y", x="x", router="router")


def check_noise(cfg, **options):
  got, stats = layers.run(cfg, **options)
  ids = layers.chosen(cfg, options.get("balance_bias"))
  want = float64_layer.run(
    layers.tokens(), layers.params(cfg), ids, layers.tokens(name="dy"), cfg
  )
  floors = tolerance.layer_floors(cfg.recipe)
  assert got.keys() == want.keys()
  noise = {name: tolerance.sqnr(got[name], want[name]) for name in want}
  low = {
    name: value
    for name, value in noise.items()
    if value < floors[KINDS.get(name, "experts")]
  }
  assert low == {}, noise
  np.testing.assert_array_equal(
    stats.load, np.bincount(ids.reshape(-1), minlength=cfg.num_experts)
  )
  assert not np.asarray(stats.dropped).any()


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe(name):
  check_noise(layers.config(recipe=RECIPES[name]))


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_layer(name):
  check_noise(layers.config(**FORMS[name]))


def test_balance_bias_moves_the_choice_only():
  cfg = layers.config(balance_bias=True)
  bias = jnp.asarray([0.3, 0.0, 0.0, -0.3])
  check_noise(cfg, balance_bias=bias)
  moved = layers.chosen(cfg, bias) != layers.chosen(cfg, jnp.zeros(4))
  assert moved.any()


@pytest.mark.parametrize(
  ("kept", "recompute"),
  [("mxfp8", "save"), ("mxfp8", "recompute"), ("bf16", "recompute")],
)
def test_everything_at_once_under_every_residual_choice(kept, recompute):
  """Biases, clamp, shared experts, sigmoid: all kept forms are read."""
  cfg = layers.config(
    score="sigmoid",
    bias=True,
    d_ff_shared=64,
    swiglu=GPT_OSS,
    recipe=Recipe.mxfp8(save_preactivations=kept, save_hidden=recompute),
  )
  check_noise(cfg)


def test_recomputing_changes_no_bit():
  kept, _ = layers.run(layers.config(recipe=RECIPES["mxfp8"]))
  again, _ = layers.run(layers.config(recipe=RECIPES["recompute"]))
  chex.assert_trees_all_equal(again, kept)


@pytest.mark.parametrize("preset", ["mxfp8", "mxfp8_bf16_wgrad", "bf16"])
def test_the_reference_is_what_auto_takes_on_a_cpu(preset):
  """Both backends that a CPU accepts are one program for every preset."""

  def program(backend):
    cfg = layers.config(recipe=RECIPES[preset], backend=backend)
    arrays = layers.tokens(), layers.params(cfg), layers.tokens(name="dy")
    step = functools.partial(layers.step.__wrapped__, cfg=cfg)
    return re.sub(
      r"backend='\w+'|0x\w+", "", str(jax.make_jaxpr(step)(*arrays))
    )

  assert program("auto") == program("xla")


class TestMask:
  """A masked token is not there."""

  KEEP = np.arange(layers.TOKENS) % 3 > 0

  def test_masked_tokens_change_nothing_for_the_others(self):
    cfg = layers.config(aux_loss_coef=0.5, z_loss_coef=0.5)
    arrays = layers.tokens(), layers.params(cfg), layers.tokens(name="dy")
    mask = jnp.asarray(self.KEEP)
    got, stats = layers.step(*arrays, cfg, mask=mask)
    x, params, dy = arrays
    alone, few = layers.step(x[mask], params, dy[mask], cfg)
    for name in ("y", "x"):
      assert not np.asarray(got[name])[~self.KEEP].any(), name
      chex.assert_trees_all_equal(got[name][mask], alone.pop(name))
      del got[name]
    chex.assert_trees_all_equal(stats.load, few.load)
    assert stats.load.sum() == self.KEEP.sum() * layers.TOP_K
    assert float(stats.aux_loss) == pytest.approx(
      float(few.aux_loss), rel=tolerance.FLOAT32
    )
    router = got.pop("router"), alone.pop("router")
    assert tolerance.frobenius(*router) <= tolerance.FLOAT32
    chex.assert_trees_all_equal(got, alone)


class TestLaws:
  """Properties of every layer, on one compiled step."""

  CONFIG = layers.config(num_experts=5)

  @hypothesis.settings(max_examples=4)
  @hypothesis.given(seed=strategies.integers(0, 2**20))
  def test_permuting_experts_permutes_their_gradients(self, seed):
    order = np.random.default_rng(seed).permutation(5)
    x, dy = layers.tokens(), layers.tokens(name="dy")
    params = layers.params(self.CONFIG)
    moved = {
      name: w[:, order] if name == "router" else w[order]
      for name, w in params.items()
    }
    got, _ = layers.step(x, moved, dy, self.CONFIG)
    want, _ = layers.step(x, params, dy, self.CONFIG)
    for name in ("gate_up", "down"):
      chex.assert_trees_all_equal(got[name], want[name][order])
    # Slots of a token are summed best first, whatever the ids: same bits.
    chex.assert_trees_all_equal(got["y"], want["y"])

  @hypothesis.settings(max_examples=4)
  @hypothesis.given(expert=strategies.integers(0, 4))
  def test_an_expert_without_rows_gets_exactly_zero(self, expert):
    params = layers.params(self.CONFIG)
    x = layers.tokens().at[:, 0].set(1)
    router = params["router"].at[0, expert].set(-100.0)
    params = params | {"router": router}
    got, stats = layers.step(x, params, layers.tokens(name="dy"), self.CONFIG)
    assert stats.load[expert] == 0
    assert stats.load.sum() == layers.TOKENS * layers.TOP_K
    for name in ("gate_up", "down"):
      rows = np.asarray(got[name].astype(jnp.float32))
      assert not rows[expert].any()
      assert all(rows[e].any() for e in range(5) if e != expert)

  def test_nan_in_a_token_shows_in_its_output_alone(self):
    x = layers.tokens().at[7, 3].set(jnp.nan)
    params, dy = layers.params(self.CONFIG), layers.tokens(name="dy")
    got, _ = layers.step(x, params, dy, self.CONFIG)
    clean, _ = layers.step(layers.tokens(), params, dy, self.CONFIG)
    assert np.isnan(np.asarray(got["y"][7].astype(jnp.float32))).any()
    others = np.arange(layers.TOKENS) != 7
    chex.assert_trees_all_equal(got["y"][others], clean["y"][others])

  def test_two_runs_give_the_same_bits(self):
    params, dy = layers.params(self.CONFIG), layers.tokens(name="dy")
    runs = [
      layers.step(layers.tokens(), params, dy, self.CONFIG)[0] for _ in range(2)
    ]
    chex.assert_trees_all_equal(*runs)


def test_forced_balance():
  cfg = layers.config(forced_balance=True)
  _, stats = jax.jit(moe, static_argnums=2)(
    layers.tokens(), layers.params(cfg), cfg
  )
  rows = layers.TOKENS * layers.TOP_K
  assert stats.load.tolist() == [rows // layers.EXPERTS] * layers.EXPERTS


def test_ids_of_minus_one_are_no_expert():
  cfg = layers.config()
  params = layers.params(cfg)
  ids = layers.chosen(cfg).copy()
  ids[::2, 1] = -1
  ids[::5] = -1
  weights = jnp.full(ids.shape, 0.5)
  experts = {name: params[name] for name in ("gate_up", "down")}

  @jax.jit
  def both(x, weights):
    (y, dropped), pull = jax.vjp(
      lambda x, w: layer.mixture(
        (cfg, None), x, w, jnp.asarray(ids), experts, layer.QuantizedWeights()
      ),
      x,
      weights,
    )
    zero = np.zeros(dropped.shape, jax.dtypes.float0)
    return y, *pull((jnp.ones_like(y), zero))

  y, dx, dweights = both(layers.tokens(), weights)
  assert not np.asarray(y.astype(jnp.float32))[::5].any()
  assert not np.asarray(dx.astype(jnp.float32))[::5].any()
  assert not np.asarray(dweights)[ids < 0].any()
  assert (np.asarray(dweights)[ids >= 0] != 0).all()
