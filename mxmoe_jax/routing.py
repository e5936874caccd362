"""Routing: which experts a token goes to, and with which weights.

    logits  = x @ router                     float32, highest precision
    scores  = softmax(logits) or sigmoid(logits)
    experts = top_k(scores + balance bias)   ties go to the lower id
    weights = scores[experts] (/ their sum) * routed_scaling

Legend: T tokens, E experts, k top_k. Ordinary JAX on global arrays: means and
counts are over all tokens of the mesh. An expert id of -1 is no expert:
padding tokens (mask) are neither routed nor counted.

Sources: Switch Transformer (arXiv 2101.03961, load-balancing loss), ST-MoE
(arXiv 2202.08906, z-loss), DeepSeek-V3 (arXiv 2412.19437, group-limited
top-k, bias for balance without a loss).
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from mxmoe_jax import config as config_lib

MoEConfig = config_lib.MoEConfig

_EPSILON = 1e-20  # keeps the sum of underflown sigmoid scores from 0 / 0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Routing:
  """Where each token goes.

  Attributes:
    experts: [T, k] int32 expert ids; -1 for no expert.
    weights: [T, k] float32 combine weights; 0 where there is no expert.
    load: [E] int32, rows routed to each expert.
    aux_loss: [] float32, load-balancing loss times its coefficient.
    z_loss: [] float32, router z-loss times its coefficient.
  """

  experts: jax.Array
  weights: jax.Array
  load: jax.Array
  aux_loss: jax.Array
  z_loss: jax.Array


def route(x: jax.Array, router: jax.Array, config: MoEConfig, *,
          mask: jax.Array | None = None,
          balance_bias: jax.Array | None = None) -> Routing:
  """Routes tokens.

  Args:
    x: [T, d_model], any float dtype; the matmul is float32.
    router: [d_model, E].
    config: the layer.
    mask: [T] bool, False for padding tokens; None if there are none.
    balance_bias: [E] float32, added to the scores for the choice only.
  """
  if mask is not None:  # a NaN in padding must not reach the router's gradient
    x = jnp.where(mask[:, None], x, 0)
  logits = router_logits(x, router)
  scores = router_scores(logits, config.score)
  experts = choose(lax.stop_gradient(scores), config, balance_bias)
  if mask is not None:
    experts = jnp.where(mask[:, None], experts, -1)
  weights = weigh(scores, experts, config)
  return Routing(
      experts, weights, load_per_expert(experts, config.num_experts),
      config.aux_loss_coef * load_balancing_loss(
          logits, experts, score=config.score, mask=mask),
      config.z_loss_coef * router_z_loss(logits, mask=mask))


@jax.checkpoint  # keeps x as it is for backward, not its float32 copy
def router_logits(x: jax.Array, router: jax.Array) -> jax.Array:
  """[T, E] float32 logits, multiplied in float32 at highest precision."""
  return jnp.matmul(x.astype(jnp.float32), router.astype(jnp.float32),
                    precision=lax.Precision.HIGHEST)


def router_scores(logits: jax.Array, score: str) -> jax.Array:
  """[T, E] scores in 0..1, softmax over the experts or sigmoid."""
  if score == "softmax":
    return jax.nn.softmax(logits, axis=-1)
  return jax.nn.sigmoid(logits)


def choose(scores: jax.Array, config: MoEConfig,
           balance_bias: jax.Array | None = None) -> jax.Array:
  """[T, k] int32 expert ids by score, best first, ties to the lower id."""
  tokens, experts = scores.shape
  if config.forced_balance:
    first = jnp.arange(tokens, dtype=jnp.int32)[:, None] * config.top_k
    return (first + jnp.arange(config.top_k, dtype=jnp.int32)) % experts
  if balance_bias is not None:
    scores = scores + lax.stop_gradient(balance_bias)
  if config.num_groups > 1:
    scores = _limit_groups(scores, config)
  return lax.top_k(scores, config.top_k)[1].astype(jnp.int32)


def _limit_groups(scores: jax.Array, config: MoEConfig) -> jax.Array:
  """Scores with -inf outside each token's best groups.

  A group's score is the sum of its two best experts (DeepSeek-V3).
  """
  tokens, experts = scores.shape
  grouped = scores.reshape(tokens, config.num_groups, -1)
  best = lax.top_k(grouped, min(2, grouped.shape[-1]))[0].sum(-1)
  chosen = lax.top_k(best, config.groups_per_token)[1]
  group = jnp.arange(config.num_groups)
  keep = jnp.any(chosen[:, :, None] == group, axis=1)
  return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(
      tokens, experts)


def weigh(scores: jax.Array, experts: jax.Array,
          config: MoEConfig) -> jax.Array:
  """[T, k] float32 combine weights of chosen experts.

  Args:
    scores: [T, E] scores, without any bias.
    experts: [T, k] ids; -1 weighs 0 and stays out of the sum.
    config: the layer.
  """
  weights = jnp.take_along_axis(scores, jnp.maximum(experts, 0), axis=-1)
  weights = jnp.where(experts >= 0, weights, 0.0)
  if config.renormalise:
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / (total + _EPSILON)
  return weights * config.routed_scaling


def load_per_expert(experts: jax.Array, num_experts: int) -> jax.Array:
  """[E] int32, how many rows each expert gets; ids of -1 are not counted."""
  hot = experts[..., None] == jnp.arange(num_experts)
  return jnp.sum(hot, axis=tuple(range(experts.ndim)), dtype=jnp.int32)


def load_balancing_loss(logits: jax.Array, experts: jax.Array, *,
                        score: str = "softmax",
                        mask: jax.Array | None = None) -> jax.Array:
  """E * sum over experts of (share of rows) * (mean probability).

  1 when balanced, E when collapsed. Sigmoid scores are normalised to sum to 1
  first (DeepSeek-V3). Gradients flow through the probabilities alone.

  Args:
    logits: [T, E] float32.
    experts: [T, k] ids; -1 is not counted.
    score: "softmax" or "sigmoid".
    mask: [T] bool, tokens that count.

  Returns:
    [] float32, without coefficient.
  """
  probability = router_scores(logits, score)
  if score == "sigmoid":
    total = jnp.sum(probability, axis=-1, keepdims=True)
    probability = probability / (total + _EPSILON)
  load = load_per_expert(experts, logits.shape[-1]).astype(jnp.float32)
  share = load / jnp.maximum(jnp.sum(load), 1.0)
  mean = _token_mean(probability, mask)
  return logits.shape[-1] * jnp.sum(lax.stop_gradient(share) * mean)


def router_z_loss(logits: jax.Array, *,
                  mask: jax.Array | None = None) -> jax.Array:
  """[] float32, mean over tokens of logsumexp(logits)^2, no coefficient."""
  return _token_mean(jnp.square(jax.nn.logsumexp(logits, axis=-1)), mask)


def _token_mean(values: jax.Array, mask: jax.Array | None) -> jax.Array:
  """Mean over the tokens (axis 0) that count; 0 if none does."""
  if mask is None:
    return jnp.sum(values, axis=0) / max(values.shape[0], 1)
  keep = mask.reshape(-1, *[1] * (values.ndim - 1))
  count = jnp.maximum(jnp.sum(mask, dtype=jnp.float32), 1.0)
  return jnp.sum(jnp.where(keep, values, 0.0), axis=0) / count


def update_balance_bias(bias: jax.Array, load: jax.Array,
                        rate: float) -> jax.Array:
  """The balance bias after one step: raised for experts below the mean load.

  Pure; call it once per optimizer step, outside the gradient, with the load
  summed over microbatches (it is global over a mesh already).

  Args:
    bias: [E] float32.
    load: [E] rows per expert, `stats.load`.
    rate: step, 1e-3 in DeepSeek-V3.

  Returns:
    [E] float32.
  """
  load = load.astype(jnp.float32)
  return bias + rate * jnp.sign(jnp.mean(load) - load)
