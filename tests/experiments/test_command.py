"""The command line: typed overrides on a config script."""

import pathlib

import pytest

from experiments import command

CONFIG = str(
  pathlib.Path(__file__).parents[2] / "experiments/configs/tiny_cpu.py"
)


def test_without_overrides_the_script_decides():
  parsed = command.parse([CONFIG])
  assert parsed.experiment.recipes == ("bf16", "mxfp8")
  assert parsed.folder == pathlib.Path("runs/tiny_cpu")


def test_overrides_reach_nested_fields_with_their_types():
  parsed = command.parse([
    CONFIG,
    *("--steps", "3", "--out", "there", "--recipes", "mxfp8"),
    *("--model.num-experts", "16", "--optimizer.learning-rate", "1e-4"),
    *("--model.buffer-factor", "1.5", "--model.balance-bias"),
    *("--mesh.data", "2"),
  ])  # fmt: skip
  experiment = parsed.experiment
  assert experiment.steps == 3
  assert parsed.folder == pathlib.Path("there")
  assert experiment.recipes == ("mxfp8",)
  assert experiment.model.num_experts == 16
  assert experiment.model.buffer_factor == 1.5
  assert experiment.model.balance_bias
  assert experiment.optimizer.learning_rate == 1e-4
  assert experiment.mesh.data == 2
  untouched = command.parse([CONFIG]).experiment
  assert experiment.model.d_ff == untouched.model.d_ff


@pytest.mark.parametrize(
  "overrides",
  [
    ["--steps", "many"],
    ["--recipes", "fp4"],
    ["--model.no-such-field", "1"],
    ["--seed"],
  ],
)
def test_an_override_that_does_not_fit_ends_the_command(overrides, capsys):
  with pytest.raises(SystemExit) as ended:
    command.parse([CONFIG, *overrides])
  assert ended.value.code == 2
  shown = capsys.readouterr()
  assert overrides[0].lstrip("-") in shown.err + shown.out


def test_a_value_the_experiment_refuses():
  with pytest.raises((ValueError, SystemExit)):
    command.parse([CONFIG, "--model.top-k", "9"])


@pytest.mark.parametrize(("arguments", "code"), [([], 2), (["--help"], 0)])
def test_usage_without_a_config(arguments, code, capsys):
  with pytest.raises(SystemExit) as ended:
    command.parse(arguments)
  assert ended.value.code == code
  assert "CONFIG.py" in capsys.readouterr().out


def test_help_lists_fields_with_their_meaning(capsys):
  with pytest.raises(SystemExit):
    command.parse([CONFIG, "--help"])
  shown = " ".join(capsys.readouterr().out.split())
  assert "--model.num-experts" in shown
  assert "experts per layer" in shown
