"""What is under a checkpoint root, and which step would `pick` take?

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

from ckptctl.findings import EXIT_FRESH, Report
from ckptctl.formats.layouts import compile_pattern
from ckptctl.judge.arguments import conditions, known_level
from ckptctl.judge.choosing import Candidate, Choice, Policy, choose, in_order
from ckptctl.judge.picking import Looker, candidates_of, check_all_empty, root_findings
from ckptctl.judge.results import Scan
from ckptctl.judge.roots import RootListing, list_root, read_listing
from ckptctl.judge.tiers import Roots, Tier, Trees, open_tiers, roots_in
from ckptctl.model import FileInfo, Level
from ckptctl.storage.contract import Kind, Store

OnReport = Callable[[Report, bool], None]

_DEEPER = {Level.LISTING: Level.STRUCTURE, Level.STRUCTURE: Level.CONTENT}


def scan(
    *roots: str,
    optional_roots: Collection[str] = (),
    level: Level | None = None,
    last: int | None = None,
    pattern: str | None = None,
    require: Collection[str] = (),
    weights_ok: bool = False,
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
    """Look at every step under a root or several, newest first, and at what `pick` would take.

    `level` None looks at the steps that decide the choice as `pick` would, and at
    the others at `listing`. `last` keeps to the newest so many. `on_report` gets
    each report, and whether it is the chosen one, as soon as it is known, newest
    first. The other arguments are those of `pick`.

    Raises `StorageError` when the root cannot be listed, `UsageError` for arguments and
    where the root holds no step that it knows, but something that is one.

    Cost: on an object store one request per 1,000 objects and one for each
    metadata; on a file system one listing for each step, and the reads of `pick`.
    """
    asked = conditions(
        require,
        world_size,
        saved_world_size,
        grace_s,
        require_seal=require_seal,
        key=key,
        marks=marks,
    )
    named = roots_in(roots, optional_roots)
    level = known_level(level)
    compiled = compile_pattern(pattern)
    with ExitStack() as stack:
        tiers = open_tiers(
            stack,
            named,
            lambda store: _list_all(store, compiled, flat=last is None),
            storage_options=storage_options,
            endpoint_url=endpoint_url,
            timeout_s=timeout_s,
        )
        looker = Looker(tiers, asked, level)
        policy = Policy(weights_ok=weights_ok)
        candidates = in_order(candidates_of(tiers), policy)
        choice = choose(candidates, looker, policy)
        shown = [c for c in candidates if c not in choice.no_steps][:last]
        reports = _reports(shown, looker, choice, level, on_report)
        return _answer(named, tiers, choice, reports, len(candidates), compiled)


def _list_all(
    store: Store, pattern: re.Pattern[str] | None, *, flat: bool
) -> tuple[RootListing, Trees]:
    """The root's listing, and where it came with it, the files of each step."""
    if store.kind is not Kind.OBJECT or not flat:
        return list_root(store, pattern), {}
    trees: dict[str, list[FileInfo]] = {}
    top: list[FileInfo] = []
    for file in store.list_tree(""):
        folder, slash, path = file.path.partition("/")
        if not slash:
            top.append(file)
            trees[folder] = [file]
            continue
        trees.setdefault(folder, []).append(replace(file, path=path))
    folders = [FileInfo(name, 0, kind="dir") for name in trees if name not in {f.path for f in top}]
    return read_listing([*top, *folders], pattern), trees


def _reports(
    shown: Iterable[Candidate],
    looker: Looker,
    choice: Choice,
    level: Level | None,
    on_report: OnReport | None,
) -> tuple[Report, ...]:
    reports = []
    # What decides nothing any more is looked at no deeper than was asked for, and once.
    looker.level = level or Level.LISTING
    looker.confirm = False
    for candidate in shown:
        report = looker(candidate, Level.LISTING)
        if candidate.named.bare and not report.parts:
            continue
        reports.append(report)
        if on_report is not None:
            on_report(report, report is choice.chosen)
    return tuple(reports)


def _answer(
    named: Roots,
    tiers: Sequence[Tier],
    choice: Choice,
    reports: tuple[Report, ...],
    n_steps: int,
    pattern: re.Pattern[str] | None,
) -> Scan:
    chosen = choice.chosen
    findings = root_findings(tiers, choice, pattern)
    empty = len(choice.no_steps) == n_steps
    gone = empty and any(finding.code == "pointer.differs" for finding in findings)
    if empty:
        check_all_empty(tiers, pattern)
    return Scan(
        root=named.first,
        roots=named.urls,
        exists=any(one.listing.exists for one in tiers),
        reports=reports,
        chosen=chosen.url if chosen else None,
        findings=tuple(findings),
        n_steps=n_steps - len(choice.no_steps),
        exit_code=0 if chosen else choice.exit_code if gone or not empty else EXIT_FRESH,
        next_command=_next_command(tiers, chosen),
    )


def _next_command(tiers: Sequence[Tier], chosen: Report | None) -> str | None:
    if chosen is not None:
        deeper = _DEEPER.get(chosen.level)
        if deeper is None:
            return f"ckptctl show {shlex.quote(chosen.url)}"
        return f"ckptctl verify {shlex.quote(chosen.url)} --level {deeper.value}"
    with_steps = [one for one in tiers if one.listing.steps]
    if with_steps:
        newest = max(with_steps, key=lambda one: one.listing.steps[0].number)
        return f"ckptctl verify {shlex.quote(newest.store.url)}@latest"
    return f"ckptctl explain {EXIT_FRESH}"
