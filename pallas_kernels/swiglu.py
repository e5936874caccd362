"""SwiGLU and its gradient, each fused with quantize.

    forward    pre, weight -> h = weight * silu(gate) * up
    backward   pre, dh, weight -> [dgate | dup], dweight

    pre   [R, 2 F] = [gate | up], bf16 or MXFP8 rows, plus a bias if given
    h     [R, F], rounded to bf16 once, then quantized as `quantize` does
    dpre  [R, 2 F] = [dgate | dup], likewise

Results come in MXFP8 rows (1x32, the next matmul), columns (32x1, the weight's
gradient) and bf16, in any combination and in one read; the forward can also
write [gate | up] in MXFP8 rows, for the backward to read. Rows that belong to
no group come out 0. What is computed is `reference.swiglu` and
`reference.swiglu_backward`, then `reference.quantize`.

Schedule (`swiglu_kernel`, `stream`). Tiles of 128 rows x 128 columns of F. A
CTA fills an SM and loads a tile or two ahead; bf16 results take the place of
the pre-activations in shared memory, and are quantized from there into staging
tiles that TMA stores. dweight is summed within a tile; the sums of a row's
tiles are added in a fixed order afterwards. Folded rows: `swiglu_rows`.

Runs on Hopper and Blackwell from one source; bound by memory bandwidth. Bytes
an element of F: forward 4 + 2.06, backward 6 + 4.13 (rows and columns).
"""

import dataclasses
import functools
import math
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  activation,
  fold,
  groups,
  mosaic,
  mxfp8,
  stream,
  swiglu_kernel,
  swiglu_problem,
  swiglu_rows,
)

MxArray = mxfp8.MxArray
GroupLayout = groups.GroupLayout
Swiglu = activation.Swiglu
SwigluTile = swiglu_problem.SwigluTile
Problem = swiglu_problem.Problem
Forward = swiglu_problem.Forward
Backward = swiglu_problem.Backward


def _problem(pre, bias, directions, **options: Any) -> Problem:
  """The static part of a call; ``options`` are fields of `Problem`."""
  return Problem(
    rows=pre.shape[0],
    width=pre.shape[1] // 2,
    pre_dtype=pre.data.dtype if isinstance(pre, MxArray) else pre.dtype,
    biased=bias is not None,
    directions=directions,
    **options,
  )


def _run(
  problem: Problem, pre, dh, weight, layout, bias, interpret: Any
) -> dict[str, Any]:
  """Calls the kernel; results by name."""
  inputs = {"pre": pre.data if problem.coded else pre}
  if problem.coded:
    inputs["pre_scale"] = pre.scale
  inputs["weight"] = weight.astype(jnp.float32)
  inputs["tile_rows"] = layout.tile_rows()
  if problem.biased:
    inputs["bias"] = bias.astype(jnp.float32)
    inputs["tile_group"] = layout.tile_group()
  if problem.backward:
    inputs["dh"] = dh
  tile = problem.tile
  ctas = stream.cta_count(math.prod(problem.grid), tile.ctas_per_sm, interpret)
  body = functools.partial(
    swiglu_kernel.kernel,
    problem=problem,
    inputs=tuple(inputs),
    ctas=ctas,
    interpret=interpret,
  )
  flat, tree = jax.tree.flatten(problem.outputs())
  call = plgpu.kernel(
    body,
    out_type=flat,
    scratch_types=problem.scratch(),
    **stream.launch(ctas, tile.warpgroups),
    compiler_params=dataclasses.replace(
      mosaic.compiler_params(), approx_math=True, reduction_scratch_bytes=0
    ),
    interpret=interpret,
  )
  return jax.tree.unflatten(tree, call(*inputs.values()))


def _arrays(problem: Problem, out: dict[str, Any]) -> dict:
  """The MXFP8 results by name."""
  found: dict[str, MxArray | None] = dict(rows=None, columns=None)
  width = problem.sources * problem.width // mxfp8.BLOCK
  for i, direction in enumerate(problem.directions):
    data, scale = (x[0] for x in out["quantized"][2 * i : 2 * i + 2])
    if direction.layout == "linear" and direction.axis == -1:
      scale = scale[:, :width]
    name = "rows" if direction.axis == -1 else "columns"
    found[name] = MxArray(
      data, scale, axis=direction.axis, layout=direction.layout
    )
  return found


