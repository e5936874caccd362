"""The arithmetic of MXFP8: scale bytes, codes, and back; exact to the bit.

    byte = rule(max |x| of the block)          `scale_byte`
    code = fp8(x * 2^(127 - byte))             `encode`
    x    = code * 2^(byte - 127)               `decode`

Scales are built with integers and every cast is clipped first, so that a CPU
(which flushes subnormals and does not saturate), the interpreter and a GPU
agree to the bit. Shapes broadcast: nothing here knows of blocks or axes.

Source: OCP Microscaling Formats (MX) v1.0, and for "rceil" NVIDIA's study of
MXFP8 training (arXiv 2506.08027).
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

SCALE_BIAS = 127
SCALE_NAN = 255
NAN_CODE = 0x7F  # a NaN in e4m3 and in e5m2

E4M3 = jnp.float8_e4m3fn
E5M2 = jnp.float8_e5m2
DTYPES = (E4M3, E5M2)
RULES = ("rceil", "floor", "ceil", "even")

Rounding = Literal["rceil", "floor", "ceil", "even"]


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
