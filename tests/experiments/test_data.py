"""The text and its batches: deterministic, split by file, resumable."""

import json

import numpy as np
import pytest

from experiments import data
from experiments import experiment as experiment_lib

CONFIG = experiment_lib.DataConfig(sequence_length=16, batch_size=4)


@pytest.fixture(scope="module")
def corpus():
  return data.read_corpus(20)


def test_the_standard_library_is_there_and_split(corpus):
  assert corpus.train.size > 1_000_000
  assert 0.01 < corpus.heldout.size / corpus.train.size < 0.2
  assert corpus.train.dtype == np.uint8


def test_reading_twice_gives_the_same_text(corpus):
  again = data.read_corpus(20)
  assert again.digest == corpus.digest
  np.testing.assert_array_equal(again.train, corpus.train)


def test_files_are_sorted_and_machine_files_left_out(tmp_path):
  for name in ("b.py", "a/z.py", "test/c.py", "_sysconfigdata_x.py", "a.txt"):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(name)
  names = [
    path.relative_to(tmp_path).as_posix()
    for path in data.source_files(tmp_path)
  ]
  assert names == ["a/z.py", "b.py"]


def test_the_split_follows_names_not_contents(tmp_path):
  for number in range(40):
    (tmp_path / f"m{number}.py").write_text(f"{number:04d}")
  before = bytes(data.read_corpus(4, tmp_path).heldout)
  for number in range(40):
    (tmp_path / f"m{number}.py").write_text(f"{number + 5000:04d}")
  after = bytes(data.read_corpus(4, tmp_path).heldout)
  pairs = [
    (before[start : start + 4], after[start : start + 4])
    for start in range(0, len(before), 4)
  ]
  assert len(before) == len(after) > 0
  assert all(int(new) == int(old) + 5000 for old, new in pairs)


def test_a_folder_without_sources_is_refused(tmp_path):
  with pytest.raises(ValueError, match="from 0 files"):
    data.read_corpus(20, tmp_path)


def test_unigram_entropy_is_in_nats():
  even = np.repeat(np.arange(8, dtype=np.uint8), 5)
  assert data.unigram_entropy(even) == pytest.approx(np.log(8))
  assert data.unigram_entropy(np.zeros(9, np.uint8)) == 0.0


def test_unigram_entropy_of_the_text(corpus):
  shares = np.bincount(corpus.train) / corpus.train.size
  shares = shares[shares > 0]
  expected = np.sum(shares * np.log(1 / shares))
  assert corpus.unigram_entropy == pytest.approx(expected)
  assert 2.5 < corpus.unigram_entropy < 4.0


def test_windows_share_one_byte_and_lose_none():
  text = np.arange(31, dtype=np.uint8)
  windows = data.Windows(text, 6)
  assert len(windows) == 6
  targets = [windows[index][1:] for index in range(len(windows))]
  np.testing.assert_array_equal(np.concatenate(targets), text[1:])


def test_batches_depend_on_the_seed_alone(corpus):
  one = data.train_batches(corpus, CONFIG, seed=3)
  same = data.train_batches(corpus, CONFIG, seed=3)
  other = data.train_batches(corpus, CONFIG, seed=4)
  first = next(one)
  assert first.shape == (4, 17)
  assert first.dtype == np.uint8
  np.testing.assert_array_equal(first, next(same))
  assert not np.array_equal(first, next(other))
  assert not np.array_equal(first, next(one))


def test_an_iterator_goes_on_from_its_state(corpus):
  batches = data.train_batches(corpus, CONFIG, seed=0)
  for _ in range(3):
    next(batches)
  state = json.loads(json.dumps(batches.get_state()))
  expected = [next(batches) for _ in range(3)]
  resumed = data.train_batches(corpus, CONFIG, seed=0)
  resumed.set_state(state)
  for batch in expected:
    np.testing.assert_array_equal(next(resumed), batch)


def test_an_epoch_shows_each_window_once_in_a_new_order():
  text = np.arange(4 * 16 * 3 + 1, dtype=np.uint8)
  corpus = data.Corpus(
    train=text, heldout=text, files=1, unigram_entropy=0.0, digest=""
  )
  batches = data.train_batches(corpus, CONFIG, seed=0)
  epochs = [
    [int(row[0]) for _ in range(3) for row in next(batches)] for _ in range(2)
  ]
  assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 192, 16))
  assert epochs[0] != epochs[1]


def test_heldout_batches_are_heldout_text(corpus):
  batches = data.heldout_batches(corpus, CONFIG)
  assert len(batches) == CONFIG.heldout_batches
  assert all(batch.shape == (4, 17) for batch in batches)
  assert bytes(batches[0][0]) == bytes(corpus.heldout[:17])


def test_too_little_text_is_said_with_numbers():
  text = np.zeros(40, np.uint8)
  corpus = data.Corpus(
    train=text, heldout=text, files=1, unigram_entropy=0.0, digest=""
  )
  with pytest.raises(ValueError, match=r"4 windows of 16 tokens.*40 bytes"):
    data.train_batches(corpus, CONFIG, seed=0)
  with pytest.raises(ValueError, match="16 windows of 16 tokens"):
    data.heldout_batches(corpus, CONFIG)
