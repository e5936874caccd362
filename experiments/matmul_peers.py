"""What others offer for a grouped matmul, as the benchmark calls it.

    torch bf16      ``torch._grouped_mm``
    torch fp8       ``torch._scaled_grouped_mm``, one scale a row and column
    JAX Pallas      the ragged_dot kernels of JAX's Pallas GPU operations
    jax.lax         ``jax.lax.ragged_dot``

All get the aligned groups that ours get, padding included, and count the same
useful rows. They write bf16. None is a dependency: one that is not installed,
or does not take the problem, is skipped with the reason.
"""

from collections.abc import Callable, Sequence
import concurrent.futures
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from experiments import matmul_ways
from pallas_kernels import groups

Call = matmul_ways.Call
Problem = matmul_ways.Problem
# What a peer that does not take a problem was seen to raise.
REFUSALS = (
  *(ImportError, AttributeError, RuntimeError, TypeError, ValueError),
  *(NotImplementedError, AssertionError),
)
E4M3_MAX = 448.0
# The schedule of JAX's ragged_dot that did best on an H200.
PALLAS = {
  "block_m": 128,
  "block_n": 128,
  "block_k": 64,
  "max_concurrent_steps": 4,
  "grid_block_n": 8,
}


def aligned_sizes(problem: Problem) -> jax.Array:
  """[G] int32, rows of each group, padding included."""
  sizes = jnp.asarray(problem.sizes, jnp.int32)
  return -(-sizes // groups.ROW_ALIGN) * groups.ROW_ALIGN


def _torch() -> Any:
  """The torch module.

  Raises:
    ImportError: It is not installed, or sees no GPU.
  """
  torch = importlib.import_module("torch")
  if not torch.cuda.is_available():
    raise ImportError("torch sees no GPU")
  return torch


def wait(result: Any) -> None:
  """Waits for a result of any of them."""
  if isinstance(result, jax.Array):
    result.block_until_ready()
  elif result is not None:
    _torch().cuda.synchronize()


def torch_bf16(problem: Problem, data: dict[str, jax.Array]) -> list[Call]:
  """``torch._grouped_mm`` for all three products."""
  torch = _torch()
  x, w, dy, ends = (
    torch.from_dlpack(a)
    for a in (*map(data.get, ("x", "w", "dy")), _ends(problem))
  )
  multiply = functools.partial(torch._grouped_mm, offs=ends)
  turned = w.transpose(1, 2)
  return [
    Call(who="torch bf16", way=way, run=functools.partial(multiply, a, b))
    for way, a, b in (
      ("fprop", x, w),
      ("dgrad", dy, turned),
      ("wgrad", x.t(), dy),
    )
  ]


def _ends(problem: Problem) -> jax.Array:
  return jnp.cumsum(aligned_sizes(problem), dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames="axis")
def _scaled(x: jax.Array, axis: int) -> tuple[jax.Array, jax.Array]:
  """fp8 codes as bytes and one float32 scale for each line along ``axis``."""
  x = x.astype(jnp.float32)
  scale = jnp.max(jnp.abs(x), axis=axis, keepdims=True) / E4M3_MAX
  scale = jnp.where(scale > 0, scale, 1.0)
  codes = (x / scale).astype(jnp.float8_e4m3fn)
  return jax.lax.bitcast_convert_type(codes, jnp.uint8), jnp.squeeze(
    scale, axis
  )


def torch_fp8(problem: Problem, data: dict[str, jax.Array]) -> list[Call]:
  """``torch._scaled_grouped_mm`` for the products whose groups are rows."""
  torch = _torch()
  ends = torch.from_dlpack(_ends(problem))

  def fp8(x: jax.Array) -> tuple[Any, Any]:
    codes, scale = map(torch.from_dlpack, _scaled(x, axis=-1))
    return codes.view(torch.float8_e4m3fn), scale

  def call(way: str, lhs: jax.Array, rhs: jax.Array) -> Call:
    (a, a_scale), (b, b_scale) = fp8(lhs), fp8(rhs)
    run = functools.partial(
      torch._scaled_grouped_mm,
      *(a, b.transpose(1, 2), a_scale, b_scale),
      offs=ends,
      out_dtype=torch.bfloat16,
      use_fast_accum=True,
    )
    return Call(who="torch fp8", way=way, run=run)

  turned = jnp.swapaxes(data["w"], 1, 2)  # contracted axis last
  return [
    call("fprop", data["x"], turned),
    call("dgrad", data["dy"], data["w"]),
  ]


def pallas(problem: Problem, data: dict[str, jax.Array]) -> list[Call]:
  """JAX's own Pallas kernels for Hopper."""
  package = "jax.experimental.pallas.ops.gpu"
  forward = importlib.import_module(f"{package}.ragged_dot_mgpu").ragged_dot
  backward = importlib.import_module(
    f"{package}.transposed_ragged_dot_mgpu"
  ).transposed_ragged_dot
  x, w, dy = map(data.get, ("x", "w", "dy"))
  sizes = aligned_sizes(problem)

  def call(way: str, function: Callable[..., Any], *pair: Any) -> Call:
    jitted = jax.jit(
      lambda a, b, sizes: function(a, b, group_sizes=sizes, **PALLAS)
    )
    run = functools.partial(jitted, *pair, sizes)
    return Call(who="JAX Pallas", way=way, run=run)

  return [
    call("fprop", forward, x, w),
    call("dgrad", functools.partial(forward, transpose_rhs=True), dy, w),
    call("wgrad", backward, x, dy),
  ]


def lax(problem: Problem, data: dict[str, jax.Array]) -> list[Call]:
  """``jax.lax.ragged_dot``, forward only: it is far behind."""
  jitted = jax.jit(
    functools.partial(jax.lax.ragged_dot, preferred_element_type=jnp.bfloat16)
  )
  run = functools.partial(jitted, data["x"], data["w"], aligned_sizes(problem))
  return [Call(who="jax.lax", way="fprop", run=run)]


PEERS = {
  "torch bf16": torch_bf16,
  "torch fp8": torch_fp8,
  "JAX Pallas": pallas,
  "jax.lax": lax,
}


def calls(
  problem: Problem, data: dict[str, jax.Array], names: Sequence[str]
) -> tuple[list[Call], dict[str, str]]:
  """The peers' calls, each tried once, and why others are skipped."""
  found, skipped, offered = [], {}, []
  for name in names:
    try:
      offered += PEERS[name](problem, data)
    except REFUSALS as reason:
      skipped[name] = _short(reason)

  def attempt(call: Call) -> str | None:
    try:
      wait(call.run())
    except REFUSALS as reason:
      return _short(reason)
    return None

  with concurrent.futures.ThreadPoolExecutor(matmul_ways.THREADS) as pool:
    reasons = list(pool.map(attempt, offered))
  for call, reason in zip(offered, reasons, strict=True):
    if reason is None:
      found.append(call)
    else:
      skipped[f"{call.who} {call.way}"] = reason
  return found, skipped


def _short(reason: BaseException) -> str:
  """The first lines of what was raised."""
  return f"{type(reason).__name__}: {' '.join(str(reason).split())[:300]}"
