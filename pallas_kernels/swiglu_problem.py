"""What one call of a SwiGLU kernel computes, and what it does not take.

`Problem` says it with static fields, and from them the shapes of results and of
shared memory; `check` refuses other arguments. `swiglu` holds the entry points.
"""

import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  activation,
  groups,
  mosaic,
  mxfp8,
  quantize_kernel,
  tile_quantize,
  tiles,
)

MxArray = mxfp8.MxArray
Direction = quantize_kernel.Direction

ROWS = tiles.TILE_ROWS
CHUNK = tile_quantize.CHUNK


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SwigluTile:
  """The schedule of a SwiGLU kernel; tiles are 128 x 128.

  Attributes:
    stages: Ring slots of [gate | up], loads in flight included.
    warpgroups: 1, 2 or 4: threads of four have at most 128 registers.
    ctas_per_sm: CTAs that share an SM.
  """

  stages: int = 2
  warpgroups: int = 2
  ctas_per_sm: int = 1

  def __post_init__(self):
    least = min(self.stages, self.ctas_per_sm)
    if least < 1 or self.warpgroups not in (1, 2, 4):
      raise ValueError(
        "SwigluTile: stages and ctas_per_sm must be at least 1, warpgroups 1, "
        f"2 or 4; got {self}."
      )

  @property
  def name(self) -> str:
    """A short name, e.g. ``s2 w2 c1``."""
    return f"s{self.stages} w{self.warpgroups} c{self.ctas_per_sm}"


FORWARD_TILE = SwigluTile(stages=3)
FULL_TILE = SwigluTile(stages=2)  # shared memory has no room for three


def forward_tile(width: int, more: bool) -> SwigluTile:
  """The forward's tile: measured on this GPU, or the default.

  Args:
    width: F.
    more: It needs other tiles besides, for MXFP8 pre-activations.
  """
  case = "forward mxfp8" if more else "forward"
  found = tiles.tuned("swiglu", mosaic.device_kind(), case, width)
  if found is not None:
    return SwigluTile(**found)
  return FULL_TILE if more else FORWARD_TILE


