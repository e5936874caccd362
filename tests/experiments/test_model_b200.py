"""The model of a B200 obeys its own arithmetic; its page is what it prints."""

import json
import pathlib

import pytest

from experiments import (
  b200_kernels,
  b200_layer,
  b200_published,
  h200_shares,
  model_b200,
)
from pallas_kernels import cases
from pallas_kernels.blackwell import tile as tile_lib

ROOT = pathlib.Path(__file__).parents[2]
PAGE = ROOT / "docs/b200_model.md"
KEPT = ROOT / "experiments/results/b200_model/model.json"
AGAIN = (
  "python -m experiments.model_b200 --markdown "
  "--json experiments/results/b200_model/model.json > docs/b200_model.md"
)


def test_the_page_is_what_the_command_prints(capsys):
  assert model_b200.main(["--markdown"]) == 0
  assert capsys.readouterr().out == PAGE.read_text(), f"run {AGAIN}"


def test_the_kept_numbers_are_what_the_command_writes(tmp_path, capsys):
  file = tmp_path / "model.json"
  assert model_b200.main(["--json", str(file)]) == 0
  assert json.loads(file.read_text()) == json.loads(KEPT.read_text()), AGAIN
  assert model_b200.LABEL in capsys.readouterr().out


def test_everything_is_labelled_a_model():
  content = json.loads(KEPT.read_text())
  assert content["what"] == "model, not measured"
  assert content["device"]["measured"] is False
  lines = PAGE.read_text().splitlines()
  headings = [line for line in lines if line.startswith("## ")]
  figures = [h for h in headings if h != "## Assumptions"]
  assert figures
  for heading in figures:
    assert "model, not measured" in heading or "The model against" in heading
  for text in b200_kernels.ASSUMPTIONS:
    assert f"- {text}" in lines


def test_the_grid_is_of_the_named_shapes():
  layers = json.loads(KEPT.read_text())["layers_ms"]
  points = {(x["model"], x["rows"], x["experts"], x["form"]) for x in layers}
  assert len(points) == len(layers)
  assert {p[0] for p in points} == set(cases.MODELS)
  assert {p[1] for p in points} == set(cases.ROWS_PER_DEVICE)
  assert {p[2] for p in points} == set(cases.LOCAL_EXPERTS)


def test_the_clock_makes_the_peak():
  tile = b200_kernels.Tile()
  clocks = b200_kernels.step_clocks(tile, "mxfp8")["tensor core"]
  flops = 2 * tile.rows * tile.columns * b200_kernels.STEP
  per_second = flops / clocks * b200_kernels.CLOCK * b200_kernels.GPU.sms / 2
  assert per_second == pytest.approx(b200_kernels.GPU.fp8)
  slow = b200_kernels.step_clocks(tile, "bf16")["tensor core"]
  assert slow == 2 * clocks


def test_shares_are_of_what_an_h200_measured(tmp_path, monkeypatch):
  def matmul(who, way, rate):
    sustained = rate and {"teraflops": rate}
    return {"who": who, "way": way, "sustained": sustained}

  def memory(variant, rate):
    return {"kernel": variant[0], "variant": variant[1],
            "gigabytes_per_second": rate}  # fmt: skip

  gpu = h200_shares.GPU
  matmuls = [
    matmul("folded", "fprop", 0.8 * gpu.fp8 / 1e12),
    matmul("folded", "wgrad", 0.6 * gpu.fp8 / 1e12),
    matmul("folded", "wgrad and fold", 1.0),  # another way
    matmul("bf16", "dgrad", 0.5 * gpu.bf16 / 1e12),
    matmul("bf16", "fprop", None),  # not sustained
    matmul("torch bf16", "fprop", 1.0),
  ]
  variants = h200_shares.VARIANTS.values()
  moved = [memory(variant, 0.7 * gpu.memory / 1e9) for variant in variants]
  moved += [memory(variant, 1.0) for variant in variants]  # a narrow shape
  copies = {"all": {"XLA elementwise": 0.9 * gpu.memory / 1e9}}
  for name, kept in {
    "grouped_matmul.json": {"cases": matmuls},
    "bench.json": {"cases": moved, "copy": copies},
  }.items():
    (tmp_path / name).write_text(json.dumps(kept))
  monkeypatch.setattr(h200_shares, "RESULTS", tmp_path)
  assert h200_shares.sustained() == {"mxfp8": 0.7, "bf16": 0.5}
  shares = h200_shares.reached()
  assert shares.pop("XLA") == shares.pop("matmul") == 0.9
  assert shares == dict.fromkeys(h200_shares.VARIANTS, 0.7)


