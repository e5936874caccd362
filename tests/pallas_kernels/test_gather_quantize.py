"""Interpreted gather and quantize equals the reference to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import gather_quantize, groups, mxfp8, reference

TOKENS = 40


def same(got, want):
  assert (got.axis, got.layout) == (want.axis, want.layout)
  np.testing.assert_array_equal(got.scale, want.scale)
  np.testing.assert_array_equal(
    np.asarray(got.data).view(np.uint8), np.asarray(want.data).view(np.uint8)
  )


@pytest.mark.parametrize(
  ("width", "layouts", "options"),
  [
    (256, ("linear", "linear"), dict()),
    (384, ("blocked", "blocked"), dict(dtype=mxfp8.E5M2, rounding="floor")),
  ],
)
def test_rows_by_index(interpreted, width, layouts, options):
  x = jax.random.normal(jax.random.key(0), (TOKENS, width), jnp.bfloat16)
  x = x.at[3, 7].set(jnp.nan)
  token = np.random.default_rng(2).integers(0, TOKENS, 256)
  source = jnp.asarray(np.where(token % 4 == 0, -1, token), jnp.int32)
  got = interpreted(
    lambda i: gather_quantize.gather_quantize(
      x, source, layouts=layouts, **options, interpret=i
    )
  )
  rows = groups.take_rows(x, source)
  for part, axis, layout in zip(got, (-1, -2), layouts, strict=True):
    same(part, reference.quantize(rows, axis, layout=layout, **options))


def test_transposed_columns(interpreted):
  x = jax.random.normal(jax.random.key(0), (TOKENS, 128), jnp.bfloat16)
  source = jnp.arange(128, dtype=jnp.int32) % (TOKENS + 1) - 1
  _, columns = interpreted(
    lambda i: gather_quantize.gather_quantize(
      x, source, transposed=True, interpret=i
    )
  )
  rows = groups.take_rows(x, source)
  want = reference.quantize(rows, -2, transposed=True, layout="blocked")
  same(columns, want)


@pytest.mark.parametrize(
  ("x", "rows"),
  [
    (jnp.zeros((8, 160), jnp.bfloat16), 128),
    (jnp.zeros((8, 128), jnp.bfloat16), 100),
    (jnp.zeros((8, 128), jnp.float32), 128),
  ],
)
def test_refusals_name_a_way_out(x, rows):
  with pytest.raises(NotImplementedError, match='"xla"'):
    gather_quantize.gather_quantize(x, jnp.zeros(rows, jnp.int32))
