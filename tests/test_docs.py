"""The documentation works: its commands exist, its code runs, its links lead.

Python blocks of a page run from top to bottom in one namespace.
"""

import contextlib
import importlib.util
import io
import os
import pathlib
import re
import tomllib
import types

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

each_page = pytest.mark.parametrize(
  "page", [pytest.param(p, id=p.relative_to(ROOT).as_posix()) for p in PAGES]
)


def blocks(page: pathlib.Path, language: str) -> list[tuple[int, str]]:
  """Fenced blocks of one language: (line of the first code line, text)."""
  text = page.read_text()
  fence = re.compile(rf"^```{language}\n(.*?)^```$", re.DOTALL | re.MULTILINE)
  return [
    (text[: found.start(1)].count("\n") + 1, found.group(1))
    for found in fence.finditer(text)
  ]


def quick_start() -> list[str]:
  """The command lines of README's first shell block."""
  _, text = blocks(ROOT / "README.md", "bash")[0]
  return text.splitlines()


def test_the_quick_start_is_two_command_lines():
  readme = (ROOT / "README.md").read_text()
  section = readme.split("## Quick start\n")[1].split("\n## ")[0]
  assert section.count("```") == 2
  assert len(quick_start()) == 2


def test_each_quick_start_line_stands_alone():
  start = "python3 -m pip install -q uv && python3 -m uv run "
  assert all(line.startswith(start) for line in quick_start())


def test_the_first_line_runs_an_experiment_that_exists():
  config = re.search(r"python -m experiments\.run (\S+)$", quick_start()[0])
  assert config
  assert (ROOT / config.group(1)).is_file()


def test_the_second_line_runs_the_tests_with_what_they_need():
  line = quick_start()[1]
  assert re.search(r" pytest( |$)", line)
  config = tomllib.loads((ROOT / "pyproject.toml").read_text())
  extras = re.findall(r"--extra (\S+)", line)
  assert set(extras) <= set(config["project"]["optional-dependencies"])
  assert "aot" in extras, "the compile check needs ptxas and the CUDA plugin"
  assert "cuda" not in extras, "CUDA's libraries are gigabytes no test uses"
  assert set(re.findall(r"--group (\S+)", line)) == {"test"}


def test_ci_runs_the_line_of_the_readme():
  script = ROOT / ".ci" / "run"
  assert os.access(script, os.X_OK)
  assert "README.md" in script.read_text()


@each_page
def test_modules_named_in_commands_exist(page):
  ours = r"python3? -m ((?:experiments|mxmoe_jax|pallas_kernels)\.[\w.]+)"
  for name in set(re.findall(ours, page.read_text())):
    assert importlib.util.find_spec(name), f"{page.name}: python -m {name}"


@each_page
def test_links_lead_somewhere(page):
  for target in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
    if not re.match(r"https?:", target):
      assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(
  "page",
  [
    pytest.param(page, id=page.relative_to(ROOT).as_posix())
    for page in PAGES
    if blocks(page, "python")
  ],
)
def test_code_in_the_docs_runs(page):
  example = types.ModuleType(page.stem)
  printed = io.StringIO()
  for line, text in blocks(page, "python"):
    # Blank lines in front: a traceback then names the line of the page.
    code = compile("\n" * (line - 1) + text, str(page), "exec")
    with contextlib.redirect_stdout(printed):
      exec(code, vars(example))
  shown = "".join(text for _, text in blocks(page, "text"))
  assert printed.getvalue() == shown, f"{page.name} shows another output"
