"""A record of `bring_up` counts for what it was made with and nothing else."""

import json
import pathlib

import pytest

from pallas_kernels import bring_up_record as record

KIND, CAPABILITY = "NVIDIA B200", "10.0"


@pytest.fixture
def file(tmp_path):
  return tmp_path / "deep" / "record.json"


def write(file, failed=(), checks=12):
  return record.write(KIND, CAPABILITY, failed, checks=checks, file=file)


def test_a_record_passes_where_it_was_made(file):
  assert write(file) == file
  assert record.passed(KIND, CAPABILITY, file=file) == (
    True,
    "bring_up passed on this machine (12 checks)",
  )


def test_without_a_record_nothing_has_passed(file):
  ok, why = record.passed(KIND, CAPABILITY, file=file)
  assert not ok
  assert "python -m pallas_kernels.bring_up" in why


@pytest.mark.parametrize(
  ("kind", "capability", "said"),
  [
    ("NVIDIA GB200", CAPABILITY, "device_kind NVIDIA B200, not NVIDIA GB200"),
    (KIND, "10.3", "capability 10.0, not 10.3"),
  ],
)
def test_another_gpu_is_not_proven(file, kind, capability, said):
  write(file)
  ok, why = record.passed(kind, capability, file=file)
  assert not ok
  assert said in why
  assert record.COMMAND in why


@pytest.mark.parametrize("name", ["jax", "jaxlib", "mxmoe_jax", "sources"])
def test_another_version_is_not_proven(file, name):
  write(file)
  now = record.versions() | {name: "another"}
  ok, why = record.passed(KIND, CAPABILITY, now, file=file)
  assert not ok
  assert f"with {name} {record.versions()[name]}, now it is another" in why
  assert record.COMMAND in why


def test_failures_are_named(file):
  write(file, failed=["quantize rows", "pack"])
  assert record.passed(KIND, CAPABILITY, file=file) == (
    False,
    "bring_up failed on this machine: quantize rows, pack",
  )


def test_a_run_of_nothing_is_no_proof(file):
  write(file, checks=0)
  ok, why = record.passed(KIND, CAPABILITY, file=file)
  assert not ok
  assert "checked nothing" in why


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"device_kind": 3}'])
def test_a_broken_record_is_none(file, text):
  file.parent.mkdir()
  file.write_text(text)
  assert not record.passed(KIND, CAPABILITY, file=file)[0]


def test_a_record_without_a_verdict_is_none(file):
  content = json.loads(write(file).read_text())
  del content["failed"]
  file.write_text(json.dumps(content))
  assert not record.passed(KIND, CAPABILITY, file=file)[0]


def test_the_usual_place_is_the_users_own(monkeypatch, tmp_path):
  monkeypatch.setattr(pathlib.Path, "home", lambda: tmp_path)
  usual = tmp_path / ".cache" / "mxmoe_jax" / "nvidia_b200.json"
  assert record.path(KIND) == usual
  assert write(None) == usual
  assert record.passed(KIND, CAPABILITY)[0]

  def homeless():
    raise RuntimeError("could not determine home directory")

  monkeypatch.setattr(pathlib.Path, "home", homeless)
  assert not record.passed(KIND, CAPABILITY)[0]


def test_the_hash_is_of_what_kernels_are_made_of(tmp_path):
  def files():
    return {name for name, _ in record._files(tmp_path)}

  for name in ("quantize.py", "bring_up_record.py", "aot_listing.py", "n.txt"):
    (tmp_path / name).write_text("x = 1\n")
  (tmp_path / "hopper").mkdir()
  (tmp_path / "hopper" / "grouped_matmul.py").write_text("y = 1\n")
  (tmp_path / "tuned").mkdir()
  (tmp_path / "tuned" / "nvidia_b200.json").write_text("{}\n")
  assert files() == {
    "quantize.py",
    "hopper/grouped_matmul.py",
    "tuned/nvidia_b200.json",
  }
  assert len(record.sources()) == 16
