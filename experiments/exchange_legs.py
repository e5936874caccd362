"""The legs of the exchange and their phases on a mesh, to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mxmoe_jax import MoEConfig, Recipe, exchange
from mxmoe_jax import sharding as sharding_lib
from mxmoe_jax import stage as stage_lib

AXIS = "expert"
LOCAL_EXPERTS = 8  # groups that rows are sorted into on each device


def expert_ids(rows: int, experts: int, skew: float) -> np.ndarray:
  """[rows, 1] int32 ids; the first device's experts get ``skew`` times."""
  share = np.ones(experts)
  share[:LOCAL_EXPERTS] *= skew
  ends = np.round(np.cumsum(share) / share.sum() * rows).astype(int)
  ids = np.searchsorted(ends, np.arange(rows), side="right")
  return np.random.default_rng(0).permutation(ids)[:, None].astype(np.int32)


def layer(precision: str, width: int, devices: int, skew: float) -> MoEConfig:
  """A layer whose legs there and back have one precision."""
  recipe = Recipe.bf16()
  if precision == "mxfp8":
    recipe = Recipe.mxfp8(dispatch="mxfp8", dispatch_grad="mxfp8")
  return MoEConfig(
    d_model=width,
    d_ff=width,
    num_experts=LOCAL_EXPERTS * devices,
    top_k=1,
    expert_axis=AXIS,
    recipe=recipe,
    buffer_factor=min(float(devices), 1.1 * skew),
  )


class Legs:
  """The exchange of one precision on a mesh; each method is a phase or a leg.

  Attributes:
    config: The layer.
    mesh: With the one axis `AXIS`.
    slices: Slices a peer, at least.
  """

  def __init__(self, config: MoEConfig, mesh: jax.sharding.Mesh, slices: int):
    self.config, self.mesh, self.slices = config, mesh, slices
    sharding = sharding_lib.resolve(config, mesh)
    self.stage = stage_lib.make_stage(config, sharding)
    self.precision = config.recipe.dispatch

  def on_devices(self, body: Callable[..., Any]) -> Callable[..., Any]:
    """``body(plan, arrays of one device)`` on every device, jitted."""
    spec = jax.sharding.PartitionSpec(AXIS)

    def local(arrays, ids):
      counts = exchange.gather_counts(ids, self.config, AXIS)
      plan = exchange.make_plan(ids, counts, self.config, AXIS, self.slices)
      return body(plan, arrays)

    return jax.jit(
      jax.shard_map(
        local,
        mesh=self.mesh,
        in_specs=(spec, spec),
        out_specs=spec,
        check_vma=False,
      )
    )

  def quantize(self, plan: exchange.Plan, x: jax.Array) -> Any:
    """bf16 to what the wire carries."""
    del plan
    return self.stage.quantize_leg(x, self.precision)

  def pack(self, plan: exchange.Plan, sent: Any) -> jax.Array:
    """Tokens to wire rows in the order of their experts."""
    row = plan.slots.order
    return self.stage.ops.pack(sent, row, jnp.ones(row.shape, jnp.float32))

  def wire(self, plan: exchange.Plan, packed: jax.Array) -> jax.Array:
    """The collective alone."""
    return exchange.send(packed, plan)

  def dense(self, plan: exchange.Plan, packed: jax.Array) -> jax.Array:
    """The same bytes by a dense collective, the same share to each device."""
    del plan
    return jax.lax.all_to_all(packed, AXIS, 0, 0, tiled=True)

  def dequantize(self, plan: exchange.Plan, rows: Any) -> jax.Array:
    """What an exchange that does not keep MXFP8 adds after the wire."""
    del plan
    return self.stage.ops.dequantize(rows, jnp.bfloat16)

  def there(self, plan: exchange.Plan, x: jax.Array) -> Any:
    """The forward leg: quantize, pack, wire; rows as the matmul reads them."""
    with jax.named_scope("quantize"):
      sent = self.quantize(plan, x)
    with jax.named_scope("exchange"):
      weights = jnp.ones((x.shape[0], 1), jnp.float32)
      return exchange.to_experts(sent, weights, plan, self.stage.ops)[0]

  def home(self, plan: exchange.Plan, rows: jax.Array) -> Any:
    """The backward leg: gradients of rows to their tokens."""
    with jax.named_scope("quantize"):
      sent = self.quantize(plan, rows)
    with jax.named_scope("exchange"):
      extra = jnp.ones(rows.shape[0], jnp.float32)
      return exchange.to_tokens(sent, extra, plan, self.stage.ops)[0]
