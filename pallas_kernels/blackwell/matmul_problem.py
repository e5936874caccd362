"""What one call of Blackwell's grouped matmul computes, and its memory."""

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import groups, mosaic
from pallas_kernels.blackwell import wgrad_problem, wgrad_tile

DEPTH, LANES = wgrad_tile.DEPTH, wgrad_tile.LANES
SCALE = wgrad_problem.SCALE


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of the kernel computes; static.

  Attributes:
    groups: G.
    rows: R.
    depth: K, contracted.
    stride: Columns of the array that holds lhs, at least K.
    width: N, columns of the result.
    across: rhs is [G, K, N], contiguous along N (MN-major), not [G, N, K].
    dtypes: Of the elements of lhs and of rhs.
    out_dtype: float32 or bf16.
    tile: The schedule.
  """

  groups: int
  rows: int
  depth: int
  stride: int
  width: int
  across: bool
  dtypes: tuple[Any, Any]
  out_dtype: Any
  tile: wgrad_tile.WgradTile

  def __post_init__(self):
    if self.chunks % self.tile.buffers:
      raise ValueError(
        f"MatmulTile: {self.tile.name} stores {self.chunks} chunks of "
        f"{self.chunk} columns, no multiple of its {self.tile.buffers} buffers."
      )

  @property
  def accumulate(self) -> bool:
    """Whether the result is added to an array: never."""
    return False

  @property
  def steps(self) -> int:
    """Steps of a tile, 128 of K each; the last may reach past K."""
    return -(-self.depth // DEPTH)

  @property
  def across_tiles(self) -> int:
    """Tiles along N."""
    return -(-self.width // self.tile.rhs)

  @property
  def down_tiles(self) -> int:
    """Tiles along the rows, at most."""
    blocks = self.rows // LANES
    if self.tile.ctas == 1:
      return blocks
    return min(blocks, blocks // self.tile.ctas + self.groups)

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
    part = tile.rhs // tile.ctas
    rhs_widths = (part, self.width) if self.across else (self.depth,)
    widths = DEPTH, self.stride, *rhs_widths
    span = min(
      mosaic.swizzle_transforms(self.dtypes[0], width)[1].swizzle  # pyright: ignore
      for width in widths
    )
    shapes = (LANES, DEPTH), (DEPTH, part) if self.across else (part, DEPTH)
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
    return wgrad_problem.tensor_memory(self.tile)

  def barriers(self, axis: str) -> list[Any]:
    """full, empty, done and free; ``axis`` is the cluster axis of a pair."""
    return wgrad_problem.barriers(self.tile, axis)[:4]

  def chunk_buffers(self) -> Any:
    """[buffers, 128, columns of a chunk]."""
    shape = (self.tile.buffers, LANES, self.chunk)
    return mosaic.swizzled(shape, self.out_dtype, self.width)

  def out_type(self) -> jax.ShapeDtypeStruct:
    """[R, N]."""
    return jax.ShapeDtypeStruct((self.rows, self.width), self.out_dtype)


def schedule(
  layout: groups.GroupLayout, problem: Problem
) -> tuple[jax.Array, jax.Array]:
  """Which rows each tile has: computed on the device, in plain jnp.

  A tile starts at any 128 rows of a group and never holds rows of two groups:
  where a group has an odd number of 128s, its last pair works half in vain.

  Returns:
    [3, tiles] int32: group, first 128 rows, how many 128s of the group are in
    the tile (1 or 2); tiles in use come first.
    [1] int32: tiles in use.
  """
  ctas = problem.tile.ctas
  blocks = -(-layout.sizes // groups.ROW_ALIGN)
  tiles = -(-blocks // ctas)
  ends = jnp.cumsum(tiles, dtype=jnp.int32)
  index = jnp.arange(problem.down_tiles, dtype=jnp.int32)
  group = jnp.searchsorted(ends, index, side="right", method="compare_all")
  group = jnp.minimum(group, layout.groups - 1).astype(jnp.int32)
  inside = (index - (ends - tiles)[group]) * ctas
  first = layout.starts[group] // groups.ROW_ALIGN + inside
  valid = jnp.clip(blocks[group] - inside, 1, ctas)
  table = jnp.stack([group, first, valid]).astype(jnp.int32)
  return table, ends[-1:]
