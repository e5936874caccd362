"""Runs checks in a worker process, and survives what they do to it.

A check that takes longer than its timeout is ended with its process and
reported as hung; one whose process dies is reported with what the process last
wrote. Either way the next check gets a new process.
"""

from __future__ import annotations

from collections.abc import Iterator
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

from pallas_kernels import bring_up_check

WORKER = "pallas_kernels.bring_up_worker"
START_SECONDS = 300.0  # imports, CUDA, and jax's own search for devices
END_SECONDS = 30.0  # until a killed process must be gone
POLL_SECONDS = 0.02
SAID_CHARACTERS = 3000  # of what a dead process last wrote
STARTS = 2  # in a row that may fail before the rest is given up

Check = bring_up_check.Check
Finding = bring_up_check.Finding


class WorkerError(RuntimeError):
  """A worker hung or died; the message says what is known."""

  def __init__(self, outcome: str, why: str):
    super().__init__(why)
    self.outcome = outcome


def scrub(text: str) -> str:
  """Text without the folders that a path on this machine starts with."""
  return re.sub(r"(?<![\w.])/(?:[^\s/'\",:]+/){2,}(?=[^\s/]+/)", ".../", text)


class Worker:
  """A process that runs checks one after another."""

  def __init__(self, table: str, folder: pathlib.Path):
    self.report = folder / "report.jsonl"
    self.log = folder / "output.txt"
    self.report.write_text("")
    self.phase = "starting"
    self._read = 0
    with self.log.open("w") as log:
      self.process = subprocess.Popen(
        [sys.executable, "-m", WORKER, table, str(self.report)],
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=log,
        text=True,
        start_new_session=True,  # its children end with it
      )

  def _lines(self) -> Iterator[dict[str, Any]]:
    """The whole lines that the worker has written since the last call."""
    with self.report.open() as file:
      file.seek(self._read)
      for line in file:
        if not line.endswith("\n"):
          return
        self._read += len(line.encode())
        yield json.loads(line)

  def await_field(self, field: str, timeout: float) -> Any:
    """Waits for a line with a field.

    Raises:
      WorkerError: It did not come in time, or the process died.
    """
    deadline = time.monotonic() + timeout
    while True:
      alive = self.process.poll() is None  # before reading: no line is missed
      for line in self._lines():
        self.phase = line.get("phase", self.phase)
        if field in line:
          return line[field]
      if not alive:
        raise WorkerError("failed", self._last_words())
      if time.monotonic() > deadline:
        raise WorkerError("hung", f"no end after {timeout:g} s of {self.phase}")
      time.sleep(POLL_SECONDS)

  def _last_words(self) -> str:
    code = self.process.returncode
    said = scrub(self.log.read_text(errors="replace").strip())
    how = f"signal {-code}" if code < 0 else f"exit status {code}"
    return f"{how} while {self.phase}: {said[-SAID_CHARACTERS:]}"

  def ask(self, check: Check, timeout: float) -> Finding:
    """Runs a check.

    Raises:
      WorkerError: It hung or died.
    """
    self.phase = "starting"
    assert self.process.stdin is not None
    try:
      self.process.stdin.write(check.name + "\n")
      self.process.stdin.flush()
    except BrokenPipeError:
      self.process.wait()
    return Finding(**self.await_field("finding", timeout))

  def stop(self) -> None:
    """Ends the process and its children.

    Raises:
      TimeoutError: It cannot be ended, as where a driver holds it.
    """
    if self.process.poll() is None:
      os.killpg(self.process.pid, signal.SIGKILL)
    try:
      self.process.wait(END_SECONDS)
    except subprocess.TimeoutExpired as error:
      raise TimeoutError(
        f"bring_up: process {self.process.pid} does not end after SIGKILL; the "
        "GPU or its driver holds it. Reset the GPU or restart the machine."
      ) from error
    if self.process.stdin is not None:
      self.process.stdin.close()


class Runner:
  """Runs checks, with a new worker after each that hung or died.

  Attributes:
    device: What the first worker said of the device.
  """

  def __init__(self, table: str, timeout: float):
    self._folder = tempfile.TemporaryDirectory()
    self._table, self._timeout = table, timeout
    self._worker: Worker | None = None
    self._starts = 0  # in a row that were tried
    self.device: dict[str, Any] = {}

  def __enter__(self) -> Runner:
    """Starts the first worker.

    Raises:
      WorkerError: It does not start.
    """
    try:
      self._start()
    except WorkerError:
      self.__exit__()
      raise
    return self

  def __exit__(self, *_: Any) -> None:
    try:
      self._stop()
    finally:
      self._folder.cleanup()

  def _start(self) -> None:
    self._worker = Worker(self._table, pathlib.Path(self._folder.name))
    self.device = self._worker.await_field("device", START_SECONDS)

  def _stop(self) -> None:
    worker, self._worker = self._worker, None
    if worker is not None:
      worker.stop()

  def run(self, check: Check) -> Finding:
    """Runs a check; whatever becomes of the worker is its finding."""
    start = time.monotonic()
    try:
      if self._worker is None:
        self._starts += 1
        if self._starts > STARTS:
          raise WorkerError("failed", "not run: no process starts any more")
        self._start()
      self._starts = 0
      return self._ask(check)
    except WorkerError as error:
      outcome, why = error.outcome, str(error)
    try:
      self._stop()
    except TimeoutError as stuck:  # it still holds the GPU
      self._starts, why = STARTS, f"{why}; {stuck}"
    seconds = round(time.monotonic() - start, 2)
    return bring_up_check.finding(check, outcome, why=why, seconds=seconds)

  def _ask(self, check: Check) -> Finding:
    assert self._worker is not None
    return self._worker.ask(check, self._timeout)
