"""Groups: every pattern lands where plain Python says."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups

ROWS = 300
GROUPS = 5


@jax.jit
def tables(sizes):
  """Everything that a layout tells, in one compilation for all patterns."""
  layout = groups.group_layout(sizes, groups.aligned_rows(ROWS, GROUPS))
  return dict(
    starts=layout.starts,
    tile_count=layout.tile_count(),
    tile_group=layout.tile_group(),
    tile_rows=layout.tile_rows(),
    row_group=layout.row_group(),
    row_valid=layout.row_valid(),
    aligned_source=groups.aligned_source(layout),
    packed_source=groups.packed_source(layout, ROWS),
  )


def expected(sizes):
  """The same tables, one row at a time."""
  rows = groups.aligned_rows(ROWS, GROUPS)
  row_group, source, starts = np.full(rows, -1), np.full(rows, -1), []
  at = packed = 0
  for g, size in enumerate(sizes):
    starts.append(at)
    tall = -(-size // 128) * 128
    row_group[at : at + tall] = g
    source[at : at + size] = np.arange(packed, packed + size)
    at, packed = at + tall, packed + size
  return rows, np.asarray(starts), row_group, source, at // 128


@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_tables(pattern):
  sizes = cases.group_sizes(pattern, GROUPS, ROWS)
  got = jax.tree.map(np.asarray, tables(jnp.asarray(sizes, jnp.int32)))
  rows, starts, row_group, source, used = expected(sizes)
  assert rows % groups.ROW_ALIGN == 0
  np.testing.assert_array_equal(got["starts"], starts)
  assert (got["starts"] % groups.ROW_ALIGN == 0).all()
  assert got["tile_count"] == used
  np.testing.assert_array_equal(got["aligned_source"], source)
  np.testing.assert_array_equal(got["row_valid"], source >= 0)
  in_use = row_group >= 0
  np.testing.assert_array_equal(got["row_group"][in_use], row_group[in_use])
  np.testing.assert_array_equal(
    got["tile_group"][:used], row_group[: used * 128 : 128]
  )
  assert got["tile_group"].max(initial=0) < GROUPS
  np.testing.assert_array_equal(
    got["tile_rows"], (source >= 0).reshape(-1, 128).sum(1)
  )
  back = np.full(ROWS, -1)
  back[source[source >= 0]] = np.flatnonzero(source >= 0)
  np.testing.assert_array_equal(got["packed_source"], back)


def test_one_compilation_serves_all_patterns():
  for pattern in cases.PATTERNS:
    tables(jnp.asarray(cases.group_sizes(pattern, GROUPS, ROWS), jnp.int32))
  assert tables._cache_size() == 1


@pytest.mark.parametrize(
  ("rows", "count", "want"),
  [(0, 0, 0), (0, 1, 128), (1, 1, 128), (128, 1, 256), (300, 3, 768)],
)
def test_aligned_rows(rows, count, want):
  assert groups.aligned_rows(rows, count) == want


@pytest.mark.parametrize("rows", cases.ODD_ROWS)
def test_aligned_rows_hold_the_worst_case(rows):
  for first in range(rows + 1):
    sizes = [first, rows - first]
    tall = sum(-(-size // 128) * 128 for size in sizes)
    assert tall <= groups.aligned_rows(rows, 2)


@pytest.mark.parametrize(
  ("sizes", "rows", "want"),
  [
    ([3, 4, 5], 12, [3, 4, 5]),
    ([3, 4, 5], 20, [3, 4, 5]),
    ([3, 4, 5], 8, [3, 4, 1]),
    ([3, 4, 5], 2, [2, 0, 0]),
    ([3, -4, 5], 20, [3, 0, 5]),
    ([0, 0, 0], 0, [0, 0, 0]),
  ],
)
def test_sizes_are_cut_from_the_end(sizes, rows, want):
  got = groups.clamp_sizes(jnp.asarray(sizes), rows)
  assert got.tolist() == want
  assert got.dtype == jnp.int32


def test_take_rows_gives_zeros_where_there_is_no_row():
  x = jnp.arange(1, 7, dtype=jnp.float32).reshape(3, 2)
  got = groups.take_rows(x, jnp.asarray([2, -1, 0, 2]))
  assert got.tolist() == [[5, 6], [0, 0], [1, 2], [5, 6]]
  chex.assert_trees_all_equal(
    groups.take_rows(x[:0], jnp.asarray([-1, -1])), jnp.zeros((2, 2))
  )


def test_a_layout_is_a_pytree_with_static_rows():
  layout = groups.group_layout(jnp.asarray([1, 2]), 384)
  assert len(jax.tree.leaves(layout)) == 2
  through = jax.jit(lambda a: a)(layout)
  assert (through.rows, through.groups, through.tiles) == (384, 2, 3)


@pytest.mark.parametrize(
  ("step", "steps"), [(64, [11, 1, 1, 1, 0, 0]), (128, [6, 1, 1, 1, 0, 0])]
)
def test_groups_by_falling_size(step, steps):
  sizes = jnp.asarray([1, 0, 700, 64, 64, 0], jnp.int32)
  layout = groups.group_layout(sizes, groups.aligned_rows(829, 6))
  group, start, found = np.asarray(layout.by_size(step))
  assert group.tolist() == [2, 0, 3, 4, 1, 5]
  assert start.tolist() == np.asarray(layout.starts)[group].tolist()
  assert found.tolist() == steps
