"""SwiGLU on a part of a tile: 128 rows x 16 columns in registers.

    h       = weight * silu(gate) * (up + offset)
    silu(g) = g * sigmoid(alpha * g)

and its gradients, in float32 and in the order of `reference.swiglu` and
`reference.swiglu_backward`. Thread r holds row r, so that a row's weight, its
share of dweight, and what it wrote to shared memory are its own.

The sigmoid is 1 / (1 + exp(-x)) by two approximate instructions, ex2 and
rsqrt. On an H200 0.999999 of the quantized bytes equal the reference's
(experiments/results/nvidia_h200/bench.json).
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

from pallas_kernels import activation, mosaic

ROWS = mosaic.ATOM
PART = 16  # columns: few enough that four warps share a scheduler's registers
VECTOR = 8  # columns of one access to shared memory
LINES = 8  # rows of a swizzled tile
SHAPE = (ROWS, PART)


def layout() -> Any:
  """Register layout of a part."""
  return mosaic.row_layout(jnp.bfloat16)


def _register_places(value, start, size: int):
  """Where in a swizzled tile the registers of a part are, for this thread.

  A row of a swizzled tile is 128 bytes, in chunks of 16 whose place is their
  number XOR the row modulo 8.

  Args:
    value: [128, 16] in `layout`.
    start: [128] in its rows' layout, the first column of the part.
    size: Bytes of an element.
  """
  index, span = ir.IndexType.get(), mosaic.SWIZZLE // size

  def number(n):
    return arith.constant(index, n)

  (first,) = start.registers.flat
  if isinstance(first.type, ir.VectorType):
    first = vector.extract(first, [], [0])
  first = arith.index_cast(index, first)
  per_chunk = number(16 // size)
  for row, column in value.layout.thread_idxs(value.shape):
    column = arith.addi(first, column)
    line, inside = (
      arith.remui(row, number(LINES)), arith.remui(column, number(span))
    )
    chunk = arith.xori(arith.divui(inside, per_chunk), line)
    offset = arith.addi(
      arith.muli(chunk, per_chunk), arith.remui(inside, per_chunk)
    )
    tile = arith.divui(row, number(LINES)), arith.divui(column, number(span))
    yield [*tile, line, offset]


def _start_of(start: jax.Array) -> jax.Array:
  """A scalar as an argument of inline code."""
  start = lax.broadcast_in_dim(jnp.int32(start), (ROWS,), ())
  return plgpu.layout_cast(start, layout().reduce(1))


def load_part(tile: Any, start: jax.Array, interpret: Any) -> jax.Array:
  """Columns [start, start + 16) of a tile, any of them: start may be dynamic.

  Args:
    tile: [128, 128] bf16 or fp8 ref, swizzled in 128 bytes.
    start: int32, a multiple of 16.
    interpret: Whether the kernel is interpreted: inline code is not.

  Returns:
    [128, 16] of the dtype of ``tile`` in `layout`.
  """
  if interpret:
    return tile[:, pl.ds(start, PART)]
  size = jnp.dtype(tile.dtype).itemsize
  transforms = mosaic.swizzle_transforms(tile.dtype, ROWS)

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(transforms), layout().reduce(1)),
    return_type=plgpu.ShapeDtypeStruct(SHAPE, tile.dtype, layout=layout()),
  )
  def load(_, ref, start):
    element = ir.MemRefType(ref.type).element_type
    zero = arith.constant(element, ir.FloatAttr.get(element, 0.0))
    value = mgpu.FragmentedArray.splat(zero, SHAPE, layout().to_mgpu())
    kind, registers = ir.VectorType.get((VECTOR,), element), value.registers
    registers = registers.copy()
    for i, place in enumerate(_register_places(value, start, size)):
      registers.flat[i] = vector.load(
        kind, ref, place, alignment=VECTOR * size
      )
    return mgpu.FragmentedArray(
      _registers=registers, _layout=value.layout, _is_signed=None
    )

  return load(tile, _start_of(start))  # pyright: ignore


def store_part(
  tile: Any, start: jax.Array, value: jax.Array, interpret: Any
) -> None:
  """The inverse of `load_part`: the same threads hold the same elements."""
  if interpret:
    tile[:, pl.ds(start, PART)] = value
    return
  size = jnp.dtype(tile.dtype).itemsize
  transforms = mosaic.swizzle_transforms(tile.dtype, ROWS)

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(transforms), layout(), layout().reduce(1))
  )
  def store(_, ref, value, start):
    places = _register_places(value, start, size)
    for register, place in zip(value.registers.flat, places, strict=True):
      vector.store(register, ref, place, alignment=VECTOR * size)

  store(tile, value, _start_of(start))  # pyright: ignore


def per_row(x: jax.Array) -> jax.Array:
  """[128] to [128, 16]: a number of each row."""
  return plgpu.layout_cast(lax.broadcast_in_dim(x, SHAPE, (0,)), layout())


def per_column(x: jax.Array) -> jax.Array:
  """[16] to [128, 16]: a number of each column."""
  return plgpu.layout_cast(lax.broadcast_in_dim(x, SHAPE, (1,)), layout())


def row_index() -> jax.Array:
  """[128] int32, the row that each thread holds."""
  index = lax.broadcasted_iota(jnp.int32, (ROWS,), 0)
  return plgpu.layout_cast(index, layout().reduce(1))


def sigmoid(x: jax.Array) -> jax.Array:
  """1 / (1 + exp(-x))."""
  root = lax.rsqrt(1.0 + jnp.exp(-x))
  return root * root


def clamp(
  gate: jax.Array, up: jax.Array, form: activation.Swiglu
) -> tuple[jax.Array, jax.Array]:
  """gate cut from above and up on both sides, as ``form`` says."""
  if form.limit is None:
    return gate, up
  up = jnp.maximum(jnp.minimum(up, form.limit), -form.limit)
  return jnp.minimum(gate, form.limit), up


def inside(x: jax.Array, limit: float) -> jax.Array:
  """1 where x does not exceed the limit, else 0; a NaN stays one in x * 0."""
  return jnp.where(x > limit, jnp.zeros_like(x), jnp.ones_like(x))


def scaled(x: jax.Array, alpha: float) -> jax.Array:
  """alpha * x, without a product by one."""
  return x if alpha == 1.0 else x * alpha


def activate(
  gate: jax.Array, up: jax.Array, weight: jax.Array, form: activation.Swiglu
) -> jax.Array:
  """weight * silu(gate) * up.

  Args:
    gate: [128, 16] float32, bias included.
    up: Likewise.
    weight: [128] float32, or one of the shape of gate.
    form: The activation.

  Returns:
    [128, 16] bf16.
  """
  gate, up = clamp(gate, up, form)
  up = up + form.up_offset if form.up_offset else up
  hidden = gate * sigmoid(scaled(gate, form.alpha)) * up
  weight = per_row(weight) if weight.ndim == 1 else weight
  return (hidden * weight).astype(jnp.bfloat16)


def differentiate(
  gate: jax.Array,
  up: jax.Array,
  dh: jax.Array,
  weight: jax.Array,
  form: activation.Swiglu,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of `activate`.

  Args:
    gate: As in `activate`.
    up: As in `activate`.
    dh: [128, 16] float32, the gradient of silu(gate) * up, without weight.
    weight: As in `activate`.
    form: As in `activate`.

  Returns:
    dgate: [128, 16] bf16.
    dup: [128, 16] bf16.
    share: [128, 16] float32, whose sum over columns is dweight.
  """
  raw_gate, raw_up = gate, up
  gate, up = clamp(gate, up, form)
  up = up + form.up_offset if form.up_offset else up
  slope = sigmoid(scaled(gate, form.alpha))
  silu = gate * slope
  share = dh * silu * up
  dact = dh * (per_row(weight) if weight.ndim == 1 else weight)
  dgate = dact * up * (slope + scaled(silu, form.alpha) * (1.0 - slope))
  dup = dact * silu
  if form.limit is not None:
    dgate = dgate * inside(raw_gate, form.limit)
    dup = dup * inside(jnp.abs(raw_up), form.limit)
  return dgate.astype(jnp.bfloat16), dup.astype(jnp.bfloat16), share
