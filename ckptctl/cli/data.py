"""`ckptctl data`: which samples a run trained once, repeated or skipped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated

import ckptctl
from ckptctl.cli.options import OfNames
from ckptctl.cli.output import Output, document_of
from ckptctl.cli.rendering import EMPTY, Line, Style, StyledText, line, next_line, padded
from ckptctl.formatting import counted, safe
from ckptctl.goodput.data_use import FIRST_IDS, DataUse, EpochState, EpochUse
from ckptctl.options import Parameter, StorageOptions

EXAMPLES = (
    "ckptctl data /shared/ckpt/run-1234",
    "ckptctl data /shared/ckpt/run-1234@1200 --json",
)
EXIT_CODES = (0, 2, 10, 11, 25, 26, 30, 31, 75, 77)

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
_COLUMNS = ("epoch", "samples", "trained", "once", "repeated", "skipped", "to come")
_WIDTHS = (6, 11, 11, 11, 9, 9, 9)


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
        yield _row(_COLUMNS, "", "")
        for _, epoch in sorted(shown.items()):
            yield _row(_cells(epoch), epoch.state.value, _STYLES[epoch.state])
        if len(shown) < len(use.epochs):
            yield line(f"  {len(use.epochs) - len(shown):,} more epochs: --json has all", hang=2)
    for epoch in wrong[:MOST_EPOCHS]:
        yield EMPTY
        yield from _details(epoch)
    yield from next_line(use.next_command)


def _row(cells: tuple[str, ...], state: str, style: Style) -> Line:
    padded_cells = (padded(cell, n, right=True) for cell, n in zip(cells, _WIDTHS, strict=True))
    return line(*padded_cells, "  ", StyledText(state, style), solid=True)


def _cells(epoch: EpochUse) -> tuple[str, ...]:
    numbers = (
        *(epoch.n_samples, epoch.trained, epoch.once),
        *(epoch.repeated, epoch.skipped, epoch.to_come),
    )
    return (str(epoch.epoch), *("unknown" if one is None else f"{one:,}" for one in numbers))


def _details(epoch: EpochUse) -> Iterator[Line]:
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
            yield line(f"{where}: {word}: {', '.join(safe(str(one)) for one in ids)}{more}", hang=4)
    if epoch.why is not None:
        yield line(f"{where}: {epoch.why}", hang=4)
    if epoch.would_show is not None:
        yield line(f"{where}: would show it: {epoch.would_show}", hang=4)
