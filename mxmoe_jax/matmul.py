"""Quantize and grouped matmul for JAX users: differentiable where it can be.

  quantize        x -> MxArray           not differentiable, and says so
  grouped_matmul  y[r] = lhs[r] @ rhs[group of r], with its gradients

    forward      lhs 1x32 along K     x  rhs blocks along K
    input_grad   dy  1x32 along N     x  rhs blocks along N
    weight_grad  lhs 32x1 along rows  x  dy  32x1 along rows

Legend: M rows, K contracted, N produced, G groups. Blocks of 32 rows never
cross a group: rows are copied into 128-aligned groups first. The layer does
not use this entry (its rows are aligned from the start); both take `operands`.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import core, custom_batching
import jax.numpy as jnp
import numpy as np

from mxmoe_jax import backend as backend_lib
from mxmoe_jax import config as config_lib
from mxmoe_jax import operands
from pallas_kernels import groups, mxfp8, reference

MxArray = mxfp8.MxArray
Recipe = config_lib.Recipe


@dataclasses.dataclass(frozen=True, kw_only=True)
class _QuantizeOptions:
  axis: int
  block: str
  rounding: str
  dtype: Any
  layout: str
  backend: str


def quantize(x: jax.Array, axis: int = -1, *, block: mxfp8.Block = "1x32",
             rounding: mxfp8.Rounding = "rceil", dtype: Any = mxfp8.E4M3,
             layout: mxfp8.Layout = "linear",
             backend: config_lib.Backend = "auto") -> MxArray:
  """Quantizes an array to MXFP8.

  Args:
    x: [...] bf16, float16 or float32; blocked axes are multiples of 32.
    axis: axis that one block of 32 runs along.
    block: "1x32", or "32x32" over the last two axes (weights).
    rounding: "rceil" (default), "floor" (OCP MX v1.0), "ceil" or "even".
    dtype: float8_e4m3fn or float8_e5m2.
    layout: "linear" scales, or "blocked" as the block-scaled MMA reads them.
    backend: "auto", "mosaic" or "xla".

  Returns:
    MxArray of the shape of x. NaN and Inf make their whole block NaN.

  Raises:
    ValueError: unknown option, or an axis that is no multiple of 32.
    TypeError: x is not floating, or a gradient through it is asked.
  """
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize not in (
      2, 4):
    raise TypeError(
        "quantize: x must be bfloat16, float16 or float32; got"
        f" {x.dtype}.")
  if not -x.ndim <= axis < x.ndim:
    raise ValueError(
        f"quantize: axis must lie in -{x.ndim}..{x.ndim - 1} for x{x.shape};"
        f" got {axis}.")
  options = _QuantizeOptions(axis=axis, block=block, rounding=rounding,
                             dtype=jnp.dtype(dtype), layout=layout,
                             backend=backend)
  return _quantize(x, options)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _quantize(x: jax.Array, options: _QuantizeOptions) -> MxArray:
  ops = backend_lib.select(options.backend)
  return ops.quantize(x, options.axis, block=options.block,
                      rounding=options.rounding, dtype=options.dtype,
                      layout=options.layout)


@_quantize.defjvp
def _quantize_jvp(options, primals, tangents):
  raise TypeError(
      "quantize: no gradient flows through an MXFP8 payload (it would be"
      " silently 0). Pass the unquantized array to grouped_matmul or MoE,"
      " which quantize inside and differentiate, or wrap the input in"
      " jax.lax.stop_gradient.")


def dequantize(x: MxArray, dtype: Any = jnp.bfloat16, *,
               backend: config_lib.Backend = "auto") -> jax.Array:
  """The numbers of an MxArray in bfloat16 (rounded once) or float32 (exact).

  Raises:
    TypeError: x is no MxArray, or a gradient with respect to it is asked.
    ValueError: another dtype is asked.
  """
  if not isinstance(x, MxArray):
    raise TypeError(f"dequantize: x must be an MxArray; got {type(x)}.")
  if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
    raise ValueError(
        "dequantize: dtype must be bfloat16 or float32; got"
        f" {jnp.dtype(dtype).name}.")
  return backend_lib.select(backend).dequantize(_constant(x), dtype)


@jax.custom_jvp
def _constant(x: MxArray) -> MxArray:
  """The MxArray itself; differentiating through it raises."""
  return x


@_constant.defjvp
def _constant_jvp(primals, tangents):
  raise TypeError(
      "an MxArray cannot be differentiated: its payload is integers to JAX."
      " Differentiate with respect to the unquantized array (pass that, or"
      " QuantizedWeights beside the master weights), or wrap it in"
      " jax.lax.stop_gradient.")


@custom_batching.custom_vmap
def refuse_vmap(tree: Any) -> Any:
  """The tree itself; vmap of it raises with the way out."""
  return tree


@refuse_vmap.def_vmap
def _refuse_vmap(axis_size, in_batched, tree):
  raise NotImplementedError(
      f"vmap (here over {axis_size}) of a grouped matmul or of the MoE layer is"
      " not supported: kernels see one set of groups. Fold the axis into the"
      " rows (any leading dimensions of x are accepted), or use jax.lax.map.")


@dataclasses.dataclass(frozen=True)
class _MatmulOptions:
  recipe: Recipe
  backend: str
  dtype: Any


def grouped_matmul(lhs: jax.Array | MxArray, rhs: jax.Array | MxArray,
                   group_sizes: Any, *, recipe: Recipe = Recipe(),
                   preferred_element_type: Any = None,
                   backend: config_lib.Backend = "auto") -> jax.Array:
  """y[r] = lhs[r] @ rhs[g] for the rows r of group g; `jax.lax.ragged_dot`.

  Differentiable in lhs and rhs where they are arrays.

  Args:
    lhs: [M, K] array, or MxArray with blocks along axis -1. Rows of group 0
      first, then group 1, and so on; rows past the last group are ignored.
    rhs: [G, K, N] array, or MxArray with blocks along axis -2 (or 32x32).
    group_sizes: [G] integers, any sizes, their sum at most M. A traced sum
      that exceeds M cannot be seen: the last groups are cut.
    recipe: its forward, input_grad, weight_grad, rounding, grad_dtype and
      weight_block count here.
    preferred_element_type: dtype of the result; default is the promotion of
      both operands' (an MxArray counts as bf16).
    backend: "auto", "mosaic" or "xla".

  Returns:
    [M, N]; rows past the last group are exactly 0.

  Raises:
    ValueError: shapes, lengths or concrete sums do not fit, or K or N is no
      multiple of 32 where the recipe quantizes along it.
    TypeError: group_sizes are not integers, or a gradient with respect to an
      MxArray is asked.
    NotImplementedError: under vmap.
  """
  lhs = lhs if isinstance(lhs, MxArray) else jnp.asarray(lhs)
  rhs = rhs if isinstance(rhs, MxArray) else jnp.asarray(rhs)
  if not isinstance(recipe, Recipe):
    raise TypeError(f"grouped_matmul: recipe must be a Recipe; got {recipe!r}.")
  if not hasattr(group_sizes, "dtype"):
    group_sizes = np.asarray(group_sizes)
  _check_matmul(lhs, rhs, group_sizes, recipe)
  if preferred_element_type is None:
    types = [jnp.bfloat16 if isinstance(x, MxArray) else x.dtype
             for x in (lhs, rhs)]
    preferred_element_type = jnp.promote_types(*types)
  lhs, rhs = (_constant(x) if isinstance(x, MxArray) else x for x in (lhs, rhs))
  sizes = groups.clamp_sizes(jnp.asarray(group_sizes, jnp.int32),
                             lhs.shape[0])
  options = _MatmulOptions(recipe, backend, jnp.dtype(preferred_element_type))
  return _grouped_matmul(lhs, rhs, sizes, options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _grouped_matmul(lhs, rhs, sizes, options):
  lhs, rhs, sizes = refuse_vmap((lhs, rhs, sizes))
  ops = backend_lib.select(options.backend)
  recipe = options.recipe
  layout, rows = _align(lhs, sizes)
  x = operands.operand(rows, -1, recipe.forward, ops, recipe)
  w = operands.weight_operand(rhs, -2, recipe.forward, ops, recipe)
  out = operands.multiply(x, w, layout, ops,
                          out_dtype=_kernel_dtype(options.dtype))
  back = groups.packed_source(layout, lhs.shape[0])
  return groups.take_rows(out, back).astype(options.dtype)


def _grouped_matmul_fwd(lhs, rhs, sizes, options):
  return _grouped_matmul(lhs, rhs, sizes, options), (lhs, rhs, sizes)


def _grouped_matmul_bwd(options, residuals, dy):
  lhs, rhs, sizes = residuals
  ops = backend_lib.select(options.backend)
  recipe, grad_type = options.recipe, options.recipe.gradient_dtype
  layout, dy_rows = _align(dy, sizes)
  dlhs = drhs = None
  if not isinstance(lhs, MxArray):
    grad = operands.operand(dy_rows, -1, recipe.input_grad, ops, recipe,
                            grad_type)
    w = operands.weight_operand(rhs, -1, recipe.input_grad, ops, recipe)
    dlhs = operands.multiply(grad, w, layout, ops, transpose_rhs=True,
                             out_dtype=_kernel_dtype(lhs.dtype))
    back = groups.packed_source(layout, lhs.shape[0])
    dlhs = groups.take_rows(dlhs, back).astype(lhs.dtype)
  if not isinstance(rhs, MxArray):
    rows = operands.operand(_align(lhs, sizes)[1], -2, recipe.weight_grad, ops,
                            recipe)
    grad = operands.operand(dy_rows, -2, recipe.weight_grad, ops, recipe,
                            grad_type)
    drhs = ops.grouped_wgrad(rows, grad, layout).astype(rhs.dtype)
  return dlhs, drhs, None


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)


def _align(x: jax.Array | MxArray, sizes: jax.Array):
  """(layout, the rows of x in 128-aligned groups, zeros between)."""
  rows = groups.aligned_rows(x.shape[0], sizes.shape[0])
  layout = groups.group_layout(sizes, rows)
  source = groups.aligned_source(layout)
  if isinstance(x, MxArray):
    return layout, reference.take_mx_rows(x, source)
  return layout, groups.take_rows(x, source)


def _kernel_dtype(dtype: Any) -> Any:
  """bf16 results for 16-bit outputs, float32 for all others."""
  return jnp.bfloat16 if jnp.dtype(dtype) == jnp.bfloat16 else jnp.float32


def _check_matmul(lhs, rhs, group_sizes, recipe: Recipe) -> None:
  if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
    raise ValueError(
        "grouped_matmul: lhs must be [M, K] and rhs [G, K, N] with one K; got"
        f" lhs{tuple(lhs.shape)} and rhs{tuple(rhs.shape)}.")
  _check_blocks(lhs, rhs)
  _check_shardings(lhs, rhs)
  if not jnp.issubdtype(jnp.result_type(group_sizes), jnp.integer):
    raise TypeError(
        "grouped_matmul: group_sizes must be integers (int32); got"
        f" {jnp.result_type(group_sizes)}.")
  if jnp.shape(group_sizes) != (rhs.shape[0],):
    raise ValueError(
        "grouped_matmul: group_sizes must have one entry per group (expert)"
        f" of rhs; got shape {jnp.shape(group_sizes)} for"
        f" {rhs.shape[0]} groups in rhs{tuple(rhs.shape)}.")
  if not isinstance(group_sizes, core.Tracer):
    sizes = np.asarray(group_sizes).astype(np.int64)
    if (sizes < 0).any() or sizes.sum() > lhs.shape[0]:
      raise ValueError(
          "grouped_matmul: group_sizes must not be negative and their sum must"
          f" not exceed the rows of lhs; got {sizes.tolist()}, sum"
          f" {sizes.sum()}, for {lhs.shape[0]} rows.")
  for name, axis, width in (("forward", "K", rhs.shape[1]),
                            ("input_grad", "N", rhs.shape[2])):
    if getattr(recipe, name) == "mxfp8" and width % mxfp8.BLOCK:
      raise ValueError(
          f"grouped_matmul: {axis} must be a multiple of {mxfp8.BLOCK} under"
          f" a recipe with {name}='mxfp8'; got {axis}={width}. Pad it to"
          f" {groups.round_up(width, mxfp8.BLOCK)}, or use {name}='bf16'.")


def _check_shardings(*operands) -> None:
  """Groups cross the shards of an Explicit mesh: the user must say how."""
  for x in jax.tree.leaves(operands):
    spec = getattr(jax.typeof(x).sharding, "spec", ())
    if any(axis is not None for axis in spec):
      raise NotImplementedError(
          "grouped_matmul: operands that are split over a mesh with Explicit"
          f" axes are not partitioned for you; got {tuple(x.shape)} sharded as"
          f" {spec}. Call it inside jax.shard_map, use a mesh with Auto axes,"
          " or use MoE, which exchanges rows itself.")


def _check_blocks(lhs, rhs) -> None:
  """An MxArray operand must be quantized along K, rows with linear scales."""
  if isinstance(lhs, MxArray) and (lhs.axis, lhs.block, lhs.layout) != (
      -1, "1x32", "linear"):
    raise ValueError(
        "grouped_matmul: an MxArray lhs needs 1x32 blocks along axis -1 (K)"
        f" with linear scales; got {lhs!r}. Use quantize(x, axis=-1).")
  if isinstance(rhs, MxArray) and rhs.block == "1x32" and rhs.axis != -2:
    raise ValueError(
        "grouped_matmul: an MxArray rhs needs blocks along axis -2 (K), or"
        f" 32x32; got {rhs!r}. Use quantize(w, axis=-2).")
