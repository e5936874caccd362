"""What the field cases are checked against: numpy in float64.

MXFP8 by exact exponents (`quantize`, `round_trip`), a grouped product
(`exact_groups`), the balance loss (`balance_loss`) and a whole gated
mixture-of-experts layer with its gradients (`layer`). Nothing of the library
is imported, and nothing but numpy.
"""

import math

import numpy as np

BLOCK = 32
TOP_EXPONENT, LARGEST = 8, 448.0  # of e4m3
NAN_EXPONENT = 128  # stands for byte 255
LAYER_ARRAYS = ("y", "dx", "wr", "wg", "wu", "wd")


def exponents(amax, rule: str):
  """Exponents of block scales, -127..127, or 128 for NaN."""
  out = np.empty(np.shape(amax), np.int64)
  for place, value in np.ndenumerate(np.asarray(amax, np.float64)):
    if not math.isfinite(value):
      out[place] = NAN_EXPONENT
      continue
    power = math.frexp(value)[1] - 1 if value else -BLOCK * 10
    above = rule == "rceil" and value > 1.75 * 2.0**power  # 448 = 1.75 * 2^8
    out[place] = min(max(power - TOP_EXPONENT + above, -127), 127)
  return out


def round_to_e4m3(value):
  """The nearest e4m3 number, ties to even, at most 448; NaN stays NaN."""
  value = np.asarray(value, np.float64)
  size = np.minimum(np.abs(value), LARGEST)
  power = np.frexp(np.where(size > 0, size, 1.0))[1] - 1
  step = 2.0 ** (np.maximum(np.where(size > 0, power, -6), -6) - 3)
  rounded = np.minimum(np.rint(size / step) * step, LARGEST)
  return np.where(np.isnan(value), np.nan, np.copysign(rounded, value))


def decode_e4m3(code: int) -> float:
  """The number of one code."""
  sign = -1.0 if code & 128 else 1.0
  exponent, mantissa = (code >> 3) & 15, code & 7
  if exponent == 15 and mantissa == 7:
    return math.nan
  if exponent == 0:
    return sign * mantissa * 2.0**-9
  return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def quantize(x, axis: int = -1, rule: str = "rceil"):
  """(elements float64 of x.shape, scale bytes) in blocks along one axis."""
  moved = np.moveaxis(np.asarray(x, np.float64), axis, -1)
  blocks = moved.reshape(*moved.shape[:-1], -1, BLOCK)
  exponent = exponents(np.max(np.abs(blocks), axis=-1), rule)
  scale = np.where(exponent == NAN_EXPONENT, np.nan, 2.0**exponent)
  codes = round_to_e4m3(blocks / scale[..., None]).reshape(moved.shape)
  byte = (exponent + 127).astype(np.uint8)
  return np.moveaxis(codes, -1, axis), np.moveaxis(byte, -1, axis)


def round_trip(x, axis: int = -1, rule: str = "rceil"):
  """x quantized and read back."""
  codes, byte = quantize(x, axis, rule)
  scale = np.where(byte == 255, np.nan, 2.0 ** (byte.astype(float) - 127))
  return codes * np.repeat(scale, BLOCK, axis=axis)


def round_trip_bound(x, axis: int = -1):
  """How far a round trip may be off, under either rule.

  2^-4 of the number (2^-3 at the top of a block, where a scale that was
  rounded down saturates) and half the smallest step of the block.
  """
  size = np.moveaxis(np.abs(np.asarray(x, np.float64)), axis, -1)
  amax = size.reshape(*size.shape[:-1], -1, BLOCK).max(-1)
  amax = np.repeat(amax, BLOCK, -1)
  share = np.where(size > 0.875 * amax, 2.0**-3, 2.0**-4)
  return np.moveaxis(share * size + amax * 2.0**-17, -1, axis)


def exact_groups(lhs, rhs, sizes, dout):
  """A grouped product and its gradients, nothing quantized."""
  lhs, rhs, dout = (np.asarray(a, np.float64) for a in (lhs, rhs, dout))
  out = np.zeros((lhs.shape[0], rhs.shape[2]))
  dlhs, drhs = np.zeros(lhs.shape), np.zeros(rhs.shape)
  ends = np.cumsum(sizes)
  for g, (end, size) in enumerate(zip(ends, sizes, strict=True)):
    span = slice(end - size, end)
    out[span], dlhs[span] = lhs[span] @ rhs[g], dout[span] @ rhs[g].T
    drhs[g] = lhs[span].T @ dout[span]
  return dict(out=out, dlhs=dlhs, drhs=drhs)


