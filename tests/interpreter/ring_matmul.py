"""A small block-scaled matmul that has every hazard, and faults to inject.

    y[M, N] = (a * a_scale)[M, K] @ (b * b_scale)[N, K]^T        one output tile

  warpgroup 0, warp 0   loads: A, B and their scales into a ring of slots
  warpgroup 0, warp 1   multiplies: scales to TMEM, then the MMA
  warpgroup 1           stores the tile in chunks through two buffers

With ``pairs`` two CTAs share a tile of twice the rows and columns. The kernel
is clean under the strict rules; each name in `FAULTS` takes one of its guards
away, and the interpreter must then report it.
"""

import functools

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

TILE = 128  # rows, columns and depth of one CTA's step
SLOTS = 2
CHUNK = 32  # columns of a store
E4M3, E8M0 = jnp.float8_e4m3fn, jnp.float8_e8m0fnu

FAULTS = (
  "no_empty_wait",  # a load overwrites a slot that the MMA still reads
  "one_scale_set",  # a scale copy overwrites columns that the MMA still reads
  "no_done_wait",  # the epilogue reads an accumulator that is not finished
  "no_store_wait",  # a chunk overwrites a buffer that the store still reads
  "no_commit",  # the store reads shared memory that was not made visible
  "no_drain",  # the kernel exits with phases that nobody observed
)


def swizzled(shape, dtype):
  """A 128-byte swizzled tile in shared memory."""
  width = 128 // jnp.dtype(dtype).itemsize
  transforms = (plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128))
  return plgpu.SMEM(shape, dtype, transforms=transforms)


def load_steps(gmem, smem, empty, full, *, steps, axis, fault):
  """Warp 0: fills the ring."""
  split = plgpu.CopyPartition.PARTITIONED(0) if axis else None
  copies = plgpu.CopyPartition.REPLICATED if axis else None

  @pl.loop(0, steps)
  def step(k):
    slot = lax.rem(k, jnp.int32(SLOTS))
    if fault != "no_empty_wait":
      pl.when(k >= SLOTS)(lambda: plgpu.barrier_wait(empty.at[slot]))
    depth = pl.ds(k * TILE, TILE)
    windows = ((slice(None), depth),) * 2 + ((slice(None), pl.ds(k, 1)),) * 2
    tracked = (split, split, split, copies)
    for source, target, window, part in zip(
      gmem, smem, windows, tracked, strict=True
    ):
      plgpu.copy_gmem_to_smem(
        source.at[window],
        target.at[slot],
        full.at[slot],
        collective_axes=axis,
        leader_tracked=part,
      )


def drain(empty, *, steps):
  """Observes the last phase of every slot."""
  for i in range(max(steps - SLOTS, 0), steps):
    plgpu.barrier_wait(empty.at[i % SLOTS])


def multiply_steps(smem, tmem, full, empty, done, *, steps, axis, fault):
  """Warp 1 of the leader: one MMA a step, each slot with its scale columns."""
  a_smem, b_smem, a_scale_smem, b_scale_smem = smem
  acc_tmem, scale_tmem = tmem
  for k in range(steps):
    slot = k % SLOTS
    plgpu.barrier_wait(full.at[slot])
    a_scale, b_scale = scale_tmem[0 if fault == "one_scale_set" else slot]
    plgpu.async_copy_scales_to_tmem(
      a_scale_smem.at[slot], a_scale, collective_axis=axis
    )
    plgpu.async_copy_scales_to_tmem(
      b_scale_smem.at[slot], b_scale, collective_axis=axis
    )
    plgpu.tcgen05_mma(
      acc_tmem,
      a_smem.at[slot],
      b_smem.at[slot].transpose((1, 0)),
      empty.at[slot],
      a_scale=a_scale,
      b_scale=b_scale,
      accumulate=k > 0,
      collective_axis=axis,
    )
  plgpu.tcgen05_commit_arrive(done, collective_axis=axis)