def backward_tile(width: int) -> SwigluTile:
  """The backward's tile; see `forward_tile`."""
  found = tiles.tuned("swiglu", mosaic.device_kind(), "backward", width)
  return FULL_TILE if found is None else SwigluTile(**found)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of a kernel computes; static.

  Attributes:
    rows: R, a multiple of 128.
    width: F, a multiple of 128.
    backward: Which of the two kernels.
    pre_dtype: bfloat16, or the fp8 type of MXFP8 pre-activations.
    biased: A bias is added to the pre-activations.
    directions: MXFP8 results.
    plain: The bf16 result is written too.
    saved: Forward only: [gate | up] is written in MXFP8 rows.
    rounding: Scale rule.
    dtype: fp8 type of the results.
    form: The activation.
    tile: The schedule.
  """

  rows: int
  width: int
  backward: bool
  pre_dtype: Any
  biased: bool
  directions: tuple[Direction, ...]
  plain: bool
  saved: bool
  rounding: mxfp8.Rounding
  dtype: Any
  form: activation.Swiglu
  tile: SwigluTile

  @property
  def coded(self) -> bool:
    """Pre-activations come in MXFP8."""
    return self.pre_dtype != jnp.bfloat16

  @property
  def sources(self) -> int:
    """Tiles that are quantized: h, or dgate and dup."""
    return 2 if self.backward else 1

  @property
  def grid(self) -> tuple[int, int]:
    """Tiles along rows and along F."""
    return self.rows // ROWS, self.width // CHUNK

  def quantization(self, directions=None) -> quantize_kernel.Problem:
    """The result [R, F] or [R, 2 F] as the quantize kernel sees it."""
    return quantize_kernel.Problem(
      shape=(1, self.rows, self.sources * self.width),
      directions=self.directions if directions is None else directions,
      rounding=self.rounding,
      dtype=self.dtype,
      square=False,
      masked=True,
      tile=tiles.StreamTile(columns=CHUNK),
    )

  def saving(self) -> quantize_kernel.Problem:
    """[gate | up] as the quantize kernel sees it."""
    whole = dataclasses.replace(self, backward=True)
    return whole.quantization((Direction(axis=-1, layout="blocked"),))

  def outputs(self) -> dict[str, Any]:
    """Name to shape and dtype of each result, in order."""
    shape, dtype = jax.ShapeDtypeStruct, jnp.bfloat16
    out = {}
    if self.directions:
      out["quantized"] = self.quantization().outputs()
    if self.plain:
      out["plain"] = shape((self.rows, self.sources * self.width), dtype)
    if self.saved:
      out["saved"] = self.saving().outputs()
    if self.backward:
      partials = self.tile.warpgroups * self.grid[1]
      out["dweight"] = shape((partials, self.rows), jnp.float32)
    return out

  def scratch(self) -> dict[str, Any]:
    """Shared memory by name."""
    tile, ring = (ROWS, CHUNK), (self.tile.stages, ROWS, CHUNK)
    scratch: dict[str, Any] = dict(
      gate_smem=mosaic.swizzled(ring, self.pre_dtype, CHUNK),
      up_smem=mosaic.swizzled(ring, self.pre_dtype, CHUNK),
      full=plgpu.Barrier(num_arrivals=2, num_barriers=self.tile.stages),
    )
    if self.tile.warpgroups > 1:
      scratch["met"] = plgpu.Barrier(num_arrivals=self.tile.warpgroups)
    if self.backward:
      scratch["dh_smem"] = mosaic.swizzled(tile, jnp.bfloat16, CHUNK)
      scratch["dh_full"] = plgpu.Barrier()
    if self.coded:
      work = mosaic.swizzled(tile, jnp.bfloat16, CHUNK)
      scratch["work_smem"] = [work] * self.sources

    staged = self.sources * len(self.directions) + 2 * self.saved
    if staged:
      codes = mosaic.swizzled((staged, *tile), self.dtype, CHUNK)
      atoms = plgpu.SMEM((staged, 1, mxfp8.ATOM_BYTES), jnp.uint8)
      scratch |= dict(codes_smem=codes, atoms_smem=atoms)
    return scratch


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
  """What `swiglu.swiglu_quantize` returns; None where not asked for.

  Attributes:
    rows: [R, F] MxArray, 1x32 blocks.
    columns: [R, F] MxArray, 32x1 blocks.
    plain: [R, F] bf16.
    pre: [R, 2 F] MxArray, 1x32 blocks, blocked scales: the pre-activations
      without bias, to save.
  """

  rows: MxArray | None
  columns: MxArray | None
  plain: jax.Array | None
  pre: MxArray | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
  """What `swiglu.swiglu_backward_quantize` returns; None where not asked for.

  Attributes:
    rows: [R, 2 F] MxArray of [dgate | dup], 1x32 blocks.
    columns: [R, 2 F] MxArray, 32x1 blocks.
    plain: [R, 2 F] bf16.
    dweight: [R] float32, the gradient of the row weights.
  """

  rows: MxArray | None
  columns: MxArray | None
  plain: jax.Array | None
  dweight: jax.Array


def check(pre, dh, layout: groups.GroupLayout, wanted: tuple) -> None:
  """Refuses what the kernels do not take.

  Raises:
    ValueError: Shapes disagree, or nothing is asked for.
    NotImplementedError: A width, dtype or scale layout that they do not take.
  """
  rows, width = pre.shape[0], pre.shape[-1] // 2
  instead = 'Use backend="xla".'
  if pre.ndim != 2 or pre.shape[1] % 2 or rows != layout.rows:
    raise ValueError(
      f"swiglu kernel: pre must be [{layout.rows}, 2 F] as the layout has "
      f"{layout.rows} rows; got {list(pre.shape)}."
    )
  if dh is not None and dh.shape != (rows, width):
    raise ValueError(
      f"swiglu kernel: dh must be [{rows}, {width}], half as wide as pre; got "
      f"{list(dh.shape)}."
    )
  if not any(wanted):
    raise ValueError(
      "swiglu kernel: ask for rows, columns or plain; got none of them."
    )
  if width % CHUNK or not width or not rows:
    raise NotImplementedError(
      f"swiglu kernel: F must be a positive multiple of {CHUNK} (gate and up "
      f"are quantized in tiles of it); got F = {width}, {rows} rows. {instead}"
    )
  if isinstance(pre, MxArray):
    if (pre.axis, pre.block, pre.layout) != (-1, "1x32", "blocked"):
      raise NotImplementedError(
        "swiglu kernel: MXFP8 pre-activations must have 1x32 blocks along the "
        f"row and blocked scales; got {pre!r}. {instead}"
      )
  elif pre.dtype != jnp.bfloat16:
    raise NotImplementedError(
      f"swiglu kernel: pre must be bfloat16 or MXFP8; got {pre.dtype}. "
      f"{instead}"
    )
  if dh is not None and dh.dtype != jnp.bfloat16:
    raise NotImplementedError(
      f"swiglu kernel: dh must be bfloat16; got {dh.dtype}. {instead}"
    )


def directions(rows, columns) -> tuple[Direction, ...]:
  """The MXFP8 results by the scale layout of each, or None."""
  for name, scales in (("rows", rows), ("columns", columns)):
    if scales not in (None, *mxfp8.LAYOUTS):
      raise ValueError(
        f"swiglu kernel: {name} must be None or a scale layout, one of "
        f"{mxfp8.LAYOUTS}; got {scales!r}."
      )
  found = ((-1, rows), (-2, columns))
  return tuple(Direction(axis=a, layout=s) for a, s in found if s is not None)
