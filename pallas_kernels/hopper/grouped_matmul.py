"""Grouped matmul on Hopper: bf16, exact MXFP8 and folded MXFP8.

    y[r] = lhs[r] @ rhs[group of r]         float32 sums, rounded once

Legend: R rows in 128-aligned groups, K contracted, N produced, G groups.

Three ways, chosen by the operands:

  plain      both bf16: 16-bit wgmma.
  converted  MXFP8: the value of the reference ("exact"). Hopper has no
             block-scaled MMA; rows become bf16 in registers, in the shadow of
             wgmma, and weights by a pass before, or they come in bf16. bf16
             holds all MXFP8 numbers of float32's range, from 2^-130 on.
  folded     MXFP8 with one scale a row and one a column (`reference.fold`), rhs
             [G, N, K]: fp8 wgmma, the scales applied to the sums. fp8 wgmma
             adds in fewer bits than float32: 2e-3 of the norm, measured.

On one H200 at (R, G, K, N) = (32768, 8, 5120, 8192), times torch's bf16 grouped
matmul, forward and dgrad: plain 1.10 and 1.08, folded 2.05 and 1.94, converted
0.97 and 0.91, or 1.03 and 0.94 with weights in bf16
(experiments/results/nvidia_h200/grouped_matmul.json).

The kernel's body is in `matmul_kernel`. Rows of nobody: padding rows inside a
group's last tile hold the product of what lhs holds there; tiles past the last
group are not written. Gradients and choice of backend: `mxmoe_jax`.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import dequantize, groups, mosaic, mxfp8, stream
from pallas_kernels.hopper import common, matmul_check, matmul_kernel, tile

TMA_BYTES = 32  # rows of the array that TMA reads tiles of: the narrowest tile
# Whether rhs may be [G, N, K], by way; fp8 wgmma reads no other order.
ORDERS = {"plain": (False, True), "converted": (False, True), "folded": (True,)}
STEP_BLOCKS = 2  # blocks of 32 in a step of the converted way

GroupLayout = groups.GroupLayout
MatmulTile = tile.MatmulTile
MxArray = mxfp8.MxArray
Problem = matmul_kernel.Problem


def grouped_matmul(
  lhs: jax.Array | MxArray,
  rhs: jax.Array | MxArray,
  layout: GroupLayout,
  *,
  transpose_rhs: bool = False,
  out_dtype: Any = jnp.bfloat16,
  lhs_rows: jax.Array | None = None,
  tile: MatmulTile | None = None,
  interpret: Any = False,
) -> jax.Array:
  """y[r] = lhs[r] @ rhs[group of r].

  Args:
    lhs: [R, K] bf16, or MxArray with blocks along axis -1.
    rhs: [G, K, N], or [G, N, K] with transpose_rhs; bf16, or MxArray with
      blocks along the contracted axis. With an MxArray lhs, bf16 are weights
      that were dequantized before, once for several calls.
    layout: Of the rows of lhs.
    transpose_rhs: Contract the last axis of rhs.
    out_dtype: bfloat16 or float32.
    lhs_rows: [R, stride] fp8 whose first K columns are lhs.data, e.g. wire rows
      seen as fp8; read in its place, so that no slice of them is copied.
    tile: The schedule; the default otherwise.
    interpret: Handed on to ``plgpu.kernel``.

  Returns:
    [R, N]. Rows of no group are unspecified: inside a group's last tile they
    hold the product of lhs there, past the last group they are not written.

  Raises:
    ValueError: Shapes, dtypes or blocks do not fit each other.
    NotImplementedError: An operand that these kernels do not take.
  """
  matmul_check.check_operands(lhs, rhs, layout, transpose_rhs, out_dtype)
  matmul_check.check_rows(lhs, lhs_rows)
  call = functools.partial(
    _call,
    layout=layout,
    transposed=transpose_rhs,
    out_dtype=out_dtype,
    tile_=tile,
    interpret=interpret,
  )
  if not isinstance(lhs, MxArray):
    return call((lhs, rhs), (), way="plain")
  if not isinstance(rhs, MxArray):
    way, scales = "converted", (_step_scales(lhs),)
  elif lhs.folded and rhs.folded and transpose_rhs:
    way, scales, rhs = (
      "folded",
      (_line_scales(lhs), _line_scales(rhs)),
      rhs.data,
    )
  else:
    way, scales = "converted", (_step_scales(lhs),)
    rhs = dequantize.dequantize(rhs, interpret=interpret)
  return call((_rows(lhs, lhs_rows, way), rhs), scales, way=way)


def _rows(lhs: MxArray, rows: jax.Array | None, way: str) -> jax.Array:
  """lhs.data, or rows that hold it if TMA can step through them.

  A last step past K would multiply what follows there by zero: NaN if it is.
  """
  depth = lhs.shape[1]
  whole = depth % matmul_kernel.step_length(way) == 0
  if rows is None or not whole or rows.shape[1] % TMA_BYTES:
    return lhs.data if rows is None else rows[:, :depth]
  return rows


def _step_scales(x: MxArray) -> jax.Array:
  """Scale bytes by step, the two of a row as one: [R / 128, steps, 128] uint16.

  In pairs, because XLA transposes 16-bit elements several times faster.
  """
  scale = x.along(-1).with_layout("linear").scale
  scale = jnp.pad(scale, ((0, 0), (0, scale.shape[1] % STEP_BLOCKS)))
  pairs = scale.reshape(-1, common.ROWS, scale.shape[1] // 2, STEP_BLOCKS)
  pairs = lax.bitcast_convert_type(pairs, jnp.uint16)
  return pairs.swapaxes(1, 2)


def _line_scales(x: MxArray) -> jax.Array:
  """The one scale of each line along axis -1 of a folded array, float32."""
  return mosaic.power_of_two(
    x.with_layout("linear").scale[..., 0].astype(jnp.uint32)
  )


def _call(
  operands: tuple[Any, Any],
  scales: Sequence[jax.Array],
  *,
  way: str,
  layout: GroupLayout,
  transposed: bool,
  out_dtype: Any,
  tile_: MatmulTile | None,
  interpret: Any,
) -> jax.Array:
  """The kernel on arrays."""
  lhs, rhs = operands
  width = rhs.shape[1 if transposed else 2]
  out_bytes = jnp.dtype(out_dtype).itemsize
  problem = Problem(
    rows=lhs.shape[0],
    depth=rhs.shape[2 if transposed else 1],
    width=width,
    stride=lhs.shape[1],
    lhs_dtype=lhs.dtype,
    rhs_dtype=rhs.dtype,
    out_dtype=jnp.dtype(out_dtype),
    transposed=transposed,
    way=way,
    tile=tile_ or tile.matmul_tile(width, out_bytes, way),
  )
  if way == "folded":
    by_row, by_column = scales
    past = -width % problem.tile.columns
    scales = by_row, jnp.pad(by_column, ((0, 0), (0, past)))
  tiles = problem.rows // common.ROWS * problem.column_tiles
  ctas = stream.cta_count(tiles, 1, interpret)
  call = plgpu.kernel(
    functools.partial(
      matmul_kernel.kernel, problem=problem, interpret=interpret
    ),
    out_type=jax.ShapeDtypeStruct((problem.rows, width), problem.out_dtype),
    scratch_types=problem.scratch(),
    interpret=interpret,
    **common.launch(ctas),
  )
  count = layout.tile_count().reshape(1)
  return call(count, layout.tile_group(), lhs, rhs, *scales)


# (rows, groups, K, N): a wide layer in all forms, then one for each width of
# tile, with rows of lhs that take each swizzle.
WIDE_SHAPE = (1024, 8, 5120, 8192)
SHAPES = (
  (1024, 4, 2880, 1408),
  (512, 4, 96, 160),
  (512, 4, 160, 96),
  (512, 4, 64, 32),
)


def variants(target: str) -> list[mosaic.Variant]:
  """Every way, in both orders of rhs and in every tile width.

  Args:
    target: PTX target; only Hopper's has kernels here.
  """
  if target != "sm_90a":
    return []
  bf16, f32, e5m2 = jnp.bfloat16, jnp.float32, mxfp8.E5M2
  found = [
    _variant(WIDE_SHAPE, transposed, out_dtype, way)
    for out_dtype in (bf16, f32)
    for way, orders in ORDERS.items()
    for transposed in orders
  ]
  found += [
    _variant(WIDE_SHAPE, True, bf16, way, e5m2)
    for way in ("folded", "converted")
  ]
  for index, shape in enumerate(SHAPES):
    found += [
      _variant(shape, orders[index % len(orders)], bf16, way)
      for way, orders in ORDERS.items()
    ]
    found.append(_variant(shape, index % 2 == 1, f32, "converted"))
  return found


def _variant(
  shape: tuple[int, int, int, int],
  transposed: bool,
  out_dtype: Any,
  way: str,
  lhs_dtype: Any = mxfp8.E4M3,
) -> mosaic.Variant:
  """One entry of `variants`."""
  rows, count, depth, width = shape
  chosen = tile.matmul_tile(width, jnp.dtype(out_dtype).itemsize, way)
  rhs = (count, width, depth) if transposed else (count, depth, width)
  steps = -(-depth // mxfp8.BLOCK // STEP_BLOCKS)
  struct = jax.ShapeDtypeStruct
  scales = {
    "plain": [],
    "folded": [((rows,), jnp.float32), ((count, width), jnp.float32)],
    "converted": [((rows // common.ROWS, steps, common.ROWS), jnp.uint16)],
  }[way]

  def function(sizes, lhs, rhs, *scales):
    return _call(
      (lhs, rhs),
      scales,
      way=way,
      layout=groups.group_layout(sizes, rows),
      transposed=transposed,
      out_dtype=out_dtype,
      tile_=chosen,
      interpret=False,
    )

  lhs_dtype = jnp.dtype(jnp.bfloat16 if way == "plain" else lhs_dtype)
  order = "GNK" if transposed else "GKN"
  return mosaic.Variant(
    kernel="hopper.grouped_matmul",
    variant=(
      f"{way} {lhs_dtype.name} {depth}x{width} {order} "
      f"{jnp.dtype(out_dtype).name} {chosen.name}"
    ),
    function=function,
    arguments=(
      struct((count,), jnp.int32),
      struct((rows, depth), lhs_dtype),
      struct(rhs, mxfp8.E4M3 if way == "folded" else jnp.bfloat16),
      *(struct(*scale) for scale in scales),
    ),
    promises=(
      "wgmma_fp8" if way == "folded" else "wgmma_16bit",
      "bulk_tensor_load",
      "bulk_tensor_store",
    ),
  )
