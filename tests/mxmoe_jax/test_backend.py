"""Which implementation runs: capabilities, refusals, reasons.

What each capability counts as is in `tests/field/test_config.py`.
"""

import dataclasses

import jax.numpy as jnp
import pytest

from mxmoe_jax import backend, quantize
from pallas_kernels import reference


@dataclasses.dataclass(frozen=True)
class FakeGpu:
  """A device as jax describes one."""

  compute_capability: str
  platform: str = "gpu"


def run_once(choice: str, device=None):
  """What quantizing one block under a backend told its listener."""
  heard = []
  ops = backend.select(choice, device, lambda *call: heard.append(call))
  ops.quantize(jnp.ones((1, 32)), -1)
  return heard


def test_a_cpu_runs_the_reference_and_says_why():
  [(name, choice)] = run_once("auto")
  assert (name, choice.implementation) == ("quantize", "xla")
  assert "no NVIDIA GPU" in choice.reason


def test_xla_is_a_choice_on_every_device():
  for device in (None, FakeGpu("9.0"), FakeGpu("12.0")):
    [(_, choice)] = run_once("xla", device)
    assert (choice.implementation, choice.reason) == (
      "xla",
      "backend='xla' asked",
    )


@pytest.mark.parametrize("capability", ["8.0", "12.0", "80", "gfx950"])
def test_an_unproven_gpu_falls_back_with_its_name(capability):
  [(_, choice)] = run_once("auto", FakeGpu(capability))
  assert choice.implementation == "xla"
  assert capability in choice.reason
  with pytest.raises(NotImplementedError, match=f"{capability}.*'xla'"):
    backend.select("mosaic", FakeGpu(capability))


def test_a_device_that_tells_no_capability_falls_back():
  assert backend.device_capability(FakeGpu(None)) == "None"
  [(_, choice)] = run_once("auto", FakeGpu(None))
  assert choice.implementation == "xla"


def test_mosaic_on_a_cpu_raises_with_the_way_out():
  with pytest.raises(NotImplementedError, match="no NVIDIA GPU.*'xla'"):
    backend.select("mosaic")
  with pytest.raises(NotImplementedError, match="no NVIDIA GPU"):
    quantize(jnp.ones((1, 32)), backend="mosaic")


def test_an_unknown_backend_names_the_known_ones():
  with pytest.raises(ValueError, match="'auto', 'mosaic', 'xla'.*'triton'"):
    backend.select("triton")


def test_every_operation_has_a_reference():
  for name in backend.OPERATIONS:
    assert callable(getattr(reference, name))
