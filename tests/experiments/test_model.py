"""The transformer: causal, relative in position, telling about its experts."""

import dataclasses
import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import experiment as experiment_lib
from experiments import model as model_lib
from tests import tolerance
from tests.experiments import shrunken

TOKENS = np.random.default_rng(0).integers(0, 256, (2, 16))


def build(recipe="bf16", **changes):
  config = dataclasses.replace(shrunken.MODEL, **changes)
  layer = model_lib.moe_config(config, recipe, experiment_lib.MeshConfig())
  return model_lib.Transformer(config, layer, rngs=nnx.Rngs(params=0))


def predict(model, tokens):
  graph, state = nnx.split(model)
  return _apply(graph, state, jnp.asarray(tokens))


@functools.partial(jax.jit, static_argnums=0)
def _apply(graph, state, tokens):
  return nnx.merge(graph, state)(tokens)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_no_logit_sees_a_later_token(recipe):
  model = build(recipe)
  before, _ = predict(model, TOKENS)
  changed = TOKENS.copy()
  changed[:, 9] = (changed[:, 9] + 1) % 256
  after, _ = predict(model, changed)
  np.testing.assert_array_equal(before[:, :9], after[:, :9])
  assert np.all(np.any(before[:, 9:] != after[:, 9:], axis=-1))


def test_shapes_and_stats():
  logits, stats = predict(build(num_layers=2), TOKENS)
  assert logits.shape == (2, 16, experiment_lib.VOCABULARY)
  assert logits.dtype == jnp.float32
  assert stats.load.shape == stats.dropped.shape == (2, 4)
  np.testing.assert_array_equal(stats.load.sum(axis=1), TOKENS.size * 2)
  np.testing.assert_array_equal(stats.dropped, 0)
  assert stats.extra_loss > 0


def test_recipes_start_from_the_same_parameters():
  leaves = [
    jax.tree.leaves(nnx.state(build(name), nnx.Param))
    for name in ("bf16", "mxfp8")
  ]
  for one, other in zip(*leaves, strict=True):
    np.testing.assert_array_equal(one, other)


def test_parameters_have_the_dtype_asked_for():
  for name in ("float32", "bfloat16"):
    params = nnx.state(build(param_dtype=name).blocks[0].attention, nnx.Param)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(name)}


def test_a_tied_head_has_no_parameters_of_its_own():
  tied = nnx.state(build(tied_head=True), nnx.Param)
  untied = nnx.state(build(), nnx.Param)
  count = [sum(x.size for x in jax.tree.leaves(s)) for s in (untied, tied)]
  assert count[0] - count[1] == experiment_lib.VOCABULARY * 32
  logits, _ = predict(build(tied_head=True), TOKENS)
  assert logits.shape == (2, 16, experiment_lib.VOCABULARY)


def test_remat_changes_no_bit():
  logits = [predict(build(remat=remat), TOKENS)[0] for remat in (False, True)]
  np.testing.assert_array_equal(*logits)


def test_rotation_keeps_norms_and_depends_on_distance():
  keys = jax.random.split(jax.random.key(0))
  query, key = (jax.random.normal(k, (1, 1, 1, 8)) for k in keys)
  query, key = (jnp.tile(x, (1, 6, 1, 1)) for x in (query, key))
  turned = [model_lib.rotate(x, 10_000.0)[0, :, 0] for x in (query, key)]
  norms = jnp.linalg.norm(turned[0], axis=-1)
  np.testing.assert_allclose(norms, norms[0], rtol=tolerance.FLOAT32)
  products = turned[0] @ turned[1].T
  for distance in range(1, 5):
    diagonal = jnp.diagonal(products, offset=distance)
    np.testing.assert_allclose(diagonal, diagonal[0], atol=tolerance.FLOAT32)
  assert abs(products[0, 0] - products[0, 3]) > 1e-2
