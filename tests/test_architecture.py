"""The rules that keep the tree readable: who imports whom, and how long."""

import ast
import functools
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PACKAGES = ("pallas_kernels", "mxmoe_jax")

# What each top-level package may import besides Python's standard library.
MAY_IMPORT = {
  "pallas_kernels": {"jax", "numpy", "pallas_kernels"},
  "mxmoe_jax": {
    *("jax", "flax", "optax", "chex", "numpy"),
    *("pallas_kernels", "mxmoe_jax"),
  },
}

# The data flow of the layer, which is the import order and the reading order: a
# module imports only modules to its left. A new module is added at its place.
READING_ORDER = (
  *("config", "sharding", "mosaic_ops", "backend", "operands", "matmul"),
  *("routing", "permute", "exchange", "stage", "weights", "experts"),
  *("residuals", "arguments", "layer", "debug", "module", "explaining"),
  "__init__",
)

MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60  # without the docstring
MAX_DEF_DEPTH = 3

# The one module of the packages that may read environment variables.
READS_ENVIRONMENT = "mxmoe_jax/backend.py"


@functools.cache
def tracked() -> tuple[pathlib.Path, ...]:
  """Every file of the repository: known to git, or new and not ignored."""
  listed = subprocess.run(
    ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  paths = (ROOT / line for line in listed.stdout.splitlines())
  return tuple(sorted(path for path in paths if path.is_file()))


def python_files(*folders: str) -> list[pathlib.Path]:
  """The Python files under some top-level folders, or all of them."""
  return [
    path
    for path in tracked()
    if path.suffix == ".py"
    and (not folders or path.relative_to(ROOT).parts[0] in folders)
  ]


@functools.cache
def tree_of(path: pathlib.Path) -> ast.Module:
  return ast.parse(path.read_text(), filename=str(path))


def name_of(path: pathlib.Path) -> str:
  return path.relative_to(ROOT).as_posix()


def module_of(path: pathlib.Path) -> str:
  parts = path.relative_to(ROOT).with_suffix("").parts
  return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: pathlib.Path) -> set[str]:
  """Dotted names a file imports; `from a import b` counts as a.b and a."""
  found = set()
  for node in ast.walk(tree_of(path)):
    if isinstance(node, ast.Import):
      found |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert not node.level, f"{name_of(path)}:{node.lineno} relative import"
      found.add(node.module)
      found |= {f"{node.module}.{alias.name}" for alias in node.names}
  return found


def modules_imported(path: pathlib.Path, known: set[str]) -> set[str]:
  """The modules of `known` that a file imports, the most specific names."""
  hits = imports_of(path) & known
  return {
    hit for hit in hits if not any(o.startswith(f"{hit}.") for o in hits)
  } - {module_of(path)}


def functions(tree: ast.AST, depth: int = 1):
  """Yields (def, how deep in other defs it stands), outermost first."""
  for node in ast.iter_child_nodes(tree):
    is_def = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if is_def:
      yield node, depth
    yield from functions(node, depth + is_def)


def code_lines(node: ast.FunctionDef) -> int:
  """Lines of a function from its `def` on, its docstring not counted."""
  lines = node.end_lineno - node.lineno + 1
  if ast.get_docstring(node) is not None:
    text = node.body[0]
    lines -= text.end_lineno - text.lineno + 1
  return lines


def each_file(*folders: str):
  return pytest.mark.parametrize(
    "path", [pytest.param(p, id=name_of(p)) for p in python_files(*folders)]
  )


@each_file(*PACKAGES)
def test_imports_only_what_its_package_may(path):
  allowed = MAY_IMPORT[path.relative_to(ROOT).parts[0]]
  top = {name.split(".")[0] for name in imports_of(path)}
  assert top - allowed - sys.stdlib_module_names == set()


@each_file("experiments")
def test_experiments_do_not_import_tests(path):
  assert "tests" not in {name.split(".")[0] for name in imports_of(path)}


def test_the_packages_hold_modules():
  for package in PACKAGES:
    assert len(python_files(package)) > 1, package
    assert (ROOT / package / "py.typed").is_file()


@each_file("mxmoe_jax")
def test_modules_import_only_what_stands_above_them(path):
  names = [
    "mxmoe_jax" if name == "__init__" else f"mxmoe_jax.{name}"
    for name in READING_ORDER
  ]
  assert module_of(path) in names, (
    f"{name_of(path)} has no place in READING_ORDER; add it where it belongs"
  )
  above = names[: names.index(module_of(path))]
  assert modules_imported(path, set(names)) <= set(above)


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_have_no_cycle(package):
  paths = {module_of(path): path for path in python_files(package)}
  waiting = {
    name: modules_imported(path, set(paths)) for name, path in paths.items()
  }
  while free := {name for name, needs in waiting.items() if not needs}:
    waiting = {
      name: needs - free for name, needs in waiting.items() if name not in free
    }
  assert waiting == {}


