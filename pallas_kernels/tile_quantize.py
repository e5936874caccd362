"""MXFP8 quantization of one tile in shared memory, along rows or columns.

    x_smem [128, n]  ->  q_smem [128, n] fp8,  scale words [128] uint32

or, where q_smem is bf16, the numbers that the fp8 codes stand for.

The tile is walked in chunks of 128 columns. For each chunk a pass returns 128
words of four scale bytes, which is one 512-byte atom of blocked scales:

  rows     word r: the scales of row r's four blocks of 32 columns
  columns  word c: the scales of column c's four blocks of 32 rows

`store_scales` writes them in either layout. Everything here runs in one
warpgroup; no barrier is used, so the caller orders shared memory around it.

The kernels that quantize (`quantize`, `swiglu`, `permute`) are made of these.
"""

from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
import jax.numpy as jnp

from pallas_kernels import mosaic, mxfp8

CHUNK = mosaic.ATOM  # columns of a chunk, rows of a tile
BLOCK = mxfp8.BLOCK
BLOCKS = CHUNK // BLOCK  # blocks of a chunk along either axis


def word_layout(axis: int, dtype: Any) -> Any:
  """Register layout of the scale words of a pass along ``axis``."""
  if axis == -1:
    return mosaic.row_layout(dtype).reduce(1)
  return mosaic.column_layout().reduce(0)


def scaled(x: jax.Array, byte: jax.Array, axis: int, layout: Any, dtype: Any):
  """fp8 codes of blocks ``x`` under scales ``byte``, one for each line."""
  line = (0,) if axis == -1 else (1,)
  inverse = lax.broadcast_in_dim(mosaic.reciprocal(byte), x.shape, line)
  inverse = plgpu.layout_cast(inverse, layout)  # must follow at once
  return (x.astype(jnp.float32) * inverse).astype(dtype)


def numbers(codes: jax.Array, byte: jax.Array, axis: int, layout: Any):
  """bf16 of fp8 ``codes`` under scales ``byte``, one for each line."""
  line = (0,) if axis == -1 else (1,)
  scale = lax.broadcast_in_dim(mosaic.power_of_two(byte), codes.shape, line)
  scale = plgpu.layout_cast(scale, layout)  # must follow at once
  return (codes.astype(jnp.float32) * scale).astype(jnp.bfloat16)


def quantize_row_chunk(
  x_smem: Any,
  q_smem: Any,
  chunk: int,
  *,
  dtype: Any,
  rounding: str,
  square: bool,
  interpret: Any,
) -> jax.Array:
  """Quantizes columns [128 chunk, 128 chunk + 128) of each row, 1x32.

  A thread owns a row, so that a block's maximum needs no other thread.

  Args:
    x_smem: [128, n] bf16 or float32.
    q_smem: [128, n] fp8 or bf16, written.
    chunk: Which 128 columns.
    dtype: fp8 type of the codes.
    rounding: One of `mxfp8.RULES`.
    square: 32x32 blocks: one scale for the 32 rows of a warp.
    interpret: Whether the kernel is interpreted.

  Returns:
    [128] uint32 scale words.
  """
  layout = mosaic.row_layout(x_smem.dtype)
  width = mosaic.SWIZZLE // jnp.dtype(x_smem.dtype).itemsize
  codes, scales = [], []
  for start in range(0, CHUNK, width):
    window = pl.ds(chunk * CHUNK + start, width)
    tile = plgpu.load(x_smem.at[:, window], layout=layout)
    for block in range(0, width, BLOCK):
      x = tile[:, block : block + BLOCK]
      amax = jnp.max(jnp.abs(x), axis=1).astype(jnp.float32)
      if square:
        bits = mosaic.float_bits(amax)
        bits = mosaic.warp_max(bits, layout.reduce(1), interpret)
        amax = lax.bitcast_convert_type(bits, jnp.float32)
      byte = mosaic.scale_byte(amax, rounding, dtype)
      made = scaled(x, byte, -1, layout, dtype)
      if q_smem.dtype != dtype:
        made = numbers(made, byte, -1, layout)
      codes.append(made)
      scales.append(byte)
  wide = mosaic.row_layout(q_smem.dtype)
  blocks = mosaic.SWIZZLE // q_smem.dtype.itemsize // BLOCK
  for first in range(0, BLOCKS, blocks):
    part = lax.concatenate(codes[first : first + blocks], 1)
    window = pl.ds(chunk * CHUNK + first * BLOCK, blocks * BLOCK)
    q_smem[:, window] = plgpu.layout_cast(part, wide)
  return mosaic.pack(scales)


