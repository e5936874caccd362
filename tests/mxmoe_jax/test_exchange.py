"""The exchange alone: every row lands where it must and comes home."""

import functools

import hypothesis
from hypothesis import strategies as st
import jax
from jax import lax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from mxmoe_jax import backend, exchange
from pallas_kernels import reference, wire
from tests.mxmoe_jax import meshes

TOKENS = 64


def tokens_and_ids(seed: int, tokens: int = TOKENS):
  """(x [T, D] bf16, weights [T, k], ids [T, k] distinct, some of them -1)."""
  rng = np.random.default_rng(seed)
  x = jnp.asarray(rng.standard_normal((tokens, meshes.D_MODEL)),
                  jnp.bfloat16)
  ids = np.argsort(rng.random((tokens, meshes.EXPERTS)), axis=1)
  ids = ids[:, :meshes.TOP_K].astype(np.int32)
  ids[rng.random(ids.shape) < 0.1] = -1
  return x, jnp.asarray(rng.random(ids.shape), jnp.float32), jnp.asarray(ids)


@functools.cache
def there_and_back(ep: int, precision: str, factor: float | None = None):
  """Jitted (x, weights, ids) -> rows, weights, sizes, home, dropped."""
  cfg, ops = meshes.config(buffer_factor=factor), backend.select("xla")

  def body(x, weights, ids):
    counts = exchange.gather_counts(ids, cfg, "expert")
    plan = exchange.make_plan(ids, counts, cfg, "expert")
    sent = reference.quantize(x) if precision == "mxfp8" else x
    rows, row_weights = exchange.to_experts(sent, weights, plan, ops)
    rows = wire.array(rows)
    home, home_weights = exchange.to_tokens(rows, row_weights, plan, ops)
    return (rows, row_weights, plan.layout.sizes, plan.layout.starts, home,
            home_weights, plan.dropped)

  everyone = P("expert")
  return jax.jit(jax.shard_map(
      body, mesh=meshes.make_mesh(1, ep), check_vma=False,
      in_specs=(everyone,) * 3, out_specs=(*[everyone] * 6, P())))


def numbers(x):
  return np.asarray(x.dequantize(jnp.float32) if hasattr(x, "dequantize")
                    else x.astype(jnp.float32))


def rows_of_experts(out, ep: int):
  """Wire bytes of each expert's rows, in order, whatever the mesh."""
  rows, row_weights, sizes, starts = out[:4]
  packed = np.asarray(wire.pack(rows, row_weights))
  per_rank = packed.reshape(ep, -1, packed.shape[1])
  local = meshes.EXPERTS // ep
  return [per_rank[e // local, s:s + n] for e, (s, n) in
          enumerate(zip(np.asarray(starts), np.asarray(sizes), strict=True))]


@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
@pytest.mark.parametrize("ep", [2, 4, 8])
def test_dispatched_bytes_do_not_depend_on_the_mesh(ep, precision):
  args = tokens_and_ids(1)
  want = rows_of_experts(
      jax.block_until_ready(there_and_back(1, precision)(*args)), 1)
  got = rows_of_experts(
      jax.block_until_ready(there_and_back(ep, precision)(*args)), ep)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)


@hypothesis.settings(max_examples=8)
@hypothesis.given(seed=st.integers(0, 2**16))
@pytest.mark.parametrize("ep", [1, 4])
def test_exchange_and_back_is_the_identity(ep, seed):
  x, weights, ids = tokens_and_ids(seed)
  out = jax.block_until_ready(there_and_back(ep, "mxfp8")(x, weights, ids))
  want = numbers(reference.quantize(x))[:, None] * (ids >= 0)[..., None]
  np.testing.assert_array_equal(numbers(out[4]), want)
  np.testing.assert_array_equal(out[5], weights * (ids >= 0))
  assert int(jnp.sum(out[6])) == 0


