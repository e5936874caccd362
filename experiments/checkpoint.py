"""Checkpoints of one recipe: everything that the next step depends on.

A checkpoint holds the `TrainState` (parameters, balance biases, optimizer
moments, step) and, as JSON, the state of the batch iterator, the resolved
experiment and the digest of the text. Restored, a run goes on to the bit as if
it had never stopped. orbax writes a checkpoint under a temporary name and
renames it when it is complete, so a killed process leaves the older ones whole.

A checkpoint that does not fit is refused with the fields that differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import pathlib
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments import experiment as experiment_lib

_ARRAYS, _CONTEXT = "state", "context"

# Differences shown in an error; another width differs in every array.
_SHOWN = 12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Context:
  """What a checkpoint says about the run it belongs to.

  Attributes:
    experiment: the resolved experiment, from `experiment.to_dict`.
    recipe: the recipe that was trained.
    text_digest: `Corpus.digest` of the text.
    batches: state of the batch iterator.
  """

  experiment: dict[str, Any]
  recipe: str
  text_digest: str
  batches: dict[str, Any]

  def differences(self, asked: Context) -> tuple[str, ...]:
    """Says how this, saved context differs from the one asked for."""
    found = experiment_lib.differences(self.experiment, asked.experiment)
    for name in ("recipe", "text_digest"):
      saved, new = getattr(self, name), getattr(asked, name)
      if saved != new:
        found += (f"{name}: saved {saved}, asked {new}",)
    return found


def _flat(tree: Any) -> dict[str, Any]:
  """Returns the leaves of a pytree by name, such as params.head.kernel."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {
    jax.tree_util.keystr(path, simple=True, separator="."): leaf
    for path, leaf in leaves
  }


def _shape(leaf: Any) -> str:
  """Returns dtype and shape of an array or of its metadata: float32[8,64]."""
  sizes = ",".join(str(size) for size in leaf.shape)
  return f"{np.dtype(leaf.dtype)}[{sizes}]"


def _misfits(saved: Mapping[str, Any], asked: Mapping[str, Any]) -> list[str]:
  """Says which arrays are missing on one side or have another shape."""
  old = {name: _shape(leaf) for name, leaf in saved.items()}
  new = {name: _shape(leaf) for name, leaf in asked.items()}
  absent = "nothing"
  return [
    f"{name}: saved {old.get(name, absent)}, asked {new.get(name, absent)}"
    for name in sorted(old.keys() | new.keys())
    if old.get(name, absent) != new.get(name, absent)
  ]


class Checkpoints:
  """The checkpoints of one recipe, in one folder; a context manager."""

  def __init__(self, folder: pathlib.Path, *, kept: int) -> None:
    """Opens a folder, which is made when it is absent.

    Args:
      folder: holds one numbered folder per checkpoint.
      kept: newest checkpoints kept.
    """
    self._folder = folder.resolve()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=kept,
      # Saved before the step donates the state's buffers.
      enable_async_checkpointing=False,
    )
    handlers = {
      _ARRAYS: ocp.StandardCheckpointHandler(),
      _CONTEXT: ocp.JsonCheckpointHandler(),
    }
    self._manager = ocp.CheckpointManager(
      self._folder, options=options, item_handlers=handlers
    )

  def __enter__(self) -> Checkpoints:
    """Returns itself."""
    return self

  def __exit__(self, *_: object) -> None:
    """Closes the manager."""
    self._manager.close()

  def latest(self) -> int | None:
    """Returns the newest complete checkpoint's step, or None."""
    return self._manager.latest_step()

  def save(self, state: Any, context: Context) -> None:
    """Writes a checkpoint of `state` under its step.

    Args:
      state: a `TrainState`.
      context: the run, and the batch iterator's state after this step.
    """
    self._manager.save(
      int(state.step),
      args=ocp.args.Composite(
        **{
          _ARRAYS: ocp.args.StandardSave(_flat(state)),
          _CONTEXT: ocp.args.JsonSave(dataclasses.asdict(context)),
        }
      ),
    )

  def restore(self, state: Any, context: Context) -> tuple[Any, dict[str, Any]]:
    """Reads the newest checkpoint.

    Args:
      state: a `TrainState` of the right structure, shapes and shardings.
      context: the run that wants to go on; its `batches` are not looked at.

    Returns:
      The saved state, placed as `state` is, and the batch iterator's state.

    Raises:
      ValueError: there is none, it cannot be read, or it does not fit.
    """
    step = self.latest()
    if step is None:
      raise ValueError(f"{self._folder} holds no complete checkpoint.")
    saved = self._context(step)
    self._refuse(step, list(saved.differences(context)))
    asked = _flat(state)
    metadata = self._read(step, lambda: self._manager.item_metadata(step))
    self._refuse(step, _misfits(metadata[_ARRAYS].tree, asked))
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, asked)
    args = ocp.args.Composite(**{_ARRAYS: ocp.args.StandardRestore(abstract)})
    arrays = self._read(step, lambda: self._manager.restore(step, args=args))
    leaves = [arrays[_ARRAYS][name] for name in asked]
    restored = jax.tree.unflatten(jax.tree.structure(state), leaves)
    return restored, saved.batches

  def check(self, context: Context) -> int:
    """Returns the step to go on from, 0 for none, reading no arrays.

    Args:
      context: the run that wants to go on.

    Raises:
      ValueError: the newest checkpoint cannot be read or does not fit.
    """
    step = self.latest()
    if step is None:
      return 0
    self._refuse(step, list(self._context(step).differences(context)))
    return step

  def _context(self, step: int) -> Context:
    args = ocp.args.Composite(**{_CONTEXT: ocp.args.JsonRestore()})
    fields = self._read(step, lambda: self._manager.restore(step, args=args))
    try:
      return Context(**fields[_CONTEXT])
    except TypeError as error:
      raise ValueError(self._unreadable(step, error)) from error

  def _read(self, step: int, read: Callable[[], Any]) -> Any:
    try:
      return read()
    except (OSError, ValueError, KeyError) as error:
      raise ValueError(self._unreadable(step, error)) from error

  def _unreadable(self, step: int, error: Exception) -> str:
    return (
      f"The checkpoint {self._folder / str(step)} cannot be read ({error})."
      " Delete that folder to go on from an older checkpoint, or choose"
      " another --out."
    )

  def _refuse(self, step: int, differences: list[str]) -> None:
    if not differences:
      return
    shown = differences[:_SHOWN]
    if len(differences) > _SHOWN:
      shown.append(f"and {len(differences) - _SHOWN} more")
    raise ValueError(
      f"The checkpoint {self._folder / str(step)} does not fit this run:\n  "
      + "\n  ".join(shown)
      + "\nUndo these changes, or choose another --out."
    )
