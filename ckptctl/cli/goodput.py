"""`ckptctl history`, `cost` and `data`: what a run's time and samples were spent on."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated

import ckptctl
from ckptctl.cli.options import MetricsOpt, OfNames
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.pictures import Symbol, glyph
from ckptctl.cli.rendering import EMPTY, Line, Style, StyledText, line, next_line, padded
from ckptctl.formatting import counted, duration, listed, percent, safe, size
from ckptctl.goodput.data_use import FIRST_IDS, DataUse, EpochState, EpochUse
from ckptctl.goodput.estimating import Given, RecoveryCost
from ckptctl.goodput.history import BUCKETS, Goodput, Mtbf, PastAttempt, RootHistory, RunHistory
from ckptctl.options import Parameter, StorageOptions

EXAMPLES: Mapping[str, tuple[str, ...]] = {
    "history": (
        "ckptctl history /shared/ckpt/run-1234",
        "ckptctl history /shared/ckpt/* --metrics /var/lib/node_exporter/ckptctl.prom --quiet",
    ),
    "cost": (
        "ckptctl cost /shared/ckpt/run-1234 --mtbf 8h --load 4m --reschedule 5m",
        "ckptctl cost --interval 1h --save-time 60 --mtbf 1.8h",
    ),
    "data": (
        "ckptctl data /shared/ckpt/run-1234",
        "ckptctl data /shared/ckpt/run-1234@1200 --json",
    ),
}
EXIT_CODES: Mapping[str, tuple[int, ...]] = {
    "history": (0, 2, 75, 77),
    "cost": (0, 2, 75, 77),
    "data": (0, 2, 10, 11, 25, 26, 30, 31, 75, 77),
}

MOST_ATTEMPTS = 20
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
        from ckptctl.cli.monitoring import history_samples, write_metrics

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
        lines = [*_root_lines(root, own, width, unicode=unicode, alone=len(found.roots) == 1)]
        yield from (EMPTY, *lines) if lines else ()


def _root_lines(
    history: RootHistory, attempts: Sequence[PastAttempt], width: int, *, unicode: bool, alone: bool
) -> Iterator[Line]:
    goodput = history.goodput
    if not alone:
        share = None if goodput is None else goodput.goodput
        words = f"  goodput {'unknown' if share is None else percent(share)}"
        yield line(StyledText(history.root, "name"), words, solid=True)
    if goodput is not None and attempts:
        if goodput.elapsed_s > 0:
            yield line("  ", *_bar(attempts, max(1, width - 2), unicode=unicode), solid=True)
        if alone:
            yield EMPTY
            yield from _time_lines(attempts, goodput, unicode=unicode)
            yield EMPTY
            yield line("  MTBF ", _mtbf(goodput.mtbf), hang=4)
            if goodput.recent != goodput.mtbf:
                yield line("  in the last 24 h of running ", _mtbf(goodput.recent), hang=4)
            yield EMPTY
            yield from _attempt_lines(attempts)
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


def _time_lines(
    attempts: Sequence[PastAttempt], goodput: Goodput, *, unicode: bool
) -> Iterator[Line]:
    """How the time was spent: a row for each kind, with its bucket."""
    for name, mark in _MARKS.items():
        seconds = [value for attempt in attempts if (value := getattr(attempt, name)) is not None]
        if name == "other_s":
            seconds = [_seconds(attempt, name) for attempt in attempts]
        if name in ("other_s", "idle_s") and not sum(seconds) > 0:
            continue
        value = duration(sum(seconds), digits=3) if seconds else "unknown"
        share = sum(seconds) / goodput.elapsed_s if goodput.elapsed_s > 0 else 0.0
        yield line(
            "  ",
            glyph(mark, unicode),
            f" {mark.word:<16}{value:>9}",
            f"{percent(share):>9}  " if seconds else " " * 11,
            _BUCKET_OF[name],
            hang=1,  # the longest bucket fits into 40 columns
            solid=True,
        )
    if goodput.ettr is not None and goodput.goodput is not None:
        shares = f"goodput {percent(goodput.goodput)}, ETTR {percent(goodput.ettr)}"
        yield line(f"  {shares} of all time", hang=2)


def _mtbf(measured: Mtbf) -> str:
    if measured.low_s is None:
        return "unknown"
    ran = f"{counted(measured.failures, 'failure')} in {duration(measured.observed_s, digits=3)}"
    low = duration(measured.low_s, digits=2)
    if measured.mean_s is None or measured.high_s is None:
        return f"unknown, at least {low} (95 %); {ran}"
    high = duration(measured.high_s, digits=2)
    return f"{duration(measured.mean_s, digits=3)}, 95 %: {low} to {high}; {ran}"


def _attempt_lines(attempts: Sequence[PastAttempt]) -> Iterator[Line]:
    shown = attempts[-MOST_ATTEMPTS:]
    width = max(2, *(len(str(attempt.number)) for attempt in shown))

    def row(number: str, started: str, ran: str, step: str, exit_code: str) -> str:
        return f"  {number:>{width}}  {started:<16} {ran:>8} {step:>9} {exit_code:>4}  "

    yield line(row("#", "started (UTC)", "ran", "step", "exit"), "ended", solid=True)
    allocation = ""
    for attempt in shown:
        cells = row(
            str(attempt.number),
            attempt.started_at[:16].replace("T", " "),
            duration(attempt.seconds),
            "-" if attempt.step is None else f"{attempt.step:,}",
            "-" if attempt.exit_code is None else str(attempt.exit_code),
        )
        on = "" if attempt.allocation == allocation else f"; on {attempt.allocation}"
        yield line(cells, *_attempt_end(attempt), on, hang=46 + width)
        allocation = attempt.allocation
    if len(attempts) > len(shown):
        yield line(f"  {len(attempts) - len(shown):,} earlier attempts: --json has all", hang=2)


def _attempt_end(attempt: PastAttempt) -> Iterator[StyledText]:
    """How an attempt ended, by what, and what followed."""
    cause = attempt.cause
    if attempt.ended_at is None:
        yield StyledText("running", "good")
    elif not attempt.failed:
        yield StyledText(attempt.decision or "as planned", "good")
    elif not cause and attempt.decision and attempt.exit_code is None:
        yield StyledText("`ckptctl run` was killed", "bad")
    elif not cause:
        signals = {128 + number: f"{number.name}, " for number in signal.Signals}
        yield StyledText(f"{signals.get(attempt.exit_code or 0, '')}unknown cause", "bad")
    else:
        yield StyledText(cause, "bad")
    at_fault = [*(f"rank {rank}" for rank in attempt.ranks[:4]), *attempt.nodes[:4]]
    if at_fault:
        yield StyledText(f" ({listed(at_fault)})")
    if attempt.failed and attempt.decision:
        yield StyledText(f", {attempt.decision}")


def cost(
    root: Annotated[
        str | None,
        Parameter("ROOT", "Folder or URL of a run; what its attempts recorded need not be given."),
    ] = None,
    interval: Annotated[
        float | None,
        Parameter(
            "--interval TIME",
            "Time from save to save: 30m, 1.5h, 3600.",
            variable="CKPTCTL_SAVE_INTERVAL",
        ),
    ] = None,
    save_time: Annotated[
        float | None, Parameter("--save-time TIME", "How long training stops for a save.")
    ] = None,
    mtbf: Annotated[
        float | None, Parameter("--mtbf TIME", "Mean time between failures of the whole job.")
    ] = None,
    reschedule: Annotated[
        float | None, Parameter("--reschedule TIME", "T1: time from the failure to new processes.")
    ] = None,
    connect: Annotated[
        float | None, Parameter("--connect TIME", "T2: time until the ranks are connected.")
    ] = None,
    load: Annotated[
        float | None, Parameter("--load TIME", "T3: time until the checkpoint is loaded.")
    ] = None,
    compiling: Annotated[
        float | None, Parameter("--compile TIME", "T4: time until the model is compiled.")
    ] = None,
    print_cadence: Annotated[
        bool,
        Parameter(
            "--print-cadence",
            "Print only how the interval compares with the time between failures: "
            "short-enough, longer-than-best, above-mtbf or unknown; the rest on standard error.",
            hidden=True,
        ),
    ] = False,
    *,
    requirements: OfNames,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Estimate what a failure of a run costs, and the best interval between saves.

    T = T0 + T1 + T2 + T3 + T4: half an interval is repeated, then rescheduling, connecting, loading
    and compiling. With a mean time between failures: the best interval (Young, Daly), and the share
    of time spent on training that is kept. With --quiet the best interval is printed, in seconds.
    """
    found = ckptctl.recovery_cost(
        root,
        interval_s=interval,
        save_s=save_time,
        mtbf_s=mtbf,
        reschedule_s=reschedule,
        connect_s=connect,
        load_s=load,
        compile_s=compiling,
        pattern=requirements.pattern,
        storage=storage,
    )
    bare = () if found.daly_s is None else (f"{found.daly_s:.0f}",)
    out.answer(
        document_of("cost", found),
        lambda: cost_lines(found),
        bare=(found.cadence.value,) if print_cadence else bare,
        bare_only=print_cadence,
    )
    return found.exit_code


