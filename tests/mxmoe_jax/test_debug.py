"""Reports on the tensors of a layer: right numbers, every tensor, in jit."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxmoe_jax import Recipe, debug
from pallas_kernels import mxfp8, reference
from tests import tolerance
from tests.mxmoe_jax import layers

E4M3_MAX = 448.0
SMALL = dict(d_model=64, d_ff=64, num_experts=2, top_k=2)


def test_sqnr_is_that_of_the_tests():
  want = layers.normal("want", (64, 32), jnp.float32)
  got = want + 0.01 * layers.normal("noise", (64, 32), jnp.float32)
  found = float(debug.sqnr(got, want))
  assert found == pytest.approx(tolerance.sqnr(got, want), abs=0.01)
  assert math.isinf(debug.sqnr(want, want))
  huge = jnp.full((4,), 3e38)
  assert float(debug.sqnr(huge / 2, huge)) == pytest.approx(6.02, abs=0.01)
  with pytest.raises(ValueError, match="one shape"):
    debug.sqnr(got[:3], want)


@pytest.mark.parametrize("layout", ["linear", "blocked"])
def test_shares_and_scales_of_a_known_tensor(layout):
  x = np.zeros((4, 64), np.float32)
  x[0] = 1.0  # both blocks alike
  x[1, :32], x[1, 32:] = 2.0**10, 1.0  # a spread of 10
  x[2, 0], x[2, 1:32] = 500.0, 2.0**-20  # saturates under "floor"; 31 vanish
  mx = reference.quantize(jnp.asarray(x), rounding="floor", layout=layout)
  report = jax.jit(debug.tensor_report)(jnp.asarray(x), mx)
  assert report.saturated == pytest.approx(1 / x.size)
  assert report.underflowed == pytest.approx(31 / np.count_nonzero(x))
  scales = np.asarray(mx.with_layout("linear").scale)
  np.testing.assert_array_equal(
    report.histogram, np.bincount(scales.reshape(-1), minlength=256)
  )
  spread = np.zeros(256, int)
  spread[0], spread[10] = 3, 1
  np.testing.assert_array_equal(report.spread, spread)
  assert report.size == x.size


def test_what_folding_would_change():
  x = np.full((2, 64), 2.0**-20, np.float32)
  x[0, :32] = 1.0  # the other half is below half the smallest of the row
  x[1, 0], x[1, 32] = 1.0, 2.0**-7  # 31 are 0 before, 31 fall below here too
  mx = reference.quantize(jnp.asarray(x))
  changed, lost, beyond = debug.fold_change(mx)
  assert changed == pytest.approx((32 + 31) / 128)
  assert lost == pytest.approx((32 + 31) / (128 - 31))
  assert beyond == 0
  again = debug.fold_change(reference.fold(mx))
  assert [float(n) for n in again] == [0.0, 0.0, 0.0]


def test_a_block_of_nan_counts_nowhere_in_the_spread():
  x = jnp.ones((1, 96)).at[0, 40].set(jnp.nan).at[0, 80].set(2.0**5)
  assert int(debug.scale_spread(reference.quantize(x))[0, 0]) == 5
  assert int(debug.saturated(x, reference.quantize(x))) == 0


# Which tensors a recipe quantizes, and into which blocks.
WEIGHTS = {
  f"{name} {use}"
  for name in ("gate_up", "down")
  for use in ("forward", "input_grad")
}
ROWS = {"x rows", "dy rows", "hidden rows", "dpre rows"}
COLUMNS = {"x columns", "dy columns", "hidden columns", "dpre columns"}


def names(recipe, **options):
  """Names of the tensors reported of a small layer, nothing computed."""
  cfg = layers.config(**SMALL, recipe=recipe)
  reported = jax.eval_shape(
    lambda x, p, dy: debug.layer_report(x, p, cfg, **{"dy": dy, **options}),
    layers.tokens(32, width=64),
    layers.params(cfg),
    layers.tokens(32, "dy", 64),
  )
  return reported.keys()


def test_every_tensor_of_the_layer_is_reported():
  everything = WEIGHTS | ROWS | COLUMNS
  assert names(Recipe.mxfp8()) == everything
  recipe = Recipe.mxfp8(
    save_preactivations="mxfp8", combine="mxfp8", dispatch_grad="mxfp8"
  )
  more = {"out rows", "pre rows", "dx rows"}
  assert names(recipe) == everything | more
  folded = names(Recipe.mxfp8(hopper="folded"), folded=True)
  assert folded == everything | {"x folded", "dy folded"}
  recipe = Recipe.mxfp8_bf16_wgrad()
  assert names(recipe) == WEIGHTS | ROWS
  assert names(recipe, dy=None) == {
    *("x rows", "hidden rows", "gate_up forward", "down forward")
  }
  assert names(Recipe.bf16()) == set()


@pytest.mark.parametrize("folded", [False, True])
def test_normal_numbers_lose_what_the_format_costs(folded):
  cfg = layers.config(**SMALL)
  report = jax.jit(lambda x, p: debug.layer_report(x, p, cfg, folded=folded))
  found = report(layers.tokens(32, width=64), layers.params(cfg))
  for name, tensor in found.items():
    if name != "x folded":  # compared with x rows, of which nothing is lost
      assert tensor.sqnr == pytest.approx(
        tolerance.ROUND_TRIP["rceil"], abs=1.5
      ), name
    assert tensor.fold_beyond == 0
    assert tensor.histogram[mxfp8.SCALE_NAN] == 0
    assert tensor.histogram.sum() * mxfp8.BLOCK == tensor.size
  for name in ("hidden rows", "gate_up forward"):
    assert (np.flatnonzero(found[name].spread).max() > 0) is not folded
