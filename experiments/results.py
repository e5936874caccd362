"""What an experiment leaves behind: metrics, summary, and what it ran on.

Files of an output folder DIR:

    DIR/experiment.json        the resolved experiment; DIR belongs to it
    DIR/metrics-RECIPE.jsonl   one line a step
    DIR/summary.json           all runs side by side, made at the end
    DIR/loss.png               their loss curves
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
from typing import Any

import jax

from experiments import experiment as experiment_lib

_PACKAGES = (
  "jax", "jaxlib", "flax", "optax", "numpy", "grain", "orbax-checkpoint"
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StepRecord:
  """One line of a metrics file.

  Attributes:
    step: optimizer steps taken, from 1.
    loss: mean cross entropy of the step's batch, nats per token.
    extra_loss: balance and router losses.
    grad_norm: global gradient norm before clipping.
    learning_rate: of this step.
    load_imbalance: rows of the busiest expert over the mean, in the layer
      where that is largest.
    dropped_rows: rows left out, over all layers.
    seconds: wall time of the step, from reading the batch to having the loss.
  """

  step: int
  loss: float
  extra_loss: float
  grad_norm: float
  learning_rate: float
  load_imbalance: float
  dropped_rows: int
  seconds: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RunResult:
  """One recipe's part of summary.json.

  Attributes:
    recipe: the recipe's name.
    seed: of parameters and data order.
    losses: training loss of every step, nats per token.
    heldout_loss: loss on held-out text after the last step.
    tokens_per_second: tokens of a batch over the median step's seconds.
    load_imbalance: mean of the last fifth of the steps.
    dropped_rows: over all steps.
    parameters: trained numbers in the model.
    wall_seconds: of all steps together, compilation not included.
    flops_per_token: of training, from `model.flops_per_token`.
    flop_utilisation: those of the median step over what the devices' data
      sheet promises for bf16, whatever the recipe; None for other devices.
  """

  recipe: experiment_lib.RecipeName
  seed: int
  losses: list[float]
  heldout_loss: float
  tokens_per_second: float
  load_imbalance: float
  dropped_rows: int
  parameters: int
  wall_seconds: float
  flops_per_token: int = 0
  flop_utilisation: float | None = None


def last_fifth(values: list[float]) -> float:
  """Returns the mean of the last fifth of `values`, of one at least."""
  return statistics.fmean(values[-max(1, len(values) // 5) :])


def write_json(path: pathlib.Path, value: Any) -> None:
  """Writes JSON under a temporary name and renames it."""
  partial = path.with_name(path.name + ".partial")
  partial.write_text(json.dumps(value, indent=2) + "\n")
  os.replace(partial, path)


def versions() -> dict[str, str]:
  """Returns the versions of Python and of the packages that matter."""
  found = {"python": platform.python_version()}
  for name in _PACKAGES:
    try:
      found[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
      found[name] = "not installed"
  return found


def _processor() -> str:
  """Returns the CPU's model name, or what Python knows of it."""
  info = pathlib.Path("/proc/cpuinfo")
  lines = info.read_text().splitlines() if info.exists() else []
  names = [line.split(":", 1)[1] for line in lines if "model name" in line]
  return names[0].strip() if names else platform.processor()


def device() -> dict[str, Any]:
  """Returns what the experiment runs on, as JSON values.

  The load average is that of the last five minutes: above the number of cores,
  other work has shared them and times are too long.
  """
  first = jax.devices()[0]
  return {
    "platform": first.platform,
    "kind": first.device_kind,
    "count": jax.device_count(),
    "processes": jax.process_count(),
    "processor": _processor(),
    "cores": os.cpu_count(),
    "load_average": round(os.getloadavg()[1], 1),
  }


class MetricsFile:
  """A JSONL file of step records; a context manager."""

  def __init__(
    self, path: pathlib.Path, *, steps: int, writes: bool = True
  ) -> None:
    """Opens the file after its first `steps` records; later ones are dropped.

    Args:
      path: the file, made when absent.
      steps: records to keep, those of a checkpoint.
      writes: whether this process is the one that writes the file.

    Raises:
      ValueError: the file lacks some of them.
    """
    self.records = _read_records(path, steps)
    self._file = None
    if not writes:
      return
    partial = path.with_name(path.name + ".partial")
    lines = (json.dumps(dataclasses.asdict(r)) + "\n" for r in self.records)
    partial.write_text("".join(lines))
    os.replace(partial, path)
    self._file = path.open("a")

  def __enter__(self) -> MetricsFile:
    """Returns itself."""
    return self

  def __exit__(self, *_: object) -> None:
    """Closes the file."""
    if self._file:
      self._file.close()

  def append(self, record: StepRecord) -> None:
    """Adds a record and hands it to the system."""
    self.records.append(record)
    if self._file:
      self._file.write(json.dumps(dataclasses.asdict(record)) + "\n")
      self._file.flush()


def _read_records(path: pathlib.Path, steps: int) -> list[StepRecord]:
  """Returns the records of steps 1 to `steps`."""
  if not steps:
    return []
  lines = path.read_text().splitlines()[:steps] if path.exists() else []
  try:
    records = [StepRecord(**json.loads(line)) for line in lines]
  except (TypeError, ValueError) as error:
    raise ValueError(
      f"{path} cannot be read ({error}). Choose another --out."
    ) from error
  if [record.step for record in records] != list(range(1, steps + 1)):
    raise ValueError(
      f"{path} must hold steps 1 to {steps}, which the checkpoint next to it"
      f" has taken; it holds {len(records)} of them. Choose another --out."
    )
  return records
