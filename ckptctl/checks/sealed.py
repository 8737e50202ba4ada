"""Is the step still what its seal says?

First by what a listing and the metadata show: whose seal it is, the files, their
sizes. Then by every byte, block by block. A seal that does not speak of this step,
or of an earlier save of it, proves nothing and damns nothing: that is told, and
the step is judged without it. How a seal is read is the question of
`formats.seals`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.checks.digest_reads import OnBytes, Stretch, read_digests
from ckptctl.checks.words import at_most_few, counted, some_of
from ckptctl.findings import Finding
from ckptctl.formats.digests import BLOCK_BYTES
from ckptctl.formats.layouts import is_own
from ckptctl.formats.seals import SEAL, Seal, SealedFile, is_authentic
from ckptctl.model import FileInfo, Step
from ckptctl.storage.contract import Store

PROVES_NOTHING = frozenset(
    {
        "seal.missing",
        "seal.invalid",
        "seal.unsupported",
        "seal.forged",
        "seal.foreign",
        "seal.lapsed",
        "seal.partial",
        "seal.weak",
        "seal.no-key",
    }
)
"""Findings after which a step is not proven by its seal, whatever its digests say."""

_IS_ANOTHER = frozenset({"seal.foreign", "seal.lapsed", "seal.forged"})


def speaks_of_step(findings: Collection[Finding]) -> bool:
    """Whether the digests of the seal are those of this save, by what `check_seal` found."""
    return not any(finding.code in _IS_ANOTHER for finding in findings)


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look at a step has shown, to be held against its seal.

    `metadata` are the SHA-256 of the metadata files that decode, by path; `named`
    are the shard files that they name; both with paths in the step.
    """

    step: Step
    metadata: Mapping[str, str]
    named: Collection[str]


