"""What others measured on B200s, and what our model says of the same work.

    Cursor    cursor.com/blog/kernels, August 2025
    torchao   github.com/pytorch/ao, torchao/prototype/moe_training/README.md at
              0b1bb117 (times of December 2025), and pull request 3203

The model knows nothing of these numbers: its shares come from our kernels on an
H200 (`b200_kernels`). Where the published kernel is not the one that is
modelled, the note says so.
"""

from collections.abc import Sequence
import dataclasses

from experiments import b200_kernels, b200_layer
from pallas_kernels import cases

LARGE = 8192  # rows, K and N of a dense matmul where none are published
TORCHAO_ROWS = 131072
TORCHAO_OP_ROWS = 128000  # of the benchmark of the differentiable matmul
DEEPSEEK, LLAMA = (
  cases.MODELS[name] for name in ("deepseek_v3", "llama4_scout")
)
EIGHT = 8  # groups
FOUR_PEERS = 3 / 4  # of the rows leave, of four devices


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
  """A published number beside the model's.

  Attributes:
    source: Who published it.
    what: What it is of.
    unit: Of both numbers.
    published: Their number.
    model: Ours.
    note: What differs, if something does.
  """

  source: str
  what: str
  unit: str
  published: float
  model: float
  note: str = ""

  @property
  def ratio(self) -> float:
    """How much faster the model is than what was published; 1 is agreement."""
    faster = self.published / self.model
    return faster if self.unit in ("us", "ms") else 1 / faster


def comparisons() -> list[Comparison]:
  """Every published number that the model can be asked for."""
  torchao = _torchao_kernels() + _torchao_steps() + _torchao_layers()
  return _cursor() + torchao


def _cursor() -> list[Comparison]:
  k = b200_kernels
  dense = {
    form: k.matmul([LARGE], LARGE, LARGE, form).tflops
    for form in ("mxfp8", "bf16")
  }
  rows = cases.group_sizes("even", EIGHT, TORCHAO_ROWS)
  wide = DEEPSEEK.d_model, 2 * DEEPSEEK.d_ff
  grouped = k.matmul(rows, *wide, "mxfp8").tflops
  quantize = k.memory("quantize", TORCHAO_ROWS * DEEPSEEK.d_model, "")
  terabytes = quantize.bytes / quantize.expected_us / 1e6
  layers = {
    form: b200_layer.layer("deepseek_v3", TORCHAO_ROWS, EIGHT, form)
    for form in ("mxfp8", "bf16")
  }
  speedup = {
    part: layers["bf16"].total(part) / layers["mxfp8"].total(part)
    for part in ("forward", "backward")
  }
  unknown = "shape not published; modelled as"

  def row(what, unit, published, model, note=""):
    return Comparison(
      source="Cursor", what=what, unit=unit, published=published, model=model,
      note=note,
    )  # fmt: skip

  return [
    row("dense matmul, MXFP8", "TFLOP/s", 2750, dense["mxfp8"],
        f"{unknown} {LARGE} cubed"),
    row("grouped matmul, MXFP8", "TFLOP/s", 2650, grouped,
        f"{unknown} {TORCHAO_ROWS} x {wide[0]} x {wide[1]}, 8 groups"),
    row("dense matmul, bf16", "TFLOP/s", 1525, dense["bf16"],
        f"1,500 to 1,550; {unknown} {LARGE} cubed"),
    row("quantize rows", "TB/s", 6.2, terabytes),
    row("layer forward, bf16 over MXFP8", "x", 25.96 / 9.45,
        speedup["forward"], "their bf16 layer was an older one, ours is even"),
    row("layer backward, bf16 over MXFP8", "x", 59.17 / 17.04,
        speedup["backward"], "likewise"),
  ]  # fmt: skip


