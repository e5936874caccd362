"""Folding: one scale per row, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mxfp8, reference


def _numbers(x: mxfp8.MxArray) -> np.ndarray:
  """The values of an MxArray, in float64."""
  scale = np.asarray(x.element_scales()).astype(np.float64)
  return np.asarray(x.data).astype(np.float64) * 2.0 ** (scale - 127)


def _top(x: mxfp8.MxArray) -> np.ndarray:
  """2^(S - 127) of each row, broadcast over it."""
  byte = np.asarray(x.element_scales()).max(x.axis, keepdims=True)
  return 2.0 ** (byte.astype(np.float64) - 127)


def _spread(shape, binades: int, axis: int, dtype=mxfp8.E4M3):
  """Random values whose blocks of 32 differ by up to `binades` binades."""
  key, other = jax.random.split(jax.random.key(binades))
  x = jax.random.normal(key, shape)
  count = shape[axis] // mxfp8.BLOCK
  lead = [1, 1]
  lead[axis] = count
  power = jax.random.randint(other, lead, -binades, 1).astype(jnp.float32)
  x = x * jnp.repeat(2.0**power, mxfp8.BLOCK, axis)
  return reference.quantize(x.astype(jnp.bfloat16), axis, dtype=dtype)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("dtype", mxfp8.DTYPES)
def test_fold_stays_within_half_the_smallest_number(axis, dtype):
  x = _spread((64, 256) if axis == -1 else (256, 64), 34, axis, dtype)
  folded = reference.fold(x)
  scale = np.asarray(folded.scale)
  assert folded.folded
  assert (scale == scale.max(axis, keepdims=True)).all()
  smallest = float(jnp.finfo(dtype).smallest_subnormal)
  error = np.abs(_numbers(folded) - _numbers(x)) / _top(x)
  assert 0 < error.max() <= smallest / 2


def test_fold_is_exact_while_numbers_stay_normal():
  data = jnp.asarray(2.0 ** np.arange(-2, 6)).astype(mxfp8.E4M3)
  data = jnp.tile(data, (1, 8))  # one row of two blocks, 2^-2 to 2^5
  x = mxfp8.MxArray(data, jnp.asarray([[123, 127]], jnp.uint8))
  np.testing.assert_array_equal(_numbers(reference.fold(x)), _numbers(x))


def test_fold_rounds_to_nearest_even():
  # 3 * 2^-9 shifted by one binade lies between 2^-9 and 2^-8: even is 2^-8.
  data = jnp.full((1, 64), 3 * 2.0**-9).astype(mxfp8.E4M3)
  x = mxfp8.MxArray(data, jnp.asarray([[126, 127]], jnp.uint8))
  first = np.asarray(reference.fold(x).data).astype(np.float64)[0, 0]
  assert first == 2.0**-8


def test_fold_keeps_the_layout_and_folds_nothing_twice():
  x = _spread((128, 128), 6, -1)
  blocked = reference.fold(x.with_layout("blocked"))
  assert blocked.layout == "blocked"
  once, twice = reference.fold(x), reference.fold(reference.fold(x))
  for a, b in ((once, twice), (once, blocked.with_layout("linear"))):
    np.testing.assert_array_equal(np.asarray(a.data).view(np.uint8),
                                  np.asarray(b.data).view(np.uint8))
    np.testing.assert_array_equal(a.scale, b.scale)


def test_a_nan_block_makes_its_row_nan_and_no_other():
  x = jnp.ones((2, 64), jnp.bfloat16).at[0, 3].set(jnp.nan)
  folded = reference.fold(reference.quantize(x))
  numbers = np.asarray(folded.dequantize(jnp.float32))
  assert np.isnan(numbers[0]).all()
  np.testing.assert_array_equal(numbers[1], 1.0)


def test_a_row_of_zeros_folds_to_zeros():
  zeros = reference.quantize(jnp.zeros((4, 96), jnp.bfloat16))
  assert not np.asarray(reference.fold(zeros).dequantize()).any()


def test_quantize_folded_and_transposed_are_the_two_steps():
  w = jax.random.normal(jax.random.key(0), (2, 64, 96), jnp.bfloat16)
  got = reference.quantize(w, -2, transposed=True, folded=True)
  want = reference.fold(reference.quantize(jnp.swapaxes(w, -1, -2), -1))
  assert got.shape == (2, 96, 64)
  assert got.axis == -1
  assert got.folded
  np.testing.assert_array_equal(_numbers(got), _numbers(want))


def test_transposed_needs_columns_of_32x1():
  with pytest.raises(ValueError, match="axis=-2 and block='1x32'"):
    reference.quantize(jnp.ones((32, 32)), -1, transposed=True)


def test_folded_rows_survive_take_rows_and_pack():
  x = _spread((16, 128), 8, -1)
  source = jnp.asarray([3, -1, 0], jnp.int32)
  taken = reference.take_rows(x, source, folded=True)
  want = reference.fold(x)
  assert taken.folded
  np.testing.assert_array_equal(_numbers(taken)[0], _numbers(want)[3])
  assert not _numbers(taken)[1].any()
  packed = reference.pack(x, source, jnp.ones(3), folded=True)
  np.testing.assert_array_equal(packed[:, :128],
                                np.asarray(taken.data).view(np.uint8))


def test_square_blocks_cannot_be_folded():
  square = reference.quantize(jnp.ones((32, 64)), block="32x32")
  with pytest.raises(ValueError, match="blocks are 1x32"):
    reference.fold(square)
