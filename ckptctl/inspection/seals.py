"""Read the seal of a step, the seals beside it and the sentinel of a root; compare the step.

A seal is read only where the listing shows one. A damaged one becomes a finding, and the step is
inspected without it. The listing and the metadata show whose seal it is, the files and their
sizes: a seal of another step, or of an earlier save of this one, proves nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from ckptctl.errors import (
    AccessDenied,
    OwnFileUnreadable,
    OwnFileUnsupported,
    PathEscape,
    PathNotFound,
)
from ckptctl.findings import CODES, Finding, Severity, at_most_few, explained
from ckptctl.formats.frameworks.file_names import is_named_as_weights
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, is_own, is_saved, step_name
from ckptctl.formats.own.files import read_back
from ckptctl.formats.own.marks import Mark, MarkKind, in_force, metadata_digest
from ckptctl.formats.own.seals import (
    MAX_SEAL_BYTES,
    MAX_SEQUENCE,
    SEAL,
    EarlierSeal,
    Seal,
    SealedFile,
    is_authentic,
    is_signed,
    parse_seal,
    seal_digest,
)
from ckptctl.formatting import command_line, counted, inside, some_of, verb
from ckptctl.inspection.marks import check_marks, read_marks_file, unusable
from ckptctl.model import FileInfo, Step
from ckptctl.options import Requirements
from ckptctl.signatures import public_key
from ckptctl.storage.contract import Store, TooLarge, list_if_there, read_if_there
from ckptctl.storage.opening import base_name

if TYPE_CHECKING:
    from ckptctl.formats.own.documents import RootDocument
    from ckptctl.inspection.open_step import OpenStep

PROVES_NOTHING = {"seal.bad-signature"} | {
    code
    for code, meaning in CODES.items()
    if code.startswith("seal.") and meaning.severity is not Severity.FAULT
}
"""Findings after which a step is not proven by its seal, even where its digests agree."""


_IS_ANOTHER = frozenset({"seal.foreign", "seal.outdated", "seal.bad-signature"})


def applies_to_step(findings: Collection[Finding]) -> bool:
    """Whether the digests of the seal are those of this save, by what `check_seal` found."""
    return not any(finding.code in _IS_ANOTHER for finding in findings)


@dataclass(frozen=True, slots=True)
class InspectedStep:
    """The result of an inspection, for comparison with the seal.

    `metadata` are the SHA-256 of the metadata files that decode, by path; `named`
    are the shard files that they name; both with paths in the step.
    """

    step: Step
    metadata: Mapping[str, str]
    named: Collection[str]


def _check_binding(opened: OpenStep, seal: Seal, requirements: Requirements) -> Iterator[Finding]:
    """Yield the contradictions between a seal of this save and the root that it is in.

    A root that records no run contradicts no seal; where a seal is required, it proves none either.
    A seal that other seals do not name contradicts nothing: they may have been made at the same
    time, or removed. Each signer counts places from 1: a signed seal is contradicted only by those
    of its signer, but where a key alone is given, as anybody could add a signature. Yields
    `seal.other-run`, `seal.renamed`, `seal.rolled-back` and `seal.set-back`. Cost: that of
    `seals_beside` and a read.
    """
    step, at_least = opened.step, requirements.seal_sequence
    run = requirements.seal_run or run_of(opened.store)
    if seal.run != run and (run is not None or requirements.require_seal):
        sealed_for = f"run {seal.run}" if seal.run else "a run that it does not name"
        yield _about_seal(
            "seal.other-run",
            f"the step was sealed for {sealed_for}, and "
            + (
                f"this is a root of run {run}: it was copied here"
                if run
                else "the root does not record of which run it is"
            ),
        )
    if seal.step.name != step.name and not _is_of_another_step(seal, step):
        yield _about_seal(
            "seal.renamed",
            f"the step was sealed as {seal.step.name}, and is {step.name} now: another save of "
            "its number may have been there",
        )
    digest = seal_digest(seal)
    signer = seal.signature.signer if seal.signature else None
    if requirements.key is not None and not requirements.require_signature:
        signer = None
    beside = [
        other
        for other in seals_beside(opened, seal.run, requirements, every=at_least is not None)
        if signer is None or (other.signature and other.signature.signer == signer)
    ]
    newer = (
        (other, earlier.sequence)
        for other in beside
        for earlier in other.earlier
        if earlier.name == step.name and earlier.sequence > seal.sequence and earlier.seal != digest
    )
    for other, place in islice(newer, 1):
        yield _about_seal(
            "seal.rolled-back",
            f"the seal of step {other.step.number} names a newer seal of {step.name} (place "
            f"{place:,}; this one has {seal.sequence:,}): an older save was put in its place",
        )
    places = [other.sequence for other in beside]
    places += [earlier.sequence for other in beside for earlier in other.earlier]
    newest = max(seal.sequence, *places, 0)
    if at_least is not None and newest < at_least:
        yield _about_seal(
            "seal.set-back",
            f"the newest seal of the root has place {newest:,} in the order of its seals, and one "
            f"with place {at_least:,} was made: newer steps were removed, or the root was "
            "replaced by an older copy",
        )


def _about_seal(code: str, message: str) -> Finding:
    return explained(code, SEAL, message)


def is_trusted(seal: Seal, requirements: Requirements) -> bool:
    """Whether a seal was made with the key and by one of the signers, where they are required."""
    key, signers = requirements.key, requirements.require_signature
    return (key is None or is_authentic(seal, key)) and (not signers or is_signed(seal, signers))


def check_seal(
    seal: Seal, seen: InspectedStep, requirements: Requirements = Requirements()
) -> Iterator[Finding]:
    """Yield the contradictions between the listing, the metadata and a seal.

    Yields `seal.bad-signature`, `seal.unkeyed`, `seal.no-key`, `seal.unsigned`,
    `seal.other-signer` about the seal itself; `seal.foreign`, `seal.outdated`, `step.foreign`
    about whose it is; `seal.gone`, `seal.digest`, `seal.partial`, `seal.extra` about files.
    Reads nothing.
    """
    about = [*_check_key(seal, requirements), *_check_signature(seal, requirements)]
    yield from about
    if any(finding.code == "seal.bad-signature" for finding in about):
        return
    other = _changed_metadata(seal, seen)
    is_foreign, step = _is_of_another_step(seal, seen.step), seen.step
    if other and is_foreign:
        yield Finding(
            "seal.foreign",
            SEAL,
            f"the seal belongs to step {seal.step.number}; it proves nothing about step "
            f"{step.number}",
            next_command=command_line("seal", step.url, "--replace"),
        )
        return
    if other and not _still_sealed(seal, seen):
        yield _about_seal(
            "seal.outdated",
            f"{other[0]} and the shard files that it names were written after the step was sealed "
            f"({seal.sealed_at}): the step was saved again, and the seal does not apply to this "
            "save",
        )
        return
    if is_foreign:
        yield explained(
            "step.foreign",
            step.name,
            f"the contents of this folder were sealed as step {seal.step.number}: the folder was "
            "renamed, or copied over another step",
        )
    yield from at_most_few(_replaced_metadata(seal, seen, path) for path in other)
    yield from at_most_few(_check_files(seal, seen))
    yield from _check_unsealed(seal, seen, requirements)


def _check_key(seal: Seal, requirements: Requirements) -> Iterator[Finding]:
    key = requirements.key
    if key is None and seal.hmac is not None and not requirements.require_signature:
        yield Finding(
            "seal.no-key",
            SEAL,
            "the seal was made with a key, and none is given: its digests are compared, but "
            "whoever wrote the step could also have written the seal",
        )
    elif key is not None and seal.hmac is None:
        yield Finding(
            "seal.unkeyed",
            SEAL,
            f"a key is given, but the seal has none ({seal.kind}): it detects "
            "damage, but not deliberate changes",
        )
    elif key is not None and not is_authentic(seal, key):
        yield _about_seal(
            "seal.bad-signature",
            "the seal does not match the key given: it was made with another key, or by someone "
            "who has none",
        )


def _check_signature(seal: Seal, requirements: Requirements) -> Iterator[Finding]:
    signature, signers = seal.signature, requirements.require_signature
    if not signers:
        return
    fingerprints = [public_key(signer).fingerprint for signer in signers]
    if signature is None:
        yield _about_seal(
            "seal.unsigned",
            f"a signature by {' or '.join(fingerprints)} is required, and the seal has none: it "
            "was made without --sign, or the signature was removed",
        )
    elif signature.signer not in fingerprints:
        yield _about_seal(
            "seal.other-signer",
            f"a signature by {' or '.join(fingerprints)} is required, and the seal names "
            f"{signature.signer}",
        )
    elif not is_signed(seal, signers):
        yield _about_seal(
            "seal.bad-signature",
            f"the signature does not match the seal and the public key {signature.signer}: "
            "one of them was changed, or somebody else signed in its name",
        )


def _changed_metadata(seal: Seal, seen: InspectedStep) -> list[str]:
    """The metadata files that are there, decode, and are not those that were sealed."""
    sealed = seal.step.metadata
    if not sealed:
        return sorted(seen.metadata)
    # One that came beside those that were sealed is a file that the seal does not list.
    return sorted(
        path for path, digest in seen.metadata.items() if sealed.get(path, digest) != digest
    )


def _is_of_another_step(seal: Seal, step: Step) -> bool:
    numbers = (seal.step.number, step.number)
    return None not in numbers and numbers[0] != numbers[1]


def _still_sealed(seal: Seal, seen: InspectedStep) -> list[str]:
    """The shard files that the metadata names and that nobody has written since the seal.

    A save over a step writes each of them anew.
    """
    unwritten = _unwritten(seal, seen.step)
    files = (file for file in seen.step.files if file.path in seen.named and file.size > 0)
    return [file.path for file in files if file.path in unwritten]


def is_unwritten(seal: Seal, step: Step) -> bool:
    """Whether nobody has written a file since it was sealed; metadata is compared by its digest."""
    sealed = {file.path for file in seal.files}
    return sealed <= seal.step.metadata.keys() | _unwritten(seal, step)


def written_again(seal: Seal, step: Step) -> frozenset[str]:
    """The paths of the sealed files that were written since, where others were not.

    A copy has a new write time for each file, or for none.
    """
    unwritten = _unwritten(seal, step)
    there = {file.path for file in step.files}
    later = {f.path for f in seal.files if f.written_ms is not None and f.path in there}
    # Of metadata the digest decides.
    return frozenset(later - unwritten - seal.step.metadata.keys()) if unwritten else frozenset()


def _unwritten(seal: Seal, step: Step) -> frozenset[str]:
    """The paths of the sealed files that nobody has written since they were sealed.

    They have the sealed size and write time. The times are those of the storage: they are
    compared with each other, never with a clock. Where a storage keeps none, or a copy has
    another one, nothing proves that a file is unwritten.
    """
    there = {file.path: file for file in step.files}
    return frozenset(
        sealed.path
        for sealed in seal.files
        if (now := there.get(sealed.path)) is not None
        and sealed.written_ms is not None
        and (now.size, written_ms(now)) == (sealed.size, sealed.written_ms)
    )


def written_ms(file: FileInfo) -> int | None:
    """When a file was written, in whole milliseconds; None where the storage keeps no times."""
    return None if file.mtime_s is None else round(file.mtime_s * 1000)


def _replaced_metadata(seal: Seal, seen: InspectedStep, path: str) -> Finding:
    still = _still_sealed(seal, seen)
    return explained(
        "seal.digest",
        path,
        f"{path} is not the metadata that was sealed, while "
        f"{counted(len(still), 'shard file')} that it names ({some_of(still)}) "
        f"{verb(len(still), 'is', 'are')} unchanged since the seal: the metadata "
        "belongs to another save, or was changed",
        expected=f"SHA-256 {seal.step.metadata.get(path, 'of no file')}",
        found=f"SHA-256 {seen.metadata[path]}",
    )


def _check_files(seal: Seal, seen: InspectedStep) -> Iterator[Finding]:
    there = {file.path: file for file in seen.step.files}
    for sealed in seal.files:
        file = there.get(sealed.path)
        if sealed.path in seen.metadata:
            continue  # compared by its SHA-256
        if file is None:
            yield Finding(
                "seal.gone",
                sealed.path,
                f"{sealed.path} was sealed with {sealed.size:,} bytes, and is missing",
            )
        elif file.kind != "file":
            yield _not_as_sealed(sealed, f"{file.what}, not a file")
        elif file.size != sealed.size:
            code = "seal.gone" if file.size < sealed.size else "seal.digest"
            yield _not_as_sealed(sealed, f"{file.size:,} bytes", code)


def _not_as_sealed(sealed: SealedFile, found: str, code: str = "seal.digest") -> Finding:
    return Finding(
        code, sealed.path, f"{sealed.path} was sealed with {sealed.size:,} bytes; now it is {found}"
    )


def _check_unsealed(
    seal: Seal, seen: InspectedStep, requirements: Requirements
) -> Iterator[Finding]:
    """Yield `seal.partial` and `seal.extra` about files that the seal does not list.

    What tools leave in a folder is passed over, but where intent is to be detected: there a program
    may load `model (1).pt`, or what else is named as weights or ends as a sealed file does.
    """
    sealed = {file.path for file in seal.files}
    suffixes = {os.path.splitext(path)[1] for path in sealed} - {""}

    def may_be_loaded(path: str) -> bool:
        name = base_name(path)
        return is_named_as_weights(name) or os.path.splitext(name)[1] in suffixes

    unsealed = [
        file.path
        for file in seen.step.files
        if file.kind != "dir" and file.path not in sealed
        if is_saved(file.path)
        or (requirements.detects_intent and not is_own(file.path) and may_be_loaded(file.path))
    ]
    needed = [path for path in unsealed if path in seen.named or path in seen.metadata]
    if needed:
        yield _about_seal(
            "seal.partial",
            f"the seal does not list {counted(len(needed), 'file')} that the step needs: "
            f"{some_of(needed)}",
        )
    extra = [path for path in unsealed if path not in needed]
    if extra:
        yield explained(
            "seal.extra",
            some_of(extra),
            f"{counted(len(extra), 'file')} added after the step was sealed: {some_of(extra)}",
        )


MAX_NEIGHBOURS = 8
"""Seals that are read below a step, above it, and at the end of the root. Each names all that
were there when it was made, so that a few are enough."""


MAX_EARLIER = 256
"""A seal names so many others, the newest: some 50 KB."""


MAX_SEALS = 1_000
"""Seals that are read where the newest of the root is asked for."""


def seals_beside(
    opened: OpenStep,
    run: str | None,
    requirements: Requirements,
    *,
    every: bool = False,
    root: Store | None = None,
) -> tuple[Seal, ...]:
    """The seals of other steps of the root that are of the run, and trusted.

    Without a key or signer, all that can be read. A seal that is damaged, or of another run, shows
    nothing and is left out, as one that may not be read: who can damage a seal can remove it.
    Those nearest to the step and the newest are read, at most
    `3 * MAX_NEIGHBOURS`; with `every` all, at most `MAX_SEALS`. `root` is where the step will
    be, if it is not published yet. Storage errors pass through:
    what did not answer may be what contradicts. Cost: one listing or two, and a read of each.
    """
    store = root or opened.store
    number = None if isinstance(opened.named, str) else opened.named.number
    paths = _paths_beside(opened, store)
    chosen = paths[:MAX_SEALS] if every else _nearest(paths, number)
    from ckptctl.storage.in_flight import in_flight  # few steps have seals beside them

    seals: list[Seal] = []
    for _, data in in_flight(partial(_read, store), (path for _, path in chosen)):
        try:
            seal = parse_seal(data or b"")
        except OwnFileUnreadable:
            continue
        if seal.run == run and is_trusted(seal, requirements):
            seals.append(seal)
    return tuple(seals)


def _read(store: Store, path: str) -> bytes | None:
    try:
        return read_if_there(store, path, limit=MAX_SEAL_BYTES)
    except (PathEscape, AccessDenied):
        return None


_LAST_NUMBER = re.compile(r"([0-9]{1,18})[^0-9]*")


def _paths_beside(opened: OpenStep, store: Store) -> list[tuple[int, str]]:
    """Where the seals of the other numbered folders are, with their numbers, newest first."""
    folder = opened.name.rpartition("/")[0] if opened.has_folder else ""
    lone = f"{OWN_FOLDER}/steps"
    names = [(entry.path, inside(entry.path, SEAL)) for entry in _folders(store, folder)]
    names += [(entry.path, inside(entry.path, base_name(SEAL))) for entry in _folders(store, lone)]
    own = opened.in_store(SEAL)
    numbered = (
        (number, path)
        for name, path in names
        if path != own and (number := _number_in(base_name(name))) is not None
    )
    return sorted(numbered, reverse=True)


def _folders(store: Store, folder: str) -> list[FileInfo]:
    try:
        return [entry for entry in list_if_there(store, folder) if entry.kind == "dir"]
    except PathEscape:
        return []


def _number_in(name: str) -> int | None:
    named = step_name(name)
    if named is not None:
        return named.number
    numbers = _LAST_NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def _nearest(paths: Sequence[tuple[int, str]], number: int | None) -> list[tuple[int, str]]:
    """The newest, and those that are nearest to a number on both sides."""
    if number is None:
        return [*paths[: 3 * MAX_NEIGHBOURS]]
    above = [one for one in paths if one[0] >= number]
    below = [one for one in paths if one[0] < number]
    chosen = (*paths[:MAX_NEIGHBOURS], *above[-MAX_NEIGHBOURS:], *below[:MAX_NEIGHBOURS])
    return list(dict.fromkeys(chosen))


def next_place(beside: Iterable[Seal], own: Seal | None) -> tuple[int, list[EarlierSeal]]:
    """The place of a new seal in the order of its root, and the seals that it names.

    `own` is the seal that it replaces.
    """
    newest: dict[str, EarlierSeal] = {}
    known = 0 if own is None else own.sequence
    for seal in beside:
        name, number = seal.step.name, seal.step.number
        itself = EarlierSeal(name, number, seal.sequence, seal_digest(seal))
        for earlier in (itself, *seal.earlier):
            known = max(known, earlier.sequence)
            if earlier.name not in newest or newest[earlier.name].sequence < earlier.sequence:
                newest[earlier.name] = earlier
    kept = sorted(newest.values(), key=lambda one: -one.sequence)[:MAX_EARLIER]
    return min(known + 1, MAX_SEQUENCE), sorted(kept, key=lambda one: one.name)


ROOT_FILE = f"{OWN_FOLDER}/root.json"
"""The sentinel of a root; it holds the id of the run, which seals name."""


ROOT_SCHEMA = "ckptctl.root/1"


_MAX_SENTINEL = 64 << 10


@dataclass(frozen=True, slots=True)
class Notes:
    """The seal of a step, if it applies to this save, and the findings from seal and marks.

    `marks` are those on this save that no other mark has lifted. `pins` are those of any
    save in this folder: a pinned step is kept even if its metadata is
    damaged or gone, so that its save can no longer be identified.
    """

    seal: Seal | None = None
    marks: tuple[Mark, ...] = ()
    findings: tuple[Finding, ...] = ()
    pins: tuple[Mark, ...] = ()

    @property
    def unread(self) -> bool:
        """Whether a mark cannot be read, so that its decision is unknown."""
        return any(finding.code == "mark.damaged" for finding in self.findings)

    @property
    def accepted(self) -> bool:
        """Whether a mark accepts this save as it is."""
        return any(mark.word is MarkKind.ACCEPTED for mark in self.marks)


NOTHING_NOTED = Notes()


def read_notes(
    opened: OpenStep,
    requirements: Requirements,
    known_faults: Collection[str] = (),
    *,
    binds: bool = False,
) -> Notes:
    """The seal and the marks of a step, compared with what was read of it.

    `known_faults` are the files that have a finding already. With `binds`, or where a seal is
    required, it is also compared with the root: which run it is of, and which seals others
    name. Storage errors pass through. Cost: one read for the seal and one for each mark, where
    there are any; for the comparison with the root, that of `seals_beside` and a read.
    """
    step, digests = opened.step, opened.digests
    current = metadata_digest(tuple(digests.items()))
    marks, damaged = opened.marks
    if requirements.marks is not None:
        marks += read_marks_file(requirements.marks).on_step(step.url, step.number, current)
    found = [*damaged, *check_marks(marks, step, current)]
    own = in_force(mark for mark in marks if mark.applies_to(step.number, current))
    named = {part.in_step(name) for part in opened.parts for name in part.ranges.file_names}
    seal, unread = opened.seal
    about = [*unread]
    if seal is not None:
        differences = check_seal(seal, InspectedStep(step, digests, named), requirements)
        # A file that the metadata misses, too, is one cause and one finding.
        about += [finding for finding in differences if finding.where not in known_faults]
        if (binds or requirements.require_seal) and applies_to_step(about):
            about += _check_binding(opened, seal, requirements)
    if requirements.require_seal and (
        seal is None or any(finding.code in PROVES_NOTHING for finding in about)
    ):
        about.append(_required(step, seal, about, signed=bool(requirements.require_signature)))
    usable = seal if applies_to_step(about) else None
    pins = tuple(mark for mark in in_force(marks) if mark.word is MarkKind.PINNED)
    return Notes(usable, own, (*found, *about), pins)


def read_sentinel(store: Store) -> RootDocument | None:
    """The fields of the sentinel, None without one. Raises `OwnFileUnreadable`, `StorageError`."""
    from ckptctl.formats.own.documents import RootDocument  # few commands need it

    try:
        data = store.read(ROOT_FILE, limit=_MAX_SENTINEL)
    except PathNotFound:
        return None
    except PathEscape as error:
        raise OwnFileUnreadable(error.message) from error
    except TooLarge as error:
        raise OwnFileUnreadable(f"it is larger than {_MAX_SENTINEL:,} bytes") from error
    return read_back(data, ROOT_SCHEMA, RootDocument, max_objects=4)


def run_of(store: Store) -> str | None:
    """The id of the run whose root this is; None where none is recorded. Cost: one read."""
    try:
        fields = read_sentinel(store)
    except OwnFileUnreadable:
        return None
    return None if fields is None else fields.get("run")


ReadSeal = tuple[Seal | None, tuple[Finding, ...]]
"""A seal, None where there is none that can be read; and the finding with the reason."""


def read_seal(opened: OpenStep) -> ReadSeal:
    """The seal in a step. Cost: one read where there is one."""
    file = next((file for file in opened.files if file.path == SEAL), None)
    if file is None:
        return None, ()
    try:
        if file.kind != "file":
            raise OwnFileUnreadable(f"it is {file.what}, not a file; it was not opened")
        return parse_seal(opened.store.read(opened.in_store(SEAL), limit=MAX_SEAL_BYTES)), ()
    except OwnFileUnsupported as error:
        return None, (unusable("seal.unsupported", SEAL, "the seal", error.message),)
    except (OwnFileUnreadable, TooLarge) as error:
        return None, (unusable("seal.invalid", SEAL, "the seal", error.message),)


def _required(step: Step, seal: Seal | None, about: Sequence[Finding], *, signed: bool) -> Finding:
    proves_nothing = [finding for finding in about if finding.code in PROVES_NOTHING]
    reasons = [finding.code for finding in proves_nothing]
    what = "there is none"
    if reasons:
        what = f"there is a seal, but {', '.join(reasons)}: {proves_nothing[0].message}"
    return Finding(
        "seal.required",
        SEAL,
        f"a seal that proves the step is required; {what}",
        expected="a signed seal of this save" if signed else "a seal of this save",
        found=seal.kind if seal else "no seal",
        next_command=command_line("explain", [*reasons, "seal.required"][0])
        if reasons or signed
        else command_line("seal", step.url),
    )
