"""A tile of 32 rows x 128 columns in registers, a 1x32 block to a thread.

Thread 32 b + r of a warpgroup holds row r of block b, so that what a block is
reduced to, and what is made of it, is one number [128] in `unit_layout`, thread
t's being number t. For `swiglu_rows_kernel`.
"""

import functools
from typing import Any

import jax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
import jax.numpy as jnp

from pallas_kernels import mosaic, mxfp8

ROWS = mxfp8.BLOCK
CHUNK = mosaic.ATOM  # columns
SHAPE = (ROWS, CHUNK)
THREADS = mosaic.ATOM
VECTOR = 8  # codes or numbers of one access to shared memory


def tile_layout() -> Any:
  """Registers of [32, 128]: thread 32 b + r holds row r of block b."""
  tiling = mgpu.fragmented_array.Tiling(((32, 128), (32, 32), (32, VECTOR)))
  return plgpu.Layout.TILED(
    tiling, warp_dims=(-5,), lane_dims=(-2,), vector_dim=-1
  )


def unit_layout() -> Any:
  """Registers of [128]: thread t holds number t."""
  return mosaic.row_layout(jnp.bfloat16).reduce(1)


def per_block(x: jax.Array, interpret: Any) -> jax.Array:
  """[32, 128] to [128]: what each thread makes of its block.

  Args:
    x: uint32, of which the largest, or float32, of which the sum is taken.
    interpret: Whether the kernel is interpreted: inline code is not.
  """
  largest = x.dtype == jnp.uint32
  if interpret:
    blocks = x.reshape(ROWS, -1, mxfp8.BLOCK)
    found = jnp.max(blocks, axis=2) if largest else jnp.sum(blocks, axis=2)
    return found.T.reshape(-1)
  kind = vector.CombiningKind.MAXUI if largest else vector.CombiningKind.ADD
  join = arith.maxui if largest else arith.addf

  @plgpu.inline_mgpu(
    arg_types=(tile_layout(),),
    return_type=plgpu.ShapeDtypeStruct(
      (THREADS,), x.dtype, layout=unit_layout()
    ),
  )
  def reduce(_, value):
    element = value.mlir_dtype
    parts = [vector.reduction(element, kind, r) for r in value.registers.flat]
    return _of_thread(functools.reduce(join, parts), not largest)

  return reduce(x)  # pyright: ignore


def _of_thread(scalar: ir.Value, is_float: bool) -> mgpu.FragmentedArray:
  """[128] in `unit_layout` of each thread's number."""
  attribute = ir.FloatAttr.get(scalar.type, 0.0) if is_float else 0
  zero = arith.constant(scalar.type, attribute)
  signed = None if is_float else False
  made = mgpu.FragmentedArray.splat(
    zero, (THREADS,), unit_layout().to_mgpu(), is_signed=signed
  )
  registers = made.registers.copy()
  if isinstance(registers.flat[0].type, ir.VectorType):
    scalar = vector.broadcast(registers.flat[0].type, scalar)
  registers.flat[0] = scalar
  return mgpu.FragmentedArray(
    _registers=registers, _layout=made.layout, _is_signed=signed
  )


def spread(x: jax.Array, interpret: Any) -> jax.Array:
  """[128] float32 to [32, 128]: each thread's number over its block."""
  if interpret:
    return jnp.repeat(x.reshape(-1, ROWS).T, mxfp8.BLOCK, axis=1)

  @plgpu.inline_mgpu(
    arg_types=(unit_layout(),),
    return_type=plgpu.ShapeDtypeStruct(SHAPE, x.dtype, layout=tile_layout()),
  )
  def widen(_, value):
    (scalar,) = value.registers.flat
    if isinstance(scalar.type, ir.VectorType):
      scalar = vector.extract(scalar, [], [0])
    return mgpu.FragmentedArray.splat(scalar, SHAPE, tile_layout().to_mgpu())

  return widen(x)  # pyright: ignore


def numbers(value, layout: Any) -> jax.Array:
  """[128] of one number; constants have no layout of their own."""
  return plgpu.layout_cast(jnp.full((THREADS,), value), layout)
