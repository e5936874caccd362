"""Meshes of host devices, layers on them, and their results by name."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from mxmoe_jax import arguments, layer
from mxmoe_jax import config as config_lib

TOKENS, D_MODEL, D_FF, EXPERTS, TOP_K = 256, 64, 96, 8, 2
AXES = ("data", "expert")


@functools.cache
def make_mesh(data: int, expert: int, *, explicit: bool = False):
  """A data x expert mesh of the first host devices."""
  kind = jax.sharding.AxisType.Explicit if explicit else (
      jax.sharding.AxisType.Auto)
  return jax.make_mesh((data, expert), AXES, axis_types=(kind, kind),
                       devices=jax.devices()[:data * expert])


def config(**changes) -> config_lib.MoEConfig:
  """The layer of these tests; biases and the balance loss included."""
  fields = dict(d_model=D_MODEL, d_ff=D_FF, num_experts=EXPERTS, top_k=TOP_K,
                aux_loss_coef=0.01, bias=True, expert_axis="expert",
                data_axes=("data",))
  return config_lib.MoEConfig(**(fields | changes))


@functools.cache
def inputs(tokens: int = TOKENS, d_ff: int = D_FF):
  """(x, dy, params) from one seed, bf16 numbers in float32 arrays."""
  rng = np.random.default_rng(7)
  shapes = arguments.parameter_shapes(config(d_ff=d_ff))
  params = {}
  for name, shape in shapes.items():
    fan_in = {"router": 0, "gate_up": 1, "down": 1}.get(name)
    scale = 0.1 if fan_in is None else shape[fan_in] ** -0.5
    params[name] = jnp.asarray(rng.standard_normal(shape) * scale,
                               jnp.float32)
  x, dy = (jnp.asarray(rng.standard_normal((tokens, D_MODEL)), jnp.bfloat16)
           .astype(jnp.float32) for _ in range(2))
  return x, dy, params


def place(params, mesh, cfg):
  """Parameters on a mesh, as the layer wants them."""
  matrices = P("expert", cfg.fsdp_axis)
  specs = {"router": P(), "gate_up": matrices, "down": matrices,
           "gate_up_bias": P("expert"), "down_bias": P("expert")}
  return {name: jax.device_put(w, NamedSharding(mesh, specs[name]))
          for name, w in params.items()}


@functools.cache
def step(cfg, mesh=None):
  """A jitted (x, dy, params, mask) -> outputs and gradients by name.

  Cached, so that tests of one layer compile it once.
  """

  @jax.jit
  def run(x, dy, params, mask=None):
    def objective(x, params):
      y, stats = layer.moe(x, params, cfg, mesh=mesh, mask=mask)
      return jnp.sum(y * dy) + stats.aux_loss, (y, stats)

    gradient = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
    (_, (y, stats)), (dx, grads) = gradient(x, params)
    return {"y": y, "dx": dx, "load": stats.load, "dropped": stats.dropped,
            "aux_loss": stats.aux_loss, **grads}

  return run


def run_layer(cfg, mesh=None, *, tokens: int = TOKENS):
  """Outputs and gradients of a layer on a mesh, as numpy arrays."""
  x, dy, params = inputs(tokens, cfg.d_ff)
  out = jax.block_until_ready(step(cfg, mesh)(x, dy, params))
  return {name: np.asarray(a) for name, a in out.items()}
