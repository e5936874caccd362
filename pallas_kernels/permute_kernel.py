"""The bodies of the permute kernels: rows by copies, scales by registers.

`gather_rows` moves rows through shared memory by bulk copies; no register ever
holds an element. A CTA keeps a ring of `stages` batches of rows:

    per batch   read its indices | a bulk copy per row and piece -> slot
                wait full[slot]  | one bulk copy of the batch -> result

A row is made of pieces side by side, each a window of a source, taken by index
or in order. Index -1 takes a row of zeros.

`relayout_scales` builds atoms of blocked scales: thread r of a warpgroup reads
the linear scales of row r of a 128-row tile, wherever that row lies, and writes
each word of four to its place in an atom in shared memory; then one bulk copy.

`permute` holds the entry points; `stream` walks batches and tiles.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
import jax.numpy as jnp

from pallas_kernels import mosaic, mxfp8, stream, tiles

ROWS = tiles.TILE_ROWS
WORD = mxfp8.ATOM_BLOCKS  # bytes: four scales, those of 128 columns
IN_BOUNDS = plgpu.OOBFillMode.PROMISE_IN_BOUNDS  # asks for a plain bulk copy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
  """Columns of a row that come from one source.

  Attributes:
    width: Elements; a multiple of 128 bytes.
    start: First column in the source.
    indexed: Rows are taken by index, else in order.
  """

  width: int
  start: int = 0
  indexed: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
  """What one call of `gather_rows` does; static.

  Attributes:
    rows: Rows of the result, a multiple of ``batch``.
    pieces: Of each row, from left to right.
    dtype: Element type.
    batch: Rows of a ring slot.
    stages: Ring slots.
  """

  rows: int
  pieces: tuple[Piece, ...]
  dtype: Any
  batch: int
  stages: int

  @property
  def width(self) -> int:
    """Elements of a row."""
    return sum(p.width for p in self.pieces)

  def scratch(self) -> list[Any]:
    """The ring and its barriers."""
    return [
      plgpu.SMEM((self.stages, self.batch, self.width), self.dtype),
      plgpu.Barrier(
        num_arrivals=self.batch * len(self.pieces), num_barriers=self.stages
      ),
    ]


def _load_row(problem: Rows, sources, zeros, row, into) -> None:
  """Starts the copies of one row, piece by piece.

  Args:
    problem: What is done.
    sources: [n, columns] ref of each piece.
    zeros: [1, columns] ref.
    row: The row of the result, and its index.
    into: The row in shared memory, and the barrier of its slot.
  """
  (row, index), (target, full), column = row, into, 0
  for piece, source in zip(problem.pieces, sources, strict=True):
    window = pl.ds(piece.start, piece.width)
    part = target.at[pl.ds(column, piece.width)]
    copy = functools.partial(
      plgpu.copy_gmem_to_smem, barrier=full, oob_mode=IN_BOUNDS
    )
    if not piece.indexed:
      copy(source.at[row, window], part)
    else:
      taken, nothing = source.at[index, window], zeros.at[0, window]
      pl.when(index >= 0)(functools.partial(copy, taken, part))
      pl.when(index < 0)(functools.partial(copy, nothing, part))
    column += piece.width


def gather_rows(*refs, problem: Rows, ctas: int) -> None:
  """The body: sources, index, zeros, result; then the scratch."""
  count = len(problem.pieces)
  sources, (index_gmem, zeros, out_gmem, ring, full) = (
    refs[:count],
    refs[count:],
  )
  batch = problem.batch

  def load(position, slot):
    first = position[0] * batch
    indices = [index_gmem[first + i] for i in range(batch)]
    for i, index in enumerate(indices):
      row, into = (first + i, index), (ring.at[slot, i], full.at[slot])
      _load_row(problem, sources, zeros, row, into)

  def process(position, slot, refill, _):
    plgpu.barrier_wait(full.at[slot])
    rows = pl.ds(position[0] * batch, batch)
    plgpu.copy_smem_to_gmem(ring.at[slot], out_gmem.at[rows])
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    refill()

  stream.walk(
    (problem.rows // batch,),
    ctas=ctas,
    stages=problem.stages,
    load=load,
    process=process,
  )
  plgpu.wait_smem_to_gmem(0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
  """What one call of `relayout_scales` does; static.

  Attributes:
    rows: Rows of the result, a multiple of 128.
    blocks: Scales of a row, a multiple of 4.
    start: First byte of the scales in a source row; rows and start are
      multiples of 4 bytes, of 16 where ``blocks`` is.
    weighted: The source row has a float32 weight behind its scales.
  """

  rows: int
  blocks: int
  start: int
  weighted: bool

  @property
  def words(self) -> int:
    """Words of a row; also atoms of a tile."""
    return self.blocks // WORD

  @property
  def step(self) -> int:
    """Words of one load: 16 bytes where the alignment allows."""
    return 4 if self.words % 4 == 0 else 1

  def outputs(self) -> list[jax.ShapeDtypeStruct]:
    """Atoms, and the weights if there are any."""
    atoms = (self.rows // ROWS, self.words, mxfp8.ATOM_BYTES)
    weights = jax.ShapeDtypeStruct((self.rows,), jnp.float32)
    found = [jax.ShapeDtypeStruct(atoms, jnp.uint8)]
    return [*found, weights] if self.weighted else found

  def scratch(self) -> list[Any]:
    """The atoms of a tile."""
    return [plgpu.SMEM((self.words, mxfp8.ATOM_BYTES), jnp.uint8)]


def word_layout() -> Any:
  """Thread r holds row r of a tile."""
  return mosaic.row_layout(jnp.bfloat16).reduce(1)


def load_row_words(
  source: Any, row: jax.Array, column: Any, count: int, interpret: Any
) -> list[jax.Array]:
  """Loads ``count`` adjacent words of a row of its own in each thread.

  Args:
    source: [n, bytes] uint8 ref in global memory.
    row: [128] int32 in `word_layout`, the row of each thread.
    column: First byte, a multiple of 4 * count as is the length of a row.
    count: 1 or 4.
    interpret: Whether the kernel is interpreted: inline code is not.

  Returns:
    ``count`` arrays of [128] uint32.
  """
  if interpret:
    taken = jnp.take(source[...], row, axis=0)
    taken = lax.dynamic_slice_in_dim(taken, column, WORD * count, 1)
    value = lax.bitcast_convert_type(
      taken.reshape(ROWS, count, WORD), jnp.uint32
    )
    return [value[:, i] for i in range(count)]
  layout = word_layout()
  words = plgpu.ShapeDtypeStruct((ROWS,), jnp.uint32, layout=layout)
  column = plgpu.layout_cast(
    lax.broadcast_in_dim(jnp.int32(column), (ROWS,), ()), layout
  )

  @plgpu.inline_mgpu(
    arg_types=(plgpu.RefType(), layout, layout), return_type=[words] * count
  )
  def load(_, ref, rows, columns):
    index, word = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    vector_type = ir.VectorType.get(
      (WORD * count,), ir.IntegerType.get_signless(8)
    )
    words_type = ir.VectorType.get((count,), word)
    (where,), (start,) = rows.registers.flat, columns.registers.flat
    offset = [
      arith.index_cast(index, _scalar(value)) for value in (where, start)
    ]
    value = vector.load(vector_type, ref, offset, alignment=WORD * count)
    value = vector.bitcast(words_type, value)
    one = ir.VectorType.get((1,), word)
    found = []
    for i in range(count):
      part = vector.extract(value, [], [i])
      register = part if where.type == word else vector.broadcast(one, part)
      registers = rows.registers.copy()
      registers.flat[0] = register
      found.append(
        mgpu.FragmentedArray(
          _registers=registers, _layout=rows.layout, _is_signed=False
        )
      )
    return found

  return list(load(source, row, column))  # pyright: ignore[reportCallIssue]


def _scalar(register: ir.Value) -> ir.Value:
  """The only element of a register."""
  if isinstance(register.type, ir.VectorType):
    return vector.extract(register, [], [0])
  return register


def relayout_scales(*refs, problem: Scales, ctas: int, interpret: Any) -> None:
  """The body: source, index, atoms (, weights); then the scratch."""
  source, index_gmem, atoms_gmem, *refs = refs
  weights_gmem = refs.pop(0) if problem.weighted else None
  (atoms_smem,) = refs

  def words_of(index, column, count):
    row = jnp.maximum(index, 0)
    words = load_row_words(source, row, column, count, interpret)
    zero = jnp.zeros_like(words[0])
    return [jnp.where(index >= 0, word, zero) for word in words]

  def process(position, slot, refill, index):
    del slot, refill
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def relayout(i, _):
      first = i * problem.step
      column = problem.start + first * WORD
      words = words_of(index, column, problem.step)
      for j, word in enumerate(words):
        target = atoms_smem.at[first + j]
        mosaic.store_words(target, word, word_layout(), interpret, blocked=True)

    lax.fori_loop(0, problem.words // problem.step, relayout, None)
    if weights_gmem is not None:
      (word,) = words_of(index, problem.start + problem.blocks, 1)
      rows = pl.ds(position[0] * ROWS, ROWS)
      weights_gmem[rows] = lax.bitcast_convert_type(word, jnp.float32)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(atoms_smem, atoms_gmem.at[position[0]])

  def prefetch(position):
    rows = index_gmem.at[pl.ds(position[0] * ROWS, ROWS)]
    return plgpu.load(rows, layout=word_layout(), optimized=False)

  stream.walk(
    (problem.rows // ROWS,),
    ctas=ctas,
    stages=1,
    load=lambda position, slot: None,
    process=process,
    prefetch=prefetch,
  )
  plgpu.wait_smem_to_gmem(0)
