"""Kernels are taken where they run, and refused with a reason where not.

A stand-in for an H200 is enough: choices are made when a call is traced, and
nothing here is compiled or run.
"""

import types

import jax
import jax.numpy as jnp
import pytest

import mxmoe_jax
from mxmoe_jax import arguments, backend, layer, mosaic_ops, stage
from mxmoe_jax import weights as weights_lib
from pallas_kernels import bring_up_record
from tests.mxmoe_jax import meshes

HOPPER = types.SimpleNamespace(platform="gpu", compute_capability="9.0",
                               device_kind="NVIDIA H200")
BLACKWELL = types.SimpleNamespace(platform="gpu", compute_capability="10.0",
                                  device_kind="NVIDIA B200")


def heard(device, call, *shapes, name="auto"):
  """The choices that a call on abstract arrays makes."""
  choices = []
  ops = backend.select(name, device, lambda *choice: choices.append(choice))
  arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
  out = jax.eval_shape(lambda *a: call(ops, *a), *arrays)
  return choices, out


def quantize(ops, x):
  return ops.quantize(x, -1)


def test_auto_takes_the_kernel_on_hopper():
  choices, out = heard(HOPPER, quantize, (256, 2880))
  assert [(n, c.implementation) for n, c in choices] == [
      ("quantize", "mosaic")]
  assert out.scale.shape == (256, 90)


def test_auto_falls_back_with_the_kernels_own_reason():
  ((_, choice),), out = heard(HOPPER, quantize, (256, 96))
  assert choice.implementation == "xla"
  assert "at least 128 values" in choice.reason
  assert out.shape == (256, 96)


def test_mosaic_refuses_instead_of_falling_back():
  with pytest.raises(NotImplementedError, match="at least 128 values"):
    heard(HOPPER, quantize, (256, 96), name="mosaic")
  with pytest.raises(NotImplementedError, match="no NVIDIA GPU"):
    backend.select("mosaic", jax.devices("cpu")[0])


def test_blackwell_is_chosen_once_bring_up_has_passed(monkeypatch, tmp_path):
  file = tmp_path / "record.json"
  monkeypatch.setattr(bring_up_record, "path", lambda kind: file)
  ((_, choice),), _ = heard(BLACKWELL, quantize, (256, 256))
  assert choice.implementation == "xla"
  assert "bring_up" in choice.reason
  assert "backend='mosaic'" in choice.reason
  bring_up_record.write("NVIDIA B200", "10.0", ["wgrad"], checks=9)
  ((_, choice),), _ = heard(BLACKWELL, quantize, (256, 256))
  assert choice.implementation == "xla"
  assert "wgrad" in choice.reason
  bring_up_record.write("NVIDIA B200", "10.0", [], checks=9)
  ((_, choice),), _ = heard(BLACKWELL, quantize, (256, 256))
  assert choice.implementation == "mosaic"


def test_blackwell_runs_when_asked():
  ((_, choice),), _ = heard(BLACKWELL, quantize, (256, 256), name="mosaic")
  assert choice.implementation == "mosaic"


def test_every_kernel_operation_is_one_of_the_pipeline():
  for generation in ("hopper", "blackwell"):
    assert set(mosaic_ops.kernels(generation)) == set(backend.OPERATIONS)


@pytest.mark.parametrize("recipe", [
    mxmoe_jax.Recipe.mxfp8(), mxmoe_jax.Recipe.bf16(),
    mxmoe_jax.Recipe.mxfp8_bf16_wgrad(),
    mxmoe_jax.Recipe.mxfp8(dispatch="bf16", combine_grad="bf16"),
    mxmoe_jax.Recipe.mxfp8(save_preactivations="mxfp8",
                           save_hidden="recompute", grad_dtype="e5m2"),
    mxmoe_jax.Recipe.mxfp8(combine="mxfp8", dispatch_grad="mxfp8",
                           weight_block="32x32"),
], ids=lambda r: r.name[:40])
def test_explain_tells_kernel_and_reference_apart(recipe):
  cfg = mxmoe_jax.MoEConfig(d_model=512, d_ff=256, num_experts=8, top_k=2,
                            bias=True, recipe=recipe)
  told = mxmoe_jax.explain(cfg, 1024, device=HOPPER)
  by_name = {p.name: p for p in told.passes}
  assert by_name["swiglu"].implementation == "mosaic"
  assert by_name["swiglu backward"].implementation == "mosaic"
  assert by_name["dispatch permute"].implementation == "mosaic"
  for name, step in by_name.items():
    if name.endswith(("forward", "input_grad", "weight_grad")):
      assert step.implementation == "mosaic"
  assert "NVIDIA H200" in str(told)


