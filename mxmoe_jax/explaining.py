"""explain(): what a layer would run, why, and what it holds in memory.

Nothing is computed: the layer's own forward and backward pass are traced with
`jax.eval_shape` at the shapes asked for, and `backend` tells which
implementation each operation took, and why.
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
from pallas_kernels import wire

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
    lines += [f"{p.name:<22} {p.precision:<6} {p.implementation:<10}"
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
  stage_lib.make_stage(config, sharding, device)  # refuses what it refuses
  shards = sharding.token_shards if sharding else 1
  ep = sharding.ep if sharding else 1
  local = tokens // shards
  kept, forward, backward = _trace(config, local, device)
  if ep > 1:
    kept = residuals.over_wire(kept)
  per_row = residuals.bytes_per_row(kept)
  rows = config.buffer_rows(local, ep)
  platform = (device or backend_lib.default_device()).platform
  return Explanation(
      passes=(*_legs(config, ep, platform, forward, "dispatch"),
              *_forward_passes(config.recipe, forward),
              *_legs(config, ep, platform, forward, "combine"),
              *_between("forward", forward),
              *_legs(config, ep, platform, backward, "combine_grad"),
              *_backward_passes(config.recipe, backward),
              *_legs(config, ep, platform, backward, "dispatch_grad"),
              *_between("backward", backward)),
      buffer_bytes=_buffers(config, local, ep, rows, per_row),
      saved_bytes_per_row=per_row, rows=rows, tokens=local,
      devices=_describe(sharding, device))


class _Heard(dict[str, list[backend_lib.Choice]]):
  """Choices by operation, in the order of the calls."""

  def listen(self, name: str, choice: backend_lib.Choice) -> None:
    """Takes down the choice of one call; for `backend.select`."""
    self.setdefault(name, []).append(choice)


def _trace(config: MoEConfig, tokens: int, device: Any
           ) -> tuple[residuals.Residuals, _Heard, _Heard]:
  """(abstract residuals, choices forward, choices backward), one device."""
  alone = dataclasses.replace(config, expert_axis=None, data_axes=(),
                              fsdp_axis=None)
  heard = _Heard(), _Heard()
  stages = [stage_lib.make_stage(alone, None, device, h.listen)
            for h in heard]
  array = jax.ShapeDtypeStruct
  params = weights_lib.expert_params({
      name: array(shape, config.param_dtype) for name, shape in
      arguments.parameter_shapes(alone).items()})
  x = array((tokens, config.d_model), config.dtype)
  weights = array((tokens, config.top_k), jnp.float32)
  ids = array((tokens, config.top_k), jnp.int32)
  empty = weights_lib.QuantizedWeights()
  _, _, kept = jax.eval_shape(
      lambda *args: layer.forward(stages[0], *args), x, weights, ids, params,
      empty)
  jax.eval_shape(lambda *args: layer.backward(stages[1], *args), x, kept,
                 weights, ids, params, empty)
  return kept, *heard


def _pass(name: str, precision: str, heard: _Heard, operation: str,
          call: int = 0) -> Pass:
  """One step, by the choice that its call of an operation took."""
  choice = heard[operation][call]
  return Pass(name, precision, choice.implementation, choice.reason)


def _forward_passes(recipe: config_lib.Recipe,
                    heard: _Heard) -> tuple[Pass, ...]:
  """The steps on the expert rows, in order."""
  return (_pass("up forward", recipe.forward, heard, "grouped_matmul", 0),
          _pass("swiglu", recipe.forward, heard, "swiglu_quantize"),
          _pass("down forward", recipe.forward, heard, "grouped_matmul", 1))


def _backward_passes(recipe: config_lib.Recipe,
                     heard: _Heard) -> tuple[Pass, ...]:
  """The steps on the expert rows, in order; recomputed ones come first."""
  steps = []
  if recipe.save_preactivations == "recompute":
    steps.append(_pass("up again", recipe.forward, heard, "grouped_matmul"))
  if recipe.save_hidden == "recompute":
    steps.append(_pass("swiglu again", recipe.weight_grad, heard,
                       "swiglu_quantize"))
  return (*steps,
          _pass("down input_grad", recipe.input_grad, heard,
                "grouped_matmul", -2),
          _pass("down weight_grad", recipe.weight_grad, heard,
                "grouped_wgrad", 0),
          _pass("swiglu backward", recipe.input_grad, heard,
                "swiglu_backward_quantize"),
          _pass("up input_grad", recipe.input_grad, heard, "grouped_matmul",
                -1),
          _pass("up weight_grad", recipe.weight_grad, heard, "grouped_wgrad",
                1))


def _between(name: str, heard: _Heard) -> tuple[Pass, ...]:
  """What prepares operands, by operation; each leg's own quantize included.

  That is: weights and rows quantized (or rounded to numbers that MXFP8 holds,
  where the matmul is in bf16), rows quantized again along the other axis, and
  numbers read from MXFP8.
  """
  steps = []
  for operation in ("quantize", "round_to_mxfp8", "views", "requantize",
                    "dequantize"):
    calls = heard.get(operation, [])
    for choice in dict.fromkeys(calls):  # in order, each once
      times = calls.count(choice)
      word = operation.removesuffix("_to_mxfp8")
      steps.append(Pass(f"{name} {word} x{times}", "mxfp8",
                        choice.implementation, choice.reason))
  return tuple(steps)


def _legs(config: MoEConfig, ep: int, platform: str, heard: _Heard,
          name: str) -> tuple[Pass, ...]:
  """A wire leg: its quantize, if it has one, and its permutation or wire."""
  precision = getattr(config.recipe, name)
  outwards = name in ("dispatch", "combine_grad")
  kept = name == "combine" and config.recipe.save_preactivations == "mxfp8"
  steps = []
  if precision == "mxfp8":  # what is kept is quantized after the last leg
    steps.append(_pass(f"{name} quantize", precision, heard, "quantize",
                       0 if outwards else -1 - kept))
  if ep == 1:
    steps.append(_pass(f"{name} permute", precision, heard, "take_rows",
                       0 if outwards else -1))
  else:
    stride = wire.stride(config.d_model, precision)
    steps.append(Pass(f"{name} wire", precision, "collective",
                      f"{stride} bytes a row over {ep} devices: "
                      + exchange.describe(config, ep, platform)))
  return tuple(steps)


def _buffers(config: MoEConfig, tokens: int, ep: int, rows: int,
             per_row: float) -> dict[str, int]:
  """Bytes per device of the buffers that a step holds."""
  recipe = config.recipe
  sent = tokens * config.top_k
  legs = ("dispatch", "combine", "combine_grad", "dispatch_grad")
  buffers = {f"wire, {leg}": (sent + rows) * wire.stride(
      config.d_model, getattr(recipe, leg)) for leg in legs if ep > 1}
  return buffers | {
      "pre-activations (bf16)": rows * 2 * config.d_ff * 2,
      "hidden (bf16)": rows * config.d_ff * 2,
      "expert outputs (bf16)": rows * config.d_model * 2,
      "saved for backward": round(rows * per_row)}


def _describe(sharding: sharding_lib.Sharding | None, device: Any) -> str:
  device = device or backend_lib.default_device()
  kind = f"{device.platform} ({device.device_kind})"
  if sharding is None:
    return f"one device, {kind}"
  return f"mesh {dict(sharding.mesh.shape)}, {kind}"
