"""What kernels leave unwritten reaches no result and no gradient.

A grouped matmul on a GPU does not write rows past the last group. Here the
reference's product gets NaN there, forward and backward.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxmoe_jax import Recipe
from mxmoe_jax import stage as stage_lib
from pallas_kernels import groups
from tests.mxmoe_jax import layers

RECIPES = {
  "mxfp8": Recipe.mxfp8(),
  "bf16": Recipe.bf16(),
  "bf16_wgrad": Recipe.mxfp8_bf16_wgrad(),
  "mxfp8_legs": Recipe.mxfp8(combine="mxfp8", dispatch_grad="mxfp8"),
  "small": Recipe.mxfp8(save_preactivations="mxfp8", save_hidden="recompute"),
  "recompute": Recipe.mxfp8(save_preactivations="recompute"),
}


@pytest.fixture
def poison(monkeypatch):
  """Every grouped matmul leaves NaN past its last group; counts the calls."""
  make, calls = stage_lib.make_stage, []

  def poisoned(*args, **options):
    stage = make(*args, **options)

    def grouped_matmul(lhs, rhs, layout, **more):
      calls.append(layout.rows)
      out = stage.ops.grouped_matmul(lhs, rhs, layout, **more)
      tile = jnp.arange(layout.rows)[:, None] // groups.ROW_ALIGN
      return jnp.where(tile < layout.tile_count(), out, jnp.nan)

    ops = dataclasses.replace(stage.ops, grouped_matmul=grouped_matmul)
    return dataclasses.replace(stage, ops=ops)

  def start():
    jax.clear_caches()
    monkeypatch.setattr(stage_lib, "make_stage", poisoned)
    return calls

  yield start
  jax.clear_caches()


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_unwritten_rows_reach_nothing(poison, recipe):
  cfg = layers.config(recipe=recipe, bias=True)
  rows = cfg.buffer_rows(layers.TOKENS, 1)
  assert rows > layers.TOKENS * layers.TOP_K + groups.ROW_ALIGN
  want, _ = layers.run(cfg)
  calls = poison()
  got, _ = layers.run(cfg)
  assert len(calls) >= 4  # two forward, two backward
  for name, array in want.items():
    np.testing.assert_array_equal(got[name], array, err_msg=name)
