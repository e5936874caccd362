"""Tile choices of the kernels: what is legal, and the defaults.

One frozen dataclass for each kernel. The compile check compiles every choice
that a kernel module lists, so a default cannot spill or overflow unnoticed.
"""

import dataclasses

TILE_ROWS = 128  # rows of a tile: one atom of blocked scales, one aligned group


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamTile:
  """The schedule of a memory-bound kernel that streams tiles of 128 rows.

  Attributes:
    columns: Columns of a tile, a multiple of 128.
    stages: Tiles of the input that a CTA holds, loads in flight included.
    ctas_per_sm: CTAs that share an SM; the grid is this times the SMs.
  """

  columns: int = 128
  stages: int = 2
  ctas_per_sm: int = 2

  def __post_init__(self):
    if self.columns % 128 or self.columns <= 0:
      raise ValueError(
        "StreamTile: columns must be a positive multiple of 128 (one atom of "
        f"blocked scales); got {self.columns}."
      )
    if self.stages < 1 or self.ctas_per_sm < 1:
      raise ValueError(
        "StreamTile: stages and ctas_per_sm must be at least 1; got "
        f"{self.stages} and {self.ctas_per_sm}."
      )

  @property
  def name(self) -> str:
    """A short name, e.g. ``128x256 s2 c2``."""
    return f"{TILE_ROWS}x{self.columns} s{self.stages} c{self.ctas_per_sm}"
