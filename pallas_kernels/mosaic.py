"""What every Pallas kernel here shares: settings, SMEM layouts, scales.

The kernels are Mosaic GPU kernels in *Lane* semantics: the body describes one
warpgroup and no barrier is inserted that the source does not show. Warpgroup
semantics, JAX's default, does not finish its layout inference on the quantize
kernels, and Lane lets a byte view of shared memory be reshaped inside a warp.

A kernel module gives three things to the rest of the library:

* entry points that take arrays and ``interpret=False``, handed on to
  ``plgpu.kernel``; tests pass ``plgpu.InterpretGPUParams``;
* a frozen tile dataclass, whose fields the caller may choose;
* ``variants(target)``: a list of `Variant`, one for each tile choice that the
  library can select on that GPU. `aot` compiles them all.

In-kernel scale arithmetic follows the element and scale rules of `mxfp8`,
written with integer operations only, so that the interpreter on a CPU, Hopper
and Blackwell agree to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
  """One kernel in one tile choice, as `aot` compiles it.

  Attributes:
    kernel: The kernel's name, e.g. ``"quantize"``.
    variant: What distinguishes this choice, e.g. ``"rows e4m3 128x256"``.
    function: Takes ``arguments`` and calls the kernel exactly once.
    arguments: Abstract arguments, ``jax.ShapeDtypeStruct``.
    promises: Names in `aot.INSTRUCTIONS` that the machine code must contain.
    ctas_per_sm: CTAs that the schedule keeps on one SM at a time; registers and
      shared memory must leave room for them.
  """

  kernel: str
  variant: str
  function: Callable[..., Any]
  arguments: tuple[jax.ShapeDtypeStruct, ...]
  promises: tuple[str, ...] = ()
  ctas_per_sm: int = 1


def compiler_params() -> plgpu.CompilerParams:
  """Lane semantics, no barrier that the source does not show."""
  return plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane,
    unsafe_no_auto_barriers=True,
  )
