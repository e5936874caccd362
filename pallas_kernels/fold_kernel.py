"""The body of the fold kernel: rows by copies, re-based in shared memory.

    data'[i] = round(data[i] * 2^(scale[i // 32] - S)),  S = largest of the row

A row is `blocks` units of 32 codes, one scale each. A CTA keeps a ring of
batches of rows; a batch is walked in chunks of 128 units, thread t holding one:

    per batch   a bulk copy per row and piece -> slot, or one of all rows
                its units' shifts -> registers, one batch ahead
                wait full[slot] | re-base in place | fence | store | refill

Index -1 takes a row of zeros. A tail (the scales and weight of a packed row)
goes through shared memory unchanged, beside the data.

`fold` holds the entry points; `permute_kernel` moves rows that stay as they
are.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, vector
import jax.numpy as jnp

from pallas_kernels import mosaic, mxfp8, stream

UNIT = mxfp8.BLOCK  # codes, and bytes, of a thread
CHUNK = mosaic.ATOM  # units that a warpgroup re-bases at once
MAX_SHIFT = 40  # all codes are 0 from 35 (e5m2) on; `reference.fold`
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # asks for a plain bulk copy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of the kernel does; static.

  Attributes:
    rows: Rows of the result, a multiple of ``batch``.
    blocks: Units of a row, a multiple of 4 (bulk copies of 128 bytes).
    tail: Units behind indexed rows, copied from a second source, in order.
    indexed: Rows are taken by index, else in order.
    dtype: fp8 type.
    batch: Rows of a ring slot.
    stages: Ring slots.
  """

  rows: int
  blocks: int
  tail: int
  indexed: bool
  dtype: Any
  batch: int
  stages: int

  @property
  def chunks(self) -> int:
    """Chunks of a batch; the last one may be partly empty."""
    return -(-self.batch * self.blocks // CHUNK)

  def output(self) -> jax.ShapeDtypeStruct:
    """The rows as units."""
    units = self.rows * (self.blocks + self.tail)
    return jax.ShapeDtypeStruct((units, UNIT), self.dtype)

  def scratch(self) -> dict[str, Any]:
    """The ring, its barriers, and the tails if there are any."""
    copies = self.batch * (2 if self.tail else 1) if self.indexed else 1
    ring = (self.stages, self.chunks * CHUNK, UNIT)
    scratch: dict[str, Any] = dict(
      ring=plgpu.SMEM(ring, self.dtype),
      full=plgpu.Barrier(num_arrivals=copies, num_barriers=self.stages),
    )
    if self.tail:
      tails = (self.stages, self.batch * self.tail, UNIT)
      scratch["tails"] = plgpu.SMEM(tails, self.dtype)
    return scratch


def wide_layout() -> Any:
  """Registers of [128, 32] codes: thread t holds unit t, 16 bytes at once."""
  return plgpu.Layout.TCGEN05_TMEM_NATIVE(16)


def unit_layout() -> Any:
  """Registers of [128]: thread t holds number t."""
  return wide_layout().reduce(1)


def load_elements(
  source: Any, index: tuple[jax.Array, ...], interpret: Any
) -> jax.Array:
  """One element of an array in global memory for each thread.

  Args:
    source: int32 or uint8 ref.
    index: [128] int32 in `unit_layout` for each axis of ``source``.
    interpret: Whether the kernel is interpreted: inline code is not.

  Returns:
    [128] of the dtype of ``source``, widened to at least 32 bits.
  """
  wide = jnp.int32 if source.dtype == jnp.int32 else jnp.uint32
  if interpret:
    return source[...][index].astype(wide)
  layout = unit_layout()

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), *[layout] * len(index)),
    return_type=plgpu.ShapeDtypeStruct((CHUNK,), wide, layout=layout),
  )
  def load(_, ref, *positions):
    registers = positions[0].registers.copy()
    word = ir.IntegerType.get_signless(32)
    for i, first in enumerate(positions[0].registers.flat):
      where = [
        arith.index_cast(ir.IndexType.get(), _scalar(p.registers.flat[i]))
        for p in positions
      ]
      value = memref.load(ref, where)
      value = value if value.type == word else arith.extui(word, value)
      if isinstance(first.type, ir.VectorType):
        value = vector.broadcast(ir.VectorType.get((1,), word), value)
      registers.flat[i] = value
    return mgpu.FragmentedArray(
      _registers=registers,
      _layout=positions[0].layout,
      _is_signed=wide == jnp.int32,
    )

  return load(source, *index)  # pyright: ignore


def _scalar(register: ir.Value) -> ir.Value:
  """The only element of a register."""
  if isinstance(register.type, ir.VectorType):
    return vector.extract(register, [], [0])
  return register


def shifted(top: jax.Array, scale: jax.Array) -> jax.Array:
  """127 + (top - scale), 255 where top is: `mosaic.reciprocal` of it re-bases.

  Args:
    top: uint32, the largest scale of a row.
    scale: uint32, that of a block of it.
  """
  shift = jnp.minimum(top - scale, jnp.uint32(MAX_SHIFT))
  nan = jnp.uint32(mxfp8.SCALE_NAN)
  return jnp.where(top == nan, nan, shift + jnp.uint32(mxfp8.SCALE_BIAS))


