"""A config script whose model trains in a blink; shared by these tests."""

import dataclasses
from typing import Any

from experiments.experiment import (
  DataConfig,
  Experiment,
  ModelConfig,
  OptimizerConfig,
)

MODEL = ModelConfig(
  d_model=32,
  num_layers=1,
  num_heads=2,
  d_ff=32,
  num_experts=4,
  top_k=2,
  balance_bias=True,
)


def experiment(**changes: Any) -> Experiment:
  """Returns three steps of one small layer, with fields replaced."""
  base = Experiment(
    name="shrunken",
    steps=3,
    checkpoint_every=2,
    model=MODEL,
    data=DataConfig(sequence_length=16, batch_size=4, heldout_batches=1),
    optimizer=OptimizerConfig(warmup_steps=1, balance_rate=0.25),
  )
  return dataclasses.replace(base, **changes)
