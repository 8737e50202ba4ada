"""No retired word names anything, and the names that scripts use are kept."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest
from typer.main import get_command

import ckptctl
import ckptctl.train
from ckptctl.cli.app import build_app
from ckptctl.cli.commands import COMMANDS
from ckptctl.cli.exit_codes import EXIT_CODES
from ckptctl.cli.output import Output
from ckptctl.loss.verdict import LossVerdict

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SHAPE = runpy.run_path(str(REPOSITORY / "tools" / "shape.py"))
MODULES = SHAPE["modules"]()

RETIRED_IN_PROSE = re.compile(
    r"\b(looked at|looker|crews?|speakers|needles|tainted|legs?|boxes)\b", re.IGNORECASE
)
PROSE = sorted(
    path for folder in ("ckptctl/pages",) for path in (REPOSITORY / folder).rglob("*.md")
)


def test_no_module_class_function_or_code_has_a_retired_name() -> None:
    assert SHAPE["retired"](MODULES) == []


def test_no_option_has_a_retired_name() -> None:
    commands = get_command(build_app(COMMANDS, Output())).commands
    options = {name for one in commands.values() for each in one.params for name in each.opts}
    words = {word for name in options for word in name.strip("-").split("-")}
    assert not words & SHAPE["RETIRED_NAMES"]
    assert "--weights-ok" not in options


@pytest.mark.parametrize("path", PROSE, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_no_page_uses_a_retired_word(path: Path) -> None:
    found = [
        f"line {number}: {match[0]}"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in RETIRED_IN_PROSE.finditer(line)
    ]
    assert found == []


def test_no_docstring_begins_with_a_question() -> None:
    asking = []
    for module, tree in MODULES.items():
        nodes = [tree, *(node for node in ast.walk(tree) if isinstance(node, DOCUMENTED))]
        for node in nodes:
            first = (ast.get_docstring(node) or "").partition("\n")[0]
            if first.endswith("?"):
                asking.append(f"{module}: {first}")
    assert asking == []


DOCUMENTED = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

KEPT_COMMANDS = (
    "scan verify pick show seal reject accept pin reshard convert diff loss classify preflight"
    " runbook run cost prune doctor explain"
)
KEPT_OPTIONS = (
    "--level --keep --apply --unsealed --reason --json --jobs --resume-step --resume-report"
    " --strict --allow-fresh --accept-unverifiable --root --backoff --max-restarts --report"
    " --world-size --detailed-exitcode --require"
)
KEPT_EXIT_CODES = {0, 1, 2, 3, 10, 11, 20, 21, 22, 23, 24, 25, 26, 27, 28, 30, 31, 32, 75, 77, 93}


def test_what_scripts_type_keeps_its_name() -> None:
    commands = get_command(build_app(COMMANDS, Output())).commands
    assert set(KEPT_COMMANDS.split()) <= set(commands)
    options = {name for one in commands.values() for each in one.params for name in each.opts}
    assert set(KEPT_OPTIONS.split()) <= options
    assert set(EXIT_CODES) >= KEPT_EXIT_CODES
    assert (REPOSITORY / "runbooks" / "rb-7.md").is_file()


def test_what_training_scripts_call_keeps_its_name() -> None:
    import inspect

    from ckptctl.train import Checkpointer, Reader, resolve

    parameters = inspect.signature(Checkpointer).parameters
    assert {"root", "model", "optimizer", "scheduler", "dataloader", "keep"} <= set(parameters)
    for name in ("resume", "save", "note"):
        assert callable(getattr(Checkpointer, name))
    assert {"step", "tokens", "loss"} <= set(inspect.signature(Checkpointer.save).parameters)
    assert callable(Reader)
    assert callable(resolve)
    assert {"pick", "verify", "scan", "seal", "mark", "check_loss"} <= set(ckptctl.__all__)


def test_the_verdicts_of_a_loss_keep_their_words() -> None:
    values = {verdict.value for verdict in LossVerdict}
    assert values == {"continuous", "no-jump", "discontinuous", "suspect", "inconclusive"}
