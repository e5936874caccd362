"""The benchmark over experts writes what it measured."""

import json

from experiments import bench_experts


def test_a_small_run_writes_its_cases(tmp_path, capsys):
  file = tmp_path / "experts.json"
  asked = ["--experts", "2", "4", "--rows", "64", "--width", "32"]
  asked += ["--samples", "2", "--json", str(file)]
  assert bench_experts.main(asked) == 0
  found = json.loads(file.read_text())
  assert [case["experts"] for case in found["cases"]] == [2, 4]
  assert all(case["milliseconds"] > 0 for case in found["cases"])
  assert found["cases"][0]["ratio"] == 1.0
  assert str(file) not in found["command"]
  assert capsys.readouterr().out.count("experts") == 2
