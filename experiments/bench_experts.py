"""Times the layer's forward pass at one number of rows and several of experts.

    python -m experiments.bench_experts [--experts 8 16] [--rows 8192]
        [--json FILE]

The reference's grouped matmul costs by rows, not by rows times experts, so
more experts at the same rows should cost little more: their weights are
quantized beforehand, and only alignment and dequantizing grow.
"""

import argparse
from collections.abc import Sequence
import json
import os
import pathlib
import statistics
import sys
import time

os.environ.setdefault("NPROC", "32")  # before jax: see BUILD.md

import jax
import jax.numpy as jnp
import numpy as np

from experiments import bench
import mxmoe_jax
from mxmoe_jax import arguments

TOP_K = 2


def milliseconds(experts: int, rows: int, width: int, samples: int) -> float:
  """Median time of one forward pass with prequantized weights.

  Args:
    experts: Number of experts.
    rows: Tokens times top_k.
    width: d_model and d_ff.
    samples: Passes timed, after two that are not.
  """
  config = mxmoe_jax.MoEConfig(
    d_model=width, d_ff=width, num_experts=experts, top_k=TOP_K
  )
  rng = np.random.default_rng(0)
  params = {
    name: jnp.asarray(rng.standard_normal(shape) * width**-0.5, jnp.bfloat16)
    for name, shape in arguments.parameter_shapes(config).items()
  }
  x = jnp.asarray(rng.standard_normal((rows // TOP_K, width)), jnp.bfloat16)
  quantized = mxmoe_jax.quantize_weights(params, config)
  layer = jax.jit(
    lambda x, params, quantized: mxmoe_jax.moe(
      x, params, config, quantized=quantized
    )[0]
  )
  times = []
  for _ in range(samples + 2):
    start = time.perf_counter()
    jax.block_until_ready(layer(x, params, quantized))
    times.append(1e3 * (time.perf_counter() - start))
  return statistics.median(times[2:])


def main(arguments_: Sequence[str]) -> int:
  """Prints the table and writes the file."""
  parser = argparse.ArgumentParser(
    prog="python -m experiments.bench_experts", description=__doc__
  )
  parser.add_argument("--experts", type=int, nargs="+", default=[8, 16])
  parser.add_argument("--rows", type=int, default=8192)
  parser.add_argument("--width", type=int, default=256)
  parser.add_argument("--samples", type=int, default=20)
  parser.add_argument("--json", type=pathlib.Path, help="file to write")
  asked = parser.parse_args(arguments_)
  cases = []
  for experts in asked.experts:
    took = milliseconds(experts, asked.rows, asked.width, asked.samples)
    ratio = took / cases[0]["milliseconds"] if cases else 1.0
    cases.append({"experts": experts, "milliseconds": took, "ratio": ratio})
    print(f"{experts:>5} experts {took:>9.2f} ms {ratio:>6.2f} x")
  if asked.json is not None:
    result = {
      **bench.origin(arguments_, "experiments.bench_experts"),
      "cores": os.cpu_count(),
      "rows": asked.rows,
      "width": asked.width,
      "samples": asked.samples,
      "cases": cases,
    }
    asked.json.write_text(json.dumps(result, indent=2) + "\n")
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
