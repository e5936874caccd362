"""Groups: which rows belong to which expert, and which tiles cover them.

Rows of one group are contiguous. Every group starts at a multiple of 128
rows, so that no tile and no block of 32 rows ever holds rows of two experts:

    start[g + 1] = start[g] + round_up(size[g], 128)

    row    0       44      128              255 256
           | g0 ... | zeros  | g1 ............. | (g2 is empty) g3 ...
    tile   0                 1                   2

Sizes live on the device; the number of rows is static, so one compilation
serves every routing. Rows between groups are padding: they hold zeros.
"""

import dataclasses

import jax
import jax.numpy as jnp

ROW_ALIGN = 128  # rows: the smallest MMA tile, and one atom of blocked scales


def round_up(n: int, multiple: int) -> int:
  """The smallest multiple of `multiple` that is at least `n`."""
  return -(-n // multiple) * multiple


def aligned_rows(rows: int, groups: int) -> int:
  """Rows of a buffer that holds `rows` rows in `groups` aligned groups.

  At worst each group wastes 127 rows: round_up(rows + groups * 127, 128).
  """
  return round_up(rows + groups * (ROW_ALIGN - 1), ROW_ALIGN)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class GroupLayout:
  """Where each group lies in a buffer of aligned rows.

  Attributes:
    sizes: [groups] int32, rows of each group.
    starts: [groups] int32, first row of each group, multiples of 128.
    rows: rows of the buffer (static).
  """

  sizes: jax.Array
  starts: jax.Array
  rows: int = dataclasses.field(metadata=dict(static=True))

  @property
  def groups(self) -> int:
    """The number of groups."""
    return self.sizes.shape[0]

  @property
  def tiles(self) -> int:
    """The number of 128-row tiles of the buffer."""
    return self.rows // ROW_ALIGN

  def tile_count(self) -> jax.Array:
    """[] int32, the tiles that hold rows; they come first."""
    aligned = -(-self.sizes // ROW_ALIGN)
    return jnp.sum(aligned, dtype=jnp.int32)

  def tile_group(self) -> jax.Array:
    """[tiles] int32, the group of each tile; the last group past the end."""
    ends = jnp.cumsum(-(-self.sizes // ROW_ALIGN))
    tile = jnp.arange(self.tiles, dtype=jnp.int32)
    group = jnp.searchsorted(ends, tile, side="right", method="compare_all")
    return jnp.minimum(group, self.groups - 1).astype(jnp.int32)

  def tile_rows(self) -> jax.Array:
    """[tiles] int32, the valid rows of each tile, 0 to 128."""
    group = self.tile_group()
    first = jnp.arange(self.tiles, dtype=jnp.int32) * ROW_ALIGN
    end = self.starts[group] + self.sizes[group]
    return jnp.clip(end - first, 0, ROW_ALIGN)

  def by_size(self, step: int) -> jax.Array:
    """[3, groups] int32: groups by falling size, first rows, steps of rows.

    Sorted by counting, which XLA fuses to one small kernel.

    Args:
      step: rows of a step, a divisor of 128.
    """
    steps = -(-self.sizes // step)
    group = jnp.arange(self.groups, dtype=jnp.int32)
    longer = steps[None, :] > steps[:, None]
    equal = steps[None, :] == steps[:, None]
    earlier = longer | (equal & (group[None, :] < group[:, None]))
    place = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    chosen = place[None, :] == group[:, None]  # [place, group]
    rows = jnp.stack([group, self.starts, steps])
    picked = jnp.where(chosen[None], rows[:, None, :], 0)
    return jnp.sum(picked, axis=2, dtype=jnp.int32)

  def row_group(self) -> jax.Array:
    """[rows] int32, the group of each row, padding included."""
    return jnp.repeat(self.tile_group(), ROW_ALIGN)

  def row_valid(self) -> jax.Array:
    """[rows] bool, whether a row belongs to a group or is padding."""
    inside = jnp.arange(ROW_ALIGN, dtype=jnp.int32)
    return (inside < self.tile_rows()[:, None]).reshape(-1)


def group_layout(sizes: jax.Array, rows: int) -> GroupLayout:
  """Lays groups out in a buffer of `rows` rows.

  Args:
    sizes: [groups] int32; the aligned sizes must not exceed `rows`
      (`aligned_rows` says how many are enough).
    rows: rows of the buffer, a multiple of 128.
  """
  sizes = sizes.astype(jnp.int32)
  aligned = -(-sizes // ROW_ALIGN) * ROW_ALIGN
  return GroupLayout(sizes, jnp.cumsum(aligned) - aligned, rows)


def clamp_sizes(sizes: jax.Array, rows: int) -> jax.Array:
  """Sizes cut so that their sum stays within `rows`, later groups first."""
  ends = jnp.clip(jnp.cumsum(jnp.maximum(sizes, 0)), 0, rows)
  return jnp.diff(ends, prepend=0).astype(jnp.int32)


def aligned_source(layout: GroupLayout) -> jax.Array:
  """Where each aligned row comes from in the same rows without padding.

  Returns:
    [rows] int32, the index of the row in the packed order (groups one after
    another); -1 for padding.
  """
  packed = jnp.cumsum(layout.sizes) - layout.sizes
  group = layout.row_group()
  row = jnp.arange(layout.rows, dtype=jnp.int32)
  source = row - layout.starts[group] + packed[group]
  return jnp.where(layout.row_valid(), source, -1)


def packed_source(layout: GroupLayout, rows: int) -> jax.Array:
  """Where each row of the packed order lies in the aligned buffer.

  Args:
    layout: of the aligned buffer.
    rows: rows of the packed array, which may have rows past the last group.

  Returns:
    [rows] int32, the aligned row; -1 past the last group.
  """
  ends = jnp.cumsum(layout.sizes)
  row = jnp.arange(rows, dtype=jnp.int32)
  group = jnp.searchsorted(ends, row, side="right", method="compare_all")
  group = jnp.minimum(group, layout.groups - 1)
  aligned = row - (ends - layout.sizes)[group] + layout.starts[group]
  return jnp.where(row < ends[-1], aligned, -1).astype(jnp.int32)


def take_rows(x: jax.Array, source: jax.Array) -> jax.Array:
  """Rows of `x` by index; zeros where the index is -1.

  Args:
    x: [n, ...].
    source: [rows] int32 in -1..n-1.

  Returns:
    [rows, ...] of the dtype of x; a row of zeros (fp8: +0) for -1.
  """
  if x.shape[0] == 0:
    return jnp.zeros((source.shape[0], *x.shape[1:]), x.dtype)
  rows = jnp.take(x, jnp.maximum(source, 0), axis=0, mode="clip")
  keep = (source >= 0).reshape(-1, *[1] * (x.ndim - 1))
  return jnp.where(keep, rows, jnp.zeros((), x.dtype))
