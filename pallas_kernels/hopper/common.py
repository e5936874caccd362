"""What Hopper's matmul kernels share: roles, ring, accumulator, epilogue.

A CTA has three warpgroups. The last one loads tiles by TMA into a ring of
slots; the other two multiply them with wgmma, each its half of the rows of the
output tile, and store the result:

    loader      acquire slot | TMA a, TMA b      -> full[slot]
    consumers   await slot   | wgmma | wait      -> empty[slot]

Every role counts the steps of all its tiles in one number that it carries from
tile to tile, so a slot's phase is right however many tiles and steps there are.
The grid is persistent: one CTA an SM, each takes every n-th tile.

Legend: a step contracts `depth` elements; a tile is 128 rows x `columns`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.hopper import tile

ROWS = tile.ROWS
CONSUMERS = 2  # warpgroups that multiply
LOADER = CONSUMERS  # index of the warpgroup that loads
PART = ROWS // CONSUMERS  # rows of a consumer, those of one wgmma
AXIS = "sm"  # the grid axis
WARPGROUP = "warpgroup"  # the thread axis
LOADER_REGISTERS = 40
# A multiple of 8, so that the three warpgroups fit the SM's 65536 registers.
CONSUMER_REGISTERS = (512 - LOADER_REGISTERS) // CONSUMERS // 8 * 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
  """Slots in shared memory between the loader and the consumers.

  Attributes:
    stages: Number of slots.
    full: Barriers, one a slot; as many arrivals as copies.
    empty: Barriers, one a slot; an arrival of each consumer.
  """

  stages: int
  full: Any
  empty: Any

  def slot(self, step: jax.Array) -> jax.Array:
    """The slot of a step."""
    return lax.rem(step, jnp.int32(self.stages))

  def acquire(self, step: jax.Array) -> jax.Array:
    """Loader: waits until the slot of ``step`` is free; returns it."""
    slot = self.slot(step)

    @pl.when(step >= self.stages)
    def _():
      plgpu.barrier_wait(self.empty.at[slot])

    return slot

  def await_full(self, step: jax.Array) -> jax.Array:
    """Consumer: waits until the slot of ``step`` is loaded; returns it."""
    slot = self.slot(step)
    plgpu.barrier_wait(self.full.at[slot])
    return slot

  def release(self, step: jax.Array) -> None:
    """Consumer: gives the slot of ``step`` back; its reads are done."""
    plgpu.barrier_arrive(self.empty.at[self.slot(step)])

  def drain(self, steps: jax.Array) -> None:
    """Loader: waits until every slot is free again after ``steps`` steps.

    A CTA must not end while others may still arrive at its barriers.
    """
    first = jnp.maximum(steps - self.stages, 0)

    def wait(step, _):
      plgpu.barrier_wait(self.empty.at[self.slot(step)])

    lax.fori_loop(first, steps, wait, None)


def ring_barriers(stages: int, copies: int) -> list[plgpu.Barrier]:
  """The ``full`` and ``empty`` barriers of a `Ring`."""
  return [
    plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
    plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
  ]


def roles(
  load: Callable[[], None], consume: Callable[[jax.Array], None]
) -> None:
  """Runs ``load`` in the loader and ``consume(index)`` in each consumer."""
  warpgroup = lax.axis_index(WARPGROUP)

  @pl.when(warpgroup == LOADER)
  def _():
    plgpu.set_max_registers(LOADER_REGISTERS, action="decrease")
    load()

  @pl.when(warpgroup < CONSUMERS)
  def _():
    plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
    consume(warpgroup)


def multiply(
  ring: Ring,
  step: jax.Array,
  count: Any,
  issue: Callable[[Any, jax.Array], None],
  shape: tuple[int, int],
) -> jax.Array:
  """Sum over ``count`` steps of the product of what the slots hold.

  One wgmma is in flight while the next one is issued; a slot is released when
  the wgmma after its own has been issued and its own has ended.

  Args:
    ring: The slots.
    step: [] int32, steps before this tile.
    count: Steps of this tile, at least 1; may be traced.
    issue: ``issue(accumulator, slot)`` starts the wgmma of a slot.
    shape: Rows and columns of the accumulator.

  Returns:
    float32 of ``shape``, in the layout ``plgpu.Layout.WGMMA``.
  """

  def scope(accumulator):
    def body(k, step):
      issue(accumulator, ring.await_full(step))
      plgpu.wgmma_wait(1)
      pl.when(k > 0)(lambda: ring.release(step - 1))
      return step + 1

    end = lax.fori_loop(0, count, body, step)
    plgpu.wgmma_wait(0)
    ring.release(end - 1)
    return accumulator[...]

  return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def fence_reads(interpret: Any) -> None:
  """Orders a thread's reads of shared memory before TMA's next writes there.

  Only the fence: whoever arrives at a barrier after it needs no other sync.
  """
  if interpret:
    plgpu.commit_smem()
    return

  @plgpu.inline_mgpu()
  def fence(_):
    mgpu.utils.inline_ptx(
      "fence.proxy.async.shared::cta;", has_side_effects=True
    )

  fence()  # pyright: ignore[reportCallIssue]


def multiply_converted(
  ring: Ring,
  step: jax.Array,
  count: int,
  convert: Callable[[jax.Array], jax.Array],
  issue: Callable[[Any, jax.Array, jax.Array], None],
  shape: tuple[int, int],
  interpret: Any,
) -> jax.Array:
  """`multiply` with an lhs that is converted in registers.

  The lhs of a step is converted while the wgmma of the step before runs. Two
  wgmma in flight, with two sets of registers, would overlap more: ptxas then
  runs all of them one after another (its warning C7513).

  Args:
    ring: The slots.
    step: [] int32, steps before this tile.
    count: Steps of this tile, at least 1.
    convert: ``convert(slot)``: the lhs of a slot, 16 bits, in the layout
      ``plgpu.Layout.WGMMA``.
    issue: ``issue(accumulator, lhs, slot)`` starts the wgmma of a slot.
    shape: Rows and columns of the accumulator.
    interpret: Whether the kernel is interpreted.

  Returns:
    float32 of ``shape``, in the layout ``plgpu.Layout.WGMMA``.
  """

  def scope(accumulator):
    def body(_, carry):
      step, lhs = carry
      issue(accumulator, lhs, ring.slot(step))
      following = convert(ring.await_full(step + 1))
      plgpu.wgmma_wait(0)
      fence_reads(interpret)
      ring.release(step)
      return step + 1, following

    first = convert(ring.await_full(step))
    last, lhs = lax.fori_loop(0, count - 1, body, (step, first))
    issue(accumulator, lhs, ring.slot(last))
    plgpu.wgmma_wait(0)
    fence_reads(interpret)
    ring.release(last)
    return accumulator[...]

  return pl.run_scoped(scope, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def slab_buffers(tile_: tile.MatmulTile, dtype: Any, width: int) -> Any:
  """Shared memory for `store`: the slabs of each consumer.

  Args:
    tile_: Says how wide a slab is, and how many there are.
    dtype: Of the result.
    width: Row length of the result in global memory.
  """
  shape = (CONSUMERS, tile_.buffers, PART, tile_.slab)
  return operand(shape, dtype, span((width, dtype)))


def store(
  accumulator: jax.Array,
  finish: Callable[[jax.Array, int], jax.Array],
  target: Callable[[int], Any],
  slabs: Any,
  tile_: tile.MatmulTile,
) -> None:
  """Stores [64, columns] through shared memory, slab by slab.

  Stores past the end of the result are dropped by TMA. The caller waits for the
  last ones with ``plgpu.wait_smem_to_gmem(0)`` before the kernel ends. Every
  tile starts at the first buffer, so their number must divide the slabs.

  Args:
    accumulator: float32.
    finish: ``finish(slab, column)``: the slab in the dtype of the result.
    target: ``target(column)``: where a slab goes, in global memory.
    slabs: This consumer's slabs, [buffers, 64, slab].
    tile_: The schedule.
  """
  for i, column in enumerate(range(0, tile_.columns, tile_.slab)):
    slab = slabs.at[i % tile_.buffers]
    rounded = finish(accumulator[:, column : column + tile_.slab], column)
    plgpu.wait_smem_to_gmem(tile_.buffers - 1, wait_read_only=True)
    slab[...] = rounded
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(slab, target(column))


def span(*widths: tuple[int, Any]) -> int:
  """Bytes of the swizzle that operands of these row lengths have in common.

  wgmma wants the same for both operands.

  Args:
    *widths: Row length in global memory and dtype of each operand.

  Raises:
    NotImplementedError: Rows are no multiple of 32 bytes.
  """
  return min(
    mosaic.swizzle_transforms(dtype, width)[1].swizzle  # pyright: ignore
    for width, dtype in widths
  )


def operand(shape: tuple[int, ...], dtype: Any, span_bytes: int) -> Any:
  """Shared memory of a ring of operand tiles, for TMA and wgmma."""
  width = min(span_bytes // jnp.dtype(dtype).itemsize, shape[-1])
  return mosaic.swizzled(shape, dtype, width)


def launch(ctas: int) -> dict[str, Any]:
  """Keyword arguments of ``plgpu.kernel`` for this schedule."""
  return {
    "grid": (ctas,),
    "grid_names": (AXIS,),
    "num_threads": CONSUMERS + 1,
    "thread_name": WARPGROUP,
    "compiler_params": mosaic.compiler_params(),
  }
