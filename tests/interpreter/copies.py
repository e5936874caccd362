"""TMA beyond JAX's interpreter: predicates, row gather, CTA pairs, multicast.

`copy_gmem_to_smem` replaces the interpreter's function of the same name. Kinds:

* plain: one block copies for itself;
* gather: the first index is a vector of rows of a 2-D source;
* partitioned: the blocks of a pair each take their part of the source, and the
  leader's barrier counts both;
* multicast: each block fetches 1/n of the source and writes it to all n.

A collective copy is done when the n-th block has made it; each barrier then
learns the merged clocks of all of them.
"""

import dataclasses
import functools
import itertools
import types

import jax
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax._src.util import split_list
import numpy as np

from tests.interpreter import common

Task = gpu_callbacks.AsyncCopyGmemToSmemTask


def predicated_store(original):
  """A store with a false predicate commits an empty bulk group."""

  @functools.wraps(original)
  def store(*, token, thread, predicate, **rest):
    if predicate is None or bool(predicate):
      return original(token=token, thread=thread, predicate=None, **rest)
    shared = gpu_callbacks._get_shared_memory()
    if shared.detect_races:
      clock = shared.incr_clock(thread)
      shared.add_copy_smem_to_gmem_clocks(thread, clock.copy(), clock.copy())
    return token

  return store


def read_source(task, shared) -> np.ndarray:
  """The source window; out of bounds reads as zero, as TMA fills it."""
  value, (_, dtype), _ = shared.get_buffer_content(
    task.src_allocation_key,
    task.src_access,
    task.thread,
    logging_info=task.logging_info,
  )
  if value is None or value.shape != task.src_access.shape:
    value = gpu_callbacks._pad_to_requested(
      value, task.src_access.shape, dtype, 0
    )
  return value


class GatherTask(Task):
  """A copy of rows named by an index vector, one access for each row."""

  row_accesses: tuple = ()

  def __call__(self, tma_thread_id):
    shared = gpu_callbacks._get_shared_memory()
    rows = []
    for access in self.row_accesses:
      self.src_access = access
      self.pre_read(tma_thread_id, shared)
      rows.append(read_source(self, shared))
    self.post_read(tma_thread_id, shared)
    shared.store_buffer_content(
      self.dst_allocation_key,
      self.dst_access,
      np.stack(rows),
      self.thread,
      logging_info=self.logging_info,
    )
    self.post_write(tma_thread_id, shared)


class CollectiveTask(Task):
  """A block's share of a copy; ``stores`` are (key, access, part of source)."""

  stores: tuple = ()

  def __call__(self, tma_thread_id):
    shared = gpu_callbacks._get_shared_memory()
    self.pre_read(tma_thread_id, shared)
    value = read_source(self, shared)
    for key, access, part in self.stores:
      self.dst_allocation_key, self.dst_access = key, access
      common.await_allocation(shared, self.dst_allocation_key)
      self.post_read(tma_thread_id, shared)
      shared.store_buffer_content(
        self.dst_allocation_key,
        self.dst_access,
        value[part],
        self.thread,
        logging_info=self.logging_info,
      )
    self.post_write(tma_thread_id, shared)


class ClockRecorder:
  """Stands in for a task's barrier: keeps the clock instead of arriving."""

  clock = None

  def arrive(self, thread, clock, info):
    del thread, info
    self.clock = clock


def gather_rows(transforms):
  """One tuple of transforms for each gathered row; None when not a gather."""
  as_int = functools.partial(jax.tree.map, int)
  for i, transform in enumerate(transforms):
    indices = getattr(transform, "indices", None)
    if indices is None:
      continue
    vectors = [np.ndim(x) for x in indices if not hasattr(x, "start")]
    if not any(vectors):
      continue
    if np.ndim(indices[0]) != 1 or sum(vectors) != 1:
      raise NotImplementedError(f"gather by {indices}: rows only")
    rest = as_int(tuple(indices[1:]))
    before, after = as_int(transforms[:i]), as_int(transforms[i + 1 :])
    return [
      (*before, types.SimpleNamespace(indices=(int(row), *rest)), *after)
      for row in np.asarray(indices[0])
    ]
  return None


