"""Runs Mosaic GPU kernels on a CPU: JAX 0.11.2's interpreter, extended.

JAX's GPU interpret mode models shared and tensor memory, TMA, barriers, warps
and a race detector. The parts under ``tests/interpreter/`` add what our kernels
use beyond it: block scales and their copies to TMEM, CTA pairs, multicast,
predicated and gathering copies, wgmma's asynchrony, saturating casts,
subnormals.

Nothing happens at import. `install` replaces functions of the interpreter, and
refuses on any JAX other than the one it was written against, by version and by
a hash of the source that it replaces. Tests use the fixture `interpreted`:

    def test_kernel(interpreted):
      y = interpreted(lambda i: kernel(x, interpret=i))

which runs the function with interpret parameters, and fails when an access
races, when a barrier is left with unobserved phases, or when it takes too long.

Not modelled: layouts, swizzles, capacity (`pallas_kernels.aot` sees them), and
clusters running at the same time.
"""

from collections.abc import Callable
import functools
import hashlib
import inspect
import threading
from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import (
  gpu_callbacks,
  interpret_pallas_call,
  jaxpr_interpret,
)
from jax._src.pallas.mosaic_gpu.interpret import shared_memory as memory
from jax.experimental.pallas import mosaic_gpu as plgpu
import pytest

from tests.interpreter import arithmetic, copies, tensor_core, wgmma

PINNED_VERSION = "0.11.2"
# sha256[:12] over the source of everything replaced or subclassed.
PINNED_HASH = "180e58655c7c"

# Copies that share a component of the vector clock hide each other's races, so
# there must be as many components as asynchronous operations in a run.
ASYNC_CLOCKS = 509

# Compiling the interpreted program takes longer than running it.
COMPILER_OPTIONS = {
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}
SECONDS = 120

_Interpreter = jaxpr_interpret.JaxprInterpreter
_SharedMemory = memory.GPUSharedMemory


def upstream_hash() -> str:
  """Hash of the upstream source that the extension replaces or relies on."""
  objects = (
    tensor_core.UpstreamMma,
    tensor_core.UpstreamCopy,
    gpu_callbacks.tcgen05_mma,
    gpu_callbacks.async_copy_smem_to_tmem,
    gpu_callbacks.tcgen05_commit_arrive,
    gpu_callbacks.copy_gmem_to_smem,
    gpu_callbacks.copy_smem_to_gmem,
    gpu_callbacks.AsyncCopyTask,
    gpu_callbacks.AsyncCopyGmemToSmemTask,
    _Interpreter.interpret,
    _Interpreter._interpret_copy_gmem_to_smem_p,
    _Interpreter._interpret_tcgen05_mma_p,
    _Interpreter._interpret_arithmetic_primitive,
    _Interpreter._interpret_async_copy_smem_to_tmem_p,
    _Interpreter._interpret_wgmma_ref_p,
    _Interpreter._interpret_wait_smem_to_gmem_p,
    gpu_callbacks.wgmma,
    gpu_callbacks.wgmma_accumulator_deref,
    gpu_callbacks.wait_smem_to_gmem,
    memory.Barrier.arrive,
    _SharedMemory.execute_pipelineable_async_task,
    _SharedMemory.assert_no_barriers_allocated,
  )
  source = "".join(inspect.getsource(inspect.unwrap(o)) for o in objects)
  return hashlib.sha256(source.encode()).hexdigest()[:12]


def check_pin(version: str, source_hash: str) -> None:
  """Refuses a JAX that the extension was not written against.

  Raises:
    RuntimeError: The version or the source differs.
  """
  if (version, source_hash) != (PINNED_VERSION, PINNED_HASH):
    raise RuntimeError(
      "the interpreter extension replaces private functions of JAX "
      f"{PINNED_VERSION} (source {PINNED_HASH}); got {version} "
      f"({source_hash}). Read what changed, adapt tests/interpreter, then "
      "update the pin."
    )


def one_device_assert(original):
  """Upstream asserts over all devices' barriers while peers may still run."""

  def check(self):
    if len({t.device_id for t in self.all_concurrent_threads}) == 1:
      original(self)

  return check