def quantize_column_chunk(
  x_smem: Any,
  q_smem: Any,
  chunk: int,
  *,
  dtype: Any,
  rounding: str,
  transposed: bool,
  interpret: Any,
) -> jax.Array:
  """Quantizes columns [128 chunk, 128 chunk + 128) in blocks of 32 rows.

  Args:
    x_smem: [128, n] bf16 or float32.
    q_smem: [128, n] fp8 or bf16, written; [n, 128] when transposed (fp8).
    chunk: Which 128 columns.
    dtype: fp8 type of the codes.
    rounding: One of `mxfp8.RULES`.
    transposed: Write the codes of x^T.
    interpret: Whether the kernel is interpreted.

  Returns:
    [128] uint32 scale words.
  """
  layout = mosaic.column_layout()
  columns = pl.ds(chunk * CHUNK, CHUNK)
  scales = []
  for block in range(BLOCKS):
    rows = pl.ds(block * BLOCK, BLOCK)
    x = plgpu.load(x_smem.at[rows, columns], layout=layout)
    amax = jnp.max(jnp.abs(x), axis=0).astype(jnp.float32)
    byte = mosaic.scale_byte(amax, rounding, dtype)
    codes = scaled(x, byte, -2, layout, dtype)
    if q_smem.dtype != dtype:
      codes = numbers(codes, byte, -2, layout)
    if transposed:
      target = q_smem.at[columns]
      _store_transposed(target, codes, block, layout, interpret)
    else:
      q_smem[rows, columns] = codes
    scales.append(byte)
  return mosaic.pack(scales)


def store_linear_columns(target: Any, words: jax.Array) -> None:
  """Stores column words as linear scales, byte b of each to row b.

  Args:
    target: [4, 128] uint8 ref, in global memory.
    words: [128] uint32.
  """
  for block in range(BLOCKS):
    byte = (words >> jnp.uint32(8 * block)) & jnp.uint32(0xFF)
    target[block, :] = byte.astype(jnp.uint8)


def mask_rows(x_smem: Any, valid: jax.Array) -> None:
  """Zeroes the rows from ``valid`` on, in place; for use by all threads.

  The caller puts a barrier after it: a column pass reads what others wrote.
  """
  layout = mosaic.row_layout(x_smem.dtype)
  width = mosaic.SWIZZLE // jnp.dtype(x_smem.dtype).itemsize
  for start in range(0, x_smem.shape[1], width):
    window = (slice(None), pl.ds(start, width))
    x = plgpu.load(x_smem.at[window], layout=layout)
    row = plgpu.layout_cast(
      lax.broadcasted_iota(jnp.int32, (CHUNK, width), 0), layout
    )
    x_smem[window] = jnp.where(row < valid, x, jnp.zeros_like(x))


def _store_transposed(
  target: Any, codes: jax.Array, block: int, layout: Any, interpret: Any
) -> None:
  """Stores a [32, 128] block of rows as 32 columns of a swizzled tile.

  A thread holds groups of 4 rows of 2 columns; ``prmt`` regroups them to a word
  of each column, and words go to shared memory past the 128-byte swizzle (chunk
  of 16 bytes XOR row modulo 8).

  Args:
    target: [128, 128] fp8 ref made by `mosaic.swizzled`.
    codes: [32, 128] fp8 in `mosaic.column_layout`.
    block: Which 32 columns of the target, 0 to 3.
    layout: Register layout of ``codes``.
    interpret: Whether the kernel is interpreted.
  """
  if interpret:
    target[:, block * BLOCK : (block + 1) * BLOCK] = codes.T
    return
  transforms = mosaic.swizzle_transforms(codes.dtype, mosaic.SWIZZLE)

  @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), layout))
  def store(_, ref, value):
    index = ir.IndexType.get()
    half, word = (ir.IntegerType.get_signless(n) for n in (16, 32))
    four = ir.VectorType.get((4,), value.mlir_dtype)

    def constant(n, kind: ir.Type = index):
      return arith.constant(kind, n)

    def pair(low, high):
      low, high = (
        arith.extui(word, mgpu.utils.bitcast(x, half)) for x in (low, high)
      )
      return arith.ori(low, arith.shli(high, constant(16, word)))

    positions = list(value.layout.thread_idxs(value.shape))
    registers = list(value.registers.flat)
    for i in range(0, len(registers), 4):
      first = pair(*registers[i : i + 2])
      last = pair(*registers[i + 2 : i + 4])
      row, column = positions[i]
      row = arith.addi(row, constant(block * BLOCK))
      for k, bytes_ in enumerate((0x6420, 0x7531)):
        line = arith.addi(column, constant(k))
        line_in_tile = arith.remui(line, constant(8))
        chunk = arith.xori(arith.divui(row, constant(16)), line_in_tile)
        offset = arith.addi(
          arith.muli(chunk, constant(16)), arith.remui(row, constant(16))
        )
        four_rows = mgpu.utils.prmt(first, last, constant(bytes_, word))
        vector.store(
          mgpu.utils.bitcast(four_rows, four),
          ref,
          [arith.divui(line, constant(8)), constant(0), line_in_tile, offset],
          alignment=4,
        )

  store(target, codes)  # pyright: ignore[reportCallIssue]
