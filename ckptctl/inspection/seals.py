"""Compare the listing and the metadata of a step with its seal, and turn its marks into findings.

A listing and the metadata show whose seal it is, the files and their sizes. A seal of another
step, or of an earlier save of this one, proves nothing: that is reported, and the step is
inspected without it. `sealed_bytes` compares the bytes.

A rejection or a superseded branch rules the step out; a pin and an acceptance are notes. Marks
on an earlier save of the step are reported and do not apply.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from ckptctl.findings import Finding
from ckptctl.formats.frameworks.layouts import is_saved
from ckptctl.formats.own.marks import Mark, MarkKind, in_force
from ckptctl.formats.own.seals import SEAL, Seal, SealedFile, is_authentic, seal_digest
from ckptctl.formatting import at_most_few, command_line, counted, some_of, verb
from ckptctl.model import FileInfo, Step

PROVES_NOTHING = frozenset(
    {
        "seal.missing",
        "seal.invalid",
        "seal.unsupported",
        "seal.bad-signature",
        "seal.foreign",
        "seal.outdated",
        "seal.partial",
        "seal.unkeyed",
        "seal.no-key",
        "seal.other-run",
        "seal.renamed",
        "seal.rolled-back",
        "seal.set-back",
        "seal.extra",
    }
)
"""Findings after which a step is not proven by its seal, even where its digests agree."""

_IS_ANOTHER = frozenset({"seal.foreign", "seal.outdated", "seal.bad-signature"})


def applies_to_step(findings: Collection[Finding]) -> bool:
    """Whether the digests of the seal are those of this save, by what `check_seal` found."""
    return not any(finding.code in _IS_ANOTHER for finding in findings)


@dataclass(frozen=True, slots=True)
class Seen:
    """The result of an inspection, for comparison with the seal.

    `metadata` are the SHA-256 of the metadata files that decode, by path; `named`
    are the shard files that they name; both with paths in the step.
    """

    step: Step
    metadata: Mapping[str, str]
    named: Collection[str]


@dataclass(frozen=True, slots=True)
class RootSeals:
    """What the root of a step knows of its seals.

    `run` is the id of the run that seals must be of, None where none is recorded. `beside` are
    the seals of other steps, `at_least` the place that the newest must have. A root that
    records no run contradicts no seal; where a seal is `required`, it proves none either.
    """

    run: str | None
    beside: Sequence[Seal] = ()
    at_least: int | None = None
    required: bool = False


def check_binding(seal: Seal, step: Step, root: RootSeals) -> Iterator[Finding]:
    """Yield the contradictions between a seal of this save and the root that it is in.

    Yields `seal.other-run`, `seal.renamed`, `seal.rolled-back` and `seal.set-back`. A seal
    that other seals do not name contradicts nothing: they may have been made at the same time, or
    removed.
    """
    if seal.run != root.run and (root.run is not None or root.required):
        yield _other_run(seal, root.run)
    if seal.step.name != step.name and not _is_of_another_step(seal, step):
        yield Finding(
            "seal.renamed",
            SEAL,
            f"the step was sealed as {seal.step.name}, and is {step.name} now: another save of "
            "its number may have been there",
            expected=seal.step.name,
            found=step.name,
            next_command="ckptctl explain seal.renamed",
        )
    digest = seal_digest(seal)
    newer = (
        _rolled_back(seal, step, other, earlier.sequence)
        for other in root.beside
        for earlier in other.earlier
        if earlier.name == step.name and earlier.sequence > seal.sequence and earlier.seal != digest
    )
    yield from islice(newer, 1)
    places = [other.sequence for other in root.beside]
    places += [earlier.sequence for other in root.beside for earlier in other.earlier]
    newest = max(seal.sequence, *places, 0)
    if root.at_least is not None and newest < root.at_least:
        yield Finding(
            "seal.set-back",
            SEAL,
            f"the newest seal of the root has place {newest:,} in the order of its seals, and one "
            f"with place {root.at_least:,} was made: newer steps were removed, or the root was "
            "replaced by an older copy",
            expected=f"a seal with place {root.at_least:,} or more",
            found=f"{newest:,}",
            next_command="ckptctl explain seal.set-back",
        )


def _other_run(seal: Seal, run: str | None) -> Finding:
    sealed_for = f"run {seal.run}" if seal.run else "a run that it does not name"
    if run is None:
        what = f"the step was sealed for {sealed_for}, and the root does not record of which run "
        what += "it is"
    else:
        what = f"the step was sealed for {sealed_for}, and this is a root of run {run}: it was "
        what += "copied here"
    return Finding(
        "seal.other-run",
        SEAL,
        what,
        expected=f"a seal for run {run}" if run else "a root with the id of its run",
        found=sealed_for,
        next_command="ckptctl explain seal.other-run",
    )


def _rolled_back(seal: Seal, step: Step, other: Seal, place: int) -> Finding:
    return Finding(
        "seal.rolled-back",
        SEAL,
        f"the seal of step {other.step.number} names a newer seal of {step.name} (place "
        f"{place:,}; this one has {seal.sequence:,}): an older save was put in its place",
        expected=f"a seal with place {place:,} or more",
        found=f"{seal.sequence:,}",
        next_command="ckptctl explain seal.rolled-back",
    )


def check_seal(seal: Seal, seen: Seen, *, key: bytes | None = None) -> Iterator[Finding]:
    """Yield the contradictions between the listing, the metadata and a seal.

    Yields `seal.bad-signature`, `seal.unkeyed`, `seal.no-key` about the seal itself;
    `seal.foreign`, `seal.outdated`, `step.foreign` about whose it is; `seal.gone`,
    `seal.digest`, `seal.partial`, `seal.extra` about files. Reads nothing.
    """
    yield from _check_key(seal, key)
    if key is not None and seal.hmac is not None and not is_authentic(seal, key):
        return
    other = _changed_metadata(seal, seen)
    if other and _is_of_another_step(seal, seen.step):
        yield _foreign_seal(seal, seen.step)
        return
    if other and not _still_sealed(seal, seen):
        yield _outdated(seal, other[0])
        return
    if not other and _is_of_another_step(seal, seen.step):
        yield _foreign_step(seal, seen.step)
    yield from at_most_few(_replaced_metadata(seal, seen, path) for path in other)
    yield from at_most_few(_check_files(seal, seen))
    yield from _check_unsealed(seal, seen)


def _check_key(seal: Seal, key: bytes | None) -> Iterator[Finding]:
    if key is None and seal.hmac is not None:
        yield Finding(
            "seal.no-key",
            SEAL,
            "the seal was made with a key, and none is given: its digests are compared, but "
            "whoever wrote the step could also have written the seal",
            expected="the key",
            found="no key",
        )
    elif key is not None and seal.hmac is None:
        yield Finding(
            "seal.unkeyed",
            SEAL,
            f"a key is given, but the seal has none ({seal.algorithm.value}): it detects "
            "damage, but not deliberate changes",
            expected="a seal made with the key",
            found=seal.kind,
        )
    elif key is not None and not is_authentic(seal, key):
        yield Finding(
            "seal.bad-signature",
            SEAL,
            "the seal does not match the key given: it was made with another key, or by someone "
            "who has none",
            expected="an HMAC by the key given",
            found="another HMAC",
            next_command="ckptctl explain seal.bad-signature",
        )


def _changed_metadata(seal: Seal, seen: Seen) -> list[str]:
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


def _still_sealed(seal: Seal, seen: Seen) -> list[str]:
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


def _foreign_seal(seal: Seal, step: Step) -> Finding:
    return Finding(
        "seal.foreign",
        SEAL,
        f"the seal belongs to step {seal.step.number}; it proves nothing about step {step.number}",
        expected=f"a seal of step {step.number}",
        found=f"a seal of step {seal.step.number}",
        next_command=command_line("seal", step.url, "--replace"),
    )


def _foreign_step(seal: Seal, step: Step) -> Finding:
    return Finding(
        "step.foreign",
        step.name,
        f"the contents of this folder were sealed as step {seal.step.number}: the folder was "
        "renamed, or copied over another step",
        expected=f"step {step.number}",
        found=f"step {seal.step.number}",
        next_command="ckptctl explain step.foreign",
    )


def _outdated(seal: Seal, path: str) -> Finding:
    return Finding(
        "seal.outdated",
        SEAL,
        f"{path} and the shard files that it names were written after the step was sealed "
        f"({seal.sealed_at}): the step was saved again, and the seal does not apply to this "
        "save",
        expected="the metadata that was sealed",
        found="metadata of another save",
        next_command="ckptctl explain seal.outdated",
    )


def _replaced_metadata(seal: Seal, seen: Seen, path: str) -> Finding:
    still = _still_sealed(seal, seen)
    return Finding(
        "seal.digest",
        path,
        f"{path} is not the metadata that was sealed, while "
        f"{counted(len(still), 'shard file')} that it names ({some_of(still)}) "
        f"{verb(len(still), 'is', 'are')} unchanged since the seal: the metadata "
        "belongs to another save, or was changed",
        expected=f"SHA-256 {seal.step.metadata.get(path, 'of no file')}",
        found=f"SHA-256 {seen.metadata[path]}",
        next_command="ckptctl explain seal.digest",
    )


def _check_files(seal: Seal, seen: Seen) -> Iterator[Finding]:
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
                expected=f"{sealed.size:,} bytes",
                found="no such file",
            )
        elif file.kind != "file":
            yield _not_as_sealed(sealed, f"{file.what}, not a file")
        elif file.size != sealed.size:
            code = "seal.gone" if file.size < sealed.size else "seal.digest"
            yield _not_as_sealed(sealed, f"{file.size:,} bytes", code)


def _not_as_sealed(sealed: SealedFile, found: str, code: str = "seal.digest") -> Finding:
    return Finding(
        code,
        sealed.path,
        f"{sealed.path} was sealed with {sealed.size:,} bytes; now it is {found}",
        expected=f"{sealed.size:,} bytes",
        found=found,
    )


def _check_unsealed(seal: Seal, seen: Seen) -> Iterator[Finding]:
    sealed = {file.path for file in seal.files}
    unsealed = [
        file.path
        for file in seen.step.files
        if file.kind != "dir" and file.path not in sealed and is_saved(file.path)
    ]
    needed = [path for path in unsealed if path in seen.named or path in seen.metadata]
    if needed:
        yield Finding(
            "seal.partial",
            SEAL,
            f"the seal does not list {counted(len(needed), 'file')} that the step needs: "
            f"{some_of(needed)}",
            expected="every file of the step",
            found=counted(len(sealed), "file"),
            next_command="ckptctl explain seal.partial",
        )
    extra = [path for path in unsealed if path not in needed]
    if extra:
        yield Finding(
            "seal.extra",
            some_of(extra),
            f"{counted(len(extra), 'file')} added after the step was sealed: {some_of(extra)}",
            expected="only sealed files",
            found=counted(len(extra), "more file"),
            next_command="ckptctl explain seal.extra",
        )


_CODES = {
    MarkKind.REJECTED: "step.rejected",
    MarkKind.SUPERSEDED: "step.superseded",
    MarkKind.PINNED: "step.pinned",
}
_FINISHED_LATE = "the metadata arrived after the step was superseded as an interrupted save"


def check_marks(marks: Sequence[Mark], step: Step, metadata: str | None) -> Iterator[Finding]:
    """Yield `step.rejected`, `step.superseded`, `step.pinned`, `step.accepted`, `mark.outdated`.

    `step.finished-late` too, where the step was superseded before it had any metadata.

    `marks` are all that were found on the step, whichever save of it they apply to;
    `metadata` is the `metadata_digest` of the save that lies here.
    """
    own = [mark for mark in marks if mark.applies_to(step.number, metadata)]
    applying = in_force(own)
    for mark in applying:
        if mark.word in _CODES:
            yield _mark_finding(_CODES[mark.word], mark, f"{mark.word.value} {_who(mark)}")
    superseded = [mark for mark in applying if mark.word is MarkKind.SUPERSEDED]
    if superseded and metadata and all(mark.metadata is None for mark in superseded):
        yield _mark_finding("step.finished-late", superseded[-1], _FINISHED_LATE)
    accepted = [mark for mark in applying if mark.word is MarkKind.ACCEPTED]
    if accepted:
        newest = accepted[-1]
        yield _mark_finding(
            "step.accepted", newest, f"{_before(own, newest)}, and accepted {_who(newest)}"
        )
    for mark in in_force(mark for mark in marks if mark not in own):
        if mark.word in _CODES:
            what = f"an earlier save of this step was {mark.word.value} {_who(mark)}"
            yield _mark_finding("mark.outdated", mark, what)


def _mark_finding(code: str, mark: Mark, message: str) -> Finding:
    return Finding(code, "", message + mark.because, found=f"mark {mark.id}")


def _who(mark: Mark) -> str:
    return f"by {mark.by} at {mark.at}"


def _before(own: Sequence[Mark], accepted: Mark) -> str:
    words = sorted({mark.word.value for mark in own if mark.id in accepted.lifts})
    return " and ".join(words) or "ruled out"
