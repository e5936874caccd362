"""How long a kernel takes on a B200: a model, not measured.

    bound      the slowest of: tensor core, shared memory, L2, device memory;
               whole tiles, whole rounds of all SMs, every byte once
    expected   the bound over the share of it that kernels reach (`REACHED`,
               `SUSTAINED`), and what starting a kernel costs

Legend: R rows, G groups, K contracted, N produced. Clocks are of the rate at
which the data sheet's peak is counted. Nothing here has run on a B200; the
assumptions are `ASSUMPTIONS`, in words.
"""

from collections.abc import Sequence
import dataclasses
import math

from experiments import h200_shares
from pallas_kernels import mxfp8, peaks
from pallas_kernels.blackwell import grouped_matmul, grouped_wgrad

GPU = peaks.PEAKS["NVIDIA B200"]
STEP = 128  # of K: one atom of scales, one step of the pipeline
# Per SM and clock, PTX ISA shapes of tcgen05.mma at their full rate.
FLOPS_PER_CLOCK = {"mxfp8": 16384, "bf16": 8192}
CLOCK = GPU.fp8 / GPU.sms / FLOPS_PER_CLOCK["mxfp8"]
SHARED_BYTES_PER_CLOCK = 128  # written by TMA and read by the tensor core
L2_BYTES_PER_CLOCK = 64  # that one SM takes from L2
SCALED = 1 + 1 / mxfp8.BLOCK  # bytes of an MXFP8 number
LAUNCH_US = 3.0  # between kernels of one program
FILL_CLOCKS = 4000  # the first loads and the last store of a matmul

# Share of its bound that a matmul sustains, and of the peak bandwidth that a
# memory-bound kernel reaches: as ours do on one H200.
SUSTAINED = h200_shares.sustained()
REACHED = h200_shares.reached()
# Bytes read and written an element of the array that each is counted in.
BYTES = {
  "quantize": 2 + SCALED,
  "quantize both": 2 + 2 * SCALED,
  "requantize": 2 * SCALED,
  "permute": 2 * SCALED,
  "permute bf16": 4.0,
  "swiglu": 4 + 2 * SCALED,
  "swiglu bf16": 6.0,
  "swiglu backward": 6 + 4 * SCALED,
  "swiglu backward bf16": 10.0,
}
# The share of the wire that two H200s reached with 256 slices, 226-241 of 450
# GB/s.
WIRE_REACHED = 0.5

