"""Scan a checkpoint root: every step, and the one that `pick` would choose.

Inspects the newest steps as `pick` does until one is chosen, and then the others at the
requested level. On an object store one flat listing shows all files of all steps; on a file
system each step is listed in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckptctl.findings import Report, Verdict
from ckptctl.formatting import command_line
from ckptctl.inspection.one_save import SaveTimes, times_of
from ckptctl.model import Level
from ckptctl.options import PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.selection.choosing import Candidate, Search
from ckptctl.selection.empty_roots import check_unnumbered
from ckptctl.selection.picking import answer_of
from ckptctl.selection.results import Scan
from ckptctl.selection.roots import list_all
from ckptctl.selection.searching import RunSearch, search
from ckptctl.selection.targets import roots_in
from ckptctl.selection.write_order import write_order

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ckptctl.options import PickKeywords

OnReport = Callable[[Report, bool, str | None], None]
"""Called with a report, whether it is the chosen one, and why `pick` skipped the step."""

NEWEST = 50
"""The default number of inspected steps."""


def scan(
    *roots: str,
    optional_roots: Collection[str] = (),
    last: int | None = NEWEST,
    on_report: OnReport | None = None,
    policy: PickPolicy = PickPolicy(),
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[PickKeywords],
) -> Scan:
    """Inspect the steps under a root or several, newest first, and find what `pick` would choose.

    `last` limits this to the newest steps, None to none; `before` continues where an
    earlier scan ended. `level` None inspects the steps that decide the choice as `pick`
    would, and the others at `listing`. `on_report` gets each report, newest first, as soon
    as it is known. The other arguments are those of `pick`.

    Raises `StorageError` if the root cannot be listed, `UsageError` for arguments and if
    the root contains no known step but unnumbered checkpoints.

    Cost: that of `pick`, which may go back further than `last`; for each other step that is
    shown, one listing and one read of each metadata, or the cost of `level`. One listing
    per folder that is not a step, at most `MAX_FOLDERS_TRIED`. On an object store that
    shows all steps, one request per 1,000 objects replaces their listings.
    """
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
    named = roots_in(roots, optional_roots)
    with ExitStack() as stack:
        done = search(
            stack,
            named,
            policy,
            requirements,
            storage,
            lambda store, pattern: list_all(store, pattern, last),
        )
        steps = [c for c in done.candidates if c not in done.no_steps]
        shown, older = steps[:last], steps[len(steps[:last]) :]
        # The chosen one is shown wherever it is.
        beyond = [c for c in older if done.chosen and done.inspect.found(c) is done.chosen]
        reports = _reports(done, [*shown, *beyond], on_report)
        n_older = len(older) - len(beyond)
        more_before = shown[-1].named.number if n_older and shown else None
        return _answer(done, requirements, reports, n_older, more_before)


def _reports(
    done: RunSearch, shown: Iterable[Candidate], on_report: OnReport | None
) -> tuple[Report, ...]:
    reports = []
    # Steps that no longer decide anything are inspected once, at the requested level.
    done.inspect.level = done.policy.level or Level.LISTING
    done.inspect.confirm = False
    reasons = reasons_of(done)
    for candidate in shown:
        report = done.inspect(candidate, Level.LISTING)
        if candidate.named.bare and not report.parts:
            continue
        reports.append(report)
        if on_report is not None:
            on_report(report, report is done.chosen, reasons.get(report.url))
    return tuple(_with_branches(done, reports))


def _with_branches(done: RunSearch, reports: Sequence[Report]) -> Iterator[Report]:
    """The reports, with a claim about the branch of each step. Cost: none; all are listed."""
    left = (Verdict.REJECTED, Verdict.SUPERSEDED)
    by_root: dict[int, list[SaveTimes]] = {}
    own: dict[str, tuple[int, SaveTimes]] = {}
    for candidate, inspected in done.inspect.inspected.items():
        times = times_of(inspected.step)
        if times is not None and inspected.report.verdict not in left:
            by_root.setdefault(candidate.root_index, []).append(times)
            own[inspected.report.url] = candidate.root_index, times
    for report in reports:
        if report is done.chosen or report.url not in own:
            yield report
            continue
        place, times = own[report.url]
        yield report.with_claim(write_order(times, by_root[place]).claim)


def reasons_of(search: Search) -> dict[str, str]:
    """Why `pick` skipped steps, by their addresses."""
    searches = (search, search.further) if search.further else (search,)
    return {over.report.url: over.reason for one in searches for over in one.passed_over}


def _answer(
    done: RunSearch,
    requirements: Requirements,
    reports: tuple[Report, ...],
    n_older: int,
    more_before: int | None,
) -> Scan:
    findings = [*done.findings]
    for root in done.opened_roots if done.n_steps else ():
        findings += check_unnumbered(root.store, root.listing)
    found = answer_of(done, requirements, "scan")
    chosen = found.chosen
    return Scan(
        root=done.roots.first,
        roots=done.roots.urls,
        exists=any(one.listing.exists for one in done.opened_roots),
        reports=reports,
        chosen=chosen.url if chosen else None,
        findings=tuple(findings),
        n_steps=done.n_steps,
        exit_code=found.exit_code,
        next_command=_deeper(chosen) if chosen else found.next_command,
        message=found.message,
        refused=tuple(reasons_of(done).items()),
        n_older=n_older,
        more_before=more_before,
        reason=found.reason,
    )


def _deeper(chosen: Report) -> str | None:
    deeper = chosen.level.deeper
    return command_line("verify", chosen.url, "--level", deeper.value) if deeper else None
