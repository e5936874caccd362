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
