"""The environment that conftest.py promises reached jax."""

import jax
from jax import numpy as jnp


def test_eight_cpu_devices():
  assert jax.default_backend() == "cpu"
  assert jax.device_count() == 8


def test_a_collective_over_all_devices_completes():
  mesh = jax.make_mesh((8,), ("x",))
  rows = jax.device_put(jnp.arange(8), jax.NamedSharding(mesh, jax.P("x")))
  total = jax.jit(
    jax.shard_map(
      lambda x: jax.lax.psum(x, "x"),
      mesh=mesh,
      in_specs=jax.P("x"),
      out_specs=jax.P(),
    )
  )(rows)
  assert total.tolist() == [28]
