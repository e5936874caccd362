"""What a wire leg should take on more devices than we have: a model.

    python -m experiments.exchange_model

    time = latency + max(bytes to devices of the same host / link,
                         bytes to other hosts / network)

The link is fitted to four times measured on two H200 over NVLink (`MEASURED`);
everything else is assumed (`ASSUMPTIONS`). Prints the tables of
``docs/expert_parallelism.md``. No GPU is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import sys

from pallas_kernels import wire

WIDTH = 5120
# Rows of each of two H200, milliseconds of a ragged_all_to_all in bf16 and in
# packed MXFP8, 128 slices a peer (256 for the longer one). Measured by hand
# before this code existed; bf16 rows had no weight beside them.
MEASURED = ((32768, 0.814, 0.518), (131072, 2.78, 1.53))
NETWORK = 40.0  # GB/s of a device: 400 Gb/s at 80 %
NETWORK_LATENCY_MS = 0.05
HOSTS = ((8, 8), (64, 64), (64, 8), (512, 8))  # devices, of which in one NVLink
SHAPES = ((16384, 7168), (131072, 7168))  # rows of a device, d_model
ASSUMPTIONS = (
  "rows go to all devices evenly, and all devices send at one time;",
  "the NVLink rate of a device does not fall with the number of its peers;",
  f"the network gives each device {NETWORK:.0f} GB/s (400 Gb/s at 80 %) and "
  f"adds {NETWORK_LATENCY_MS} ms; it is used beside NVLink;",
  "nothing else uses the links, and no kernel waits for the exchange.",
)


@dataclasses.dataclass(frozen=True)
class Link:
  """What was fitted: a leg takes latency + bytes / rate.

  Attributes:
    latency_ms: Of one leg.
    rate: GB/s that a device sends.
  """

  latency_ms: float
  rate: float


def row_bytes(width: int, precision: str) -> int:
  """Bytes of a row as measured: bf16 alone, or a packed MXFP8 row."""
  return 2 * width if precision == "bf16" else wire.stride(width, precision)


def fit() -> Link:
  """The line through the measured points of each precision, averaged."""
  lines = []
  for column, precision in ((1, "bf16"), (2, "mxfp8")):
    (few, *_), (many, *_) = MEASURED
    sent = [n * row_bytes(WIDTH, precision) / 2 / 1e6 for n in (few, many)]
    slope = (MEASURED[1][column] - MEASURED[0][column]) / (sent[1] - sent[0])
    lines.append((MEASURED[0][column] - slope * sent[0], 1 / slope))
  latency, rate = (sum(x) / len(x) for x in zip(*lines, strict=True))
  return Link(latency, rate)


def leg_ms(
  rows: int, width: int, precision: str, devices: int, linked: int, link: Link
) -> float:
  """Milliseconds of one leg.

  Args:
    rows: That each device sends, to itself too.
    width: d_model.
    precision: "mxfp8" or "bf16".
    devices: Of the expert axis.
    linked: Devices that NVLink joins, the sender too.
    link: From `fit`.
  """
  megabytes = rows * wire.stride(width, precision) / 1e6
  near = megabytes * (linked - 1) / devices / link.rate
  far = megabytes * (devices - linked) / devices / NETWORK
  latency = link.latency_ms + NETWORK_LATENCY_MS * (devices > linked)
  return latency + max(near, far)


def page() -> list[str]:
  """The lines of the tables, in Markdown."""
  link = fit()
  lines = [
    f"Fitted to two H200: {link.latency_ms:.2f} ms and {link.rate:.0f} GB/s a"
    " device. Model, not measured; milliseconds of one leg:",
    "",
    "| devices | joined by NVLink | rows x d_model | bf16 | MXFP8 | ratio |",
    "| ---: | ---: | --- | ---: | ---: | ---: |",
  ]
  for devices, linked in HOSTS:
    for rows, width in SHAPES:
      bf16, mxfp8 = (
        leg_ms(rows, width, precision, devices, linked, link)
        for precision in ("bf16", "mxfp8")
      )
      lines.append(
        f"| {devices} | {linked} | {rows} x {width} | {bf16:.2f} |"
        f" {mxfp8:.2f} | {bf16 / mxfp8:.2f} |"
      )
  return [*lines, "", "Assumed:", "", *(f"- {line}" for line in ASSUMPTIONS)]


def main(arguments: Sequence[str]) -> int:
  """Prints the tables."""
  if arguments:
    print("exchange_model: takes no arguments", file=sys.stderr)
    return 2
  print("\n".join(page()))
  return 0


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
