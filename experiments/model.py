"""A small decoder-only transformer with mixture-of-experts layers.

    tokens [batch, time] int32
     | embed                       x [batch, time, d_model]
     | x + attention(norm(x))      RoPE, causal        | num_layers
     | x + MoE(norm(x))            mxmoe_jax.MoE       |  times
     | head(norm(x))               logits [batch, time, vocabulary] float32

Master parameters are float32 and are cast where they are used; activations are
bfloat16; norms, rotary angles and logits are float32. Dropout, padding masks
and generation are not here: every batch is full text.
"""

from __future__ import annotations

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from experiments import experiment as experiment_lib
import mxmoe_jax

# Added to the mean square inside a norm, so that a zero row stays finite.
_NORM_EPSILON = 1e-6

# Standard deviation of the embedding and of the head.
_EMBEDDING_SCALE = 0.02


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class LayerStats:
  """What the MoE layers say about one batch.

  Attributes:
    load: ``[num_layers, num_experts] int32``, rows sent to each expert.
    dropped: ``[num_layers, num_experts] int32``, rows left out.
    extra_loss: ``[] float32``, balance and router losses, times their
      coefficients, over all layers.
  """

  load: jax.Array
  dropped: jax.Array
  extra_loss: jax.Array


def recipe(name: experiment_lib.RecipeName) -> mxmoe_jax.Recipe:
  """Returns the preset of that name."""
  presets: dict[str, Callable[[], mxmoe_jax.Recipe]] = {
    "bf16": mxmoe_jax.Recipe.bf16,
    "mxfp8": mxmoe_jax.Recipe.mxfp8,
    "mxfp8_bf16_wgrad": mxmoe_jax.Recipe.mxfp8_bf16_wgrad,
    "folded": functools.partial(mxmoe_jax.Recipe.mxfp8, hopper="folded"),
  }
  return presets[name]()


def moe_config(
  config: experiment_lib.ModelConfig,
  recipe_name: experiment_lib.RecipeName,
  mesh: experiment_lib.MeshConfig,
) -> mxmoe_jax.MoEConfig:
  """Returns the config of one MoE layer.

  Args:
    config: the transformer.
    recipe_name: a preset of `mxmoe_jax.Recipe`.
    mesh: its axes are named to the layer only when they are in use.

  Raises:
    ValueError: the library refuses the combination.
  """
  meshed = mesh.size > 1
  return mxmoe_jax.MoEConfig(
    d_model=config.d_model,
    d_ff=config.d_ff,
    num_experts=config.num_experts,
    top_k=config.top_k,
    score=config.score,
    renormalise=config.renormalise,
    num_groups=config.num_groups,
    groups_per_token=config.groups_per_token,
    routed_scaling=config.routed_scaling,
    balance_bias=config.balance_bias,
    aux_loss_coef=config.aux_loss_coef,
    z_loss_coef=config.z_loss_coef,
    d_ff_shared=config.d_ff_shared,
    expert_axis="expert" if meshed else None,
    data_axes=("data",) if meshed else (),
    fsdp_axis="data" if meshed and mesh.fsdp else None,
    buffer_factor=config.buffer_factor,
    recipe=recipe(recipe_name),
    backend=config.backend,
    param_dtype=jnp.dtype(config.param_dtype),
  )


def rotate(x: jax.Array, base: float) -> jax.Array:
  """Turns the halves of each head by angles that grow with position (RoPE).

  Args:
    x: ``[batch, time, heads, head_dim]``, head_dim even.
    base: base of the frequencies.

  Returns:
    Same shape and dtype as `x`; a rotation, so norms are kept.

  Source: Su et al., RoFormer, arXiv:2104.09864, equation 34, pairing channel
  i with i + head_dim / 2.
  """
  half = x.shape[-1] // 2
  frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
  angle = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * frequency
  cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
  left, right = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  turned = (left * cos - right * sin, right * cos + left * sin)
  return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _embed(embedding: nnx.Embed, tokens: jax.Array) -> jax.Array:
  """The embedding of each token, as a product with one-hot rows.

  The numbers are those of a gather, but the gradient is a product too. That of
  a gather adds bf16 rows by atomics: with a byte as a token most of them meet
  in few rows, and a GPU spent half of a training step there.
  """
  one_hot = jax.nn.one_hot(tokens, embedding.num_embeddings, dtype=jnp.bfloat16)
  return one_hot @ embedding.embedding[...].astype(jnp.bfloat16)