def store_tile(acc_tmem, y_gmem, y_smem, done, *, row, columns, fault):
  """Warpgroup 1: accumulator to global memory, a chunk at a time."""
  if fault != "no_done_wait":
    plgpu.barrier_wait(done)
  for j in range(columns // CHUNK):
    buffer, window = y_smem.at[j % 2], pl.ds(j * CHUNK, CHUNK)
    if fault != "no_store_wait":
      plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    buffer[...] = plgpu.async_load_tmem(acc_tmem.at[:, window])
    if fault != "no_commit":
      plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer, y_gmem.at[row, window])
  plgpu.wait_smem_to_gmem(0)


def kernel(*refs, steps, pairs, fault):
  """The three roles over one tile."""
  *gmem, y_gmem = refs[:5]
  *smem, y_smem = refs[5:10]
  full, empty, done, acc_tmem, *scales = refs[10:]
  axis = "pair" if pairs else None
  half, member = lax.axis_index("half"), lax.axis_index("pair")
  ring = dict(steps=steps, axis=axis, fault=fault)
  tmem = (acc_tmem, list(zip(scales[:SLOTS], scales[SLOTS:], strict=True)))

  def roles(warp):
    @pl.when(warp == 0)
    def _():
      load_steps(gmem, smem, empty, full, **ring)
      if fault not in ("no_drain", "no_empty_wait"):
        drain(empty, steps=steps)

    @pl.when(jnp.logical_and(warp == 1, member == 0))
    def _():
      multiply_steps(smem, tmem, full, empty, done, **ring)

  pl.when(half == 0)(lambda: plgpu.warp_map(roles))

  @pl.when(half == 1)
  def _():
    columns = TILE * (2 if pairs else 1)
    row = pl.ds(member * TILE, TILE)
    store_tile(
      acc_tmem, y_gmem, y_smem, done, row=row, columns=columns, fault=fault
    )


def matmul(a, b, a_scale, b_scale, *, pairs=False, fault=None, interpret=False):
  """Runs the kernel on one tile.

  Args:
    a: [M, K] float8_e4m3fn, M = N = 128 or, in pairs, 256.
    b: [N, K] float8_e4m3fn.
    a_scale: [M / 128, K / 128, 32, 16] float8_e8m0fnu, blocked.
    b_scale: [N / 128, K / 128, 32, 16] float8_e8m0fnu, blocked.
    pairs: Two CTAs share the tile.
    fault: One of `FAULTS`, or None.
    interpret: Interpret parameters, or False to compile.

  Returns:
    [M, N] float32.
  """
  steps, tile = a.shape[1] // TILE, TILE * (2 if pairs else 1)
  scale = functools.partial(
    plgpu.TMEM,
    dtype=E8M0,
    layout=plgpu.TMEMLayout.SCALES_LAYOUT,
    collective=pairs,
  )
  scratch = [
    swizzled((SLOTS, TILE, TILE), E4M3),
    swizzled((SLOTS, TILE, TILE), E4M3),
    plgpu.SMEM((SLOTS, 1, 1, 32, 16), E8M0),
    plgpu.SMEM((SLOTS, tile // TILE, 1, 32, 16), E8M0),
    swizzled((2, TILE, CHUNK), jnp.float32),
    plgpu.Barrier(num_arrivals=4, num_barriers=SLOTS),
    plgpu.Barrier(num_barriers=SLOTS, orders_tensor_core=True),
    plgpu.Barrier(orders_tensor_core=True),
    plgpu.TMEM((TILE, tile), jnp.float32, collective=pairs),
    *[scale((TILE, 4)) for _ in range(SLOTS)],
    *[scale((tile, 4)) for _ in range(SLOTS)],
  ]
  run = plgpu.kernel(
    functools.partial(kernel, steps=steps, pairs=pairs, fault=fault),
    out_type=jax.ShapeDtypeStruct((tile, tile), jnp.float32),
    scratch_types=scratch,
    cluster=(2 if pairs else 1,),
    cluster_names=("pair",),
    num_threads=2,
    thread_name="half",
    interpret=interpret,
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane,
      unsafe_no_auto_barriers=True,
    ),
  )
  return run(a, b, a_scale, b_scale)
