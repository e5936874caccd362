"""Small layers for tests on one device: inputs, and one jitted step."""

import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np

from mxmoe_jax import MoEConfig, arguments, moe, routing

TOKENS, D_MODEL, D_FF, EXPERTS, TOP_K = 384, 128, 96, 4, 2


def config(**changes) -> MoEConfig:
  """A small layer; widths differ, so that shapes tell arrays apart."""
  sizes = dict(d_model=D_MODEL, d_ff=D_FF, num_experts=EXPERTS, top_k=TOP_K)
  return MoEConfig(**(sizes | changes))


def normal(name: str, shape, dtype=jnp.bfloat16):
  """Normal numbers from a name."""
  return jax.random.normal(
    jax.random.key(zlib.crc32(name.encode())), shape, dtype
  )


def params(cfg: MoEConfig, dtype=jnp.bfloat16) -> dict[str, jax.Array]:
  """Normal parameters of variance 1 / fan-in; biases of deviation 0.3."""
  fan_in = dict(router=0, gate_up=1, down=1, shared_gate_up=0, shared_down=0)
  out = {}
  for name, shape in arguments.parameter_shapes(cfg).items():
    scale = shape[fan_in[name]] ** -0.5 if name in fan_in else 0.3
    kind = jnp.float32 if name == "router" else dtype
    out[name] = (scale * normal(name, shape, jnp.float32)).astype(kind)
  return out


def tokens(count: int = TOKENS, name: str = "x", width: int = D_MODEL):
  """[count, width] bf16."""
  return normal(name, (count, width))


@functools.partial(jax.jit, static_argnames="cfg")
def step(x, params, dy, cfg, mask=None, balance_bias=None, quantized=None):
  """(outputs by name, gradients included; stats) of one layer."""

  def apply(x, params):
    return moe(
      x,
      params,
      cfg,
      mask=mask,
      balance_bias=balance_bias,
      quantized=quantized,
    )

  y, pull, stats = jax.vjp(apply, x, params, has_aux=True)
  dx, grads = pull(dy.astype(y.dtype))
  return dict(y=y, x=dx, **grads), stats


def run(cfg: MoEConfig, **options):
  """(outputs and gradients as numpy by name, stats) on the usual inputs."""
  arrays = tokens(), params(cfg), tokens(name="dy")
  out, stats = step(*arrays, cfg, **options)
  return jax.tree.map(np.asarray, out), stats


def chosen(cfg: MoEConfig, balance_bias=None):
  """[T, k] ids of the usual inputs."""
  routed = routing.route(
    tokens(), params(cfg)["router"], cfg, balance_bias=balance_bias
  )
  return np.asarray(routed.experts)
