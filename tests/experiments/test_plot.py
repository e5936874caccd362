"""The loss curves."""

import pytest

from experiments import plot, results


def run(recipe):
  return results.RunResult(
    recipe=recipe,
    seed=0,
    losses=[3.0, 2.0, 1.0],
    heldout_loss=1.5,
    tokens_per_second=10.0,
    load_imbalance=1.0,
    dropped_rows=0,
    parameters=1,
    wall_seconds=1.0,
  )


@pytest.mark.parametrize(
  ("window", "expected"),
  [(1, [4.0, 2.0, 0.0]), (2, [4.0, 3.0, 1.0]), (9, [4.0, 3.0, 2.0])],
)
def test_smooth_is_a_mean_of_what_came_before(window, expected):
  assert plot.smooth([4.0, 2.0, 0.0], window) == expected


def test_draw_writes_a_png(tmp_path):
  path = tmp_path / "loss.png"
  plot.draw(
    path, [run("bf16"), run("mxfp8")], unigram_entropy=3.1, title="a title"
  )
  assert path.read_bytes().startswith(b"\x89PNG")
