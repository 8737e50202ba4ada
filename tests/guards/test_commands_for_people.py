"""Each command that is shown to a person is built by one function, which quotes its words."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ckptctl.cli.commands import COMMANDS

PACKAGE = Path(__file__).resolve().parent.parent.parent / "ckptctl"
BEGUN = re.compile(rf"\bckptctl ({'|'.join(COMMANDS)})\b[^`]*$")


def built_by_hand(source: str) -> Iterator[str]:
    """The expressions that put a command together without `command_line`."""
    tree = ast.parse(source)
    compared = {
        id(each)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for each in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) not in compared and _is_built(node):
            yield ast.unparse(node)


def _is_built(node: ast.AST) -> bool:
    if isinstance(node, ast.JoinedStr):
        pairs = zip(node.values, node.values[1:], strict=False)
        return any(isinstance(b, ast.FormattedValue) and _begins(a) for a, b in pairs)
    if isinstance(node, ast.BinOp):
        return _begins(node.left)
    if isinstance(node, ast.List | ast.Tuple):
        name, *words = (*node.elts, None)
        is_command = isinstance(words[0], ast.Starred) if words else False
        if words and isinstance(words[0], ast.Constant):
            is_command = words[0].value in COMMANDS
        return is_command and isinstance(name, ast.Constant) and name.value == "ckptctl"
    return False


def _begins(node: ast.AST) -> bool:
    """Whether a text ends within a command of ckptctl."""
    return (
        isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and BEGUN.search(node.value) is not None
    )


def test_commands_are_built_by_one_function():
    found = {
        name: by_hand
        for path in PACKAGE.rglob("*.py")
        if (name := path.relative_to(PACKAGE).as_posix()) not in ("formatting.py",)
        if (by_hand := [*built_by_hand(path.read_text())])
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        'f"ckptctl scan {url}"',
        'f"{what}; run ckptctl verify {url} --level content"',
        '"ckptctl scan " + url',
        'shlex.join(["ckptctl", "scan", url])',
        'shlex.join(["ckptctl", *words])',
    ],
)
def test_a_command_that_is_built_by_hand_is_found(source: str):
    assert [*built_by_hand(source)]


@pytest.mark.parametrize(
    "source", ['f"`ckptctl run` of {node}"', 'words == ["ckptctl", "scan", a]']
)
def test_what_is_no_command_is_not_found(source: str):
    assert not [*built_by_hand(source)]
