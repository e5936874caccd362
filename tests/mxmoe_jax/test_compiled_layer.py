"""The whole layer, forward and backward, compiled for GPUs without any.

For one B200, eight B200s and eight H200s, with backend="mosaic". On B200s the
HLO calls our kernels for every product of the experts, which read what a kernel
wrote or what the wire brought: no dequantize, no fallback. On both nothing
copies rows between the wire and who multiplies them. What is called is another
test's matter (`pallas_kernels`). Needs the `aot` extra.
"""

import functools

import pytest

from tests.mxmoe_jax import compiled_hlo, layer_hlo
from tests.mxmoe_jax.layer_hlo import D_FF, D_MODEL, EXPERTS, TOKENS

ONE, EIGHT = (1, 1), (2, 4)  # data x experts
KERNEL = "mosaic_gpu_v2"
NOTHING = ("parameter", *compiled_hlo.VIEWS)  # makes nothing


@functools.cache
def built(gpu, data, ep):
  """(the compiled module, rows of a device's expert buffer, its experts)."""
  rows = layer_hlo.config(ep).buffer_rows(TOKENS // (data * ep), ep)
  module = compiled_hlo.parse(layer_hlo.hlo(gpu, data, ep))
  return module, rows, EXPERTS // ep


@pytest.fixture(params=[ONE, EIGHT], ids=["one device", "eight devices"])
def layer(request):
  """`built` for B200s."""
  return built("b200", *request.param)


def products(layer):
  """Kernels that multiply MXFP8: (those of rows, weight gradients)."""
  module, rows, experts = layer
  found = [
    kernel
    for kernel in module.kernels()
    if sum(array.is_fp8 for array in module.read_by(kernel)) == 2
    and len(kernel.results) == 1
    and kernel.results[0].is_float
  ]
  of_rows = [k for k in found if k.results[0].shape[0] == rows]
  of_weights = [k for k in found if k.results[0].shape[0] == experts]
  assert len(of_rows) + len(of_weights) == len(found)
  return of_rows, of_weights


def test_every_product_of_the_experts_is_a_kernel_on_mxfp8(layer):
  of_rows, of_weights = products(layer)
  widths = sorted(k.results[0].shape[1] for k in of_rows)
  # Up and down, and the gradients of what they read.
  assert widths == sorted([2 * D_FF, D_MODEL, D_FF, D_MODEL])
  gradients = sorted(k.results[0].shape[1:] for k in of_weights)
  assert gradients == sorted([(D_MODEL, 2 * D_FF), (D_FF, D_MODEL)])


def test_nothing_else_multiplies(layer):
  module, _, _ = layer
  assert {kernel.target for kernel in module.kernels()} == {KERNEL}
  for found in module.instructions.values():
    assert found.opcode not in ("while", "conditional", "convolution")
    if found.opcode == "dot":  # the router's
      shapes = [a.shape for a in (*found.results, *module.read_by(found))]
      assert any(EXPERTS in shape for shape in shapes), shapes


def test_products_read_what_kernels_wrote_or_the_wire_brought(layer):
  module, _, _ = layer
  of_rows, of_weights = products(layer)
  for kernel in (*of_rows, *of_weights):
    for name in kernel.operands:
      (array,) = module.instructions[name].results
      if not array.is_fp8:
        continue
      for origin in module.origins(name):
        source = module.instructions[origin]
        wire = source.opcode.startswith("ragged-all-to-all")
        assert wire or source.target == KERNEL, (origin, source)


@pytest.mark.parametrize("gpu", ["b200", "h200"])
def test_rows_are_read_where_the_wire_put_them(gpu):
  module, rows, _ = built(gpu, *EIGHT)
  landed = {
    name: found
    for name, found in module.instructions.items()
    if found.opcode.startswith("ragged-all-to-all")
    and found.results[0].shape[0] == rows
  }
  assert len(landed) == 2  # dispatch, and the gradient of combine
  for name, found in landed.items():
    readers = [module.instructions[n] for n in module.readers(name)]
    kernels = [r for r in readers if r.target == KERNEL]
    products = [r for r in kernels if r.results[0].is_float]
    columns = [r for r in kernels if r.results[0].is_fp8]  # requantize
    assert len(products) == len(columns) == 1
    scales = [r for r in kernels if r not in (*products, *columns)]
    # Beside them only scales and row weights leave the wire rows.
    for reader in (*scales, *(r for r in readers if r not in kernels)):
      left = sum(array.bytes for array in reader.results)
      assert left <= rows * (D_MODEL // 32 + 4) < found.results[0].bytes // 16


def test_nothing_dequantizes(layer):
  module, rows, _ = layer
  for name, found in module.instructions.items():
    if found.opcode in NOTHING or found.target == KERNEL:
      continue
    floats = [array for array in found.results if array.is_float]
    reads_fp8 = any(array.is_fp8 for array in module.read_by(found))
    assert not (floats and reads_fp8), (name, found)
    for array in floats:  # rows of experts are floats in kernels alone
      wide = len(array.shape) > 1 and array.size > rows
      assert not (wide and array.shape[0] == rows), (name, found)
