"""Is a runbook sound: does every end of every command lead somewhere, and is the diagram true?

Form is refused by `document` already. Whether the commands do what the page
says is shown by running them.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.runbook.document import DONE, NEXT, STOP, Block, Runbook, State, used_names

SECTIONS = (
    "Trigger",
    "Severity",
    "Inputs",
    "Flow",
    "Procedure",
    "Rollback",
    "References",
)
"""What every runbook has, in this order; others may stand between them."""

_OF_THE_ENGINE = frozenset({"BECAUSE", "PICTURE", "RECORD"})
_END = "[*]"


def problems(book: Runbook) -> tuple[str, ...]:
    """What is wrong with a runbook, one sentence each; empty for a sound one."""
    return (
        *_sections(book),
        *_inputs(book),
        *_names(book),
        *_diagram(book),
        *(problem for state in book.states for problem in _state(book, state)),
    )


def _sections(book: Runbook) -> Iterator[str]:
    for name in SECTIONS:
        if name not in book.sections:
            yield f"the section {name} is missing"
    there = [name for name in book.sections if name in SECTIONS]
    if there != [name for name in SECTIONS if name in there]:
        yield f"the sections are in another order than {', '.join(SECTIONS)}"


def _inputs(book: Runbook) -> Iterator[str]:
    if not any(given.name == "ROOT" and given.required for given in book.inputs):
        yield "the input `ROOT` is missing, or not required: the state of a run lies under it"


def _names(book: Runbook) -> Iterator[str]:
    names = [block.name for state in book.states for block in state.blocks]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"the block name {name!r} is there {names.count(name)} times"


def _diagram(book: Runbook) -> Iterator[str]:
    drawn = {(arrow.source, arrow.target) for arrow in book.arrows}
    told = set(_told(book))
    known = {state.name for state in book.states}
    for name in sorted({name for arrow in drawn for name in arrow} - known - {_END}):
        yield f"the state {name!r} of the diagram has no section with a command block"
    for source, target in sorted(told - drawn):
        yield f"a table leads from {source} to {target}, and the diagram has no such arrow"
    for source, target in sorted(drawn - told):
        yield f"the diagram has an arrow from {source} to {target}, and no table leads there"
    reached = _reached(book)
    for name in sorted(known - reached):
        yield f"the state {name!r} is never reached from {book.start}"


def _told(book: Runbook) -> Iterator[tuple[str, str]]:
    for state in book.states:
        for block in state.blocks:
            for row in block.outcomes:
                if row.then == DONE:
                    yield state.name, _END
                elif row.then not in (NEXT, STOP):
                    yield state.name, row.then


def _reached(book: Runbook) -> set[str]:
    reached = {book.start}
    told = tuple(_told(book))
    while more := {target for source, target in told if source in reached} - reached:
        reached |= more
    return reached


def _state(book: Runbook, state: State) -> Iterator[str]:
    for block in state.blocks:
        where = f"{state.name}, block {block.name!r}"
        yield from (f"{where}: {problem}" for problem in _block(book, block))
        if block is state.blocks[-1] and any(row.then == NEXT for row in block.outcomes):
            yield f"{where}: it is the last of its state, so `next` leads nowhere"


def _block(book: Runbook, block: Block) -> Iterator[str]:
    if block.on("other") is None:
        yield "the table has no row `other`, so an unexpected end leads nowhere"
    elif block.outcomes[-1].event != "other" and block.on("other") is not None:
        yield "rows behind `other` are never reached"
    if (block.needs or block.changes) and block.on("not run") is None:
        yield "it may be left out, and the table has no row `not run`"
    if block.at_most and block.on("too often") is None:
        yield "it has at-most, and the table has no row `too often`"
    for row in block.outcomes:
        if row.then == STOP and row.code is None and row.event in ("not run", "too often"):
            yield f"`{row.event}` has no exit code of its own: say `stop N`"
        if not row.because:
            yield "a row does not say why (`because`)"
    known = _OF_THE_ENGINE.union(book.variables)
    for name in (*block.needs, *used_names(block.code)):
        if name not in known:
            yield f"${name} is no input, and no block sets it"
