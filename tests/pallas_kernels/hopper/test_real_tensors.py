"""Hopper's interpreted matmuls on activations and gradients of real text."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mxfp8, reference
from pallas_kernels.hopper import grouped_wgrad
from tests import real_tensors, tolerance
from tests.pallas_kernels.hopper import test_grouped_matmul as matmul

CALLS = ["up", "down", "down dgrad", "up dgrad"]


def call(name):
  """(lhs, rhs, layout, options) of a grouped matmul of the layer."""
  found = real_tensors.products()["grouped_matmul"]
  assert len(found) == len(CALLS)
  (lhs, rhs, layout), options = found[CALLS.index(name)]
  assert isinstance(lhs, mxfp8.MxArray)
  assert isinstance(rhs, mxfp8.MxArray)
  return lhs, rhs, layout, options


@pytest.mark.parametrize("name", CALLS)
def test_exact(interpreted, name):
  lhs, rhs, layout, options = call(name)
  got = interpreted(matmul.kernel(options), lhs, rhs, layout)
  assert np.asarray(got).any()
  matmul.check(got, lhs, rhs, layout, options)


@pytest.mark.parametrize("name", CALLS)
def test_folded(interpreted, name):
  exact, weights, layout, options = call(name)
  if not options["transpose_rhs"]:  # folded weights have K last
    plain = weights.dequantize(jnp.float32).swapaxes(1, 2)
    weights = reference.quantize(plain, -1)
  lhs, rhs = reference.fold(exact), reference.fold(weights)
  options = {"transpose_rhs": True, "out_dtype": jnp.float32}
  got = np.asarray(interpreted(matmul.kernel(options), lhs, rhs, layout))
  matmul.check(got, lhs, rhs, layout, options)
  matmul.check_fold(got, exact, weights, layout)


@pytest.mark.parametrize("index", [0, 1])
def test_wgrad(interpreted, index):
  (lhs, rhs, layout), _ = real_tensors.products()["grouped_wgrad"][index]
  got = interpreted(
    lambda interpret, *args: grouped_wgrad.grouped_wgrad(
      *args, out_dtype=jnp.float32, interpret=interpret
    ),
    *(lhs, rhs, layout),
  )
  a, b = matmul.numbers(lhs), matmul.numbers(rhs)
  starts, sizes = np.asarray(layout.starts), np.asarray(layout.sizes)
  for group, (start, size) in enumerate(zip(starts, sizes, strict=True)):
    x, y = a[start : start + size], b[start : start + size]
    want, magnitudes = x.T @ y, np.abs(x).T @ np.abs(y)
    bound = tolerance.matmul_bound(magnitudes, want, bf16=False)
    assert (np.abs(np.asarray(got[group]) - want) <= bound).all()
  assert np.asarray(got).any()
