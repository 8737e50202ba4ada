"""No retired word names anything, and the names that scripts use are kept."""

from __future__ import annotations

import ast
import io
import re
import runpy
import tokenize
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

import ckptctl
import ckptctl.train
from ckptctl.cli.commands import COMMANDS, command_of, exit_codes
from ckptctl.cli.documents import DOCUMENTS
from ckptctl.cli.explain import schema
from ckptctl.loss.verdict import LossVerdict

REPOSITORY = Path(__file__).resolve().parent.parent.parent
SHAPE = runpy.run_path(str(REPOSITORY / "tools" / "shape.py"))


RETIRED_IN_PROSE = re.compile(
    rf"\b({'|'.join(sorted(SHAPE['retired_words']('prose'), key=len, reverse=True))})\b",
    re.IGNORECASE,
)
DOCUMENTS_IN_PROSE = sorted(
    path
    for name in ("ckptctl/pages", "docs", "runbooks", "examples", "*.md")
    for found in REPOSITORY.glob(name)
    for path in ([found] if found.is_file() else found.rglob("*.md"))
    if path.name != "glossary.md"
)
SOURCES = sorted(SHAPE["PACKAGE"].rglob("*.py"))
PROGRAMS = sorted(
    path
    for name in ("tests", "fixtures", "tools", "bench", "examples")
    for path in (REPOSITORY / name).rglob("*.py")
)
"""The Python files outside the package."""
A_PATTERN = re.compile(r"\\|\(\?|\[\^")
"""What a regular expression contains and a sentence does not."""
BETWEEN_WORDS = re.compile(r"""(?:["']\s+[bfru]*["']|\\n|[\s"'#\\])+""")
"""What may be between the words of a sentence in a source: new lines, and quotation marks."""
NAME = re.compile(r"[^\W\d]\w*")
QUESTION = re.compile(r"""^\s*[rR]?["']+\s*[^\n]*\?(?:[ "']|$)""", re.MULTILINE)


@cache
def source_of(path: Path) -> str:
    return path.read_text()


def parsed(
    paths: list[Path], may_hold: Callable[[str], object]
) -> Iterator[tuple[Path, ast.Module]]:
    """The files that may hold what is looked for: to parse and walk all takes ten seconds."""
    for path in paths:
        if may_hold(source_of(path)):
            yield path, ast.parse(source_of(path))


def may_use_a_retired_word(source: str) -> bool:
    return RETIRED_IN_PROSE.search(BETWEEN_WORDS.sub(" ", source)) is not None


def may_define_a_retired_name(source: str) -> bool:
    words = SHAPE["retired_words"]("names")
    return any(words & SHAPE["words_in"](name) for name in set(NAME.findall(source)))


def test_no_module_class_function_variable_or_code_has_a_retired_name() -> None:
    sources = SHAPE["sources"]()
    trees = {
        name: ast.parse(source if may_define_a_retired_name(source) else "")
        for name, source in sources.items()
    }
    assert SHAPE["retired"](trees) == []


def test_each_class_name_names_one_class() -> None:
    """Found by its name, and a key of the tables of `explain`, which have classes by name."""
    assert SHAPE["shared_class_names"](SHAPE["sources"]()) == []


def test_a_second_class_of_a_name_is_found_with_or_without_an_underscore() -> None:
    files = {
        "a": "class Row(NamedTuple):\n    pass\n",
        "b": "class Rows:\n    class _Row:\n        pass\n",
        "c": "class Row[T]:\n    pass\n",
        "d": '"""A\nclass Row of text."""\nRow = tuple[str, ...]\n',
    }
    assert SHAPE["shared_class_names"](files) == ["Row: a, b, c"]


def test_a_class_name_is_shared_by_intent_only_where_several_modules_have_it() -> None:
    text = "\n".join(SHAPE["sources"]().values())
    assert all(text.count(f"\nclass {name}(") > 1 for name in SHAPE["SHARED_BY_INTENT"])


@pytest.mark.parametrize(
    "source",
    [
        "def f() -> None:\n    pass  # it stands still",
        "# It ends without\n# a word.",
        'def f() -> None:\n    """It ends without\n    a word."""',
        'text = "it ends without "  "a word"',
        'text = "it ends without " f"a word, {name}"',
        'text = "it ends without\\na word"',
        'text = """it ends without\\\n a word"""',
    ],
)
def test_a_retired_word_is_found_wherever_it_is(source: str) -> None:
    path = REPOSITORY / "module.py"
    texts = prose_in(source, ast.parse(source))
    assert [found for text in texts for found in retired_in(path, text)]
    assert may_use_a_retired_word(source)


