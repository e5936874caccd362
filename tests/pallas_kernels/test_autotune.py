"""Which tiles are tried, which is kept, and how it is found again."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import autotune, swiglu, tiles, timing, workloads

TABLES = sorted(
  (pathlib.Path(autotune.__file__).parent / tiles.TUNED).glob("*.json")
)
SUBJECTS = [
  pytest.param(w, id=f"{w.kernel} {w.tuned}")
  for w in autotune.subjects(autotune.KERNELS)
]


def as_tile(kernel, fields):
  """The dataclass of an entry of a table."""
  kind = swiglu.SwigluTile if kernel == "swiglu" else tiles.StreamTile
  return kind(**fields)


def entry(width, stages):
  tile = tiles.StreamTile(stages=stages)
  return {
    "kernel": "quantize",
    "case": "rows",
    "width": width,
    "tile": dataclasses.asdict(tile),
  }


@pytest.mark.parametrize("workload", SUBJECTS)
def test_tiles_are_many_distinct_and_accepted(workload):
  found = autotune.choices(workload)
  assert len(found) > 1
  assert len({tile.name for tile in found}) == len(found)
  small = next(
    w
    for w in workloads.MAKERS[workload.kernel](1024, 512)
    if w.tuned == workload.tuned
  )
  run = functools.partial(small.run, tile=found[-1])
  jax.eval_shape(run, *jax.eval_shape(small.make))
  kept = json.loads(json.dumps(dataclasses.asdict(found[-1])))
  assert as_tile(workload.kernel, kept) == found[-1]


def test_an_untuned_workload_has_no_tiles():
  workload = next(
    w for w in workloads.quantize_workloads(1024, 512) if not w.tuned
  )
  with pytest.raises(ValueError, match="has no tiles to choose from"):
    autotune.choices(workload)


def test_tiles_fit_in_shared_memory():
  for read, written in ((2, 1), (2, 2), (1, 2)):
    for tile in autotune.stream_tiles(read, written):
      each = read * tile.stages + written * tile.buffers
      smem = tiles.TILE_ROWS * tile.columns * each * tile.ctas_per_sm
      assert smem < autotune.SMEM_BYTES


def stub(results):
  """A workload whose kernel gives a result by the stages of its tile."""
  return dataclasses.replace(
    workloads.quantize_workloads(1024, 512)[0],
    make=lambda: (jnp.zeros(8, jnp.bfloat16),),
    run=lambda x, tile: x + results[tile.stages],
  )


def test_tiles_are_timed_if_they_agree(monkeypatch):
  monkeypatch.setattr(timing, "CACHE_BYTES", 64)
  options = [tiles.StreamTile(stages=n) for n in (1, 2)]
  arguments = stub({}).make()
  found = autotune.glance(stub({1: 0.5, 2: 0.5}), arguments, options)
  assert [tile for tile, _, _ in found] == options
  assert all(us > 0 for _, _, us in found)
  with pytest.raises(RuntimeError, match="s2 c2 w1 b1 gives other results"):
    autotune.glance(stub({1: 0.5, 2: 0.25}), arguments, options)


def test_a_tile_that_does_not_compile_is_left_out(monkeypatch, capsys):
  monkeypatch.setattr(timing, "CACHE_BYTES", 64)
  options = [tiles.StreamTile(stages=n) for n in (1, 2)]

  def run(x, tile):
    if tile.stages == 1:
      raise ValueError("exceeds available shared memory")
    return x

  workload = dataclasses.replace(stub({}), run=run)
  found = autotune.glance(workload, workload.make(), options)
  assert [tile for tile, _, _ in found] == options[1:]
  assert "exceeds available shared memory" in capsys.readouterr().out


def test_a_tile_must_win_by_a_margin():
  first, second = (tiles.StreamTile(stages=n) for n in (1, 2))
  near, far = 1 - autotune.MARGIN / 2, 1 - 2 * autotune.MARGIN
  assert autotune.best([(first, 1.0), (second, near)])[0] == first
  assert autotune.best([(first, 1.0), (second, far)])[0] == second


def test_a_lookup_takes_the_widest_that_is_not_wider(monkeypatch):
  entries = (entry(1024, 1), entry(7168, 3))
  monkeypatch.setattr(tiles, "tuned_entries", lambda _: entries)

  def stages(width, case="rows"):
    found = tiles.tuned("quantize", "any", case, width)
    return None if found is None else found["stages"]

  assert [stages(w) for w in (512, 1024, 4096, 7168, 8192)] == [
    None, 1, 1, 3, 3,
  ]  # fmt: skip
  assert stages(7168, "both") is None


def test_kernels_take_the_measured_tile_on_its_gpu_alone(monkeypatch):
  measured = {"NVIDIA X": (entry(1024, 7),)}
  monkeypatch.setattr(
    tiles, "tuned_entries", lambda kind: measured.get(kind, ())
  )
  assert tiles.quantize_tile((-1,), 2048, 2, "NVIDIA X").stages == 7
  default = tiles.quantize_tile((-1,), 2048, 2)
  assert default.stages < 7
  assert tiles.quantize_tile((-1,), 2048, 2, "NVIDIA Y") == default
  assert tiles.quantize_tile((-1,), 2048, 4, "NVIDIA X").stages < 7
  assert tiles.quantize_tile((-1, -2), 2048, 2, "NVIDIA X").stages < 7


def test_a_gpu_that_was_not_measured_has_no_table():
  assert tiles.tuned_entries("NVIDIA B200") == ()
  assert tiles.tuned("quantize", "cpu", "rows", 7168) is None


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_a_table_holds_what_was_measured(path):
  table = json.loads(path.read_text())
  assert path.name == tiles.tuned_file(table["device"])
  for found in table["entries"]:
    finalists = found["finalists"]
    assert len(found["glanced_at"]) >= len(finalists) > 1
    assert found["microseconds"] == finalists[found["name"]]
    least = min(finalists.values())
    assert found["microseconds"] * (1 - autotune.MARGIN) <= least + 0.1
    tile = as_tile(found["kernel"], found["tile"])
    assert tile.name == found["name"]


def test_a_cpu_is_refused(capsys):
  assert autotune.main([]) == 2
  assert "JAX found cpu" in capsys.readouterr().err
