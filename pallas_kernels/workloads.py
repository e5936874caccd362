"""What benchmarks and the autotuner run: a kernel, its inputs, its meaning.

A `Workload` names one call of one kernel at one size. It holds the kernel, the
plain-jnp reference, a maker of random inputs and what the project asks of it.
Bytes are those of all inputs, read once, and all results, written once:

    quantize     rows 2 + 1.03, both directions 2 + 2.06 an element of x
    dequantize   1.03 + 2
    swiglu       forward 4 + 2.06, backward 6 + 4.13 an element of F
    permute      1.03 + 1.03, as requantize
    quantize, then pack, two kernels: 2 + 1.03, then 1.03 + 1.03

Not here: times (`timing`), tables (`experiments.bench`), tiles (`autotune`).
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import (
  cases,
  dequantize,
  gather_quantize,
  groups,
  mxfp8,
  permute,
  quantize,
  reference,
  requantize,
  swiglu,
  workload,
)

PADDING = 4096  # one row in so many is padding where rows are taken by index

Workload = workload.Workload
layout = workload.layout


def _both(x, scales=("blocked", "blocked")):
  return tuple(
    reference.quantize(x, axis, layout=s)
    for axis, s in zip((-1, -2), scales, strict=True)
  )


def _both_of_groups(x, tile_rows):
  inside = jnp.arange(groups.ROW_ALIGN) < tile_rows[:, None]
  return _both(jnp.where(inside.reshape(-1, 1), x, 0))


def _both_transposed(x):
  turned = reference.quantize(x.T, -1, layout="blocked")
  return reference.quantize(x, -1, layout="blocked"), turned


def _run_groups(x, tile_rows, **schedule):
  return quantize.quantize_both(x, tile_rows=tile_rows, **schedule)


def quantize_workloads(rows: int, width: int) -> list[Workload]:
  """One direction in each layout, both, with and without groups."""
  common: dict[str, Any] = dict(kernel="quantize", rows=rows, width=width)

  def make():
    return (workload.normal(0, (rows, width)),)

  def make_groups():
    lay = layout(rows)  # every group lacks some rows of its last tile
    ragged = dataclasses.replace(lay, sizes=jnp.maximum(lay.sizes - 29, 0))
    return workload.normal(0, (rows, width)), ragged.tile_rows()

  def one(axis, scales, **more):
    options = dict(axis=axis, layout=scales)
    name = f"{'rows' if axis == -1 else 'columns'} {scales}"
    return Workload(
      variant=name,
      make=make,
      run=functools.partial(quantize.quantize, **options),
      meaning=functools.partial(reference.quantize, **options),
      **common | more,
    )

  def rounded(name, axis):
    return Workload(
      variant=name,
      make=make,
      run=functools.partial(quantize.round_to_mxfp8, axis=axis),
      meaning=functools.partial(reference.round_to_mxfp8, axis=axis),
      **common,
    )

  def both(name, meaning=_both, options=None, **more):
    run = functools.partial(quantize.quantize_both, **options or {})
    found: dict[str, Any] = dict(variant=name, make=make, run=run)
    return Workload(meaning=meaning, **common | found | more)

  linear = ("linear", "linear")
  return [
    one(-1, "blocked", bar=0.90, tuned="rows"),
    one(-1, "linear", bar=0.90),
    one(-2, "blocked", tuned="columns"),
    one(-2, "linear"),
    rounded("rounded along rows", -1),
    rounded("rounded along columns", -2),
    both("both blocked", bar=0.85, tuned="both"),
    both(
      "both linear",
      functools.partial(_both, scales=linear),
      options=dict(layouts=linear),
      bar=0.85,
    ),
    both(
      "both of groups", _both_of_groups, make=make_groups, run=_run_groups,
      bar=0.85,
    ),
    both("both transposed", _both_transposed, options=dict(transposed=True)),
  ]  # fmt: skip


def _run_dequantize(data, scale, *, axis, scales, **schedule):
  x = mxfp8.MxArray(data, scale, axis=axis, layout=scales)
  return dequantize.dequantize(x, **schedule)


def _mean_dequantize(data, scale, *, axis, scales):
  x = mxfp8.MxArray(data, scale, axis=axis, layout=scales)
  return reference.dequantize(x)


def dequantize_workloads(rows: int, width: int) -> list[Workload]:
  """Both directions in both scale layouts."""

  def make(axis, scales):
    x = workload.normal(0, (rows, width))
    x = reference.quantize(x, axis, layout=scales)
    return x.data, x.scale

  found = []
  for axis, direction in ((-1, "rows"), (-2, "columns")):
    for scales in ("blocked", "linear"):
      options = dict(axis=axis, scales=scales)
      found.append(
        Workload(
          kernel="dequantize",
          variant=f"{direction} {scales}",
          rows=rows,
          width=width,
          make=functools.partial(make, **options),
          run=functools.partial(_run_dequantize, **options),
          meaning=functools.partial(_mean_dequantize, **options),
          bar=0.88,
          tuned=direction if scales == "blocked" else None,
        )
      )
  return found


BLOCKED: dict[str, Any] = dict(rows="blocked", columns="blocked")


def _forward(pre, weight, lay, **options):
  out = swiglu.swiglu_quantize(pre, weight, lay, **options)
  return [x for x in (out.rows, out.columns, out.pre) if x is not None]


def _forward_meaning(pre, weight, lay, saved=False, **options):
  out = reference.swiglu_quantize(pre, weight, lay, **BLOCKED | options)
  kept = [reference.quantize(pre, layout="blocked")] if saved else []
  return [out.rows, out.columns, *kept]


def _backward(pre, dh, weight, lay, **options):
  out = swiglu.swiglu_backward_quantize(pre, dh, weight, lay, **options)
  return out.rows, out.columns, out.dweight


def _backward_meaning(pre, dh, weight, lay, **options):
  out, dweight = reference.swiglu_backward_quantize(
    pre, dh, weight, lay, **BLOCKED | options
  )
  return out.rows, out.columns, dweight


def swiglu_workloads(rows: int, width: int) -> list[Workload]:
  """Forward and backward, plain and with MXFP8 pre-activations."""
  common: dict[str, Any] = dict(kernel="swiglu", rows=rows, width=width)

  def make():
    weight = jax.random.uniform(jax.random.key(1), (rows,), jnp.float32)
    return workload.normal(0, (rows, 2 * width)), weight, layout(rows)

  def make_backward(saved=False):
    pre, weight, lay = make()
    if saved:
      pre = reference.quantize(pre, layout="blocked")
    return pre, workload.normal(2, (rows, width)), weight, lay

  def folded(name, run, make, meaning, **options):
    run = functools.partial(run, folded=True, rows="linear", **options)
    meaning = functools.partial(meaning, folded=True, rows="linear")
    return Workload(
      variant=name, make=make, run=run, meaning=meaning, **common
    )

  return [
    Workload(
      variant="forward", make=make, run=_forward, meaning=_forward_meaning,
      bar=0.85, tuned="forward", **common,
    ),
    Workload(
      variant="forward, keeps MXFP8", make=make,
      run=functools.partial(_forward, save_pre=True),
      meaning=functools.partial(_forward_meaning, saved=True),
      tuned="forward mxfp8", **common,
    ),
    Workload(
      variant="backward", make=make_backward, run=_backward,
      meaning=_backward_meaning, bar=0.85, tuned="backward", **common,
    ),
    Workload(
      variant="backward of MXFP8",
      make=functools.partial(make_backward, saved=True), run=_backward,
      meaning=_backward_meaning, **common,
    ),
    folded("forward, folded", _forward, make, _forward_meaning,
           one_pass=False),
    folded("forward, folded at once", _forward, make, _forward_meaning),
    folded("backward, folded", _backward, make_backward, _backward_meaning),
    folded("backward, folded at once", _backward, make_backward,
           _backward_meaning, one_pass=True),
  ]  # fmt: skip


def _unpacked(wire, index, *, width):
  taken, end = groups.take_rows(wire, index), width + width // mxfp8.BLOCK
  data = jax.lax.bitcast_convert_type(taken[:, :width], mxfp8.E4M3)
  weight = jax.lax.bitcast_convert_type(taken[:, end : end + 4], jnp.float32)
  scaled = mxfp8.MxArray(data, taken[:, width:end])
  return scaled.with_layout("blocked"), weight


def _taken_both(x, index):
  return _both(groups.take_rows(x, index))


def _packed(x, row, weight, *, quantize, pack):
  return pack(quantize(x), row, weight)


def permute_workloads(rows: int, width: int) -> list[Workload]:
  """Rows in random order, plain, packed, in bf16; requantize beside them."""
  common: dict[str, Any] = dict(kernel="permute", rows=rows, width=width)

  def source():
    order = jax.random.permutation(jax.random.key(3), rows).astype(jnp.int32)
    return jnp.where(jnp.arange(rows) % PADDING == PADDING - 1, -1, order)

  def arrays():
    return reference.quantize(workload.normal(0, (rows, width)))

  def weights():
    return jax.random.uniform(jax.random.key(1), (rows,), jnp.float32)

  def permute_meaning(x, index):
    return reference.take_mx_rows(x, index).with_layout("blocked")

  def wire_run(wire, index, **schedule):
    return permute.permute_wire(wire, index, width, **schedule)

  def pack_make():
    return arrays(), jnp.maximum(source(), 0), weights()

  def rows_make():
    return arrays(), source()

  def numbers_make():
    return workload.normal(0, (rows, width)), source()

  def one(variant, make, run, meaning, **more):
    return Workload(
      variant=variant, make=make, run=run, meaning=meaning, **common | more
    )

  def packed_make():
    return workload.normal(0, (rows, width)), *pack_make()[1:]

  part = functools.partial
  return [
    one("arrays", rows_make, permute.permute, permute_meaning, bar=0.80),
    one("packed rows", lambda: (reference.pack(*pack_make()), source()),
        wire_run, part(_unpacked, width=width), bar=0.80),
    one("pack", pack_make, permute.pack, reference.pack),
    one("quantize, then pack", packed_make,
        part(_packed, quantize=quantize.quantize, pack=permute.pack),
        part(_packed, quantize=reference.quantize, pack=reference.pack),
        bar=0.80, between=lambda x, *_: reference.quantize(x)),
    one("arrays, folded", rows_make, part(permute.permute, folded=True),
        part(reference.take_rows, folded=True)),
    one("pack, folded", pack_make, part(permute.pack, folded=True),
        part(reference.pack, folded=True)),
    one("bf16, then quantize both", numbers_make, permute.gather_quantize,
        _taken_both),
    one("bf16 to both at once", numbers_make, gather_quantize.gather_quantize,
        _taken_both),
    one("rows to columns", lambda: (arrays().with_layout("blocked"),),
        part(requantize.requantize, layout="blocked"),
        lambda x: reference.requantize(x, -2, layout="blocked"),
        kernel="requantize"),
  ]  # fmt: skip


MAKERS: dict[str, Callable[[int, int], list[Workload]]] = {
  "quantize": quantize_workloads,
  "dequantize": dequantize_workloads,
  "swiglu": swiglu_workloads,
  "permute": permute_workloads,
}


def shapes(kernel: str) -> list[tuple[int, int]]:
  """Rows and widths that a kernel is measured at, the first one first.

  The largest rows per device of `cases` at DeepSeek-V3's widths; fewer rows
  where a row is wider, and the width that is no multiple of 128.
  """
  deepseek, llama = cases.MODELS["deepseek_v3"], cases.MODELS["llama4_scout"]
  _, middle, most = cases.ROWS_PER_DEVICE
  if kernel == "swiglu":
    return [(most, deepseek.d_ff), (middle, llama.d_ff)]
  if kernel == "permute":
    return [(most, deepseek.d_model)]
  return [(most, deepseek.d_model), (most, cases.MODELS["gpt_oss_20b"].d_model)]
