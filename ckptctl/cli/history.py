"""`ckptctl history`: the attempts of a run, and how their time was spent."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated

import ckptctl
from ckptctl.cli.options import MetricsOpt
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.pictures import Symbol, glyph
from ckptctl.cli.rendering import EMPTY, Line, StyledText, line, padded
from ckptctl.formatting import counted, duration, listed, percent
from ckptctl.goodput.history import RootHistory, RunHistory
from ckptctl.goodput.timeline import BUCKETS, Goodput, Mtbf, PastAttempt
from ckptctl.options import Parameter, StorageOptions

EXAMPLES = (
    "ckptctl history /shared/ckpt/run-1234",
    "ckptctl history /shared/ckpt/* --metrics /var/lib/node_exporter/ckptctl.prom --quiet",
)
EXIT_CODES = (0, 2, 75, 77)

MOST_ROWS = 20
"""Attempts in the table; the newest. JSON has all."""


def history(
    roots: Annotated[list[str], Parameter("ROOT...", "Roots of runs, each of its own run.")],
    state: Annotated[
        str | None,
        Parameter(
            "--state DIR",
            "The DIR of run --state, if it was given; by default the root holds the state.",
        ),
    ] = None,
    metrics: MetricsOpt = None,
    *,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Show the attempts of runs, and how much of their time was training that is kept.

    Attempts are read from the ledgers that ckptctl.train keeps in a root, and from the state of
    ckptctl run. The rest of the time is divided into what was trained again, restarts, loads,
    first steps and saves. With --quiet only the goodput is printed, as a share.
    """
    found = ckptctl.run_history(*roots, state=state, storage=storage)
    if metrics is not None:
        from ckptctl.cli.metrics import history_samples, write_metrics

        write_metrics(metrics, history_samples(found))
    share = found.goodput.goodput
    out.answer(
        document_of("history", found),
        lambda: history_lines(found, out.out.picture_width, unicode=out.out.unicode),
        bare=() if share is None else (f"{share:.4f}",),
    )
    return found.exit_code


# In the order in which they come in an attempt; the field, how it is drawn, and its bucket.
_MARKS: Mapping[str, Symbol] = {
    "restart_s": Symbol("·", ".", "warn", "restart (T1)"),
    "startup_s": Symbol("◌", "o", "warn", "startup (T2)"),
    "load_s": Symbol("»", "L", "warn", "load (T3)"),
    "first_step_s": Symbol("±", "+", "warn", "first step (T4)"),
    "productive_s": Symbol("█", "#", "good", "training, kept"),
    "save_s": Symbol("◇", "s", "warn", "saves"),
    "lost_s": Symbol("✗", "x", "bad", "lost (T0)"),
    "other_s": Symbol("?", "?", "", "other"),
    "idle_s": Symbol(" ", " ", "", "not counted"),
}
_BUCKET_OF = {name: bucket for bucket, name in BUCKETS.items()} | {
    "productive_s": "goodput",
    "idle_s": "excluded",
}


def history_lines(found: RunHistory, width: int, *, unicode: bool) -> Iterator[Line]:
    """The answer, then for each root its picture, its time and its attempts."""
    yield line(StyledText(found.message, "strong"), hang=2)
    for root in found.roots:
        own = [attempt for attempt in found.attempts if attempt.root == root.root]
        yield from _parted(
            _root_lines(root, own, width, unicode=unicode, alone=len(found.roots) == 1)
        )


def _parted(lines: Iterable[Line]) -> Iterator[Line]:
    """The lines after an empty one; nothing where there are none."""
    for place, text in enumerate(lines):
        if place == 0:
            yield EMPTY
        yield text


def _root_lines(
    history: RootHistory, attempts: Sequence[PastAttempt], width: int, *, unicode: bool, alone: bool
) -> Iterator[Line]:
    goodput = history.goodput
    share = "unknown" if goodput is None or goodput.goodput is None else percent(goodput.goodput)
    if not alone:
        yield line(StyledText(history.root, "name"), f"  goodput {share}", solid=True)
    if goodput is not None and attempts:
        if goodput.elapsed_s > 0:
            yield line("  ", *_bar(attempts, max(1, width - 2), unicode=unicode), solid=True)
        if alone:
            yield EMPTY
            yield from _time_lines(attempts, goodput, unicode=unicode)
            yield EMPTY
            yield from mtbf_lines(goodput)
            yield EMPTY
            yield from _table(attempts)
    for warning in history.warnings:
        yield line(StyledText("warning:", "warn"), f" {warning}", hang=2)


def _bar(attempts: Sequence[PastAttempt], width: int, *, unicode: bool) -> Iterator[StyledText]:
    """The time from left to right; each cell shows what took most of it."""
    parts = [
        (name, seconds)
        for attempt in attempts
        for name in ("idle_s", *(name for name in _MARKS if name != "idle_s"))
        if (seconds := _seconds(attempt, name))
    ]
    cell_s = sum(seconds for _, seconds in parts) / width
    here: dict[str, float] = {}
    left_s, n_cells = cell_s, 0
    for name, seconds in parts:
        while seconds > 0 and n_cells < width:
            taken_s = min(seconds, left_s)
            here[name] = here.get(name, 0.0) + taken_s
            seconds, left_s = seconds - taken_s, left_s - taken_s
            if left_s <= cell_s * 1e-9:
                yield glyph(_MARKS[max(here, key=lambda name: here[name])], unicode)
                here, left_s, n_cells = {}, cell_s, n_cells + 1