_NAMES = {
    "interval": "from save to save",
    "save": "a save takes",
    "mtbf": "between failures",
    "reschedule": "T1 rescheduling",
    "connect": "T2 connecting",
    "load": "T3 loading",
    "compile": "T4 compiling",
    "step": "size of a step",
}


def cost_lines(found: RecoveryCost) -> Iterator[Line]:
    """The answer, what it rests on, and what follows from it."""
    yield line(StyledText(found.message, "strong"), hang=2)
    yield EMPTY
    for figure in found.given:
        value = (
            size(round(figure.value)) if figure.unit == "B" else duration(figure.value, digits=3)
        )
        if figure.name in _NAMES and (figure.value or figure.source != "given"):
            yield _cost_row(_NAMES[figure.name], value, _origin(figure))
    if found.unknown and found.per_failure_s is not None:
        names = listed([_NAMES[name] for name in found.unknown])
        yield line(f"  not counted, because unknown: {names}", hang=4)
    yield EMPTY
    if found.rollback_s is not None and found.per_failure_s is not None:
        lost = next((figure for figure in found.given if figure.name == "lost"), None)
        source = "half an interval" if lost is None else _origin(lost)
        yield _cost_row("T0 trained again", duration(found.rollback_s, digits=3), source)
        yield _cost_row(
            "a failure costs", duration(found.per_failure_s, digits=3), "T0 + T1 + T2 + T3 + T4"
        )
    if found.daly_s is not None:
        best = duration(found.daly_s, digits=3)
        yield _cost_row("best, Daly", best, "training between two saves")
    if found.share is not None:
        low, high = found.share_low, found.share_high
        bounds = "" if low is None or high is None else f"; 95 %: {percent(low)} to {percent(high)}"
        source = f"of all time, as it is saved now{bounds}"
        yield _cost_row("effective time", percent(found.share), source)
    if found.best_share is not None:
        yield _cost_row("at the best", percent(found.best_share), "with Daly's interval")
    if found.goodput is not None:
        yield _cost_row("so far", percent(found.goodput), "of the recorded time (ckptctl history)")
    yield from next_line(found.next_command)


