"""Quantize against the golden rows and an independent float64 twin."""

import chex
import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import mxfp8, reference
from tests import tolerance
from tests.pallas_kernels import float64_format

RULES = ("floor", "ceil", "rceil", "even")
JUST_ABOVE_448 = np.nextafter(np.float32(448), np.float32(1e9))
ALL_NAN = "7F 7F 7F 7F"
ZERO = [(0, "00 80")] * 4
BAD = [(255, ALL_NAN)] * 4

# Block, then (scale byte, data bytes) for each of RULES; the rest is 0.
GOLDEN = {
  "plain": ([1, 0.5, -0.25, 0.001], [(119, "78 70 E8 28")] * 4),
  "at_448": (
    [448, -448, 1, 0.01],
    [
      (127, "7E FE 38 05"),
      (128, "76 F6 30 03"),
      (127, "7E FE 38 05"),
      (127, "7E FE 38 05"),
    ],
  ),
  "at_450": (
    [450, -300, 1, 0.01],
    [
      (127, "7E F9 38 05"),
      (128, "76 F1 30 03"),
      (128, "76 F1 30 03"),
      (127, "7E F9 38 05"),
    ],
  ),
  "at_500": (
    [500, 480, -464, 1],
    [
      (127, "7E 7E FE 38"),
      (128, "78 77 F6 30"),
      (128, "78 77 F6 30"),
      (128, "78 77 F6 30"),
    ],
  ),
  "below_1_even_up": (
    [0.96875, 0.9, 0.1],
    [(118, "7E 7E 65"), *[(119, "78 76 5D")] * 3],
  ),
  "below_1_even_down": (
    [0.9375, 0.9, 0.1],
    [
      (118, "7E 7E 65"),
      (119, "77 76 5D"),
      (119, "77 76 5D"),
      (118, "7E 7E 65"),
    ],
  ),
  "zeros": ([0.0, -0.0], ZERO),
  "inf": ([1, -np.inf], BAD),
  "nan": ([1, np.nan], BAD),
  "subnormal": ([2.0**-126, 2.0**-127, 2.0**-133], [(0, "40 38 08")] * 4),
  "bf16_max": (
    [3.3895e38, 1e38],
    [(246, "7E 71"), *[(247, "78 69")] * 3],
  ),
  "just_above_448": (
    [JUST_ABOVE_448],
    [(127, "7E"), (128, "76"), (128, "76"), (127, "7E")],
  ),
}
GOLDEN_E5M2 = {
  "plain": ([1, 0.5, -0.25, 0.001], [(112, "78 74 F0 50")] * 4),
  "at_60000": (
    [60000, 57344, 1],
    [
      (127, "7B 7B 3C"),
      (128, "77 77 38"),
      (128, "77 77 38"),
      (127, "7B 7B 3C"),
    ],
  ),
  "zeros": ([0.0, -0.0], ZERO),
  "inf": ([1, np.inf], BAD),
}
quantize = jax.jit(
  reference.quantize,
  static_argnames=("axis", "block", "rounding", "dtype", "layout"),
)


def bytes_of(q):
  """(codes uint8, scale bytes uint8) of an MxArray."""
  return np.asarray(q.data).view(np.uint8), np.asarray(q.scale)


def check_golden(values, expected, fmt):
  block = np.zeros((1, 32), np.float32)
  block[0, : len(values)] = values
  for rule, (byte, data) in zip(RULES, expected, strict=True):
    dtype = jnp.dtype(float64_format.FORMATS[fmt][0])
    codes, scale = bytes_of(quantize(block, rounding=rule, dtype=dtype))
    want = bytes.fromhex(data)
    assert (rule, scale.item()) == (rule, byte)
    assert (rule, codes[0, : len(want)].tobytes()) == (rule, want)
    twin = float64_format.quantize(block, rule, fmt)
    np.testing.assert_array_equal(codes, twin[0])
    rest = 0x7F if byte == 255 else 0
    assert (codes[0, len(values) :] == rest).all()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_rows(name):
  check_golden(*GOLDEN[name], "e4m3")


@pytest.mark.parametrize("name", GOLDEN_E5M2)
def test_golden_rows_of_e5m2(name):
  check_golden(*GOLDEN_E5M2[name], "e5m2")


