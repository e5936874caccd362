"""What one call of Blackwell's grouped wgrad computes, and its memory."""

import dataclasses
from typing import Any, Protocol

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import mosaic
from pallas_kernels.blackwell import wgrad_tile

DEPTH, LANES = wgrad_tile.DEPTH, wgrad_tile.LANES
SCALE = jnp.float8_e8m0fnu


class Tiled(Protocol):
  """What the roles that matmuls share ask of a problem; see `Problem`."""

  @property
  def tile(self) -> wgrad_tile.WgradTile:
    """The schedule."""
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
  def chunk(self) -> int:
    """Columns that the epilogue stores at a time."""
    ...

  @property
  def chunks(self) -> int:
    """Chunks of a tile."""
    ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of the kernel computes; static.

  Attributes:
    groups: G.
    rows: R.
    depth: K, columns of lhs.
    width: N, columns of rhs.
    dtypes: Of the elements of lhs and of rhs.
    out_dtype: float32 or bf16.
    accumulate: Adds to what an array holds.
    tile: The schedule.
  """

  groups: int
  rows: int
  depth: int
  width: int
  dtypes: tuple[Any, Any]
  out_dtype: Any
  accumulate: bool
  tile: wgrad_tile.WgradTile

  def __post_init__(self):
    if self.chunks % self.tile.buffers:
      raise ValueError(
        f"WgradTile: {self.tile.name} stores {self.chunks} chunks of "
        f"{self.chunk} columns, no multiple of its {self.tile.buffers} buffers."
      )

  @property
  def grid(self) -> tuple[int, int]:
    """Tiles of a group along K and along N."""
    return -(-self.depth // self.tile.lhs), -(-self.width // self.tile.rhs)

  @property
  def tiles(self) -> int:
    """Tiles of all groups."""
    return self.groups * self.grid[0] * self.grid[1]

  @property
  def chunk(self) -> int:
    """Columns that the epilogue stores at a time."""
    return wgrad_tile.chunk(self.out_dtype)

  @property
  def chunks(self) -> int:
    """Chunks of a tile."""
    return self.tile.rhs // self.chunk

  def operands(self) -> list[Any]:
    """Slots of lhs, rhs and their scales in shared memory.

    The tensor core wants both operands swizzled alike, and TMA tiles that
    divide the rows of the array: the narrower one decides.
    """
    tile = self.tile
    sizes = LANES, tile.rhs // tile.ctas
    widths = (DEPTH,) if tile.transposed else (*sizes, self.depth, self.width)
    span = min(
      mosaic.swizzle_transforms(self.dtypes[0], width)[1].swizzle  # pyright: ignore
      for width in widths
    )
    shapes = [(n, DEPTH) if tile.transposed else (DEPTH, n) for n in sizes]
    data = [
      mosaic.swizzled((tile.stages, *shape), dtype, span)
      for shape, dtype in zip(shapes, self.dtypes, strict=True)
    ]
    scales = [
      plgpu.SMEM((tile.stages, atoms, 1, 4, 128), SCALE)
      for atoms in (1, tile.rhs // 128)
    ]
    return data + scales

  def tensor_memory(self) -> list[Any]:
    """The sums, and the columns of scales of lhs and rhs."""
    return tensor_memory(self.tile)

  def barriers(self, axis: str) -> list[Any]:
    """full, empty, done, free and loaded; ``axis``: the cluster axis."""
    return barriers(self.tile, axis)

  def chunk_buffers(self) -> Any:
    """[buffers, 128, columns of a chunk]."""
    shape = (self.tile.buffers, LANES, self.chunk)
    return mosaic.swizzled(shape, self.out_dtype, self.width)

  def out_type(self) -> jax.ShapeDtypeStruct:
    """[G, K, N]."""
    shape = (self.groups, self.depth, self.width)
    return jax.ShapeDtypeStruct(shape, self.out_dtype)


def tensor_memory(tile: wgrad_tile.WgradTile) -> list[Any]:
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


def barriers(tile: wgrad_tile.WgradTile, axis: str) -> list[Any]:
  """full, empty, done, free and loaded; ``axis`` is the cluster axis."""
  kept: dict[str, Any] = dict(
    num_barriers=tile.accumulators, orders_tensor_core=True
  )
  if tile.ctas > 1:
    free = plgpu.ClusterBarrier(collective_axes=(axis,), **kept)
  else:
    free = plgpu.Barrier(**kept)
  return [
    plgpu.Barrier(num_arrivals=4, num_barriers=tile.stages),
    plgpu.Barrier(num_barriers=tile.stages, orders_tensor_core=True),
    plgpu.Barrier(**kept),
    free,
    plgpu.Barrier(num_barriers=tile.buffers),
  ]
