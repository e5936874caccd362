"""What is measured: like with like, at named shapes, bytes counted once."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import cases, tiles, workloads


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


def test_what_one_kernel_hands_to_another_counts_twice():
  rows, width = 1024, 512
  made = {w.variant: w for w in workloads.permute_workloads(rows, width)}
  both, pack = made["quantize, then pack"], made["pack"]
  numbers, scaled = 2 * rows * width, rows * (width + width // 32)
  assert both.bytes() == numbers + scaled + pack.bytes()


def test_every_count_is_of_a_workload():
  names = {p.id for p in all_workloads()}
  assert set(PER_ELEMENT) <= names


def test_the_compile_check_knows_the_width_that_is_tuned():
  for kernel in ("quantize", "dequantize"):
    assert workloads.shapes(kernel)[0][1] == tiles.TUNED_WIDTH


@pytest.mark.parametrize("kernel", workloads.MAKERS)
def test_shapes_are_named_ones(kernel):
  models = cases.MODELS.values()
  widths = {m.d_model for m in models} | {m.d_ff for m in models}
  for rows, width in workloads.shapes(kernel):
    assert rows in cases.ROWS_PER_DEVICE
    assert width in widths


def test_packed_rows_mean_what_plain_rows_do():
  made = {w.variant: w for w in workloads.permute_workloads(256, 128)}
  plain, packed, pack = (
    made[name] for name in ("arrays", "packed rows", "pack")
  )
  x, index = plain.make()
  rows, row, weight = pack.make()
  got, got_weight = packed.meaning(pack.meaning(rows, row, weight), index)
  order = jnp.where(index < 0, -1, row[index])  # packed, then taken
  want = plain.meaning(x, order)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert (a.view(jnp.uint8) == b.view(jnp.uint8)).all()
  assert (got_weight == jnp.where(index < 0, 0, weight[index])).all()
