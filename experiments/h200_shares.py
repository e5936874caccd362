"""Which shares of an H200's peaks our kernels reach, from the files kept of it.

    results/nvidia_h200/bench.json            `reached`, of the bandwidth
    results/nvidia_h200/grouped_matmul.json   `sustained`, of the tensor core

The model of a B200 takes both over. Two digits: runs differ by a few percent.
"""

import json
import pathlib
import statistics
from typing import Any

from pallas_kernels import peaks

RESULTS = pathlib.Path(__file__).parent / "results/nvidia_h200"
GPU = peaks.PEAKS["NVIDIA H200"]
# Each kernel's first case of a variant is the widest shape measured.
VARIANTS = {
  "quantize": ("quantize", "rows blocked"),
  "quantize both": ("quantize", "both blocked"),
  "requantize": ("requantize", "rows to columns"),
  "permute": ("permute", "arrays"),
  "swiglu": ("swiglu", "forward"),
  "swiglu backward": ("swiglu", "backward"),
}
MATMULS = {"mxfp8": ("folded", GPU.fp8), "bf16": ("bf16", GPU.bf16)}
WAYS = ("fprop", "dgrad", "wgrad")


def _kept(name: str) -> dict[str, Any]:
  return json.loads((RESULTS / name).read_text())


def reached() -> dict[str, float]:
  """Kernel -> share of the peak bandwidth.

  "XLA" is an elementwise kernel that XLA generates; "matmul", where memory
  limits it, is given what the best of the others reaches.
  """
  kept = _kept("bench.json")
  rates = {"XLA": kept["copy"]["all"]["XLA elementwise"]}
  for name, variant in VARIANTS.items():
    rates[name] = next(
      case["gigabytes_per_second"]
      for case in kept["cases"]
      if (case["kernel"], case["variant"]) == variant
    )
  rates["matmul"] = max(rates.values())
  return {
    name: round(1e9 * rate / GPU.memory, 2) for name, rate in rates.items()
  }


def sustained() -> dict[str, float]:
  """Form -> share of the tensor core's peak in calls without a break.

  The mean over shapes of forward, dgrad and wgrad; "mxfp8" is folded.
  """
  cases = _kept("grouped_matmul.json")["cases"]
  found = {}
  for form, (who, peak) in MATMULS.items():
    rates = [
      case["sustained"]["teraflops"]
      for case in cases
      if case["who"] == who and case["way"] in WAYS and case["sustained"]
    ]
    found[form] = round(1e12 * statistics.mean(rates) / peak, 2)
  return found
