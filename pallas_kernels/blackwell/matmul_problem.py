"""What one call of Blackwell's grouped matmul computes, and in which order."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import groups
from pallas_kernels.blackwell import memory
from pallas_kernels.blackwell import tile as tile_lib

DEPTH, LANES = tile_lib.DEPTH, tile_lib.LANES


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of the kernel computes; static.

  Attributes:
    groups: G.
    rows: R.
    depth: K, contracted.
    stride: Columns of the array that holds lhs, at least K.
    width: N, columns of the result.
    turned: rhs is [G, N, K], contiguous along K, not [G, K, N] (MN-major).
    dtypes: Of the elements of lhs and of rhs.
    out_dtype: float32 or bf16.
    tile: The schedule.
  """

  groups: int
  rows: int
  depth: int
  stride: int
  width: int
  turned: bool
  dtypes: tuple[Any, Any]
  out_dtype: Any
  tile: tile_lib.MatmulTile

  def __post_init__(self):
    self.tile.check_chunks(self.out_dtype)

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
  def across(self) -> tuple[bool, bool]:
    """Whether lhs, and rhs, is contiguous across K."""
    return False, not self.turned

  @property
  def chunk(self) -> int:
    """Columns that the epilogue stores at a time."""
    return tile_lib.chunk(self.out_dtype)

  @property
  def chunks(self) -> int:
    """Chunks of a tile."""
    return self.tile.rhs // self.chunk

  def operands(self) -> list[Any]:
    """Slots of lhs, rhs and their scales."""
    widths = self.stride, self.depth if self.turned else self.width
    return memory.slots(self.tile, self.dtypes, self.across, widths)

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
