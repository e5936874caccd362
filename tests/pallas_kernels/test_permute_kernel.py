"""Interpreted permute and requantize equal the reference to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
  cases,
  groups,
  mxfp8,
  permute,
  reference,
  requantize,
  tiles,
  wire,
)

TOKENS, GROUPS = 40, 3


def mx_rows(rows, width, dtype=mxfp8.E4M3, seed=0):
  """MXFP8 rows of every code and of scales over the whole range."""
  rng = np.random.default_rng(seed)
  code = rng.integers(0, 256, (rows, width)).astype(np.uint8)
  byte = rng.integers(0, 256, (rows, width // mxfp8.BLOCK)).astype(np.uint8)
  return mxfp8.MxArray(jnp.asarray(code.view(dtype)), jnp.asarray(byte))


def same_bytes(got, want):
  got, want = np.asarray(got), np.asarray(want)
  assert (got.dtype, got.shape) == (want.dtype, want.shape)
  np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))


def same(got, want):
  assert (got.axis, got.block, got.layout) == (
    want.axis,
    want.block,
    want.layout,
  )
  same_bytes(got.data, want.data)
  same_bytes(got.scale, want.scale)


def some_source(rows):
  """Tokens in random order, one row in four of none."""
  token = np.random.default_rng(2).integers(0, TOKENS, rows)
  return jnp.asarray(np.where(token % 4 == 0, -1, token), jnp.int32)


@pytest.mark.parametrize(
  ("width", "dtype"), [(512, mxfp8.E4M3), (1408, mxfp8.E5M2)]
)
def test_permute(interpreted, width, dtype):
  x, source = mx_rows(TOKENS, width, dtype), some_source(128)
  got = interpreted(
    lambda i: permute.permute(x, source, stages=2, interpret=i)
  )
  same(got, reference.take_mx_rows(x, source).with_layout("blocked"))


def test_permute_packed_rows(interpreted):
  x, source = mx_rows(TOKENS, 512), some_source(128)
  weight = jnp.linspace(0.1, 1, TOKENS)
  packed = wire.pack(x, weight)
  got, weights = interpreted(
    lambda i: permute.permute_wire(packed, source, 512, interpret=i)
  )
  same(got, reference.take_mx_rows(x, source).with_layout("blocked"))
  same_bytes(weights, groups.take_rows(weight, source))


@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_relayout_fills_padding(interpreted, pattern):
  sizes = cases.group_sizes(pattern, GROUPS, 200)
  rows = groups.aligned_rows(200, GROUPS)
  layout = groups.group_layout(jnp.array(sizes), rows)
  x = mx_rows(layout.rows, 256)
  weight = jnp.linspace(0.1, 1, layout.rows)
  packed = wire.pack(x, weight)
  atoms, weights = interpreted(
    lambda i: permute.relayout_wire(packed, 256, layout, interpret=i)
  )
  scale = jnp.where(layout.row_valid()[:, None], x.scale, 0)
  same_bytes(atoms, mxfp8.to_blocked(scale))
  same_bytes(weights, jnp.where(layout.row_valid(), weight, 0))


@pytest.mark.parametrize("slots", [1, 129])
def test_pack(interpreted, slots):
  x = mx_rows(TOKENS, 128)
  rng = np.random.default_rng(1)
  row = jnp.asarray(rng.integers(0, TOKENS, slots), jnp.int32)
  weight = jnp.asarray(rng.random(slots), jnp.float32)
  got = interpreted(lambda i: permute.pack(x, row, weight, interpret=i))
  want = wire.pack(reference.take_mx_rows(x, row), weight)
  same_bytes(got, want)
  rows, extra = wire.unpack(got, x)
  same(rows, reference.take_mx_rows(x, row))
  same_bytes(extra, weight)


def test_pack_bf16_rows(interpreted):
  x = jax.random.normal(jax.random.key(0), (TOKENS, 192), jnp.bfloat16)
  row = jnp.arange(130, dtype=jnp.int32) % TOKENS
  weight = jnp.linspace(0.1, 1, 130)
  got = interpreted(lambda i: permute.pack(x, row, weight, interpret=i))
  same_bytes(got, wire.pack(x[row], weight))


@pytest.mark.parametrize("rows", cases.ODD_ROWS[:2])
def test_take_rows(interpreted, rows):
  x = jax.random.normal(jax.random.key(0), (TOKENS, 64), jnp.bfloat16)
  source = jnp.arange(rows, dtype=jnp.int32) % (TOKENS + 1) - 1
  got = interpreted(lambda i: permute.take_rows(x, source, interpret=i))
  same_bytes(got, groups.take_rows(x, source))


def test_gather_and_quantize(interpreted):
  x = jax.random.normal(jax.random.key(0), (TOKENS, 128), jnp.bfloat16)
  source = some_source(128)
  got = interpreted(lambda i: permute.gather_quantize(x, source, interpret=i))
  rows = groups.take_rows(x, source)
  for part, axis in zip(got, (-1, -2), strict=True):
    same(part, reference.quantize(rows, axis, layout="blocked"))


def real_rows(rows, width, dtype, seed=0):
  """Quantized numbers over many binades, rows of zeros and of NaN included."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((rows, width))
  x *= np.exp2(rng.integers(-30, 30, (rows, 1)))
  x[3], x[40, 7], x[64:96] = 0.0, np.inf, 0.0
  return reference.quantize(
    jnp.asarray(x, jnp.bfloat16), dtype=dtype, layout="blocked"
  )


