"""Expert parallelism on one machine without a GPU.

Eight CPU devices stand in for GPUs: the experts are split over four of them,
and two such groups split the batch. The rows travel in MXFP8 as they would
between GPUs; how long that takes here says nothing about GPUs.
"""

from experiments.experiment import (
  DataConfig,
  Experiment,
  MeshConfig,
  ModelConfig,
  OptimizerConfig,
)


def experiment() -> Experiment:
  """Returns a small model on a mesh of 2 x 4 devices."""
  return Experiment(
    name="expert_parallel_cpu",
    recipes=("bf16", "mxfp8"),
    steps=40,
    checkpoint_every=10,
    model=ModelConfig(
      d_model=64,
      num_layers=2,
      num_heads=4,
      d_ff=64,
      num_experts=8,
      top_k=2,
      score="sigmoid",
      balance_bias=True,
      aux_loss_coef=0.001,
    ),
    data=DataConfig(sequence_length=64, batch_size=16),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=5),
    mesh=MeshConfig(data=2, expert=4),
  )
