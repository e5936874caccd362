"""Meshes and shardings that do not fit are refused before any step runs."""

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import pytest

import mxmoe_jax
from mxmoe_jax import sharding
from tests.mxmoe_jax import meshes


def test_no_axes_or_no_mesh_means_no_sharding():
  mesh = meshes.make_mesh(1, 2)
  alone = meshes.config(expert_axis=None, data_axes=())
  assert sharding.resolve(alone, mesh) is None
  assert sharding.resolve(meshes.config(), None) is None


def test_resolve_takes_the_mesh_in_context():
  with jax.set_mesh(meshes.make_mesh(2, 4)):
    found = sharding.resolve(meshes.config(), None)
  assert found is not None
  assert (found.ep, found.token_shards) == (4, 8)
  assert found.tokens == P(("data", "expert"))


def test_experts_must_divide_over_the_axis():
  cfg = meshes.config(num_experts=6)
  with pytest.raises(ValueError, match="num_experts=6 over 4 devices"):
    mxmoe_jax.MoE(cfg, rngs=nnx.Rngs(0), mesh=meshes.make_mesh(1, 4))


def test_axis_must_be_in_the_mesh():
  cfg = meshes.config(expert_axis="model")
  with pytest.raises(ValueError, match=r"\['model'\] are not in the mesh"):
    sharding.resolve(cfg, meshes.make_mesh(1, 4))


def test_tokens_must_divide_over_the_mesh():
  x, _, params = meshes.inputs()
  with pytest.raises(ValueError, match="63 tokens over 2 devices.*to 64"):
    mxmoe_jax.moe(x[:63], params, meshes.config(),
                  mesh=meshes.make_mesh(1, 2))


def test_fsdp_shards_must_hold_whole_blocks():
  cfg = meshes.config(fsdp_axis="data")  # d_ff = 96 over 2
  with pytest.raises(ValueError, match="d_ff must be a multiple of 2 . 32"):
    sharding.resolve(cfg, meshes.make_mesh(2, 4))


def test_buffer_factor_must_leave_room_for_a_tile():
  x, _, params = meshes.inputs()
  cfg = meshes.config(buffer_factor=0.5)
  with pytest.raises(ValueError, match="room for 32 rows per device"):
    mxmoe_jax.moe(x, params, cfg, mesh=meshes.make_mesh(1, 8))


def test_explicit_mesh_refuses_another_sharding_of_x():
  x, _, params = meshes.inputs()
  cfg, mesh = meshes.config(), meshes.make_mesh(2, 4, explicit=True)
  with jax.set_mesh(mesh):
    x = jax.device_put(x, NamedSharding(mesh, P("expert")))
    with pytest.raises(ValueError, match="x.256, 64. must be sharded as"):
      mxmoe_jax.moe(x, meshes.place(params, mesh, cfg), cfg)


def test_explicit_mesh_refuses_another_sharding_of_weights():
  x, _, params = meshes.inputs()
  cfg, mesh = meshes.config(), meshes.make_mesh(2, 4, explicit=True)
  with jax.set_mesh(mesh):
    x = jax.device_put(x, NamedSharding(mesh, P(("data", "expert"))))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    with pytest.raises(ValueError, match="'gate_up'.*must be sharded as"):
      mxmoe_jax.moe(x, params, cfg)


def test_parameters_are_annotated_only_when_asked():
  cfg = meshes.config()
  plain = mxmoe_jax.MoE(cfg, rngs=nnx.Rngs(0))
  assert all(v.get_metadata().get("out_sharding") is None
             for _, v in nnx.to_flat_state(nnx.state(plain, nnx.Param)))
  mesh = meshes.make_mesh(2, 4)
  with jax.set_mesh(mesh):
    named = mxmoe_jax.MoE(cfg, rngs=nnx.Rngs(0),
                          axis_names=sharding.parameter_axes(cfg))
  experts = NamedSharding(mesh, P("expert"))
  assert named.gate_up[...].sharding.is_equivalent_to(experts, 4)
  with pytest.raises(ValueError, match="one name .or None. per axis"):
    mxmoe_jax.MoE(cfg, rngs=nnx.Rngs(0), axis_names={"down": ("expert",)})


def test_module_on_a_mesh_equals_the_module_without():
  cfg, mesh = meshes.config(), meshes.make_mesh(2, 4)
  x = meshes.inputs()[0].astype(jnp.bfloat16)
  alone = mxmoe_jax.MoE(cfg, rngs=nnx.Rngs(0))
  spread = mxmoe_jax.MoE(cfg, rngs=nnx.Rngs(0), mesh=mesh)
  want, _ = nnx.jit(lambda m, x: m(x))(alone, x)
  got, _ = jax.block_until_ready(nnx.jit(lambda m, x: m(x))(spread, x))
  assert jnp.array_equal(got, want)


def test_grouped_matmul_refuses_operands_split_on_an_explicit_mesh():
  mesh = meshes.make_mesh(1, 2, explicit=True)
  with jax.set_mesh(mesh):
    x = jax.device_put(jnp.ones((64, 32)), NamedSharding(mesh, P("expert")))
    with pytest.raises(NotImplementedError, match="inside jax.shard_map"):
      mxmoe_jax.grouped_matmul(x, jnp.ones((2, 32, 32)), jnp.array([32, 32]))
