"""What `bring_up` checks of the matmul kernels of one GPU generation.

    grouped_matmul   MXFP8, forward and input gradient; on Hopper bf16 and the
                     folded form too
    grouped_wgrad    MXFP8, also adding to a gradient that is there; on Hopper
                     bf16 too
    wgrad_folded     Hopper's fp8 wgrad of transposed copies
    simple_matmul    Blackwell's plainest kernel: first of all

A kernel is imported by name when its check runs, so that one that is missing or
broken costs its own checks alone. Rows of nobody hold NaN on the way in (a
wgrad's last tiles hold zeros, as its contract asks), and are left out of the
comparison: what a kernel leaves there is not specified.
"""

from collections.abc import Callable
import dataclasses
import importlib
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bring_up_check, cases, groups, mxfp8, reference

Check = bring_up_check.Check
Shape = tuple[int, int, int, int]  # rows, groups, K, N

# Blackwell's tiles that avoid one risk each; they come before the default one,
# so that a table says which of them works where the default does not.
CAUTIOUS: dict[str, dict[str, Any]] = {
  "one CTA": dict(lhs=128, rhs=128, stages=5),
  "one accumulator": dict(accumulators=1),
  "copies along K": dict(transposed=True),
}
SIMPLE = "simple_matmul"
PATTERNS = ("skewed", "empty_first", "empty_last", "one_hot", "single_row")
REAL_PATTERNS = ("even", "skewed")


def real_shapes() -> list[Shape]:
  """DeepSeek-V3's gate and up on 8 local experts, then on 32."""
  model = cases.MODELS["deepseek_v3"]
  rows = cases.ROWS_PER_DEVICE[1]
  return [
    (rows, experts, model.d_model, 2 * model.d_ff)
    for experts in cases.LOCAL_EXPERTS[-2:]
  ]


def _normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def _layout(sizes: jax.Array, shape: Shape) -> groups.GroupLayout:
  rows, count, _, _ = shape
  spare = groups.ROW_ALIGN  # at least one tile past the last group
  return groups.group_layout(sizes, groups.aligned_rows(rows, count) + spare)


def _quantize(x: jax.Array, axis: int, form: str) -> jax.Array | mxfp8.MxArray:
  if form == "bf16":
    return x
  folded = form == "folded"
  return reference.quantize(x, axis, layout="blocked", folded=folded)


def _only_rows(y: jax.Array, lhs: Any, rhs: Any, layout: Any) -> jax.Array:
  del lhs, rhs
  return jnp.where(layout.row_valid()[:, None], y, 0)


def _generation(module: str) -> str:
  """The folder of a kernel's module, e.g. ``hopper``."""
  return module.split(".")[-2]


def _name(module: str, *words: str) -> str:
  """E.g. ``hopper grouped_matmul bf16 forward``."""
  kernel = module.split(".")[-1]
  return " ".join([_generation(module), kernel, *filter(None, words)])


def _kernel(module: str, name: str) -> Callable[..., Any]:
  return getattr(importlib.import_module(module), name)


def _options(tile: str) -> dict[str, Any]:
  """Options of a kernel for one of the `CAUTIOUS` tiles; "" is the default."""
  if not tile:
    return {}
  make = _kernel("pallas_kernels.blackwell.tile", "MatmulTile")
  return {"tile": make(**CAUTIOUS[tile])}


