"""The README's numbers are those of the kept results."""

import json

import pytest

from experiments import tables


def marked(name):
  return (
    f"a\n<!-- results {name}: begin -->\nold\n<!-- results {name}: end -->\nb\n"
  )


def test_the_readme_shows_the_kept_results():
  assert "<!-- results " in tables.PAGE.read_text()
  assert tables.main(["--check"]) == 0


def test_a_changed_number_is_found_and_put_right(tmp_path, capsys):
  page = tmp_path / "README.md"
  page.write_text(marked("experts"))
  assert tables.main(["--check"], page) == 1
  assert "tables differ" in capsys.readouterr().err
  assert "old" in page.read_text()
  assert tables.main([], page) == 0
  assert "| 16 | 64.5 | 1.13 |" in page.read_text()
  assert page.read_text().startswith("a\n")
  assert page.read_text().endswith("\nb\n")
  assert tables.main(["--check"], page) == 0


def test_an_unknown_table_is_refused():
  with pytest.raises(ValueError, match="got 'wishes'"):
    tables.rewrite(marked("wishes"))


def test_training_compares_means_over_seeds(tmp_path):
  with pytest.raises(ValueError, match="must hold runs of bf16"):
    tables.training(tmp_path)
  for recipe, seed, loss in (
    ("bf16", 0, 1.0), ("bf16", 1, 1.1), ("folded", 0, 1.05), ("folded", 1, 1.06)
  ):  # fmt: skip
    run = {
      "recipe": recipe,
      "heldout_loss": loss,
      "tokens_per_second": 2e5,
      "flop_utilisation": 0.125,
    }
    path = tmp_path / f"{recipe}-{seed}.json"
    path.write_text(json.dumps({"runs": [run]}))
  text = tables.training(tmp_path)
  assert "| bf16 | 2 | 1.0500 | 0.1000 | +0.00% | 200,000 | 12.5% |" in text
  assert "| folded | 2 | 1.0550 | 0.0100 | +0.48% | 200,000 | 12.5% |" in text
