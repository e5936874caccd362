"""Entry point: ``python -m experiments.run CONFIG.py [--out DIR] [overrides]``.

CONFIG.py defines ``def experiment() -> Experiment``. Every field of it can be
set from the command line, with its type checked: ``--steps 50``,
``--recipes mxfp8``, ``--model.num-experts 16``; ``--help`` after CONFIG.py
lists them.

tyro, grain and matplotlib may be missing: flags are then read by argparse,
batches shuffled by numpy (in another order), and no curves are drawn.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys

# What a run needs beyond the library, of the extra `experiments`.
_NEEDED = ("rich", "orbax")

# With this flag the caller has chosen the number of host devices.
_HOST_DEVICES = "xla_force_host_platform_device_count"

# Seconds that a collective between host devices may wait.
_PATIENCE = (
  "--xla_cpu_collective_call_terminate_timeout_seconds=600"
  " --xla_cpu_collective_timeout_seconds=600"
)


def set_environment() -> None:
  """Sets what must be set before jax is imported.

  XLA:CPU sizes its thread pool by NPROC. Collectives between host devices
  each hold a thread while they wait for the others, so on a machine with few
  cores the default pool can leave none for the device they wait for. XLA ends
  a process whose collective waits for 40 seconds, which on such a machine is
  no sign of a fault.
  """
  os.environ.setdefault("NPROC", "32")
  flags = os.environ.get("XLA_FLAGS", "")
  if "xla_cpu_collective" not in flags:
    os.environ["XLA_FLAGS"] = f"{flags} {_PATIENCE}".strip()


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
    return _run(arguments)
  except (ValueError, FloatingPointError, NotImplementedError) as error:
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    return 1


def _run(arguments: list[str]) -> int:
  """Runs the experiment; tyro, then jax, are imported here and not before."""
  from experiments import command as command_lib

  command = command_lib.parse(arguments)
  mesh = command.experiment.mesh

  import jax
  import rich.console

  from experiments import job, processes, progress

  if mesh.processes > 1 and not command.distributed:
    return processes.start_all(arguments, mesh.processes)
  if mesh.size > 1 and _HOST_DEVICES not in os.environ["XLA_FLAGS"]:
    # CPU devices that stand in for GPUs; says nothing to other platforms.
    jax.config.update("jax_num_cpu_devices", mesh.size // mesh.processes)
  if command.parent is not None:
    processes.end_with(command.parent)
  if command.distributed:
    processes.join(command)
  line = ["python", "-m", "experiments.run", *processes.typed(arguments)]
  quiet = not processes.is_first()
  job.run(
    command.experiment,
    folder=command.folder,
    command=shlex.join(line),
    shown=progress.Progress(rich.console.Console(quiet=quiet)),
  )
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