@pytest.mark.parametrize("width", [128, 512])
@pytest.mark.parametrize("dtype", mxfp8.DTYPES)
@pytest.mark.parametrize("layout", mxfp8.LAYOUTS)
def test_requantize(interpreted, width, dtype, layout):
  x = real_rows(256, width, dtype)
  got = interpreted(
    lambda i: requantize.requantize(x, layout=layout, interpret=i)
  )
  same(got, reference.requantize(x, -2, layout=layout))


def test_requantize_packed_rows(interpreted):
  x = real_rows(384, 256, mxfp8.E4M3).with_layout("linear")
  packed = wire.pack(x, jnp.ones(384))
  data = jax.lax.bitcast_convert_type(packed, mxfp8.E4M3)
  atoms = x.with_layout("blocked").scale
  got = interpreted(
    lambda i: requantize.requantize_data(
      data, atoms, 256, rounding="floor", interpret=i
    )
  )
  same(got, reference.requantize(x, -2, rounding="floor", layout="blocked"))


@pytest.mark.parametrize(
  "refused",
  [
    lambda: permute.permute(mx_rows(8, 96), jnp.zeros(128, jnp.int32)),
    lambda: permute.permute(mx_rows(8, 2880), jnp.zeros(128, jnp.int32)),
    lambda: permute.permute(mx_rows(8, 128), jnp.zeros(100, jnp.int32)),
    lambda: permute.permute(
      mx_rows(8, 128).with_layout("blocked"), jnp.zeros(128, jnp.int32)
    ),
    lambda: permute.take_rows(jnp.zeros((4, 8)), jnp.zeros(4, jnp.int32)),
    lambda: permute.take_rows(jnp.zeros((0, 32)), jnp.zeros(4, jnp.int32)),
    lambda: permute.pack(mx_rows(8, 160), jnp.zeros(8, jnp.int32), jnp.ones(8)),
    lambda: permute.pack(
      jnp.zeros((8, 128)), jnp.zeros(8, jnp.int32), jnp.ones(8)
    ),
    lambda: permute.pack(
      jnp.zeros((8, 96), jnp.bfloat16), jnp.zeros(8, jnp.int32), jnp.ones(8)
    ),
    lambda: requantize.requantize(mx_rows(100, 128)),
    lambda: requantize.requantize(mx_rows(128, 160)),
    lambda: requantize.requantize(mx_rows(128, 128), -1),
  ],
)
def test_refusals_name_a_way_out(refused):
  with pytest.raises(NotImplementedError, match='backend="xla"'):
    refused()


def test_wrong_calls():
  short, source = jnp.zeros((8, 160), jnp.uint8), jnp.zeros(128, jnp.int32)
  with pytest.raises(ValueError, match="stride"):
    permute.permute_wire(short, source, 128)
  x = mxfp8.MxArray(
    jnp.zeros((128, 256), mxfp8.E4M3), jnp.zeros((128, 8), jnp.uint8)
  )
  with pytest.raises(ValueError, match="must be"):
    requantize.requantize_data(x.data, x.scale, 256)
  tile = tiles.StreamTile(columns=384)
  with pytest.raises(ValueError, match="divide"):
    requantize.requantize(x, tile=tile)
