"""bring_up reports kernels that are wrong, raise, hang or die, and goes on."""

import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import (
  bring_up,
  bring_up_check,
  bring_up_matmul,
  bring_up_process,
  bring_up_record,
  bring_up_table,
  bring_up_worker,
  peaks,
  timing,
)
from pallas_kernels.blackwell import tile as tile_lib
from tests.pallas_kernels import bring_up_subjects as subjects

SUBJECTS = "tests.pallas_kernels.bring_up_subjects"
ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
  """The subjects' run: exit status, report by kernel, report, printed text."""
  folder = tmp_path_factory.mktemp("bring_up")
  report = folder / "report.json"
  with pytest.MonkeyPatch.context() as patch:
    printed = []
    patch.setattr("builtins.print", lambda *a, **_: printed.append(str(a[0])))
    status = bring_up.main(
      ["--json", str(report), "--timeout", "4"], table=SUBJECTS
    )
  content = json.loads(report.read_text())
  return status, {c["kernel"]: c for c in content["checks"]}, content, printed


@pytest.mark.parametrize(
  ("kernel", "outcome", "why"),
  [
    ("good", "passed", ""),
    ("wrong", "wrong", "result 0: 1 of 64 elements differ on zero"),
    ("refuses", "skipped", "takes no (64,). Use backend='xla'."),
    ("raises", "failed", "ValueError: cannot compile (64,)"),
    ("hangs", "hung", "no end after 4 s of running the kernel on zero"),
    ("good again", "passed", ""),
    ("dies", "failed", "signal 6 while running the kernel on zero"),
    ("missing", "skipped", "not built: there is no pallas_kernels.blackwell."),
    ("large", "skipped", "real shapes need a GPU"),
    ("uninterpreted", "skipped", "it takes too long"),
  ],
)
def test_each_outcome_is_reported(run, kernel, outcome, why):
  _, found, _, printed = run
  assert found[kernel]["outcome"] == outcome, found[kernel]
  assert why in found[kernel]["why"]
  line = next(text for text in printed if text.startswith(f"{kernel} "))
  assert f" {outcome}" in line


def test_a_failure_is_the_exit_status(run):
  status, found, content, printed = run
  assert status == 1
  assert len(found) == len(subjects.checks(None))
  assert content["summary"] == {
    "passed": 2, "wrong": 1, "skipped": 4, "failed": 2, "hung": 1,
  }  # fmt: skip
  assert printed[-1] == "2 passed, 1 wrong, 4 skipped, 2 failed, 1 hung"


def test_an_interrupted_report_says_so(run):
  _, _, content, _ = run
  assert content["complete"] is True
  device, checks = content["device"], content["checks"]
  findings = [
    bring_up_check.finding(c, "passed") for c in subjects.checks(None)
  ]
  cut = bring_up.report(device, findings[:2], "command", len(checks))
  assert (cut["complete"], cut["planned"]) == (False, len(checks))


def test_a_report_names_its_origin_and_no_folder(run):
  _, _, content, _ = run
  assert content["command"] == "python -m pallas_kernels.bring_up --timeout 4"
  assert content["device"] == {"platform": "cpu", "kind": "cpu"}
  assert content["versions"]["jax"] == jax.__version__
  assert content["versions"]["sources"] == bring_up_record.sources()
  text = json.dumps(content)
  assert "kernel.py" in text
  assert "/usr/lib" not in text
  assert str(ROOT) not in text


def test_a_quick_run_on_a_cpu_passes_and_says_what_it_skipped(capsys):
  words = ["--kernels", "both linear", "requantize", "permute", "grouped"]
  assert bring_up.main(["--quick", *words]) == 0
  lines = capsys.readouterr().out.splitlines()
  assert "JAX found no GPU" in lines[0]
  assert any("quantize both linear" in x and "passed" in x for x in lines)
  for name in ("permute pack", "hopper grouped_matmul", "blackwell grouped_wg"):
    chosen = [line for line in lines if line.startswith(name)]
    assert chosen
    assert all("skipped  " in line for line in chosen)
  assert not any("wrote" in line for line in lines)


def test_a_worker_that_cannot_start_is_said(capsys):
  assert bring_up.main([], table="tests.pallas_kernels.no_such_table") == 1
  assert "No module named" in capsys.readouterr().err


