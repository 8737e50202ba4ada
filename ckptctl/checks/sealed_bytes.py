"""Compare the digests of a step's bytes with those of its seal.

The blocks of each sealed file are digested in the pass that reads the records. A
difference is reported with its block and its bytes. `seals` compares sizes and whose
seal it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from ckptctl.findings import Finding
from ckptctl.formats.digests import BLOCK_BYTES
from ckptctl.formats.own.seals import Seal, SealedFile
from ckptctl.formatting import at_most_few
from ckptctl.model import FileInfo

Found = Mapping[str, Sequence[str | None]]
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


def proven(files: Sequence[SealedFile], found: Found) -> frozenset[str]:
    """The files that are what was sealed, to the last byte."""
    return frozenset(
        sealed.path
        for sealed in files
        if tuple(found.get(sealed.path, ())) == tuple(sealed.digests.by_block)
    )


def check_sealed_bytes(seal: Seal, files: Sequence[SealedFile], found: Found) -> Iterator[Finding]:
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
