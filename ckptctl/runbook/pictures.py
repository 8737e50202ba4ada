"""Draw the steps, the shards and the time of a run.

The SVG images are made from the documents that the commands of a run recorded. A record may
be another person's: a malformed document gives no image. Colour never carries a state
alone: each has a letter and a word.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ckptctl.findings import NO_METADATA
from ckptctl.formats.frameworks.file_names import rank_in_name
from ckptctl.formats.own.run_events import EndedEvent, Event
from ckptctl.formatting import counted, duration
from ckptctl.markup import as_text
from ckptctl.symbols import STEP_MARKS

Document = Mapping[str, object]

_GOOD, _WARN, _BAD, _NEUTRAL = "#2a7f3f", "#b35c00", "#b3261e", "#5b6470"
_COLORS: Mapping[str, str] = {"good": _GOOD, "warn": _WARN, "bad": _BAD}
_WROTE_NOTHING = (_NEUTRAL, "·", "wrote nothing")
_MAX_STEPS = 40
_STEPS_PER_ROW = 8
"""So many are legible on a page."""
_ROW = 112
_MAX_RANKS = 1024
_CELL = 26


def timeline_of_steps(
    scan: Document, chosen: str | None, steps_per_row: int = _STEPS_PER_ROW
) -> str:
    """The steps of a scan, newest first, each with its verdict; the chosen one is marked."""
    reports = [each for each in _list(scan.get("reports")) if each.get("number") is not None]
    shown = reports[:_MAX_STEPS]
    if not shown:
        return ""
    columns = min(len(shown), steps_per_row)
    rows = (len(shown) + columns - 1) // columns
    width = max(72, 90 * steps_per_row // columns)
    cells = [
        _step(report, 10 + width * (n % columns) + width // 2, _ROW * (n // columns), chosen)
        for n, report in enumerate(shown)
    ]
    title = f"The newest {counted(len(shown), 'step')} under the root, newest first"
    return _svg(20 + width * columns, _ROW * rows, title, cells)


def _step(report: Document, middle: int, y: int, chosen: str | None) -> str:
    verdict = str(report.get("verdict"))
    symbol = STEP_MARKS.get(verdict)
    color, glyph = (_COLORS[symbol.style], symbol.glyph) if symbol else (_NEUTRAL, "·")
    taken = chosen is not None and str(report.get("url")).rstrip("/") == chosen.rstrip("/")
    parts = [
        f'<rect x="{middle - 15}" y="{y + 16}" width="30" height="30" rx="4" fill="{color}"/>',
        _words(middle, y + 37, glyph, fill="#fff", size=16),
        _words(middle, y + 64, str(report.get("number")), weight="bold"),
        _words(middle, y + 80, verdict, size=11),
    ]
    if taken:
        parts.append(_words(middle, y + 100, "▲ chosen", size=11, weight="bold"))
    return "".join(parts)


def map_of_shards(verify: Document) -> str:
    """The ranks that wrote a step, each whole, with a finding about its files, or not checked."""
    report = verify.get("report")
    if not isinstance(report, dict):
        return ""
    findings = _list(report.get("findings"))
    faults = _faulty_ranks(findings)
    unread = report.get("seal") is None and any(one.get("code") in NO_METADATA for one in findings)
    intact = (_NEUTRAL, "□", "present, not checked") if unread else (_GOOD, "✓", "whole")
    size = report.get("world_size")
    stated = size.get("size") if isinstance(size, dict) else None
    stated = stated if type(stated) is int else None
    written = _written_ranks(report.get("ranks"))
    n_ranks = max([stated or 0, *(rank + 1 for rank in (*written, *faults))])
    if not 0 < n_ranks <= _MAX_RANKS:
        return ""
    columns = min(n_ranks, 32)
    cells = [
        _rank(rank, columns, faults.get(rank), intact if rank in written else _WROTE_NOTHING)
        for rank in range(n_ranks)
    ]
    rows = (n_ranks + columns - 1) // columns
    title = f"Ranks that wrote step {report.get('number')}"
    return _svg(max(20 + _CELL * columns, 360), 24 + _CELL * rows, title, cells)


def _faulty_ranks(findings: Sequence[Document]) -> dict[int, str]:
    found: dict[int, str] = {}
    for finding in findings:
        where = str(finding.get("where"))
        named = re.search(r"__(\d{1,7})_", where)
        rank = int(named[1]) if named else rank_in_name(where)
        if rank is not None and finding.get("severity") == "fault":
            found.setdefault(rank, str(finding.get("code")))
    return found


def _written_ranks(parts: object) -> frozenset[int]:
    pairs = [pair for pair in parts if _is_pair(pair)] if isinstance(parts, list) else []
    return frozenset(rank for _, ranks in pairs for rank in ranks if type(rank) is int)


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[1], list)


def _rank(rank: int, columns: int, fault: str | None, otherwise: tuple[str, str, str]) -> str:
    x, y = 10 + _CELL * (rank % columns), 10 + _CELL * (rank // columns)
    color, glyph, word = (_BAD, "✗", fault) if fault else otherwise
    middle = x + (_CELL - 4) // 2
    return (
        f"<g><title>rank {rank}: {as_text(word)}</title>"
        f'<rect x="{x}" y="{y}" width="{_CELL - 4}" height="{_CELL - 4}" rx="3" fill="{color}"/>'
        f"{_words(middle, y + 16, glyph, fill='#fff')}</g>"
    )


def bars_of_time(rows: Sequence[tuple[str, float]]) -> str:
    """A bar chart of durations; `rows` are names and seconds."""
    longest = max((seconds for _, seconds in rows), default=0.0)
    if not longest:
        return ""
    bars = [_bar(n, name, seconds, longest) for n, (name, seconds) in enumerate(rows)]
    return _svg(720, 16 + 24 * len(rows), "Where the time went", bars)


def _bar(n: int, name: str, seconds: float, longest: float) -> str:
    y, width = 10 + 24 * n, max(2, round(400 * seconds / longest))
    return (
        f"{_words(150, y + 13, name, anchor='end')}"
        f'<rect x="160" y="{y}" width="{width}" height="16" rx="2" fill="#3b6ea5"/>'
        f"{_words(168 + width, y + 13, duration(seconds, digits=3), anchor='start')}"
    )


def _svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="system-ui, sans-serif">'
        f"<title>{as_text(title)}</title>{''.join(parts)}</svg>"
    )


def _words(
    x: int,
    y: int,
    text: str,
    *,
    fill: str = "currentColor",
    size: int = 12,
    weight: str = "normal",
    anchor: str = "middle",
) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{fill}" '
        f'text-anchor="{anchor}">{as_text(text)}</text>'
    )


def _list(value: object) -> list[Document]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def documents_of(events: Sequence[Event], schema: str) -> Iterator[Document]:
    """The documents of one kind that the commands of a run recorded, in order."""
    for event in events:
        report = event.report if isinstance(event, EndedEvent) else None
        if report is not None and str(report.get("schema")).startswith(f"{schema}/"):
            yield report
