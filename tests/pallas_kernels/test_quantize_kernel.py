"""Interpreted quantize and dequantize equal the reference to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
  cases,
  dequantize,
  groups,
  mxfp8,
  quantize,
  reference,
  tiles,
)

E4M3, E5M2 = mxfp8.DTYPES
SHAPE = (256, 256)


def hard_values(shape, dtype=jnp.bfloat16, seed=0):
  """Normal values over many binades, with every special kind of block."""
  rng = np.random.default_rng(seed)
  rows = shape[:-1]
  x = rng.standard_normal(shape) * np.exp2(rng.integers(-20, 20, (*rows, 1)))
  flat = x.reshape(-1, shape[-1])
  special = {
    0: 0.0,
    1: -0.0,
    2: np.ldexp(1.0, -130),  # subnormal
    3: np.ldexp(1.0, -126),
    4: 3.3e38,
    5: 448.0,
    6: 450.0,
    7: -464.0,
  }
  for row, value in special.items():
    if row < len(flat):
      flat[row, :96] = value
      flat[row, 1] = value / 3
  flat[-1, 40] = np.inf
  flat[-1, 70] = np.nan
  return jnp.asarray(flat.reshape(shape), dtype)


def assert_equal(got, want):
  assert (got.axis, got.block, got.layout) == (
    want.axis,
    want.block,
    want.layout,
  )
  assert got.data.dtype == want.data.dtype
  np.testing.assert_array_equal(got.scale, want.scale)
  np.testing.assert_array_equal(
    np.asarray(got.data).view(np.uint8), np.asarray(want.data).view(np.uint8)
  )


def assert_equal_values(got, want):
  """Equal bits, or both NaN: the two sides spell NaN differently."""
  a, b = np.asarray(got), np.asarray(want)
  assert a.dtype == b.dtype
  nan = np.isnan(a.astype(np.float32))
  np.testing.assert_array_equal(nan, np.isnan(b.astype(np.float32)))
  np.testing.assert_array_equal(
    np.where(nan, 0, a.view(np.uint16)), np.where(nan, 0, b.view(np.uint16))
  )


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [SHAPE, (2, 96, 160)])
def test_rounding_to_numbers_of_mxfp8(interpreted, axis, x_dtype, shape):
  x = hard_values(shape, x_dtype)
  got = interpreted(lambda i: quantize.round_to_mxfp8(x, axis, interpret=i))
  assert_equal_values(got, reference.round_to_mxfp8(x, axis))


def test_rounding_refuses_other_dtypes():
  x = jnp.zeros(SHAPE, jnp.float16)
  with pytest.raises(NotImplementedError, match="bfloat16 or float32"):
    quantize.round_to_mxfp8(x)


def test_rounding_in_square_blocks(interpreted):
  x = hard_values((2, 128, 160))
  options = dict(block="32x32", rounding="floor")
  got = interpreted(
    lambda i: quantize.round_to_mxfp8(x, -2, **options, interpret=i)
  )
  assert_equal_values(got, reference.round_to_mxfp8(x, -2, **options))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("layout", mxfp8.LAYOUTS)
@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
def test_directions_and_layouts(interpreted, axis, layout, x_dtype):
  x = hard_values(SHAPE, x_dtype)
  got = interpreted(
    lambda i: quantize.quantize(x, axis, layout=layout, interpret=i)
  )
  assert_equal(got, reference.quantize(x, axis, layout=layout))


@pytest.mark.parametrize(
  ("rounding", "dtype"),
  [*((rule, E4M3) for rule in mxfp8.RULES), ("rceil", E5M2), ("even", E5M2)],
)
def test_rules_and_element_types(interpreted, rounding, dtype):
  x = hard_values((128, 128))
  options = {"rounding": rounding, "dtype": dtype}
  rows, columns = interpreted(
    lambda i: quantize.quantize_both(x, **options, interpret=i)
  )
  options["layout"] = "blocked"
  assert_equal(rows, reference.quantize(x, -1, **options))
  assert_equal(columns, reference.quantize(x, -2, **options))


@pytest.mark.parametrize("layout", mxfp8.LAYOUTS)
def test_transposed_columns(interpreted, layout):
  x = hard_values((256, 160))
  layouts = ("linear", layout)
  _, columns = interpreted(
    lambda i: quantize.quantize_both(
      x, layouts=layouts, transposed=True, interpret=i
    )
  )
  assert_equal(columns, reference.quantize(x.T, -1, layout=layout))


@pytest.mark.parametrize(("axis", "layout"), [(-1, "linear"), (-2, "blocked")])
def test_square_blocks(interpreted, axis, layout):
  x = hard_values((2, 128, 160))
  options = {"block": "32x32", "layout": layout}
  got = interpreted(
    lambda i: quantize.quantize(x, axis, **options, interpret=i)
  )
  want = reference.quantize(x, axis, **options)
  assert_equal(got, want)
  if layout == "linear":
    for along in (-1, -2):
      np.testing.assert_array_equal(
        got.along(along).scale, want.along(along).scale
      )


def test_padding_rows_of_groups_count_as_zeros(interpreted):
  rows = groups.aligned_rows(150, 3)
  x = hard_values((rows, 128))  # padding rows hold rubbish, NaN included

  def both(interpret, tile_rows):
    return quantize.quantize_both(x, tile_rows=tile_rows, interpret=interpret)

  for pattern in cases.PATTERNS:
    sizes = jnp.asarray(cases.group_sizes(pattern, 3, 150), jnp.int32)
    layout = groups.group_layout(sizes, rows)
    by_rows, by_columns = interpreted(both, layout.tile_rows())
    clean = jnp.where(layout.row_valid()[:, None], x, 0)
    assert_equal(by_rows, reference.quantize(clean, -1, layout="blocked"))
    assert_equal(by_columns, reference.quantize(clean, -2, layout="blocked"))


def odd_shapes():
  """Every odd row count at one width, every odd width at one row count.

  Wide rows are cut to their last 128 columns and more: the edge is what counts.
  """
  for rows in cases.ODD_ROWS:
    yield rows, 160
  for width in cases.ODD_WIDTHS:
    yield 127, 256 + width % 128 if width > 256 else width


@pytest.mark.parametrize(("rows", "width"), sorted(set(odd_shapes())))
def test_odd_shapes_are_right_or_refused(interpreted, rows, width):
  x = hard_values((rows, width))
  if rows == 129 or width < 128:
    with pytest.raises(NotImplementedError, match='backend="xla"'):
      quantize.quantize(x)
    return
  got = interpreted(
    lambda i: quantize.quantize(x, layout="blocked", interpret=i)
  )
  assert_equal(got, reference.quantize(x, layout="blocked"))
  linear = reference.quantize(x)
  back = interpreted(lambda i: dequantize.dequantize(linear, interpret=i))
  assert_equal_values(back, reference.dequantize(linear))


@pytest.mark.parametrize(
  "tile",
  [
    tiles.StreamTile(columns=256, stages=1, ctas_per_sm=1),
    tiles.StreamTile(columns=256, ctas_per_sm=1, warpgroups=2, buffers=2),
    tiles.StreamTile(columns=128, stages=3, ctas_per_sm=2, buffers=3),
  ],
)
def test_every_schedule_gives_the_same(interpreted, tile):
  x = hard_values((3, 136, 416))  # the last tiles are partial, both ways
  rows, columns = interpreted(
    lambda i: quantize.quantize_both(x[:, :128], tile=tile, interpret=i)
  )
  assert_equal(rows, reference.quantize(x[:, :128], -1, layout="blocked"))
  assert_equal(columns, reference.quantize(x[:, :128], -2, layout="blocked"))
  got = interpreted(lambda i: quantize.quantize(x, tile=tile, interpret=i))
  assert_equal(got, reference.quantize(x))
  back = interpreted(
    lambda i: dequantize.dequantize(got, tile=tile, interpret=i)
  )
  assert_equal_values(back, reference.dequantize(got))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("layout", mxfp8.LAYOUTS)
@pytest.mark.parametrize("dtype", mxfp8.DTYPES)
def test_dequantize_of_any_bytes(interpreted, axis, layout, dtype):
  rng = np.random.default_rng(1)
  codes = rng.integers(0, 256, SHAPE).astype(np.uint8).view(dtype)
  shape = mxfp8.scale_shape(SHAPE, axis, "1x32", "linear")
  scale = rng.integers(0, 256, shape).astype(np.uint8)
  scale.flat[:6] = [0, 1, 2, 16, 254, 255]
  x = mxfp8.MxArray(jnp.asarray(codes), jnp.asarray(scale), axis=axis)
  x = x.with_layout(layout)
  got = interpreted(lambda i: dequantize.dequantize(x, interpret=i))
  assert_equal_values(got, reference.dequantize(x))


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("layout", mxfp8.LAYOUTS)
def test_dequantize_of_less_than_a_tile(interpreted, axis, layout):
  x = reference.quantize(hard_values((2, 64, 96)), axis, layout=layout)
  got = interpreted(lambda i: dequantize.dequantize(x, interpret=i))
  assert_equal_values(got, reference.dequantize(x))


def test_dequantize_of_square_blocks(interpreted):
  x = reference.quantize(hard_values((128, 160)), block="32x32")
  got = interpreted(lambda i: dequantize.dequantize(x, interpret=i))
  assert_equal_values(got, reference.dequantize(x))


@pytest.mark.parametrize(
  "option", [dict(rounding="up"), dict(block="16"), dict(layout="tiled")]
)
def test_an_unknown_option_is_refused_as_the_reference_does(option):
  (name,) = option
  x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
  for module in (quantize, reference):
    with pytest.raises(ValueError, match=f"{name} must be one of"):
      jax.eval_shape(lambda x, m=module: m.quantize(x, **option), x)


def test_what_the_kernels_do_not_take_is_refused():
  x = jnp.zeros(SHAPE, jnp.bfloat16)
  for bad in (x.astype(jnp.float16), x[None, None], x[:, :96], x[:129], x[:0]):
    with pytest.raises(NotImplementedError, match='backend="xla"'):
      quantize.quantize(bad)
  with pytest.raises(NotImplementedError, match='backend="xla"'):
    quantize.quantize(x.reshape(32, 16, 128), 0)
  with pytest.raises(NotImplementedError, match="along"):
    quantize.quantize(x, -2, block="32x32", transposed=True)
  with pytest.raises(ValueError, match="multiple of 32"):
    quantize.quantize(x[:, :250])
  with pytest.raises(ValueError, match="multiple of 128"):
    tiles.StreamTile(columns=128, warpgroups=2)
  with pytest.raises(ValueError, match="buffers must be 1 or 3"):
    tiles.StreamTile(stages=3, buffers=2)
  y = reference.quantize(x)
  with pytest.raises(NotImplementedError, match="bfloat16"):
    dequantize.dequantize(y, jnp.float32)
