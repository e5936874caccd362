"""What a person sees while recipes train: bars on a terminal, else little."""

from __future__ import annotations

import pathlib

import rich.console
import rich.progress
import rich.table

from experiments import results


class Progress:
  """One bar per recipe; silent when the output is not a terminal."""

  def __init__(self, console: rich.console.Console) -> None:
    """Draws on `console`."""
    self._console = console
    self._bars = rich.progress.Progress(
      rich.progress.TextColumn("{task.description:>16}"),
      rich.progress.BarColumn(),
      rich.progress.MofNCompleteColumn(),
      rich.progress.TimeRemainingColumn(),
      rich.progress.TextColumn("{task.fields[note]}"),
      console=console,
      disable=not console.is_terminal,
    )
    self._bar = rich.progress.TaskID(0)

  def __enter__(self) -> Progress:
    """Shows the bars."""
    self._bars.start()
    return self

  def __exit__(self, *_: object) -> None:
    """Stops the bars, which stay where they are."""
    self._bars.stop()

  def start(self, recipe: str, *, done: int, steps: int) -> None:
    """Adds a bar for a recipe that has taken `done` of `steps` steps."""
    note = "compiling" if done < steps else "done before"
    self._bar = self._bars.add_task(
      recipe, total=steps, completed=done, note=note
    )

  def step(self, record: results.StepRecord) -> None:
    """Moves the newest bar to a step."""
    note = f"loss {record.loss:.3f}  {record.seconds:.2f} s/step"
    self._bars.update(self._bar, completed=record.step, note=note)

  def report(
    self,
    runs: list[results.RunResult],
    *,
    unigram_entropy: float,
    folder: pathlib.Path,
  ) -> None:
    """Prints the runs side by side, and where the files are."""
    table = rich.table.Table("recipe", title=None)
    columns = ("last fifth", "held out", "tokens/s", "imbalance", "dropped")
    for column in columns:
      table.add_column(column, justify="right")
    for run in runs:
      table.add_row(
        run.recipe,
        f"{results.last_fifth(run.losses):.4f}",
        f"{run.heldout_loss:.4f}",
        f"{run.tokens_per_second:,.0f}",
        f"{run.load_imbalance:.2f}",
        str(run.dropped_rows),
      )
    self._console.print(table)
    self._console.print(
      "Losses in nats per byte; the unigram entropy of the text is"
      f" {unigram_entropy:.4f}."
      f" Written: {folder}/summary.json, {folder}/loss.png",
      soft_wrap=True,
    )
