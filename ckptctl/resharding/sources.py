"""The source of a reshard or conversion: its tensors, chunks and sidecars.

The metadata of a part, also where each rank saved its own, becomes one list of entries.
A step that inspection does not call complete is refused. `planning` decides how the
entries are sharded in the new step.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import NamedTuple

from ckptctl.errors import CkptctlError, UsageError
from ckptctl.findings import Finding, Report, Verdict
from ckptctl.formats.archive.writing import WRITABLE
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layouts import (
    METADATA,
    METADATA_TMP,
    is_own,
    rank_local_rank,
    shard_rank,
)
from ckptctl.formats.frameworks.state_keys import entry_kinds
from ckptctl.formatting import command_line
from ckptctl.inspection.inspecting import Inspection
from ckptctl.model import (
    DTYPE_SIZES,
    SHARDED,
    ByteRange,
    BytesEntry,
    Chunks,
    FileInfo,
    Metadata,
    Part,
    PartFormat,
    RangeColumns,
    TensorEntry,
)
from ckptctl.records.slices import Dims, TensorSlice


class SourceDamaged(CkptctlError, code="step.damaged", exit_code=21):
    """The source does not match what was saved; `finding` names the place and the difference.

    Every process of a group gets it where one of them finds the damage.
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message, next_command=finding.next_command)
        self.finding = finding


class SourceChunk(NamedTuple):
    """A slice of a tensor, and the byte range of its record."""

    elements: TensorSlice
    record: ByteRange


class ChunkOverlap(NamedTuple):
    """The elements that chunk number `number` and a slice share."""

    number: int
    elements: TensorSlice


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """A tensor and its chunks in the order of their first offsets, without empty ones.

    A tensor without elements has one chunk. `kind` is the kind of train state; `rank`
    is set if the entry exists once per rank. `n_cut` is how many chunks the writer made of
    it, empty ones included; `longest` is the length of the longest chunk along
    dimension 0.
    """

    entry: TensorEntry
    chunks: tuple[SourceChunk, ...]
    kind: str
    rank: str | None
    n_cut: int
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        lengths = (c.elements.sizes[0] for c in self.chunks if c.elements.sizes)
        object.__setattr__(self, "longest", max(lengths, default=0))

    @property
    def item_bytes(self) -> int:
        """The size of an element in bytes."""
        return DTYPE_SIZES[self.entry.dtype]

    @property
    def n_bytes(self) -> int:
        """The size of the whole tensor in bytes."""
        return prod(self.entry.shape) * self.item_bytes

    def overlaps(self, wanted: TensorSlice) -> Iterator[ChunkOverlap]:
        """The parts of a slice of this tensor, by the chunks that hold them, in their order."""
        if not wanted.offsets:
            yield ChunkOverlap(0, wanted)
            return
        first, end = wanted.offsets[0], wanted.ends[0]
        # Chunks are in the order of their first offsets: none after `end` can overlap, and
        # one that begins before the slice does so by less than the longest chunk has.
        low = bisect_left(
            self.chunks, first - self.longest + 1, key=lambda chunk: chunk.elements.offsets[0]
        )
        for number in range(low, len(self.chunks)):
            chunk = self.chunks[number].elements
            if chunk.offsets[0] >= end:
                return
            common = chunk.overlap(wanted)
            if common is not None:
                yield ChunkOverlap(number, common)


@dataclass(frozen=True, slots=True)
class SourceBytes:
    """An entry that is no tensor, and its record; `kind` and `rank` as for tensors."""

    fqn: str
    record: ByteRange
    kind: str
    rank: str | None


@dataclass(frozen=True, slots=True)
class SourcePart:
    """The entries of one folder of DCP, and the SHA-256 of each of its metadata files.

    `several` are FQNs that more than one rank saved on its own: the first of them counts.
    """

    path: str
    tensors: tuple[SourceTensor, ...]
    bytes_entries: tuple[SourceBytes, ...]
    paths: Mapping[str, tuple[str | int, ...]]
    digests: tuple[str, ...]
    several: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankFile:
    """A sidecar that is copied; `kind` and `rank` if it exists once per rank."""

    file: FileInfo
    kind: str | None
    rank: str | None


