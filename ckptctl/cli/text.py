"""Lines of styled text: wrap, pad and escape.

Views and pictures give lines: pieces of text with a style by name. Whether the
style becomes a colour, and what becomes of control characters in the text, is
decided where it is printed (`output`).
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

Style = Literal["", "good", "warn", "bad", "strong", "name", "command"]


class Span(NamedTuple):
    """A piece of text in one style."""

    text: str
    style: Style = ""


class Line(NamedTuple):
    """One line.

    `hang` is how far its continuation lines are indented when it has to be
    wrapped. A `solid` line is never wrapped: paths and commands stay whole, to
    be copied.
    """

    spans: tuple[Span, ...]
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


def line(*pieces: str | Span, hang: int = 0, solid: bool = False) -> Line:
    """A line of pieces; a bare string is a piece without a style."""
    spans = tuple(piece if isinstance(piece, Span) else Span(piece) for piece in pieces)
    return Line(tuple(span for span in spans if span.text), hang, solid)


def made_safe(a_line: Line) -> Line:
    """The line with nothing in it that a terminal would obey."""
    return a_line._replace(spans=tuple(Span(safe(text), style) for text, style in a_line.spans))


def trimmed(a_line: Line) -> Line:
    """The line without the spaces at its end."""
    spans = list(a_line.spans)
    while spans and not spans[-1].text.strip(" "):
        spans.pop()
    if spans:
        spans[-1] = spans[-1]._replace(text=spans[-1].text.rstrip(" "))
    return a_line._replace(spans=tuple(spans))


def padded(text: str, width: int, style: Style = "", *, right: bool = False) -> Span:
    """A cell of a table: the text filled up to `width`, never cut."""
    fill = " " * (width - cell_width(text))
    return Span(fill + text if right else text + fill, style)


def wrapped(a_line: Line, width: int | None) -> Iterator[Line]:
    """The line in as many lines as `width` cells need; broken at spaces only.

    A word that is too long stays whole and lets the terminal break it. No width
    means no end.
    """
    if width is None or a_line.solid or a_line.width <= width:
        yield trimmed(a_line)
        return
    taken: list[Span] = []
    used = 0
    for space, word in _words(a_line.spans):
        needed = sum(cell_width(span.text) for span in (*space, *word))
        if used + needed > width and any(span.text.strip() for span in taken):
            yield trimmed(Line(tuple(taken)))
            taken, used = [Span(" " * a_line.hang)], a_line.hang
            space, needed = (), sum(cell_width(span.text) for span in word)
        taken += [*space, *word]
        used += needed
    yield trimmed(Line(tuple(taken)))


_PIECES = re.compile(r" +|[^ ]+")


def _words(spans: Iterable[Span]) -> Iterator[tuple[tuple[Span, ...], tuple[Span, ...]]]:
    """Words with the spaces before them; a word may go over several spans."""
    space: list[Span] = []
    word: list[Span] = []
    for text, style in spans:
        for piece in _PIECES.findall(text):
            if piece.isspace():
                if word:
                    yield tuple(space), tuple(word)
                    space, word = [], []
                space.append(Span(piece, style))
            else:
                word.append(Span(piece, style))
    if word:
        yield tuple(space), tuple(word)


def safe(text: str) -> str:
    r"""The text with everything that a terminal would obey spelled out.

    Control characters, ANSI sequences, line breaks, bidirectional overrides and
    undecodable bytes become `\x1b`, `\n`, `\u202e`; all else stays as it is.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


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
