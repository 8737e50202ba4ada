"""Compare a step with those before it: names of tensors, counts, and records that did not change.

Between two steps training changes every chunk of a tensor or none of them, on whichever rank. If
all records of a shard file equal those of the step before, by their checksums, while other chunks
of the same tensors changed, the file belongs to that step, or that step has this one's. This is a
suspicion: no record states its step. Frozen tensors are unchanged in all files, and so are zeros.
Rows without a gradient (of an embedding, of an expert) may be unchanged in one file alone, but a
file also has optimizer moments that are not zero, which decay.

Predecessors are not inspected: where one is damaged, gone or does not answer, nothing is compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, zip_longest
from math import prod

from ckptctl.errors import StorageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.directory import TAIL
from ckptctl.formats.frameworks.layouts import METADATA, StepName
from ckptctl.formats.frameworks.state_keys import Leaf, entries_of, is_moment, leaves_of
from ckptctl.formatting import command_line, counted, inside, some_of
from ckptctl.inspection.identity import path_then
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.sidecars import leaves_at, tensors_in_header
from ckptctl.inspection.structure import NO_CRC
from ckptctl.inspection.train_state import Shape, check_names
from ckptctl.model import DTYPE_SIZES, NO_FILE, SHARDED, ByteRange, Metadata, TensorEntry
from ckptctl.records.opening import elements_crc
from ckptctl.records.ranges import Ranges
from ckptctl.storage.contract import Span

FEW = 4
"""Records of each shard file that are compared first."""

MANY = 64
"""Records of an unchanged file that are compared then; at most `MAX_SUSPECTS` such files."""

MAX_SUSPECTS = 16

MIN_TENSORS = 3
"""The least number of tensors that are unchanged in a file but changed in others."""

MIN_ELEMENTS = 16
"""A chunk of fewer elements may keep its values by chance: in bfloat16 small changes are lost."""

Crcs = Mapping[int, int]
"""Checksums of elements, by the number of the record's range."""


@dataclass(frozen=True, slots=True)
class _SplitTensor:
    """A tensor whose chunks lie in several files: those that are large enough and not zero."""

    fqn: str
    numbers: tuple[int, ...]
    is_moment: bool


@dataclass(frozen=True, slots=True)
class StaleShard:
    """An unchanged file: how many of its records were compared, and what changed elsewhere.

    `numbers` are chunks, each of another tensor, that did not change while all others of
    their tensors that were compared changed. `has_moments`: moments of an optimizer are
    among them. `n_mixed` tensors were unchanged in other files too, and changed in some.
    """

    file: int
    n_records: int
    numbers: tuple[int, ...]
    has_moments: bool
    n_mixed: int


