"""Bad arguments of a layer: each error names the numbers and the way out."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mxmoe_jax import (
  MoEConfig,
  QuantizedWeights,
  Recipe,
  arguments,
  moe,
  quantize_weights,
)

CONFIG = MoEConfig(d_model=64, d_ff=32, num_experts=4, top_k=2)


def call(x=None, config=CONFIG, drop=None, add=None, **options):
  """Traces a layer with one argument changed."""
  params = {
    name: jnp.zeros(shape)
    for name, shape in arguments.parameter_shapes(config).items()
    if name != drop
  } | (add or {})
  x = jnp.zeros((8, 64)) if x is None else x
  return jax.eval_shape(lambda: moe(x, params, config, **options))


def test_the_unchanged_call_is_fine():
  y, stats = call()
  assert y.shape == (8, 64)
  assert stats.load.shape == (4,)


@pytest.mark.parametrize(
  ("change", "text"),
  [
    (
      dict(x=jnp.zeros((8, 32))),
      r"last axis of x must be d_model; got x\(8, 32\) for d_model=64",
    ),
    (dict(x=jnp.zeros(())), r"got x\(\) for d_model=64"),
    (dict(drop="down"), r"missing \['down'\], unknown \[\]"),
    (dict(add=dict(bias=jnp.zeros(3))), r"missing \[\], unknown \['bias'\]"),
    (
      dict(add=dict(down=jnp.zeros((4, 64, 32)))),
      r"params\['down'\].*\(4, 32, 64\); got \(4, 64, 32\)",
    ),
    (
      dict(mask=jnp.ones((8, 1), bool)),
      r"leading shape \(8,\).*got bool\(8, 1\)",
    ),
    (dict(mask=jnp.ones(8, jnp.int32)), r"mask must be bool.*got int32\(8,\)"),
    (
      dict(balance_bias=jnp.zeros(4)),
      "config.balance_bias=False and balance_bias given",
    ),
    (
      dict(
        config=MoEConfig(
          d_model=64, d_ff=32, num_experts=4, top_k=2, balance_bias=True
        )
      ),
      "config.balance_bias=True and balance_bias missing",
    ),
    (
      dict(
        config=MoEConfig(
          d_model=64, d_ff=32, num_experts=4, top_k=2, balance_bias=True
        ),
        balance_bias=jnp.zeros(3),
      ),
      r"balance_bias must have shape \(4,\); got \(3,\)",
    ),
    (
      dict(
        config=MoEConfig(
          d_model=64, d_ff=32, num_experts=4, top_k=2, buffer_factor=0.5
        )
      ),
      "buffer_factor=0.5 leaves room for 8 rows",
    ),
  ],
)
def test_values(change, text):
  with pytest.raises(ValueError, match=text):
    call(**change)


@pytest.mark.parametrize(
  ("change", "text"),
  [
    (dict(x=jnp.zeros((8, 64), jnp.int32)), "x must be floating; got int32"),
    (dict(quantized={}), "made by quantize_weights"),
  ],
)
def test_types(change, text):
  with pytest.raises(TypeError, match=text):
    call(**change)


def quantized(**changes):
  """Copies made under another config."""
  config = dataclasses.replace(CONFIG, **changes)
  params = {
    name: jnp.ones(shape)
    for name, shape in arguments.parameter_shapes(config).items()
  }
  return quantize_weights(params, config)


def test_quantized_weights_must_be_those_of_the_config():
  call(quantized=quantized())
  for other, text in (
    (quantized(num_experts=8), r"shape \(4, 64, 64\).*got MxArray\(\[8, 64,"),
    (quantized(d_ff=64), r"shape \(4, 64, 64\).*got MxArray\(\[4, 64, 128\]"),
    (quantized(recipe=Recipe.bf16()), "quantized.gate_up must be given"),
    (quantized(recipe=Recipe(weight_block="32x32")), "and 1x32 blocks along"),
    (
      QuantizedWeights(
        gate_up=quantized().gate_up_grad,
        gate_up_grad=quantized().gate_up,
        down=quantized().down,
        down_grad=quantized().down_grad,
      ),
      "quantized.gate_up must have .* blocks along axis -2",
    ),
  ):
    with pytest.raises(ValueError, match=text):
      call(quantized=other)
  bf16 = dataclasses.replace(CONFIG, recipe=Recipe.bf16())
  call(config=bf16, quantized=quantized(recipe=Recipe.bf16()))
  with pytest.raises(ValueError, match="quantized.gate_up must be None"):
    call(config=bf16, quantized=quantized())


def test_quantize_weights_names_what_is_missing():
  with pytest.raises(ValueError, match=r"missing \['down'\]"):
    quantize_weights({"gate_up": jnp.ones((4, 64, 2, 32))}, CONFIG)


def test_shapes_of_all_parameters():
  full = MoEConfig(
    d_model=64, d_ff=32, num_experts=4, top_k=2, bias=True, d_ff_shared=96
  )
  assert arguments.parameter_shapes(full) == dict(
    router=(64, 4),
    gate_up=(4, 64, 2, 32),
    down=(4, 32, 64),
    gate_up_bias=(4, 2, 32),
    down_bias=(4, 64),
    shared_gate_up=(64, 2, 96),
    shared_down=(96, 64),
  )
