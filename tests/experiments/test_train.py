"""The step: learns, moves the balance bias, places arrays on a mesh."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import experiment as experiment_lib
from experiments import train
from tests.experiments import shrunken

BATCH = np.random.default_rng(0).integers(0, 256, (4, 17)).astype(np.uint8)


@pytest.fixture(scope="module")
def program():
  return train.build(shrunken.experiment(steps=30), "mxfp8")


def test_a_batch_seen_often_is_learnt(program):
  state = program.initialise()
  before = float(program.evaluate(state, program.place(BATCH)))
  losses = []
  for _ in range(30):
    state, metrics = program.step(state, program.place(BATCH))
    losses.append(float(metrics.loss))
  assert losses[0] == pytest.approx(before)
  # Logits start near 0: every byte is as likely as any other.
  assert abs(losses[0] - np.log(256)) < 0.2
  assert losses[-1] < 0.7 * losses[0]
  assert int(state.step) == 30


def test_metrics_of_one_step(program):
  _, metrics = program.step(program.initialise(), program.place(BATCH))
  assert int(metrics.dropped_rows) == 0
  assert 1.0 <= float(metrics.load_imbalance) <= 4.0
  assert float(metrics.grad_norm) > 0
  assert float(metrics.extra_loss) > 0


def test_the_balance_bias_moves_by_its_rate_once_a_step(program):
  state = program.initialise()
  (start,) = jax.tree.leaves(state.balance)
  np.testing.assert_array_equal(start, 0)
  state, _ = program.step(state, program.place(BATCH))
  (moved,) = jax.tree.leaves(state.balance)
  assert set(np.unique(np.abs(moved))) <= {0.0, 0.25}
  assert np.any(moved != 0)


def test_no_balance_bias_no_balance_state():
  model = dataclasses.replace(shrunken.MODEL, balance_bias=False)
  program = train.build(shrunken.experiment(model=model), "bf16")
  state, _ = jax.eval_shape(
    program.step, program.initialise(), program.place(BATCH)
  )
  assert jax.tree.leaves(state.balance) == []


def test_only_matrices_decay():
  config = experiment_lib.OptimizerConfig(weight_decay=0.5)
  optimizer = train.make_optimizer(config, steps=10)
  params = {"matrix": jnp.ones((2, 2)), "vector": jnp.ones(2)}
  state = optimizer.init(params)
  zeros = jax.tree.map(jnp.zeros_like, params)
  _, state = optimizer.update(zeros, state, params)  # Warm-up starts at 0.
  updates, _ = optimizer.update(zeros, state, params)
  assert np.all(np.asarray(updates["matrix"]) < 0)
  np.testing.assert_array_equal(updates["vector"], 0)


@pytest.mark.parametrize("steps", [1, 2, 30, 1000])
def test_the_schedule_peaks_after_warm_up_and_ends_low(steps):
  config = experiment_lib.OptimizerConfig(
    learning_rate=0.5, warmup_steps=20, final_fraction=0.1
  )
  schedule = train.make_schedule(config, steps)
  assert float(schedule(min(20, steps // 2))) == pytest.approx(0.5)
  assert float(schedule(steps)) == pytest.approx(0.05)


def test_a_mesh_needs_its_devices():
  assert train.make_mesh(experiment_lib.MeshConfig()) is None
  mesh = train.make_mesh(experiment_lib.MeshConfig(data=2, expert=4))
  assert mesh is not None
  assert dict(mesh.shape) == {"data": 2, "expert": 4}
  with pytest.raises(ValueError, match="needs 128 devices; 8 found"):
    train.make_mesh(experiment_lib.MeshConfig(expert=128))


def test_a_batch_is_split_over_both_axes():
  mesh = train.make_mesh(experiment_lib.MeshConfig(data=2, expert=2))
  placed = train.place_batch(BATCH, mesh=mesh)
  np.testing.assert_array_equal(placed, BATCH)
  assert len(placed.addressable_shards) == 4
  assert {shard.data.shape for shard in placed.addressable_shards} == {(1, 17)}


def test_expert_leaves_and_their_moments_lie_on_the_expert_axis(program):
  mesh = train.make_mesh(experiment_lib.MeshConfig(data=2, expert=2))
  placed = train.state_shardings(program.initialise(), mesh, fsdp=False)
  split = {
    jax.tree_util.keystr(path, simple=True, separator=".")
    for path, leaf in jax.tree_util.tree_leaves_with_path(placed)
    if leaf.spec
  }
  experts = {f"blocks.0.moe.{name}.value" for name in ("gate_up", "down")}
  where = ("params.", "optimizer.1.0.mu.", "optimizer.1.0.nu.")
  assert split == {start + name for start in where for name in experts}


def test_fsdp_splits_expert_weights_over_data_too(program):
  mesh = train.make_mesh(experiment_lib.MeshConfig(data=2, expert=2))
  placed = train.state_shardings(program.initialise(), mesh, fsdp=True)
  specs = {tuple(leaf.spec) for leaf in jax.tree.leaves(placed)}
  assert specs == {(), ("expert", "data")}