def unit_bytes(refs, problem: Problem, position, interpret) -> list[jax.Array]:
  """127 + (S - scale) of each unit of a batch, a [128] array for each chunk.

  Args:
    refs: scale [n, blocks] uint8, top [n] uint8 (S of each row) and, where rows
      are indexed, index [rows] int32.
    problem: What is done.
    position: Of the batch.
    interpret: Whether the kernel is interpreted.
  """
  found = []
  for chunk in range(problem.chunks):
    thread = lax.broadcasted_iota(jnp.int32, (CHUNK,), 0)
    unit = plgpu.layout_cast(thread, unit_layout()) + chunk * CHUNK
    row = lax.div(unit, jnp.int32(problem.blocks))
    block = unit - row * problem.blocks
    row = jnp.minimum(row, problem.batch - 1)  # past the last: never stored
    row = source = row + position[0] * problem.batch
    if problem.indexed:
      row = load_elements(refs["index"], (row,), interpret)
      source = jnp.maximum(row, 0)
    scale = load_elements(refs["scale"], (source, block), interpret)
    top = load_elements(refs["top"], (source,), interpret)
    byte = shifted(top, scale)
    bias = jnp.uint32(mxfp8.SCALE_BIAS)
    found.append(jnp.where(row >= 0, byte, bias))
  return found


def rebase(ring: Any, chunk: int, byte: jax.Array) -> None:
  """Re-bases a chunk in place, each thread its unit.

  Args:
    ring: [units, 32] fp8 ref, a ring slot.
    chunk: Which 128 units.
    byte: [128] uint32, `unit_bytes` of them.
  """
  window, layout = pl.ds(chunk * CHUNK, CHUNK), wide_layout()
  codes = plgpu.load(ring.at[window], layout=layout, optimized=False)
  factor = lax.broadcast_in_dim(mosaic.reciprocal(byte), codes.shape, (0,))
  factor = plgpu.layout_cast(factor, layout)  # must follow at once
  codes = (codes.astype(jnp.float32) * factor).astype(ring.dtype)
  ring[window] = codes


def load_batch(refs, problem: Problem, position, slot) -> None:
  """Starts the copies of a batch's rows and tails."""
  first, full = position[0] * problem.batch, refs["full"].at[slot]
  copy = functools.partial(
    plgpu.copy_gmem_to_smem, barrier=full, oob_mode=IN_BOUNDS
  )
  blocks, tail = problem.blocks, problem.tail
  if not problem.indexed:
    units = problem.batch * blocks
    taken = refs["data"].at[pl.ds(first * blocks, units)]
    copy(taken, refs["ring"].at[slot, pl.ds(0, units)])
    return
  rows = [first + i for i in range(problem.batch)]
  indices = [refs["index"][row] for row in rows]
  for i, (row, index) in enumerate(zip(rows, indices, strict=True)):
    target = refs["ring"].at[slot, pl.ds(i * blocks, blocks)]
    taken = refs["data"].at[pl.ds(index * blocks, blocks)]
    nothing = functools.partial(copy, refs["zeros"], target)
    pl.when(index >= 0)(functools.partial(copy, taken, target))
    pl.when(index < 0)(nothing)
    if tail:
      source = refs["tail"].at[pl.ds(row * tail, tail)]
      copy(source, refs["tails"].at[slot, pl.ds(i * tail, tail)])


def store_batch(refs, problem: Problem, position, slot) -> None:
  """Starts the stores of a batch: at once, or row by row beside the tails."""
  blocks, tail = problem.blocks, problem.tail
  first, ring = position[0] * problem.batch, refs["ring"].at[slot]
  if not tail:
    units = problem.batch * blocks
    target = refs["out"].at[pl.ds(first * blocks, units)]
    plgpu.copy_smem_to_gmem(ring.at[pl.ds(0, units)], target)
    return
  for i in range(problem.batch):
    start = (first + i) * (blocks + tail)
    plgpu.copy_smem_to_gmem(
      ring.at[pl.ds(i * blocks, blocks)],
      refs["out"].at[pl.ds(start, blocks)],
      commit_group=False,
    )
    plgpu.copy_smem_to_gmem(
      refs["tails"].at[slot, pl.ds(i * tail, tail)],
      refs["out"].at[pl.ds(start + blocks, tail)],
      commit_group=i == problem.batch - 1,
    )


def kernel(*gmem, problem: Problem, inputs, ctas: int, interpret: Any, **smem):
  """The body: inputs by the names in ``inputs``, then the result."""
  refs = dict(zip([*inputs, "out"], gmem, strict=True)) | smem

  def process(position, slot, refill, bytes_):
    plgpu.barrier_wait(refs["full"].at[slot])
    for chunk, byte in enumerate(bytes_):
      rebase(refs["ring"].at[slot], chunk, byte)
    plgpu.commit_smem()
    store_batch(refs, problem, position, slot)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    refill()

  stream.walk(
    (problem.rows // problem.batch,),
    ctas=ctas,
    stages=problem.stages,
    load=functools.partial(load_batch, refs, problem),
    process=process,
    prefetch=lambda at: unit_bytes(refs, problem, at, interpret),
  )
  plgpu.wait_smem_to_gmem(0)
