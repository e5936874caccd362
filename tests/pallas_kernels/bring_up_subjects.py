"""Checks for `test_bring_up`, each with what must be said of it in its name."""

import itertools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import bring_up_check

SIZE = 64
HANG_SECONDS = 1000


def double(x, **_):
  return x + x


def one_off(x, **_):
  return (x + x).at[7].set(0)


def raises(x, **_):
  raise ValueError(f"cannot compile {x.shape} in /usr/lib/deep/kernel.py")


def refuses(x, **_):
  raise NotImplementedError(f"takes no {x.shape}. Use backend='xla'.")


def dies(x, **_):
  del x
  os.abort()


def hangs(x, **_):
  time.sleep(HANG_SECONDS)
  return x


def moves(x, **_):
  """Another result at each call."""
  like = jax.ShapeDtypeStruct(x.shape, x.dtype)
  counter = itertools.count()
  return jax.pure_callback(
    lambda: np.full(x.shape, next(counter), x.dtype), like
  )


def check(name, run, module="pallas_kernels.quantize", **fields):
  """A kernel that should double 64 numbers."""
  return bring_up_check.Check(
    kernel=name,
    shape=f"{SIZE}",
    stage=fields.pop("stage", "small"),
    module=module,
    make=lambda first: (first + jnp.arange(SIZE, dtype=jnp.bfloat16),),
    run=run,
    meaning=double,
    inputs={"zero": (0.0,), "one": (1.0,)},
    **fields,
  )


def checks(capability):
  """The table, as `bring_up_table.checks`."""
  del capability
  return [
    check("good", double),
    check("wrong", one_off),
    check("refuses", refuses),
    check("raises", raises),
    check("hangs", hangs),
    check("good again", double),
    check("dies", dies),
    check("missing", double, module="pallas_kernels.blackwell.not_there"),
    check("large", double, stage="real"),
    check("uninterpreted", double, interpreted="it takes too long"),
  ]
