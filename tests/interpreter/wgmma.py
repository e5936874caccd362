"""wgmma beyond JAX's interpreter: asynchronous reads, lhs in registers, fp8.

Upstream multiplies at once and tells the race detector of nothing. Here a wgmma
reads its operands in shared memory through the async proxy, at a clock of its
own that its thread learns only when it waits: with `wgmma_wait`, or by reading
the accumulator. A slot that is given back before its wgmma has been awaited is
then a race with the copy that overwrites it.

A wait arrives here as a wait for stores with a negative count (`rewritten`),
because upstream drops it before any function could be replaced. Sums are
float32 of exact products. Not modelled: which thread of the warpgroup holds
what, and that registers may not change under a wgmma.
"""

import functools

import jax
from jax._src import callback
from jax._src.pallas.mosaic_gpu import primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, jaxpr_interpret
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
import numpy as np

from tests.interpreter import common

AHEAD = -1  # a wait for at most n wgmma is one for AHEAD - n stores


def pending(shared, thread) -> list:
  """Clocks of the thread's wgmma that were not awaited, oldest first."""
  return shared.__dict__.setdefault("pending_wgmma", {}).setdefault(thread, [])


def await_wgmma(shared, thread, n: int) -> None:
  """Orders all but the last ``n`` wgmma of a thread before what follows."""
  clocks = pending(shared, thread)
  while len(clocks) > n:
    clock = clocks.pop(0)
    if clock is not None:
      with shared.lock:
        shared.clocks[thread].update(clock)


def read_operand(shared, thread, clock, operand, info):
  """An operand as float32; one in shared memory is read at ``clock``."""
  key_or_array, transforms = operand
  if transforms is None:
    return np.asarray(key_or_array).astype(np.float32)
  key = memory.HostAllocationKey.from_array(key_or_array)
  transforms = gpu_callbacks._remove_noop_transforms(transforms)
  access = shared.access(key, jax.tree.map(int, transforms))
  if clock is not None:
    gpu_callbacks.get_races().check_read(
      thread,
      clock.async_smem_clock.copy(),
      key,
      access,
      source_info=info.source_info,
    )
  return common.read(shared, key, access, info).astype(np.float32)


@gpu_callbacks.fail_on_exception
def wgmma(*, token, mesh_location, thread, acc, a, b, source_info):
  """Adds a @ b to the accumulator; each is (key or array, transforms)."""
  shared = gpu_callbacks._get_shared_memory()
  info = memory.GPULoggingInfo(mesh_location, thread, source_info)
  clock = None
  if shared.detect_races:
    shared.incr_clock(thread)
    number = shared.get_next_tma_thread_id()
    clock = common.start_clock(shared, thread, None, number)
  x, y = (
    read_operand(shared, thread, clock, operand, info) for operand in (a, b)
  )
  pending(shared, thread).append(clock)
  key = memory.HostAllocationKey.from_array(acc[0])
  access = shared.access(key, jax.tree.map(int, acc[1]))
  sums = common.read(shared, key, access, info, thread)
  with np.errstate(invalid="ignore", over="ignore"):
    sums = sums + np.matmul(x, y)
  shared.store_buffer_content(key, access, sums, thread, logging_info=info)
  return token


def interpret_wgmma(self, eqn, token, get_invals):
  """Evaluates the operands of a wgmma, then calls `wgmma`."""
  operands, leaves = get_invals()[:3], get_invals()[3:]
  parts = []
  for index, name in enumerate(("acc", "a", "b")):
    tree = eqn.params[f"{name}_transforms_tree"]
    count = 0 if tree is None else tree.num_leaves
    mine, leaves = leaves[:count], leaves[count:]
    aval = eqn.invars[index].aval
    if not hasattr(aval, "inner_aval"):  # an array: lhs in registers
      parts.append((operands[index], None))
      continue
    transforms = () if tree is None else jax.tree.unflatten(tree, mine)
    parts.append(jaxpr_interpret.resolve_ref(aval, operands[index], transforms))
  return callback.io_callback(
    functools.partial(wgmma, source_info=eqn.source_info),
    gpu_callbacks.TOKEN_SHAPE_DTYPE,
    token=token,
    mesh_location=self.mesh_location,
    thread=self.thread,
    **dict(zip(("acc", "a", "b"), parts, strict=True)),
  ), []


def awaiting_deref(original):
  """Reading the accumulator waits for the wgmma that write it."""

  @functools.wraps(original)
  def deref(*, thread, wait_n, **rest):
    shared = gpu_callbacks._get_shared_memory()
    await_wgmma(shared, thread, wait_n or 0)
    return original(thread=thread, wait_n=wait_n, **rest)

  return deref


def awaiting_stores(original):
  """A wait for a negative number of stores is one for wgmma."""

  @functools.wraps(original)
  def wait(*, token, thread, n, **rest):
    n = int(n)
    if n > AHEAD:
      return original(token=token, thread=thread, n=n, **rest)
    await_wgmma(gpu_callbacks._get_shared_memory(), thread, AHEAD - n)
    return token

  return wait


def rewritten(jaxpr):
  """The jaxpr with waits for wgmma in the form of waits for stores."""
  wait = primitives.wgmma_wait_p
  if not any(e.primitive is wait for e in jaxpr.eqns):
    return jaxpr
  store_wait = primitives.wait_smem_to_gmem_p
  return jaxpr.replace(
    eqns=[
      e.replace(
        primitive=store_wait,
        params={"n": AHEAD - e.params["n"], "wait_read_only": True},
      )
      if e.primitive is wait
      else e
      for e in jaxpr.eqns
    ]
  )


def rewriting_interpret(original):
  """Interprets a jaxpr after `rewritten`."""

  def interpret(self, jaxpr, token, *args):
    return original(self, rewritten(jaxpr), token, *args)

  return interpret
