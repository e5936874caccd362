"""The layer once more in float64: every expert for every token, no kernels.

The routing is given; its weights are computed again. Gradients are JAX's own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def run(x, params, ids, dy, config) -> dict[str, np.ndarray]:
  """y, and the gradients of x and of every parameter, by name.

  Args:
    x: [T, D].
    params: as in `moe`.
    ids: [T, k] expert ids, -1 for none.
    dy: [T, D].
    config: the layer.
  """
  with jax.enable_x64(True):
    wide = jax.tree.map(
      lambda a: jnp.asarray(np.asarray(a).astype(np.float64)), (x, params, dy)
    )
    apply = functools.partial(_apply, ids=np.asarray(ids), config=config)
    y, pull = jax.vjp(apply, *wide[:2])
    dx, grads = pull(wide[2])
    return jax.tree.map(np.asarray, dict(y=y, x=dx, **grads))


def _apply(x, params, *, ids, config):
  share = _shares(x @ params["router"], ids, config)
  pre = jnp.einsum("td,edcf->tecf", x, params["gate_up"])
  if config.bias:
    pre = pre + params["gate_up_bias"]
  out = jnp.einsum("tef,efd->ted", _activate(pre, config), params["down"])
  if config.bias:
    out = out + params["down_bias"]
  y = jnp.einsum("te,ted->td", share, out)
  if config.d_ff_shared:
    pre = jnp.einsum("td,dcf->tcf", x, params["shared_gate_up"])
    y = y + _activate(pre, config) @ params["shared_down"]
  return y


def _shares(logits, ids, config):
  """[T, E] what each expert's output counts for each token."""
  if config.score == "softmax":
    scores = jnp.exp(logits - jax.nn.logsumexp(logits, -1, keepdims=True))
  else:
    scores = 1 / (1 + jnp.exp(-logits))
  chosen = (ids[:, :, None] == np.arange(config.num_experts)).any(1)
  picked = jnp.where(chosen, scores, 0.0)
  if config.renormalise:
    total = picked.sum(-1, keepdims=True)
    picked = picked / jnp.where(total > 0, total, 1.0)
  return picked * config.routed_scaling


def _activate(pre, config):
  """[..., 2, F] to [..., F]."""
  form, gate, up = config.swiglu, pre[..., 0, :], pre[..., 1, :]
  if form.limit is not None:
    gate = jnp.where(gate > form.limit, form.limit, gate)
    up = jnp.where(jnp.abs(up) > form.limit, form.limit * jnp.sign(up), up)
  return gate / (1 + jnp.exp(-form.alpha * gate)) * (up + form.up_offset)
