"""The library behind the neutral interface of the field cases.

Takes and gives arrays that numpy can convert; nothing here computes what the
library should compute. Imports no other test module, so that any runner of
field cases can use it alone: `run_all(Adapter())`.
"""

import functools
import pathlib
import tempfile

from flax import nnx
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import orbax.checkpoint as ocp

from mxmoe_jax import (
  MoE,
  MoEConfig,
  QuantizedWeights,
  dequantize,
  exchange,
  grouped_matmul,
  layer,
  permute,
  quantize,
  quantize_weights,
  routing,
  sharding,
  stage,
  weights,
)
from pallas_kernels import MxArray

NAMES = ("wr", "wg", "wu", "wd")


def _router(num_experts: int, top_k: int, **changes) -> MoEConfig:
  """A config of which only the routing counts."""
  return MoEConfig(
    d_model=32, d_ff=32, num_experts=num_experts, top_k=top_k, **changes
  )


def _layer_config(p, top_k: int, ep: int = 1) -> MoEConfig:
  num_experts, d_model, d_ff = np.shape(p["wg"])
  return MoEConfig(
    d_model=d_model,
    d_ff=d_ff,
    num_experts=num_experts,
    top_k=top_k,
    expert_axis="expert" if ep > 1 else None,
  )


def _mesh(size: int, axis: str = "expert"):
  """Devices in a row whose arrays JAX places by itself."""
  return jax.make_mesh(
    (size,), (axis,), axis_types=(jax.sharding.AxisType.Auto,)
  )


def _to_params(p) -> dict[str, jax.Array]:
  p = {name: jnp.asarray(p[name], jnp.float32) for name in NAMES}
  gate_up = jnp.stack([p["wg"], p["wu"]], axis=2)
  return dict(router=p["wr"], gate_up=gate_up, down=p["wd"])


def _from_params(params) -> dict[str, np.ndarray]:
  params = jax.tree.map(np.asarray, params)
  gate_up = params["gate_up"]
  return dict(
    wr=params["router"],
    wg=gate_up[:, :, 0],
    wu=gate_up[:, :, 1],
    wd=params["down"],
  )


def _apply(x, params, ids, quantized, config, mesh):
  """The layer; with forced ids, its routing is only the weighing."""
  if ids is None:
    return layer.moe(x, params, config, mesh=mesh, quantized=quantized)[0]
  scores = routing.router_scores(
    routing.router_logits(x, params["router"]), config.score
  )
  y, _ = layer.mixture(
    (config, sharding.resolve(config, mesh)),
    x.astype(config.dtype),
    routing.weigh(scores, ids, config),
    ids,
    weights.expert_params(params),
    quantized or QuantizedWeights(),
  )
  return y.astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("config", "mesh", "remat"))
def _layer_vjp(x, params, dy, ids, quantized, *, config, mesh, remat=False):
  def apply(x, params):
    return _apply(x, params, ids, quantized, config, mesh)

  y, pull = jax.vjp(jax.checkpoint(apply) if remat else apply, x, params)
  return y, pull(dy.astype(y.dtype))


@jax.jit
def _matmul_vjp(lhs, rhs, sizes, dout):
  out, pull = jax.vjp(lambda a, b: grouped_matmul(a, b, sizes), lhs, rhs)
  return out, *pull(dout.astype(out.dtype))


