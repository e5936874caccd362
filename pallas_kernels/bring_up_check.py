"""One check of `bring_up`: a kernel against its meaning, and what it found.

A kernel passes when every element of every result is finite where the
reference's is, and

    codes    the share of equal elements is at least `Limits.equal`
    numbers  |got - want| / |want| <= `Limits.frobenius`, and no element is off
             by more than `Limits.element` times the root mean square of want in
             its row, or in its group for a weight gradient

and when three more calls give the same bits: an error that moves is a race.
"""

from collections.abc import Callable
import dataclasses
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp

CODES = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}  # by bytes of an element


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
  """How far results may be from the reference.

  Attributes:
    equal: The least share of equal elements of each result that is not
      float32; None compares them as numbers.
    frobenius: The largest relative Frobenius error of a result of numbers.
    element: The largest error of one element, in units of the root mean square
      over its index along the first axis: rows and groups differ in size.
  """

  equal: float | None = 1.0
  frobenius: float = 1e-3
  element: float = 0.1


# Sums of float32 in another order, then one rounding to bf16.
NUMBERS = Limits(equal=None)
# Hopper's fp8 wgmma keeps about 14 bits of a sum: 1.4e-3 to 5.0e-3 measured on
# an H200, more the longer the sum.
SHORT_SUMS = Limits(equal=None, frobenius=6e-3)
# exp differs between compilers.
NEARLY = Limits(equal=0.999)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
  """A kernel at one shape, on one or more sets of inputs.

  Attributes:
    kernel: The name it has in the table, e.g. ``"grouped_matmul mxfp8"``.
    shape: In words, e.g. ``"1024 x 512"``.
    stage: "small" shapes come first; "real" ones are timed too.
    module: The module that must be there.
    make: Makes the inputs from a value of ``inputs``; jittable.
    run: The kernel; takes inputs and, by name, ``interpret``.
    meaning: The reference on the same inputs, with the same results.
    inputs: Name -> arguments of ``make``, alike in shape; timed is the first.
    specified: Takes a result and the inputs and blanks what a kernel may leave
      as it likes; None where all of a result is specified.
    limits: How far the results may be apart.
    flops: Of one call, counting rows that belong to a group; 0 if none.
    rate: Name of the peak that bounds it, "memory", "bf16" or "fp8".
    baselines: Name -> (function, maker of its inputs): timed beside it.
    interpreted: Whether a CPU runs it in JAX's own interpret mode; if not,
      why not.
  """

  kernel: str
  shape: str
  stage: str
  module: str
  make: Callable[..., tuple[Any, ...]]
  run: Callable[..., Any]
  meaning: Callable[..., Any]
  inputs: dict[str, tuple[Any, ...]]
  specified: Callable[..., Any] | None = None
  limits: Limits = Limits()
  flops: float = 0.0
  rate: str = "memory"
  baselines: dict[str, tuple[Callable[..., Any], Callable[[], Any]]] = (
    dataclasses.field(default_factory=dict)
  )
  interpreted: bool | str = True

  @property
  def name(self) -> str:
    """E.g. ``quantize rows blocked, 1024 x 512``."""
    return f"{self.kernel}, {self.shape}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
  """What became of a check.

  Attributes:
    kernel: The check's.
    shape: The check's.
    stage: The check's.
    outcome: "passed"; "wrong" values; "failed" to compile or run; "hung";
      or "skipped".
    why: In words, unless it passed.
    unequal: Elements of codes that differ from the reference's.
    frobenius: Relative error of the numbers, the largest of all results.
    element: Their largest error in units of the root mean square.
    seconds: What the check took, compilation included.
    microseconds: Median time of a call, or None where it was not timed.
    flops: Of a call.
    bytes: Of a call: arguments and results, each once.
    rate: Which peak bounds it.
    baselines: Name -> microseconds of what was timed beside it.
  """

  kernel: str
  shape: str
  stage: str
  outcome: str
  why: str = ""
  unequal: int = 0
  frobenius: float = 0.0
  element: float = 0.0
  seconds: float = 0.0
  microseconds: float | None = None
  flops: float = 0.0
  bytes: int = 0
  rate: str = "memory"
  baselines: dict[str, float] = dataclasses.field(default_factory=dict)

  @property
  def name(self) -> str:
    """The check's name."""
    return f"{self.kernel}, {self.shape}"

  @property
  def bad(self) -> bool:
    """Whether it ran and did not pass."""
    return self.outcome not in ("passed", "skipped")