def wild(seed, blocks):
  """[blocks, 32] float32: normal, wide, subnormal and non-finite blocks."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((blocks, 32))
  part = blocks // 8
  x[part : 4 * part] *= 2.0 ** rng.integers(-150, 126, (3 * part, 1))
  x[4 * part : 5 * part] *= 2.0 ** rng.integers(-40, 40, (part, 32))
  x[5 * part : 6 * part] *= 2.0 ** rng.integers(-149, -110, (part, 32))
  near = 2.0 ** rng.integers(-20, 20, (part, 1))
  x[6 * part : 7 * part] = near * rng.integers(400, 513, (part, 32))
  with np.errstate(over="ignore"):
    x = x.astype(np.float32)
  bits = rng.integers(0, 2**32, (blocks - 7 * part, 32), dtype=np.uint32)
  x[7 * part :] = bits.view(np.float32)  # most hold a NaN or an infinity
  return x


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
  ("fmt", "blocks"), [("e4m3", 1_000_000 // 32), ("e5m2", 6_000)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equal_to_the_bit_with_float64(rule, fmt, blocks, dtype):
  with np.errstate(over="ignore", invalid="ignore"):
    x = wild(RULES.index(rule), blocks).astype(jnp.dtype(dtype))
  element = jnp.dtype(float64_format.FORMATS[fmt][0])
  codes, scale = bytes_of(quantize(x, rounding=rule, dtype=element))
  want_codes, want_scale = float64_format.quantize(x, rule, fmt)
  np.testing.assert_array_equal(scale, want_scale)
  np.testing.assert_array_equal(codes, want_codes)


@pytest.mark.parametrize("rule", RULES)
def test_every_bf16_maximum_gets_the_right_scale(rule):
  every = np.arange(0x8000, dtype=np.uint16).view(ml_dtypes.bfloat16)
  x = np.zeros((every.size, 32), ml_dtypes.bfloat16)
  x[:, 7] = every
  got = bytes_of(quantize(x, rounding=rule))[1]
  want = float64_format.scale_bytes(float64_format.widen(every), rule)
  np.testing.assert_array_equal(got[:, 0], want)
  finite = want[np.isfinite(float64_format.widen(every))]
  assert finite.max() <= 254


@pytest.mark.parametrize("axis", [-1, -2, -3, 0, 1, 2])
def test_every_axis(axis):
  x = wild(5, 64 * 3 * 32).reshape(64, 96, 32)
  codes, scale = bytes_of(quantize(x, axis))
  moved = float64_format.quantize(np.moveaxis(x, axis, -1))
  np.testing.assert_array_equal(codes, np.moveaxis(moved[0], -1, axis))
  np.testing.assert_array_equal(scale, np.moveaxis(moved[1], -1, axis))


@pytest.mark.parametrize("rule", RULES)
def test_square_blocks(rule):
  x = wild(6, 2 * 64 * 3).reshape(2, 64, 96)
  got = bytes_of(quantize(x, block="32x32", rounding=rule))
  chex.assert_trees_all_equal(got, float64_format.quantize_square(x, rule))


def test_transposing_square_blocks_transposes_both_arrays():
  x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
  a = bytes_of(quantize(x, -1, block="32x32"))
  b = bytes_of(quantize(x.T, -2, block="32x32"))
  chex.assert_trees_all_equal(a, tuple(array.T for array in b))


@pytest.mark.parametrize("rule", RULES)
def test_round_trip_of_normal_numbers(rule):
  x = jax.random.normal(jax.random.key(0), (4096, 32), jnp.bfloat16)
  q = quantize(x, rounding=rule)
  assert tolerance.sqnr(q.dequantize(), x) >= tolerance.ROUND_TRIP[rule]


def test_requantize_is_dequantize_and_quantize():
  q = quantize(jax.random.normal(jax.random.key(1), (64, 96)))
  requantize = jax.jit(
    reference.requantize, static_argnames=("axis", "rounding")
  )
  for rule in RULES:
    got = requantize(q, -2, rounding=rule)
    want = quantize(q.dequantize(), -2, rounding=rule)
    chex.assert_trees_all_equal(bytes_of(got), bytes_of(want))
    assert got.axis == -2


@hypothesis.settings(max_examples=8)
@hypothesis.given(
  seed=strategies.integers(0, 2**20), rule=strategies.sampled_from(RULES)
)
def test_permutation_commutes_with_row_blocks_only(seed, rule):
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((64, 64)) * 2.0 ** rng.integers(-9, 9, (64, 1))
  x = jnp.asarray(x, jnp.bfloat16)
  order = jnp.asarray(rng.permutation(64))
  rows = reference.take_mx_rows(quantize(x, rounding=rule), order)
  again = quantize(x[order], rounding=rule)
  chex.assert_trees_all_equal(bytes_of(rows), bytes_of(again))
  columns = quantize(x, -2, rounding=rule).data[order]
  moved = quantize(x[order], -2, rounding=rule).data
  assert (np.asarray(columns) != np.asarray(moved)).any()


def test_rows_of_an_mxarray_by_index():
  q = quantize(jax.random.normal(jax.random.key(1), (4, 64)))
  got = reference.take_mx_rows(q, jnp.asarray([3, -1, 0]))
  codes, scale = bytes_of(got)
  np.testing.assert_array_equal(codes[[0, 2]], bytes_of(q)[0][[3, 0]])
  np.testing.assert_array_equal(scale[[0, 2]], bytes_of(q)[1][[3, 0]])
  assert not codes[1].any()
  assert not scale[1].any()
  with pytest.raises(ValueError, match="along axis -1 with linear.*axis -2"):
    reference.take_mx_rows(
      mxfp8.MxArray(
        jnp.zeros((64, 64), mxfp8.E4M3), jnp.zeros((2, 64), jnp.uint8), axis=-2
      ),
      jnp.asarray([0]),
    )
