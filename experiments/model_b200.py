"""What a B200 should make of the kernels and the layer: a model, not measured.

    python -m experiments.model_b200 [--json FILE] [--markdown]

Prints the page ``docs/b200_model.md`` (``--markdown``) or a few layers of it.
The model is in `b200_kernels`, the layer's kernels in `b200_layer`, what others
published in `b200_published`. No GPU is asked: the numbers follow from tiles,
bytes and operations of our kernels, public peaks, and shares of them that the
same sources reach on an H200.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
import dataclasses
import functools
import json
import pathlib
import sys
from typing import Any

from experiments import b200_kernels, b200_layer, b200_published
from pallas_kernels import cases

LABEL = "model, not measured"
COMMAND = "python -m experiments.model_b200"
SHOWN_MODEL = "deepseek_v3"
SHOWN_ROWS = cases.ROWS_PER_DEVICE[-1]
SHOWN_EXPERTS = 8
FORMS = ("bf16", "mxfp8")

Layer = b200_layer.Layer
layer = functools.cache(b200_layer.layer)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
  """A Markdown table; columns after the first are aligned to the right."""
  lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
  return ["| " + " | ".join(line) + " |" for line in lines]


def number(x: float) -> str:
  """Three digits that count, without an exponent."""
  if x == 0:
    return "0"
  return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def kernel_table(kernels: Sequence[b200_kernels.Estimate]) -> list[str]:
  """One line for each kernel of a pass."""
  head = ("kernel", "TFLOP", "GB", "limit", "bound us", "expected us",
          "expected rate", "tile")  # fmt: skip
  rows = []
  for kernel in kernels:
    rate = f"{number(kernel.tflops)} TFLOP/s"
    if not kernel.flops:
      rate = f"{kernel.bytes / kernel.expected_us / 1e6:.2f} TB/s"
    rows.append(
      (
        kernel.name,
        f"{kernel.flops / 1e12:.2f}" if kernel.flops else "",
        f"{kernel.bytes / 1e9:.2f}",
        kernel.limit,
        number(kernel.bound_us),
        number(kernel.expected_us),
        rate,
        kernel.tile,
      )
    )
  return table(head, rows)


def alike() -> dict[str, str]:
  """A model of each shape of layer -> all models of that shape, in words."""
  found: dict[tuple[int, int, int], list[str]] = {}
  for name, shape in cases.MODELS.items():
    widths = shape.d_model, shape.d_ff, shape.top_k
    found.setdefault(widths, []).append(name)
  return {names[0]: ", ".join(names) for names in found.values()}


def layer_row(model: str, rows: int, experts: int) -> tuple[str, ...]:
  """A layer in both forms, ms, and what MXFP8 gains."""
  bf16, mxfp8 = (layer(model, rows, experts, form) for form in FORMS)
  cells = [alike()[model], f"{rows:,}", str(experts)]
  for part in ("forward", "backward"):
    before, after = bf16.total(part), mxfp8.total(part)
    cells += [number(before), number(after), f"{before / after:.2f}"]
  before, after = (
    sum(x.total(part) for part in ("forward", "backward"))
    for x in (bf16, mxfp8)
  )
  bound = sum(mxfp8.total(part, "bound_us") for part in ("forward", "backward"))
  cells += [number(bound), f"{before / after:.2f}"]
  return tuple(cells)


def layer_table(points: Iterable[tuple[str, int, int]]) -> list[str]:
  """Layers side by side; times in ms."""
  head = ("layer", "rows", "experts", "forward bf16", "MXFP8", "x", "backward "
          "bf16", "MXFP8", "x", "both, bound of MXFP8", "both, x")  # fmt: skip
  return table(head, (layer_row(*point) for point in points))


def published_table() -> list[str]:
  """Published numbers beside the model's."""
  head = ("what", "source", "unit", "published", "model", "ratio", "note")
  return table(
    head,
    (
      (c.what, c.source, c.unit, number(c.published), number(c.model),
       f"{c.ratio:.2f}", c.note)
      for c in b200_published.comparisons()
    ),
  )  # fmt: skip


def step_table() -> list[str]:
  """What the kernels' tiles do in one step of 128 of K."""
  limits = ("tensor core", "shared memory", "L2")
  head = ("tile", "stages", "MMAs", "scale copies", *limits,
          "shared memory, bytes", "tensor memory, columns")  # fmt: skip
  return table(
    head,
    (
      (step.tile, str(step.stages), str(step.mmas), str(step.scale_copies),
       *(number(step.clocks[limit]) for limit in limits),
       f"{step.smem_bytes:,}", str(step.tmem_columns))
      for step in b200_kernels.steps()
    ),
  )  # fmt: skip


def leg_table() -> list[str]:
  """The legs of the exchange of the shown layer."""
  rows = []
  for form in FORMS:
    legs = layer(SHOWN_MODEL, SHOWN_ROWS, SHOWN_EXPERTS, form).legs
    rows += [
      (f"{form} recipe: {leg.name}", f"{leg.bytes / 1e9:.2f}",
       number(leg.bound_us), number(leg.expected_us))
      for leg in legs
    ]  # fmt: skip
  return table(("leg", "GB sent", "bound us", "expected us"), rows)


