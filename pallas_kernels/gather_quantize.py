"""Gather and quantize: bf16 rows by index to MXFP8 rows and columns, one pass.

    y[r] = x[source[r]], zeros where source[r] = -1
    rows = quantize(y, -1)        columns = quantize(y, -2)

Legend: x [n, K] bf16; a tile is 128 rows of y x `columns`.

Schedule. A CTA fills an SM. Its last warpgroup loads, the others quantize:

    loader    wait free[stage] | read 16 indices ahead | a bulk copy per row
    others    wait full[stage] | rows pass | columns pass | fence, free[stage]
              store data and scale atoms by TMA

Copies of rows cannot swizzle, so rows in shared memory are 16 bytes longer than
their data: threads that read one column of different rows, and ldmatrix, then
meet no bank twice. The passes are those of `quantize_kernel`.

Bytes an element: 2 + 2.06, where `permute.gather_quantize`, two kernels, moves
4 more; 1.3 times as fast on an H200. Needs no gather of Blackwell's TMA: one
source for both. No operation of the layer calls it yet.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic, mxfp8, quantize_kernel, stream, tiles

MxArray = mxfp8.MxArray
Direction = quantize_kernel.Direction
Problem = quantize_kernel.Problem

ROWS = tiles.TILE_ROWS
WIDE = 256  # columns: a copy of 512 bytes a row, and two warpgroups
NARROW = 128
PAD = 8  # bf16 numbers: 16 bytes, the unit of bulk copies
GROUP = 16  # rows whose indices are read at once
STAGES = 2
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # asks for a plain bulk copy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cta:
  """The static problem and what its warpgroups share."""

  problem: Problem
  interpret: Any
  ctas: int
  full: Any
  free: Any
  ring: Any

  @property
  def steps(self) -> jax.Array:
    """Tiles of this CTA."""
    _, down, across = self.problem.grid
    ahead = down * across - 1 - lax.axis_index(stream.AXIS)
    return lax.div(ahead, jnp.int32(self.ctas)) + 1

  def position(self, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Row and column of a tile."""
    tile = lax.axis_index(stream.AXIS) + step * self.ctas
    across = jnp.int32(self.problem.grid[2])
    return lax.div(tile, across), lax.rem(tile, across)

  def stage(self, step: jax.Array) -> jax.Array:
    """Its place in the ring."""
    return lax.rem(step, jnp.int32(self.problem.tile.stages))


