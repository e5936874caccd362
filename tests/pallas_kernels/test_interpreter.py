"""The rig: right values, and every injected fault is reported."""

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import mxfp8
from tests import mosaic_interpreter
from tests.interpreter import arithmetic, ring_matmul, tensor_core

STEPS = 3  # wraps the ring of two slots


def operands(tile: int, seed: int = 0):
  """Random MXFP8 operands of one tile: codes and linear scale bytes."""
  rng = np.random.default_rng(seed)
  depth = STEPS * ring_matmul.TILE

  def one():
    code = rng.integers(0, 256, (tile, depth)).astype(np.uint8)
    code[code & 0x7F == mxfp8.NAN_CODE] = 0x3A
    byte = rng.integers(110, 140, (tile, depth // mxfp8.BLOCK)).astype(np.uint8)
    return code.view(jnp.float8_e4m3fn), byte

  return one(), one()


def blocked(byte):
  """Linear scale bytes to the e8m0 atoms that the tensor core reads."""
  atoms = mxfp8.to_blocked(jnp.asarray(byte))
  atoms = atoms.reshape(*atoms.shape[:2], 32, 16)
  return jax.lax.bitcast_convert_type(atoms, jnp.float8_e8m0fnu)


def exact(code, byte):
  scale = np.ldexp(1.0, byte.astype(np.int32) - mxfp8.SCALE_BIAS)
  return code.astype(np.float64) * np.repeat(scale, mxfp8.BLOCK, axis=1)


def run_matmul(interpreted, *, pairs, fault=None, seconds=60):
  (a, sa), (b, sb) = operands(256 if pairs else 128)
  scales = blocked(sa), blocked(sb)
  result = interpreted(
    lambda interpret: ring_matmul.matmul(
      a, b, *scales, pairs=pairs, fault=fault, interpret=interpret
    ),
    seconds=seconds,
  )
  return np.asarray(result), exact(a, sa), exact(b, sb)


@pytest.mark.parametrize("pairs", [False, True])
def test_block_scaled_matmul_is_right(interpreted, pairs):
  y, a, b = run_matmul(interpreted, pairs=pairs)
  bound = 1e-6 * (np.abs(a) @ np.abs(b).T)
  assert np.all(np.abs(y - a @ b.T) <= bound)


@pytest.mark.parametrize("fault", ring_matmul.FAULTS)
def test_injected_fault_is_reported(interpreted, fault):
  with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)) as caught:
    run_matmul(interpreted, pairs=fault == "one_scale_set", fault=fault)
  if isinstance(caught.value, jax.errors.JaxRuntimeError):
    assert "barrier" in str(caught.value).lower()
  else:
    assert isinstance(caught.value, mosaic_interpreter.RaceError)


def test_a_deadlock_ends(interpreted):
  def kernel(y_gmem, barrier):
    del y_gmem
    plgpu.barrier_wait(barrier)

  def call(interpret):
    return plgpu.kernel(
      kernel,
      out_type=jax.ShapeDtypeStruct((128,), jnp.float32),
      scratch_types=[plgpu.Barrier()],
      interpret=interpret,
    )()

  with pytest.raises((TimeoutError, jax.errors.JaxRuntimeError)):
    interpreted(call, seconds=3)


def test_state_is_reset_after_a_failure(interpreted):
  with pytest.raises((AssertionError, jax.errors.JaxRuntimeError)):
    run_matmul(interpreted, pairs=False, fault="no_empty_wait")
  y, a, b = run_matmul(interpreted, pairs=False)
  assert np.all(np.abs(y - a @ b.T) <= 1e-6 * (np.abs(a) @ np.abs(b).T))


def test_gather_and_predicates(interpreted):
  x = np.arange(64 * 128, dtype=np.float32).reshape(64, 128)
  rows = np.array([3, 60, 3, 0, 9, 1, 2, 33], np.uint32)

  def kernel(x_gmem, rows_gmem, y_gmem, x_smem, barrier):
    index = plgpu.load(
      rows_gmem, layout=plgpu.Layout.TMA_INDICES, optimized=False
    )
    plgpu.copy_gmem_to_smem(x_gmem.at[index, pl.ds(0, 64)], x_smem, barrier)
    plgpu.barrier_wait(barrier)
    plgpu.copy_smem_to_gmem(x_smem, y_gmem.at[pl.ds(0, 8)], predicate=True)
    plgpu.copy_smem_to_gmem(x_smem, y_gmem.at[pl.ds(8, 8)], predicate=False)
    plgpu.wait_smem_to_gmem(0)

  y = interpreted(
    lambda interpret: plgpu.kernel(
      kernel,
      out_type=jax.ShapeDtypeStruct((16, 64), jnp.float32),
      scratch_types=[plgpu.SMEM((8, 64), jnp.float32), plgpu.Barrier()],
      interpret=interpret,
    )(x, rows)
  )
  np.testing.assert_array_equal(y[:8], x[rows, :64])
  assert np.isnan(y[8:]).all()  # never written


def test_arithmetic_is_the_gpus():
  e4m3, e5m2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
  x = jnp.array([500.0, -1e9, jnp.inf, 464.0, 0.0], jnp.float32)
  got = arithmetic.saturating_cast(x, e4m3).astype(jnp.float32)
  np.testing.assert_array_equal(got, [448, -448, 448, 448, 0])
  for dtype in (e4m3, e5m2):
    code = arithmetic.saturating_cast(jnp.array([-jnp.nan]), dtype)
    assert code.view(jnp.uint8)[0] == mxfp8.NAN_CODE
  tiny = np.array([1, 0x7FFFFF, 0x80000001], np.uint32).view(np.float32)
  got = arithmetic.gpu_multiply(tiny, np.float32([2.0**127] * 3))
  np.testing.assert_array_equal(
    got.view(np.uint32),
    np.float32([2.0**-22, (2**23 - 1) * 2.0**-22, -(2.0**-22)]).view(np.uint32),
  )
  down = arithmetic.gpu_multiply(np.float32([1.5]), np.float32([2.0**-127]))
  assert down.view(np.uint32)[0] == 0x00600000


def test_scale_atoms_are_unblocked_as_they_were_blocked():
  byte = np.random.default_rng(0).integers(0, 256, (256, 8)).astype(np.uint8)
  atoms = np.asarray(mxfp8.to_blocked(jnp.asarray(byte)))
  atoms = atoms.reshape(*atoms.shape[:2], 32, 16)
  np.testing.assert_array_equal(tensor_core.unblock(atoms), byte)
