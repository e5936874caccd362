"""The body of the SwiGLU kernels that fold: whole rows, 32 at a time.

    for each stripe of 32 rows, W warpgroups side by side:
      for each tile of 32 x 128   wait | compute | quantize rows to the stripe
                                  quantize columns | refill | store columns
      largest scale of each row over all warpgroups                     | meet
      re-base the stripe's codes in shared memory, store rows

A row's scale is known when all of it is computed; until then its codes stay in
shared memory, [32, F] or [32, 2 F] bytes, where a thread finds what it wrote
(`swiglu_rows_tile`). Columns are 32x1 blocks, one a stripe, and need no fold.
`swiglu_rows` holds the call; `swiglu_kernel` is the kernel that does not fold.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
import jax.numpy as jnp

from pallas_kernels import (
  activation,
  fold_kernel,
  mosaic,
  mxfp8,
  stream,
  swiglu_tile,
  tile_quantize,
)
from pallas_kernels import swiglu_rows_tile as rows_tile

ROWS = rows_tile.ROWS  # of a stripe
CHUNK = rows_tile.CHUNK  # columns of a tile
SHAPE = rows_tile.SHAPE
THREADS = rows_tile.THREADS
TILE_ROWS = mosaic.ATOM  # rows of a tile of a group's layout


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
  """What one call of the kernel computes; static.

  Attributes:
    rows: R, a multiple of 128.
    width: F, a multiple of 128 * ``warpgroups``.
    backward: Which of the two kernels.
    columns: Whether 32x1 blocks are wanted too.
    rounding: Scale rule.
    dtype: fp8 type of the results.
    form: The activation.
    stages: Ring slots of a warpgroup.
    warpgroups: Of a CTA.
  """

  rows: int
  width: int
  backward: bool
  columns: bool
  rounding: mxfp8.Rounding
  dtype: Any
  form: activation.Swiglu
  stages: int
  warpgroups: int

  @property
  def sources(self) -> int:
    """Results side by side: h, or dgate and dup."""
    return 2 if self.backward else 1

  @property
  def across(self) -> int:
    """Tiles along F."""
    return self.width // CHUNK

  @property
  def steps(self) -> int:
    """Tiles of a stripe for each warpgroup."""
    return self.across // self.warpgroups

  def outputs(self) -> dict[str, Any]:
    """Name to shape and dtype of each result, in order."""
    shape, stripes = jax.ShapeDtypeStruct, self.rows // ROWS
    data = shape((self.rows, self.sources * self.width), self.dtype)
    out = dict(rows=data, top=shape((stripes, THREADS), jnp.uint32))
    if self.columns:
      out["columns"] = data
      out["scale"] = shape((stripes, self.sources * self.width), jnp.uint8)
    if self.backward:
      partials = (self.warpgroups, stripes, THREADS)
      out["dweight"] = shape(partials, jnp.float32)
    return out

  def scratch(self) -> dict[str, Any]:
    """Shared memory by name."""
    count, tiles = self.warpgroups, self.sources * self.across
    ring = (count * self.stages, *SHAPE)
    inputs = 3 if self.backward else 2
    scratch: dict[str, Any] = dict(
      ring=[mosaic.swizzled(ring, jnp.bfloat16, CHUNK)] * inputs,
      full=plgpu.Barrier(
        num_arrivals=inputs, num_barriers=count * self.stages
      ),
      met=plgpu.Barrier(num_arrivals=count),
      codes=mosaic.swizzled((tiles, *SHAPE), self.dtype, CHUNK),
      bytes_=plgpu.SMEM((tiles, THREADS), jnp.uint8),
      tops=plgpu.SMEM((2, count, 2 * THREADS), jnp.uint32),
    )
    if self.columns:
      staged = (count * self.sources, *SHAPE)
      scratch["staged"] = mosaic.swizzled(staged, self.dtype, CHUNK)
    return scratch


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cta:
  """The static problem, this warpgroup's place, and the refs by name."""

  problem: Problem
  interpret: Any
  mine: Any
  refs: types.SimpleNamespace

  def column(self, step: jax.Array) -> jax.Array:
    """The tile along F that this warpgroup takes."""
    return step * self.problem.warpgroups + self.mine

  def meet(self) -> None:
    """Makes writes to shared memory visible to all threads and to TMA."""
    plgpu.commit_smem()
    if self.problem.warpgroups > 1:
      plgpu.barrier_arrive(self.refs.met)
      plgpu.barrier_wait(self.refs.met)


def window(stripe: jax.Array, column: jax.Array) -> tuple[Any, Any]:
  """A tile in an array of rows."""
  return pl.ds(stripe * ROWS, ROWS), pl.ds(column * CHUNK, CHUNK)


