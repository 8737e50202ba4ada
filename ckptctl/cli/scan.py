"""`ckptctl scan`: every step under one root or several, and which one to resume from."""

from __future__ import annotations

import time
from typing import Annotated

import ckptctl
from ckptctl.cli.documents import document
from ckptctl.cli.formatting import count
from ckptctl.cli.options import OfStep, OptionalRootOpt, RootsArg, option
from ckptctl.cli.output import Output
from ckptctl.cli.views.scan import StepTable, chosen_lines, foot_lines, none_lines, usable_urls
from ckptctl.findings import Report
from ckptctl.options import PickPolicy, StorageOptions
from ckptctl.selection.results import Scan
from ckptctl.selection.scanning import NEWEST

EXAMPLES = ("ckptctl scan /shared/ckpt/run-1234", "ckptctl scan s3://bucket/run-1234 --last 20")
EXIT_CODES = (0, 2, 10, 11, 75, 77)


def scan(
    roots: RootsArg,
    optional_root: OptionalRootOpt = None,
    last: Annotated[
        int,
        option("--last", metavar="N", min=0, help="Only the newest N steps; 0 for all of them."),
    ] = NEWEST,
    *,
    policy: PickPolicy,
    requirements: OfStep,
    storage: StorageOptions,
    out: Output,
) -> int:
    """List the steps of a root with their verdicts and the step that pick would choose.

    Steps are listed newest first, as soon as each has been inspected; --before STEP continues
    where the list ended. Without --level the steps that decide the choice are inspected as deep
    as pick does, and the others by their listing and metadata; --level content reads every byte
    of every listed step. With --quiet the address of the step that pick chooses is printed, and
    those of usable older ones, one per line.
    """
    named = dict.fromkeys((*roots, *(optional_root or ())))
    shown = _Shown(out, tuple(each.rstrip("/") or each for each in named))
    found = ckptctl.scan(
        *roots,
        optional_roots=optional_root or (),
        last=last or None,
        on_report=shown.on_report,
        policy=policy,
        requirements=requirements,
        storage=storage,
    )
    shown.finish(found)
    return found.exit_code


class _Shown:
    """Prints rows as they come, held back until the verdict can be said first."""

    def __init__(self, out: Output, roots: tuple[str, ...]) -> None:
        self._out = out
        self._roots = roots if len(roots) > 1 else ()
        self._waiting: list[tuple[Report, str | None]] = []
        self._table: StepTable | None = None

    def on_report(self, report: Report, is_chosen: bool, reason: str | None) -> None:
        """One more step was inspected."""
        if not self._out.talks:
            return
        if self._table is None:
            self._waiting.append((report, reason))
        if is_chosen:
            self._out.lines(chosen_lines(report))
            self._begin(report.url)
        elif self._table is not None:
            self._out.lines(self._table.row(report, reason))
        else:
            self._out.progress(f"{count(len(self._waiting), 'step')} inspected")

    def finish(self, scan: Scan) -> None:
        """All steps were inspected."""
        if self._out.talks and self._table is None:
            self._out.lines(none_lines(scan))
            if scan.reports:
                self._begin(None)
        out = self._out.out
        self._out.answer(
            lambda: document("scan", scan),
            lambda: foot_lines(scan, out.picture_width, unicode=out.unicode),
            bare=usable_urls(scan),
        )

    def _begin(self, chosen: str | None) -> None:
        out = self._out.out
        first, _ = self._waiting[0]
        table = StepTable(first, chosen, time.time(), out.width, out.unicode, self._roots)
        self._table = table
        self._out.lines(table.head())
        for report, reason in self._waiting:
            self._out.lines(table.row(report, reason))
