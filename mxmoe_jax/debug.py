"""What MXFP8 does to the tensors of a layer: pure functions, usable in jit.

    signal to noise   10 log10(sum x^2 / sum (x - q)^2), in dB
    saturated         share of x beyond the largest number of its block
    underflowed       share of x that is not 0 and became 0
    scale histogram   how often each scale byte occurs
    spread            of a row: its largest scale byte minus its smallest
    fold              share of numbers that `reference.fold` changes, and of
                      those beyond its bound

`layer_report(x, params, config)` runs the layer's own passes, listens to every
quantization, and reports each by the name of its tensor. Everything returned
is an array (`TensorReport` is a pytree), so a training step may return it.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from mxmoe_jax import backend as backend_lib
from mxmoe_jax import config as config_lib
from mxmoe_jax import layer, routing, weights
from mxmoe_jax import stage as stage_lib
from pallas_kernels import mxfp8, reference

MoEConfig = config_lib.MoEConfig
MxArray = mxfp8.MxArray
Views = reference.Views
SCALE_BYTES = 256


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TensorReport:
  """What quantization did to one tensor; every field an array.

  Attributes:
    sqnr: [] float32, dB over the whole tensor; inf if nothing was lost.
    saturated: [] float32, share of finite numbers.
    underflowed: [] float32, share of the numbers that are not 0.
    histogram: [256] int32, blocks of each scale byte (linear layout).
    spread: [256] int32, rows of each spread of scale bytes. Blocks of zeros
      do not count, nor does NaN: a row of them has spread 0.
    fold_changed: [] float32, share of all numbers that folding changes.
    fold_lost: [] float32, share of the numbers other than 0 that folding
      makes 0.
    fold_beyond: [] int32, numbers it changes by more than its bound: none.
    size: [] int32, numbers.
  """

  sqnr: jax.Array
  saturated: jax.Array
  underflowed: jax.Array
  histogram: jax.Array
  spread: jax.Array
  fold_changed: jax.Array
  fold_lost: jax.Array
  fold_beyond: jax.Array
  size: jax.Array


def sqnr(got: jax.Array, want: jax.Array) -> jax.Array:
  """Signal to noise in dB, [] float32; inf if equal.

  Args:
    got: any shape and dtype.
    want: of the same shape.

  Raises:
    ValueError: the shapes differ.
  """
  if got.shape != want.shape:
    raise ValueError(
        f"sqnr: both arrays must have one shape; got {got.shape} and"
        f" {want.shape}.")
  got, want = got.astype(jnp.float32), want.astype(jnp.float32)
  top = jnp.max(jnp.abs(want), initial=0.0)
  # Squares must neither overflow nor underflow.
  unit = jnp.where(top > 2.0**50, 2.0**-96, jnp.where(
      top < 2.0**-50, 2.0**64, 1.0))
  noise = jnp.sum(jnp.square((got - want) * unit))
  return 10 * jnp.log10(jnp.sum(jnp.square(want * unit)) / noise)


def saturated(x: jax.Array, mx: MxArray) -> jax.Array:
  """[] float32, share of the finite x beyond the range of its block.

  Args:
    x: what was quantized.
    mx: its MXFP8 form, same shape.
  """
  x = x.astype(jnp.float32)
  largest = mxfp8.decode(
      jnp.full(x.shape, jnp.finfo(mx.data.dtype).max, mx.data.dtype),
      mx.element_scales(), jnp.float32)
  finite = jnp.isfinite(x)
  beyond = finite & (jnp.abs(x) > largest)
  return _share(beyond, jnp.sum(finite, dtype=jnp.float32))


def underflowed(x: jax.Array, mx: MxArray) -> jax.Array:
  """[] float32, share of the x that are not 0 and became 0."""
  some = x != 0
  lost = some & (mx.data.astype(jnp.float32) == 0)
  return _share(lost, jnp.sum(some, dtype=jnp.float32))


def _share(hits: jax.Array, count: jax.Array) -> jax.Array:
  return jnp.sum(hits, dtype=jnp.float32) / jnp.maximum(count, 1.0)


def scale_histogram(mx: MxArray) -> jax.Array:
  """[256] int32, blocks of each scale byte."""
  return _count(mx.with_layout("linear").scale)


def scale_spread(mx: MxArray) -> jax.Array:
  """Spread of the scale bytes of each row along the blocked axis, int32.

  Each unit is a power of two: a row of spread s is folded by shifts up to s.
  Blocks whose numbers are all 0 and NaN blocks are left out.

  Returns:
    [..., 1, ...], the shape of linear scales with the blocked axis 1.
  """
  linear = mx.with_layout("linear")
  scale, axis = linear.scale.astype(jnp.int32), linear.axis
  used = _blocks_in_use(linear) & (scale != mxfp8.SCALE_NAN)
  top = jnp.max(jnp.where(used, scale, 0), axis, keepdims=True)
  low = jnp.min(jnp.where(used, scale, mxfp8.SCALE_NAN), axis, keepdims=True)
  return jnp.maximum(top - low, 0)


def _blocks_in_use(mx: MxArray) -> jax.Array:
  """Which blocks hold a number that is not 0, shaped as linear scales."""
  nonzero = mx.data.astype(jnp.float32) != 0
  axes = (-2, -1) if mx.block == "32x32" else (mx.axis,)
  for axis in axes:
    at = nonzero.ndim + axis
    shape = nonzero.shape
    split = (*shape[:at], shape[at] // mxfp8.BLOCK, mxfp8.BLOCK,
             *shape[at + 1:])
    nonzero = jnp.any(nonzero.reshape(split), axis=at + 1)
  return nonzero


def _count(values: jax.Array) -> jax.Array:
  flat = values.astype(jnp.int32).reshape(-1)
  return jnp.zeros(SCALE_BYTES, jnp.int32).at[flat].add(1)


def fold_change(mx: MxArray) -> tuple[jax.Array, jax.Array, jax.Array]:
  """What folding changes of an array that is not folded yet.

  Args:
    mx: 1x32 blocks, or 32x32 ones as `axis` reads them.

  Returns:
    [] float32, the share of numbers that change; [] float32, the share of the
    numbers other than 0 that become 0; [] int32, the numbers that change by
    more than `reference.fold` promises.
  """
  mx = mx.along(mx.axis)
  folded = reference.fold(mx)
  shift = (mx.element_scales().astype(jnp.int32)
           - folded.element_scales().astype(jnp.int32))  # 0 or below
  code = mx.data.astype(jnp.float32)
  before = jnp.ldexp(code, jnp.maximum(shift, -60))  # in units of the row
  after = folded.data.astype(jnp.float32)
  error = jnp.abs(after - before)  # NaN, from a NaN block, counts nowhere
  bound = float(jnp.finfo(mx.data.dtype).smallest_subnormal) / 2
  some = code != 0
  return (jnp.mean(error > 0, dtype=jnp.float32),
          _share(some & (after == 0), jnp.sum(some, dtype=jnp.float32)),
          jnp.sum(error > bound, dtype=jnp.int32))


def tensor_report(x: jax.Array, mx: MxArray) -> TensorReport:
  """What quantizing x to mx did.

  Args:
    x: [...] any float dtype.
    mx: of the same shape; no padding counts that is 0.

  Raises:
    ValueError: the shapes differ.
  """
  changed, lost, beyond = fold_change(mx)
  return TensorReport(
      sqnr=sqnr(mx.dequantize(jnp.float32), x), saturated=saturated(x, mx),
      underflowed=underflowed(x, mx), histogram=scale_histogram(mx),
      spread=_count(scale_spread(mx)), fold_changed=changed, fold_lost=lost,
      fold_beyond=beyond, size=jnp.asarray(x.size, jnp.int32))


def layer_report(x: jax.Array, params: dict[str, jax.Array],
                 config: MoEConfig, *, dy: jax.Array | None = None,
                 balance_bias: jax.Array | None = None,
                 folded: bool | None = None) -> dict[str, TensorReport]:
  """Reports every tensor that a layer quantizes, on one device.

  Args:
    x: [..., d_model].
    params: of the layer, as `moe` takes them.
    config: the layer; its mesh axes are ignored.
    dy: [..., d_model] gradient of the output; without it the forward pass
      alone is reported.
    balance_bias: [E], as `moe` takes it.
    folded: whether rows and weights are folded; default as the layer does on
      this device. A CPU never folds by itself, but can show what would come.

  Returns:
    Reports by name: "x rows", "dy columns", "hidden rows", "dpre rows" and so
    on, rows being blocks for the next matmul and columns those for a weight
    gradient; "gate_up forward", "down input_grad" and so on for weights. What
    is quantized from MXFP8 is compared with that, not with what came before.
    A folded tensor shows its whole loss in `sqnr`; `fold_changed` is then 0.
  """
  alone = dataclasses.replace(config, expert_axis=None, data_axes=(),
                              fsdp_axis=None)
  tokens = x.reshape(-1, config.d_model)
  routed = routing.route(tokens, params["router"], alone,
                         balance_bias=balance_bias)
  shared = (routed.weights, routed.experts, weights.expert_params(params),
            weights.QuantizedWeights())
  listener = _Listener(alone, tokens.shape[0])
  stage = stage_lib.make_stage(alone, None)
  folded = stage.folded if folded is None else folded
  stage = dataclasses.replace(stage, ops=listener.attach(stage.ops),
                              folded=folded)
  _, _, kept = layer.forward(stage, tokens.astype(config.dtype), *shared)
  if dy is not None:
    listener.turn(kept.rows)
    dy = dy.reshape(-1, config.d_model).astype(config.dtype)
    layer.backward(stage, dy, kept, *shared)
  return listener.reports


def watch(ops: backend_lib.Ops, seen: Callable[..., None]) -> backend_lib.Ops:
  """The same operations, each call of which is told.

  Args:
    ops: operations of a backend.
    seen: called with (operation, args, options, result) after each call.
  """

  def watched(name: str) -> Callable[..., Any]:
    def call(*args: Any, **options: Any) -> Any:
      result = getattr(ops, name)(*args, **options)
      seen(name, args, options, result)
      return result

    return call

  calls = {name: watched(name) for name in backend_lib.OPERATIONS}
  return dataclasses.replace(ops, **calls)


class _Listener:
  """Makes a report of each quantization that a layer traces."""

  def __init__(self, config: MoEConfig, tokens: int):
    self.reports: dict[str, TensorReport] = {}
    self._config, self._tokens = config, tokens
    self._rows: Views | None = None  # of the forward pass, once it is over

  def turn(self, rows: Views) -> None:
    """The forward pass is over and has kept these rows."""
    self._rows = rows

  def attach(self, ops: backend_lib.Ops) -> backend_lib.Ops:
    """The operations, listened to; SwiGLU shows what it quantizes."""

    def shown(run: Callable[..., Any]) -> Callable[..., Any]:
      def call(*args: Any, plain: bool = False, **options: Any) -> Any:
        result = run(*args, plain=True, **options)
        views = result if isinstance(result, Views) else result[0]
        name = "hidden" if isinstance(result, Views) else "dpre"
        self._views(name, views.plain, views)
        # Numbers that nobody asked for must not be read by a matmul.
        views = dataclasses.replace(views,
                                    plain=views.plain if plain else None)
        return views if isinstance(result, Views) else (views, *result[1:])

      return call

    ops = watch(ops, self._seen)
    return dataclasses.replace(
        ops, swiglu_quantize=shown(ops.swiglu_quantize),
        swiglu_backward_quantize=shown(ops.swiglu_backward_quantize))

  def _seen(self, operation: str, args: tuple[Any, ...],
            options: dict[str, Any], result: Any) -> None:
    if operation == "quantize":
      source = args[0]
      if options.get("transposed"):
        source = jnp.swapaxes(source, -1, -2)
      axis = (*args, options.get("axis", -1))[1]
      self._add(self._quantized(args[0].shape, axis), source, result)
    elif operation == "round_to_mxfp8":
      mx = reference.quantize(*args, **options)
      self._add(self._quantized(args[0].shape, args[1]), args[0], mx)
    elif operation == "views":
      self._views(self._passing("x", "dy"), args[0], result)
    elif operation == "requantize":
      x = args[0]
      kept = self._rows and self._rows.rows
      forward = self._rows is None or (kept and kept.data is x.data)
      self._add(f"{'x' if forward else 'dy'} {_side(result)}",
                x.dequantize(jnp.float32), result)
    elif operation == "take_rows" and options.get("folded"):
      plain: Any = reference.take_rows(args[0].dequantize(jnp.float32), args[1])
      self._add(f"{self._passing('x', 'dy')} folded", plain, result)

  def _passing(self, forward: str, backward: str) -> str:
    return forward if self._rows is None else backward

  def _quantized(self, shape: tuple[int, ...], axis: int) -> str:
    """The name of what `quantize` was given, from its shape."""
    config = self._config
    if len(shape) == 3:
      wide = shape[-2:] == (config.d_model, 2 * config.d_ff)
      return (f"{'gate_up' if wide else 'down'}"
              f" {'forward' if axis == -2 else 'input_grad'}")
    side = "rows" if axis == -1 else "columns"
    if shape[0] == self._tokens:
      return f"{self._passing('x', 'dy')} {side}"
    if shape[1] == config.d_model and config.recipe.combine == "mxfp8" and (
        self._rows is None and "out rows" not in self.reports):
      return f"out {side}"
    if shape[1] == 2 * config.d_ff and self._rows is None:
      return f"pre {side}"
    return f"{self._passing('x', 'dx')} {side}"

  def _views(self, name: str, x: Any, views: Views) -> None:
    for mx in (views.rows, views.columns):
      if isinstance(mx, MxArray):
        self._add(f"{name} {_side(mx)}", x, mx)

  def _add(self, name: str, x: jax.Array, mx: MxArray) -> None:
    while name in self.reports:
      name = f"{name} again"
    self.reports[name] = tensor_report(x, mx)


def _side(mx: MxArray) -> str:
  return "rows" if mx.axis == -1 else "columns"
