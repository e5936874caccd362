"""The interpreted grouped matmul of Hopper against float64, race-checked."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups, mxfp8, reference
from pallas_kernels.hopper import common, fold_loss, grouped_matmul, tile
from tests import mosaic_interpreter, tolerance

E4M3, E5M2 = mxfp8.DTYPES
GROUPS, K, N = 3, 192, 160
ROWS = 300
# Few slots and slabs: every tile wraps the ring and the slabs.
TILE = tile.MatmulTile(columns=128, stages=2, slab=32, buffers=2)


def layout_of(pattern, rows=ROWS, count=GROUPS):
  sizes = cases.group_sizes(pattern, count, rows)
  aligned = groups.aligned_rows(rows, count)
  return groups.group_layout(jnp.asarray(sizes, jnp.int32), aligned)


def numbers(x):
  """An operand in float64."""
  if isinstance(x, mxfp8.MxArray):
    x = x.dequantize(jnp.float32)
  return np.asarray(x).astype(np.float64)


def values(shape, kind, seed):
  """Normal bf16 numbers; "outliers": two channels are 100 times larger."""
  x = np.random.default_rng(seed).standard_normal(shape)
  if kind == "outliers":
    x[..., [5, 70]] *= 100
  return jnp.asarray(x, jnp.bfloat16)


@functools.partial(jax.jit, static_argnames=("axis", "dtype", "folded"))
def quantized(x, axis, dtype=E4M3, folded=False):
  q = reference.quantize(x, axis, dtype=dtype)
  return reference.fold(q) if folded else q


def operands(way, kind="normal", depth=K, width=N):
  """(lhs, rhs, options) of a way; rows of nobody come later."""
  rows = groups.aligned_rows(ROWS, GROUPS)
  x = values((rows, depth), kind, 0)
  w = values((GROUPS, depth, width), kind, 1)
  last = jnp.swapaxes(w, 1, 2)
  transposed = {"transpose_rhs": True}
  return {
    "bf16": lambda: (x, w, {}),
    "bf16 transposed": lambda: (x, last, transposed),
    "exact": lambda: (quantized(x, -1), quantized(w, -2), {}),
    "exact transposed": lambda: (
      quantized(x, -1, E5M2),
      quantized(last, -1),
      transposed | {"out_dtype": jnp.float32},
    ),
    "exact of bf16 weights": lambda: (quantized(x, -1), w, {}),
    "folded": lambda: (
      quantized(x, -1, folded=True),
      quantized(last, -1, folded=True),
      transposed | {"out_dtype": jnp.float32},
    ),
  }[way]()


def poisoned(lhs, layout):
  """lhs with NaN in every row of nobody."""
  valid = layout.row_valid()[:, None]
  if not isinstance(lhs, mxfp8.MxArray):
    return jnp.where(valid, lhs, jnp.nan)
  codes = jax.lax.bitcast_convert_type(lhs.data, jnp.uint8)
  codes = jnp.where(valid, codes, jnp.uint8(mxfp8.NAN_CODE))
  return dataclasses.replace(
    lhs,
    data=jax.lax.bitcast_convert_type(codes, lhs.data.dtype),
    scale=jnp.where(valid, lhs.scale, jnp.uint8(mxfp8.SCALE_NAN)),
  )


def by_group(lhs, rhs, layout, transposed):
  """(rows, lhs of them, rhs of them) of each group, in float64."""
  a, b = numbers(lhs), numbers(rhs)
  for group, (start, size) in enumerate(
    zip(np.asarray(layout.starts), np.asarray(layout.sizes), strict=True)
  ):
    rows = slice(start, start + size)
    yield rows, a[rows], b[group].T if transposed else b[group]


def check(got, lhs, rhs, layout, options):
  """Every row of a group is within `tolerance.matmul_bound`."""
  got = np.asarray(got)
  bf16 = got.dtype == jnp.bfloat16
  transposed = options.get("transpose_rhs", False)
  for rows, a, b in by_group(lhs, rhs, layout, transposed):
    want = a @ b
    bound = tolerance.matmul_bound(np.abs(a) @ np.abs(b), want, bf16=bf16)
    assert (np.abs(got[rows].astype(np.float64) - want) <= bound).all()


def check_fold(got, exact, weights, layout):
  """float32 of the folded operands is within `fold_bound` of the exact ones.

  Weights have the contracted axis last.
  """
  smallest = float(jnp.finfo(E4M3).smallest_subnormal)
  tops = [
    2.0 ** (np.max(np.asarray(x.with_layout("linear").scale), -1) - 127.0)
    for x in (exact, weights)
  ]
  for group, (rows, a, b) in enumerate(by_group(exact, weights, layout, True)):
    want, magnitudes = a @ b, np.abs(a) @ np.abs(b)
    bound = tolerance.fold_bound(
      np.abs(a), np.abs(b), tops[0][rows], tops[1][group], smallest
    ) + tolerance.matmul_bound(magnitudes, want, bf16=False)
    assert (np.abs(got[rows] - want) <= bound).all()


def kernel(options):
  """The kernel as `interpreted` calls it."""

  def call(interpret, lhs, rhs, layout):
    return grouped_matmul.grouped_matmul(
      lhs, rhs, layout, tile=TILE, interpret=interpret, **options
    )

  return call


@pytest.mark.parametrize("way", ["bf16", "exact transposed", "folded"])
def test_every_pattern_of_groups(interpreted, way):
  lhs, rhs, options = operands(way, width=96)
  call = kernel(options)
  for pattern in cases.PATTERNS:
    layout = layout_of(pattern)
    got = interpreted(call, poisoned(lhs, layout), rhs, layout)
    check(got, lhs, rhs, layout, options)


@pytest.mark.parametrize(
  "way", ["bf16 transposed", "exact", "exact of bf16 weights"]
)
def test_the_other_operands(interpreted, way):
  lhs, rhs, options = operands(way)
  layout = layout_of("skewed")
  got = interpreted(kernel(options), poisoned(lhs, layout), rhs, layout)
  check(got, lhs, rhs, layout, options)


@pytest.mark.parametrize(
  ("way", "depth", "width"),
  [
    ("exact", 160, 160),
    ("exact of bf16 weights", 96, 32),
    ("folded", 160, 96),
    ("bf16 transposed", 32, 320),
  ],
)
def test_widths_that_end_inside_a_tile(interpreted, way, depth, width):
  lhs, rhs, options = operands(way, depth=depth, width=width)
  layout = layout_of("single_row")
  got = interpreted(kernel(options), lhs, rhs, layout)
  check(got, lhs, rhs, layout, options)


def test_outliers_stay_within_the_bounds(interpreted):
  layout = layout_of("even")
  exact, weights, options = operands("exact transposed", "outliers")
  got = interpreted(kernel(options), exact, weights, layout)
  check(got, exact, weights, layout, options)

  exact = quantized(exact.dequantize(), -1)
  lhs, rhs = reference.fold(exact), reference.fold(weights)
  got = np.asarray(interpreted(kernel(options), lhs, rhs, layout))
  check(got, lhs, rhs, layout, options)
  assert int(fold_loss.fold_loss(exact).changed)  # else nothing is tested
  check_fold(got, exact, weights, layout)


@pytest.mark.parametrize("way", ["exact transposed", "folded"])
def test_scales_at_the_ends_of_their_range(interpreted, way):
  """A NaN block shows in its row alone; very large and very small are exact."""
  lhs, rhs, options = operands(way)
  layout = layout_of("even")
  scale = jnp.full_like(lhs.scale, 17)  # e5m2's smallest is normal in float32
  scale = scale.at[0].set(225).at[1, 0].set(mxfp8.SCALE_NAN)
  lhs = dataclasses.replace(lhs, scale=scale)
  if way == "folded":
    lhs = reference.fold(lhs)
  got = np.asarray(interpreted(kernel(options), lhs, rhs, layout))
  assert np.isnan(got[1]).all()
  got = got.copy()
  got[1] = 0
  data, scale = lhs.data.at[1].set(0), lhs.scale.at[1].set(0)
  check(
    got, dataclasses.replace(lhs, data=data, scale=scale), rhs, layout, options
  )


@pytest.mark.parametrize(
  ("depth", "stride", "read"),
  [(128, 256, "in place"), (160, 256, "copied"), (128, 144, "copied")],
)
def test_rows_of_a_wire_buffer_are_read(interpreted, depth, stride, read):
  """Rows hold the data, NaN behind it; lhs.data itself is not read."""
  lhs, rhs, options = operands("folded", depth=depth)
  layout = layout_of("even")
  wire = jnp.full((lhs.shape[0], stride), jnp.nan, E4M3)
  wire = wire.at[:, :depth].set(lhs.data)
  assert (grouped_matmul._rows(lhs, wire, "folded") is wire) == (
    read == "in place"
  )
  hollow = dataclasses.replace(lhs, data=jnp.zeros_like(lhs.data))
  got = interpreted(
    lambda i, rows: grouped_matmul.grouped_matmul(
      hollow, rhs, layout, lhs_rows=rows, tile=TILE, interpret=i, **options
    ),
    wire,
  )
  check(got, lhs, rhs, layout, options)


@pytest.mark.parametrize(
  ("way", "owner", "left_out"),
  [
    ("bf16", common.plgpu, "wgmma_wait"),  # wgmma may still read the slot
    ("exact of bf16 weights", common, "fence_reads"),
  ],
)
def test_a_slot_given_back_too_early_is_a_race(
  interpreted, monkeypatch, way, owner, left_out
):
  lhs, rhs, options = operands(way)
  monkeypatch.setattr(owner, left_out, lambda _: None)
  with pytest.raises(mosaic_interpreter.RaceError):
    interpreted(kernel(options), lhs, rhs, layout_of("even"))


def test_fold_loss_counts_what_is_lost():
  data = jnp.asarray(np.full((2, 64), 1.5), E4M3)
  scale = jnp.asarray([[127, 127], [127, 117]], jnp.uint8)
  loss = fold_loss.fold_loss(mxfp8.MxArray(data, scale))
  # 1.5 x 2^-10 lies between 2^-10 (a tie, to zero) and 2^-9: one third off.
  assert (int(loss.changed), int(loss.lost)) == (32, 32)
  near = mxfp8.MxArray(data, scale.at[1, 1].set(120))  # 1.5 x 2^-7: 6 x 2^-9
  loss = fold_loss.fold_loss(near)
  assert (int(loss.changed), int(loss.lost)) == (0, 0)


def test_variants_are_hoppers_alone():
  assert grouped_matmul.variants("sm_100a") == []
  found = grouped_matmul.variants("sm_90a")
  assert {v.promises[0] for v in found} == {"wgmma_fp8", "wgmma_16bit"}


@pytest.mark.parametrize(("width", "columns"), [(2048, 256), (160, 192)])
def test_the_default_tile_wastes_little(width, columns):
  for way in ("plain", "folded", "converted"):
    assert tile.matmul_tile(width, 2, way).columns == columns


def test_what_the_kernel_does_not_take_is_refused():
  lhs, rhs, _ = operands("bf16")
  layout = layout_of("even")
  call = functools.partial(grouped_matmul.grouped_matmul, layout=layout)
  for bad in (
    (lhs.astype(jnp.float32), rhs.astype(jnp.float32)),
    (lhs, quantized(rhs, -2)),
    (lhs[:, :40], rhs[:, :40]),
    (lhs, rhs[:, :, :40]),
  ):
    with pytest.raises(NotImplementedError, match='backend="xla"'):
      call(*bad)
  with pytest.raises(ValueError, match="contracted axis"):
    call(quantized(lhs, -1), quantized(rhs, -1))
  with pytest.raises(ValueError, match="must be equal"):
    call(lhs, rhs, transpose_rhs=True)
  with pytest.raises(ValueError, match="as many"):
    call(lhs[:128], rhs)
  with pytest.raises(ValueError, match="out_dtype"):
    call(lhs, rhs, out_dtype=jnp.float16)
  with pytest.raises(ValueError, match="lhs_rows must be"):
    call(quantized(lhs, -1), rhs, lhs_rows=lhs)
  for bad in ({"columns": 100}, {"stages": 1}, {"along": 2}, {"buffers": 3}):
    with pytest.raises(ValueError, match="MatmulTile"):
      tile.MatmulTile(**bad)
