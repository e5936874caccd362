"""SwiGLU on a part of a tile: 128 rows x 16 columns in registers.

    h       = weight * silu(gate) * (up + offset)
    silu(g) = g * sigmoid(alpha * g)

and its gradients, in float32 and in the order of `reference.swiglu` and
`reference.swiglu_backward`. Thread r holds row r, so that a row's weight, its
share of dweight, and what it wrote to shared memory are its own.

The sigmoid is 1 / (1 + exp(-x)) by two approximate instructions, ex2 and
rsqrt. On an H200 0.999999 of the quantized bytes equal the reference's
(experiments/results/nvidia_h200/bench.json).
"""

from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import activation, mosaic

ROWS = mosaic.ATOM
PART = 16  # columns: few enough that all numbers fit in registers
SHAPE = (ROWS, PART)


def layout() -> Any:
  """Register layout of a part."""
  return mosaic.row_layout(jnp.bfloat16)


def per_row(x: jax.Array) -> jax.Array:
  """[128] to [128, 16]: a number of each row."""
  return plgpu.layout_cast(lax.broadcast_in_dim(x, SHAPE, (0,)), layout())


def per_column(x: jax.Array) -> jax.Array:
  """[16] to [128, 16]: a number of each column."""
  return plgpu.layout_cast(lax.broadcast_in_dim(x, SHAPE, (1,)), layout())


def row_index() -> jax.Array:
  """[128] int32, the row that each thread holds."""
  index = lax.broadcasted_iota(jnp.int32, (ROWS,), 0)
  return plgpu.layout_cast(index, layout().reduce(1))


def sigmoid(x: jax.Array) -> jax.Array:
  """1 / (1 + exp(-x))."""
  root = lax.rsqrt(1.0 + jnp.exp(-x))
  return root * root


def clamp(
  gate: jax.Array, up: jax.Array, form: activation.Swiglu
) -> tuple[jax.Array, jax.Array]:
  """gate cut from above and up on both sides, as ``form`` says."""
  if form.limit is None:
    return gate, up
  up = jnp.maximum(jnp.minimum(up, form.limit), -form.limit)
  return jnp.minimum(gate, form.limit), up


def inside(x: jax.Array, limit: float) -> jax.Array:
  """1 where x does not exceed the limit, else 0; a NaN stays one in x * 0."""
  return jnp.where(x > limit, jnp.zeros_like(x), jnp.ones_like(x))


def scaled(x: jax.Array, alpha: float) -> jax.Array:
  """alpha * x, without a product by one."""
  return x if alpha == 1.0 else x * alpha


def activate(
  gate: jax.Array, up: jax.Array, weight: jax.Array, form: activation.Swiglu
) -> jax.Array:
  """weight * silu(gate) * up.

  Args:
    gate: [128, 16] float32, bias included.
    up: Likewise.
    weight: [128] float32.
    form: The activation.

  Returns:
    [128, 16] bf16.
  """
  gate, up = clamp(gate, up, form)
  up = up + form.up_offset if form.up_offset else up
  hidden = gate * sigmoid(scaled(gate, form.alpha)) * up
  return (hidden * per_row(weight)).astype(jnp.bfloat16)


def differentiate(
  gate: jax.Array,
  up: jax.Array,
  dh: jax.Array,
  weight: jax.Array,
  form: activation.Swiglu,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients of `activate`.

  Args:
    gate: As in `activate`.
    up: As in `activate`.
    dh: [128, 16] float32, the gradient of silu(gate) * up, without weight.
    weight: As in `activate`.
    form: As in `activate`.

  Returns:
    dgate: [128, 16] bf16.
    dup: [128, 16] bf16.
    dweight: [128] float32, the sum over these columns.
  """
  raw_gate, raw_up = gate, up
  gate, up = clamp(gate, up, form)
  up = up + form.up_offset if form.up_offset else up
  slope = sigmoid(scaled(gate, form.alpha))
  silu = gate * slope
  dweight = jnp.sum(dh * silu * up, axis=1)
  dact = dh * per_row(weight)
  dgate = dact * up * (slope + scaled(silu, form.alpha) * (1.0 - slope))
  dup = dact * silu
  if form.limit is not None:
    dgate = dgate * inside(raw_gate, form.limit)
    dup = dup * inside(jnp.abs(raw_up), form.limit)
  return dgate.astype(jnp.bfloat16), dup.astype(jnp.bfloat16), dweight
