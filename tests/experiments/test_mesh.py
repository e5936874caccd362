"""Several devices and several processes: the same training as one device."""

import json
import pathlib
import subprocess
import sys
import time

import pytest
import rich.console

from experiments import command, experiment, job, processes, progress
from tests import tolerance
from tests.experiments import shrunken

ROOT = pathlib.Path(__file__).parents[2]
SHRUNKEN = ROOT / "tests/experiments/shrunken.py"
SECONDS = 240

MESH = experiment.MeshConfig(data=2, expert=2)


def train(folder, mesh):
  runs = job.run(
    shrunken.experiment(mesh=mesh, recipes=("bf16",)),
    folder=folder,
    command="the command",
    shown=progress.Progress(rich.console.Console(quiet=True)),
  )
  return runs[0].losses


@pytest.fixture(scope="module")
def meshed(tmp_path_factory):
  """Losses on a mesh of 2 x 2 devices in one process."""
  return train(tmp_path_factory.mktemp("meshed") / "out", MESH)


def start(*arguments):
  """Starts the command in an environment that has not chosen its devices."""
  return subprocess.Popen(
    [
      *("env", "-u", "XLA_FLAGS"),
      *(sys.executable, "-m", "experiments.run", str(SHRUNKEN)),
      *("--mesh.data", "2", "--mesh.expert", "2", "--mesh.processes", "2"),
      *("--recipes", "bf16", *arguments),
    ],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def test_a_mesh_trains_as_one_device_does(tmp_path, meshed):
  alone = train(tmp_path / "out", experiment.MeshConfig())
  assert meshed == pytest.approx(alone, rel=tolerance.REORDERED_LOSS)


def test_two_processes_train_as_one_does_even_when_killed(tmp_path, meshed):
  metrics = tmp_path / "out/metrics-bf16.jsonl"
  killed = start("--out", str(tmp_path / "out"))
  deadline = time.monotonic() + SECONDS
  while not metrics.exists() or metrics.read_text().count("\n") < 2:
    assert killed.poll() is None, killed.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.01)
  killed.kill()
  # Returns when the pipes are closed: no process was left behind.
  killed.communicate(timeout=SECONDS)
  assert not (tmp_path / "out/summary.json").exists()
  out, error = start("--out", str(tmp_path / "out")).communicate(
    timeout=SECONDS
  )
  assert (tmp_path / "out/summary.json").exists(), out + error
  summary = json.loads((tmp_path / "out/summary.json").read_text())
  assert summary["device"]["processes"] == 2
  assert summary["device"]["count"] == 4
  assert "--process-id" not in summary["command"]
  losses = summary["runs"][0]["losses"]
  assert losses == pytest.approx(meshed, rel=tolerance.REORDERED_LOSS)


def test_processes_with_different_experiments_are_refused(tmp_path):
  address = processes.free_address()
  own = [
    start(
      *("--distributed", "--coordinator", address, "--num-processes", "2"),
      *("--process-id", str(number), "--seed", str(7 * number)),
      *("--out", str(tmp_path / "out")),
    )
    for number in range(2)
  ]
  for process in own:
    _, error = process.communicate(timeout=SECONDS)
    assert process.returncode == 1
    assert "seed: process 0 has 0, process 1 has 7" in error
  assert not (tmp_path / "out").exists()


def test_a_process_that_fails_ends_the_others():
  assert processes.start_all(["no_such_config.py"], 2) == 1


def test_the_command_is_kept_without_what_differs_between_processes():
  own = ("--distributed", "--coordinator", "localhost:1", "--process-id", "3")
  assert processes.typed(["c.py", "--seed", "4", *own]) == [
    *("c.py", "--seed", "4"),
  ]
  on_a_cluster = ["c.py", "--distributed"]
  assert processes.typed(on_a_cluster) == on_a_cluster


@pytest.mark.parametrize(
  ("name", "count"), [("expert_parallel_cpu", 1), ("multi_process_cpu", 2)]
)
def test_the_mesh_configs_stand_for_eight_devices(name, count):
  parsed = command.parse([str(ROOT / f"experiments/configs/{name}.py")])
  mesh = parsed.experiment.mesh
  assert (mesh.data, mesh.expert, mesh.processes) == (2, 4, count)
