"""Loss curves of several recipes in one picture.

The figure is made without pyplot, so nothing looks for a display: matplotlib
draws a PNG with its Agg renderer.
"""

from __future__ import annotations

import pathlib

from matplotlib import figure, ticker

from experiments import results

# Steps in the running mean drawn over the raw curve, as a share of the run.
_SMOOTHING = 0.05


def smooth(values: list[float], window: int) -> list[float]:
  """Returns the mean of each value and of those up to `window` - 1 before."""
  sums = [0.0]
  for value in values:
    sums.append(sums[-1] + value)
  starts = [max(0, end - window) for end in range(1, len(values) + 1)]
  return [
    (sums[end] - sums[start]) / (end - start)
    for end, start in enumerate(starts, start=1)
  ]


def draw(
  path: pathlib.Path,
  runs: list[results.RunResult],
  *,
  unigram_entropy: float,
  title: str,
) -> None:
  """Writes a PNG: raw losses faint, their running mean strong.

  Args:
    path: the file to write.
    runs: one curve each.
    unigram_entropy: nats per byte, drawn as a level.
    title: says the experiment and the device.
  """
  picture = figure.Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
  axes = picture.subplots()
  for number, run in enumerate(runs):
    steps = range(1, len(run.losses) + 1)
    window = max(1, round(_SMOOTHING * len(run.losses)))
    colour, style = f"C{number}", ("-", "--", ":")[number % 3]
    axes.plot(steps, run.losses, color=colour, alpha=0.25, linewidth=0.8)
    axes.plot(
      steps,
      smooth(run.losses, window),
      color=colour,
      linestyle=style,
      label=f"{run.recipe}: {results.last_fifth(run.losses):.3f} at the end,"
      f" {run.heldout_loss:.3f} held out",
    )
  axes.axhline(
    unigram_entropy, color="grey", linewidth=0.8, label="unigram entropy"
  )
  axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
  axes.set(xlabel="step", ylabel="loss (nats per byte)", title=title)
  axes.legend(frameon=False)
  picture.savefig(path, format="png")
