"""Training of one recipe: state, step and evaluation, each one jit.

    state, batch --loss and gradients, AdamW, balance bias--> state, metrics

The whole state is donated to the step. Gradients are those of the mean cross
entropy plus the layers' own losses; the cross entropy alone is reported. The
balance bias is moved once per step by the load of the whole batch.

With a mesh the batch is split over its data and expert axes, expert weights
and their moments over the expert axis, and the rest is on every device.
Gradient accumulation, pipeline and tensor parallelism are not here.
"""

from __future__ import annotations

from collections.abc import Callable
import contextlib
import dataclasses
import functools
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np
import optax

from experiments import experiment as experiment_lib
from experiments import model as model_lib
import mxmoe_jax

# Leaves whose first axis counts experts (mxmoe_jax.moe says their shapes).
_EXPERT_LEAVES = frozenset({"gate_up", "down"})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class TrainState:
  """All that a step changes.

  Attributes:
    step: ``[] int32``, optimizer steps taken.
    params: trained parameters.
    balance: balance biases; empty when the model has none.
    optimizer: optax's state.
  """

  step: jax.Array
  params: nnx.State
  balance: nnx.State
  optimizer: optax.OptState


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class StepMetrics:
  """What one step reports, each ``[]``.

  Attributes:
    loss: float32, mean cross entropy in nats per token.
    extra_loss: float32, balance and router losses.
    grad_norm: float32, global norm before clipping.
    load_imbalance: float32, rows of the busiest expert over the mean, in the
      layer where that is largest.
    dropped_rows: int32, over all layers.
  """

  loss: jax.Array
  extra_loss: jax.Array
  grad_norm: jax.Array
  load_imbalance: jax.Array
  dropped_rows: jax.Array


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
  """The jitted functions of one recipe.

  Attributes:
    initialise: makes the first `TrainState`.
    step: ``(state, batch) -> (state, StepMetrics)``; donates the state.
    evaluate: ``(state, batch) -> loss``, ``[] float32`` nats per token.
    place: puts a host batch ``[batch, time + 1] uint8`` on the devices.
    mesh: the mesh, or None on one device.
    explanation: which implementation runs each pass of a layer, and why.
  """

  initialise: Callable[[], TrainState]
  step: Any
  evaluate: Callable[[TrainState, jax.Array], jax.Array]
  place: Callable[[np.ndarray], jax.Array]
  mesh: jax.sharding.Mesh | None
  explanation: str

  def context(self) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which the functions find their mesh."""
    return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()


def make_schedule(
  config: experiment_lib.OptimizerConfig, steps: int
) -> optax.Schedule:
  """Returns linear warm-up from 0 and cosine decay over `steps` steps.

  A run so short that warm-up would be more than half of it warms up for half.
  """
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=config.learning_rate,
    warmup_steps=min(config.warmup_steps, steps // 2),
    decay_steps=steps,
    end_value=config.learning_rate * config.final_fraction,
  )


def make_optimizer(
  config: experiment_lib.OptimizerConfig, steps: int
) -> optax.GradientTransformation:
  """Returns clipped AdamW that decays matrices only."""
  return optax.chain(
    optax.clip_by_global_norm(config.max_grad_norm),
    optax.adamw(
      make_schedule(config, steps),
      b1=config.beta1,
      b2=config.beta2,
      weight_decay=config.weight_decay,
      mask=lambda params: jax.tree.map(lambda leaf: leaf.ndim > 1, params),
    ),
  )


def make_mesh(config: experiment_lib.MeshConfig) -> jax.sharding.Mesh | None:
  """Returns the mesh over the first devices, or None for one device.

  Raises:
    ValueError: there are too few devices.
  """
  if config.size == 1:
    return None
  found = jax.device_count()
  # A process none of whose devices is in the mesh would have nothing to do.
  if found < config.size or (jax.process_count() > 1 and found > config.size):
    raise ValueError(
      f"mesh {config.data} x {config.expert} needs {config.size} devices;"
      f" {found} found. Set --mesh.data and --mesh.expert to fit."
    )
  return jax.make_mesh(
    (config.data, config.expert),
    ("data", "expert"),
    axis_types=(jax.sharding.AxisType.Auto,) * 2,
    devices=jax.devices()[: config.size],
  )


def _cross_entropy(
  model: model_lib.Transformer, batch: jax.Array
) -> tuple[jax.Array, model_lib.LayerStats]:
  """Returns the mean loss of ``[batch, time + 1] uint8`` and the stats."""
  tokens = batch.astype(jnp.int32)
  logits, stats = model(tokens[:, :-1])
  losses = optax.softmax_cross_entropy_with_integer_labels(
    logits, tokens[:, 1:]
  )
  return jnp.mean(losses), stats


def _move_balance(
  model: model_lib.Transformer, load: jax.Array, rate: float
) -> nnx.State:
  """Returns the biases after one update by ``load [layers, experts]``."""
  for block, rows in zip(model.blocks, load, strict=True):
    bias = block.moe.balance_bias
    if bias is not None:
      bias[...] = mxmoe_jax.update_balance_bias(bias[...], rows, rate)
  return nnx.state(model, nnx.Not(nnx.Param))


def train_step(
  state: TrainState,
  batch: jax.Array,
  *,
  graph: nnx.GraphDef[model_lib.Transformer],
  optimizer: optax.GradientTransformation,
  balance_rate: float,
) -> tuple[TrainState, StepMetrics]:
  """Takes one optimizer step.

  Args:
    state: before the step.
    batch: ``[batch, time + 1] uint8``; inputs and, one later, targets.
    graph: the model's structure.
    optimizer: made by `make_optimizer`.
    balance_rate: step of the balance bias.

  Returns:
    The state after the step, and its metrics.
  """

  def total_loss(params: nnx.State) -> tuple[jax.Array, Any]:
    model = nnx.merge(graph, params, state.balance)
    loss, stats = _cross_entropy(model, batch)
    return loss + stats.extra_loss, (loss, stats)

  gradient = jax.value_and_grad(total_loss, has_aux=True)
  (_, (loss, stats)), grads = gradient(state.params)
  updates, moments = optimizer.update(grads, state.optimizer, state.params)
  params: Any = optax.apply_updates(state.params, updates)
  model = nnx.merge(graph, params, state.balance)
  load = stats.load.astype(jnp.float32)
  after = TrainState(
    step=state.step + 1,
    params=params,
    balance=_move_balance(model, stats.load, balance_rate),
    optimizer=moments,
  )
  return after, StepMetrics(
    loss=loss,
    extra_loss=stats.extra_loss,
    grad_norm=optax.tree.norm(grads),
    load_imbalance=jnp.max(jnp.max(load, axis=1) / jnp.mean(load, axis=1)),
    dropped_rows=jnp.sum(stats.dropped),
  )


def evaluate(
  state: TrainState,
  batch: jax.Array,
  *,
  graph: nnx.GraphDef[model_lib.Transformer],
) -> jax.Array:
  """Returns the mean loss of a batch in nats per token, ``[] float32``."""
  model = nnx.merge(graph, state.params, state.balance)
  return _cross_entropy(model, batch)[0]


def state_shardings(
  state: Any, mesh: jax.sharding.Mesh | None, *, fsdp: bool
) -> Any:
  """Returns where each leaf of a `TrainState` lies; None without a mesh.

  Args:
    state: the state or its shapes.
    mesh: with axes data and expert.
    fsdp: whether the second axis of expert weights is split over data.
  """
  if mesh is None:
    return None

  experts = PartitionSpec("expert", "data" if fsdp else None)

  def place(path: tuple[Any, ...], _: Any) -> NamedSharding:
    names = {getattr(entry, "key", None) for entry in path}
    over_experts = "moe" in names and names & _EXPERT_LEAVES
    return NamedSharding(mesh, experts if over_experts else PartitionSpec())

  return jax.tree_util.tree_map_with_path(place, state)


def build(
  experiment: experiment_lib.Experiment,
  recipe_name: experiment_lib.RecipeName,
) -> Program:
  """Returns the functions that train one recipe.

  Args:
    experiment: the experiment.
    recipe_name: one of its recipes.

  Raises:
    ValueError: the library refuses the configuration, or devices are missing.
    NotImplementedError: the backend asked for cannot run here.
  """
  mesh = make_mesh(experiment.mesh)
  layer = model_lib.moe_config(experiment.model, recipe_name, experiment.mesh)
  optimizer = make_optimizer(experiment.optimizer, experiment.steps)
  tokens = experiment.data.batch_size * experiment.data.sequence_length

  def make_model() -> model_lib.Transformer:
    rngs = nnx.Rngs(params=experiment.seed)
    return model_lib.Transformer(experiment.model, layer, rngs=rngs)

  def initialise() -> TrainState:
    _, params, balance = nnx.split(make_model(), nnx.Param, ...)
    return TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      balance=balance,
      optimizer=optimizer.init(params),
    )

  graph = nnx.graphdef(nnx.eval_shape(make_model))
  placed = state_shardings(
    jax.eval_shape(initialise), mesh, fsdp=experiment.mesh.fsdp
  )
  everywhere = NamedSharding(mesh, PartitionSpec()) if mesh else None
  step = functools.partial(
    train_step,
    graph=graph,
    optimizer=optimizer,
    balance_rate=experiment.optimizer.balance_rate,
  )
  return Program(
    initialise=jax.jit(initialise, out_shardings=placed),
    step=jax.jit(step, donate_argnums=0, out_shardings=(placed, everywhere)),
    evaluate=jax.jit(
      functools.partial(evaluate, graph=graph), out_shardings=everywhere
    ),
    place=functools.partial(place_batch, mesh=mesh),
    mesh=mesh,
    explanation=str(mxmoe_jax.explain(layer, tokens, mesh=mesh)),
  )


def place_batch(
  batch: np.ndarray, *, mesh: jax.sharding.Mesh | None
) -> jax.Array:
  """Puts a batch on the devices, split over all mesh axes.

  Args:
    batch: ``[batch, time + 1] uint8``, the whole batch on every process.
    mesh: the mesh, or None.
  """
  if mesh is None:
    return jnp.asarray(batch)
  sharding = NamedSharding(mesh, PartitionSpec(("data", "expert")))
  return jax.make_array_from_callback(
    batch.shape, sharding, lambda index: batch[index]
  )
