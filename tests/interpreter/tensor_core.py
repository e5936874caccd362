"""tcgen05 beyond JAX's interpreter: block scales, scale copies, CTA pairs.

`Mma` and `Copy` stand in for the interpreter's tasks of the same names. A scale
copy arrives as a plain SMEM to TMEM copy (`rewriting_interpret` renames the
primitive, operands and parameters are the same) and is told apart by its 4-D
source, [rows / 128, k / 128, 32, 16], or the same bytes as [.., 4, 128] that a
kernel reshapes (`reshaped_atoms`).

Ordering is the strict rule of the PTX ISA: cp -> mma, and mma -> mma on one
accumulator, are pipelines. That an mma also precedes a later cp of its thread
is relied on elsewhere but not promised, so a kernel here must not need it.
"""

import dataclasses
import functools

from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.state import types as state_types
import numpy as np

from tests.interpreter import common

UpstreamMma = gpu_callbacks.TcGen05Mma
UpstreamCopy = gpu_callbacks.TcGen05Copy


def scale_values(scale: np.ndarray) -> np.ndarray:
  """float64 values of scales; byte s of e8m0 is 2^(s - 127), 255 is NaN."""
  if scale.dtype.name != "float8_e8m0fnu":
    return scale.astype(np.float64)
  byte = np.ascontiguousarray(scale).view(np.uint8).astype(np.int32)
  return np.where(byte == 255, np.nan, np.ldexp(1.0, byte - 127))


