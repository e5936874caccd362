"""Writes the exact pins of every dependency into pyproject.toml.

    python3 .ci/pin.py             keep the pins; add what is new
    python3 .ci/pin.py --upgrade   resolve everything anew
    python3 .ci/pin.py --check     change nothing; fail if the pins are stale

Pins live in ``[tool.uv]``: ``constraint-dependencies`` for what is installed
(every package of every extra and group, transitive ones too) and
``build-constraint-dependencies`` for the build backend. They name no registry,
which uv.lock would, so they are what git keeps and uv.lock is not.

Standard library only; uv must be importable (``python3 -m pip install uv``).
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import tomllib

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEGIN = "# pins: begin (written by .ci/pin.py)\n"
END = "# pins: end\n"


def uv(*args: str, cwd: pathlib.Path, stdin: str = "") -> list[str]:
  """Runs uv and returns the lines it printed; raises if it failed."""
  done = subprocess.run(
    [sys.executable, "-m", "uv", *args],
    cwd=cwd,
    input=stdin,
    stdout=subprocess.PIPE,
    text=True,
    check=True,
  )
  return [line for line in done.stdout.splitlines() if line.strip()]


def split(text: str) -> tuple[str, str, str]:
  """Cuts pyproject.toml into what is before, in and after the pin block."""
  before, rest = text.split(BEGIN)
  pins, after = rest.split(END)
  return before, pins, after


def toml_list(name: str, values: list[str]) -> str:
  """One TOML array of strings, one value a line."""
  return "\n".join([f"{name} = [", *(f'  "{v}",' for v in values), "]", ""])


def resolve(text: str) -> str:
  """The pin block for a pyproject.toml; its own pins are honoured."""
  plain = ["--quiet", "--no-header", "--no-annotate"]
  everything = ["--all-extras", "--all-groups", "--no-hashes"]
  with tempfile.TemporaryDirectory() as folder:
    root = pathlib.Path(folder)
    (root / "pyproject.toml").write_text(text)
    uv("lock", "--quiet", cwd=root)
    installed = uv(
      "export", "--frozen", "--no-emit-project", *plain, *everything, cwd=root
    )
    config = tomllib.loads(text)
    known = config["tool"]["uv"].get("build-constraint-dependencies", [])
    (root / "known.txt").write_text("\n".join(known))
    build = uv(
      *("pip", "compile", "-", "--universal", "--python-version=3.12"),
      *("--constraint=known.txt", *plain),
      cwd=root,
      stdin="\n".join(config["build-system"]["requires"]),
    )
  return toml_list("constraint-dependencies", installed) + toml_list(
    "build-constraint-dependencies", build
  )


def main() -> int:
  """Parses the command line and rewrites (or checks) the pin block."""
  parser = argparse.ArgumentParser(description="Pin every dependency.")
  choice = parser.add_mutually_exclusive_group()
  choice.add_argument("--upgrade", action="store_true", help="forget the pins")
  choice.add_argument("--check", action="store_true", help="write nothing")
  args = parser.parse_args()

  path = ROOT / "pyproject.toml"
  before, pins, after = split(path.read_text())
  kept = "" if args.upgrade else pins
  new = resolve(before + BEGIN + kept + END + after)
  if new == pins:
    print("pins: up to date")
    return 0
  if args.check:
    print("pins: stale; run `python3 .ci/pin.py` and commit pyproject.toml")
    return 1
  path.write_text(before + BEGIN + new + END + after)
  print(f"pins: wrote {new.count('==')} to {path.name}")
  return 0


if __name__ == "__main__":
  raise SystemExit(main())
