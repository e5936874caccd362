"""Entry point: ``python -m experiments.run CONFIG.py [--out DIR] [overrides]``.

CONFIG.py defines ``def experiment() -> Experiment``. Every field of it can be
set from the command line, with its type checked: ``--steps 50``,
``--recipes mxfp8``, ``--model.num-experts 16``; ``--help`` after CONFIG.py
lists them.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys

# What a run needs beyond the library: the extra `experiments`.
_NEEDED = ("tyro", "rich", "grain", "orbax", "matplotlib")


def set_environment() -> None:
  """Sets what must be set before jax is imported.

  XLA:CPU sizes its thread pool by NPROC. Collectives between host devices
  each hold a thread while they wait for the others, so on a machine with few
  cores the default pool can leave none for the device they wait for.
  """
  os.environ.setdefault("NPROC", "32")


def main(arguments: list[str]) -> int:
  """Runs the command; returns the exit status.

  Args:
    arguments: the command line without the program.
  """
  set_environment()
  missing = [name for name in _NEEDED if not importlib.util.find_spec(name)]
  if missing:
    print(
      f"experiments.run needs {', '.join(missing)}, not installed here."
      " Install the extra, from the root of the clone:"
      " pip install -e '.[experiments]'",
      file=sys.stderr,
    )
    return 1
  try:
    _run(arguments)
  except (ValueError, FloatingPointError, NotImplementedError) as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return 1
  return 0


def _run(arguments: list[str]) -> None:
  """Runs the experiment; tyro, then jax, are imported here and not before."""
  from experiments import command as command_lib

  command = command_lib.parse(arguments)

  import rich.console

  from experiments import job, progress

  job.run(
    command.experiment,
    folder=command.folder,
    command=shlex.join(["python", "-m", "experiments.run", *arguments]),
    shown=progress.Progress(rich.console.Console()),
  )


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
