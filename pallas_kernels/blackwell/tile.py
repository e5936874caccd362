"""Tile choices of Blackwell's grouped matmul and wgrad: what is legal.

    256 x 256   two CTAs; the accumulators overlap by 64 columns   the default
    256 x 256   two CTAs, one accumulator                          the fallback
    256 x 128   two CTAs, two accumulators                         narrow rhs
    128 x 128   one CTA, two accumulators                          both narrow

Two accumulators of 256 columns and the scales do not fit the 512 columns of
tensor memory, so that they share some, which are read first. The fallback does
without: no multiply of a tile overlaps the store of the one before. A width of
192 would fit twice, but atoms of scales come in 128 columns, and the tensor
core's address of half an atom cannot be written in Pallas.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp

DEPTH = 128  # rows of a step: one atom of blocked scales, four MMAs
LANES = 128  # columns of lhs of one CTA: lanes of tensor memory
ATOM_BYTES = 512  # scales of 128 columns of one operand and 128 rows
TMEM_COLUMNS = 512  # 32-bit columns of tensor memory, PTX ISA tcgen05
TMEM_UNIT = 8  # columns that Pallas rounds an allocation up to
SMEM_BYTES = 232448  # shared memory that one CTA may use, CUDA guide
BARRIER_BYTES = 1024  # barriers, generously
CHUNK_BYTES = 128  # bytes of a row that the epilogue stores at a time
SHARED_UNIT = 64  # columns of a bf16 chunk: what accumulators may share


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MatmulTile:
  """The schedule of a grouped matmul or wgrad.

  Attributes:
    lhs: Rows of a tile of the result: rows of a matmul's lhs, columns of a
      wgrad's. 256 for a pair of CTAs, 128 for one.
    rhs: Columns of a tile of the result: 128, or 256 for a pair.
    stages: Steps that the ring holds, loads in flight included.
    accumulators: 2, so that a tile is multiplied while the one before is
      stored, or 1.
    buffers: Chunks of the result whose stores may be in flight: 2 or 4.
    transposed: Reads copies, made by XLA before, of operands that are not
      contiguous along what is contracted (MN-major), instead of the operands.
    band: Tiles of a band: within it neighbours in time share operands in L2.
    along: Axis of the result that a band lies across: 0 walks all columns for a
      few rows, 1 all rows for a few columns.
  """

  lhs: int = 256
  rhs: int = 256
  stages: int = 5
  accumulators: int = 2
  buffers: int = 2
  transposed: bool = False
  band: int = 8
  along: int = 0

  def __post_init__(self):
    if self.lhs not in (LANES, 2 * LANES) or self.rhs not in (128, self.lhs):
      raise ValueError(
        "MatmulTile: lhs x rhs must be 256x256, 256x128 or 128x128 (pairs of "
        f"CTAs or one, whole atoms of scales); got {self.lhs}x{self.rhs}."
      )
    if self.accumulators not in (1, 2) or self.buffers not in (2, 4):
      raise ValueError(
        "MatmulTile: accumulators must be 1 or 2 and buffers 2 or 4; got "
        f"accumulators={self.accumulators}, buffers={self.buffers}."
      )
    if self.stages < 2 or self.band < 1:
      raise ValueError(
        "MatmulTile: needs at least 2 stages and a band of 1; got "
        f"stages={self.stages}, band={self.band}."
      )
    if self.along not in (0, 1):
      raise ValueError(f"MatmulTile: along must be 0 or 1; got {self.along}.")
    if self.accumulators == 2 and self.shared > self.rhs // 2:
      raise ValueError(
        f"MatmulTile: the scales of {self.stages} stages leave no room for two "
        f"accumulators of {self.rhs} columns; take fewer stages."
      )
    if self.accumulator_columns + self.scale_columns > TMEM_COLUMNS:
      raise ValueError(
        f"MatmulTile: {self.name} needs {self.accumulator_columns} columns of "
        f"sums and {self.scale_columns} of scales, more than {TMEM_COLUMNS}; "
        "take fewer stages."
      )
    if self.smem_bytes > SMEM_BYTES:
      raise ValueError(
        f"MatmulTile: {self.name} needs {self.smem_bytes} bytes of shared "
        f"memory, more than {SMEM_BYTES}; take fewer stages or buffers."
      )

  @property
  def ctas(self) -> int:
    """CTAs that share a tile."""
    return self.lhs // LANES

  @property
  def scale_columns(self) -> int:
    """Columns of tensor memory for the scales of all slots."""
    lhs = -(-4 * self.stages // TMEM_UNIT) * TMEM_UNIT
    if self.rhs == 128:
      return 2 * lhs
    return lhs + self.rhs // 32 * self.stages

  @property
  def shared(self) -> int:
    """Columns that the two accumulators have in common."""
    if self.accumulators == 1:
      return 0
    excess = 2 * self.rhs + self.scale_columns - TMEM_COLUMNS
    return max(0, -(-excess // SHARED_UNIT) * SHARED_UNIT)

  @property
  def accumulator_columns(self) -> int:
    """Columns of tensor memory for the sums."""
    return self.accumulators * self.rhs - self.shared

  @property
  def lag(self) -> int:
    """Tiles back to the one whose columns a tile overwrites."""
    return 1 if self.shared else self.accumulators

  @property
  def smem_bytes(self) -> int:
    """Shared memory of a CTA that the schedule needs."""
    operands = DEPTH * (LANES + self.rhs // self.ctas)
    scales = ATOM_BYTES * (1 + self.rhs // 128)
    chunks = self.buffers * LANES * CHUNK_BYTES
    return self.stages * (operands + scales) + chunks + BARRIER_BYTES

  def check_chunks(self, out_dtype: Any) -> None:
    """Refuses buffers that a tile's chunks do not fill evenly.

    Raises:
      ValueError: The chunks of ``out_dtype`` are no multiple of the buffers.
    """
    columns = chunk(out_dtype)
    if self.rhs // columns % self.buffers:
      raise ValueError(
        f"MatmulTile: {self.name} stores {self.rhs // columns} chunks of "
        f"{columns} columns, no multiple of its {self.buffers} buffers."
      )

  @property
  def name(self) -> str:
    """A short name, e.g. ``256x256 s5 a2 b2 n8/0``."""
    major = " transposed" if self.transposed else ""
    return (
      f"{self.lhs}x{self.rhs} s{self.stages} a{self.accumulators} "
      f"b{self.buffers} n{self.band}/{self.along}{major}"
    )


# Shapes with the share of the peak that each can reach: what tiles of this size
# read from shared memory for a multiply (a model, not measured).
SHAPES = ((256, 256, 1.0), (256, 128, 0.75), (128, 128, 0.5))


def chunk(out_dtype: Any) -> int:
  """Columns that the epilogue stores at a time."""
  return CHUNK_BYTES // jnp.dtype(out_dtype).itemsize
