"""Field cases of the format; FCnn is the number of the report.

Each retells public reports as a small input with a known answer.
"""

import ml_dtypes
import numpy as np
import pytest

from tests.field import inputs, reference

RULE = "rceil"


def test_fc04_scale_is_not_rounded_to_nearest(adapter):
  """github.com/jax-ml/ml_dtypes/issues/298: the scale came out one low."""
  top = np.float32([448 * 1.2, 448 * 1.4, 448 * 1.49, 448 * 2.8])[:, None]
  x = np.concatenate([top, np.tile(top / 16, (1, 31))], axis=1)
  _, byte = adapter.quantize(x)
  assert byte[:, 0].tolist() == [128, 128, 128, 129]
  error = np.abs(adapter.qdq(x) - x)[:, 0]
  assert (error <= reference.round_trip_bound(x)[:, 0]).all()


def test_fc05_overflow_saturates(adapter):
  """github.com/jax-ml/ml_dtypes/issues/400: NaN from just above 464."""
  x = np.tile(np.float32([1.9, -1.9, 1.0, 0.25] * 8), (4, 1))
  got = adapter.qdq(x)
  np.testing.assert_array_equal(got, reference.round_trip(x, -1, RULE))
  assert got[0, 0] == 1.875


def test_fc06_zero_blocks_stay_zero(adapter):
  """github.com/vipshop/cache-dit/pull/1097: maximum 0, then 0 / 0."""
  x = inputs.integers(9, (4, 96))
  x[1, 32:64], x[3] = 0, 0
  np.testing.assert_array_equal(adapter.qdq(x), x)
  i = inputs.matmul(10, 64, (2, 64, 32), [32, 32])
  i["lhs"][:, :32], i["rhs"][1], i["dout"][32:] = 0, 0, 0
  inputs.assert_exact(adapter, i)


def test_fc22_transposed_input(adapter):
  """github.com/pytorch/FBGEMM/pull/2919: written with the wrong strides."""
  unequal = np.exp2(np.arange(96) % 11).astype(np.float32)
  x = inputs.normal(27, (64, 96)) * unequal
  across, down = adapter.quantize(x.T, axis=-1), adapter.quantize(x, axis=0)
  want = reference.quantize(x, 0, RULE)
  for a, d, w in zip(across, down, want, strict=True):
    np.testing.assert_array_equal(a, d.T)
    np.testing.assert_array_equal(d, w)


def test_fc33_nan_is_not_swallowed(adapter):
  """github.com/pytorch/ao/pull/4271: a NaN became a finite block."""
  x = inputs.integers(25, (4, 128))
  hit = np.zeros(x.shape, bool)
  for row, column in enumerate((0, 37, 64, 127)):
    x[row, column] = np.nan
    hit[row, column // 32 * 32 : column // 32 * 32 + 32] = True
  got = adapter.qdq(x)
  assert np.isnan(got[hit]).all()
  np.testing.assert_array_equal(got[~hit], x[~hit])


def test_fc48_tiny_numbers(adapter):
  """github.com/flashinfer-ai/flashinfer/issues/2440: reciprocal overflow."""
  size = np.float32([[1e-34], [5e-35], [1e-36], [1e-37], [3e-39]])
  x = inputs.normal(26, (5, 64)).clip(-3, 3) * size
  x = x.astype(ml_dtypes.bfloat16).astype(np.float64)
  amax = np.repeat(np.abs(x).reshape(5, 2, 32).max(-1), 32, axis=-1)
  bound = np.where(
    amax < 448 * 2.0**-126, np.abs(x), reference.round_trip_bound(x)
  )
  got = adapter.qdq(x.astype(np.float32)).astype(np.float64)
  assert (np.abs(got - x) <= bound + 2.0**-126).all()


def test_fc62_float_scales_are_refused(adapter):
  """github.com/deepseek-ai/DeepGEMM/pull/112: cut to their exponent."""
  codes = np.full((2, 32), 0x38, np.uint8)
  with pytest.raises(TypeError, match="uint8 scales.*powers of two"):
    adapter.dequantize_any_scale(codes, np.full((2, 1), 0.75, np.float32))


def test_fc63_wide_range_in_a_block(adapter):
  """github.com/AMD-AGI/Primus-Turbo/pull/349: gradients of a wide range."""
  x = inputs.normal(65, (8, 128))
  x[:, ::32] *= 2.0**14
  error = np.abs(adapter.qdq(x) - x)
  assert (error <= reference.round_trip_bound(x)).all()


def test_fc64_every_code(adapter):
  """github.com/Scottcjn/ram-coffers/issues/716: 0x7F read as 480."""
  codes = np.tile(np.arange(256, dtype=np.uint8).reshape(8, 32), (2, 1))
  scales = np.repeat(np.uint8([127, 121]), 8)[:, None]
  got = adapter.dequantize_codes(codes, scales)
  value = np.array([reference.decode_e4m3(int(c)) for c in range(256)])
  want = np.concatenate([value, value * 2.0**-6]).reshape(16, 32)
  np.testing.assert_array_equal(got, want)
  assert np.signbit(got.reshape(-1)[128])
