"""The folded recipe through the whole layer, as Hopper runs it.

A CPU never folds; here it is told to, and runs the reference.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxmoe_jax import Recipe, quantize_weights, routing
from mxmoe_jax import stage as stage_lib
from tests import real_tensors, tolerance
from tests.mxmoe_jax import float64_layer, layers

FOLDED = Recipe.mxfp8(hopper="folded")


@pytest.fixture
def folding(monkeypatch):
  """Every layer with a folded recipe folds, whatever the device."""

  def folds_on(config, device=None):
    del device
    return config.recipe.hopper == "folded"

  monkeypatch.setattr(stage_lib, "folds_on", folds_on)
  jax.clear_caches()
  yield
  jax.clear_caches()


def _noise(cfg, inputs=None):
  """SQNR in dB against the float64 layer, by array; of (x, params, dy)."""
  inputs = inputs or (
    layers.tokens(), layers.params(cfg), layers.tokens(name="dy")
  )  # fmt: skip
  x, params, dy = inputs
  got, _ = layers.step(*inputs, cfg)
  ids = np.asarray(routing.route(x, params["router"], cfg).experts)
  want = float64_layer.run(x, params, ids, dy, cfg)
  return {name: tolerance.sqnr(got[name], want[name]) for name in want}


def _inputs(kind):
  """(config, x, params, dy); outliers: channels of 100 times the others."""
  if kind == "real":
    found = real_tensors.layer()
    return found.config, found.x, found.params, found.dy
  cfg = layers.config()
  x, dy = layers.tokens(), layers.tokens(name="dy")
  if kind == "outliers":
    x, dy = (a.at[:, jnp.asarray([5, 70])].multiply(100) for a in (x, dy))
  return cfg, x, layers.params(cfg), dy


@pytest.mark.usefixtures("folding")
@pytest.mark.parametrize("kind", ["normal", "outliers", "real"])
def test_folding_costs_no_more_than_its_bar(kind):
  cfg, *inputs = _inputs(kind)
  folded = _noise(dataclasses.replace(cfg, recipe=FOLDED), tuple(inputs))
  exact = _noise(cfg, tuple(inputs))
  loss = {name: exact[name] - folded[name] for name in exact}
  assert max(loss.values()) <= tolerance.FOLDED_COSTS, loss
  assert any(loss.values()), "nothing was folded"


@pytest.mark.usefixtures("folding")
@pytest.mark.parametrize("recipe", [
    Recipe.mxfp8(hopper="folded", dispatch="bf16", combine_grad="bf16"),
    Recipe.mxfp8(hopper="folded", save_preactivations="recompute",
                 save_hidden="recompute"),
    Recipe.mxfp8_bf16_wgrad(hopper="folded")])
def test_folding_goes_with_the_other_choices(recipe):
  got = _noise(layers.config(recipe=recipe))
  floors = tolerance.layer_floors(recipe)
  kinds = {"y": "y", "x": "x", "router": "router"}
  low = {name: db for name, db in got.items()
         if db < floors[kinds.get(name, "experts")]}
  assert low == {}, got


@pytest.mark.usefixtures("folding")
def test_folded_copies_of_weights_give_the_same_bits():
  cfg = layers.config(recipe=FOLDED)
  copies = quantize_weights(layers.params(cfg), cfg)
  e, d, f = cfg.num_experts, cfg.d_model, cfg.d_ff
  shapes = {name: getattr(copies, name).shape for name in (
      "gate_up", "gate_up_grad", "down", "down_grad")}
  assert shapes == dict(gate_up=(e, 2 * f, d), gate_up_grad=(e, d, 2 * f),
                        down=(e, d, f), down_grad=(e, f, d))
  got, _ = layers.run(cfg, quantized=copies)
  want, _ = layers.run(cfg)
  for name, array in want.items():
    np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.mark.usefixtures("folding")
def test_copies_that_are_not_folded_are_refused():
  plain = quantize_weights(layers.params(layers.config()), layers.config())
  with pytest.raises(ValueError, match="reads folded copies"):
    layers.run(layers.config(recipe=FOLDED), quantized=plain)


def test_a_cpu_folds_nothing():
  got, _ = layers.run(layers.config(recipe=FOLDED))
  want, _ = layers.run(layers.config())
  np.testing.assert_array_equal(got["y"], want["y"])
