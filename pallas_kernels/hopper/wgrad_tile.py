"""Tile choices of Hopper's grouped wgrad: what is legal, and what is fast."""

from collections.abc import Mapping
import dataclasses

STEP_BYTES = 128  # of a column in a step: 64 rows of bf16, 128 of fp8
UNIT = 64  # columns: rows of one wgmma, and a swizzled tile of bf16
MAX_COLUMNS = 256  # columns of one wgmma
CONSUMERS = 2  # warpgroups that multiply
# float32 sums that a thread can hold beside what it computes with.
MAX_SUMS = 192
THREADS = 128  # of a warpgroup
SMEM_BYTES = 232448  # shared memory that one CTA may use, CUDA guide 16.8
BARRIER_BYTES = 1024  # barriers, generously
SLAB_BYTES = 128  # bytes of each of the 64 rows of a slab of the epilogue


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WgradTile:
  """The schedule of a grouped wgrad.

  Attributes:
    lhs: Columns of lhs of a tile, rows of its result; a multiple of 64, of 128
      if the consumers share it.
    rhs: Columns of rhs of a tile; a multiple of 64, at most 256.
    stages: Steps that the ring holds, loads in flight included.
    alternate: The two consumers take tiles in turn, so that one multiplies
      while the other stores; otherwise they share each tile by halves of lhs.
    buffers: Slabs, 64 rows of 128 bytes, of a consumer whose stores may be in
      flight.
    band: Tiles along rhs of a band: neighbours in time share operands in L2.
  """

  lhs: int = 192
  rhs: int = 128
  stages: int = 4
  alternate: bool = True
  buffers: int = 4
  band: int = 8

  def __post_init__(self):
    unit = UNIT if self.alternate else UNIT * CONSUMERS
    if self.lhs <= 0 or self.lhs % unit:
      raise ValueError(
        f"WgradTile: lhs must be a positive multiple of {unit}; got {self.lhs}."
      )
    if self.rhs not in range(UNIT, MAX_COLUMNS + 1, UNIT):
      raise ValueError(
        f"WgradTile: rhs must be a multiple of {UNIT} up to {MAX_COLUMNS}; got "
        f"{self.rhs}."
      )
    if self.stages < 2 or self.buffers < 1 or self.band < 1:
      raise ValueError(
        "WgradTile: needs at least 2 stages, 1 buffer and a band of 1; got "
        f"stages={self.stages}, buffers={self.buffers}, band={self.band}."
      )
    if self.part * self.rhs > MAX_SUMS * THREADS:
      raise ValueError(
        f"WgradTile: a consumer holds {self.part} x {self.rhs} sums, more than "
        f"the {MAX_SUMS} of a thread that fit its registers."
      )
    if self.smem_bytes > SMEM_BYTES:
      raise ValueError(
        f"WgradTile: {self.name} needs {self.smem_bytes} bytes of shared memory"
        f", more than {SMEM_BYTES}; take fewer stages or buffers."
      )

  @property
  def part(self) -> int:
    """Columns of lhs of one consumer."""
    return self.lhs if self.alternate else self.lhs // CONSUMERS

  @property
  def smem_bytes(self) -> int:
    """Shared memory that the schedule needs."""
    ring = self.stages * STEP_BYTES * (self.lhs + self.rhs)
    slabs = CONSUMERS * self.buffers * UNIT * SLAB_BYTES
    return ring + slabs + BARRIER_BYTES

  @property
  def name(self) -> str:
    """A short name, e.g. ``192x128 s4 b4 n8 turns``."""
    how = "turns" if self.alternate else "halves"
    return (
      f"{self.lhs}x{self.rhs} s{self.stages} b{self.buffers} n{self.band} {how}"
    )


# Measured on an H200 at (rows, G, K, N) = (32768, 8, 5120, 8192) and
# (32768, 32, 7168, 2048): tiles in turn are 3 to 16 % faster than halves of
# 128x256, because the store of one tile hides behind the next one's multiply.
# Which of the two is faster depends on the operands; with its relative speed.
TALL = WgradTile()
WIDE = WgradTile(lhs=128, rhs=192)
BF16 = {TALL: 1.0, WIDE: 0.97}
FOLDED = {TALL: 0.95, WIDE: 1.0}
# Scales and sums to add to need registers that tiles in turn do not leave.
ROOMY = WgradTile(lhs=128, rhs=256, buffers=2, alternate=False)


def least_work(
  depth: int, width: int, speeds: Mapping[WgradTile, float]
) -> WgradTile:
  """The tile that covers the result in the least time.

  Args:
    depth: K.
    width: N.
    speeds: Tiles to choose from, with their relative speeds.
  """

  def work(tile: WgradTile) -> float:
    down, across = -(-depth // tile.lhs), -(-width // tile.rhs)
    return down * tile.lhs * across * tile.rhs / speeds[tile]

  return min(speeds, key=work)
