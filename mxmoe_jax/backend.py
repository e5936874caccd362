"""Which implementation runs, and why: the only reader of env vars.

    "xla"     the plain-jnp reference, everywhere
    "mosaic"  our Pallas (Mosaic GPU) kernels, or a NotImplementedError
    "auto"    mosaic where it is proven to run, else xla, with the reason:
              on 9.0, and on 10.0 once `pallas_kernels.bring_up` has passed

An operation is one of the fields of `Ops`. Each call is decided on its own, at
trace time: a kernel may refuse a shape. `explain()` listens to the decisions
through `listen`; nothing falls back unseen.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, Literal

import jax

from mxmoe_jax import config as config_lib
from mxmoe_jax import mosaic_ops
from pallas_kernels import bring_up_record, reference

Generation = Literal["hopper", "blackwell"]


@dataclasses.dataclass(frozen=True)
class Ops:
  """The operations of the pipeline, with the signatures of `reference`.

  Attributes:
    generation: whose kernels may run them; None if plain jnp alone does.
  """

  generation: Generation | None
  quantize: Callable[..., Any]
  views: Callable[..., reference.Views]
  requantize: Callable[..., Any]
  round_to_mxfp8: Callable[..., jax.Array]
  dequantize: Callable[..., Any]
  take_rows: Callable[..., Any]
  pack: Callable[..., jax.Array]
  grouped_matmul: Callable[..., jax.Array]
  grouped_wgrad: Callable[..., jax.Array]
  swiglu_quantize: Callable[..., reference.Views]
  swiglu_backward_quantize: Callable[..., tuple[reference.Views, jax.Array]]


OPERATIONS = tuple(f.name for f in dataclasses.fields(Ops)
                   if f.name != "generation")


@dataclasses.dataclass(frozen=True)
class Choice:
  """What runs one call of an operation.

  Attributes:
    implementation: "mosaic" or "xla".
    reason: why; for xla, why not the kernel.
  """

  implementation: Literal["mosaic", "xla"]
  reason: str


Listener = Callable[[str, Choice], None]


def generation(capability: str | None) -> Generation | None:
  """The GPU generation of a CUDA compute capability.

  Args:
    capability: "major.minor", such as "9.0"; anything else (a bare "80",
      an AMD name, None) is an unknown device.

  Returns:
    "hopper" for 9.0, "blackwell" for 10.0, else None: kernels have not even
    been compiled for 10.3 and 12.x.
  """
  known: dict[str | None, Generation] = {"9.0": "hopper", "10.0": "blackwell"}
  return known.get(capability)




def default_device() -> Any:
  """The device that computations run on unless told otherwise."""
  device = jax.config.jax_default_device
  if isinstance(device, str):  # a platform
    return jax.devices(device)[0]
  return jax.devices()[0] if device is None else device


def device_capability(device: Any = None) -> str | None:
  """The compute capability of `device` (default: JAX's default), or None."""
  device = default_device() if device is None else device
  if device.platform not in ("gpu", "cuda"):
    return None
  return str(getattr(device, "compute_capability", None))


def _obstacle(backend: str, device: Any) -> str | None:
  """Why no kernel at all runs on the device under a backend, or None."""
  if backend == "xla":
    return "backend='xla' asked"
  capability = device_capability(device)
  if capability is None:
    return "no NVIDIA GPU: Mosaic GPU kernels need one"
  known = generation(capability)
  if known is None:
    return (f"compute capability {capability}: kernels are compiled for 9.0"
            " and 10.0 only")
  if known == "blackwell" and backend == "auto":
    proven, reason = bring_up_record.passed(
        getattr(device or default_device(), "device_kind", ""), capability)
    if not proven:
      return (f"compute capability {capability}: {reason}, or ask for"
              " backend='mosaic'")
  return None


def select(backend: str, device: Any = None,
           listen: Listener | None = None) -> Ops:
  """The operations to run under a backend on a device.

  Args:
    backend: "auto", "mosaic" or "xla".
    device: default is JAX's default device.
    listen: called with (operation, Choice) at each call of an operation.

  Raises:
    ValueError: if the backend is unknown.
    NotImplementedError: if "mosaic" is asked for where no kernel can run.
  """
  if backend not in config_lib.BACKENDS:
    raise ValueError(
        f"backend must be one of {config_lib.BACKENDS}; got {backend!r}.")
  obstacle = _obstacle(backend, device)
  if backend == "mosaic" and obstacle is not None:
    raise NotImplementedError(
        f"backend='mosaic': {obstacle}. Use backend='xla', or 'auto', which"
        " takes kernels where they run.")
  runs = None if obstacle else generation(device_capability(device))
  kernels = mosaic_ops.kernels(runs) if runs else {}
  calls: dict[str, Any] = {name: functools.partial(
      _run, name, kernels.get(name), obstacle, backend == "mosaic", listen)
                           for name in OPERATIONS}
  return Ops(generation=runs, **calls)


def _run(name: str, kernel: Callable[..., Any] | None, obstacle: str | None,
         strict: bool, listen: Listener | None, *args: Any,
         **options: Any) -> Any:
  """Runs an operation on its kernel, or on the reference with the reason."""
  if obstacle is None and kernel is None:
    obstacle = f"there is no Mosaic kernel for {name} yet"
    if strict:
      raise NotImplementedError(
          f"backend='mosaic': {obstacle}. Use backend='auto' or 'xla'.")
  if obstacle is None and kernel is not None:
    try:
      out = kernel(*args, **options)
    except NotImplementedError as refusal:
      if strict:
        raise
      obstacle = str(refusal)
    else:
      if listen is not None:
        listen(name, Choice("mosaic", "a kernel takes it"))
      return out
  if listen is not None:
    listen(name, Choice("xla", obstacle or ""))
  return getattr(reference, name)(*args, **options)
