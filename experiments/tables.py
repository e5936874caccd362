"""The README's tables of results, made from the kept JSON files.

    python -m experiments.tables [--check]

A table stands between two comments, ``results NAME: begin`` and ``end``; NAME
is one of `TABLES`. The command rewrites what is between them, or with --check
says which differ and returns 1. No number there is written by hand.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
import json
import pathlib
import re
import statistics
import sys
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "experiments/results"
PAGE = ROOT / "README.md"
_BLOCK = re.compile(
  r"(<!-- results (\w+): begin -->\n).*?(<!-- results \2: end -->)", re.DOTALL
)


def _read(name: str) -> Any:
  """A kept result.

  Raises:
    ValueError: there is no such file.
  """
  path = RESULTS / name
  if not path.is_file():
    raise ValueError(
      f"{path} must exist for the table that a page asks for. Run the command"
      " that writes it, or take the table's markers out of the page."
    )
  return json.loads(path.read_text())


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
  """A Markdown table whose columns, but for the first, are aligned right."""
  rule = ["---", *["---:"] * (len(head) - 1)]
  lines = [f"| {' | '.join(row)} |" for row in (head, rule, *rows)]
  return "\n".join(lines) + "\n"


def _source(found: dict[str, Any]) -> str:
  device = found["device"]["kind"]
  return f"\n{device}, jax {found['versions']['jax']}: `{found['command']}`\n"


def kernels() -> str:
  """Each memory-bound kernel at its largest shape."""
  found = _read("nvidia_h200/bench.json")
  most = max(case["rows"] for case in found["cases"])
  rows = [
    (
      case["name"],
      f"{case['time']['median_us']:.0f}",
      f"{case['gigabytes_per_second']:.0f}",
      f"{case['of_copy']:.2f}",
      f"{case['times_reference']:.1f}",
    )
    for case in found["cases"]
    if case["rows"] == most
  ]
  head = ("kernel", "us", "GB/s", "of a copy", "x XLA")
  return _table(head, rows) + _source(found)


def grouped_matmul() -> str:
  """Ours and the peers' grouped matmuls, rows spread evenly."""
  found = _read("nvidia_h200/grouped_matmul.json")
  rows = []
  for case in found["cases"]:
    problem = case["problem"]
    if problem["pattern"] != "even":
      continue
    shape = (
      f"{problem['name']} {problem['rows']} x {problem['depth']} x"
      f" {problem['width']}, {problem['groups']} groups"
    )
    torch = case["times"].get("torch bf16")
    rows.append(
      (
        f"{shape}, {case['way']}, {case['who']}",
        f"{case['time']['median_us']:.0f}",
        f"{case['teraflops']:.0f}",
        "" if torch is None else f"{torch:.2f}",
      )
    )
  head = ("product", "us", "TFLOP/s", "x torch bf16")
  return _table(head, sorted(rows)) + _source(found)


def numerics() -> str:
  """Recipes by passes, normal inputs and outliers."""
  found = _read("cpu/numerics.json")
  names = list(found["cases"][0]["decibels"])
  rows = [
    (
      f"{case['recipe']}, {case['inputs']}",
      *(f"{case['decibels'][name]:.1f}" for name in names),
    )
    for case in found["cases"]
  ]
  head = ("dB", *(n if n == "y" else f"d {n}" for n in names))
  return _table(head, rows) + _source(found)


def experts() -> str:
  """The plain-jnp layer at the same rows over more experts."""
  found = _read("cpu/experts.json")
  rows = [
    (
      str(case["experts"]),
      f"{case['milliseconds']:.1f}",
      f"{case['ratio']:.2f}",
    )
    for case in found["cases"]
  ]
  return _table(("experts", "ms", "x"), rows) + _source(found)


def moe_layer() -> str:
  """The whole layer, every model that was measured."""
  paths = sorted((RESULTS / "nvidia_h200").glob("moe_layer_*.json"))
  if not paths:
    _read("nvidia_h200/moe_layer_deepseek_v3.json")  # says what is missing
  text = []
  head = ("arm", "forward ms", "backward ms", "both ms", "x bf16", "saved GB")
  for path in paths:
    found = json.loads(path.read_text())
    rows = [
      (
        f"{found['model']}, {arm['name']}",
        f"{arm['forward_ms']:.2f}",
        f"{arm['backward_ms']:.2f}",
        f"{arm['both_ms']:.2f}",
        f"{arm['times_bf16']['both']:.2f}" if "times_bf16" in arm else "",
        f"{arm['memory']['saved'] / 1e9:.2f}",
      )
      for arm in found["arms"]
    ]
    text.append(_table(head, rows) + _source(found))
  return "\n".join(text)


def training(folder: pathlib.Path = RESULTS / "nvidia_h200/h200_moe") -> str:
  """Held-out loss of each recipe over its seeds.

  Args:
    folder: summaries, one recipe and seed each.
  """
  paths = sorted(folder.glob("*.json"))
  runs = [run for path in paths for run in json.loads(path.read_text())["runs"]]
  losses: dict[str, list[dict[str, Any]]] = {}
  for run in runs:
    losses.setdefault(run["recipe"], []).append(run)
  if "bf16" not in losses:
    raise ValueError(
      f"{folder} must hold runs of bf16 to compare with; got {sorted(losses)}."
    )
  base = statistics.fmean(run["heldout_loss"] for run in losses["bf16"])
  rows = []
  for recipe, own in losses.items():
    found = [run["heldout_loss"] for run in own]
    used = [run["flop_utilisation"] or 0.0 for run in own]
    rate = statistics.median(run["tokens_per_second"] for run in own)
    rows.append(
      (
        recipe,
        str(len(found)),
        f"{statistics.fmean(found):.4f}",
        f"{max(found) - min(found):.4f}",
        f"{statistics.fmean(found) / base - 1:+.2%}",
        f"{rate:,.0f}",
        f"{statistics.median(used):.1%}",
      )
    )
  head = ("recipe", "seeds", "held-out loss", "spread", "against bf16")
  return _table((*head, "tokens/s", "MFU"), rows)


TABLES: dict[str, Callable[[], str]] = {
  "kernels": kernels,
  "grouped_matmul": grouped_matmul,
  "numerics": numerics,
  "experts": experts,
  "moe_layer": moe_layer,
  "training": training,
}


def rewrite(text: str) -> str:
  """The page with every marked table made anew.

  Raises:
    ValueError: a name is unknown, or a result is missing.
  """

  def fill(block: re.Match[str]) -> str:
    name = block.group(2)
    if name not in TABLES:
      raise ValueError(
        f"tables: NAME must be one of {sorted(TABLES)}; got {name!r}."
      )
    return f"{block.group(1)}\n{TABLES[name]()}\n{block.group(3)}"

  return _BLOCK.sub(fill, text)


def main(arguments: Sequence[str], page: pathlib.Path = PAGE) -> int:
  """Runs the command; returns its exit status."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.tables",
    description="Makes the README's tables from the kept results.",
  )
  parser.add_argument("--check", action="store_true", help="change nothing")
  asked = parser.parse_args(arguments)
  before = page.read_text()
  after = rewrite(before)
  if asked.check and before != after:
    print(
      f"{page.name}: tables differ from experiments/results. Run"
      " python -m experiments.tables.",
      file=sys.stderr,
    )
    return 1
  if before != after:
    page.write_text(after)
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