def test_explain_tells_each_leg_by_its_own_call():
  """1025 tokens fit no TMA tile; the aligned rows on their way home do."""
  recipe = mxmoe_jax.Recipe.mxfp8(
      combine="mxfp8", dispatch_grad="mxfp8", save_preactivations="mxfp8")
  cfg = mxmoe_jax.MoEConfig(d_model=512, d_ff=256, num_experts=8, top_k=2,
                            recipe=recipe)
  told = mxmoe_jax.explain(cfg, 1025, device=HOPPER)
  by_name = {p.name: p.implementation for p in told.passes}
  for name, want in (("dispatch", "xla"), ("combine", "mosaic"),
                     ("combine_grad", "xla"), ("dispatch_grad", "mosaic")):
    assert by_name[f"{name} quantize"] == want, name


def test_the_default_device_decides(monkeypatch):
  cpu = jax.devices("cpu")[0]
  devices = jax.devices
  monkeypatch.setattr(
      jax, "devices", lambda *kind: devices(*kind) if kind else [HOPPER])
  assert backend.device_capability() == "9.0"
  for device in (cpu, "cpu"):
    with jax.default_device(device):
      assert backend.device_capability() is None


def abstract_layer(cfg, device):
  """Shapes of all results of the forward and of the backward pass."""
  made, array = stage.make_stage(cfg, None, device), jax.ShapeDtypeStruct
  x = array((512, cfg.d_model), jnp.bfloat16)
  weights = array((512, cfg.top_k), jnp.float32)
  ids = array((512, cfg.top_k), jnp.int32)
  shapes = arguments.parameter_shapes(cfg)
  params = weights_lib.expert_params(
      {name: array(shape, jnp.float32) for name, shape in shapes.items()})
  copies = mxmoe_jax.QuantizedWeights()
  y, dropped, kept = jax.eval_shape(
      lambda *args: layer.forward(made, *args), x, weights, ids, params, copies)
  gradients = jax.eval_shape(
      lambda *args: layer.backward(made, *args), x, kept, weights, ids, params,
      copies)
  return y, dropped, gradients


def test_shapes_agree_with_the_reference_through_the_whole_layer():
  """Forward and backward trace to the same shapes with and without kernels."""
  cfg = meshes.config(d_model=256, d_ff=256, expert_axis=None, data_axes=())
  on_gpu = abstract_layer(cfg, HOPPER)
  assert on_gpu == abstract_layer(cfg, jax.devices("cpu")[0])
  told = [mxmoe_jax.explain(cfg, 512, device=device)
          for device in (HOPPER, jax.devices("cpu")[0])]
  assert told[0].buffer_bytes == told[1].buffer_bytes


def test_folded_is_for_hopper_alone():
  recipe = mxmoe_jax.Recipe.mxfp8(hopper="folded")
  cfg = meshes.config(recipe=recipe, expert_axis=None, data_axes=())
  assert stage.make_stage(cfg, None, HOPPER).folded
  for device in (jax.devices("cpu")[0], BLACKWELL):
    assert not stage.make_stage(cfg, None, device).folded
  exact = meshes.config(expert_axis=None, data_axes=())
  assert not stage.make_stage(exact, None, HOPPER).folded


@pytest.mark.parametrize("change", [
    dict(recipe=mxmoe_jax.Recipe.mxfp8(hopper="folded",
                                       weight_block="32x32")),
    dict(fsdp_axis="data")])
def test_what_cannot_be_folded_is_refused_with_the_way_out(change):
  recipe = mxmoe_jax.Recipe.mxfp8(hopper="folded")
  cfg = meshes.config(**dict(recipe=recipe, d_ff=128) | change)
  with pytest.raises(NotImplementedError, match="Use hopper='exact'"):
    stage.make_stage(cfg, None, HOPPER)
  with pytest.raises(NotImplementedError, match="Use hopper='exact'"):
    mxmoe_jax.explain(cfg, 512, mesh=meshes.make_mesh(2, 4), device=HOPPER)


@pytest.mark.parametrize(("device", "backend_name", "rows", "columns"), [
    (HOPPER, "auto", "linear", "blocked"),
    (HOPPER, "xla", "linear", "linear"),
    (BLACKWELL, "mosaic", "blocked", "blocked"),
    (BLACKWELL, "auto", "linear", "linear")])
def test_scales_are_made_as_the_matmuls_read_them(
    device, backend_name, rows, columns, monkeypatch, tmp_path):
  monkeypatch.setattr(bring_up_record, "path", lambda kind: tmp_path / "none")
  cfg = meshes.config(expert_axis=None, data_axes=(), backend=backend_name)
  wanted = stage.make_stage(cfg, None, device).wanted("mxfp8", "mxfp8")
  assert (wanted["rows"], wanted["columns"]) == (rows, columns)