class StaleShardCheck:
    """Which records of a part to compare with the step before, and the result.

    `crcs` are the checksums of this step, as `structure` returns them. Cost: one comparison
    per chunk.
    """

    def __init__(self, ranges: Ranges, crcs: Sequence[int]) -> None:
        self._ranges = ranges
        self._crcs = crcs
        self._split = [*_split_tensors(ranges, crcs)] if len(ranges.file_names) > 1 else []
        self._of_number = {n: split for split in self._split for n in split.numbers}
        n_tensors = Counter(
            file for split in self._split for file in {ranges.files[n] for n in split.numbers}
        )
        self._decidable = {file for file, n in n_tensors.items() if n >= MIN_TENSORS}

    def first(self) -> tuple[int, ...]:
        """A few records of each file; none where no file could be assessed."""
        files = self._ranges.files
        n_left = dict.fromkeys(self._decidable, FEW)
        chosen: dict[int, None] = {}
        for split in _by_turns(self._split):
            wanted = [n for n in split.numbers if n_left.get(files[n], 0) > 0]
            if not wanted:
                continue
            within = {files[n] for n in wanted}
            if len(within) == 1:  # alone it proves nothing
                wanted += [n for n in split.numbers if files[n] not in within][:1]
            for number in wanted:
                chosen[number] = None
                n_left[files[number]] = n_left.get(files[number], 0) - 1
        return tuple(chosen)

    def suspects(self, before: Crcs) -> tuple[int, ...]:
        """Files whose first records are unchanged while a tensor in them changed elsewhere."""
        return tuple(one.file for one in self._unchanged(before, at_least=1))[:MAX_SUSPECTS]

    def closer(self, suspects: Sequence[int], before: Crcs) -> tuple[int, ...]:
        """Many more records of these files, and others of the same tensors."""
        files = self._ranges.files
        moved = self._moved(before)
        by_file = self._ranges.by_file
        chosen: dict[int, None] = {}
        for file in suspects:
            known = [n for n in by_file[file] if self._crcs[n] != NO_CRC]
            for number in known[:: max(1, -(-len(known) // MANY))]:
                chosen[number] = None
                split = self._of_number.get(number)
                others = [n for n in split.numbers if files[n] in moved] if split else []
                chosen.update(dict.fromkeys(others[:1]))
        return tuple(n for n in chosen if n not in before)

    def confirmed(self, suspects: Sequence[int], before: Crcs) -> tuple[StaleShard, ...]:
        """The suspects that are unchanged in all compared records."""
        found = self._unchanged(before, at_least=MIN_TENSORS)
        return tuple(one for one in found if one.file in suspects)

    def _moved(self, before: Crcs) -> set[int]:
        """The files in which a record moved on."""
        return {self._ranges.files[n] for n, crc in before.items() if crc != self._crcs[n]}

    def _unchanged(self, before: Crcs, *, at_least: int) -> Iterator[StaleShard]:
        files = self._ranges.files
        moved = self._moved(before)
        by_file: dict[int, list[int]] = defaultdict(list)
        for number in before:
            by_file[files[number]].append(number)
        for file in sorted(self._decidable & by_file.keys() - moved):
            alone: dict[str, int] = {}
            n_mixed = 0
            for number in by_file[file]:
                split = self._of_number.get(number)
                others = split.numbers if split else ()
                went_on = {
                    before[n] != self._crcs[n] for n in others if n in before and files[n] in moved
                }
                n_mixed += len(went_on) == 2
                if split is not None and went_on == {True}:
                    alone.setdefault(split.fqn, number)
            if len(alone) >= at_least:
                numbers = tuple(alone.values())
                has_moments = any(self._of_number[n].is_moment for n in numbers)
                yield StaleShard(file, len(by_file[file]), numbers, has_moments, n_mixed)


def _split_tensors(ranges: Ranges, crcs: Sequence[int]) -> Iterator[_SplitTensor]:
    for entry, first in zip(ranges.entries, ranges.first_range, strict=True):
        if not isinstance(entry, TensorEntry) or len(entry.chunks) < 2:
            continue
        numbers = tuple(
            first + chunk
            for chunk in range(len(entry.chunks))
            if _tells(entry, chunk, ranges.files[first + chunk], crcs[first + chunk])
        )
        if len({ranges.files[number] for number in numbers}) > 1:
            yield _SplitTensor(entry.fqn, numbers, is_moment(entry.path or (entry.fqn,)))


def _tells(entry: TensorEntry, chunk: int, file: int, crc: int) -> bool:
    if file == NO_FILE or crc == NO_CRC:
        return False
    n_elements = prod(entry.chunks.sizes_of(chunk))
    n_bytes = n_elements * DTYPE_SIZES.get(entry.dtype, 0)
    return n_elements >= MIN_ELEMENTS and n_bytes > 0 and crc != _crc_of_zeros(n_bytes)


@lru_cache(maxsize=4096)
def _crc_of_zeros(n_bytes: int) -> int:
    from zlib_ng.zlib_ng import crc32, crc32_combine

    crc, piece, length = crc32(b""), crc32(b"\0"), 1
    while n_bytes:
        if n_bytes % 2:
            crc = crc32_combine(crc, piece, length)
        piece, length, n_bytes = crc32_combine(piece, piece, length), 2 * length, n_bytes // 2
    return crc


def _by_turns(split: Collection[_SplitTensor]) -> Iterator[_SplitTensor]:
    """A moment, a weight, a moment, …: at the first step there are no moments yet."""
    widest = sorted(split, key=lambda one: -len(one.numbers))
    moments: Iterable[_SplitTensor] = [one for one in widest if one.is_moment]
    weights: Iterable[_SplitTensor] = [one for one in widest if not one.is_moment]
    both = chain.from_iterable(zip_longest(moments, weights))
    return (one for one in both if one is not None)


MAX_METADATA_BYTES = 32 << 20
"""Steps of larger metadata (some 190,000 chunks) are not compared: two would be in memory."""

MAX_TRIED = 2
"""So many older steps are tried until one can be read."""


def check_renamed(opened: OpenStep, part: OpenPart) -> Iterator[Finding]:
    """Yield a `state.renamed` where tensors have other names than in the step before.

    Storage errors of the older step are passed over. Cost: one metadata; of rank files and
    safetensors three short reads of one file, or its header.
    """
    for named in islice(opened.neighbours.older(), 1):
        now, then = {}, {}
        with suppress(StorageError, MemoryError):
            before = opened.neighbours.open(opened.store, named)
            if part.part.format in SHARDED:
                held = _metadata(before, part) if len(part.metadata) == 1 else None
                now = _shapes(leaf for one in part.metadata[:1] for _, leaf in entries_of(one))
                then = _shapes(leaf for _, leaf in entries_of(held)) if held else {}
            else:
                now, then = _shapes_in_files(opened, part, before)
        yield from check_names(now, then, named.name, opened.url)


def _shapes(leaves: Iterable[Leaf]) -> dict[str, Shape]:
    tensors = (leaf for leaf in leaves if leaf.shape)
    return {".".join(map(str, leaf.path)): (leaf.dtype, leaf.shape or ()) for leaf in tensors}


def _shapes_in_files(
    opened: OpenStep, part: OpenPart, before: OpenStep
) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """The tensors in one file of a part, and those in the file of the same name before."""
    number = before.step.number
    if opened.step.number is None or number is None:
        return {}, {}
    states: list[tuple[str, object]] = [
        (held.in_step(name), tensors_in_header(header))
        for held in part.safetensors
        for name, header in held.headers.items()
    ]
    states += [(sidecar.path, sidecar.content) for sidecar in opened.sidecars]
    for path, state in states:
        now = _shapes(leaves_of(state))
        path_before = path_then(opened, before, path, number)
        then = _shapes(leaves_at(before, path_before)) if now else {}
        if then:
            return now, then
    return {}, {}


def check_step_before(opened: OpenStep, part: OpenPart) -> Iterator[Finding]:
    """Yield a `shard.stale` for each shard file that equals that of the step before.

    `part` has no faults. Nothing is reported for a part without tensors that are split over
    several files, or without a step before it.

    Storage errors of the older step are ignored. Cost: a listing of the root, one metadata,
    and `FEW` short reads per shard file; if one of them is unchanged, two times `MANY` more
    for each such file, and at worst the same for one more step.
    """
    if len(part.metadata) != 1 or part.metadata[0].n_bytes > MAX_METADATA_BYTES:
        return
    check = StaleShardCheck(part.ranges, part.crcs)
    first = check.first()
    if not first:
        return
    steps = iter(part.opened.neighbours.older())
    before = _compared(steps, part, first)
    if before is None:
        return
    suspects = check.suspects(before.crcs)
    if not suspects:
        return
    try:
        closer = check.closer(suspects, before.crcs)
        folder = _folder(before.opened, part)
        before.crcs.update(_crcs(folder, before.metadata, part, closer))
    except (StorageError, MemoryError):
        return
    found = check.confirmed(suspects, before.crcs)
    numbers = [number for shard in found if not shard.has_moments for number in shard.numbers]
    still_before = _compared(steps, part, numbers) if numbers else None
    earlier_crcs = {} if still_before is None else still_before.crcs
    moved = {part.ranges.files[n] for n, crc in before.crcs.items() if crc != part.crcs[n]}
    for one in found:
        # What is unchanged now and had changed in the step before is not frozen.
        known = [n for n in one.numbers if n in earlier_crcs]
        had_moved = all(before.crcs[n] != earlier_crcs[n] for n in known)
        if one.has_moments or (one.n_mixed == 0 and len(known) >= MIN_TENSORS and had_moved):
            where, older = part.in_step(part.ranges.file_names[one.file]), before.opened
            names = some_of([part.ranges.owner(number).entry.fqn for number in one.numbers])
            others = counted(len(moved), "other shard file")
            yield Finding(
                "shard.stale",
                where,
                f"{where} is equal to the same file in {older.name}: "
                f"{counted(one.n_records, 'record')} were compared, and all have the same "
                f"checksums, while other chunks of the same tensors ({names}) changed; one of the "
                "two steps seems to have the other's shard",
                expected=f"other elements than in {older.name}, as in {others}",
                found="the same elements",
                next_command=command_line("diff", older.url, opened.url, "--values"),
            )


@dataclass(frozen=True, slots=True)
class Before:
    """What was read of one older step: checksums by our own ranges."""

    opened: OpenStep
    metadata: Metadata
    crcs: dict[int, int]


def compared_before(part: OpenPart, numbers: Sequence[int]) -> Before | None:
    """The checksums of records of a part in the nearest older step that can be read.

    Cost: one metadata, and a short read of each record.
    """
    return _compared(iter(part.opened.neighbours.older()), part, numbers)


def _compared(steps: Iterator[StepName], part: OpenPart, numbers: Sequence[int]) -> Before | None:
    """The checksums of records in the next of `steps` that can be read, None where none can."""
    for named in islice(steps, MAX_TRIED):
        with suppress(StorageError, MemoryError):
            before = part.opened.neighbours.open(part.store, named)
            metadata = _metadata(before, part)
            if metadata is not None:
                crcs = _crcs(_folder(before, part), metadata, part, numbers)
                if crcs:
                    return Before(before, metadata, crcs)
    return None


def _folder(before: OpenStep, part: OpenPart) -> str:
    return before.in_store(part.path) if part.path else before.folder


def _metadata(before: OpenStep, part: OpenPart) -> Metadata | None:
    """The metadata of the same part of an older step; None for one without, or with much of it.

    Raises `StorageError`, `MemoryError`. Cost: one read.
    """
    same = next((one for one in before.parts if one.path == part.path), None)
    name = inside(part.path, METADATA)
    n_bytes = sum(file.size for file in before.files if file.path == name)
    if same is None or n_bytes > MAX_METADATA_BYTES or len(same.metadata) != 1:
        return None
    return same.metadata[0]


def _crcs(
    folder: str, metadata: Metadata, part: OpenPart, numbers: Iterable[int]
) -> dict[int, int]:
    """What the records of the same chunks in the same files say of their elements."""
    found: dict[int, int] = {}
    places = [(n, place) for n in numbers if (place := _same_chunk(metadata, part.ranges, n))]
    spans = [_tail(folder, place) for _, place in places]
    for (number, place), (_, tail) in zip(places, part.store.read_spans(spans), strict=True):
        crc = elements_crc(tail, place.length)
        if crc is not None:
            found[number] = crc
    return found


def _same_chunk(metadata: Metadata, ranges: Ranges, number: int) -> ByteRange | None:
    """Where an older step has the same chunk, in a shard file of the same name."""
    owner = ranges.owner(number)
    now = owner.entry
    then = metadata.tensors.get(now.fqn)
    if not isinstance(now, TensorEntry) or then is None:
        return None
    if (then.dtype, then.shape) != (now.dtype, now.shape):
        return None
    bounds = (now.chunks.offsets_of(owner.chunk), now.chunks.sizes_of(owner.chunk))
    for chunk in (owner.chunk, *range(len(then.chunks))):
        if chunk >= len(then.chunks):
            continue
        if (then.chunks.offsets_of(chunk), then.chunks.sizes_of(chunk)) == bounds:
            place = then.chunks.byte_range_of(chunk)
            same = place is not None and place.file == ranges.file_names[ranges.files[number]]
            return place if same and place is not None and not place.transforms else None
    return None


def _tail(folder: str, place: ByteRange) -> Span:
    length = min(TAIL, place.length)
    return Span(f"{folder}/{place.file}", place.end - length, length)
