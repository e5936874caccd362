"""The commands that time the exchange, small, on CPU devices."""

import json

import numpy as np
import pytest

from experiments import bench, bench_exchange, bench_pipeline, exchange_legs


def test_the_table_has_every_column_and_the_phases(tmp_path, capsys):
  file = tmp_path / "exchange.json"
  asked = ["exchange", "--devices", "2", "--rows", "64", "--width", "64"]
  asked += ["--skew", "2", "--slices", "8", "16", "--json", str(file)]
  asked += ["--profile", str(tmp_path / "traces"), "--sample-seconds", "0.001"]
  assert bench.main(asked) == 0
  shown = capsys.readouterr().out
  heads = ("input_shape", "num_splits", *bench_exchange.TABLE)
  phases = ["quantize_mxfp8_ms", "dequantize_mxfp8_ms"]
  for precision in bench_exchange.PRECISIONS:
    phases += [f"{p}_{precision}_ms" for p in ("pack", "wire", "dense")]
  assert all(head in shown for head in (*heads, *phases))
  found = json.loads(file.read_text())
  assert [case["num_splits"] for case in found["cases"]] == [16, 32]
  for case in found["cases"]:
    assert all(ms > 0 for ms in case["milliseconds"].values())
    # 64 + 2 + 4 bytes and 2 * 64 + 4 bytes, aligned to 128
    assert case["wire_bytes"] == {"bf16": 64 * 256, "mxfp8": 64 * 128}
  for direction in ("fwd", "bwd"):
    traces = list((tmp_path / "traces" / direction).rglob("*.xplane.pb"))
    assert traces


def test_pipeline_times_three_arms(tmp_path, capsys):
  file = tmp_path / "pipeline.json"
  asked = ["pipeline", "--devices", "2", "--tokens", "64", "--shapes", "64,32"]
  asked += ["--top-k", "2", "--sample-seconds", "0.001", "--json", str(file)]
  assert bench.main(asked) == 0
  shown = capsys.readouterr().out
  assert all(arm in shown for arm in bench_pipeline.ARMS)
  cases = json.loads(file.read_text())["cases"]
  assert [case["arm"] for case in cases] == list(bench_pipeline.ARMS)
  for case in cases:
    for time in ("forward_ms", "backward_ms", "both_ms"):
      assert time in shown
      assert case[time] > 0
    assert 0 < case["xla_passes"] == case["passes"]  # a CPU has no kernel


@pytest.mark.parametrize("skew", [1.0, 3.0])
def test_the_first_devices_experts_get_the_skew(skew):
  local = exchange_legs.LOCAL_EXPERTS
  ids = exchange_legs.expert_ids(4096, 2 * local, skew)
  counts = np.bincount(ids[:, 0], minlength=2 * local)
  assert counts.sum() == 4096
  got = counts[:local].sum() / counts[local:].sum()
  np.testing.assert_allclose(got, skew, rtol=0.01)


@pytest.mark.parametrize(
  "wrong", [["--devices", "0"], ["--devices", "99"], ["--skew", "0.5"]]
)
@pytest.mark.parametrize("name", ["exchange", "pipeline"])
def test_what_there_is_not_is_refused(name, wrong, capsys):
  with pytest.raises(SystemExit):
    bench.main([name, *wrong])
  assert wrong[0] in capsys.readouterr().err
