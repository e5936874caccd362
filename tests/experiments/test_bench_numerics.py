"""Decibels of recipes: above the floors, ordered, written."""

import json

import pytest

from experiments import bench, bench_numerics
from tests import tolerance


@pytest.fixture(scope="module")
def found(tmp_path_factory):
  file = tmp_path_factory.mktemp("numerics") / "numerics.json"
  asked = ["numerics", "--recipes", "bf16", "folded", "--no-tensors"]
  assert bench.main([*asked, "--json", str(file)]) == 0
  return json.loads(file.read_text())


def test_normal_inputs_reach_the_floors_of_the_layer(found):
  for case in found["cases"]:
    if case["inputs"] == "normal":
      floors = tolerance.layer_floors(bench_numerics.RECIPES[case["recipe"]])
      for name, db in case["decibels"].items():
        kind = name if name in floors else "experts"
        less = tolerance.FOLDED_COSTS if case["recipe"] == "folded" else 0.0
        assert db >= floors[kind] - less, (case["recipe"], name)


def test_bf16_is_above_mxfp8_in_every_pass(found):
  bf16, folded = (
    next(c["decibels"] for c in found["cases"]
         if c["recipe"] == name and c["inputs"] == "normal")
    for name in ("bf16", "folded")
  )  # fmt: skip
  assert bf16.keys() == folded.keys() == set(bench_numerics.PASSES)
  assert all(bf16[name] > folded[name] + 10 for name in bf16)


def test_the_kept_result_names_every_recipe_and_bounds_every_fold():
  kept = bench_numerics.pathlib.Path(__file__).parents[2]
  kept = json.loads(
    (kept / "experiments/results/cpu/numerics.json").read_text()
  )
  assert {c["recipe"] for c in kept["cases"]} == set(bench_numerics.RECIPES)
  assert kept["tensors"].keys() == set(bench_numerics.INPUTS)
  for tensors in kept["tensors"].values():
    assert all(told["fold_beyond"] == 0 for told in tensors.values())
