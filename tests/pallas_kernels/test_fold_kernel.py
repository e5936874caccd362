"""Interpreted folding equals the reference to the bit, on every path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
  fold,
  groups,
  mxfp8,
  permute,
  quantize,
  reference,
  swiglu,
)
from tests import tolerance

TOKENS = 40


def mx_rows(rows, width, dtype=mxfp8.E4M3):
  """Every code but NaN; scales far apart, some rows with a NaN block."""
  rng = np.random.default_rng(width)
  code = rng.integers(0, 256, (rows, width)).astype(np.uint8)
  nan = np.isnan(code.view(dtype).astype(np.float32))
  code = np.where(nan, 0, code).astype(np.uint8)
  spread = np.arange(rows)[:, None] % 45  # binades; all codes are 0 from 35 on
  byte = 200 - rng.integers(0, spread + 1, (rows, width // mxfp8.BLOCK))
  byte[::13, 0], byte[5] = 255, 0
  return mxfp8.MxArray(
    jnp.asarray(code.view(dtype)), jnp.asarray(byte, jnp.uint8)
  )


def same(got, want):
  assert (got.axis, got.block, got.layout) == (
    want.axis,
    want.block,
    want.layout,
  )
  assert got.folded == want.folded
  np.testing.assert_array_equal(got.scale, want.scale)
  np.testing.assert_array_equal(
    np.asarray(got.data).view(np.uint8), np.asarray(want.data).view(np.uint8)
  )


@pytest.mark.parametrize(
  ("width", "dtype"), [(128, mxfp8.E4M3), (1408, mxfp8.E5M2)]
)
def test_rows_in_order(interpreted, width, dtype):
  x = mx_rows(TOKENS, width, dtype)
  got = interpreted(lambda i: fold.fold(x, interpret=i))
  same(got, reference.fold(x))


@pytest.mark.parametrize(
  ("width", "dtype"), [(256, mxfp8.E5M2), (1152, mxfp8.E4M3)]
)
def test_permute(interpreted, width, dtype):
  x = mx_rows(TOKENS, width, dtype)
  token = np.random.default_rng(2).integers(0, TOKENS, 128)
  source = jnp.asarray(np.where(token % 4 == 0, -1, token), jnp.int32)
  got = interpreted(
    lambda i: permute.permute(
      x, source, folded=True, slot_bytes=4 * width, stages=2, interpret=i
    )
  )
  same(got, reference.take_rows(x, source, folded=True))


@pytest.mark.parametrize("slots", [1, 36])
def test_pack(interpreted, slots):
  x = mx_rows(TOKENS, 128)
  rng = np.random.default_rng(1)
  row = jnp.asarray(rng.integers(0, TOKENS, slots), jnp.int32)
  weight = jnp.asarray(rng.random(slots), jnp.float32)
  got = interpreted(
    lambda i: permute.pack(x, row, weight, folded=True, interpret=i)
  )
  np.testing.assert_array_equal(
    got, reference.pack(x, row, weight, folded=True)
  )


def test_weights(interpreted):
  w = jax.random.normal(jax.random.key(0), (2, 128, 128), jnp.bfloat16)
  w = w * jnp.exp2(-jnp.arange(128.0)[:, None] // 12).astype(jnp.bfloat16)
  options = dict(axis=-2, transposed=True, folded=True, rounding="even")
  got = interpreted(lambda i: quantize.quantize(w, **options, interpret=i))
  same(got, reference.quantize(w, **options))


def test_both_directions_fold_the_rows_alone(interpreted):
  x = jax.random.normal(jax.random.key(0), (128, 128), jnp.bfloat16)
  x = x * jnp.exp2(-jnp.arange(128.0) // 12).astype(jnp.bfloat16)
  got = interpreted(
    lambda i: quantize.quantize_both(x, folded=True, interpret=i)
  )
  same(got[0], reference.quantize(x, layout="blocked", folded=True))
  same(got[1], reference.quantize(x, -2, layout="blocked"))


def test_swiglu_beside_bf16(interpreted):
  layout = groups.group_layout(jnp.array([100]), 128)
  pre = jax.random.normal(jax.random.key(0), (128, 256), jnp.bfloat16)
  pre = pre * jnp.exp2(-(jnp.arange(256.0) // 32 % 4)).astype(jnp.bfloat16)
  weight = jnp.linspace(0.1, 1, 128)
  options = dict(rows="linear", columns=None, folded=True, plain=True)
  out = interpreted(
    lambda i: swiglu.swiglu_quantize(
      pre, weight, layout, **options, interpret=i
    )
  )
  same(out.rows, reference.quantize(out.plain, folded=True))


@pytest.mark.parametrize(
  ("width", "rows", "options"),
  [
    (256, 40, dict()),
    (128, 70, dict(dtype=mxfp8.E5M2, rounding="even", columns=None)),
  ],
)
def test_swiglu_of_whole_rows(interpreted, width, rows, options):
  """Against the kernel that does not fold, whose arithmetic is the same."""
  buffer = groups.aligned_rows(rows, 1)
  layout = groups.group_layout(jnp.array([rows]), buffer)
  key, other = jax.random.split(jax.random.key(0))
  pre = jax.random.normal(key, (buffer, 2 * width), jnp.bfloat16)
  binades = jnp.arange(2.0 * width) // 32 % 20
  pre = pre * jnp.exp2(-binades).astype(jnp.bfloat16)
  pre = jnp.where(layout.row_valid()[:, None], pre, jnp.nan)
  dh = jax.random.normal(other, (buffer, width), jnp.bfloat16)
  weight = jnp.linspace(0.1, 1, buffer)
  call = dict(rows="linear", columns="linear", plain=False) | options

  def both(interpret, folded):
    more = dict(folded=folded, one_pass=True, interpret=interpret)
    return (
      swiglu.swiglu_quantize(pre, weight, layout, **call, **more),
      swiglu.swiglu_backward_quantize(pre, dh, weight, layout, **call, **more),
    )

  got = interpreted(lambda i: both(i, True))
  want = interpreted(lambda i: both(i, False))
  for a, b in zip(got, want, strict=True):
    same(a.rows, reference.fold(b.rows))
    if b.columns is None:
      assert a.columns is None
    else:
      same(a.columns, b.columns)
  tolerance.assert_reordered(got[1].dweight, want[1].dweight)


def test_a_tile_that_is_given_is_used(monkeypatch):
  """The kernel of whole rows has a schedule of its own."""
  monkeypatch.setattr(swiglu.swiglu_rows, "whole_rows", None)
  layout = groups.group_layout(jnp.array([100]), 128)
  pre, dh = (
    jnp.ones((128, 512), jnp.bfloat16),
    jnp.ones((128, 256), jnp.bfloat16),
  )
  tile = swiglu.SwigluTile(stages=2)
  options = dict(folded=True, one_pass=True, tile=tile)
  out = jax.eval_shape(
    lambda: swiglu.swiglu_quantize(pre, jnp.ones(128), layout, **options)
  )
  back = jax.eval_shape(
    lambda: swiglu.swiglu_backward_quantize(
      pre, dh, jnp.ones(128), layout, **options
    )
  )
  assert out.rows.folded
  assert back.rows.folded


def test_no_rows_are_asked_for(interpreted):
  layout = groups.group_layout(jnp.array([100]), 128)
  pre, weight = jnp.ones((128, 256), jnp.bfloat16), jnp.ones(128)
  out = interpreted(
    lambda i: swiglu.swiglu_quantize(
      pre, weight, layout, rows=None, folded=True, interpret=i
    )
  )
  assert out.rows is None
  assert not out.columns.folded


@pytest.mark.parametrize(
  "refused",
  [
    lambda w: quantize.quantize(w, -2, folded=True),
    lambda w: quantize.quantize(w, block="32x32", folded=True),
    lambda w: quantize.quantize(w[:, :160], folded=True),
    lambda w: fold.fold(reference.quantize(w, -2)),
    lambda w: fold.fold(mxfp8.MxArray(
      jnp.zeros((1, 2**17), mxfp8.E4M3), jnp.zeros((1, 2**12), jnp.uint8)
    )),
  ],
)  # fmt: skip
def test_refusals_name_a_way_out(refused):
  w = jnp.zeros((128, 256), jnp.bfloat16)
  with pytest.raises(NotImplementedError, match='backend="xla"'):
    refused(w)
