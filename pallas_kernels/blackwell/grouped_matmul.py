"""Grouped matmul on Blackwell: block-scaled MXFP8, forward and dgrad.

    y[r] = lhs[r] @ rhs[group of r]         float32 sums, rounded once

Legend: R rows in 128-aligned groups (`groups.GroupLayout`), K contracted, N
produced, G groups. lhs [R, K] has blocks along K. rhs has blocks along K too:

    forward   [G, K, N], contiguous along N (MN-major), as weights are stored
    dgrad     [G, N, K], contiguous along K (K-major): transpose_rhs

Schedule (`matmul_kernel`). A persistent pair of CTAs on each two SMs; a warp
loads by TMA, a warp of one CTA multiplies for both, a warpgroup of each stores
one tile while the next is multiplied. Tiles are dealt out on the device: only
rows that exist are computed. They are walked group by group, 8 tiles of rows at
a time for all of N, so that what works at one time shares the weights of one
group, or of a few small ones, in L2, and these rows stay there.

Rows of nobody: padding rows inside a group's last 128 hold the product of what
lhs holds there; rows past the last group are not written, and nothing that they
hold reaches another row.

Compiled and interpreted, not run: no Blackwell GPU was at hand. `bring_up` runs
`simple_matmul` first. Tiles of two CTAs rest on MN-major operands in
block-scaled MMAs of a pair, which ``MatmulTile(transposed=True)`` does without
(rhs is copied), and on overlapping accumulators, which
``MatmulTile(accumulators=1)`` does without.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import groups, mosaic, mxfp8, tiles
from pallas_kernels.blackwell import matmul_kernel, matmul_problem, memory
from pallas_kernels.blackwell import tile as tile_lib

MxArray = mxfp8.MxArray
MatmulTile = tile_lib.MatmulTile
Problem = matmul_problem.Problem

DEPTH = tile_lib.DEPTH
PAIR_ROWS = 160  # mean rows of a group from which pairs of CTAs pay


def _refuse(what: str) -> NotImplementedError:
  return NotImplementedError(
    f'grouped_matmul kernel: {what}. Use backend="xla".'
  )


def check(
  lhs: jax.Array | MxArray,
  rhs: jax.Array | MxArray,
  layout: groups.GroupLayout,
  transpose_rhs: bool,
  out_dtype: Any,
) -> None:
  """Refuses what the kernels do not take.

  Raises:
    NotImplementedError: Not MXFP8, another result, or widths that are no
      multiple of 32.
    ValueError: Shapes or blocks that do not belong together.
  """
  contracted = -1 if transpose_rhs else -2
  if (
    (lhs.ndim, rhs.ndim) != (2, 3)
    or lhs.shape[0] != layout.rows
    or rhs.shape[0] != layout.groups
    or lhs.shape[1] != rhs.shape[contracted]
  ):
    raise ValueError(
      f"grouped_matmul: lhs must be [{layout.rows}, K] and rhs "
      f"[{layout.groups}, {'N, K' if transpose_rhs else 'K, N'}], as many rows "
      f"and groups as the layout; got lhs{lhs.shape} and rhs{rhs.shape}."
    )
  for name, x, axis in (("lhs", lhs, -1), ("rhs", rhs, contracted)):
    if not isinstance(x, MxArray):
      raise _refuse(
        "on Blackwell it multiplies MXFP8 operands by block-scaled MMA and no "
        f"others; got {name} {x.dtype}"
      )
    if x.block == "1x32" and x.axis != axis:
      raise ValueError(
        f"grouped_matmul: blocks of {name} must run along the contracted axis "
        f"{axis}; got {x!r}. Quantize it along {axis}."
      )
  widths = lhs.shape[1], rhs.shape[-3 - contracted]
  if any(not n or n % mxfp8.BLOCK for n in widths):
    raise _refuse(
      "K and N must be positive multiples of 32 (rows that TMA tiles fit); got "
      f"K={widths[0]}, N={widths[1]}"
    )
  if jnp.dtype(out_dtype) not in (jnp.float32, jnp.bfloat16):
    raise _refuse(f"out_dtype must be float32 or bfloat16; got {out_dtype}")
  if not layout.rows or not layout.groups:
    raise _refuse("there must be rows and groups")


def default_tile(rows: int, count: int, width: int) -> MatmulTile:
  """The tile measured on this GPU, or the one whose padded work takes least.

  Args:
    rows: R.
    count: G.
    width: N.
  """
  case = "pairs" if rows >= PAIR_ROWS * count else "single"
  found = tiles.tuned(
    "blackwell.grouped_matmul", mosaic.device_kind(), case, width
  )
  if found is not None:
    return MatmulTile(**found)
  shapes = [
    shape for shape in tile_lib.SHAPES if (shape[0] > 128) == (case == "pairs")
  ]

  def cost(shape):
    _, columns, share = shape
    return -(-width // columns) * columns / share, columns

  lhs, rhs, _ = min(shapes, key=cost)
  return MatmulTile(lhs=lhs, rhs=rhs, stages=5 if lhs == rhs else 7)


def wire_data(lhs: MxArray, data: jax.Array | None) -> jax.Array:
  """The array that holds lhs's data in its first K columns.

  Where K is no multiple of 128 the last step would read what follows in the
  row, which may be the code of NaN: such rows are copied out.

  Raises:
    ValueError: It is not fp8 [R, at least K].
  """
  if data is None:
    return lhs.data
  if (
    data.ndim != 2
    or data.shape[0] != lhs.shape[0]
    or data.shape[1] < lhs.shape[1]
    or data.dtype != lhs.data.dtype
  ):
    raise ValueError(
      f"grouped_matmul: lhs_rows must be {lhs.data.dtype} [{lhs.shape[0]}, at "
      f"least {lhs.shape[1]}]; got {data.dtype} {data.shape}."
    )
  return data if lhs.shape[1] % DEPTH == 0 else data[:, : lhs.shape[1]]


def grouped_matmul(
  lhs: jax.Array | MxArray,
  rhs: jax.Array | MxArray,
  layout: groups.GroupLayout,
  *,
  transpose_rhs: bool = False,
  out_dtype: Any = jnp.bfloat16,
  lhs_rows: jax.Array | None = None,
  tile: MatmulTile | None = None,
  interpret: Any = False,
) -> jax.Array:
  """As `reference.grouped_matmul`, up to the order of float32 sums.

  Args:
    lhs: [R, K] MxArray with blocks along axis -1, any layout of scales (blocked
      ones are read as they are); K a multiple of 32.
    rhs: [G, K, N], or [G, N, K] with transpose_rhs: MxArray with blocks along
      K, or 32x32. e4m3 and e5m2 may be mixed.
    layout: Of the rows.
    transpose_rhs: Contract the last axis of rhs.
    out_dtype: bfloat16 or float32.
    lhs_rows: [R, stride] fp8 whose first K columns are lhs.data, e.g. wire rows
      seen as fp8; read in its place, so that no slice of them is copied.
    tile: The schedule; None for the default.
    interpret: Interpret parameters; False compiles.

  Returns:
    [R, N]. Padding rows inside a group's last 128 hold the product of what lhs
    holds there; rows past the last group are not written.

  Raises:
    NotImplementedError: The kernel does not take this width or dtype.
    ValueError: Shapes or block axes do not belong together.
  """
  check(lhs, rhs, layout, transpose_rhs, out_dtype)
  assert isinstance(lhs, MxArray)
  assert isinstance(rhs, MxArray)
  width = rhs.shape[1 if transpose_rhs else 2]
  tile = tile or default_tile(layout.rows, layout.groups, width)
  _, a_scale = memory.arrays(lhs, -1)
  b, b_scale = memory.arrays(rhs, -1 if transpose_rhs else -2)
  a = wire_data(lhs, lhs_rows)
  if tile.transposed and not transpose_rhs:
    b = jnp.swapaxes(b, 1, 2)
  problem = Problem(
    groups=layout.groups,
    rows=layout.rows,
    depth=lhs.shape[1],
    stride=a.shape[1],
    width=width,
    turned=transpose_rhs or tile.transposed,
    dtypes=(a.dtype, b.dtype),
    out_dtype=jnp.dtype(out_dtype),
    tile=tile,
  )
  most = problem.down_tiles * problem.across_tiles
  call = memory.call(
    matmul_kernel.kernel, problem, most, "blackwell_grouped_matmul", interpret
  )
  table, count = matmul_problem.schedule(layout, problem)
  return call(table, count, a, b, a_scale, b_scale)


# name, rows, K, N, rhs transposed, result, dtypes, the tile if not default.
_VARIANTS: tuple[tuple[str, int, int, int, bool, Any, Any,
                       MatmulTile | None], ...] = (
  ("forward", 16384, 7168, 4096, False, jnp.bfloat16, mxfp8.E4M3, None),
  ("forward float32", 16384, 2048, 7168, False, jnp.float32, mxfp8.E4M3, None),
  ("dgrad", 16384, 4096, 7168, True, jnp.bfloat16, mxfp8.E4M3, None),
  ("dgrad e5m2", 16384, 4096, 7168, True, jnp.bfloat16, mxfp8.E5M2, None),
  ("dgrad float32", 16384, 4096, 7168, True, jnp.float32, mxfp8.E4M3, None),
  ("forward narrow", 16384, 2048, 128, False, jnp.bfloat16, mxfp8.E4M3, None),
  ("forward narrow float32", 16384, 2048, 128, False, jnp.float32, mxfp8.E4M3,
   None),
  ("dgrad narrow", 16384, 2048, 128, True, jnp.bfloat16, mxfp8.E4M3, None),
  ("forward small groups", 1024, 2048, 768, False, jnp.bfloat16, mxfp8.E4M3,
   None),
  ("forward small groups float32", 1024, 2048, 768, False, jnp.float32,
   mxfp8.E4M3, None),
  ("dgrad small groups", 1024, 1408, 2048, True, jnp.bfloat16, mxfp8.E4M3,
   None),
  ("forward swizzle 64", 16384, 2880, 2880, False, jnp.bfloat16, mxfp8.E4M3,
   None),
  ("dgrad swizzle 32", 16384, 96, 160, True, jnp.bfloat16, mxfp8.E4M3, None),
  ("forward one accumulator", 16384, 2048, 1408, False, jnp.bfloat16,
   mxfp8.E4M3, MatmulTile(accumulators=1)),
  ("forward transposed", 16384, 2048, 1408, False, jnp.bfloat16, mxfp8.E4M3,
   MatmulTile(transposed=True)),
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
  rows: int,
  depth: int,
  width: int,
  transposed: bool,
  out_dtype: Any,
  dtype: Any,
  tile: MatmulTile | None,
) -> mosaic.Variant:
  """One entry of `variants`."""
  tile = tile or default_tile(rows, 8, width)

  def function(*operands):
    return grouped_matmul(
      *operands, transpose_rhs=transposed, out_dtype=out_dtype, tile=tile
    )

  return variant(
    "grouped_matmul",
    f"{name} {tile.name}",
    function,
    (rows, depth, width),
    transposed,
    dtype,
    *(("mma_of_a_pair",) if tile.ctas > 1 else ()),
  )


def variant(
  kernel: str,
  name: str,
  function: Callable[..., jax.Array],
  shape: tuple[int, int, int],
  transposed: bool,
  dtype: Any,
  *promises: str,
) -> mosaic.Variant:
  """A kernel of this contract, with blocked scales and 8 groups.

  Args:
    kernel: Its name.
    name: Of the variant.
    function: ``function(lhs, rhs, layout)`` calls it.
    shape: R, K, N.
    transposed: rhs is [G, N, K].
    dtype: Of the elements of lhs; those of rhs are e4m3.
    *promises: Beside those that all such kernels make.
  """
  rows, depth, width = shape
  count, axis = 8, -1 if transposed else -2
  rhs = (count, width, depth) if transposed else (count, depth, width)
  struct = jax.ShapeDtypeStruct

  def scales(shape, axis):
    blocked = mxfp8.scale_shape(shape, axis, "1x32", "blocked")
    return struct(blocked, jnp.uint8)

  def run(lhs, rhs, lhs_scale, rhs_scale, sizes):
    return function(
      MxArray(lhs, lhs_scale, axis=-1, layout="blocked"),
      MxArray(rhs, rhs_scale, axis=axis, layout="blocked"),
      groups.group_layout(sizes, rows),
    )

  return mosaic.Variant(
    kernel=f"blackwell.{kernel}",
    variant=name,
    function=run,
    arguments=(
      struct((rows, depth), dtype),
      struct(rhs, mxfp8.E4M3),
      scales((rows, depth), -1),
      scales(rhs, axis),
      struct((count,), jnp.int32),
    ),
    promises=(
      *("mxfp8_mma", "scale_copy_to_tmem", "tmem_load"),
      *("bulk_tensor_load", "bulk_tensor_store", *promises),
    ),
  )
