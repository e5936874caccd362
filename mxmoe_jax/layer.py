"""The mixture-of-experts layer, whole: open this file first.

    x [..., d_model]
     | route                 routing.py      float32, global
     | quantize              stage.py        each token once, 1x32
     | exchange              exchange.py     rows land expert-major, aligned
     | up, activate, down    experts.py      grouped matmuls and SwiGLU
     | exchange back         exchange.py
     | combine               permute.py      float32 sum over top_k
    y [..., d_model]

From quantize to combine is one custom_vjp; its forward and its backward are one
shard_map each, over the whole mesh, so nothing is differentiated through a
shard_map. `backward` is the same picture read upwards. The recipe decides what
is MXFP8.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from mxmoe_jax import (
  arguments,
  exchange,
  experts,
  matmul,
  permute,
  residuals,
  routing,
)
from mxmoe_jax import config as config_lib
from mxmoe_jax import sharding as sharding_lib
from mxmoe_jax import stage as stage_lib
from mxmoe_jax import weights as weights_lib

MoEConfig = config_lib.MoEConfig
QuantizedWeights = weights_lib.QuantizedWeights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MoEStats:
  """What a layer reports; all arrays, over the whole mesh.

  Attributes:
    load: [E] int32, rows routed to each expert.
    dropped: [E] int32, rows of each expert that found no room.
    aux_loss: [] float32, load-balancing loss times its coefficient.
    z_loss: [] float32, router z-loss times its coefficient.
  """

  load: jax.Array
  dropped: jax.Array
  aux_loss: jax.Array
  z_loss: jax.Array


def moe(x: jax.Array, params: dict[str, jax.Array], config: MoEConfig, *,
        mask: jax.Array | None = None, balance_bias: jax.Array | None = None,
        quantized: QuantizedWeights | None = None,
        mesh: sharding_lib.Mesh | None = None
        ) -> tuple[jax.Array, MoEStats]:
  """Applies a mixture-of-experts layer.

  Args:
    x: [..., d_model] bf16 or float32.
    params: router [d_model, E] float32, gate_up [E, d_model, 2, d_ff], down
      [E, d_ff, d_model]; with config.bias gate_up_bias [E, 2, d_ff] and
      down_bias [E, d_model]; with config.d_ff_shared shared_gate_up
      [d_model, 2, d_ff_shared] and shared_down [d_ff_shared, d_model].
    config: the layer.
    mask: [...] bool, False for padding tokens: not routed, not counted.
    balance_bias: [E] float32, with config.balance_bias.
    quantized: MXFP8 copies of the expert weights; gradients go to params.
    mesh: the mesh of config's axes; default is the mesh in context.

  Returns:
    y [..., d_model] of x's dtype, and MoEStats. Add both losses to yours.

  Raises:
    ValueError, TypeError: an argument does not fit the config or the mesh.
    NotImplementedError: the backend cannot run here, or under vmap.
  """
  sharding = sharding_lib.resolve(config, mesh)
  arguments.check(x, params, config, mask, balance_bias, quantized, sharding)
  tokens = x.reshape(-1, config.d_model)
  routed = routing.route(
      tokens, params["router"], config, balance_bias=balance_bias,
      mask=None if mask is None else mask.reshape(-1))
  mixed: Any = mixture(
      (config, sharding), tokens.astype(config.dtype), routed.weights,
      routed.experts, weights_lib.expert_params(params),
      quantized or QuantizedWeights())
  y, dropped = mixed
  y = experts.add_shared(y, tokens, params, config)
  stats = MoEStats(routed.load, dropped, routed.aux_loss, routed.z_loss)
  return y.reshape(x.shape).astype(x.dtype), stats


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def mixture(static, x, weights, ids, params, quantized) -> Any:
  """y[t] = sum over j of weights[t, j] * expert ids[t, j] of x[t].

  Args:
    static: (MoEConfig, Sharding or None).
    x: [T, d_model] bf16.
    weights: [T, k] float32 combine weights.
    ids: [T, k] int32 expert ids, -1 for none.
    params: expert weights, see `moe`.
    quantized: their MXFP8 copies, or empty.

  Returns:
    y [T, d_model] bf16; dropped [E] int32.
  """
  return _mixture_fwd(static, x, weights, ids, params, quantized)[0]


def _mixture_fwd(static, *primals):
  args: Any = matmul.refuse_vmap(primals)
  tokens, local, views = sharding_lib.specs(static[1], args[3])
  y, dropped, kept = sharding_lib.run(
      functools.partial(forward, stage_lib.make_stage(*static)), static[1],
      (*[tokens] * 3, local, views), (tokens, P(), tokens), *args)
  return (y, dropped), (kept, primals[1:])  # as given: a scan keeps no copy


def _mixture_bwd(static, saved, cotangents):
  kept, (weights, ids, params, quantized) = saved
  tokens, local, views = sharding_lib.specs(static[1], params)
  dx, dweights, grads = sharding_lib.run(
      functools.partial(backward, stage_lib.make_stage(*static)), static[1],
      (*[tokens] * 4, local, views), (tokens, tokens, local),
      cotangents[0], kept, weights, ids, params, quantized)
  return dx, dweights, None, grads, None


mixture.defvjp(_mixture_fwd, _mixture_bwd)


def forward(stage, x, weights, ids, params, quantized):
  """One device: (y, dropped, residuals)."""
  recipe, axis = stage.recipe, stage.expert_axis
  counts = exchange.gather_counts(ids, stage.config, axis)
  plan = exchange.make_plan(ids, counts, stage.config, axis)
  sent = stage.quantize_leg(x, recipe.dispatch)
  received, row_weights = exchange.to_experts(
      sent, weights, plan, stage.ops, folded=stage.folds(recipe.forward))
  rows = stage_lib.arrived(received, stage)
  pre = experts.up(rows, params, quantized, plan.layout, stage)
  hidden = experts.activate(pre, row_weights, params, plan.layout, stage,
                            rows=True, columns=residuals.keeps_hidden(stage))
  out = experts.down(hidden, row_weights, params, quantized, plan.layout,
                     stage)
  sent = stage.quantize_leg(out, recipe.combine)
  home, _ = exchange.to_tokens(sent, row_weights, plan, stage.ops)
  kept = residuals.keep(rows, pre, hidden, row_weights, counts, stage)
  y = permute.combine(home).astype(x.dtype)
  return y, stage.sum_data(plan.dropped), kept


def backward(stage, dy, kept, weights, ids, params, quantized):
  """One device: gradients of (x, weights, params)."""
  recipe, axis = stage.recipe, stage.expert_axis
  plan = exchange.make_plan(ids, kept.counts[0], stage.config, axis)
  sent = stage.quantize_leg(dy, recipe.combine_grad, grad=True)
  received, _ = exchange.to_experts(
      sent, weights, plan, stage.ops, folded=stage.folds(recipe.input_grad))
  dy_rows = stage_lib.arrived(received, stage, grad=True)
  pre, hidden = residuals.restore(kept, params, quantized, plan.layout, stage)
  dh, down_grads = experts.down_backward(
      dy_rows, hidden, kept.row_weights, params, quantized, plan.layout,
      stage)
  dpre, drow_weights = experts.activate_backward(
      dh, dy_rows, pre, kept.row_weights, params, plan.layout, stage)
  dx_rows, up_grads = experts.up_backward(
      dpre, kept.rows, params, quantized, plan.layout, stage)
  sent = stage.quantize_leg(dx_rows, recipe.dispatch_grad, grad=True)
  home, dweights = exchange.to_tokens(sent, drow_weights, plan, stage.ops)
  grads = stage.reduce_gradients(down_grads | up_grads, params)
  return permute.combine(home).astype(dy.dtype), dweights, grads

