"""The MXFP8 format: fp8 elements, one power-of-two scale per block of 32.

    value[i] = data[i] * 2^(scale[i // 32] - 127)

  data   float8_e4m3fn or float8_e5m2, the shape of the array it stands for
  scale  uint8, the biased exponent of a power of two (e8m0): 0 is 2^-127,
         255 is NaN. Never a float: NCCL has no e8m0 and a cast to it rounds.

Linear layout: one byte per block, the data's shape with the blocked axis
divided by 32. Blocked layout: the 512-byte atoms of 128 rows x 4 blocks that
the block-scaled MMA reads (the atom of cuBLAS).

Source: OCP Microscaling Formats (MX) v1.0; the scale rules are named in
`RULES`. What each kernel does with the format is in `reference.py`.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

BLOCK = 32  # elements that share one scale (OCP MX v1.0)
ATOM_ROWS = 128  # rows of one 512-byte atom of blocked scales
ATOM_BLOCKS = 4  # blocks of one row in such an atom
ATOM_BYTES = ATOM_ROWS * ATOM_BLOCKS
SCALE_BIAS = 127
SCALE_NAN = 255
NAN_CODE = 0x7F  # a NaN in e4m3 and in e5m2

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
DTYPES = (E4M3, E5M2)
RULES = ("rceil", "floor", "ceil", "even")
BLOCKS = ("1x32", "32x32")
LAYOUTS = ("linear", "blocked")

Rounding = Literal["rceil", "floor", "ceil", "even"]
Block = Literal["1x32", "32x32"]
Layout = Literal["linear", "blocked"]


@dataclasses.dataclass(frozen=True)
class ElementFormat:
  """What the arithmetic needs to know of an fp8 element type.

  Attributes:
    max: largest finite value.
    exponent: floor(log2(max)).
    mantissa_bits: explicit mantissa bits.
    top_mantissa: mantissa of `max`, as the 23 bits of a float32.
  """

  max: float
  exponent: int
  mantissa_bits: int
  top_mantissa: int


def element_format(dtype: Any) -> ElementFormat:
  """The constants of an element type.

  Raises:
    ValueError: if `dtype` is neither float8_e4m3fn nor float8_e5m2.
  """
  if dtype == E4M3:
    return ElementFormat(448.0, 8, 3, 0x600000)
  if dtype == E5M2:
    return ElementFormat(57344.0, 15, 2, 0x600000)
  raise ValueError(
      "MXFP8 elements must be float8_e4m3fn or float8_e5m2; got "
      f"dtype={jnp.dtype(dtype).name}.")


def scale_byte(amax_bits: jax.Array, rounding: Rounding,
               dtype: Any) -> jax.Array:
  """Scale bytes of blocks, by integer arithmetic on the block maxima.

  Args:
    amax_bits: uint32, the float32 bits of max |x| per block (NaN above Inf
      above every finite number, so an integer maximum propagates them).
    rounding: one of `RULES`: "rceil" the smallest power of two that keeps the
      maximum representable, "floor" OCP MX v1.0, "ceil", "even".
    dtype: element type.

  Returns:
    int32 bytes in 0..255 of the shape of `amax_bits`; 255 where the block
    holds NaN or Inf.

  Raises:
    ValueError: if `rounding` is unknown.
  """
  fmt = element_format(dtype)
  exponent = (amax_bits >> 23).astype(jnp.int32)
  mantissa = amax_bits & jnp.uint32(0x7FFFFF)
  if rounding == "rceil":
    byte = exponent + (mantissa > fmt.top_mantissa)
  elif rounding == "floor":
    byte = exponent
  elif rounding == "ceil":
    byte = exponent + (mantissa != 0)
  elif rounding == "even":
    half = jnp.uint32(1 << (22 - fmt.mantissa_bits))
    byte = ((amax_bits + half) >> 23).astype(jnp.int32)
  else:
    raise ValueError(
        f"rounding must be one of {RULES}; got {rounding!r}.")
  byte = jnp.maximum(byte - fmt.exponent, 0)
  return jnp.where(exponent == 255, SCALE_NAN, byte)


def float32_bits(x: jax.Array) -> jax.Array:
  """The float32 bits of `x` (bf16, float16 or float32) as uint32.

  bf16 is widened by a shift, so that a backend that flushes subnormals
  cannot lose any.
  """
  if x.dtype == jnp.bfloat16:
    half = jax.lax.bitcast_convert_type(x, jnp.uint16)
    return half.astype(jnp.uint32) << 16
  return jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def power_of_two(byte: jax.Array) -> jax.Array:
  """2^(byte - 127) as float32 for int32 bytes in 1..254 (normal numbers)."""
  bits = byte.astype(jnp.uint32) << 23
  return jax.lax.bitcast_convert_type(bits, jnp.float32)


def encode(bits: jax.Array, byte: jax.Array, dtype: Any) -> jax.Array:
  """fp8 codes of numbers under given scales: round to nearest even, saturate.

  Args:
    bits: uint32, the float32 bits of the numbers.
    byte: int32 scale bytes, broadcastable to `bits`. A finite block never has
      one above 247, so the reciprocal scale is a normal float32.
    dtype: element type.

  Returns:
    fp8 array of the shape of `bits`; every element of a block whose byte is
    255 is the NaN code 0x7F.
  """
  fmt = element_format(dtype)
  value = jax.lax.bitcast_convert_type(bits, jnp.float32)
  scaled = value * power_of_two(jnp.clip(2 * SCALE_BIAS - byte, 1, 254))
  # A subnormal float32 is mantissa * 2^-149; XLA:CPU flushes it to zero in the
  # product above, so it is scaled through its integer mantissa instead. Under
  # a scale byte of 105 and more it is far below half the smallest fp8 number.
  magnitude = bits & jnp.uint32(0x7FFFFF)
  small = magnitude.astype(jnp.float32) * power_of_two(
      jnp.clip(105 - byte, 1, 254))
  small = jnp.where(bits >> 31 == 1, -small, small)
  subnormal = (bits >> 23) & 0xFF == 0
  scaled = jnp.where(subnormal, small, scaled)
  codes = jnp.clip(scaled, -fmt.max, fmt.max).astype(dtype)
  nan = jax.lax.bitcast_convert_type(jnp.uint8(NAN_CODE), dtype)
  return jnp.where(byte == SCALE_NAN, nan, codes)


def decode(data: jax.Array, byte: jax.Array, dtype: Any) -> jax.Array:
  """The numbers that codes and scales stand for.

  Exact in float32, down to subnormals; bf16 is rounded once, to even.

  Args:
    data: fp8 codes.
    byte: uint8 scale bytes, broadcastable to `data`.
    dtype: float32 or bfloat16.
  """
  byte = byte.astype(jnp.int32)
  code = data.astype(jnp.float32)
  scale = power_of_two(jnp.maximum(byte, 1))
  value = code * jnp.where(byte == SCALE_NAN, jnp.nan, scale)
  value = jnp.where(byte == 0, value * 0.5, value)  # 2^-127 is subnormal
  if dtype == jnp.bfloat16:
    value = value.astype(jnp.bfloat16)
  # Below 2^-126 the number is an integer times 2^-149 and goes through that
  # integer, because XLA:CPU would flush it. Only blocks of scale byte 16 or
  # less can hold such numbers (e5m2's smallest is 2^-16).
  tiny = jnp.abs(code) * power_of_two(jnp.minimum(byte, 16) + 149)
  integer = jnp.where(tiny < 2.0**23, tiny, 0.0).astype(jnp.uint32)
  sign = jax.lax.bitcast_convert_type(data, jnp.uint8) >> 7
  subnormal = (byte <= 16) & (tiny < 2.0**23)
  if dtype == jnp.bfloat16:
    low = (integer + 0x7FFF + ((integer >> 16) & 1)) >> 16
    low = (low | (sign.astype(jnp.uint32) << 15)).astype(jnp.uint16)
  else:
    low = integer | (sign.astype(jnp.uint32) << 31)
  return jnp.where(subnormal, jax.lax.bitcast_convert_type(low, dtype), value)


def to_blocked(scale: jax.Array) -> jax.Array:
  """Linear scales [..., R, C] to atoms [..., ceil(R/128), ceil(C/4), 512].

  Scale (r, c) sits at byte (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4 of its
  atom. Rows and columns that fill up the last atoms hold 0 (2^-127: finite).

  Args:
    scale: uint8; R is the axis that is not contracted, C counts blocks.
  """
  *lead, rows, cols = scale.shape
  pad = [(0, 0)] * len(lead) + [(0, -rows % ATOM_ROWS),
                                (0, -cols % ATOM_BLOCKS)]
  scale = jnp.pad(scale, pad)
  tall, wide = -(-rows // ATOM_ROWS), -(-cols // ATOM_BLOCKS)
  scale = scale.reshape(*lead, tall, 4, 32, wide, ATOM_BLOCKS)
  scale = jnp.moveaxis(scale, -2, -4)  # [..., tall, wide, 4, 32, 4]
  scale = jnp.swapaxes(scale, -3, -2)  # [..., tall, wide, 32, 4, 4]
  return scale.reshape(*lead, tall, wide, ATOM_BYTES)


def from_blocked(scale: jax.Array, rows: int, cols: int) -> jax.Array:
  """The inverse of `to_blocked`: atoms back to linear [..., rows, cols]."""
  *lead, tall, wide, _ = scale.shape
  scale = scale.reshape(*lead, tall, wide, 32, 4, ATOM_BLOCKS)
  scale = jnp.swapaxes(scale, -3, -2)  # [..., tall, wide, 4, 32, 4]
  scale = jnp.moveaxis(scale, -4, -2)  # [..., tall, 4, 32, wide, 4]
  scale = scale.reshape(*lead, tall * ATOM_ROWS, wide * ATOM_BLOCKS)
  return scale[..., :rows, :cols]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MxArray:
  """An array in MXFP8: a frozen pytree of codes and scales.

  Invariants, with B = 32 and `axis` negative (so that they survive a scan
  over, or a slice of, leading axes):

      block "1x32":   scale.shape == data.shape, but axis divided by B
      block "32x32":  scale.shape == data.shape, last two axes divided by B
      layout "linear":   scale as above
      layout "blocked":  scale == to_blocked(L), L the linear 1x32 view along
                         `axis`, transposed first if axis == -2
      value == data * 2^(scale - 127), scale repeated over its block

  Attributes:
    data: float8_e4m3fn or float8_e5m2, any shape.
    scale: uint8.
    axis: the axis that one block runs along, and that a matmul contracts.
    block: "1x32", or "32x32" for weights that are read along both axes.
    layout: "linear" or "blocked".

  Raises:
    TypeError: if data is not fp8, or scale is not uint8 (float scales are
      refused, not truncated to their exponent).
    ValueError: if the shapes do not obey the invariants.
  """

  data: jax.Array
  scale: jax.Array
  axis: int = dataclasses.field(default=-1, metadata=dict(static=True))
  block: Block = dataclasses.field(default="1x32", metadata=dict(static=True))
  layout: Layout = dataclasses.field(default="linear",
                                     metadata=dict(static=True))

  def __post_init__(self):
    _check_static(self)
    if hasattr(self.data, "dtype") and hasattr(self.scale, "dtype"):
      _check_arrays(self)

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the array that this stands for."""
    return self.data.shape

  @property
  def ndim(self) -> int:
    """The number of axes of the array that this stands for."""
    return self.data.ndim

  @property
  def nbytes(self) -> int:
    """Bytes of data and scales together."""
    return self.data.size + self.scale.size

  def dequantize(self, dtype: Any = jnp.bfloat16) -> jax.Array:
    """The numbers, in bfloat16 (rounded once) or float32 (exact)."""
    return decode(self.data, self.element_scales(), dtype)

  def element_scales(self) -> jax.Array:
    """Linear scale bytes repeated to one per element, the shape of data."""
    linear = self.with_layout("linear")
    scale = jnp.repeat(linear.scale, BLOCK, self.axis)
    if self.block == "32x32":
      scale = jnp.repeat(scale, BLOCK, -3 - self.axis)
    return scale

  def along(self, axis: int) -> "MxArray":
    """The 1x32 view along `axis` of 32x32 blocks; data is shared.

    Raises:
      ValueError: if the blocks are 1x32 along another axis: they cannot be
        re-read, only requantized.
    """
    axis = axis - self.ndim if axis >= 0 else axis
    if self.block == "1x32":
      if axis == self.axis:
        return self
      raise ValueError(
          f"along: blocks of 1x32 along axis {self.axis} cannot be read along"
          f" axis {axis}; requantize, or use block='32x32'.")
    linear = self.with_layout("linear")
    scale = jnp.repeat(linear.scale, BLOCK, -3 - axis)
    return MxArray(self.data, scale, axis=axis)

  def with_layout(self, layout: Layout) -> "MxArray":
    """The same numbers with scales in another layout."""
    if layout not in LAYOUTS:
      raise ValueError(f"layout must be one of {LAYOUTS}; got {layout!r}.")
    if layout == self.layout:
      return self
    other = -3 - self.axis  # the axis of the last two that is not contracted
    if layout == "blocked":
      scale = self.along(self.axis).scale
      scale = scale if self.axis == -1 else jnp.swapaxes(scale, -1, -2)
      return dataclasses.replace(self, scale=to_blocked(scale), layout=layout)
    rows, cols = self.shape[other], self.shape[self.axis] // BLOCK
    scale = from_blocked(self.scale, rows, cols)
    scale = scale if self.axis == -1 else jnp.swapaxes(scale, -1, -2)
    if self.block == "32x32":
      first = jnp.arange(0, rows, BLOCK)
      scale = jnp.take(scale, first, axis=other)
    return dataclasses.replace(self, scale=scale, layout=layout)

  def __repr__(self) -> str:
    data = getattr(self.data, "dtype", type(self.data).__name__)
    shape = list(getattr(self.data, "shape", ()))
    scales = list(getattr(self.scale, "shape", ()))
    return (f"MxArray({shape} {data}, {self.block} blocks along axis"
            f" {self.axis}, {self.layout} scales {scales} uint8)")


def _check_static(x: MxArray) -> None:
  if x.block not in BLOCKS:
    raise ValueError(f"block must be one of {BLOCKS}; got {x.block!r}.")
  if x.layout not in LAYOUTS:
    raise ValueError(f"layout must be one of {LAYOUTS}; got {x.layout!r}.")
  if x.axis >= 0:
    raise ValueError(
        f"axis of an MxArray must be negative (counted from the end);"
        f" got axis={x.axis}. Pass axis - ndim.")
  if x.axis < -2 and (x.block == "32x32" or x.layout == "blocked"):
    raise ValueError(
        f"32x32 blocks and blocked scales need axis -1 or -2; got axis="
        f"{x.axis}. Use block='1x32' with linear scales, or move the axis.")


def _check_arrays(x: MxArray) -> None:
  data, scale = np.dtype(x.data.dtype), np.dtype(x.scale.dtype)
  fp8, bytes_ = data in DTYPES, scale == np.uint8
  if not (fp8 or bytes_) or scale == jax.dtypes.float0:
    return  # a tree of results (tangents, comparisons), not an MXFP8 array
  if not (fp8 and bytes_):
    raise TypeError(
        "MxArray needs fp8 data and uint8 scales (biased exponents of powers"
        f" of two); got data {data}, scale {scale}. Float scales that are no"
        " powers of two have no MXFP8 form: quantize the values again.")
  want = scale_shape(x.data.shape, x.axis, x.block, x.layout)
  if tuple(x.scale.shape) != want:
    raise ValueError(
        f"MxArray of shape {tuple(x.data.shape)} with {x.block} blocks along"
        f" axis {x.axis} and {x.layout} scales needs scales of shape {want};"
        f" got {tuple(x.scale.shape)}.")


def scale_shape(shape: tuple[int, ...], axis: int, block: Block,
                layout: Layout) -> tuple[int, ...]:
  """The shape of the scale array that `MxArray` demands.

  Raises:
    ValueError: if a quantized axis is missing or no multiple of 32.
  """
  blocked_axes = (-1, -2) if block == "32x32" else (axis,)
  out = list(shape)
  if len(shape) < max(-a for a in blocked_axes):
    raise ValueError(
        f"quantize: {block} blocks along axis {axis} need more axes than"
        f" x{tuple(shape)} has.")
  for a in blocked_axes:
    if shape[a] % BLOCK:
      raise ValueError(
          f"quantize: axis {a} must be a multiple of {BLOCK} (one scale per"
          f" {BLOCK} values); got {shape[a]} in x{tuple(shape)}. Pad it to"
          f" {-(-shape[a] // BLOCK) * BLOCK}.")
    out[a] //= BLOCK
  if layout == "linear":
    return tuple(out)
  rows, cols = shape[-3 - axis], shape[axis] // BLOCK
  return (*shape[:-2], -(-rows // ATOM_ROWS), -(-cols // ATOM_BLOCKS),
          ATOM_BYTES)
