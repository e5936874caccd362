"""The SwiGLU kernels' body: what one CTA does with a tile of 128 x 128.

    wait gate, up (, dh)   rows of [gate | up] in MXFP8, if wanted     | meet
    compute a window, in place: gate <- h, or gate, up <- dgate, dup
    zero padding rows | fence                                          | meet
    load the next dh | passes over h, or dgate and dup | stores        | meet
    refill the ring slot

A CTA has one or two warpgroups. With two, each computes one window of 64
columns; then one takes the rows and the other the columns of h (forward), or
one takes dgate and the other dup (backward). `meet` is a barrier of both.
Pre-activations in MXFP8 are not overwritten: results go to work tiles.

`swiglu` holds the entry points and says what is computed; `swiglu_tile` has the
arithmetic, `tile_quantize` the passes, `stream` walks the tiles.
"""

from collections.abc import Callable
import dataclasses
import functools
import itertools
import types
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  dequantize,
  mosaic,
  mxfp8,
  quantize_kernel,
  stream,
  swiglu_problem,
  swiglu_tile,
  tile_quantize,
)

Problem = swiglu_problem.Problem

ROWS = swiglu_problem.ROWS
CHUNK = swiglu_problem.CHUNK
WINDOW = swiglu_problem.WINDOW
WINDOWS = swiglu_problem.WINDOWS
PART = swiglu_tile.PART


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cta:
  """The static problem and the refs of one CTA, by name."""

  problem: Problem
  interpret: Any
  ctas: int
  refs: types.SimpleNamespace

  def by_warpgroup(self, n: int, function: Callable[[], None]) -> None:
    """Runs ``function`` in the warpgroup that takes the n-th part."""
    warpgroups = self.problem.tile.warpgroups
    if warpgroups == 1:
      function()
    else:
      pl.when(lax.axis_index(stream.WARPGROUP) == n % warpgroups)(function)

  def staging(self, n: int) -> tuple[Any, Any]:
    """Codes and scale atom of the n-th pass, in shared memory."""
    return self.refs.codes_smem.at[n], self.refs.atoms_smem.at[n]

  def meet(self) -> None:
    """Makes writes to shared memory visible to all threads and to TMA."""
    plgpu.commit_smem()
    if self.problem.tile.warpgroups > 1:
      plgpu.barrier_arrive(self.refs.met)
      plgpu.barrier_wait(self.refs.met)


def _window(window: int) -> tuple[slice, Any]:
  return slice(None), pl.ds(window * WINDOW, WINDOW)


def load_gate_up(cta: Cta, position, slot) -> None:
  """Starts the loads of a tile's [gate | up]."""
  row, column = position
  rows = pl.ds(row * ROWS, ROWS)
  for half, smem in enumerate((cta.refs.gate_smem, cta.refs.up_smem)):
    start = half * cta.problem.width + column * CHUNK
    source = cta.refs.pre.at[rows, pl.ds(start, CHUNK)]
    plgpu.copy_gmem_to_smem(source, smem.at[slot], cta.refs.full.at[slot])


def load_dh(cta: Cta, position) -> None:
  """Starts the load of a tile's dh."""
  row, column = position
  source = cta.refs.dh.at[pl.ds(row * ROWS, ROWS), pl.ds(column * CHUNK, CHUNK)]
  plgpu.copy_gmem_to_smem(source, cta.refs.dh_smem, cta.refs.dh_full)


def load_next_dh(cta: Cta, position) -> None:
  """`load_dh` of this CTA's next tile, if there is one."""
  down, across = cta.problem.grid
  tile = position[0] * across + position[1] + cta.ctas
  following = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
  pl.when(tile < down * across)(lambda: load_dh(cta, following))


def load_window(tile_smem, window: int) -> list[jax.Array]:
  """The parts of 16 columns of a window; fp8 as it is."""
  layout = swiglu_tile.layout()
  if tile_smem.dtype == jnp.bfloat16:
    value, start = plgpu.load(tile_smem.at[_window(window)], layout=layout), 0
  else:  # 64 columns are half of a swizzled row
    value, start = plgpu.load(tile_smem, layout=layout), window * WINDOW
  starts = range(start, start + WINDOW, PART)
  return [value[:, s : s + PART] for s in starts]


