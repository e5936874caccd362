"""Where the time of a layer goes: each of its operations, timed alone.

The layer's own passes are run once with every operation watched; each call
then gets the very arrays and options it had in the layer, is compiled alone
and timed. Beside them what is no operation of the backend: the router with its
gradient, the plan of the permutation, and the sum over a token's rows.

Alone, an operation cannot overlap or be fused with its neighbours, and glue
between them is not counted: the parts add up to the whole about, not exactly.
"""

from collections.abc import Callable
import concurrent.futures
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from mxmoe_jax import config as config_lib
from mxmoe_jax import (
  debug,
  exchange,
  layer,
  permute,
  routing,
)
from mxmoe_jax import stage as stage_lib
from mxmoe_jax import weights as weights_lib
from pallas_kernels import timing

MoEConfig = config_lib.MoEConfig
Timing = timing.Timing

# Parts of the picture, in the order of the data flow.
PARTS = (
  *("router", "permute", "quantize", "quantize weights", "up", "swiglu"),
  *("down", "down dgrad", "down wgrad", "up dgrad", "up wgrad", "combine"),
)
_KINDS = {
  "take_rows": "permute",
  "pack": "permute",
  "swiglu_quantize": "swiglu",
  "swiglu_backward_quantize": "swiglu",
}
_MATMULS = {
  ("forward", "grouped_matmul"): ("up", "down"),
  ("backward", "grouped_matmul"): ("down dgrad", "up dgrad"),
  ("backward", "grouped_wgrad"): ("down wgrad", "up wgrad"),
}


THREADS = 8  # that compile


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Part:
  """One operation of a layer, alone.

  Attributes:
    direction: "forward" or "backward".
    part: one of `PARTS`.
    operation: of the backend, or what else it is.
    implementation: "mosaic" or "xla".
    time: of a call.
  """

  direction: str
  part: str
  operation: str
  implementation: str
  time: Timing


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
  """A call as the layer made it.

  Attributes:
    direction: "forward" or "backward".
    operation: of the backend.
    implementation: "mosaic" or "xla".
    weights: whether its first argument is a weight.
    run: takes the arrays.
    arrays: of it.
  """

  direction: str
  operation: str
  implementation: str
  weights: bool
  run: Callable[..., Any]
  arrays: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
  """A part that can be timed.

  Attributes:
    direction: as in `Part`, as the next three.
    part: one of `PARTS`.
    operation: of the backend, or what else it is.
    implementation: "mosaic" or "xla".
    run: takes the arrays.
    arrays: of it.
  """

  direction: str
  part: str
  operation: str
  implementation: str
  run: Callable[..., Any]
  arrays: tuple[Any, ...]


class _Watcher:
  """Takes down the calls of one direction while they are traced."""

  def __init__(self):
    self.found: list[tuple[str, str, bool, Any, list[int]]] = []
    self.traced: list[jax.Array] = []
    self._implementation = "xla"

  def stage(self, config: MoEConfig) -> stage_lib.Stage:
    stage = stage_lib.make_stage(config, None, listen=self._listen)
    return dataclasses.replace(stage, ops=debug.watch(stage.ops, self._seen))

  def _listen(self, name: str, choice: Any) -> None:
    del name
    self._implementation = choice.implementation

  def _seen(self, name: str, args: Any, options: Any, result: Any) -> None:
    del result
    leaves, tree = jax.tree.flatten((args, options))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array)]
    arrays = [leaves[i] for i in places]
    for i in places:
      leaves[i] = None
    at = [self._place(a) for a in arrays]
    weights = getattr(args[0], "ndim", 0) == 3
    rebuild = functools.partial(_call, name, tree, tuple(leaves), tuple(places))
    self.found.append((name, self._implementation, weights, rebuild, at))

  def _place(self, array: jax.Array) -> int:
    """Where an array stands among those to be returned, each once."""
    for i, known in enumerate(self.traced):
      if known is array:
        return i
    self.traced.append(array)
    return len(self.traced) - 1


def _call(name: str, tree: Any, leaves: Any, places: Any, ops: Any,
          *arrays: jax.Array) -> Any:  # fmt: skip
  values = list(leaves)
  for place, array in zip(places, arrays, strict=True):
    values[place] = array
  args, options = jax.tree.unflatten(tree, values)
  return getattr(ops, name)(*args, **options)


