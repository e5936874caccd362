"""The results that the repository keeps say what the documentation says."""

import json
import pathlib

import pytest

from experiments import bench_matmul, command, experiment, results
from tests import tolerance

ROOT = pathlib.Path(__file__).parents[2]
KEPT = sorted((ROOT / "experiments/results").glob("*/*.json"))
SUMMARIES = [path for path in KEPT if "runs" in json.loads(path.read_text())]


def test_there_are_some():
  assert ROOT / "experiments/results/cpu/tiny_cpu.json" in SUMMARIES


@pytest.mark.parametrize("path", SUMMARIES, ids=lambda path: path.stem)
def test_a_summary_names_its_origin(path):
  summary = json.loads(path.read_text())
  assert summary["command"].startswith("python -m experiments.run ")
  assert summary["versions"]["jax"]
  assert summary["device"]["platform"] in ("cpu", "gpu")
  for run in summary["runs"]:
    assert len(run["losses"]) == summary["experiment"]["steps"]


def test_tiny_cpu_learns_alike_in_both_recipes():
  path = ROOT / "experiments/results/cpu/tiny_cpu.json"
  summary = json.loads(path.read_text())
  ends = {
    run["recipe"]: results.last_fifth(run["losses"]) for run in summary["runs"]
  }
  assert ends.keys() == {"bf16", "mxfp8"}
  assert max(ends.values()) <= summary["unigram_entropy"] - 0.7
  assert ends["mxfp8"] == pytest.approx(
    ends["bf16"], rel=tolerance.TRAINING_LOSS
  )


def test_tiny_cpu_is_still_the_config_that_was_run():
  path = ROOT / "experiments/results/cpu/tiny_cpu.json"
  asked = command.parse([str(ROOT / "experiments/configs/tiny_cpu.py")])
  saved = json.loads(path.read_text())["experiment"]
  wanted = experiment.to_dict(asked.experiment)
  assert experiment.differences(saved, wanted) == ()


def test_the_kept_matmuls_are_within_their_errors():
  path = ROOT / "experiments/results/nvidia_h200/grouped_matmul.json"
  kept = json.loads(path.read_text())
  assert kept["command"].startswith("python -m experiments.bench grouped_mat")
  assert kept["device"]["kind"] == "NVIDIA H200"
  errors = {}
  for case in kept["cases"]:
    assert case["teraflops"] > 0
    if case["error"] is not None:
      errors.setdefault(case["who"], []).append(case["error"])
  assert max(errors["exact"] + errors["bf16"]) <= tolerance.BF16_ROUNDING
  assert max(errors["folded"]) < bench_matmul.WRONG
