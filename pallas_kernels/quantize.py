"""Quantize: bf16 or float32 to MXFP8, along rows, columns, or both in one read.

    rows     data[r, c] = x[r, c] / 2^(s - 127),  s of x[r, 32 c' : 32 c' + 32]
    columns  likewise, s of x[32 r' : 32 r' + 32, c]

Legend: x [.., R, C]; a tile is 128 rows x `columns` of one matrix.

Schedule (`stream`). One warpgroup a CTA, a few CTAs an SM. A CTA waits for the
oldest tile of its ring, quantizes it from shared memory into shared memory,
refills the slot, and stores by TMA while it awaits the next tile. The body of
the kernel is in `quantize_kernel`.

Blocked scales leave as 512-byte atoms. Linear scales are stored from registers.
Edges: loads past the array give zeros and stores past it are dropped by TMA.
Widths are multiples of 32, rows beyond the first 128 multiples of 8.

Runs on Hopper and Blackwell from one source; bound by memory bandwidth. The
way back is `dequantize`.
"""

import functools
import math
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import fold, mosaic, mxfp8, quantize_kernel, stream, tiles

MxArray = mxfp8.MxArray
StreamTile = tiles.StreamTile
Direction = quantize_kernel.Direction

ROWS = tiles.TILE_ROWS
CHUNK = quantize_kernel.CHUNK
# By bytes of an input number: bf16 results leave room for narrow tiles.
ROUNDED_TILES = {
  2: StreamTile(columns=128, ctas_per_sm=2),
  4: StreamTile(columns=128, ctas_per_sm=1),
}
TMA_COLUMNS = 32  # columns: the narrowest swizzled tile, 32 bytes of fp8
TMA_ROWS = 8  # rows of a swizzled tile


def _check(x: jax.Array) -> None:
  """Refuses what the kernel does not take.

  Raises:
    NotImplementedError: Another dtype or rank, or a shape that TMA tiles do
      not fit.
  """
  instead = 'Use backend="xla".'
  if x.dtype not in (jnp.bfloat16, jnp.float32):
    raise NotImplementedError(
      f"quantize kernel: x must be bfloat16 or float32; got {x.dtype}. "
      f"{instead}"
    )
  if x.ndim not in (2, 3) or 0 in x.shape:
    raise NotImplementedError(
      "quantize kernel: x must be a matrix or a stack of matrices, not empty; "
      f"got x{x.shape}. {instead}"
    )
  if x.shape[-1] < CHUNK or x.shape[-1] % TMA_COLUMNS:
    raise NotImplementedError(
      f"quantize kernel: rows must hold at least {CHUNK} values and a multiple "
      f"of {TMA_COLUMNS} (TMA tiles); got x{x.shape}. {instead}"
    )
  if x.shape[-2] > ROWS and x.shape[-2] % TMA_ROWS:
    raise NotImplementedError(
      f"quantize kernel: beyond one tile of {ROWS} rows their number must be a "
      f"multiple of {TMA_ROWS} (TMA tiles); got x{x.shape}. {instead}"
    )


def _run(
  x: jax.Array,
  directions: tuple[Direction, ...],
  *,
  rounding: mxfp8.Rounding,
  dtype: Any,
  square: bool = False,
  tile_rows: jax.Array | None,
  tile: StreamTile | None,
  interpret: Any,
) -> list[MxArray]:
  """`_call`, and what it gives as arrays of the shape of x."""
  out = _call(
    x, directions, rounding=rounding, dtype=dtype, square=square,
    tile_rows=tile_rows, tile=tile or _default_tile(x, directions),
    interpret=interpret,
  )  # fmt: skip
  pairs = zip(directions, out[::2], out[1::2], strict=True)
  return [_as_mx(d, data, scale, x.shape) for d, data, scale in pairs]


