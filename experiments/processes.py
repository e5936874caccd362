"""Several processes that train one model together through jax.distributed.

    one command --start_all--> N processes on this machine, or
    a cluster   --distributed--> N processes on many machines
     | join                     one view of all devices
     | require_same             every process was given the same experiment
     | on_first                 files are written by one process

Checkpoints and metrics go to one folder that all processes see.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
import json
import os
import socket
import subprocess
import sys
import threading
import time

import jax
from jax.experimental import multihost_utils
import numpy as np

from experiments import command as command_lib
from experiments import experiment as experiment_lib

# Bytes of a message between processes, whose size must be equal everywhere; a
# resolved experiment takes about 2,000.
_MESSAGE_BYTES = 1 << 16

# Seconds between looks at the processes that were started here.
_POLL_SECONDS = 0.2

# Flags that differ from process to process.
_OWN_FLAGS = ("--coordinator", "--num-processes", "--process-id", "--parent")


def free_address() -> str:
  """Returns an address on this machine whose port is free now."""
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    return f"localhost:{probe.getsockname()[1]}"


def start_all(arguments: Sequence[str], count: int) -> int:
  """Runs the command in `count` processes on this machine.

  When one fails the others, which would wait for it for ever, are ended.

  Args:
    arguments: the command line without the program.
    count: processes.

  Returns:
    The exit status: 0, or that of the first process seen to fail.
  """
  address = free_address()
  running = [
    subprocess.Popen(
      [
        *(sys.executable, "-m", "experiments.run", *arguments),
        *("--distributed", "--coordinator", address),
        *("--num-processes", str(count), "--process-id", str(number)),
        *("--parent", str(os.getpid())),
      ],
      stdout=None if number == 0 else subprocess.DEVNULL,
    )
    for number in range(count)
  ]
  try:
    return _wait(running)
  finally:
    for process in running:
      process.kill()
      process.wait()


def _wait(running: list[subprocess.Popen[bytes]]) -> int:
  """Returns 0 when all have ended well, or the first failure seen."""
  while True:
    codes = [process.poll() for process in running]
    failed = [code for code in codes if code]
    if failed:
      # Killed by signal -N counts as 128 + N, as a shell says it.
      return failed[0] if failed[0] > 0 else 128 - failed[0]
    if None not in codes:
      return 0
    time.sleep(_POLL_SECONDS)


def typed(arguments: Sequence[str]) -> list[str]:
  """Returns the command line without what differs from process to process."""
  kept, rest = [], iter(arguments)
  for argument in rest:
    if argument in _OWN_FLAGS:
      next(rest, None)
    else:
      kept.append(argument)
  launched = len(kept) < len(arguments)
  return [word for word in kept if not (launched and word == "--distributed")]


def end_with(parent: int) -> None:
  """Ends this process when `parent` has ended, even by kill -9.

  Left behind it would go on writing to a folder that a new start takes up.

  Args:
    parent: id of the process that started this one.
  """

  def watch() -> None:
    while os.getppid() == parent:
      time.sleep(_POLL_SECONDS)
    os._exit(1)

  threading.Thread(target=watch, daemon=True).start()


def join(command: command_lib.Command) -> None:
  """Makes this process one of several; before any device is looked at.

  Args:
    command: says where the others are.

  Raises:
    ValueError: the cluster has another number of processes.
  """
  jax.distributed.initialize(
    coordinator_address=command.coordinator,
    num_processes=command.num_processes,
    process_id=command.process_id,
  )
  expected = command.experiment.mesh.processes
  found = jax.process_count()
  if found != expected:
    raise ValueError(
      f"mesh.processes must be the number of processes; got {expected}, and"
      f" {found} were started. Set --mesh.processes {found}."
    )


def is_first() -> bool:
  """Whether this process writes the files."""
  return jax.process_index() == 0


def _gather(message: str) -> list[str]:
  """Returns the messages of all processes, in their order."""
  encoded = message.encode()[: _MESSAGE_BYTES - 4]
  packed = np.zeros(_MESSAGE_BYTES, np.uint8)
  packed[:4] = np.frombuffer(np.uint32(len(encoded)).tobytes(), np.uint8)
  packed[4 : 4 + len(encoded)] = np.frombuffer(encoded, np.uint8)
  rows = np.asarray(multihost_utils.process_allgather(packed))
  lengths = rows[:, :4].copy().view(np.uint32)[:, 0]
  return [
    bytes(row[4 : 4 + int(length)]).decode(errors="replace")
    for row, length in zip(rows, lengths, strict=True)
  ]


def require_same(experiment: experiment_lib.Experiment) -> None:
  """Refuses processes that were given different experiments.

  Args:
    experiment: this process's.

  Raises:
    ValueError: on every process, with the fields that differ.
  """
  if jax.process_count() == 1:
    return
  own = json.dumps(experiment_lib.to_dict(experiment))
  first, *others = (json.loads(text) for text in _gather(own))
  said = []
  for number, other in enumerate(others, start=1):
    flat, asked = (experiment_lib.flatten(config) for config in (first, other))
    said += [
      f"{name}: process 0 has {flat.get(name)}, process {number} has"
      f" {asked.get(name)}"
      for name in sorted(flat.keys() | asked.keys())
      if flat.get(name) != asked.get(name)
    ]
  if said:
    raise ValueError(
      "All processes must be given the same experiment:\n  "
      + "\n  ".join(said)
      + "\nStart them with the same config script and overrides."
    )


def on_first(action: Callable[[], None]) -> None:
  """Runs `action` on process 0 while the others wait for its outcome.

  Args:
    action: touches files.

  Raises:
    ValueError: `action` raised it, on every process.
  """
  failure = ""
  if is_first():
    try:
      action()
    except ValueError as error:
      if jax.process_count() == 1:
        raise
      failure = str(error)
  if jax.process_count() > 1:
    failure = _gather(failure)[0]
  if failure:
    raise ValueError(failure)
