"""The benchmark's comparison, its table and its refusals."""

import dataclasses

import jax.numpy as jnp
import pytest
import rich.console

from experiments import bench
from pallas_kernels import timing, workloads

COPY = timing.Copy(how="some copy", gigabytes_per_second=1e-3, all={})


def workload(run, bar=None):
  """A workload of a kernel that doubles 1024 numbers."""
  return workloads.Workload(
    kernel="quantize",
    variant="double",
    rows=32,
    width=32,
    make=lambda: (jnp.arange(1024, dtype=jnp.bfloat16).reshape(32, 32),),
    run=run,
    meaning=lambda x: x + x,
    bar=bar,
  )


def printed(table):
  console = rich.console.Console(width=150, record=True)
  console.print(table)
  return console.export_text()


def test_a_case_is_checked_and_timed():
  case = bench.run_case(workload(lambda x: 2 * x), COPY, samples=2)
  assert case.equal_bytes == 1.0
  assert case.float32_error is None
  assert case.bytes == 2 * 1024 * 2
  rate = case.bytes / case.time.median_us / 1e3
  assert case.gigabytes_per_second == pytest.approx(rate)
  assert case.of_copy == pytest.approx(rate / 1e-3)
  assert case.times_reference == pytest.approx(
    case.reference.median_us / case.time.median_us
  )


def test_a_wrong_element_shows():
  case = bench.run_case(
    workload(lambda x: (2 * x).at[3, 5].add(64)), COPY, samples=2
  )
  assert case.equal_bytes == pytest.approx(1023 / 1024)
  assert "0.999023" in printed(bench.table([case], COPY))


def test_a_single_wrong_element_of_many_is_not_rounded_away():
  want = jnp.zeros(2**25, jnp.uint8)
  equal, _ = bench.compare(want.at[7].set(1), want)
  assert equal < 1.0


def test_float32_results_compare_by_error():
  got = {"codes": jnp.ones(4, jnp.uint8), "w": jnp.array([3.0, 4.5])}
  want = {"codes": jnp.ones(4, jnp.uint8), "w": jnp.array([3.0, 4.0])}
  assert bench.compare(got, want) == (1.0, pytest.approx(0.1))


def test_other_shapes_are_refused():
  with pytest.raises(ValueError, match="differ in shape"):
    bench.compare(jnp.zeros(3), jnp.zeros(4))


def test_the_table_marks_a_missed_bar():
  case = bench.run_case(workload(lambda x: x + x, bar=0.9), COPY, samples=2)
  low = dataclasses.replace(case, of_copy=0.80)
  high = dataclasses.replace(case, of_copy=0.95)
  text = printed(bench.table([low, high], COPY))
  assert "0.800 missed" in text
  assert "0.950 missed" not in text
  assert "some copy" in text


def test_kernels_come_at_their_shapes_or_at_the_one_given():
  usual = bench.chosen(["permute", "permute"], None, None)
  assert {(w.rows, w.width) for w in usual} == set(workloads.shapes("permute"))
  assert len({w.name for w in usual}) == len(usual)
  narrow = bench.chosen(["swiglu", "quantize"], 256, 512)
  assert {w.kernel for w in narrow} == {"swiglu", "quantize"}
  assert {(w.rows, w.width) for w in narrow} == {(256, 512)}


def test_the_origin_names_command_device_and_versions():
  found = bench.origin(["quantize", "--json", "a/b.json", "--rows", "256"])
  assert found["command"] == "python -m experiments.bench quantize --rows 256"
  assert found["device"]["platform"] == "cpu"
  assert found["versions"]["jax"]


def test_a_cpu_is_refused(capsys):
  assert bench.main(["quantize"]) == 2
  assert "JAX found cpu" in capsys.readouterr().err


def test_an_unknown_kernel_is_refused(capsys):
  with pytest.raises(SystemExit):
    bench.main(["matmul"])
  assert "invalid choice: 'matmul'" in capsys.readouterr().err