def _call(
  x: jax.Array,
  directions: tuple[Direction, ...],
  *,
  tile_rows: jax.Array | None,
  tile: StreamTile,
  interpret: Any,
  **options: Any,
) -> list[jax.Array]:
  """Calls the kernel; fewer rows than a tile's are padded to one tile."""
  _check(x)
  stack = x if x.ndim == 3 else x[None]
  rows = stack.shape[1]
  if rows < ROWS:
    stack = jnp.pad(stack, ((0, 0), (0, ROWS - rows), (0, 0)))
  problem = quantize_kernel.Problem(
    shape=stack.shape,
    directions=directions,
    **options,
    masked=tile_rows is not None,
    tile=tile,
  )
  tiles_ = math.prod(problem.grid)
  ctas = stream.cta_count(tiles_, tile.ctas_per_sm, interpret)
  body = functools.partial(
    quantize_kernel.kernel, problem=problem, ctas=ctas, interpret=interpret
  )
  call = plgpu.kernel(
    body,
    out_type=problem.outputs(),
    scratch_types=problem.scratch(x.dtype),
    **stream.launch(ctas, tile.warpgroups),
    compiler_params=mosaic.compiler_params(),
    interpret=interpret,
  )
  return call(stack, *([] if tile_rows is None else [tile_rows]))


def _default_tile(x: Any, directions: tuple[Direction, ...]) -> StreamTile:
  axes = tuple(d.axis for d in directions)
  return tiles.quantize_tile(
    axes, x.shape[-1], x.dtype.itemsize, mosaic.device_kind()
  )


def _as_mx(direction, data, scale, shape) -> MxArray:
  """Trims what covers whole tiles only and drops the axis that was added."""
  rows, columns = shape[-2:]
  transposed, axis = direction.transposed, direction.axis
  kept = (columns, rows) if transposed else (rows, columns)
  axis = -1 if transposed else axis
  data = data[:, : kept[0], : kept[1]]
  if direction.layout == "linear":
    wanted = list(kept)
    wanted[axis] //= mxfp8.BLOCK
    scale = scale[:, : wanted[0], : wanted[1]]
  if len(shape) == 2:
    data, scale = data[0], scale[0]
  return MxArray(data, scale, axis=axis, layout=direction.layout)


def quantize(
  x: jax.Array,
  axis: int = -1,
  *,
  block: mxfp8.Block = "1x32",
  rounding: mxfp8.Rounding = "rceil",
  dtype: Any = mxfp8.E4M3,
  layout: mxfp8.Layout = "linear",
  transposed: bool = False,
  folded: bool = False,
  tile_rows: jax.Array | None = None,
  tile: StreamTile | None = None,
  interpret: Any = False,
) -> MxArray:
  """Quantizes along one axis; equal to `reference.quantize` to the bit.

  Args:
    x: [R, C] or [G, R, C], bf16 or float32; C a multiple of 32, at least 128.
    axis: -1 (1x32 blocks) or -2 (32x1 blocks).
    block: "1x32", or "32x32": one scale for 32 rows and columns.
    rounding: One of `mxfp8.RULES`.
    dtype: float8_e4m3fn or float8_e5m2.
    layout: "linear" or "blocked" scales.
    transposed: With axis -2: return x^T, blocks along its last axis.
    folded: Fold the result, blocks along its last axis, in a second kernel
      (`fold`): 2.03 bytes an element more.
    tile_rows: [R / 128] int32, the valid rows of each 128; the others count as
      zeros (`groups.GroupLayout.tile_rows`). For a matrix of aligned groups.
    tile: The schedule; None for the default.
    interpret: Interpret parameters; False compiles.

  Returns:
    MxArray of the shape of x, or of x^T when transposed.

  Raises:
    NotImplementedError: The kernel does not take this shape or dtype.
    ValueError: An axis is no multiple of 32, or an option is unknown.
  """
  axis = axis - x.ndim if axis >= 0 else axis
  mxfp8.scale_shape(x.shape, axis, block, "linear")
  if axis < -2:
    raise NotImplementedError(
      f"quantize kernel: blocks run along the last two axes; got {axis=}. "
      'Use backend="xla".'
    )
  if folded and transposed:
    fold.check((*x.shape[:-2], *x.shape[:-3:-1]), -1, block)
  elif folded:
    fold.check(x.shape, axis, block)
  common: dict[str, Any] = {
    "rounding": rounding,
    "dtype": dtype,
    "tile_rows": tile_rows,
    "tile": tile,
    "interpret": interpret,
  }
  if block == "32x32":
    if transposed:
      raise NotImplementedError(
        "quantize kernel: 32x32 blocks need no transposed copy: read the "
        "blocks along the other axis (MxArray.along)."
      )
    direction = Direction(axis=-1, layout="linear")
    (rows,) = _run(x, (direction,), square=True, **common)
    scale = rows.scale[..., :: mxfp8.BLOCK, :]
    square = MxArray(rows.data, scale, axis=axis, block=block)
    return square.with_layout(layout)
  scales = "linear" if folded else layout
  direction = Direction(axis=axis, layout=scales, transposed=transposed)
  (out,) = _run(x, (direction,), **common)
  if folded:
    out = fold.fold(out, layout, interpret=interpret)
  return out