@dataclass(frozen=True, slots=True)
class Source:
    """The step or file to reshard or convert.

    `changes` yields a `step.changed` if its files are not as they were inspected.
    """

    url: str
    report: Report
    parts: tuple[SourcePart, ...]
    files: tuple[RankFile, ...]
    changes: Callable[[], Iterator[Finding]]

    def check_unchanged(self) -> None:
        """Raise `SourceDamaged` if files were written since: what was read may be of two saves.

        Each record of either save matches its own checksum. Cost: one listing.
        """
        for finding in self.changes():
            raise SourceDamaged(finding)

    def with_damage(self, damage: SourceDamaged) -> Report:
        """The report with the damage that was found, or `step.changed` if files were written since.

        What was read of two saves does not prove that either of them is damaged. Cost: one
        listing.
        """
        return self.report.with_findings(next(self.changes(), damage.finding))


def source_in(
    inspected: Inspection, parts: Sequence[SourcePart], files: Sequence[RankFile] = ()
) -> Source:
    """The source that `parts` of an inspected step make, with sidecars to copy."""
    url, changes = inspected.step.url, inspected.opened.changes
    return Source(url, inspected.report, tuple(parts), tuple(files), changes)


def source_of(inspected: Inspection) -> Source:
    """The source in an inspected step; raises `UsageError` if a tensor cannot be resharded.

    Call `check_format` and `refusal` before: the step must be complete, sharded DCP.
    """
    parts = [each for each in inspected.parts if each.part.format in SHARDED]
    made = [_part(each.part, each.metadata) for each in parts]
    return source_in(inspected, made, [*_files(inspected)])


def check_format(inspected: Inspection) -> None:
    """Raise `UsageError` if the step holds tensors, but none in sharded DCP."""
    formats = [part.format for part in inspected.step.parts]
    if formats and not any(found in SHARDED for found in formats):
        url = inspected.step.url
        words = ["show", url]
        if PartFormat.SAFETENSORS in formats:
            words = ["convert", url, f"{url}-dcp", "--accept-unverifiable"]
        raise UsageError(
            f"{url} holds {formats[0].value}, not sharded DCP", next_command=command_line(*words)
        )


def refusal(report: Report, *, accept_unverifiable: bool) -> bool:
    """Whether a step must be refused because it is not complete."""
    if report.verdict is Verdict.UNVERIFIABLE:
        return not accept_unverifiable
    return report.verdict is not Verdict.COMPLETE


def needs_content(report: Report) -> bool:
    """Whether only level `content` can verify the step: it has records without checksums."""
    unproven = ("record.no-crc", "record.transformed")
    return any(finding.code in unproven for finding in report.findings)


def _part(part: Part, metadatas: Sequence[Metadata]) -> SourcePart:
    tensors: dict[str, list[TensorEntry]] = {}
    others: dict[str, SourceBytes] = {}
    kinds: dict[str, tuple[str, str | None]] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    several: dict[str, None] = {}
    for metadata in metadatas:
        kinds |= {
            fqn: (kind.names[0], kind.rank)
            for fqn, kind in entry_kinds(metadata, part.path).items()
        }
        paths |= metadata.planner_paths
        for fqn, entry in metadata.tensors.items():
            tensors.setdefault(fqn, []).append(entry)
        for fqn, found in metadata.bytes_entries.items():
            if found.byte_range is not None and fqn not in others:
                others[fqn] = SourceBytes(fqn, found.byte_range, *kinds[fqn])
            elif found.byte_range is not None:
                several[fqn] = None
    return SourcePart(
        part.path,
        tuple(_tensor(entries, *kinds[fqn]) for fqn, entries in tensors.items()),
        tuple(others.values()),
        paths,
        tuple(metadata.digest for metadata in metadatas),
        tuple(several),
    )


