"""Every check of `bring_up`: which kernels, at which shapes, in which order.

The plainest matmul comes first, then the memory-bound kernels (those of
`workloads`), then the grouped matmuls, all at small shapes; then real shapes,
which are timed. A kernel that joins the library joins this table.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import (
  bring_up_check,
  bring_up_matmul,
  fold,
  mxfp8,
  reference,
  workloads,
)

Check = bring_up_check.Check

GENERATIONS = {"9.0": "hopper", "10.0": "blackwell"}  # by compute capability
SMALL = (256, 256)  # rows and columns: two tiles each way
# Of permute, whose batches of narrow rows take long to compile.
SMALL_PERMUTE = (256, 2048)
# What the layer runs, at the shapes of `workloads`.
REAL = (
  "quantize rows blocked", "quantize columns blocked", "quantize both blocked",
  "dequantize rows blocked", "swiglu forward", "swiglu backward",
  "permute arrays", "permute packed rows", "permute pack",
  "permute arrays, folded", "permute pack, folded",
  "requantize rows to columns", "fold rows",
)  # fmt: skip


def memory_check(workload: workloads.Workload, stage: str) -> Check:
  """The check of a memory-bound kernel."""
  slow = workload.kernel in ("permute", "fold")

  def same_array():
    return (jnp.zeros((workload.rows, workload.width), jnp.bfloat16),)

  return Check(
    kernel=f"{workload.kernel} {workload.variant}",
    shape=f"{workload.rows} x {workload.width}",
    stage=stage,
    module=f"pallas_kernels.{workload.kernel}",
    make=workload.make,
    run=workload.run,
    meaning=workload.meaning,
    inputs={"": ()},
    limits=(
      bring_up_check.NEARLY
      if workload.kernel == "swiglu"
      else bring_up_check.Limits()
    ),
    baselines={"bf16 copy": (jnp.copy, same_array)},
    interpreted="JAX's interpret mode copies row after row" if slow else True,
  )


def memory_checks(stage: str) -> list[Check]:
  """The memory-bound kernels at small or at real shapes."""
  found = []
  for kernel, maker in workloads.MAKERS.items():
    shape = SMALL if stage == "small" else workloads.shapes(kernel)[0]
    for workload in maker(*shape):
      if stage == "small" and workload.kernel == "permute":
        others = maker(*SMALL_PERMUTE)
        workload = next(w for w in others if w.variant == workload.variant)
      found.append(memory_check(workload, stage))
  shape = SMALL_PERMUTE if stage == "small" else workloads.shapes("permute")[0]
  found.append(memory_check(fold_workload(*shape), stage))
  if stage == "real":
    found = [check for check in found if check.kernel in REAL]
  return found


def fold_workload(rows: int, width: int) -> workloads.Workload:
  """MXFP8 rows to one scale a row, where they lie; scales differ by 2^15."""

  def make():
    x = jax.random.normal(jax.random.key(0), (rows, width), jnp.bfloat16)
    shift = (jnp.arange(width) // mxfp8.BLOCK % 16).astype(jnp.bfloat16)
    return (reference.quantize(x * jnp.exp2(-shift)),)

  return workloads.Workload(
    kernel="fold",
    variant="rows",
    rows=rows,
    width=width,
    make=make,
    run=fold.fold,
    meaning=reference.fold,
  )


def generations(capability: str | None) -> list[str]:
  """The GPU generations whose own kernels a device should show.

  Args:
    capability: Compute capability; None for a CPU, which shows them all as
      skipped.
  """
  if capability is None:
    return list(GENERATIONS.values())
  return [GENERATIONS[capability]] if capability in GENERATIONS else []


def checks(capability: str | None) -> list[Check]:
  """All checks for a device, in order.

  Args:
    capability: Compute capability, e.g. ``"10.0"``; None for a CPU.
  """
  found = memory_checks("small") + memory_checks("real")
  for generation in generations(capability):
    found += bring_up_matmul.checks(generation)
  simple = bring_up_matmul.SIMPLE
  return sorted(
    found,
    key=lambda check: (
      check.stage == "real",
      not check.module.endswith(simple),
    ),
  )


def obstacle(check: Check, capability: str | None) -> str | None:
  """Why a check cannot run on a device, or None.

  Args:
    check: One of `checks`.
    capability: As in `checks`.
  """
  if capability is None:
    if check.stage == "real":
      return "real shapes need a GPU"
    return None if check.interpreted is True else str(check.interpreted)
  if float(capability) < min(map(float, GENERATIONS)):
    return f"compute capability {capability} has no TMA: Hopper or newer has"
  return None
