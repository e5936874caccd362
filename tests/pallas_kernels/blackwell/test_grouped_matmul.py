"""The interpreted grouped matmul of Blackwell against float64, race-checked."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups, mxfp8
from pallas_kernels.blackwell import (
  grouped_matmul,
  matmul_kernel,
  matmul_problem,
  memory,
  roles,
)
from tests import mosaic_interpreter, tolerance

GROUPS, K, N = 3, 384, 512
ROWS = 400
MatmulTile = grouped_matmul.MatmulTile
# Two slots for three steps, so that the ring wraps in each tile; two tiles
# along N for one pair, so that both accumulators do.
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


@pytest.mark.parametrize(
  ("lhs_dtype", "out_dtype"),
  [(mxfp8.E5M2, jnp.bfloat16), (mxfp8.E4M3, jnp.float32)],
)
def test_dgrad_reads_the_weights_as_they_are(run, lhs_dtype, out_dtype):
  sizes = cases.group_sizes("skewed", GROUPS, ROWS)
  lhs, rhs, layout = problem(sizes, transposed=True, dtype=lhs_dtype)
  got = run(
    lhs, rhs, layout, transpose_rhs=True, out_dtype=out_dtype, tile=PAIRS
  )
  assert got.dtype == out_dtype
  check(got, lhs, rhs, layout, transposed=True)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("tile", [PAIRS, SINGLE])
def test_widths_that_are_multiples_of_32_alone(run, tile, transposed):
  lhs, rhs, layout = problem([130, 0, 1], 160, 96, transposed)
  got = run(lhs, rhs, layout, transpose_rhs=transposed, tile=tile)
  assert got.shape[1] == 96
  check(got, lhs, rhs, layout, transposed)


@pytest.mark.parametrize(("columns", "accumulators"), [(128, 2), (256, 1)])
def test_accumulators_that_do_not_overlap(run, columns, accumulators):
  tile = MatmulTile(rhs=columns, stages=3, accumulators=accumulators)
  assert not tile.shared
  lhs, rhs, layout = problem([130, 257], 256, 352)
  check(run(lhs, rhs, layout, tile=tile), lhs, rhs, layout)


def test_transposed_copies(run):
  lhs, rhs, layout = problem([257, 0, 1], 288, 256)
  tile = MatmulTile(stages=3, transposed=True)
  check(run(lhs, rhs, layout, tile=tile), lhs, rhs, layout)


@pytest.mark.parametrize("depth", [128, 96])
def test_rows_are_read_out_of_a_wire_buffer(interpreted, depth):
  """What follows a row on the wire is read by nobody, even if it is NaN."""
  lhs, rhs, layout = problem([128, 60], depth, 128)
  wire = jnp.full((layout.rows, 256), jnp.nan, lhs.data.dtype)
  wire = wire.at[:, :depth].set(lhs.data)
  none = mxfp8.MxArray(jnp.zeros_like(lhs.data), lhs.scale, layout="blocked")

  def call(interpret, lhs, rhs, layout, wire):
    return grouped_matmul.grouped_matmul(
      lhs, rhs, layout, lhs_rows=wire, tile=SINGLE, interpret=interpret
    )

  got = interpreted(call, none, rhs, layout, wire)
  check(got, lhs, rhs, layout)


def test_clusters_share_the_tiles(run, monkeypatch):
  monkeypatch.setattr(memory, "resident", lambda *_: 2)
  lhs, rhs, layout = problem([100, 300, 128], 256)
  tile = MatmulTile(stages=3, band=2, along=1)
  check(run(lhs, rhs, layout, tile=tile), lhs, rhs, layout)


def test_linear_scales_and_square_blocks(run):
  lhs, rhs, layout = problem([128, 128], 128, 256)
  scale = rhs.with_layout("linear").scale[:, :, ::32]
  square = mxfp8.MxArray(rhs.data, scale, axis=-1, block="32x32")
  lhs = lhs.with_layout("linear")
  check(run(lhs, square, layout, tile=SINGLE), lhs, square, layout)


def nothing(*_, **__):
  """Stands in for a guard that a fault takes away."""


def first_columns(memory, slot, problem):
  del slot
  return SCALE_COLUMNS(memory, 0, problem)


def only_last_wait(count, **options):
  if count == 0:
    WAIT(count, **options)


def fill_buffers(memory, tile, member, problem):
  """As `pass_over`, but chunks are written; only the stores are left out."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(plgpu, "copy_smem_to_gmem", nothing)
    matmul_kernel.store_rows(memory, tile, member, problem)


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
  "a chunk overwrites a store": (plgpu, "wait_smem_to_gmem", only_last_wait),
  "a CTA without rows fills buffers": (
    matmul_kernel,
    "pass_over",
    fill_buffers,
  ),
  "slots are not drained": (roles, "drain_slots", nothing),
  "accumulators are not drained": (roles, "drain_turns", nothing),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_reported(interpreted, monkeypatch, fault):
  monkeypatch.setattr(*FAULTS[fault])
  lhs, rhs, layout = problem([257, 1], 256, 512)

  def call(interpret, lhs, rhs, layout):
    return grouped_matmul.grouped_matmul(
      lhs,
      rhs,
      layout,
      out_dtype=jnp.float32,  # two chunks share columns
      tile=PAIRS,
      interpret=interpret,
    )

  with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as caught:
    interpreted(call, lhs, rhs, layout)
  if isinstance(caught.value, jax.errors.JaxRuntimeError):
    assert "barrier" in str(caught.value).lower()
  else:
    assert isinstance(caught.value, mosaic_interpreter.RaceError)


