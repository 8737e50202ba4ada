"""Lines of styled text, and what several commands print in them.

Renderers give lines: pieces of text with a style by name. Whether the style becomes a colour,
and what becomes of control characters in the text, is decided where it is printed (`output`).
Findings, train state, next commands and pages of Markdown look alike in all commands.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

from ckptctl.findings import Finding, Report, Severity
from ckptctl.formatting import counted, listed, safe
from ckptctl.model import TrainState, WorldSize

if TYPE_CHECKING:
    from ckptctl.selection.picking import Pick


Style = Literal["", "good", "warn", "bad", "strong", "name", "command", "code"]
"""A `command` is to be run next, with the caller's options; `code` stays as it is."""


class StyledText(NamedTuple):
    """A piece of text in one style."""

    text: str
    style: Style = ""


class Line(NamedTuple):
    """One line.

    `hang` is how far its continuation lines are indented when it has to be
    wrapped. A `solid` line is a row of a table, a picture, or text to be copied: its spaces
    have a meaning. One with a command or code in it is never wrapped.
    """

    spans: tuple[StyledText, ...]
    hang: int = 0
    solid: bool = False

    @property
    def text(self) -> str:
        """The bare text."""
        return "".join(span.text for span in self.spans)

    @property
    def width(self) -> int:
        """How many terminal cells the line takes."""
        return sum(cell_width(span.text) for span in self.spans)


EMPTY = Line(())


def line(*pieces: str | StyledText, hang: int = 0, solid: bool = False) -> Line:
    """A line of pieces; a bare string is a piece without a style."""
    spans = tuple(piece if isinstance(piece, StyledText) else StyledText(piece) for piece in pieces)
    return Line(tuple(span for span in spans if span.text), hang, solid)


def made_safe(a_line: Line) -> Line:
    """The line with nothing in it that a terminal would obey."""
    return a_line._replace(
        spans=tuple(StyledText(safe(text), style) for text, style in a_line.spans)
    )


def trimmed(a_line: Line) -> Line:
    """The line without the spaces at its end."""
    spans = list(a_line.spans)
    while spans and not (text := spans[-1].text.rstrip(" ")):
        spans.pop()
    if spans:
        spans[-1] = spans[-1]._replace(text=text)
    return a_line._replace(spans=tuple(spans))


def padded(text: str, width: int, style: Style = "", *, right: bool = False) -> StyledText:
    """A cell of a table: the text filled up to `width`, never cut."""
    fill = " " * (width - cell_width(text))
    return StyledText(fill + text if right else text + fill, style)


def wrapped(a_line: Line, width: int | None) -> Iterator[Line]:
    """The line in as many lines as `width` cells need; broken at spaces only.

    A word that is too long stays whole and lets the terminal break it, and so does a path in
    the style `name`. No width means no end.
    """
    whole = a_line.solid and any(span.style in ("command", "code") for span in a_line.spans)
    if width is None or whole or a_line.width <= width:
        yield trimmed(a_line)
        return
    hang = a_line.hang or (_LEAST_HANG if a_line.solid else 0)
    if width - hang < _LEAST_ROOM:
        hang = min(hang, _LEAST_HANG)
    taken: list[StyledText] = []
    used = 0
    for space, word in _words(a_line.spans):
        needed = sum(cell_width(span.text) for span in (*space, *word))
        if used + needed > width and any(span.text.strip() for span in taken):
            yield trimmed(Line(tuple(taken)))
            taken, used = [StyledText(" " * hang)], hang
            space, needed = (), sum(cell_width(span.text) for span in word)
        taken += [*space, *word]
        used += needed
    yield trimmed(Line(tuple(taken)))


_PIECES = re.compile(r" +|[^ ]*\d (?:%|[KMGTP]?i?B|ms|s|min|h|days?)(?![\w%])[^ ]*|[^ ]+")
"""Spaces and words; a number and its unit are one word."""
_LEAST_HANG, _LEAST_ROOM = 4, 24
"""Where less room than this is left beside the hang, continuation lines hang less."""


def _words(
    spans: Iterable[StyledText],
) -> Iterator[tuple[tuple[StyledText, ...], tuple[StyledText, ...]]]:
    """Words with the spaces before them; a word may go over several spans."""
    space: list[StyledText] = []
    word: list[StyledText] = []
    for text, style in spans:
        for piece in [text] if style == "name" else _PIECES.findall(text):
            if piece.isspace():
                if word:
                    yield tuple(space), tuple(word)
                    space, word = [], []
                space.append(StyledText(piece, style))
            else:
                word.append(StyledText(piece, style))
    if word:
        yield tuple(space), tuple(word)


def in_shell(command: str) -> str:
    r"""The command with each word that a terminal cannot show written as bash and zsh read it.

    A name that is not UTF-8, or has a line break in it: `$'step_1\xff'`.
    """
    if command.isprintable():
        return command
    import os
    import shlex

    return " ".join(
        shlex.quote(word) if word.isprintable() else _in_bytes(os.fsencode(word))
        for word in shlex.split(command)
    )


def _in_bytes(word: bytes) -> str:
    shown = (chr(b) if 32 <= b < 127 and b not in b"'\\\\" else f"\\x{b:02x}" for b in word)
    return f"$'{''.join(shown)}'"


