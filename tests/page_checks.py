"""Check that a page of a runbook is sound.

Every end of every command leads somewhere, the diagram agrees with the tables, and a value reaches
a command as one argument: quoted, or as a list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ckptctl.errors import UsageError
from ckptctl.runbook.document import (
    DONE,
    NEXT,
    STOP,
    TYPES,
    Block,
    Runbook,
    State,
    find_runbook,
    used_names,
)

SECTIONS = ("Trigger", "Severity", "Inputs", "Flow", "Procedure", "Rollback", "References")
"""The required sections, in this order; others may stand between them."""

_OF_THE_ENGINE = frozenset({"BECAUSE", "RECORD"})
_END = "[*]"
_ARROW = re.compile(r"^ +(\S+) --> ([^\s:]+)", re.MULTILINE)
_OF_THE_SHELL = re.compile(
    r"(BASH|CKPTCTL|DYLD|GIT|LC|LD|PYTHON|SHELL)_?[A-Z0-9_]*|ENV|HOME|IFS|LANG|PATH|PS[0-9]|SHELLOPTS"
)
_OTHER_SHELL = re.compile(r"\b(?:ba|da|z)?sh\s+-\w*c\b|`")
_LAUNCHED = re.compile(r"--launcher[ =]\"\$\{?([A-Z][A-Z0-9_]*)")
_EVAL = re.compile(r"\beval\b")


def problems(book: Runbook) -> tuple[str, ...]:
    """The problems of a runbook, one sentence each; empty for a sound one."""
    return (
        *_sections(book),
        *_inputs(book),
        *_names(book),
        *_diagram(book),
        *(problem for state in book.states for problem in _state(book, state)),
        *_led_to(book),
    )


def _led_to(book: Runbook) -> Iterator[str]:
    rows = (row for state in book.states for block in state.blocks for row in block.outcomes)
    for name in dict.fromkeys(row.leads for row in rows if row.leads):
        try:
            find_runbook(name)
        except UsageError as error:
            yield f"`stop N {name}` leads nowhere: {error.message}"


def _sections(book: Runbook) -> Iterator[str]:
    sections = re.findall(r"^## (\S.*?)\s*$", book.text, re.MULTILINE)
    for name in SECTIONS:
        if name not in sections:
            yield f"the section {name} is missing"
    there = [name for name in sections if name in SECTIONS]
    if there != [name for name in SECTIONS if name in there]:
        yield f"the sections are in another order than {', '.join(SECTIONS)}"


def _inputs(book: Runbook) -> Iterator[str]:
    if not any(given.name == "ROOT" and given.required for given in book.inputs):
        yield "the input `ROOT` is missing, or not required: the state of a run lies under it"
    for given in book.inputs:
        if not given.words and given.type not in TYPES:
            yield f"`{given.name}` has the type {given.type!r}; types are {', '.join(TYPES)}"
        elif given.default is not None and given.mistake(given.default) is not None:
            yield f"the default of `{given.name}` must be {given.mistake(given.default)}"
    for name in book.variables:
        if _OF_THE_SHELL.fullmatch(name):
            yield f"`{name}` changes how a shell or a program works, and cannot be an input"


def _names(book: Runbook) -> Iterator[str]:
    names = [block.name for state in book.states for block in state.blocks]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"the block name {name!r} occurs {names.count(name)} times"


def _diagram(book: Runbook) -> Iterator[str]:
    arrows = {(source, target) for source, target in _ARROW.findall(book.text)}
    start = book.states[0].name
    drawn = {arrow for arrow in arrows if arrow[0] != _END}
    if arrows - drawn != {(_END, start)}:
        yield f"the diagram in the section Flow needs one arrow `[*] --> STATE`, to {start}"
    stated = set(_transitions(book))
    known = {state.name for state in book.states}
    for name in sorted({name for arrow in drawn for name in arrow} - known - {_END}):
        yield f"the state {name!r} of the diagram has no section with a command block"
    for source, target in sorted(stated - drawn):
        yield f"a table leads from {source} to {target}, but the diagram has no such arrow"
    for source, target in sorted(drawn - stated):
        yield f"the diagram has an arrow from {source} to {target}, but no table leads there"
    reached = _reached(book)
    for name in sorted(known - reached):
        yield f"the state {name!r} is never reached from {start}"


def _transitions(book: Runbook) -> Iterator[tuple[str, str]]:
    for state in book.states:
        for block in state.blocks:
            for row in block.outcomes:
                if row.then == DONE:
                    yield state.name, _END
                elif row.then not in (NEXT, STOP):
                    yield state.name, row.then


def _reached(book: Runbook) -> set[str]:
    reached = {book.states[0].name}
    stated = tuple(_transitions(book))
    while more := {target for source, target in stated if source in reached} - reached:
        reached |= more
    return reached


def _state(book: Runbook, state: State) -> Iterator[str]:
    for block in state.blocks:
        where = f"{state.name}, block {block.name!r}"
        yield from (f"{where}: {problem}" for problem in _block(book, block))
        if block is state.blocks[-1] and any(row.then == NEXT for row in block.outcomes):
            yield f"{where}: it is the last of its state, so `next` leads nowhere"


def _block(book: Runbook, block: Block) -> Iterator[str]:
    if block.on("other") is None and block.decides is None:
        yield "the table has no row `other`, so an unexpected end leads nowhere"
    elif block.on("other") is not None and block.outcomes[-1].event != "other":
        yield "rows behind `other` are never reached"
    if (block.attended or block.repeats) and not block.changes:
        yield "`attended` and `repeats` are for a block that `changes`"
    if block.overrides and block.decides is None:
        yield "`overrides` is for a block that `decides`"
    decision = book.input(block.decides) if block.decides is not None else None
    if block.decides is not None and (decision is None or not decision.is_decision):
        yield f"it decides {block.decides}, which is not in the table of decisions"
    for name in block.asks:
        if book.input(name) is None:
            yield f"it asks for {name}, which is not an input"
    if (block.needs or block.changes or block.decides) and block.on("not run") is None:
        yield "it may be skipped, but the table has no row `not run`"
    if block.at_most and block.on("too often") is None:
        yield "it has at-most, but the table has no row `too often`"
    for row in block.outcomes:
        if (
            row.then == STOP
            and row.code is None
            and row.event in ("not run", "too often", "dry run")
        ):
            yield f"`{row.event}` has no exit code; use `stop N`"
        if not row.because:
            yield "a row has no reason (`because`)"
    for name in unquoted(block.code):
        yield f"${name} is not quoted, so that its value becomes several words"
    if len(_EVAL.findall(block.code)) != len(block.commands) - len(block.runs):
        yield 'eval runs one input and nothing else: eval "$NAME"'
    if _OTHER_SHELL.search(block.code):
        yield 'the value would be run as code: use eval "$NAME" for an input, $( ) for output'
    if len(block.commands) > len(block.runs) and not block.changes:
        yield "it runs an input as a command, so it needs `changes`"
    for name in _LAUNCHED.findall(block.code):
        if name not in block.runs:
            yield f"${name} is started by a program, so the block needs `runs={name}`"
    for name in block.commands:
        declared = book.input(name)
        if declared is None or declared.is_list:
            yield f"${name} is run as a command, but is not an input with one value"
    for each in book.inputs:
        uses = len(re.findall(rf"\$\{{?{each.name}\b", block.code))
        whole = len(re.findall(rf'"\$\{{{each.name}\[@\][^"}}]*\}}"', block.code))
        if each.is_list and uses != whole:
            yield f'use the whole list {each.name}: "${{{each.name}[@]}}"'
    known = _OF_THE_ENGINE.union(book.variables)
    for name in (*block.needs, *used_names(block.code)):
        if name not in known:
            yield f"${name} is not an input, and no block sets it"


_TOKEN = re.compile(
    r"""\\. | \$\( | \$\{[!\#]?(?P<braced>\w+)(?P<alternative>:?\+)? | \$(?P<plain>[A-Za-z_]\w*)
    | (?:(?<=[\s;])|^)(?P<comment>\#)[^\n]* | [(){}"']""",
    re.VERBOSE | re.DOTALL | re.MULTILINE,
)
_QUOTED = ('"', 'in " }')
"""Contexts in which bash does not split words: a quotation, and a `${…}` in one."""


def unquoted(code: str) -> Iterator[str]:
    """The names of the variables that bash would split into words, in order of use.

    `${NAME:+word}` expands to `word`, not to the value of NAME, so only `word` counts.
    """
    within = [""]
    at = 0
    while (found := _TOKEN.search(code, at)) is not None:
        at = found.end()
        sign, is_quoted = found[0], within[-1] in _QUOTED
        if name := found["braced"] or found["plain"]:
            if not is_quoted and not found["alternative"]:
                yield name
            if found["braced"]:
                within.append(_QUOTED[1] if is_quoted else "}")
        elif sign == within[-1] or (sign == "}" and within[-1] == _QUOTED[1]):
            within.pop()
        elif found["comment"]:
            at = found.start("comment") + 1 if is_quoted else at
        elif sign == "'" and not is_quoted:
            at = code.find("'", at) + 1 or len(code)
        elif sign == '"':
            within.append('"')
        elif sign == "$(" or (sign == "(" and not is_quoted):
            within.append(")")
