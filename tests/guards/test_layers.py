"""A module imports from its own floor or a lower one; and what may be imported where."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent.parent / "ckptctl"

# docs/architecture.md, "Packages and layers".
LAYERS = {
    "errors": 0,
    "model": 0,
    "options": 0,
    "findings": 0,
    "formatting": 0,
    "outside_numbers": 0,
    "redaction": 0,
    "signatures": 0,
    "starting": 0,
    "storage": 1,
    "distributed": 1,
    "formats": 2,
    "logs": 2,
    "records": 3,
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
HEAVY = (
    "torch",
    "numpy",
    "s3fs",
    "obstore",
    "fsspec",
    "zstandard",
    "rich",
    "jsonschema",
    "cryptography",
)
"""Never at the top of a module: imported inside the function that needs them."""

MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@cache
def tree_of(name: str) -> ast.Module:
    return ast.parse((PACKAGE / name).read_text())


@cache
def nodes_of(name: str) -> dict[type[ast.AST], list[ast.AST]]:
    """Every node of a module, by its kind."""
    found: dict[type[ast.AST], list[ast.AST]] = defaultdict(list)
    for node in ast.walk(tree_of(name)):
        found[type(node)].append(node)
    return found


def layer_of(name: str) -> str:
    return name.removesuffix(".py").split("/")[0]


def imports(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that these nodes import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def imports_of(name: str) -> list[tuple[int, str]]:
    nodes = nodes_of(name)
    return list(imports([*nodes[ast.Import], *nodes[ast.ImportFrom]]))


def imports_at_start(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """What is imported when the module is: not in functions, not for type checkers."""
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom, ast.Try, ast.With)):
            yield from imports(ast.walk(node))
        if isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
            yield from imports(ast.walk(node))


def imported(names: Iterable[str], *, forbidden: Callable[[str, str], bool]) -> list[str]:
    """Where one of the modules imports what `forbidden(module, imported name)` says it may not."""
    return [
        f"{name}:{line}: {found}"
        for name in names
        for line, found in imports_of(name)
        if forbidden(name, found)
    ]


def places(
    names: Iterable[str], kind: type[ast.AST], condition: Callable[[ast.AST], bool]
) -> list[str]:
    """Where one of the modules has a node of that kind for which the condition holds."""
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name in names
        for node in nodes_of(name)[kind]
        if condition(node)
    ]


def root_of(name: str) -> str:
    return name.split(".", maxsplit=1)[0]


def test_a_module_imports_from_its_own_floor_or_a_lower_one():
    def too_high(name: str, found: str) -> bool:
        if layer_of(name) == TOP or not found.startswith("ckptctl."):
            return False
        return LAYERS.get(found.split(".")[1], 0) > LAYERS[layer_of(name)]

    assert imported(MODULES, forbidden=too_high) == []


def test_every_module_has_a_floor():
    assert {layer_of(name) for name in MODULES} - {TOP} <= set(LAYERS)


def test_torch_stays_in_its_floors_and_numpy_out_of_the_package():
    allowed = {"torch": TORCH_ALLOWED, "numpy": ("train",), "click": ()}

    def outside(name: str, found: str) -> bool:
        return layer_of(name) not in allowed.get(root_of(found), (layer_of(name),))

    assert imported(MODULES, forbidden=outside) == []


def test_nothing_heavy_is_imported_at_the_start():
    heavy = [
        f"{name}:{line}: {found}"
        for name in MODULES
        if layer_of(name) not in TORCH_ALLOWED
        for line, found in imports_at_start(tree_of(name))
        if root_of(found) in HEAVY
    ]
    assert heavy == []


def test_only_one_module_draws_with_rich():
    others = [name for name in MODULES if name != "cli/console.py"]
    assert imported(others, forbidden=lambda _, found: root_of(found) == "rich") == []


def test_only_public_names_of_typer_are_used():
    # What typer documents for `cls=`, by which commands are imported late, and its tree.
    public = ("typer.core.TyperGroup", "typer.main.get_command")
    assert (
        imported(MODULES, forbidden=lambda _, f: f.startswith("typer.") and f not in public) == []
    )


def test_a_pure_check_reads_nothing():
    """These turn what was read into findings: they import no storage and open no file."""
    names = "coverage presence safetensors shape"
    checks = [f"inspection/{name}.py" for name in names.split()]
    assert places(checks, ast.Name, lambda node: node.id == "open") == []
    known = {"__future__", "ckptctl", *PURE}
    assert imported(checks, forbidden=lambda _, found: root_of(found) not in known) == []
    modules = [name.removesuffix(".py").replace("/", ".") for name in checks]
    code = "".join(f"import ckptctl.{name}\n" for name in modules) + "import sys\n"
    code += "print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in done.stdout.split() if name.startswith("ckptctl.storage")]


PURE = """
array bisect collections dataclasses functools itertools math operator re shlex typing
zlib_ng
""".split()  # noqa: SIM905


MAY_PRINT = ("cli/output.py", "cli/main.py", "supervisor/evidence.py", "train/ledger.py")


def test_only_one_module_prints():
    quiet = [name for name in MODULES if name not in MAY_PRINT]
    streams = {f"sys.{mark}{name}{mark}" for name in ("stdout", "stderr") for mark in ("", "__")}
    ends = {name.removeprefix("sys.") for name in streams}
    assert (
        places(
            quiet, ast.Attribute, lambda node: node.attr in ends and ast.unparse(node) in streams
        )
        == []
    )
    assert (
        places(
            quiet,
            ast.Call,
            lambda node: isinstance(node.func, ast.Name) and node.func.id == "print",
        )
        == []
    )


def test_an_address_in_a_command_is_quoted():
    """A root may have any name, and people paste what `next:` prints into a shell."""

    def bare(text: ast.JoinedStr) -> bool:
        first, *_ = text.values
        if not isinstance(first, ast.Constant) or not str(first.value).startswith("ckptctl "):
            return False
        return any(
            isinstance(part, ast.FormattedValue)
            and isinstance(part.value, ast.Attribute)
            and part.value.attr in ("url", "path", "root", "name")
            for part in text.values
        )

    assert places(MODULES, ast.JoinedStr, bare) == []


def test_an_error_about_an_option_has_its_name_as_data():
    """The command line puts the variable or the key in its place that has set the option."""

    def begins_with_an_option(call: ast.Call) -> bool:
        text = call.args[0] if call.args else None
        first = text.values[0] if isinstance(text, ast.JoinedStr) else text
        is_usage = isinstance(call.func, ast.Name) and call.func.id == "UsageError"
        return is_usage and isinstance(first, ast.Constant) and str(first.value).startswith("--")

    assert places(MODULES, ast.Call, begins_with_an_option) == []


def test_no_module_is_named_after_a_public_function_and_none_is_called_utils():
    library = {Path(name).stem for name in MODULES if layer_of(name) != "cli"}
    assert not library & {"scan", "verify", "pick", "show", "utils"}


def test_no_two_modules_of_the_tests_share_a_name():
    """Each is imported by its file's name alone: the second one of a name would be the first."""
    names = Counter(path.name for path in (PACKAGE.parent / "tests").rglob("*.py"))
    assert [name for name, n in names.items() if n > 1 and name != "conftest.py"] == []
