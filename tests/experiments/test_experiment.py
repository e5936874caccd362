"""Configs: what is refused, how scripts are loaded, how configs differ."""

import dataclasses
import json

import pytest

from experiments import experiment as experiment_lib


def small(**changes):
  return experiment_lib.Experiment(name="small", **changes)


@pytest.mark.parametrize(
  ("build", "said"),
  [
    (lambda: experiment_lib.ModelConfig(d_model=48), "next one is 64"),
    (lambda: experiment_lib.ModelConfig(d_ff=33), "next one is 64"),
    (
      lambda: experiment_lib.ModelConfig(d_model=96, num_heads=5),
      "d_model=96, num_heads=5",
    ),
    (
      lambda: experiment_lib.ModelConfig(num_experts=4, top_k=5),
      "top_k=5, num_experts=4",
    ),
    (lambda: experiment_lib.DataConfig(batch_size=0), "batch_size"),
    (lambda: experiment_lib.DataConfig(heldout_every=1), "at least 2"),
    (lambda: experiment_lib.OptimizerConfig(learning_rate=0.0), "positive"),
    (lambda: experiment_lib.OptimizerConfig(beta2=1.0), "beta2"),
    (lambda: experiment_lib.OptimizerConfig(final_fraction=2.0), "2.0"),
    (lambda: experiment_lib.MeshConfig(expert=0), "expert"),
    (lambda: small(recipes=()), "at least one recipe"),
    (lambda: small(recipes=("bf16", "bf16")), "none twice"),
    (lambda: small(steps=0), "steps"),
    (lambda: experiment_lib.Experiment(name="a/b"), "folder name"),
    (
      lambda: small(mesh=experiment_lib.MeshConfig(data=3)),
      "batch_size=16, mesh=3 x 1",
    ),
    (
      lambda: small(
        mesh=experiment_lib.MeshConfig(expert=16),
        data=experiment_lib.DataConfig(batch_size=16),
      ),
      "num_experts=8, expert=16",
    ),
  ],
)
def test_a_bad_value_is_refused_with_its_numbers(build, said):
  with pytest.raises(ValueError, match=said):
    build()


def test_experiments_are_hashable_and_equal_by_value():
  assert hash(small()) == hash(small())
  assert small() == small()


def test_load_runs_the_script(tmp_path):
  script = tmp_path / "config.py"
  script.write_text(
    "from experiments.experiment import Experiment\n"
    "def experiment():\n"
    "  return Experiment(name='from_script', steps=7)\n"
  )
  assert experiment_lib.load(script).steps == 7


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("x = 1\n", "defines no function `experiment`"),
    ("def experiment():\n  return 3\n", "returned a int"),
  ],
)
def test_load_says_what_a_script_lacks(tmp_path, text, said):
  script = tmp_path / "config.py"
  script.write_text(text)
  with pytest.raises(ValueError, match=said):
    experiment_lib.load(script)


def test_load_of_a_missing_or_foreign_file(tmp_path):
  with pytest.raises(ValueError, match="is not a file"):
    experiment_lib.load(tmp_path / "none.py")
  foreign = tmp_path / "config.txt"
  foreign.write_text("")
  with pytest.raises(ValueError, match="not a Python file"):
    experiment_lib.load(foreign)


def test_to_dict_survives_json():
  fields = experiment_lib.to_dict(small())
  assert json.loads(json.dumps(fields)) == fields


def test_differences_name_each_field_that_changes_numbers():
  one = small()
  other = small(
    steps=3,
    checkpoint_every=9,
    model=dataclasses.replace(one.model, d_ff=64),
  )
  found = experiment_lib.differences(
    experiment_lib.to_dict(one), experiment_lib.to_dict(other)
  )
  assert found == (
    "model.d_ff: saved 128, asked 64",
    "steps: saved 100, asked 3",
  )


def test_differences_name_a_field_only_one_side_has():
  saved = experiment_lib.to_dict(small())
  del saved["seed"]
  found = experiment_lib.differences(saved, experiment_lib.to_dict(small()))
  assert found == ("seed: saved nothing, asked 0",)
