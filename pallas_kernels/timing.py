"""How long work takes on a GPU, and how fast the GPU copies.

    time of a call = (clock after - clock before) / calls,   calls run unbroken

A sample is a batch of calls, enqueued one after another and awaited once, long
enough that the launch of the first and the wait for the last do not count
(0.3 % of 10 ms). It needs no profiler and no CUDA binding. Calls shorter than
their own dispatch on the host, some 10 us, measure that dispatch instead.

Data that fits the level-2 cache is timed on several copies of it in turn
(`rotation`). What is compared with a copy is compared with the fastest one
that was found in the same process (`copies`).
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import itertools
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import permute

SAMPLES = 20
SAMPLE_SECONDS = 0.01
MAX_CALLS = 1000
CACHE_BYTES = 2**28  # twice the largest level-2 cache, 126 MB of B200
COPY_BYTES = 2**31
COPY_ROW = 4096  # bf16 columns of the array that is copied


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
  """Microseconds of one call.

  Attributes:
    median_us: Over the samples.
    low_us: First quartile.
    high_us: Third quartile.
    samples: Batches that were timed.
    calls: Calls in each.
  """

  median_us: float
  low_us: float
  high_us: float
  samples: int
  calls: int

  def rate(self, nbytes: float) -> float:
    """GB/s of a call that moves so many bytes."""
    return nbytes / self.median_us / 1e3


def measure(call: Callable[[], Any], **options: Any) -> Timing:
  """Times one call; `measure_in_turn` has the options."""
  return measure_in_turn([call], **options)[0]


def measure_in_turn(
  calls: Sequence[Callable[[], Any]],
  *,
  wait: Callable[[Any], Any] = jax.block_until_ready,
  samples: int = SAMPLES,
  sample_seconds: float = SAMPLE_SECONDS,
  clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
  """Times calls that enqueue device work and return at once.

  A sample of each is taken in turn, so that a GPU that grows warm or slow does
  so for all of them.

  Args:
    calls: Each does its work; what it returns goes to ``wait``. Results of
      earlier calls are dropped.
    wait: Waits for the work behind a result, and for all before it.
    samples: Batches of each call, at least 2.
    sample_seconds: How long a batch lasts, about.
    clock: Seconds.

  Raises:
    ValueError: Fewer than 2 samples.
  """
  if samples < 2:
    raise ValueError(f"timing: samples must be at least 2; got {samples}.")

  def batch(call: Callable[[], Any], count: int) -> float:
    result, start = None, clock()
    for _ in range(count):
      result = call()
    wait(result)
    return (clock() - start) / count

  counts = []
  for call in calls:
    batch(call, 2)  # compiles, loads, and lets clocks rise
    once = max(batch(call, 3), 1e-9)
    counts.append(min(MAX_CALLS, max(1, math.ceil(sample_seconds / once))))
    batch(call, counts[-1])
  pairs = list(zip(calls, counts, strict=True))
  rounds = [[1e6 * batch(*pair) for pair in pairs] for _ in range(samples)]
  return [
    _summary(found, count)
    for found, count in zip(zip(*rounds, strict=True), counts, strict=True)
  ]


def _summary(found: Sequence[float], calls: int) -> Timing:
  low, median, high = statistics.quantiles(found, n=4, method="inclusive")
  return Timing(
    median_us=median, low_us=low, high_us=high, samples=len(found), calls=calls
  )


def nbytes(tree: Any) -> int:
  """Bytes of all arrays (or their shapes) of a pytree."""
  return sum(
    math.prod(x.shape) * jnp.dtype(x.dtype).itemsize
    for x in jax.tree.leaves(tree)
  )


def rotation(
  function: Callable[..., Any], arguments: tuple[Any, ...]
) -> Callable[[], Any]:
  """A call of ``function`` that no cache serves.

  Args:
    function: Jitted.
    arguments: Of it. Below 256 MiB as many copies are made as exceed that, and
      each call takes the next.
  """
  copies_ = math.ceil(CACHE_BYTES / max(nbytes(arguments), CACHE_BYTES // 64))
  more = [jax.tree.map(jnp.copy, arguments) for _ in range(copies_ - 1)]
  turn = itertools.cycle([arguments, *more])
  return lambda: function(*next(turn))


def time_function(
  function: Callable[..., Any], arguments: tuple[Any, ...], **options: Any
) -> Timing:
  """`measure` of a jitted function, with its ``options``."""
  return measure(rotation(function, arguments), **options)


def copies(
  size: int = COPY_BYTES, *, bulk: bool = True, **options: Any
) -> dict[str, Timing]:
  """Ways to copy ``size`` bytes on the device, each timed.

  Args:
    size: Bytes, each read once and written once; a multiple of 8192.
    bulk: Include our own kernel, which needs Hopper or newer.
    **options: Of `measure_in_turn`.

  Returns:
    "XLA copy": ``jnp.copy``, for which XLA asks the driver. "XLA elementwise":
    a kernel that XLA generates, ``~x``. "Pallas bulk copies":
    `permute.take_rows` of all rows in order.
  """
  rows = size // (2 * COPY_ROW)
  x = jnp.zeros((rows, COPY_ROW), jnp.uint16) + jnp.arange(
    COPY_ROW, dtype=jnp.uint16
  )
  order = jnp.arange(rows, dtype=jnp.int32)
  ways: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "XLA copy": (jnp.copy, (x,)),
    "XLA elementwise": (jnp.bitwise_not, (x,)),
  }
  if bulk:
    ways["Pallas bulk copies"] = (permute.take_rows, (x, order))
  return {
    name: time_function(jax.jit(function), arguments, **options)
    for name, (function, arguments) in ways.items()
  }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copy:
  """The fastest of several ways to copy.

  Attributes:
    how: Its name.
    gigabytes_per_second: Bytes read and bytes written over its median time.
    all: GB/s of each way.
  """

  how: str
  gigabytes_per_second: float
  all: dict[str, float]


def fastest(found: Iterable[dict[str, Timing]], size: int = COPY_BYTES) -> Copy:
  """The fastest of timed copies of ``size`` bytes, over several rounds."""
  rates: dict[str, float] = {}
  for timings in found:
    for name, timing in timings.items():
      rates[name] = max(rates.get(name, 0.0), timing.rate(2 * size))
  how = max(rates, key=rates.__getitem__)
  return Copy(how=how, gigabytes_per_second=rates[how], all=rates)
