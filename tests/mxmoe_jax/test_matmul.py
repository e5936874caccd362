"""quantize, dequantize and grouped_matmul as JAX users meet them.

The exact cases are in `tests/field/test_matmul.py`.
"""

import functools

import chex
import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import pytest

from mxmoe_jax import (
  MoEConfig,
  Recipe,
  dequantize,
  grouped_matmul,
  quantize,
  quantize_weights,
)
from pallas_kernels import MxArray, cases, mxfp8, reference
from tests import tolerance

ROWS, GROUPS, K, N = 512, 4, 256, 128
SPARE = 40  # rows past the last group
RECIPES = {
  "mxfp8": Recipe.mxfp8(),
  "bf16_wgrad": Recipe.mxfp8_bf16_wgrad(),
  "e5m2": Recipe.mxfp8(grad_dtype="e5m2"),
  "square": Recipe.mxfp8(weight_block="32x32"),
}


def normal(seed, shape, dtype=jnp.bfloat16):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


@functools.partial(jax.jit, static_argnames="recipe")
def vjp(lhs, rhs, sizes, dout, recipe):
  matmul = functools.partial(grouped_matmul, recipe=recipe)
  out, pull = jax.vjp(lambda a, b: matmul(a, b, sizes), lhs, rhs)
  return dict(zip(("out", "dlhs", "drhs"), (out, *pull(dout)), strict=True))


def float64(lhs, rhs, sizes, dout):
  """The same by groups in float64, unquantized."""
  lhs, rhs, dout = (np.asarray(a).astype(np.float64) for a in (lhs, rhs, dout))
  out, dlhs, drhs = (
    np.zeros(dout.shape),
    np.zeros(lhs.shape),
    np.zeros(rhs.shape),
  )
  for g, end in enumerate(np.cumsum(sizes)):
    span = slice(end - sizes[g], end)
    out[span], dlhs[span] = lhs[span] @ rhs[g], dout[span] @ rhs[g].T
    drhs[g] = lhs[span].T @ dout[span]
  return dict(out=out, dlhs=dlhs, drhs=drhs)


@pytest.mark.parametrize("name", RECIPES)
def test_noise_of_one_matmul(name):
  lhs, rhs = normal(0, (ROWS + SPARE, K)), normal(1, (GROUPS, K, N))
  dout = normal(2, (ROWS + SPARE, N))
  recipe = RECIPES[name]
  floors = tolerance.MATMUL_E5M2 if name == "e5m2" else tolerance.MATMUL
  for pattern in ("even", "skewed", "empty_first"):
    sizes = cases.group_sizes(pattern, GROUPS, ROWS)
    got = vjp(lhs, rhs, jnp.asarray(sizes), dout, recipe)
    want = float64(lhs, rhs, sizes, dout)
    for array, floor in floors.items():
      assert tolerance.sqnr(got[array], want[array]) >= floor, array
    assert not np.asarray(got["out"][ROWS:]).any()
    assert not np.asarray(got["dlhs"][ROWS:]).any()
    empty = [g for g, size in enumerate(sizes) if not size]
    assert not np.asarray(got["drhs"])[empty].any()


def test_bf16_within_the_bound_of_its_sums():
  lhs, rhs = normal(0, (ROWS + SPARE, K)), normal(1, (GROUPS, K, N))
  dout = normal(2, (ROWS + SPARE, N))
  sizes = cases.group_sizes("skewed", GROUPS, ROWS)
  got = vjp(lhs, rhs, jnp.asarray(sizes), dout, Recipe.bf16())
  want = float64(lhs, rhs, sizes, dout)
  size = float64(*map(jnp.abs, (lhs, rhs)), sizes, jnp.abs(dout))
  for name, array in got.items():
    bound = tolerance.matmul_bound(size[name], want[name], bf16=True)
    error = np.abs(np.asarray(array).astype(np.float64) - want[name])
    assert (error <= bound).all(), name


def test_same_contract_as_ragged_dot():
  lhs, rhs = normal(0, (70, 64), jnp.float32), normal(1, (3, 64, 32))
  rhs = rhs.astype(jnp.float32)
  sizes = jnp.asarray([44, 0, 20])
  matmul = jax.jit(functools.partial(grouped_matmul, recipe=Recipe.bf16()))
  got = matmul(lhs, rhs, sizes)
  want = lax.ragged_dot(lhs, rhs, sizes)
  assert got.dtype == want.dtype
  rounded = 2 * tolerance.BF16_ROUNDING  # of both operands
  size = lax.ragged_dot(jnp.abs(lhs), jnp.abs(rhs), sizes)
  assert (jnp.abs(got - want) <= rounded * size).all()


