"""Reads the text of compiled HLO: instructions, their types and operands."""

import dataclasses
import math
import re

_LINE = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$")
_TYPE = re.compile(r"\b([a-z]+\d+[a-z0-9]*)\[([\d,]*)\]")
_OPERAND = re.compile(r"%([\w.-]+)")
_TARGET = re.compile(r'custom_call_target="([^"]+)"')

VIEWS = ("bitcast", "get-tuple-element", "tuple")  # cost nothing
FLOATS = ("f16", "bf16", "f32", "f64")


@dataclasses.dataclass(frozen=True)
class Array:
  """The type of an array.

  Attributes:
    dtype: as HLO names it, e.g. ``f8e4m3fn``.
    shape: its dimensions.
  """

  dtype: str
  shape: tuple[int, ...]

  @property
  def size(self) -> int:
    """Elements."""
    return math.prod(self.shape)

  @property
  def bytes(self) -> int:
    """Bytes of elements of whole bytes."""
    return self.size * int(re.findall(r"\d+", self.dtype)[0]) // 8

  @property
  def is_fp8(self) -> bool:
    """Whether elements are 8-bit floats; scales (e8m0) are not."""
    return self.dtype in ("f8e4m3fn", "f8e5m2")

  @property
  def is_float(self) -> bool:
    """Whether elements are floats of 16 bits or more."""
    return self.dtype in FLOATS


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    opcode: e.g. ``fusion``.
    results: its result, or those of a tuple.
    operands: names of what it reads.
    target: of a custom call, or None.
  """

  opcode: str
  results: tuple[Array, ...]
  operands: tuple[str, ...]
  target: str | None


@dataclasses.dataclass(frozen=True)
class Module:
  """The instructions of a module by name, those of all computations."""

  instructions: dict[str, Instruction]

  def read_by(self, found: Instruction) -> list[Array]:
    """What an instruction reads; of tuples, all parts."""
    known = (self.instructions[name] for name in found.operands)
    return [array for source in known for array in source.results]

  def kernels(self) -> list[Instruction]:
    """The custom calls."""
    return [i for i in self.instructions.values() if i.opcode == "custom-call"]

  def origins(self, name: str) -> set[str]:
    """What an array is a view of: names, seen through views of no cost."""
    found = self.instructions[name]
    if found.opcode not in VIEWS:
      return {name}
    return set().union(*(self.origins(n) for n in found.operands))

  def readers(self, name: str) -> set[str]:
    """Who reads an array or a view of it."""
    direct = {n for n, i in self.instructions.items() if name in i.operands}
    views = {n for n in direct if self.instructions[n].opcode in VIEWS}
    return (direct - views).union(*(self.readers(n) for n in views))


def _operands(arguments: str) -> tuple[str, ...]:
  """Names before the parenthesis that closes the argument list."""
  depth = 1
  for end, character in enumerate(arguments):
    depth += (character == "(") - (character == ")")
    if not depth:
      return tuple(_OPERAND.findall(arguments[:end]))
  raise ValueError(f"an argument list that does not end: {arguments[:80]}")


def _arrays(text: str) -> tuple[Array, ...]:
  return tuple(
    Array(dtype, tuple(int(d) for d in dims.split(",") if d))
    for dtype, dims in _TYPE.findall(text)
  )


def parse(text: str) -> Module:
  """The instructions of HLO text, as ``compiled.as_text()`` gives it."""
  instructions = {}
  for line in text.splitlines():
    if (found := _LINE.match(line)) is None:
      continue
    name, types, opcode, rest = found.groups()
    target = _TARGET.search(rest)
    assert name not in instructions, f"two instructions named {name}"
    instructions[name] = Instruction(
      opcode, _arrays(types), _operands(rest), target and target[1]
    )
  return Module(instructions)
