"""Real text that is always there: the source files of Python itself.

    standard library --files, sorted by name--> train | held out
    train text --windows of sequence_length + 1 bytes, shuffled--> batches

A token is a byte. Files are split by a checksum of their name, so a file is in
the same part wherever Python is installed; the text itself follows the Python
version, and its digest is kept with every result. Installed packages can be
named to be read too. Batches come from a grain iterator, or where grain is
missing from one of our own with another order; its state is a few numbers that
a checkpoint holds.

Every process reads the whole batch and hands its devices their part: text is
small, and the iterator's state is then the same everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable
import dataclasses
import hashlib
import importlib.util
import pathlib
import sysconfig
from typing import Any, Protocol
import zlib

import numpy as np

from experiments import experiment as experiment_lib

# Folders that some distributions package apart, tables, and tests: without
# them the text is nearly the same on every installation.
_LEFT_OUT = frozenset({
  "__pycache__", "dist-packages", "encodings", "ensurepip", "idlelib",
  "lib2to3", "pydoc_data", "site-packages", "test", "tests", "tkinter",
  "turtledemo",
})  # fmt: skip

# Build settings of one machine, paths included.
_MACHINE_FILES = "_sysconfigdata"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
  """Text as bytes.

  Attributes:
    train: ``[train_bytes] uint8``.
    heldout: ``[heldout_bytes] uint8``, from other files than `train`.
    files: number of files read.
    unigram_entropy: nats per byte of `train`, each byte taken alone. A model
      that knows only how frequent each byte is has this loss.
    digest: first 16 hex digits of the SHA-256 of both texts.
  """

  train: np.ndarray
  heldout: np.ndarray
  files: int
  unigram_entropy: float
  digest: str


def unigram_entropy(text: np.ndarray) -> float:
  """Returns the entropy of single bytes in nats.

  Args:
    text: ``[bytes] uint8``, at least one.
  """
  counts = np.bincount(text, minlength=experiment_lib.VOCABULARY)
  shares = counts[counts > 0] / text.size
  return float(-np.sum(shares * np.log(shares)))


def source_files(root: pathlib.Path) -> list[pathlib.Path]:
  """Returns the source files below `root`, sorted by their relative name."""
  names = (path.relative_to(root) for path in root.rglob("*.py"))
  kept = (
    name
    for name in names
    if not _LEFT_OUT.intersection(name.parts)
    and not name.name.startswith(_MACHINE_FILES)
  )
  return [root / name for name in sorted(kept, key=pathlib.Path.as_posix)]


def package_root(name: str) -> pathlib.Path:
  """Returns the folder of an installed package, found without importing it.

  Raises:
    ValueError: it is not installed as a folder.
  """
  spec = importlib.util.find_spec(name)
  places = list(spec.submodule_search_locations or ()) if spec else []
  if not places:
    raise ValueError(
      f"data.packages names {name!r}, which is not installed here as a folder."
      " Install it, or leave it out."
    )
  return pathlib.Path(places[0])


def read_corpus(
  heldout_every: int,
  root: pathlib.Path | None = None,
  packages: Iterable[str] = (),
) -> Corpus:
  """Reads the standard library, and packages, and splits them by file.

  Args:
    heldout_every: one file in this many is held out.
    root: folder to read; the running Python's standard library by default.
    packages: installed packages that are read after it.

  Returns:
    The corpus.

  Raises:
    ValueError: one of the two parts is empty, or a package is missing.
  """
  root = root or pathlib.Path(sysconfig.get_path("stdlib"))
  parts: tuple[list[bytes], list[bytes]] = ([], [])
  folders = {"": root} | {f"{name}/": package_root(name) for name in packages}
  paths = [(prefix + path.relative_to(folder).as_posix(), path)
           for prefix, folder in folders.items()
           for path in source_files(folder)]  # fmt: skip
  for named, path in paths:
    name = named.encode()
    parts[zlib.crc32(name) % heldout_every == 0].append(path.read_bytes())
  train, heldout = (b"".join(part) for part in parts)
  if not train or not heldout:
    raise ValueError(
      f"{root} must hold Python source files for training and for held-out"
      f" text; got {len(train)} and {len(heldout)} bytes from"
      f" {len(paths)} files. Install Python with its standard library as files."
    )
  text = np.frombuffer(train, np.uint8)
  return Corpus(
    train=text,
    heldout=np.frombuffer(heldout, np.uint8),
    files=len(paths),
    unigram_entropy=unigram_entropy(text),
    digest=hashlib.sha256(train + b"\0" + heldout).hexdigest()[:16],
  )


@dataclasses.dataclass(frozen=True, slots=True)
class Windows:
  """Windows of a text side by side, as a grain random-access source.

  Attributes:
    text: ``[bytes] uint8``.
    length: bytes in a window; neighbours share one byte, the last target of
      one being the first input of the next.
  """

  text: np.ndarray
  length: int

  def __len__(self) -> int:
    return (self.text.size - 1) // (self.length - 1)

  def __getitem__(self, index: int) -> np.ndarray:
    """Returns window `index`, ``[length] uint8``."""
    start = index * (self.length - 1)
    return self.text[start : start + self.length]


def _windows(
  text: np.ndarray, data: experiment_lib.DataConfig, batches: int
) -> Windows:
  """Returns the windows of `text`, at least enough for `batches` batches."""
  windows = Windows(text, data.sequence_length + 1)
  needed = batches * data.batch_size
  if len(windows) < needed:
    raise ValueError(
      f"{needed} windows of {data.sequence_length} tokens are needed"
      f" ({batches} batches of {data.batch_size}); {text.size} bytes of text"
      f" hold {len(windows)}. Choose a smaller batch_size or sequence_length."
    )
  return windows


class Batches(Protocol):
  """An endless iterator whose state is JSON."""

  def __iter__(self) -> Batches: ...

  def __next__(self) -> np.ndarray: ...

  def get_state(self) -> dict[str, Any]:
    """Returns where the iterator stands."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from a state."""
    ...


