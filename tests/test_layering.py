"""Who may import whom, and what importing may do. Everything is read from the source, nothing from the code."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"delta": ROOT / "delta", "store": ROOT / "store", "engines": ROOT / "engines"}
TOP = ROOT / "src" / "deltacast"
MAY_IMPORT = {
    "delta": {"delta"},
    "store": {"delta", "store"},
    "engines": {"delta", "store", "engines"},
}
LONGEST_FUNCTION = 60
NEEDS_VLLM = {ROOT / "engines" / "vllm" / name for name in ("engine.py", "trainer.py")}  # tests/integration has them
BANNED_STEMS = {"utils", "util", "common", "misc", "helpers", "helper"}

pytestmark = pytest.mark.skipif(not PACKAGES["delta"].is_dir(), reason="not a checkout")


def _modules() -> list[Path]:
    files = [path for folder in PACKAGES.values() for path in folder.rglob("*.py")]
    own = [path for path in TOP.rglob("*.py") if path.relative_to(TOP).parts[0] not in PACKAGES]
    return sorted(files + own)


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


MODULES = pytest.mark.parametrize("path", _modules(), ids=_name)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), _name(path))


def _imported(path: Path) -> Iterator[str]:
    """Full dotted names that a module imports anywhere, in functions and under TYPE_CHECKING too."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{_name(path)}:{node.lineno} imports relatively"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


def _package(path: Path) -> str | None:
    return next((name for name, folder in PACKAGES.items() if folder in path.parents), None)


def test_there_is_something_to_check() -> None:
    """All three folders and the top package are found."""
    assert {_package(path) for path in _modules()} == {"delta", "store", "engines", None}


@MODULES
def test_dependencies_run_one_way(path: Path) -> None:
    """Delta imports only itself, store also delta, engines both; none of them the command line or the facade."""
    package = _package(path)
    if package is None:
        return
    for name in _imported(path):
        if name.split(".")[0] == "deltacast":
            assert name.split(".")[1] in MAY_IMPORT[package], f"{_name(path)} imports {name}"


@MODULES
def test_no_module_imports_a_bare_folder_name(path: Path) -> None:
    """`import delta` would find another package, or load ours a second time."""
    assert {name.split(".")[0] for name in _imported(path)}.isdisjoint(PACKAGES), _name(path)


@MODULES
def test_torch_distributed_stays_under_engines(path: Path) -> None:
    """Only engines imports or spells torch.distributed."""
    if _package(path) == "engines":
        return
    used = {name for name in _imported(path) if name.startswith("torch.distributed")}
    used |= {ast.unparse(n) for n in ast.walk(_tree(path)) if isinstance(n, ast.Attribute)} & {"torch.distributed"}
    assert not used, _name(path)


@MODULES
def test_no_module_has_a_name_that_says_nothing(path: Path) -> None:
    """utils, common, misc and helpers are where things go that have no place."""
    assert path.stem.strip("_") not in BANNED_STEMS


def _listed(tree: ast.Module) -> set[object]:
    """The names in `__all__`."""
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    values = [node.value for node in assigned if ast.unparse(node.targets[0]) == "__all__"]
    return {ast.literal_eval(element) for value in values if isinstance(value, ast.List) for element in value.elts}


@MODULES
def test_public_names_are_listed_and_have_docstrings(path: Path) -> None:
    """Every function and class in `__all__`, and each public method, says what it does; every module, what it holds."""
    tree = _tree(path)
    assert ast.get_docstring(tree), _name(path)
    listed = _listed(tree)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name in listed:
            assert ast.get_docstring(node), f"{_name(path)}: {node.name}"
            for inner in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef) and not inner.name.startswith("_"):
                    assert ast.get_docstring(inner), f"{_name(path)}: {node.name}.{inner.name}"


@MODULES
def test_no_function_is_longer_than_a_screen(path: Path) -> None:
    """A hard bound; most are far shorter."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{_name(path)}:{node.lineno} {node.name} has {length} lines"


@pytest.mark.parametrize("name", PACKAGES)
def test_the_links_are_relative_links(name: str) -> None:
    """src/deltacast holds links to the folders, so editable installs and type checkers see one copy."""
    link = TOP / name
    assert link.is_symlink()
    assert str(link.readlink()) == f"../../{name}"
    assert link.resolve() == PACKAGES[name]


def _run(code: str, folder: Path) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    done = subprocess.run(
        [sys.executable, "-P", "-W", "error", "-c", code],
        capture_output=True, text=True, timeout=60, check=False, cwd=folder, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_deltacast_is_cheap_and_does_nothing(tmp_path: Path) -> None:
    """No torch, no numpy, no thread, no output, no file, no environment variable, no handler, no random state."""
    code = """
import logging, os, random, sys, threading
before = dict(os.environ), random.getstate(), threading.active_count(), logging.root.handlers[:], logging.root.level
import deltacast
assert before == (
    dict(os.environ), random.getstate(), threading.active_count(), logging.root.handlers[:], logging.root.level
)
print(sorted({"torch", "numpy", "typer", "rich", "safetensors"} & set(sys.modules)), os.listdir())
"""
    assert _run(code, tmp_path) == "[] []"


def test_importing_every_library_module_touches_nothing(tmp_path: Path) -> None:
    """Seeds, default dtype, thread counts, process groups, signals and the folder stay as torch alone leaves them."""
    names = [
        ".".join(("deltacast", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")
        for path in _modules()
        if _package(path) is not None and path not in NEEDS_VLLM
    ]
    code = f"""
import importlib, os, signal, sys, threading
import numpy, torch, torch.distributed
def seen():
    return (
        dict(os.environ), torch.initial_seed(), torch.get_rng_state().tolist(), torch.get_default_dtype(),
        torch.get_num_threads(), torch.is_grad_enabled(), torch.distributed.is_initialized(),
        threading.active_count(), signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM),
        str(numpy.random.get_state()), str(numpy.geterr()), sys.path[:], os.listdir(),
    )
before = seen()
for name in {names!r}:
    importlib.import_module(name)
assert seen() == before
print(len(os.listdir()))
"""
    assert _run(code, tmp_path) == "0"


def test_names_of_the_facade_are_what_their_modules_hold(tmp_path: Path) -> None:
    """Every name in `deltacast.__all__` resolves; an unknown one is an AttributeError that says so."""
    code = """
import deltacast
for name in deltacast.__all__:
    assert getattr(deltacast, name) is not None, name
try:
    deltacast.nothing
except AttributeError as err:
    print(err)
"""
    assert _run(code, tmp_path) == "module 'deltacast' has no attribute 'nothing'"
