"""Which implementation runs, and why: the only reader of env vars.

    "xla"     the plain-jnp reference, everywhere
    "mosaic"  our Pallas (Mosaic GPU) kernels, or a NotImplementedError
    "auto"    mosaic where it is proven to run, else xla, with the reason

An operation is one of the fields of `Ops`. Each is chosen on its own;
`choices` gives the reasons that `explain()` prints.
"""

from collections.abc import Callable
import dataclasses
from typing import Any, Literal

import jax

from mxmoe_jax import config as config_lib
from pallas_kernels import reference

Generation = Literal["hopper", "blackwell"]


@dataclasses.dataclass(frozen=True)
class Ops:
  """The operations of the pipeline, with the signatures of `reference`."""

  quantize: Callable[..., Any]
  requantize: Callable[..., Any]
  dequantize: Callable[..., Any]
  grouped_matmul: Callable[..., jax.Array]
  grouped_wgrad: Callable[..., jax.Array]
  views: Callable[..., reference.Views]
  swiglu_quantize: Callable[..., reference.Views]
  swiglu_backward_quantize: Callable[..., tuple[reference.Views, jax.Array]]


OPERATIONS = tuple(f.name for f in dataclasses.fields(Ops))


@dataclasses.dataclass(frozen=True)
class Choice:
  """What runs one operation.

  Attributes:
    implementation: "mosaic" or "xla".
    reason: why not a faster one, in words.
  """

  implementation: Literal["mosaic", "xla"]
  reason: str


def generation(capability: str | None) -> Generation | None:
  """The GPU generation of a CUDA compute capability.

  Args:
    capability: "major.minor", such as "9.0"; anything else (a bare "80",
      an AMD name, None) is an unknown device.

  Returns:
    "hopper" for 9.0, "blackwell" for 10.0, else None: 10.3 and 12.x have not
    been proven.
  """
  known: dict[str | None, Generation] = {"9.0": "hopper", "10.0": "blackwell"}
  return known.get(capability)


def device_capability(device: Any = None) -> str | None:
  """The compute capability of `device` (default: the first), or None."""
  device = jax.devices()[0] if device is None else device
  if device.platform not in ("gpu", "cuda"):
    return None
  return str(getattr(device, "compute_capability", None))


def choices(backend: str, device: Any = None) -> dict[str, Choice]:
  """What runs each operation, by name, under a backend on a device.

  Raises:
    ValueError: if the backend is unknown.
    NotImplementedError: if "mosaic" is asked for where it cannot run.
  """
  if backend not in config_lib.BACKENDS:
    raise ValueError(
        f"backend must be one of {config_lib.BACKENDS}; got {backend!r}.")
  if backend == "xla":
    return dict.fromkeys(OPERATIONS, Choice("xla", "backend='xla' asked"))
  capability = device_capability(device)
  if capability is None:
    reason = "no NVIDIA GPU: Mosaic GPU kernels need one"
  elif generation(capability) is None:
    reason = (f"compute capability {capability}: kernels are proven for 9.0"
              " and 10.0 only")
  else:
    reason = "no Mosaic kernel for this operation yet"
  if backend == "mosaic":
    raise NotImplementedError(
        f"backend='mosaic': {reason}. Use backend='xla', or 'auto', which"
        " takes kernels where they exist.")
  return dict.fromkeys(OPERATIONS, Choice("xla", reason))


def select(backend: str, device: Any = None) -> Ops:
  """The operations to run under a backend on a device.

  Raises:
    ValueError, NotImplementedError: as `choices`.
  """
  choices(backend, device)
  return Ops(**{name: getattr(reference, name) for name in OPERATIONS})
