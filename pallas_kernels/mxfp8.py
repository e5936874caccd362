"""The MXFP8 format: fp8 elements, one power-of-two scale per block of 32.

    value[i] = data[i] * 2^(scale[i // 32] - 127)

  data   float8_e4m3fn or float8_e5m2, the shape of the array it stands for
  scale  uint8, the biased exponent of a power of two (e8m0): 0 is 2^-127,
         255 is NaN. Never a float: NCCL has no e8m0 and a cast to it rounds.

Linear layout: one byte per block, the data's shape with the blocked axis
divided by 32. Blocked layout: the 512-byte atoms of 128 rows x 4 blocks that
the block-scaled MMA reads (the atom of cuBLAS).

The arithmetic is in `codec`, whose names are repeated here; what each kernel
does with the format is in `reference`.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import codec

DTYPES = codec.DTYPES
E4M3 = codec.E4M3
E5M2 = codec.E5M2
NAN_CODE = codec.NAN_CODE
RULES = codec.RULES
Rounding = codec.Rounding
SCALE_BIAS = codec.SCALE_BIAS
SCALE_NAN = codec.SCALE_NAN
decode = codec.decode
element_format = codec.element_format
encode = codec.encode
float32_bits = codec.float32_bits
scale_byte = codec.scale_byte

BLOCK = 32  # elements that share one scale (OCP MX v1.0)
ATOM_ROWS = 128  # rows of one 512-byte atom of blocked scales
ATOM_BLOCKS = 4  # blocks of one row in such an atom
ATOM_BYTES = ATOM_ROWS * ATOM_BLOCKS

BLOCKS = ("1x32", "32x32")
LAYOUTS = ("linear", "blocked")

Block = Literal["1x32", "32x32"]
Layout = Literal["linear", "blocked"]


def to_blocked(scale: jax.Array) -> jax.Array:
  """Linear scales [..., R, C] to atoms [..., ceil(R/128), ceil(C/4), 512].

  Scale (r, c) sits at byte (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4 of its
  atom. Rows and columns that fill up the last atoms hold 0 (2^-127: finite).

  Args:
    scale: uint8; R is the axis that is not contracted, C counts blocks.
  """
  *lead, rows, cols = scale.shape
  pad = [(0, 0)] * len(lead) + [(0, -rows % ATOM_ROWS),
                                (0, -cols % ATOM_BLOCKS)]
  scale = jnp.pad(scale, pad)
  tall, wide = -(-rows // ATOM_ROWS), -(-cols // ATOM_BLOCKS)
  scale = scale.reshape(*lead, tall, 4, 32, wide, ATOM_BLOCKS)
  scale = jnp.moveaxis(scale, -2, -4)  # [..., tall, wide, 4, 32, 4]
  scale = jnp.swapaxes(scale, -3, -2)  # [..., tall, wide, 32, 4, 4]
  return scale.reshape(*lead, tall, wide, ATOM_BYTES)


def from_blocked(scale: jax.Array, rows: int, cols: int) -> jax.Array:
  """The inverse of `to_blocked`: atoms back to linear [..., rows, cols]."""
  *lead, tall, wide, _ = scale.shape
  scale = scale.reshape(*lead, tall, wide, 32, 4, ATOM_BLOCKS)
  scale = jnp.swapaxes(scale, -3, -2)  # [..., tall, wide, 4, 32, 4]
  scale = jnp.moveaxis(scale, -4, -2)  # [..., tall, 4, 32, wide, 4]
  scale = scale.reshape(*lead, tall * ATOM_ROWS, wide * ATOM_BLOCKS)
  return scale[..., :rows, :cols]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class MxArray:
  """An array in MXFP8: a frozen pytree of codes and scales.

  Invariants, with B = 32 and `axis` negative (so that they survive a scan
  over, or a slice of, leading axes):

      block "1x32":   scale.shape == data.shape, but axis divided by B
      block "32x32":  scale.shape == data.shape, last two axes divided by B
      layout "linear":   scale as above
      layout "blocked":  scale == to_blocked(L), L the linear 1x32 view along
                         `axis`, transposed first if axis == -2
      folded:  L does not vary along `axis`: one scale per row (or column)
      value == data * 2^(scale - 127), scale repeated over its block

  Attributes:
    data: float8_e4m3fn or float8_e5m2, any shape.
    scale: uint8.
    axis: the axis that one block runs along, and that a matmul contracts.
    block: "1x32", or "32x32" for weights that are read along both axes.
    layout: "linear" or "blocked".
    folded: whether each row along `axis` has one scale for all its blocks
      (`reference.fold`), as Hopper's fp8 matmul wants; still MXFP8.

  Raises:
    TypeError: if data is not fp8, or scale is not uint8 (float scales are
      refused, not truncated to their exponent).
    ValueError: if the shapes do not obey the invariants.
  """

  data: jax.Array
  scale: jax.Array
  axis: int = dataclasses.field(default=-1, metadata=dict(static=True))
  block: Block = dataclasses.field(default="1x32", metadata=dict(static=True))
  layout: Layout = dataclasses.field(default="linear",
                                     metadata=dict(static=True))
  folded: bool = dataclasses.field(default=False, metadata=dict(static=True))

  def __post_init__(self):
    _check_static(self)
    if hasattr(self.data, "dtype") and hasattr(self.scale, "dtype"):
      _check_arrays(self)

  @property
  def shape(self) -> tuple[int, ...]:
    """The shape of the array that this stands for."""
    return self.data.shape

  @property
  def ndim(self) -> int:
    """The number of axes of the array that this stands for."""
    return self.data.ndim

  @property
  def nbytes(self) -> int:
    """Bytes of data and scales together."""
    return self.data.size + self.scale.size

  def dequantize(self, dtype: Any = jnp.bfloat16) -> jax.Array:
    """The numbers, in bfloat16 (rounded once) or float32 (exact)."""
    return decode(self.data, self.element_scales(), dtype)

  def element_scales(self) -> jax.Array:
    """Linear scale bytes repeated to one per element, the shape of data."""
    linear = self.with_layout("linear")
    scale = jnp.repeat(linear.scale, BLOCK, self.axis)
    if self.block == "32x32":
      scale = jnp.repeat(scale, BLOCK, -3 - self.axis)
    return scale

  def along(self, axis: int) -> "MxArray":
    """The 1x32 view along `axis` of 32x32 blocks; data is shared.

    Raises:
      ValueError: if the blocks are 1x32 along another axis: they cannot be
        re-read, only requantized.
    """
    axis = axis - self.ndim if axis >= 0 else axis
    if self.block == "1x32":
      if axis == self.axis:
        return self
      raise ValueError(
          f"along: blocks of 1x32 along axis {self.axis} cannot be read along"
          f" axis {axis}; requantize, or use block='32x32'.")
    linear = self.with_layout("linear")
    scale = jnp.repeat(linear.scale, BLOCK, -3 - axis)
    return MxArray(self.data, scale, axis=axis)

  def with_layout(self, layout: Layout) -> "MxArray":
    """The same numbers with scales in another layout."""
    if layout not in LAYOUTS:
      raise ValueError(f"layout must be one of {LAYOUTS}; got {layout!r}.")
    if layout == self.layout:
      return self
    other = -3 - self.axis  # the axis of the last two that is not contracted
    if layout == "blocked":
      scale = self.along(self.axis).scale
      scale = scale if self.axis == -1 else jnp.swapaxes(scale, -1, -2)
      return dataclasses.replace(self, scale=to_blocked(scale), layout=layout)
    rows, cols = self.shape[other], self.shape[self.axis] // BLOCK
    scale = from_blocked(self.scale, rows, cols)
    scale = scale if self.axis == -1 else jnp.swapaxes(scale, -1, -2)
    if self.block == "32x32":
      first = jnp.arange(0, rows, BLOCK)
      scale = jnp.take(scale, first, axis=other)
    return dataclasses.replace(self, scale=scale, layout=layout)

  def __repr__(self) -> str:
    data = getattr(self.data, "dtype", type(self.data).__name__)
    shape = list(getattr(self.data, "shape", ()))
    scales = list(getattr(self.scale, "shape", ()))
    folded = "folded " if self.folded else ""
    return (f"MxArray({shape} {data}, {self.block} blocks along axis"
            f" {self.axis}, {folded}{self.layout} scales {scales} uint8)")


def _check_static(x: MxArray) -> None:
  if x.block not in BLOCKS:
    raise ValueError(f"block must be one of {BLOCKS}; got {x.block!r}.")
  if x.layout not in LAYOUTS:
    raise ValueError(f"layout must be one of {LAYOUTS}; got {x.layout!r}.")
  if x.axis >= 0:
    raise ValueError(
        f"axis of an MxArray must be negative (counted from the end);"
        f" got axis={x.axis}. Pass axis - ndim.")
  if x.folded and x.block != "1x32":
    raise ValueError(
        "folded rows have one scale each, so their blocks are 1x32; got"
        f" block={x.block!r}.")
  if x.axis < -2 and (x.block == "32x32" or x.layout == "blocked"):
    raise ValueError(
        f"32x32 blocks and blocked scales need axis -1 or -2; got axis="
        f"{x.axis}. Use block='1x32' with linear scales, or move the axis.")


def _check_arrays(x: MxArray) -> None:
  data, scale = np.dtype(x.data.dtype), np.dtype(x.scale.dtype)
  fp8, bytes_ = data in DTYPES, scale == np.uint8
  if not (fp8 or bytes_) or scale == jax.dtypes.float0:
    return  # a tree of results (tangents, comparisons), not an MXFP8 array
  if not (fp8 and bytes_):
    raise TypeError(
        "MxArray needs fp8 data and uint8 scales (biased exponents of powers"
        f" of two); got data {data}, scale {scale}. Float scales that are no"
        " powers of two have no MXFP8 form: quantize the values again.")
  want = scale_shape(x.data.shape, x.axis, x.block, x.layout)
  if tuple(x.scale.shape) != want:
    raise ValueError(
        f"MxArray of shape {tuple(x.data.shape)} with {x.block} blocks along"
        f" axis {x.axis} and {x.layout} scales needs scales of shape {want};"
        f" got {tuple(x.scale.shape)}.")


def scale_shape(shape: tuple[int, ...], axis: int, block: Block,
                layout: Layout) -> tuple[int, ...]:
  """The shape of the scale array that `MxArray` demands.

  Raises:
    ValueError: if a quantized axis is missing or no multiple of 32, or the
      block or the layout is unknown.
  """
  for name, value, allowed in (("block", block, BLOCKS),
                               ("layout", layout, LAYOUTS)):
    if value not in allowed:
      raise ValueError(f"{name} must be one of {allowed}; got {value!r}.")
  blocked_axes = (-1, -2) if block == "32x32" else (axis,)
  out = list(shape)
  if len(shape) < max(-a for a in blocked_axes):
    raise ValueError(
        f"quantize: {block} blocks along axis {axis} need more axes than"
        f" x{tuple(shape)} has.")
  for a in blocked_axes:
    if shape[a] % BLOCK:
      raise ValueError(
          f"quantize: axis {a} must be a multiple of {BLOCK} (one scale per"
          f" {BLOCK} values); got {shape[a]} in x{tuple(shape)}. Pad it to"
          f" {-(-shape[a] // BLOCK) * BLOCK}.")
    out[a] //= BLOCK
  if layout == "linear":
    return tuple(out)
  rows, cols = shape[-3 - axis], shape[axis] // BLOCK
  return (*shape[:-2], -(-rows // ATOM_ROWS), -(-cols // ATOM_BLOCKS),
          ATOM_BYTES)
