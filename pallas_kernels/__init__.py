"""MXFP8 kernels for NVIDIA GPUs: arrays in, arrays out, one device.

`MxArray` is the format; `reference` is the meaning of every kernel in plain
jnp. Kernels know nothing of autodiff, meshes, Flax or fallback: see
`mxmoe_jax` for those.
"""

from pallas_kernels.mxfp8 import MxArray

__all__ = ["MxArray"]