class Adapter:
  """One method a public entry; see the docstring of the field cases."""

  mode = "rceil"

  def quantize(self, x, axis=-1):
    """Elements as float32 and scale bytes, blocks along `axis`."""
    q = quantize(jnp.asarray(x), axis)
    return np.asarray(q.data.astype(jnp.float32)), np.asarray(q.scale)

  def dequantize_codes(self, codes, scales):
    """The numbers of e4m3 codes; scales go to the library as they are."""
    data = lax.bitcast_convert_type(jnp.asarray(codes), jnp.float8_e4m3fn)
    return np.asarray(
      dequantize(MxArray(data, jnp.asarray(scales)), jnp.float32)
    )

  dequantize_any_scale = dequantize_codes

  def qdq(self, x, axis=-1):
    """Quantized and read back, float32."""
    return np.asarray(dequantize(quantize(jnp.asarray(x), axis), jnp.float32))

  def grouped_mm(self, lhs, rhs, group_sizes):
    """[M, N]; group sizes are concrete, so that their sum can be checked."""
    return np.asarray(
      grouped_matmul(jnp.asarray(lhs), jnp.asarray(rhs), group_sizes)
    )

  def grouped_mm_vjp(self, lhs, rhs, group_sizes, dout):
    """(out, dlhs, drhs), under jit with traced group sizes."""
    lhs, rhs, dout = (jnp.asarray(a) for a in (lhs, rhs, dout))
    jax.eval_shape(lambda a, b: grouped_matmul(a, b, group_sizes), lhs, rhs)
    grads = _matmul_vjp(lhs, rhs, jnp.asarray(group_sizes), dout)
    return tuple(np.asarray(a) for a in grads)

  def grouped_mm_bias_vjp(self, lhs, rhs, bias, group_sizes, dout):
    """(out, dlhs, drhs, dbias) of a product plus its group's bias."""
    sizes = np.asarray(group_sizes)
    group = np.repeat(np.arange(len(sizes)), sizes)
    inside = np.arange(len(lhs)) < sizes.sum()
    group = jnp.asarray(np.pad(group, (0, len(lhs) - len(group))))

    def apply(lhs, rhs, bias):
      out = grouped_matmul(lhs, rhs, sizes)
      return out + jnp.where(inside[:, None], bias[group], 0)

    @jax.jit
    def both(lhs, rhs, bias, dout):
      out, pull = jax.vjp(apply, lhs, rhs, bias)
      return out, *pull(dout)

    operands = (jnp.asarray(a) for a in (lhs, rhs, bias, dout))
    return tuple(map(np.asarray, both(*operands)))

  def grouped_mm_sharded(self, lhs, rhs, group_sizes, which):
    """[M, N] under jit, with rows, experts or columns over two devices."""
    mesh = _mesh(2, "x")
    specs = {
      "rows": (P("x"), P()),
      "experts": (P(), P("x")),
      "columns": (P(), P(None, None, "x")),
    }[which]
    lhs, rhs = (
      jax.device_put(a, jax.NamedSharding(mesh, spec))
      for a, spec in zip((lhs, rhs), specs, strict=True)
    )
    return np.asarray(jax.jit(grouped_matmul)(lhs, rhs, group_sizes))

  def scan_layers(self, x, w, group_sizes):
    """Stacked products under scan, clipped to -1..1 between them."""

    def step(h, w):
      return jnp.clip(grouped_matmul(h, w, group_sizes), -1, 1), None

    scan = jax.jit(lambda x, w: lax.scan(step, x, w)[0])
    return np.asarray(scan(jnp.asarray(x), jnp.asarray(w)))

  def compile_count(self, list_of_group_sizes, M, K, N):
    """How often jit(grouped_matmul) compiles for several group sizes."""
    matmul = jax.jit(lambda *args: grouped_matmul(*args))
    groups = len(list_of_group_sizes[0])
    lhs, rhs = jnp.ones((M, K)), jnp.ones((groups, K, N))
    for sizes in list_of_group_sizes:
      matmul(lhs, rhs, jnp.asarray(sizes))
    return matmul._cache_size()

  def route(self, logits, k, score="softmax", normalize=True):
    """(weights [T, k], ids [T, k])."""
    config = _router(np.shape(logits)[1], k, score=score, renormalise=normalize)

    @jax.jit
    @jax.checkpoint
    def choose(logits):
      scores = routing.router_scores(logits, score)
      ids = routing.choose(scores, config)
      return routing.weigh(scores, ids, config), ids

    return tuple(map(np.asarray, choose(jnp.asarray(logits, jnp.float32))))

  def route_x(self, x, w_router, k):
    """Ids [T, k], the router's own matmul included."""
    config = _router(np.shape(w_router)[1], k)
    routed = routing.route(jnp.asarray(x), jnp.asarray(w_router), config)
    return np.asarray(routed.experts)

  def _aux(self, logits, k, coef, mask=None):
    """The coefficient times the loss, through the whole router."""
    num_experts = logits.shape[1]
    config = _router(num_experts, k, aux_loss_coef=coef)
    identity = jnp.eye(num_experts, dtype=jnp.float32)
    mask = None if mask is None else jnp.asarray(mask, bool)
    return routing.route(logits, identity, config, mask=mask).aux_loss

  def aux_loss(self, logits, k, mask=None):
    """The load-balancing loss with coefficient 1."""
    return float(self._aux(jnp.asarray(logits), k, 1.0, mask))

  def aux_loss_grad(self, logits, k, coef):
    """The gradient of coef * loss with respect to the logits."""
    loss = functools.partial(self._aux, k=k, coef=coef)
    return np.asarray(jax.grad(loss)(jnp.asarray(logits)))

  def counts(self, idx, E):
    """Rows per expert."""
    return np.asarray(routing.load_per_expert(jnp.asarray(idx), E))

  def combine(self, y, w):
    """[T, D]: rows with their weights in, summed over the k of a token."""
    rows = jnp.asarray(y).astype(jnp.float32) * jnp.asarray(w)[..., None]
    return np.asarray(permute.combine(rows))

  def moe_vjp(self, x, p, k, dy, *, ep=1, remat=False, idx=None):
    """y and the gradients dx, wr, wg, wu, wd of a whole layer."""
    ids = None if idx is None else jnp.asarray(idx, jnp.int32)
    y, (dx, grads) = _layer_vjp(
      jnp.asarray(x),
      _to_params(p),
      jnp.asarray(dy),
      ids,
      None,
      config=_layer_config(p, k, ep),
      mesh=_mesh(ep) if ep > 1 else None,
      remat=remat,
    )
    return dict(y=np.asarray(y), dx=np.asarray(dx), **_from_params(grads))

  def accumulate(self, x, p, k, dy, parts):
    """Gradients summed over microbatches that share quantized weights."""
    config, params = _layer_config(p, k), _to_params(p)
    quantized = quantize_weights(params, config)
    total = jax.tree.map(jnp.zeros_like, params)
    for part in parts:
      _, (_, grads) = _layer_vjp(
        jnp.asarray(x[part]),
        params,
        jnp.asarray(dy[part]),
        None,
        quantized,
        config=config,
        mesh=None,
      )
      total = jax.tree.map(jnp.add, total, grads)
    return _from_params(total)

  def a2a_roundtrip(self, x, idx, E, ep):
    """[T, k, D]: to identity experts and home, not summed."""
    config = MoEConfig(
      d_model=np.shape(x)[1],
      d_ff=32,
      num_experts=E,
      top_k=np.shape(idx)[1],
      expert_axis="expert",
    )
    mesh = _mesh(ep)
    steps = stage.make_stage(config, sharding.resolve(config, mesh))

    def travel(x, ids):
      counts = exchange.gather_counts(ids, config, "expert")
      plan = exchange.make_plan(ids, counts, config, "expert")
      sent = steps.quantize_leg(x, config.recipe.dispatch)
      ones = jnp.ones(ids.shape, jnp.float32)
      rows, ones = exchange.to_experts(sent, ones, plan, steps.ops)
      rows = steps.ops.dequantize(rows)
      home, _ = exchange.to_tokens(rows, ones, plan, steps.ops)
      return home.astype(jnp.float32)

    split = dict(in_specs=P("expert"), out_specs=P("expert"))
    travel = jax.shard_map(travel, mesh=mesh, check_vma=False, **split)
    args = jnp.asarray(x, jnp.bfloat16), jnp.asarray(idx, jnp.int32)
    return np.asarray(jax.jit(travel)(*args))

  def train(self, x, p, k, dy, steps, resume_at=None):
    """Parameters after SGD steps; a checkpoint is written and read between."""
    config, params = _layer_config(p, k), _to_params(p)
    x, dy = jnp.asarray(x), jnp.asarray(dy)
    for step in range(steps):
      if step == resume_at:
        params = _save_and_restore(params)
      _, (_, grads) = _layer_vjp(
        x, params, dy, None, None, config=config, mesh=None
      )
      params = jax.tree.map(lambda w, g: w - 0.01 * g, params, grads)
    return _from_params(params)

  def construct(self, E, k, ep, devices):
    """A module on a mesh (data, expert) of so many devices."""
    mesh = jax.sharding.AbstractMesh((devices // ep, ep), ("data", "expert"))
    config = MoEConfig(
      d_model=64,
      d_ff=64,
      num_experts=E,
      top_k=k,
      expert_axis="expert",
      data_axes=("data",),
    )
    if devices % ep:
      raise ValueError(f"{devices} devices are not divisible by {ep=}")
    return MoE(config, rngs=nnx.Rngs(0), mesh=mesh)


def _save_and_restore(params):
  """Parameters as a checkpoint gives them back."""
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / "state"
    with ocp.StandardCheckpointer() as checkpointer:
      checkpointer.save(path, params)
      checkpointer.wait_until_finished()
      empty = jax.tree.map(jnp.zeros_like, params)
      return checkpointer.restore(path, empty)
