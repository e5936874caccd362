"""The interpreted folded wgrad of Hopper, and what folding by group costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups, mxfp8, reference
from pallas_kernels.hopper import wgrad_folded, wgrad_tile
from tests import tolerance

GROUPS, K, N = 3, 128, 64
ROWS = 300
TURNS = wgrad_tile.WgradTile(lhs=64, rhs=64, stages=2, buffers=2)
HALVES = wgrad_tile.WgradTile(
  lhs=128, rhs=64, stages=2, buffers=1, alternate=False
)
TILES = {"turns": TURNS, "halves": HALVES}
HALF_STEP = 2.0**-10  # half the smallest e4m3 number


def layout_of(pattern):
  sizes = cases.group_sizes(pattern, GROUPS, ROWS)
  rows = groups.aligned_rows(ROWS, GROUPS)
  return groups.group_layout(jnp.asarray(sizes, jnp.int32), rows)


def transposed(layout, width, seed):
  """[width, R] MXFP8 of rows of very different size; zeros where padding."""
  keys = jax.random.split(jax.random.key(seed))
  x = jax.random.normal(keys[0], (layout.rows, width))
  x *= 2.0 ** jax.random.randint(keys[1], (layout.rows, 1), -9, 3)
  x = jnp.where(layout.row_valid()[:, None], x, 0).astype(jnp.bfloat16)
  return reference.quantize(x, -2, transposed=True)


@pytest.fixture(scope="module")
def fold():
  return jax.jit(wgrad_folded.fold_groups)


def poisoned(x, layout):
  """NaN past the last group, in data and scales."""
  nobody = np.arange(layout.rows) >= 128 * int(layout.tile_count())
  return dataclasses.replace(
    x,
    data=jnp.where(nobody, jnp.nan, x.data),
    scale=jnp.where(nobody[:: mxfp8.BLOCK], mxfp8.SCALE_NAN, x.scale),
  )


def float64(x):
  return np.asarray(x.dequantize(jnp.float32)).astype(np.float64)


def spans(layout):
  pairs = zip(np.asarray(layout.starts), np.asarray(layout.sizes), strict=True)
  return [slice(start, start + size) for start, size in pairs]


@pytest.mark.parametrize("pattern", ["skewed", "empty_first"])
def test_folding_moves_a_number_within_its_bound(fold, pattern):
  layout = layout_of(pattern)
  x = transposed(layout, K, 0)
  folded = fold(poisoned(x, layout), layout)
  byte = np.asarray(folded.scale).astype(np.int32)
  moved = 0
  for span in spans(layout):
    if span.start == span.stop:
      continue
    blocks = slice(span.start // 32, -(-span.stop // 32))
    assert (byte[:, blocks] == byte[:, blocks][:, :1]).all()
    unit = np.exp2(byte[:, blocks][:, :1] - mxfp8.SCALE_BIAS)
    error = np.abs(float64(folded)[:, span] - float64(x)[:, span])
    assert (error <= HALF_STEP * unit).all()
    moved += np.count_nonzero(error)
  assert moved


def test_one_group_is_folded_as_the_reference_folds(fold):
  layout = groups.group_layout(jnp.asarray([256], jnp.int32), 256)
  x = transposed(layout, K, 0)
  got, want = fold(x, layout), jax.jit(reference.fold)(x)
  for a, b in ((got.data, want.data), (got.scale, want.scale)):
    np.testing.assert_array_equal(
      np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
    )


def test_a_nan_block_shows_in_its_group_alone(fold):
  layout = layout_of("even")
  x = transposed(layout, K, 0)
  x = dataclasses.replace(x, scale=x.scale.at[5, 0].set(mxfp8.SCALE_NAN))
  folded = float64(fold(x, layout))
  first, second, third = spans(layout)
  assert np.isnan(folded[5, first]).all()
  assert not np.isnan(folded[5, second]).any()
  assert not np.isnan(folded[5, third]).any()
  assert not np.isnan(np.delete(folded[:, first], 5, 0)).any()


@pytest.fixture(scope="module")
def run(interpreted):
  kernels = {}

  def kernel(options):
    return lambda i, lhs, rhs, layout, *more: wgrad_folded.grouped_wgrad_folded(
      lhs,
      rhs,
      layout,
      accumulate=more[0] if more else None,
      interpret=i,
      **options,
    )

  def run(*arguments, **options):
    key = tuple(options.items())
    return interpreted(kernels.setdefault(key, kernel(options)), *arguments)

  return run


def expected(lhs, rhs, layout):
  """The product of the folded operands in float64, and of the magnitudes."""
  a, b = float64(lhs), float64(rhs)
  sums = [a[:, s] @ b[:, s].T for s in spans(layout)]
  magnitudes = [np.abs(a[:, s]) @ np.abs(b[:, s]).T for s in spans(layout)]
  return np.stack(sums), np.stack(magnitudes)


@pytest.mark.parametrize(
  ("how", "pattern"),
  [*(("turns", p) for p in cases.PATTERNS), ("halves", "skewed")],
)
def test_every_pattern(run, fold, how, pattern):
  layout = layout_of(pattern)
  lhs, rhs = transposed(layout, K, 0), transposed(layout, N, 1)
  pair = [fold(poisoned(x, layout), layout) for x in (lhs, rhs)]
  got = run(*pair, layout, tile=TILES[how])
  want, magnitudes = expected(*pair, layout)
  # The interpreter sums in float32; the tensor core keeps fewer bits.
  bound = tolerance.matmul_bound(magnitudes, want, bf16=False)
  assert (np.abs(np.asarray(got).astype(np.float64) - want) <= bound).all()
  assert not np.asarray(got)[np.asarray(layout.sizes) == 0].any()


def test_it_adds_to_what_is_there(run, fold):
  layout = layout_of("empty_last")
  pair = [fold(transposed(layout, n, n), layout) for n in (K, N)]
  before = jax.random.normal(jax.random.key(7), (GROUPS, K, N))
  got = run(*pair, layout, before, tile=TURNS)
  want, magnitudes = expected(*pair, layout)
  there = np.asarray(before).astype(np.float64)
  bound = tolerance.matmul_bound(
    magnitudes + np.abs(there), want + there, bf16=False
  )
  error = np.abs(np.asarray(got).astype(np.float64) - want - there)
  assert (error <= bound).all()
  np.testing.assert_array_equal(got[-1], before[-1])


def test_other_operands_are_refused():
  layout = layout_of("even")
  good = transposed(layout, K, 0)
  rows = jnp.ones((layout.rows, K), jnp.bfloat16)
  wrong = reference.quantize(rows, -1)
  with pytest.raises(ValueError, match="rhs must be an MxArray"):
    wgrad_folded.grouped_wgrad_folded(good, wrong, layout)
  with pytest.raises(ValueError, match="transposed copy"):
    wgrad_folded.fold_groups(reference.quantize(rows, -2), layout)
  narrow = transposed(layout, 96, 0)
  with pytest.raises(NotImplementedError, match="K=96"):
    wgrad_folded.grouped_wgrad_folded(narrow, good, layout)


def test_tiles_waste_little_and_leave_room():
  wide = wgrad_tile.least_work(4096, 768, wgrad_tile.BF16)
  assert wide == wgrad_tile.WIDE
  assert wgrad_tile.least_work(768, 4096, wgrad_tile.BF16) == wgrad_tile.TALL
  assert wgrad_folded.default_tile(768, 4096, True) == wgrad_tile.ROOMY


def test_only_hopper_has_variants():
  assert wgrad_folded.variants("sm_100a") == []
  assert len(wgrad_folded.variants("sm_90a")) > 2
