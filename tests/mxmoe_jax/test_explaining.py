"""explain(): every step is named, with what runs it and why."""

import dataclasses

import jax
import pytest

from mxmoe_jax import Explanation, Recipe, explain
from tests.mxmoe_jax import layers, meshes

PRESETS = (Recipe.mxfp8(), Recipe.mxfp8_bf16_wgrad(), Recipe.bf16())
MATMULS = {
  "up forward": "forward",
  "down forward": "forward",
  "down input_grad": "input_grad",
  "down weight_grad": "weight_grad",
  "up input_grad": "input_grad",
  "up weight_grad": "weight_grad",
}


@pytest.mark.parametrize("recipe", PRESETS)
def test_every_matmul_has_the_precision_of_the_recipe(recipe):
  told = explain(layers.config(recipe=recipe), 64)
  passes = {p.name: p for p in told.passes}
  for name, field in MATMULS.items():
    assert passes[name].precision == getattr(recipe, field), name
    assert passes[name].implementation == "xla"
    assert "no NVIDIA GPU" in passes[name].reason


def test_the_text_holds_the_numbers():
  told = explain(layers.config(), 64)
  assert isinstance(told, Explanation)
  text = str(told)
  for p in told.passes:
    assert p.name in text
    assert p.reason in text
  for name, size in told.buffer_bytes.items():
    assert name in text
    assert f"{size:,}" in text
  assert f"{told.saved_bytes_per_row:,.1f} bytes per row" in text
  assert f"{told.rows} rows" in text


def test_buffers_are_counted_from_the_rows():
  cfg = layers.config()
  told = explain(cfg, 64)
  assert told.rows == cfg.buffer_rows(64)
  assert told.buffer_bytes["hidden (bf16)"] == told.rows * cfg.d_ff * 2
  assert told.buffer_bytes["expert outputs (bf16)"] == (
    told.rows * cfg.d_model * 2
  )


def test_recomputed_steps_are_told():
  recipe = Recipe.mxfp8(
    save_preactivations="recompute", save_hidden="recompute"
  )
  names = [p.name for p in explain(layers.config(recipe=recipe), 64).passes]
  assert "up again" in names
  assert "swiglu again" in names
  usual = [p.name for p in explain(layers.config(), 64).passes]
  assert len(usual) == len(names) - 2


def test_a_mesh_shows_tokens_per_device_and_the_wire():
  told = explain(meshes.config(), 256, mesh=meshes.make_mesh(2, 4))
  assert told.tokens == 32
  wires = [p for p in told.passes if p.name.endswith("wire")]
  assert len(wires) == 4
  assert all("over 4 devices" in p.reason for p in wires)
  assert "wire, dispatch" in told.buffer_bytes


def test_another_device_can_be_judged():
  cpu = jax.devices()[1]
  told = explain(layers.config(), 64, device=cpu)
  assert "cpu" in told.devices


def test_what_the_layer_refuses_is_refused():
  with pytest.raises(NotImplementedError, match="no NVIDIA GPU"):
    explain(layers.config(backend="mosaic"), 64)
  with pytest.raises(ValueError, match="63 tokens over 8 devices"):
    explain(meshes.config(), 63, mesh=meshes.make_mesh(2, 4))


def test_is_frozen():
  told = explain(layers.config(), 64)
  with pytest.raises(dataclasses.FrozenInstanceError):
    told.rows = 1


def test_what_prepares_operands_is_told_with_its_number_of_calls():
  """Forward: x, two weights. Backward: dy, two weights; x and dy again."""
  cfg = layers.config()
  names = [p.name for p in explain(cfg, 256).passes]
  assert "forward quantize x3" in names
  assert "backward quantize x3" in names
  assert "backward requantize x2" in names
  plain = dataclasses.replace(cfg, recipe=Recipe.bf16())
  assert not [p.name for p in explain(plain, 256).passes if " x" in p.name]
