"""Which old steps may go?

Only steps that are whole, sealed and resumable count as kept; what is pinned, or named by the
caller (the step resumed from, the one in flight), stays whatever its number is. What is
damaged, unknown or no step at all is left to a person. How a step goes is the question of
`removing`.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl.errors import PathNotFound, UsageError
from ckptctl.findings import Report, Verdict
from ckptctl.formats.bounded_json import read_json
from ckptctl.formats.layouts import OWN_FOLDER, StepName, compile_pattern, is_own
from ckptctl.formats.marks import Word
from ckptctl.judge.arguments import conditions, known_level
from ckptctl.judge.empty_roots import check_has_steps
from ckptctl.judge.looking import Looked, look
from ckptctl.judge.removing import remove_step
from ckptctl.judge.reporting import Conditions
from ckptctl.judge.roots import RootListing, list_root
from ckptctl.model import Level
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store

_OLD = (Verdict.COMPLETE, Verdict.REJECTED, Verdict.SUPERSEDED)
_MAX_RECORD = 1 << 20


@dataclass(frozen=True, slots=True)
class Fate:
    """What retention means for one step: whether it `goes`, and why or why not."""

    number: int
    url: str
    verdict: Verdict
    n_bytes: int
    goes: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Pruned:
    """What `prune` did, or would do: the fate of every step, newest first.

    `applied` says that what goes is gone; `n_bytes` is the size of all that goes.
    """

    root: str
    keep: int
    applied: bool
    fates: tuple[Fate, ...]
    n_bytes: int
    message: str
    exit_code: int
    next_command: str | None


@dataclass(frozen=True, slots=True)
class Surplus:
    """A step that retention does not keep, as it was found."""

    named: StepName
    report: Report


def prune(
    root: str,
    keep: int,
    *,
    apply: bool = False,
    unsealed: bool = False,
    level: Level | None = None,
    pattern: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
) -> Pruned:
    """Remove what is older than the newest `keep` good steps; without `apply` only say what goes.

    Good is whole, sealed and resumable: with `unsealed`, steps without a seal count too. A
    step that lacks the optimizer which others hold does not count, nor does one that is
    rejected, superseded, damaged or unknown. `level` is how deep to look at what counts;
    None is as deep as is cheap. Pinned steps stay, and the one that the newest attempt
    resumed from; damaged ones are left to a person. Just before a step goes it is looked
    at again.

    Raises `UsageError` for `keep` below 1 and for a path that is no root, `StorageError`
    where the root cannot be listed or a step cannot be removed. Cost: one listing, a look
    at each step; on an object store a request for each object that goes.
    """
    if keep < 1:
        raise UsageError(f"--keep is {keep}; at least 1 good step is kept")
    with open_store(
        root, storage_options=storage_options, endpoint_url=endpoint_url, timeout_s=timeout_s
    ) as store:
        compiled = compile_pattern(pattern)
        listing = list_root(store, compiled)
        check_has_steps(store, listing, compiled)
        looks = _looks(store, listing, _ASKED, known_level(level))
        protected = {number for number in (_resumed_from(store),) if number is not None}
        fates = _fates(looks, keep, protected, unsealed=unsealed)
        going = [(named, fate) for (named, _), fate in zip(looks, fates, strict=True) if fate.goes]
        done: list[Fate] = []
        for named, fate in reversed(going if apply else []):
            looked = look(store, named, _ASKED, level=Level.LISTING)
            if _stays(looked, protected) is None:
                remove_step(store, named.name)
                done.append(fate)
        if apply:
            late = {fate for _, fate in going} - set(done)
            fates = tuple(
                replace(one, goes=False, reason="changed meanwhile") if one in late else one
                for one in fates
            )
        return _pruned(root, keep, fates, apply=apply, unsealed=unsealed)


def surplus(store: Store, keep: int, protected: Collection[int] = ()) -> tuple[Surplus, ...]:
    """The steps older than the newest `keep` that are whole and sealed, oldest first.

    Empty where there are fewer than that: then nothing may go. For who holds the root: a save
    that is not finished is nobody's any more. Cost: one listing, and a look at level `listing`
    at every step.
    """
    looks = _looks(store, list_root(store), _NONE_SAVING, Level.LISTING)
    fates = _fates(looks, keep, protected, unsealed=False)
    return tuple(
        Surplus(named, looked.report)
        for (named, looked), fate in reversed(list(zip(looks, fates, strict=True)))
        if fate.goes
    )


_ASKED = conditions((), None, None, 600.0)
_NONE_SAVING = conditions((), None, None, 0.0)


def _looks(
    store: Store, listing: RootListing, asked: Conditions, level: Level | None
) -> list[tuple[StepName, Looked]]:
    return [(named, look(store, named, asked, level=level)) for named in listing.steps]


def _fates(
    looks: Sequence[tuple[StepName, Looked]],
    keep: int,
    protected: Collection[int],
    *,
    unsealed: bool,
) -> tuple[Fate, ...]:
    whole = [one for _, one in looks if one.report.verdict is Verdict.COMPLETE]
    optimizer = any(one.report.state.optimizer.found for one in whole)
    n_kept = 0
    fates = []
    for named, looked in looks:
        report = looked.report
        if n_kept < keep:
            goes, (counts, reason) = False, _counts(report, optimizer, unsealed=unsealed)
            n_kept += counts
        else:
            stays = _stays(looked, protected)
            goes, reason = stays is None, stays or f"older than the {_newest(keep)}"
        fates.append(Fate(named.number, report.url, report.verdict, report.n_bytes, goes, reason))
    return tuple(fates)


def _counts(report: Report, optimizer: bool, *, unsealed: bool) -> tuple[bool, str]:
    """Whether a step is one of those to keep, and what it is called."""
    if report.verdict is not Verdict.COMPLETE:
        return False, f"{report.verdict.value}: does not count"
    if optimizer and not report.state.optimizer.found:
        return False, "whole, but without an optimizer: does not count"
    if report.seal is None and not unsealed:
        return False, "whole, but not sealed: does not count"
    return True, "kept: whole and sealed" if report.seal else "kept: whole, not sealed"


def _stays(looked: Looked, protected: Collection[int]) -> str | None:
    """Why a step stays although it is old; None where it may go."""
    report = looked.report
    marks = looked.notes.marks if looked.notes else ()
    if any(mark.word is Word.PINNED for mark in marks):
        return "pinned"
    if report.number in protected:
        return "the newest attempt resumed from it"
    left_over = all(is_own(file.path) for file in looked.step.files)
    if not looked.step.parts and not left_over:  # else a removal was cut short
        return "not recognised as a checkpoint"
    if report.verdict in _OLD or (report.verdict is Verdict.INCOMPLETE and report.interrupted):
        return None
    if report.verdict is Verdict.IN_PROGRESS:
        return "in-progress: it may still be written"
    return f"{report.verdict.value}: left to a person"


def _resumed_from(store: Store) -> int | None:
    """The step that the newest attempt on record resumed from."""
    try:
        names = [one.path for one in store.list_dir(f"{OWN_FOLDER}/attempts")]
        newest = max(name for name in names if name.endswith(".resume.json"))
        record = read_json(store, newest, max_bytes=_MAX_RECORD)
    except (PathNotFound, ValueError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return step if isinstance(step, int) else None


def _pruned(
    root: str, keep: int, fates: tuple[Fate, ...], *, apply: bool, unsealed: bool
) -> Pruned:
    going = [one for one in fates if one.goes]
    n_kept = sum(one.reason.startswith("kept") for one in fates)
    n_bytes = sum(one.n_bytes for one in going)
    where = f"{shlex.quote(root)} --keep {keep}{' --unsealed' if unsealed else ''}"
    command: str | None = None
    if n_kept < keep:
        message = f"nothing goes: {n_kept} of {keep} good steps are there"
        if not fates:
            message = f"nothing goes: {root} holds no step at all"
        if any("not sealed" in one.reason for one in fates):
            command = f"ckptctl seal {shlex.quote(root)}@auto"
    elif apply:
        message = f"removed {_steps(going)}"
    elif going:
        message = f"{_steps(going)} would go; nothing was removed"
        command = f"ckptctl prune {where} --apply"
    else:
        message = f"nothing goes: no step that is older than the {_newest(keep)} is free to go"
    return Pruned(root, keep, apply, fates, n_bytes, message, 0, command)


def _newest(keep: int) -> str:
    return "newest good step" if keep == 1 else f"newest {keep} good steps"


def _steps(going: Sequence[Fate]) -> str:
    n_bytes = sum(one.n_bytes for one in going)
    return f"{len(going)} step{'' if len(going) == 1 else 's'}, {n_bytes:,} bytes"