@pytest.mark.parametrize("ctas", [1, 2])
def test_tiles_cover_the_rows_of_groups_once(ctas):
  layout = groups.group_layout(jnp.array([0, 300, 129, 1, 256]), 1280)
  made = grouped_matmul.Problem(
    groups=5,
    rows=1280,
    depth=128,
    stride=128,
    width=128,
    turned=False,
    dtypes=(mxfp8.E4M3, mxfp8.E4M3),
    out_dtype=jnp.dtype(jnp.bfloat16),
    tile=MatmulTile(lhs=128 * ctas, rhs=128),
  )
  table, count = matmul_problem.schedule(layout, made)
  group, first, valid = np.asarray(table)[:, : int(count[0])]
  covered = [
    (g, block + i)
    for g, block, n in zip(group, first, valid, strict=True)
    for i in range(n)
  ]
  tile_group = np.asarray(layout.tile_group())
  want = [(tile_group[t], t) for t in range(int(layout.tile_count()))]
  assert covered == want


@pytest.mark.parametrize(
  ("rows", "width", "shape"),
  [
    (16384, 4096, (256, 256)),
    (16384, 768, (256, 256)),
    (16384, 1408, (256, 256)),
    (16384, 128, (256, 128)),
    (1024, 2048, (128, 128)),
  ],
)
def test_the_default_tile_wastes_least(rows, width, shape):
  tile = grouped_matmul.default_tile(rows, 8, width)
  assert (tile.lhs, tile.rhs) == shape
  assert tile.stages >= 4


def test_what_it_does_not_take_is_refused():
  lhs, rhs, layout = problem([100], 64, 96)
  call = grouped_matmul.grouped_matmul
  with pytest.raises(NotImplementedError, match='got lhs bf.*backend="xla"'):
    call(jnp.zeros(lhs.shape, jnp.bfloat16), rhs, layout)
  with pytest.raises(NotImplementedError, match="multiples of 32"):
    call(lhs, operand((1, 64, 48), -2, 0), layout)
  with pytest.raises(ValueError, match="as many rows and groups"):
    call(problem([300], 64, 96)[0], rhs, layout)
  with pytest.raises(ValueError, match="along the contracted axis -1"):
    call(operand(lhs.shape, -2, 0), rhs, layout)
  with pytest.raises(NotImplementedError, match="float32 or bfloat16"):
    call(lhs, rhs, layout, out_dtype=jnp.float16)
  with pytest.raises(ValueError, match="lhs_rows must be"):
    call(lhs, rhs, layout, lhs_rows=jnp.zeros((128, 32), lhs.data.dtype))


def test_it_is_compiled_for_blackwell_alone():
  assert grouped_matmul.variants("sm_90a") == []
  made = {v.variant for v in grouped_matmul.variants("sm_100a")}
  assert len(made) == len(grouped_matmul.variants("sm_100a"))
