"""The steps on expert rows that no kernel does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxmoe_jax import Swiglu, experts
from pallas_kernels import cases, groups
from tests import tolerance
from tests.mxmoe_jax import layers

sum_groups = jax.jit(experts.sum_groups)


@pytest.mark.parametrize("pattern", cases.PATTERNS)
def test_sums_of_groups(pattern):
  sizes = cases.group_sizes(pattern, 4, 300)
  layout = groups.group_layout(
    jnp.asarray(sizes, jnp.int32), groups.aligned_rows(300, 4)
  )
  valid = np.asarray(layout.row_valid())
  rows = np.asarray(layers.normal("rows", (layout.rows, 32), jnp.float32))
  rows = np.where(valid[:, None], rows, 0)
  got = np.asarray(sum_groups(jnp.asarray(rows), layout)).astype(np.float64)
  group = np.asarray(layout.row_group())
  for g, size in enumerate(sizes):
    mine = rows[valid & (group == g)].astype(np.float64)
    assert len(mine) == size
    bound = tolerance.FLOAT32_SUM * np.abs(mine).sum(0)
    assert (np.abs(got[g] - mine.sum(0)) <= bound).all()


def test_shared_experts_are_added_in_float32():
  cfg = layers.config(d_ff_shared=64, swiglu=Swiglu(limit=2.0))
  params, x = layers.params(cfg), layers.tokens()
  y = layers.tokens(name="y")
  got = jax.jit(experts.add_shared, static_argnums=3)(y, x, params, cfg)
  x, y, w, down = (
    np.asarray(a).astype(np.float64)
    for a in (x, y, params["shared_gate_up"], params["shared_down"])
  )
  gate, up = (x @ w[:, i] for i in (0, 1))
  gate, up = np.minimum(gate, 2), np.clip(up, -2, 2)
  want = y + gate / (1 + np.exp(-gate)) * up @ down
  assert got.dtype == jnp.bfloat16
  assert tolerance.sqnr(got, want) >= tolerance.LAYER_BF16


def test_no_shared_experts_leave_y_alone():
  cfg, y = layers.config(), layers.tokens(name="y")
  assert experts.add_shared(y, layers.tokens(), {}, cfg) is y
