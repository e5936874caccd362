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
CTA of two warpgroups fills an SM and loads one tile ahead; bf16 results take
the place of the pre-activations in shared memory, and are quantized from there
into staging tiles that TMA stores. dweight is summed within a tile; the sums of
a row's tiles are added in a fixed order afterwards.

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
  groups,
  mosaic,
  mxfp8,
  reference,
  stream,
  swiglu_kernel,
  tiles,
)

MxArray = mxfp8.MxArray
GroupLayout = groups.GroupLayout
Swiglu = reference.Swiglu
SwigluTile = swiglu_kernel.SwigluTile
Direction = swiglu_kernel.Direction

CHUNK = swiglu_kernel.CHUNK
FORWARD_TILE = SwigluTile(stages=3)
BACKWARD_TILE = SwigluTile(stages=2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Forward:
  """What `swiglu_quantize` returns; None where not asked for.

  Attributes:
    rows: [R, F] MxArray, 1x32 blocks.
    columns: [R, F] MxArray, 32x1 blocks.
    plain: [R, F] bf16.
    pre: [R, 2 F] MxArray, 1x32 blocks, blocked scales: the pre-activations
      without bias, to save.
  """

  rows: MxArray | None
  columns: MxArray | None
  plain: jax.Array | None
  pre: MxArray | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Backward:
  """What `swiglu_backward_quantize` returns; None where not asked for.

  Attributes:
    rows: [R, 2 F] MxArray of [dgate | dup], 1x32 blocks.
    columns: [R, 2 F] MxArray, 32x1 blocks.
    plain: [R, 2 F] bf16.
    dweight: [R] float32, the gradient of the row weights.
  """

  rows: MxArray | None
  columns: MxArray | None
  plain: jax.Array | None
  dweight: jax.Array


def _check(pre, dh, layout: GroupLayout, wanted: tuple) -> None:
  """Refuses what the kernels do not take.

  Raises:
    ValueError: Shapes disagree, or nothing is asked for.
    NotImplementedError: A width, dtype or scale layout that they do not take.
  """
  rows, width = pre.shape[0], pre.shape[-1] // 2
  instead = 'Use backend="xla".'
  if pre.ndim != 2 or pre.shape[1] % 2 or rows != layout.rows:
    raise ValueError(
      f"swiglu kernel: pre must be [{layout.rows}, 2 F] as the layout has "
      f"{layout.rows} rows; got {list(pre.shape)}."
    )
  if dh is not None and dh.shape != (rows, width):
    raise ValueError(
      f"swiglu kernel: dh must be [{rows}, {width}], half as wide as pre; got "
      f"{list(dh.shape)}."
    )
  if not any(wanted):
    raise ValueError(
      "swiglu kernel: ask for rows, columns or plain; got none of them."
    )
  if width % CHUNK or not width or not rows:
    raise NotImplementedError(
      f"swiglu kernel: F must be a positive multiple of {CHUNK} (gate and up "
      f"are quantized in tiles of it); got F = {width}, {rows} rows. {instead}"
    )
  if isinstance(pre, MxArray):
    if (pre.axis, pre.block, pre.layout) != (-1, "1x32", "blocked"):
      raise NotImplementedError(
        "swiglu kernel: MXFP8 pre-activations must have 1x32 blocks along the "
        f"row and blocked scales; got {pre!r}. {instead}"
      )
  elif pre.dtype != jnp.bfloat16:
    raise NotImplementedError(
      f"swiglu kernel: pre must be bfloat16 or MXFP8; got {pre.dtype}. "
      f"{instead}"
    )
  if dh is not None and dh.dtype != jnp.bfloat16:
    raise NotImplementedError(
      f"swiglu kernel: dh must be bfloat16; got {dh.dtype}. {instead}"
    )


def _directions(rows, columns) -> tuple[Direction, ...]:
  """The MXFP8 results by the scale layout of each, or None."""
  for name, scales in (("rows", rows), ("columns", columns)):
    if scales not in (None, *mxfp8.LAYOUTS):
      raise ValueError(
        f"swiglu kernel: {name} must be None or a scale layout, one of "
        f"{mxfp8.LAYOUTS}; got {scales!r}."
      )
  found = ((-1, rows), (-2, columns))
  return tuple(Direction(axis=a, layout=s) for a, s in found if s is not None)


def _run(problem: swiglu_kernel.Problem, pre, dh, weight, layout, bias,
         interpret: Any) -> dict[str, Any]:
  """Calls the kernel; results by name."""
  inputs = dict(pre=pre.data if problem.coded else pre)
  if problem.coded:
    inputs["pre_scale"] = pre.scale
  inputs |= dict(weight=weight.astype(jnp.float32),
                 tile_rows=layout.tile_rows())
  if problem.biased:
    inputs |= dict(bias=bias.astype(jnp.float32),
                   tile_group=layout.tile_group())
  if problem.backward:
    inputs["dh"] = dh
  ctas = stream.cta_count(
    math.prod(problem.grid), problem.tile.ctas_per_sm, interpret
  )
  flat, tree = jax.tree.flatten(problem.outputs())
  call = plgpu.kernel(
    functools.partial(
      swiglu_kernel.kernel,
      problem=problem,
      inputs=tuple(inputs),
      ctas=ctas,
      interpret=interpret,
    ),
    out_type=flat,
    scratch_types=problem.scratch(),
    grid=(ctas,),
    grid_names=(stream.AXIS,),
    num_threads=problem.tile.warpgroups,
    thread_name=swiglu_kernel.THREAD,
    compiler_params=dataclasses.replace(
      mosaic.compiler_params(), approx_math=True, reduction_scratch_bytes=0
    ),
    interpret=interpret,
  )
  return jax.tree.unflatten(tree, call(*inputs.values()))


def _arrays(problem: swiglu_kernel.Problem, out: dict[str, Any]) -> dict:
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
    tile: The schedule; None for the default.
    interpret: Interpret parameters; False compiles.

  Raises:
    NotImplementedError: The kernel does not take this shape or dtype.
    ValueError: Shapes disagree, or an option is unknown.
  """
  _check(pre, None, layout, (rows, columns, plain))
  if save_pre and isinstance(pre, MxArray):
    raise ValueError("swiglu kernel: save_pre, but pre is MXFP8 already.")
  problem = swiglu_kernel.Problem(
    rows=layout.rows, width=pre.shape[1] // 2, backward=False,
    pre_dtype=pre.data.dtype if isinstance(pre, MxArray) else pre.dtype,
    biased=bias is not None, directions=_directions(rows, columns),
    plain=plain, saved=save_pre, rounding=rounding, dtype=dtype, form=form,
    tile=tile or forward_tile(
      pre.shape[1] // 2, save_pre or isinstance(pre, MxArray)
    ),
  )
  out = _run(problem, pre, None, weight, layout, bias, interpret)
  saved = None
  if save_pre:
    data, scale = (x[0] for x in out["saved"])
    saved = MxArray(data, scale, layout="blocked")
  return Forward(**_arrays(problem, out), plain=out.get("plain"), pre=saved)


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
  tile: SwigluTile | None = None,
  interpret: Any = False,
) -> Backward:
  """[dgate | dup] of `swiglu_quantize`, quantized in the same read, and dweight.

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
    tile: As above.
    interpret: As above.

  Raises:
    NotImplementedError: The kernel does not take this shape or dtype.
    ValueError: Shapes disagree, or an option is unknown.
  """
  _check(pre, dh, layout, (rows, columns, plain))
  problem = swiglu_kernel.Problem(
    rows=layout.rows, width=pre.shape[1] // 2, backward=True,
    pre_dtype=pre.data.dtype if isinstance(pre, MxArray) else pre.dtype,
    biased=bias is not None, directions=_directions(rows, columns),
    plain=plain, saved=False, rounding=rounding, dtype=dtype, form=form,
    tile=tile or backward_tile(pre.shape[1] // 2),
  )
  out = _run(problem, pre, dh, weight, layout, bias, interpret)
  dweight = jnp.sum(out["dweight"], axis=0)
  return Backward(
    **_arrays(problem, out), plain=out.get("plain"), dweight=dweight
  )


def forward_tile(width: int, more: bool) -> SwigluTile:
  """The forward's tile: measured on this GPU, or the default.

  Args:
    width: F.
    more: It needs other tiles besides, for MXFP8 pre-activations.
  """
  case = "forward mxfp8" if more else "forward"
  found = tiles.tuned("swiglu", mosaic.device_kind(), case, width)
  if found is not None:
    return SwigluTile(**found)
  return SwigluTile(stages=2) if more else FORWARD_TILE


def backward_tile(width: int) -> SwigluTile:
  """The backward's tile; see `forward_tile`."""
  found = tiles.tuned("swiglu", mosaic.device_kind(), "backward", width)
  return BACKWARD_TILE if found is None else SwigluTile(**found)