def cluster_group(block_id, cluster_dims, axes) -> list[int]:
  """Blocks that differ from ``block_id`` along ``axes`` only, in order."""
  coords = list(np.unravel_index(block_id, cluster_dims))
  group = []
  for position in itertools.product(*(range(cluster_dims[a]) for a in axes)):
    for axis, index in zip(axes, position, strict=True):
      coords[axis] = index
    group.append(int(np.ravel_multi_index(coords, cluster_dims)))
  return group


def collective_stores(key, source, access, leader_tracked, rank, group):
  """Where block ``rank`` of ``group`` writes which part of the source."""
  n = len(group)
  if isinstance(leader_tracked, primitives.CopyPartition.PARTITIONED):
    axis = leader_tracked.axis
    size = source.shape[axis] // n
    part = (slice(None),) * axis + (slice(rank * size, (rank + 1) * size),)
    return ((key, access, part),)
  if access.permutation is not None:
    raise NotImplementedError("multicast into a transposed destination")
  axis = next(i for i, d in enumerate(access.shape) if d % n == 0)
  slices = [i for i, r in enumerate(access.range) if isinstance(r, slice)]
  size = access.shape[axis] // n
  start = access.range[slices[axis]].start + rank * size
  window = list(access.range)
  window[slices[axis]] = slice(start, start + size, 1)
  target = dataclasses.replace(access, range=tuple(window))
  part = (slice(None),) * axis + (slice(rank * size, (rank + 1) * size),)
  return tuple((common.in_block(key, block), target, part) for block in group)


def join_collective(shared, task, clock, barrier_key, leader_tracked, group):
  """Counts this block in; the last one arrives at the barriers for all.

  The n-th call on a destination by each block of the group forms one copy.
  """
  rank = group.index(task.thread.block_id)
  key = task.dst_allocation_key
  slot = (
    task.thread.device_id,
    tuple(group),
    key.buffer_id,
    key.thread_id,
    str(task.dst_access),
  )
  with shared.lock:
    state = shared.__dict__.setdefault("collective_copies", ({}, {}))
    counts, pending = state
    counts[slot, rank] = nth = counts.get((slot, rank), -1) + 1
    entries = pending.setdefault((slot, nth), {})
    source = (str(task.src_access), leader_tracked)
    entries[rank] = (task.thread, clock, barrier_key, source)
    entries = dict(entries)  # the peers may still add theirs
    if len(entries) == len(group):
      del pending[slot, nth]
  if len({entry[3] for entry in entries.values()}) != 1:
    raise ValueError(f"a collective copy with differing sources: {entries}")
  if len(entries) < len(group):
    return
  merged = None
  for _, part, *_ in entries.values():
    if part is not None and merged is None:
      merged = part.copy()
    elif part is not None:
      merged.update(part)
  for member in [0] if leader_tracked is not None else range(len(group)):
    thread, _, key, _ = entries[member]
    shared.get_barrier(key).arrive(
      thread, merged.copy() if merged is not None else None, task.logging_info
    )


def copy_share(shared, task, barrier_key, leader_tracked, group):
  """This block's share of a collective copy."""
  target, whole = task.dst_allocation_key, task.dst_access
  rank = group.index(task.thread.block_id)
  task.stores = collective_stores(
    target, task.src_access, whole, leader_tracked, rank, group
  )
  task.barrier = recorder = ClockRecorder()
  shared.execute_async_task(task)
  task.dst_allocation_key, task.dst_access = target, whole
  join_collective(
    shared, task, recorder.clock, barrier_key, leader_tracked, group
  )