def test_a_retired_name_and_a_question_are_found() -> None:
    source = 'class TheCrew:\n    """Which ranks are left? All."""\n'
    assert SHAPE["retired"]({"module": ast.parse(source)}) == ["module.TheCrew"]
    assert may_define_a_retired_name(source)
    assert QUESTION.search(source)


def test_the_table_of_retired_words_is_read() -> None:
    assert {"look", "gate", "crew"} <= SHAPE["retired_words"]("names")
    assert "without a word" in SHAPE["retired_words"]("prose")
    assert RETIRED_IN_PROSE.search("It ends without words.") is None
    assert RETIRED_IN_PROSE.search("It ends Without a word.")


def test_no_option_has_a_retired_name() -> None:
    commands = {name: command_of(name) for name in COMMANDS}
    options = {name for one in commands.values() for each in one.params for name in each.opts}
    words = {word for name in options for word in SHAPE["words_in"](name)}
    assert not words & SHAPE["retired_words"]("names")
    assert "--weights-ok" not in options


def fields_in(part: object) -> Iterator[str]:
    """The names of all fields in a JSON Schema."""
    if isinstance(part, dict):
        yield from part.get("properties", ())
        for each in part.values():
            yield from fields_in(each)
    elif isinstance(part, list):
        for each in part:
            yield from fields_in(each)


def test_no_field_of_a_document_has_a_retired_name() -> None:
    retired = SHAPE["retired_words"]("names")
    fields = {name: set(fields_in(schema(name))) for name in DOCUMENTS}
    assert all(fields.values())
    assert [
        f"{name}: {field}"
        for name, found in fields.items()
        for field in found
        if retired & SHAPE["words_in"](field)
    ] == []


def retired_in(path: Path, text: str) -> Iterator[str]:
    """Each retired word in a text, with what is around it."""
    for match in RETIRED_IN_PROSE.finditer(text):
        around = text[max(0, match.start() - 40) : match.end() + 40]
        yield f"{path.relative_to(REPOSITORY)}: {match[0]!r} in {around!r}"


def test_no_document_uses_a_retired_word() -> None:
    assert [
        found
        for path in DOCUMENTS_IN_PROSE
        for found in retired_in(path, " ".join(path.read_text().split()))
    ] == []


def comments_in(source: str) -> str:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return " ".join(comments)


def docstrings_in(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def prose_in(source: str, tree: ast.Module) -> Iterator[str]:
    """Docstrings, messages and comments of a module, without patterns of logs."""
    yield comments_in(source)
    for node in ast.walk(tree):
        text = node.value if isinstance(node, ast.Constant) else None
        if isinstance(text, str) and text.count(" ") > 1 and not A_PATTERN.search(text):
            yield " ".join(text.split())


def test_no_docstring_message_or_comment_uses_a_retired_word() -> None:
    assert [
        found
        for path, tree in parsed(SOURCES, may_use_a_retired_word)
        for text in prose_in(source_of(path), tree)
        for found in retired_in(path, text)
    ] == []


def test_no_docstring_or_comment_of_a_program_uses_a_retired_word() -> None:
    assert [
        found
        for path, tree in parsed(PROGRAMS, may_use_a_retired_word)
        for text in (comments_in(source_of(path)), *docstrings_in(tree))
        for found in retired_in(path, " ".join(text.split()))
    ] == []


def test_no_docstring_begins_with_a_question() -> None:
    assert [
        f"{path}: {docstring}"
        for path, tree in parsed([*SOURCES, *PROGRAMS], QUESTION.search)
        for docstring in docstrings_in(tree)
        if re.search(r"\?( |$)", docstring.partition("\n")[0])
    ] == []


KEPT_COMMANDS = (
    "scan verify pick show seal reject accept pin reshard convert diff loss classify preflight"
    " runbook run cost prune doctor explain"
)
KEPT_OPTIONS = (
    "--level --keep --apply --unsealed --reason --json --jobs --resume-step --resume-report"
    " --strict --allow-fresh --accept-unverifiable --root --backoff --max-restarts --report"
    " --world-size --detailed-exitcode --require"
)
KEPT_EXIT_CODES = {
    0,
    1,
    2,
    3,
    10,
    11,
    20,
    21,
    22,
    23,
    24,
    25,
    26,
    27,
    28,
    29,
    30,
    31,
    32,
    75,
    77,
    93,
    94,
}


def test_what_scripts_type_keeps_its_name() -> None:
    commands = {name: command_of(name) for name in COMMANDS}
    assert set(KEPT_COMMANDS.split()) <= set(commands)
    options = {name for one in commands.values() for each in one.params for name in each.opts}
    assert set(KEPT_OPTIONS.split()) <= options
    assert set(exit_codes()) >= KEPT_EXIT_CODES
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