class PlainBatches:
  """Shuffled batches by numpy alone, every epoch in an order of its own."""

  def __init__(self, windows: Windows, batch_size: int, seed: int) -> None:
    """Starts at the first batch of the first epoch."""
    self._windows, self._size, self._seed = windows, batch_size, seed
    self._taken = 0
    self._epoch, self._order = -1, np.zeros(0, np.int64)

  def __iter__(self) -> PlainBatches:
    """Returns itself."""
    return self

  def __next__(self) -> np.ndarray:
    """Returns the next ``[batch_size, length] uint8``."""
    rows = range(self._taken, self._taken + self._size)
    self._taken += self._size
    return np.stack([self._windows[self._place(row)] for row in rows])

  def get_state(self) -> dict[str, Any]:
    """Returns how many windows were taken."""
    return {"taken": self._taken}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on from a state."""
    self._taken = state["taken"]

  def _place(self, row: int) -> int:
    epoch, at = divmod(row, len(self._windows))
    if epoch != self._epoch:
      rng = np.random.default_rng([self._seed, epoch])
      self._epoch, self._order = epoch, rng.permutation(len(self._windows))
    return int(self._order[at])


def train_batches(
  corpus: Corpus, data: experiment_lib.DataConfig, seed: int
) -> Batches:
  """Returns endless shuffled batches; every epoch has an order of its own.

  Args:
    corpus: the text.
    data: sizes.
    seed: decides the order.

  Returns:
    An iterator over ``[batch_size, sequence_length + 1] uint8``, with
    ``get_state()`` and ``set_state(state)``.

  Raises:
    ValueError: the text is too short for one batch.
  """
  windows = _windows(corpus.train, data, batches=1)
  if importlib.util.find_spec("grain") is None:
    return PlainBatches(windows, data.batch_size, seed)
  import grain

  dataset = (
    grain.MapDataset.source(windows)
    .seed(seed)
    .shuffle()
    .repeat()
    .batch(data.batch_size, drop_remainder=True)
  )
  # Slicing bytes takes no time worth a thread.
  return iter(dataset.to_iter_dataset(grain.ReadOptions(num_threads=0)))


def heldout_batches(
  corpus: Corpus, data: experiment_lib.DataConfig
) -> list[np.ndarray]:
  """Returns held-out batches, evenly spread over the held-out text.

  Args:
    corpus: the text.
    data: sizes.

  Returns:
    `heldout_batches` arrays, ``[batch_size, sequence_length + 1] uint8``.

  Raises:
    ValueError: the text is too short.
  """
  windows = _windows(corpus.heldout, data, data.heldout_batches)
  count = data.heldout_batches * data.batch_size
  chosen = np.linspace(0, len(windows) - 1, count).astype(int)
  rows = np.stack([windows[int(index)] for index in chosen])
  return list(rows.reshape(data.heldout_batches, data.batch_size, -1))
