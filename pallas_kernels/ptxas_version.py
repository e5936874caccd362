"""Mosaic asks ptxas for its version once a process, and not at every cast.

JAX 0.11.2 starts ``ptxas --version`` each time a kernel that is being lowered
casts to or from 8 bits: over a thousand processes for one layer, more than half
of the time that its lowering takes. The answer decides which casts Mosaic may
emit and cannot change while a process runs.

This is the one place where a private function of JAX is replaced, by itself
with a memory. Other versions of JAX are left alone: lowering then takes longer,
if they still ask as often, and nothing else differs.
"""

import functools
from typing import Any

import jax
from jax.experimental.mosaic.gpu import fragmented_array

PINNED_VERSION = "0.11.2"
_NAME = "_get_ptxas_isa_version"


def extension() -> Any:
  """JAX's compiled part of Mosaic GPU; None where no CUDA plugin is there."""
  found = getattr(fragmented_array, "mgpu_lib", None)
  return getattr(found, "_mosaic_gpu_ext", None)


def remember() -> bool:
  """Makes Mosaic keep ptxas's version; safe to call again.

  Returns:
    Whether it does now: not on another version of JAX, and not without a CUDA
    plugin.
  """
  asked = getattr(extension(), _NAME, None)
  if jax.__version__ != PINNED_VERSION or asked is None:
    return False
  if not hasattr(asked, "cache_info"):
    setattr(extension(), _NAME, functools.cache(asked))
  return True
