"""Interpreted SwiGLU, forward and backward, equals the reference."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups, mxfp8, reference, swiglu
from tests import tolerance

GROUPS = 3
GPT_OSS = swiglu.Swiglu(limit=1.5, alpha=1.702, up_offset=1.0)
ONE_WARPGROUP = swiglu.SwigluTile(stages=1, warpgroups=1, ctas_per_sm=2)


def inputs(pattern="skewed", rows=200, width=128, seed=0):
  """A layout, pre, dh, weight and bias; garbage in the padding rows."""
  rng = np.random.default_rng(seed)
  sizes = cases.group_sizes(pattern, GROUPS, rows)
  buffer = groups.aligned_rows(rows, GROUPS)
  layout = groups.group_layout(jnp.array(sizes), buffer)
  valid = np.asarray(layout.row_valid())[:, None]

  def rows_of(columns):
    x = np.where(valid, rng.standard_normal((buffer, columns)), np.nan)
    return jnp.asarray(x, jnp.bfloat16)

  weight = jnp.asarray(rng.random(buffer), jnp.float32)
  bias = jnp.asarray(rng.standard_normal((GROUPS, 2 * width)), jnp.float32)
  return layout, rows_of(2 * width), rows_of(width), weight, bias


def same(got, want):
  """Equal in kind and to the bit."""
  assert (got.axis, got.layout) == (want.axis, want.layout)
  assert got.data.dtype == want.data.dtype
  np.testing.assert_array_equal(got.scale, want.scale)
  np.testing.assert_array_equal(
    np.asarray(got.data).view(np.uint8), np.asarray(want.data).view(np.uint8)
  )


def close(got, want):
  """bf16 that may differ where exp does: a share of equal numbers, one ulp."""
  a, b = (np.asarray(x).view(np.int16) for x in (got, want))
  assert a.shape == b.shape
  assert np.mean(a == b) >= tolerance.SWIGLU_EQUAL_BYTES
  magnitude = (x & 0x7FFF for x in (a, b))
  assert np.max(np.abs(np.subtract(*magnitude))) <= 1
  assert np.all((a ^ b) >= 0)  # of one sign


def check_parts(out, want, rows, columns, **options):
  """The bf16 result by the bar, its quantization to the bit."""
  close(out.plain, want)
  for part, axis, layout in ((out.rows, -1, rows), (out.columns, -2, columns)):
    if layout is None:
      assert part is None
    else:
      same(part, reference.quantize(out.plain, axis, layout=layout, **options))


@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_forward(interpreted, pattern):
  layout, pre, _, weight, _ = inputs(pattern)
  out = interpreted(
    lambda i: swiglu.swiglu_quantize(
      pre, weight, layout, plain=True, interpret=i
    )
  )
  want = reference.swiglu(pre, weight, layout)
  check_parts(out, want, "blocked", "blocked")
  assert out.pre is None


@pytest.mark.parametrize("pattern", ["skewed", "all_empty"])
def test_backward(interpreted, pattern):
  layout, pre, dh, weight, _ = inputs(pattern)
  out = interpreted(
    lambda i: swiglu.swiglu_backward_quantize(
      pre, dh, weight, layout, plain=True, interpret=i
    )
  )
  want, dweight = reference.swiglu_backward(pre, dh, weight, layout)
  check_parts(out, want, "blocked", "blocked")
  tolerance.assert_reordered(out.dweight, dweight)


@pytest.mark.parametrize("tile", [None, ONE_WARPGROUP])
def test_forward_options(interpreted, tile):
  layout, pre, _, weight, bias = inputs(rows=100, width=384)
  options = dict(rows="linear", columns=None, save_pre=True, plain=True)
  quantize = dict(rounding="floor", dtype=mxfp8.E5M2)
  out = interpreted(
    lambda i: swiglu.swiglu_quantize(
      pre, weight, layout, form=GPT_OSS, bias=bias, tile=tile, **options,
      **quantize, interpret=i,
    )
  )  # fmt: skip
  want = reference.swiglu(pre, weight, layout, form=GPT_OSS, bias=bias)
  check_parts(out, want, "linear", None, **quantize)
  valid = layout.row_valid()[:, None]
  kept = jnp.where(valid, pre, 0)
  same(out.pre, reference.quantize(kept, layout="blocked", **quantize))


@pytest.mark.parametrize("tile", [None, ONE_WARPGROUP])
def test_backward_options(interpreted, tile):
  layout, pre, dh, weight, bias = inputs(rows=100, width=256)
  quantize = dict(rounding="even", dtype=mxfp8.E5M2)
  out = interpreted(
    lambda i: swiglu.swiglu_backward_quantize(
      pre, dh, weight, layout, form=GPT_OSS, bias=bias, columns="linear",
      plain=True, tile=tile, **quantize, interpret=i,
    )
  )  # fmt: skip
  want, dweight = reference.swiglu_backward(
    pre, dh, weight, layout, form=GPT_OSS, bias=bias
  )
  check_parts(out, want, "blocked", "linear", **quantize)
  tolerance.assert_reordered(out.dweight, dweight)


@pytest.mark.parametrize("dtype", mxfp8.DTYPES)
def test_saved_preactivations(interpreted, dtype):
  layout, pre, dh, weight, bias = inputs(rows=100, width=128)
  pre = jnp.where(layout.row_valid()[:, None], pre, 0)
  pre = reference.quantize(pre, dtype=dtype, layout="blocked")
  out = interpreted(
    lambda i: swiglu.swiglu_backward_quantize(
      pre, dh, weight, layout, bias=bias, rows=None, plain=True, interpret=i
    )
  )
  want, dweight = reference.swiglu_backward(pre, dh, weight, layout, bias=bias)
  check_parts(out, want, None, "blocked")
  tolerance.assert_reordered(out.dweight, dweight)
  again = interpreted(
    lambda i: swiglu.swiglu_quantize(
      pre, weight, layout, bias=bias, plain=True, interpret=i
    )
  )
  want = reference.swiglu(pre, weight, layout, bias=bias)
  check_parts(again, want, "blocked", "blocked")


def test_nan_is_kept(interpreted):
  layout, pre, dh, weight, _ = inputs(rows=100)
  pre, dh = pre.at[1, 0].set(jnp.nan), dh.at[2, 5].set(jnp.inf)
  out, back = interpreted(
    lambda i: (
      swiglu.swiglu_quantize(
        pre, weight, layout, form=GPT_OSS, columns=None, interpret=i
      ),
      swiglu.swiglu_backward_quantize(
        pre, dh, weight, layout, form=GPT_OSS, columns=None, interpret=i
      ),
    )
  )
  for part, row in ((out.rows, 1), (back.rows, 1), (back.rows, 2)):
    linear = part.with_layout("linear").scale
    assert linear[row, 0] == mxfp8.SCALE_NAN
  assert np.isnan(back.dweight[1])


@pytest.mark.parametrize("width", [96, 160, 2880])
def test_odd_widths_are_refused(width):
  layout = groups.group_layout(jnp.array([100]), 128)
  pre, dh = (jnp.zeros((128, n), jnp.bfloat16) for n in (2 * width, width))
  weight = jnp.ones(128)
  with pytest.raises(NotImplementedError, match='multiple of 128.*"xla"'):
    swiglu.swiglu_quantize(pre, weight, layout)
  with pytest.raises(NotImplementedError, match='multiple of 128.*"xla"'):
    swiglu.swiglu_backward_quantize(pre, dh, weight, layout)


def test_other_refusals():
  layout = groups.group_layout(jnp.array([100]), 128)
  pre, weight = jnp.zeros((128, 256), jnp.bfloat16), jnp.ones(128)
  wide, linear = pre.astype(jnp.float32), reference.quantize(pre)
  for x in (wide, linear):
    with pytest.raises(NotImplementedError, match='"xla"'):
      swiglu.swiglu_quantize(x, weight, layout)
  with pytest.raises(NotImplementedError, match="dh must be bfloat16"):
    swiglu.swiglu_backward_quantize(pre, wide[:, :128], weight, layout)


@pytest.mark.parametrize(
  ("options", "message"),
  [
    (dict(rows=None, columns=None), "none of them"),
    (dict(rows="diagonal"), "diagonal"),
    (dict(tile=dict(warpgroups=3)), "warpgroups"),
  ],
)
def test_wrong_options(options, message):
  layout = groups.group_layout(jnp.array([100]), 128)
  pre, weight = jnp.zeros((128, 256), jnp.bfloat16), jnp.ones(128)
  def call():
    if "tile" in options:
      swiglu.SwigluTile(**options["tile"])
    swiglu.swiglu_quantize(pre, weight, layout, **options)

  with pytest.raises(ValueError, match=message):
    call()


def test_wrong_shapes():
  layout = groups.group_layout(jnp.array([100]), 128)
  pre, weight = jnp.zeros((128, 256), jnp.bfloat16), jnp.ones(128)
  with pytest.raises(ValueError, match="128 rows"):
    swiglu.swiglu_quantize(pre[:64], weight, layout)
  with pytest.raises(ValueError, match="half as wide"):
    swiglu.swiglu_backward_quantize(pre, pre, weight, layout)
