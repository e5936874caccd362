"""Checkpoints: exact, complete or absent, refused when they do not fit."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import checkpoint, train
from experiments import experiment as experiment_lib
from tests.experiments import shrunken


def context(recipe="mxfp8", **changes):
  return checkpoint.Context(
    experiment=experiment_lib.to_dict(shrunken.experiment(**changes)),
    recipe=recipe,
    text_digest="abc",
    batches={"next_index": 3},
  )


@pytest.fixture(scope="module")
def state():
  """A state of step 1 whose every part has left its first value."""
  program = train.build(shrunken.experiment(), "mxfp8")
  return jax.tree.map(lambda leaf: leaf + 1, program.initialise())


@pytest.fixture
def folder(tmp_path, state):
  with checkpoint.Checkpoints(tmp_path, kept=2) as saved:
    saved.save(state, context())
  return tmp_path


def test_a_new_folder_has_nothing_to_go_on_from(tmp_path, state):
  with checkpoint.Checkpoints(tmp_path / "new", kept=2) as saved:
    assert saved.check(context()) == 0
    with pytest.raises(ValueError, match="no complete checkpoint"):
      saved.restore(state, context())


def test_every_leaf_comes_back_to_the_bit(folder, state):
  blank = train.build(shrunken.experiment(), "mxfp8").initialise()
  with checkpoint.Checkpoints(folder, kept=2) as saved:
    assert saved.check(context()) == 1
    restored, batches = saved.restore(blank, context())
  assert batches == {"next_index": 3}
  assert jax.tree.structure(restored) == jax.tree.structure(state)
  for one, other in zip(
    jax.tree.leaves(restored), jax.tree.leaves(state), strict=True
  ):
    assert one.dtype == other.dtype
    np.testing.assert_array_equal(one, other)


def test_bookkeeping_may_differ(folder):
  with checkpoint.Checkpoints(folder, kept=2) as saved:
    assert saved.check(context(checkpoint_every=77)) == 1


def test_other_settings_are_named(folder, state):
  asked = dataclasses.replace(context(recipe="bf16", seed=5), text_digest="def")
  lines = (
    "seed: saved 0, asked 5",
    "recipe: saved mxfp8, asked bf16",
    "text_digest: saved abc, asked def",
  )
  with checkpoint.Checkpoints(folder, kept=2) as saved:
    for refuse in (saved.check, lambda asked: saved.restore(state, asked)):
      with pytest.raises(ValueError, match="does not fit this run") as refused:
        refuse(asked)
      assert all(line in str(refused.value) for line in lines)


def test_other_arrays_are_named(folder):
  model = dataclasses.replace(shrunken.MODEL, d_ff=64, balance_bias=False)
  program = train.build(shrunken.experiment(model=model), "mxfp8")
  with (
    checkpoint.Checkpoints(folder, kept=2) as saved,
    pytest.raises(ValueError, match="does not fit this run") as refused,
  ):
    saved.restore(program.initialise(), context())
  said = str(refused.value)
  assert (
    "moe.down.value: saved float32[4,32,32], asked float32[4,64,32]" in said
  )
  assert "balance_bias.value: saved float32[4], asked nothing" in said


@pytest.mark.parametrize("part", ["state", "context"])
def test_a_damaged_checkpoint_is_named(folder, state, part):
  for path in (folder / "1" / part).rglob("*"):
    if path.is_file():
      path.write_bytes(b"damaged")
  with (
    checkpoint.Checkpoints(folder, kept=2) as saved,
    pytest.raises(ValueError, match="cannot be read") as refused,
  ):
    saved.restore(state, context())
  assert str(folder / "1") in str(refused.value)


def test_an_unfinished_checkpoint_does_not_count(folder):
  (folder / "9.orbax-checkpoint-tmp").mkdir()
  with checkpoint.Checkpoints(folder, kept=2) as saved:
    assert saved.latest() == 1


def test_only_the_newest_are_kept(tmp_path, state):
  with checkpoint.Checkpoints(tmp_path, kept=2) as saved:
    for step in (1, 2, 3):
      numbered = dataclasses.replace(state, step=np.int32(step))
      saved.save(numbered, context())
  assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3"]
