"""MXFP8 once more, in float64 and ml_dtypes: what the library is held to.

Written from the definitions, not from the integer formulas: a scale is found
by comparing the block's maximum with all 255 powers of two, an element by
dividing in float64 (exact) and one cast.
"""

import ml_dtypes
import numpy as np

BLOCK = 32
FORMATS = {
  "e4m3": (np.dtype(ml_dtypes.float8_e4m3fn), 448.0, 3),
  "e5m2": (np.dtype(ml_dtypes.float8_e5m2), 57344.0, 2),
}
NAN_BYTE = 255
_POWERS = 2.0 ** (np.arange(255) - 127.0)  # what bytes 0..254 stand for


def widen(x):
  """Any float array as float64, signalling NaN included."""
  with np.errstate(invalid="ignore"):
    return np.asarray(x).astype(np.float64)


def scale_bytes(amax, rule: str, fmt: str = "e4m3"):
  """uint8 scale bytes of block maxima (float64, NaN allowed)."""
  _, largest, mantissa_bits = FORMATS[fmt]
  top = _POWERS * 2.0 ** np.floor(np.log2(largest))
  if rule == "rceil":  # the smallest scale under which the maximum fits
    byte = np.searchsorted(_POWERS * largest, amax, side="left")
  elif rule == "floor":  # the largest with the maximum at 2^8 or more
    byte = np.searchsorted(top, amax, side="right") - 1
  elif rule == "ceil":  # the smallest with the maximum at 2^8 or less
    byte = np.searchsorted(top, amax, side="left")
  else:  # even: floor, of the maximum rounded to the element's mantissa
    reached = top * (1 - 2.0 ** -(mantissa_bits + 2))
    byte = np.searchsorted(reached, amax, side="right") - 1
  byte = np.clip(byte, 0, 254)
  return np.where(np.isfinite(amax), byte, NAN_BYTE).astype(np.uint8)


def quantize(x, rule: str = "rceil", fmt: str = "e4m3"):
  """(codes uint8 [..., n], bytes uint8 [..., n / 32]) along the last axis."""
  blocks = widen(x).reshape(*np.shape(x)[:-1], -1, BLOCK)
  byte = scale_bytes(np.max(np.abs(blocks), axis=-1), rule, fmt)
  return _encode(blocks, byte[..., None], fmt).reshape(np.shape(x)), byte


def quantize_square(x, rule: str = "rceil", fmt: str = "e4m3"):
  """The same in 32x32 blocks of the last two axes."""
  x = widen(x)
  *lead, rows, cols = x.shape
  tiles = x.reshape(*lead, rows // BLOCK, BLOCK, cols // BLOCK, BLOCK)
  byte = scale_bytes(np.max(np.abs(tiles), axis=(-3, -1)), rule, fmt)
  codes = _encode(tiles, byte[..., :, None, :, None], fmt)
  return codes.reshape(x.shape), byte


def _encode(x, byte, fmt: str):
  dtype, largest, _ = FORMATS[fmt]
  scaled = x / 2.0 ** (byte.astype(np.float64) - 127)
  with np.errstate(invalid="ignore"):  # a NaN keeps being one
    codes = np.clip(scaled, -largest, largest).astype(dtype).view(np.uint8)
  return np.where(byte == NAN_BYTE, 0x7F, codes).astype(np.uint8)


def decode(codes, byte, fmt: str = "e4m3"):
  """float64 numbers of codes under scale bytes that broadcast to them."""
  value = codes.view(FORMATS[fmt][0]).astype(np.float64)
  scale = 2.0 ** (byte.astype(np.float64) - 127)
  return value * np.where(byte == NAN_BYTE, np.nan, scale)
