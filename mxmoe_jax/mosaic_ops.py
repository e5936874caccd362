"""The pipeline's operations on our kernels, with the reference's signatures.

Each function calls one kernel module of `pallas_kernels`; a shape or option
that a kernel does not take is its NotImplementedError, which `backend` turns
into the reference (backend "auto") or lets through ("mosaic").
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels import dequantize as dequantize_kernel
from pallas_kernels import groups, mxfp8, permute, reference, swiglu, wire
from pallas_kernels import quantize as quantize_kernel
from pallas_kernels import requantize as requantize_kernel
from pallas_kernels.blackwell import grouped_matmul as blackwell_matmul
from pallas_kernels.blackwell import grouped_wgrad as blackwell_wgrad
from pallas_kernels.hopper import grouped_matmul as hopper_matmul
from pallas_kernels.hopper import grouped_wgrad as hopper_wgrad

MxArray = mxfp8.MxArray
Views = reference.Views

quantize = quantize_kernel.quantize
round_to_mxfp8 = quantize_kernel.round_to_mxfp8


def dequantize(x: MxArray | wire.WireRows, dtype: Any = jnp.bfloat16
               ) -> jax.Array:
  """`reference.dequantize`; rows on the wire are copied out first."""
  return dequantize_kernel.dequantize(wire.array(x), dtype)


def requantize(x: MxArray | wire.WireRows, axis: int = -2,
               **options: Any) -> MxArray:
  """`reference.requantize`; rows on the wire are read in their place."""
  if not isinstance(x, wire.WireRows):
    return requantize_kernel.requantize(x, axis, **options)
  scale, _ = permute.relayout_wire(x.packed, x.width)
  return requantize_kernel.requantize_data(x.data, scale, x.width, **options)


def in_place(kernel: Callable[..., jax.Array], blocked: bool
             ) -> Callable[..., jax.Array]:
  """A grouped matmul kernel that reads rows on the wire in their place.

  Args:
    kernel: takes ``lhs_rows``.
    blocked: whether it reads blocked scales.
  """

  def multiply(lhs: jax.Array | MxArray | wire.WireRows, *args: Any,
               **options: Any) -> jax.Array:
    if not isinstance(lhs, wire.WireRows):
      return kernel(lhs, *args, **options)
    rows = lhs.array()
    if blocked and lhs.width % groups.ROW_ALIGN == 0:  # whole scale atoms
      scale, _ = permute.relayout_wire(lhs.packed, lhs.width)
      rows = dataclasses.replace(rows, scale=scale, layout="blocked")
    return kernel(rows, *args, lhs_rows=lhs.data, **options)

  return multiply


def views(x: jax.Array, *, rows: mxfp8.Layout | None = "linear",
          columns: mxfp8.Layout | None = "linear", plain: bool = False,
          rounding: mxfp8.Rounding = "rceil", dtype: Any = mxfp8.E4M3,
          folded: bool = False) -> Views:
  """`reference.views`: both in one read of x."""
  if rows is not None and columns is not None:
    made = quantize_kernel.quantize_both(
        x, rounding=rounding, dtype=dtype, layouts=(rows, columns),
        folded=folded)
  else:
    asked: tuple[tuple[int, mxfp8.Layout | None], ...] = (
        (-1, rows), (-2, columns))
    one = {axis: quantize_kernel.quantize(x, axis, rounding=rounding,
                                          dtype=dtype, layout=layout,
                                          folded=folded and axis == -1)
           for axis, layout in asked if layout is not None}
    made = one.get(-1), one.get(-2)
  return Views(made[0], made[1], x if plain else None)


def swiglu_quantize(pre: jax.Array | MxArray, weight: jax.Array,
                    layout: groups.GroupLayout, **options: Any) -> Views:
  """`reference.swiglu_quantize`, fused."""
  out = swiglu.swiglu_quantize(_blocked(pre), weight, layout, **options)
  return Views(out.rows, out.columns, out.plain)


def swiglu_backward_quantize(pre: jax.Array | MxArray, dh: jax.Array,
                             weight: jax.Array, layout: groups.GroupLayout,
                             **options: Any) -> tuple[Views, jax.Array]:
  """`reference.swiglu_backward_quantize`, fused."""
  out = swiglu.swiglu_backward_quantize(_blocked(pre), dh, weight, layout,
                                        **options)
  return Views(out.rows, out.columns, out.plain), out.dweight


def _blocked(pre: jax.Array | MxArray) -> jax.Array | MxArray:
  return pre.with_layout("blocked") if isinstance(pre, MxArray) else pre


pack = permute.pack


def take_rows(x: jax.Array | MxArray, source: jax.Array,
              **options: Any) -> jax.Array | MxArray:
  """`reference.take_rows`; scales of an MxArray come out blocked."""
  if isinstance(x, MxArray):
    return permute.permute(x, source, **options)
  return permute.take_rows(x, source)


def kernels(generation: Literal["hopper", "blackwell"]
            ) -> dict[str, Callable[..., Any]]:
  """The kernels of a GPU generation, by the names of `backend.Ops`.

  Matmuls are written for one generation's tensor cores; the rest runs on both.
  """
  matmuls: dict[str, dict[str, Callable[..., Any]]] = {
      "hopper": dict(grouped_matmul=in_place(hopper_matmul.grouped_matmul,
                                             blocked=False),
                     grouped_wgrad=hopper_wgrad.grouped_wgrad),
      "blackwell": dict(grouped_matmul=in_place(
          blackwell_matmul.grouped_matmul, blocked=True),
                        grouped_wgrad=blackwell_wgrad.grouped_wgrad)}
  return matmuls[generation] | dict(
      quantize=quantize, views=views, requantize=requantize,
      round_to_mxfp8=round_to_mxfp8,
      dequantize=dequantize, take_rows=take_rows, pack=pack,
      swiglu_quantize=swiglu_quantize,
      swiglu_backward_quantize=swiglu_backward_quantize)