def load_tile(cta: Cta, stripe, column, slot) -> None:
  """Starts the loads of gate, up (and dh)."""
  refs, across = cta.refs, cta.problem.across
  halves = column, column + across
  sources = [refs.pre.at[window(stripe, at)] for at in halves]
  if cta.problem.backward:
    sources.append(refs.dh.at[window(stripe, column)])
  for source, smem in zip(sources, refs.ring, strict=True):
    plgpu.copy_gmem_to_smem(source, smem.at[slot], refs.full.at[slot])


def compute(cta: Cta, slot, weight, valid) -> tuple[list[jax.Array], Any]:
  """h, or dgate and dup, [32, 128] bf16; and each thread's dweight."""
  layout = rows_tile.tile_layout()
  gate, up, *dh = (
    plgpu.load(smem.at[slot], layout=layout).astype(jnp.float32)
    for smem in cta.refs.ring
  )
  weight = lax.broadcast_in_dim(weight, SHAPE, (0,))
  weight = plgpu.layout_cast(weight, layout)  # must follow at once
  form, share = cta.problem.form, None
  if cta.problem.backward:
    *values, share = swiglu_tile.differentiate(gate, up, dh[0], weight, form)
    share = rows_tile.per_block(share, cta.interpret)
  else:
    values = [swiglu_tile.activate(gate, up, weight, form)]
  row = lax.broadcasted_iota(jnp.int32, SHAPE, 0)
  inside = plgpu.layout_cast(row, layout) < valid
  return [jnp.where(inside, x, jnp.zeros_like(x)) for x in values], share


def quantize_block(cta: Cta, x: jax.Array, tile) -> jax.Array:
  """Codes and scale of each thread's block to the stripe; [128] scales."""
  problem, refs = cta.problem, cta.refs
  largest = rows_tile.per_block(mosaic.float_bits(jnp.abs(x)), cta.interpret)
  amax = lax.bitcast_convert_type(largest, jnp.float32)
  byte = mosaic.scale_byte(amax, problem.rounding, problem.dtype)
  inverse = rows_tile.spread(mosaic.reciprocal(byte), cta.interpret)
  codes = (x.astype(jnp.float32) * inverse).astype(problem.dtype)
  refs.codes[tile] = codes
  refs.bytes_[tile] = byte.astype(jnp.uint8)
  return byte


def quantize_columns(cta: Cta, stripe, column, slot) -> None:
  """32x1 blocks of the numbers that took the inputs' place."""
  problem, refs, layout = cta.problem, cta.refs, mosaic.column_layout()
  for i in range(problem.sources):
    x = plgpu.load(refs.ring[i].at[slot], layout=layout)
    amax = jnp.max(jnp.abs(x), axis=0).astype(jnp.float32)
    byte = mosaic.scale_byte(amax, problem.rounding, problem.dtype)
    codes = tile_quantize.scaled(x, byte, -2, layout, problem.dtype)
    refs.staged[cta.mine * problem.sources + i] = codes
    columns = pl.ds((column + i * problem.across) * CHUNK, CHUNK)
    refs.scale[stripe, columns] = byte.astype(jnp.uint8)


def process(cta: Cta, stripe, step, slot, row, refill) -> Any:
  """One tile; ``row`` is weight, valid rows; returns scales and dweight."""
  problem, refs, column = cta.problem, cta.refs, cta.column(step)
  plgpu.barrier_wait(refs.full.at[slot])
  values, share = compute(cta, slot, *row)
  plgpu.wait_smem_to_gmem(0, wait_read_only=True)
  top = None
  for i, x in enumerate(values):
    byte = quantize_block(cta, x, column + i * problem.across)
    top = byte if top is None else jnp.maximum(top, byte)
    if problem.columns:
      refs.ring[i][slot] = x
  plgpu.commit_smem()
  if problem.columns:
    quantize_columns(cta, stripe, column, slot)
    plgpu.commit_smem()
  refill()
  for i in range(problem.sources if problem.columns else 0):
    plgpu.copy_smem_to_gmem(
      refs.staged.at[cta.mine * problem.sources + i],
      refs.columns.at[window(stripe, column + i * problem.across)],
    )
  return top, share


def row_tops(cta: Cta, top: jax.Array, turn: jax.Array) -> jax.Array:
  """The largest scale of each thread's row, over blocks and warpgroups.

  Each warpgroup writes its scales twice, one after the other, so that a window
  that starts 32 further reads those of the next block of the same row.
  """
  tops = cta.refs.tops.at[lax.rem(turn, jnp.int32(2))]
  for copy in range(2):
    tops[cta.mine, pl.ds(copy * THREADS, THREADS)] = top
  cta.meet()
  for other in range(cta.problem.warpgroups):
    for start in range(0, THREADS, ROWS):
      more = plgpu.load(
        tops.at[other, pl.ds(start, THREADS)],
        layout=rows_tile.unit_layout(),
        optimized=False,
      )
      top = jnp.maximum(top, more)
  return top