def load_tiles(cta: Cta, x, index_gmem, zeros) -> None:
  """The loader's loop over tiles."""
  columns, stages = cta.problem.tile.columns, cta.problem.tile.stages

  def indices(first):
    return [index_gmem[first + i] for i in range(GROUP)]

  def load_group(group, ahead, row, window, stage):
    last = ROWS // GROUP - 1
    following = indices(row + jnp.minimum(group + 1, last) * GROUP)
    for i, index in enumerate(ahead):
      target = cta.ring.at[stage, group * GROUP + i, pl.ds(0, columns)]
      copy = functools.partial(
        plgpu.copy_gmem_to_smem,
        barrier=cta.full.at[stage],
        oob_mode=IN_BOUNDS,
      )
      taken = functools.partial(copy, x.at[index, window], target)
      nothing = functools.partial(copy, zeros.at[0], target)
      pl.when(index >= 0)(taken)
      pl.when(index < 0)(nothing)
    return following

  def load_tile(step, _):
    stage, (row, column) = cta.stage(step), cta.position(step)
    free = functools.partial(plgpu.barrier_wait, cta.free.at[stage])
    pl.when(step >= stages)(free)
    load = functools.partial(
      load_group,
      row=row * ROWS,
      window=pl.ds(column * columns, columns),
      stage=stage,
    )
    lax.fori_loop(0, ROWS // GROUP, load, indices(row * ROWS))

  def drain(step, _):
    plgpu.barrier_wait(cta.free.at[cta.stage(step)])

  steps = cta.steps
  lax.fori_loop(0, steps, load_tile, None)
  lax.fori_loop(jnp.maximum(steps - stages, 0), steps, drain, None)


def quantize_tiles(cta: Cta, mine, gmem, smem) -> None:
  """The loop over tiles of a warpgroup that takes part ``mine`` of each."""
  problem, part = cta.problem, cta.problem.tile.part

  def quantize_tile(step, _):
    stage, (row, column) = cta.stage(step), cta.position(step)
    at = (0, row, column * problem.tile.warpgroups + mine)
    outputs = [
      (d, (*gmem[2 * i : 2 * i + 2], *(ref.at[mine] for ref in pair)))
      for i, (d, pair) in enumerate(zip(problem.directions, smem, strict=True))
    ]
    plgpu.barrier_wait(cta.full.at[stage])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    source = cta.ring.at[stage, :, pl.ds(mine * part, part)]
    quantize_kernel.quantize_tile(source, outputs, at, problem, cta.interpret)
    plgpu.commit_smem()
    plgpu.barrier_arrive(cta.free.at[stage])
    quantize_kernel.store_tile(outputs, at, problem)

  lax.fori_loop(0, cta.steps, quantize_tile, None)
  plgpu.wait_smem_to_gmem(0)


def kernel(x, index, zeros, *refs, problem: Problem, ctas: int, interpret: Any):
  """The body: inputs, outputs by direction, then the scratch."""
  count = 2 * len(problem.directions)
  gmem, (full, free, ring, *smem) = refs[:count], refs[count:]
  cta = Cta(
    problem=problem, interpret=interpret, ctas=ctas, full=full, free=free,
    ring=ring,
  )  # fmt: skip
  pairs = list(zip(smem[::2], smem[1::2], strict=True))
  mine, loader = lax.axis_index(stream.WARPGROUP), problem.tile.warpgroups
  pl.when(mine == loader)(lambda: load_tiles(cta, x, index, zeros))
  pl.when(mine < loader)(lambda: quantize_tiles(cta, mine, gmem, pairs))


def _check(x: jax.Array, source: jax.Array) -> None:
  """Refuses what the kernel does not take.

  Raises:
    NotImplementedError: Of another dtype, an odd width or odd rows.
  """
  instead = 'Use permute.gather_quantize, or backend="xla".'
  if x.ndim != 2 or x.dtype != jnp.bfloat16 or 0 in x.shape:
    raise NotImplementedError(
      "gather_quantize kernel: x must be a matrix of bfloat16, not empty; got "
      f"{x.dtype}{list(x.shape)}. {instead}"
    )
  rows = source.shape[0]
  if x.shape[1] % NARROW or rows % ROWS or not rows:
    raise NotImplementedError(
      f"gather_quantize kernel: width and rows of the result must be positive "
      f"multiples of {ROWS} (whole tiles); got {x.shape[1]} and {rows}. "
      f"{instead}"
    )


def _problem(
  rows: int, width: int, layouts: tuple[mxfp8.Layout, mxfp8.Layout],
  transposed: bool, **options: Any,
) -> Problem:
  """The result as the quantize kernel sees it."""
  columns = WIDE if width % WIDE == 0 else NARROW
  return Problem(
    shape=(1, rows, width),
    directions=(
      Direction(axis=-1, layout=layouts[0]),
      Direction(axis=-2, layout=layouts[1], transposed=transposed),
    ),
    square=False,
    masked=False,
    tile=tiles.StreamTile(
      columns=columns, stages=STAGES, ctas_per_sm=1,
      warpgroups=columns // NARROW,
    ),
    **options,
  )  # fmt: skip


def gather_quantize(
  x: jax.Array,
  source: jax.Array,
  *,
  rounding: mxfp8.Rounding = "rceil",
  dtype: Any = mxfp8.E4M3,
  layouts: tuple[mxfp8.Layout, mxfp8.Layout] = ("blocked", "blocked"),
  transposed: bool = False,
  interpret: Any = False,
) -> tuple[MxArray, MxArray]:
  """Rows of x by index, quantized along rows and along columns.

  Args:
    x: [n, K] bf16, K a multiple of 128.
    source: [rows] int32 in -1..n-1, rows a multiple of 128; -1 gives zeros.
    rounding: One of `mxfp8.RULES`.
    dtype: float8_e4m3fn or float8_e5m2.
    layouts: Scale layouts of the rows and of the columns.
    transposed: Return the columns of y^T, contiguous along the rows.
    interpret: Interpret parameters; False compiles.

  Returns:
    The 1x32 rows and the 32x1 columns, equal to `reference.quantize` of the
    rows to the bit.

  Raises:
    NotImplementedError: The kernel does not take this shape or dtype.
  """
  _check(x, source)
  rows, width = source.shape[0], x.shape[1]
  problem = _problem(
    rows, width, layouts, transposed, rounding=rounding, dtype=dtype
  )
  tile = problem.tile
  _, down, across = problem.grid
  ctas = stream.cta_count(down * across, 1, interpret)
  ring = (tile.stages, ROWS, tile.columns + PAD)
  scratch = [
    plgpu.Barrier(num_arrivals=ROWS, num_barriers=tile.stages),
    plgpu.Barrier(num_arrivals=tile.warpgroups, num_barriers=tile.stages),
    plgpu.SMEM(ring, x.dtype),
    *problem.scratch(x.dtype)[3:],
  ]
  call = plgpu.kernel(
    functools.partial(kernel, problem=problem, ctas=ctas, interpret=interpret),
    out_type=problem.outputs(),
    scratch_types=scratch,
    **stream.launch(ctas, tile.warpgroups + 1),
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )
  out = [y[0] for y in call(x, source, jnp.zeros((1, tile.columns), x.dtype))]
  made = []
  for i, d in enumerate(problem.directions):
    axis = -1 if d.transposed else d.axis
    made.append(MxArray(*out[2 * i : 2 * i + 2], axis=axis, layout=d.layout))
  return made[0], made[1]


def variants(target: str) -> list[mosaic.Variant]:
  """Both tiles, the columns as they are and transposed."""
  del target
  rows, shape = 1024, jax.ShapeDtypeStruct

  def variant(name, width, **options):
    return mosaic.Variant(
      kernel="gather_quantize",
      variant=f"{name} {width}",
      function=functools.partial(gather_quantize, **options),
      arguments=(
        shape((512, width), jnp.bfloat16), shape((rows,), jnp.int32)
      ),
      promises=("bulk_copy", "bulk_tensor_store", "cast_to_fp8"),
    )  # fmt: skip

  return [
    variant("blocked", 7168),
    variant("linear", 2048, layouts=("linear", "linear")),
    variant("transposed e5m2", 1408, transposed=True, dtype=mxfp8.E5M2),
  ]
