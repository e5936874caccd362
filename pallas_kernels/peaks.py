"""Public peak rates of the GPUs that kernels are compared with.

    NVIDIA H100 and H200 (SXM) and B200 (HGX) data sheets, dense rates

Rates are without sparsity, in FLOP/s and bytes/s. A data sheet's number is a
ceiling, not what a clock under load sustains.
"""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Peak:
  """What one GPU can do at most.

  Attributes:
    bf16: FLOP/s of dense bf16 matmuls.
    fp8: FLOP/s of dense fp8 matmuls; MXFP8 ones too where there are block
      scales in the tensor core.
    memory: Bytes/s of device memory, reads and writes together.
    wire: Bytes/s of NVLink in one direction.
    sms: Multiprocessors.
  """

  bf16: float
  fp8: float
  memory: float
  wire: float
  sms: int


PEAKS = {
  "NVIDIA B200": Peak(
    bf16=2250e12, fp8=4500e12, memory=8.0e12, wire=900e9, sms=148
  ),
  "NVIDIA H200": Peak(
    bf16=989e12, fp8=1979e12, memory=4.8e12, wire=450e9, sms=132
  ),
  "NVIDIA H100": Peak(
    bf16=989e12, fp8=1979e12, memory=3.35e12, wire=450e9, sms=132
  ),
}


def peak(device_kind: str) -> Peak | None:
  """The peaks of a device as JAX names it; None for one not listed."""
  found = [name for name in PEAKS if device_kind.startswith(name)]
  return PEAKS[found[0]] if found else None
