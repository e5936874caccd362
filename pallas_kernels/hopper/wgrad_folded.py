"""Grouped wgrad on Hopper at fp8 speed: transposed operands, folded by group.

    dw[g, k, n] = 2^(S[g, k] - 127) 2^(T[g, n] - 127)
                  * sum over the rows r of g of lhs[k, r] rhs[n, r]

Legend: lhs [K, R] and rhs [N, R], MXFP8 with blocks along the rows R, that is
the transposed copies that `quantize(x, -2, transposed=True)` writes; S and T
are their scale bytes, which `fold_groups` makes equal within each group.

Hopper's fp8 wgmma wants the contracted axis innermost and knows no block
scales. What folding costs is said at `fold_groups`; beside it the tensor core
sums fp8 products with fewer bits than float32: on an H200 1.4e-3 of the result
in the Frobenius norm at 4096 rows a group, 5e-3 at 32768. `grouped_wgrad` is
the exact way.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import groups, mosaic, mxfp8
from pallas_kernels.hopper import (
  grouped_wgrad,
  wgrad_call,
  wgrad_kernel,
  wgrad_tile,
)

MxArray = mxfp8.MxArray
WgradTile = wgrad_tile.WgradTile

MAX_SHIFT = 40  # all codes are 0 from 35 (e5m2) on


def _check(name: str, x: MxArray, layout: groups.GroupLayout) -> None:
  """Refuses what is no transposed copy of the rows.

  Raises:
    ValueError: It has another shape or other blocks.
  """
  blocks = isinstance(x, MxArray) and (x.axis, x.block) == (-1, "1x32")
  if not blocks or x.ndim != 2 or x.shape[1] != layout.rows:
    raise ValueError(
      f"folded wgrad: {name} must be an MxArray [columns, {layout.rows}] with "
      "1x32 blocks along the rows of the layout, a transposed copy; got "
      f"{x!r}. Make it by quantize(x, -2, transposed=True)."
    )


def _tops(scale: jax.Array, layout: groups.GroupLayout) -> jax.Array:
  """[F, G], the largest scale byte of each column in each group.

  Args:
    scale: [F, R / 32] uint8; bytes of tiles past the last group do not count.
    layout: Of the rows.
  """
  tiles = scale.reshape(scale.shape[0], layout.tiles, -1).max(axis=-1)
  tile = jnp.arange(layout.tiles)
  group = jnp.where(tile < layout.tile_count(), layout.tile_group(), -1)
  inside = group[None, :] == jnp.arange(layout.groups)[:, None]
  held = jnp.where(inside[None], tiles[:, None, :], jnp.uint8(0))
  return held.max(axis=-1)


def fold_groups(x: MxArray, layout: groups.GroupLayout) -> MxArray:
  """Re-bases each column within each group to one scale, its largest.

      data'[f, r] = round(data[f, r] * 2^(scale[f, r // 32] - S[f, group of r]))

  As `reference.fold`, by group: exact while the shifted number stays normal;
  otherwise the error is at most half the smallest fp8 number, 2^-10 (e4m3) in
  units of 2^(S - 127). A NaN block makes its column NaN in its whole group.

  Args:
    x: [F, R] with 1x32 blocks along the rows.
    layout: Of the rows.

  Returns:
    [F, R], linear scales. Past the last group data and scales mean nothing.

  Raises:
    ValueError: x is no transposed copy of the rows.
  """
  _check("x", x, layout)
  linear = x.with_layout("linear")
  group = layout.row_group()[:: mxfp8.BLOCK]
  top = _tops(linear.scale, layout)[:, group]
  shift = top.astype(jnp.int32) - linear.scale.astype(jnp.int32)
  # No code is subnormal in float32, nor becomes so: the cast rounds once.
  factor = mosaic.power_of_two(
    (mxfp8.SCALE_BIAS - jnp.clip(shift, 0, MAX_SHIFT)).astype(jnp.uint32)
  )
  factor = jnp.where(top == mxfp8.SCALE_NAN, jnp.nan, factor)
  numbers = x.data.astype(jnp.float32).reshape(*top.shape, mxfp8.BLOCK)
  data = (numbers * factor[..., None]).astype(x.data.dtype)
  return dataclasses.replace(linear, data=data.reshape(x.shape), scale=top)


def _group_scales(
  x: MxArray, layout: groups.GroupLayout, tile: int
) -> jax.Array:
  """[G, F padded to whole tiles] float32, the scale of each column by group."""
  first = jnp.minimum(layout.starts, layout.rows - 1) // mxfp8.BLOCK
  byte = x.with_layout("linear").scale[:, first].T
  byte = jnp.where(layout.sizes[:, None] > 0, byte, mxfp8.SCALE_BIAS)
  byte = jnp.pad(byte, ((0, 0), (0, -byte.shape[1] % tile)))
  return mosaic.power_of_two(byte.astype(jnp.uint32))


def default_tile(depth: int, width: int, accumulate: bool) -> WgradTile:
  """The tile of a problem.

  Args:
    depth: K.
    width: N.
    accumulate: The sums are added to something.
  """
  if accumulate:
    return wgrad_tile.ROOMY
  return wgrad_tile.least_work(depth, width, wgrad_tile.FOLDED)


def grouped_wgrad_folded(
  lhs: MxArray,
  rhs: MxArray,
  layout: groups.GroupLayout,
  *,
  out_dtype: Any = jnp.float32,
  accumulate: jax.Array | None = None,
  tile: WgradTile | None = None,
  interpret: Any = False,
) -> jax.Array:
  """The weight gradient of operands that `fold_groups` returned.

  Args:
    lhs: [K, R] with one scale for each column and group; K a multiple of 64.
      Padding rows must be zero; rows past the last group are not read.
    rhs: [N, R] likewise.
    layout: Of the rows.
    out_dtype: float32 or bfloat16.
    accumulate: [G, K, N] float32 that the sums are added to, or None.
    tile: The schedule; None for the default.
    interpret: Interpret parameters; False compiles.

  Returns:
    [G, K, N]; groups without rows are 0, or `accumulate` as it was.

  Raises:
    NotImplementedError: The kernel does not take this width or dtype.
    ValueError: Shapes or blocks do not belong together.
  """
  for name, x in (("lhs", lhs), ("rhs", rhs)):
    _check(name, x, layout)
  depth, width = lhs.shape[0], rhs.shape[0]
  grouped_wgrad.check_result(
    (layout.groups, depth, width), out_dtype, accumulate
  )
  tile = tile or default_tile(depth, width, accumulate is not None)
  problem = wgrad_kernel.Problem(
    groups=layout.groups,
    depth=depth,
    width=width,
    out_dtype=jnp.dtype(out_dtype),
    accumulate=accumulate is not None,
    folded=True,
    lhs_dtype=lhs.data.dtype,
    rhs_dtype=rhs.data.dtype,
    tile=tile,
  )
  scales = (
    _group_scales(lhs, layout, tile.lhs),
    _group_scales(rhs, layout, tile.rhs),
  )
  more = () if accumulate is None else (accumulate,)
  arrays = (lhs.data, rhs.data, *scales, *more)
  return wgrad_call.call(problem, layout, arrays, interpret)


def variants(target: str) -> list[mosaic.Variant]:
  """Every result type and tile; Hopper only.

  Args:
    target: PTX target, e.g. ``sm_90a``.
  """
  if target != "sm_90a":
    return []
  return [
    _variant(out_dtype, False, tile)
    for tile in wgrad_tile.FOLDED
    for out_dtype in (jnp.bfloat16, jnp.float32)
  ] + [_variant(jnp.float32, True, wgrad_tile.ROOMY)]


def _variant(
  out_dtype: Any, accumulate: bool, tile: WgradTile
) -> mosaic.Variant:
  """One entry of `variants`; its last tiles end past K and N."""
  count, rows, depth, width = 8, 4096, 2048, 1408

  def function(lhs, lhs_scale, rhs, rhs_scale, sizes, *accumulate):
    return grouped_wgrad_folded(
      MxArray(lhs, lhs_scale),
      MxArray(rhs, rhs_scale),
      groups.group_layout(sizes, rows),
      out_dtype=out_dtype,
      accumulate=accumulate[0] if accumulate else None,
      tile=tile,
    )

  struct = jax.ShapeDtypeStruct
  arguments = [
    struct((depth, rows), mxfp8.E4M3),
    struct((depth, rows // mxfp8.BLOCK), jnp.uint8),
    struct((width, rows), mxfp8.E4M3),
    struct((width, rows // mxfp8.BLOCK), jnp.uint8),
    struct((count,), jnp.int32),
  ]
  if accumulate:
    arguments.append(struct((count, depth, width), jnp.float32))
  name = jnp.dtype(out_dtype).name + " added" * accumulate
  return mosaic.Variant(
    kernel="grouped_wgrad folded",
    variant=f"{name} {tile.name}",
    function=function,
    arguments=tuple(arguments),
    promises=("wgmma_fp8", "bulk_tensor_load", "bulk_tensor_store"),
  )