def quantize_both(
  x: jax.Array,
  *,
  rounding: mxfp8.Rounding = "rceil",
  dtype: Any = mxfp8.E4M3,
  layouts: tuple[mxfp8.Layout, mxfp8.Layout] = ("blocked", "blocked"),
  transposed: bool = False,
  folded: bool = False,
  tile_rows: jax.Array | None = None,
  tile: StreamTile | None = None,
  interpret: Any = False,
) -> tuple[MxArray, MxArray]:
  """Quantizes along rows and along columns in one read of x.

  Args:
    x: As in `quantize`; R and C multiples of 32.
    rounding: As in `quantize`.
    dtype: As in `quantize`.
    layouts: Scale layouts of the rows and of the columns.
    transposed: Return the columns of x^T, contiguous along R.
    folded: Fold the rows, not the columns, as in `quantize`.
    tile_rows: As in `quantize`.
    tile: As in `quantize`.
    interpret: As in `quantize`.

  Returns:
    The 1x32 rows and the 32x1 columns; equal to two calls of `quantize`.

  Raises:
    NotImplementedError: The kernel does not take this shape or dtype.
    ValueError: An axis is no multiple of 32, or an option is unknown.
  """
  for axis in (-1, -2):
    mxfp8.scale_shape(x.shape, axis, "1x32", "linear")
  directions = (
    Direction(axis=-1, layout="linear" if folded else layouts[0]),
    Direction(axis=-2, layout=layouts[1], transposed=transposed),
  )
  rows, columns = _run(
    x,
    directions,
    rounding=rounding,
    dtype=dtype,
    tile_rows=tile_rows,
    tile=tile,
    interpret=interpret,
  )
  if folded:
    rows = fold.fold(rows, layouts[0], interpret=interpret)
  return rows, columns


def round_to_mxfp8(
  x: jax.Array,
  axis: int = -1,
  *,
  block: mxfp8.Block = "1x32",
  rounding: mxfp8.Rounding = "rceil",
  tile: StreamTile | None = None,
  interpret: Any = False,
) -> jax.Array:
  """The bf16 numbers of `quantize`; equal to `reference.round_to_mxfp8`.

  For weights whose reader multiplies in bf16: one read and one write instead of
  quantize and dequantize.

  Args:
    x: As in `quantize`.
    axis: -1 (1x32 blocks) or -2 (32x1 blocks).
    block: "1x32", or "32x32".
    rounding: One of `mxfp8.RULES`.
    tile: The schedule; None for the default.
    interpret: Interpret parameters; False compiles.

  Raises:
    NotImplementedError: The kernel does not take this shape or dtype.
    ValueError: An axis is no multiple of 32, or an option is unknown.
  """
  axis = axis - x.ndim if axis >= 0 else axis
  mxfp8.scale_shape(x.shape, axis, block, "linear")
  if axis < -2:
    raise NotImplementedError(
      f"quantize kernel: blocks run along the last two axes; got {axis=}. "
      'Use backend="xla".'
    )
  square = block == "32x32"
  direction = Direction(axis=-1 if square else axis, layout="blocked")
  numbers, _ = _call(
    x, (direction,), rounding=rounding, dtype=mxfp8.E4M3, square=square,
    rounded=True, tile_rows=None, tile=tile or ROUNDED_TILES[x.dtype.itemsize],
    interpret=interpret,
  )  # fmt: skip
  return numbers[:, : x.shape[-2]].reshape(x.shape)


