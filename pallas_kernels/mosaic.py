"""What every Pallas kernel here shares: settings, SMEM layouts, scales.

The kernels are Mosaic GPU kernels in *Lane* semantics: the body describes one
warpgroup and no barrier is inserted that the source does not show. Warpgroup
semantics, JAX's default, does not finish its layout inference on the quantize
kernels, and Lane lets a byte view of shared memory be reshaped inside a warp.

A kernel module gives three things to the rest of the library:

* entry points that take arrays and ``interpret=False``, handed on to
  ``plgpu.kernel``; tests pass ``plgpu.InterpretGPUParams``;
* a frozen tile dataclass, whose fields the caller may choose;
* ``variants(target)``: a list of `Variant`, one for each tile choice that the
  library can select on GPUs of a PTX target. `aot` compiles them all.

In-kernel scale arithmetic follows the element and scale rules of `mxfp8`,
written with integer operations only, so that the interpreter on a CPU, Hopper
and Blackwell agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
import jax.numpy as jnp
import numpy as np

from pallas_kernels import mxfp8, ptxas_version

SWIZZLE = 128  # bytes: rows of a swizzled tile, the widest that TMA offers
ATOM = 128  # rows of one atom of blocked scales, and threads of a warpgroup
SPLIT = mxfp8.BLOCK  # rows of one warp
DEFAULT_SMS = 132  # an H200's; used when the device does not tell

ptxas_version.remember()  # before the first kernel is lowered


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
  """One kernel in one tile choice, as `aot` compiles it.

  Attributes:
    kernel: The kernel's name, e.g. ``"quantize"``.
    variant: What distinguishes this choice, e.g. ``"rows e4m3 128x256"``.
    function: Takes ``arguments`` and calls the kernel exactly once.
    arguments: Abstract arguments, ``jax.ShapeDtypeStruct``.
    promises: Names in `aot_listing.INSTRUCTIONS` that the code must contain.
    ctas_per_sm: CTAs that the schedule keeps on one SM at a time; registers and
      shared memory must leave room for them.
  """

  kernel: str
  variant: str
  function: Callable[..., Any]
  arguments: tuple[jax.ShapeDtypeStruct, ...]
  promises: tuple[str, ...] = ()
  ctas_per_sm: int = 1


def compiler_params() -> plgpu.CompilerParams:
  """Lane semantics, no barrier that the source does not show."""
  return plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
  )


def sm_count() -> int:
  """Multiprocessors of the device that this process compiles for."""
  device = jax.config.jax_default_device or jax.devices()[0]
  return getattr(device, "core_count", DEFAULT_SMS)


def device_kind() -> str:
  """JAX's name of the device that this process compiles for."""
  device = jax.config.jax_default_device or jax.devices()[0]
  return getattr(device, "device_kind", "")


def swizzled(shape: tuple[int, ...], dtype: Any, width: int) -> Any:
  """Shared memory whose last two axes are tiled and swizzled for TMA.

  Args:
    shape: Last axis a multiple of 128 bytes, the one before of 8.
    dtype: Element type.
    width: Row length of the array in global memory that TMA copies to or from.
      Tiles must divide it, so rows that are no multiple of 128 bytes get
      narrower tiles.

  Raises:
    NotImplementedError: Rows are no multiple of 32 bytes.
  """
  return plgpu.SMEM(shape, dtype, transforms=swizzle_transforms(dtype, width))