def _seconds(attempt: PastAttempt, name: str) -> float:
    """The time of one kind; what nothing is recorded of is other."""
    seconds: float | None = getattr(attempt, name)
    if name == "other_s" and seconds is None:
        named = (getattr(attempt, mark) or 0.0 for mark in _MARKS if mark not in _BETWEEN)
        return attempt.seconds - sum(named)
    return seconds or 0.0


_BETWEEN = ("restart_s", "idle_s")


def time_rows(attempts: Sequence[PastAttempt]) -> Iterator[tuple[Symbol, float | None, str]]:
    """How the time was spent: how it is drawn, the seconds, and the bucket."""
    for name, mark in _MARKS.items():
        seconds = [each for one in attempts if (each := getattr(one, name)) is not None]
        if name == "other_s":
            seconds = [_seconds(one, name) for one in attempts]
        if name in ("other_s", "idle_s") and not sum(seconds) > 0:
            continue
        yield mark, sum(seconds) if seconds else None, _BUCKET_OF[name]


def _time_lines(
    attempts: Sequence[PastAttempt], goodput: Goodput, *, unicode: bool
) -> Iterator[Line]:
    for mark, seconds, bucket in time_rows(attempts):
        value = "unknown" if seconds is None else duration(seconds, digits=3)
        share = (seconds or 0.0) / goodput.elapsed_s if goodput.elapsed_s > 0 else 0.0
        yield line(
            "  ",
            glyph(mark, unicode),
            f" {mark.word:<16}{value:>9}",
            " " * 11 if seconds is None else f"{percent(share):>9}  ",
            bucket,
            hang=1,  # the longest bucket fits into 40 columns
            solid=True,
        )
    if goodput.ettr is not None and goodput.goodput is not None:
        shares = f"goodput {percent(goodput.goodput)}, ETTR {percent(goodput.ettr)}"
        yield line(f"  {shares} of all time", hang=2)


def mtbf_lines(goodput: Goodput) -> Iterator[Line]:
    """The time between failures, with its bounds."""
    yield line("  MTBF ", *_mtbf(goodput.mtbf), hang=4)
    if goodput.recent != goodput.mtbf:
        yield line("  in the last 24 h of running ", *_mtbf(goodput.recent), hang=4)


def _mtbf(measured: Mtbf) -> Iterator[str]:
    if measured.low_s is None:
        yield "unknown"
        return
    ran = f"{counted(measured.failures, 'failure')} in {duration(measured.observed_s, digits=3)}"
    low = duration(measured.low_s, digits=2)
    if measured.mean_s is None or measured.high_s is None:
        yield f"unknown, at least {low} (95 %); {ran}"
        return
    yield f"{duration(measured.mean_s, digits=3)}, "
    yield f"95 %: {low} to {duration(measured.high_s, digits=2)}; {ran}"


COLUMNS = ("#", "started (UTC)", "ran", "step", "exit", "ended")


def attempt_cells(attempt: PastAttempt) -> tuple[str, ...]:
    """The cells of an attempt under `COLUMNS` but the last."""
    return (
        str(attempt.number),
        attempt.started_at[:16].replace("T", " "),
        duration(attempt.seconds),
        "-" if attempt.step is None else f"{attempt.step:,}",
        "-" if attempt.exit_code is None else str(attempt.exit_code),
    )


def _table(attempts: Sequence[PastAttempt]) -> Iterator[Line]:
    shown = attempts[-MOST_ROWS:]
    widths = (max(2, *(len(str(attempt.number)) for attempt in shown)), 16, 8, 9, 4)
    *columns, ended = COLUMNS
    yield line(*_padded(columns, widths), f"  {ended}", solid=True)
    allocation = ""
    for attempt in shown:
        yield line(
            *_padded(attempt_cells(attempt), widths),
            "  ",
            *attempt_end(attempt),
            "" if attempt.allocation == allocation else f"; on {attempt.allocation}",
            hang=46 + widths[0],
        )
        allocation = attempt.allocation
    if len(attempts) > len(shown):
        yield line(f"  {len(attempts) - len(shown):,} earlier attempts: --json has all", hang=2)


def _padded(cells: Sequence[str], widths: Sequence[int]) -> Iterator[StyledText | str]:
    for place, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        yield "  " if place in (0, 1) else " "
        yield padded(cell, width, right=place != 1)


def _unclassified(attempt: PastAttempt) -> str:
    """The cause as far as the exit code alone shows it."""
    if attempt.decision and attempt.exit_code is None:
        return "`ckptctl run` was killed"
    with suppress(ValueError):
        return f"{signal.Signals((attempt.exit_code or 0) - 128).name}, unknown cause"
    return "unknown cause"


def attempt_end(attempt: PastAttempt) -> Iterator[StyledText]:
    """How an attempt ended, by what, and what followed."""
    if attempt.ended_at is None:
        yield StyledText("running", "good")
    elif not attempt.failed:
        yield StyledText(attempt.decision or "as planned", "good")
    else:
        yield StyledText(attempt.cause or _unclassified(attempt), "bad")
    at_fault = [*(f"rank {rank}" for rank in attempt.ranks[:4]), *attempt.nodes[:4]]
    if at_fault:
        yield StyledText(f" ({listed(at_fault)})")
    if attempt.failed and attempt.decision:
        yield StyledText(f", {attempt.decision}")
