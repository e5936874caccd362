"""Tile choices of Hopper's matmul kernels: what is legal, and the defaults."""

import dataclasses

from pallas_kernels import tiles

SMEM_BYTES = 232448  # shared memory that one CTA may use, CUDA guide 16.8
BARRIER_BYTES = 1024  # barriers, generously
ROWS = tiles.TILE_ROWS
STEP_BYTES = 128  # of a row of an operand in one step: one swizzled tile
SLAB = 64  # columns that the epilogue stores at a time
MAX_STAGES = 8  # more hides no more latency
COLUMNS = (256, 192, 128, 64)  # tile widths, the fastest first
# Speed of a tile width relative to 256, measured for none but used to weigh the
# columns that the last tile of a row wastes.
SPEED = {256: 1.0, 192: 0.95, 128: 0.85, 64: 0.5}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatmulTile:
  """The schedule of a grouped matmul with tiles of 128 rows.

  Attributes:
    columns: Columns of an output tile.
    stages: Steps that the ring holds, loads in flight included.
    buffers: Slabs of 64 columns whose stores may be in flight.
    band: Tiles of a band: within it neighbours in time share operands in L2.
    along: Axis that a band lies across: 1 walks all rows for a few columns, 0
      walks all columns for a few rows.
  """

  columns: int = 256
  stages: int = 4
  buffers: int = 2
  band: int = 8
  along: int = 0

  def __post_init__(self):
    if self.columns not in COLUMNS:
      raise ValueError(
        f"MatmulTile: columns must be one of {COLUMNS}; got {self.columns}."
      )
    if self.stages < 2 or self.buffers < 1 or self.band < 1:
      raise ValueError(
        "MatmulTile: needs at least 2 stages, 1 buffer and a band of 1; got "
        f"stages={self.stages}, buffers={self.buffers}, band={self.band}."
      )
    if self.along not in (0, 1):
      raise ValueError(f"MatmulTile: along must be 0 or 1; got {self.along}.")

  @property
  def name(self) -> str:
    """A short name, e.g. ``128x256 s4 b2 n8/1``."""
    return (
      f"{ROWS}x{self.columns} s{self.stages} b{self.buffers} "
      f"n{self.band}/{self.along}"
    )


def matmul_tile(width: int, out_bytes: int, way: str) -> MatmulTile:
  """The default tile.

  Args:
    width: Columns of the result, N.
    out_bytes: Bytes of one element of it.
    way: One of `matmul_kernel.WAYS`; "converted" has an lhs of half the size.
  """

  def waste(columns: int) -> float:
    return -(-width // columns) * columns / SPEED[columns]

  columns = min(COLUMNS, key=waste)
  buffers = 2 if out_bytes == 2 and way != "converted" else 1
  slabs = buffers * ROWS * SLAB * out_bytes
  room = SMEM_BYTES - BARRIER_BYTES - slabs
  rows = ROWS // 2 if way == "converted" else ROWS
  step = (rows + columns) * STEP_BYTES
  if way == "converted":
    step += 2 * ROWS  # scale bytes
  return MatmulTile(
    columns=columns, stages=min(room // step, MAX_STAGES), buffers=buffers
  )
