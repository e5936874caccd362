"""What one call of Blackwell's grouped wgrad computes."""

import dataclasses
from typing import Any

import jax

from pallas_kernels.blackwell import memory
from pallas_kernels.blackwell import tile as tile_lib


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
  tile: tile_lib.MatmulTile

  def __post_init__(self):
    self.tile.check_chunks(self.out_dtype)

  @property
  def grid(self) -> tuple[int, int]:
    """Tiles of a group along K and along N."""
    return -(-self.depth // self.tile.lhs), -(-self.width // self.tile.rhs)

  @property
  def tiles(self) -> int:
    """Tiles of all groups."""
    return self.groups * self.grid[0] * self.grid[1]

  @property
  def across(self) -> tuple[bool, bool]:
    """Whether lhs, and rhs, is contiguous across the rows: unless copied."""
    return not self.tile.transposed, not self.tile.transposed

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
    widths = () if self.tile.transposed else (self.depth, self.width)
    return memory.slots(self.tile, self.dtypes, self.across, widths)

  def out_type(self) -> jax.ShapeDtypeStruct:
    """[G, K, N]."""
    shape = (self.groups, self.depth, self.width)
    return jax.ShapeDtypeStruct(shape, self.out_dtype)
