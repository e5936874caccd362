"""What is measured: like with like, at named shapes, bytes counted once."""

import jax
import pytest

from pallas_kernels import cases, workloads


def all_workloads(rows=1024, width=512):
  made = (maker(rows, width) for maker in workloads.MAKERS.values())
  return [
    pytest.param(w, id=f"{w.kernel} {w.variant}") for m in made for w in m
  ]


# Bytes read and written an element, as the field counts them.
PER_ELEMENT = {
  "quantize rows blocked": 2 + 1 + 1 / 32,
  "quantize both blocked": 2 + 2 + 2 / 32,
  "dequantize columns linear": 1 + 1 / 32 + 2,
  "swiglu forward": 4 + 2 + 2 / 32,
  "swiglu backward": 6 + 4 + 4 / 32,
  "permute arrays": 2 + 2 / 32,
}


@pytest.mark.parametrize("workload", all_workloads())
def test_a_workload_compares_like_with_like(workload):
  arguments = jax.eval_shape(workload.make)
  shapes = [
    [(x.shape, x.dtype) for x in jax.tree.leaves(result)]
    for result in (
      jax.eval_shape(workload.run, *arguments),
      jax.eval_shape(workload.meaning, *arguments),
    )
  ]
  assert shapes[0] == shapes[1]
  wanted = PER_ELEMENT.get(f"{workload.kernel} {workload.variant}")
  if wanted is not None:  # row weights and indices are the rest
    got = workload.bytes() / (workload.rows * workload.width)
    assert wanted <= got < wanted + 0.03


def test_every_count_is_of_a_workload():
  names = {p.id for p in all_workloads()}
  assert set(PER_ELEMENT) <= names


@pytest.mark.parametrize("kernel", workloads.MAKERS)
def test_shapes_are_named_ones(kernel):
  models = cases.MODELS.values()
  widths = {m.d_model for m in models} | {m.d_ff for m in models}
  for rows, width in workloads.shapes(kernel):
    assert rows in cases.ROWS_PER_DEVICE
    assert width in widths
