"""The whole layer, forward and backward, compiled for B200s without any.

On one device and on a mesh of eight, with backend="mosaic": its HLO calls our
kernels for every product of the experts, and between the exchange and a matmul
there is nothing but moves of bytes: no dequantize, no fallback. What is called
is another test's matter (`pallas_kernels`). Needs the `aot` extra.
"""

import functools
import importlib.resources

import jax
from jax.experimental import topologies
from jax.experimental.mosaic.gpu import fragmented_array
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

import mxmoe_jax
from mxmoe_jax import arguments
from mxmoe_jax import config as config_lib
from tests.mxmoe_jax import compiled_hlo

# EXPERTS is no other dimension: the products of the router show it.
TOKENS, D_MODEL, D_FF, EXPERTS, TOP_K = 512, 256, 128, 16, 2
MESHES = {"one device": (1, 1), "eight devices": (2, 4)}
KERNEL = "mosaic_gpu_v2"
VIEWS = ("parameter", "get-tuple-element", "bitcast", "tuple")  # make nothing
# Nothing runs, so the code of XLA's own kernels may be as bad as it likes.
COMPILER_OPTIONS = {
  "xla_gpu_autotune_level": 0,
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}


def remember_ptxas(patch):
  """Mosaic asks ptxas for its version in a process each time it casts."""
  extension = fragmented_array.mgpu_lib._mosaic_gpu_ext  # pyright: ignore
  version = functools.cache(extension._get_ptxas_isa_version)
  patch.setattr(extension, "_get_ptxas_isa_version", version)


def config(ep):
  axes = dict(expert_axis="expert", data_axes=("data",)) if ep > 1 else {}
  return config_lib.MoEConfig(
    d_model=D_MODEL, d_ff=D_FF, num_experts=EXPERTS, top_k=TOP_K,
    recipe=config_lib.Recipe.mxfp8(), backend="mosaic", **axes,
  )  # fmt: skip


def compiled(data, ep):
  """The HLO of the gradient of a layer."""
  target = importlib.resources.files("pallas_kernels") / "targets"
  topology = topologies.get_topology_desc(
    platform="cuda",
    topology=f"1x1x{data * ep}",
    target_config=(target / "b200.txtpb").read_text(),
  )
  devices = np.array(topology.devices).reshape(data, ep)
  mesh, cfg = jax.sharding.Mesh(devices, ("data", "expert")), config(ep)

  def abstract(shape, dtype, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  x = abstract((TOKENS, D_MODEL), jnp.bfloat16, ("data", "expert"))
  params = {
    name: abstract(shape, jnp.float32)
    if name == "router"
    else abstract(shape, jnp.bfloat16, "expert")
    for name, shape in arguments.parameter_shapes(cfg).items()
  }

  def objective(x, params):
    y, _ = mxmoe_jax.moe(x, params, cfg, mesh=mesh if ep > 1 else None)
    return jnp.sum(jnp.square(y.astype(jnp.float32)))

  with (
    jax.default_device(topology.devices[0]),
    pytest.MonkeyPatch.context() as m,
  ):
    remember_ptxas(m)
    lowered = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(x, params)
    return lowered.compile(COMPILER_OPTIONS).as_text()


@pytest.fixture(scope="module", params=MESHES)
def layer(request):
  """(the compiled module, rows of a device's expert buffer, its experts)."""
  data, ep = MESHES[request.param]
  rows = config(ep).buffer_rows(TOKENS // (data * ep), ep)
  module = compiled_hlo.parse(compiled(data, ep))
  return module, rows, EXPERTS // ep


def products(layer):
  """Kernels that multiply MXFP8: (those of rows, weight gradients)."""
  module, rows, experts = layer
  found = [
    kernel
    for kernel in module.kernels()
    if sum(array.is_fp8 for array in module.read_by(kernel)) == 2
    and len(kernel.results) == 1
    and kernel.results[0].is_float
  ]
  of_rows = [k for k in found if k.results[0].shape[0] == rows]
  of_weights = [k for k in found if k.results[0].shape[0] == experts]
  assert len(of_rows) + len(of_weights) == len(found)
  return of_rows, of_weights


def test_every_product_of_the_experts_is_a_kernel_on_mxfp8(layer):
  of_rows, of_weights = products(layer)
  widths = sorted(k.results[0].shape[1] for k in of_rows)
  # Up and down, and the gradients of what they read.
  assert widths == sorted([2 * D_FF, D_MODEL, D_FF, D_MODEL])
  gradients = sorted(k.results[0].shape[1:] for k in of_weights)
  assert gradients == sorted([(D_MODEL, 2 * D_FF), (D_FF, D_MODEL)])


def test_nothing_else_multiplies(layer):
  module, _, _ = layer
  assert {kernel.target for kernel in module.kernels()} == {KERNEL}
  for found in module.instructions.values():
    assert found.opcode not in ("while", "conditional", "convolution")
    if found.opcode == "dot":  # the router's
      shapes = [a.shape for a in (*found.results, *module.read_by(found))]
      assert any(EXPERTS in shape for shape in shapes), shapes


def test_products_read_what_kernels_wrote_or_the_wire_brought(layer):
  module, _, _ = layer
  of_rows, of_weights = products(layer)
  for kernel in (*of_rows, *of_weights):
    for name in kernel.operands:
      (array,) = module.instructions[name].results
      if not array.is_fp8:
        continue
      for origin in module.origins(name):
        source = module.instructions[origin]
        wire = source.opcode.startswith("ragged-all-to-all")
        assert wire or source.target == KERNEL, (origin, source)


def test_nothing_dequantizes(layer):
  module, rows, _ = layer
  for name, found in module.instructions.items():
    if found.opcode in VIEWS or found.target == KERNEL:
      continue
    floats = [array for array in found.results if array.is_float]
    reads_fp8 = any(array.is_fp8 for array in module.read_by(found))
    assert not (floats and reads_fp8), (name, found)
    for array in floats:  # rows of experts are floats in kernels alone
      wide = len(array.shape) > 1 and array.size > rows
      assert not (wide and array.shape[0] == rows), (name, found)
