"""The layer under jit, grad, remat, scan, donation and accumulation."""

import functools

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from mxmoe_jax import Recipe, layer, moe, quantize_weights
from tests.mxmoe_jax import layers

TOKENS = 64
CONFIG = layers.config(d_model=64, d_ff=32, aux_loss_coef=0.1)


def inputs(name: str = "x"):
  return layers.tokens(TOKENS, name, 64)


def loss(x, params, cfg=CONFIG, quantized=None):
  y, stats = moe(x, params, cfg, quantized=quantized)
  return jnp.sum(jnp.square(y.astype(jnp.float32))) + stats.aux_loss


@pytest.fixture(scope="module")
def params():
  return layers.params(CONFIG)


@pytest.fixture(scope="module")
def gradients(params):
  """Of x and of the parameters, under jit."""
  return jax.jit(jax.grad(loss, (0, 1)))(inputs(), params)


def test_one_compilation_for_five_routings(params):
  traced = chex.assert_max_traces(lambda x, params: moe(x, params, CONFIG), n=1)
  chex.clear_trace_counter()
  run, loads = jax.jit(traced), set()
  for seed in range(5):
    leaning = params["router"].at[:, seed % 4].add(0.1 * seed)
    _, stats = run(inputs(f"x{seed}"), params | {"router": leaning})
    loads.add(tuple(stats.load.tolist()))
  assert len(loads) == 5
  assert run._cache_size() == 1


def test_gradients_have_the_dtype_of_their_primal():
  for dtype in (jnp.float32, jnp.bfloat16):
    params = layers.params(CONFIG, dtype)
    for x in (inputs(), inputs().astype(jnp.float32)):
      grads = jax.eval_shape(jax.grad(loss, (0, 1)), x, params)
      chex.assert_trees_all_equal_shapes_and_dtypes(grads, (x, params))


def test_integers_and_quantized_weights_get_no_gradient(params):
  experts = {name: params[name] for name in ("gate_up", "down")}
  quantized = jax.eval_shape(lambda p: quantize_weights(p, CONFIG), params)
  ids = jnp.zeros((TOKENS, 2), jnp.int32)

  def mixture(x, weights, ids, experts, quantized):
    y, _ = layer.mixture((CONFIG, None), x, weights, ids, experts, quantized)
    return y.astype(jnp.float32).sum()

  gradient = jax.grad(mixture, argnums=(0, 1, 2, 3, 4), allow_int=True)
  got = jax.eval_shape(
    gradient, inputs(), jnp.ones((TOKENS, 2)), ids, experts, quantized
  )
  dx, dweights, dids, dexperts, dquantized = got
  assert dids.dtype == jax.dtypes.float0
  assert (dx.dtype, dweights.dtype) == (jnp.bfloat16, jnp.float32)
  assert dexperts["down"].dtype == jnp.bfloat16
  for scale in jax.tree.leaves(dquantized)[1::2]:
    assert scale.dtype == jax.dtypes.float0


def test_remat_changes_no_bit(params, gradients):
  """By the names of the residuals; without names it is a field case."""
  policy = jax.checkpoint_policies.save_only_these_names("moe_rows", "moe_pre")
  remat = jax.checkpoint(loss, policy=policy)
  again = jax.jit(jax.grad(remat, (0, 1)))(inputs(), params)
  chex.assert_trees_all_equal(again, gradients)


def block(x, params):
  """A layer with its residual connection."""
  y, stats = moe(x, params, CONFIG)
  return x + y, stats.load


def test_scan_over_layers_equals_the_loop():
  """The loop runs one compiled layer twice, forward and backward."""
  first = layers.params(CONFIG)
  stack = [first, jax.tree.map(lambda w: w[::-1], first)]
  stacked = jax.tree.map(lambda *w: jnp.stack(w), *stack)

  @jax.jit
  def scanned(x, stacked, dh):
    h, pull, load = jax.vjp(
      lambda s: lax.scan(block, x, s), stacked, has_aux=True
    )
    return h, load, pull(dh)[0]

  @jax.jit
  def one(x, params, dh):
    h, pull, load = jax.vjp(block, x, params, has_aux=True)
    return h, load, *pull(dh)

  x, dh = inputs(), inputs("dh")
  between, load0, *_ = one(x, stack[0], dh)
  h, load1, dbetween, grads1 = one(between, stack[1], dh)
  *_, grads0 = one(x, stack[0], dbetween)
  want = (
    h,
    *(
      jax.tree.map(lambda *a: jnp.stack(a), *pair)
      for pair in ((load0, load1), (grads0, grads1))
    ),
  )
  chex.assert_trees_all_equal(scanned(x, stacked, dh), want)


