"""Activations and gradients of real text: the tiny model, trained for a moment.

`layer` has what the experts of its last block get, `products` the operands of
each grouped matmul that they make of it.
"""

import dataclasses
import functools
from typing import Any
from unittest import mock

from flax import nnx
import jax
import jax.numpy as jnp
import optax

from experiments import data, train
from experiments import model as model_lib
from experiments.configs import tiny_cpu
from experiments.experiment import DataConfig
import mxmoe_jax
from mxmoe_jax import debug, routing, weights
from mxmoe_jax import layer as layer_lib
from mxmoe_jax import stage as stage_lib

STEPS = 20
WINDOWS, LENGTH = 2, 64  # tokens of the captured step


@dataclasses.dataclass(frozen=True)
class Layer:
  """What the experts of a block get, and what their gradient starts from.

  Attributes:
    x: [tokens, d_model] bf16.
    dy: [tokens, d_model] bf16.
    params: of the layer; router float32, the rest bf16.
    config: exact MXFP8.
  """

  x: jax.Array
  dy: jax.Array
  params: dict[str, jax.Array]
  config: mxmoe_jax.MoEConfig


@functools.cache
def layer() -> Layer:
  """The last block's, after `STEPS` steps of bf16 training."""
  tiny = tiny_cpu.experiment()
  experiment = dataclasses.replace(
    tiny, steps=STEPS, checkpoint_every=0,
    data=DataConfig(sequence_length=LENGTH, batch_size=8),
  )  # fmt: skip
  corpus = data.read_corpus(experiment.data.heldout_every)
  batches = data.train_batches(corpus, experiment.data, experiment.seed)
  program = train.build(experiment, "bf16")
  state = program.initialise()
  for _ in range(STEPS):
    state, metrics = program.step(state, program.place(next(batches)))
    jax.block_until_ready(metrics)
  config = model_lib.moe_config(experiment.model, "mxfp8", experiment.mesh)
  model = model_lib.Transformer(experiment.model, config, rngs=nnx.Rngs(0))
  nnx.update(model, state.params)
  x, dy = _seen_by_last(model, jnp.asarray(next(batches)[:WINDOWS], jnp.int32))
  last = model.blocks[-1].moe
  names = ("router", "gate_up", "down")
  params = {name: getattr(last, name)[...] for name in names}
  params |= {n: params[n].astype(jnp.bfloat16) for n in names[1:]}
  return Layer(x, dy, params, config)


def _seen_by_last(model: Any, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
  """(x, dy) of the last block's experts for a batch [windows, length + 1]."""
  original, blocks = mxmoe_jax.MoE.__call__, len(model.blocks)

  def loss(probe):
    seen = []

    def tapped(self, x, *args, **options):
      y, stats = original(self, x, *args, **options)
      seen.append(x)
      return (y + probe if len(seen) == blocks else y), stats

    with mock.patch.object(mxmoe_jax.MoE, "__call__", tapped):
      logits, _ = model(tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(
      logits, tokens[:, 1:]
    )
    return jnp.mean(losses), seen[-1]

  shape = (*tokens[:, 1:].shape, model.config.d_model)
  dy, x = jax.jit(jax.grad(loss, has_aux=True))(jnp.zeros(shape, jnp.bfloat16))
  return tuple(a.reshape(-1, shape[-1]).astype(jnp.bfloat16) for a in (x, dy))


@functools.cache
def products() -> dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]]:
  """(arguments, options) of each call by operation, in the layer's order."""
  captured, found = layer(), {"grouped_matmul": [], "grouped_wgrad": []}

  def seen(name, arguments, options, result):
    del result
    if name in found:
      found[name].append((arguments, options))

  stage = stage_lib.make_stage(captured.config, None)
  stage = dataclasses.replace(stage, ops=debug.watch(stage.ops, seen))
  router = captured.params["router"]
  routed = routing.route(captured.x, router, captured.config)
  shared = (
    routed.weights,
    routed.experts,
    weights.expert_params(captured.params),
    weights.QuantizedWeights(),
  )
  _, _, kept = layer_lib.forward(stage, captured.x, *shared)
  layer_lib.backward(stage, captured.dy, kept, *shared)
  return found