def test_prequantized_operands_give_the_same_bits():
  lhs, rhs = normal(0, (64, 64)), normal(1, (2, 64, 32))
  sizes = jnp.asarray([40, 24])

  @jax.jit
  def all_ways(lhs, rhs):
    a, b = quantize(lhs), quantize(rhs, axis=-2)
    pairs = ((lhs, rhs), (a, rhs), (lhs, b), (a, b))
    return [grouped_matmul(*pair, sizes) for pair in pairs]

  want, *others = all_ways(lhs, rhs)
  for got in others:
    chex.assert_trees_all_equal(got, want)


def test_gradient_beside_a_prequantized_operand():
  lhs, rhs = normal(0, (64, 64)), normal(1, (2, 64, 32))
  sizes = jnp.asarray([40, 24])
  b = quantize(rhs, axis=-2, block="32x32")

  def loss(lhs, rhs):
    return grouped_matmul(lhs, rhs, sizes).astype(jnp.float32).sum()

  square = functools.partial(
    grouped_matmul, recipe=Recipe.mxfp8(weight_block="32x32")
  )
  got = jax.jit(jax.grad(loss))(lhs, b)
  want = jax.jit(
    jax.grad(lambda a, b: square(a, b, sizes).astype(jnp.float32).sum())
  )(lhs, rhs)
  chex.assert_trees_all_equal(got, want)


@pytest.mark.parametrize("wanted", [jnp.bfloat16, jnp.float32])
def test_dtype_of_the_result(wanted):
  lhs, rhs = normal(0, (32, 32)), normal(1, (1, 32, 32))
  out = jax.eval_shape(
    lambda: grouped_matmul(
      lhs, rhs, jnp.asarray([32]), preferred_element_type=wanted
    )
  )
  assert out.dtype == wanted


def test_traced_sizes_past_the_rows_are_cut():
  lhs, rhs = normal(0, (64, 32)), normal(1, (2, 32, 32))
  matmul = jax.jit(grouped_matmul)
  got = matmul(lhs, rhs, jnp.asarray([40, 99]))
  chex.assert_trees_all_equal(got, matmul(lhs, rhs, jnp.asarray([40, 24])))


