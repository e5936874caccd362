"""Our own grouped matmuls as the benchmark calls them, and how right they are.

    fprop  y  = x @ w[g]            x [R, K], w [G, K, N]
    dgrad  dx = dy @ w[g]^T         dy [R, N]
    wgrad  dw = x^T dy per group    to float32, as the layer asks for it

Each in bf16, in exact MXFP8, and in folded MXFP8. Operands are quantized
beforehand: what is timed begins with the operands that a layer has. Folded
wgrad takes transposed copies folded by group; "wgrad and fold" folds them too.
Rows of padding are zeros.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import cases, mxfp8, quantize, reference
from pallas_kernels import groups as groups_lib
from pallas_kernels.hopper import grouped_matmul as hopper_matmul
from pallas_kernels.hopper import grouped_wgrad as hopper_wgrad
from pallas_kernels.hopper import wgrad_folded

MxArray = mxfp8.MxArray

Backend = Literal["mosaic", "xla"]
WAYS = ("fprop", "dgrad", "wgrad")
# More ways, of one precision each. Peers round a weight gradient to bf16 and
# write half as much.
SPECIAL = {"wgrad to bf16": "bf16", "wgrad and fold": "folded"}
# "exact, w bf16": the weights have been dequantized before, once for all calls.
PRECISIONS = ("bf16", "exact", "exact, w bf16", "folded")
THREADS = 8  # that prepare operands: most of it is compiling
SAMPLE = 24  # rows and columns that `error` looks at


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """A shape and how its rows are shared out; K, N are those of the forward.

  Attributes:
    name: Of the shape.
    rows: Rows before alignment.
    groups: G.
    depth: K.
    width: N.
    pattern: One of `cases.PATTERNS`.
  """

  name: str
  rows: int
  groups: int
  depth: int
  width: int
  pattern: str

  @property
  def sizes(self) -> list[int]:
    """Rows of each group."""
    return cases.group_sizes(self.pattern, self.groups, self.rows)

  @property
  def flops(self) -> int:
    """Operations on rows that belong to a group; padding does not count."""
    return 2 * sum(self.sizes) * self.depth * self.width

  @property
  def shape(self) -> tuple[int, int, int, int]:
    """What decides which code runs."""
    return self.rows, self.groups, self.depth, self.width

  def layout(self) -> groups_lib.GroupLayout:
    """Where the groups lie."""
    rows = groups_lib.aligned_rows(self.rows, self.groups)
    return groups_lib.group_layout(jnp.asarray(self.sizes, jnp.int32), rows)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
  """A way to compute one of the products.

  Attributes:
    who: Precision of ours, or a peer's name.
    way: One of `WAYS`, perhaps with what is special about it.
    run: Starts the work and returns its result.
    error: Relative error of a result on a sample, or None.
  """

  who: str
  way: str
  run: Callable[[], Any]
  error: Callable[[Any], float] | None = None


def arrays(problem: Problem) -> dict[str, jax.Array]:
  """Random x, w and dy in bf16, with zeros in the rows of padding."""

  @jax.jit
  def make(layout):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {
      "x": (layout.rows, problem.depth),
      "w": (problem.groups, problem.depth, problem.width),
      "dy": (layout.rows, problem.width),
    }
    made = {
      name: jax.random.normal(key, shape, jnp.bfloat16)
      for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }
    keep = layout.row_valid()[:, None]
    return made | {n: jnp.where(keep, made[n], 0) for n in ("x", "dy")}

  return make(problem.layout())


def operands(
  way: str, precision: str, data: dict[str, jax.Array], backend: Backend
) -> tuple[Any, Any, dict[str, Any]]:
  """The operands of a product and its options.

  Raises:
    NotImplementedError: This precision does not exist for this product.
  """
  x, w, dy = data["x"], data["w"], data["dy"]
  lhs = dy if way == "dgrad" else x
  options = {"transpose_rhs": True} if way == "dgrad" else {}
  if precision == "bf16":
    return lhs, dy if way == "wgrad" else w, options
  kernel = quantize.quantize if backend == "mosaic" else reference.quantize
  mx = jax.jit(kernel, static_argnames="axis")
  if way == "wgrad":
    if precision == "exact, w bf16":
      raise NotImplementedError("it has no weights among its operands")
    if precision == "exact":
      return mx(x, axis=-2), mx(dy, axis=-2), options
    if backend == "xla":
      raise NotImplementedError("a kernel alone, plain jnp has no such thing")
    turn = jax.jit(functools.partial(reference.quantize, transposed=True),
                   static_argnames="axis")  # fmt: skip
    return turn(x, axis=-2), turn(dy, axis=-2), options
  if precision == "folded":  # weights lie with the contracted axis last
    w = w if way == "dgrad" else jnp.swapaxes(w, 1, 2)
    fold = jax.jit(reference.fold)
    return fold(mx(lhs, axis=-1)), fold(mx(w, axis=-1)), {"transpose_rhs": True}
  weights = mx(w, axis=-1 if way == "dgrad" else -2)
  if precision == "exact, w bf16":
    weights = jax.jit(reference.dequantize)(weights)
  return mx(lhs, axis=-1), weights, options


def product(
  way: str, precision: str, backend: Backend
) -> Callable[..., jax.Array]:
  """The grouped product of a backend; options by name."""
  if way == "wgrad" and precision == "folded":
    return wgrad_folded.grouped_wgrad_folded
  if way == "wgrad":
    if backend == "mosaic":
      return hopper_wgrad.grouped_wgrad
    return reference.grouped_wgrad
  if backend == "mosaic":
    return hopper_matmul.grouped_matmul
  return reference.grouped_matmul


def fold_and_multiply(lhs: MxArray, rhs: MxArray, layout: Any) -> jax.Array:
  """Folded wgrad from transposed copies that are not folded yet."""
  lhs, rhs = (wgrad_folded.fold_groups(x, layout) for x in (lhs, rhs))
  return wgrad_folded.grouped_wgrad_folded(lhs, rhs, layout)


@jax.jit
def _pick(x: jax.Array | MxArray, index: tuple[jax.Array, ...]) -> jax.Array:
  numbers = x.dequantize(jnp.float32) if isinstance(x, MxArray) else x
  return numbers[index].astype(jnp.float32)


def sampled(x: Any, *index: Any) -> np.ndarray:
  """Rows and columns of an operand or result in float64; None takes all."""
  grid = tuple(np.arange(n) if i is None else np.asarray(i)
               for i, n in zip(index, x.shape, strict=True))  # fmt: skip
  return np.asarray(_pick(x, np.ix_(*grid))).astype(np.float64)


def error(
  lhs: Any, rhs: Any, layout: groups_lib.GroupLayout, options: dict, got: Any
) -> float:
  """Relative Frobenius error on some rows and columns, against float64.

  The operands are taken as they are, so that quantization is no error.
  """
  rng = np.random.default_rng(1)

  def some(n: int) -> np.ndarray:  # as many for every pattern
    inner = rng.permutation(np.arange(1, n - 1))[: SAMPLE - 2]
    return np.unique([0, n - 1, *inner])

  valid = np.flatnonzero(np.asarray(layout.row_valid()))
  if not valid.size:
    return 0.0
  group = np.asarray(layout.row_group())
  across = some(got.shape[-1])
  if got.ndim == 3:  # a weight gradient
    down = some(got.shape[1])
    if isinstance(lhs, MxArray) and lhs.axis == -1:  # transposed copies
      a, b = sampled(lhs, down, None).T, sampled(rhs, across, None).T
    else:
      a, b = sampled(lhs, None, down), sampled(rhs, None, across)
    want = np.stack(
      [
        a[v].T @ b[v]
        for v in (valid[group[valid] == g] for g in range(layout.groups))
      ]
    )
    have = sampled(got, None, down, across)
  else:
    rows = valid[some(valid.size)]
    turned = options.get("transpose_rhs", False)
    window = (None, across, None) if turned else (None, None, across)
    w = sampled(rhs, *window)
    w = np.swapaxes(w, 1, 2) if turned else w
    want = np.einsum("rk,rkn->rn", sampled(lhs, rows, None), w[group[rows]])
    have = sampled(got, rows, across)
  norm = np.linalg.norm(want)
  return float(np.linalg.norm(have - want) / norm)


def calls(
  problem: Problem,
  data: dict[str, jax.Array],
  backend: Backend,
  compile_: Callable[..., Callable[..., Any]],
  precisions: Sequence[str] = PRECISIONS,
) -> tuple[list[Call], dict[str, str]]:
  """Ours, every product in some precisions.

  Args:
    problem: What is computed.
    data: Its `arrays`.
    backend: Which implementation.
    compile_: ``compile_(key, function, *arguments)``: the compiled function,
      the same for the same key; raises what the kernel refuses.
    precisions: Some of `PRECISIONS`.

  Returns:
    The calls, and for each that does not exist the reason.
  """
  kinds = [(w, p) for w in (*WAYS, *SPECIAL) for p in precisions]
  kinds = [k for k in kinds if SPECIAL.get(k[0], k[1]) == k[1]]
  layout = problem.layout()

  def prepare(kind: tuple[str, str]) -> Call | str:
    label, precision = kind
    way = label.split()[0]
    try:
      lhs, rhs, options = operands(way, precision, data, backend)
      function = product(way, precision, backend)
      if label == "wgrad to bf16":
        options |= {"out_dtype": jnp.bfloat16}
      elif label == "wgrad and fold":
        function = fold_and_multiply
      elif (way, precision) == ("wgrad", "folded"):
        fold = jax.jit(wgrad_folded.fold_groups)
        lhs, rhs = fold(lhs, layout), fold(rhs, layout)
      function = functools.partial(function, **options)
      key = (problem.shape, label, precision)
      run = compile_(key, function, lhs, rhs, layout)
    except NotImplementedError as reason:
      return str(reason)
    return Call(
      who=precision,
      way=label,
      run=functools.partial(run, lhs, rhs, layout),
      error=functools.partial(error, lhs, rhs, layout, options),
    )

  with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
    made = list(pool.map(prepare, kinds))
  named = [(f"{p} {w}", call) for (w, p), call in zip(kinds, made, strict=True)]
  skipped = {name: call for name, call in named if isinstance(call, str)}
  return [call for call in made if isinstance(call, Call)], skipped
