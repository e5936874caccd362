"""Grouped wgrad on Blackwell: the gradient of every expert's weight, in MXFP8.

    dw[g] = sum over the rows r of group g of lhs[r]^T rhs[r]     (+ accumulate)

Legend: lhs [R, K], rhs [R, N], dw [G, K, N]; the rows are aligned groups
(`groups.GroupLayout`). Both operands have blocks of 32 rows (axis -2), so that
the tensor core's block-scaled MMA contracts rows; it reads both across
(MN-major), without transposed copies.

Padding rows must hold zeros and a finite scale: a group's last 128 rows are
contracted whole. Rows past the last group are not read.

Schedule (`wgrad_kernel`). A persistent pair of CTAs on each two SMs; a warp
loads by TMA, a warp of one CTA multiplies for both, a warpgroup of each stores
one tile while the next is multiplied. A tile is a piece of one dw[g]; its steps
walk the rows of the group 128 at a time, so that their number is known on the
device only. Groups are taken from the longest to the shortest and tiles are
dealt round, so that no SM works longer than the others by more than one tile. A
group without rows costs the store of its zeros.

Compiled and interpreted, not run: no Blackwell GPU was at hand. Tiles of two
CTAs rest on operands across in block-scaled MMAs of a pair, which
``MatmulTile(transposed=True)`` does without, and on overlapping accumulators,
which ``MatmulTile(accumulators=1)`` does without.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import groups, mosaic, mxfp8
from pallas_kernels.blackwell import memory, wgrad_kernel, wgrad_problem
from pallas_kernels.blackwell import tile as tile_lib

MxArray = mxfp8.MxArray
MatmulTile = tile_lib.MatmulTile


def _refuse(what: str) -> NotImplementedError:
  return NotImplementedError(
    f'grouped_wgrad kernel: {what}. Use backend="xla".'
  )


def _check_operand(name: str, x: jax.Array | MxArray, rows: int) -> None:
  """Refuses an operand that the kernel does not take.

  Raises:
    NotImplementedError: Not MXFP8, or columns that are no multiple of 32.
    ValueError: Other rows than the layout's, or blocks along the columns.
  """
  if x.ndim != 2 or x.shape[0] != rows:
    raise ValueError(
      f"grouped_wgrad: {name} must be [{rows}, columns], the rows of the "
      f"layout; got {x.shape}."
    )
  if not isinstance(x, MxArray):
    raise _refuse(
      "on Blackwell it multiplies MXFP8 operands by block-scaled MMA and no "
      f"others; got {name} {x.dtype}"
    )
  if x.block != "32x32" and x.axis != -2:
    raise ValueError(
      "grouped_wgrad: rows are contracted, so MXFP8 blocks must run along axis "
      f"-2; got {name} {x!r}. Quantize it along axis -2."
    )
  if not x.shape[1] or x.shape[1] % mxfp8.BLOCK:
    raise _refuse(
      "K and N must be positive multiples of 32 (rows that TMA tiles fit); got "
      f"{name} with {x.shape[1]} columns"
    )


def _check_result(
  shape: tuple[int, ...], out_dtype: Any, accumulate: jax.Array | None
) -> None:
  """Refuses a result that the kernel does not make.

  Raises:
    NotImplementedError: Another dtype, or sums that are not float32.
    ValueError: ``accumulate`` is not float32 of ``shape``.
  """
  if out_dtype not in (jnp.float32, jnp.bfloat16):
    raise _refuse(f"out_dtype must be float32 or bfloat16; got {out_dtype}")
  if accumulate is None:
    return
  if accumulate.shape != shape or accumulate.dtype != jnp.float32:
    raise ValueError(
      f"grouped_wgrad: accumulate must be float32 {shape}; got "
      f"{accumulate.dtype} {accumulate.shape}."
    )
  if out_dtype != jnp.float32:
    raise _refuse(f"it accumulates in float32; got out_dtype {out_dtype}")


def default_tile(depth: int, width: int, *, accumulate: bool) -> MatmulTile:
  """The tile whose padded work takes least; the narrower one of equals.

  Args:
    depth: K, columns of lhs.
    width: N, columns of rhs.
    accumulate: Whether the result is added to an array, which is loaded ahead
      into buffers that cost a stage.
  """

  def cost(shape):
    lhs, rhs, share = shape
    tiles = -(-depth // lhs) * -(-width // rhs)
    return tiles * lhs * rhs / share, lhs * rhs

  lhs, rhs, _ = min(tile_lib.SHAPES, key=cost)
  stages = 5 if lhs == rhs else 7
  if accumulate:
    return MatmulTile(lhs=lhs, rhs=rhs, stages=stages - 1, buffers=4)
  return MatmulTile(lhs=lhs, rhs=rhs, stages=stages)


def grouped_wgrad(
  lhs: jax.Array | MxArray,
  rhs: jax.Array | MxArray,
  layout: groups.GroupLayout,
  *,
  out_dtype: Any = jnp.float32,
  accumulate: jax.Array | None = None,
  tile: MatmulTile | None = None,
  interpret: Any = False,
) -> jax.Array:
  """As `reference.grouped_wgrad`, up to the order of float32 sums.

  Args:
    lhs: [R, K] MxArray with blocks along axis -2 (32x1) or 32x32, any layout of
      scales (blocked ones are read as they are); K a multiple of 32. Padding
      rows must be zero with finite scales; rows past the last group are not
      read.
    rhs: [R, N] likewise; e4m3 and e5m2 may be mixed.
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
  out_dtype = jnp.dtype(out_dtype)
  for name, x in (("lhs", lhs), ("rhs", rhs)):
    _check_operand(name, x, layout.rows)
  shape = (layout.groups, lhs.shape[1], rhs.shape[1])
  _check_result(shape, out_dtype, accumulate)
  if not layout.rows or not layout.groups:
    raise _refuse("there must be rows and groups")
  assert isinstance(lhs, MxArray)
  assert isinstance(rhs, MxArray)
  default = default_tile(
    lhs.shape[1], rhs.shape[1], accumulate=accumulate is not None
  )
  problem = wgrad_problem.Problem(
    groups=layout.groups,
    rows=layout.rows,
    depth=lhs.shape[1],
    width=rhs.shape[1],
    dtypes=(lhs.data.dtype, rhs.data.dtype),
    out_dtype=out_dtype,
    accumulate=accumulate is not None,
    tile=tile or default,
  )
  call = memory.call(
    wgrad_kernel.kernel,
    problem,
    problem.tiles,
    "blackwell_grouped_wgrad",
    interpret,
  )
  (a, a_scale), (b, b_scale) = (memory.arrays(x, -2) for x in (lhs, rhs))
  if problem.tile.transposed:
    a, b = a.T, b.T
  group, start, steps = layout.by_size(groups.ROW_ALIGN)
  order = jnp.stack([group, start // groups.ROW_ALIGN, steps])
  more = () if accumulate is None else (accumulate,)
  return call(order, a, b, a_scale, b_scale, *more)


# name, K, N, result, whether it is added to an array, the tile if not default.
_VARIANTS: tuple[tuple[str, int, int, Any, bool, MatmulTile | None], ...] = (
  ("float32", 2048, 1408, jnp.float32, False, None),
  ("bf16", 2048, 1408, jnp.bfloat16, False, None),
  ("float32 added", 2048, 1408, jnp.float32, True, None),
  ("narrow float32", 2048, 128, jnp.float32, False, None),
  ("narrow bf16", 2048, 128, jnp.bfloat16, False, None),
  ("narrow float32 added", 2048, 128, jnp.float32, True, None),
  ("small float32", 96, 128, jnp.float32, False, None),
  ("small bf16", 96, 128, jnp.bfloat16, False, None),
  ("small float32 added", 96, 128, jnp.float32, True, None),
  ("swizzle 64 float32", 2880, 2880, jnp.float32, False, None),
  ("swizzle 32 float32", 160, 2048, jnp.float32, False, None),
  ("one accumulator", 2048, 1408, jnp.float32, False,
   MatmulTile(accumulators=1)),
  ("transposed", 2880, 1408, jnp.float32, False, MatmulTile(transposed=True)),
)  # fmt: skip


def variants(target: str) -> list[mosaic.Variant]:
  """Every result type and tile that the library selects; Blackwell only.

  Args:
    target: PTX target, e.g. ``sm_90a``.
  """
  if target != "sm_100a":
    return []
  return [_variant(*one) for one in _VARIANTS]


def _variant(
  name: str,
  depth: int,
  width: int,
  out_dtype: Any,
  accumulate: bool,
  tile: MatmulTile | None,
) -> mosaic.Variant:
  """One entry of `variants`."""
  count, rows = 8, 4096
  tile = tile or default_tile(depth, width, accumulate=accumulate)

  def function(lhs, rhs, lhs_scale, rhs_scale, sizes, *accumulate):
    layout = groups.group_layout(sizes, rows)
    a = MxArray(lhs, lhs_scale, axis=-2, layout="blocked")
    b = MxArray(rhs, rhs_scale, axis=-2, layout="blocked")
    more = accumulate[0] if accumulate else None
    return grouped_wgrad(
      a, b, layout, out_dtype=out_dtype, accumulate=more, tile=tile
    )

  def scales(columns):
    shape = mxfp8.scale_shape((rows, columns), -2, "1x32", "blocked")
    return jax.ShapeDtypeStruct(shape, jnp.uint8)

  arguments = [
    jax.ShapeDtypeStruct((rows, depth), mxfp8.E4M3),
    jax.ShapeDtypeStruct((rows, width), mxfp8.E5M2),
    scales(depth),
    scales(width),
    jax.ShapeDtypeStruct((count,), jnp.int32),
  ]
  if accumulate:
    arguments.append(jax.ShapeDtypeStruct((count, depth, width), jnp.float32))
  return mosaic.Variant(
    kernel="blackwell.grouped_wgrad",
    variant=f"{name} {tile.name}",
    function=function,
    arguments=tuple(arguments),
    promises=(
      *("mxfp8_mma", "scale_copy_to_tmem", "tmem_load"),
      *("bulk_tensor_load", "bulk_tensor_store"),
      *(("mma_of_a_pair",) if tile.ctas > 1 else ()),
    ),
  )
