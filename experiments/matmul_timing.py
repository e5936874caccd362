"""How the benchmark compiles and times calls of grouped matmuls.

In turn with each other, and each without a break for a while, with the SM clock
and the power that nvidia-smi reads meanwhile.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import math
import shutil
import statistics
import subprocess
import time
from typing import Any

import jax

from experiments import matmul_peers, matmul_ways
from pallas_kernels import timing

BATCH_SECONDS = 0.05  # of calls between two waits
SMI_MILLISECONDS = 50
SMI = (
  "nvidia-smi",
  "--id=0",
  "--query-gpu=clocks.sm,power.draw",
  "--format=csv,noheader,nounits",
  f"-lms={SMI_MILLISECONDS}",
)

Call = matmul_ways.Call
Problem = matmul_ways.Problem


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sustained:
  """One call without a break.

  Attributes:
    median_us: Of a call, over the second half.
    teraflops: At that time.
    clock_mhz: Median SM clock over the second half, None without nvidia-smi.
    watts: Likewise.
  """

  median_us: float
  teraflops: float
  clock_mhz: float | None
  watts: float | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
  """What was measured of one call.

  Attributes:
    problem: What was computed.
    way: Which product.
    who: Precision of ours, or a peer.
    time: In turn with the others.
    teraflops: On useful rows, at the median.
    times: Peer -> its median over ours, for the same product.
    sustained: If it was measured.
    error: Of ours.
  """

  problem: Problem
  way: str
  who: str
  time: timing.Timing
  teraflops: float
  times: dict[str, float]
  sustained: Sustained | None
  error: float | None


class Compiler:
  """Compiles each function once for a key; several threads may call it."""

  def __init__(self):
    self._found: dict[Any, Callable[..., Any]] = {}

  def __call__(self, key: Any, function: Callable[..., Any], *arguments: Any):
    """The compiled function."""
    if key not in self._found:
      self._found[key] = jax.jit(function).lower(*arguments).compile()
    return self._found[key]


def read_smi(text: str) -> tuple[float | None, float | None]:
  """Median clock and power of the second half of nvidia-smi's lines."""
  rows = []
  for line in text.splitlines():
    try:
      clock, watts = map(float, line.split(","))
    except ValueError:  # a line that was cut off, or [N/A]
      continue
    rows.append((clock, watts))
  rows = rows[len(rows) // 2 :]
  if not rows:
    return None, None
  clocks, powers = zip(*rows, strict=True)
  return statistics.median(clocks), statistics.median(powers)


def sustain(call: Call, flops: int, once: float, seconds: float) -> Sustained:
  """Runs a call for some seconds.

  Args:
    call: What to run.
    flops: Of a call.
    once: Seconds that it takes, about.
    seconds: How long to go on.
  """
  count = max(1, math.ceil(BATCH_SECONDS / max(once, 1e-6)))
  smi = None
  if shutil.which(SMI[0]):
    smi = subprocess.Popen(SMI, stdout=subprocess.PIPE, text=True)
  times, result, start = [], None, time.perf_counter()
  while not times or time.perf_counter() - start < seconds:
    began = time.perf_counter()
    for _ in range(count):
      result = call.run()
    matmul_peers.wait(result)
    times.append((time.perf_counter() - began) / count)
  clock = watts = None
  if smi is not None:
    smi.terminate()
    clock, watts = read_smi(smi.communicate()[0])
  median = statistics.median(times[len(times) // 2 :])
  return Sustained(
    median_us=1e6 * median,
    teraflops=flops / median / 1e12,
    clock_mhz=clock,
    watts=watts,
  )


def measure(
  problem: Problem, calls: Sequence[Call], samples: int, seconds: float
) -> list[Case]:
  """Checks and times calls; without ``seconds`` only in turn."""
  with concurrent.futures.ThreadPoolExecutor(matmul_ways.THREADS) as pool:
    errors = list(pool.map(lambda c: c.error and c.error(c.run()), calls))
  times = timing.measure_in_turn(
    [call.run for call in calls], wait=matmul_peers.wait, samples=samples
  )
  medians = {
    (call.who, call.way): t.median_us
    for call, t in zip(calls, times, strict=True)
  }

  def compared(call: Call, median: float) -> dict[str, float]:
    return {
      who: other / median
      for (who, way), other in medians.items()
      if way == call.way.split()[0] and who in matmul_peers.PEERS
    }

  found = []
  for call, t, error in zip(calls, times, errors, strict=True):
    sustained = None
    if seconds:
      sustained = sustain(call, problem.flops, t.median_us / 1e6, seconds)
    found.append(
      Case(
        problem=problem,
        way=call.way,
        who=call.who,
        time=t,
        teraflops=problem.flops / t.median_us / 1e6,
        times=compared(call, t.median_us),
        sustained=sustained,
        error=error,
      )
    )
  return found
