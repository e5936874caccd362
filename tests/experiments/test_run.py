"""The command itself, in processes of its own."""

import json
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments import run

ROOT = pathlib.Path(__file__).parents[2]
SHRUNKEN = ROOT / "tests/experiments/shrunken.py"
SECONDS = 120


def start(*arguments):
  return subprocess.Popen(
    [sys.executable, "-m", "experiments.run", str(SHRUNKEN), *arguments],
    cwd=ROOT,
    stdout=subprocess.PIPE,
    stderr=subprocess.PIPE,
    text=True,
  )


def losses(folder):
  summary = json.loads((folder / "summary.json").read_text())
  return [one["losses"] for one in summary["runs"]]


def test_killed_in_the_middle_the_command_goes_on_to_the_bit(tmp_path):
  overrides = (
    *("--recipes", "bf16", "--steps", "40"),
    *("--checkpoint-every", "5"),
  )
  whole, broken = tmp_path / "whole", tmp_path / "broken"
  metrics = broken / "metrics-bf16.jsonl"
  disturbed = start(*overrides, "--out", str(broken))
  deadline = time.monotonic() + SECONDS
  while not metrics.exists() or metrics.read_text().count("\n") < 7:
    assert disturbed.poll() is None, disturbed.communicate()
    assert time.monotonic() < deadline
    time.sleep(0.01)
  disturbed.kill()
  disturbed.communicate(timeout=SECONDS)
  assert disturbed.returncode == -signal.SIGKILL
  assert not (broken / "summary.json").exists()
  for folder in (broken, whole):
    out, error = start(*overrides, "--out", str(folder)).communicate(
      timeout=SECONDS
    )
    assert (folder / "summary.json").exists(), error
    assert "\x1b" not in out + error
  assert losses(broken) == losses(whole)


def test_an_error_is_one_message_and_no_traceback(tmp_path):
  (tmp_path / "thesis.txt").write_text("")
  refused = start("--out", str(tmp_path))
  out, error = refused.communicate(timeout=SECONDS)
  assert refused.returncode == 1
  assert error.startswith("ValueError: ")
  assert "holds other files" in error
  assert "Traceback" not in out + error


def test_missing_packages_are_named_with_the_way_to_get_them(
  monkeypatch, capsys
):
  monkeypatch.setattr(
    run.importlib.util, "find_spec", lambda name: name != "orbax" or None
  )
  assert run.main(["config.py"]) == 1
  assert "needs orbax" in (said := capsys.readouterr().err)
  assert "pip install" in said


@pytest.mark.parametrize("given", [None, "4"])
def test_the_thread_pool_is_set_unless_it_was(monkeypatch, given):
  if given is None:
    monkeypatch.delenv("NPROC", raising=False)
  else:
    monkeypatch.setenv("NPROC", given)
  run.set_environment()
  assert run.os.environ["NPROC"] == (given or "32")
