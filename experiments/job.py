"""One experiment from its config to its files.

    check the folder, the text, every recipe and its checkpoint   no work yet
     | for each recipe: loop.run_recipe                           metrics
     | side by side                                               summary, plot

Whatever can be wrong with a config, a folder or a checkpoint is said before a
step runs.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import pathlib
from typing import Any

from experiments import data, loop, processes, progress, results, train
from experiments import experiment as experiment_lib
from experiments import model as model_lib

_RESOLVED = "experiment.json"


def claim_folder(
  folder: pathlib.Path, experiment: experiment_lib.Experiment
) -> None:
  """Makes `folder` this experiment's own.

  Args:
    folder: absent, empty, or left by an earlier start of the same experiment.
    experiment: written there as experiment.json.

  Raises:
    ValueError: it holds another experiment, or files of unknown origin.
  """
  resolved = folder / _RESOLVED
  if resolved.is_file():
    _require_same(resolved, experiment)
  elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
    raise ValueError(
      f"{folder} must be an empty or absent folder, or hold {_RESOLVED} of this"
      " experiment; it holds other files. Choose another --out."
    )
  folder.mkdir(parents=True, exist_ok=True)
  results.write_json(resolved, experiment_lib.to_dict(experiment))


def _require_same(
  resolved: pathlib.Path, experiment: experiment_lib.Experiment
) -> None:
  """Refuses a folder whose experiment.json computes other numbers."""
  try:
    saved = json.loads(resolved.read_text())
  except ValueError as error:
    raise ValueError(
      f"{resolved} cannot be read ({error}). Choose another --out."
    ) from error
  found = experiment_lib.differences(saved, experiment_lib.to_dict(experiment))
  if found:
    raise ValueError(
      f"{resolved.parent} holds another experiment:\n  "
      + "\n  ".join(found)
      + "\nUndo these changes, choose another --out, or delete the folder."
    )


def run(
  experiment: experiment_lib.Experiment,
  *,
  folder: pathlib.Path,
  command: str,
  shown: progress.Progress,
) -> list[results.RunResult]:
  """Trains every recipe and writes summary.json and loss.png.

  Args:
    experiment: the resolved experiment.
    folder: for its files.
    command: the command line, kept with the results.
    shown: where progress goes.

  Returns:
    One result per recipe, in order.

  Raises:
    ValueError, NotImplementedError: the config, the folder or a checkpoint
      does not serve; said before a step runs.
    FloatingPointError: a loss is not finite.
  """
  programs = [train.build(experiment, name) for name in experiment.recipes]
  corpus = data.read_corpus(
    experiment.data.heldout_every, packages=experiment.data.packages
  )
  data.heldout_batches(corpus, experiment.data)
  processes.require_same(experiment)
  processes.on_first(functools.partial(claim_folder, folder, experiment))
  job = loop.Job(experiment=experiment, folder=folder, corpus=corpus)
  done = {}
  for recipe in experiment.recipes:
    with job.checkpoints(recipe) as saved:
      done[recipe] = saved.check(job.context(recipe, {}))
  runs = []
  with shown:
    for recipe, program in zip(experiment.recipes, programs, strict=True):
      shown.start(recipe, done=done[recipe], steps=experiment.steps)
      runs.append(loop.run_recipe(job, recipe, program, shown.step))
  if processes.is_first():
    _write(job, programs, runs, command)
    shown.report(runs, unigram_entropy=corpus.unigram_entropy, folder=folder)
  return runs


def _write(
  job: loop.Job,
  programs: list[train.Program],
  runs: list[results.RunResult],
  command: str,
) -> None:
  """Writes summary.json, and loss.png where matplotlib is installed."""
  summary = {"command": command, **_summary(job, runs)}
  summary["explanations"] = {
    run.recipe: program.explanation.splitlines()
    for run, program in zip(runs, programs, strict=True)
  }
  results.write_json(job.folder / "summary.json", summary)
  if importlib.util.find_spec("matplotlib") is None:
    return
  from experiments import plot

  plot.draw(
    job.folder / "loss.png",
    runs,
    unigram_entropy=job.corpus.unigram_entropy,
    title=f"{job.experiment.name} on {summary['device']['kind']}",
  )


def _summary(job: loop.Job, runs: list[results.RunResult]) -> dict[str, Any]:
  """Returns what summary.json says of the runs and of what they ran on."""
  experiment, corpus = job.experiment, job.corpus
  return {
    "device": results.device(),
    "versions": results.versions(),
    "text": {
      "source": ", ".join(
        ["Python standard library", *experiment.data.packages]
      ),
      "files": corpus.files,
      "train_bytes": int(corpus.train.size),
      "heldout_bytes": int(corpus.heldout.size),
      "digest": corpus.digest,
    },
    "unigram_entropy": corpus.unigram_entropy,
    "recipes": {
      name: dataclasses.asdict(model_lib.recipe(name))
      for name in experiment.recipes
    },
    "experiment": experiment_lib.to_dict(experiment),
    "runs": [dataclasses.asdict(run) for run in runs],
  }