@each_file()
def test_files_are_short(path):
  lines = path.read_text().count("\n")
  assert lines <= MAX_FILE_LINES


@each_file()
def test_functions_are_short(path):
  long = {
    node.name: code_lines(node)
    for node, _ in functions(tree_of(path))
    if code_lines(node) > MAX_FUNCTION_LINES
  }
  assert long == {}


@each_file()
def test_defs_are_not_nested_deep(path):
  deep = {
    node.name: depth
    for node, depth in functions(tree_of(path))
    if depth > MAX_DEF_DEPTH
  }
  assert deep == {}


# In tests, ruff's BLE001 lets one through only where a comment says why.
@each_file(*PACKAGES, "experiments")
def test_no_except_catches_everything(path):
  broad = {"Exception", "BaseException"}
  for node in ast.walk(tree_of(path)):
    if isinstance(node, ast.ExceptHandler):
      assert node.type is not None, f"bare except at line {node.lineno}"
      caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
      assert not caught & broad, f"broad except at line {node.lineno}"


@each_file(*PACKAGES)
def test_environment_is_read_in_one_module(path):
  if name_of(path) == READS_ENVIRONMENT:
    return
  tree = tree_of(path)
  # Setting a variable that jax or XLA reads is no reading: these are allowed.
  written = {
    id(node.value)
    for node in ast.walk(tree)
    if isinstance(node, ast.Subscript)
    and isinstance(node.ctx, ast.Store | ast.Del)
  }
  reads = [
    node.lineno
    for node in ast.walk(tree)
    if isinstance(node, ast.Attribute)
    and node.attr in ("environ", "environb", "getenv", "getenvb")
    and id(node) not in written
  ]
  assert reads == [], f"read it in {READS_ENVIRONMENT} and pass the value"
  assert not imports_of(path) & {"os.environ", "os.getenv"}


@each_file(*PACKAGES)
def test_public_names_have_docstrings(path):
  tree = tree_of(path)
  assert ast.get_docstring(tree), "the module has no docstring"
  scopes = [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef))]
  bare = [
    node.name
    for scope in scopes
    for node in scope.body
    if isinstance(node, ast.FunctionDef | ast.ClassDef)
    and not node.name.startswith("_")
    and not (ast.get_docstring(node))
  ]
  assert bare == []


def test_no_file_names_a_machine_or_a_registry():
  folders = "|".join(("work", "tmp", "root", "home"))
  registries = "|".join(("pypi" + r"\.org", "python" + "hosted", "npm" + "js"))
  forbidden = re.compile(rf"(?<![\w./\-])/(?:{folders})(?![\w\-])|{registries}")
  found = {}
  for path in tracked():
    raw = path.read_bytes()
    if b"\0" not in raw:  # a picture names nothing
      hits = {hit.group() for hit in forbidden.finditer(raw.decode())}
      found |= {name_of(path): hits} if hits else {}
  assert found == {}


class TestPackaging:
  """What is installed, and that every version of it is exact."""

  @pytest.fixture
  def config(self):
    return tomllib.loads((ROOT / "pyproject.toml").read_text())

  def test_the_wheel_holds_the_two_packages_only(self, config):
    wheel = config["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert set(wheel) == {"packages"}
    assert sorted(wheel["packages"]) == sorted(PACKAGES)

  def test_every_requirement_has_one_exact_pin(self, config):
    project = config["project"]
    wanted = [
      *project["dependencies"],
      *(r for e in project["optional-dependencies"].values() for r in e),
      *(
        r
        for group in config["dependency-groups"].values()
        for r in group
        if isinstance(r, str)
      ),
    ]
    pins = config["tool"]["uv"]["constraint-dependencies"]
    names = [pin.split("==")[0] for pin in pins]
    assert all(re.match(r"[\w.\-]+==[\w.]+( ; |$)", pin) for pin in pins)
    assert len(names) == len(set(names))
    assert {re.match(r"[\w.\-]+", r).group() for r in wanted} <= set(names)

  def test_no_lock_file_is_kept(self):
    assert "uv.lock" not in {path.name for path in tracked()}
    assert "uv.lock" in (ROOT / ".gitignore").read_text().split()