def check_seal(seal: Seal, seen: Seen, *, key: bytes | None = None) -> Iterator[Finding]:
    """Yield what the listing and the metadata say against a seal, or it against them.

    Yields `seal.forged`, `seal.weak`, `seal.no-key` about the seal itself;
    `seal.foreign`, `seal.lapsed`, `step.foreign` about whose it is; `seal.gone`,
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
        yield _lapsed(seal, other[0])
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
            "whoever wrote the step could have written the seal",
            expected="the key",
            found="no key",
        )
    elif key is not None and seal.hmac is None:
        yield Finding(
            "seal.weak",
            SEAL,
            f"a key is given, but the seal has none ({seal.algorithm.value}): it shows damage, "
            "and nothing that was done on purpose",
            expected="a seal made with the key",
            found=seal.kind,
        )
    elif key is not None and not is_authentic(seal, key):
        yield Finding(
            "seal.forged",
            SEAL,
            "the seal does not match the key given: it was made with another key, or by someone "
            "who has none",
            expected="an HMAC by the key given",
            found="another HMAC",
            next_command="ckptctl explain seal.forged",
        )


def _changed_metadata(seal: Seal, seen: Seen) -> list[str]:
    """The metadata files that are there, decode, and are not those that were sealed."""
    sealed = dict(seal.step.metadata)
    return sorted(
        path
        for path, digest in seen.metadata.items()
        if sealed.get(path, "" if not sealed else digest) != digest
    )


def _is_of_another_step(seal: Seal, step: Step) -> bool:
    numbers = (seal.step.number, step.number)
    return None not in numbers and numbers[0] != numbers[1]


def _still_sealed(seal: Seal, seen: Seen) -> list[str]:
    """The shard files that the metadata names and that nobody has written since the seal.

    A save over a step writes each of them anew. The times are those of the storage:
    they are compared with each other, never with a clock.
    """
    sealed = {file.path: file for file in seal.files}
    return [
        file.path
        for file in seen.step.files
        if file.path in seen.named
        and file.size > 0
        and (was := sealed.get(file.path)) is not None
        and was.size == file.size
        and was.written_ms is not None
        and was.written_ms == written_ms(file)
    ]


def written_ms(file: FileInfo) -> int | None:
    """When a file was written, in whole milliseconds; None where the storage keeps no times."""
    return None if file.mtime_s is None else round(file.mtime_s * 1000)


def _foreign_seal(seal: Seal, step: Step) -> Finding:
    return Finding(
        "seal.foreign",
        SEAL,
        f"the seal is that of step {seal.step.number}, metadata and all; it proves nothing "
        f"about step {step.number}",
        expected=f"a seal of step {step.number}",
        found=f"a seal of step {seal.step.number}",
        next_command=f"ckptctl seal {step.url} --replace",
    )


def _foreign_step(seal: Seal, step: Step) -> Finding:
    return Finding(
        "step.foreign",
        step.name,
        f"what lies in this folder was sealed as step {seal.step.number}: a folder that was "
        "renamed, or copied over another step",
        expected=f"step {step.number}",
        found=f"step {seal.step.number}",
        next_command="ckptctl explain step.foreign",
    )


def _lapsed(seal: Seal, path: str) -> Finding:
    return Finding(
        "seal.lapsed",
        SEAL,
        f"{path} and the shard files that it names were written after the step was sealed "
        f"({seal.sealed_at}): the step was saved anew, and the seal says nothing of this save",
        expected="the metadata that was sealed",
        found="metadata of another save",
        next_command="ckptctl explain seal.lapsed",
    )


def _replaced_metadata(seal: Seal, seen: Seen, path: str) -> Finding:
    still = _still_sealed(seal, seen)
    return Finding(
        "seal.digest",
        path,
        f"{path} is not the metadata that was sealed, while {counted(len(still), 'shard file')} "
        f"that it names ({some_of(still)}) {'is' if len(still) == 1 else 'are'} as old as the "
        "seal says: metadata of another save, or metadata that was changed",
        expected=f"SHA-256 {dict(seal.step.metadata).get(path, 'of no file')}",
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
                f"{sealed.path} was sealed with {sealed.size:,} bytes, and is gone",
                expected=f"{sealed.size:,} bytes",
                found="no such file",
            )
        elif file.kind != "file":
            yield _not_as_sealed(sealed, f"a {file.kind}, not a file")
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
        if file.kind == "file" and file.path not in sealed and not is_own(file.path)
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
            f"{counted(len(extra), 'file')} came into the step after it was sealed: "
            f"{some_of(extra)}",
            expected="no file but those that were sealed",
            found=counted(len(extra), "more file"),
        )


@dataclass(slots=True)
class Compared:
    """What comparing the bytes of a step with its seal found, and the bytes that were read."""

    findings: tuple[Finding, ...] = ()
    n_bytes: int = 0


def compare_bytes(
    store: Store,
    folder: str,
    seal: Seal,
    files: Sequence[FileInfo],
    *,
    passed_over: Collection[str] = (),
    jobs: int | None = None,
    on_bytes: OnBytes | None = None,
) -> Compared:
    """Digest every byte of the sealed files, and compare; each differing file is one finding.

    `folder` is the step in the store, `files` its listing. Files of `passed_over`, and
    those that are not there with their sealed size, are left to the findings that
    speak of them already. Storage errors pass through. Cost: every byte once.
    """
    sizes = {file.path: file.size for file in files if file.kind == "file"}
    compared = [
        sealed
        for sealed in seal.files
        if sizes.get(sealed.path) == sealed.size and sealed.path not in passed_over
    ]
    found: dict[str, dict[int, str]] = {sealed.path: {} for sealed in compared}
    prefix = f"{folder}/" if folder else ""
    blocks = (block for sealed in compared for block in _blocks(sealed, prefix))
    for stretch, digests in read_digests(
        store, blocks, seal.algorithm, jobs=jobs, on_bytes=on_bytes
    ):
        path = stretch.path.removeprefix(prefix)
        found[path][stretch.start // BLOCK_BYTES] = digests.whole
    owners = {sealed.digests.by_block: sealed.path for sealed in seal.files}
    findings = (
        _differing(sealed, [digest for _, digest in sorted(found[sealed.path].items())], owners)
        for sealed in compared
    )
    return Compared(
        tuple(at_most_few(finding for finding in findings if finding is not None)),
        sum(sealed.size for sealed in compared),
    )


def _blocks(sealed: SealedFile, prefix: str) -> Iterator[Stretch]:
    for start in range(0, max(1, sealed.size), BLOCK_BYTES):
        yield Stretch(prefix + sealed.path, start, min(BLOCK_BYTES, sealed.size - start))


def _differing(
    sealed: SealedFile, found: Sequence[str], owners: Mapping[tuple[str, ...], str]
) -> Finding | None:
    expected = sealed.digests.by_block
    wrong = [n for n, digest in enumerate(found) if digest != expected[n]]
    if not wrong:
        return None
    owner = owners.get(tuple(found))
    if owner is not None:
        what = f"it holds what was sealed as {owner}: the two files were swapped or copied"
    else:
        what = f"{_place(sealed, wrong)} not what was sealed: damaged, or of another save"
    first = wrong[0]
    return Finding(
        "seal.digest",
        sealed.path,
        f"{sealed.path}: {what}",
        expected=f"{_named(sealed, first)} with digest {expected[first]}",
        found=found[first],
        next_command="ckptctl explain seal.digest",
    )


def _place(sealed: SealedFile, wrong: Sequence[int]) -> str:
    if len(sealed.digests.by_block) == 1:
        return f"its {sealed.size:,} bytes are"
    if len(wrong) == 1:
        return f"{_named(sealed, wrong[0])} is"
    n_blocks = len(sealed.digests.by_block)
    return f"{len(wrong):,} of {n_blocks:,} blocks, the first being {_named(sealed, wrong[0])}, are"


def _named(sealed: SealedFile, block: int) -> str:
    start = block * BLOCK_BYTES
    end = min(sealed.size, start + BLOCK_BYTES)
    n_blocks = len(sealed.digests.by_block)
    return f"block {block + 1} of {n_blocks} (bytes {start:,} to {end:,})"
