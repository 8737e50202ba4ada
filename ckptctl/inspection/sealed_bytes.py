"""Compare the bytes of a step with its seal: digests of what was read, and the store's checksums.

The blocks of each sealed file are digested in the pass that reads the records. A difference is
reported with its block and its bytes. `seals` compares sizes and whose seal it is.

A store's own checksums are compared without reading a byte. Equal ones prove that the object was
not replaced by one with other bytes since it was sealed; they do not prove what its disks return
today. ETags and versions show that an object was written again, and not with which bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from ckptctl.findings import ByStore, Finding
from ckptctl.formats.digests import BLOCK_BYTES
from ckptctl.formats.own.seals import SEAL, Seal, SealedFile, Stored
from ckptctl.formatting import at_most_few, command_line, counted, some_of, verb
from ckptctl.model import Checksum, FileInfo, Kept

FoundDigests = Mapping[str, Sequence[str | None]]
"""The digests of the blocks of files, by path; None for a block that was not read whole."""


def comparable(
    seal: Seal, files: Sequence[FileInfo], passed_over: Collection[str] = ()
) -> tuple[SealedFile, ...]:
    """The sealed files whose bytes are to be compared.

    Those that the listing `files` does not have with their sealed size, and those
    `passed_over`, have a finding already.
    """
    sizes = {file.path: file.size for file in files if file.kind == "file"}
    return tuple(
        sealed
        for sealed in seal.files
        if sizes.get(sealed.path) == sealed.size and sealed.path not in passed_over
    )


def proven(files: Sequence[SealedFile], found: FoundDigests) -> frozenset[str]:
    """The files that are what was sealed, to the last byte."""
    return frozenset(
        sealed.path
        for sealed in files
        if tuple(found.get(sealed.path, ())) == tuple(sealed.digests.by_block)
    )


def check_sealed_bytes(
    seal: Seal, files: Sequence[SealedFile], found: FoundDigests
) -> Iterator[Finding]:
    """Yield a `seal.digest` for each of `files` with a block that is not what was sealed."""
    owners = {sealed.digests.by_block: sealed.path for sealed in seal.files}
    yield from at_most_few(
        finding
        for sealed in files
        if (finding := _differing(sealed, found.get(sealed.path, ()), owners)) is not None
    )


def _differing(
    sealed: SealedFile, found: Sequence[str | None], owners: Mapping[tuple[str, ...], str]
) -> Finding | None:
    expected = sealed.digests.by_block
    wrong = [n for n, digest in enumerate(found) if digest not in (None, expected[n])]
    if not wrong:
        return None
    owner = owners.get(tuple(digest or "" for digest in found))
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


def best_of(kept: Kept, can_compute: Callable[[str], bool]) -> Checksum | None:
    """The checksum to be sealed of a file: of the whole, one that can be computed before others."""
    whole = [checksum for checksum in kept.checksums if checksum.whole]
    computed = [checksum for checksum in whole if can_compute(checksum.algorithm)]
    return next(iter((*computed, *whole)), None)


def as_kept(
    path: str, kept: Kept, checksum: Checksum | None, computed: str | None
) -> tuple[Stored | None, tuple[Finding, ...]]:
    """The entry of a seal for a file that the store keeps so, None where it keeps nothing.

    `computed` is what the bytes of the file come to by the algorithm of `checksum`, None
    where nobody computed it. Finds `store.contradicts` where that is another.
    """
    if checksum is None:
        known = kept.etag or kept.version
        return Stored(etag=kept.etag, version=kept.version) if known else None, ()
    compared = computed is not None
    stored = Stored(checksum.algorithm, checksum.value, compared, kept.etag, kept.version)
    if computed is None or computed == checksum.value:
        return stored, ()
    finding = Finding(
        "store.contradicts",
        path,
        f"the bytes of {path} do not match the {checksum.algorithm} that the store reports: "
        "they were damaged in the store or in transit",
        expected=f"{checksum.algorithm} {computed}",
        found=f"{checksum.algorithm} {checksum.value}",
        next_command="ckptctl explain store.contradicts",
    )
    return stored, (finding,)


def check_stored(
    sealed: Sequence[SealedFile], kept: Mapping[str, Kept], url: str
) -> tuple[ByStore, tuple[Finding, ...]]:
    """Hold what the store keeps now of sealed files, by path, against what was sealed.

    `url` is the step's address. Finds `seal.digest` where a checksum differs,
    `store.rewritten` and `store.unverifiable` where there is none to compare.
    """
    same: list[SealedFile] = []
    other: list[Finding] = []
    rewritten: list[str] = []
    unproven: dict[str, list[SealedFile]] = {}
    for file in sealed:
        was, now = file.stored or Stored(), kept[file.path]
        value = _comparable(was, now)
        if value is None and _written_again(was, now):
            rewritten.append(file.path)
        elif value is None:
            unproven.setdefault(_why_not(was, now), []).append(file)
        elif value == was.checksum:
            same.append(file)
        else:
            other.append(_replaced(file.path, was, value))
    found = [*at_most_few(other)]
    if rewritten:
        found.append(_rewritten(rewritten, url))
    found += [_unproven(why, files, kept, url) for why, files in unproven.items()]
    n_not_compared = sum(file.stored is not None and not file.stored.compared for file in same)
    return ByStore(len(sealed), len(same), sum(file.size for file in same), n_not_compared), tuple(
        found
    )


def _comparable(was: Stored, now: Kept) -> str | None:
    """The checksum that the store keeps now, by the algorithm of the sealed one."""
    values = (c.value for c in now.checksums if c.whole and c.algorithm == was.algorithm)
    return next(values, None) if was.checksum else None


def _written_again(was: Stored, now: Kept) -> bool:
    pairs = ((was.etag, now.etag), (was.version, now.version))
    return any(before and after and before != after for before, after in pairs)


def _why_not(was: Stored, now: Kept) -> str:
    if now.why_none:
        return now.why_none
    whole = sorted(checksum.algorithm for checksum in now.checksums if checksum.whole)
    if not whole:
        return "the store has only checksums of its parts"
    if not was.checksum:
        return _NOT_SEALED
    return f"the seal has its {was.algorithm}, and the store keeps {', '.join(whole)}"


_NOT_SEALED = "the seal has no checksum of the store's"


def _replaced(path: str, was: Stored, value: str) -> Finding:
    return Finding(
        "seal.digest",
        path,
        f"the store reports a different {was.algorithm} for {path} than when it was sealed: "
        "the object was replaced by one with other bytes",
        expected=f"{was.algorithm} {was.checksum}",
        found=f"{was.algorithm} {value}",
        next_command="ckptctl explain seal.digest",
    )


def _rewritten(paths: Sequence[str], url: str) -> Finding:
    return Finding(
        "store.rewritten",
        some_of(paths),
        f"{counted(len(paths), 'sealed file')} {verb(len(paths), 'was', 'were')} written "
        "again after the step was sealed, and no checksum of the store shows whether the "
        f"bytes are the same: {some_of(paths)}",
        expected="the ETag and the version that were sealed",
        found="others",
        next_command=command_line("verify", url, "--level", "content"),
    )


def _unproven(why: str, files: Sequence[SealedFile], kept: Mapping[str, Kept], url: str) -> Finding:
    paths = [file.path for file in files]
    unchanged = all(
        file.stored and file.stored.etag and file.stored.etag == kept[file.path].etag
        for file in files
    )
    witness = "; their ETags are unchanged" if unchanged else ""
    return Finding(
        "store.unverifiable",
        some_of(paths),
        f"no checksum of the store could be compared for {counted(len(files), 'sealed file')} "
        f"({some_of(paths)}): {why}{witness}",
        expected="a checksum of the whole object, in the store and in the seal",
        found=why,
        next_command=command_line("seal", url, "--replace")
        if why == _NOT_SEALED
        else command_line("verify", url, "--level", "content"),
    )


def without_seal(url: str, why: str, *, there: bool) -> Finding:
    """The finding for a step of which no seal covers all; `there` is one, but `why` it does not."""
    return Finding(
        "store.unverifiable",
        SEAL,
        f"the store's checksums could not be compared with those of a seal: {why}",
        expected="a seal of this save",
        found=why,
        next_command=command_line("verify", url, "--level", "content")
        if there
        else command_line("seal", url),
    )
