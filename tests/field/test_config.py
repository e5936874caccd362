"""Field cases of configurations; FCnn is the number of the report."""

from flax import nnx
import jax
import jax.numpy as jnp
import pytest

from mxmoe_jax import MoE, MoEConfig, Recipe, backend, grouped_matmul
from tests.field import inputs

PRESETS = (Recipe.mxfp8, Recipe.mxfp8_bf16_wgrad, Recipe.bf16)


def test_fc25_experts_that_do_not_divide(adapter):
  """github.com/pytorch/torchtitan/pull/4258: an obscure mesh failure."""
  with pytest.raises(ValueError, match="num_experts=6 over 4 devices"):
    adapter.construct(E=6, k=2, ep=4, devices=8)
  assert adapter.construct(E=8, k=2, ep=4, devices=8).config.num_experts == 8


def test_fc61_more_choices_than_experts(adapter):
  """github.com/kvcache-ai/ktransformers/pull/2041: reads out of range."""
  with pytest.raises(ValueError, match="top_k=8,.* num_experts=4"):
    adapter.construct(E=4, k=8, ep=1, devices=1)


def test_fc65_no_flag_of_the_ragged_product_is_needed(adapter):
  """github.com/jax-ml/jax/issues/40888: it imports an unreleased module.

  No path of the library is built on `jax.lax.ragged_dot`, so the flag has
  nothing to break.
  """
  i = inputs.matmul(3, 64, (2, 64, 32), [44, 20])
  flag = "jax_ragged_dot_use_gpu_pallas_triton_lowering"
  before = getattr(jax.config, flag)
  jax.config.update(flag, True)
  try:
    text = str(
      jax.make_jaxpr(
        lambda a, b: grouped_matmul(
          a, b, i["group_sizes"], recipe=Recipe.bf16()
        )
      )(i["lhs"], i["rhs"])
    )
    inputs.assert_exact(adapter, i)
  finally:
    jax.config.update(flag, before)
  assert "ragged_dot" not in text


@pytest.mark.parametrize("preset", PRESETS)
def test_fc66_kernels_are_refused_at_start_up(preset):
  """github.com/AI-Hypercomputer/maxtext/pull/4955: pairs that fail late.

  The pairs that run are in `tests/mxmoe_jax/test_layer.py`.
  """
  with pytest.raises(NotImplementedError, match="backend='mosaic': no NVIDIA"):
    backend.select("mosaic", jax.devices()[0])
  config = MoEConfig(
    d_model=64,
    d_ff=64,
    num_experts=4,
    top_k=2,
    recipe=preset(),
    backend="mosaic",
  )
  layer = MoE(config, rngs=nnx.Rngs(0))
  with pytest.raises(NotImplementedError, match="Use backend='xla', or 'auto'"):
    jax.eval_shape(layer, jnp.ones((32, 64)))


@pytest.mark.parametrize(
  ("capability", "want"),
  [
    ("8.0", None),
    ("80", None),
    ("9.0", "hopper"),
    ("90", None),
    ("10.0", "blackwell"),
    ("100", None),
    ("12.0", None),
    ("gfx950", None),
    ("", None),
    (None, None),
  ],
)
def test_fc67_generation_of_a_capability(capability, want):
  """github.com/marin-community/marin/pull/5899: '80' read as 80.0 >= 10."""
  assert backend.generation(capability) == want