def test_a_process_that_cannot_be_ended_is_said(monkeypatch):
  class Stuck:
    def __init__(self, table, folder):
      del table, folder

    def await_field(self, field, timeout):
      del field, timeout
      return {"platform": "gpu"}

    def ask(self, check, timeout):
      raise bring_up_process.WorkerError("hung", f"{check.name}: {timeout}")

    def stop(self):
      raise TimeoutError("it does not end")

  monkeypatch.setattr(bring_up_process, "Worker", Stuck)
  good = subjects.check("good", subjects.double)
  with bring_up_process.Runner(SUBJECTS, 1.0) as runner:
    first, second = runner.run(good), runner.run(good)
  assert (first.outcome, first.why) == (
    "hung",
    "good, 64: 1.0; it does not end",
  )
  assert second.outcome == "failed"
  assert second.why.startswith("not run")


def test_an_element_is_judged_by_its_row_or_group():
  one_row = np.zeros((1024, 512), np.float32)
  one_row[3] = np.random.default_rng(0).normal(size=512)
  rounded, largest = one_row.copy(), np.abs(one_row[3]).argmax()
  rounded[3, largest] *= 1 + 2**-8  # another bf16
  limits = bring_up_check.NUMBERS
  right = bring_up_check.compare(rounded, one_row, limits)
  assert right.ok  # though 0.3 of the rms of all rows
  assert 0.005 < right.element < 0.02
  two = np.stack([one_row, one_row * 1e-4])  # groups of a weight gradient
  wrong = two.copy()
  wrong[1, 3, 0] += 1e-4
  found = bring_up_check.compare(wrong, two, limits)
  assert not found.ok
  assert found.frobenius < limits.frobenius
  wrong = one_row.copy()
  wrong[4, 0] = 1e-9  # where nothing belongs
  assert not bring_up_check.compare(wrong, one_row, limits).ok


def test_a_result_that_moves_is_wrong():
  anything = bring_up_check.Limits(equal=0.0)
  check = subjects.check("moves", subjects.moves, limits=anything)
  found = bring_up_worker.run_check(
    check, interpret=False, say=lambda phase: None
  )
  assert found.outcome == "wrong"
  assert found.why == "results change from call to call on zero"


def test_what_is_not_specified_is_not_compared():
  def blank(result, x):
    return jnp.where(jnp.arange(x.size) == 7, 0, result)

  check = subjects.check("one off", subjects.one_off, specified=blank)
  found = bring_up_worker.run_check(
    check, interpret=False, say=lambda phase: None
  )
  assert found.outcome == "passed"


def test_real_shapes_are_timed_beside_their_baseline(monkeypatch):
  monkeypatch.setattr(timing, "CACHE_BYTES", 64)
  monkeypatch.setattr(timing, "SAMPLE_SECONDS", 1e-4)
  phases = []
  check = subjects.check(
    "large", subjects.double, stage="real", flops=64.0,
    baselines={"bf16 dot": (jnp.sin, lambda: (jnp.ones(64),))},
  )  # fmt: skip
  found = bring_up_worker.run_check(check, interpret=False, say=phases.append)
  assert found.outcome == "passed"
  assert found.microseconds > 0
  assert found.bytes == 2 * 64 * 2
  assert found.baselines["bf16 dot"] > 0
  assert phases[-1] == "timing"


class TestVerdicts:
  """What `bring_up_check.compare` lets through."""

  def test_one_code_of_many(self):
    want = jnp.zeros(2**20, jnp.uint8)
    got = want.at[12345].set(1)
    found = bring_up_check.compare(got, want, bring_up_check.Limits())
    assert (found.ok, found.unequal) == (False, 1)
    assert bring_up_check.compare(got, want, bring_up_check.NEARLY).ok

  @pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, 1.0])
  def test_one_number_of_many(self, bad):
    want = jax.random.normal(jax.random.key(0), (2**16,)).astype(jnp.bfloat16)
    limits = bring_up_check.NUMBERS
    assert bring_up_check.compare(want, want, limits).ok
    found = bring_up_check.compare(want.at[3].add(bad), want, limits)
    assert not found.ok
    assert found.element > limits.element
    json.dumps(found.element, allow_nan=False)
    assert "result 0: relative error" in found.why

  def test_other_shapes(self):
    found = bring_up_check.compare(
      jnp.zeros(3), jnp.zeros(4), bring_up_check.NUMBERS
    )
    assert not found.ok
    assert "(3,)" in found.why

  def test_zeros(self):
    zeros = jnp.zeros(8)
    assert bring_up_check.compare(zeros, zeros, bring_up_check.NUMBERS).ok
    found = bring_up_check.compare(zeros + 1, zeros, bring_up_check.NUMBERS)
    assert not found.ok


