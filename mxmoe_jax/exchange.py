"""Exchange: the all-to-all between tokens and experts, in MXFP8 or bf16.

    counts [ep, E] --all_gather--> every device knows every row's place
    wire row:  data | linear scales | float32 weight      uint8, 128-aligned

Rows land expert-major in 128-aligned groups, ordered inside a group by
(source device, source place): no second permutation follows the wire. With
one device along the expert axis the exchange is the permutation itself.

On GPUs a wire leg is one `ragged_all_to_all` with a slice per (peer, expert):
compiled for eight GPUs in the tests, not yet run on several. XLA:CPU has no
such collective: there a leg is an all_gather and a local gather with the same
result.

Legend: ep devices of the expert axis, S slots of a device, E experts, L = E /
ep local experts, R rows of the expert buffer.
"""

import dataclasses

import jax
from jax import lax
import jax.numpy as jnp

from mxmoe_jax import backend as backend_lib
from mxmoe_jax import config as config_lib
from mxmoe_jax import permute
from pallas_kernels import groups, mxfp8, wire

MxArray = mxfp8.MxArray
MoEConfig = config_lib.MoEConfig

# XLA launches about one thread block per slice of a ragged_all_to_all. Two H200
# over NVLink, 16,384 rows of 5,120 bf16, 1 slice a peer: 31.9 ms, 8: 4.4, 32:
# 1.43, 128: 0.61. `experiments.bench exchange --slices` measures it anew.
SLICES_PER_PEER = 128
# There a dense all_to_all of the same bytes took 0.46 ms (131,072 rows: 2.14
# against 2.78), so much less at most. Its splits are equal and static, though:
# to lose no row each holds all of a device's, ep times the bytes. So a leg is
# dense only if ep < DENSE_GAIN, which is never.
DENSE_GAIN = 1.33


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
  """Where every row of this device goes, and where its rows come from.

  Attributes:
    slots: this device's slots in expert order.
    layout: groups of this device's expert buffer.
    source: [R] int32, device * S + place of the row; -1 for padding.
    home: [S] int32, device * R + row where each slot's row lies; -1 if it
      has none (no expert, or dropped).
    kept: [ep, ep, L] int32, rows from device i to expert l of device j.
    first: [ep, ep, L] int32, the place on device i where they begin.
    land: [ep, ep, L] int32, the row on device j where they begin.
    dropped: [E] int32, rows of all devices that had no room, per expert.
    top_k: k (static).
    axis: name of the expert axis, or None (static).
    slices: slices that each (peer, expert) is sent in on a GPU (static).
  """

  slots: permute.SlotOrder
  layout: groups.GroupLayout
  source: jax.Array
  home: jax.Array
  kept: jax.Array
  first: jax.Array
  land: jax.Array
  dropped: jax.Array
  top_k: int = dataclasses.field(metadata=dict(static=True))
  axis: str | None = dataclasses.field(metadata=dict(static=True))
  slices: int = dataclasses.field(metadata=dict(static=True))


