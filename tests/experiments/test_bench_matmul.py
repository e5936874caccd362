"""The benchmark of grouped matmuls: its command, its checks, its arithmetic."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import bench, bench_matmul, matmul_peers, matmul_timing
from experiments import matmul_ways as ways
from pallas_kernels import cases
from tests import tolerance

PROBLEM = ways.Problem(
  name="small", rows=40, groups=2, depth=64, width=32, pattern="skewed"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
  """What the command wrote and said at a small size."""
  file = tmp_path_factory.mktemp("bench") / "grouped_matmul.json"
  words = ["grouped_matmul", "--peers", "--json", str(file)]
  words += ["--rows", "40", "--groups", "16", "--depth", "64", "--width", "32"]
  words += ["--patterns", "even", "--samples", "2", "--seconds", "0.001"]
  words += ["--precisions", "bf16"]
  status = bench.main(words)
  return status, json.loads(file.read_text())


def test_the_command_measures_every_product(report):
  status, content = report
  assert status == 0
  assert content["backend"] == "xla"
  assert content["command"].startswith("python -m experiments.bench grouped_ma")
  measured = {(case["way"], case["who"]) for case in content["cases"]}
  assert {
    ("fprop", "jax.lax"),
    ("wgrad to bf16", "bf16"),
    ("dgrad", "bf16"),
  } <= (measured)
  for case in content["cases"]:
    rate = case["sustained"]["teraflops"] * case["sustained"]["median_us"]
    assert rate == pytest.approx(2 * 40 * 64 * 32 / 1e6)
    if case["who"] in ways.PRECISIONS:
      assert case["error"] <= tolerance.BF16_ROUNDING


def test_the_command_says_what_it_skipped(report):
  _, content = report
  assert "torch" in content["skipped"]["given: torch bf16"]


def test_the_command_compares_numbers_of_experts(report):
  _, content = report
  for case in content["experts"]:
    assert case["experts"] == [4, 16]
    assert case["ratio"] == case["median_us"][1] / case["median_us"][0]
    assert case["bar"] == bench_matmul.EXPERTS_BAR


def test_only_rows_of_groups_count():
  assert PROBLEM.flops == 2 * 40 * 64 * 32
  single = ways.Problem(
    name="small", rows=40, groups=2, depth=64, width=32, pattern="single_row"
  )
  assert single.flops == 2 * 2 * 64 * 32


def test_without_a_size_the_shapes_are_those_of_cases():
  asked = bench_matmul.parse(["--patterns", "even", "one_hot"])
  found = list(bench_matmul.problems(asked))
  assert [p[0].name for p in found] == list(cases.TIMED_MATMULS)
  assert [p.pattern for p in found[0]] == ["even", "one_hot"]
  assert found[1][0].shape == cases.TIMED_MATMULS["deepseek_v3"]


def test_what_does_not_exist_is_named():
  data = ways.arrays(PROBLEM)
  with pytest.raises(NotImplementedError, match="kernel alone"):
    ways.operands("wgrad", "folded", data, "xla")


@pytest.mark.parametrize(
  ("way", "precision"),
  [("fprop", "folded"), ("dgrad", "exact"), ("wgrad", "bf16")],
)
def test_a_wrong_element_shows(way, precision):
  data, layout = ways.arrays(PROBLEM), PROBLEM.layout()
  lhs, rhs, options = ways.operands(way, precision, data, "xla")
  got = ways.product(way, precision, "xla")(lhs, rhs, layout, **options)
  right = ways.error(lhs, rhs, layout, options, got)
  assert right <= tolerance.BF16_ROUNDING
  spoilt = got.at[(0,) * got.ndim].add(100.0)
  assert ways.error(lhs, rhs, layout, options, spoilt) > bench_matmul.WRONG


def test_times_compare_with_peers_of_the_same_product():
  def call(who, way):
    return ways.Call(who=who, way=way, run=lambda: jnp.zeros(8))

  calls = [
    call("bf16", "fprop"),
    call("bf16", "wgrad to bf16"),
    call("jax.lax", "fprop"),
    call("torch bf16", "wgrad"),
  ]
  found = matmul_timing.measure(PROBLEM, calls, samples=2, seconds=0)
  assert [set(case.times) for case in found] == [
    {"jax.lax"},
    {"torch bf16"},
    {"jax.lax"},
    {"torch bf16"},
  ]
  first, _, peer, _ = found
  ratio = peer.time.median_us / first.time.median_us
  assert first.times["jax.lax"] == pytest.approx(ratio)
  assert first.sustained is None


def test_clock_and_power_are_those_of_the_second_half():
  text = "1980, 100.0\n1900, 200.0\n1400, 690.0\n1380, 700.0\n13"
  assert matmul_timing.read_smi(text) == (1390.0, 695.0)
  assert matmul_timing.read_smi("[N/A], [N/A]\n") == (None, None)


def test_fp8_of_the_peer_has_a_scale_for_each_line():
  x = jnp.asarray([[1.0, -2.0], [0.0, 0.0]], jnp.bfloat16)
  codes, scale = matmul_peers._scaled(x, axis=-1)
  assert codes.dtype == jnp.uint8
  np.testing.assert_allclose(scale, [2 / 448, 1.0], rtol=1e-6)