def softmax(logits):
  """Over the last axis, in float64."""
  logits = np.asarray(logits, np.float64)
  e = np.exp(logits - logits.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def choose(probabilities, top_k: int):
  """Ids of the largest, ties to the lower id."""
  return np.argsort(-probabilities, axis=1, kind="stable")[:, :top_k]


def balance_loss(logits, top_k: int, mask=None) -> float:
  """Switch form, 1 when balanced; tokens outside the mask do not count."""
  logits = np.asarray(logits, np.float64)
  logits = logits if mask is None else logits[np.asarray(mask, bool)]
  p = softmax(logits)
  experts = logits.shape[1]
  share = np.bincount(choose(p, top_k).reshape(-1), minlength=experts)
  return float(experts * (share / share.sum() * p.mean(0)).sum())


def balance_loss_gradient(logits, top_k: int):
  """Its gradient; the shares are constants."""
  p = softmax(logits)
  tokens, experts = p.shape
  share = np.bincount(choose(p, top_k).reshape(-1), minlength=experts)
  share = share / share.sum()
  return experts / tokens * p * (share - (p * share).sum(1, keepdims=True))


def layer(x, p, top_k: int, dy, ids=None):
  """y = sum over k of weight * (silu(x wg) * (x wu)) wd, and all gradients.

  Args:
    x: [T, D].
    p: wr [D, E], wg and wu [E, D, F], wd [E, F, D].
    top_k: experts per token: softmax, then choose, then renormalise.
    dy: [T, D].
    ids: [T, k] forced ids, -1 for none; None chooses.

  Returns:
    y, dx, wr, wg, wu, wd: the result and the gradients, by name.
  """
  x, dy = np.asarray(x, np.float64), np.asarray(dy, np.float64)
  w = {name: np.asarray(a, np.float64) for name, a in p.items()}
  probability = softmax(x @ w["wr"])
  ids = choose(probability, top_k) if ids is None else np.asarray(ids)
  live = ids >= 0
  picked = np.take_along_axis(probability, np.maximum(ids, 0), 1) * live
  total = picked.sum(1, keepdims=True)
  total = np.where(total > 0, total, 1.0)
  weight = picked / total
  grads = {name: np.zeros(a.shape) for name, a in w.items()}
  grads |= dict(y=np.zeros(x.shape), dx=np.zeros(x.shape))
  dweight = np.zeros(weight.shape)
  for e in range(w["wg"].shape[0]):
    _add_expert(e, x, w, dy, ids, weight, grads, dweight)
  inner = (dweight * weight).sum(1, keepdims=True)
  dpicked = np.where(live, (dweight - inner) / total, 0.0)
  dp = np.zeros(probability.shape)
  np.add.at(dp, (np.arange(len(x))[:, None], np.maximum(ids, 0)), dpicked)
  dlogits = probability * (dp - (dp * probability).sum(1, keepdims=True))
  grads["wr"] = x.T @ dlogits
  grads["dx"] += dlogits @ w["wr"].T
  return grads


def _add_expert(e, x, w, dy, ids, weight, grads, dweight) -> None:
  """What one expert adds to the result and the gradients, in place."""
  token, slot = np.nonzero(ids == e)
  rows, share = x[token], weight[token, slot][:, None]
  gate, up = rows @ w["wg"][e], rows @ w["wu"][e]
  sigmoid = 1 / (1 + np.exp(-gate))
  hidden = gate * sigmoid * up
  out, dout = hidden @ w["wd"][e], dy[token] * share
  np.add.at(grads["y"], token, out * share)
  dweight[token, slot] = (out * dy[token]).sum(1)
  dhidden = dout @ w["wd"][e].T
  dgate = dhidden * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
  dup = dhidden * gate * sigmoid
  grads["wd"][e] = hidden.T @ dout
  grads["wg"][e], grads["wu"][e] = rows.T @ dgate, rows.T @ dup
  np.add.at(grads["dx"], token, dgate @ w["wg"][e].T + dup @ w["wu"][e].T)
