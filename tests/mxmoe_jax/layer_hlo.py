"""The whole layer, compiled for GPUs that are not there.

    python -m tests.mxmoe_jax.layer_hlo b200|h200 DATA EXPERT

prints the HLO of its gradient on a mesh of DATA x EXPERT devices. A process
compiles kernels for one GPU only, so each has its own (`hlo`).
"""

import functools
import importlib.resources
import pathlib
import subprocess
import sys

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

import mxmoe_jax
from mxmoe_jax import arguments
from mxmoe_jax import config as config_lib

# EXPERTS is no other dimension: the products of the router show it.
TOKENS, D_MODEL, D_FF, EXPERTS, TOP_K = 512, 256, 128, 16, 2
# Nothing runs, so the code of XLA's own kernels may be as bad as it likes.
COMPILER_OPTIONS = {
  "xla_gpu_autotune_level": 0,
  "xla_backend_optimization_level": 0,
  "xla_llvm_disable_expensive_passes": True,
}


def config(ep):
  axes = dict(expert_axis="expert", data_axes=("data",)) if ep > 1 else {}
  return config_lib.MoEConfig(
    d_model=D_MODEL, d_ff=D_FF, num_experts=EXPERTS, top_k=TOP_K,
    recipe=config_lib.Recipe.mxfp8(), backend="mosaic", **axes,
  )  # fmt: skip


def compiled(gpu, data, ep):
  """The HLO of the gradient of a layer."""
  target = importlib.resources.files("pallas_kernels") / "targets"
  topology = topologies.get_topology_desc(
    platform="cuda",
    topology=f"1x1x{data * ep}",
    target_config=(target / f"{gpu}.txtpb").read_text(),
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

  with jax.default_device(topology.devices[0]):
    lowered = jax.jit(jax.grad(objective, argnums=(0, 1))).lower(x, params)
    return lowered.compile(COMPILER_OPTIONS).as_text()


@functools.cache
def hlo(gpu, data, ep):
  """`compiled` in a process of its own."""
  root = pathlib.Path(__file__).parents[2]
  words = [sys.executable, "-m", "tests.mxmoe_jax.layer_hlo", gpu]
  done = subprocess.run(
    [*words, str(data), str(ep)],
    cwd=root, capture_output=True, text=True, timeout=280,
  )  # fmt: skip
  assert done.returncode == 0, done.stderr[-4000:]
  return done.stdout


if __name__ == "__main__":
  print(compiled(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