class TestBadInput:
  """Every refusal names the numbers and the way out."""

  LHS, RHS = jnp.ones((64, 32)), jnp.ones((2, 32, 32))
  SIZES = jnp.asarray([40, 24])

  @pytest.mark.parametrize(
    ("lhs", "rhs", "sizes", "text"),
    [
      ((64, 32), (2, 64, 32), [1, 1], r"lhs\(64, 32\) and rhs\(2, 64, 32\)"),
      ((64, 32), (32, 32), [1, 1], r"rhs \[G, K, N\].*rhs\(32, 32\)"),
      ((64, 32), (3, 32, 32), [1, 1], r"shape \(2,\) for 3 groups"),
      ((64, 32), (2, 32, 32), [[1], [1]], r"shape \(2, 1\) for 2 groups"),
      ((64, 32), (2, 32, 32), [40, 25], "sum 65, .*for 64 rows"),
      ((64, 32), (2, 32, 32), [40, -1], r"\[40, -1\]"),
      ((64, 33), (2, 33, 32), [1, 1], "K must be.*32.*K=33. Pad it to 64"),
      ((64, 32), (2, 32, 40), [1, 1], "N must be.*32.*N=40. Pad it to 64"),
    ],
  )
  def test_shapes(self, lhs, rhs, sizes, text):
    with pytest.raises(ValueError, match=text):
      grouped_matmul(jnp.ones(lhs), jnp.ones(rhs), np.asarray(sizes))

  def test_odd_widths_are_fine_in_bf16(self):
    out = grouped_matmul(
      jnp.ones((4, 33)),
      jnp.ones((1, 33, 5)),
      jnp.asarray([4]),
      recipe=Recipe.bf16(),
    )
    assert (out == 33).all()

  def test_float_sizes(self):
    with pytest.raises(TypeError, match=r"must be integers.*float32"):
      grouped_matmul(self.LHS, self.RHS, self.SIZES.astype(jnp.float32))

  def test_a_recipe_by_name(self):
    with pytest.raises(TypeError, match="must be a Recipe; got 'mxfp8'"):
      grouped_matmul(self.LHS, self.RHS, self.SIZES, recipe="mxfp8")

  def test_sizes_may_be_a_list(self):
    out = grouped_matmul(self.LHS, self.RHS, [40, 24])
    assert (out == 32).all()

  def test_blocks_along_another_axis(self):
    with pytest.raises(ValueError, match="lhs needs 1x32.*axis=-1"):
      grouped_matmul(quantize(self.LHS, 0), self.RHS, self.SIZES)
    with pytest.raises(ValueError, match="rhs needs blocks along axis -2"):
      grouped_matmul(self.LHS, quantize(self.RHS), self.SIZES)

  def test_gradient_with_respect_to_an_mxarray(self):
    w = quantize(self.RHS, axis=-2)

    def product(w):
      return grouped_matmul(self.LHS, w, self.SIZES)

    with pytest.raises(TypeError, match="MxArray cannot be differentiated"):
      jax.vjp(product, w)
    with pytest.raises(TypeError, match="MxArray cannot be differentiated"):
      jax.vjp(dequantize, w)

  def test_gradient_through_quantize(self):
    def loss(x):
      return dequantize(quantize(x), jnp.float32).sum()

    with pytest.raises(TypeError, match="silently 0.*stop_gradient"):
      jax.grad(loss)(self.LHS)
    stopped = jax.grad(lambda x: loss(lax.stop_gradient(x)))(self.LHS)
    assert not stopped.any()

  def test_forward_mode(self):
    def product(x):
      return grouped_matmul(x, self.RHS, self.SIZES)

    with pytest.raises(TypeError, match="forward-mode"):
      jax.jvp(product, (self.LHS,), (self.LHS,))

  def test_vmap_names_the_way_out(self):
    with pytest.raises(NotImplementedError, match="over 2.*Fold the axis"):
      jax.vmap(lambda x: grouped_matmul(x, self.RHS, self.SIZES))(
        jnp.ones((2, 64, 32))
      )

  @pytest.mark.parametrize("dtype", [jnp.int32, jnp.float8_e4m3fn])
  def test_quantize_takes_floats_of_two_or_four_bytes(self, dtype):
    with pytest.raises(TypeError, match=f"float32; got {jnp.dtype(dtype)}"):
      quantize(jnp.ones((1, 32), dtype))

  def test_quantize_names_the_axes_that_there_are(self):
    with pytest.raises(ValueError, match=r"-2..1 for x\(1, 32\); got 2"):
      quantize(jnp.ones((1, 32)), axis=2)

  def test_dequantize(self):
    with pytest.raises(TypeError, match="x must be an MxArray"):
      dequantize(self.LHS)
    with pytest.raises(ValueError, match="bfloat16 or float32; got float16"):
      dequantize(quantize(self.LHS), jnp.float16)


def test_public_quantize_is_the_reference():
  x = normal(0, (64, 96))
  for options in (
    dict(rounding="floor", dtype=mxfp8.E5M2),
    dict(block="32x32", layout="blocked"),
  ):
    got, want = quantize(x, **options), reference.quantize(x, **options)
    assert isinstance(got, MxArray)
    chex.assert_trees_all_equal(got.scale, want.scale)
    chex.assert_trees_all_equal(got.dequantize(), want.dequantize())


@pytest.mark.parametrize(
  ("recipe", "missing"),
  [
    (Recipe.mxfp8(), []),
    (Recipe.bf16(), ["gate_up", "gate_up_grad", "down", "down_grad"]),
    (Recipe.mxfp8(input_grad="bf16"), ["gate_up_grad", "down_grad"]),
  ],
)
def test_quantized_weights_hold_what_the_recipe_reads(recipe, missing):
  config = MoEConfig(d_model=64, d_ff=96, num_experts=2, top_k=1, recipe=recipe)
  params = dict(gate_up=normal(0, (2, 64, 2, 96)), down=normal(1, (2, 96, 64)))
  views = jax.eval_shape(lambda p: quantize_weights(p, config), params)
  axes = dict(gate_up=-2, gate_up_grad=-1, down=-2, down_grad=-1)
  for name, axis in axes.items():
    view = getattr(views, name)
    assert (view is None) == (name in missing)
    assert view is None or view.axis == axis


def test_square_blocks_need_one_copy_of_the_weights():
  config = MoEConfig(
    d_model=64,
    d_ff=96,
    num_experts=2,
    top_k=1,
    recipe=Recipe.mxfp8(weight_block="32x32"),
  )
  params = dict(gate_up=normal(0, (2, 64, 2, 96)), down=normal(1, (2, 96, 64)))
  views = quantize_weights(params, config)
  assert views.gate_up is views.gate_up_grad
  assert views.down is views.down_grad
