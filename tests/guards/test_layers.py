"""A module imports from its own floor or a lower one; and what may be imported where."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent.parent / "ckptctl"

# docs/architecture.md, "Packages and layers".
LAYERS = {
    "errors": 0,
    "model": 0,
    "options": 0,
    "findings": 0,
    "formatting": 0,
    "data_classes": 0,
    "html_page": 0,
    "storage": 1,
    "distributed": 1,
    "formats": 2,
    "records": 3,
    "checks": 4,
    "inspection": 5,
    "loss": 5,
    "failures": 5,
    "selection": 6,
    "resharding": 7,
    "preflight_checks": 8,
    "diagnostics": 8,
    "supervisor": 8,
    "goodput": 8,
    "train": 8,
    "integrations": 9,
    "runbook": 9,
    "drill": 10,
    "rerun": 10,
    "cli": 11,
    "__main__": 11,
}
# The public names are asked for by name from every floor, and fetched when they are asked for.
TOP = "__init__"

TORCH_ALLOWED = ("distributed", "train")
HEAVY = ("torch", "numpy", "s3fs", "obstore", "fsspec", "zstandard", "rich", "jsonschema", "PIL")
"""Never at the top of a module: imported inside the function that needs them."""

MODULES = sorted(PACKAGE.rglob("*.py"))


def layer_of(name: str) -> str:
    return name.removesuffix(".py").split("/")[0]


def imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported anywhere in a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def imports_at_start(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What is imported when the module is: not in functions, not for type checkers."""
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield from imports(node)
        if isinstance(node, (ast.Try, ast.With)):
            yield from imports(node)
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from imports(node)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_from_its_own_floor_or_a_lower_one(path):
    own = layer_of(path.relative_to(PACKAGE).as_posix())
    if own == TOP:
        return
    too_high = [
        f"line {line}: {name}"
        for line, name in imports(ast.parse(path.read_text()))
        if name.startswith("ckptctl.")
        and (floor := name.split(".")[1]) in LAYERS
        and LAYERS[floor] > LAYERS[own]
    ]
    assert too_high == []


def test_every_module_has_a_floor():
    there = {layer_of(path.relative_to(PACKAGE).as_posix()) for path in MODULES}
    assert there - {TOP} <= set(LAYERS)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_torch_stays_in_its_floors_and_numpy_out_of_the_package(path):
    own = layer_of(path.relative_to(PACKAGE).as_posix())
    roots = {name.split(".")[0] for _, name in imports(ast.parse(path.read_text()))}
    assert "numpy" not in roots or own == "train"
    assert "torch" not in roots or own in TORCH_ALLOWED
    assert "rich" not in roots
    assert "click" not in roots


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_heavy_is_imported_at_the_start(path):
    if layer_of(path.relative_to(PACKAGE).as_posix()) in TORCH_ALLOWED:
        return
    tree = ast.parse(path.read_text())
    heavy = [name for _, name in imports_at_start(tree) if name.split(".")[0] in HEAVY]
    assert heavy == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_public_names_of_typer_are_used(path):
    names = [name for _, name in imports(ast.parse(path.read_text()))]
    assert not [name for name in names if name.startswith("typer.")]


CHECKS = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] == "checks"]


@pytest.mark.parametrize("path", CHECKS, ids=lambda path: path.name)
def test_a_check_reads_nothing(path):
    """Checks turn what was read into findings: they import no storage and open no file."""
    tree = ast.parse(path.read_text())
    opens = [
        f"line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "open"
    ]
    roots = {name.split(".")[0] for _, name in imports(tree)}
    assert opens == []
    assert roots <= {"__future__", "ckptctl", *PURE}
    code = f"import ckptctl.checks.{path.stem}, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if name.startswith("ckptctl.storage")]


PURE = """
array bisect collections dataclasses functools itertools math operator re shlex typing
zlib_ng
""".split()  # noqa: SIM905


MAY_PRINT = ("cli/output.py", "cli/main.py", "train/ledger.py")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_one_module_prints(path):
    if path.relative_to(PACKAGE).as_posix() in MAY_PRINT:
        return
    tree = ast.parse(path.read_text())
    streams = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and node.attr in ("stdout", "stderr", "__stdout__", "__stderr__")
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    ]
    prints = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert streams + prints == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_an_address_in_a_command_is_quoted(path):
    """A root may have any name, and people paste what `next:` prints into a shell."""
    bare = [
        f"line {text.lineno}: {ast.unparse(part.value)}"
        for text in ast.walk(ast.parse(path.read_text()))
        if isinstance(text, ast.JoinedStr)
        and isinstance(text.values[0], ast.Constant)
        and str(text.values[0].value).startswith("ckptctl ")
        for part in text.values
        if isinstance(part, ast.FormattedValue)
        and isinstance(part.value, ast.Attribute)
        and part.value.attr in ("url", "path", "root", "name")
    ]
    assert bare == []


def test_no_module_is_named_after_a_public_function_and_none_is_called_utils():
    public = {"scan", "verify", "pick", "show"}
    library = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] != "cli"]
    assert not {path.stem for path in library} & (public | {"utils"})


def test_no_two_test_modules_share_a_name():
    """pytest imports each by its file's name alone: the second one of a name is an error."""
    names = Counter(path.name for path in (PACKAGE.parent / "tests").rglob("test_*.py"))
    assert [name for name, n in names.items() if n > 1] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_data_classes_are_those_of_the_package(path):
    """Those of the standard library take ten times as long to define."""
    if path.name == "data_classes.py":
        return
    found = [
        alias.name
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "dataclasses"
        for alias in node.names
    ]
    assert not {"dataclass", "field", "replace"} & {*found}
