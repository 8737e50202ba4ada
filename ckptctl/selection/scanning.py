"""Scan a checkpoint root: every step, and the one that `pick` would take.

Looks at the newest steps as `pick` does until one is chosen, and then at the
others as deep as was asked for. On an object store one flat listing shows all
files of all steps; on a file system each step is listed when its turn comes.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

from ckptctl.findings import EXIT_NONE_USABLE, Finding, Report
from ckptctl.formats.frameworks.layouts import compile_pattern
from ckptctl.inspection.marks_file import check_marks_file
from ckptctl.model import Level
from ckptctl.options import Requirements, known_level, not_negative
from ckptctl.selection.choosing import Candidate, Choice, Policy, choose, in_order
from ckptctl.selection.empty_roots import Beginning, check_unnumbered
from ckptctl.selection.picking import (
    CachingInspector,
    beginning_of,
    candidates_of,
    found_message,
    none_usable,
    root_findings,
    storage_corruption,
)
from ckptctl.selection.results import Scan
from ckptctl.selection.roots import list_all
from ckptctl.selection.tiers import Roots, Tier, open_tiers, roots_in
from ckptctl.storage.opening import open_store

OnReport = Callable[[Report, bool, str | None], None]
"""Is told a report, whether it is the chosen one, and why `pick` passed the step over."""

NEWEST = 50
"""How many steps are inspected where nobody says how many."""

_DEEPER = {Level.LISTING: Level.STRUCTURE, Level.STRUCTURE: Level.CONTENT}


def scan(
    *roots: str,
    optional_roots: Collection[str] = (),
    level: Level | None = None,
    last: int | None = NEWEST,
    pattern: str | None = None,
    require: Collection[str] = (),
    allow_missing_state: bool = False,
    accept_unverifiable: bool = False,
    before: int | None = None,
    skip: Collection[int] = (),
    max_fallback: int = 2,
    world_size: int | None = None,
    saved_world_size: int | None = None,
    grace_s: float = 600.0,
    require_seal: bool = False,
    key: bytes | None = None,
    marks: str | None = None,
    on_report: OnReport | None = None,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
) -> Scan:
    """Inspect the steps under a root or several, newest first, and find what `pick` would take.

    `last` keeps to the newest so many, None to all of them; `before` goes on where an
    earlier scan ended. `level` None inspects the steps that decide the choice as `pick`
    would, and the others at `listing`. `on_report` gets each report, newest first, as soon
    as it is known. The other arguments are those of `pick`.

    Raises `StorageError` when the root cannot be listed, `UsageError` for arguments and
    where the root holds no step that it knows, but something that is one.

    Cost: what `pick` costs, which may go back further than `last`; for each other step that
    is shown, one listing and one read of each metadata, or what `level` takes. One listing
    for each folder that is no step, at most `MAX_FOLDERS_TRIED`. On an object store where
    all steps are shown, one request for 1,000 objects takes the place of their listings.
    """
    asked = Requirements(
        require=require,
        world_size=world_size,
        saved_world_size=saved_world_size,
        grace_s=grace_s,
        require_seal=require_seal,
        key=key,
        marks=marks,
    )
    check_marks_file(asked.marks)
    named = roots_in(roots, optional_roots)
    fallback = int(not_negative("max-fallback", max_fallback))
    policy = Policy(allow_missing_state, accept_unverifiable, before, frozenset(skip), fallback)
    level = known_level(level)
    compiled = compile_pattern(pattern)
    with ExitStack() as stack:
        tiers = open_tiers(
            stack,
            named,
            lambda store: list_all(store, compiled, last),
            storage_options=storage_options,
            endpoint_url=endpoint_url,
            timeout_s=timeout_s,
        )
        looker = CachingInspector(tiers, asked, level)
        candidates = in_order(candidates_of(tiers), policy)
        choice = choose(candidates, looker, policy)
        steps = [c for c in candidates if c not in choice.no_steps]
        shown, older = steps[:last], steps[len(steps[:last]) :]
        # The chosen one is shown wherever it is.
        beyond = [c for c in older if choice.chosen and looker.found(c) is choice.chosen]
        reports = _reports([*shown, *beyond], looker, choice, level, on_report)
        findings = root_findings(tiers, choice, compiled)
        opened = partial(
            open_store,
            storage_options=storage_options,
            endpoint_url=endpoint_url,
            timeout_s=timeout_s,
        )
        begins = None
        if choice.chosen is None:
            begins = beginning_of(tiers, choice, findings, compiled, opened)
        scan = _answer(named, tiers, choice, reports, policy, findings, begins, compiled)
        n_older = len(older) - len(beyond)
        more_before = shown[-1].named.number if n_older and shown else None
        return replace(scan, n_older=n_older, more_before=more_before)


def _reports(
    shown: Iterable[Candidate],
    looker: CachingInspector,
    choice: Choice,
    level: Level | None,
    on_report: OnReport | None,
) -> tuple[Report, ...]:
    reports = []
    # What decides nothing any more is looked at no deeper than was asked for, and once.
    looker.level = level or Level.LISTING
    looker.confirm = False
    reasons = reasons_of(choice)
    for candidate in shown:
        report = looker(candidate, Level.LISTING)
        if candidate.named.bare and not report.parts:
            continue
        reports.append(report)
        if on_report is not None:
            on_report(report, report is choice.chosen, reasons.get(report.url))
    return tuple(reports)


def reasons_of(choice: Choice) -> dict[str, str]:
    """Why `pick` passed steps over, by their addresses."""
    searches = (choice, choice.further) if choice.further else (choice,)
    return {over.report.url: over.reason for one in searches for over in one.passed_over}


def _answer(
    named: Roots,
    tiers: Sequence[Tier],
    choice: Choice,
    reports: tuple[Report, ...],
    policy: Policy,
    findings: list[Finding],
    begins: Beginning | None,
    pattern: re.Pattern[str] | None,
) -> Scan:
    chosen = choice.chosen
    n_steps = len(candidates_of(tiers)) - len(choice.no_steps)
    for tier in tiers if n_steps else ():
        findings += check_unnumbered(tier.store, tier.listing, pattern)
    message, next_command = _in_words(named, choice, policy, n_steps, begins)
    return Scan(
        root=named.first,
        roots=named.urls,
        exists=any(one.listing.exists for one in tiers),
        reports=reports,
        chosen=chosen.url if chosen else None,
        findings=tuple(findings),
        n_steps=n_steps,
        exit_code=begins.exit_code if begins else choice.exit_code,
        next_command=next_command,
        message=message,
        refused=tuple(reasons_of(choice).items()),
    )


def _in_words(
    roots: Roots, choice: Choice, policy: Policy, n_steps: int, begins: Beginning | None
) -> tuple[str, str | None]:
    """The answer in the words of `pick`, and what to run next."""
    if choice.chosen is not None:
        return found_message(choice, choice.chosen), _deeper(choice.chosen)
    if begins is None:
        return none_usable(roots, choice, policy, n_steps)
    if begins.exit_code == EXIT_NONE_USABLE:
        return begins.message, storage_corruption(roots)
    return begins.message, f"ckptctl explain {begins.exit_code}"


def _deeper(chosen: Report) -> str | None:
    deeper = _DEEPER.get(chosen.level)
    if deeper is None:
        return None
    return f"ckptctl verify {shlex.quote(chosen.url)} --level {deeper.value}"
