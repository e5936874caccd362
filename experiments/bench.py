"""Times the memory-bound kernels beside a copy and beside XLA.

    python -m experiments.bench quantize|dequantize|swiglu|permute ...
        [--rows N] [--width N] [--samples N] [--json FILE]
    python -m experiments.bench grouped_matmul ...      see `bench_matmul`
    python -m experiments.bench moe_layer ...           see `bench_moe_layer`
    python -m experiments.bench numerics ...            see `bench_numerics`
    python -m experiments.bench exchange ...            see `bench_exchange`
    python -m experiments.bench pipeline ...            see `bench_pipeline`

A row of the table is one `pallas_kernels.workloads.Workload`: the kernel's
device time (median and quartiles of at least 20 samples), the bytes that it
must read and write over that time, their ratio to the fastest copy measured in
the same process, the time of the XLA-compiled reference over the kernel's, and
how many of the results' bytes equal the reference's on the whole arrays.
SwiGLU is not equal in every byte: its exp differs between compilers.

Needs an NVIDIA GPU, Hopper or newer. Without torch, one way to copy is missing.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import dataclasses
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import pathlib
import platform
import sys
from typing import Any

import jax
import jax.numpy as jnp
import rich.console
import rich.table

from experiments import (
  bench_exchange,
  bench_matmul,
  bench_moe_layer,
  bench_numerics,
  bench_pipeline,
)
from pallas_kernels import timing, workloads

PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "torch")

Workload = workloads.Workload
Timing = timing.Timing


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
  """What was measured of one workload.

  Attributes:
    name: The workload's.
    kernel: The workload's.
    variant: The workload's.
    rows: The workload's.
    width: The workload's.
    bytes: Inputs and results, each once.
    time: Of the kernel.
    gigabytes_per_second: Bytes over the median.
    of_copy: Ratio to the fastest copy.
    bar: The least ratio that the project asks for.
    reference: Time of the XLA-compiled reference.
    times_reference: Its median over the kernel's.
    equal_bytes: Share of equal bytes of data, scales and bf16 results.
    float32_error: Relative Frobenius error of float32 results, if any.
  """

  name: str
  kernel: str
  variant: str
  rows: int
  width: int
  bytes: int
  time: Timing
  gigabytes_per_second: float
  of_copy: float
  bar: float | None
  reference: Timing
  times_reference: float
  equal_bytes: float
  float32_error: float | None


@jax.jit
def _equal(got: Any, want: Any) -> tuple[jax.Array, jax.Array]:
  """Equal elements of each leaf, and its squared error over its square."""
  pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
  codes = [(_codes(a), _codes(b)) for a, b in pairs]
  equal = [jnp.mean(a == b, dtype=jnp.float32) for a, b in codes]
  below = jnp.nextafter(jnp.float32(1), jnp.float32(0))  # a mean may round up
  equal = [
    jnp.where(jnp.all(a == b), 1.0, jnp.minimum(e, below))
    for e, (a, b) in zip(equal, codes, strict=True)
  ]
  floats = [(a, b) for a, b in pairs if a.dtype == jnp.float32]
  error = [jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in floats]
  kept = [e for e, (a, _) in zip(equal, pairs, strict=True)
          if a.dtype != jnp.float32]  # fmt: skip
  return jnp.stack(kept), jnp.stack(error) if error else jnp.zeros(0)


def _codes(x: jax.Array) -> jax.Array:
  unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
  return jax.lax.bitcast_convert_type(x, unsigned)


def compare(got: Any, want: Any) -> tuple[float, float | None]:
  """Equality of two results.

  Returns:
    The least share of equal elements over the leaves that are not float32,
    exactly 1 only if all are; and the largest relative Frobenius error of the
    float32 leaves, None without any.

  Raises:
    ValueError: Their leaves differ in number, shape or dtype.
  """
  shapes = [
    [(x.shape, x.dtype) for x in jax.tree.leaves(tree)] for tree in (got, want)
  ]
  if shapes[0] != shapes[1]:
    raise ValueError(f"bench: results differ in shape: {shapes}.")
  equal, error = _equal(jax.tree.leaves(got), jax.tree.leaves(want))
  return float(equal.min()), float(error.max()) if error.size else None


def run_case(
  workload: Workload, copy: timing.Copy, samples: int, **schedule: Any
) -> Case:
  """Checks and times one workload."""
  arguments = jax.block_until_ready(jax.jit(workload.make)())
  kernel = jax.jit(functools.partial(workload.run, **schedule))
  meaning = jax.jit(workload.meaning)
  equal, error = compare(kernel(*arguments), meaning(*arguments))
  time, reference = timing.measure_in_turn(
    [timing.rotation(f, arguments) for f in (kernel, meaning)], samples=samples
  )
  rate = time.rate(workload.bytes())
  return Case(
    name=workload.name,
    kernel=workload.kernel,
    variant=workload.variant,
    rows=workload.rows,
    width=workload.width,
    bytes=workload.bytes(),
    time=time,
    gigabytes_per_second=rate,
    of_copy=rate / copy.gigabytes_per_second,
    bar=workload.bar,
    reference=reference,
    times_reference=reference.median_us / time.median_us,
    equal_bytes=equal,
    float32_error=error,
  )


def torch_copy(size: int, **options: Any) -> dict[str, Timing]:
  """``torch.Tensor.copy_`` of so many bytes; nothing without torch."""
  if importlib.util.find_spec("torch") is None:
    return {}
  torch = importlib.import_module("torch")
  if not torch.cuda.is_available():
    return {}
  source = torch.randint(255, (size,), dtype=torch.uint8, device="cuda")
  copy = functools.partial(torch.empty_like(source).copy_, source)
  timed = timing.measure(
    copy, wait=lambda _: torch.cuda.synchronize(), **options
  )
  del source, copy
  torch.cuda.empty_cache()
  return {"torch copy_": timed}


def copies(size: int = timing.COPY_BYTES) -> dict[str, Timing]:
  """Every way to copy, timed once."""
  return timing.copies(size) | torch_copy(size)


def chosen(
  kernels: Sequence[str], rows: int | None, width: int | None
) -> list[Workload]:
  """Workloads of some kernels at their own shapes, or at the one given."""
  found: list[Workload] = []
  for kernel in dict.fromkeys(kernels):
    shapes = workloads.shapes(kernel)
    if rows or width:
      shapes = [(rows or shapes[0][0], width or shapes[0][1])]
    for shape in shapes:
      found += workloads.MAKERS[kernel](*shape)
  return found


def table(cases: Sequence[Case], copy: timing.Copy) -> rich.table.Table:
  """The cases side by side."""
  made = rich.table.Table(
    title=f"{copy.how}: {copy.gigabytes_per_second:.0f} GB/s"
  )
  made.add_column("case")
  for name in ("us", "quartiles", "GB/s", "of copy", "bar", "x XLA", "equal"):
    made.add_column(name, justify="right")
  for case in cases:
    time, missed = case.time, case.bar is not None and case.of_copy < case.bar
    made.add_row(
      case.name,
      f"{time.median_us:.1f}",
      f"{time.low_us:.1f}-{time.high_us:.1f}",
      f"{case.gigabytes_per_second:.0f}",
      f"{case.of_copy:.3f}" + (" missed" if missed else ""),
      "" if case.bar is None else f"{case.bar:.2f}",
      f"{case.times_reference:.1f}",
      "bits" if case.equal_bytes == 1.0 else f"{case.equal_bytes:.6f}",
    )
  return made


def origin(
  arguments: Sequence[str], module: str = "experiments.bench"
) -> dict[str, Any]:
  """Command, device and versions, as JSON values."""
  versions = {"python": platform.python_version()}
  for name in PACKAGES:
    if importlib.util.find_spec(name.replace("-", "_")) is not None:
      versions[name] = importlib.metadata.version(name)
  first = jax.devices()[0]
  device = {"platform": first.platform, "kind": first.device_kind}
  words = list(arguments)
  if "--json" in words:  # where the file went is nobody's concern
    at = words.index("--json")
    words = words[:at] + words[at + 2 :]
  command = " ".join([f"python -m {module}", *words])
  return {"command": command, "device": device, "versions": versions}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
  parser = argparse.ArgumentParser(
    prog="python -m experiments.bench",
    description="Times the memory-bound kernels beside a copy and beside XLA.",
  )
  parser.add_argument("kernels", nargs="+", choices=sorted(workloads.MAKERS))
  parser.add_argument("--rows", type=int, help="instead of the usual ones")
  parser.add_argument("--width", type=int, help="columns; of a SwiGLU, of F")
  parser.add_argument("--samples", type=int, default=timing.SAMPLES)
  parser.add_argument("--json", type=pathlib.Path, help="file to write")
  return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
  """Runs the command; returns its exit status, 1 if a case is wrong."""
  others = (
    *(bench_matmul, bench_moe_layer, bench_numerics),
    *(bench_exchange, bench_pipeline),
  )
  for other in others:
    if other.NAME in arguments[:1]:
      return other.main(arguments, origin)
  asked = _parse(arguments)
  if jax.devices()[0].platform != "gpu":
    print(
      "bench: the kernels run on an NVIDIA GPU (Hopper or newer); JAX found "
      f"{jax.devices()[0].platform}. Install the cuda extra on such a machine.",
      file=sys.stderr,
    )
    return 2
  console = rich.console.Console(width=None if sys.stdout.isatty() else 130)
  before = copies()
  copy = timing.fastest([before])
  cases, failed = [], {}
  for workload in chosen(asked.kernels, asked.rows, asked.width):
    try:
      cases.append(run_case(workload, copy, asked.samples))
    except (NotImplementedError, jax.errors.JaxRuntimeError) as error:
      failed[workload.name] = str(error)
      console.print(f"{workload.name}: {str(error)[:400]}")
      continue
    console.print(f"{workload.name}: {cases[-1].of_copy:.3f} of a copy")
  after = timing.fastest([copies()])
  console.print(table(cases, copy))
  if asked.json:
    found = origin(arguments) | {
      "copy": dataclasses.asdict(copy),
      "copy_afterwards": dataclasses.asdict(after),
      "cases": [dataclasses.asdict(case) for case in cases],
      "failed": failed,
    }
    asked.json.write_text(json.dumps(found, indent=2) + "\n")
  wrong = [c.name for c in cases if c.equal_bytes < 1 and c.kernel != "swiglu"]
  wrong += [c.name for c in cases if c.equal_bytes < 0.999]
  if wrong:
    print(f"bench: unequal to the reference: {wrong}", file=sys.stderr)
  return 1 if wrong or failed else 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
