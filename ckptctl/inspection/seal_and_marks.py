"""Read the seal and the marks of a step, files of marks, and the sentinel of a root.

In a step they are read only where its listing shows that there is something. A file of marks
is for steps that cannot be written to: one mark per line, of any step of any root; new marks are
appended. What is damaged becomes a finding, and the step is inspected without it.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from ckptctl.errors import (
    AccessDenied,
    OwnFileUnreadable,
    OwnFileUnsupported,
    PathEscape,
    PathNotFound,
    PathUntrusted,
    UsageError,
)
from ckptctl.findings import ByStore, Finding
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, step_name
from ckptctl.formats.own.files import read_back
from ckptctl.formats.own.marks import (
    MARKS_FOLDER,
    MAX_MARK_BYTES,
    Mark,
    MarkKind,
    in_force,
    mark_bytes,
    metadata_digest,
    named_word,
    parse_mark,
)
from ckptctl.formats.own.seals import (
    MAX_SEAL_BYTES,
    MAX_SEQUENCE,
    SEAL,
    EarlierSeal,
    Seal,
    is_authentic,
    parse_seal,
    seal_digest,
)
from ckptctl.formatting import command_line, inside
from ckptctl.inspection.seals import (
    PROVES_NOTHING,
    RootSeals,
    Seen,
    applies_to_step,
    check_binding,
    check_marks,
    check_seal,
)
from ckptctl.model import FileInfo, Step
from ckptctl.options import Requirements
from ckptctl.storage.contract import Span, Store, TooLarge, list_if_there, read_if_there
from ckptctl.storage.files import append_line
from ckptctl.storage.opening import absolute_url, base_name
from ckptctl.storage.shared_places import open_named

if TYPE_CHECKING:
    from ckptctl.formats.own.documents import RootDocument
    from ckptctl.inspection.open_step import OpenStep


MAX_NEIGHBOURS = 8
"""Seals that are read below a step, above it, and at the end of the root. Each names all that
were there when it was made, so that a few are enough."""

MAX_EARLIER = 256
"""A seal names so many others, the newest: some 50 KB."""

MAX_SEALS = 1_000
"""Seals that are read where the newest of the root is asked for."""


@dataclass(frozen=True, slots=True)
class SealedStep:
    """A seal beside the one that is inspected, and its digest."""

    seal: Seal
    digest: str


def seals_beside(
    opened: OpenStep,
    run: str | None,
    key: bytes | None,
    *,
    every: bool = False,
    root: Store | None = None,
) -> tuple[SealedStep, ...]:
    """The seals of other steps of the root that are of the run, and made with the key.

    Without a key, all that can be read. A seal that is damaged, or of another run, shows
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

    found: list[SealedStep] = []
    for _, data in in_flight(partial(_read, store), (path for _, path in chosen)):
        try:
            seal = parse_seal(data or b"")
        except OwnFileUnreadable:
            continue
        if seal.run == run and (key is None or is_authentic(seal, key)):
            found.append(SealedStep(seal, seal_digest(seal)))
    return tuple(found)


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


def next_place(beside: Iterable[SealedStep], own: Seal | None) -> tuple[int, list[EarlierSeal]]:
    """The place of a new seal in the order of its root, and the seals that it names.

    `own` is the seal that it replaces.
    """
    newest: dict[str, EarlierSeal] = {}
    known = 0 if own is None else own.sequence
    for one in beside:
        about = one.seal.step
        itself = EarlierSeal(about.name, about.number, one.seal.sequence, one.digest)
        for earlier in (itself, *one.seal.earlier):
            known = max(known, earlier.sequence)
            if earlier.name not in newest or newest[earlier.name].sequence < earlier.sequence:
                newest[earlier.name] = earlier
    kept = sorted(newest.values(), key=lambda one: -one.sequence)[:MAX_EARLIER]
    return min(known + 1, MAX_SEQUENCE), sorted(kept, key=lambda one: one.name)


ROOT_FILE = f"{OWN_FOLDER}/root.json"
"""The sentinel of a root; it holds the id of the run, which seals name."""
ROOT_SCHEMA = "ckptctl.root/1"
_MAX_SENTINEL = 64 << 10