def calls(config: MoEConfig, data: tuple[Any, Any, Any]) -> list[Call]:
  """Every operation of a layer's forward and backward pass, in order.

  Args:
    config: the layer, on one device.
    data: x [T, d_model], params and dy [T, d_model].
  """
  x, params, dy = data
  watchers = {name: _Watcher() for name in ("forward", "backward")}

  @jax.jit
  def traced(x, params, dy):
    routed = routing.route(x, params["router"], config)
    shared = (routed.weights, routed.experts,
              weights_lib.expert_params(params),
              weights_lib.QuantizedWeights())  # fmt: skip
    _, _, kept = layer.forward(watchers["forward"].stage(config), x, *shared)
    layer.backward(watchers["backward"].stage(config), dy, kept, *shared)
    return {name: w.traced for name, w in watchers.items()}

  arrays = traced(x, params, dy)
  ops = stage_lib.make_stage(config, None).ops
  return [
    Call(
      direction=direction,
      operation=name,
      implementation=implementation,
      weights=weights,
      run=functools.partial(rebuild, ops),
      arrays=tuple(arrays[direction][i] for i in at),
    )
    for direction, watcher in watchers.items()
    for name, implementation, weights, rebuild, at in watcher.found
  ]


def part_of(call: Call, earlier: list[Call], config: MoEConfig) -> str:
  """The part that a call belongs to.

  Args:
    call: the call.
    earlier: calls before it.
    config: of the layer: a recomputed up comes first in backward.
  """
  names = _MATMULS.get((call.direction, call.operation))
  if names is None:
    usual = "quantize weights" if call.weights else "quantize"
    return _KINDS.get(call.operation, usual)
  again = (
    call.direction == "backward"
    and call.operation == "grouped_matmul"
    and config.recipe.save_preactivations == "recompute"
  )
  names = ("up", *names) if again else names
  same = [c for c in earlier if (c.direction, c.operation) == (
      call.direction, call.operation)]  # fmt: skip
  return names[len(same)]


def _others(config: MoEConfig, data: tuple[Any, Any, Any]):
  """(direction, part, name, function, arguments) of what is no operation."""
  x, params, dy = data
  rows = jnp.broadcast_to(dy[:, None], (dy.shape[0], config.top_k, dy.shape[1]))

  def route(x, router):
    return routing.route(x, router, config).weights

  def plan(ids):
    counts = exchange.gather_counts(ids, config, None)
    return exchange.make_plan(ids, counts, config, None)

  weights, pull = jax.jit(lambda *a: jax.vjp(route, *a))(x, params["router"])
  ids = jax.jit(lambda x, router: routing.route(x, router, config).experts)(
    x, params["router"]
  )
  return [
    ("forward", "router", "route", route, (x, params["router"])),
    ("backward", "router", "route gradient", lambda p, w: p(w),
     (pull, weights)),
    *((d, "permute", "plan", plan, (ids,)) for d in ("forward", "backward")),
    *((d, "combine", "combine", permute.combine, (rows,))
      for d in ("forward", "backward")),
  ]  # fmt: skip


def prepare(config: MoEConfig, data: tuple[Any, Any, Any]) -> list[Prepared]:
  """Every part of a layer, compiled.

  Args:
    config: the layer.
    data: x, params and dy.
  """
  found, seen = [], []
  for call in calls(config, data):
    found.append(
      Prepared(
        direction=call.direction,
        part=part_of(call, seen, config),
        operation=call.operation,
        implementation=call.implementation,
        run=call.run,
        arrays=call.arrays,
      )
    )
    seen.append(dataclasses.replace(call, arrays=()))
  for direction, part, name, run, arrays in _others(config, data):
    found.append(
      Prepared(
        direction=direction,
        part=part,
        operation=name,
        implementation="xla",
        run=run,
        arrays=arrays,
      )
    )

  def compiled(part: Prepared) -> Prepared:
    run = jax.jit(part.run).lower(*part.arrays).compile()
    return dataclasses.replace(part, run=run)

  with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
    return list(pool.map(compiled, found))


def measure(parts: list[Prepared], **options: Any) -> list[Part]:
  """Times parts one after the other; ``options`` of `timing.measure`."""
  return [
    Part(
      direction=part.direction,
      part=part.part,
      operation=part.operation,
      implementation=part.implementation,
      time=timing.time_function(part.run, part.arrays, **options),
    )
    for part in parts
  ]


def sums(parts: list[Part], direction: str) -> dict[str, float]:
  """Milliseconds of each part in a direction, in the order of `PARTS`."""
  totals = dict.fromkeys(PARTS, 0.0)
  for part in parts:
    if part.direction == direction:
      totals[part.part] += part.time.median_us / 1e3
  return {name: total for name, total in totals.items() if total}
