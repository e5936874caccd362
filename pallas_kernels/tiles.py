"""Tile choices of the kernels: what is legal, and the defaults.

One frozen dataclass for each kernel. The compile check compiles every choice
that a kernel module lists, so a default cannot spill or overflow unnoticed.
`tuned` looks a tile up that `autotune` measured on a GPU.
"""

import dataclasses
import functools
import importlib.resources
import json
from typing import Any

WIDE = 512  # columns from which tiles of 256 waste little at the edge
TILE_ROWS = 128  # rows of a tile: one atom of blocked scales, one aligned group
TUNED = "tuned"  # the folder of what was measured
TUNED_WIDTH = 7168  # columns that quantize and dequantize are tuned at
CASES = {-1: "rows", -2: "columns"}  # names in it, by axis


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StreamTile:
  """The schedule of a memory-bound kernel that streams tiles of 128 rows.

  Attributes:
    columns: Columns of a tile, a multiple of 128 for each warpgroup.
    stages: Tiles of the input that a CTA holds, loads in flight included.
    ctas_per_sm: CTAs that share an SM; the grid is this times the SMs.
    warpgroups: Warpgroups of a CTA; each takes an equal part of the columns.
    buffers: Output tiles that a CTA holds, 1 or as many as `stages`: with one,
      a tile waits until the last one's store has read it.
  """

  columns: int = 128
  stages: int = 2
  ctas_per_sm: int = 2
  warpgroups: int = 1
  buffers: int = 1

  def __post_init__(self):
    if self.warpgroups < 1 or self.columns <= 0 or self.columns % self.unit:
      raise ValueError(
        "StreamTile: columns must be a positive multiple of 128 (one atom of "
        f"blocked scales) for each of {self.warpgroups} warpgroups; got "
        f"{self.columns}."
      )
    if self.stages < 1 or self.ctas_per_sm < 1:
      raise ValueError(
        "StreamTile: stages and ctas_per_sm must be at least 1; got "
        f"{self.stages} and {self.ctas_per_sm}."
      )
    if self.buffers not in (1, self.stages):
      raise ValueError(
        f"StreamTile: buffers must be 1 or {self.stages} (the stages); got "
        f"{self.buffers}."
      )

  @property
  def unit(self) -> int:
    """Columns of one atom for each warpgroup."""
    return TILE_ROWS * self.warpgroups

  @property
  def part(self) -> int:
    """Columns of one warpgroup."""
    return self.columns // self.warpgroups

  @property
  def name(self) -> str:
    """A short name, e.g. ``128x256 s2 c1 w2 b1``."""
    return (
      f"{TILE_ROWS}x{self.columns} s{self.stages} c{self.ctas_per_sm} "
      f"w{self.warpgroups} b{self.buffers}"
    )


def quantize_tile(
  axes: tuple[int, ...], width: int, itemsize: int, device_kind: str = ""
) -> StreamTile:
  """The tile of the quantize kernel: measured on this GPU, or the default.

  Measured on an H200 at 131072 x 7168: one CTA an SM and wide tiles are best,
  because memory then sees few and long rows; both directions at once leave no
  room in shared memory for wide tiles.

  Args:
    axes: Axes that it quantizes along, -1, -2 or both.
    width: Columns of the array.
    itemsize: Bytes of an input element, 2 or 4.
    device_kind: As JAX names the GPU, for what was measured on it.
  """
  case = "both" if len(axes) > 1 else CASES[max(axes)]
  found = tuned("quantize", device_kind, case, width)
  if found is not None and itemsize == 2:
    return StreamTile(**found)
  if len(axes) > 1 or width < WIDE or itemsize > 2:
    return StreamTile(columns=128, ctas_per_sm=1)
  if axes == (-1,):
    return StreamTile(columns=256, ctas_per_sm=1)
  return StreamTile(columns=256, ctas_per_sm=1, warpgroups=2, buffers=2)


def dequantize_tile(axis: int, width: int, device_kind: str = "") -> StreamTile:
  """The tile of the dequantize kernel; see `quantize_tile`."""
  found = tuned("dequantize", device_kind, CASES[axis], width)
  if found is not None:
    return StreamTile(**found)
  if width < WIDE:
    return StreamTile(columns=128, ctas_per_sm=1, buffers=2)
  warpgroups = 1 if axis == -1 else 2
  return StreamTile(
    columns=256, ctas_per_sm=1, warpgroups=warpgroups, buffers=2
  )


def tuned_file(device_kind: str) -> str:
  """File of a GPU's table, e.g. ``nvidia_h200.json``."""
  return device_kind.lower().replace(" ", "_") + ".json"


@functools.cache
def tuned_entries(device_kind: str) -> tuple[dict[str, Any], ...]:
  """What `autotune` measured on a kind of GPU; empty if nothing was.

  Args:
    device_kind: As JAX names it, e.g. ``NVIDIA H200``.
  """
  folder = importlib.resources.files("pallas_kernels") / TUNED
  file = folder / tuned_file(device_kind)
  if not file.is_file():
    return ()
  return tuple(json.loads(file.read_text())["entries"])


def tuned(
  kernel: str, device_kind: str, case: str, width: int
) -> dict[str, Any] | None:
  """The tile measured as best, as keyword arguments of its dataclass.

  Args:
    kernel: Name of the kernel's module.
    device_kind: As JAX names it.
    case: Which of the kernel's outputs, `workloads.Workload.tuned`.
    width: Columns; measurements on wider arrays do not count.

  Returns:
    None without a measurement at this width or below, but `WIDE` at least: the
    defaults say what serves narrow arrays.
  """
  found = [
    entry
    for entry in tuned_entries(device_kind)
    if (entry["kernel"], entry["case"]) == (kernel, case)
    and WIDE <= entry["width"] <= width
  ]
  if not found:
    return None
  return dict(max(found, key=lambda entry: entry["width"])["tile"])
