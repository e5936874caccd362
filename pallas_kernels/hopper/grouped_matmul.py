"""Grouped matmul on Hopper: bf16, exact MXFP8 and folded MXFP8.

    y[r] = lhs[r] @ rhs[group of r]         float32 sums, rounded once

Legend: R rows in 128-aligned groups, K contracted, N produced, G groups.

Three ways, chosen by the operands:

  bf16     both bf16: wgmma of 16-bit operands
  exact    both MXFP8: the value of the reference. Hopper has no block-scaled
           MMA, so both are dequantized to bf16, which holds every MXFP8 number
           whose scale byte is 12 to 246, and multiplied as bf16
  folded   both MXFP8 with one scale a row and one a column (`reference.fold`):
           fp8 wgmma, the scales applied to the sums

The kernel's body is in `matmul_kernel`. Rows of nobody: padding rows inside a
group's last tile hold the product of what lhs holds there; tiles past the last
group are not written. Gradients and choice of backend: `mxmoe_jax`.
"""

from collections.abc import Sequence
import functools
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import dequantize, groups, mosaic, mxfp8, reference, stream
from pallas_kernels.hopper import common, matmul_kernel, tile

BLOCK = mxfp8.BLOCK
INSTEAD = 'Use backend="xla".'

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
  tile: MatmulTile | None = None,
  interpret: Any = False,
) -> jax.Array:
  """y[r] = lhs[r] @ rhs[group of r].

  Args:
    lhs: [R, K] bf16, or MxArray with blocks along axis -1.
    rhs: [G, K, N], or [G, N, K] with transpose_rhs; bf16, or MxArray with
      blocks along the contracted axis.
    layout: Of the rows of lhs.
    transpose_rhs: Contract the last axis of rhs.
    out_dtype: bfloat16 or float32.
    tile: The schedule; the default otherwise.
    interpret: Handed on to ``plgpu.kernel``.

  Returns:
    [R, N]. Rows of no group are unspecified: inside a group's last tile they
    hold the product of lhs there, past the last group they are not written.

  Raises:
    ValueError: Shapes, dtypes or blocks do not fit each other.
    NotImplementedError: An operand that these kernels do not take.
  """
  _check(lhs, rhs, layout, transpose_rhs, out_dtype)
  call = functools.partial(
    _call,
    layout=layout,
    transposed=transpose_rhs,
    out_dtype=out_dtype,
    tile_=tile,
    interpret=interpret,
  )
  if not isinstance(lhs, MxArray) or not isinstance(rhs, MxArray):
    return call((lhs, rhs), ())
  if lhs.folded and rhs.folded and transpose_rhs:
    scales = (_line_scales(lhs), _line_scales(rhs))
    return call((lhs.data, rhs.data), scales)
  return call((_bf16(lhs, interpret), _bf16(rhs, interpret)), ())


def _line_scales(x: MxArray) -> jax.Array:
  """The one scale of each line along axis -1 of a folded array, float32."""
  return mosaic.power_of_two(
    x.with_layout("linear").scale[..., 0].astype(jnp.uint32)
  )


def _bf16(x: MxArray, interpret: Any) -> jax.Array:
  """x in bf16, by the kernel where it takes the shape."""
  if interpret:
    return reference.dequantize(x)
  try:
    return dequantize.dequantize(x)
  except NotImplementedError:  # a shape that TMA tiles do not fit
    return reference.dequantize(x)


def _call(
  operands: tuple[Any, Any],
  scales: Sequence[jax.Array],
  *,
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
    lhs_dtype=lhs.dtype,
    rhs_dtype=rhs.dtype,
    out_dtype=jnp.dtype(out_dtype),
    transposed=transposed,
    scaled=bool(scales),
    tile=tile_ or tile.matmul_tile(width, out_bytes),
  )
  if scales:
    by_row, by_column = scales
    past = -width % problem.tile.columns
    scales = by_row, jnp.pad(by_column, ((0, 0), (0, past)))
  tiles = problem.rows // common.ROWS * problem.column_tiles
  ctas = stream.cta_count(tiles, 1, interpret)
  call = plgpu.kernel(
    functools.partial(matmul_kernel.kernel, problem=problem),
    out_type=jax.ShapeDtypeStruct((problem.rows, width), problem.out_dtype),
    scratch_types=problem.scratch(),
    interpret=interpret,
    **common.launch(ctas),
  )
  count = layout.tile_count().reshape(1)
  return call(count, layout.tile_group(), lhs, rhs, *scales)