class TestTable:
  """Which checks there are for which device."""

  def test_names_are_distinct_and_small_shapes_come_first(self):
    for capability in (None, "9.0", "10.0", "12.0"):
      checks = bring_up_table.checks(capability)
      names = [check.name for check in checks]
      assert len(set(names)) == len(names)
      stages = [check.stage for check in checks]
      assert stages == sorted(stages, reverse=True)

  def test_a_gpu_gets_its_own_matmuls(self):
    def matmuls(capability):
      checks = bring_up_table.checks(capability)
      return {c.module.split(".")[1] for c in checks if "grouped" in c.module}

    assert matmuls("9.0") == {"hopper"}
    assert matmuls("10.0") == {"blackwell"}
    assert matmuls("12.0") == set()
    assert matmuls(None) == {"hopper", "blackwell"}

  def test_an_old_gpu_is_told_why(self):
    check = bring_up_table.checks("8.0")[0]
    assert "has no TMA" in bring_up_table.obstacle(check, "8.0")
    assert bring_up_table.obstacle(check, "10.0") is None

  def test_cautious_tiles_are_legal_and_come_first(self):
    for options in bring_up_matmul.CAUTIOUS.values():
      assert tile_lib.MatmulTile(**options) != tile_lib.MatmulTile()
    names = [c.kernel for c in bring_up_table.checks("10.0")]
    assert bring_up_matmul.SIMPLE in names[0]
    default = names.index("blackwell grouped_matmul mxfp8 forward")
    for tile in bring_up_matmul.CAUTIOUS:
      assert sum(name.endswith(tile) for name in names[:default]) == 2

  @pytest.mark.parametrize("capability", ["9.0", "10.0"])
  def test_kernel_and_meaning_are_of_one_form(self, capability):
    for check in bring_up_table.checks(capability):
      arguments = jax.eval_shape(check.make, *next(iter(check.inputs.values())))
      want = jax.eval_shape(check.meaning, *arguments)
      assert jax.tree.leaves(want), check.name


def timed(**fields):
  return bring_up_check.Finding(
    **dict(kernel="k", shape="s", stage="real", outcome="passed") | fields
  )


def test_the_table_shows_rates_and_shares():
  peak = peaks.peak("NVIDIA B200")
  matmul = timed(
    microseconds=1000.0, flops=2.25e12, rate="fp8", baselines={"bf16 dot": 1900}
  )
  line = bring_up.row(matmul, peak)
  assert "1000.0  2250 TFLOP/s     50% fp8  1.90 x bf16 dot" in line
  memory = timed(microseconds=1.0, bytes=4_000_000)
  assert "1.0     4.00 TB/s  50% memory" in bring_up.row(memory, peak)
  assert "%" not in bring_up.row(memory, peaks.peak("NVIDIA X"))


class TestRecord:
  """When a run leaves a record."""

  def keep(self, tmp_path, words, outcome, platform="gpu"):
    device = dict(platform=platform, kind="NVIDIA B200", capability="10.0")
    file = tmp_path / "record.json"
    asked = bring_up.parse([*words, "--record", str(file)])
    bring_up.keep_record(asked, device, [timed(outcome=outcome)])
    return bring_up_record.passed("NVIDIA B200", "10.0", file=file)

  def test_a_full_run_does(self, tmp_path):
    assert self.keep(tmp_path, [], "passed")[0]

  def test_a_failure_does_and_says_so(self, tmp_path):
    assert self.keep(tmp_path, [], "passed")[0]
    ok, why = self.keep(tmp_path, ["--quick"], "hung")
    assert not ok
    assert "failed on this machine: k, s" in why

  @pytest.mark.parametrize("words", [["--quick"], ["--kernels", "k"]])
  def test_a_partial_run_does_not(self, tmp_path, words):
    assert "not been proven" in self.keep(tmp_path, words, "passed")[1]

  def test_a_cpu_does_not(self, tmp_path):
    assert "not been proven" in self.keep(tmp_path, [], "passed", "cpu")[1]


def test_paths_are_shortened():
  said = 'File "/usr/lib/python3/site-packages/jax/core.py", line 3'
  assert bring_up_process.scrub(said) == 'File ".../jax/core.py", line 3'
  assert bring_up_process.scrub("a/b 3/4 f(x)/y") == "a/b 3/4 f(x)/y"


def test_a_kept_report_holds_no_failure():
  kept = ROOT / "experiments/results/nvidia_h200/bring_up.json"
  content = json.loads(kept.read_text())
  assert content["command"].startswith("python -m pallas_kernels.bring_up")
  assert content["device"]["kind"] == "NVIDIA H200"
  assert content["versions"]["jax"]
  outcomes = [check["outcome"] for check in content["checks"]]
  assert content["summary"]["passed"] == outcomes.count("passed")
  for check in content["checks"]:
    assert check["outcome"] == "passed" or check["why"]
    assert check["outcome"] in ("passed", "skipped")
