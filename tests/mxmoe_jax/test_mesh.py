"""The layer on meshes of host devices: a mesh never decides the numbers."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import mxmoe_jax
from mxmoe_jax import config as config_lib
from tests import tolerance
from tests.mxmoe_jax import meshes

Recipe = config_lib.Recipe
GRADIENTS = ("dx", "router", "gate_up", "down", "gate_up_bias", "down_bias")


@pytest.fixture(scope="module")
def alone():
  """The layer on one device, without a mesh."""
  return meshes.run_layer(meshes.config(expert_axis=None, data_axes=()))


def assert_same_routing(got, want):
  np.testing.assert_array_equal(got["load"], want["load"])
  np.testing.assert_array_equal(got["dropped"], want["dropped"])
  tolerance.assert_reordered(got["aux_loss"], want["aux_loss"])


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
def test_expert_parallelism_changes_nothing(alone, ep):
  mesh = meshes.make_mesh(1, ep)
  got = meshes.run_layer(meshes.config(), mesh)
  assert_same_routing(got, alone)
  for name in ("y", *GRADIENTS):
    tolerance.assert_reordered(got[name], alone[name])


def test_one_by_one_mesh_equals_no_mesh(alone):
  got = meshes.run_layer(meshes.config(), meshes.make_mesh(1, 1))
  for name, want in alone.items():
    np.testing.assert_array_equal(got[name], want, err_msg=name)


def test_data_axis_and_fsdp(alone):
  """Other 32 rows share a wgrad block: equal to the floors of SQNR."""
  floors = tolerance.layer_floors(Recipe())
  cfg = meshes.config(d_ff=64, fsdp_axis="data")
  want = meshes.run_layer(
      meshes.config(d_ff=64, expert_axis=None, data_axes=()))
  for got in (meshes.run_layer(cfg, meshes.make_mesh(2, 4)),
              meshes.run_layer(meshes.config(d_ff=64),
                               meshes.make_mesh(4, 2))):
    assert_same_routing(got, want)
    tolerance.assert_reordered(got["y"], want["y"])
    tolerance.assert_reordered(got["dx"], want["dx"])
    for name in GRADIENTS:
      assert tolerance.sqnr(got[name], want[name]) >= floors["experts"]


@pytest.mark.parametrize("recipe", [
    Recipe.bf16(), Recipe.mxfp8(combine="mxfp8", dispatch_grad="mxfp8"),
    Recipe.mxfp8(dispatch="bf16", combine_grad="bf16", weight_block="32x32",
                 save_preactivations="recompute", save_hidden="recompute"),
], ids=lambda recipe: recipe.name)
def test_recipe_decides_the_numbers(recipe):
  want = meshes.run_layer(
      meshes.config(recipe=recipe, expert_axis=None, data_axes=()))
  got = meshes.run_layer(meshes.config(recipe=recipe),
                         meshes.make_mesh(1, 4))
  for name in ("y", *GRADIENTS):
    tolerance.assert_reordered(got[name], want[name])


@pytest.mark.parametrize("explicit", [False, True], ids=["auto", "explicit"])
def test_mesh_in_context_under_the_users_jit(alone, explicit):
  """x [batch, sequence, d_model] split over its batch; shardings come back."""
  mesh, cfg = meshes.make_mesh(2, 4, explicit=explicit), meshes.config()
  x, dy, params = meshes.inputs()
  batch = NamedSharding(mesh, P(("data", "expert")))
  shape = (16, meshes.TOKENS // 16, meshes.D_MODEL)
  with jax.set_mesh(mesh):
    x, dy = (jax.device_put(a.reshape(shape), batch) for a in (x, dy))
    got = jax.block_until_ready(
        meshes.step(cfg)(x, dy, meshes.place(params, mesh, cfg)))
  assert got["y"].sharding.is_equivalent_to(batch, 3)
  assert got["dx"].sharding.is_equivalent_to(batch, 3)
  experts = NamedSharding(mesh, P("expert"))
  assert got["gate_up"].sharding.is_equivalent_to(experts, 4)
  for name in ("y", "dx"):
    tolerance.assert_reordered(
        np.asarray(got[name]).reshape(alone[name].shape), alone[name])
  assert tolerance.sqnr(got["down"], alone["down"]) >= 20.5


def one_expert(expert: int):
  """Parameters whose router sends every token to two given experts."""
  x, dy, params = meshes.inputs()
  x = x.at[:, 0].set(4.0)
  router = jnp.zeros_like(params["router"]).at[0, expert].set(8.0)
  router = router.at[0, (expert + 1) % meshes.EXPERTS].set(4.0)
  return x, dy, params | {"router": router}


@pytest.mark.parametrize("expert", [0, 7])
def test_all_tokens_on_one_pair_of_experts(expert):
  """One rank gets everything, another nothing; dropless is right."""
  args = one_expert(expert)
  want = meshes.step(meshes.config(expert_axis=None, data_axes=()))(*args)
  got = jax.block_until_ready(
      meshes.step(meshes.config(), meshes.make_mesh(1, 8))(*args))
  assert int(jnp.sum(got["load"] > 0)) == 2
  assert int(jnp.sum(got["dropped"])) == 0
  for name in ("y", *GRADIENTS):
    tolerance.assert_reordered(got[name], want[name])
  idle = [e for e in range(8) if e not in (expert, (expert + 1) % 8)]
  np.testing.assert_array_equal(np.asarray(got["down"])[idle], 0)


def test_a_rank_without_tokens():
  """Masked tokens on one rank: nothing is routed from it, or counted."""
  x, dy, params = meshes.inputs()
  mask = jnp.arange(meshes.TOKENS) >= meshes.TOKENS // 4
  alone = meshes.config(expert_axis=None, data_axes=())
  want = meshes.step(alone)(x, dy, params, mask)
  got = jax.block_until_ready(
      meshes.step(meshes.config(), meshes.make_mesh(1, 4))(x, dy, params,
                                                           mask))
  np.testing.assert_array_equal(got["load"], want["load"])
  assert int(jnp.sum(got["load"])) == meshes.TOP_K * int(jnp.sum(mask))
  np.testing.assert_array_equal(np.asarray(got["y"])[~np.asarray(mask)], 0)
  for name in ("y", *GRADIENTS):
    tolerance.assert_reordered(got[name], want[name])


def expected_drops(ids, ep: int, room: int):
  """Drops per expert by hand: each rank takes (source, expert, position)."""
  local = meshes.EXPERTS // ep
  dropped = np.zeros(meshes.EXPERTS, int)
  kept_slots = np.zeros(ids.size, bool)
  for rank in range(ep):
    taken = 0
    for source in range(ep):
      own = np.arange(source * ids.size // ep, (source + 1) * ids.size // ep)
      for expert in range(rank * local, (rank + 1) * local):
        for slot in own[ids.reshape(-1)[own] == expert]:
          kept_slots[slot] = taken < room
          dropped[expert] += taken >= room
          taken += 1
  return dropped, kept_slots.reshape(ids.shape).all(-1)


def test_buffer_factor_drops_as_counted_by_hand():
  """Other tokens stay the same to the bit."""
  x, dy, params = meshes.inputs()
  ep, mesh = 4, meshes.make_mesh(1, 4)
  skewed = params | {"router": params["router"].at[0, 1].set(2.0)}
  x = x.at[:, 0].set(1.5)
  cfg = meshes.config(buffer_factor=1.5)
  whole = meshes.step(meshes.config(), mesh)(x, dy, skewed)
  got = jax.block_until_ready(meshes.step(cfg, mesh)(x, dy, skewed))
  logits = np.asarray(x, np.float64) @ np.asarray(skewed["router"],
                                                  np.float64)
  ids = np.argsort(-logits, axis=1, kind="stable")[:, :meshes.TOP_K]
  room = int(1.5 * meshes.TOKENS // ep * meshes.TOP_K)
  dropped, complete = expected_drops(ids, ep, room)
  assert dropped.sum() > 0
  np.testing.assert_array_equal(got["dropped"], dropped)
  np.testing.assert_array_equal(np.asarray(got["y"])[complete],
                                np.asarray(whole["y"])[complete])
  assert np.any(np.asarray(got["y"])[~complete]
                != np.asarray(whole["y"])[~complete])
  assert all(np.isfinite(got[name]).all() for name in GRADIENTS)


def test_quantized_weights_on_a_mesh(alone):
  cfg, mesh = meshes.config(), meshes.make_mesh(1, 4)
  x, _, params = meshes.inputs()
  quantized = mxmoe_jax.quantize_weights(params, cfg)
  y, _ = jax.jit(lambda *a: mxmoe_jax.moe(*a[:2], cfg, quantized=a[2],
                                          mesh=mesh))(x, params, quantized)
  tolerance.assert_reordered(jax.block_until_ready(y), alone["y"])


def test_bytes_of_the_wire_are_in_explain():
  """ep 4 x data 2, DeepSeek-V3 widths: 7424 bytes a row, 14464 in bf16."""
  cfg = config_lib.MoEConfig(
      d_model=7168, d_ff=2048, num_experts=256, top_k=8,
      expert_axis="expert", data_axes=("data",), buffer_factor=1.5)
  told = mxmoe_jax.explain(cfg, 8192, mesh=meshes.make_mesh(2, 4))
  assert told.tokens == 1024
  assert told.rows == 12288 + 64 * 127 + -(12288 + 64 * 127) % 128
  sent = 1024 * 8 + told.rows
  assert told.buffer_bytes["wire, dispatch"] == 7424 * sent
  assert told.buffer_bytes["wire, combine"] == 14464 * sent
