"""Decide which old steps to remove, by the rules of `pick`, and remove them.

A step counts as kept only if `pick` would choose it, compared with the steps it would be
compared with, and if its bytes are proven. Steps that are older than all counted ones are
removed, oldest first, unless there is a reason to keep them; a step without which `pick`
would refuse a counted one stays. `prune` and `Checkpointer(keep=)` both use this.

No reader uses a partly removed step: its metadata goes first, so from then on it is an
interrupted save, is never chosen, and the next retention removes the rest. A format without
DCP metadata gets a note instead, which goes last: without it, the rest could pass for a
weights-only step.

A step that stays is proven once, by every byte: by a seal, or by the note
`.ckptctl/proof.json` that retention writes into it after comparing them. Both apply to the
proven files, by names, sizes and write times, and to one metadata. Bytes that a disk has lost
since, without a write, are detected only when read again (`--level content`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property, partial
from itertools import islice

from ckptctl import __version__
from ckptctl.errors import (
    AccessDenied,
    CkptctlError,
    OwnFileUnreadable,
    PathNotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from ckptctl.findings import ClaimName, Report, Verdict
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.layouts import METADATA, OWN_FOLDER, REMOVING, StepName
from ckptctl.formats.own.documents import ProofDocument
from ckptctl.formats.own.files import as_stored, canonical, read_back, time_now
from ckptctl.formats.own.marks import metadata_digest
from ckptctl.inspection.inspecting import Inspection, inspect_step
from ckptctl.inspection.one_save import times_of
from ckptctl.inspection.open_step import Neighbours, OpenStep, RootSteps, list_step
from ckptctl.inspection.seals import is_unwritten, written_ms
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import FileInfo, Level, StepUrl
from ckptctl.options import PickPolicy, Requirements
from ckptctl.selection.branches import BranchState, branch_of, written_after_all
from ckptctl.selection.candidates import CachingInspector, Candidate, candidates_of, in_order
from ckptctl.selection.choosing import (
    MAX_PREDECESSORS,
    PassedOver,
    Search,
    by_number,
    refusal,
    why_not,
)
from ckptctl.selection.history import holder
from ckptctl.selection.roots import moved_aside, neighbours_of, pointed_steps
from ckptctl.selection.targets import OpenRoot
from ckptctl.storage.contract import NotSupported, Store, StoreKind, TooLarge, Upload
from ckptctl.storage.in_flight import act_in_flight, in_flight
from ckptctl.storage.opening import join_url


def remove_step(store: Store, name: str, *, seen: Sequence[FileInfo] | None = None) -> bool:
    """Remove a step; False, removing nothing, if its files differ from those of `seen`.

    No link is followed, neither in the step nor in the place of one of its folders. Raises
    `AccessDenied` or `StorageUnavailable` if something cannot be removed; what is left then
    is an interrupted save, or the complete step. Cost: one listing; on an object store a
    request per object, several at once.
    """
    listed = list_step(store, name)
    if seen is not None and tuple(seen) != listed:
        return False
    files = [file.path for file in listed]
    markers = [path for path in files if path.rpartition("/")[2].endswith(METADATA)]
    # A seal without its shards would make a partial removal look like damage.
    own = [path for path in files if layouts.is_own(path) and path not in (*markers, REMOVING)]
    rest = sorted(set(files).difference(markers, own, [REMOVING]))
    try:
        if layouts.is_scattered(name) or any(
            layouts.is_flat_file(file) and file.path == name for file in listed
        ):
            act_in_flight(store.remove, rest)
            act_in_flight(store.remove, [layouts.own_file_of_lone(name, path) for path in own])
            return True
        noted = [] if markers else _note(store, name)
        if store.folders is not None:
            store.folders.remove_folder(name, first=(markers, own, rest if noted else ()))
        else:
            for paths in (markers, own, rest, noted):
                act_in_flight(store.remove, [f"{name}/{path}" for path in paths])
    except StorageError as error:
        kind = AccessDenied if isinstance(error, AccessDenied) else StorageUnavailable
        url = join_url(store.url, name)
        why = error.message.removeprefix(f"{url}: ")
        raise kind(f"{url} could not be removed completely: {why}") from error
    return True


def _note(store: Store, name: str) -> list[str]:
    """Write a note into a step that it is being removed; its path, if there was space."""
    with suppress(StorageUnavailable):
        store.put(f"{name}/{REMOVING}", b"being removed\n", replace=True)
        return [REMOVING]
    return []


MAX_AGE_S = 24 * 3600.0
"""No single object takes a day to write."""


def abandoned_uploads(
    store: Store, pattern: re.Pattern[str] | None = None, *, number: int | None = None
) -> Sequence[Upload]:
    """The abandoned uploads into steps of a root; with `number`, into that step.

    Listings do not show the parts of an upload, which are billed until it is aborted. One of an
    attempt that no longer holds the root is abandoned; one under a name without an attempt is
    another tool's, and counts as abandoned after a day. Everything else may still be running.

    Empty if the client cannot list them or is not permitted to: a lifecycle rule of the
    bucket has to abort them then. Cost: a listing of the fence, and one request per 1,000
    uploads.
    """
    found: Sequence[Upload] = ()
    with suppress(NotSupported, AccessDenied, PathNotFound):
        found = store.list_uploads()
    if not found:
        return ()
    held = holder(store)
    token = held.number if held else 0
    abandoned = []
    for upload in found:
        named = layouts.step_name(upload.path.partition("/")[0], pattern)
        if named is None or (number is not None and named.number != number):
            continue
        old = upload.begun_s is not None and time.time() - upload.begun_s > MAX_AGE_S
        if 0 < named.attempt < token or (not named.attempt and old):
            abandoned.append(upload)
    return abandoned


PROOF = f"{OWN_FOLDER}/proof.json"
"""The path of the note in its step."""

SCHEMA = "ckptctl.proof/1"

_MAX_BYTES = 64 << 10


def has_seal(inspected: Inspection) -> bool:
    """Whether a seal lists all files that the step needs, and applies to this save of it."""
    notes = inspected.notes
    is_partial = any(finding.code == "seal.partial" for finding in notes.findings)
    return notes.seal is not None and not is_partial


def is_proven(store: Store, inspected: Inspection) -> bool:
    """Whether a seal or a note proves the bytes of the present files.

    Storage errors are passed on. Cost: one short read if there is a note.
    """
    seal = inspected.notes.seal if has_seal(inspected) else None
    return (seal is not None and is_unwritten(seal, inspected.step)) or _noted(store, inspected)


def write_proof(store: Store, inspected: Inspection) -> None:
    """Leave a note that all bytes of the step have been compared, if there is space for it.

    A full storage is what steps are removed for. Cost: one write.
    """
    path = inspected.opened.in_store(PROOF)
    with suppress(StorageFull):
        store.put(path, as_stored(SCHEMA, _fields(inspected)), replace=True)


def _noted(store: Store, inspected: Inspection) -> bool:
    if not any(file.path == PROOF and file.kind == "file" for file in inspected.step.files):
        return False
    try:
        data = store.read(inspected.opened.in_store(PROOF), limit=_MAX_BYTES)
        noted = read_back(data, SCHEMA, ProofDocument, max_objects=8)
    except (OwnFileUnreadable, PathNotFound, TooLarge):
        return False
    now = _fields(inspected)
    was = (noted["number"], noted["metadata"], noted["files"])
    return was == (now["number"], now["metadata"], now["files"])


def files_digest(files: Iterable[FileInfo]) -> str:
    """A SHA-256 over the files of a step by path, each with its size and write time."""
    saved = {f.path: [f.size, written_ms(f)] for f in files if layouts.is_saved(f.path)}
    return sha256_of(canonical(saved))


def _fields(inspected: Inspection) -> ProofDocument:
    report = inspected.report
    return {
        "tool": f"ckptctl {__version__}",
        "at": time_now(),
        "number": report.number,
        "metadata": metadata_digest(report.digests),
        "files": files_digest(inspected.step.files),
    }


class Remedy(Enum):
    """What would let a step count that does not."""

    ACCEPT_UNVERIFIABLE = "it is sealed, and its format has no checksums"
    SEAL_UNVERIFIABLE = "nothing proves its bytes but a seal"
    SEAL = "a seal proves which save it is"
    UNSEALED = "it is complete, and has no seal"


@dataclass(frozen=True, slots=True)
class NotCounted:
    """Why a step does not count, and what would let it."""

    reason: str
    remedy: Remedy | None = None

    @classmethod
    def refused(cls, over: PassedOver) -> NotCounted:
        """A step that `pick` refuses once it has inspected it in full."""
        unproven = over.report.verdict is Verdict.UNVERIFIABLE
        return cls(over.cause or over.reason, Remedy.SEAL_UNVERIFIABLE if unproven else None)


@dataclass(frozen=True, slots=True)
class PruneDecision:
    """The decision on one step: whether it is removed, and why."""

    number: int
    """The training step."""
    url: StepUrl
    verdict: Verdict
    """The verdict of the step."""
    n_bytes: int
    """Its size in bytes."""
    removed: bool
    """It is removed."""
    reason: str
    """Why it is removed or kept, in one line."""
    counts: bool = False
    """It is one of the good steps that are kept."""
    remedy: Remedy | None = None
    """What would let it count."""


_NOT_RECOGNISED = NotCounted("not recognised as a checkpoint")

_OLD = (Verdict.COMPLETE, Verdict.REJECTED, Verdict.SUPERSEDED)

OnInspected = Callable[[int, int], None]
"""Called with the number of inspected steps and their total."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Which steps count: the newest `keep` that `pick` would choose under the same conditions.

    Without `unsealed` a step needs a seal to count. `protected` maps steps that always stay
    to the reason. `seal_bytes` states how the bytes are compared where a seal is required.
    """

    keep: int
    requirements: Requirements
    policy: PickPolicy = field(default_factory=PickPolicy)
    unsealed: bool = False
    protected: Mapping[int, str] = field(default_factory=dict)
    seal_bytes: SealBytes | None = None


Prove = Callable[[Inspection, CachingInspector, Candidate], NotCounted | None]
"""Prove the bytes of a step; returns why not, None if it is proven or assumed to be."""

Remove = Callable[[Inspection], bool]
"""Remove a step that is unchanged; False if it changed. See `removing.remove_step`."""


class RetentionPlan:
    """The decision on every step of a root; `carry_out` removes steps.

    `n_to_read` is the size in bytes of the steps that count only once they are proven, `failures`
    are the errors that kept steps from being removed.

    `others` are other roots of the run: steps that `pick` over all of them would refuse do
    not count, and nothing is removed there. `memory` holds the inspections of complete
    steps from the last time and is updated: a step with unchanged files is not read again.

    Raises `StorageError` if the root, or the folder of replaced steps, cannot be listed.
    Cost: an inspection at `listing` of each step, several at once; `pick`'s inspection of
    those that may count; what `prove` reads.
    """

    def __init__(
        self,
        root: OpenRoot,
        rules: Rules,
        *,
        prove: Prove,
        others: Sequence[OpenRoot] = (),
        memory: dict[str, Inspection] | None = None,
        on_inspected: OnInspected | None = None,
    ) -> None:
        self._store = root.store
        self._rules = rules
        self._root = root
        opened_roots = [root, *others]
        self._inspector = CachingInspector(
            opened_roots, rules.requirements, rules.policy.level, rules.seal_bytes
        )
        self._compared = in_order(candidates_of(opened_roots), rules.policy)
        self._order = [candidate for candidate in self._compared if candidate.root_index == 0]
        self._alone = not others
        self._memory = {} if memory is None else memory
        self._inspections = self._inspect_all(on_inspected)
        self._has_proven_number = any(
            one.report.claim(ClaimName.IDENTITY).is_proven for one in self._inspections.values()
        )
        self._decisions: dict[str, PruneDecision] = {}
        # Listed before anything is removed: an error here must not hide a removal.
        self._set_aside = [
            (named, self._at_listing(OpenStep(root.store, named)))
            for named in moved_aside(root.store)
        ]
        self.n_to_read = 0
        self.failures: list[CkptctlError] = []
        self._pointed = pointed_steps(root.store, root.listing)
        self._counted: list[_Counted] = []
        self._being_removed: str | None = None
        self._branches: str | None = None
        self._count(prove)

    def carry_out(self, remove: Remove | None) -> None:
        """Remove the steps; with None, only decide.

        If a counted step has changed since its inspection, nothing more is removed. Steps
        that cannot be removed are reported, and the others are removed. Cost: before each
        removal a listing of each counted step.
        """
        if len(self._counted) == self._rules.keep:
            self._remove_older(remove)

    @property
    def unknown(self) -> list[Report]:
        """The reports of steps that could not be inspected."""
        reports = [self._inspections[candidate.named.name].report for candidate in self._order]
        return [one for one in reports if one.verdict is Verdict.UNKNOWN and not one.only_archived]

    def decisions(self) -> tuple[PruneDecision, ...]:
        """The decisions, newest first; replaced steps come last.

        Also valid after an exception such as `KeyboardInterrupt` ended `carry_out`.
        """
        old = [(named, inspected) for named, inspected in self._set_aside if self._is_older(named)]
        steps = [(one.named, self._inspections[one.named.name]) for one in self._order]
        return tuple(self._decided(inspected, named) for named, inspected in (*steps, *old))

    def _decided(self, inspected: Inspection, named: StepName) -> PruneDecision:
        name = inspected.step.name
        if name in self._decisions:
            return self._decisions[name]
        reason = "not reached" if self._is_older(named) else self._incomparable(named)
        reason = reason or self._branches
        if name == self._being_removed:
            reason = "its removal was interrupted: it may be complete, incomplete or gone"
        return self._decision(inspected, reason or "not needed")

    def _is_older(self, named: StepName) -> bool:
        """Whether a step is older than all counted steps, if enough count."""
        if len(self._counted) < self._rules.keep or self._incomparable(named) is not None:
            return False
        return named.number < self._counted[-1].candidate.named.number

    def _incomparable(self, named: StepName) -> str | None:
        """Why a step is neither older nor newer than those that count; None if it is.

        Epochs and steps have no common order: the epoch with the lowest number may be the newest
        save of all.
        """
        if not self._counted:
            return None
        newest = self._counted[0].candidate.named
        counts = [layouts.counted_by(step.layout) for step in (named, newest)]
        if counts[0] == counts[1]:
            return None
        return (
            f"its name counts {counts[0]}, and {newest.name} counts {counts[1]}: --pattern selects "
            "the steps of one count"
        )

    # Inspecting

    def _inspect_all(self, on_inspected: OnInspected | None) -> dict[str, Inspection]:
        """Inspect every step at `listing`, several at once."""
        inspections: dict[str, Inspection] = {}
        for candidate, inspected in in_flight(self._inspect, self._order):
            inspections[candidate.named.name] = replace(inspected, parts=())
            if on_inspected is not None:
                on_inspected(len(inspections), len(self._order))
            if self._is_all_that_pick_sees:
                self._inspector.inspected[candidate] = inspections[candidate.named.name]
        whole = {name: one for name, one in inspections.items() if one.report.usable}
        self._memory.clear()
        self._memory.update(whole)
        return inspections

    @property
    def _is_all_that_pick_sees(self) -> bool:
        level = self._rules.policy.level
        if self._rules.requirements.reads_every_byte(level):
            return False
        if not self._alone:  # records of other roots may exclude a step
            return False
        return level is Level.LISTING or (level is None and self._store.kind is StoreKind.OBJECT)

    def _inspect(self, candidate: Candidate) -> Inspection:
        named = candidate.named
        files = self._root.listing.trees.get(named.name)
        known = self._memory.get(named.name)
        if known is not None:
            try:
                files = list_step(self._store, named.name) if files is None else files
            except StorageError:
                files = None  # the inspection reports what it is
            if files is not None and tuple(files) == known.step.files:
                return known
        steps = RootSteps(self._root.listing.trees)
        beside = neighbours_of(lambda: self._root.listing.steps, named.number, steps)
        return self._at_listing(OpenStep(self._store, named, files), beside)

    def _at_listing(self, step: OpenStep, neighbours: Neighbours | None = None) -> Inspection:
        """Inspect a step for what its listing excludes; a required seal is compared later."""
        return inspect_step(
            step,
            self._rules.requirements,
            level=Level.LISTING,
            neighbours=neighbours,
            seal_bytes=SealBytes.LATER,
        )

    # Counting

    def _count(self, prove: Prove) -> None:
        """Find the newest steps that count, in the way that `pick` finds the newest step."""
        search = Search(self._inspector, self._rules.policy)
        for copies, older in by_number(self._compared):
            if len(self._counted) == self._rules.keep:
                return
            beside = [copy for copy in copies if copy.root_index != 0]
            for copy in (copy for copy in copies if copy.root_index == 0):
                name = copy.named.name
                taken = partial(self._taken, copy, older, beside, search, prove)
                other_count = self._incomparable(copy.named)
                why = NotCounted(other_count) if other_count is not None else None
                why = why or self._cannot_count(name, search) or taken()
                if why is None:
                    break
                decision = self._decision(self._inspections[name], f"{why.reason}: does not count")
                self._decisions[name] = replace(decision, remedy=why.remedy)
                if self._branches is not None:
                    return

    def _cannot_count(self, name: str, search: Search) -> NotCounted | None:
        """Why the listing excludes a step; None if a deeper inspection is useful."""
        inspected = self._inspections[name]
        report = inspected.report
        if not inspected.step.parts and report.verdict is not Verdict.UNKNOWN:
            return _NOT_RECOGNISED
        over = refusal(report, self._rules.policy)
        if over is not None:
            search.passed_over.append(over)
            if report.verdict is Verdict.COMPLETE or report.has_finding("seal.required"):
                return NotCounted(over.reason)
            if report.verdict is not Verdict.UNVERIFIABLE:
                return NotCounted(report.verdict.value)
            if has_seal(inspected):
                why = "sealed, but unverifiable without --accept-unverifiable"
                return NotCounted(why, Remedy.ACCEPT_UNVERIFIABLE)
            return NotCounted(report.verdict.value, Remedy.SEAL_UNVERIFIABLE)
        if not has_seal(inspected):
            if report.verdict is Verdict.UNVERIFIABLE:  # reading its bytes proves nothing
                why = "without checksums, and not sealed"
                return NotCounted(why, Remedy.SEAL_UNVERIFIABLE)
            if not self._rules.unsealed:
                return NotCounted("complete, but not sealed", Remedy.UNSEALED)
        return _doubt(inspected) or self._unlike_others(report)

    def _unlike_others(self, report: Report) -> NotCounted | None:
        """Why the number of a step is in doubt that other steps prove of theirs; None without.

        A copy under another number, alone beside one other step, is contradicted by nothing.
        """
        claim = report.claim(ClaimName.IDENTITY)
        if report.seal or claim.is_proven or not self._has_proven_number:
            return None
        why = f"identity is not proven ({claim.by}), and that of other steps is"
        return NotCounted(why, Remedy.SEAL)

    def _taken(
        self,
        copy: Candidate,
        older: Sequence[Candidate],
        beside: Sequence[Candidate],
        search: Search,
        prove: Prove,
    ) -> NotCounted | None:
        """Count a step that `pick` would choose and whose bytes are proven; else why not."""
        consulted: list[Candidate] = []

        def asked(candidate: Candidate, at_least: Level) -> Report:
            consulted.append(candidate)
            return self._inspector(candidate, at_least)

        search.inspect = asked
        n_over = len(search.passed_over)
        if not search.try_copies([copy], older, beside):
            over = search.passed_over[n_over:]
            return NotCounted.refused(over[0]) if over else _NOT_RECOGNISED
        inspected = self._inspections[copy.named.name]
        report = self._inspector.inspected[copy].report
        branches = self._undecided(copy)
        if branches is not None:
            # Once a newer step counts, it shows which branch the run is on.
            self._branches = None if self._counted else "the run may have gone back: undecided"
            return NotCounted(branches)
        n_to_read = 0
        if not (report.level is Level.CONTENT or is_proven(self._store, inspected)):
            unproven = prove(inspected, self._inspector, copy)
            if unproven is not None:
                return unproven
            n_to_read = report.n_bytes
        name = copy.named.name
        how = "and sealed" if has_seal(inspected) else "by its bytes"
        self._decisions[name] = replace(
            self._decision(inspected, f"kept: complete {how}{_unproven(report)}"), counts=True
        )
        self.n_to_read += n_to_read
        self._counted.append(_Counted(copy, report, is_compared=len(consulted) > 1))
        return None

    # Removing

    def _remove_older(self, remove: Remove | None) -> None:
        """Remove what is older than all counted steps, oldest first."""
        what = newest_good(self._rules.keep)
        gone: set[str] = set()
        for candidate in reversed(self._order):
            name = candidate.named.name
            if not self._is_older(candidate.named):
                continue
            inspected = self._inspections[name]
            stays = self._removed(inspected, remove, partial(self._stays, candidate, gone))
            if stays is None:
                gone.add(name)
            self._decisions[name] = self._decision(
                inspected, stays or f"older than the {what}", removed=not stays
            )
        for named, inspected in self._set_aside:  # replaced, which only a person would use
            if self._is_older(named):
                stays = self._removed(inspected, remove, partial(_stays_aside, inspected))
                decision = self._decision(
                    inspected, stays or f"moved aside, and older than the {what}", removed=not stays
                )
                self._decisions[inspected.step.name] = decision

    def _removed(
        self, inspected: Inspection, remove: Remove | None, keeps: Callable[[], str | None]
    ) -> str | None:
        """Remove a step unless `keeps` has a reason, or only plan to; why it stays.

        No error ends the removal, because what has been removed must be reported.
        """
        try:
            stays = keeps()
            if stays is not None or remove is None:
                return stays
            changed = self._changed()
            if changed is not None:
                return f"step {changed}, which counts, changed meanwhile"
            self._being_removed = inspected.step.name
            return None if remove(inspected) else "changed meanwhile"
        except PathNotFound:
            return None  # another process has removed it
        except CkptctlError as error:
            self.failures.append(error)
            return error.message

    def _changed(self) -> int | None:
        """A counted step that was marked, written to or removed since; None without one.

        Between inspection and removal there are the reads of a proof and earlier removals.
        """
        for one in self._counted:
            named = one.candidate.named
            try:
                now = list_step(self._store, named.name)
            except StorageError:
                return named.number
            if _but_proof(now) != _but_proof(self._inspections[named.name].step.files):
                return named.number
        return None

    def _stays(self, candidate: Candidate, gone: Collection[str]) -> str | None:
        """Why a step is kept although it is old; None if it may be removed."""
        inspected = self._inspections[candidate.named.name]
        report = inspected.report
        marked = _marked(inspected)
        if marked is not None:
            return marked
        number = candidate.named.number
        linked = candidate.named.name in self._root.listing.links
        if linked or any(file.link is not None for file in inspected.step.files):
            return "links lead out of it: left to a person"
        if number in self._rules.protected:
            return self._rules.protected[number]
        if number in self._pointed:
            return f"{self._pointed[number]} names it"
        if candidate in self._confirmed:
            return self._confirmed[candidate]
        being_removed = any(one.where == REMOVING for one in report.findings)
        if not inspected.step.parts and not (_is_left_over(inspected) or being_removed):
            return _NOT_RECOGNISED.reason
        cut_short = report.interrupted or being_removed
        accepted = refusal(report, self._rules.policy) is None
        is_old = report.verdict in _OLD or (report.verdict is Verdict.INCOMPLETE and cut_short)
        is_old = is_old or report.only_archived
        may_count = accepted or (report.interrupted and not being_removed)
        if may_count and (later := self._written_later(inspected)) is not None:
            return later
        if is_old or accepted:
            return self._is_needed(candidate, gone)
        if report.verdict is Verdict.IN_PROGRESS:
            return "in-progress: it may still be written"
        return f"{report.verdict.value}: left to a person"

    @cached_property
    def _confirmed(self) -> Mapping[Candidate, str]:
        """Why `pick --prefer confirmed` takes a step, or may take it, in words.

        Inspected as deep as by `pick`: the listing alone may show a damaged one as sound.
        """
        kept: dict[Candidate, str] = {}
        for candidate in self._order:
            listed = self._inspections[candidate.named.name].report
            if not listed.has_finding("step.confirmed") or refusal(listed, self._rules.policy):
                continue
            report = self._inspector(candidate, Level.LISTING)
            if refusal(report, self._rules.policy) is None:
                kept[candidate] = "the newest confirmed step"
                break
            if report.verdict is Verdict.UNKNOWN:
                kept[candidate] = "confirmed, and could not be inspected"
        return kept

    def _written_later(self, inspected: Inspection) -> str | None:
        """Why a step is kept that was written after all that count; None if it was not.

        An unfinished save may still run, however long ago its last file was written. A copy
        without times is kept until the next save.
        """
        newest = self._counted[0].candidate.named
        counted = [self._inspections[c.candidate.named.name] for c in self._counted]
        if not written_after_all(times_of(inspected.step), [times_of(one.step) for one in counted]):
            return None
        return f"written after step {newest.number}: the run may have gone back to an earlier step"

    def _undecided(self, candidate: Candidate) -> str | None:
        """Why no step counts from `candidate` on; None where it is on the run's branch.

        `pick` stops there too, because the run may have gone back.
        """
        inspected = {one: self._inspections[one.named.name] for one in self._order}
        order = branch_of(candidate, self._order, self._root, inspected, self._inspector)
        return order.why if order.state is BranchState.WENT_BACK else None

    def _is_needed(self, candidate: Candidate, gone: Collection[str]) -> str | None:
        """Why `pick` needs a step to choose the counted ones; None if it does not.

        A step that lacks state is compared with older ones: without the nearest one, which
        also lacks it, an older one that has it would exclude the step.
        """
        name = candidate.named.name
        for one in self._counted:
            if not one.is_compared or candidate not in (older := self._older(one, gone)):
                continue
            older = self._older(one, {*gone, name})
            if why_not(one.report, older, self._inspector, self._rules.policy) is not None:
                return f"step {one.candidate.named.number} would be refused without it"
        return None

    def _older(self, one: _Counted, gone: Collection[str]) -> list[Candidate]:
        """The steps that a counted step is compared with once `gone` are removed."""
        older = (
            candidate
            for candidate in self._compared
            if candidate.named.number < one.candidate.named.number
            and (candidate.root_index != 0 or candidate.named.name not in gone)
        )
        return list(islice(older, MAX_PREDECESSORS))

    def _decision(
        self, inspected: Inspection, reason: str, *, removed: bool = False
    ) -> PruneDecision:
        report, name = inspected.report, inspected.step.name
        number = report.number if report.number is not None else 0
        url = join_url(self._store.url, name)
        return PruneDecision(number, url, report.verdict, report.n_bytes, removed, reason)


def newest_good(keep: int) -> str:
    """The steps that are kept, in words."""
    return "newest good step" if keep == 1 else f"newest {keep} good steps"


@dataclass(frozen=True, slots=True)
class _Counted:
    """A step that counts, as `pick` inspects it; `is_compared` if older steps were compared."""

    candidate: Candidate
    report: Report
    is_compared: bool


_DEMANDED = (ClaimName.WHOLE, ClaimName.ONE_SAVE)
"""What must be proven of a step for which others are removed."""

_IN_DOUBT = (ClaimName.ONE_SAVE, ClaimName.IDENTITY, ClaimName.BRANCH)
"""What no finding may leave in doubt: a step may count nothing, and name no other."""


def _doubt(inspected: Inspection) -> NotCounted | None:
    """What is not proven, also where `pick` would only warn; None where all is.

    A person who accepted a step decided about its times, and the bytes of a sealed one, which are
    compared next, prove its save.
    """
    report = inspected.report
    is_decided = inspected.notes.accepted or has_seal(inspected)
    for name in (ClaimName.WHOLE,) if is_decided else _DEMANDED:
        claim = report.claim(name)
        if not claim.is_proven:
            why = f"{name.value} is not proven ({claim.finding or claim.by})"
            return NotCounted(why, Remedy.SEAL)
    for name in _IN_DOUBT:
        code = report.claim(name).finding
        if code:
            return NotCounted(f"{name.value} is in doubt ({code})")
    return None


def _unproven(report: Report) -> str:
    """What neither a finding doubts nor anything proves: a step without a count of its own."""
    is_proven = report.seal or report.claim(ClaimName.IDENTITY).is_proven
    return "" if is_proven else f"; not proven: {ClaimName.IDENTITY.value}"


def _but_proof(files: Iterable[FileInfo]) -> list[FileInfo]:
    """The files of a step without the note that retention itself writes."""
    return [file for file in files if file.path != PROOF]


def _stays_aside(inspected: Inspection) -> str | None:
    """Why a replaced step is kept."""
    unknown = inspected.report.verdict is Verdict.UNKNOWN
    return _marked(inspected) or ("unknown: left to a person" if unknown else None)


def _marked(inspected: Inspection) -> str | None:
    """Why the marks on a step keep it; None where they do not."""
    if inspected.notes.pins:
        return "pinned"
    if inspected.notes.unread and not _is_left_over(inspected):
        return "a mark on it cannot be read: it may be pinned"
    return None


def _is_left_over(inspected: Inspection) -> bool:
    """Whether only files of ckptctl are left of a step, so its removal was interrupted."""
    return all(layouts.is_own(file.path) for file in inspected.step.files)
