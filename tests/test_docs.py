"""The documentation works: its commands exist, its code runs, its links lead.

Python blocks of a page run from top to bottom in one namespace, and what they
print is what the page's ``text`` blocks show. A block that cannot run here has
a line in front of it that says why:

    <!-- not run: needs a GPU -->

Command lines are read by the parsers of their own modules, without running.
"""

import argparse
from collections.abc import Sequence
import contextlib
import importlib
import importlib.util
import io
import os
import pathlib
import re
import shlex
import tomllib
import types

import jax
import pytest

from experiments import command as experiment_command

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

# Pages whose commands are checked, beside those.
READMES = sorted((ROOT / "experiments").rglob("README.md"))

LANGUAGES = {"", "bash", "python", "text"}  # "": a drawing
MOST_NOT_RUN = 3  # python blocks of all pages
FENCE = re.compile(
  r"(?:^<!-- not run: (?P<why>.+?) -->\n+)?"
  r"^```(?P<language>.*)\n(?P<code>(?:.*\n)*?)^```$",
  re.MULTILINE,
)
# Stand-ins for what a reader puts in.
MEANT = {"CONFIG.py": "experiments/configs/tiny_cpu.py", "N": "1"}


def each(pages):
  return pytest.mark.parametrize(
    "page", [pytest.param(p, id=p.relative_to(ROOT).as_posix()) for p in pages]
  )


each_page = each(PAGES)


def fences(page: pathlib.Path, language: str) -> list[tuple[int, str, str]]:
  """Fenced blocks of one language: line, text, and why it is not run if so."""
  text = page.read_text()
  return [
    (text[: f.start("code")].count("\n") + 1, f["code"], f["why"] or "")
    for f in FENCE.finditer(text)
    if f["language"] == language
  ]


def blocks(page: pathlib.Path, language: str) -> list[tuple[int, str]]:
  """Fenced blocks of one language: (line of the first code line, text)."""
  return [(line, text) for line, text, _ in fences(page, language)]


def commands(page: pathlib.Path) -> list[list[str]]:
  """The words after ``python -m`` of each of our commands on a page.

  Lines of shell blocks, indented lines, and spans between backticks.
  """
  text = page.read_text()
  lines = "".join(code for _, code in blocks(page, "bash")).split("\n")
  prose = FENCE.sub("", text)
  lines += re.findall(r"^ {4}(.*)$", prose, re.MULTILINE)
  lines += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose)]
  found = []
  for line in lines:
    ours = r"python3? -m ((?:experiments|mxmoe_jax|pallas_kernels)[\w.]*.*)"
    for words in re.findall(ours, line):
      first, *_ = re.split(r" (?:&&|\||>) ", words)
      found.append(shlex.split(first, comments=True))
  return found


class ParsedError(Exception):
  """A command line was read; nothing of the command has run."""


def read_command(words: Sequence[str], monkeypatch) -> None:
  """Lets a module's own parser read a command line.

  Raises:
    SystemExit: The parser refuses it.
    Failed: The module has no parser that reads arguments.
  """
  module, *arguments = (MEANT.get(word, word) for word in words)
  main = importlib.import_module(module)
  if not arguments:
    return
  if module == "experiments.run":
    experiment_command.parse(arguments)
    return
  parse = argparse.ArgumentParser.parse_args

  def parse_alone(parser, args=None, namespace=None):
    parse(parser, args, namespace)
    raise ParsedError

  with monkeypatch.context() as patch:
    patch.setattr(argparse.ArgumentParser, "parse_args", parse_alone)
    with pytest.raises(ParsedError):
      main.main(arguments)


def headings(page: pathlib.Path) -> set[str]:
  """The anchors of a page's headings, as GitHub makes them."""
  prose = FENCE.sub("", page.read_text())
  found = re.findall(r"^#+ (.+)$", prose, re.MULTILINE)
  return {
    re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
    for heading in found
  }


