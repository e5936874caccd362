"""SwiGLU and its gradient with folded rows, in one pass over the activations.

    forward    h = weight * silu(gate) * up       rows: fold(quantize(h))
    backward   dpre = [dgate | dup], dweight      rows: fold(quantize(dpre))

Called by `swiglu`, whose results these are; `swiglu_rows_kernel` draws the
schedule. A CTA fills an SM and holds 32 whole rows of codes, so F is at most
about 5120 forward and 2560 backward; a bias, pre-activations in MXFP8 and the
bf16 result are not offered. `swiglu` then folds by a second kernel (`fold`).

Bytes an element of F: forward 4 + 2.03, backward 6 + 4.06, where two kernels
move 2.03 and 4.06 more. On an H200 the forward is 1.2 times as fast as two
kernels (F 2048), so `swiglu` takes it; the backward, whose 255 registers a
thread leave one CTA of two warpgroups an SM, is not, and runs only when asked
for (``one_pass``; experiments/results/nvidia_h200/bench.json).
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  activation,
  groups,
  mosaic,
  mxfp8,
  stream,
  swiglu_rows_kernel,
)

MxArray = mxfp8.MxArray
Problem = swiglu_rows_kernel.Problem

SMEM_BYTES = 226 * 1024  # of a CTA; Hopper and Blackwell, barriers aside
ROWS = swiglu_rows_kernel.ROWS
CHUNK = swiglu_rows_kernel.CHUNK


def _smem_bytes(problem: Problem) -> int:
  """Shared memory of a CTA."""
  tile, count = ROWS * CHUNK, problem.warpgroups
  inputs = 2 * (3 if problem.backward else 2)
  staged = problem.sources if problem.columns else 0
  tiles = problem.sources * problem.across
  tops = 2 * count * 2 * CHUNK * 4
  ring = count * tile * (inputs * problem.stages + staged)
  return ring + tiles * (tile + CHUNK) + tops


def schedule(problem: Problem) -> Problem | None:
  """``problem`` with as many warpgroups and stages as fit; None if none do."""
  for warpgroups, stages in ((4, 2), (2, 3), (2, 2), (2, 1), (1, 2), (1, 1)):
    tried = dataclasses.replace(
      problem, warpgroups=warpgroups, stages=stages
    )
    fits = _smem_bytes(tried) <= SMEM_BYTES
    if problem.across % warpgroups == 0 and fits:
      return tried
  return None


def problem(
  rows: int, width: int, *, backward: bool, columns: bool,
  rounding: mxfp8.Rounding, dtype: Any, form: activation.Swiglu,
) -> Problem | None:
  """What the kernel would compute; None if a row is too long for it."""
  return schedule(
    Problem(
      rows=rows, width=width, backward=backward, columns=columns,
      rounding=rounding, dtype=dtype, form=form, stages=1, warpgroups=1,
    )
  )  # fmt: skip


def run(
  problem: Problem,
  pre: jax.Array,
  dh: jax.Array | None,
  weight: jax.Array,
  layout: groups.GroupLayout,
  interpret: Any,
) -> tuple[MxArray, MxArray | None, jax.Array | None]:
  """Calls the kernel.

  Args:
    problem: From `problem`.
    pre: [R, 2 F] bf16.
    dh: [R, F] bf16, backward only.
    weight: [R] float32.
    layout: Of the rows.
    interpret: Interpret parameters; False compiles.

  Returns:
    Folded rows and columns, linear scales, and dweight [R] float32; columns and
    dweight are None where the problem has none.
  """
  inputs = {"pre": pre, "weight": weight.astype(jnp.float32)}
  inputs["tile_rows"] = layout.tile_rows()
  if dh is not None:
    inputs["dh"] = dh
  ctas = stream.cta_count(problem.rows // ROWS, 1, interpret)
  outputs = problem.outputs()
  call = plgpu.kernel(
    functools.partial(
      swiglu_rows_kernel.kernel,
      problem=problem,
      inputs=tuple(inputs),
      ctas=ctas,
      interpret=interpret,
    ),
    out_type=list(outputs.values()),
    scratch_types=problem.scratch(),
    **stream.launch(ctas, problem.warpgroups),
    compiler_params=dataclasses.replace(
      mosaic.compiler_params(), approx_math=True, reduction_scratch_bytes=0
    ),
    interpret=interpret,
  )
  out = dict(zip(outputs, call(*inputs.values()), strict=True))
  top = out["top"][:, :ROWS].reshape(-1, 1).astype(jnp.uint8)
  blocks = problem.sources * problem.width // mxfp8.BLOCK
  scale = jnp.broadcast_to(top, (problem.rows, blocks))
  rows, columns = MxArray(out["rows"], scale, folded=True), None
  if problem.columns:
    columns = MxArray(out["columns"], out["scale"], axis=-2)
  dweight = out.get("dweight")
  if dweight is not None:
    shares = dweight.reshape(problem.warpgroups, -1, CHUNK // ROWS, ROWS)
    dweight = jnp.sum(shares, axis=(0, 2)).reshape(-1)
  return rows, columns, dweight


def whole_rows(
  pre: jax.Array | MxArray,
  dh: jax.Array | None,
  weight: jax.Array,
  layout: groups.GroupLayout,
  bias: jax.Array | None,
  *,
  rows: mxfp8.Layout | None,
  columns: mxfp8.Layout | None,
  interpret: Any,
  **options: Any,
) -> tuple[MxArray, MxArray | None, jax.Array | None] | None:
  """Folded rows, columns, dweight; None where the kernel does not serve.

  Args:
    pre: As in `swiglu.swiglu_quantize`, as all that follows.
    dh: Backward only.
    weight: As above.
    layout: As above.
    bias: As above.
    rows: As above; blocked scales are laid out by XLA.
    columns: As above, likewise.
    interpret: As above.
    **options: rounding, dtype and form.
  """
  if rows is None or bias is not None or isinstance(pre, MxArray):
    return None
  made = problem(
    pre.shape[0], pre.shape[1] // 2, backward=dh is not None,
    columns=columns is not None, **options,
  )  # fmt: skip
  if made is None:
    return None
  by_rows, by_columns, dweight = run(made, pre, dh, weight, layout, interpret)
  if columns is not None and by_columns is not None:
    by_columns = by_columns.with_layout(columns)
  return by_rows.with_layout(rows), by_columns, dweight


def variants(target: str) -> list[mosaic.Variant]:
  """Both kernels at the widths that they take, with and without columns."""
  del target
  return [
    _variant("forward", 2048),
    _variant("forward rows", 1408, columns=False),
    _variant("forward e5m2", 768, dtype=mxfp8.E5M2, rounding="even"),
    _variant("backward", 2048, backward=True),
    _variant("backward gpt-oss", 768, backward=True, form=activation.Swiglu(
      limit=7.0, alpha=1.702, up_offset=1.0)),
  ]  # fmt: skip


def _variant(name: str, width: int, **options: Any) -> mosaic.Variant:
  """One entry of `variants`."""
  rows, shape = 1024, jax.ShapeDtypeStruct
  default: dict[str, Any] = dict(
    backward=False, columns=True, rounding="rceil", dtype=mxfp8.E4M3,
    form=activation.Swiglu(),
  )  # fmt: skip
  made = problem(rows, width, **default | options)
  assert made is not None
  backward = made.backward

  def function(pre, weight, sizes, *dh):
    layout = groups.group_layout(sizes, rows)
    return run(made, pre, dh[0] if dh else None, weight, layout, False)

  dh = [shape((rows, width), jnp.bfloat16)] if backward else []
  return mosaic.Variant(
    kernel="swiglu_rows",
    variant=f"{name} {width} s{made.stages} w{made.warpgroups}",
    function=function,
    arguments=(
      shape((rows, 2 * width), jnp.bfloat16),
      shape((rows,), jnp.float32),
      shape((8,), jnp.int32),
      *dh,
    ),
    promises=("bulk_tensor_load", "bulk_tensor_store", "cast_to_fp8"),
  )
