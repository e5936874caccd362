"""Blackwell's plainest grouped matmul, interpreted, against float64."""

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import cases, groups, mxfp8, reference
from pallas_kernels.blackwell import simple_matmul
from tests import mosaic_interpreter, tolerance

GROUPS, ROWS = 3, 300


def problem(pattern, depth, width, *, transposed=False, dtype=mxfp8.E4M3):
  """(lhs, rhs, layout): NaN in all rows of nobody."""
  rows = groups.aligned_rows(ROWS, GROUPS)
  sizes = jnp.asarray(cases.group_sizes(pattern, GROUPS, ROWS), jnp.int32)
  layout = groups.group_layout(sizes, rows)
  rng = np.random.default_rng(0)
  x = jnp.asarray(rng.standard_normal((rows, depth)), jnp.float32)
  x = jnp.where(layout.row_valid()[:, None], x, jnp.nan)
  shape = (width, depth) if transposed else (depth, width)
  w = jnp.asarray(rng.standard_normal((GROUPS, *shape)), jnp.float32)
  axis = -1 if transposed else -2
  lhs = reference.quantize(x, -1, dtype=dtype, layout="blocked")
  return lhs, reference.quantize(w, axis, layout="blocked"), layout


def check(got, lhs, rhs, layout, transposed):
  """Every row of a group is within `tolerance.matmul_bound`."""
  got = np.asarray(got)
  a, b = (
    np.asarray(x.dequantize(jnp.float32)).astype(np.float64) for x in (lhs, rhs)
  )
  b = np.swapaxes(b, 1, 2) if transposed else b
  for group, (start, size) in enumerate(
    zip(np.asarray(layout.starts), np.asarray(layout.sizes), strict=True)
  ):
    rows = slice(start, start + size)
    want = a[rows] @ b[group]
    bound = tolerance.matmul_bound(
      np.abs(a[rows]) @ np.abs(b[group]), want, bf16=got.dtype == jnp.bfloat16
    )
    assert (np.abs(got[rows].astype(np.float64) - want) <= bound).all()


@pytest.mark.parametrize(
  ("pattern", "depth", "width", "transposed", "dtype", "out_dtype"),
  [
    ("skewed", 256, 128, False, mxfp8.E4M3, jnp.bfloat16),
    ("empty_first", 96, 160, False, mxfp8.E4M3, jnp.float32),
    ("single_row", 160, 96, True, mxfp8.E5M2, jnp.bfloat16),
    ("all_empty", 128, 128, True, mxfp8.E4M3, jnp.float32),
  ],
)
def test_it_multiplies_each_group(
  interpreted, pattern, depth, width, transposed, dtype, out_dtype
):
  lhs, rhs, layout = problem(
    pattern, depth, width, transposed=transposed, dtype=dtype
  )
  got = interpreted(
    lambda interpret, *arguments: simple_matmul.simple_matmul(
      *arguments,
      transpose_rhs=transposed,
      out_dtype=out_dtype,
      interpret=interpret,
    ),
    *(lhs, rhs, layout),
  )
  assert (got.shape, got.dtype) == ((layout.rows, width), out_dtype)
  check(got, lhs, rhs, layout, transposed)


def test_a_step_that_does_not_wait_is_a_race(interpreted, monkeypatch):
  """The multiply must have read the slot before the next load fills it."""
  wait = plgpu.barrier_wait
  waits = []

  def every_other(barrier):
    waits.append(barrier)
    if len(waits) % 2:
      wait(barrier)

  monkeypatch.setattr(plgpu, "barrier_wait", every_other)
  lhs, rhs, layout = problem("one_hot", 256, 128)
  with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as caught:
    interpreted(
      lambda interpret, *arguments: simple_matmul.simple_matmul(
        *arguments, interpret=interpret
      ),
      *(lhs, rhs, layout),
    )
  if isinstance(caught.value, jax.errors.JaxRuntimeError):
    assert "barrier" in str(caught.value).lower()
  else:
    assert isinstance(caught.value, mosaic_interpreter.RaceError)


def test_it_refuses_what_the_scheduled_kernel_refuses():
  lhs, rhs, layout = problem("even", 64, 64)
  bf16 = jnp.zeros(lhs.shape, jnp.bfloat16)
  with pytest.raises(NotImplementedError, match='backend="xla"'):
    simple_matmul.simple_matmul(bf16, rhs, layout)
  with pytest.raises(ValueError, match="contracted axis"):
    simple_matmul.simple_matmul(lhs, rhs, layout, transpose_rhs=True)


def test_it_is_compiled_for_blackwell_alone():
  assert simple_matmul.variants("sm_90a") == []
  made = {v.variant for v in simple_matmul.variants("sm_100a")}
  assert len(made) == len(simple_matmul.variants("sm_100a"))
