"""The sharded layer, compiled for eight GPUs on a machine that has none.

Its HLO holds exactly the collectives that the recipe promises, with their
dtypes and bytes. Needs the `aot` extra (the CUDA compiler plug-in).
"""

import importlib.resources
import itertools
import math
import re

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import mxmoe_jax
from mxmoe_jax import arguments
from mxmoe_jax import config as config_lib
from pallas_kernels import wire

Recipe = config_lib.Recipe
TOKENS, D_MODEL, D_FF, EXPERTS, TOP_K = 1024, 256, 128, 16, 2
EP, DATA = 4, 2
OPERATION = re.compile(
    r"= (.*?) (all-gather|all-reduce|ragged-all-to-all|all-to-all|"
    r"reduce-scatter|collective-permute|collective-broadcast)(-start)?\(")
SHAPE = re.compile(r"\b([a-z]+\d+)\[([\d,]*)\]")
EXPERT_BYTES = EXPERTS // EP * 3 * D_MODEL * D_FF  # elements, one device


@pytest.fixture(scope="module", params=["b200", "h200"])
def mesh(request):
  target = importlib.resources.files("pallas_kernels") / "targets"
  topology = topologies.get_topology_desc(
      platform="cuda", topology="1x1x8",
      target_config=(target / f"{request.param}.txtpb").read_text())
  devices = np.array(topology.devices).reshape(DATA, EP)
  return jax.sharding.Mesh(devices, ("data", "expert"))


def config(recipe, fsdp=None):
  return config_lib.MoEConfig(
      d_model=D_MODEL, d_ff=D_FF, num_experts=EXPERTS, top_k=TOP_K,
      expert_axis="expert", data_axes=("data",), fsdp_axis=fsdp,
      recipe=recipe, backend="xla")


def abstract(shape, dtype, mesh, *spec):
  return jax.ShapeDtypeStruct(shape, dtype,
                              sharding=NamedSharding(mesh, P(*spec)))


def collectives(cfg, mesh, *, gradient: bool) -> list[tuple[str, str, int]]:
  """Sorted (operation, dtype, elements of the result) of the compiled HLO."""
  x = abstract((TOKENS, D_MODEL), jnp.bfloat16, mesh, ("data", "expert"))
  specs = {"router": (), "gate_up": ("expert", cfg.fsdp_axis),
           "down": ("expert", cfg.fsdp_axis)}
  params = {
      name: abstract(shape, jnp.float32 if name == "router" else jnp.bfloat16,
                     mesh, *specs[name])
      for name, shape in arguments.parameter_shapes(cfg).items()}

  def forward(x, params):
    return mxmoe_jax.moe(x, params, cfg, mesh=mesh)[0]

  def objective(x, params):
    return jnp.sum(jnp.square(forward(x, params).astype(jnp.float32)))

  fn = jax.grad(objective, argnums=(0, 1)) if gradient else forward
  text = jax.jit(fn).lower(x, params).compile().as_text()
  return sorted(itertools.chain.from_iterable(
      _parse(*found.groups()) for found in OPERATION.finditer(text)))


def _parse(results: str, operation: str, start: str | None):
  """(operation, dtype, elements) of each result of one HLO operation.

  A start operation lists its operands before its results; XLA also merges
  several arrays into one operation.
  """
  shapes = SHAPE.findall(results)
  if operation == "ragged-all-to-all":
    shapes = [shape for shape in shapes if shape[0] == "u8"][-1:]
  elif start:
    shapes = shapes[len(shapes) // 2:]
  for dtype, dims in shapes:
    yield operation, dtype, math.prod(int(d) for d in dims.split(",") if d)


def legs(cfg, *names):
  """The wire legs that a recipe promises: rows times stride in bytes."""
  tokens = TOKENS // (EP * DATA)
  rows = {"dispatch": cfg.buffer_rows(tokens, EP),
          "combine_grad": cfg.buffer_rows(tokens, EP),
          "combine": tokens * TOP_K, "dispatch_grad": tokens * TOP_K}
  return [("ragged-all-to-all", "u8", rows[n] * wire.stride(
      D_MODEL, getattr(cfg.recipe, n))) for n in names]


COUNTS = ("all-gather", "s32", EP * EXPERTS)
ROUTER = ("all-reduce", "f32", D_MODEL * EXPERTS)


@pytest.mark.parametrize("recipe", [Recipe.mxfp8(), Recipe.bf16()],
                         ids=lambda r: r.name)
def test_forward_holds_counts_dispatch_and_combine(mesh, recipe):
  cfg = config(recipe)
  assert collectives(cfg, mesh, gradient=False) == sorted(
      [COUNTS, *legs(cfg, "dispatch", "combine")])


def test_gradient_adds_two_legs_and_one_sum_of_weight_gradients(mesh):
  cfg = config(Recipe.mxfp8())
  weights = ("all-reduce", "f32", EXPERT_BYTES)
  assert collectives(cfg, mesh, gradient=True) == sorted(
      [COUNTS, weights, ROUTER,
       *legs(cfg, "dispatch", "combine", "combine_grad", "dispatch_grad")])


def test_fsdp_gathers_mxfp8_bytes_and_scatters_float32_sums(mesh):
  cfg = config(Recipe.mxfp8(), fsdp="data")
  found = collectives(cfg, mesh, gradient=True)
  gathered = [c for c in found if c[0] == "all-gather" and c != COUNTS]
  assert {dtype for _, dtype, _ in gathered} == {"u8"}
  twice = 2 * EXPERT_BYTES * 33 // 32  # the forward's and the gradient's view
  assert sum(n for _, _, n in gathered) == twice
  scattered = [c for c in found if c[0] == "reduce-scatter"]
  assert {dtype for _, dtype, _ in scattered} == {"f32"}
  assert sum(n for _, _, n in scattered) == EXPERT_BYTES // DATA
  assert [c for c in found if c[0] == "all-reduce"] == [ROUTER]
  assert len([c for c in found if c[0] == "ragged-all-to-all"]) == 4
