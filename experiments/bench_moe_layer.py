"""Times the whole MoE layer, forward and backward, in several precisions.

    python -m experiments.bench moe_layer [--model NAME] [--rows 32768]
        [--arms NAME ...] [--json FILE] [--png FILE]

Arms are those of `layer_arms`. The programs "forward" and "forward and
backward" of each of ours are timed in turn, so that a GPU that grows warm does
so for all; backward is the difference of the two medians. JAX's default is
timed by itself, in fewer samples: where it is far slower it would cool the
others. The parts of ours are timed alone (`layer_parts`) and drawn as a
stacked bar. An arm that cannot run here is named with the reason.

On a GPU ours run on the kernels where these take the shape ("auto"); passes
that do not are listed. Elsewhere plain jnp runs, which says nothing about GPUs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
import concurrent.futures
import dataclasses
import importlib.util
import json
import pathlib
import sys
import threading
import time
from typing import Any

import jax
import rich.console
import rich.table

from experiments import layer_arms, layer_parts
from pallas_kernels import timing

NAME = "moe_layer"  # of the command
ROWS = 32768
SAMPLE_SECONDS = 0.2  # some twenty calls between two waits
PART_SECONDS = 0.02
BASELINE = "bf16"
Program = layer_arms.Program
Timing = timing.Timing
# What an arm that does not run here is known to raise.
REFUSALS = (NotImplementedError, ValueError, jax.errors.JaxRuntimeError)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
  """What was measured of one arm.

  Attributes:
    name: of the arm.
    recipe: in words.
    forward: time of the forward pass.
    both: of forward and backward in one program.
    forward_ms: median.
    backward_ms: median of both, less that of forward.
    both_ms: median.
    teraflops: of both, counting the six products of the experts.
    memory: bytes of the compiled program of both.
    saved_bytes_per_row: as explain counts, per row of the expert buffer.
    fallbacks: passes that run on XLA, with the reason.
    parts: operations alone.
  """

  name: str
  recipe: str
  forward: Timing
  both: Timing
  forward_ms: float
  backward_ms: float
  both_ms: float
  teraflops: float
  memory: layer_arms.Memory
  saved_bytes_per_row: float | None
  fallbacks: dict[str, str]
  parts: list[layer_parts.Part]

  def ratios(self, other: Arm) -> dict[str, float]:
    """Times of another arm over this one's: above 1, this one is faster."""
    return {
      "forward": other.forward_ms / self.forward_ms,
      "backward": other.backward_ms / self.backward_ms,
      "both": other.both_ms / self.both_ms,
    }


def build(
  asked: argparse.Namespace, data: Any, configs: dict[str, Any]
) -> tuple[list[Program], dict[str, str]]:
  """Compiles and runs each arm once; those that refuse come with reasons."""
  running = threading.Lock()  # each takes gigabytes

  def attempt(name: str) -> Program | str:
    try:
      program = layer_arms.build(name, configs[name], data)
      with running:
        jax.block_until_ready(program.step(*data))
    except REFUSALS as reason:
      return _short(reason)
    _say(f"{name}: compiled and run once")
    return program

  with concurrent.futures.ThreadPoolExecutor() as pool:  # it is compiling
    made = dict(zip(asked.arms, pool.map(attempt, asked.arms), strict=True))
  refused = {name: found for name, found in made.items()
             if isinstance(found, str)}  # fmt: skip
  return [p for p in made.values() if isinstance(p, Program)], refused


def _say(words: str) -> None:
  """A line about progress: compiling takes minutes."""
  print(f"{time.strftime('%H:%M:%S')} {words}", file=sys.stderr, flush=True)


def _short(reason: BaseException) -> str:
  return f"{type(reason).__name__}: {' '.join(str(reason).split())[:400]}"


