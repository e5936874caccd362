"""The file that says which kernels were proven on the GPU at hand.

    path(kind)                  ~/.cache/mxmoe_jax/nvidia_b200.json
    write(...)                  what `python -m pallas_kernels.bring_up` found
    passed(kind, capability)    (True, "...") or (False, why not)

A record counts for one kind of GPU, one JAX and one state of the kernels'
source: `versions` names them, with a hash over the package's files that a
kernel can depend on. Anything else, an older record or none, asks for
`bring_up` to be run again. The record is per user and per machine; a home
directory that many machines share is one reason to pass another ``file``.
"""

from collections.abc import Sequence
import functools
import hashlib
import importlib.metadata
import importlib.resources
import json
import os
import pathlib
from typing import Any

import jax

from pallas_kernels import tiles

FOLDER = pathlib.PurePath(".cache", "mxmoe_jax")  # under the home directory
COMMAND = "python -m pallas_kernels.bring_up"
PACKAGES = {"jax": "jax", "jaxlib": "jaxlib", "mxmoe_jax": "mxmoe-jax"}
# Modules that no kernel is made of: tools, and what only they read.
TOOLS = ("aot", "autotune", "bring_up", "peaks", "timing", "cases", "workloads")


def path(device_kind: str) -> pathlib.Path:
  """Where the record of a kind of GPU lies unless told otherwise.

  Args:
    device_kind: As JAX names it, e.g. ``NVIDIA B200``.

  Raises:
    RuntimeError: The user has no home directory.
  """
  return pathlib.Path.home() / FOLDER / tiles.tuned_file(device_kind)


@functools.cache
def sources() -> str:
  """Hash over the kernels' source and the tiles that were measured."""
  digest = hashlib.sha256()
  for name, data in sorted(_files(importlib.resources.files("pallas_kernels"))):
    digest.update(f"{name} {len(data)}\n".encode() + data)
  return digest.hexdigest()[:16]


def _files(folder: Any, prefix: str = "") -> list[tuple[str, bytes]]:
  """Names and contents of the .py and .json files below a package."""
  found = []
  for entry in folder.iterdir():
    name = prefix + entry.name
    if entry.is_dir():
      found += _files(entry, name + "/")
    elif name.endswith((".py", ".json")) and not name.startswith(TOOLS):
      found.append((name, entry.read_bytes()))
  return found


def versions() -> dict[str, str]:
  """What a record must agree with: packages, and `sources`."""
  found = {"sources": sources(), "jax": jax.__version__}
  for name, package in PACKAGES.items():
    try:
      found[name] = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
      found.setdefault(name, "not installed")  # run from a clone
  return found


def write(
  device_kind: str,
  capability: str | None,
  failed: Sequence[str],
  *,
  checks: int,
  file: pathlib.Path | None = None,
) -> pathlib.Path:
  """Writes what a full run of `bring_up` found on this machine.

  Args:
    device_kind: As JAX names the GPU.
    capability: Its compute capability, e.g. ``"10.0"``.
    failed: Names of the checks that failed; empty if all passed.
    checks: How many ran.
    file: Where, instead of `path`.

  Returns:
    The file.
  """
  target = file or path(device_kind)
  target.parent.mkdir(parents=True, exist_ok=True)
  record = {
    "device_kind": device_kind,
    "capability": capability,
    "versions": versions(),
    "checks": checks,
    "failed": list(failed),
  }
  partial = target.with_name(target.name + ".partial")
  partial.write_text(json.dumps(record, indent=1) + "\n")
  os.replace(partial, target)
  return target


def passed(
  device_kind: str,
  capability: str | None,
  versions_: dict[str, str] | None = None,
  *,
  file: pathlib.Path | None = None,
) -> tuple[bool, str]:
  """Whether the kernels have passed on this machine, and why not.

  Args:
    device_kind: As JAX names the GPU.
    capability: Its compute capability, e.g. ``"10.0"``.
    versions_: What the record must agree with; `versions` if left out.
    file: Where the record lies, instead of `path`.
  """
  again = f"run {COMMAND} on it"
  try:
    record = _read(file or path(device_kind))
  except RuntimeError:  # no home directory
    record = None
  if record is None:
    return False, f"the kernels have not been proven on this machine: {again}"
  wanted = {"device_kind": device_kind, "capability": capability}
  for name, want in wanted.items():
    if record.get(name) != want:
      got = record.get(name)
      return False, f"bring_up passed for {name} {got}, not {want}: {again}"
  proven = record.get("versions") or {}
  for name, want in (versions_ or versions()).items():
    if proven.get(name) != want:
      return False, (
        f"bring_up ran with {name} {proven.get(name)}, now it is {want}: "
        f"{again} again"
      )
  if failed := record.get("failed", ["all"]):
    return False, f"bring_up failed on this machine: {', '.join(failed)}"
  if not record.get("checks"):
    return False, f"bring_up checked nothing: {again} again"
  return True, f"bring_up passed on this machine ({record['checks']} checks)"


def _read(file: pathlib.Path) -> dict[str, Any] | None:
  """A record, or None where there is none that can be read."""
  try:
    record = json.loads(file.read_text())
  except (OSError, ValueError):
    return None
  return record if isinstance(record, dict) else None
