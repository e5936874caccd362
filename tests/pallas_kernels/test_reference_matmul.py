"""The grouped products and the activation against float64."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups, mxfp8, reference
from tests import tolerance

MODES = ("forward", "input_grad", "weight_grad")
ROWS, GROUPS, K, N = cases.SMALL_MATMULS[1]


def float64(x):
  """The numbers that an operand stands for."""
  if isinstance(x, mxfp8.MxArray):
    x = x.dequantize(jnp.float32)
  return np.asarray(x).astype(np.float64)


def operands(shape, mode, precision):
  """(lhs, rhs) of one product in aligned rows, bf16 or MXFP8."""
  rows, count, k, n = shape
  rows = groups.aligned_rows(rows, count)
  second = (rows, n) if mode == "weight_grad" else (count, k, n)
  if mode == "input_grad":
    second = (count, n, k)
  keys = jax.random.split(jax.random.key(1))
  lhs = jax.random.normal(keys[0], (rows, k), jnp.bfloat16)
  rhs = jax.random.normal(keys[1], second, jnp.bfloat16)
  if precision == "bf16":
    return lhs, rhs
  axes = {"forward": (-1, -2), "input_grad": (-1, -1), "weight_grad": (-2, -2)}
  quantize = jax.jit(reference.quantize, static_argnames="axis")
  return tuple(
    quantize(x, axis) for x, axis in zip((lhs, rhs), axes[mode], strict=True)
  )


@functools.partial(jax.jit, static_argnames=("mode", "out_dtype"))
def product(lhs, rhs, sizes, mode, out_dtype):
  layout = groups.group_layout(sizes, lhs.shape[0])
  if mode == "weight_grad":
    # The contract: padding rows of both operands are zero.
    keep = layout.row_valid()[:, None]
    lhs, rhs = (
      jax.tree.map(
        lambda a: (
          jnp.where(keep, a, jnp.zeros((), a.dtype))
          if a.shape[0] == layout.rows
          else a
        ),
        x,
      )
      for x in (lhs, rhs)
    )
    return reference.grouped_wgrad(lhs, rhs, layout, out_dtype=out_dtype)
  return reference.grouped_matmul(
    lhs,
    rhs,
    layout,
    transpose_rhs=mode == "input_grad",
    out_dtype=out_dtype,
  )


def expected(lhs, rhs, sizes, mode):
  """The product in float64, group by group."""
  starts = np.cumsum([0] + [-(-size // 128) * 128 for size in sizes])
  spans = [slice(a, a + n) for a, n in zip(starts, sizes, strict=False)]
  if mode == "weight_grad":
    return np.stack([lhs[span].T @ rhs[span] for span in spans])
  w = np.swapaxes(rhs, 1, 2) if mode == "input_grad" else rhs
  out = np.zeros((lhs.shape[0], w.shape[2]))
  for g, span in enumerate(spans):
    out[span] = lhs[span] @ w[g]
  return out


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
  ("shape", "precision"),
  list(zip(cases.SMALL_MATMULS, ("bf16", "mxfp8", "bf16"), strict=True)),
)
def test_every_pattern_within_the_bound(shape, mode, precision):
  lhs, rhs = operands(shape, mode, precision)
  a, b = float64(lhs), float64(rhs)
  out_dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
  for pattern in cases.PATTERNS:
    sizes = cases.group_sizes(pattern, shape[1], shape[0])
    got = product(lhs, rhs, jnp.asarray(sizes, jnp.int32), mode, out_dtype)
    assert got.dtype == out_dtype
    want = expected(a, b, sizes, mode)
    bound = tolerance.matmul_bound(
      expected(np.abs(a), np.abs(b), sizes, mode),
      want,
      bf16=out_dtype == jnp.bfloat16,
    )
    assert (np.abs(float64(got) - want) <= bound).all(), pattern
    untouched = want == 0 if mode == "weight_grad" else bound == 0
    assert not float64(got)[untouched].any(), pattern


def test_rows_outside_every_group_may_hold_anything():
  lhs, rhs = operands(cases.SMALL_MATMULS[1], "forward", "bf16")
  sizes = jnp.asarray(cases.group_sizes("skewed", GROUPS, ROWS), jnp.int32)
  layout = groups.group_layout(sizes, lhs.shape[0])
  poisoned = jnp.where(layout.row_valid()[:, None], lhs, jnp.nan)
  got = product(poisoned, rhs, sizes, "forward", jnp.float32)
  want = product(lhs, rhs, sizes, "forward", jnp.float32)
  chex.assert_trees_all_equal(got, want)


def test_a_group_without_rows_has_zero_gradient():
  lhs, rhs = operands(cases.SMALL_MATMULS[1], "weight_grad", "mxfp8")
  got = product(
    lhs, rhs, jnp.asarray([100, 0, 3], jnp.int32), "weight_grad", jnp.float32
  )
  assert not np.asarray(got)[1].any()
  assert np.asarray(got)[0].any()
  assert np.asarray(got)[2].any()


FORMS = {
  "swiglu": reference.Swiglu(),
  "gpt_oss": reference.Swiglu(limit=7.0, alpha=1.702, up_offset=1.0),
  "tight": reference.Swiglu(limit=0.5),
}


@pytest.fixture(scope="module")
def arrays():
  rows, width = groups.aligned_rows(101, 3), 64
  keys = jax.random.split(jax.random.key(3), 4)
  return dict(
    pre=3 * jax.random.normal(keys[0], (rows, 2 * width), jnp.bfloat16),
    dh=jax.random.normal(keys[1], (rows, width), jnp.bfloat16),
    weight=jax.random.uniform(keys[2], (rows,)),
    bias=jax.random.normal(keys[3], (3, 2 * width)),
  )


class TestSwiglu:
  """The activation and its gradient, with bias, weights and padding."""

  SIZES = jnp.asarray([40, 0, 61], jnp.int32)

  def exact(self, arrays, form):
    """(hidden, dpre, dweight) in float64, by JAX's own gradient."""
    layout = groups.group_layout(self.SIZES, arrays["pre"].shape[0])
    group, valid = map(np.asarray, (layout.row_group(), layout.row_valid()))
    with jax.enable_x64(True):
      wide = {name: jnp.asarray(float64(a)) for name, a in arrays.items()}

      def hidden(pre, weight):
        gate, up = jnp.split(pre + wide["bias"][group], 2, axis=-1)
        if form.limit is not None:
          gate = jnp.where(gate > form.limit, form.limit, gate)
          up = jnp.where(
            jnp.abs(up) > form.limit, jnp.sign(up) * form.limit, up
          )
        act = gate / (1 + jnp.exp(-form.alpha * gate)) * (up + form.up_offset)
        return jnp.where(valid[:, None], act * weight[:, None], 0.0)

      out, pull = jax.vjp(hidden, wide["pre"], wide["weight"])
      return tuple(map(np.asarray, (out, *pull(wide["dh"]))))

  @pytest.mark.parametrize("name", FORMS)
  def test_against_float64(self, arrays, name):
    form = FORMS[name]
    layout = groups.group_layout(self.SIZES, arrays["pre"].shape[0])
    options = dict(form=form, bias=arrays["bias"])

    @jax.jit
    def both(pre, dh, weight):
      hidden = reference.swiglu(pre, weight, layout, **options)
      return hidden, *reference.swiglu_backward(
        pre, dh, weight, layout, **options
      )

    got = both(arrays["pre"], arrays["dh"], arrays["weight"])
    assert [a.dtype for a in got] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    for have, want in zip(
      map(float64, got), self.exact(arrays, form), strict=True
    ):
      scale = np.abs(want) + np.sqrt(np.mean(np.square(want)))
      error = np.abs(have - want)
      assert (error <= tolerance.BF16_ROUNDING * scale).all()
      assert not have[want == 0].any()

  def test_padding_never_reaches_a_result(self, arrays):
    layout = groups.group_layout(self.SIZES, arrays["pre"].shape[0])
    keep = layout.row_valid()

    @jax.jit
    def both(pre, dh, weight):
      hidden = reference.swiglu(pre, weight, layout)
      return hidden, *reference.swiglu_backward(pre, dh, weight, layout)

    clean = tuple(arrays[name] for name in ("pre", "dh", "weight"))
    dirty = tuple(
      jnp.where(keep.reshape(-1, *[1] * (a.ndim - 1)), a, jnp.nan)
      for a in clean
    )
    for have, want in zip(both(*dirty), both(*clean), strict=True):
      np.testing.assert_array_equal(have, want)

  @pytest.mark.parametrize("limit", [0.0, -1.0])
  def test_a_limit_must_be_positive(self, limit):
    with pytest.raises(ValueError, match=f"positive or None; got {limit}"):
      reference.Swiglu(limit=limit)