def unblock(scale: np.ndarray) -> np.ndarray:
  """[rows / 128, k / 4, 32, 16] blocked scales to [rows, k] (k in blocks)."""
  rows, k, lanes, chunk = scale.shape
  if (lanes, chunk) not in ((32, 16), (4, 128)):
    raise ValueError(f"a scale atom is (32, 16); got {scale.shape}")
  atoms = scale.reshape(rows, k, 32, 4, 4).transpose(0, 3, 2, 1, 4)
  return atoms.reshape(rows * 128, k * 4)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mma(UpstreamMma):
  """tcgen05.mma with block scales, by one CTA or a pair.

  In a pair each CTA holds its rows of A, its half of B's columns and its rows
  of the accumulator; A's scales are its own, B's are replicated.
  """

  def forms_pipeline(self, parent):
    if parent.collective_axis != self.collective_axis:
      return False
    return isinstance(parent, Copy) or (
      isinstance(parent, Mma)
      and parent.acc_key == self.acc_key
      and parent.acc_access == self.acc_access
    )

  def __call__(self, pipeline_clock, tma_thread_id):
    if self.a_scale_key is None and self.collective_axis is None:
      return super().__call__(pipeline_clock, tma_thread_id)
    if self.a_sparse_metadata_key is not None:
      raise NotImplementedError("sparse tcgen05.mma is not interpreted")
    shared = gpu_callbacks._get_shared_memory()
    clock = common.start_clock(
      shared, self.thread, pipeline_clock, tma_thread_id
    )
    blocks = common.pair(self.thread, self.collective_axis)
    b = np.concatenate(
      [
        self._operand(shared, clock, self.b_key, x, self.b_access)
        for x in blocks
      ],
      axis=1,
    )
    for block in blocks:
      self._multiply(shared, clock, block, b)
    if self.barrier_key:
      common.arrive_tensor_core(
        shared,
        self.barrier_key,
        blocks,
        self.thread,
        clock,
        common.logging_info(self),
      )
    return clock.copy() if clock is not None else None

  def _operand(self, shared, clock, key, block, access) -> np.ndarray:
    """A block's operand in float64, its read told to the race detector."""
    key = common.in_block(key, block)
    info = common.logging_info(self)
    value = common.read(shared, key, access, info, self.thread)
    common.check_read(self, clock, key, access)
    return value if value.dtype.itemsize == 1 else value.astype(np.float64)

  def _scale(self, shared, clock, key, block, transforms) -> np.ndarray:
    block_key = common.in_block(key, block)
    common.await_allocation(shared, block_key)
    access = shared.access(block_key, transforms)
    return scale_values(self._operand(shared, clock, key, block, access))

  def _multiply(self, shared, clock, block, b) -> None:
    """One block's rows: accumulator (+)= (a * scale) @ (b * scale)."""
    a = self._operand(shared, clock, self.a_key, block, self.a_access)
    a, b = a.astype(np.float64), b.astype(np.float64)
    if self.a_scale_key is not None:
      sa = self._scale(
        shared, clock, self.a_scale_key, block, self.a_scale_transforms
      )
      sb = self._scale(
        shared, clock, self.b_scale_key, block, self.b_scale_transforms
      )
      if sa.shape[0] != a.shape[0] or sb.shape[0] != b.shape[1]:
        raise ValueError(
          f"scales {sa.shape} and {sb.shape} do not fit {a.shape} @ {b.shape}"
        )
      a = a * np.repeat(sa, a.shape[1] // sa.shape[1], axis=1)
      b = b * np.repeat(sb, b.shape[0] // sb.shape[1], axis=1).T
    key, info = common.in_block(self.acc_key, block), common.logging_info(self)
    common.await_allocation(shared, key)
    with np.errstate(over="ignore", invalid="ignore"):
      result = a @ b
      if self.accumulate:
        result = result + common.read(
          shared, key, self.acc_access, info
        ).astype(np.float64)
      result = result.astype(shared.buffer_shape_and_dtype(self.acc_key).dtype)
    shared.store_buffer_content(
      key,
      self.acc_access,
      result,
      self.thread,
      increment_clock=False,
      logging_info=info,
    )
    common.check_write(self, clock, key, self.acc_access)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(UpstreamCopy):
  """tcgen05.cp, also of scales and by a pair of CTAs."""

  def __call__(self, pipeline_clock, tma_thread_id):
    scales = (len(self.smem_access.shape), len(self.tmem_access.shape)) == (
      4,
      2,
    )
    if not scales and self.collective_axis is None:
      return super().__call__(pipeline_clock, tma_thread_id)
    shared, info = gpu_callbacks._get_shared_memory(), common.logging_info(self)
    clock = common.start_clock(
      shared, self.thread, pipeline_clock, tma_thread_id
    )
    for block in common.pair(self.thread, self.collective_axis):
      source = common.in_block(self.smem_key, block)
      target = common.in_block(self.tmem_key, block)
      value = common.read(shared, source, self.smem_access, info, self.thread)
      value = unblock(value) if scales else value
      if value.shape != self.tmem_access.shape:
        raise ValueError(
          f"tcgen05.cp of {value.shape} into TMEM {self.tmem_access.shape}"
        )
      common.await_allocation(shared, target)
      shared.store_buffer_content(
        target,
        self.tmem_access,
        value,
        self.thread,
        increment_clock=False,
        logging_info=info,
      )
      common.check_read(self, clock, source, self.smem_access)
      common.check_write(self, clock, target, self.tmem_access)
    return clock.copy() if clock is not None else None


def reshaped_atoms(original):
  """Reads the atoms of scales where they lie: their reshape moves no byte."""

  @functools.wraps(original)
  def copy(*, smem_transforms, **rest):
    *before, last = smem_transforms or (None,)
    if isinstance(last, state_types.ReshapeTransform):
      if last.shape[-2:] != (32, 16):
        raise NotImplementedError(f"a reshape to {last.shape}, not to atoms")
      smem_transforms = tuple(before)
    return original(smem_transforms=smem_transforms, **rest)

  return copy


def only_leader(original):
  """A collective tensor core operation is issued by the leader block alone."""

  @functools.wraps(original)
  def operation(*, token, thread, collective_axis=None, **rest):
    if collective_axis is not None and thread.block_id & 1:
      return token
    return original(
      token=token, thread=thread, collective_axis=collective_axis, **rest
    )

  return operation


@gpu_callbacks.fail_on_exception
def commit_arrive(
  *,
  token,
  mesh_location,
  thread,
  barrier_key_as_array,
  collective_axis=None,
  source_info=None,
):
  """tcgen05.commit: arrives, in each CTA of a pair, when all is done."""
  shared = gpu_callbacks._get_shared_memory()
  key = gpu_callbacks.HostAllocationKey.from_array(barrier_key_as_array)
  if shared.detect_races:
    shared.incr_clock(thread)
  clock = shared.get_clock(thread)
  done = shared.get_tcgen05_async_clock(thread) if clock is not None else None
  if done is not None:
    clock.update(done)
  common.arrive_tensor_core(
    shared,
    key,
    common.pair(thread, collective_axis),
    thread,
    clock,
    common.memory.GPULoggingInfo(mesh_location, thread, source_info),
  )
  return token


def rewriting_interpret(original):
  """Interprets scale copies as plain SMEM to TMEM copies."""
  scales = primitives.async_copy_scales_to_tmem_p
  plain = primitives.async_copy_smem_to_tmem_p

  def interpret(self, jaxpr, token, *args):
    if any(e.primitive is scales for e in jaxpr.eqns):
      jaxpr = jaxpr.replace(
        eqns=[
          e.replace(primitive=plain) if e.primitive is scales else e
          for e in jaxpr.eqns
        ]
      )
    return original(self, jaxpr, token, *args)

  return interpret