def matmul_check(
  module: str,
  shape: Shape,
  form: str,
  *,
  transposed: bool,
  stage: str,
  tile: str = "",
) -> Check:
  """y = lhs @ rhs of each row's group.

  Args:
    module: Of the kernel.
    shape: Rows, groups, K and N.
    form: Of both operands: "bf16", "mxfp8" or "folded".
    transposed: rhs is [G, N, K], as an input gradient has it.
    stage: "small" or "real".
    tile: One of `CAUTIOUS`, or "" for the default.
  """
  rows, count, depth, width = shape

  def make(sizes):
    layout = _layout(sizes, shape)
    lhs = _normal(0, (layout.rows, depth))
    lhs = jnp.where(layout.row_valid()[:, None], lhs, jnp.nan)
    rhs = _normal(
      1, (count, width, depth) if transposed else (count, depth, width)
    )
    contracted = -1 if transposed else -2
    return _quantize(lhs, -1, form), _quantize(rhs, contracted, form), layout

  def run(lhs, rhs, layout, **options):
    kernel = _kernel(module, module.split(".")[-1])
    options |= _options(tile)
    return kernel(lhs, rhs, layout, transpose_rhs=transposed, **options)

  def meaning(lhs, rhs, layout):
    return reference.grouped_matmul(lhs, rhs, layout, transpose_rhs=transposed)

  def dot_operands():
    return _normal(2, (rows, depth)), _normal(3, (depth, width))

  def ragged_operands():
    sizes = jnp.array(cases.group_sizes("even", count, rows), jnp.int32)
    return _normal(2, (rows, depth)), _normal(3, (count, depth, width)), sizes

  baselines: dict[str, Any] = {"bf16 dot": (jnp.matmul, dot_operands)}
  if form == "bf16" and not transposed:
    baselines["ragged_dot"] = (lax.ragged_dot, ragged_operands)
  folded = form == "folded"
  order = "dgrad" if transposed and not folded else "forward"
  return _check(
    kernel=_name(module, form, order, tile),
    module=module, shape=shape, stage=stage, make=make, run=run,
    meaning=meaning, form=form, specified=_only_rows,
    limits=bring_up_check.SHORT_SUMS if folded else bring_up_check.NUMBERS,
    baselines=baselines,
  )  # fmt: skip


def folded_wgrad_check(shape: Shape, *, stage: str) -> Check:
  """dw of transposed copies that are folded by group; Hopper's.

  Args:
    shape: Rows, groups, K and N.
    stage: "small" or "real".
  """
  module = "pallas_kernels.hopper.wgrad_folded"
  plain = wgrad_check(module, shape, "bf16", stage=stage)

  def make(sizes):
    lhs, rhs, layout, there = plain.make(sizes)
    turned = (
      reference.quantize(x, -2, transposed=True, layout="blocked")
      for x in (lhs, rhs)
    )
    fold = _kernel(module, "fold_groups")
    return *(fold(x, layout) for x in turned), layout, there

  def run(lhs, rhs, layout, there, **options):
    del there
    return _kernel(module, "grouped_wgrad_folded")(lhs, rhs, layout, **options)

  def meaning(lhs, rhs, layout, there):
    plain_lhs, plain_rhs = (x.dequantize(jnp.bfloat16).T for x in (lhs, rhs))
    return plain.meaning(plain_lhs, plain_rhs, layout, there)

  return dataclasses.replace(
    plain,
    kernel="hopper grouped_wgrad folded",
    make=make,
    run=run,
    meaning=meaning,
    limits=bring_up_check.SHORT_SUMS,
    rate="fp8",
  )


def wgrad_check(
  module: str,
  shape: Shape,
  form: str,
  *,
  stage: str,
  adding: bool = False,
  tile: str = "",
) -> Check:
  """dw = lhs^T rhs over each group's rows, on top of what is there if adding.

  Args:
    module: Of the kernel.
    shape: Rows, groups, K and N.
    form: Of both operands: "bf16" or "mxfp8".
    stage: "small" or "real".
    adding: Add to a gradient that is there.
    tile: One of `CAUTIOUS`, or "" for the default.
  """
  rows, count, depth, width = shape

  def make(sizes):
    layout = _layout(sizes, shape)
    tile = jnp.arange(layout.rows) // groups.ROW_ALIGN
    outside = jnp.where(tile < layout.tile_count(), 0.0, jnp.nan)[:, None]
    valid = layout.row_valid()[:, None]
    made = [_normal(i, (layout.rows, n)) for i, n in ((0, depth), (1, width))]
    made = [jnp.where(valid, x, outside).astype(x.dtype) for x in made]
    there = jnp.zeros((count, depth, width) if adding else (), jnp.float32)
    return *(_quantize(x, -2, form) for x in made), layout, there + 2.0

  def run(lhs, rhs, layout, there, **options):
    options |= _options(tile)
    options |= {"accumulate": there} if adding else {}
    return _kernel(module, "grouped_wgrad")(lhs, rhs, layout, **options)

  def meaning(lhs, rhs, layout, there):
    dw = reference.grouped_wgrad(lhs, rhs, layout)
    return there + dw if adding else dw

  def dot_operands():
    return _normal(2, (rows, depth)), _normal(3, (rows, width))

  def dot(lhs, rhs):
    return lax.dot_general(
      lhs, rhs, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )

  return _check(
    kernel=_name(module, form, "adding" if adding else "", tile),
    module=module, shape=shape, stage=stage, make=make, run=run,
    meaning=meaning, form=form, limits=bring_up_check.NUMBERS,
    baselines={"bf16 dot": (dot, dot_operands)},
  )  # fmt: skip


