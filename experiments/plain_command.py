"""The command line where tyro is missing: the same flags, by argparse.

Every field of the config is a flag by its path, ``--model.num-experts 16``;
a switch has ``--model.remat`` and ``--model.no-remat``. Help is shorter.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import types
import typing
from typing import Any


def parse(default: Any, arguments: list[str], prog: str) -> Any:
  """Returns `default` with the fields that the command line sets.

  Args:
    default: a frozen dataclass; its field ``experiment``, a dataclass too,
      has flags without prefix.
    arguments: the command line.
    prog: the program, for messages.

  Raises:
    SystemExit: help was asked, or an argument is unknown or of another type.
    ValueError: the dataclass refuses a value.
  """
  parser = argparse.ArgumentParser(prog=prog, allow_abbrev=False)
  _add(parser, default, ())
  given = vars(parser.parse_args(arguments))
  changes = {name: value for name, value in given.items() if value is not None}
  return _replace(default, (), changes)


def _flag(path: tuple[str, ...], *, no: bool = False) -> str:
  """E.g. --model.num-experts; of a switch the negative form too."""
  *owners, name = (part for part in path if part != "experiment")
  words = [*owners, f"no-{name}" if no else name]
  return "--" + ".".join(words).replace("_", "-")


def _add(
  parser: argparse.ArgumentParser, value: Any, path: tuple[str, ...]
) -> None:
  """Adds a flag for every field below `value`."""
  hints = typing.get_type_hints(type(value))
  for field in dataclasses.fields(value):
    now, where = getattr(value, field.name), (*path, field.name)
    if dataclasses.is_dataclass(now):
      _add(parser, now, where)
      continue
    options: dict[str, Any] = dict(dest=".".join(where), default=None)
    if hints[field.name] is bool:
      parser.add_argument(_flag(where), action="store_true", **options)
      parser.add_argument(
        _flag(where, no=True), action="store_false", **options
      )
    else:
      shown = f"now {now}".replace("%", "%%")
      options |= _reader(hints[field.name]) | {"help": shown}
      parser.add_argument(_flag(where), **options)


def _reader(hint: Any) -> dict[str, Any]:
  """How argparse reads a value of this type."""
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin is tuple:
    return _reader(inner[0]) | {"nargs": "*"}
  if origin is typing.Literal:
    return {"type": type(inner[0]), "choices": inner}
  if origin in (types.UnionType, typing.Union):  # T | None
    kind = next(each for each in inner if each is not types.NoneType)
    return {"type": kind}
  return {"type": pathlib.Path if hint is pathlib.Path else hint}


def _replace(value: Any, path: tuple[str, ...], changes: dict[str, Any]) -> Any:
  fields = {}
  for field in dataclasses.fields(value):
    now, where = getattr(value, field.name), (*path, field.name)
    if dataclasses.is_dataclass(now):
      new = _replace(now, where, changes)
    else:
      new = changes.get(".".join(where), now)
      new = tuple(new) if isinstance(new, list) else new
    if new is not now:
      fields[field.name] = new
  return dataclasses.replace(value, **fields) if fields else value
