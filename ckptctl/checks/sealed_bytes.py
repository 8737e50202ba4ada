"""Compare the bytes of a step with the digests of its seal.

The blocks of each sealed file are digested in the pass that reads the records, and
compared: a difference is told with its block and its bytes. Sizes, and whose seal it
is, were compared before, in `sealed`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from ckptctl.checks.formatting import at_most_few
from ckptctl.findings import Finding
from ckptctl.formats.digests import BLOCK_BYTES
from ckptctl.formats.own.seals import Seal, SealedFile
from ckptctl.model import FileInfo
from ckptctl.records.byte_pass import Run
from ckptctl.records.digest_runs import DigestRun, Stretch


class RecordRun(Run, Protocol):
    """A run that reads records, from `start` of its file on."""

    @property
    def start(self) -> int:
        """Offset of its first byte."""
        ...


class Comparison:
    """Every byte of the sealed files, block by block, against the seal.

    `folder` is the step in the store, `files` its listing. Files of `passed_over`, and
    those that are not there with their sealed size, are left to the findings that
    speak of them already.
    """

    def __init__(
        self,
        folder: str,
        seal: Seal,
        files: Sequence[FileInfo],
        passed_over: Collection[str] = (),
    ) -> None:
        sizes = {file.path: file.size for file in files if file.kind == "file"}
        self._prefix = f"{folder}/" if folder else ""
        self._seal = seal
        self._files = [
            sealed
            for sealed in seal.files
            if sizes.get(sealed.path) == sealed.size and sealed.path not in passed_over
        ]
        self._runs: dict[str, list[DigestRun]] = {}

    def runs(self, others: Sequence[RecordRun] = ()) -> list[Run]:
        """What to read: `others`, digested where they are blocks, and the blocks that are not."""
        by_stretch = {Stretch(run.path, run.start, run.n_bytes): run for run in others}
        for sealed in self._files:
            self._runs[sealed.path] = [
                DigestRun(block, self._seal.algorithm, by_stretch.pop(block, None))
                for block in _blocks(sealed, self._prefix)
            ]
        own: list[Run] = [run for runs in self._runs.values() for run in runs]
        return [*own, *by_stretch.values()]

    @property
    def whole(self) -> bool:
        """All of it was read."""
        return all(run.digests is not None for runs in self._runs.values() for run in runs)

    @property
    def proven(self) -> frozenset[str]:
        """The files that are what was sealed, to the last byte."""
        return frozenset(
            sealed.path
            for sealed in self._files
            if [*self._found(sealed)] == [*sealed.digests.by_block]
        )

    def findings(self) -> Iterator[Finding]:
        """Yield a `seal.digest` for each file with a block that is not what was sealed."""
        owners = {sealed.digests.by_block: sealed.path for sealed in self._seal.files}
        yield from at_most_few(
            finding
            for sealed in self._files
            if (finding := _differing(sealed, self._found(sealed), owners)) is not None
        )

    def _found(self, sealed: SealedFile) -> list[str | None]:
        read = [run.digests for run in self._runs.get(sealed.path, ())]
        return [None if digests is None else digests.whole for digests in read]


def _blocks(sealed: SealedFile, prefix: str) -> Iterator[Stretch]:
    for start in range(0, max(1, sealed.size), BLOCK_BYTES):
        yield Stretch(prefix + sealed.path, start, min(BLOCK_BYTES, sealed.size - start))


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
