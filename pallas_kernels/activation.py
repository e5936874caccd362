"""The gated activation of the experts, as static options and as a formula."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Swiglu:
  """The gated activation: g * sigmoid(alpha * g) * (u + up_offset).

  The defaults are SwiGLU (Shazeer 2020). GPT-OSS clamps g from above and u to
  both sides at limit = 7, with alpha = 1.702 and up_offset = 1.

  Attributes:
    limit: clamp g to at most `limit` and u to +-`limit`; None does not clamp.
    alpha: slope inside the sigmoid.
    up_offset: added to u after the clamp.
  """

  limit: float | None = None
  alpha: float = 1.0
  up_offset: float = 0.0

  def __post_init__(self):
    if self.limit is not None and not self.limit > 0:
      raise ValueError(
          f"Swiglu: limit must be positive or None; got {self.limit}.")

  def apply(self, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The activation of float32 arrays of one shape."""
    if self.limit is not None:
      gate = jnp.minimum(gate, self.limit)
      up = jnp.clip(up, -self.limit, self.limit)
    return gate * jax.nn.sigmoid(self.alpha * gate) * (up + self.up_offset)
