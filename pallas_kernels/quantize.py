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

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import fold, mosaic, mxfp8, quantize_call, tiles

MxArray = mxfp8.MxArray
StreamTile = tiles.StreamTile
Direction = quantize_call.Direction

# By bytes of an input number: bf16 results leave room for narrow tiles.
ROUNDED_TILES = {
  2: StreamTile(columns=128, ctas_per_sm=2),
  4: StreamTile(columns=128, ctas_per_sm=1),
}


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
    (rows,) = quantize_call.run(x, (direction,), square=True, **common)
    scale = rows.scale[..., :: mxfp8.BLOCK, :]
    square = MxArray(rows.data, scale, axis=axis, block=block)
    return square.with_layout(layout)
  scales = "linear" if folded else layout
  direction = Direction(axis=axis, layout=scales, transposed=transposed)
  (out,) = quantize_call.run(x, (direction,), **common)
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
  rows, columns = quantize_call.run(
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
  quantize_call.check(x)
  axis = axis - x.ndim if axis >= 0 else axis
  mxfp8.scale_shape(x.shape, axis, block, "linear")
  if axis < -2:
    raise NotImplementedError(
      f"quantize kernel: blocks run along the last two axes; got {axis=}. "
      'Use backend="xla".'
    )
  square = block == "32x32"
  direction = Direction(axis=-1 if square else axis, layout="blocked")
  numbers, _ = quantize_call.call_kernel(
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
  tile = quantize_call.default_tile(x, directions)
  if rounded:
    tile = ROUNDED_TILES[x.dtype.itemsize]
  tile_rows = jax.ShapeDtypeStruct((4096 // tiles.TILE_ROWS,), jnp.int32)
  promises = ["bulk_tensor_load", "bulk_tensor_store", "cast_to_fp8"]
  if any(d.layout == "blocked" for d in directions):
    promises.append("bulk_copy")

  def function(x, tile_rows=None):
    return quantize_call.call_kernel(
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
