"""MxArray, scale layouts and the element arithmetic."""

import dataclasses

import chex
import jax
from jax import lax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import mxfp8, reference
from tests.pallas_kernels import float64_format

MxArray = mxfp8.MxArray
quantize = jax.jit(  # one compilation where there would be one per operation
  reference.quantize,
  static_argnames=("axis", "block", "rounding", "dtype", "layout"),
)
dequantize = jax.jit(reference.dequantize, static_argnames="dtype")


def normal(shape, seed=0, dtype=jnp.bfloat16):
  return jax.random.normal(jax.random.key(seed), shape, dtype)


class TestBlockedLayout:
  """The atoms of 512 bytes that the block-scaled MMA reads."""

  @pytest.mark.parametrize(
    ("place", "byte"),
    [((0, 0), 0), ((1, 0), 16), ((32, 0), 4), ((33, 2), 22), ((127, 3), 511)],
  )
  def test_places_in_an_atom(self, place, byte):
    scale = jnp.zeros((128, 4), jnp.uint8).at[place].set(1)
    atom = np.asarray(mxfp8.to_blocked(scale)).reshape(-1)
    assert np.flatnonzero(atom).tolist() == [byte]

  def test_word_of_an_atom_holds_one_row(self):
    row = np.arange(128, dtype=np.uint8)
    scale = np.repeat(row[:, None], 4, axis=1)
    words = np.asarray(mxfp8.to_blocked(jnp.asarray(scale))).reshape(128, 4)
    for r in range(128):
      assert (words[r % 32 * 4 + r // 32] == r).all()

  @pytest.mark.parametrize("shape", [(1, 1), (128, 4), (300, 7), (2, 130, 5)])
  def test_every_scale_is_at_the_byte_of_the_formula(self, shape):
    *lead, rows, cols = shape
    scale = np.random.default_rng(0).integers(1, 255, shape).astype(np.uint8)
    got = np.asarray(mxfp8.to_blocked(jnp.asarray(scale)))
    tall, wide = -(-rows // 128), -(-cols // 4)
    chex.assert_shape(got, (*lead, tall, wide, 512))
    want = np.zeros((*lead, tall * wide * 512), np.uint8)
    for r in range(rows):
      for c in range(cols):
        byte = ((r // 128) * wide + c // 4) * 512
        byte += (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
        want[..., byte] = scale[..., r, c]
    np.testing.assert_array_equal(got.reshape(want.shape), want)
    back = mxfp8.from_blocked(jnp.asarray(got), rows, cols)
    np.testing.assert_array_equal(back, scale)

  @pytest.mark.parametrize("block", mxfp8.BLOCKS)
  @pytest.mark.parametrize("axis", [-1, -2])
  def test_there_and_back(self, block, axis):
    q = quantize(normal((2, 192, 96)), axis, block=block)
    blocked = q.with_layout("blocked")
    assert blocked.layout == "blocked"
    direct = quantize(normal((2, 192, 96)), axis, block=block, layout="blocked")
    chex.assert_trees_all_equal(blocked.scale, direct.scale)
    chex.assert_trees_all_equal(blocked.with_layout("linear").scale, q.scale)
    chex.assert_trees_all_equal(blocked.dequantize(), dequantize(q))
    rows, cols = (192, 96 // 32) if axis == -1 else (96, 192 // 32)
    view = q.along(axis).scale
    view = view if axis == -1 else jnp.swapaxes(view, -1, -2)
    chex.assert_shape(view, (2, rows, cols))
    chex.assert_trees_all_equal(mxfp8.to_blocked(view), blocked.scale)


class TestDecode:
  """Every code under every kind of scale."""

  BYTES = (*range(31), 100, 120, 126, 127, 128, 200, 239, 246, 247, 254, 255)

  @pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
  @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
  def test_all_codes_under_small_and_large_scales(self, fmt, dtype):
    codes = np.tile(np.arange(256, dtype=np.uint8), (len(self.BYTES), 1))
    byte = np.asarray(self.BYTES, np.uint8)[:, None]
    fp8 = float64_format.FORMATS[fmt][0]
    got = mxfp8.decode(jnp.asarray(codes.view(fp8)), jnp.asarray(byte), dtype)
    with np.errstate(over="ignore"):  # 57344 * 2^127 is infinity
      want = float64_format.decode(codes, byte, fmt).astype(np.float32)
      want = want.astype(np.dtype(dtype))
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(nan, np.isnan(np.float32(got)))
    bits = np.uint32 if dtype == jnp.float32 else np.uint16
    np.testing.assert_array_equal(
      np.asarray(got).view(bits)[~nan], want.view(bits)[~nan]
    )

  def test_sign_of_zero_is_kept(self):
    code = jnp.asarray([0x00, 0x80], jnp.uint8)
    code = lax.bitcast_convert_type(code, mxfp8.E4M3)
    for byte in (0, 127, 254):
      got = mxfp8.decode(code, jnp.full(2, byte, jnp.uint8), jnp.float32)
      assert np.signbit(np.asarray(got)).tolist() == [False, True]


class TestTraps:
  """Each was seen in this JAX; the first assert of each shows it still is."""

  def test_a_cast_to_e8m0_rounds_to_nearest(self):
    amax = jnp.float32(448 * 1.4)
    naive = (amax / 448).astype(jnp.float8_e8m0fnu)
    assert lax.bitcast_convert_type(naive, jnp.uint8) == 127
    x = jnp.full((1, 32), amax)
    assert quantize(x).scale[0, 0] == 128

  def test_a_cast_of_zero_to_e8m0_is_nan(self):
    naive = jnp.float32(0).astype(jnp.float8_e8m0fnu)
    assert lax.bitcast_convert_type(naive, jnp.uint8) == mxfp8.SCALE_NAN
    assert quantize(jnp.zeros((1, 32))).scale[0, 0] == 0

  @pytest.mark.parametrize("value", [465.0, np.inf])
  def test_a_cast_to_e4m3_does_not_saturate(self, value):
    assert np.isnan(np.float32(jnp.float32(value).astype(mxfp8.E4M3)))
    x = jnp.full((1, 32), 465.0)
    q = quantize(x, rounding="floor")
    assert (np.float32(q.data) == 448).all()
    assert q.scale[0, 0] == 127

  def test_subnormals_are_flushed_by_the_compiler(self):
    tiny = jnp.asarray([2.0**-127, 2.0**-133], jnp.float32)
    scaled = jax.jit(lambda x: x * jnp.float32(2.0**126))(tiny)
    assert (np.asarray(scaled) == 0).all()
    q = quantize(jnp.pad(tiny, (0, 30)))
    assert np.asarray(q.data).view(np.uint8)[:2].tolist() == [0x38, 0x08]
    assert np.float64(dequantize(q, jnp.float32))[:2].tolist() == [
      2.0**-127,
      2.0**-133,
    ]

  def test_a_gradient_through_a_bitcast_is_silently_zero(self):
    def through_bytes(x):
      codes = lax.bitcast_convert_type(x.astype(mxfp8.E4M3), jnp.uint8)
      back = lax.bitcast_convert_type(codes, mxfp8.E4M3)
      return back.astype(jnp.float32).sum()

    assert jax.grad(through_bytes)(jnp.float32(1.5)) == 0

  def test_1x32_blocks_cannot_be_read_as_32x1(self):
    q = quantize(normal((64, 64)))
    with pytest.raises(ValueError, match="along axis -1 .* along axis -2"):
      q.along(-2)
    with pytest.raises(ValueError, match="quantize it along -2"):
      reference._operand(q, -2)


class TestMxArray:
  """A frozen pytree that obeys its equations."""

  @pytest.fixture
  def q(self):
    return quantize(normal((4, 64, 96)))

  def test_invariants(self, q):
    assert (q.axis, q.block, q.layout) == (-1, "1x32", "linear")
    assert q.shape == (4, 64, 96)
    assert q.ndim == 3
    assert q.scale.shape == (4, 64, 3)
    assert q.nbytes == 4 * 64 * 96 * 33 // 32
    columns = quantize(normal((4, 64, 96)), 1)
    assert (columns.axis, columns.scale.shape) == (-2, (4, 2, 96))
    square = quantize(normal((4, 64, 96)), block="32x32")
    assert square.scale.shape == (4, 2, 3)

  def test_value_is_data_times_the_power_of_its_scale(self, q):
    scale = np.repeat(2.0 ** (np.float64(q.scale) - 127), 32, axis=-1)
    want = np.float64(np.asarray(q.data).astype(np.float32)) * scale
    np.testing.assert_array_equal(np.float64(dequantize(q, jnp.float32)), want)

  def test_square_blocks_read_along_both_axes(self):
    q = quantize(normal((2, 64, 96)), block="32x32")
    assert q.along(-1).scale.shape == (2, 64, 3)
    assert q.along(1).scale.shape == (2, 2, 96)
    for axis in (-1, -2):
      chex.assert_trees_all_equal(q.along(axis).dequantize(), dequantize(q))

  def test_is_a_pytree_of_two_arrays(self, q):
    leaves, tree = jax.tree.flatten(q)
    assert [leaf.dtype for leaf in leaves] == [mxfp8.E4M3, jnp.uint8]
    again = jax.tree.unflatten(tree, leaves)
    assert (again.axis, again.block, again.layout) == (-1, "1x32", "linear")

  def test_passes_through_jit_with_static_fields(self, q):
    out = jax.jit(lambda a: dataclasses.replace(a))(q)
    assert isinstance(out, MxArray)
    chex.assert_trees_all_equal(out.dequantize(), dequantize(q))
    columns = jax.jit(lambda x: quantize(x, 1))(normal((4, 64, 96)))
    assert columns.axis == -2

  def test_scan_slices_the_leading_axis(self, q):
    def step(total, one):
      assert one.shape == (64, 96)
      assert one.scale.shape == (64, 3)
      return total + one.dequantize(jnp.float32), one

    total, stacked = lax.scan(step, jnp.zeros((64, 96)), q)
    want = sum(dequantize(q, jnp.float32)[i] for i in range(4))
    chex.assert_trees_all_equal(total, want)
    chex.assert_trees_all_equal(stacked.scale, q.scale)

  def test_a_tree_of_results_keeps_the_structure(self, q):
    same = jax.tree.map(lambda a, b: bool((a == b).all()), q, q)
    assert (same.data, same.scale) == (True, True)
    equal = jax.tree.map(lambda a, b: a == b, q, q)
    assert equal.data.dtype == bool
    shapes = jax.eval_shape(lambda a: a, q)
    assert shapes.scale.shape == q.scale.shape

  def test_is_frozen(self, q):
    with pytest.raises(dataclasses.FrozenInstanceError):
      q.axis = -2

  def test_repr_tells_shapes_and_blocks(self, q):
    text = repr(q)
    for part in ("[4, 64, 96]", "float8_e4m3fn", "1x32", "axis -1", "linear"):
      assert part in text
    assert "[4, 64, 3]" in repr(jax.eval_shape(lambda a: a, q))


class TestRefusals:
  """Each names what was got and what would do."""

  DATA = jnp.zeros((64, 64), mxfp8.E4M3)
  SCALE = jnp.zeros((64, 2), jnp.uint8)

  def test_float_scales(self):
    with pytest.raises(TypeError, match="uint8 scales.*float32.*powers"):
      MxArray(self.DATA, self.SCALE.astype(jnp.float32))

  def test_data_that_is_not_fp8(self):
    with pytest.raises(TypeError, match="fp8 data.*int8"):
      MxArray(self.DATA.astype(jnp.int8), self.SCALE)

  def test_scales_of_another_shape(self):
    with pytest.raises(ValueError, match=r"\(64, 2\); got \(64, 4\)"):
      MxArray(self.DATA, jnp.zeros((64, 4), jnp.uint8))
    with pytest.raises(ValueError, match=r"\(2, 64\); got \(64, 2\)"):
      MxArray(self.DATA, self.SCALE, axis=-2)

  def test_a_positive_axis(self):
    with pytest.raises(ValueError, match="negative.*axis=1"):
      MxArray(self.DATA, self.SCALE, axis=1)

  @pytest.mark.parametrize(
    ("change", "text"),
    [
      (dict(block="32"), "block must be one of"),
      (dict(layout="tiled"), "layout must be one of"),
      (dict(axis=-3, block="32x32"), "axis -1 or -2; got axis=-3"),
      (dict(axis=-3, layout="blocked"), "axis -1 or -2; got axis=-3"),
    ],
  )
  def test_unknown_options(self, change, text):
    with pytest.raises(ValueError, match=text):
      MxArray(self.DATA, self.SCALE, **change)

  def test_another_layout(self):
    with pytest.raises(ValueError, match="layout must be one of.*'tiled'"):
      MxArray(self.DATA, self.SCALE).with_layout("tiled")

  def test_another_element_type(self):
    with pytest.raises(ValueError, match="e4m3fn or float8_e5m2; got.*e3m4"):
      quantize(normal((1, 32)), dtype=ml_dtypes.float8_e3m4)

  def test_an_unknown_rule(self):
    with pytest.raises(ValueError, match="rounding must be one of.*'up'"):
      quantize(normal((1, 32)), rounding="up")

  @pytest.mark.parametrize(
    ("shape", "axis", "block", "text"),
    [
      ((4, 100), -1, "1x32", "axis -1 .* got 100 .* Pad it to 128"),
      ((100, 32), 0, "1x32", "axis -2 .* got 100 .* Pad it to 128"),
      ((32, 33), -1, "32x32", "axis -1 .* got 33 .* Pad it to 64"),
      ((32,), -1, "32x32", r"need more axes than x\(32,\)"),
    ],
  )
  def test_widths_that_are_no_multiple_of_32(self, shape, axis, block, text):
    with pytest.raises(ValueError, match=text):
      quantize(jnp.ones(shape), axis, block=block)
