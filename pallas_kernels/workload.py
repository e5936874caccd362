"""One call of one kernel, as benchmarks and the autotuner run it.

`workloads` lists them; here is what an entry is, and what inputs they share.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import cases, groups, timing

GROUPS = cases.LOCAL_EXPERTS[-1]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
  """One call of one kernel.

  Attributes:
    kernel: Name of its module.
    variant: Which results, in which scale layout.
    rows: Rows of the arrays.
    width: Columns; of a SwiGLU the columns of F.
    make: Makes the arguments; jittable.
    run: The kernel; takes the arguments and, by name, a schedule.
    meaning: The reference on the same arguments, with the same results.
    bar: Share of a copy's bandwidth that the project asks for, if any.
    tuned: Name under which a schedule measured on this is looked up, if any.
    between: Takes the arguments; what the first of two kernels hands to the
      second, if there are two.
  """

  kernel: str
  variant: str
  rows: int
  width: int
  make: Callable[[], tuple[Any, ...]]
  run: Callable[..., Any]
  meaning: Callable[..., Any]
  bar: float | None = None
  tuned: str | None = None
  between: Callable[..., Any] | None = None

  @property
  def name(self) -> str:
    """E.g. ``quantize rows blocked 131072 x 7168``."""
    return f"{self.kernel} {self.variant} {self.rows} x {self.width}"

  def bytes(self) -> int:
    """Bytes of inputs and results, each once, and what lies between twice."""
    arguments = jax.eval_shape(self.make)
    counted = [arguments, jax.eval_shape(self.run, *arguments)]
    if self.between is not None:  # written, then read
      counted += [jax.eval_shape(self.between, *arguments)] * 2
    return timing.nbytes(counted)


def normal(seed: int, shape: tuple[int, ...]) -> jax.Array:
  """Random bf16 numbers."""
  return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def layout(rows: int, pattern: str = "even") -> groups.GroupLayout:
  """Groups that fill a buffer of ``rows`` rows, whole tiles each."""
  per_tile = groups.ROW_ALIGN
  sizes = cases.group_sizes(pattern, GROUPS, rows // per_tile)
  return groups.group_layout(
    jnp.array(sizes, jnp.int32) * per_tile, groups.round_up(rows, per_tile)
  )
