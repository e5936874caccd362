"""Fold: MXFP8 rows to one scale a row, on the way from one place to another.

    data'[r, c] = round(data[r, c] * 2^(scale[r, c // 32] - S[r]))

    fold        rows where they lie: hidden rows, weights
    take        out[r] = fold(x[source[r]])          (`permute.permute`)
    take_wire   packed rows data | scales | weight   (`permute.pack`)

S[r] is the largest scale of row r. Equal to `reference.fold` to the bit; codes
that are NaN under a finite scale, which quantize never writes, lose their sign.

Schedule (`fold_kernel`, `stream`). Bulk copies bring rows into a ring in shared
memory, threads re-base them there, 32 codes under one scale each, and bulk
copies store them. XLA finds S, in 1/32 of the bytes, and the scales of the
result are S, spread over the row by XLA where somebody reads them. Bound by
memory bandwidth: 2.03 bytes an element. One source for Hopper and Blackwell.

Widths are multiples of 128 (bulk copies of 128 bytes).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import fold_kernel, groups, mosaic, mxfp8, stream

MxArray = mxfp8.MxArray
Problem = fold_kernel.Problem

BULK = 128  # bytes: Mosaic's bulk copies are multiples of it
SLOT_BYTES = 32768  # bytes of a ring slot, about
RING_BYTES = 220_000  # of an SM, for all its CTAs; Hopper and Blackwell
STAGES = 3
MAX_COPIES = 32  # of a batch, one a row: they are written out in the code
CTAS_PER_SM = 2


def check(shape: tuple[int, ...], axis: int, block: mxfp8.Block) -> None:
  """Refuses what the kernel does not take.

  Args:
    shape: Of the array to fold.
    axis: That its blocks run along, negative.
    block: Their form.

  Raises:
    NotImplementedError: Blocks along another axis, or an odd width.
  """
  if (axis, block) != (-1, "1x32"):
    raise NotImplementedError(
      f"fold kernel: it folds 1x32 blocks along the row; got {axis=}, {block=}"
      '. Use backend="xla".'
    )
  if shape[-1] % BULK or 0 in shape:
    raise NotImplementedError(
      f"fold kernel: rows must be a positive multiple of {BULK} wide (bulk "
      f'copies); got {list(shape)}. Use backend="xla".'
    )


def _row_batch(problem: Problem, slot_bytes: int) -> Problem:
  """``problem`` with as many rows in a ring slot as fit and divide the rows.

  Raises:
    NotImplementedError: A row is longer than a ring slot may be.
  """
  length = (problem.blocks + problem.tail) * fold_kernel.UNIT
  if length * problem.stages > RING_BYTES:
    raise NotImplementedError(
      f"fold kernel: {problem.stages} rows of {length} bytes exceed shared "
      'memory. Use backend="xla".'
    )
  most = 2 ** max(0, int(math.log2(slot_bytes / length)))
  most = min(most, MAX_COPIES) if problem.indexed else most
  return dataclasses.replace(problem, batch=math.gcd(problem.rows, most))


def _top(scale: jax.Array) -> jax.Array:
  """[n, blocks] scales to the largest of each row, [n]."""
  return jnp.max(scale, axis=1)


def _call(
  x: MxArray,
  top: jax.Array,
  source: jax.Array | None,
  tail: jax.Array | None,
  *,
  slot_bytes: int = SLOT_BYTES,
  stages: int = STAGES,
  interpret: Any,
) -> jax.Array:
  """Calls the kernel.

  Args:
    x: [n, K], linear scales.
    top: [n] uint8.
    source: [rows] int32, or None for all rows in order.
    tail: [rows, bytes] uint8 behind each row, or None.
    slot_bytes: Of a ring slot, at most, but one row at least.
    stages: Ring slots.
    interpret: Interpret parameters; False compiles.

  Returns:
    [rows, K + bytes] fp8.
  """
  rows = x.shape[0] if source is None else source.shape[0]
  unit, dtype = fold_kernel.UNIT, x.data.dtype
  problem = Problem(
    rows=rows,
    blocks=x.shape[1] // unit,
    tail=0 if tail is None else tail.shape[1] // unit,
    indexed=source is not None,
    dtype=dtype,
    batch=1,
    stages=stages,
  )
  problem = _row_batch(problem, slot_bytes)
  inputs = {"data": x.data.reshape(-1, unit), "scale": x.scale, "top": top}
  if source is not None:
    inputs["index"] = source
    inputs["zeros"] = jnp.zeros((problem.blocks, unit), dtype)
  if tail is not None:
    tail = lax.bitcast_convert_type(tail, dtype)
    inputs["tail"] = tail.reshape(-1, unit)
  slot = problem.chunks * fold_kernel.CHUNK + problem.batch * problem.tail
  per_sm = RING_BYTES // (slot * unit * problem.stages)
  per_sm = max(1, min(CTAS_PER_SM, per_sm))
  ctas = stream.cta_count(rows // problem.batch, per_sm, interpret)
  call = plgpu.kernel(
    functools.partial(
      fold_kernel.kernel,
      problem=problem,
      inputs=tuple(inputs),
      ctas=ctas,
      interpret=interpret,
    ),
    out_type=problem.output(),
    scratch_types=problem.scratch(),
    **stream.launch(ctas),
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )
  return call(*inputs.values()).reshape(rows, -1)


def _kept(top: jax.Array) -> jax.Array:
  """A number of each row, which XLA then does not look up for each block."""
  return lax.optimization_barrier(top)


def _folded(data: jax.Array, top: jax.Array) -> MxArray:
  """Folded rows of codes [.., K] and their scales [..]."""
  shape = (*data.shape[:-1], data.shape[-1] // mxfp8.BLOCK)
  return MxArray(data, jnp.broadcast_to(top[..., None], shape), folded=True)


def fold(
  x: MxArray, layout: mxfp8.Layout | None = None, *, interpret: Any = False
) -> MxArray:
  """Folds rows where they lie; equal to `reference.fold`.

  Args:
    x: [.., K], 1x32 blocks along the row, linear or blocked scales; K a
      multiple of 128.
    layout: Scale layout of the result; None for that of x.
    interpret: Interpret parameters; False compiles.

  Returns:
    MxArray of the shape of x.

  Raises:
    NotImplementedError: The kernel does not take this shape or direction.
  """
  check(x.shape, x.axis, x.block)
  linear = x.with_layout("linear")
  width = x.shape[-1]
  scale = linear.scale.reshape(-1, width // mxfp8.BLOCK)
  rows = MxArray(linear.data.reshape(-1, width), scale)
  top = _top(scale)
  data = _call(rows, top, None, None, interpret=interpret)
  out = _folded(data.reshape(x.shape), top.reshape(x.shape[:-1]))
  return out.with_layout(layout or x.layout)


def take(
  x: MxArray, source: jax.Array, *, slot_bytes: int = SLOT_BYTES,
  stages: int = STAGES, interpret: Any = False,
) -> MxArray:
  """Folded rows by index; equal to `reference.take_rows` with ``folded``.

  Args:
    x: [n, K], 1x32 blocks along the row, linear scales; K a multiple of 128.
    source: [rows] int32 in -1..n-1; -1 gives zeros with scale byte 0. Best a
      multiple of 32 rows: they are stored in batches that divide it.
    slot_bytes: Bytes of a ring slot, at most; at least one row.
    stages: Ring slots.
    interpret: Interpret parameters; False compiles.

  Returns:
    [rows, K] MxArray, linear scales.

  Raises:
    NotImplementedError: The kernel does not take this shape or direction.
  """
  check(x.shape, x.axis, x.block)
  top, ring = _top(x.scale), dict(slot_bytes=slot_bytes, stages=stages)
  data = _call(x, top, source, None, **ring, interpret=interpret)
  return _folded(data, _kept(groups.take_rows(top, source)))


def take_wire(
  x: MxArray, row: jax.Array, weight: jax.Array, stride: int, *,
  slot_bytes: int = SLOT_BYTES, stages: int = STAGES, interpret: Any = False,
) -> jax.Array:
  """Packed folded rows; equal to `reference.pack` with ``folded``.

  Args:
    x: As in `take`.
    row: [S] int32 in 0..n-1.
    weight: [S] float32.
    stride: Bytes of a packed row, a multiple of 128.
    slot_bytes: As in `take`.
    stages: As in `take`.
    interpret: As in `take`.

  Returns:
    [S, stride] uint8: data | scales | weight | zeros.

  Raises:
    NotImplementedError: The kernel does not take this shape or direction.
  """
  check(x.shape, x.axis, x.block)
  top, ring = _top(x.scale), dict(slot_bytes=slot_bytes, stages=stages)
  slots, blocks = row.shape[0], x.scale.shape[1]
  weights = lax.bitcast_convert_type(weight.astype(jnp.float32), jnp.uint8)
  spare = stride - x.shape[1] - blocks - weights.shape[1]
  tail = [
    jnp.broadcast_to(_kept(top[row])[:, None], (slots, blocks)),
    weights,
    jnp.zeros((slots, spare), jnp.uint8),
  ]
  joined = jnp.concatenate(tail, axis=1)
  packed = _call(x, top, row, joined, **ring, interpret=interpret)
  return lax.bitcast_convert_type(packed, jnp.uint8)


def variants(target: str) -> list[mosaic.Variant]:
  """Rows in order, by index and packed, both fp8 types."""
  del target
  tokens, rows, width, stride = 512, 1024, 7168, 7424
  shape = jax.ShapeDtypeStruct
  index, weight = shape((rows,), jnp.int32), shape((rows,), jnp.float32)

  def variant(name, function, width, *more, dtype=mxfp8.E4M3):
    data = shape((tokens, width), dtype)
    scale = shape((tokens, width // mxfp8.BLOCK), jnp.uint8)
    return mosaic.Variant(
      kernel="fold",
      variant=name,
      function=lambda d, s, *more: function(MxArray(d, s), *more),
      arguments=(data, scale, *more),
      promises=("bulk_copy", "cast_from_fp8", "cast_to_fp8"),
      ctas_per_sm=CTAS_PER_SM,
    )

  pack = functools.partial(take_wire, stride=stride)
  return [
    variant("rows 2048", fold, 2048),
    variant("rows 1408 e5m2", fold, 1408, dtype=mxfp8.E5M2),
    variant("by index", take, width, index),
    variant("by index e5m2", take, width, index, dtype=mxfp8.E5M2),
    variant("packed", pack, width, index, weight),
  ]