ASSUMPTIONS = (
  "Peaks are the data sheet's, dense: "
  f"{GPU.fp8 / 1e12:,.0f} TFLOP/s MXFP8, {GPU.bf16 / 1e12:,.0f} bf16, "
  f"{GPU.memory / 1e12:g} TB/s, {GPU.sms} SMs, NVLink "
  f"{GPU.wire / 1e9:,.0f} GB/s each way.",
  f"A clock is {CLOCK / 1e9:.3f} GHz, at which {GPU.sms} SMs make the MXFP8 "
  "peak. The GPU slows under load; that is in the sustained share.",
  f"An SM moves {SHARED_BYTES_PER_CLOCK} bytes a clock through shared memory, "
  "loads and operand reads together, and takes "
  f"{L2_BYTES_PER_CLOCK} from L2 (an estimate).",
  "Matmul tiles are those that the kernels in `pallas_kernels.blackwell` take "
  "by default; tiles are dealt in whole rounds; the store of one hides behind "
  "the multiply of the next, but for the last. bf16 matmuls, for which there "
  "is no Blackwell kernel here, are given the same tiles.",
  "Every operand comes from device memory once: L2 (126 MB) serves the rest.",
  f"Matmuls sustain {SUSTAINED['mxfp8']:.0%} (MXFP8) and "
  f"{SUSTAINED['bf16']:.0%} (bf16) of their bound, as our kernels do of the "
  "peak on one H200, where the clock falls under load.",
  "Memory-bound kernels reach the share of the peak bandwidth that the same "
  "source reaches on one H200. There they use at most 42 % of the issue slots; "
  "on a B200, with 1.67 times the bandwidth and 1.1 times the slots a second, "
  "that would be at most 64 %, so that memory stays the bound.",
  f"Each kernel costs {LAUNCH_US:g} us to start; a matmul fills and drains in "
  f"{FILL_CLOCKS} clocks.",
  "Groups are even. Router, loss, optimizer and shared experts are left out.",
  f"Collectives reach {WIRE_REACHED:.0%} of the wire, as on two H200s.",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tile:
  """What one CTA, or a pair, computes at a time.

  Attributes:
    rows: Rows of the result, 128 for each CTA.
    columns: Columns of the result; a pair loads half of them each.
    ctas: 1 or 2.
  """

  rows: int = 256
  columns: int = 256
  ctas: int = 2

  @property
  def name(self) -> str:
    """E.g. ``256x256, 2 CTAs``."""
    return f"{self.rows}x{self.columns}, {self.ctas} CTA" + "s" * (
      self.ctas > 1
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
  """What the model says of one kernel.

  Attributes:
    name: In words.
    flops: Useful ones; 0 if it only moves bytes.
    bytes: Read and written, each once.
    limit: What bounds it.
    bound_us: The least time.
    expected_us: The time to expect.
    tile: Name of a matmul's tile.
  """

  name: str
  flops: float
  bytes: float
  limit: str
  bound_us: float
  expected_us: float
  tile: str = ""

  @property
  def tflops(self) -> float:
    """Expected useful TFLOP/s."""
    return self.flops / self.expected_us / 1e6


def step_clocks(tile: Tile, form: str) -> dict[str, float]:
  """Clocks of one step of 128 of K on one SM, by what could bound it."""
  size = 2.0 if form == "bf16" else SCALED
  lhs, rhs = tile.rows // tile.ctas, tile.columns // tile.ctas
  loaded = STEP * size * (lhs + rhs)
  read = STEP * math.floor(size) * (lhs + rhs)
  flops = 2 * lhs * tile.columns * STEP
  return {
    "tensor core": flops / FLOPS_PER_CLOCK[form],
    "shared memory": (loaded + read) / SHARED_BYTES_PER_CLOCK,
    "L2": loaded / L2_BYTES_PER_CLOCK,
  }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Step:
  """One step of 128 of K in one of the kernels' tiles.

  Attributes:
    tile: Its name.
    stages: Steps in flight.
    mmas: Block-scaled MMAs, each 32 of K.
    scale_copies: Copies of scales to tensor memory.
    clocks: Of one SM, by what could bound it.
    smem_bytes: Shared memory of a CTA.
    tmem_columns: Columns of tensor memory, of 512.
  """

  tile: str
  stages: int
  mmas: int
  scale_copies: int
  clocks: dict[str, float]
  smem_bytes: int
  tmem_columns: int


def steps() -> list[Step]:
  """What the kernels' tiles do in a step, widest tile first."""
  found = []
  for width, depth in ((256, 256), (128, 256), (128, 128)):
    chosen = grouped_wgrad.default_tile(depth, width, accumulate=False)
    tile = Tile(rows=chosen.lhs, columns=chosen.rhs, ctas=chosen.ctas)
    found.append(
      Step(
        tile=tile.name,
        stages=chosen.stages,
        mmas=STEP // mxfp8.BLOCK,
        scale_copies=1 + chosen.rhs // 128,
        clocks=step_clocks(tile, "mxfp8"),
        smem_bytes=chosen.smem_bytes,
        tmem_columns=chosen.accumulator_columns + chosen.scale_columns,
      )
    )
  return found


def _matmul(
  name: str,
  form: str,
  tile: Tile,
  *,
  tiles: int,
  steps: int,
  flops: float,
  moved: float,
) -> Estimate:
  """A persistent matmul of so many tiles of so many steps."""
  rounds = math.ceil(tiles / (GPU.sms // tile.ctas))
  clocks = step_clocks(tile, form)
  slowest = max(clocks, key=clocks.__getitem__)
  compute = 1e6 * rounds * steps * clocks[slowest] / CLOCK
  memory = 1e6 * moved / GPU.memory
  bound = max(compute, memory)
  expected = max(compute / SUSTAINED[form], memory / REACHED["matmul"])
  return Estimate(
    name=name,
    flops=flops,
    bytes=moved,
    limit=slowest if compute >= memory else "memory",
    bound_us=bound,
    expected_us=expected + 1e6 * FILL_CLOCKS / CLOCK + LAUNCH_US,
    tile=tile.name,
  )


def matmul(
  rows: Sequence[int], depth: int, width: int, form: str, name: str = "matmul"
) -> Estimate:
  """y = x @ w of each group; bf16 results.

  Args:
    rows: Rows of each group.
    depth: K.
    width: N.
    form: "mxfp8" or "bf16".
    name: In words.
  """
  chosen = grouped_matmul.default_tile(sum(rows), len(rows), width)
  tile = Tile(rows=chosen.lhs, columns=chosen.rhs, ctas=chosen.ctas)
  across = math.ceil(width / tile.columns)
  size = 2.0 if form == "bf16" else SCALED
  total = sum(rows)
  moved = size * depth * (total + len(rows) * width) + 2.0 * total * width
  return _matmul(
    name, form, tile,
    tiles=sum(math.ceil(n / tile.rows) for n in rows) * across,
    steps=math.ceil(depth / STEP),
    flops=2.0 * total * depth * width,
    moved=moved,
  )  # fmt: skip


def wgrad(
  rows: Sequence[int], depth: int, width: int, form: str, name: str = "wgrad"
) -> Estimate:
  """dw = x^T dy over the rows of each group; float32 results.

  Args:
    rows: Rows of each group, alike.
    depth: K, columns of x.
    width: N, columns of dy.
    form: "mxfp8" or "bf16".
    name: In words.
  """
  chosen = grouped_wgrad.default_tile(depth, width, accumulate=False)
  tile = Tile(rows=chosen.lhs, columns=chosen.rhs, ctas=chosen.ctas)
  size = 2.0 if form == "bf16" else SCALED
  total = sum(rows)
  moved = size * total * (depth + width) + 4.0 * len(rows) * depth * width
  each = math.ceil(depth / tile.rows) * math.ceil(width / tile.columns)
  return _matmul(
    name, form, tile,
    tiles=each * len(rows),
    steps=math.ceil(max(rows) / STEP),
    flops=2.0 * total * depth * width,
    moved=moved,
  )  # fmt: skip


def memory(
  kernel: str, elements: float, name: str, *, reached: str | None = None
) -> Estimate:
  """A memory-bound kernel.

  Args:
    kernel: Key of `BYTES`.
    elements: Of the array that it is counted in.
    name: In words.
    reached: Key of `REACHED`, the kernel's if left out.
  """
  moved = BYTES[kernel] * elements
  return moving(moved, name, reached or kernel.removesuffix(" bf16"))


def moving(moved: float, name: str, reached: str) -> Estimate:
  """A kernel that reads and writes so many bytes."""
  bound = 1e6 * moved / GPU.memory
  return Estimate(
    name=name,
    flops=0.0,
    bytes=moved,
    limit="memory",
    bound_us=bound,
    expected_us=bound / REACHED[reached] + LAUNCH_US,
  )


def wire(sent: float, name: str) -> Estimate:
  """A collective in which every device sends so many bytes to others."""
  bound = 1e6 * sent / GPU.wire
  return Estimate(
    name=name,
    flops=0.0,
    bytes=sent,
    limit="wire",
    bound_us=bound,
    expected_us=bound / WIRE_REACHED + LAUNCH_US,
  )