def _origin(one: Given) -> str:
    """Where a number is from, with what shows how certain it is."""
    if one.n is None:
        return one.source
    if one.low is None or one.high is None:
        return f"{one.source}, mean of {one.n:,}"
    low, high = duration(one.low, digits=2), duration(one.high, digits=2)
    return f"{one.source}, {one.n:,} times; 95 %: {low} to {high}"


def _cost_row(name: str, value: str, source: str) -> Line:
    return line("  ", padded(name, 18), padded(value, 12, right=True), "  ", source, hang=34)


MOST_EPOCHS = 20
"""Epochs in the table; those that are not as they should be, then the newest. JSON has all."""


def data(
    root: Annotated[
        str,
        Parameter(
            "ROOT", "Root of a run, whose ledger is in its newest usable step; or ROOT@1200."
        ),
    ],
    samples: Annotated[
        int | None,
        Parameter(
            "--samples N",
            "Samples of the data set, whose ids are the numbers from 0 on, where the ledger does "
            "not hold that.",
            min=1,
        ),
    ] = None,
    *,
    requirements: OfNames,
    storage: StorageOptions,
    out: Output,
) -> int:
    """Show which samples of each epoch were trained once, repeated or skipped.

    Reads the data ledger that a Checkpointer keeps in each step. It covers all attempts of the
    branch that the step is on: what an abandoned branch trained does not count. With --quiet only
    the verdict is printed: found, excluded or unknown.
    """
    use = ckptctl.data_use(root, samples=samples, requirements=requirements, storage=storage)
    out.answer(document_of("data", use), lambda: data_lines(use), bare=(use.verdict,))
    return use.exit_code