def finding(check: Check, outcome: str, **fields: Any) -> Finding:
  """A finding of a check."""
  return Finding(
    kernel=check.kernel,
    shape=check.shape,
    stage=check.stage,
    outcome=outcome,
    **fields,
  )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
  """What a comparison found.

  Attributes:
    ok: Whether the results are within the limits.
    unequal: Elements of codes that differ.
    frobenius: The largest relative Frobenius error of the numbers, or 0.
    element: Their largest error in units of the root mean square, or 0.
    why: In words, what is wrong; empty if nothing is.
  """

  ok: bool
  unequal: int = 0
  frobenius: float = 0.0
  element: float = 0.0
  why: str = ""


def _codes(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(x, CODES[x.dtype.itemsize])


@jax.jit
def _unequal(got: jax.Array, want: jax.Array) -> jax.Array:
  return jnp.sum(_codes(got) != _codes(want), dtype=jnp.int32)


@jax.jit
def _errors(got: jax.Array, want: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Relative Frobenius error, and the largest error over the rms of want.

  The rms is that of each index along the first axis, of vectors that of all.
  Where all of want is zero, any error is infinitely large.
  """
  got, want = got.astype(jnp.float32), want.astype(jnp.float32)
  scale = jnp.max(jnp.abs(want), initial=0.0)  # small squares underflow
  scale = jnp.where(scale > 0, scale, 1.0)
  error, want = (got - want) / scale, want / scale
  rms = jnp.sqrt(jnp.mean(jnp.square(want)))
  rms = jnp.where(rms > 0, rms, 1.0)
  frobenius = jnp.sqrt(jnp.mean(jnp.square(error))) / rms
  error = jnp.where(jnp.isnan(error), jnp.inf, jnp.abs(error))
  lines = tuple(range(1, want.ndim)) or None
  rms = jnp.sqrt(jnp.mean(jnp.square(want), axis=lines, keepdims=True))
  return frobenius, jnp.max(
    jnp.where(error > 0, error / rms, 0.0), initial=0.0
  )


def same_bits(got: Any, want: Any) -> bool:
  """Whether two results of one kernel hold the same bits."""
  pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  return all(int(_unequal(a, b)) == 0 for a, b in pairs)


def compare(got: Any, want: Any, limits: Limits) -> Verdict:
  """Judges results against the reference's.

  Args:
    got: A pytree of arrays.
    want: One with as many leaves of the same shapes and dtypes.
    limits: How far they may be apart.
  """
  shapes = [
    [(x.shape, str(x.dtype)) for x in jax.tree.leaves(tree)]
    for tree in (got, want)
  ]
  if shapes[0] != shapes[1]:
    return Verdict(ok=False, why=f"results are {shapes[0]}, not {shapes[1]}")
  unequal, frobenius, element, wrong = 0, 0.0, 0.0, []
  leaves = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
  for i, (a, b) in enumerate(leaves):
    if limits.equal is not None and a.dtype != jnp.float32:
      differ = int(_unequal(a, b))
      unequal += differ
      if differ > (1 - limits.equal) * a.size:
        wrong.append(f"result {i}: {differ} of {a.size} elements differ")
      continue
    error, largest = (float(e) for e in _errors(a, b))
    if not (error <= limits.frobenius and largest <= limits.element):
      wrong.append(
        f"result {i}: relative error {error:.2g} (limit {limits.frobenius:g}), "
        f"largest {largest:.2g} rms (limit {limits.element:g})"
      )
    frobenius, element = worse(frobenius, error), worse(element, largest)
  return Verdict(
    ok=not wrong,
    unequal=unequal,
    frobenius=frobenius,
    element=element,
    why="; ".join(wrong),
  )


def worse(a: float, b: float) -> float:
  """The larger of two errors; NaN and infinity as the largest JSON can say."""
  return max(a, b if math.isfinite(b) else sys.float_info.max)
