"""explain(): what a layer would run, why, and what it holds in memory.

Nothing is computed: shapes come from `jax.eval_shape` of the layer's own
forward pass, reasons from `backend.choices`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mxmoe_jax import arguments, exchange, layer, residuals
from mxmoe_jax import backend as backend_lib
from mxmoe_jax import config as config_lib
from mxmoe_jax import sharding as sharding_lib
from mxmoe_jax import stage as stage_lib
from mxmoe_jax import weights as weights_lib

MoEConfig = config_lib.MoEConfig


@dataclasses.dataclass(frozen=True)
class Pass:
  """One step of the layer.

  Attributes:
    name: the step, such as "up forward".
    precision: "mxfp8" or "bf16".
    implementation: "mosaic", "xla", or the collective of a wire leg.
    reason: why, in words.
  """

  name: str
  precision: str
  implementation: str
  reason: str


@dataclasses.dataclass(frozen=True)
class Explanation:
  """What `explain` found; `str()` is the text.

  Attributes:
    passes: every step, in the order it runs.
    buffer_bytes: bytes per device of each buffer, by name.
    saved_bytes_per_row: bytes kept for the backward pass per row of the
      expert buffer.
    rows: rows of that buffer per device.
    tokens: tokens per device.
    devices: in words.
  """

  passes: tuple[Pass, ...]
  buffer_bytes: dict[str, int]
  saved_bytes_per_row: float
  rows: int
  tokens: int
  devices: str

  def __str__(self) -> str:
    lines = [f"{self.tokens} tokens per device, {self.devices}",
             f"expert buffer: {self.rows} rows (groups aligned to 128)", ""]
    lines += [f"{p.name:<18} {p.precision:<6} {p.implementation:<10}"
              f" {p.reason}" for p in self.passes]
    lines += ["", "bytes per device"]
    lines += [f"  {name:<26} {size:>16,}"
              for name, size in self.buffer_bytes.items()]
    lines.append(f"saved for backward: {self.saved_bytes_per_row:,.1f} bytes"
                 " per row")
    return "\n".join(lines)


def explain(config: MoEConfig, tokens: int, *,
            mesh: sharding_lib.Mesh | None = None,
            device: Any = None) -> Explanation:
  """Says which kernel each pass would use and why not a faster one.

  Args:
    config: the layer.
    tokens: tokens of one call, over the whole mesh.
    mesh: the mesh; default is the one in context.
    device: the device to judge, default the mesh's first.

  Returns:
    Explanation.

  Raises:
    ValueError, NotImplementedError: what the layer itself would raise.
  """
  sharding = sharding_lib.resolve(config, mesh)
  sharding_lib.check_tokens(tokens, config, sharding)
  device = device or sharding_lib.first_device(sharding)
  choices = backend_lib.choices(config.backend, device)
  shards = sharding.token_shards if sharding else 1
  ep = sharding.ep if sharding else 1
  local = tokens // shards
  kept = _kept(config, local)
  per_row = residuals.bytes_per_row(kept)
  rows = config.buffer_rows(local, ep)
  return Explanation(
      passes=(*_legs(config, ep, ("dispatch",), choices),
              *_matmuls(config, choices, "forward"),
              *_legs(config, ep, ("combine", "combine_grad"), choices),
              *_matmuls(config, choices, "backward"),
              *_legs(config, ep, ("dispatch_grad",), choices)),
      buffer_bytes=_buffers(config, local, ep, rows, per_row),
      saved_bytes_per_row=per_row, rows=rows, tokens=local,
      devices=_describe(sharding, device))


def _kept(config: MoEConfig, tokens: int) -> residuals.Residuals:
  """The abstract residuals of one device without a mesh."""
  local = dataclasses.replace(config, expert_axis=None, data_axes=(),
                              fsdp_axis=None, backend="xla")
  stage = stage_lib.make_stage(local, None)
  array = jax.ShapeDtypeStruct
  params = {name: array(shape, config.param_dtype) for name, shape in
            arguments.parameter_shapes(local).items()}
  slots = (tokens, config.top_k)
  return jax.eval_shape(
      lambda *args: layer.forward(stage, *args)[2],
      array((tokens, config.d_model), config.dtype),
      array(slots, jnp.float32), array(slots, jnp.int32),
      weights_lib.expert_params(params), weights_lib.QuantizedWeights())


def _matmuls(config: MoEConfig, choices: dict[str, backend_lib.Choice],
             direction: str) -> tuple[Pass, ...]:
  """The steps on the expert rows, in order."""
  recipe = config.recipe
  if direction == "forward":
    steps = [("up forward", recipe.forward, "grouped_matmul"),
             ("swiglu", recipe.forward, "swiglu_quantize"),
             ("down forward", recipe.forward, "grouped_matmul")]
  else:
    steps = [("down input_grad", recipe.input_grad, "grouped_matmul"),
             ("down weight_grad", recipe.weight_grad, "grouped_wgrad"),
             ("swiglu backward", recipe.input_grad,
              "swiglu_backward_quantize"),
             ("up input_grad", recipe.input_grad, "grouped_matmul"),
             ("up weight_grad", recipe.weight_grad, "grouped_wgrad")]
  return tuple(Pass(name, precision, choices[op].implementation,
                    choices[op].reason) for name, precision, op in steps)


def _legs(config: MoEConfig, ep: int, names: tuple[str, ...],
          choices: dict[str, backend_lib.Choice]) -> tuple[Pass, ...]:
  """The wire legs, with their bytes per row."""
  out = []
  for name in names:
    precision = getattr(config.recipe, name)
    stride = exchange.wire_stride(config.d_model, precision)
    if ep == 1:
      text = "one device along the expert axis: a permutation, no wire"
    else:
      text = (f"{stride} bytes a row over {ep} devices (ragged_all_to_all on"
              " GPUs, all_gather on CPU)")
    implementation = ("exchange" if ep > 1
                      else choices["quantize"].implementation)
    out.append(Pass(f"{name} leg", precision, implementation, text))
  return tuple(out)


def _buffers(config: MoEConfig, tokens: int, ep: int, rows: int,
             per_row: float) -> dict[str, int]:
  """Bytes per device of the buffers that a step holds."""
  recipe = config.recipe
  sent, stride = tokens * config.top_k, exchange.wire_stride
  wire = {f"wire, {leg}": stride(config.d_model, getattr(recipe, leg))
          for leg in ("dispatch", "combine", "combine_grad",
                      "dispatch_grad")}
  buffers = {name: size * (sent + rows) for name, size in wire.items()
             } if ep > 1 else {}
  return buffers | {
      "pre-activations (bf16)": rows * 2 * config.d_ff * 2,
      "hidden (bf16)": rows * config.d_ff * 2,
      "expert outputs (bf16)": rows * config.d_model * 2,
      "saved for backward": round(rows * per_row)}


def _describe(sharding: sharding_lib.Sharding | None, device: Any) -> str:
  device = device or jax.devices()[0]
  kind = f"{device.platform} ({device.device_kind})"
  if sharding is None:
    return f"one device, {kind}"
  return f"mesh {dict(sharding.mesh.shape)}, {kind}"
