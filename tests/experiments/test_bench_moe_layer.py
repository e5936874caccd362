"""The benchmark of the layer: arms that run, parts, refusals, file, picture."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench, bench_moe_layer, layer_arms, layer_parts
from mxmoe_jax import moe
from pallas_kernels import timing
from tests import tolerance

TINY = ["--rows", "64", "--experts", "2", "--width", "64", "32"]
QUICK = ["--samples", "2", "--seconds", "1e-4"]


def test_jax_default_computes_the_same_layer():
  config = layer_arms.layer_config("bf16", "gpt_oss", 4, "xla", (64, 32))
  x, params, _ = layer_arms.inputs(config, 256)
  want = jax.jit(lambda *a: moe(*a, config)[0])(x, params)
  got = jax.jit(lambda *a: layer_arms.jax_default(*a, config))(x, params)
  assert tolerance.sqnr(got, want) >= tolerance.LAYER_BF16


def test_the_models_have_their_widths_and_experts():
  shapes = {
    name: layer_arms.layer_config("mxfp8", name, experts, "xla")
    for name, experts in layer_arms.EXPERTS.items()
  }
  deepseek, llama = shapes["deepseek_v3"], shapes["llama4_scout"]
  assert (deepseek.d_model, deepseek.d_ff, deepseek.top_k) == (7168, 2048, 8)
  assert (llama.num_experts, llama.top_k) == (8, 1)
  assert shapes["gpt_oss"].bias
  assert all(config.forced_balance for config in shapes.values())


def test_rows_that_are_no_tokens_are_refused():
  config = layer_arms.layer_config("bf16", "deepseek_v3", 8, "xla", (64, 32))
  with pytest.raises(ValueError, match="multiple of top_k=8; got 63"):
    layer_arms.inputs(config, 63)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
  folder = tmp_path_factory.mktemp("layer")
  file, png = folder / "layer.json", folder / "layer.png"
  asked = ["moe_layer", *TINY, *QUICK, "--arms", "mxfp8_small"]
  asked += ["folded", "--png", str(png), "--json", str(file)]
  assert bench.main(asked) == 0
  return json.loads(file.read_text()), png


def test_a_small_run_writes_file_and_picture(ran):
  found, png = ran
  assert png.read_bytes().startswith(b"\x89PNG")
  assert found["command"].startswith("python -m experiments.bench moe_layer")
  (arm,) = found["arms"]
  assert arm["name"] == "mxfp8_small"
  assert "png" not in found["command"]
  assert arm["forward_ms"] > 0
  both = arm["forward_ms"] + arm["backward_ms"]
  assert arm["both_ms"] == pytest.approx(both)
  assert arm["memory"]["temporary"] > 0
  # The least that it can keep: rows, pre-activations and hidden in MXFP8.
  kept = arm["saved_bytes_per_row"]
  assert kept == pytest.approx((64 + 2 * 32 + 32) * 33 / 32 + 4, abs=1)
  assert arm["memory"]["saved"] >= 64 * kept


def arm(name, forward, both):
  """An arm with these milliseconds and nothing else of interest."""
  ms = timing.Timing(median_us=1, low_us=1, high_us=1, samples=2, calls=1)
  return bench_moe_layer.Arm(
    name=name, recipe=name, forward=ms, both=ms, forward_ms=forward,
    backward_ms=both - forward, both_ms=both, teraflops=1.0,
    memory=layer_arms.Memory(
      arguments=1, outputs=1, temporary=1, peak=None, saved=1
    ),
    saved_bytes_per_row=None, fallbacks={}, parts=[],
  )  # fmt: skip


def test_ratios_are_the_other_time_over_this_one():
  fast, slow = arm("folded", 1.0, 2.0), arm("bf16", 1.5, 4.5)
  assert fast.ratios(slow) == {"forward": 1.5, "backward": 3.0, "both": 2.25}
  assert slow.ratios(slow) == {"forward": 1, "backward": 1, "both": 1}


def test_an_arm_that_cannot_run_here_says_why(ran):
  found, _ = ran
  assert list(found["refused"]) == ["folded"]
  assert "folds on Hopper alone" in found["refused"]["folded"]


def test_every_part_of_the_layer_is_timed(ran):
  found, _ = ran
  parts = {(p["direction"], p["part"]) for p in found["arms"][0]["parts"]}
  forward = {"router", "permute", "quantize", "quantize weights", "up"}
  forward |= {"swiglu", "down", "combine"}
  backward = {"router", "permute", "quantize", "quantize weights", "swiglu"}
  backward |= {"down dgrad", "down wgrad", "up dgrad", "up wgrad", "combine"}
  assert parts == {("forward", p) for p in forward} | {
    ("backward", p) for p in backward
  }


def test_calls_are_those_of_the_layer():
  config = layer_arms.layer_config("bf16", "llama4_scout", 2, "xla", (64, 32))
  data = layer_arms.inputs(config, 64)
  calls = layer_parts.calls(config, data)
  matmuls = [c for c in calls if c.operation == "grouped_matmul"]
  shapes = [jax.eval_shape(c.run, *c.arrays).shape[1] for c in matmuls]
  assert shapes == [2 * 32, 64, 32, 64]  # up, down, down dgrad, up dgrad
  rows = jax.jit(calls[0].run)(*calls[0].arrays)
  assert calls[0].operation == "take_rows"
  kept = np.asarray(rows, np.float32).any(axis=1)
  np.testing.assert_array_equal(
    np.sort(np.asarray(rows, np.float32)[kept], 0),
    np.sort(np.asarray(data[0], np.float32), 0),
  )


def test_an_up_that_is_run_again_is_an_up():
  config = layer_arms.layer_config("mxfp8", "llama4_scout", 2, "xla", (64, 32))
  again = dataclasses.replace(
    config,
    recipe=dataclasses.replace(config.recipe, save_preactivations="recompute"),
  )
  calls = [
    layer_parts.Call(
      direction="backward",
      operation="grouped_matmul",
      implementation="xla",
      weights=False,
      run=jnp.add,
      arrays=(),
    )
  ] * 3
  names = [layer_parts.part_of(c, calls[:i], again)
           for i, c in enumerate(calls)]  # fmt: skip
  assert names == ["up", "down dgrad", "up dgrad"]
  assert bench_moe_layer.parse(["--model", "gpt_oss"]).rows == 32768
