"""Render the results of `runbook`."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from ckptctl.cli.formatting import count
from ckptctl.cli.text import EMPTY, Line, Span, line, padded
from ckptctl.cli.views.common import next_line
from ckptctl.runbook.document import Runbook
from ckptctl.runbook.running import Ran


def list_lines(books: Sequence[Runbook]) -> Iterator[Line]:
    """Every runbook by its name and title."""
    width = max((len(book.name) for book in books), default=0)
    for book in books:
        yield line(padded(book.name, width, "name"), "  ", book.title, hang=width + 2)
    yield EMPTY
    main = next((book for book in books if book.name == "rb-7"), books[0])
    yield from next_line(f"ckptctl runbook show {shlex.quote(main.called)}")


def lint_lines(book: Runbook, problems: Sequence[str]) -> Iterator[Line]:
    """Whether a runbook is sound, and what is not."""
    if not problems:
        yield line(Span("sound", "good"), f": {book.name}, {count(len(book.states), 'state')}")
        return
    yield line(Span(f"not sound: {count(len(problems), 'problem')}", "bad"))
    yield from (line(f"  {problem}", hang=4) for problem in problems)


def ran_lines(ran: Ran, transcript: str | None) -> Iterator[Line]:
    """How the run went, where its record lies, and what comes next."""
    yield EMPTY
    if not ran.finished:
        yield line(Span("left", "warn"), f" in {ran.state}; the run {ran.run} waits for you")
    elif ran.exit_code == 0:
        yield line(Span("done", "good"), f": {ran.reason}", hang=2)
    else:
        said = Span(f"stopped in {ran.state} with exit code {ran.exit_code}", "bad")
        yield line(said, f": {ran.reason}", hang=2)
    if ran.step is not None:
        yield line("  step: ", Span(ran.step, "name"), solid=True)
    if ran.url is not None:
        yield line("  record: ", ran.url, solid=True)
    if transcript is not None:
        yield line("  transcript: ", transcript, solid=True)
    yield from next_line(ran.next_command)
