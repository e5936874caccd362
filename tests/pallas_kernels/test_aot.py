"""The compile check passes on every kernel and fails on bad ones."""

import dataclasses
import json
import subprocess
import sys

import pytest

from pallas_kernels import aot, aot_listing, mosaic

TARGETS = tuple(aot.target_names())
SECONDS = 600  # about 100 kernels a target, one after another


def run_module(*arguments):
  """Runs a module in a process of its own; returns the finished process."""
  return subprocess.run(
    [sys.executable, "-m", *map(str, arguments)],
    capture_output=True,
    text=True,
    timeout=SECONDS,
    check=False,
  )


@pytest.fixture(scope="module", params=TARGETS)
def subjects(request, tmp_path_factory):
  """The JSON report on `aot_subjects`, by name, and the kept listings."""
  folder = tmp_path_factory.mktemp(request.param)
  report = folder / "report.json"
  done = run_module(
    "tests.pallas_kernels.aot_subjects", request.param, report, folder
  )
  assert done.returncode == 1, done.stdout + done.stderr
  content = json.loads(report.read_text())
  return content, {k["variant"]: k for k in content["kernels"]}, folder


def test_a_good_kernel_passes(subjects):
  _, kernels, folder = subjects
  good = kernels["good"]
  assert good["problems"] == []
  assert good["spill_bytes"] == 0
  assert 0 < good["registers"] <= 255
  assert good["threads"] == 128
  assert good["smem_bytes"] >= 128 * 64 * 4
  assert good["compile_seconds"] > 0
  assert good["instructions"]["bulk_tensor_load"] == 1
  listing = next(folder.glob("subject-good.sass")).read_text()
  assert "UTMALDG" in listing
  assert ".target sm_" in next(folder.glob("subject-good.ptx")).read_text()


@pytest.mark.parametrize(
  ("name", "reason"),
  [
    ("spills", "spills"),
    ("breaks its promise", "promises cast_to_fp8 and has none"),
    ("does not fit twice", "2 CTAs per SM need"),
    ("exceeds shared memory", "does not compile"),
  ],
)
def test_a_bad_kernel_fails(subjects, name, reason):
  _, kernels, _ = subjects
  assert any(reason in p for p in kernels[name]["problems"]), kernels[name]
  if name == "spills":
    assert kernels[name]["spill_bytes"] > 0
    assert kernels[name]["instructions"]["local_store"] > 0


def test_the_architecture_is_the_targets(subjects):
  content, kernels, folder = subjects
  ptx = next(folder.glob("subject-good.ptx")).read_text()
  assert f".target {content['architecture']}" in ptx.replace("\t", " ")
  if content["target"] == "b200":
    core = kernels["tensor core"]
    assert core["problems"] == []
    assert core["instructions"]["block_scaled_mma"] > 0
    assert core["tmem_columns"] >= 256


@pytest.mark.timeout(SECONDS + 20)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_of_the_library_compiles(target, tmp_path):
  report = tmp_path / "report.json"
  done = run_module("pallas_kernels.aot", "--target", target, "--json", report)
  assert done.returncode == 0, done.stdout + done.stderr
  kernels = json.loads(report.read_text())["kernels"]
  assert kernels
  assert all(k["spill_bytes"] == 0 and not k["problems"] for k in kernels)
  names = [(k["kernel"], k["variant"]) for k in kernels]
  assert len(set(names)) == len(names)


def test_an_unknown_target_is_refused():
  with pytest.raises(ValueError, match=r"one of .*'b200', .*'h200'"):
    aot.load_target("b100")
  done = run_module("pallas_kernels.aot", "--target", "b100")
  assert done.returncode == 2
  assert "b200" in done.stderr


@pytest.mark.parametrize("name", TARGETS)
def test_a_new_gpu_of_an_architecture_needs_its_file_alone(name):
  known = aot.load_target(name)
  new = dataclasses.replace(known, name="new")
  names = [
    [(v.kernel, v.variant) for v in aot.kernels(target)]
    for target in (known, new)
  ]
  assert names[0] == names[1]


def test_kernels_are_chosen_by_words():
  variants = aot.kernels(aot.load_target("h200"))
  assert aot.named(variants, []) == variants
  folds = aot.named(variants, ["fold"])
  assert {v.kernel for v in folds} > {"fold", "hopper.grouped_matmul"}
  assert len(folds) < len(variants)
  narrow = aot.named(variants, ["fold", "narrow"])
  assert len(narrow) > len(folds)
  with pytest.raises(ValueError, match="named like"):
    aot.named(variants, ["sort"])


def test_a_serialized_wgmma_is_a_problem():
  log = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async "
    "instructions are serialized due to insufficient register resources for "
    "the wgmma pipeline in function 'kernel'\n"
    "ptxas info    : Used 168 registers, used 1 barriers\n"
  )
  texts = {"ptx": "", "sass": "", "resources.txt": "", "ptxas": log}
  base = aot_listing.Result(kernel="some", variant="variant")
  result = aot_listing.read_listings(base, texts, 0.0)
  assert result.serialized == 1
  variant = mosaic.Variant(
    kernel="some", variant="variant", function=abs, arguments=()
  )
  target = aot.load_target("h200")
  assert aot.problems(result, variant, target) == (
    "ptxas serializes wgmma in 1 places",
  )