def _torchao_kernels() -> list[Comparison]:
  k, shape = b200_kernels, DEEPSEEK
  d, f = shape.d_model, shape.d_ff
  rows = cases.group_sizes("even", EIGHT, TORCHAO_ROWS)

  def row(what, published, estimate, note=""):
    return Comparison(
      source="torchao", what=what, unit="us", published=published,
      model=estimate.expected_us, note=note,
    )  # fmt: skip

  def quantize(elements):
    return k.memory("quantize", elements, "")

  return [
    row("quantize rows, 131072 x 7168", 580.6, quantize(TORCHAO_ROWS * d)),
    row("quantize columns, 131072 x 7168", 670.7, quantize(TORCHAO_ROWS * d)),
    row("quantize columns, 131072 x 2048", 191.7, quantize(TORCHAO_ROWS * f)),
    row("quantize weights, 8 x 2048 x 7168", 76.8, quantize(EIGHT * d * f)),
    row("grouped matmul, 131072 x 7168 x 2048, 8 groups", 1838.1,
        k.matmul(rows, d, f, "mxfp8"), "CUTLASS"),
    row("grouped dgrad, 131072 x 2048 x 7168, 8 groups", 1838.1,
        k.matmul(rows, f, d, "mxfp8"), "CUTLASS"),
    row("grouped wgrad, 7168 x 131072 x 2048, 8 groups", 2412.4,
        k.wgrad(rows, d, f, "mxfp8"),
        "CUTLASS; its authors call it slow; results in bf16"),
  ]  # fmt: skip


def _operation(rows: Sequence[int], depth: int, width: int, form: str) -> float:
  """us of y = x @ w and both gradients, quantizing every operand twice."""
  k, total = b200_kernels, sum(rows)
  found = [
    k.matmul(rows, depth, width, form),
    k.matmul(rows, width, depth, form),
    k.wgrad(rows, depth, width, form),
  ]
  if form == "mxfp8":
    sizes = (total * depth, total * width, len(rows) * depth * width)
    found += [k.memory("quantize", n, "") for n in sizes for _ in range(2)]
  return sum(kernel.expected_us for kernel in found)


def _torchao_layers() -> list[Comparison]:
  found = []
  for name, model, published in (
    ("Llama 4", "llama4_scout", 275.270 / 192.420),
    ("DeepSeek-V3", "deepseek_v3", 92.032 / 80.182),
  ):
    total = {}
    for form in ("bf16", "mxfp8"):
      layer = b200_layer.layer(model, TORCHAO_ROWS, EIGHT, form)
      total[form] = layer.total("forward") + layer.total("backward")
    found.append(
      Comparison(
        source="torchao",
        what=f"layer forward and backward, bf16 over MXFP8, {name}",
        unit="x",
        published=published,
        model=total["bf16"] / total["mxfp8"],
        note="theirs holds the router and shuffles in bf16 too",
      )
    )
  return found


def _torchao_steps() -> list[Comparison]:
  rows = cases.group_sizes("even", EIGHT, TORCHAO_OP_ROWS)
  found = []
  for name, depth, width, times in (
    ("Llama 4", LLAMA.d_model, LLAMA.d_ff, (37700.7, 22170.6)),
    ("DeepSeek-V3", DEEPSEEK.d_model, DEEPSEEK.d_ff, (14966.8, 10397.2)),
  ):
    for form, published in zip(("bf16", "mxfp8"), times, strict=True):
      model = _operation(rows, depth, width, form)
      found.append(
        Comparison(
          source="torchao",
          what=f"grouped matmul, forward and backward, {name}, {form}",
          unit="us",
          published=published,
          model=model,
          note="scale layouts by kernels of their own"
          if form == "mxfp8"
          else "",
        )
      )
  for batch, published in ((4, 0.594), (8, 1.538), (16, 1.770)):
    sent = FOUR_PEERS * batch * LARGE * LLAMA.d_model * 2.0
    model = 1e-3 * b200_kernels.wire(sent, "").expected_us
    found.append(
      Comparison(
        source="torchao",
        what=f"all-to-all of ({batch}, {LARGE}, {LLAMA.d_model}) bf16, 4 GPUs",
        unit="ms",
        published=published,
        model=model,
      )
    )
  return found
