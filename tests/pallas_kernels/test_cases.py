"""The named shapes and group patterns."""

import pytest

from pallas_kernels import cases


@pytest.mark.parametrize("pattern", cases.PATTERNS)
@pytest.mark.parametrize("groups", [1, 2, 3, 8])
@pytest.mark.parametrize("rows", [0, *cases.ODD_ROWS, 300])
def test_sizes_never_exceed_the_rows(pattern, groups, rows):
  sizes = cases.group_sizes(pattern, groups, rows)
  assert len(sizes) == groups
  assert min(sizes) >= 0
  assert sum(sizes) <= rows
  whole = groups > 1 or not pattern.startswith("empty")
  if pattern not in ("all_empty", "single_row") and whole:
    assert sum(sizes) == rows


@pytest.mark.parametrize(
  ("pattern", "want"),
  [
    ("even", [26, 25, 25, 25]),
    ("skewed", [58, 25, 12, 6]),
    ("one_hot", [0, 0, 101, 0]),
    ("empty_first", [0, 64, 25, 12]),
    ("empty_last", [64, 25, 12, 0]),
    ("all_empty", [0, 0, 0, 0]),
    ("single_row", [1, 1, 1, 1]),
  ],
)
def test_what_each_pattern_means(pattern, want):
  assert cases.group_sizes(pattern, 4, 101) == want


def test_an_unknown_pattern_names_the_known_ones():
  with pytest.raises(ValueError, match="'even', .*got 'uneven'"):
    cases.group_sizes("uneven", 4, 101)


def test_model_shapes_can_be_quantized():
  for name, shape in cases.MODELS.items():
    assert shape.d_model % 32 == 0, name
    assert shape.d_ff % 32 == 0, name
    assert shape.top_k <= shape.num_experts, name


def test_widths_of_small_shapes_are_multiples_of_a_block():
  for _, _, k, n in cases.SMALL_MATMULS:
    assert k % 32 == 0
    assert n % 32 == 0
  assert any(width % 128 for width in cases.ODD_WIDTHS)
