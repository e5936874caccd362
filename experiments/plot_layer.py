"""A stacked bar of where the time of a layer goes, as PNG."""

from __future__ import annotations

from collections.abc import Mapping
import pathlib

from matplotlib import figure

from experiments import layer_parts


def draw(
  path: pathlib.Path,
  bars: Mapping[str, tuple[float, Mapping[str, float]]],
  *,
  title: str,
) -> None:
  """Writes a PNG: parts stacked, the whole as a black line over them.

  Args:
    path: the file to write.
    bars: by label, milliseconds of the whole and of each part; a bar without
      parts is one grey block.
    title: says the layer and the device.
  """
  picture = figure.Figure(figsize=(10, 5), dpi=120, layout="constrained")
  axes = picture.subplots()
  labels = list(bars)
  floor = [0.0] * len(labels)
  for number, part in enumerate(layer_parts.PARTS):
    heights = [bars[label][1].get(part, 0.0) for label in labels]
    if any(heights):
      axes.bar(labels, heights, bottom=floor, label=part,
               color=f"C{number % 10}", hatch="//" if number > 9 else None,
               width=0.6)  # fmt: skip
    floor = [f + h for f, h in zip(floor, heights, strict=True)]
  rest = [0.0 if bars[label][1] else bars[label][0] for label in labels]
  if any(rest):
    axes.bar(
      labels, rest, color="lightgrey", label="not taken apart", width=0.6
    )
  wholes = [bars[label][0] for label in labels]
  axes.plot(labels, wholes, "k_", markersize=30, label="whole program")
  axes.set(ylabel="ms", title=title)
  axes.legend(frameon=False, fontsize=8, ncols=2)
  picture.savefig(path, format="png")
