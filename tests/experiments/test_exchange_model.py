"""The model of the exchange: through its points, and as the docs show it."""

import pathlib

import pytest

from experiments import exchange_model

PAGE = pathlib.Path(__file__).parents[2] / "docs/expert_parallelism.md"


def test_it_passes_near_what_was_measured():
  link = exchange_model.fit()
  for rows, *measured in exchange_model.MEASURED:
    for precision, took in zip(("bf16", "mxfp8"), measured, strict=True):
      got = exchange_model.leg_ms(
        rows, exchange_model.WIDTH, precision, 2, 2, link
      )
      assert got == pytest.approx(took, rel=0.1)


def test_more_bytes_and_slower_links_take_longer():
  link = exchange_model.fit()
  legs = [
    exchange_model.leg_ms(rows, 7168, precision, devices, 8, link)
    for precision, rows, devices in (
      ("mxfp8", 4096, 8),
      ("bf16", 4096, 8),
      ("bf16", 8192, 8),
      ("bf16", 8192, 64),
      ("bf16", 8192, 512),
    )
  ]
  assert legs == sorted(legs)
  assert len(set(legs)) == len(legs)


def test_the_page_shows_what_the_command_prints(capsys):
  assert exchange_model.main([]) == 0
  text = PAGE.read_text()
  shown = text.split("<!-- model: begin -->")[1].split("<!-- model: end -->")[0]
  assert shown.strip() == capsys.readouterr().out.strip()
  assert "Model, not measured" in shown