def swizzle_transforms(dtype: Any, width: int) -> tuple[Any, ...]:
  """Tiling and swizzle for rows of ``width`` elements; see `swizzled`."""
  size = jnp.dtype(dtype).itemsize
  for span in (SWIZZLE, 64, 32):
    if width * size % span == 0:
      return (
        plgpu.TilingTransform((8, span // size)),  # pyright: ignore
        plgpu.SwizzleTransform(span),  # pyright: ignore
      )
  raise NotImplementedError(
    "a TMA tile needs rows that are a multiple of 32 bytes; got "
    f'{width} x {size} bytes. Use backend="xla".'
  )


def row_layout(dtype: Any) -> Any:
  """Registers of [128, n]: thread t holds row t.

  In vectors of 16 bytes; fp8 in vectors of 8, as many elements as bf16.
  """
  vector_length = min(16 // jnp.dtype(dtype).itemsize, 8)
  return plgpu.Layout.TCGEN05_TMEM_NATIVE(vector_length)


def column_layout() -> Any:
  """Registers of [32, 128]: each warp holds 32 columns.

  Lane l holds columns 2 (l % 16) and the next, and of every 8 rows the first or
  the last 4: shared memory is read without bank conflicts, bf16 by ldmatrix,
  and a column's maximum takes one shuffle.
  """
  tiling = mgpu.fragmented_array.Tiling(((32, 128), (32, 32), (8, 2), (4, 2)))
  return plgpu.Layout.TILED(
    tiling, warp_dims=(-7,), lane_dims=(-4, -5), vector_dim=-1
  )


def float_bits(x: jax.Array) -> jax.Array:
  """The uint32 bits of a bf16 or float32 array, widened to float32."""
  return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)


def scale_byte(amax: jax.Array, rounding: str, dtype: Any) -> jax.Array:
  """Scale bytes of block maxima, as `mxfp8.scale_byte`, for use in a kernel.

  Adding a constant to the bits carries into the exponent exactly when the
  mantissa is beyond what the rule lets stay.

  Args:
    amax: Largest magnitude of each block, bf16 or float32, NaN if any is NaN.
    rounding: One of `mxfp8.RULES`.
    dtype: Element type.

  Returns:
    uint32 of the same shape, 0 to 247, or 255 for NaN and Inf.

  Raises:
    ValueError: ``rounding`` is unknown.
  """
  if rounding not in mxfp8.RULES:
    raise ValueError(
      f"rounding must be one of {mxfp8.RULES}; got {rounding!r}."
    )
  element = mxfp8.element_format(dtype)
  carry = {
    "rceil": 0x7FFFFF - element.top_mantissa,
    "floor": 0,
    "ceil": 0x7FFFFF,
    "even": 1 << (22 - element.mantissa_bits),
  }[rounding]
  bits = float_bits(amax)
  exponent = (bits + jnp.uint32(carry)) >> jnp.uint32(23)
  bias = jnp.uint32(element.exponent)
  byte = jnp.maximum(exponent, bias) - bias
  infinite = bits >= jnp.uint32(0x7F800000)
  return jnp.where(infinite, jnp.uint32(mxfp8.SCALE_NAN), byte)


def reciprocal(byte: jax.Array) -> jax.Array:
  """2^(127 - byte) as float32; NaN for 255. Bytes 248 to 254 do not occur."""
  bits = (jnp.uint32(2 * mxfp8.SCALE_BIAS) - byte) << jnp.uint32(23)
  nan = byte == jnp.uint32(mxfp8.SCALE_NAN)
  bits = jnp.where(nan, jnp.uint32(0x7FC00000), bits)
  return lax.bitcast_convert_type(bits, jnp.float32)


def power_of_two(byte: jax.Array) -> jax.Array:
  """2^(byte - 127) as float32: subnormal for byte 0, NaN for 255."""
  bits = jnp.where(
    byte == jnp.uint32(0), jnp.uint32(0x00400000), byte << jnp.uint32(23)
  )
  nan = byte == jnp.uint32(mxfp8.SCALE_NAN)
  bits = jnp.where(nan, jnp.uint32(0x7FC00000), bits)
  return lax.bitcast_convert_type(bits, jnp.float32)


def pack(scales: list[jax.Array]) -> jax.Array:
  """Four arrays of scale bytes to words, the first in the lowest byte."""
  word = scales[0]
  for i, byte in enumerate(scales[1:], 1):
    word = word | (byte << jnp.uint32(8 * i))
  return word


def warp_max(x: jax.Array, layout: Any, interpret: Any) -> jax.Array:
  """The largest of each 32 rows of a [128] uint32 array, in all of them.

  ``redux.sync`` over the lanes of a warp; the interpreter has no inline code.
  """
  if interpret:
    largest = jnp.max(x.reshape(-1, SPLIT), axis=1)
    return jnp.repeat(largest, SPLIT)

  @plgpu.inline_mgpu(
    arg_types=(layout,),
    return_type=plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=layout),
  )
  def reduce(_, value):
    everyone = arith.constant(ir.IntegerType.get_signless(32), 0xFFFFFFFF)
    kind = mgpu.utils.ReductionKind.UMAX
    registers = np.empty_like(value.registers)
    for i, register in np.ndenumerate(value.registers):
      registers[i] = mgpu.utils.redux(register, everyone, kind)
    return mgpu.FragmentedArray(
      _registers=registers, _layout=value.layout, _is_signed=False
    )

  return reduce(x)  # pyright: ignore[reportCallIssue]


def _word_offset(row: ir.Value, blocked: bool) -> list[ir.Value]:
  """Where word ``row`` starts in [512] (an atom) or [128, 4] bytes."""

  def constant(n):
    return arith.constant(ir.IndexType.get(), n)

  if not blocked:
    return [row, constant(0)]
  lane = arith.muli(arith.remui(row, constant(SPLIT)), constant(16))
  warp = arith.muli(arith.divui(row, constant(SPLIT)), constant(4))
  return [arith.addi(lane, warp)]


def store_words(
  target: Any, words: jax.Array, layout: Any, interpret: Any, *, blocked: bool
) -> None:
  """Stores [128] uint32 words as bytes, each thread its own.

  Args:
    target: uint8 ref: with ``blocked`` [512], one atom, where word r sits at
      word (r % 32) * 4 + r // 32; otherwise [128, 4], word r in row r. Rows
      start at multiples of 4 bytes.
    words: [128] uint32 of the register layout ``layout``.
    layout: Register layout of ``words``.
    interpret: Whether the kernel is interpreted: inline code is not.
    blocked: Which of the two targets it is.
  """
  if interpret:
    rows = lax.bitcast_convert_type(words, jnp.uint8)
    atom = rows.reshape(4, SPLIT, 4).swapaxes(0, 1).reshape(-1)
    target[...] = atom if blocked else rows
    return

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
  def store(_, ref, value):
    one_word = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    four_bytes = ir.VectorType.get((4,), ir.IntegerType.get_signless(8))

    def store_word(word, position):
      bytes_ = vector.bitcast(four_bytes, vector.broadcast(one_word, word))
      offset = _word_offset(position[0], blocked)
      vector.store(bytes_, ref, offset, alignment=4)

    value.foreach(store_word)

  store(target, words)  # pyright: ignore[reportCallIssue]


def load_words(
  source: Any, layout: Any, interpret: Any, *, blocked: bool
) -> jax.Array:
  """The inverse of `store_words`: [128] uint32 in the layout ``layout``."""
  if interpret:
    rows = source[...]
    if blocked:
      rows = rows.reshape(SPLIT, 4, 4).swapaxes(0, 1).reshape(ATOM, 4)
    return lax.bitcast_convert_type(rows, jnp.uint32)

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(),),
    return_type=plgpu.ShapeDtypeStruct((ATOM,), jnp.uint32, layout=layout),
  )
  def load(_, ref):
    word = ir.IntegerType.get_signless(32)
    four_bytes = ir.VectorType.get((4,), ir.IntegerType.get_signless(8))
    zeros = mgpu.FragmentedArray.splat(
      arith.constant(word, 0), (ATOM,), layout.to_mgpu(), is_signed=False
    )

    def load_word(_, position):
      offset = _word_offset(position[0], blocked)
      bytes_ = vector.load(four_bytes, ref, offset, alignment=4)
      return mgpu.utils.bitcast(bytes_, word)

    return zeros.foreach(load_word, create_array=True, is_signed=False)

  return load(source)  # pyright: ignore[reportCallIssue]
