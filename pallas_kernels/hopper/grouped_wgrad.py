"""Grouped wgrad on Hopper: the gradient of every expert's weight.

    dw[g] = sum over the rows r of group g of lhs[r]^T rhs[r]     (+ accumulate)

Legend: lhs [R, K], rhs [R, N], dw [G, K, N]; the rows are aligned groups
(`groups.GroupLayout`) and padding rows hold zeros. A tile is a piece of one
dw[g]; its steps walk the rows of the group, 64 at a time, so that their number
is known on the device only.

Schedule (`wgrad_kernel`). One CTA an SM; a warpgroup loads by TMA and two
multiply bf16 by wgmma. Groups are taken from the longest to the shortest and
tiles are dealt round, so that no SM works longer than the others by more than
one tile. A group without rows costs the store of its zeros.

MXFP8 operands are dequantized to bf16 first, exactly but for what bf16 cannot
hold (below 2^-133): Hopper's fp8 wgmma has neither block scales nor operands
that lie across the contracted axis; `wgrad_folded` does without them.
`grouped_matmul` is the forward.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dequantize, groups, mosaic, mxfp8
from pallas_kernels.hopper import wgrad_call, wgrad_kernel, wgrad_tile

MxArray = mxfp8.MxArray
WgradTile = wgrad_tile.WgradTile

# What a result can be: its dtype, and whether the sums are added to something.
RESULTS = ((jnp.bfloat16, False), (jnp.float32, False), (jnp.float32, True))


def _refuse(what: str) -> NotImplementedError:
  return NotImplementedError(
    f'grouped_wgrad kernel: {what}. Use backend="xla".'
  )


def check_result(
  shape: tuple[int, int, int], out_dtype: Any, accumulate: jax.Array | None
) -> None:
  """Refuses results that the kernels do not write.

  Args:
    shape: G, K, N.
    out_dtype: Of the result.
    accumulate: What the sums are added to, or None.

  Raises:
    NotImplementedError: Another dtype, or a width that TMA tiles do not fit.
    ValueError: accumulate has another shape or dtype.
  """
  if accumulate is not None and (
    accumulate.shape != shape or accumulate.dtype != jnp.float32
  ):
    raise ValueError(
      f"grouped_wgrad: accumulate must be float32 {shape}; got "
      f"{accumulate.dtype} {accumulate.shape}."
    )
  if out_dtype not in (jnp.float32, jnp.bfloat16):
    raise _refuse(f"out_dtype must be float32 or bfloat16; got {out_dtype}")
  if accumulate is not None and out_dtype != jnp.float32:
    raise _refuse(f"it accumulates in float32; got out_dtype {out_dtype}")
  if not all(shape) or shape[1] % 64 or shape[2] % 64:
    raise _refuse(
      "K and N must be positive multiples of 64 (tiles of 128 bytes, which "
      f"wgmma reads across); got K={shape[1]}, N={shape[2]}"
    )


def _check(lhs, rhs, layout: groups.GroupLayout) -> None:
  """Refuses operands that the kernel does not take.

  Raises:
    NotImplementedError: Another dtype.
    ValueError: Shapes or blocks that do not belong together.
  """
  rows = layout.rows
  if lhs.ndim != 2 or rhs.ndim != 2 or {lhs.shape[0], rhs.shape[0]} != {rows}:
    raise ValueError(
      f"grouped_wgrad: lhs and rhs must be [{rows}, columns], the rows of the "
      f"layout; got lhs{lhs.shape} and rhs{rhs.shape}."
    )
  for name, x in (("lhs", lhs), ("rhs", rhs)):
    mx = isinstance(x, MxArray)
    if mx and x.block != "32x32" and x.axis != -2:
      raise ValueError(
        "grouped_wgrad: rows are contracted, so MXFP8 blocks must run along "
        f"axis -2; got {name} {x!r}. Quantize it along axis -2."
      )
    if not mx and x.dtype != jnp.bfloat16:
      raise _refuse(f"operands must be bf16 or MXFP8; got {name} {x.dtype}")


def grouped_wgrad(
  lhs: jax.Array | MxArray,
  rhs: jax.Array | MxArray,
  layout: groups.GroupLayout,
  *,
  out_dtype: Any = jnp.float32,
  accumulate: jax.Array | None = None,
  tile: WgradTile | None = None,
  interpret: Any = False,
) -> jax.Array:
  """As `reference.grouped_wgrad`, up to the order of float32 sums.

  Args:
    lhs: [R, K] bf16, or MxArray with blocks along axis -2; K a multiple of 64.
      Padding rows must be zero; rows past the last group are not read.
    rhs: [R, N] likewise.
    layout: Of the rows.
    out_dtype: float32 or bfloat16, rounded from float32 sums.
    accumulate: [G, K, N] float32 that the sums are added to, or None.
    tile: The schedule; None for the default.
    interpret: Interpret parameters; False compiles.

  Returns:
    [G, K, N]; groups without rows are 0, or `accumulate` as it was.

  Raises:
    NotImplementedError: The kernel does not take this width or dtype.
    ValueError: Shapes or block axes do not belong together.
  """
  _check(lhs, rhs, layout)
  shape = (layout.groups, lhs.shape[1], rhs.shape[1])
  check_result(shape, out_dtype, accumulate)
  lhs, rhs = (
    dequantize.dequantize(x, interpret=interpret)
    if isinstance(x, MxArray)
    else x
    for x in (lhs, rhs)
  )
  problem = wgrad_kernel.Problem(
    groups=layout.groups,
    depth=lhs.shape[1],
    width=rhs.shape[1],
    out_dtype=jnp.dtype(out_dtype),
    accumulate=accumulate is not None,
    folded=False,
    lhs_dtype=lhs.dtype,
    rhs_dtype=rhs.dtype,
    tile=tile or wgrad_tile.least_work(*shape[1:], wgrad_tile.BF16),
  )
  more = () if accumulate is None else (accumulate,)
  return wgrad_call.call(problem, layout, (lhs, rhs, *more), interpret)


def variants(target: str) -> list[mosaic.Variant]:
  """Every result type and tile that the library selects; Hopper only.

  Args:
    target: PTX target, e.g. ``sm_90a``.
  """
  if target != "sm_90a":
    return []
  return [
    _variant(out_dtype, accumulate, tile)
    for tile in wgrad_tile.BF16
    for out_dtype, accumulate in RESULTS
  ]


def _variant(
  out_dtype: Any, accumulate: bool, tile: WgradTile
) -> mosaic.Variant:
  """One entry of `variants`; its last tiles end past K and N."""
  count, rows, depth, width = 8, 4096, 2048, 1408

  def function(lhs, rhs, sizes, *accumulate):
    layout = groups.group_layout(sizes, rows)
    more = accumulate[0] if accumulate else None
    return grouped_wgrad(
      lhs, rhs, layout, out_dtype=out_dtype, accumulate=more, tile=tile
    )

  arguments = [
    jax.ShapeDtypeStruct((rows, depth), jnp.bfloat16),
    jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
    jax.ShapeDtypeStruct((count,), jnp.int32),
  ]
  if accumulate:
    arguments.append(jax.ShapeDtypeStruct((count, depth, width), jnp.float32))
  name = jnp.dtype(out_dtype).name + " added" * accumulate
  return mosaic.Variant(
    kernel="grouped_wgrad",
    variant=f"{name} {tile.name}",
    function=function,
    arguments=tuple(arguments),
    promises=("wgmma_16bit", "bulk_tensor_load", "bulk_tensor_store"),
  )