def links(page: pathlib.Path) -> list[str]:
  """Targets of a page's links to files, anchors included."""
  found = re.findall(r"\]\(([^)\s]+)", FENCE.sub("", page.read_text()))
  return [target for target in found if not re.match(r"https?:", target)]


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


@each([*PAGES, *READMES])
def test_commands_are_read_by_their_modules(page, monkeypatch, capsys):
  for words in commands(page):
    assert importlib.util.find_spec(words[0]), f"{page.name}: {words[0]}"
    try:
      read_command(words, monkeypatch)
    except SystemExit as end:  # --help ends with 0
      if end.code:
        pytest.fail(f"{page.name}: {words}\n{capsys.readouterr().err}")


def test_a_wrong_command_is_noticed(monkeypatch):
  wrong: tuple[str, ...] = (
    "pallas_kernels.aot --target b200 --fast",
    "experiments.bench quantise",
    "experiments.run CONFIG.py --model.experts 4",
  )
  for line in wrong:
    with pytest.raises(SystemExit, match="2"):
      read_command(line.split(), monkeypatch)
  with pytest.raises(pytest.fail.Exception, match="ParsedError"):
    read_command(["experiments.exchange_model", "--markdown"], monkeypatch)


@each_page
def test_files_named_on_a_page_exist(page):
  folders = "docs|experiments|mxmoe_jax|pallas_kernels|tests"
  named = rf"(?<![\w/.])(?:{folders})/[\w/]+\.(?:py|md|json|txtpb)\b"
  for name in set(re.findall(named, page.read_text())):
    assert (ROOT / name).is_file(), f"{page.name}: {name}"


@each_page
def test_links_lead_somewhere(page):
  for link in links(page):
    target, _, anchor = link.partition("#")
    other = page.parent / target if target else page
    assert other.exists(), f"{page.name}: {link}"
    if anchor:
      assert anchor in headings(other), f"{page.name}: {link}"


def test_every_page_can_be_reached_from_the_readme():
  reached, todo = set(), [ROOT / "README.md"]
  while todo:
    page = todo.pop().resolve()
    if page.suffix == ".md" and page not in reached:
      reached.add(page)
      todo += [page.parent / link.partition("#")[0] for link in links(page)]
  assert set(PAGES) <= reached


def test_the_index_of_kernels_names_every_kernel():
  index = ROOT / "docs" / "kernels" / "README.md"
  linked = {(index.parent / link).resolve() for link in links(index)}
  kernels = {
    path
    for path in (ROOT / "pallas_kernels").rglob("*.py")
    if re.search(r"^def variants\(", path.read_text(), re.MULTILINE)
  }
  assert kernels
  assert kernels <= linked


@each_page
def test_blocks_are_marked_as_what_they_are(page):
  marks = {fence["language"] for fence in FENCE.finditer(page.read_text())}
  assert marks <= LANGUAGES


def test_few_blocks_are_not_run_and_say_why():
  skipped = [why for p in PAGES for _, _, why in fences(p, "python") if why]
  assert len(skipped) <= MOST_NOT_RUN
  assert all(why.startswith("needs ") for why in skipped)


@pytest.fixture
def quick_compilation():
  """XLA without most optimizations: pages compile a lot and compute little."""
  name = "jax_disable_most_optimizations"
  before = jax.config.values[name]
  jax.config.update(name, True)
  yield
  jax.config.update(name, before)


@pytest.mark.usefixtures("quick_compilation")
@each([page for page in PAGES if blocks(page, "python")])
def test_code_in_the_docs_runs(page):
  example = types.ModuleType(page.stem)
  printed = io.StringIO()
  for line, text, not_run in fences(page, "python"):
    # Blank lines in front: a traceback then names the line of the page.
    code = compile("\n" * (line - 1) + text, str(page), "exec")
    if not_run:
      continue
    with contextlib.redirect_stdout(printed):
      exec(code, vars(example))
  shown = "".join(text for _, text in blocks(page, "text"))
  assert printed.getvalue() == shown, f"{page.name} shows another output"