def replacements() -> list[tuple[Any, str, Any]]:
  """What `install` sets: (owner, name, new value)."""
  new = []

  def wrap(owner, name, wrapper):
    new.append((owner, name, wrapper(getattr(owner, name))))

  wrap(gpu_callbacks, "TcGen05Mma", lambda _: tensor_core.Mma)
  wrap(gpu_callbacks, "TcGen05Copy", lambda _: tensor_core.Copy)
  wrap(gpu_callbacks, "tcgen05_mma", tensor_core.only_leader)
  wrap(
    gpu_callbacks,
    "async_copy_smem_to_tmem",
    lambda original: tensor_core.only_leader(
      tensor_core.reshaped_atoms(original)
    ),
  )
  wrap(
    gpu_callbacks,
    "tcgen05_commit_arrive",
    lambda _: tensor_core.only_leader(tensor_core.commit_arrive),
  )
  wrap(gpu_callbacks, "copy_smem_to_gmem", copies.predicated_store)
  wrap(gpu_callbacks, "copy_gmem_to_smem", lambda _: copies.copy_gmem_to_smem)
  wrap(
    _Interpreter,
    "_interpret_copy_gmem_to_smem_p",
    lambda _: copies.interpret_copy_gmem_to_smem,
  )
  wrap(
    _Interpreter,
    "_interpret_arithmetic_primitive",
    arithmetic.interpreted_arithmetic,
  )
  wrap(
    _Interpreter,
    "interpret",
    lambda f: wgmma.rewriting_interpret(tensor_core.rewriting_interpret(f)),
  )
  wrap(_Interpreter, "_interpret_wgmma_ref_p", lambda _: wgmma.interpret_wgmma)
  wrap(gpu_callbacks, "wgmma_accumulator_deref", wgmma.awaiting_deref)
  wrap(gpu_callbacks, "wait_smem_to_gmem", wgmma.awaiting_stores)
  wrap(_SharedMemory, "assert_no_barriers_allocated", one_device_assert)
  return new


def install() -> Callable[[], None]:
  """Extends the interpreter; returns the function that undoes it.

  Raises:
    RuntimeError: Not the JAX that the extension was written against.
  """
  check_pin(jax.__version__, upstream_hash())
  saved = []
  for owner, name, value in replacements():
    saved.append((owner, name, getattr(owner, name)))
    setattr(owner, name, value)
  jax.clear_caches()

  def uninstall() -> None:
    for owner, name, value in saved:
      setattr(owner, name, value)
    jax.clear_caches()

  return uninstall


def params(**overrides: Any) -> plgpu.InterpretGPUParams:
  """Interpret parameters of the strict mode: races with a clock each."""
  settings = {
    "detect_races": True,
    "num_tma_threads_per_device": ASYNC_CLOCKS,
  }
  return plgpu.InterpretGPUParams(**{**settings, **overrides})


class RaceError(AssertionError):
  """Two accesses of an interpreted kernel are not ordered."""


@functools.lru_cache(maxsize=1)
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
  """``function(params(), *arguments)`` under jit; the last one is kept."""
  return jax.jit(
    functools.partial(function, params()), compiler_options=COMPILER_OPTIONS
  )


def run(
  function: Callable[..., Any], *arguments: Any, seconds: float = SECONDS
) -> Any:
  """Calls ``function(interpret, *arguments)`` and waits for its arrays.

  Args:
    function: Runs kernels with the interpret parameters that it is given.
    *arguments: Arrays; the same function compiles once for all values.
    seconds: Time after which the kernel counts as deadlocked.

  Raises:
    RaceError: The race detector found an unordered pair of accesses.
    TimeoutError: No result in time; the kernel's threads are made to fail.
  """
  outcome: dict[str, Any] = {}

  def call() -> None:
    try:
      result = compiled(function)(*arguments)
      outcome["value"] = jax.block_until_ready(result)
      outcome["races"] = gpu_callbacks.get_races().races_found
    except BaseException as error:  # noqa: BLE001  raised again by the caller
      outcome["error"] = error

  thread = threading.Thread(target=call, daemon=True)
  thread.start()
  thread.join(seconds)
  try:
    if thread.is_alive():
      error = TimeoutError(f"no result after {seconds} s: a deadlock?")
      gpu_callbacks.fail(error, token=0, device_id=0)  # wakes the waiters
      thread.join(seconds)
      raise error
    if "error" in outcome:
      raise outcome["error"]
    if outcome["races"]:
      raise RaceError("the interpreted kernel races; stdout tells where")
    return outcome["value"]
  finally:
    interpret_pallas_call.reset_gpu_interpret_mode_state()


@pytest.fixture(scope="module")
def interpreted():
  """`run` with the extension installed while a module's tests run."""
  uninstall = install()
  yield run
  compiled.cache_clear()
  uninstall()
