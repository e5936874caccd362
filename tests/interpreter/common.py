"""What the parts of the interpreter extension share: blocks, clocks, barriers.

Words: a *block* is a CTA of a cluster, as in JAX's interpreter; a *key* names
an allocation; the *clock* of an operation is its vector clock, absent when no
races are looked for.
"""

import dataclasses
import time

from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory

SMEM = memory.IDX_BY_GPU_MEMORY_SPACE[gpu_core.MemorySpace.SMEM]
POLL_SECONDS = 1e-4


def in_block(key, block_id):
  """The same allocation in another block of the cluster."""
  return dataclasses.replace(key, block_id=block_id)


def pair(thread, collective_axis) -> tuple[int, ...]:
  """Blocks that take part in a tensor core operation, the leader first.

  The axis of a two-CTA operation is the minormost of the cluster and has size
  2, so a pair is two consecutive block numbers.
  """
  if collective_axis is None:
    return (thread.block_id,)
  leader = thread.block_id & ~1
  return (leader, leader + 1)


def await_allocation(shared, key) -> None:
  """Waits until the peer block has allocated ``key``.

  A kernel starts with a cluster barrier on the GPU; the interpreter has none.
  """
  while True:
    with shared.lock:
      if key in shared.mem:
        return
    shared.check_failed()
    time.sleep(POLL_SECONDS)


def read(shared, key, access, info, thread=None):
  """The contents of ``access``, which must be in bounds."""
  await_allocation(shared, key)
  value, _, _ = shared.get_buffer_content(
    key, access, thread, logging_info=info
  )
  if value is None:
    raise IndexError(f"out-of-bounds read of {key}: {access}")
  return value


def start_clock(shared, thread, pipeline_clock, tma_thread_id):
  """The clock of an asynchronous operation that ``thread`` starts now."""
  if not shared.detect_races:
    return None
  clock = shared.get_clock(thread)
  if pipeline_clock is not None:
    clock.update(pipeline_clock)
  clock.inc(tma_thread_id)
  return clock


def arrive_tensor_core(shared, key, blocks, thread, clock, info) -> None:
  """Arrives at the barrier ``key`` of each block, as tcgen05.commit does."""
  for block in blocks:
    block_key = in_block(key, block)
    await_allocation(shared, block_key)
    barrier = shared.get_barrier(block_key)
    if not isinstance(barrier, memory.Barrier):
      raise ValueError(f"tcgen05 arrives at a Barrier only; got {barrier}")
    if not barrier.orders_tensor_core:
      raise ValueError("tcgen05 needs a Barrier with orders_tensor_core=True")
    barrier.arrive(thread, clock, info)


def logging_info(task):
  """Where ``task`` was started, for error messages."""
  return memory.GPULoggingInfo(
    task.mesh_location, task.thread, task.source_info
  )


def check_read(task, clock, key, access) -> None:
  """Tells the race detector of a read by an asynchronous operation."""
  if clock is None:
    return
  in_smem = key.memory_space_id == SMEM
  part = clock.async_smem_clock if in_smem else clock.generic_clock
  gpu_callbacks.get_races().check_read(
    task.thread, part, key, access, source_info=task.source_info
  )


def check_write(task, clock, key, access) -> None:
  """Tells the race detector of a write to TMEM."""
  if clock is None:
    return
  gpu_callbacks.get_races().check_write(
    task.thread, clock.generic_clock, key, access, source_info=task.source_info
  )
