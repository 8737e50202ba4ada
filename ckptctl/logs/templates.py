"""Read later lines of one form by the places that its first line had.

A trainer prints the same line at every step, with other numbers. Once a line is parsed by its
format, a template of it finds the same values in the next ones: all text between the values is
equal, up to its numbers and the width of its blanks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from ckptctl.logs.clocks import clock_place, minute_in

_MAX_TEMPLATES = 12
"""With how many a line is compared."""
_MAX_COMPILED = 100
"""Of a log whose lines have more forms, the others are parsed by their format: to compile a
template takes as long as to parse twenty lines."""
_NUMBER = r"\d{1,20}(?:\.\d{0,20})?(?:[eE][-+]?\d{1,4})?"
_GROUPED = r"\d[\d,]{0,20}"
_VALUE = re.compile(rf"([-+]?)({_NUMBER}|{_GROUPED})([a-zA-Z%]{{0,3}})")
_BLANK = r"[ #\u2500-\u259f]+"
"""Blanks, and what a bar is drawn with."""
_BETWEEN = re.compile(rf"(?<![A-Za-z_])\d[\d.,:]*|{_BLANK}")
_RUNS_ON = re.compile(r"\d[.,:]*$")
_CLOCK = ("minute", "second", "fraction")
_SECONDS = {f"{second:02}": second for second in range(61)}


class Template:
    """A form of line: the fields of its values, and the pattern that finds them.

    A field is a group of the pattern; `minute`, `second` and `fraction` are those of its time.
    """

    __slots__ = ("_clock", "_fields", "_groups", "fullmatch")

    def __init__(self, fields: Sequence[str], pattern: str) -> None:
        places = {field: number for number, field in enumerate(fields, 1)}
        self._clock = tuple(places.pop(part) for part in _CLOCK if part in places)
        self._fields, self._groups = tuple(places), tuple(places.values())
        self.fullmatch = re.compile(pattern).fullmatch

    def found(self, match: re.Match[str]) -> tuple[dict[str, str], float | None] | None:
        """The text of each field of a line that matches, and its time; None without a valid one."""
        texts = dict(zip(self._fields, match.group(*self._groups), strict=True))
        if not self._clock:
            return texts, None
        minute, second, *fraction = match.group(*self._clock)
        minute_s, second_s = minute_in(minute), _SECONDS.get(second)
        if minute_s is None or second_s is None:
            return None
        at_s = minute_s + second_s
        return texts, at_s + float(f"0.{fraction[0]}") if fraction else at_s


class Templates:
    """The templates of one log, the one that matched last first."""

    def __init__(self) -> None:
        self._templates: list[Template] = []
        self._n_compiled = 0

    def read(self, text: str) -> tuple[dict[str, str], float | None] | None:
        """The text of each field of a line, and its time; None for a line of a new form."""
        for n, template in enumerate(self._templates):
            match = template.fullmatch(text)
            if match is not None:
                if n:
                    self._templates.insert(0, self._templates.pop(n))
                return template.found(match)
        return None

    def learn(self, text: str, spans: Mapping[str, tuple[int, int]], clock_from: int) -> None:
        """Keep the form of a line whose fields are at `spans`.

        Its time is the first one behind `clock_from`.
        """
        if self._n_compiled >= _MAX_COMPILED:
            return
        template = _template(text, dict(spans), clock_from)
        if template is not None:
            self._n_compiled += 1
            self._templates.insert(0, template)
            del self._templates[_MAX_TEMPLATES:]

    def clear(self) -> None:
        """Forget all: the fields of the lines are now others."""
        self._templates.clear()


def _template(text: str, spans: dict[str, tuple[int, int]], clock_from: int) -> Template | None:
    patterns: dict[str, str] = {}
    for field, (begin, end) in spans.items():
        value = _VALUE.fullmatch(text, begin, end)
        if value is None or text[end : end + 1].isdigit() or _RUNS_ON.search(text, 0, begin):
            return None
        number = _GROUPED if "," in value[2] else _NUMBER
        patterns[field] = f"({re.escape(value[1])}{number}{re.escape(value[3])})"
    place = clock_place(text[clock_from:])
    if place is not None:
        if not place.is_utc:
            return None
        begin, second, end = (clock_from + at for at in place[:3])
        minute = re.sub(r"\d", "0", text[begin:second])
        spans["minute"] = begin, second
        patterns["minute"] = f"({re.escape(minute)})".replace("0", r"\d")
        spans["second"], patterns["second"] = (second, second + 2), r"(\d\d)"
        if end > second + 2:
            spans["fraction"], patterns["fraction"] = (second + 3, end), r"(\d{1,9})"
    pattern, at = "", 0
    fields = sorted(spans, key=spans.__getitem__)
    for field in fields:
        begin, end = spans[field]
        if begin < at:
            return None  # the format reads one text as two fields
        pattern += _between(text, at, begin) + patterns[field]
        at = end
    return Template(fields, pattern + _between(text, at, len(text)))


def _between(text: str, begin: int, end: int) -> str:
    """The pattern of a text between two values."""
    parts, at = [], begin
    for match in _BETWEEN.finditer(text, begin, end):
        run = match[0]
        if run[0].isdecimal():
            run = r"\d[\d.,:]*"
        elif run != " ":
            run = _BLANK if run.strip(" ") else " +"
        parts += [re.escape(text[at : match.start()]), run]
        at = match.end()
    return "".join([*parts, re.escape(text[at:end])])
