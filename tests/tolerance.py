"""Every bar of the numerics, in one file: no test sets its own.

Two kinds. A bound says how far one number may be off, from the arithmetic
alone (`matmul_bound`). A floor is a signal-to-quantization-noise ratio in dB
over a whole array (`sqnr`), from the format: it needs normal random data.
Where neither is named, arrays are equal to the bit.

The floors of the matmul are the thresholds that torchao tests against.
"""

import math

import numpy as np

# A float32 sum of exact products, as a share of |x| @ |w| in float64.
FLOAT32_SUM = 1e-6
# One rounding to bf16, as a share of the number.
BF16_ROUNDING = 2.0**-8
# One rounding to e4m3 (to nearest) and the smallest step of a block, as shares
# of the number and of the block's largest.
E4M3_ROUNDING = 2.0**-4
E4M3_STEP = 2.0**-17

# Quantize and dequantize of normal numbers, 4096 blocks, e4m3; measured 30.6,
# 31.5, 31.5 and 31.2 dB, tested to a tenth.
ROUND_TRIP = {"floor": 30.5, "ceil": 31.4, "rceil": 31.4, "even": 31.1}

# One grouped matmul, quantized, against unquantized float64.
MATMUL = {"out": 27.0, "dlhs": 25.0, "drhs": 24.0}
MATMUL_E5M2 = MATMUL | {"dlhs": 23.5, "drhs": 23.5}
# A wire leg alone, forward and backward.
EXCHANGE = {"forward": 30.0, "backward": 28.0}

# The SwiGLU layer against a float64 layer with the same routing.
LAYER = {"y": 22.5, "x": 21.5, "experts": 20.5, "router": 20.0}
LAYER_E5M2 = LAYER | {"x": 19.5, "experts": 19.5}
LAYER_BF16 = 40.0
FLOOR_COSTS = 1.5  # dB, layer floors of the rule "floor"
FOLDED_COSTS = 0.5  # dB, the folded layer against the exact one

# Fused SwiGLU: exp differs between compilers.
SWIGLU_EQUAL_BYTES = 0.999

# Runs that differ in the order of float32 sums: 1e-7 flips single fp8 codes.
REORDERED_FROBENIUS = 1e-3
REORDERED_ELEMENT = 0.1  # rms
REORDERED_LOSS = 1e-3  # the first 20 steps

# Router arithmetic is float32; a few roundings of numbers near 1.
FLOAT32 = 1e-5

TRAINING_LOSS = 0.01  # relative, mean of the last fifth of the steps


def sqnr(got, want) -> float:
  """Signal to noise in dB: 10 log10(sum want^2 / sum (got - want)^2)."""
  got, want = (np.asarray(a, np.float64) for a in (got, want))
  assert got.shape == want.shape, f"{got.shape} against {want.shape}"
  noise = np.sum(np.square(got - want))
  if noise == 0:
    return math.inf
  return float(10 * np.log10(np.sum(np.square(want)) / noise))


def matmul_bound(magnitudes, y, *, bf16: bool):
  """How far a grouped matmul may be from float64 on the same operands.

  Args:
    magnitudes: |x| @ |w| in float64.
    y: x @ w in float64.
    bf16: the result is rounded to bf16.
  """
  rounding = BF16_ROUNDING * np.abs(y) if bf16 else 0.0
  return FLOAT32_SUM * magnitudes + rounding


def fold_bound(lhs, rhs, lhs_top, rhs_top, smallest):
  """How far folding may move one product, from `reference.fold`'s bound.

  Each number moves by at most half the smallest fp8 number times the top scale
  of its line, so x @ w moves by |dx| @ |w| + |x| @ |dw| + |dx| @ |dw|.

  Args:
    lhs: |x| [R, K] in float64.
    rhs: |w| [K, N] likewise.
    lhs_top: [R] the largest scale of each row, 2^(S - 127).
    rhs_top: [N] of each column.
    smallest: The smallest number of the fp8 type.
  """
  row, column = smallest / 2 * lhs_top[:, None], smallest / 2 * rhs_top[None]
  return (row * rhs.sum(0) + lhs.sum(1)[:, None] * column +
          lhs.shape[1] * row * column)


def layer_floors(recipe) -> dict[str, float]:
  """Floors in dB of a layer under a recipe, by kind of array."""
  if not recipe.uses_mxfp8:
    return dict.fromkeys(LAYER, LAYER_BF16)
  floors = LAYER_E5M2 if recipe.grad_dtype == "e5m2" else LAYER
  less = FLOOR_COSTS if recipe.rounding == "floor" else 0.0
  return {name: floor - less for name, floor in floors.items()}


def assert_reordered(got, want) -> None:
  """Checks two runs that differ in the order of float32 sums alone."""
  got, want = (np.asarray(a, np.float64) for a in (got, want))
  assert got.shape == want.shape
  norm = np.linalg.norm(want)
  error = np.abs(got - want)
  assert np.linalg.norm(error) <= REORDERED_FROBENIUS * norm
  rms = norm / math.sqrt(max(want.size, 1))
  assert error.max(initial=0.0) <= REORDERED_ELEMENT * rms


# Field cases: relative Frobenius norms of the differences of a whole layer.
FIELD_LAYER = 0.15  # against float64; MXFP8 is at 0.07-0.10
FIELD_MESH = 0.12  # a mesh against one device
FIELD_REMAT = 0.01  # recomputed against kept


def frobenius(got, want) -> float:
  """|got - want| / |want| over a whole array."""
  got, want = (np.asarray(a, np.float64) for a in (got, want))
  assert got.shape == want.shape, f"{got.shape} against {want.shape}"
  return float(np.linalg.norm(got - want) / np.linalg.norm(want))
