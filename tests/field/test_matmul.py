"""Field cases of the grouped product; FCnn is the number of the report."""

import ml_dtypes
import numpy as np
import pytest

from tests.field import inputs, reference


def test_fc01_groups_inside_a_block_of_rows(adapter):
  """github.com/pytorch/torchtitan/issues/2262: 44 rows, one scale for two.

  A block of 32 rows across the border would flush the second gradient to 0.
  """
  i = inputs.matmul(0, 64, (2, 64, 64), [44, 20])
  small = np.where(np.arange(64) < 44, 1.0, 2.0**-20)[:, None]
  i["lhs"] *= small.astype(np.float32)
  i["dout"] *= small.astype(np.float32)
  inputs.assert_exact(adapter, i)


def test_fc02_experts_without_tokens(adapter):
  """github.com/openxla/tokamax/issues/887: gradients not zero, or NaN."""
  inputs.assert_exact(adapter, inputs.matmul(3, 16, (4, 64, 32), [8, 0, 8, 0]))


def test_fc03_rows_past_the_last_group(adapter):
  """github.com/pytorch/pytorch/issues/193633: never written, then NaN."""
  i = inputs.matmul(6, 96, (2, 64, 32), [40, 24])
  want = reference.exact_groups(**_renamed(i))
  i["lhs"][64:] = np.nan
  inputs.assert_exact(adapter, i, want)
  assert not want["out"][64:].any()


def _renamed(i):
  """The same inputs under the names of the reference."""
  return {"sizes" if k == "group_sizes" else k: v for k, v in i.items()}


def test_fc07_all_tokens_on_one_expert(adapter):
  """github.com/vllm-project/vllm/pull/48398: buffers for the average."""
  sizes = [0, 0, 0, 160, 0, 0, 0, 0]
  inputs.assert_exact(adapter, inputs.matmul(14, 160, (8, 64, 64), sizes))


def test_fc08_borders_inside_a_tile(adapter):
  """github.com/NVIDIA/TransformerEngine/pull/3483: the next expert's rows."""
  sizes = [1, 127, 129, 31, 0, 33, 2, 61]
  inputs.assert_exact(adapter, inputs.matmul(34, 384, (8, 64, 64), sizes))


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint32"])
def test_fc12_integers_beside_a_gradient(adapter, dtype):
  """github.com/jax-ml/jax/pull/7652: a tangent type for group sizes."""
  i = inputs.matmul(43, 64, (2, 32, 32), [32, 32])
  i["group_sizes"] = i["group_sizes"].astype(dtype)
  inputs.assert_exact(adapter, i)


def test_fc13_gradients_have_the_dtype_of_their_operand(adapter):
  """github.com/jax-ml/jax/issues/10818: bf16 rows, float32 weights."""
  i = inputs.matmul(46, 64, (2, 64, 32), [32, 32])
  i["lhs"] = i["lhs"].astype(ml_dtypes.bfloat16)
  i["dout"] = i["dout"].astype(ml_dtypes.bfloat16)
  inputs.assert_exact(adapter, i)
  _, dlhs, drhs = adapter.grouped_mm_vjp(**i)
  assert (str(dlhs.dtype), str(drhs.dtype)) == ("bfloat16", "float32")


def test_fc17_one_compilation(adapter):
  """github.com/Dao-AILab/sonic-moe/issues/60: one for each routing."""
  sizes = ([96, 0, 0], [0, 96, 0], [32, 32, 32], [44, 20, 32], [1, 2, 93])
  sizes = [np.int32(s) for s in sizes]
  assert adapter.compile_count(sizes, 96, 64, 32) == 1


def test_fc21_widths_that_are_no_multiple_of_128(adapter):
  """github.com/NVIDIA/TransformerEngine/pull/3070: padding scales read."""
  inputs.assert_exact(adapter, inputs.matmul(31, 96, (3, 96, 160), [32, 0, 64]))


def test_fc23_scales_of_rectangular_weights(adapter):
  """github.com/vllm-project/vllm/pull/34824: K and N swapped.

  Every block of K has another power of two; results are exact up to one
  rounding to bf16.
  """
  i = inputs.matmul(28, 96, (2, 128, 64), [32, 64])
  power = np.exp2(np.arange(4).repeat(32)).astype(np.float32)
  i["lhs"] /= power
  i["rhs"] *= power[:, None] * np.float32([1, 4])[:, None, None]
  inputs.assert_exact(adapter, i, atol=dict(out=2.0, dlhs=8.0, drhs=0.5))


def test_fc34_scan_equals_the_loop(adapter):
  """github.com/jax-ml/jax/issues/5832: layers under scan differed."""
  sizes = np.int32([20, 44])
  x, w = inputs.integers(49, (64, 64)), inputs.integers(50, (3, 2, 64, 64))
  h = x.astype(np.float64)
  for weights in w:
    out = reference.exact_groups(h, weights, sizes, np.zeros((64, 64)))["out"]
    h = np.clip(out, -1, 1)
  np.testing.assert_array_equal(adapter.scan_layers(x, w, sizes), h)


@pytest.mark.parametrize("which", ["rows", "experts", "columns"])
def test_fc37_operands_sharded_by_jit(adapter, which):
  """github.com/jax-ml/jax/issues/33403: undefined under a partitioner."""
  i = inputs.matmul(51, 128, (4, 64, 64), [10, 54, 0, 64])
  want = reference.exact_groups(**_renamed(i))["out"]
  del i["dout"]
  got = adapter.grouped_mm_sharded(**i, which=which)
  np.testing.assert_array_equal(got, want)


def test_fc43_group_sizes_of_another_length(adapter):
  """github.com/flashinfer-ai/flashinfer/pull/1469: reads out of range."""
  lhs, rhs = inputs.integers(55, (64, 32)), inputs.integers(56, (3, 32, 32))
  with pytest.raises(ValueError, match=r"shape \(2,\) for 3 groups"):
    adapter.grouped_mm(lhs, rhs, np.int32([32, 32]))
  with pytest.raises(ValueError, match="sum 65.* for 64 rows"):
    adapter.grouped_mm(lhs, rhs, np.int32([32, 32, 1]))


def test_fc45_gate_and_up_in_one_array(adapter):
  """github.com/pytorch/pytorch/issues/159620: the halves mixed up."""
  i = inputs.matmul(57, 96, (2, 64, 192), [64, 32])
  i["rhs"][:, :, 96:] *= 4
  i["dout"][:, 96:] = 0
  inputs.assert_exact(adapter, i)


def test_fc52_bias_gradient_without_spare_rows(adapter):
  """github.com/AI-Hypercomputer/maxtext/pull/3699: padding entered it."""
  i = inputs.matmul(61, 96, (3, 64, 32), [40, 0, 24])
  want = reference.exact_groups(**_renamed(i))
  bias = inputs.integers(64, (3, 32))
  got = adapter.grouped_mm_bias_vjp(**i, bias=bias)
  out, dlhs, drhs, dbias = got
  want["out"][:64] += np.repeat(bias, i["group_sizes"], axis=0)
  np.testing.assert_array_equal(out, want["out"])
  np.testing.assert_array_equal(dlhs, want["dlhs"])
  np.testing.assert_array_equal(drhs, want["drhs"])
  dout = i["dout"]
  np.testing.assert_array_equal(
    dbias, [dout[:40].sum(0), np.zeros(32), dout[40:64].sum(0)]
  )
