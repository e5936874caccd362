"""Blackwell's grouped matmul in its plainest form: for a first run.

    y[r] = lhs[r] @ rhs[group of r]         float32 sums, rounded once

One CTA computes one 128 x 128 tile of the result and ends. It has one slot of
shared memory and one accumulator, no roles, no pair, no overlap:

    for each 128 of K:  TMA lhs, rhs and their scales | wait
                        scales to TMEM | block-scaled MMA | wait
    TMEM load | shared memory | TMA store | wait

What it shares with `grouped_matmul` is what must be right first: the layouts of
operands and scales, the descriptors of the MMA, the columns of scales, the
edges. So where this kernel agrees with `reference.grouped_matmul` on a GPU and
`grouped_matmul` does not, the fault is in the schedule. JAX's own test of the
block-scaled MMA has the same structure. It is slow, and nothing else uses it.

Unlike in the other kernels barriers between the threads of the warpgroup are
left to the compiler. Compiled and interpreted, not run: no Blackwell GPU was at
hand.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import groups, mosaic, mxfp8
from pallas_kernels.blackwell import grouped_matmul, memory
from pallas_kernels.blackwell import tile as tile_lib

MxArray = mxfp8.MxArray

TILE = tile_lib.LANES  # rows and columns of a tile, and K of a step
COPIES = 4  # lhs, rhs and their scales arrive at one barrier


def _kernel(
  count,
  tile_group,
  lhs,
  rhs,
  lhs_scale,
  rhs_scale,
  out,
  operands,
  tensor_memory,
  barriers,
  chunk,
  *,
  steps: int,
  across: bool,
):
  """The body of one CTA: one tile, if it holds rows of a group."""
  row, column = lax.axis_index("row"), lax.axis_index("column")

  @pl.when(row < count[0])
  def _():
    group = tile_group[row]
    rows, columns = pl.ds(row * TILE, TILE), pl.ds(column * TILE, TILE)

    def windows(k):
      depth = pl.ds(k * TILE, TILE)
      return (
        lhs.at[rows, depth],
        rhs.at[(group, depth, columns) if across else (group, columns, depth)],
        lhs_scale.at[pl.ds(row, 1), pl.ds(k, 1)],
        rhs_scale.at[group, pl.ds(column, 1), pl.ds(k, 1)],
      )

    _multiply(
      windows, operands, tensor_memory, barriers, steps=steps, across=across
    )
    _store(tensor_memory[0], chunk, out, rows, column)


def _multiply(windows, operands, tensor_memory, barriers, *, steps, across):
  """Sums the products of all steps in ``tensor_memory``."""
  sums, *scale_columns = tensor_memory
  full, done = barriers
  lhs, rhs, *scales = operands

  @pl.loop(0, steps)
  def step(k):
    for source, target in zip(windows(k), operands, strict=True):
      plgpu.copy_gmem_to_smem(source, target, full)
    plgpu.barrier_wait(full)
    for source, target in zip(scales, scale_columns, strict=True):
      plgpu.async_copy_scales_to_tmem(source.reshape(1, 1, 32, 16), target)
    plgpu.tcgen05_mma(
      sums,
      lhs,
      rhs if across else rhs.transpose((1, 0)),
      done,
      a_scale=scale_columns[0],
      b_scale=scale_columns[1],
      accumulate=k > 0,
    )
    plgpu.barrier_wait(done)


def _store(sums, chunk, out, rows, column):
  """Stores the tile, as many columns at a time as ``chunk`` holds."""
  width = chunk.shape[1]
  for first in range(0, TILE, width):
    value = plgpu.async_load_tmem(sums.at[:, pl.ds(first, width)])
    chunk[...] = value.astype(chunk.dtype)
    plgpu.commit_smem()
    columns = pl.ds(column * TILE + first, width)
    plgpu.copy_smem_to_gmem(chunk, out.at[rows, columns])
    plgpu.wait_smem_to_gmem(0)
  plgpu.wait_load_tmem()


def _scratch(
  stride: int, depth: int, width: int, across: bool, types: tuple[Any, ...]
) -> list[Any]:
  """Operands, tensor memory, barriers and the chunk that is stored.

  Args:
    stride: Columns of the array that holds lhs.
    depth: K.
    width: N.
    across: rhs is [G, K, N], not [G, N, K].
    types: Of lhs, of rhs and of the result.
  """
  lhs, rhs, out = types
  span = min(
    mosaic.swizzle_transforms(lhs, n)[1].swizzle  # pyright: ignore
    for n in (TILE, stride, width if across else depth)
  )
  atom = plgpu.SMEM((1, 1, 4, 128), memory.SCALE)
  columns = plgpu.TMEM(
    (TILE, TILE // mxfp8.BLOCK),
    memory.SCALE,
    layout=plgpu.TMEMLayout.SCALES_LAYOUT,
  )
  return [
    [
      mosaic.swizzled((TILE, TILE), lhs, span),
      mosaic.swizzled((TILE, TILE), rhs, span),
      *(atom, atom),
    ],
    [plgpu.TMEM((TILE, TILE), jnp.float32), columns, columns],
    [
      plgpu.Barrier(num_arrivals=COPIES),
      plgpu.Barrier(orders_tensor_core=True),
    ],
    mosaic.swizzled((TILE, tile_lib.chunk(out)), out, width),
  ]


def simple_matmul(
  lhs: jax.Array | MxArray,
  rhs: jax.Array | MxArray,
  layout: groups.GroupLayout,
  *,
  transpose_rhs: bool = False,
  out_dtype: Any = jnp.bfloat16,
  interpret: Any = False,
) -> jax.Array:
  """As `grouped_matmul.grouped_matmul`, without its schedule.

  Args:
    lhs: [R, K] MxArray with blocks along axis -1; K a multiple of 32.
    rhs: [G, K, N], or [G, N, K] with transpose_rhs: MxArray with blocks along
      K, or 32x32. e4m3 and e5m2 may be mixed.
    layout: Of the rows.
    transpose_rhs: Contract the last axis of rhs.
    out_dtype: bfloat16 or float32.
    interpret: Interpret parameters; False compiles.

  Returns:
    [R, N]. Padding rows inside a group's last 128 hold the product of what lhs
    holds there; rows past the last group are not written.

  Raises:
    NotImplementedError: The kernel does not take this width or dtype.
    ValueError: Shapes or block axes do not belong together.
  """
  grouped_matmul.check(lhs, rhs, layout, transpose_rhs, out_dtype)
  assert isinstance(lhs, MxArray)
  assert isinstance(rhs, MxArray)
  out_dtype, depth = jnp.dtype(out_dtype), lhs.shape[1]
  width = rhs.shape[1 if transpose_rhs else 2]
  a, a_scale = memory.arrays(lhs, -1)
  b, b_scale = memory.arrays(rhs, -1 if transpose_rhs else -2)
  across = not transpose_rhs
  types = (a.dtype, b.dtype, out_dtype)
  call = plgpu.kernel(
    functools.partial(_kernel, steps=-(-depth // TILE), across=across),
    out_type=jax.ShapeDtypeStruct((layout.rows, width), out_dtype),
    scratch_types=_scratch(depth, depth, width, across, types),
    grid=(layout.tiles, -(-width // TILE)),
    grid_names=("row", "column"),
    kernel_name="blackwell_simple_matmul",  # in profiles
    compiler_params=plgpu.CompilerParams(
      lowering_semantics=plgpu.LoweringSemantics.Lane
    ),
    interpret=interpret,
  )
  count = layout.tile_count().reshape(1)
  return call(count, layout.tile_group(), a, b, a_scale, b_scale)


# name, K, N, rhs transposed, type of lhs, of the result.
_VARIANTS: tuple[tuple[str, int, int, bool, Any, Any], ...] = (
  ("forward", 1024, 512, False, mxfp8.E4M3, jnp.bfloat16),
  ("forward float32", 1024, 512, False, mxfp8.E4M3, jnp.float32),
  ("dgrad e5m2", 1024, 512, True, mxfp8.E5M2, jnp.bfloat16),
  ("dgrad float32", 1024, 512, True, mxfp8.E4M3, jnp.float32),
  ("forward swizzle 32", 96, 160, False, mxfp8.E4M3, jnp.bfloat16),
)


def variants(target: str) -> list[mosaic.Variant]:
  """Both orders of rhs and both results; Blackwell only.

  Args:
    target: PTX target, e.g. ``sm_90a``.
  """
  if target != "sm_100a":
    return []
  return [_variant(*one) for one in _VARIANTS]


def _variant(
  name: str, depth: int, width: int, transposed: bool, dtype: Any, out: Any
) -> mosaic.Variant:
  """One entry of `variants`."""

  def function(*operands):
    return simple_matmul(*operands, transpose_rhs=transposed, out_dtype=out)

  shape = 1024, depth, width
  return grouped_matmul.variant(
    "simple_matmul", name, function, shape, transposed, dtype
  )
