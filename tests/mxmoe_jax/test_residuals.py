"""What is kept for the backward pass: no expert output, counted to the byte."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mxmoe_jax import Recipe, arguments, explain, layer, moe, sharding
from pallas_kernels import cases, wire
from tests.mxmoe_jax import layers, meshes

# D, 2 F, F and R = rows all differ, so a shape names what it is.
TOKENS, D_MODEL, D_FF, EXPERTS = 200, 128, 96, 4
RECIPES = {
  "mxfp8": Recipe.mxfp8(),
  "bf16": Recipe.bf16(),
  "bf16_wgrad": Recipe.mxfp8_bf16_wgrad(),
  "mxfp8_preactivations": Recipe.mxfp8(save_preactivations="mxfp8"),
  "recompute": Recipe.mxfp8(
    save_preactivations="recompute", save_hidden="recompute"
  ),
  "bf16_recompute": Recipe.bf16(
    save_preactivations="recompute", save_hidden="recompute"
  ),
  "bf16_dispatch": Recipe.mxfp8(dispatch="bf16"),
}
# Bytes a row beside the float32 combine weight.
MX_ROW, BF16_ROW = D_MODEL * 33 / 32, D_MODEL * 2
PRE, MX_PRE = 2 * D_FF * 2, 2 * D_FF * 33 / 32
HIDDEN, MX_HIDDEN = D_FF * 2, D_FF * 33 / 32
BYTES = {
  "mxfp8": MX_ROW + PRE + MX_HIDDEN,
  "bf16": BF16_ROW + PRE + HIDDEN,
  "bf16_wgrad": MX_ROW + PRE + MX_HIDDEN,
  "mxfp8_preactivations": MX_ROW + MX_PRE + MX_HIDDEN,
  "recompute": MX_ROW,
  "bf16_recompute": BF16_ROW,
  "bf16_dispatch": MX_ROW + PRE + MX_HIDDEN,
}


def config(name):
  return layers.config(
    d_model=D_MODEL, d_ff=D_FF, num_experts=EXPERTS, recipe=RECIPES[name]
  )


def arguments_of(cfg):
  """(x, weights, ids, expert params) of the differentiated core."""
  params = layers.params(cfg)
  experts = {name: params[name] for name in ("gate_up", "down")}
  weights = jax.nn.softmax(
    layers.normal("weights", (TOKENS, layers.TOP_K), jnp.float32)
  )
  rng = np.random.default_rng(0)
  ids = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(TOKENS)])
  return (
    layers.tokens(TOKENS, width=D_MODEL),
    weights,
    jnp.asarray(ids, jnp.int32),
    experts,
  )


def pull_of(cfg):
  """Returns `jax.vjp(...)[1]`, whose leaves are what is kept."""

  def pull(x, weights, ids, experts):
    def core(x, weights, experts):
      return layer.mixture(
        (cfg, None), x, weights, ids, experts, layer.QuantizedWeights()
      )

    return jax.vjp(core, x, weights, experts)[1]

  return pull


def nbytes(tree) -> int:
  return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", RECIPES)
def test_explain_counts_the_leaves_of_the_vjp(name):
  cfg = config(name)
  args = arguments_of(cfg)
  leaves = jax.tree.leaves(jax.eval_shape(pull_of(cfg), *args))
  told = explain(cfg, TOKENS)
  rows = cfg.buffer_rows(TOKENS)
  assert told.rows == rows
  counts = EXPERTS * 4  # [1, 1, E] int32, once a layer
  assert nbytes(leaves) - nbytes(args[1:]) - counts == round(
    told.saved_bytes_per_row * rows
  )
  assert told.saved_bytes_per_row == BYTES[name] + 4
  assert told.buffer_bytes["saved for backward"] == round(
    told.saved_bytes_per_row * rows
  )


@pytest.mark.parametrize("name", ["mxfp8", "bf16", "recompute"])
def test_explain_counts_wire_rows_over_a_mesh(name):
  devices = 2
  cfg = layers.config(
    d_model=D_MODEL, d_ff=D_FF, num_experts=EXPERTS, recipe=RECIPES[name],
    expert_axis="expert",
  )  # fmt: skip
  mesh = meshes.make_mesh(1, devices)
  args = arguments_of(cfg)

  def pull(x, weights, ids, experts):
    static = cfg, sharding.resolve(cfg, mesh)

    def core(x, weights, experts):
      return layer.mixture(
        static, x, weights, ids, experts, layer.QuantizedWeights()
      )

    return jax.vjp(core, x, weights, experts)[1]

  leaves = jax.tree.leaves(jax.eval_shape(pull, *args))
  told = explain(cfg, TOKENS, mesh=mesh)
  counts = devices * devices * EXPERTS * 4
  assert nbytes(leaves) - nbytes(args[1:]) - counts == round(
    told.saved_bytes_per_row * told.rows * devices
  )
  width = wire.stride(D_MODEL, "mxfp8") if name != "bf16" else BF16_ROW
  alone = MX_ROW if name != "bf16" else BF16_ROW
  assert told.saved_bytes_per_row == BYTES[name] - alone + width + 4


@pytest.mark.parametrize("name", sorted(RECIPES.keys() - {"bf16"}))
def test_no_leaf_has_the_shape_of_an_expert_output(name):
  cfg = config(name)
  rows = cfg.buffer_rows(TOKENS)
  leaves = jax.tree.leaves(jax.eval_shape(pull_of(cfg), *arguments_of(cfg)))
  wide = [
    a
    for a in leaves
    if a.shape == (rows, D_MODEL) and a.dtype in (jnp.bfloat16, jnp.float32)
  ]
  assert len(wide) == (name == "bf16_recompute")  # the rows that went in


def test_in_bf16_the_kept_rows_are_those_that_went_in():
  cfg = config("bf16")
  args = arguments_of(cfg)
  rows = cfg.buffer_rows(TOKENS)
  leaves = jax.tree.leaves(jax.jit(pull_of(cfg))(*args))
  [kept] = [a for a in leaves if a.shape == (rows, D_MODEL)]
  known = {row.tobytes() for row in np.asarray(args[0])}
  found = [row.tobytes() for row in np.asarray(kept) if row.any()]
  assert len(found) == TOKENS * layers.TOP_K
  assert set(found) == known


def kept_bytes(cfg, rows: int) -> int:
  """What a whole layer, router included, keeps beside its own arguments."""
  struct = jax.ShapeDtypeStruct
  x = struct((rows // cfg.top_k, cfg.d_model), jnp.bfloat16)
  params = {
    name: struct(shape, jnp.float32 if name == "router" else jnp.bfloat16)
    for name, shape in arguments.parameter_shapes(cfg).items()
  }

  def pull(x, params):
    return jax.vjp(lambda x, params: moe(x, params, cfg)[0], x, params)[1]

  given = {(a.shape, a.dtype) for a in jax.tree.leaves((x, params))}
  leaves = jax.tree.leaves(jax.eval_shape(pull, x, params))
  return nbytes([a for a in leaves if (a.shape, a.dtype) not in given])


@pytest.mark.parametrize("model", ["deepseek_v3", "llama4_scout"])
def test_memory_of_a_whole_layer_shrinks_with_its_pre_activations(model):
  shape = cases.MODELS[model]
  experts = 32 if model == "deepseek_v3" else 8
  sizes = dict(
    d_model=shape.d_model, d_ff=shape.d_ff, num_experts=experts,
    top_k=shape.top_k,
  )  # fmt: skip
  kept = {
    name: kept_bytes(layers.config(recipe=recipe, **sizes), 32768)
    for name, recipe in RECIPES.items()
  }
  assert kept["mxfp8_preactivations"] < 0.55 * kept["bf16"]
  assert kept["recompute"] < 0.3 * kept["bf16"]
  assert 0.6 < kept["mxfp8"] / kept["bf16"] < 0.8  # the default


def test_the_router_keeps_no_float32_tokens():
  cfg = layers.config(d_model=7168, d_ff=64, num_experts=4, top_k=2)
  assert kept_bytes(cfg, 4096) < 2048 * 7168 * 4


def test_deepseek_v3_saves_what_the_design_says():
  sizes = dict(d_model=7168, d_ff=2048, num_experts=8, top_k=8)
  told = {
    name: explain(layers.config(recipe=recipe, **sizes), 128)
    for name, recipe in RECIPES.items()
  }
  kilobytes = {
    name: round(t.saved_bytes_per_row / 1000, 1) for name, t in told.items()
  }
  assert kilobytes["bf16"] == 26.6
  assert kilobytes["mxfp8"] == 17.7
  assert kilobytes["mxfp8_preactivations"] == 13.7
