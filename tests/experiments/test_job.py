"""An experiment end to end: its files, and going on to the bit."""

import dataclasses
import json

import pytest
import rich.console

from experiments import job, progress, results
from tests import tolerance
from tests.experiments import shrunken

RUN_FIELDS = {
  *("recipe", "seed", "losses", "tokens_per_second", "load_imbalance"),
  *("dropped_rows", "heldout_loss", "parameters", "wall_seconds"),
  *("flops_per_token", "flop_utilisation"),
}


def run(folder, *, on_terminal=False, **changes):
  console = rich.console.Console(
    record=True, force_terminal=on_terminal, width=200, quiet=not on_terminal
  )
  runs = job.run(
    shrunken.experiment(**changes),
    folder=folder,
    command="the command",
    shown=progress.Progress(console),
  )
  return runs, console.export_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
  folder = tmp_path_factory.mktemp("finished") / "out"
  return folder, run(folder)[0]


def test_every_file_is_written(finished):
  folder, _ = finished
  assert {path.name for path in folder.iterdir()} == {
    *("experiment.json", "summary.json", "loss.png"),
    *("metrics-bf16.jsonl", "metrics-mxfp8.jsonl"),
    *("checkpoints-bf16", "checkpoints-mxfp8"),
  }
  assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_the_summary_holds_what_it_promises(finished):
  folder, runs = finished
  summary = json.loads((folder / "summary.json").read_text())
  assert summary["command"] == "the command"
  assert summary["device"]["platform"] == "cpu"
  assert summary["versions"]["jax"]
  assert 2.5 < summary["unigram_entropy"] < 4.0
  assert summary["experiment"]["steps"] == 3
  assert summary["recipes"].keys() == {"bf16", "mxfp8"}
  assert [one["recipe"] for one in summary["runs"]] == ["bf16", "mxfp8"]
  for one, result in zip(summary["runs"], runs, strict=True):
    assert one == dataclasses.asdict(result)
    assert one.keys() == RUN_FIELDS
    assert len(one["losses"]) == 3
    assert one["tokens_per_second"] > 0
    assert one["dropped_rows"] == 0


def test_metrics_have_a_line_a_step(finished):
  folder, runs = finished
  lines = (folder / "metrics-mxfp8.jsonl").read_text().splitlines()
  records = [results.StepRecord(**json.loads(line)) for line in lines]
  assert [record.step for record in records] == [1, 2, 3]
  assert [record.loss for record in records] == runs[1].losses


def test_recipes_share_data_and_start_but_not_arithmetic(finished):
  _, (bf16, mxfp8) = finished
  assert bf16.losses[0] == pytest.approx(
    mxfp8.losses[0], rel=tolerance.TRAINING_LOSS
  )
  assert bf16.losses != mxfp8.losses


def test_a_finished_experiment_is_not_trained_again(finished):
  folder, runs = finished
  before = (folder / "metrics-bf16.jsonl").read_text()
  again, shown = run(folder, on_terminal=True)
  assert (folder / "metrics-bf16.jsonl").read_text() == before
  assert again == runs
  assert "mxfp8" in shown
  assert "summary.json" in shown


def test_a_diverging_run_says_where(tmp_path):
  optimizer = dataclasses.replace(
    shrunken.experiment().optimizer, learning_rate=1e38
  )
  with pytest.raises(FloatingPointError, match=r"at step [23] must be"):
    run(tmp_path / "out", recipes=("bf16",), optimizer=optimizer)


def test_a_folder_of_another_experiment_is_left_alone(finished):
  folder, _ = finished
  before = (folder / "experiment.json").read_text()
  with pytest.raises(ValueError, match="seed: saved 0, asked 1"):
    run(folder, seed=1)
  assert (folder / "experiment.json").read_text() == before


def test_a_folder_of_unknown_files_is_left_alone(tmp_path):
  (tmp_path / "thesis.txt").write_text("")
  with pytest.raises(ValueError, match="holds other files"):
    run(tmp_path)
  assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_unreadable_experiment_is_said(tmp_path):
  (tmp_path / "experiment.json").write_text("{")
  with pytest.raises(ValueError, match=r"experiment\.json cannot be read"):
    run(tmp_path)


def test_a_backend_that_cannot_run_here_is_refused_before_any_file(tmp_path):
  model = dataclasses.replace(shrunken.MODEL, backend="mosaic")
  with pytest.raises(NotImplementedError, match="mosaic"):
    run(tmp_path / "out", model=model)
  assert not (tmp_path / "out").exists()
