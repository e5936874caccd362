"""The interpreted grouped wgrad of Hopper against float64, race-checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups, mxfp8, reference
from pallas_kernels.hopper import grouped_wgrad, wgrad_tile
from tests import tolerance

GROUPS, K, N = 3, 128, 192
ROWS = 300
# Two slots, so that every pattern but single_row wraps the ring.
TURNS = wgrad_tile.WgradTile(lhs=64, rhs=128, stages=2)
HALVES = wgrad_tile.WgradTile(lhs=128, rhs=64, stages=2, alternate=False)
TILES = {"turns": TURNS, "halves": HALVES}


def operands(sizes, rows=ROWS, depth=K, width=N):
  """(lhs, rhs, layout): normal rows, zero padding, NaN past the last group."""
  rows = groups.aligned_rows(rows, len(sizes))
  layout = groups.group_layout(jnp.asarray(sizes, jnp.int32), rows)
  keep = np.asarray(layout.row_valid())[:, None]
  nobody = np.arange(rows)[:, None] >= 128 * int(layout.tile_count())
  keys = jax.random.split(jax.random.key(0))
  pair = (
    jnp.where(keep, jax.random.normal(key, (rows, n), jnp.bfloat16), 0)
    for key, n in zip(keys, (depth, width), strict=True)
  )
  return *(jnp.where(nobody, jnp.nan, x) for x in pair), layout


def expected(lhs, rhs, layout):
  """The product in float64, and that of the magnitudes."""
  a, b = (np.asarray(x).astype(np.float64) for x in (lhs, rhs))
  spans = [
    slice(start, start + size)
    for start, size in zip(
      np.asarray(layout.starts), np.asarray(layout.sizes), strict=True
    )
  ]
  sums = [a[s].T @ b[s] for s in spans]
  magnitudes = [np.abs(a[s]).T @ np.abs(b[s]) for s in spans]
  return np.stack(sums), np.stack(magnitudes)


def check(got, want, magnitudes):
  bf16 = got.dtype == jnp.bfloat16
  bound = tolerance.matmul_bound(magnitudes, want, bf16=bf16)
  assert (np.abs(np.asarray(got).astype(np.float64) - want) <= bound).all()


@pytest.fixture(scope="module")
def run(interpreted):
  """Calls the kernel; a tile and options compile once for all sizes."""

  def kernel(options):
    def call(interpret, lhs, rhs, layout, *accumulate):
      return grouped_wgrad.grouped_wgrad(
        lhs,
        rhs,
        layout,
        accumulate=accumulate[0] if accumulate else None,
        interpret=interpret,
        **options,
      )

    return call

  kernels = {}

  def run(*arguments, **options):
    key = tuple(options.items())
    call = kernels.setdefault(key, kernel(options))
    return interpreted(call, *arguments)

  return run


@pytest.mark.parametrize("pattern", cases.PATTERNS)
@pytest.mark.parametrize("how", TILES)
def test_every_pattern(run, how, pattern):
  lhs, rhs, layout = operands(cases.group_sizes(pattern, GROUPS, ROWS))
  got = run(lhs, rhs, layout, tile=TILES[how], out_dtype=jnp.float32)
  assert got.shape == (GROUPS, K, N)
  check(got, *expected(lhs, rhs, layout))
  empty = np.asarray(layout.sizes) == 0
  assert not np.asarray(got)[empty].any()