def rebase_tiles(cta: Cta, stripe, top: jax.Array) -> None:
  """Re-bases this warpgroup's tiles of the stripe and stores them."""
  problem, refs = cta.problem, cta.refs

  def rebase(step, _):
    for i in range(problem.sources):
      tile = cta.column(step) + i * problem.across
      layout = rows_tile.unit_layout()
      byte = plgpu.load(refs.bytes_.at[tile], layout=layout, optimized=False)
      byte = fold_kernel.shifted(top, byte.astype(jnp.uint32))
      factor = rows_tile.spread(mosaic.reciprocal(byte), cta.interpret)
      codes = plgpu.load(refs.codes.at[tile], layout=rows_tile.tile_layout())
      codes = (codes.astype(jnp.float32) * factor).astype(problem.dtype)
      refs.codes[tile] = codes

  def store(step, _):
    for i in range(problem.sources):
      tile = cta.column(step) + i * problem.across
      target = refs.rows.at[window(stripe, tile)]
      plgpu.copy_smem_to_gmem(refs.codes.at[tile], target)

  lax.fori_loop(0, problem.steps, rebase, None)
  plgpu.commit_smem()
  lax.fori_loop(0, problem.steps, store, None)


def run_stripe(cta: Cta, stripe, turn, fetch) -> None:
  """One stripe: its tiles, then the fold.

  Args:
    cta: This warpgroup.
    stripe: Which 32 rows.
    turn: How many stripes this CTA has done.
    fetch: ``fetch(step)`` loads a tile of this CTA's, steps counted from the
      first stripe on, if there is one.
  """
  problem, refs = cta.problem, cta.refs
  weight = plgpu.load(
    refs.weight.at[pl.ds(stripe * ROWS, ROWS)],
    layout=rows_tile.tile_layout().reduce(1),
    optimized=False,
  )
  per_tile = TILE_ROWS // ROWS
  valid = refs.tile_rows[lax.div(stripe, jnp.int32(per_tile))]
  valid = valid - lax.rem(stripe, jnp.int32(per_tile)) * ROWS
  stages = problem.stages

  def body(step, carry):
    total = turn * problem.steps + step
    slot = cta.mine * stages + lax.rem(total, jnp.int32(stages))
    refill = functools.partial(fetch, total + stages)
    top, share = process(cta, stripe, step, slot, (weight, valid), refill)
    if not problem.backward:
      return (jnp.maximum(carry[0], top),)
    return jnp.maximum(carry[0], top), carry[1] + share

  first = [rows_tile.numbers(jnp.uint32(0), rows_tile.unit_layout())]
  if problem.backward:
    first.append(rows_tile.numbers(jnp.float32(0), rows_tile.unit_layout()))
  top, *dweight = lax.fori_loop(0, problem.steps, body, tuple(first))
  if problem.backward:
    thread = lax.broadcasted_iota(jnp.int32, (THREADS,), 0)
    row = plgpu.layout_cast(thread, rows_tile.unit_layout()) & (ROWS - 1)
    none = jnp.zeros_like(dweight[0])
    refs.dweight[cta.mine, stripe] = jnp.where(row < valid, dweight[0], none)
  top = row_tops(cta, top, turn)

  @pl.when(cta.mine == 0)
  def _():
    refs.top[stripe] = top

  rebase_tiles(cta, stripe, top)


def kernel(*gmem, problem: Problem, inputs, ctas: int, interpret: Any, **smem):
  """The body: inputs and outputs in order, scratch by name."""
  names = [*inputs, *problem.outputs()]
  refs = dict(zip(names, gmem, strict=True)) | smem
  several = problem.warpgroups > 1
  mine = lax.axis_index(stream.WARPGROUP) if several else jnp.int32(0)
  refs = types.SimpleNamespace(**refs)
  cta = Cta(problem=problem, interpret=interpret, mine=mine, refs=refs)
  first, steps = lax.axis_index(stream.AXIS), jnp.int32(problem.steps)
  turns = lax.div(problem.rows // ROWS - 1 - first, jnp.int32(ctas)) + 1

  def fetch(total: jax.Array) -> None:
    stripe = first + lax.div(total, steps) * ctas
    column = cta.column(lax.rem(total, steps))
    slot = mine * problem.stages + lax.rem(total, jnp.int32(problem.stages))
    some = total < turns * steps
    pl.when(some)(lambda: load_tile(cta, stripe, column, slot))

  for total in range(problem.stages):
    fetch(jnp.int32(total))

  def body(turn, _):
    run_stripe(cta, first + turn * ctas, turn, fetch)

  lax.fori_loop(0, turns, body, None)
  plgpu.wait_smem_to_gmem(0)
