"""The README's job: MXFP8 next to bf16 on a plain CPU, in a few minutes.

On a CPU both recipes run through plain jnp, so their speed says nothing about
a GPU; what it shows is that the loss curves agree.
"""

from experiments.experiment import (
  DataConfig,
  Experiment,
  ModelConfig,
  OptimizerConfig,
)


def experiment() -> Experiment:
  """Returns a model of about 1 million parameters and its training."""
  return Experiment(
    name="tiny_cpu",
    recipes=("bf16", "mxfp8"),
    steps=180,
    checkpoint_every=50,
    model=ModelConfig(
      d_model=128,
      num_layers=2,
      num_heads=4,
      d_ff=128,
      num_experts=8,
      top_k=2,
      # Windows are short: lower frequencies would hardly turn.
      rope_base=100.0,
    ),
    data=DataConfig(sequence_length=128, batch_size=16),
    optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=10),
  )
