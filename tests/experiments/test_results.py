"""Metrics files and the small reports around them."""

import dataclasses
import json

import pytest

from experiments import results


def record(step, loss=1.0):
  return results.StepRecord(
    step=step,
    loss=loss,
    extra_loss=0.0,
    grad_norm=1.0,
    learning_rate=0.1,
    load_imbalance=1.0,
    dropped_rows=0,
    seconds=0.5,
  )


def write(path, steps):
  with results.MetricsFile(path, steps=0) as metrics:
    for step in range(1, steps + 1):
      metrics.append(record(step, loss=float(step)))


def test_records_survive_the_file(tmp_path):
  path = tmp_path / "metrics.jsonl"
  write(path, 3)
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert [line["step"] for line in lines] == [1, 2, 3]
  assert lines[0] == dataclasses.asdict(record(1))


def test_records_after_the_checkpoint_are_dropped(tmp_path):
  path = tmp_path / "metrics.jsonl"
  write(path, 5)
  with results.MetricsFile(path, steps=3) as metrics:
    metrics.append(record(4, loss=9.0))
  lines = [json.loads(line) for line in path.read_text().splitlines()]
  assert [line["loss"] for line in lines] == [1.0, 2.0, 3.0, 9.0]


def test_a_line_cut_off_after_the_checkpoint_does_no_harm(tmp_path):
  path = tmp_path / "metrics.jsonl"
  write(path, 3)
  with path.open("a") as file:
    file.write('{"step": 4, "lo')
  with results.MetricsFile(path, steps=3) as metrics:
    assert [kept.step for kept in metrics.records] == [1, 2, 3]


def test_missing_steps_are_said(tmp_path):
  path = tmp_path / "metrics.jsonl"
  write(path, 2)
  with pytest.raises(ValueError, match=r"steps 1 to 4.*holds 2"):
    results.MetricsFile(path, steps=4)
  assert len(path.read_text().splitlines()) == 2


def test_a_broken_record_is_said(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 1}\n')
  with pytest.raises(ValueError, match="cannot be read"):
    results.MetricsFile(path, steps=1)


@pytest.mark.parametrize(
  ("values", "mean"), [([3.0], 3.0), ([9.0] * 8 + [1.0, 3.0], 2.0)]
)
def test_last_fifth(values, mean):
  assert results.last_fifth(values) == mean


def test_device_and_versions_are_named():
  device = results.device()
  assert device["platform"] == "cpu"
  assert device["count"] >= 1
  assert device["processor"]
  assert {"python", "jax", "flax", "grain"} <= results.versions().keys()
