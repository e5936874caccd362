"""Compiles every kernel for a named GPU on a machine that has none.

    python -m pallas_kernels.aot --target b200|h200 [--kernels WORD ...]
        [--json FILE] [--keep DIR]

A target is a file in ``targets/``: XLA's description of a GPU. XLA compiles for
that description, so the result is a real cubin (sm_90a or sm_100a), and ptxas
says what the kernel costs. The check fails, and the command exits 1, when a
kernel does not compile, spills, exceeds a budget of the GPU, or lacks an
instruction that its `mosaic.Variant` promises.

What this proves: the kernel compiles, fits and uses the hardware it is meant to
use. It proves neither values nor the absence of races (the interpreter in the
tests does) and says nothing of speed. ``--kernels`` leaves out those whose
names hold none of the words.

Adding a GPU is adding a file to ``targets/`` (docs/adding_a_gpu.md); adding a
kernel is adding its module to `kernels`. One process per target: JAX caches
lowered kernels without the architecture in the key. ptxas and nvdisasm come
from the ``aot`` extra.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
import dataclasses
import importlib.resources
import importlib.util
import json
import os
import pathlib
import re
import sys
import tempfile
import time

import jax
from jax.experimental import topologies

from pallas_kernels import (
  aot_listing,
  dequantize,
  fold,
  gather_quantize,
  mosaic,
  permute,
  quantize,
  requantize,
  swiglu,
  swiglu_rows,
)
from pallas_kernels.blackwell import grouped_matmul as blackwell_grouped_matmul
from pallas_kernels.blackwell import grouped_wgrad as blackwell_grouped_wgrad
from pallas_kernels.blackwell import simple_matmul as blackwell_simple_matmul
from pallas_kernels.hopper import grouped_matmul as hopper_grouped_matmul
from pallas_kernels.hopper import grouped_wgrad as hopper_grouped_wgrad
from pallas_kernels.hopper import wgrad_folded as hopper_wgrad_folded

TMEM_COLUMNS = 512  # per SM, PTX ISA, tcgen05.alloc
SMEM_RESERVED = 1024  # bytes per CTA that the driver keeps, CUDA guide 7.4
REGISTER_UNIT = 8  # registers per thread are allocated in units of 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Target:
  """A GPU as XLA describes it; sizes in bytes and registers.

  Attributes:
    name: The stem of its file in ``targets/``.
    text: The ``GpuTargetConfigProto`` in text form.
  """

  name: str
  text: str

  def limit(self, field: str) -> int:
    """An integer field of the description.

    Raises:
      ValueError: The description lacks the field.
    """
    found = re.search(rf"\b{field}: (\d+)", self.text)
    if found is None:
      raise ValueError(f"aot: targets/{self.name}.txtpb must give {field}.")
    return int(found[1])

  @property
  def architecture(self) -> str:
    """The PTX target, e.g. ``sm_100a``."""
    return f"sm_{self.limit('major')}{self.limit('minor')}a"


def target_names() -> list[str]:
  """Names of the GPUs that ``targets/`` describes, sorted."""
  files = importlib.resources.files("pallas_kernels") / "targets"
  return sorted(
    f.name.removesuffix(".txtpb")
    for f in files.iterdir()
    if f.name.endswith(".txtpb")
  )


def load_target(name: str) -> Target:
  """Reads a target's description.

  Raises:
    ValueError: No such target.
  """
  if name not in target_names():
    raise ValueError(
      f"aot: target must be one of {target_names()}; got {name!r}. "
      "Add its description as pallas_kernels/targets/NAME.txtpb."
    )
  files = importlib.resources.files("pallas_kernels") / "targets"
  return Target(name=name, text=(files / f"{name}.txtpb").read_text())


def kernels(target: Target) -> list[mosaic.Variant]:
  """Every kernel in every tile choice that the library can select."""
  modules = (
    *(quantize, dequantize, requantize, permute, fold, gather_quantize),
    *(swiglu, swiglu_rows),
    *(hopper_grouped_matmul, hopper_grouped_wgrad, hopper_wgrad_folded),
    blackwell_simple_matmul,
    *(blackwell_grouped_matmul, blackwell_grouped_wgrad),
  )
  return [v for m in modules for v in m.variants(target.architecture)]


def named(
  variants: Sequence[mosaic.Variant], words: Sequence[str]
) -> list[mosaic.Variant]:
  """The variants whose names hold one of the words; all without words.

  Raises:
    ValueError: None does.
  """
  found = [
    v
    for v in variants
    if not words or any(word in f"{v.kernel} {v.variant}" for word in words)
  ]
  if not found:
    known = sorted({v.kernel for v in variants})
    raise ValueError(f"aot: no kernel is named like {words}; known: {known}.")
  return found


def use_target(target: Target) -> jax.sharding.Sharding:
  """Makes the GPU of ``target`` the one that this process compiles for.

  Without a default device Mosaic assumes sm_90. The CPU platform is chosen
  before any backend starts: with the CUDA plugin installed and no GPU, looking
  for one takes seconds and prints a trace.
  """
  jax.config.update("jax_platforms", "cpu")
  topology = topologies.get_topology_desc(
    platform="cuda", target_config=target.text, topology="1x1x1"
  )
  jax.config.update("jax_default_device", topology.devices[0])
  mesh = topologies.make_mesh(topology, (1,), ("device",))
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def compile_variant(
  variant: mosaic.Variant,
  target: Target,
  sharding: jax.sharding.Sharding,
  keep: pathlib.Path,
) -> aot_listing.Result:
  """Compiles one variant; leaves its PTX and SASS in ``keep``.

  Mosaic writes its listings to the directory named in the environment at the
  time of compilation; the intermediate MLIR, megabytes each, is dropped.
  """
  arguments = [
    jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    for a in variant.arguments
  ]
  stem = re.sub(r"[^\w.-]+", "_", f"{variant.kernel}-{variant.variant}")
  base = aot_listing.Result(kernel=variant.kernel, variant=variant.variant)
  with tempfile.TemporaryDirectory() as dump:
    os.environ["MOSAIC_GPU_DUMP_TO"] = dump
    start = time.perf_counter()
    try:
      jax.jit(variant.function).lower(*arguments).compile()
    except (jax.errors.JaxRuntimeError, ValueError, NotImplementedError) as e:
      return dataclasses.replace(
        base, problems=(f"does not compile: {str(e)[:2000]}",)
      )
    seconds = time.perf_counter() - start
    del os.environ["MOSAIC_GPU_DUMP_TO"]
    texts = {}
    for suffix in ("ptx", "ptxas", "sass_ctrl", "resources.txt"):
      files = list(pathlib.Path(dump).glob(f"*.{suffix}"))
      if len(files) != 1:
        problem = f"expected one kernel, got {len(files)} {suffix} listings"
        return dataclasses.replace(base, problems=(problem,))
      texts[suffix.removesuffix("_ctrl")] = files[0].read_text()
  for suffix in ("ptx", "sass"):
    (keep / f"{stem}.{suffix}").write_text(texts[suffix])
  result = aot_listing.read_listings(base, texts, seconds)
  return dataclasses.replace(result, problems=problems(result, variant, target))


def problems(
  result: aot_listing.Result, variant: mosaic.Variant, target: Target
) -> tuple[str, ...]:
  """Says in words what disqualifies a compiled kernel; empty if nothing."""
  found = []
  if result.spill_bytes:
    found.append(f"spills {result.spill_bytes} bytes of registers")
  if result.serialized:
    found.append(f"ptxas serializes wgmma in {result.serialized} places")
  if not result.registers:
    found.append("ptxas reported no registers")
  ctas = variant.ctas_per_sm
  registers = -(-result.registers // REGISTER_UNIT) * REGISTER_UNIT
  registers *= result.threads * ctas
  if registers > target.limit("registers_per_core_limit"):
    found.append(f"{ctas} CTAs per SM need {registers} registers")
  smem = (result.smem_bytes + SMEM_RESERVED) * ctas
  if smem > target.limit("shared_memory_per_core"):
    found.append(f"{ctas} CTAs per SM need {smem} bytes of shared memory")
  if result.tmem_columns * ctas > TMEM_COLUMNS:
    found.append(
      f"{ctas} CTAs per SM need {result.tmem_columns * ctas} columns"
    )
  found.extend(
    f"promises {name} and has none"
    for name in variant.promises
    if not result.instructions.get(name)
  )
  return tuple(found)


def require_tools() -> None:
  """Checks that ptxas and nvdisasm come from the ``aot`` extra.

  Raises:
    ValueError: One of them is missing; without ptxas nothing compiles, and
      without nvdisasm there is no SASS to count in.
  """
  spec = importlib.util.find_spec("nvidia.cu13")
  folders = (spec and spec.submodule_search_locations) or []
  for tool in ("ptxas", "nvdisasm"):
    if not any(pathlib.Path(f, "bin", tool).exists() for f in folders):
      raise ValueError(
        f"aot: {tool} must be in nvidia/cu13/bin of this environment; looked "
        f"in {folders}. Install the extra: uv sync --extra aot."
      )


def check(
  target: Target, variants: Sequence[mosaic.Variant], keep: pathlib.Path
) -> list[aot_listing.Result]:
  """Compiles ``variants`` for ``target`` and prints a line for each."""
  require_tools()
  sharding = use_target(target)
  results = []
  for variant in variants:
    result = compile_variant(variant, target, sharding, keep)
    results.append(result)
    print(aot_listing.describe(result), flush=True)
  return results


def run(
  target: Target,
  variants: Sequence[mosaic.Variant],
  *,
  json_file: pathlib.Path | None = None,
  keep: pathlib.Path | None = None,
) -> int:
  """Checks ``variants``, writes the JSON report; returns the exit status."""
  with tempfile.TemporaryDirectory() as scratch:
    directory = keep or pathlib.Path(scratch)
    directory.mkdir(parents=True, exist_ok=True)
    results = check(target, variants, directory)
  failed = [r for r in results if r.problems]
  if json_file is not None:
    report = {
      "target": target.name,
      "architecture": target.architecture,
      "jax": jax.__version__,
      "kernels": [dataclasses.asdict(r) for r in results],
    }
    json_file.write_text(json.dumps(report, indent=2) + "\n")
  print(f"{len(results)} kernels for {target.name}, {len(failed)} failed")
  return 1 if failed else 0


def main(argv: Sequence[str] | None = None) -> int:
  """The command line; returns the exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m pallas_kernels.aot",
    description="Compile every kernel for a GPU that this machine lacks.",
  )
  parser.add_argument("--target", required=True, choices=target_names())
  parser.add_argument(
    "--kernels", nargs="+", default=[], metavar="WORD",
    help="only kernels whose name holds one of these",
  )  # fmt: skip
  parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
  parser.add_argument("--keep", type=pathlib.Path, metavar="DIR")
  args = parser.parse_args(argv)
  target = load_target(args.target)
  require_tools()
  use_target(target)  # before `kernels`, which takes the tiles measured on it
  asked = named(kernels(target), args.kernels)
  return run(target, asked, json_file=args.json, keep=args.keep)


if __name__ == "__main__":
  sys.exit(main())
