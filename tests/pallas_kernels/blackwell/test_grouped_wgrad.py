"""The interpreted grouped wgrad of Blackwell against float64, race-checked."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups, mxfp8, reference
from pallas_kernels.blackwell import (
  grouped_wgrad,
  memory,
  roles,
  wgrad_kernel,
)
from pallas_kernels.blackwell import tile as tile_lib
from tests import mosaic_interpreter, tolerance

GROUPS, K, N = 3, 256, 512
ROWS = 400
# Two slots, so that every pattern but single_row wraps the ring; two tiles of
# each group for one pair, so that both accumulators wrap.
PAIRS = tile_lib.MatmulTile(stages=2)
SINGLE = tile_lib.MatmulTile(lhs=128, rhs=128, stages=2)


def operand(layout, columns, seed, dtype=mxfp8.E4M3):
  """Random codes and scales; zero padding; NaN past the last group."""
  rng = np.random.default_rng(seed)
  code = rng.integers(0, 256, (layout.rows, columns)).astype(np.uint8)
  code[~np.isfinite(code.view(dtype).astype(np.float32))] = 0x3A
  code[~np.asarray(layout.row_valid())] = 0
  blocks = layout.rows // mxfp8.BLOCK
  byte = rng.integers(118, 137, (blocks, columns)).astype(np.uint8)
  used = 128 * int(layout.tile_count())
  code[used:] = mxfp8.NAN_CODE
  byte[used // mxfp8.BLOCK :] = mxfp8.SCALE_NAN
  x = mxfp8.MxArray(jnp.asarray(code.view(dtype)), jnp.asarray(byte), axis=-2)
  return x.with_layout("blocked")


def problem(sizes, depth=K, width=N, rows=ROWS, dtypes=(mxfp8.E4M3,) * 2):
  """(lhs, rhs, layout)."""
  rows = groups.aligned_rows(rows, len(sizes))
  layout = groups.group_layout(jnp.asarray(sizes, jnp.int32), rows)
  lhs = operand(layout, depth, 0, dtypes[0])
  rhs = operand(layout, width, 1, dtypes[1])
  return lhs, rhs, layout


def expected(lhs, rhs, layout):
  """The product in float64, and that of the magnitudes."""
  a, b = (
    np.asarray(x.dequantize(jnp.float32)).astype(np.float64) for x in (lhs, rhs)
  )
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
    options = {k: v for k, v in options.items() if k != "fault"}

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
def test_every_pattern(run, pattern):
  lhs, rhs, layout = problem(cases.group_sizes(pattern, GROUPS, ROWS))
  got = run(lhs, rhs, layout, tile=PAIRS)
  assert got.shape == (GROUPS, K, N)
  check(got, *expected(lhs, rhs, layout))
  empty = np.asarray(layout.sizes) == 0
  assert not np.asarray(got)[empty].view(np.uint32).any()  # +0


def test_narrow_tiles_of_mixed_types_and_widths_at_the_edge(run):
  sizes = cases.group_sizes("skewed", GROUPS, ROWS)
  lhs, rhs, layout = problem(sizes, 96, 160, dtypes=(mxfp8.E4M3, mxfp8.E5M2))
  got = run(lhs, rhs, layout, tile=SINGLE, out_dtype=jnp.bfloat16)
  assert got.shape == (GROUPS, 96, 160)
  check(got, *expected(lhs, rhs, layout))


@pytest.mark.parametrize(("rhs", "accumulators"), [(128, 2), (256, 1)])
def test_accumulators_that_do_not_overlap(run, rhs, accumulators):
  tile = tile_lib.MatmulTile(rhs=rhs, stages=3, accumulators=accumulators)
  assert not tile.shared
  lhs, rhs, layout = problem([130, 257], 352, 160, 400)
  check(run(lhs, rhs, layout, tile=tile), *expected(lhs, rhs, layout))


def test_transposed_copies(run):
  lhs, rhs, layout = problem([257, 0, 1], 288, 256, 300)
  tile = tile_lib.MatmulTile(stages=3, transposed=True)
  got = run(lhs, rhs, layout, tile=tile, out_dtype=jnp.bfloat16)
  check(got, *expected(lhs, rhs, layout))


def test_it_adds_to_what_is_there(run):
  lhs, rhs, layout = problem([130, 0, 1], 160, 384, 200)
  before = jax.random.normal(jax.random.key(7), (GROUPS, 160, 384))
  tile = tile_lib.MatmulTile(stages=2, buffers=4)
  got = run(lhs, rhs, layout, before, tile=tile)
  want, magnitudes = expected(lhs, rhs, layout)
  there = np.asarray(before).astype(np.float64)
  check(got, want + there, magnitudes + np.abs(there))
  np.testing.assert_array_equal(got[1], before[1])


def test_clusters_share_the_tiles(run, monkeypatch):
  monkeypatch.setattr(memory, "resident", lambda *_: 2)
  lhs, rhs, layout = problem([100, 300, 128], 256, 512, 528)
  tile = tile_lib.MatmulTile(stages=3)
  check(run(lhs, rhs, layout, tile=tile), *expected(lhs, rhs, layout))


def test_other_scales_become_the_same_atoms():
  lhs, rhs, _ = problem([128, 128], 128, 256, 256)
  byte = rhs.with_layout("linear").scale[:, ::32]
  square = mxfp8.MxArray(rhs.data, byte, axis=-1, block="32x32")
  along = square.along(-2).with_layout("blocked")
  for x, same in ((lhs.with_layout("linear"), lhs), (square, along)):
    data, atoms = memory.arrays(x, -2)
    assert data is same.data
    np.testing.assert_array_equal(
      np.asarray(atoms).view(np.uint8).reshape(same.scale.shape), same.scale
    )


def test_it_relies_on_zero_padding(run):
  """A number in a padding row is summed: whoever writes rows zeroes them."""
  lhs, rhs, layout = problem([100, 128], 128, 128, 256)
  one = [
    mxfp8.MxArray(x.data.at[100].set(1.0), x.scale, axis=-2, layout="blocked")
    for x in (lhs, rhs)
  ]
  clean = np.asarray(run(lhs, rhs, layout, tile=SINGLE))
  got = np.asarray(run(*one, layout, tile=SINGLE))
  np.testing.assert_array_equal(got[1], clean[1])
  assert (got[0] != clean[0]).any()


def nothing(*_, **__):
  """Stands in for a guard that a fault takes away."""


def first_columns(memory, slot, problem):
  del slot
  return SCALE_COLUMNS(memory, 0, problem)


def only_last_wait(count, **options):
  if count == 0:
    WAIT(count, **options)


SCALE_COLUMNS, WAIT = roles.scale_columns, plgpu.wait_smem_to_gmem
FAULTS = {
  "a load does not wait for the multiply": (
    roles,
    "await_empty",
    nothing,
  ),
  "one set of scale columns": (roles, "scale_columns", first_columns),
  "a tile does not wait for columns": (roles, "previous_turn", nothing),
  "columns are given up early": (roles, "release_after", lambda _: 0),
  "shared columns are not first": (
    roles,
    "chunk_order",
    lambda turn, i, problem: jnp.int32(i),
  ),
  "a chunk overwrites a store": (plgpu, "wait_smem_to_gmem", only_last_wait),
  "slots are not drained": (roles, "drain_slots", nothing),
  "accumulators are not drained": (roles, "drain_turns", nothing),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported(run, monkeypatch, fault):
  monkeypatch.setattr(*FAULTS[fault])
  lhs, rhs, layout = problem([257, 128, 128, 0], 256, 256, 513)
  with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as caught:
    run(lhs, rhs, layout, tile=PAIRS, fault=fault)
  if isinstance(caught.value, jax.errors.JaxRuntimeError):
    assert "barrier" in str(caught.value).lower()
  else:
    assert isinstance(caught.value, mosaic_interpreter.RaceError)


def test_a_group_without_rows_is_not_left_as_it_was(run, monkeypatch):
  monkeypatch.setattr(wgrad_kernel, "store_zeros", nothing)
  lhs, rhs, layout = problem([128, 0], 128, 128, 128)
  got = run(lhs, rhs, layout, tile=SINGLE, fault="no zeros")
  assert np.isnan(np.asarray(got)[1]).all()  # what the interpreter leaves


@pytest.mark.parametrize(
  ("depth", "width", "shape"),
  [
    (7168, 4096, (256, 256)),
    (768, 2048, (256, 256)),
    (2048, 1408, (256, 256)),
    (2048, 128, (256, 128)),
    (96, 160, (128, 128)),
  ],
)
def test_the_default_tile_wastes_least(depth, width, shape):
  for accumulate in (False, True):
    tile = grouped_wgrad.default_tile(depth, width, accumulate=accumulate)
    assert (tile.lhs, tile.rhs) == shape
  assert tile_lib.MatmulTile().stages >= 4
  assert tile_lib.MatmulTile().shared == 64


@pytest.mark.parametrize(
  ("options", "says"),
  [
    (dict(lhs=128, rhs=256), "256x256, 256x128 or 128x128"),
    (dict(accumulators=3), "accumulators must be 1 or 2"),
    (dict(stages=1), "at least 2 stages"),
    (dict(along=2), "along must be 0 or 1"),
    (dict(stages=6), "take fewer stages"),
    (dict(lhs=128, rhs=128, stages=7), "bytes of shared memory"),
  ],
)
def test_an_illegal_tile_is_refused(options, says):
  with pytest.raises(ValueError, match=says):
    tile_lib.MatmulTile(**options)


def test_what_it_does_not_take_is_refused():
  lhs, rhs, layout = problem([100], 64, 96, 100)
  call = grouped_wgrad.grouped_wgrad
  with pytest.raises(NotImplementedError, match='got lhs bf.*backend="xla"'):
    call(jnp.zeros(lhs.shape, jnp.bfloat16), rhs, layout)
  with pytest.raises(NotImplementedError, match="multiples of 32"):
    call(lhs, operand(layout, 48, 0), layout)
  with pytest.raises(ValueError, match="must be \\[256, columns\\]"):
    call(problem([300], 64, 96)[0], rhs, layout)
  with pytest.raises(ValueError, match="along axis -2"):
    call(reference.quantize(jnp.ones(lhs.shape)), rhs, layout)
  with pytest.raises(NotImplementedError, match="float32 or bfloat16"):
    call(lhs, rhs, layout, out_dtype=jnp.float16)
  sums = jnp.zeros((1, 64, 96))
  with pytest.raises(NotImplementedError, match="accumulates in float32"):
    call(lhs, rhs, layout, out_dtype=jnp.bfloat16, accumulate=sums)
  with pytest.raises(ValueError, match="accumulate must be float32"):
    call(lhs, rhs, layout, accumulate=sums[0])


def test_it_is_compiled_for_blackwell_alone():
  assert grouped_wgrad.variants("sm_90a") == []
  made = {v.variant for v in grouped_wgrad.variants("sm_100a")}
  assert len(made) == len(grouped_wgrad.variants("sm_100a"))