SUFFIX = f"({LABEL})"


def _layers() -> list[str]:
  """The sections on whole layers."""
  every = [
    (model, rows, SHOWN_EXPERTS)
    for model in alike()
    for rows in cases.ROWS_PER_DEVICE
  ]
  local = [(SHOWN_MODEL, SHOWN_ROWS, n) for n in cases.LOCAL_EXPERTS]
  return [
    f"## Layers, ms {SUFFIX}",
    "",
    "`x` is bf16 over MXFP8. Weights are prepared once for each change of "
    "them, and the exchange is below; neither is in these times.",
    "",
    *layer_table(every),
    "",
    f"## Local experts, ms {SUFFIX}",
    "",
    *layer_table(local),
    "",
  ]


def _kernels() -> list[str]:
  """The sections on the kernels and the wire of one layer."""
  shown = layer(SHOWN_MODEL, SHOWN_ROWS, SHOWN_EXPERTS, "mxfp8")
  at = f"{SHOWN_MODEL}, {SHOWN_ROWS:,} rows, {SHOWN_EXPERTS} local experts"
  parts = (
    ("Forward:", shown.forward),
    ("Backward:", shown.backward),
    ("Weights, once for each change of them:", shown.weights),
  )
  lines = [f"## Kernels {SUFFIX}", "", f"The MXFP8 recipe at {at}.", ""]
  for name, kernels in parts:
    lines += [name, "", *kernel_table(kernels), ""]
  return [
    *lines,
    f"## One step of a matmul, clocks of an SM {SUFFIX}",
    "",
    "128 of K in the tiles that the kernels choose from, MXFP8. Instructions "
    "are of the tensor core's one thread for both CTAs of a pair. The compile "
    "check (`python -m pallas_kernels.aot --target b200`) finds them: 20 MMAs "
    "and 15 copies of scales for the five stages of 256x256.",
    "",
    *step_table(),
    "",
    f"## The exchange between {b200_layer.EP} devices {SUFFIX}",
    "",
    f"The same layer. What a device sends to the other {b200_layer.EP - 1}.",
    "",
    *leg_table(),
    "",
  ]


def page() -> str:
  """The text of ``docs/b200_model.md``."""
  lines = [
    "# What a B200 should do: a model, not a measurement",
    "",
    "Every figure of this library on this page is a **model, not measured**: "
    "our kernels have never run on a Blackwell GPU. The page is what "
    f"`{COMMAND} --markdown` prints; the same numbers and the grid of all "
    "shapes are in "
    "[model.json](../experiments/results/b200_model/model.json).",
    "",
    "## Assumptions",
    "",
    *(f"- {text}" for text in b200_kernels.ASSUMPTIONS),
    "",
    *_layers(),
    *_kernels(),
    "## The model against what others measured on B200s",
    "",
    "`published` was measured by its source; `model` is what this model says "
    f"of the same work {SUFFIX}. The ratio is how much faster the model is: "
    "above 1, it promises more than others have reached.",
    "",
    *published_table(),
  ]
  return "\n".join(lines) + "\n"


def _totals(found: Layer) -> dict[str, float]:
  return {
    f"{part}_{kind}": round(found.total(part, f"{kind}_us"), 4)
    for part in ("forward", "backward", "weights", "legs")
    for kind in ("bound", "expected")
  }


def report() -> dict[str, Any]:
  """All numbers, as JSON values; times of layers in ms."""
  shown = {
    form: layer(SHOWN_MODEL, SHOWN_ROWS, SHOWN_EXPERTS, form) for form in FORMS
  }
  grid = [
    layer(model, rows, experts, form)
    for model in cases.MODELS
    for rows in cases.ROWS_PER_DEVICE
    for experts in cases.LOCAL_EXPERTS
    for form in FORMS
  ]
  return {
    "what": LABEL,
    "command": COMMAND,
    "device": {"kind": "NVIDIA B200", "measured": False},
    "peaks": dataclasses.asdict(b200_kernels.GPU),
    "assumptions": list(b200_kernels.ASSUMPTIONS),
    "layers_ms": [
      {"model": x.model, "rows": x.rows, "experts": x.experts, "form": x.form}
      | _totals(x)
      for x in grid
    ],
    "steps": [dataclasses.asdict(step) for step in b200_kernels.steps()],
    "kernels_us": {form: dataclasses.asdict(x) for form, x in shown.items()},
    "against_published": [
      dataclasses.asdict(c) | {"ratio": round(c.ratio, 3)}
      for c in b200_published.comparisons()
    ],
  }


def main(arguments: Sequence[str]) -> int:
  """Prints the page or its first table; writes the file."""
  parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
  parser.add_argument("--json", type=pathlib.Path, help="file to write")
  parser.add_argument("--markdown", action="store_true", help="the whole page")
  asked = parser.parse_args(arguments)
  if asked.markdown:
    print(page(), end="")
  else:
    points = [(m, SHOWN_ROWS, SHOWN_EXPERTS) for m in alike()]
    print(f"ms, {LABEL}", *layer_table(points), sep="\n")
  if asked.json is not None:
    asked.json.write_text(json.dumps(report(), indent=1) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