def test_groups_are_aligned_and_padding_is_zero():
  out = there_and_back(4, "mxfp8")(*tokens_and_ids(3))
  rows, row_weights, sizes, starts = jax.block_until_ready(out[:4])
  assert np.all(np.asarray(starts) % 128 == 0)
  packed = np.asarray(wire.pack(rows, row_weights)).reshape(
      4, -1, wire.stride(meshes.D_MODEL, "mxfp8"))
  held = np.zeros(packed.shape[:2], bool)
  for e, (s, n) in enumerate(zip(starts, sizes, strict=True)):
    held[e // 2, int(s):int(s) + int(n)] = True
  assert held.sum() == int(np.sum(sizes))
  assert not packed[~held].any()
  assert packed[held].any(-1).all()


def test_dropped_rows_are_the_last_in_order():
  """Room for 128 rows a rank: the later sources and experts lose theirs."""
  x, weights, ids = tokens_and_ids(4, tokens=256)
  ids = jnp.where(ids >= 0, ids % 2, -1)  # all rows want rank 0's experts
  ids = ids.at[:, 1].set(jnp.where(ids[:, 0] == ids[:, 1], -1, ids[:, 1]))
  out = there_and_back(4, "bf16", 1.0)(x, weights, ids)
  sizes, dropped = (np.asarray(a) for a in (out[2], out[6]))
  assert sizes[:2].sum() == 128
  assert sizes[2:].sum() == 0
  asked = np.asarray(jnp.sum(ids >= 0))
  assert dropped.sum() == asked - 128
  first = np.asarray(ids)[:64]  # of source 0: all kept if they fit
  assert (first >= 0).sum() <= 128
  home = numbers(out[4])[:64]
  np.testing.assert_array_equal(home.any(-1), first >= 0)


@pytest.mark.parametrize("width", [32, 96, 2880])
def test_wire_row_is_data_scales_weight(width):
  x = jnp.asarray(np.random.default_rng(0).standard_normal((5, width)),
                  jnp.bfloat16)
  weight = jnp.arange(5, dtype=jnp.float32) / 7
  for rows, precision in ((reference.quantize(x), "mxfp8"), (x, "bf16")):
    packed = wire.pack(rows, weight)
    assert packed.dtype == jnp.uint8
    assert packed.shape == (5, wire.stride(width, precision))
    assert packed.shape[1] % 128 == 0
    back, extra = wire.unpack(packed, rows)
    np.testing.assert_array_equal(numbers(back), numbers(rows))
    np.testing.assert_array_equal(extra, weight)
  assert wire.stride(7168, "mxfp8") == 7424


def ragged_on_cpu(operand, output, read, send, write, receive, *, axis_name):
  """What `lax.ragged_all_to_all` documents, slice by slice, by all_gather."""
  me, ep = lax.axis_index(axis_name), lax.axis_size(axis_name)
  per_peer = read.shape[0] // ep
  everyone, reads, sends, writes = (
      lax.all_gather(a, axis_name).reshape(ep, -1, *a.shape[1:])
      for a in (operand, read, send, write))
  mine = [a.reshape(ep, ep, per_peer)[:, me] for a in (reads, sends, writes)]
  starts, sizes, places = mine
  row = jnp.arange(output.shape[0])
  for source in range(ep):
    inside = (row >= places[source][:, None]) & (
        row < (places[source] + sizes[source])[:, None])
    part = jnp.argmax(inside, axis=0)
    taken = starts[source][part] + row - places[source][part]
    output = jnp.where(inside.any(0)[:, None],
                       everyone[source][taken], output)
  agreed = jnp.all(receive.reshape(ep, per_peer) == sizes)
  in_range = jnp.all((read >= 0) & (read + send <= operand.shape[0]))
  return jnp.where(agreed & in_range, output, 255)


@functools.cache
def both_wires(slices: int, factor: float | None):
  """Jitted; the wire of a GPU and that of a CPU, there and back."""
  cfg = meshes.config(buffer_factor=factor)

  def body(x, weights, ids):
    counts = exchange.gather_counts(ids, cfg, "expert")
    plan = exchange.make_plan(ids, counts, cfg, "expert", slices)
    order = plan.slots.order
    packed = reference.pack(reference.quantize(x), order // plan.top_k,
                            weights.reshape(-1)[order])
    landed = exchange._ragged_send(packed, plan)
    home = exchange._ragged_return(landed, plan)
    return (landed, exchange.send(packed, plan), home,
            exchange.send_home(landed, plan), plan.dropped)

  spec = P("expert")
  return jax.jit(jax.shard_map(
      body, mesh=meshes.make_mesh(1, 4), check_vma=False,
      in_specs=(spec,) * 3, out_specs=(*[spec] * 4, P())))


@pytest.mark.parametrize("slices", [1, 16, 128])
@pytest.mark.parametrize("case", ["even", "skewed", "one rank", "dropped"])
def test_slices_of_a_gpu_land_where_the_cpu_gathers(case, slices, monkeypatch):
  monkeypatch.setattr(lax, "ragged_all_to_all", ragged_on_cpu)
  x, weights, ids = tokens_and_ids(5)
  if case == "skewed":
    ids = jnp.where((ids >= 0) & (jnp.arange(TOKENS) % 4 > 0)[:, None],
                    jnp.arange(meshes.TOP_K), ids)
  if case in ("one rank", "dropped"):  # the others get nothing
    ids = jnp.where(ids >= 0, 2 + jnp.arange(meshes.TOP_K), ids)
  run = both_wires(slices, 1.0 if case == "dropped" else None)
  landed, want, home, want_home, dropped = jax.block_until_ready(
      run(x, weights, ids))
  np.testing.assert_array_equal(landed, want)
  np.testing.assert_array_equal(home, want_home)
  assert np.asarray(home).any()
  assert (np.asarray(dropped).sum() > 0) == (case == "dropped")


def test_explain_says_which_collective_and_why():
  cfg = meshes.config()
  told = exchange.describe(cfg, 4, "gpu")
  assert "ragged_all_to_all, 64 x 2 slices a peer" in told
  assert "send 4 times the rows" in told
  assert "XLA:CPU" in exchange.describe(cfg, 4, "cpu")
