"""What Blackwell's grouped matmul and wgrad share: refs, scratch and launch.

A CTA, or the leader of a pair, runs three roles, a warp, a warp and a
warpgroup (`roles`):

    load      global memory -> slots of lhs, rhs and their scales
    multiply  slots -> accumulators in tensor memory
    store     accumulators -> chunks of columns -> global memory
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Protocol

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic, mxfp8
from pallas_kernels.blackwell import tile as tile_lib

DEPTH, LANES = tile_lib.DEPTH, tile_lib.LANES
SCALE = jnp.float8_e8m0fnu
PAIR = "cta"  # the cluster axis
CLUSTERS = "cluster"  # the grid axis
WARPGROUP = "warpgroup"  # the thread axis
LOAD, MULTIPLY = 0, 1  # warps of warpgroup 0
STORE = 1  # a warpgroup


class Problem(Protocol):
  """What the roles ask of `matmul_problem.Problem` and `wgrad_problem`'s."""

  @property
  def tile(self) -> tile_lib.MatmulTile:
    """The schedule."""
    ...

  @property
  def width(self) -> int:
    """N, columns of the result."""
    ...

  @property
  def out_dtype(self) -> Any:
    """float32 or bf16."""
    ...

  @property
  def accumulate(self) -> bool:
    """Adds to what an array holds."""
    ...

  @property
  def across(self) -> tuple[bool, bool]:
    """Whether lhs, and rhs, is contiguous across what is contracted."""
    ...

  @property
  def chunk(self) -> int:
    """Columns that the epilogue stores at a time."""
    ...

  @property
  def chunks(self) -> int:
    """Chunks of a tile."""
    ...

  def operands(self) -> list[Any]:
    """Slots of lhs, rhs and their scales, see `slots`."""
    ...

  def out_type(self) -> jax.ShapeDtypeStruct:
    """The result."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
  """The refs of a CTA.

  Attributes:
    schedule: What says which tiles there are, in global memory.
    sources: lhs, rhs, scales of lhs, scales of rhs, in global memory.
    accumulate: What is added to, float32 like ``out``, or None.
    out: The result.
    slots: As ``sources``, in shared memory, a slot first.
    chunks: [buffers, 128, columns of a chunk] of the result.
    sums: Accumulators in tensor memory.
    scales: Scales of lhs and of rhs in tensor memory, see
      `roles.scale_columns`.
    full: Barriers of loaded slots.
    empty: Barriers of slots that were multiplied.
    done: Barriers of finished accumulators.
    free: Barriers of accumulators that were read.
    loaded: Barriers of chunks of ``accumulate``, or None.
  """

  schedule: Any
  sources: tuple[Any, ...]
  accumulate: Any
  out: Any
  slots: tuple[Any, ...]
  chunks: Any
  sums: Any
  scales: tuple[Any, Any]
  full: Any
  empty: Any
  done: Any
  free: Any
  loaded: Any


def take(schedule: Any, refs: list[Any], problem: Problem) -> Memory:
  """The refs of a kernel, in the order of `call`."""
  sources, refs = refs[:4], refs[4:]
  accumulate = refs.pop(0) if problem.accumulate else None
  out, slots, chunks, (sums, *scales), barriers = refs
  full, empty, done, free, *loaded = barriers
  return Memory(
    schedule=schedule,
    sources=tuple(sources),
    accumulate=accumulate,
    out=out,
    slots=tuple(slots),
    chunks=chunks,
    sums=sums,
    scales=tuple(scales),
    full=full,
    empty=empty,
    done=done,
    free=free,
    loaded=loaded[0] if loaded else None,
  )


def slots(
  tile: tile_lib.MatmulTile,
  dtypes: tuple[Any, Any],
  across: tuple[bool, bool],
  widths: tuple[int, ...],
) -> list[Any]:
  """Slots of lhs, rhs and their scales in shared memory.

  The tensor core wants both operands swizzled alike, and TMA tiles that divide
  the rows of the array: the narrower one decides.

  Args:
    tile: The schedule.
    dtypes: Of the elements of lhs and of rhs.
    across: As in `Problem`.
    widths: Row lengths of the arrays.
  """
  sizes = LANES, tile.rhs // tile.ctas
  shapes = [
    (DEPTH, n) if turned else (n, DEPTH)
    for n, turned in zip(sizes, across, strict=True)
  ]
  span = min(
    mosaic.swizzle_transforms(dtypes[0], width)[1].swizzle  # pyright: ignore
    for width in (*(inner for _, inner in shapes), *widths)
  )
  data = [
    mosaic.swizzled((tile.stages, *shape), dtype, span)
    for shape, dtype in zip(shapes, dtypes, strict=True)
  ]
  scales = [
    plgpu.SMEM((tile.stages, atoms, 1, 4, 128), SCALE)
    for atoms in (1, tile.rhs // 128)
  ]
  return data + scales


def chunk_buffers(problem: Problem) -> Any:
  """[buffers, 128, columns of a chunk]."""
  shape = (problem.tile.buffers, LANES, problem.chunk)
  return mosaic.swizzled(shape, problem.out_dtype, problem.width)


def tensor_memory(tile: tile_lib.MatmulTile) -> list[Any]:
  """The sums, and the columns of scales of lhs and rhs."""
  pair = tile.ctas > 1

  def scales(rows, columns):
    return plgpu.TMEM(
      (rows, columns),
      SCALE,
      layout=plgpu.TMEMLayout.SCALES_LAYOUT,
      collective=pair,
    )

  of_128 = scales(128, 4 * tile.stages)
  of_rhs = [scales(256, 4) for _ in range(tile.stages)]
  sums = (LANES, tile.accumulator_columns)
  return [
    plgpu.TMEM(sums, jnp.float32, collective=pair),
    of_128,
    of_128 if tile.rhs == 128 else of_rhs,
  ]


def barriers(problem: Problem) -> list[Any]:
  """full, empty, done, free and, to add to an array, loaded."""
  tile = problem.tile
  kept: dict[str, Any] = dict(
    num_barriers=tile.accumulators, orders_tensor_core=True
  )
  if tile.ctas > 1:
    free = plgpu.ClusterBarrier(collective_axes=(PAIR,), **kept)
  else:
    free = plgpu.Barrier(**kept)
  made = [
    plgpu.Barrier(num_arrivals=4, num_barriers=tile.stages),
    plgpu.Barrier(num_barriers=tile.stages, orders_tensor_core=True),
    plgpu.Barrier(**kept),
    free,
  ]
  if problem.accumulate:
    made.append(plgpu.Barrier(num_barriers=tile.buffers))
  return made


def run_roles(
  load: Callable[[], None],
  multiply: Callable[[], None],
  store: Callable[[], None],
) -> None:
  """Runs each role where it belongs: ``multiply`` in the leader alone."""
  warpgroup, member = lax.axis_index(WARPGROUP), lax.axis_index(PAIR)

  def warps(warp):
    pl.when(warp == LOAD)(load)
    pl.when((warp == MULTIPLY) & (member == 0))(multiply)

  pl.when(warpgroup == 0)(lambda: plgpu.warp_map(warps))
  pl.when(warpgroup == STORE)(store)


def resident(ctas: int, interpret: Any) -> int:
  """Clusters of ``ctas`` that work at a time; one when interpreted."""
  return 1 if interpret else mosaic.sm_count() // ctas


def call(
  body: Callable[..., None],
  problem: Problem,
  tiles: int,
  name: str,
  interpret: Any,
) -> Callable[..., jax.Array]:
  """The kernel, as a function of what its ``body`` reads.

  Args:
    body: Of a CTA: refs of the arguments, the result, the scratch.
    problem: What is computed.
    tiles: Tiles of the result, at most.
    name: In profiles.
    interpret: Interpret parameters; False compiles.
  """
  ctas = problem.tile.ctas
  return plgpu.kernel(
    functools.partial(body, problem=problem),
    out_type=problem.out_type(),
    scratch_types=[
      problem.operands(),
      chunk_buffers(problem),
      tensor_memory(problem.tile),
      barriers(problem),
    ],
    grid=(min(tiles, resident(ctas, interpret)),),
    grid_names=(CLUSTERS,),
    cluster=(ctas,),
    cluster_names=(PAIR,),
    num_threads=2,
    thread_name=WARPGROUP,
    kernel_name=name,
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )


def arrays(x: mxfp8.MxArray, axis: int) -> tuple[jax.Array, jax.Array]:
  """Data, and atoms of scales [..., outer/128, blocks/4, 4, 128] e8m0.

  Args:
    x: Operand.
    axis: That is contracted.
  """
  atoms = x.along(axis).with_layout("blocked").scale
  atoms = lax.bitcast_convert_type(atoms, SCALE)
  return x.data, atoms.reshape(*atoms.shape[:-1], 4, 128)
