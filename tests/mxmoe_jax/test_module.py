"""MoE as nnx, as Linen and as a function: the same numbers."""

import functools

import chex
from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mxmoe_jax import (
  BalanceBias,
  MoE,
  MoEConfig,
  arguments,
  moe,
  quantize_weights,
  to_linen,
  update_balance_bias,
)
from tests import tolerance

CONFIG = MoEConfig(
  d_model=64,
  d_ff=32,
  num_experts=4,
  top_k=2,
  score="sigmoid",
  bias=True,
  d_ff_shared=32,
  balance_bias=True,
  aux_loss_coef=0.1,
  z_loss_coef=0.01,
)
X = jax.random.normal(jax.random.key(1), (2, 16, 64), jnp.bfloat16)


@pytest.fixture(scope="module")
def layer():
  return MoE(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def output(layer):
  """(y, stats) of the module under nnx.jit."""
  return nnx.jit(lambda layer, x: layer(x))(layer, X)


def test_parameters_have_the_documented_shapes_and_dtypes(layer):
  state = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
  assert {n: a.shape for n, a in state.items()} == (
    arguments.parameter_shapes(CONFIG)
  )
  assert state["router"].dtype == jnp.float32
  others = {a.dtype for n, a in state.items() if n != "router"}
  assert others == {jnp.dtype(jnp.bfloat16)}
  chex.assert_trees_all_equal(layer.params(), state)


def test_initial_weights_have_variance_one_over_fan_in():
  wide = MoEConfig(
    d_model=256,
    d_ff=128,
    num_experts=4,
    top_k=2,
    bias=True,
    param_dtype=jnp.float32,
  )
  params = MoE(wide, rngs=nnx.Rngs(3)).params()
  for name, fan_in in (("gate_up", 256), ("down", 128), ("router", 256)):
    got = float(jnp.var(params[name])) * fan_in
    assert got == pytest.approx(1, abs=0.1), name
  assert not params["down_bias"].any()
  assert not params["gate_up_bias"].any()


def test_module_and_function_agree(layer, output):
  bias = layer.balance_bias[...]
  y, stats = jax.jit(functools.partial(moe, config=CONFIG))(
    X, layer.params(), balance_bias=bias
  )
  chex.assert_trees_all_equal((y, stats), output)
  assert y.shape == X.shape
  assert y.dtype == X.dtype


def test_stats_are_arrays(output):
  _, stats = output
  rows = X.shape[0] * X.shape[1] * CONFIG.top_k
  assert stats.load.sum() == rows
  chex.assert_shape([stats.load, stats.dropped], (4,))
  chex.assert_type([stats.load, stats.dropped], jnp.int32)
  chex.assert_shape([stats.aux_loss, stats.z_loss], ())
  assert float(stats.aux_loss) > 0
  assert float(stats.z_loss) > 0
  assert all(isinstance(a, jax.Array) for a in jax.tree.leaves(stats))


def test_linen_twin_gives_the_same_numbers(layer, output):
  twin = to_linen(CONFIG)
  shapes = jax.eval_shape(twin.init, jax.random.key(0), X)
  assert set(shapes) == {"params", "BalanceBias"}
  variables = dict(
    params=dict(layer.params()),
    BalanceBias=dict(balance_bias=layer.balance_bias[...]),
  )
  want = jax.tree.map(jnp.shape, shapes["params"])
  assert jax.tree.map(jnp.shape, variables["params"]) == want
  y, stats = jax.jit(twin.apply)(variables, X)
  chex.assert_trees_all_equal((y, stats), output)


def test_linen_twin_takes_a_mask():
  twin = to_linen(CONFIG)
  mask = jnp.ones(X.shape[:-1], bool)

  def both(key, x, mask):
    return twin.init_with_output(key, x, mask)[0]

  y, stats = jax.eval_shape(both, jax.random.key(0), X, mask)
  assert y.shape == X.shape
  assert stats.load.shape == (4,)


def test_balance_bias_is_state_that_no_optimizer_sees(layer):
  assert isinstance(layer.balance_bias, BalanceBias)
  assert layer.balance_bias.shape == (4,)
  optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.Param)
  del optimizer
  seen = nnx.to_pure_dict(nnx.state(layer, nnx.Param))
  assert "balance_bias" not in seen
  plain = MoE(
    MoEConfig(d_model=64, d_ff=32, num_experts=4, top_k=2), rngs=nnx.Rngs(0)
  )
  assert plain.balance_bias is None


def test_a_training_step_moves_every_parameter():
  layer = MoE(CONFIG, rngs=nnx.Rngs(0))
  optimizer = nnx.Optimizer(layer, optax.sgd(10.0), wrt=nnx.Param)
  before = jax.tree.map(np.asarray, layer.params())

  @nnx.jit
  def step(layer, optimizer, x):
    def loss(layer):
      y, stats = layer(x)
      squares = jnp.mean(jnp.square(y.astype(jnp.float32)))
      return squares + stats.aux_loss + stats.z_loss, stats

    gradient = nnx.value_and_grad(loss, has_aux=True)
    (value, stats), grads = gradient(layer)
    optimizer.update(layer, grads)
    bias = layer.balance_bias
    bias[...] = update_balance_bias(bias[...], stats.load, 0.01)
    return value, stats

  value, stats = step(layer, optimizer, X)
  assert np.isfinite(float(value))
  for name, new in layer.params().items():
    assert (np.asarray(new) != before[name]).any(), name
  mean = X.shape[0] * X.shape[1] * CONFIG.top_k / 4
  want = 0.01 * np.sign(mean - np.asarray(stats.load))
  np.testing.assert_allclose(
    layer.balance_bias[...], want, rtol=tolerance.FLOAT32
  )


def test_quantized_weights_beside_the_master(layer, output):
  @nnx.jit
  def run(layer, x):
    quantized = quantize_weights(layer.params(), CONFIG)
    return layer(x, quantized=quantized)

  chex.assert_trees_all_equal(run(layer, X), output)


def test_parameters_are_unannotated_unless_asked(layer):
  assert layer.router.get_metadata("out_sharding", None) is None
  names = {"down": ("expert", None, "embed")}
  with pytest.raises(ValueError, match=r"one name.*per axis.*'down'"):
    MoE(CONFIG, rngs=nnx.Rngs(0), axis_names={"down": ("expert",)})
  with pytest.raises(ValueError, match="one name.*per axis.*'wide'"):
    MoE(CONFIG, rngs=nnx.Rngs(0), axis_names={"wide": names["down"]})
