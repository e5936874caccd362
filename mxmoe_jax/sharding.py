"""Sharding: how the arrays of a layer lie on a mesh.

    tokens, and all per-token and per-row arrays   over data axes, then expert
    expert weights [E, ...]                        E over the expert axis,
                                                   axis 1 over the FSDP axis
    router, shared experts                         as the user has them

The experts run inside one `jax.shard_map` over all axes of the mesh, forward
and backward; axes that the config does not name see replicated copies. Weight
gradients are summed over the data axes once, inside. Out of scope: splitting
one expert over devices (tensor parallelism).
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from mxmoe_jax import config as config_lib
from pallas_kernels import groups, mxfp8

MoEConfig = config_lib.MoEConfig
Mesh = jax.sharding.Mesh | jax.sharding.AbstractMesh


@dataclasses.dataclass(frozen=True)
class Sharding:
  """The mesh and the axes of a sharded layer.

  Attributes:
    mesh: the mesh.
    token_axes: axes that tokens are split over, data axes first.
    expert_axis: axis that experts are split over, or None.
    fsdp_axis: axis that axis 1 of the expert weights is split over, or None.
  """

  mesh: Mesh
  token_axes: tuple[str, ...]
  expert_axis: str | None
  fsdp_axis: str | None

  @property
  def ep(self) -> int:
    """Devices along the expert axis."""
    return self.mesh.shape[self.expert_axis] if self.expert_axis else 1

  @property
  def data_axes(self) -> tuple[str, ...]:
    """The token axes without the expert axis."""
    return tuple(a for a in self.token_axes if a != self.expert_axis)

  @property
  def token_shards(self) -> int:
    """Devices that tokens are split over."""
    n = 1
    for axis in self.token_axes:
      n *= self.mesh.shape[axis]
    return n

  @property
  def tokens(self) -> P:
    """Spec of arrays with a leading token or row axis."""
    return P(self.token_axes)

  @property
  def weights(self) -> P:
    """Spec of expert weights [E, K, ...] and of their MXFP8 copies."""
    return P(self.expert_axis, self.fsdp_axis)

  @property
  def biases(self) -> P:
    """Spec of expert biases [E, ...]."""
    return P(self.expert_axis)


def specs(sharding: Sharding | None, params: Mapping[str, Any]
          ) -> tuple[P | None, dict[str, P] | None, P | None]:
  """Specs of (tokens, expert params by name, quantized copies).

  None each without a mesh.
  """
  if sharding is None:
    return None, None, None
  by_name = {name: sharding.biases if name.endswith("_bias")
             else sharding.weights for name in params}
  return sharding.tokens, by_name, sharding.weights


def parameter_axes(config: MoEConfig) -> dict[str, tuple[str | None, ...]]:
  """Mesh axis names of the expert parameters, for `MoE(axis_names=...)`."""
  e, f = config.expert_axis, config.fsdp_axis
  axes: dict[str, tuple[str | None, ...]] = {
      "gate_up": (e, f, None, None), "down": (e, f, None)}
  if config.bias:
    axes |= {"gate_up_bias": (e, None, None), "down_bias": (e, None)}
  return axes


def check_explicit(name: str, x: jax.Array, want: P,
                   sharding: Sharding) -> None:
  """On a mesh with Explicit axes, checks how an array lies on it.

  Raises:
    ValueError: the array is sharded otherwise than `want`.
  """
  explicit = jax.sharding.AxisType.Explicit
  if explicit not in sharding.mesh.axis_types:
    return
  got = getattr(jax.typeof(x).sharding, "spec", P())
  if _axes_of(got, x.ndim) != _axes_of(want, x.ndim):
    raise ValueError(
        f"MoE: on a mesh with Explicit axes {dict(sharding.mesh.shape)},"
        f" {name}{tuple(x.shape)} must be sharded as {want}; got {got}. Use"
        f" jax.device_put or jax.reshard(..., {want}) first.")


def _axes_of(spec: P, ndim: int) -> list[tuple[str, ...]]:
  """The mesh axes of each array axis, as tuples."""
  padded = [*spec, *[None] * (ndim - len(spec))]
  return [() if a is None else a if isinstance(a, tuple) else (a,)
          for a in padded]


def resolve(config: MoEConfig, mesh: Mesh | None) -> Sharding | None:
  """The sharding of a layer: a given mesh, else the one in context.

  Returns:
    None if the config names no axis, or if there is no mesh at all.

  Raises:
    ValueError: the config names an axis that the mesh lacks, or names axes
      and a mesh was given that does not fit the experts.
  """
  named = (*config.data_axes, *filter(None, (config.expert_axis,)))
  if mesh is None:
    context = jax.sharding.get_abstract_mesh()
    mesh = None if context.empty else context
  if not named or mesh is None:
    return None
  missing = [axis for axis in named if axis not in mesh.axis_names]
  if missing:
    raise ValueError(
        f"MoE: the config names mesh axes {named}, but {missing} are not in"
        f" the mesh with axes {dict(mesh.shape)}. Rename them in MoEConfig"
        " (expert_axis, data_axes) or in the mesh.")
  sharding = Sharding(mesh, named, config.expert_axis, config.fsdp_axis)
  check_experts(config, sharding.ep)
  _check_fsdp(config, sharding)
  return sharding


def first_device(sharding: Sharding | None) -> Any:
  """A device of the mesh, to ask what it can run; None for the default."""
  mesh = sharding.mesh if sharding else None
  return mesh.devices.flat[0] if isinstance(mesh, jax.sharding.Mesh) else None


def check_experts(config: MoEConfig, ep: int) -> None:
  """Raises ValueError unless `ep` devices divide the experts evenly."""
  if config.num_experts % ep:
    raise ValueError(
        "MoE: num_experts must be divisible by the size of the expert axis;"
        f" got num_experts={config.num_experts} over {ep} devices of axis"
        f" {config.expert_axis!r}.")


def _check_fsdp(config: MoEConfig, sharding: Sharding) -> None:
  if sharding.fsdp_axis is None:
    return
  parts = sharding.mesh.shape[sharding.fsdp_axis]
  for name in ("d_model", "d_ff"):
    width = getattr(config, name)
    if width % (parts * mxfp8.BLOCK):
      raise ValueError(
          f"MoE: {name} must be a multiple of {parts} * {mxfp8.BLOCK} to be"
          f" split over {parts} devices of fsdp_axis {sharding.fsdp_axis!r}"
          f" (each quantizes whole blocks of {mxfp8.BLOCK}); got"
          f" {name}={width}.")


def check_tokens(tokens: int, config: MoEConfig,
                 sharding: Sharding | None) -> None:
  """Checks that tokens split evenly and that buffers are not too small.

  Raises:
    ValueError: naming the numbers.
  """
  shards = 1 if sharding is None else sharding.token_shards
  ep = 1 if sharding is None else sharding.ep
  if tokens % shards:
    raise ValueError(
        "MoE: the number of tokens must be divisible by the devices they are"
        f" split over; got {tokens} tokens over {shards} devices"
        f" ({sharding.token_axes if sharding else ()}). Pad the batch to"
        f" {groups.round_up(tokens, shards)} and mask the padding.")
  room = config.real_rows(tokens // shards, ep)
  limited = config.buffer_factor is not None
  if limited and tokens and room < groups.ROW_ALIGN:
    raise ValueError(
        f"MoE: buffer_factor={config.buffer_factor} leaves room for {room}"
        f" rows per device ({tokens // shards} tokens x top_k={config.top_k}),"
        f" fewer than the {groups.ROW_ALIGN} of one tile. Raise it, or use"
        " None to drop nothing.")


def run(body: Callable[..., Any], sharding: Sharding | None,
        in_specs: tuple, out_specs: Any, *args: Any) -> Any:
  """body(*args), inside one shard_map over the whole mesh if there is one."""
  if sharding is None:
    return body(*args)
  return jax.shard_map(body, mesh=sharding.mesh, in_specs=in_specs,
                       out_specs=out_specs, check_vma=False)(*args)


def reduce_gradient(grad: jax.Array, like: jax.Array,
                    sharding: Sharding | None) -> jax.Array:
  """A float32 weight gradient summed over the data axes, as its parameter.

  Args:
    grad: [E, K, ...] float32, this device's part of the sum.
    like: the local parameter: its shape (axis 1 may be split) and dtype.
    sharding: of the layer, None for one device.
  """
  if sharding is not None:
    fsdp = sharding.fsdp_axis if grad.ndim == 3 else None  # not the biases
    others = tuple(a for a in sharding.data_axes if a != fsdp)
    if fsdp is not None:
      grad = lax.psum_scatter(grad, fsdp, scatter_dimension=1, tiled=True)
    if others:
      grad = lax.psum(grad, others)
  return grad.reshape(like.shape).astype(like.dtype)
