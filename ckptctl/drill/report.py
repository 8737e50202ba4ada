"""Write the report of a drill, as Markdown and as an HTML page that needs nothing else."""

from __future__ import annotations

import html
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from ckptctl.drill.results import Drilled, Trial
from ckptctl.formatting import duration
from ckptctl.html_page import page, table

COLUMNS = (
    *("fault", "grade", "detected in", "restarted in", "resumed from", "resumed with"),
    *("lost steps", "loss"),
)


def write_reports(found: Drilled, folder: Path) -> None:
    """Write `report.md` and `report.html` into a folder."""
    (folder / "report.md").write_text(as_markdown(found), encoding="utf-8")
    (folder / "report.html").write_text(as_html(found), encoding="utf-8")


def grade(trial: Trial) -> str:
    """The grade of a trial in one word."""
    return "survived" if trial.passed else "failed"


def row(trial: Trial) -> tuple[str, ...]:
    """The cells of a trial, under `COLUMNS`."""
    seconds = (
        "-" if each is None else duration(each) for each in (trial.detected_s, trial.restarted_s)
    )
    step, lost = (
        "-" if each is None else str(each) for each in (trial.resumed_from, trial.lost_steps)
    )
    size = "-" if trial.world_size is None else f"{trial.world_size} ranks"
    without = f", without {', '.join(trial.excluded)}" if trial.excluded else ""
    return (trial.fault, grade(trial), *seconds, step, size + without, lost, trial.loss or "-")


def facts(found: Drilled) -> Iterator[tuple[str, str]]:
    """What else a reader must know, in pairs."""
    yield "command", shlex.join(found.command)
    yield "root", found.root
    yield "began with", f"step {found.step}, copied by {found.copied_by}"
    yield "seed", str(found.seed)
    read_only = "read-only for the job" if found.root_read_only else "writable to the job"
    changed = "unchanged" if found.root_unchanged else "changed during the drill"
    yield "the real root", f"{read_only}; {changed}"


def details(trial: Trial) -> Iterator[str]:
    """One sentence each about a trial."""
    yield trial.description
    if trial.cause is not None:
        section = f" in section {trial.section}" if trial.section else ""
        ranks = f", ranks {', '.join(map(str, trial.ranks))}" if trial.ranks else ""
        nodes = f", nodes {', '.join(trial.nodes)}" if trial.nodes else ""
        yield f"`ckptctl run` named: {trial.cause}{section}{ranks}{nodes}"
    if trial.evidence:
        folder, names = Path(trial.evidence[0]).parent, map(os.path.basename, trial.evidence)
        yield f"evidence in {folder}: {', '.join(names)}"
    if trial.runbook_exit_code is not None:
        yield f"RB-7 ended with {trial.runbook_exit_code}"
    if trial.loss_message is not None:
        yield f"loss: {trial.loss_message}"
    yield from trial.problems
    yield f"logs and transcript: {trial.folder}"


def as_markdown(found: Drilled) -> str:
    """The report as Markdown."""
    lines = [f"# Drill: {found.message}", ""]
    lines += [f"- {name}: `{text}`" for name, text in facts(found)]
    lines += ["", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
    lines += [_line(row(trial)) for trial in found.trials]
    for trial in found.trials:
        lines += [
            "",
            f"## {trial.fault}: {grade(trial)}",
            "",
            *(f"- {each}" for each in details(trial)),
        ]
    return "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def as_html(found: Drilled) -> str:
    """The report as one HTML page without scripts and other files."""
    title = f"Drill: {found.message}"
    about = (f"<li>{name}: <code>{html.escape(text)}</code></li>" for name, text in facts(found))
    rows = [[html.escape(cell) for cell in row(trial)] for trial in found.trials]
    parts = (
        f'<h2 class="{grade(trial)}">{trial.fault}: {grade(trial)}</h2><ul>'
        + "".join(f"<li>{_with_code(each)}</li>" for each in details(trial))
        + "</ul>"
        for trial in found.trials
    )
    headline = f"<h1>{html.escape(title)}</h1>"
    return page(title, (headline, f"<ul>{''.join(about)}</ul>", table(COLUMNS, rows), *parts))


def _with_code(text: str) -> str:
    """A line of Markdown as HTML, of which it has only code."""
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))