class Attention(nnx.Module):
  """Causal multi-head self-attention with rotary positions."""

  def __init__(
    self, config: experiment_lib.ModelConfig, *, rngs: nnx.Rngs
  ) -> None:
    """Initialises; `rngs` needs a `params` stream."""
    self.num_heads = config.num_heads
    self.rope_base = config.rope_base
    width = config.d_model
    self.qkv = _linear(width, 3 * width, config, rngs)
    self.out = _linear(width, width, config, rngs)

  def __call__(self, x: jax.Array) -> jax.Array:
    """Maps ``[batch, time, d_model]`` to the same shape and dtype."""
    batch, time, width = x.shape
    heads = (batch, time, self.num_heads, width // self.num_heads)
    query, key, value = (
      part.reshape(heads) for part in jnp.split(self.qkv(x), 3, axis=-1)
    )
    query = rotate(query, self.rope_base)
    key = rotate(key, self.rope_base)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    return self.out(mixed.reshape(x.shape))


class Block(nnx.Module):
  """Attention and experts, each after a norm and added to the stream."""

  def __init__(
    self,
    config: experiment_lib.ModelConfig,
    layer: mxmoe_jax.MoEConfig,
    *,
    rngs: nnx.Rngs,
  ) -> None:
    """Initialises; `rngs` needs a `params` stream."""
    self.attention_norm = _norm(config, rngs)
    self.attention = Attention(config, rngs=rngs)
    self.moe_norm = _norm(config, rngs)
    self.moe = mxmoe_jax.MoE(layer, rngs=rngs)

  def __call__(self, x: jax.Array) -> tuple[jax.Array, LayerStats]:
    """Maps ``[batch, time, d_model]`` to the same, and this layer's stats."""
    x = x + self.attention(self.attention_norm(x))
    update, stats = self.moe(self.moe_norm(x))
    extra = stats.aux_loss + stats.z_loss
    return x + update, LayerStats(stats.load, stats.dropped, extra)


class Transformer(nnx.Module):
  """The language model; see the module's picture."""

  def __init__(
    self,
    config: experiment_lib.ModelConfig,
    layer: mxmoe_jax.MoEConfig,
    *,
    rngs: nnx.Rngs,
  ) -> None:
    """Initialises.

    Args:
      config: the transformer.
      layer: every block's experts, from `moe_config`.
      rngs: needs a `params` stream.
    """
    self.config = config
    scale = nnx.initializers.normal(_EMBEDDING_SCALE)
    self.embedding = nnx.Embed(
      experiment_lib.VOCABULARY,
      config.d_model,
      embedding_init=scale,
      dtype=jnp.bfloat16,
      param_dtype=jnp.dtype(config.param_dtype),
      rngs=rngs,
    )
    self.blocks = nnx.List(
      Block(config, layer, rngs=rngs) for _ in range(config.num_layers)
    )
    self.final_norm = _norm(config, rngs)
    self.head = (
      None
      if config.tied_head
      else _linear(
        config.d_model, experiment_lib.VOCABULARY, config, rngs, init=scale
      )
    )

  def __call__(self, tokens: jax.Array) -> tuple[jax.Array, LayerStats]:
    """Predicts every next token.

    Args:
      tokens: ``[batch, time] int32`` below the vocabulary's size.

    Returns:
      logits ``[batch, time, vocabulary] float32``, and the stats of all
      layers.
    """
    x = _embed(self.embedding, tokens)
    call = _call_recomputed if self.config.remat else Block.__call__
    if self.config.scan_layers:
      x, layers = _scan(call, list(self.blocks), x)
    else:
      layers = []
      for block in self.blocks:
        x, stats = call(block, x)
        layers.append(stats)
    x = self.final_norm(x)
    logits = self.embedding.attend(x) if self.head is None else self.head(x)
    return logits.astype(jnp.float32), LayerStats(
      load=jnp.stack([stats.load for stats in layers]),
      dropped=jnp.stack([stats.dropped for stats in layers]),
      extra_loss=jnp.sum(jnp.stack([stats.extra_loss for stats in layers])),
    )


def _call_recomputed(
  block: Block, x: jax.Array
) -> tuple[jax.Array, LayerStats]:
  """Calls a block that saves its input alone for backward."""
  graph, state = nnx.split(block)
  call = jax.checkpoint(lambda state, x: nnx.merge(graph, state)(x))
  return call(state, x)


def _scan(
  call: Callable[..., Any], blocks: list[Block], x: jax.Array
) -> tuple[jax.Array, list[LayerStats]]:
  """Calls equal blocks one after another as one compiled loop."""
  graph = nnx.graphdef(blocks[0])
  states = [nnx.state(block) for block in blocks]
  stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)
  x, stats = jax.lax.scan(
    lambda x, state: call(nnx.merge(graph, state), x), x, stacked
  )
  return x, [
    jax.tree.map(lambda leaf, i=i: leaf[i], stats) for i in range(len(blocks))
  ]


def flops_per_token(
  config: experiment_lib.ModelConfig, sequence_length: int
) -> int:
  """Returns the operations of training on one token, nothing recomputed.

  6 for each weight that a token meets in a matmul (its top_k experts only),
  and 6 * time * d_model a layer for causal attention: each of the two products
  meets half the window on average.
  """
  width = config.d_model
  experts = 3 * width * (config.top_k * config.d_ff + config.d_ff_shared)
  layer = 4 * width * width + width * config.num_experts + experts
  attention = sequence_length * width
  head = width * experiment_lib.VOCABULARY
  return 6 * (config.num_layers * (layer + attention) + head)


def _linear(
  inputs: int,
  outputs: int,
  config: experiment_lib.ModelConfig,
  rngs: nnx.Rngs,
  init: nnx.Initializer | None = None,
) -> nnx.Linear:
  """Returns a matmul without bias, LeCun-normal unless `init` is given."""
  return nnx.Linear(
    inputs,
    outputs,
    use_bias=False,
    kernel_init=init or nnx.initializers.lecun_normal(),
    dtype=jnp.bfloat16,
    param_dtype=jnp.dtype(config.param_dtype),
    rngs=rngs,
  )


def _norm(config: experiment_lib.ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
  """Returns an RMS norm over d_model."""
  return nnx.RMSNorm(
    config.d_model,
    epsilon=_NORM_EPSILON,
    dtype=jnp.bfloat16,
    param_dtype=jnp.dtype(config.param_dtype),
    rngs=rngs,
  )
