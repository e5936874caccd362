"""Tile choices of Hopper's matmul kernels: what is legal, and the defaults."""

import dataclasses

from pallas_kernels import tiles

SMEM_BYTES = 232448  # shared memory that one CTA may use, CUDA guide 16.8
BARRIER_BYTES = 1024  # barriers, generously
ROWS = tiles.TILE_ROWS
STEP_BYTES = 128  # of a row of rhs in one step: one swizzled tile
SLABS = (64, 32)  # widths of what the epilogue stores at a time
MAX_STAGES = 8  # more hides no more latency
# Speed of a tile's columns relative to 256, measured on an H200 at N of 2880
# and 1536; 64 is a guess. Converting lhs takes as long at any width, so narrow
# tiles cost it more.
SPEED = {256: 1.0, 192: 0.96, 128: 0.84, 64: 0.5}
CONVERTED_SPEED = {256: 1.0, 192: 0.87, 128: 0.7, 64: 0.4}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatmulTile:
  """The schedule of a grouped matmul with tiles of 128 rows.

  Attributes:
    columns: Columns of an output tile.
    stages: Steps that the ring holds, loads in flight included.
    slab: Columns that the epilogue stores at a time.
    buffers: Slabs of each consumer whose stores may be in flight; divides the
      slabs of a tile.
    band: Tiles of a band: within it neighbours in time share operands in L2.
    along: Axis that a band lies across: 1 walks all rows for a few columns, 0
      walks all columns for a few rows.
  """

  columns: int = 256
  stages: int = 4
  slab: int = 64
  buffers: int = 2
  band: int = 8
  along: int = 0

  def __post_init__(self):
    if self.columns not in SPEED or self.slab not in SLABS:
      raise ValueError(
        f"MatmulTile: columns must be one of {tuple(SPEED)} and slab one of "
        f"{SLABS}; got {self.columns} and {self.slab}."
      )
    if self.buffers < 1 or self.columns // self.slab % self.buffers:
      raise ValueError(
        "MatmulTile: buffers must divide the slabs of a tile, "
        f"{self.columns // self.slab}; got {self.buffers}."
      )
    if self.stages < 2 or self.band < 1:
      raise ValueError(
        "MatmulTile: needs at least 2 stages and a band of 1; got "
        f"stages={self.stages}, band={self.band}."
      )
    if self.along not in (0, 1):
      raise ValueError(f"MatmulTile: along must be 0 or 1; got {self.along}.")

  @property
  def name(self) -> str:
    """A short name, e.g. ``128x256 s4 b2x64 n8/0``."""
    return (
      f"{ROWS}x{self.columns} s{self.stages} b{self.buffers}x{self.slab} "
      f"n{self.band}/{self.along}"
    )


def matmul_tile(width: int, out_bytes: int, way: str) -> MatmulTile:
  """The default tile.

  Slabs are 128 bytes wide: narrower ones were slower on an H200. Converting lhs
  gained more from a fifth stage than from a second slab, and from wide bands.

  Args:
    width: Columns of the result, N.
    out_bytes: Bytes of one element of it.
    way: One of `matmul_kernel.WAYS`; "converted" has an lhs of half the size.
  """
  converted = way == "converted"
  speed = CONVERTED_SPEED if converted else SPEED

  def cost(columns: int) -> float:
    return -(-width // columns) * columns / speed[columns]

  columns = min(speed, key=cost)
  slab = 128 // out_bytes
  slabs = columns // slab
  buffers = 1 if converted else next(n for n in (2, 3, 1) if slabs % n == 0)
  room = SMEM_BYTES - BARRIER_BYTES - buffers * ROWS * slab * out_bytes
  rows = ROWS // 2 if converted else ROWS
  step = (rows + columns) * STEP_BYTES + (2 * ROWS if converted else 0)
  return MatmulTile(
    columns=columns,
    stages=min(room // step, MAX_STAGES),
    slab=slab,
    buffers=buffers,
    band=16 if converted else 8,
    along=1 if converted else 0,
  )