@gpu_callbacks.fail_on_exception
def copy_gmem_to_smem(
  *,
  token,
  mesh_location,
  thread,
  src_allocation_key_as_array,
  src_transforms,
  dst_allocation_key_as_array,
  dst_transforms,
  barrier_allocation_key_as_array,
  predicate=None,
  source_info=None,
  cluster_dims=(),
  collective=(),
  leader_tracked=None,
):
  """A TMA load in any of the kinds that the module docstring lists."""
  shared = gpu_callbacks._get_shared_memory()
  key = gpu_callbacks.HostAllocationKey.from_array
  source, target = (
    key(src_allocation_key_as_array),
    key(dst_allocation_key_as_array),
  )
  barrier_key = key(barrier_allocation_key_as_array)
  src_transforms = gpu_callbacks._remove_noop_transforms(src_transforms)
  dst_transforms = gpu_callbacks._remove_noop_transforms(dst_transforms)
  clock = shared.incr_clock(thread) if shared.detect_races else None
  if predicate is not None and not bool(predicate):
    if collective:
      raise NotImplementedError("a predicated collective copy")
    info = memory.GPULoggingInfo(mesh_location, thread, source_info)
    shared.get_barrier(barrier_key).arrive(thread, clock, info)
    return token
  rows = gather_rows(src_transforms)
  if rows and collective:
    raise NotImplementedError("a collective gather")
  first = rows[0] if rows else jax.tree.map(int, src_transforms)
  kind = GatherTask if rows else CollectiveTask if collective else Task
  task = kind(
    mesh_location=mesh_location,
    thread=thread,
    src_allocation_key=source,
    src_access=shared.access(source, first),
    dst_allocation_key=target,
    dst_access=shared.access(target, jax.tree.map(int, dst_transforms)),
    barrier_allocation_key=barrier_key,
    source_info=source_info,
    clock=clock,
  )
  if rows:
    task.row_accesses = tuple(shared.access(source, row) for row in rows)
  if not collective:
    shared.execute_async_task(task)
    return token
  group = cluster_group(thread.block_id, cluster_dims, collective)
  copy_share(shared, task, barrier_key, leader_tracked, group)
  return token


def interpret_copy_gmem_to_smem(self, eqn, token, get_invals):
  """Evaluates the load's operands, then calls `copy_gmem_to_smem`."""
  params, invals = eqn.params, get_invals()
  if not params["has_barrier"]:
    raise NotImplementedError("copy_gmem_to_smem without a barrier")
  predicate = invals.pop() if params["has_user_predicate"] else None
  trees = [params[f"{x}_transforms_treedef"] for x in ("src", "dst", "barrier")]
  (source, target, barrier), src_flat, dst_flat, barrier_flat = split_list(
    invals, [3, trees[0].num_leaves, trees[1].num_leaves]
  )
  barrier = jaxpr_interpret._get_barrier_allocation_key_from_inval(
    barrier, trees[2], barrier_flat
  )
  source, src_transforms = jaxpr_interpret.resolve_ref(
    eqn.invars[0].aval, source, jax.tree.unflatten(trees[0], src_flat)
  )
  target, dst_transforms = jaxpr_interpret.resolve_ref(
    eqn.invars[1].aval, target, jax.tree.unflatten(trees[1], dst_flat)
  )
  axes = [
    self.mesh.cluster_names.index(a) for a in params["collective_axes"] or ()
  ]
  collective = tuple(a for a in axes if self.cluster_dims[a] > 1)
  function = functools.partial(
    gpu_callbacks.copy_gmem_to_smem,
    source_info=eqn.source_info,
    cluster_dims=self.cluster_dims,
    collective=collective,
    leader_tracked=params["leader_tracked"] if collective else None,
  )
  return callback.io_callback(
    function,
    gpu_callbacks.TOKEN_SHAPE_DTYPE,
    token=token,
    mesh_location=self.mesh_location,
    thread=self.thread,
    src_allocation_key_as_array=source,
    src_transforms=src_transforms,
    dst_allocation_key_as_array=target,
    dst_transforms=dst_transforms,
    barrier_allocation_key_as_array=barrier,
    predicate=predicate,
  ), []