def test_kept_shares_leave_the_bound_above_what_is_expected():
  for share in (*b200_kernels.SUSTAINED.values(),
                *b200_kernels.REACHED.values()):  # fmt: skip
    assert 0.5 < share < 1


def test_small_tiles_starve_the_tensor_core():
  pair = b200_kernels.step_clocks(b200_kernels.Tile(), "mxfp8")
  single = b200_kernels.step_clocks(
    b200_kernels.Tile(rows=128, columns=128, ctas=1), "mxfp8"
  )
  for clocks, most in ((pair, 1.1), (single, 2.2)):
    slowest = max(clocks.values()) / clocks["tensor core"]
    assert 1.0 <= slowest < most
  assert max(single.values()) > 1.9 * single["tensor core"]


def test_steps_are_of_the_kernels_tiles():
  found = b200_kernels.steps()
  assert [(s.mmas, s.scale_copies) for s in found] == [(4, 3), (4, 2), (4, 2)]
  assert len({s.tile for s in found}) == len(found)
  for step in found:
    assert step.smem_bytes <= tile_lib.SMEM_BYTES
    assert step.tmem_columns <= tile_lib.TMEM_COLUMNS


@pytest.mark.parametrize("form", ["bf16", "mxfp8"])
def test_whole_tiles_and_whole_rounds_cost(form):
  def us(rows, depth=4096, width=4096):
    return b200_kernels.matmul(rows, depth, width, form).bound_us

  assert us([257] * 64) == us([512] * 64)  # of the last tile all is multiplied
  assert us([8192]) < us([8192 + 1])
  eight_rounds = us([256 * 37])  # 37 x 16 tiles on 74 pairs of SMs
  assert us([256 * 36 + 1]) == eight_rounds
  assert us([256 * 37 + 1]) == pytest.approx(eight_rounds * 9 / 8)


def test_a_short_group_is_bound_by_its_weights():
  few = b200_kernels.matmul([128] * 32, 7168, 4096, "mxfp8")
  many = b200_kernels.matmul([4096] * 32, 7168, 4096, "mxfp8")
  assert few.limit == "memory"
  assert many.limit != "memory"
  few = b200_kernels.wgrad([128] * 32, 7168, 4096, "mxfp8")
  assert few.limit == "memory"  # the float32 result


@pytest.mark.parametrize("form", ["bf16", "mxfp8"])
@pytest.mark.parametrize("model", cases.MODELS)
def test_no_kernel_beats_its_bound_or_a_peak(model, form):
  layer = b200_layer.layer(model, 16384, 32, form)
  gpu = b200_kernels.GPU
  peak = gpu.fp8 if form == "mxfp8" else gpu.bf16
  for kernel in (*layer.forward, *layer.backward, *layer.weights, *layer.legs):
    assert kernel.expected_us > kernel.bound_us > 0, kernel.name
    assert kernel.flops <= peak * kernel.bound_us * 1e-6 * (1 + 1e-9)
    limit = gpu.wire if kernel.limit == "wire" else gpu.memory
    assert kernel.bytes <= limit * kernel.bound_us * 1e-6 * (1 + 1e-9)


def test_a_layer_multiplies_what_a_layer_must():
  shape, rows = cases.MODELS["deepseek_v3"], 32768
  layer = b200_layer.layer("deepseek_v3", rows, 8, "mxfp8")
  one = 2.0 * rows * shape.d_model * 3 * shape.d_ff
  assert sum(k.flops for k in layer.forward) == one
  assert sum(k.flops for k in layer.backward) == 2 * one
  plain = b200_layer.layer("deepseek_v3", rows, 8, "bf16")
  assert plain.total("forward") > layer.total("forward")
  assert layer.legs[0].bytes < 0.55 * plain.legs[0].bytes
  assert layer.legs[1].bytes == plain.legs[1].bytes


def test_the_ratio_is_how_much_more_the_model_promises():
  fields = dict(source="s", what="w", published=2.0)
  times = b200_published.Comparison(unit="us", model=1.0, **fields)
  rates = b200_published.Comparison(unit="TB/s", model=4.0, **fields)
  assert times.ratio == rates.ratio == 2.0


def test_the_model_is_near_the_best_that_is_published():
  best = {
    c.what: c.ratio
    for c in b200_published.comparisons()
    if c.source == "Cursor" and c.unit != "x"
  }
  assert len(best) == 4
  for what, ratio in best.items():
    assert 0.9 < ratio < 1.2, what
  for c in b200_published.comparisons():
    if c.source == "torchao" and c.unit == "us":
      assert c.ratio > 1, c.what