def swiglu_quantize(
  pre: jax.Array | MxArray,
  weight: jax.Array,
  layout: GroupLayout,
  *,
  form: Swiglu = Swiglu(),
  bias: jax.Array | None = None,
  rows: mxfp8.Layout | None = "blocked",
  columns: mxfp8.Layout | None = "blocked",
  plain: bool = False,
  save_pre: bool = False,
  rounding: mxfp8.Rounding = "rceil",
  dtype: Any = mxfp8.E4M3,
  folded: bool = False,
  one_pass: bool = True,
  tile: SwigluTile | None = None,
  interpret: Any = False,
) -> Forward:
  """h = weight * silu(gate) * up, quantized in the same read.

  Args:
    pre: [R, 2 F] bf16, or MxArray of 1x32 blocks with blocked scales; F is a
      multiple of 128.
    weight: [R] float32, the combine weight of each row.
    layout: Of the rows; the others come out 0.
    form: The activation.
    bias: [groups, 2 F], added to pre in float32, or None.
    rows: Scale layout of h in 1x32 blocks; None does not write it.
    columns: Scale layout of h in 32x1 blocks; None does not write it.
    plain: Write h in bf16.
    save_pre: Write pre in MXFP8 rows (bf16 pre only).
    rounding: One of `mxfp8.RULES`.
    dtype: float8_e4m3fn or float8_e5m2.
    folded: Fold the rows (`reference.fold`).
    one_pass: Fold them in the same kernel (`swiglu_rows`), where a row fits and
      nothing else is asked for; otherwise a second one does (`fold`), which
      moves 2.03 bytes more. Measured: faster forward, no faster backward.
    tile: The schedule, of two passes; None for the default.
    interpret: Interpret parameters; False compiles.

  Raises:
    NotImplementedError: The kernel does not take this shape or dtype.
    ValueError: Shapes disagree, or an option is unknown.
  """
  swiglu_problem.check(pre, None, layout, (rows, columns, plain))
  if folded and one_pass and not (plain or save_pre or tile):
    whole = swiglu_rows.whole_rows(
      pre, None, weight, layout, bias, rows=rows, columns=columns, form=form,
      rounding=rounding, dtype=dtype, interpret=interpret,
    )  # fmt: skip
    if whole is not None:
      return Forward(*whole[:2], plain=None, pre=None)
  if save_pre and isinstance(pre, MxArray):
    raise ValueError("swiglu kernel: save_pre, but pre is MXFP8 already.")
  more = save_pre or isinstance(pre, MxArray)
  problem = _problem(
    pre,
    bias,
    swiglu_problem.directions(rows and ("linear" if folded else rows), columns),
    backward=False,
    plain=plain,
    saved=save_pre,
    rounding=rounding,
    dtype=dtype,
    form=form,
    tile=tile or swiglu_problem.forward_tile(pre.shape[1] // 2, more),
  )
  out = _run(problem, pre, None, weight, layout, bias, interpret)
  saved = None
  if save_pre:
    data, scale = (x[0] for x in out["saved"])
    saved = MxArray(data, scale, layout="blocked")
  made = _arrays(problem, out)
  if folded and rows is not None:
    made["rows"] = fold.fold(made["rows"], rows, interpret=interpret)
  return Forward(**made, plain=out.get("plain"), pre=saved)


def swiglu_backward_quantize(
  pre: jax.Array | MxArray,
  dh: jax.Array,
  weight: jax.Array,
  layout: GroupLayout,
  *,
  form: Swiglu = Swiglu(),
  bias: jax.Array | None = None,
  rows: mxfp8.Layout | None = "blocked",
  columns: mxfp8.Layout | None = "blocked",
  plain: bool = False,
  rounding: mxfp8.Rounding = "rceil",
  dtype: Any = mxfp8.E4M3,
  folded: bool = False,
  one_pass: bool = False,
  tile: SwigluTile | None = None,
  interpret: Any = False,
) -> Backward:
  """The gradients of `swiglu_quantize`, quantized in the same read.

  Args:
    pre: As in `swiglu_quantize`.
    dh: [R, F] bf16, the gradient of silu(gate) * up (not times weight).
    weight: As in `swiglu_quantize`, as all that follows.
    layout: As above.
    form: As above.
    bias: As above.
    rows: Scale layout of dpre in 1x32 blocks, or None.
    columns: Scale layout of dpre in 32x1 blocks, or None.
    plain: Write dpre in bf16.
    rounding: As above.
    dtype: float8_e4m3fn or float8_e5m2.
    folded: As above.
    one_pass: As above; not the default here.
    tile: As above.
    interpret: As above.

  Raises:
    NotImplementedError: The kernel does not take this shape or dtype.
    ValueError: Shapes disagree, or an option is unknown.
  """
  swiglu_problem.check(pre, dh, layout, (rows, columns, plain))
  if folded and one_pass and not (plain or tile):
    whole = swiglu_rows.whole_rows(
      pre, dh, weight, layout, bias, rows=rows, columns=columns, form=form,
      rounding=rounding, dtype=dtype, interpret=interpret,
    )  # fmt: skip
    if whole is not None:
      made, dweight = whole[:2], whole[2]
      return Backward(*made, plain=None, dweight=dweight)  # pyright: ignore
  problem = _problem(
    pre,
    bias,
    swiglu_problem.directions(rows and ("linear" if folded else rows), columns),
    backward=True,
    plain=plain,
    saved=False,
    rounding=rounding,
    dtype=dtype,
    form=form,
    tile=tile or swiglu_problem.backward_tile(pre.shape[1] // 2),
  )
  out = _run(problem, pre, dh, weight, layout, bias, interpret)
  dweight = jnp.sum(out["dweight"], axis=0)
  made = _arrays(problem, out)
  if folded and rows is not None:
    made["rows"] = fold.fold(made["rows"], rows, interpret=interpret)
  return Backward(**made, plain=out.get("plain"), dweight=dweight)


def variants(target: str) -> list[mosaic.Variant]:
  """What the recipes ask for, at DeepSeek-V3's width.

  Args:
    target: PTX target; the choices are the same on all.
  """
  del target
  gpt_oss = Swiglu(limit=7.0, alpha=1.702, up_offset=1.0)
  linear: dict[str, Any] = dict(rows="linear", columns="linear")
  neither: dict[str, Any] = dict(rows=None, columns=None, plain=True)
  return [
    _variant("forward both"),
    _variant("forward rows", columns=None),
    _variant("forward keeps MXFP8", save_pre=True),
    _variant("forward of MXFP8", coded=True),
    _variant("forward bf16", **neither),
    _variant("forward both gpt-oss", biased=True, form=gpt_oss, **linear),
    _variant("backward both", backward=True),
    _variant("backward of MXFP8", backward=True, coded=True),
    _variant("backward bf16", backward=True, **neither),
    _variant(
      "backward both e5m2 gpt-oss", backward=True, biased=True, form=gpt_oss,
      dtype=mxfp8.E5M2,
    ),
  ]  # fmt: skip


def _variant(
  name: str, *, backward=False, coded=False, biased=False, **options: Any
) -> mosaic.Variant:
  """One entry of `variants`."""
  rows, width, shape = 1024, 2048, jax.ShapeDtypeStruct
  scale = mxfp8.scale_shape((rows, 2 * width), -1, "1x32", "blocked")
  pre = [shape((rows, 2 * width), mxfp8.E4M3 if coded else jnp.bfloat16)]
  pre += [shape(scale, jnp.uint8)] if coded else []
  dh = [shape((rows, width), jnp.bfloat16)] if backward else []
  row = [shape((rows,), jnp.float32), shape((8,), jnp.int32)]
  bias = [shape((8, 2 * width), jnp.float32)] if biased else []

  def function(*arrays):
    arrays = list(arrays)
    first = [arrays.pop(0)]
    if coded:
      first = [MxArray(first[0], arrays.pop(0), layout="blocked")]
    if backward:
      first.append(arrays.pop(0))
    weight, sizes, *bias = arrays
    layout = groups.group_layout(sizes, rows)
    run: Any = swiglu_backward_quantize if backward else swiglu_quantize
    return run(*first, weight, layout, bias=bias[0] if bias else None,
               **options)

  more = coded or options.get("save_pre", False)
  tile = swiglu_problem.forward_tile(width, more)
  if backward:
    tile = swiglu_problem.backward_tile(width)
  quantized = [] if "plain" in options else ["cast_to_fp8"]
  return mosaic.Variant(
    kernel="swiglu",
    variant=f"{name} {tile.name}",
    function=function,
    arguments=(*pre, *dh, *row, *bias),
    promises=("bulk_tensor_load", "bulk_tensor_store", *quantized),
    ctas_per_sm=tile.ctas_per_sm,
  )