def time_programs(
  programs: Sequence[Program], data: Any, samples: int, seconds: float
) -> dict[str, tuple[Timing, Timing]]:
  """Times of (forward, both) by arm."""
  x, params, dy = data
  ours = [p for p in programs if p.name != "jax"]
  theirs = [p for p in programs if p.name == "jax"]
  found = {}
  for group, count in ((ours, samples), (theirs, max(2, samples // 4))):
    runs: list[Callable[[], Any]] = []
    for p in group:
      runs += [lambda p=p: p.forward(x, params),
               lambda p=p: p.step(x, params, dy)]  # fmt: skip
    if runs:
      times = timing.measure_in_turn(
        runs, samples=count, sample_seconds=seconds
      )
      pairs = zip(times[::2], times[1::2], strict=True)
      found |= dict(zip([p.name for p in group], pairs, strict=True))
  return found


def measure(
  programs: Sequence[Program], data: Any, asked: argparse.Namespace
) -> list[Arm]:
  """The arms that run, whole."""
  times = time_programs(programs, data, asked.samples, asked.seconds)
  arms = []
  for p in programs:
    forward, both = times[p.name]
    flops = 18 * asked.rows * p.config.d_model * p.config.d_ff
    arms.append(
      Arm(
        name=p.name,
        recipe=p.config.recipe.name,
        forward=forward,
        both=both,
        forward_ms=forward.median_us / 1e3,
        backward_ms=(both.median_us - forward.median_us) / 1e3,
        both_ms=both.median_us / 1e3,
        teraflops=flops / both.median_us / 1e6,
        memory=p.memory,
        saved_bytes_per_row=p.saved_bytes_per_row,
        fallbacks=p.fallbacks,
        parts=[],
      )
    )
  return arms


def with_parts(
  arms: Sequence[Arm], configs: dict[str, Any], data: Any,
  asked: argparse.Namespace,
) -> Iterator[Arm]:  # fmt: skip
  """The arms again, ours with their operations timed alone."""

  def prepare(arm: Arm) -> list[layer_parts.Prepared]:
    return layer_parts.prepare(configs[arm.name], data)

  ours = [arm for arm in arms if arm.name != "jax"]
  with concurrent.futures.ThreadPoolExecutor() as pool:  # it is compiling
    prepared = dict(zip([arm.name for arm in ours], pool.map(prepare, ours),
                        strict=True))  # fmt: skip
  for arm in arms:
    parts = layer_parts.measure(
      prepared.get(arm.name, []),
      samples=max(2, asked.samples // 4),
      sample_seconds=min(asked.seconds, PART_SECONDS),
    )
    yield dataclasses.replace(arm, parts=parts)


def table(arms: Sequence[Arm], title: str) -> rich.table.Table:
  """The arms side by side."""
  made = rich.table.Table(title=title)
  made.add_column("arm")
  columns = ("forward ms", "backward ms", "both ms", "x bf16 fwd", "bwd")
  columns += ("both", "TFLOP/s", "peak GB", "saved GB", "saved B/row")
  for column in columns:
    made.add_column(column, justify="right")
  base = next((a for a in arms if a.name == BASELINE), None)
  for arm in arms:
    m = arm.memory
    ratios = [f"{r:.2f}" for r in arm.ratios(base).values()] if base else []
    peak = m.peak or m.arguments + m.outputs + m.temporary
    made.add_row(
      *(arm.name, f"{arm.forward_ms:.3f}", f"{arm.backward_ms:.3f}"),
      f"{arm.both_ms:.3f}",
      *(ratios or [""] * 3),
      f"{arm.teraflops:.0f}",
      f"{peak / 1e9:.2f}",
      f"{m.saved / 1e9:.3f}",
      f"{arm.saved_bytes_per_row:,.0f}" if arm.saved_bytes_per_row else "",
    )
  return made


def parse(arguments: Sequence[str]) -> argparse.Namespace:
  """The command line after ``moe_layer``."""
  parser = argparse.ArgumentParser(
    prog=f"python -m experiments.bench {NAME}",
    description="Times the MoE layer, forward and backward.",
  )
  models, arms = sorted(layer_arms.EXPERTS), list(layer_arms.RECIPES)
  parser.add_argument("--model", choices=models, default="deepseek_v3")
  parser.add_argument("--rows", type=int, default=ROWS, help="tokens * top_k")
  parser.add_argument("--experts", type=int, help="of the device")
  parser.add_argument(
    "--width", type=int, nargs=2, metavar=("D_MODEL", "D_FF")
  )
  parser.add_argument("--arms", nargs="+", choices=arms, default=arms)
  parser.add_argument("--backend", choices=("auto", "mosaic", "xla"))
  parser.add_argument("--samples", type=int, default=timing.SAMPLES)
  parser.add_argument("--seconds", type=float, default=SAMPLE_SECONDS)
  parser.add_argument(
    "--parts", action=argparse.BooleanOptionalAction, default=True
  )
  parser.add_argument("--json", type=pathlib.Path, help="file to write")
  parser.add_argument("--png", type=pathlib.Path, help="stacked bar to draw")
  return parser.parse_args(arguments)


def result(
  asked: argparse.Namespace, arms: Sequence[Arm], refused: dict[str, str]
) -> dict[str, Any]:
  """What goes to the file, beside the origin."""
  by_name = {arm.name: arm for arm in arms}
  others = [by_name[n] for n in (BASELINE, "jax") if n in by_name]
  found = []
  for arm in arms:
    ratios = {f"times_{o.name}": arm.ratios(o) for o in others}
    found.append(dataclasses.asdict(arm) | ratios)
  return {
    "model": asked.model,
    "rows": asked.rows,
    "experts": asked.experts,
    "width": asked.width,
    "backend": asked.backend,
    "refused": refused,
    "arms": found,
  }


def main(
  arguments: Sequence[str], origin: Callable[[Sequence[str]], dict[str, Any]]
) -> int:
  """Runs the command; returns its exit status, 1 if no arm ran.

  Args:
    arguments: with ``moe_layer`` first.
    origin: `bench.origin`.
  """
  asked = parse(arguments[1:])
  asked.experts = asked.experts or layer_arms.EXPERTS[asked.model]
  on_gpu = jax.devices()[0].platform == "gpu"
  asked.backend = asked.backend or ("auto" if on_gpu else "xla")
  configs = {
    name: layer_arms.layer_config(
      name, asked.model, asked.experts, asked.backend, asked.width
    )
    for name in asked.arms
  }
  first = configs[asked.arms[0]]
  asked.width = [first.d_model, first.d_ff]
  data = layer_arms.inputs(first, asked.rows)
  console = rich.console.Console(width=None if sys.stdout.isatty() else 150)
  programs, refused = build(asked, data, configs)
  arms = measure(programs, data, asked)

  def write(arms: Sequence[Arm]) -> None:
    if asked.json:
      found = origin(_without_png(arguments)) | result(asked, arms, refused)
      asked.json.write_text(json.dumps(found, indent=2) + "\n")

  device = jax.devices()[0].device_kind
  title = (
    f"{asked.model}: {asked.rows} rows, {asked.experts} experts of"
    f" {first.d_model} x {first.d_ff}, {device}"
  )
  console.print(table(arms, title))
  for name, reason in refused.items():
    console.print(f"{name} cannot run here: {reason}", markup=False)
  for arm in arms if on_gpu else ():
    for step, reason in arm.fallbacks.items():
      console.print(f"{arm.name} {step} on XLA: {reason}", markup=False)
  write(arms)  # the parts take minutes
  if asked.parts:
    arms = list(with_parts(arms, configs, data, asked))
    write(arms)
  if asked.png:
    _draw(asked.png, arms, title)
  return 0 if arms else 1


def _without_png(arguments: Sequence[str]) -> list[str]:
  """The command line without where the picture went."""
  words = list(arguments)
  if "--png" in words:
    at = words.index("--png")
    del words[at : at + 2]
  return words


def _draw(path: pathlib.Path, arms: Sequence[Arm], title: str) -> None:
  if importlib.util.find_spec("matplotlib") is None:
    print(f"{path} is not drawn: matplotlib is missing.", file=sys.stderr)
    return
  from experiments import plot_layer

  bars = {}
  for arm in arms:
    for direction, ms in (("forward", arm.forward_ms),
                          ("backward", arm.backward_ms)):  # fmt: skip
      bars[f"{arm.name}\n{direction}"] = (
        ms,
        layer_parts.sums(arm.parts, direction),
      )
  plot_layer.draw(path, bars, title=title)
