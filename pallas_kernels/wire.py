"""The wire format: one row of MXFP8 (or bf16) and a float32, in bytes.

    data | linear scales | float32 weight | zeros      stride: 128-aligned

One collective then moves data, scales and weight together (NCCL has no e8m0
and no fp8 on every version; bytes it has). For d_model = 7168 a row is 7168 +
224 + 4 bytes, stride 7424.
"""

import dataclasses
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp

from pallas_kernels import groups, mxfp8

MxArray = mxfp8.MxArray

WIRE_ALIGN = 128  # bytes: the unit of bulk copies on the GPU
WEIGHT_BYTES = 4


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WireRows:
  """MXFP8 rows that stay where the wire brought them.

  Kernels that take a stride read the data in its place; `array` is for all
  others, and costs a copy of the rows if it is read.

  Attributes:
    packed: [R, stride] uint8, as `pack` makes them.
    width: K, elements of a row.
    dtype: fp8 type of the data.
    folded: whether the scales of a row are all alike (`MxArray.folded`).
  """

  packed: jax.Array
  width: int = dataclasses.field(metadata=dict(static=True))
  dtype: Any = dataclasses.field(metadata=dict(static=True))
  folded: bool = dataclasses.field(default=False, metadata=dict(static=True))

  axis = -1  # of the blocks, as of an MxArray
  block = "1x32"

  @property
  def shape(self) -> tuple[int, int]:
    """[R, K]."""
    return self.packed.shape[0], self.width

  @property
  def data(self) -> jax.Array:
    """[R, stride] of the fp8 type; the first K columns are the data."""
    return lax.bitcast_convert_type(self.packed, self.dtype)

  def array(self) -> MxArray:
    """The rows as an MxArray with linear scales."""
    scale = self.packed[:, self.width:self.width + self.width // mxfp8.BLOCK]
    return MxArray(self.data[:, :self.width], scale, folded=self.folded)

  def weights(self) -> jax.Array:
    """[R] float32, what rode along."""
    end = self.width + self.width // mxfp8.BLOCK
    return _from_bytes(self.packed[:, end:end + WEIGHT_BYTES],
                       jnp.float32)[:, 0]


def array(x: Any) -> Any:
  """x, or the MxArray that wire rows hold."""
  return x.array() if isinstance(x, WireRows) else x


def stride(width: int, precision: str) -> int:
  """Bytes of one wire row: data, scales, float32 weight; 128-aligned."""
  data = width + width // mxfp8.BLOCK if precision == "mxfp8" else 2 * width
  return groups.round_up(data + WEIGHT_BYTES, WIRE_ALIGN)


def pack(rows: jax.Array | MxArray, extra: jax.Array) -> jax.Array:
  """[n, stride] uint8 wire rows of rows [n, d] and extra [n] float32."""
  if isinstance(rows, MxArray):
    rows = rows.with_layout("linear")
  parts = [rows.data, rows.scale] if isinstance(rows, MxArray) else [rows]
  parts = [_as_bytes(p) for p in (*parts, extra[:, None])]
  used = sum(p.shape[1] for p in parts)
  spare = -used % WIRE_ALIGN
  parts.append(jnp.zeros((extra.shape[0], spare), jnp.uint8))
  return jnp.concatenate(parts, axis=1)


def unpack(packed: jax.Array, like: jax.Array | MxArray
           ) -> tuple[jax.Array | MxArray, jax.Array]:
  """The inverse of `pack`; `like` gives width and precision."""
  width = like.shape[-1]
  if isinstance(like, MxArray):
    data = lax.bitcast_convert_type(packed[:, :width], like.data.dtype)
    end = width + width // mxfp8.BLOCK
    rows = dataclasses.replace(like, data=data, layout="linear",
                               scale=packed[:, width:end])
  else:
    end = width * like.dtype.itemsize
    rows = _from_bytes(packed[:, :end], like.dtype)
  extra = _from_bytes(packed[:, end:end + WEIGHT_BYTES], jnp.float32)
  return rows, extra[:, 0]


def _as_bytes(x: jax.Array) -> jax.Array:
  """[n, d] of any dtype as [n, bytes] uint8."""
  if x.dtype.itemsize == 1:
    return lax.bitcast_convert_type(x, jnp.uint8)
  return lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1)


def _from_bytes(x: jax.Array, dtype: Any) -> jax.Array:
  """The inverse of `_as_bytes` for dtypes of several bytes."""
  size = jnp.dtype(dtype).itemsize
  return lax.bitcast_convert_type(x.reshape(x.shape[0], -1, size), dtype)
