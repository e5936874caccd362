"""The H200 experiment, shrunken, and running without optional packages."""

import dataclasses
import json
import pathlib
import subprocess
import sys

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import command, data, plain_command
from experiments import experiment as experiment_lib
from experiments import model as model_lib
from experiments.configs import h200_moe
from tests import tolerance
from tests.experiments import shrunken

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = str(ROOT / "experiments/configs/h200_moe.py")
TINY = (
  *("--steps", "3", "--data.packages", "optax", "--data.batch-size", "4"),
  *("--data.sequence-length", "16", "--data.heldout-batches", "1"),
  *("--model.d-model", "32", "--model.d-ff", "32", "--model.num-heads", "2"),
  *("--model.num-layers", "2", "--model.num-experts", "4"),
)
# None in sys.modules: to Python the package is not installed.
BARE = (
  "import sys; sys.modules.update(dict.fromkeys(['tyro', 'grain',"
  " 'matplotlib'])); from experiments import run;"
  " sys.exit(run.main(sys.argv[1:]))"
)


def test_it_runs_without_tyro_grain_and_matplotlib(tmp_path):
  out = tmp_path / "out"
  words = [CONFIG, *TINY, "--recipe", "folded", "--seed", "1"]
  done = subprocess.run(
    [sys.executable, "-c", BARE, *words, "--out", str(out)],
    cwd=ROOT, capture_output=True, text=True, timeout=200,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr
  summary = json.loads((out / "summary.json").read_text())
  (run,) = summary["runs"]
  assert (run["recipe"], run["seed"], len(run["losses"])) == ("folded", 1, 3)
  assert np.isfinite(run["heldout_loss"])
  assert run["flop_utilisation"] is None  # no data sheet says a CPU's peak
  assert summary["text"]["source"] == "Python standard library, optax"
  assert not (out / "loss.png").exists()


def test_it_has_the_size_that_it_says():
  found = h200_moe.experiment()
  layer = model_lib.moe_config(found.model, "bf16", found.mesh)
  model = nnx.eval_shape(
    lambda: model_lib.Transformer(found.model, layer, rngs=nnx.Rngs(0))
  )
  leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
  assert sum(leaf.size for leaf in leaves) == pytest.approx(185e6, rel=0.01)
  assert found.steps >= 2000
  assert found.recipes == ("bf16", "mxfp8", "mxfp8_bf16_wgrad", "folded")


def test_operations_of_a_token_by_hand():
  config = dataclasses.replace(
    shrunken.MODEL, num_layers=2, top_k=3, d_ff_shared=64
  )
  layer = 4 * 32 * 32 + 32 * 4 + 3 * 32 * (3 * 32 + 64) + 16 * 32
  want = 6 * (2 * layer + 32 * 256)
  assert model_lib.flops_per_token(config, 16) == want


def test_scanned_layers_compute_what_separate_ones_do():
  tokens = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 16)))
  logits = []
  for scan in (False, True):
    config = dataclasses.replace(shrunken.MODEL, num_layers=2, scan_layers=scan)
    layer = model_lib.moe_config(config, "bf16", experiment_lib.MeshConfig())
    model = model_lib.Transformer(config, layer, rngs=nnx.Rngs(params=0))
    out, stats = nnx.jit(lambda model, tokens: model(tokens))(model, tokens)
    logits.append(out)
    assert stats.load.shape == (2, 4)
  # XLA leaves out other roundings to bf16 in a loop.
  assert tolerance.sqnr(*logits) >= tolerance.LAYER_BF16


def test_plain_flags_are_those_of_tyro():
  words = [
    *("--steps", "3", "--out", "there", "--recipes", "mxfp8", "bf16"),
    *("--model.num-experts", "16", "--optimizer.learning-rate", "1e-4"),
    *("--model.buffer-factor", "1.5", "--model.balance-bias"),
    *("--model.no-scan-layers", "--data.packages", "optax", "numpy"),
  ]
  default = command.Command(experiment=h200_moe.experiment())
  plain = plain_command.parse(default, words, "prog")
  assert plain == command.parse([CONFIG, *words])
  assert plain.experiment.model.buffer_factor == 1.5
  assert plain_command.parse(default, [], "prog") == default


@pytest.mark.parametrize(
  "words",
  [["--steps", "many"], ["--recipes", "fp4"], ["--no-such"], ["--seed"]],
)
def test_plain_flags_that_do_not_fit_end_the_command(words, capsys):
  default = command.Command(experiment=h200_moe.experiment())
  with pytest.raises(SystemExit) as ended:
    plain_command.parse(default, words, "prog")
  assert ended.value.code == 2
  assert words[0] in capsys.readouterr().err


def test_plain_batches_shuffle_each_epoch_and_go_on_from_a_state():
  windows = data.Windows(np.arange(4 * 16 * 3 + 1, dtype=np.uint8), 17)
  batches = data.PlainBatches(windows, 4, seed=0)
  epochs = [
    [int(row[0]) for _ in range(3) for row in next(batches)] for _ in range(2)
  ]
  assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(0, 192, 16))
  assert epochs[0] != epochs[1]
  state = json.loads(json.dumps(batches.get_state()))
  resumed = data.PlainBatches(windows, 4, seed=0)
  resumed.set_state(state)
  np.testing.assert_array_equal(next(resumed), next(batches))
  other = data.PlainBatches(windows, 4, seed=1)
  assert [int(row[0]) for row in next(other)] != epochs[0][:4]


def test_packages_add_text_and_a_missing_one_is_named():
  alone = data.read_corpus(20)
  more = data.read_corpus(20, packages=["optax"])
  assert more.files > alone.files
  assert more.train.size > alone.train.size
  assert bytes(more.train[: alone.train.size]) == bytes(alone.train)
  with pytest.raises(ValueError, match="'no_such_package', which is not"):
    data.read_corpus(20, packages=["no_such_package"])
