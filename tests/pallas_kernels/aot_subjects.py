"""Kernels for `test_aot`, good and bad; run in a process for each target.

Usage: python -m tests.pallas_kernels.aot_subjects TARGET JSON KEEP
"""

import pathlib
import sys

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import aot, mosaic
from tests.interpreter import ring_matmul

ROWS = 128


def copy_kernel(columns, scratch=0):
  """Copies [128, columns] float32 through shared memory."""

  def kernel(x_gmem, y_gmem, x_smem, unused, barrier):
    del unused
    plgpu.copy_gmem_to_smem(x_gmem, x_smem, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(x_smem, y_gmem)
    plgpu.wait_smem_to_gmem(0)

  return plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((ROWS, columns), jnp.float32),
    scratch_types=[
      plgpu.SMEM((ROWS, columns), jnp.float32),
      plgpu.SMEM((max(scratch, 1),), jnp.int8),
      plgpu.Barrier(),
    ],
    compiler_params=mosaic.compiler_params(),
  )


def spilling_kernel(columns):
  """Holds [128, columns] float32 in registers across a barrier: it spills."""

  def kernel(x_gmem, y_gmem, barrier):
    layout = plgpu.Layout.TCGEN05_TMEM_NATIVE(4)
    tiles = [
      plgpu.load(x_gmem.at[:, pl.ds(j, 32)], layout=layout, optimized=False)
      for j in range(0, columns, 32)
    ]
    plgpu.barrier_arrive(barrier)
    plgpu.barrier_wait(barrier)
    for j, tile in zip(range(0, columns, 32), tiles, strict=True):
      y_gmem[:, pl.ds(j, 32)] = tile

  return plgpu.kernel(
    kernel,
    out_type=jax.ShapeDtypeStruct((ROWS, columns), jnp.float32),
    scratch_types=[plgpu.Barrier()],
    compiler_params=mosaic.compiler_params(),
  )


def subjects(target: str) -> list[mosaic.Variant]:
  """The kernels, named by what the check must say of them."""

  def variant(name, function, columns=64, **rest):
    x = jax.ShapeDtypeStruct((ROWS, columns), jnp.float32)
    return mosaic.Variant(
      kernel="subject", variant=name, function=function, arguments=(x,), **rest
    )

  found = [
    variant(
      "good", copy_kernel(64), promises=("bulk_tensor_load", "bulk_copy")
    ),
    variant("spills", spilling_kernel(512), 512),
    variant("breaks its promise", copy_kernel(64), promises=("cast_to_fp8",)),
    variant("does not fit twice", copy_kernel(256), 256, ctas_per_sm=2),
    variant("exceeds shared memory", copy_kernel(64, scratch=250_000)),
  ]
  if target == "b200":
    data = jax.ShapeDtypeStruct((256, 384), jnp.float8_e4m3fn)
    scale = jax.ShapeDtypeStruct((2, 3, 32, 16), jnp.float8_e8m0fnu)
    found.append(
      mosaic.Variant(
        kernel="subject",
        variant="tensor core",
        function=lambda *x: ring_matmul.matmul(*x, pairs=True),
        arguments=(data, data, scale, scale),
        promises=("block_scaled_mma", "scale_copy_to_tmem", "tmem_load"),
      )
    )
  return found


if __name__ == "__main__":
  name, json_file, keep = sys.argv[1:]
  sys.exit(
    aot.run(
      aot.load_target(name),
      subjects(name),
      json_file=pathlib.Path(json_file),
      keep=pathlib.Path(keep),
    )
  )