def _tensor(entries: Sequence[TensorEntry], kind: str, rank: str | None) -> SourceTensor:
    first = entries[0]
    if first.dtype not in WRITABLE:
        raise UsageError(f"{first.fqn} is of dtype {first.dtype}, which cannot be resharded")
    if first.layout != "strided":
        raise UsageError(f"{first.fqn} has the layout {first.layout}, which cannot be resharded")
    held: dict[Dims, SourceChunk] = {}
    n_cut = 0
    is_empty = 0 in first.shape
    for entry in entries:
        chunks = entry.chunks
        n_cut += len(chunks)
        for number in range(len(chunks)):
            sizes, record = chunks.sizes_of(number), chunks.byte_range_of(number)
            if record is None or (0 in sizes and not is_empty):
                continue
            # Ranks that saved their own metadata each list the replicated entries.
            offsets = chunks.offsets_of(number)
            held.setdefault(offsets, SourceChunk(TensorSlice(offsets, sizes), record))
    in_order = sorted(held.values(), key=lambda chunk: chunk.elements.offsets)
    return SourceTensor(first, tuple(in_order[:1] if is_empty else in_order), kind, rank, n_cut)


def tensor_entry(
    fqn: str, dtype: str, shape: Dims, path: tuple[str | int, ...] = ()
) -> TensorEntry:
    """A tensor whose chunks are not those of DCP, but stated beside it."""
    chunks = Chunks(len(shape), array("q"), array("q"), RangeColumns.missing(0))
    return TensorEntry(fqn, dtype, shape, chunks, path)


def part_of(
    path: str,
    tensors: Sequence[tuple[TensorEntry, Sequence[SourceChunk]]],
    digest: str,
    values: Sequence[tuple[BytesEntry, ByteRange]] = (),
    *,
    folder: str = "",
) -> SourcePart:
    """The part that tensors and other values make, each with where its bytes lie.

    The name of the `folder` counts for the kinds of the entries.
    """
    entries = {entry.fqn: entry for entry, _ in tensors}
    others = {entry.fqn: entry for entry, _ in values}
    kinds = entry_kinds(Metadata(entries, others, ()), folder)
    made = []
    for entry, chunks in tensors:
        held = [chunk for chunk in chunks if 0 not in chunk.elements.sizes or 0 in entry.shape]
        in_order = sorted(held, key=lambda chunk: chunk.elements.offsets)
        kept = in_order[:1] if 0 in entry.shape else in_order
        kind = kinds[entry.fqn]
        made.append(SourceTensor(entry, tuple(kept), kind.names[0], kind.rank, len(chunks)))
    return SourcePart(
        path,
        tuple(made),
        tuple(
            SourceBytes(entry.fqn, place, kinds[entry.fqn].names[0], kinds[entry.fqn].rank)
            for entry, place in values
        ),
        {fqn: entry.path for fqn, entry in (entries | others).items()},
        (digest,),
    )


def check_is_copied(url: str, file: FileInfo) -> None:
    """Raise `UsageError` for a file of the step at `url` that is a link or not a regular file."""
    if file.kind != "file":
        raise UsageError(f"{url}: {file.path} is a link or not a regular file, and is not copied")


def _files(inspected: Inspection) -> Iterator[RankFile]:
    """The sidecars: all files but shards, metadata and ckptctl's own."""
    step = inspected.step
    dcp = {part.path for part in step.parts if part.format in SHARDED}
    for file in step.files:
        folder, _, name = file.path.rpartition("/")
        if is_own(file.path):
            continue
        ours = name in (METADATA, METADATA_TMP) or rank_local_rank(name) is not None
        if folder in dcp and (ours or shard_rank(name) is not None or name.endswith(".distcp")):
            continue
        check_is_copied(step.url, file)
        kind = kind_of_file(step.layout, file.path)
        yield RankFile(file, kind.names[0] if kind else None, kind.rank if kind else None)
