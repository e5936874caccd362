"""Which kernels a MoE layer runs on a B200, forward and backward.

The flow is the layer's (`mxmoe_jax.layer`) with the default recipe, and with
`Recipe.bf16()`. T tokens, R = T top_k rows in G even groups on one device, D
the width of the model, F that of an expert. A model, not measured; see
`b200_kernels`.
"""

import dataclasses
from typing import Any

from experiments import b200_kernels
from pallas_kernels import cases, wire

Estimate = b200_kernels.Estimate

EP = 8  # devices of the exchange that wire legs are counted for


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
  """One layer on one device.

  Attributes:
    model: Name in `cases.MODELS`.
    rows: R.
    experts: G, on this device.
    form: "mxfp8" or "bf16".
    forward: Kernels of the forward pass.
    backward: Kernels of the backward pass.
    weights: What prepares weights, once for each change of them.
    legs: Collectives with `EP` devices, forward then backward.
  """

  model: str
  rows: int
  experts: int
  form: str
  forward: tuple[Estimate, ...]
  backward: tuple[Estimate, ...]
  weights: tuple[Estimate, ...]
  legs: tuple[Estimate, ...]

  def total(self, part: str, kind: str = "expected_us") -> float:
    """Milliseconds of a part of the layer.

    Args:
      part: "forward", "backward", "weights" or "legs".
      kind: "expected_us" or "bound_us".
    """
    return 1e-3 * sum(getattr(kernel, kind) for kernel in getattr(self, part))


def layer(model: str, rows: int, experts: int, form: str) -> Layer:
  """The kernels of a layer.

  Args:
    model: Name in `cases.MODELS`.
    rows: R; divided evenly over the experts.
    experts: G.
    form: "mxfp8" or "bf16".
  """
  shape = cases.MODELS[model]
  sizes = cases.group_sizes("even", experts, rows)
  parts = _mxfp8 if form == "mxfp8" else _bf16
  tokens = rows // shape.top_k
  forward, backward, weights = parts(shape, sizes, tokens)
  return Layer(
    model=model,
    rows=rows,
    experts=experts,
    form=form,
    forward=forward,
    backward=backward,
    weights=weights,
    legs=_legs(shape, rows, form),
  )


def _combine(tokens: int, rows: int, width: int) -> list[Estimate]:
  """bf16 rows back to the order of tokens, and their sum."""
  k = b200_kernels
  return [
    k.memory("permute bf16", rows * width, "rows to tokens, bf16"),
    k.moving(2.0 * width * (rows + tokens), "sum over top_k", "XLA"),
  ]


def _matmuls(shape: Any, sizes: list[int], form: str) -> dict[str, Estimate]:
  """The six matmuls of the layer by name."""
  d, f, k = shape.d_model, shape.d_ff, b200_kernels
  return {
    "up": k.matmul(sizes, d, 2 * f, form, "up"),
    "down": k.matmul(sizes, f, d, form, "down"),
    "down dgrad": k.matmul(sizes, d, f, form, "down dgrad"),
    "down wgrad": k.wgrad(sizes, f, d, form, "down wgrad"),
    "up dgrad": k.matmul(sizes, 2 * f, d, form, "up dgrad"),
    "up wgrad": k.wgrad(sizes, d, 2 * f, form, "up wgrad"),
  }


def _mxfp8(shape: Any, sizes: list[int], tokens: int):
  d, f, k, rows = shape.d_model, shape.d_ff, b200_kernels, sum(sizes)
  each = _matmuls(shape, sizes, "mxfp8")
  dispatch = [
    k.memory("quantize", tokens * d, "quantize tokens"),
    k.memory("permute", rows * d, "pack rows"),
    k.moving(2.0 * rows * d / 32, "scales to atoms", "permute"),
  ]
  forward = (
    *dispatch,
    each["up"],
    k.memory("swiglu", rows * f, "SwiGLU, quantized both ways"),
    each["down"],
    *_combine(tokens, rows, d),
  )
  backward = (
    *dispatch,
    each["down dgrad"],
    k.memory("requantize", rows * d, "dy to columns"),
    each["down wgrad"],
    k.memory("swiglu backward", rows * f, "SwiGLU backward, both ways"),
    each["up dgrad"],
    k.memory("requantize", rows * d, "x to columns"),
    each["up wgrad"],
    *_combine(tokens, rows, d),
  )
  weights = 3 * len(sizes) * d * f
  return forward, backward, (k.memory("quantize both", weights, "weights"),)


def _bf16(shape: Any, sizes: list[int], tokens: int):
  d, f, k, rows = shape.d_model, shape.d_ff, b200_kernels, sum(sizes)
  each = _matmuls(shape, sizes, "bf16")
  dispatch = k.memory("permute bf16", rows * d, "pack rows, bf16")
  forward = (
    dispatch,
    each["up"],
    k.memory("swiglu bf16", rows * f, "SwiGLU"),
    each["down"],
    *_combine(tokens, rows, d),
  )
  backward = (
    dispatch,
    each["down dgrad"],
    each["down wgrad"],
    k.memory("swiglu backward bf16", rows * f, "SwiGLU backward"),
    each["up dgrad"],
    each["up wgrad"],
    *_combine(tokens, rows, d),
  )
  return forward, backward, ()


def _legs(shape: Any, rows: int, form: str) -> tuple[Estimate, ...]:
  """The four legs of the exchange, in the order they run."""
  away = rows * (EP - 1) / EP
  plain = 2.0 * shape.d_model
  packed = wire.stride(shape.d_model, form)
  return (
    b200_kernels.wire(away * packed, f"dispatch, {form}"),
    b200_kernels.wire(away * plain, "combine, bf16"),
    b200_kernels.wire(away * packed, f"combine_grad, {form}"),
    b200_kernels.wire(away * plain, "dispatch_grad, bf16"),
  )
