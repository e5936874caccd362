"""Inputs of the field cases, and how their arrays are compared."""

import math

import numpy as np

from tests import tolerance
from tests.field import reference


def integers(seed: int, shape):
  """-1, 0 and 1 as float32: exact in MXFP8 under any scale rule."""
  rng = np.random.default_rng(seed)
  return rng.integers(-1, 2, shape).astype(np.float32)


def normal(seed: int, shape, scale: float = 1.0):
  """Normal float32."""
  rng = np.random.default_rng(seed)
  return (scale * rng.standard_normal(shape)).astype(np.float32)


def distinct(seed: int, tokens: int, experts: int):
  """[tokens, 2] random expert ids, two different ones for each token."""
  rng = np.random.default_rng(seed)
  return np.stack([rng.permutation(experts)[:2] for _ in range(tokens)])


def matmul(seed: int, rows: int, rhs_shape, sizes):
  """Integer operands of a grouped product and its gradients."""
  _, k, n = rhs_shape
  return dict(
    lhs=integers(seed, (rows, k)),
    rhs=integers(seed + 1, rhs_shape),
    group_sizes=np.asarray(sizes, np.int32),
    dout=integers(seed + 2, (rows, n)),
  )


def layer(seed: int, wanted, width: int, d_ff: int, experts: int):
  """(x, p, dy) of a layer that routes each token as `wanted` says.

  The first features of a token are its router logits / 4: 1 for the first
  wanted expert and 0.5 for the second.
  """
  rng = np.random.default_rng(seed)
  tokens = len(wanted)
  x = rng.standard_normal((tokens, width)).astype(np.float32) * 0.5
  x[:, :experts] = 0
  for j, strength in zip(range(wanted.shape[1]), (1.0, 0.5), strict=True):
    x[np.arange(tokens), wanted[:, j]] = strength
  router = np.zeros((width, experts), np.float32)
  router[:experts] = 4 * np.eye(experts)

  def weights(*shape):
    scaled = rng.standard_normal(shape) / math.sqrt(shape[1])
    return scaled.astype(np.float32)

  p = dict(
    wr=router,
    wg=weights(experts, width, d_ff),
    wu=weights(experts, width, d_ff),
    wd=weights(experts, d_ff, width),
  )
  return x, p, rng.standard_normal((tokens, width)).astype(np.float32)


def assert_exact(adapter, inputs, expected=None, atol=None) -> None:
  """Checks a grouped product and its gradients, equal unless atol says."""
  expected = expected or reference.exact_groups(
    inputs["lhs"], inputs["rhs"], inputs["group_sizes"], inputs["dout"]
  )
  got = adapter.grouped_mm_vjp(**inputs)
  for name, have in zip(("out", "dlhs", "drhs"), got, strict=True):
    np.testing.assert_allclose(
      have.astype(np.float64),
      expected[name],
      rtol=0,
      atol=(atol or {}).get(name, 0),
      err_msg=name,
    )


def assert_layer(got, want, bar: float, names=reference.LAYER_ARRAYS):
  """Checks the arrays of a layer by their relative Frobenius norms."""
  errors = {name: tolerance.frobenius(got[name], want[name]) for name in names}
  assert all(error <= bar for error in errors.values()), errors