def variants(target: str) -> list[mosaic.Variant]:
  """Every choice of outputs that the library makes, wide and narrow.

  Args:
    target: PTX target; the choices are the same on all.
  """
  del target
  linear, blocked = (Direction(axis=-1, layout=x) for x in mxfp8.LAYOUTS)
  down, down_blocked = (Direction(axis=-2, layout=x) for x in mxfp8.LAYOUTS)
  turned = Direction(axis=-2, layout="blocked", transposed=True)
  cases = {
    "rows linear": (linear,),
    "rows blocked": (blocked,),
    "columns linear": (down,),
    "columns blocked": (down_blocked,),
    "columns transposed": (turned,),
    "both blocked": (blocked, down_blocked),
    "both linear": (linear, down),
    "both transposed": (blocked, turned),
  }
  both = cases["both blocked"]
  found = [_variant(name, case) for name, case in cases.items()]
  found += [
    _variant(f"{name} narrow", cases[name], width=160)
    for name in ("rows blocked", "columns blocked")
  ]
  found += [
    _variant(f"{name} float32", cases[name], x_dtype=jnp.float32)
    for name in ("rows blocked", "columns blocked", "both blocked")
  ]
  found += [
    _variant(f"{name} wide", cases[name], width=tiles.TUNED_WIDTH)
    for name in ("rows blocked", "columns blocked", "both blocked")
  ]
  found += [
    _variant(f"{name} rounded {x_dtype.__name__}", cases[name], x_dtype=x_dtype,
             rounded=True)
    for name in ("rows blocked", "columns blocked")
    for x_dtype in (jnp.bfloat16, jnp.float32)
  ]  # fmt: skip
  return [
    *found,
    _variant("both groups", both, masked=True),
    _variant("square", (linear,), square=True),
    _variant("both e5m2 even", both, rounding="even", dtype=mxfp8.E5M2),
  ]


def _variant(
  name: str,
  directions: tuple[Direction, ...],
  *,
  x_dtype: Any = jnp.bfloat16,
  width: int = 2880,
  masked: bool = False,
  square: bool = False,
  rounding: mxfp8.Rounding = "rceil",
  dtype: Any = mxfp8.E4M3,
  rounded: bool = False,
) -> mosaic.Variant:
  """One entry of `variants`."""
  x = jax.ShapeDtypeStruct((4096, width), x_dtype)
  tile = _default_tile(x, directions)
  if rounded:
    tile = ROUNDED_TILES[x.dtype.itemsize]
  tile_rows = jax.ShapeDtypeStruct((4096 // ROWS,), jnp.int32)
  promises = ["bulk_tensor_load", "bulk_tensor_store", "cast_to_fp8"]
  if any(d.layout == "blocked" for d in directions):
    promises.append("bulk_copy")

  def function(x, tile_rows=None):
    return _call(
      x,
      directions,
      rounding=rounding,
      dtype=dtype,
      square=square,
      rounded=rounded,
      tile_rows=tile_rows,
      tile=tile,
      interpret=False,
    )

  return mosaic.Variant(
    kernel="quantize",
    variant=f"{name} {tile.name}",
    function=function,
    arguments=(x, tile_rows) if masked else (x,),
    promises=tuple(promises),
    ctas_per_sm=tile.ctas_per_sm,
  )
