"""Bring the tables of the documents up to date with the program.

    python tools/reference.py              # write the tables
    python tools/reference.py --modules    # print every module with the first line of its docstring

Commands, options, exit codes and findings are written from the program itself, between the marks
`<!-- NAME -->` and `<!-- end -->` of `docs/reference.md` and `docs/findings/README.md`; the words
around them are written by hand. Tests run this and compare.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ckptctl.cli.commands import (
    COMMANDS,
    SUMMARIES,
    command_of,
    default_of,
    exit_codes,
    load,
    value_of,
)
from ckptctl.findings import CODES
from ckptctl.loss.verdict import FORCES

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = REPOSITORY / "ckptctl"
PAGES = (REPOSITORY / "docs" / "reference.md", REPOSITORY / "docs" / "findings" / "README.md")
_BLOCK = re.compile(r"(<!-- (?P<name>(?!end )[a-z -]+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def main() -> int:
    """Rewrite the pages, or print the modules."""
    if "--modules" in sys.argv[1:]:
        print("\n".join(_modules()))
        return 0
    for page in PAGES:
        page.write_text(renewed(page.read_text()))
    return 0


def renewed(text: str) -> str:
    """The page with every block between marks written anew."""
    return _BLOCK.sub(lambda match: match[1] + _block(match["name"]), text)


def _block(name: str) -> str:
    what, _, command = name.partition(" ")
    writers: dict[str, Callable[[str], Iterator[str]]] = {
        "commands": lambda _: _commands(),
        "command": _command,
        "arguments": lambda _: _shared_arguments(),
        "common": lambda _: _rows(_options(COMMANDS[0], common=True)),
        "several": lambda _: iter(_several()),
        "exit": lambda _: _exit_codes(),
        "findings": lambda _: _findings(),
    }
    return "".join(f"{line}\n" for line in writers[what](command))


@cache
def _shared() -> set[str]:
    each = [{p.name for p in command_of(name).params} for name in COMMANDS if name != "explain"]
    return set.intersection(*each) - {"pattern"}


def _options(command: str, *, common: bool) -> list[Any]:
    shared = _shared()
    options = [p for p in command_of(command).params if p.param_type_name == "option"]
    return [option for option in options if (option.name in shared) is common]


def _commands() -> Iterator[str]:
    for heading, summaries in SUMMARIES.items():
        yield f"**{heading}**"
        yield ""
        for name, summary in summaries.items():
            yield f"- [`{name}`](#{name}): {summary}"
        yield ""


def _command(name: str) -> Iterator[str]:
    arguments = [p for p in command_of(name).params if p.param_type_name == "argument"]
    usage = " ".join(p.metavar if p.required else f"[{p.metavar}]" for p in arguments)
    yield f"`ckptctl {name} [OPTIONS] {usage}`"
    lines = [f"- `{argument.metavar}`: {argument.help}" for argument in arguments]
    shared_arguments = _shared_arguments()
    own_arguments = [line for line in lines if line not in shared_arguments]
    if own_arguments:
        yield ""
        yield from own_arguments
    rows = {row: option for option in _options(name, common=False) for row in _rows([option])}
    several = _several()
    own = [row for row in rows if row not in several]
    shared = [f"`{rows[row].opts[0]}`" for row in rows if row in several]
    if own:
        yield ""
        yield from own
    if shared:
        yield ""
        yield f"Also [shared options](#options-of-several-commands): {', '.join(shared)}."
    yield ""
    yield f"Exit codes: [{', '.join(map(str, load(name).exit_codes))}](#exit-codes)."


@cache
def _shared_arguments() -> Sequence[str]:
    """The lines of the arguments that several commands have."""
    lines = [
        f"- `{argument.metavar}`: {argument.help}"
        for name in COMMANDS
        for argument in command_of(name).params
        if argument.param_type_name == "argument"
    ]
    return [line for line, n in Counter(lines).items() if n > 1]


@cache
def _several() -> Sequence[str]:
    """The rows that two commands or more have, one for each name, in their order."""
    rows = [row for name in COMMANDS for row in _rows(_options(name, common=False))]
    several: dict[str, str] = {}
    for row, n in Counter(rows).most_common():
        if n > 1:  # another meaning of the same name is left to the sections
            several.setdefault(row.split()[1].strip(":,"), row)
    return [row for row in dict.fromkeys(rows) if row in several.values()]


def _rows(options: list[Any]) -> Iterator[str]:
    for option in options:
        names = ", ".join(f"`{name}`" for name in option.opts)
        value = f" `{value_of(option)}`" if value_of(option) else ""
        meaning = option.help.replace("<", "&lt;")
        default = f" Default: {default_of(option)}." if default_of(option) else ""
        yield f"- {names}{value}: {meaning}{default}"


def _exit_codes() -> Iterator[str]:
    yield "| code | means | try again? | what to do |"
    yield "|---|---|---|---|"
    for number, code in exit_codes().items():
        yield f"| {number} | {code.title} | {code.retry} | {code.advice} |"


def _findings() -> Iterator[str]:
    by_verdict: dict[str, list[str]] = {}
    for code, meaning in sorted(CODES.items()):
        forced = meaning.verdict or FORCES.get(code)
        line = f"- [`{code}`](../../ckptctl/pages/{code}.md): {meaning.title}"
        by_verdict.setdefault(forced.value if forced else meaning.severity.value, []).append(line)
    last = [severity for severity in ("warning", "note") if severity in by_verdict]
    for verdict in [*(name for name in by_verdict if name not in last), *last]:
        yield f"## {verdict}"
        yield ""
        yield from by_verdict[verdict]
        yield ""


def _modules() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix().removesuffix("__init__.py")
        content = ast.get_docstring(ast.parse(path.read_text())) or ""
        yield f"{name or 'ckptctl':45} {content.partition(chr(10))[0]}"


if __name__ == "__main__":
    sys.exit(main())
