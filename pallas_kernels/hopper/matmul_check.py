"""What the operands of Hopper's grouped matmul must be."""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import groups, mxfp8
from pallas_kernels.hopper import common

BLOCK = mxfp8.BLOCK
INSTEAD = 'Use backend="xla".'

GroupLayout = groups.GroupLayout
MxArray = mxfp8.MxArray


def check_operands(
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
  check_blocks(lhs, rhs, contracted - 3)
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


def check_blocks(lhs: Any, rhs: Any, contracted: int) -> None:
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
  if not quantized[0] or (not quantized[1] and rhs.dtype != jnp.bfloat16):
    raise NotImplementedError(
      "grouped_matmul kernel: operands must be both MxArray or both bfloat16, "
      f"or lhs an MxArray and rhs bfloat16; got {lhs!r} and {rhs!r}. {INSTEAD}"
    )
  for name, x, axis in (("lhs", lhs, -1), ("rhs", rhs, contracted)):
    if isinstance(x, MxArray) and x.block == "1x32" and x.axis != axis:
      raise ValueError(
        f"grouped_matmul: the blocks of {name} must run along the contracted "
        f"axis {axis}; got {x!r}. Quantize it along that axis."
      )


def check_rows(lhs: jax.Array | MxArray, rows: jax.Array | None) -> None:
  """Refuses ``lhs_rows`` that cannot hold the data of lhs.

  Raises:
    ValueError: lhs is no MxArray, or rows, dtype or length do not fit.
  """
  if rows is None:
    return
  if not isinstance(lhs, MxArray):
    raise ValueError("grouped_matmul: lhs_rows needs an MxArray lhs.")
  if (
    rows.ndim != 2
    or rows.shape[0] != lhs.shape[0]
    or rows.shape[1] < lhs.shape[1]
    or rows.dtype != lhs.data.dtype
  ):
    raise ValueError(
      f"grouped_matmul: lhs_rows must be {lhs.data.dtype} [{lhs.shape[0]}, "
      f"stride] with stride >= {lhs.shape[1]}; got {rows.dtype} {rows.shape}."
    )
