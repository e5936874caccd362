"""Does training suffer? A MoE language model on one H200, four recipes.

185 million parameters, of which a token meets 36 million, read 33 million bytes
of Python source in 2000 steps. A run is one recipe and one seed and needs no
file of another:

    python -m experiments.run experiments/configs/h200_moe.py
        --recipe folded --seed 1 --out runs/h200_moe/folded-1

Its summary.json is kept as results/nvidia_h200/h200_moe/RECIPE-SEED.json.
"""

from experiments.experiment import (
  DataConfig,
  Experiment,
  ModelConfig,
  OptimizerConfig,
)


def experiment() -> Experiment:
  """Returns all four recipes at seed 0."""
  return Experiment(
    name="h200_moe",
    recipes=("bf16", "mxfp8", "mxfp8_bf16_wgrad", "folded"),
    steps=2000,
    model=ModelConfig(
      d_model=768,
      num_layers=6,
      num_heads=12,
      d_ff=768,
      num_experts=16,
      top_k=2,
      scan_layers=True,
    ),
    # The packages are those that the library itself is installed with.
    data=DataConfig(
      packages=("jax", "flax", "optax", "numpy"),
      sequence_length=512,
      batch_size=32,
      heldout_batches=32,
    ),
    optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=200),
  )