def test_a_scan_keeps_no_copy_of_the_weights():
  """Weights kept for the backward pass are those that went in."""
  params = layers.params(CONFIG)
  stacked = jax.tree.map(lambda w: jnp.stack([w] * 3), params)

  def deep(stacked, x):
    return jnp.sum(lax.scan(block, x, stacked)[0].astype(jnp.float32))

  jaxpr = jax.make_jaxpr(jax.grad(deep))(stacked, inputs())
  forward, _ = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
  made = {v.aval.shape for v in forward.outvars}
  assert any(len(shape) == 3 for shape in made)
  assert not made & {stacked[n].shape for n in ("gate_up", "down")}


def test_donated_arguments_give_the_same_bits(params, gradients):
  step = jax.jit(jax.grad(loss, (0, 1)), donate_argnums=(0, 1))
  mine = jax.tree.map(jnp.copy, (inputs(), params))
  chex.assert_trees_all_equal(step(*mine), gradients)
  assert all(w.is_deleted() for w in jax.tree.leaves(mine))


def test_accumulation_with_shared_quantized_weights(params):
  """Quantized once for all microbatches, or in each: the same gradients."""
  parts = jnp.stack([inputs(f"part{i}") for i in range(3)])

  @functools.partial(jax.jit, static_argnames="shared")
  def accumulate(params, parts, shared):
    quantized = quantize_weights(params, CONFIG) if shared else None

    def add(total, x):
      grads = jax.grad(loss, 1)(x, params, CONFIG, quantized)
      return jax.tree.map(jnp.add, total, grads), None

    return lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)[0]

  got = accumulate(params, parts, shared=True)
  want = accumulate(params, parts, shared=False)
  chex.assert_trees_all_equal(got, want)
  assert all(
    np.asarray(g.astype(jnp.float32)).any() for g in jax.tree.leaves(got)
  )


def test_leading_dimensions_are_only_a_shape(params):
  x = inputs()
  run = jax.jit(lambda x, m: moe(x, params, CONFIG, mask=m))
  mask = jnp.arange(TOKENS) % 4 > 0
  flat, stats = run(x, mask)
  deep, same = run(x.reshape(2, 4, 8, 64), mask.reshape(2, 4, 8))
  assert deep.shape == (2, 4, 8, 64)
  chex.assert_trees_all_equal(deep.reshape(x.shape), flat)
  chex.assert_trees_all_equal(same.load, stats.load)
  one = jax.eval_shape(lambda v: moe(v, params, CONFIG)[0], x[0])
  assert one.shape == (64,)


def test_result_has_the_dtype_of_x(params):
  y, _ = jax.eval_shape(
    lambda x: moe(x, params, CONFIG), inputs().astype(jnp.float32)
  )
  assert y.dtype == jnp.float32


@pytest.mark.parametrize("recipe", [Recipe.mxfp8(), Recipe.bf16()])
def test_vmap_raises_with_the_way_out(params, recipe):
  cfg = layers.config(d_model=64, d_ff=32, recipe=recipe)
  with pytest.raises(NotImplementedError, match="over 2.*Fold the axis into"):
    jax.eval_shape(
      jax.vmap(lambda x: moe(x, params, cfg)[0]), jnp.stack([inputs()] * 2)
    )


def test_forward_mode_raises(params):
  x = inputs()
  with pytest.raises(TypeError, match="forward-mode"):
    jax.jit(
      lambda x: jax.jvp(lambda x: moe(x, params, CONFIG)[0], (x,), (x,))
    ).lower(x)