def _check(
  *, shape: Shape, stage: str, form: str, module: str, **fields: Any
) -> Check:
  """What the checks of all grouped matmuls share."""
  rows, count, depth, width = shape
  patterns = REAL_PATTERNS if stage == "real" else PATTERNS
  sizes = {p: cases.group_sizes(p, count, rows) for p in patterns}
  # Hopper has no block scales: it multiplies MXFP8 as bf16, unless folded.
  slow = "mxfp8" if _generation(module) == "hopper" else ""
  return Check(
    shape=f"{rows} x {depth} x {width}, {count} groups",
    stage=stage,
    module=module,
    inputs={p: (np.array(s, np.int32),) for p, s in sizes.items()},
    flops=2.0 * rows * depth * width,
    rate="bf16" if form in ("bf16", slow) else "fp8",
    interpreted="JAX's interpret mode lacks what a grouped matmul uses",
    **fields,
  )


def checks(generation: str) -> list[Check]:
  """All checks of the matmul kernels of a GPU generation.

  Args:
    generation: "hopper" or "blackwell", a folder of this package.
  """
  folder = f"pallas_kernels.{generation}"
  matmul, wgrad = f"{folder}.grouped_matmul", f"{folder}.grouped_wgrad"
  forms = {"hopper": ["bf16", "mxfp8", "folded"], "blackwell": ["mxfp8"]}
  ways = [
    (form, transposed)
    for form in forms[generation]
    for transposed in (False, True)
    if transposed or form != "folded"  # folded weights are [G, N, K]
  ]
  found = _cautious(folder) if generation == "blackwell" else []
  for shape in cases.BRING_UP_MATMULS:
    for form, transposed in ways:
      check = matmul_check(
        matmul, shape, form, transposed=transposed, stage="small"
      )
      found.append(check)
  for shape in cases.BRING_UP_WGRADS:
    found += [
      wgrad_check(wgrad, shape, form, stage="small")
      for form in forms[generation]
      if form != "folded"
    ]
    check = wgrad_check(wgrad, shape, "mxfp8", stage="small", adding=True)
    found.append(check)
    if "folded" in forms[generation]:
      found.append(folded_wgrad_check(shape, stage="small"))
  first, second = real_shapes()
  for form, transposed in ways:
    check = matmul_check(
      matmul, first, form, transposed=transposed, stage="real"
    )
    found.append(check)
  fastest, transposed = ways[-1]
  found += [
    matmul_check(matmul, second, fastest, transposed=transposed, stage="real"),
    *(
      wgrad_check(wgrad, first, form, stage="real")
      for form in forms[generation]
      if form != "folded"
    ),
    wgrad_check(wgrad, second, "mxfp8", stage="real"),
  ]
  if "folded" in forms[generation]:
    found.append(folded_wgrad_check(first, stage="real"))
  return found


def _cautious(folder: str) -> list[Check]:
  """The plainest kernel, then every cautious tile at one small shape."""
  small: dict[str, Any] = dict(form="mxfp8", stage="small")
  found = [
    matmul_check(f"{folder}.{SIMPLE}", shape, transposed=turned, **small)
    for shape in cases.BRING_UP_MATMULS
    for turned in (False, True)
  ]
  matmul, wgrad = f"{folder}.grouped_matmul", f"{folder}.grouped_wgrad"
  shape, wgrad_shape = cases.BRING_UP_MATMULS[0], cases.BRING_UP_WGRADS[0]
  for tile in CAUTIOUS:
    found += [
      matmul_check(matmul, shape, transposed=False, tile=tile, **small),
      wgrad_check(wgrad, wgrad_shape, tile=tile, **small),
    ]
  return found
