"""The training loop of one recipe.

    initialise or restore -> compile -> step, record, checkpoint ... -> evaluate

All recipes of a job start from the same parameters and read the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import dataclasses
import math
import pathlib
import statistics
import time
from typing import Any

import jax
import numpy as np

from experiments import checkpoint, data, model, processes, results, train
from experiments import experiment as experiment_lib
from pallas_kernels import peaks


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Job:
  """What every recipe of an experiment shares.

  Attributes:
    experiment: the resolved experiment.
    folder: where files go.
    corpus: the text.
  """

  experiment: experiment_lib.Experiment
  folder: pathlib.Path
  corpus: data.Corpus

  def context(
    self, recipe: experiment_lib.RecipeName, batches: dict[str, Any]
  ) -> checkpoint.Context:
    """Returns what a checkpoint of this job says about itself."""
    return checkpoint.Context(
      experiment=experiment_lib.to_dict(self.experiment),
      recipe=recipe,
      text_digest=self.corpus.digest,
      batches=batches,
    )

  def checkpoints(self, recipe: str) -> checkpoint.Checkpoints:
    """Opens the checkpoints of a recipe."""
    return checkpoint.Checkpoints(
      self.folder / f"checkpoints-{recipe}",
      kept=self.experiment.checkpoints_kept,
    )

  def checkpoint_due(self, step: int) -> bool:
    """Whether a checkpoint follows this step."""
    every = self.experiment.checkpoint_every
    last = step == self.experiment.steps
    return every > 0 and (last or step % every == 0)


def run_recipe(
  job: Job,
  recipe: experiment_lib.RecipeName,
  program: train.Program,
  on_step: Callable[[results.StepRecord], None],
) -> results.RunResult:
  """Trains a recipe from its newest checkpoint, or from the start.

  Args:
    job: the experiment, its folder and its text.
    recipe: one of its recipes.
    program: that recipe's functions, from `train.build`.
    on_step: called after every step.

  Returns:
    The losses of all steps, those before a restart included, and totals.

  Raises:
    ValueError: the checkpoint or the metrics file does not fit.
    FloatingPointError: a loss or a gradient is not finite.
  """
  experiment = job.experiment
  batches = data.train_batches(job.corpus, experiment.data, experiment.seed)
  path = job.folder / f"metrics-{recipe}.jsonl"
  with program.context(), job.checkpoints(recipe) as saved:
    state = program.initialise()
    context = job.context(recipe, batches.get_state())
    done = saved.check(context)
    if done:
      state, position = saved.restore(state, context)
      batches.set_state(position)
    writes = processes.is_first()
    with results.MetricsFile(path, steps=done, writes=writes) as metrics:
      for trained, record in _steps(job, program, state, batches, done):
        state = trained
        metrics.append(record)
        _require_finite(record, recipe)
        on_step(record)
        if job.checkpoint_due(record.step):
          saved.save(state, job.context(recipe, batches.get_state()))
    return _result(job, recipe, program, state, metrics.records)


def _steps(
  job: Job,
  program: train.Program,
  state: train.TrainState,
  batches: data.Batches,
  done: int,
) -> Iterator[tuple[train.TrainState, results.StepRecord]]:
  """Yields the state after each step, `done` of them being behind it."""
  experiment = job.experiment
  if done == experiment.steps:
    return
  shape = (experiment.data.batch_size, experiment.data.sequence_length + 1)
  example = program.place(np.zeros(shape, np.uint8))
  # Ahead of time, so that no step's seconds hold the compilation.
  step = program.step.lower(state, example).compile()
  schedule = train.make_schedule(experiment.optimizer, experiment.steps)
  # All at once: a few small operations in each step would count as its time.
  rates = np.asarray(jax.vmap(schedule)(np.arange(experiment.steps)))
  for number in range(done + 1, experiment.steps + 1):
    started = time.perf_counter()
    state, metrics = step(state, program.place(next(batches)))
    # Blocks: XLA:CPU must not run several steps at once on few threads.
    told = jax.device_get(metrics)
    yield (
      state,
      results.StepRecord(
        step=number,
        loss=float(told.loss),
        extra_loss=float(told.extra_loss),
        grad_norm=float(told.grad_norm),
        learning_rate=float(rates[number - 1]),
        load_imbalance=float(told.load_imbalance),
        dropped_rows=int(told.dropped_rows),
        seconds=time.perf_counter() - started,
      ),
    )


def _require_finite(record: results.StepRecord, recipe: str) -> None:
  """Stops a run that has diverged, its last record already written."""
  if not math.isfinite(record.loss) or not math.isfinite(record.grad_norm):
    raise FloatingPointError(
      f"{recipe}: loss {record.loss} and gradient norm {record.grad_norm} at"
      f" step {record.step} must be finite. Lower optimizer.learning_rate or"
      " choose another seed."
    )


def _result(
  job: Job,
  recipe: experiment_lib.RecipeName,
  program: train.Program,
  state: train.TrainState,
  records: list[results.StepRecord],
) -> results.RunResult:
  """Evaluates the trained state and sums up the records."""
  config = job.experiment.data
  heldout = [
    float(program.evaluate(state, program.place(batch)))
    for batch in data.heldout_batches(job.corpus, config)
  ]
  tokens = config.batch_size * config.sequence_length
  step_seconds = statistics.median(record.seconds for record in records)
  flops = model.flops_per_token(job.experiment.model, config.sequence_length)
  peak = peaks.peak(jax.devices()[0].device_kind)
  rate = flops * tokens / step_seconds / job.experiment.mesh.size
  return results.RunResult(
    recipe=recipe,
    seed=job.experiment.seed,
    losses=[record.loss for record in records],
    heldout_loss=statistics.fmean(heldout),
    tokens_per_second=tokens / step_seconds,
    load_imbalance=results.last_fifth(
      [record.load_imbalance for record in records]
    ),
    dropped_rows=sum(record.dropped_rows for record in records),
    parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
    wall_seconds=sum(record.seconds for record in records),
    flops_per_token=flops,
    flop_utilisation=rate / peak.bf16 if peak else None,
  )
