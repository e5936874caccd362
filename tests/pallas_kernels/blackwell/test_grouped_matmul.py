"""The interpreted grouped matmul of Blackwell against float64, race-checked."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups, mxfp8
from pallas_kernels.blackwell import grouped_matmul
from tests import tolerance

GROUPS, K, N = 3, 384, 512
ROWS = 400
MatmulTile = grouped_matmul.MatmulTile
# Two slots for three steps, so that the ring wraps in each tile; two tiles along
# N for one pair, so that both accumulators do.
PAIRS = MatmulTile(stages=2)
SINGLE = MatmulTile(lhs=128, rhs=128, stages=2)


def operand(shape, axis, seed, dtype=mxfp8.E4M3, mine=None):
  """Random codes and scales; NaN in rows that are not ``mine``."""
  rng = np.random.default_rng(seed)
  code = rng.integers(0, 256, shape).astype(np.uint8)
  code[~np.isfinite(code.view(dtype).astype(np.float32))] = 0x3A
  blocks = list(shape)
  blocks[axis] //= mxfp8.BLOCK
  byte = rng.integers(118, 137, blocks).astype(np.uint8)
  if mine is not None:
    code[~mine] = mxfp8.NAN_CODE
    byte[~mine] = mxfp8.SCALE_NAN
  x = mxfp8.MxArray(jnp.asarray(code.view(dtype)), jnp.asarray(byte), axis=axis)
  return x.with_layout("blocked")


def problem(sizes, depth=K, width=N, transposed=False, dtype=mxfp8.E4M3):
  """(lhs, rhs, layout): NaN in all rows of nobody."""
  rows = groups.aligned_rows(sum(sizes), len(sizes))
  layout = groups.group_layout(jnp.asarray(sizes, jnp.int32), rows)
  mine = np.asarray(layout.row_valid())
  lhs = operand((rows, depth), -1, 0, dtype, mine)
  shape = (width, depth) if transposed else (depth, width)
  rhs = operand((len(sizes), *shape), -1 if transposed else -2, 1)
  return lhs, rhs, layout


def expected(lhs, rhs, layout, transposed):
  """The product in float64 and that of the magnitudes, of rows of groups."""
  a, b = (
    np.asarray(x.dequantize(jnp.float32)).astype(np.float64) for x in (lhs, rhs)
  )
  b = np.swapaxes(b, 1, 2) if transposed else b
  mine = np.asarray(layout.row_valid())
  group = np.asarray(layout.row_group())[mine]
  a = a[mine]
  product = np.zeros((len(a), b.shape[2]))
  magnitudes = np.zeros_like(product)
  for g in np.unique(group):
    rows = group == g
    product[rows] = a[rows] @ b[g]
    magnitudes[rows] = np.abs(a[rows]) @ np.abs(b[g])
  return product, magnitudes


def check(got, lhs, rhs, layout, transposed=False):
  """Rows of groups are right; what others hold is nobody's business."""
  want, magnitudes = expected(lhs, rhs, layout, transposed)
  bf16 = got.dtype == jnp.bfloat16
  got = np.asarray(got)[np.asarray(layout.row_valid())].astype(np.float64)
  bound = tolerance.matmul_bound(magnitudes, want, bf16=bf16)
  assert got.shape == want.shape
  assert (np.abs(got - want) <= bound).all()


@pytest.fixture(scope="module")
def run(interpreted):
  """Calls the kernel; a tile and options compile once for all sizes."""

  def kernel(options):
    def call(interpret, lhs, rhs, layout):
      return grouped_matmul.grouped_matmul(
        lhs, rhs, layout, interpret=interpret, **options
      )

    return call

  kernels = {}

  def run(*arguments, **options):
    key = tuple(options.items())
    call = kernels.setdefault(key, kernel(options))
    return interpreted(call, *arguments)

  return run


@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_every_pattern(run, pattern):
  lhs, rhs, layout = problem(cases.group_sizes(pattern, GROUPS, ROWS))
  got = run(lhs, rhs, layout, tile=PAIRS)
  assert got.dtype == jnp.bfloat16
  check(got, lhs, rhs, layout)