def pre_activation(
  cta: Cta, raw, half: int, column, start: int, group, scale_words
) -> jax.Array:
  """float32 numbers of a part of gate (half 0) or up (1), bias included.

  Args:
    cta: This CTA.
    raw: [128, 16] as loaded.
    half: Which half of pre.
    column: Which tile along F.
    start: First column of the part in the tile.
    group: The tile's group, or None without bias.
    scale_words: [128] uint32 of each half, for MXFP8.
  """
  layout = swiglu_tile.layout()
  if cta.problem.coded:
    block = start // mxfp8.BLOCK
    raw = dequantize.product(raw, scale_words[half], block, -1, layout)
  value = raw.astype(jnp.float32)
  if group is None:
    return value
  first = half * cta.problem.width + column * CHUNK + start
  bias = plgpu.load(
    cta.refs.bias.at[group, pl.ds(first, PART)],
    layout=layout.reduce(0),
    optimized=False,
  )
  return value + swiglu_tile.per_column(bias)


def compute_window(cta: Cta, position, slot, window: int, results, ahead):
  """Computes 64 columns of h, or of dgate, dup and dweight."""
  problem, refs = cta.problem, cta.refs
  weight, valid, group, scale_words = ahead
  loaded = [
    load_window(smem.at[slot], window)
    for smem in (refs.gate_smem, refs.up_smem)
  ]
  if problem.backward:
    loaded.append(load_window(refs.dh_smem, window))
  values, sums = [], []
  for i, (gate, up, *dh) in enumerate(zip(*loaded, strict=True)):
    start = window * WINDOW + i * PART
    gate, up = (
      pre_activation(cta, raw, half, position[1], start, group, scale_words)
      for half, raw in enumerate((gate, up))
    )
    if problem.backward:
      (dh,) = dh
      *value, dweight = swiglu_tile.differentiate(
        gate, up, dh.astype(jnp.float32), weight, problem.form
      )
      sums.append(dweight)
    else:
      value = [swiglu_tile.activate(gate, up, weight, problem.form)]
    values.append(value)
  for tile_smem, parts in zip(results, zip(*values, strict=True), strict=True):
    tile_smem[_window(window)] = lax.concatenate(list(parts), 1)
  if problem.backward:
    store_dweight(cta, position, window, sum(sums[1:], sums[0]), valid)
  pl.when(valid < ROWS)(functools.partial(mask_window, results, window, valid))


def store_dweight(cta: Cta, position, window: int, dweight, valid) -> None:
  """Stores a window's share of the gradient of the row weights."""
  row, column = position
  inside = swiglu_tile.row_index() < valid
  dweight = jnp.where(inside, dweight, jnp.zeros_like(dweight))
  part = column * WINDOWS + window
  cta.refs.dweight[part, pl.ds(row * ROWS, ROWS)] = dweight


def mask_window(results, window: int, valid) -> None:
  """Zeroes the padding rows of a window."""
  for tile_smem in results:
    tile_quantize.mask_rows(tile_smem.at[_window(window)], valid)


def quantize_tiles(cta: Cta, work, quantization) -> None:
  """Runs passes and starts their stores; for one warpgroup.

  Args:
    cta: This CTA.
    work: List of (tile in shared memory, its position, direction, refs).
    quantization: The `quantize_kernel.Problem` of the result.
  """
  if not work:
    return
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  for tile_smem, at, direction, refs in work:
    quantize_kernel.quantize_tile(
      tile_smem, [(direction, refs)], at, quantization, cta.interpret
    )
  plgpu.commit_smem()
  for _, at, direction, refs in work:
    quantize_kernel.store_tile([(direction, refs)], at, quantization)


def quantize_results(cta: Cta, position, results) -> None:
  """The passes of all warpgroups over h, or dgate and dup."""
  problem, refs = cta.problem, cta.refs
  quantization = problem.quantization()
  shares: list[list] = [[], []]
  staging = itertools.count(2 * problem.saved)
  for i, tile_smem in enumerate(results):
    at = (0, position[0], position[1] + i * problem.grid[1])
    for j, direction in enumerate(problem.directions):
      gmem = refs.quantized[2 * j : 2 * j + 2]
      part = i if problem.backward else j
      outputs = (*gmem, *cta.staging(next(staging)))
      shares[part].append((tile_smem, at, direction, outputs))
  for part, work in enumerate(shares):
    cta.by_warpgroup(
      part, functools.partial(quantize_tiles, cta, work, quantization)
    )


