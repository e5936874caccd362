"""MoE as a Flax module: `nnx.Module`, and its Linen twin by `to_linen`.

The module owns the parameters and the balance bias; everything else is
`layer.moe`. Parameters carry no axis names unless asked for.
"""

from collections.abc import Mapping
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp

from mxmoe_jax import arguments, layer
from mxmoe_jax import config as config_lib
from mxmoe_jax import sharding as sharding_lib
from mxmoe_jax import weights as weights_lib

MoEConfig = config_lib.MoEConfig
AxisNames = Mapping[str, tuple[str | None, ...]]

# The axes that feed one output number; a sum over them has variance 1.
_FAN_IN = {"router": 0, "gate_up": 1, "down": 1, "shared_gate_up": 0,
           "shared_down": 0}


class BalanceBias(nnx.Variable):
  """Balance bias of the router: state, not a parameter.

  The layer reads it; `update_balance_bias` makes the next one, once per step.
  An optimizer that filters on `nnx.Param` never sees it.
  """


class MoE(nnx.Module):
  """A mixture-of-experts layer: `y, stats = layer(x)`.

  Attributes:
    config: the MoEConfig.
    router, gate_up, down, ...: `nnx.Param`s, named and shaped as in `moe`.
    balance_bias: BalanceBias [E] float32, or None.
  """

  def __init__(self, config: MoEConfig, *, rngs: nnx.Rngs,
               mesh: sharding_lib.Mesh | None = None,
               axis_names: AxisNames | None = None):
    """Initialises parameters.

    Args:
      config: the layer.
      rngs: stream `params` draws the parameters.
      mesh: mesh of config's axes; default is the mesh in context at a call.
      axis_names: names per axis of parameters, by parameter name; mesh or
        logical names, `sharding.parameter_axes(config)` for those of the
        config. Parameters that are not named stay unannotated.

    Raises:
      ValueError: a name is no parameter, or has the wrong number of axes, or
        the experts do not divide over the mesh.
    """
    self.config = config
    self.mesh = mesh
    sharding_lib.resolve(config, mesh)
    shapes = arguments.parameter_shapes(config)
    axis_names = dict(axis_names or {})
    _check_axis_names(axis_names, shapes)
    for name, shape in shapes.items():
      value = _initial(name, shape, config, rngs)
      names = axis_names.get(name)
      metadata: dict[str, Any] = (
          {} if names is None else {"out_sharding": names})
      setattr(self, name, nnx.Param(value, **metadata))
    self.balance_bias = nnx.data(
        BalanceBias(jnp.zeros(config.num_experts, jnp.float32))
        if config.balance_bias else None)

  def params(self) -> dict[str, jax.Array]:
    """The parameters as the pytree that `moe` takes."""
    names = arguments.parameter_shapes(self.config)
    return {name: getattr(self, name)[...] for name in names}

  def __call__(self, x: jax.Array, mask: jax.Array | None = None, *,
               quantized: weights_lib.QuantizedWeights | None = None
               ) -> tuple[jax.Array, layer.MoEStats]:
    """Applies the layer.

    Args:
      x: [..., d_model] bf16 or float32.
      mask: [...] bool, False for padding tokens; None if there are none.
      quantized: from `quantize_weights`, for reuse over microbatches.

    Returns:
      y [..., d_model] of x's dtype, and MoEStats; add stats.aux_loss and
      stats.z_loss to your loss.

    Raises:
      ValueError, TypeError, NotImplementedError: as `moe`.
    """
    bias = None if self.balance_bias is None else self.balance_bias[...]
    return layer.moe(x, self.params(), self.config, mask=mask,
                     balance_bias=bias, quantized=quantized, mesh=self.mesh)


def _initial(name: str, shape: tuple[int, ...], config: MoEConfig,
             rngs: nnx.Rngs) -> jax.Array:
  """Truncated normal of variance 1 / fan-in; biases are 0."""
  dtype = jnp.float32 if name == "router" else config.param_dtype
  if name not in _FAN_IN:
    return jnp.zeros(shape, dtype)
  scale = 1 / math.sqrt(shape[_FAN_IN[name]])
  truncated = jax.random.truncated_normal(rngs.params(), -2, 2, shape)
  return (truncated * scale / 0.87962566).astype(dtype)  # its own deviation


def _check_axis_names(names: dict[str, Any],
                      shapes: dict[str, tuple[int, ...]]) -> None:
  for name, axes in names.items():
    if name not in shapes or len(axes) != len(shapes[name]):
      raise ValueError(
          "MoE: axis_names must give one name (or None) per axis of a"
          f" parameter, out of {shapes}; got {name!r}: {axes}.")


def to_linen(config: MoEConfig, *, name: str | None = None,
             **kwargs: Any) -> nnx.bridge.ToLinen:
  """The layer as a Linen module, with the same call and parameter names.

  Args:
    config: the layer.
    name: of the Linen module.
    **kwargs: `mesh` and `axis_names`, as for `MoE`.

  Returns:
    A Linen module; `init` and `apply` take (x, mask). The balance bias lives
    in the collection `BalanceBias`.
  """
  return nnx.bridge.to_linen(MoE, config, name=name, **kwargs)