def cell_width(text: str) -> int:
    """How many terminal cells the text takes."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


SEVERITY_STYLES: dict[Severity, Style] = {
    Severity.FAULT: "bad",
    Severity.WARNING: "warn",
    Severity.NOTE: "",
}


def next_line(command: str | None) -> list[Line]:
    """The last line of an answer: one command, whole, to be copied."""
    return [line("next: ", StyledText(command, "command"), solid=True)] if command else []


def error_lines(message: str, next_command: str | None) -> list[Line]:
    """Why ckptctl could not do its work, and what to do about it."""
    lines = [line(StyledText("error:", "bad"), f" {message}", hang=2)]
    if next_command:
        lines.append(line("next:  ", StyledText(next_command, "command"), solid=True))
    return lines


def finding_lines(findings: Sequence[Finding]) -> list[Line]:
    """Findings, one a line, with their codes for `ckptctl explain`."""
    width = max((len(finding.code) for finding in findings), default=0)
    lines = []
    for finding in findings:
        style = SEVERITY_STYLES[finding.severity]
        word, code = padded(finding.severity.value, 7, style), padded(finding.code, width, style)
        message = message_with_path(finding)
        lines.append(line("  ", word, "  ", code, "  ", message, hang=13 + width))
    return lines


def message_with_path(finding: Finding) -> str:
    """The message of a finding, with the path that it concerns."""
    if not finding.where or all(name in finding.message for name in finding.where.split(", ")):
        return finding.message
    return f"{finding.where}: {finding.message}"


def state_lines(state: TrainState, *, usable: bool) -> list[Line]:
    """What a resume restores, and what it does not; nothing where it could not be inspected."""
    if not state.held:
        return []
    missing = state.absent
    verb = "restores" if usable else "would restore"
    lines = [line(f"  a resume {verb} {', '.join(_state_facts(state))}", hang=4)]
    if missing:
        lines.append(line("  but not ", StyledText(listed(missing, "or"), "warn"), hang=4))
    if state.unrecognized:
        names = ", ".join(safe(entry.where) for entry in state.unrecognized)
        lines.append(line("  not recognized: ", StyledText(names, "warn"), hang=4))
        unknown = listed(state.unknown, "or")
        if unknown:
            lines.append(line(f"  so that {unknown} is unknown (--state KIND=KEY)", hang=4))
    return lines


def _state_facts(state: TrainState) -> Iterator[str]:
    for kind in state.held:
        part = state.part(kind)
        facts = []
        if part.value is not None:
            facts.append(f"{part.value:,}")
        if part.of_each_rank is not None:
            facts.append(f"{part.of_each_rank:,} on each rank")
        if part.of_adapter:
            facts.append("an adapter, without its base model")
        if part.n_ranks is not None:
            facts.append(f"for {counted(part.n_ranks, 'rank')}")
        yield f"{kind} ({', '.join(facts)})" if facts else kind


def ranks_in_words(world_size: WorldSize | None) -> str:
    """The world size of the writer, with where it was read from."""
    if world_size is None:
        return "written by an unknown number of ranks"
    least = "at least " if world_size.at_least else ""
    source = _SOURCES.get(world_size.source, world_size.source)
    return f"written by {least}{counted(world_size.size, 'rank')} ({source})"


_SOURCES = {
    "shard-files": "by its shard files",
    "train-state": "by its train state",
    "seal": "by its seal",
    "manifest": "by its manifest",
    "asked": "as you stated",
}


def step_name(report: Report) -> str:
    """The step's number, or its folder's name where that gives none."""
    if report.number is not None:
        return str(report.number)
    return report.url.rstrip("/").rpartition("/")[2]


def table_lines(rows: Sequence[Sequence[str]]) -> list[Line]:
    """Rows of cells in columns, each as wide as its widest cell."""
    widths = [max(map(cell_width, column)) for column in zip(*rows, strict=True)]
    return [
        line("  ".join(padded(cell, width).text for cell, width in zip(row, widths, strict=True)))
        for row in rows
    ]


def section(lines: Iterable[Line]) -> list[Line]:
    """The lines and an empty one, or nothing at all."""
    taken = [*lines]
    return [*taken, EMPTY] if taken else []


def page_lines(text: str, width: int | None) -> Iterator[Line]:
    """The page: on a terminal prose fills its width, off a terminal it is as it was written."""
    lines = text.splitlines()
    if width is None:
        yield from (line(text, solid=True) for text in lines)
        return
    fence = ""
    paragraph: list[str] = []
    for text in lines:
        opening = re.match("`{3,}", text)
        if fence:
            if opening and opening[0] == fence:
                fence = ""
            else:
                yield line("  ", StyledText(text.expandtabs(4), "code"), solid=True)
            continue
        is_apart = not text.strip() or opening is not None or text.startswith(("#", "|"))
        if is_apart or _ITEM.match(text):
            yield from _paragraph_lines(paragraph)
            paragraph = []
        if not is_apart:
            paragraph.append(text)
        elif opening:
            fence = opening[0]
        elif text.startswith("#"):
            yield line(StyledText(text.lstrip("# "), "strong"), hang=2)
        else:
            yield line(text.rstrip(), solid=True)
    yield from _paragraph_lines(paragraph)


_ITEM = re.compile(r"(?:[-*]|\d{1,9}\.) ")


def _paragraph_lines(paragraph: Sequence[str]) -> Iterator[Line]:
    """A paragraph or an item of a list as one line."""
    if paragraph:
        text = "\n".join(paragraph)
        item = _ITEM.match(text)
        mark = item[0] if item else ""
        yield line(mark, prose(text.removeprefix(mark)), hang=len(mark))


def prose(text: str) -> str:
    """A paragraph of Markdown as one line of text, without the targets of its links."""
    return " ".join(re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).split())


def refused_lines(pick: Pick) -> list[Line]:
    """Why newer steps were refused, one a line, without what the answer already states."""
    return [
        line(f"  not step {step_name(over.report)}: {over.reason}", hang=4)
        for over in pick.passed_over
        if over.reason not in pick.message
    ]
