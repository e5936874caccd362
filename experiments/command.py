"""The command line of experiments.run: a config script and typed overrides.

Read by tyro where it is installed, else by `plain_command`.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import pathlib
from typing import Annotated, Any

from experiments import experiment as experiment_lib
from experiments import plain_command

_TYRO: Any = (
  importlib.import_module("tyro") if importlib.util.find_spec("tyro") else None
)
# The experiment's fields have flags without prefix.
_UNNAMED = _TYRO.conf.arg(name="") if _TYRO else None

_USAGE = (
  "python -m experiments.run CONFIG.py [--out DIR] [overrides]\n"
  "CONFIG.py is a config script such as experiments/configs/tiny_cpu.py;\n"
  "`python -m experiments.run CONFIG.py --help` lists its fields."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Command:
  """Trains the experiment of a config script; every field can be overridden.

  Attributes:
    experiment: the config script's experiment, with overrides.
    out: folder of the results; runs/NAME when left out. A second start with
      the same folder and the same experiment goes on from its checkpoints.
    distributed: whether this is one of `mesh.processes` processes that a
      cluster has started. Where jax knows the cluster that is enough; else the
      next three say what it needs.
    coordinator: address and port of process 0, such as host:1234.
    num_processes: all processes.
    process_id: this one, from 0.
    parent: id of the process that this one ends with; the command sets it for
      the processes that it starts.
  """

  experiment: Annotated[experiment_lib.Experiment, _UNNAMED]
  out: pathlib.Path | None = None
  distributed: bool = False
  coordinator: str | None = None
  num_processes: int | None = None
  process_id: int | None = None
  parent: int | None = None

  @property
  def folder(self) -> pathlib.Path:
    """The folder of the results."""
    return self.out or pathlib.Path("runs") / self.experiment.name


def parse(arguments: list[str]) -> Command:
  """Reads the config script and applies the overrides.

  Args:
    arguments: the command line without the program.

  Returns:
    The command.

  Raises:
    ValueError: the config script does not serve, or an override's value is
      refused by `Experiment`.
    SystemExit: help was asked, or an argument is unknown or of another type.
  """
  if not arguments or arguments[0] in ("-h", "--help"):
    print(_USAGE)
    raise SystemExit(0 if arguments else 2)
  path = pathlib.Path(arguments[0])
  default = Command(experiment=experiment_lib.load(path))
  prog = f"python -m experiments.run {path}"
  words = ["--recipes" if word == "--recipe" else word for word in arguments]
  if _TYRO is None:
    return plain_command.parse(default, words[1:], prog)
  return _TYRO.cli(Command, args=words[1:], default=default, prog=prog)
