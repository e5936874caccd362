"""What a compiled kernel costs, read from its listings; see `aot`.

Mosaic writes PTX, ptxas's log, SASS and its own resources for each kernel. The
counts are of static instructions: a loop's body counts once.
"""

import dataclasses
import re

# name -> (which listing, pattern). A count is a count of static instructions.
INSTRUCTIONS = {
  "block_scaled_mma": ("ptx", r"tcgen05\.mma\.\S*block_scale"),
  "mxfp8_mma": (
    "ptx",
    r"tcgen05\.mma\.\S*kind::mxf8f6f4\.block_scale\.scale_vec::1X",
  ),
  "mma_of_a_pair": ("ptx", r"tcgen05\.mma\.cta_group::2"),
  "scale_copy_to_tmem": ("ptx", r"tcgen05\.cp\."),
  "tmem_load": ("ptx", r"tcgen05\.ld\."),
  "wgmma_fp8": ("ptx", r"wgmma\.mma_async\.\S*\.e4m3"),
  "wgmma_16bit": ("ptx", r"wgmma\.mma_async\.\S*\.(?:bf16|f16)\.(?:bf16|f16)"),
  "bulk_tensor_load": (
    "ptx",
    r"cp\.async\.bulk\.tensor\.\S*shared::\w+\.global",
  ),
  "bulk_tensor_store": (
    "ptx",
    r"cp\.async\.bulk\.tensor\.\S*global\.shared::cta",
  ),
  "bulk_gather": ("ptx", r"cp\.async\.bulk\.tensor\.\S*gather4"),
  "bulk_copy": ("ptx", r"cp\.async\.bulk\.(?:shared|global)"),
  "cast_to_fp8": ("ptx", r"cvt\.rn\.satfinite\.e[45]m[32]x2"),
  "cast_from_fp8": ("ptx", r"cvt\.rn\.f16x2\.e[45]m[32]x2"),
  "local_load": ("sass", r"\bLDL\b"),
  "local_store": ("sass", r"\bSTL\b"),
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Result:
  """What ptxas and the listings say of one `mosaic.Variant`.

  Attributes:
    registers: Registers per thread.
    spill_bytes: Bytes of spill stores and loads, and of stack frame.
    serialized: Warnings of ptxas that it runs wgmma one after another.
    smem_bytes: Shared memory per CTA, scratch and barriers.
    tmem_columns: Tensor memory columns per CTA.
    threads: Threads per CTA.
    instructions: Name in `INSTRUCTIONS` -> static count; absent names are 0.
    problems: Why the check fails, in words; empty when it passes.
  """

  kernel: str
  variant: str
  registers: int = 0
  spill_bytes: int = 0
  serialized: int = 0
  smem_bytes: int = 0
  tmem_columns: int = 0
  threads: int = 0
  compile_seconds: float = 0.0
  instructions: dict[str, int] = dataclasses.field(default_factory=dict)
  problems: tuple[str, ...] = ()


def read_listings(
  base: Result, texts: dict[str, str], seconds: float
) -> Result:
  """Fills a result from the PTX, ptxas log, SASS and Mosaic's resources."""

  def total(pattern: str, text: str) -> int:
    return sum(int(x) for x in re.findall(pattern, text))

  counts = {
    name: len(re.findall(pattern, texts[listing]))
    for name, (listing, pattern) in INSTRUCTIONS.items()
  }
  resources = texts["resources.txt"]
  barriers = total(r"num_barriers=(\d+)", resources)
  return dataclasses.replace(
    base,
    registers=total(r"Used (\d+) registers", texts["ptxas"]),
    spill_bytes=total(r"(\d+) bytes (?:spill|stack)", texts["ptxas"]),
    serialized=len(re.findall(r"wgmma\S* .*serialized", texts["ptxas"])),
    smem_bytes=total(r"smem_scratch_bytes=(\d+)", resources) + 8 * barriers,
    tmem_columns=total(r"tmem_scratch_cols=(\d+)", resources)
    + total(r"tmem_collective_scratch_cols=(\d+)", resources),
    threads=total(r"\.(?:reqntid|maxntid) (\d+)", texts["ptx"]),
    compile_seconds=round(seconds, 2),
    instructions={name: n for name, n in counts.items() if n},
  )


def describe(result: Result) -> str:
  """One line for people: the costs, then the problems."""
  counts = " ".join(f"{k}={v}" for k, v in result.instructions.items())
  line = (
    f"{result.kernel:<18} {result.variant:<34} {result.registers:>4} reg "
    f"{result.spill_bytes:>3} spill {result.smem_bytes:>7} smem "
    f"{result.tmem_columns:>4} tmem {result.compile_seconds:>6.2f} s  {counts}"
  )
  return "\n".join([line, *(f"  FAIL: {p}" for p in result.problems)])