MAX_MARKS = 256
"""So many marks of one step are read: those that rule it out first, then the newest."""


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
        differences = check_seal(seal, Seen(step, digests, named), key=requirements.key)
        # A file that the metadata misses, too, is one cause and one finding.
        about += [finding for finding in differences if finding.where not in known_faults]
        if (binds or requirements.require_seal) and applies_to_step(about):
            about += check_binding(seal, step, _root_seals(opened, seal, requirements))
    if requirements.require_seal and (
        seal is None or any(finding.code in PROVES_NOTHING for finding in about)
    ):
        about.append(_required(step, seal, about))
    usable = seal if applies_to_step(about) else None
    pins = tuple(mark for mark in in_force(marks) if mark.word is MarkKind.PINNED)
    return Notes(usable, own, (*found, *about), pins)


def _root_seals(opened: OpenStep, seal: Seal, requirements: Requirements) -> RootSeals:
    run = requirements.seal_run or run_of(opened.store)
    at_least = requirements.seal_sequence
    beside = seals_beside(opened, seal.run, requirements.key, every=at_least is not None)
    return RootSeals(
        run, [one.seal for one in beside], at_least, required=requirements.require_seal
    )


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

ReadMarks = tuple[tuple[Mark, ...], tuple[Finding, ...]]
"""The marks on a step, and a finding for each file that could not be read as one."""


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
        return None, (_unreadable("seal.unsupported", SEAL, "the seal", error.message),)
    except (OwnFileUnreadable, TooLarge) as error:
        return None, (_unreadable("seal.invalid", SEAL, "the seal", error.message),)


def read_marks(opened: OpenStep) -> ReadMarks:
    """The marks in a step. Cost: one read for each.

    A mark that rules the step out counts by the name of its file where it cannot be
    read: neither damage nor many later marks let a step be taken that was rejected.
    """
    step = opened.step
    files = [
        file
        for file in step.files
        if file.path in (OWN_FOLDER, MARKS_FOLDER)  # a link, say: what is behind it is not read
        or (file.path.startswith(f"{MARKS_FOLDER}/") and file.path.endswith(".json"))
    ]
    newest = sorted(files, key=lambda file: file.path, reverse=True)
    order = sorted(newest, key=lambda file: named_word(file.path) not in _RULES_OUT)
    read = [f for f in order[:MAX_MARKS] if f.kind == "file" and f.size <= MAX_MARK_BYTES]
    marks: list[Mark] = []
    unread = {file.path: _why_not_read(file) for file in files if file not in read}
    spans = (Span(opened.in_store(file.path), 0, file.size) for file in read)
    for file, (_, data) in zip(read, opened.store.read_spans(spans), strict=True):
        try:
            marks.append(parse_mark(data))
        except OwnFileUnreadable as error:
            unread[file.path] = error.message
    current = metadata_digest(tuple(opened.digests.items()))
    marks += [
        _by_name(path, word, why, step, current)
        for path, why in unread.items()
        if (word := named_word(path)) in _RULES_OUT
    ]
    damaged = [
        _unreadable("mark.damaged", path, "a mark", why) for path, why in sorted(unread.items())
    ]
    return tuple(marks), tuple(damaged)


_RULES_OUT = (MarkKind.REJECTED, MarkKind.SUPERSEDED)


def _by_name(path: str, word: MarkKind, why: str, step: Step, current: str | None) -> Mark:
    """The mark that a file was written for which cannot be read; `accept` lifts it as any other."""
    name = path.rpartition("/")[2].removesuffix(".json")
    return Mark(
        id=name,
        word=word,
        by="somebody",
        at=name.partition("-")[0],
        reason=f"the mark cannot be read and counts by its name: {why}",
        url=step.url,
        number=step.number,
        metadata=current,
    )


def _why_not_read(file: FileInfo) -> str:
    if file.kind != "file":
        return f"it is {file.what}, not a file; it was not opened"
    return f"{file.size:,} bytes, or one of too many marks; it was not read"


def _unreadable(code: str, where: str, what: str, why: str) -> Finding:
    return Finding(
        code,
        where,
        f"{what} cannot be used: {why}",
        expected="a file as ckptctl writes it",
        found=why,
        next_command=command_line("explain", code),
    )


