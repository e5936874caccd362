"""MoEConfig and Recipe: every field is checked, every preset has a name."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from mxmoe_jax import MoEConfig, Recipe
from pallas_kernels import cases

SIZES = dict(d_model=64, d_ff=96, num_experts=8, top_k=2)


@pytest.mark.parametrize(
  ("change", "text"),
  [
    (
      dict(d_model=100),
      "d_model must be a multiple of 32.*d_model=100. Use 128",
    ),
    (dict(d_ff=33), "d_ff must be a multiple of 32.*d_ff=33. Use 64"),
    (dict(top_k=9), "top_k=9, num_experts=8"),
    (dict(num_experts=0), "num_experts must be a positive integer; got 0"),
    (dict(d_model=64.0), "d_model must be a positive integer; got 64.0"),
    (dict(num_groups=3), "num_groups must divide.*num_groups=3, num_experts=8"),
    (
      dict(num_groups=4, groups_per_token=5),
      "groups_per_token=5, num_groups=4",
    ),
    (
      dict(num_groups=4, groups_per_token=1, top_k=3),
      "top_k=3, but 1 groups hold 2 experts",
    ),
    (dict(score="relu"), "score must be one of.*got 'relu'"),
    (dict(backend="cuda"), "backend must be one of.*got 'cuda'"),
    (dict(aux_loss_coef=-1.0), "aux_loss_coef must not be negative; got -1.0"),
    (dict(z_loss_coef=-0.1), "z_loss_coef must not be negative; got -0.1"),
    (dict(buffer_factor=0.0), "buffer_factor must be positive.*got 0.0"),
    (dict(d_ff_shared=-32), "d_ff_shared must be 0 or more; got -32"),
    (
      dict(expert_axis="data", data_axes=("data",)),
      "expert_axis='data' in data_axes",
    ),
    (dict(fsdp_axis="data"), "fsdp_axis='data', data_axes="),
    (dict(dtype=jnp.float32), "dtype must be bfloat16.*got float32"),
    (dict(param_dtype=jnp.int32), "param_dtype must be a floating dtype"),
  ],
)
def test_bad_values_are_named(change, text):
  with pytest.raises(ValueError, match=text):
    MoEConfig(**(SIZES | change))


@pytest.mark.parametrize(
  ("change", "text"),
  [
    (dict(data_axes="data"), "data_axes must be a tuple.*got 'data'"),
    (dict(recipe="mxfp8"), "recipe must be a Recipe.*got 'mxfp8'"),
    (dict(width=3), "unexpected keyword argument 'width'"),
  ],
)
def test_bad_types_are_named(change, text):
  with pytest.raises(TypeError, match=text):
    MoEConfig(**(SIZES | change))


def test_widths_are_free_in_bf16():
  config = MoEConfig(**(SIZES | dict(d_model=100)), recipe=Recipe.bf16())
  assert config.d_model == 100


@pytest.mark.parametrize(
  ("change", "text"),
  [
    (dict(rounding="up"), "rounding must be one of.*'rceil'.*got 'up'"),
    (dict(forward="fp8"), "forward must be one of.*got 'fp8'"),
    (dict(dispatch="fp8"), "dispatch must be one of.*got 'fp8'"),
    (dict(grad_dtype="e3m4"), "grad_dtype must be one of.*got 'e3m4'"),
    (dict(weight_block="16x16"), "weight_block must be one of.*'16x16'"),
    (dict(save_preactivations="no"), "save_preactivations must be one of"),
    (dict(save_hidden="no"), "save_hidden must be one of.*got 'no'"),
    (dict(hopper="fast"), "hopper must be one of.*got 'fast'"),
  ],
)
def test_recipes_name_the_choices(change, text):
  with pytest.raises(ValueError, match=text):
    Recipe(**change)


def test_presets_differ_and_have_their_names():
  presets = [Recipe.mxfp8(), Recipe.mxfp8_bf16_wgrad(), Recipe.bf16()]
  assert [r.name for r in presets] == ["mxfp8", "mxfp8_bf16_wgrad", "bf16"]
  assert len(set(presets)) == 3
  assert [r.uses_mxfp8 for r in presets] == [True, True, False]
  custom = Recipe.mxfp8(rounding="floor")
  assert custom.name == "custom(rounding=floor)"


def test_the_legs_that_feed_sums_are_bf16():
  recipe = Recipe.mxfp8()
  assert (recipe.dispatch, recipe.combine_grad) == ("mxfp8", "mxfp8")
  assert (recipe.combine, recipe.dispatch_grad) == ("bf16", "bf16")


def test_both_are_frozen_and_static():
  config = MoEConfig(**SIZES)
  with pytest.raises(dataclasses.FrozenInstanceError):
    config.top_k = 3
  assert hash(config) == hash(MoEConfig(**SIZES))
  doubled = jax.jit(lambda x, c: x * c.top_k, static_argnums=1)
  assert doubled(jnp.float32(3), config) == 6


@pytest.mark.parametrize("name", cases.MODELS)
def test_public_models_can_be_configured(name):
  shape = cases.MODELS[name]
  config = MoEConfig(
    d_model=shape.d_model,
    d_ff=shape.d_ff,
    num_experts=shape.num_experts,
    top_k=shape.top_k,
    score=shape.score,
    d_ff_shared=shape.shared_experts * shape.d_ff,
  )
  tokens = 1024
  rows = config.buffer_rows(tokens)
  assert rows % 128 == 0
  least = tokens * shape.top_k + shape.num_experts * 127
  assert least <= rows < least + 128


@pytest.mark.parametrize(
  ("factor", "ep", "want"),
  [
    (None, 1, 512),
    (None, 4, 2048),  # ep * min(top_k, 2 local experts) / top_k = 4
    (None, 8, 2048),  # one local expert: half of each token's rows
    (1.5, 4, 768),
    (1.5, 1, 512),  # never more than the worst case
  ],
)
def test_real_rows_of_a_buffer(factor, ep, want):
  config = MoEConfig(**SIZES, buffer_factor=factor)
  assert config.real_rows(256, ep) == want


def test_dropless_buffers_have_room_for_the_last_row():
  """64 * 11 / 15 is no binary fraction: the worst case is an integer."""
  config = MoEConfig(d_model=64, d_ff=32, num_experts=704, top_k=15)
  assert config.real_rows(1000, 64) == 64 * 11 * 1000
  limited = dataclasses.replace(config, buffer_factor=float("inf"))
  assert limited.real_rows(1000, 64) == 64 * 11 * 1000