_STYLES: Mapping[EpochState, Style] = {
    EpochState.ONCE: "good",
    EpochState.ONCE_SO_FAR: "good",
    EpochState.WRONG: "bad",
    EpochState.UNKNOWN: "warn",
}
_VERDICTS: Mapping[str, Style] = {"found": "bad", "excluded": "good", "unknown": "warn"}
_EPOCH_COLUMNS = ("epoch", "samples", "trained", "once", "repeated", "skipped", "to come")
_EPOCH_WIDTHS = (6, 11, 11, 11, 9, 9, 9)


def data_lines(use: DataUse) -> Iterator[Line]:
    """The answer, a table of the epochs, and what is known of those that are not right."""
    yield line(StyledText(use.message, _VERDICTS[use.verdict]), hang=2)
    if use.step is not None and use.since is not None:
        yield line(f"  {safe(use.source)}: steps {use.since + 1:,} to {use.step:,}", hang=4)
    if use.in_flight_steps:
        yield line(
            f"  in flight: {counted(use.in_flight_steps, 'step')} after it, whose samples no step "
            "holds: a resume trains them again, and they do not count as repeated",
            hang=4,
        )
    doubted = (EpochState.WRONG, EpochState.UNKNOWN)
    wrong = [epoch for epoch in use.epochs if epoch.state in doubted]
    shown = {epoch.epoch: epoch for epoch in (*wrong[:MOST_EPOCHS], *use.epochs[-MOST_EPOCHS:])}
    if shown:
        yield EMPTY
        yield _epoch_row(_EPOCH_COLUMNS, "", "")
        for _, epoch in sorted(shown.items()):
            numbers = (
                *(epoch.n_samples, epoch.trained, epoch.once),
                *(epoch.repeated, epoch.skipped, epoch.to_come),
            )
            cells = ("unknown" if number is None else f"{number:,}" for number in numbers)
            row = (str(epoch.epoch), *cells)
            yield _epoch_row(row, epoch.state.value, _STYLES[epoch.state])
        if len(shown) < len(use.epochs):
            yield line(f"  {len(use.epochs) - len(shown):,} more epochs: --json has all", hang=2)
    for epoch in wrong[:MOST_EPOCHS]:
        yield EMPTY
        yield from _epoch_details(epoch)
    yield from next_line(use.next_command)


def _epoch_row(cells: tuple[str, ...], state: str, style: Style) -> Line:
    columns = zip(cells, _EPOCH_WIDTHS, strict=True)
    numbers = (padded(cell, width, right=True) for cell, width in columns)
    return line(*numbers, "  ", StyledText(state, style), solid=True)


def _epoch_details(epoch: EpochUse) -> Iterator[Line]:
    """The first samples, and why the rest is not known, of one epoch."""
    where = f"  epoch {epoch.epoch}"
    if epoch.after_step is not None:
        yield line(f"{where}: first after step {epoch.after_step:,}", hang=4)
    for word, ids, n in (
        ("repeated", epoch.first_repeated, epoch.repeated),
        ("skipped", epoch.first_skipped, epoch.skipped),
    ):
        if ids:
            more = ", …" if n is not None and n > FIRST_IDS else ""
            yield line(
                f"{where}: {word}: {', '.join(safe(str(name)) for name in ids)}{more}", hang=4
            )
    if epoch.why is not None:
        yield line(f"{where}: {epoch.why}", hang=4)
    if epoch.would_show is not None:
        yield line(f"{where}: would show it: {epoch.would_show}", hang=4)