def _check(
  lhs: jax.Array | MxArray,
  rhs: jax.Array | MxArray,
  layout: GroupLayout,
  transpose_rhs: bool,
  out_dtype: Any,
) -> None:
  """Refuses what does not fit.

  Raises:
    ValueError: Shapes, dtypes or blocks do not fit each other.
    NotImplementedError: An operand that these kernels do not take.
  """
  contracted = 2 if transpose_rhs else 1
  if len(lhs.shape) != 2 or len(rhs.shape) != 3:
    raise ValueError(
      "grouped_matmul: lhs must be [R, K] and rhs [G, K, N] (or [G, N, K] with "
      f"transpose_rhs); got {lhs.shape} and {rhs.shape}."
    )
  if lhs.shape[1] != rhs.shape[contracted]:
    raise ValueError(
      f"grouped_matmul: lhs{lhs.shape} has K={lhs.shape[1]} and rhs{rhs.shape} "
      f"has {rhs.shape[contracted]} with transpose_rhs={transpose_rhs}; they "
      "must be equal."
    )
  if (layout.rows, layout.groups) != (lhs.shape[0], rhs.shape[0]):
    raise ValueError(
      f"grouped_matmul: the layout has {layout.rows} rows in {layout.groups} "
      f"groups; lhs{lhs.shape} and rhs{rhs.shape} must have as many."
    )
  if jnp.dtype(out_dtype) not in (jnp.bfloat16, jnp.float32):
    raise ValueError(
      "grouped_matmul: out_dtype must be bfloat16 or float32; got "
      f"{jnp.dtype(out_dtype).name}."
    )
  _check_blocks(lhs, rhs, contracted - 3)
  if 0 in lhs.shape or 0 in rhs.shape or layout.rows % common.ROWS:
    raise NotImplementedError(
      "grouped_matmul kernel: operands must not be empty and rows a multiple "
      f"of {common.ROWS}; got lhs{lhs.shape} and rhs{rhs.shape}. {INSTEAD}"
    )
  if lhs.shape[1] % BLOCK or rhs.shape[3 - contracted] % BLOCK:
    raise NotImplementedError(
      f"grouped_matmul kernel: K and N must be multiples of {BLOCK} (the rows "
      f"of a TMA tile); got lhs{lhs.shape} and rhs{rhs.shape}. {INSTEAD}"
    )


def _check_blocks(lhs: Any, rhs: Any, contracted: int) -> None:
  """Refuses operands of different kinds and blocks along another axis.

  Raises:
    ValueError: Blocks do not run along the contracted axis.
    NotImplementedError: Not both bf16, nor both MxArray.
  """
  quantized = [isinstance(x, MxArray) for x in (lhs, rhs)]
  if not any(quantized):
    if {lhs.dtype, rhs.dtype} == {jnp.dtype(jnp.bfloat16)}:
      return
    raise NotImplementedError(
      "grouped_matmul kernel: arrays must be bfloat16; got "
      f"{lhs.dtype} and {rhs.dtype}. {INSTEAD}"
    )
  if not all(quantized):
    raise NotImplementedError(
      "grouped_matmul kernel: operands must be both MxArray or both bfloat16; "
      f"got {type(lhs).__name__} and {type(rhs).__name__}. {INSTEAD}"
    )
  for name, x, axis in (("lhs", lhs, -1), ("rhs", rhs, contracted)):
    if x.block == "1x32" and x.axis != axis:
      raise ValueError(
        f"grouped_matmul: the blocks of {name} must run along the contracted "
        f"axis {axis}; got {x!r}. Quantize it along that axis."
      )


# (case, rows, groups, K, N): the wide shapes of the peers, and widths
# that end inside a tile.
SHAPES = ((1024, 8, 5120, 8192), (1024, 4, 2880, 1408), (1024, 4, 96, 160))


def variants(target: str) -> list[mosaic.Variant]:
  """Every way in every tile width and both orders of rhs.

  Args:
    target: Name of a GPU; only Hopper's have kernels here.
  """
  if target != "h200":
    return []
  found = []
  for rows, count, depth, width in SHAPES:
    for transposed in (False, True):
      for out_dtype in (jnp.bfloat16, jnp.float32):
        shape = (rows, count, depth, width)
        found.append(_variant(shape, transposed, out_dtype, None))
        if transposed:
          found.append(_variant(shape, transposed, out_dtype, mxfp8.E4M3))
  return found


def _variant(
  shape: tuple[int, int, int, int],
  transposed: bool,
  out_dtype: Any,
  folded: Any,
) -> mosaic.Variant:
  """One entry of `variants`; ``folded`` is the fp8 type, or None for bf16."""
  rows, count, depth, width = shape
  dtype = folded or jnp.bfloat16
  chosen = tile.matmul_tile(width, jnp.dtype(out_dtype).itemsize)
  rhs = (count, width, depth) if transposed else (count, depth, width)
  struct = jax.ShapeDtypeStruct
  arguments = [
    struct((count,), jnp.int32),
    struct((rows, depth), dtype),
    struct(rhs, dtype),
  ]
  if folded:
    arguments += [
      struct((rows,), jnp.float32),
      struct((count, width), jnp.float32),
    ]

  def function(sizes, lhs, rhs, *scales):
    return _call(
      (lhs, rhs),
      scales,
      layout=groups.group_layout(sizes, rows),
      transposed=transposed,
      out_dtype=out_dtype,
      tile_=chosen,
      interpret=False,
    )

  way = jnp.dtype(dtype).name
  order = "GNK" if transposed else "GKN"
  return mosaic.Variant(
    kernel="hopper.grouped_matmul",
    variant=(
      f"{way} {depth}x{width} {order} {jnp.dtype(out_dtype).name} {chosen.name}"
    ),
    function=function,
    arguments=tuple(arguments),
    promises=(
      "wgmma_fp8" if folded else "wgmma_16bit",
      "bulk_tensor_load",
      "bulk_tensor_store",
    ),
  )