def _required(step: Step, seal: Seal | None, about: Sequence[Finding]) -> Finding:
    reasons = [finding.code for finding in about if finding.code in PROVES_NOTHING]
    what = f"there is a seal, but {', '.join(reasons)}" if reasons else "there is none"
    return Finding(
        "seal.required",
        SEAL,
        f"a seal that proves the step is required; {what}",
        expected="a seal of this save",
        found=seal.kind if seal else "no seal",
        next_command=command_line("seal", step.url)
        if not reasons
        else command_line("explain", reasons[0]),
    )


def ask_store(
    opened: OpenStep, seal: Seal | None, findings: Sequence[Finding]
) -> tuple[ByStore | None, tuple[Finding, ...]]:
    """Compare the checksums that the store keeps with those in the step's seal.

    A file that differs from the seal by the `findings` so far is left out, and so are
    metadata files, which every inspection reads and compares. Storage errors pass
    through. Cost: one HEAD for each sealed file, and no byte.
    """
    from ckptctl.inspection.sealed_bytes import check_stored, comparable, without_seal

    step = opened.step
    if seal is None:
        if opened.has_seal:
            why = "its seal belongs to another save"
            return None, (without_seal(step.url, why, there=True),)
        return None, (without_seal(step.url, "the step has no seal", there=False),)
    differing = {finding.where for finding in findings if finding.code == "seal.digest"}
    asked = comparable(seal, step.files, {*seal.step.metadata, *differing})
    prefix = opened.in_store("")
    answers = opened.store.kept(prefix + file.path for file in asked)
    kept = {answer.path.removeprefix(prefix): answer for answer in answers}
    by_store, found = check_stored(asked, kept, step.url)
    if any(finding.code == "seal.partial" for finding in findings):
        why = "the seal does not list every file that the step needs"
        found = (*found, without_seal(step.url, why, there=True))
    return by_store, found


MAX_FILE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class MarksInFile:
    """The marks of a file."""

    path: str
    marks: tuple[Mark, ...] = ()

    def on_step(self, url: str, number: int | None, metadata: str | None) -> tuple[Mark, ...]:
        """The marks on a step, of whichever save: by its metadata, or by where it lies.

        A root may have been moved or mounted elsewhere; metadata is the same there.
        """
        lies_at = absolute_url(url)
        return tuple(
            mark
            for mark in self.marks
            if mark.url == lies_at or (metadata is not None and mark.applies_to(number, metadata))
        )


def read_marks_file(path: str) -> MarksInFile:
    """All marks in a file; none where there is no file yet.

    Raises `UsageError` where the file, or a line of it, cannot be read: that line may be a
    rejection of any step, and a rejection must not be passed over.

    Cost: one read of the file; it is parsed only where it has changed since the last call.
    """
    return _parsed(path, _content(path))


@lru_cache(maxsize=1)
def _parsed(path: str, content: bytes) -> MarksInFile:
    marks = []
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            if len(line) > MAX_MARK_BYTES:
                raise OwnFileUnreadable(f"it is {len(line):,} bytes long")
            marks.append(parse_mark(line))
        except OwnFileUnreadable as error:
            raise UsageError(
                f"the file of marks {path} cannot be read: line {number} is not a mark: "
                f"{error.message}. It may reject any step, so nothing is decided without it: "
                "correct the line, or delete it and reject the step again",
                next_command=f"sed -n {number}p {shlex.quote(path)}",
            ) from error
    return MarksInFile(path, tuple(marks))


def check_marks_file(path: str | None) -> None:
    """Raise as `read_marks_file` does, before anything else is asked of a storage."""
    if path is not None:
        read_marks_file(path)


def _content(path: str) -> bytes:
    try:
        fd = open_named(path)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise _bad_file(path, error.strerror or type(error).__name__) from error
    except PathUntrusted as error:
        raise _bad_file(path, error.message) from error
    size = os.fstat(fd).st_size
    if size > MAX_FILE_BYTES:
        os.close(fd)
        raise _bad_file(path, f"it is {size:,} bytes, more than {MAX_FILE_BYTES:,}")
    with os.fdopen(fd, "rb") as file:
        return file.read()


def _bad_file(path: str, why: str) -> UsageError:
    return UsageError(f"the file of marks {path} cannot be read: {why}")


def add_mark(path: str, mark: Mark) -> None:
    """Add one mark to a file, durably; raises `StorageError` where that cannot be."""
    append_line(path, mark_bytes(mark))