def slices_per_expert(local_experts: int,
                      slices_per_peer: int = SLICES_PER_PEER) -> int:
  """Slices that the rows for one expert are sent in: one, or more if few.

  Args:
    local_experts: experts of each device.
    slices_per_peer: at least so many in all for each peer.
  """
  return -(-slices_per_peer // local_experts)


def describe(config: MoEConfig, ep: int, platform: str) -> str:
  """Which collective a wire leg is, and why; for `explain`.

  Args:
    config: the layer.
    ep: devices of the expert axis.
    platform: of those devices, as JAX names it.
  """
  if platform == "cpu":
    return "all_gather and a local gather: XLA:CPU has no ragged_all_to_all"
  if ep == 1:
    return "no collective: one device"
  local = config.num_experts // ep
  slices = slices_per_expert(local)
  return (f"ragged_all_to_all, {slices} x {local} slices a peer; a dense"
          f" all_to_all moves a byte up to {DENSE_GAIN} times as fast (two"
          f" H200), but its equal splits would send {ep} times the rows")


def gather_counts(experts: jax.Array, config: MoEConfig,
                  axis: str | None) -> jax.Array:
  """[ep, E] int32, rows of every device for every expert (all_gather)."""
  counts = permute.sort_slots(experts, config.num_experts).counts
  if axis is None:
    return counts[None]
  return lax.all_gather(counts, axis)


def make_plan(experts: jax.Array, counts: jax.Array, config: MoEConfig,
              axis: str | None, slices_per_peer: int = SLICES_PER_PEER
              ) -> Plan:
  """Plans the exchange; the same on every device, no communication.

  Args:
    experts: [T, k] int32 expert ids of this device's tokens, -1 for none.
    counts: [ep, E] int32 from `gather_counts`.
    config: the layer.
    axis: name of the expert axis, or None for one device.
    slices_per_peer: see `slices_per_expert`.
  """
  tokens, top_k = experts.shape
  ep, num_experts = counts.shape
  slots = permute.sort_slots(experts, num_experts)
  rows = config.buffer_rows(tokens, ep)
  me = 0 if axis is None else lax.axis_index(axis)
  by_target = counts.reshape(ep, ep, -1)
  kept = _keep(by_target, config.real_rows(tokens, ep))
  first = (jnp.cumsum(counts, axis=1) - counts).reshape(by_target.shape)
  sizes = jnp.sum(kept, axis=0)
  aligned = -(-sizes // groups.ROW_ALIGN) * groups.ROW_ALIGN
  starts = jnp.cumsum(aligned, axis=1) - aligned
  land = starts + jnp.cumsum(kept, axis=0) - kept
  layout = groups.group_layout(sizes[me], rows)
  source = _row_sources(layout, kept[:, me], first[:, me], land[:, me],
                        tokens * top_k)
  home = _slot_homes(experts, slots, kept[me], first[me], land[me], rows)
  dropped = jnp.sum(by_target - kept, axis=0).reshape(-1)
  slices = slices_per_expert(num_experts // ep, slices_per_peer)
  return Plan(slots, layout, source, home, kept, first, land, dropped, top_k,
              axis, slices)


def _keep(by_target: jax.Array, room: int) -> jax.Array:
  """[ep, ep, L] rows that find room, cut from the end of (source, expert)."""
  ep, _, local = by_target.shape
  arriving = jnp.swapaxes(by_target, 0, 1).reshape(ep, ep * local)
  kept = jax.vmap(lambda sizes: groups.clamp_sizes(sizes, room))(arriving)
  return jnp.swapaxes(kept.reshape(ep, ep, local), 0, 1)


def _row_sources(layout: groups.GroupLayout, kept: jax.Array,
                 first: jax.Array, land: jax.Array, slots: int) -> jax.Array:
  """[R] where each row of this device comes from; see `Plan.source`.

  Args:
    layout: of this device's buffer.
    kept: [ep, L], the plan's column for this device, as the next two.
    first: [ep, L].
    land: [ep, L].
    slots: S.
  """
  group = layout.row_group()
  row = jnp.arange(layout.rows, dtype=jnp.int32)
  device = jnp.sum(row >= (land + kept)[:, group], axis=0)
  device = jnp.minimum(device, kept.shape[0] - 1)
  place = first[device, group] + row - land[device, group]
  source = jnp.where(layout.row_valid(), device * slots + place, -1)
  return source.astype(jnp.int32)


def _slot_homes(experts: jax.Array, slots: permute.SlotOrder,
                kept: jax.Array, first: jax.Array, land: jax.Array,
                rows: int) -> jax.Array:
  """[S] where each slot's row lies; see `Plan.home`.

  Args:
    experts: [T, k] ids.
    slots: this device's slots in expert order.
    kept: [ep, L], the plan's row for this device, as the next two.
    first: [ep, L].
    land: [ep, L].
    rows: R.
  """
  expert = experts.reshape(-1)
  device, local = jnp.divmod(jnp.maximum(expert, 0), kept.shape[1])
  inside = slots.place - first[device, local]
  home = device * rows + land[device, local] + inside
  held = (expert >= 0) & (inside < kept[device, local])
  return jnp.where(held, home, -1).astype(jnp.int32)


def to_experts(x: jax.Array | MxArray, weights: jax.Array, plan: Plan,
               ops: backend_lib.Ops, *, folded: bool = False
               ) -> tuple[jax.Array | MxArray | wire.WireRows, jax.Array]:
  """Sends tokens to their experts (dispatch, and the gradient of combine).

  Args:
    x: [T, d] bf16 or MxArray (1x32, linear scales), one row per token.
    weights: [T, k] float32, one number per slot that rides along.
    plan: of this exchange.
    ops: operations of the backend.
    folded: fold the rows of an MxArray on the way (`reference.fold`).

  Returns:
    rows: [R, d] like x; MXFP8 rows that came over the wire stay there, as
      `wire.WireRows`. Padding rows are 0 with scale byte 0.
    row_weights: [R] float32; padding 0.
  """
  weights = weights.reshape(-1)
  fold = dict(folded=True) if folded and isinstance(x, MxArray) else {}
  if plan.axis is None:
    slot = jnp.where(plan.source >= 0,
                     groups.take_rows(plan.slots.order, plan.source), -1)
    token = jnp.where(slot >= 0, slot // plan.top_k, -1)
    return ops.take_rows(x, token, **fold), groups.take_rows(weights, slot)
  packed = ops.pack(x, plan.slots.order // plan.top_k,
                    groups.take_rows(weights, plan.slots.order), **fold)
  landed = send(packed, plan)
  if isinstance(x, MxArray):
    rows = wire.WireRows(landed, x.shape[1], x.data.dtype, **fold)
    return rows, rows.weights()
  return wire.unpack(landed, x)


def to_tokens(rows: jax.Array | MxArray, extra: jax.Array, plan: Plan,
              ops: backend_lib.Ops) -> tuple[jax.Array | MxArray, jax.Array]:
  """Sends rows home (combine, and the gradient of dispatch).

  Args:
    rows: [R, d] bf16 or MxArray.
    extra: [R] float32, one number per row that rides along.
    plan: of this exchange.
    ops: operations of the backend.

  Returns:
    [T, k, d] like rows, zeros for slots without a row; [T, k] float32.
  """
  if plan.axis is None:
    values, extra = (ops.take_rows(rows, plan.home),
                     groups.take_rows(extra, plan.home))
  else:
    packed = wire.pack(rows, extra)
    values, extra = wire.unpack(send_home(packed, plan), rows)

  def by_token(a):
    return a.reshape(-1, plan.top_k, *a.shape[1:])

  if isinstance(values, MxArray):  # blocked scales cannot be split by token
    values = values.with_layout("linear")
  return jax.tree.map(by_token, values), by_token(extra)


def send(packed: jax.Array, plan: Plan) -> jax.Array:
  """Wire rows to their experts: [S, stride] in expert order to [R, stride].

  They land expert-major in aligned groups; rows between groups are zeros.
  """
  return lax.platform_dependent(
      packed, cpu=lambda w: _gather(w, plan.source, plan.axis),
      default=lambda w: _ragged_send(w, plan))


def send_home(packed: jax.Array, plan: Plan) -> jax.Array:
  """Wire rows home: [R, stride] expert-major to [S, stride] in slot order."""
  return lax.platform_dependent(
      packed, cpu=lambda w: _gather(w, plan.home, plan.axis),
      default=lambda w: _ragged_return(w, plan))


def _gather(packed: jax.Array, source: jax.Array, axis: str | None
            ) -> jax.Array:
  """The exchange without ragged_all_to_all: everything, then a choice."""
  assert axis is not None
  everyone = lax.all_gather(packed, axis, tiled=True)
  return groups.take_rows(everyone, source)


def _ragged_send(packed: jax.Array, plan: Plan) -> jax.Array:
  """Dispatch by ragged_all_to_all, a slice (or more) per expert."""
  me = lax.axis_index(plan.axis)
  out = jnp.zeros((plan.layout.rows, packed.shape[1]), jnp.uint8)
  return _ragged(packed, out, plan, read=plan.first[me], rows=plan.kept[me],
                 write=plan.land[me], receive=plan.kept[:, me])


def _ragged_return(packed: jax.Array, plan: Plan) -> jax.Array:
  """The way home by ragged_all_to_all, put back into slot order."""
  me = lax.axis_index(plan.axis)
  out = jnp.zeros((plan.home.shape[0], packed.shape[1]), jnp.uint8)
  out = _ragged(packed, out, plan, read=plan.land[:, me],
                rows=plan.kept[:, me], write=plan.first[:, me],
                receive=plan.kept[me])
  held = jnp.where(plan.home >= 0, plan.slots.place, -1)
  return groups.take_rows(out, held)


def _ragged(packed: jax.Array, out: jax.Array, plan: Plan, *, read, rows,
            write, receive) -> jax.Array:
  """One ragged_all_to_all; offsets and sizes are [ep, L], in rows.

  A slice per (peer, expert) is split further into `Plan.slices`.
  """
  assert plan.axis is not None
  parts = plan.slices
  part = jnp.arange(parts, dtype=jnp.int32)

  def split(offset, size):
    size = size[..., None]
    most = -(-size // parts)
    step = jnp.minimum(most * part, size)  # empty slices stay inside, too
    length = jnp.minimum(size - step, most)
    return (offset[..., None] + step).reshape(-1), length.reshape(-1)

  read, send_sizes = split(read, rows)
  write, _ = split(write, rows)
  _, receive_sizes = split(receive, receive)
  return lax.ragged_all_to_all(packed, out, read, send_sizes, write,
                               receive_sizes, axis_name=plan.axis)
