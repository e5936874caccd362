"""The interpreted grouped wgrad of Hopper against float64, race-checked."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups, reference
from pallas_kernels.hopper import grouped_wgrad, wgrad_tile
from tests import tolerance

GROUPS, K, N = 3, 128, 192
ROWS = 300
# Two slots, so that every pattern wraps the ring; fewer buffers than slabs.
TURNS = wgrad_tile.WgradTile(lhs=64, rhs=128, stages=2, buffers=2)
HALVES = wgrad_tile.WgradTile(
  lhs=128, rhs=64, stages=2, buffers=1, alternate=False
)
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


@pytest.mark.parametrize("how", TILES)
def test_it_adds_to_what_is_there(run, how):
  lhs, rhs, layout = operands([130, 0, 1])
  before = jax.random.normal(jax.random.key(7), (GROUPS, K, N))
  got = run(lhs, rhs, layout, before, tile=TILES[how])
  want, magnitudes = expected(lhs, rhs, layout)
  there = np.asarray(before).astype(np.float64)
  check(got, want + there, magnitudes + np.abs(there))
  np.testing.assert_array_equal(got[1], before[1])


@pytest.mark.parametrize(
  ("how", "depth", "width"), [("turns", 64, 320), ("halves", 192, 64)]
)
def test_tiles_at_the_edge(run, how, depth, width):
  lhs, rhs, layout = operands([70, 65], 135, depth, width)
  got = run(lhs, rhs, layout, tile=TILES[how], out_dtype=jnp.bfloat16)
  assert got.shape == (2, depth, width)
  check(got, *expected(lhs, rhs, layout))


def test_mxfp8(run):
  lhs, rhs, layout = operands([100], 100)
  lhs, rhs = (
    reference.quantize(jnp.nan_to_num(x), -2, layout=scales)
    for x, scales in ((lhs, "linear"), (rhs, "blocked"))
  )
  got = run(lhs, rhs, layout, tile=TURNS)
  check(got, *expected(lhs.dequantize(), rhs.dequantize(), layout))
  np.testing.assert_allclose(
    got, reference.grouped_wgrad(lhs, rhs, layout), rtol=1e-4, atol=1e-4
  )


class TestRefusals:
  """What the kernel does not take, and why."""

  LAYOUT = groups.group_layout(jnp.asarray([128], jnp.int32), 128)

  def call(self, lhs=(128, 64), rhs=(128, 64), dtype=jnp.bfloat16, **options):
    return grouped_wgrad.grouped_wgrad(
      jnp.zeros(lhs, dtype), jnp.zeros(rhs, dtype), self.LAYOUT, **options
    )

  @pytest.mark.parametrize(
    ("reason", "options"),
    [
      ("multiples of 64.*K=96", {"lhs": (128, 96)}),
      ("multiples of 64.*N=32", {"rhs": (128, 32)}),
      ("bf16 or MXFP8; got lhs float32", {"dtype": jnp.float32}),
      ("float32 or bfloat16; got", {"out_dtype": jnp.float16}),
      (
        "accumulates in float32",
        {"out_dtype": jnp.bfloat16, "accumulate": jnp.zeros((1, 64, 64))},
      ),
    ],
  )
  def test_not_implemented(self, reason, options):
    with pytest.raises(NotImplementedError, match=reason) as caught:
      self.call(**options)
    assert 'Use backend="xla".' in str(caught.value)

  def test_shapes_must_belong_together(self):
    with pytest.raises(ValueError, match=r"\[128, columns\]"):
      self.call(lhs=(256, 64))
    with pytest.raises(ValueError, match=r"float32 \(1, 64, 64\)"):
      self.call(accumulate=jnp.zeros((1, 64, 128)))

  def test_blocks_must_run_along_the_rows(self):
    x = jnp.ones((128, 128), jnp.bfloat16)
    rows, columns = (reference.quantize(x, axis) for axis in (-1, -2))
    with pytest.raises(ValueError, match="axis -2; got rhs"):
      grouped_wgrad.grouped_wgrad(columns, rows, self.LAYOUT)

  @pytest.mark.parametrize(
    ("reason", "fields"),
    [
      ("lhs must be a positive multiple of 128", {"lhs": 64}),
      ("rhs must be a multiple of 64 up to 256", {"rhs": 320}),
      ("at least 2 stages", {"stages": 1}),
      ("more than the 192", {"lhs": 256, "rhs": 256}),
      ("bytes of shared memory", {"stages": 8}),
    ],
  )
  def test_tiles(self, reason, fields):
    with pytest.raises(ValueError, match=reason):
      wgrad_tile.WgradTile(**{"lhs": 128, "alternate": False} | fields)


def test_only_hopper_has_variants():
  assert grouped_wgrad.variants("sm_100a") == []
  assert len(grouped_wgrad.variants("sm_90a")) > 2
