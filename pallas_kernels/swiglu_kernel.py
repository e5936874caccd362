"""The SwiGLU kernels' body: what one CTA does with a tile of 128 x 128.

    wait gate, up (, dh)   rows of [gate | up] in MXFP8, if wanted     | meet
    compute columns, in place: gate <- h, or gate, up <- dgate, dup
    zero padding rows | fence                                          | meet
    load the next up or dh | passes over h, or dgate and dup | stores  | meet
    load the next gate (and up)

A CTA has one, two or four warpgroups. Each computes an equal share of the
columns, in a loop over parts of 16: unrolled it needs twice the registers, and
half as many warps fit. Then the passes, two (forward) or four, are dealt out to
the warpgroups. `meet` is a barrier of all. Pre-activations in MXFP8 are not
overwritten: results go to work tiles.

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


def load_pre(cta: Cta, half: int, position, slot) -> None:
  """Starts the load of a tile of gate (half 0) or up (1)."""
  row, column = position
  start = half * cta.problem.width + column * CHUNK
  source = cta.refs.pre.at[pl.ds(row * ROWS, ROWS), pl.ds(start, CHUNK)]
  smem = (cta.refs.gate_smem, cta.refs.up_smem)[half]
  plgpu.copy_gmem_to_smem(source, smem.at[slot], cta.refs.full.at[slot])


def load_dh(cta: Cta, position) -> None:
  """Starts the load of a tile's dh."""
  row, column = position
  source = cta.refs.dh.at[pl.ds(row * ROWS, ROWS), pl.ds(column * CHUNK, CHUNK)]
  plgpu.copy_gmem_to_smem(source, cta.refs.dh_smem, cta.refs.dh_full)


def load_later(cta: Cta, tile, load: Callable) -> None:
  """Calls ``load`` with the position of a tile, if there is one."""
  down, across = cta.problem.grid
  position = lax.div(tile, jnp.int32(across)), lax.rem(tile, jnp.int32(across))
  pl.when(tile < down * across)(lambda: load(position))


def refill_early(cta: Cta, position, slot) -> None:
  """Loads over what is dead once a tile is computed: dh, or else up."""
  tile = position[0] * cta.problem.grid[1] + position[1]
  if cta.problem.backward:
    load_later(cta, tile + cta.ctas, functools.partial(load_dh, cta))
  else:
    tile = tile + cta.ctas * cta.problem.tile.stages
    load_later(cta, tile, lambda at: load_pre(cta, 1, at, slot))


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


def compute_parts(cta: Cta, position, slot, results, ahead, mine: int) -> None:
  """Computes a warpgroup's columns of h, or of dgate, dup and dweight.

  A loop over parts, so that no more than one of them is in registers.
  """
  problem, refs, interpret = cta.problem, cta.refs, cta.interpret
  weight, valid, group, scale_words = ahead
  count = CHUNK // PART // problem.tile.warpgroups
  sources = [refs.gate_smem.at[slot], refs.up_smem.at[slot]]

  def compute(part, dweight):
    start = part * PART
    gate, up = (
      pre_activation(
        cta, swiglu_tile.load_part(smem, start, interpret), half, position[1],
        start, group, scale_words,
      )
      for half, smem in enumerate(sources)
    )  # fmt: skip
    if problem.backward:
      dh = swiglu_tile.load_part(refs.dh_smem, start, interpret)
      *value, share = swiglu_tile.differentiate(
        gate, up, dh.astype(jnp.float32), weight, problem.form
      )
      dweight = dweight + jnp.sum(share, axis=1)
    else:
      value = [swiglu_tile.activate(gate, up, weight, problem.form)]
    for tile_smem, x in zip(results, value, strict=True):
      swiglu_tile.store_part(tile_smem, start, x, interpret)
    return dweight

  def clear(part, _):
    inside = swiglu_tile.per_row(swiglu_tile.row_index()) < valid
    for tile_smem in results:
      x = swiglu_tile.load_part(tile_smem, part * PART, interpret)
      x = jnp.where(inside, x, jnp.zeros_like(x))
      swiglu_tile.store_part(tile_smem, part * PART, x, interpret)

  loop = functools.partial(lax.fori_loop, mine * count, (mine + 1) * count)
  none = jnp.zeros((ROWS,), jnp.float32)
  none = plgpu.layout_cast(none, swiglu_tile.layout().reduce(1))
  dweight = loop(compute, none)
  if problem.backward:
    store_dweight(cta, position, mine, dweight, valid)
  pl.when(valid < ROWS)(lambda: loop(clear, None))


def store_dweight(cta: Cta, position, mine: int, dweight, valid) -> None:
  """Stores a warpgroup's share of the gradient of the row weights."""
  row, column = position
  inside = swiglu_tile.row_index() < valid
  dweight = jnp.where(inside, dweight, jnp.zeros_like(dweight))
  part = column * cta.problem.tile.warpgroups + mine
  cta.refs.dweight[part, pl.ds(row * ROWS, ROWS)] = dweight


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
  shares: list[list] = [[] for _ in range(problem.tile.warpgroups)]
  items = itertools.count()
  for i, tile_smem in enumerate(results):
    at = (0, position[0], position[1] + i * problem.grid[1])
    for j, direction in enumerate(problem.directions):
      gmem, item = refs.quantized[2 * j : 2 * j + 2], next(items)
      outputs = (*gmem, *cta.staging(item + 2 * problem.saved))
      mine = item % problem.tile.warpgroups
      shares[mine].append((tile_smem, at, direction, outputs))
  for mine, work in enumerate(shares):
    cta.by_warpgroup(
      mine, functools.partial(quantize_tiles, cta, work, quantization)
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
  for mine in range(problem.tile.warpgroups):
    compute = functools.partial(
      compute_parts, cta, position, slot, results, ahead, mine
    )
    cta.by_warpgroup(mine, compute)
  cta.meet()
  cta.by_warpgroup(0, lambda: refill_early(cta, position, slot))
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

  halves = (0, 1) if problem.backward else (0,)

  def load(position, slot):
    for half in halves:
      cta.by_warpgroup(0, lambda h=half: load_pre(cta, h, position, slot))

  def load_first():
    tile = lax.axis_index(stream.AXIS)
    if problem.backward:
      load_later(cta, tile, functools.partial(load_dh, cta))
      return
    for slot in range(problem.tile.stages):
      load_up = functools.partial(load_pre, cta, 1, slot=slot)
      load_later(cta, tile + slot * ctas, load_up)

  cta.by_warpgroup(0, load_first)
  stream.walk(
    problem.grid,
    ctas=ctas,
    stages=problem.tile.stages,
    load=load,
    process=functools.partial(process_tile, cta),
    prefetch=prefetch,
  )
  plgpu.wait_smem_to_gmem(0)
