"""Write the answer of `scan`, `loss` and `history` as one HTML page: `--html`.

What the terminal says in colour has a word beside it here as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.cli.documents import document
from ckptctl.cli.output import replace_file
from ckptctl.cli.pictures import LACKING, STEP_MARKS, step_state
from ckptctl.cli.rendering import (
    Line,
    Span,
    Style,
    finding_lines,
    made_safe,
    next_line,
    safe,
    step_name,
)
from ckptctl.findings import EXIT_FRESH, Verdict
from ckptctl.formatting import counted, duration, size, utc
from ckptctl.html_page import page, table

if TYPE_CHECKING:
    from ckptctl.goodput.history import RunHistory
    from ckptctl.goodput.timeline import Goodput, PastAttempt
    from ckptctl.loss.checking import LossReport
    from ckptctl.selection.results import Scan


def write_page(path: str, title: str, headline: str, style: Style, parts: Iterable[str]) -> None:
    """Write a page, whole; `parts` are HTML below the headline."""
    headline = f"<h1 class={style or 'strong'}>{escape(safe(headline))}</h1>"
    replace_file(path, page(title, (headline, *parts)), "the page")


def write_scan(path: str, found: Scan) -> None:
    """The steps of a root, and which of them `pick` takes."""
    from ckptctl.cli.scan import chosen_lines, ranks_word, reason_of, state_words
    from ckptctl.runbook.pictures import timeline_of_steps

    chosen = next((each for each in found.reports if each.url == found.chosen), None)
    headline = chosen_lines(chosen)[0].text if chosen else found.message
    good = chosen is not None or found.exit_code == EXIT_FRESH
    refused = dict(found.refused)
    rows = []
    for report in found.reports:
        passed_over = refused.get(report.url)
        state = step_state(report, passed_over=passed_over is not None)
        mark = STEP_MARKS[state]
        word = mark.word if state == LACKING else report.verdict.value
        complete = report.verdict is Verdict.COMPLETE
        rows.append(
            (
                step_name(report) + (" ← pick" if report is chosen else ""),
                Cell((Span(f"{mark.glyph} {word}", mark.style),)),
                passed_over if passed_over and complete else reason_of(report),
                "-" if report.verdict is Verdict.UNKNOWN else report.level.value,
                size(report.n_bytes),
                ranks_word(report.world_size),
                "-" if report.written_s is None else utc(report.written_s),
                state_words(report.state),
            )
        )
    columns = ("step", "verdict", "reason", "checked", "size", "ranks", "written", "train state")
    n_more = f"; {counted(found.n_older, 'older step')} not shown" if found.n_older else ""
    picture = timeline_of_steps(document("scan", found), found.chosen)
    write_page(
        path,
        f"Steps of {found.root}",
        headline,
        "good" if good else "bad",
        (
            f"<p><code>{escape(found.chosen or found.root)}</code></p>",
            *([f"<figure>{picture}</figure>"] if picture else []),
            f"<h2>{counted(len(found.reports), 'step')}, newest first{n_more}</h2>",
            _table(columns, rows),
            *as_html(finding_lines(found.findings)),
            *as_html(next_line(found.next_command)),
        ),
    )


def write_loss(path: str, report: LossReport) -> None:
    """The verdict on a resume, the curve, and what it follows from."""
    from ckptctl.cli.loss_rendering import STYLES, loss_lines
    from ckptctl.loss.plots import svg_of

    picture = svg_of(report)
    write_page(
        path,
        f"Loss: {report.verdict.value}",
        f"{report.verdict.value}: {report.message}",
        STYLES[report.verdict],
        (
            *([f"<figure>{picture}</figure>"] if picture else []),
            *as_html(loss_lines(report, width=None, unicode=True)[2:]),
        ),
    )


def write_history(path: str, found: RunHistory) -> None:
    """The attempts of runs, and what became of their time."""
    parts: list[str] = []
    for each in found.roots:
        own = [attempt for attempt in found.attempts if attempt.root == each.root]
        parts.append(f"<h2><code>{escape(each.root)}</code></h2>")
        parts += [f"<p class=warn>warning: {escape(warning)}</p>" for warning in each.warnings]
        if each.goodput is not None and own:
            parts += _history(own, each.goodput)
    parts += as_html(finding_lines(found.findings))
    write_page(path, "History of runs", found.message, "strong", parts)


def _history(attempts: Sequence[PastAttempt], goodput: Goodput) -> Iterator[str]:
    from ckptctl.cli.history import COLUMNS, attempt_cells, attempt_end, mtbf_lines, time_rows

    rows = list(time_rows(attempts))
    whole = sum(seconds for _, seconds, _ in rows if seconds) or 1.0
    yield '<div class=bar role=img aria-label="The shares of the table below">'
    for mark, seconds, _ in rows:
        if seconds:
            share = 100 * seconds / whole
            yield (
                f'<span class="{mark.style or "other"}" style="width:{share:.3f}%" '
                f'title="{escape(mark.word)}: {duration(seconds, digits=3)}, {share:.1f} %">'
                f"{escape(mark.glyph) if share > 2 else ''}</span>"
            )
    yield "</div>"
    yield _table(
        ("", "time", "duration", "share", "bucket"),
        [
            (
                mark.glyph,
                Cell((Span(mark.word, mark.style),)),
                "unknown" if seconds is None else duration(seconds, digits=3),
                "" if seconds is None else f"{seconds / whole:.1%}",
                bucket,
            )
            for mark, seconds, bucket in rows
        ],
    )
    yield from as_html(mtbf_lines(goodput))
    yield f"<h2>{counted(len(attempts), 'attempt')}</h2>"
    yield _table(
        COLUMNS, [(*attempt_cells(each), Cell(tuple(attempt_end(each)))) for each in attempts]
    )


class Cell(NamedTuple):
    """A cell of a table in a style, or of several spans."""

    spans: Sequence[Span]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str | Cell]]) -> str:
    return table(columns, [[*map(_cell, row)] for row in rows])


def _cell(cell: str | Cell) -> str:
    return escape(safe(cell)) if isinstance(cell, str) else "".join(map(_span, cell.spans))


def as_html(lines: Iterable[Line]) -> Iterator[str]:
    """Lines of the terminal: paths, commands and tables as they are, prose as paragraphs."""
    for solid, group in groupby(map(made_safe, lines), key=lambda each: each.solid):
        texts = ["".join(map(_span, each.spans)) for each in group]
        if solid:
            yield f"<pre tabindex=0>{chr(10).join(texts)}</pre>"
        else:
            yield from (f"<p>{text.strip()}</p>" for text in texts if text.strip())


def _span(span: Span) -> str:
    text = escape(safe(span.text))
    return f"<span class={span.style}>{text}</span>" if span.style else text