def save_gate_up(cta: Cta, position, slot, valid) -> None:
  """Writes [gate | up] in MXFP8 rows, before it is overwritten."""
  problem, refs = cta.problem, cta.refs
  quantization = problem.saving()
  (direction,) = quantization.directions

  def save(half, smem):
    pl.when(valid < ROWS)(lambda: tile_quantize.mask_rows(smem, valid))
    at = (0, position[0], position[1] + half * problem.grid[1])
    outputs = (*refs.saved, *cta.staging(half))
    quantize_tiles(cta, [(smem, at, direction, outputs)], quantization)

  for half, smem in enumerate((refs.gate_smem, refs.up_smem)):
    cta.by_warpgroup(half, functools.partial(save, half, smem.at[slot]))
  cta.meet()


def store_plain(cta: Cta, position, results) -> None:
  """Starts the stores of the bf16 result; for one warpgroup."""
  row, column = position
  for i, tile_smem in enumerate(results):
    start = i * cta.problem.width + column * CHUNK
    window = pl.ds(row * ROWS, ROWS), pl.ds(start, CHUNK)
    plgpu.copy_smem_to_gmem(tile_smem, cta.refs.plain.at[window])


def process_tile(cta: Cta, position, slot, refill, ahead) -> None:
  """One tile, in the order that the module docstring draws."""
  problem, refs = cta.problem, cta.refs
  results = [refs.gate_smem.at[slot], refs.up_smem.at[slot]]
  results = refs.work_smem if problem.coded else results[: problem.sources]
  plgpu.barrier_wait(refs.full.at[slot])
  if problem.backward:
    plgpu.barrier_wait(refs.dh_full)
  if problem.saved:
    save_gate_up(cta, position, slot, ahead[1])
  for window in range(WINDOWS):
    compute = functools.partial(
      compute_window, cta, position, slot, window, results, ahead
    )
    cta.by_warpgroup(window, compute)
  cta.meet()
  if problem.backward:
    cta.by_warpgroup(0, lambda: load_next_dh(cta, position))
  quantize_results(cta, position, results)
  if problem.plain:
    cta.by_warpgroup(0, lambda: store_plain(cta, position, results))
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  cta.meet()
  cta.by_warpgroup(0, refill)


def kernel(*gmem, problem: Problem, inputs, ctas: int, interpret: Any, **smem):
  """The body: inputs and outputs in order, scratch by name."""
  names = [*inputs]
  refs = dict(zip(names, gmem[: len(names)], strict=True))
  tree = jax.tree.structure(problem.outputs())
  refs |= jax.tree.unflatten(tree, gmem[len(names) :])
  refs = types.SimpleNamespace(**refs, **smem)
  cta = Cta(problem=problem, interpret=interpret, ctas=ctas, refs=refs)

  def prefetch(position):
    row, column = position
    weight = plgpu.load(
      refs.weight.at[pl.ds(row * ROWS, ROWS)],
      layout=swiglu_tile.layout().reduce(1),
      optimized=False,
    )
    scale_words = ()
    if problem.coded:
      columns = column, column + problem.grid[1]
      scale_words = tuple(
        mosaic.load_words(
          refs.pre_scale.at[row, c],
          swiglu_tile.layout().reduce(1),
          interpret,
          blocked=True,
        )
        for c in columns
      )
    group = refs.tile_group[row] if problem.biased else None
    return weight, refs.tile_rows[row], group, scale_words

  def load(position, slot):
    cta.by_warpgroup(0, lambda: load_gate_up(cta, position, slot))

  if problem.backward:
    index = lax.axis_index(stream.AXIS)
    across = jnp.int32(problem.grid[1])
    first = lax.div(index, across), lax.rem(index, across)
    cta.by_warpgroup(0, lambda: load_dh(cta, first))
  stream.walk(
    problem.grid,
    ctas=ctas,
    stages=problem.tile.stages,
    load=load,
    process=functools.partial(process_tile, cta),
    prefetch=prefetch,
  )
  plgpu.wait_smem_to_gmem(0)
