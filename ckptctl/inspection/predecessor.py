"""Compare a step with its predecessors.

Finds them under the root, and reads what `inspection.stale_shards` compares: the ends of a few
records, where their checksums are; or the numbers of the steps that they were written as.
Predecessors are not inspected: where one is damaged, gone or does not answer, nothing is
compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice

from ckptctl.data_classes import dataclass
from ckptctl.errors import StorageError
from ckptctl.findings import Finding
from ckptctl.formats.archive.directory import TAIL
from ckptctl.formats.frameworks.layouts import (
    METADATA,
    StepName,
    counts_training_steps,
    path_in_step,
)
from ckptctl.formats.frameworks.scattered import is_scattered
from ckptctl.formats.frameworks.state_keys import Leaf, entries_of, leaves_of
from ckptctl.formatting import command_line, inside
from ckptctl.inspection.beside import Neighbours
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.shape import own_number, wrong_step
from ckptctl.inspection.sidecars import tensors_in_header, value_in_archive
from ckptctl.inspection.stale_shards import StaleShardCheck, has_moved, stale
from ckptctl.inspection.train_state import Shape, check_names
from ckptctl.model import SHARDED, ByteRange, Metadata, TensorEntry
from ckptctl.records.opening import elements_crc
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import read_headers
from ckptctl.storage.contract import Span, read_range

MAX_METADATA_BYTES = 32 << 20
"""Steps of larger metadata (some 190,000 chunks) are not compared: two would be in memory."""

MAX_END = 64 << 10
"""Bytes of the end of two files that are compared."""

COUNTS = ("global_step", "global_steps", "iteration", "iter", "iter_num", "step")
"""Keys under which transformers, DeepSpeed, Lightning, Megatron, BasicSR, nanoGPT and others count
the steps of the run."""

MAX_TRIED = 2
"""So many older steps are tried until one can be read."""


def check_counts(
    opened: OpenStep, contents: Mapping[str, object], neighbours: Neighbours
) -> Iterator[Finding]:
    """Yield `state.mixed` for each file of a rank-file step that is that of an older step.

    `contents` are decoded files by path. One that counts as many steps as an older step has in
    its name, and no more, and ends with the same bytes as the file of that step, was not
    written by this save: an archive ends with the checksums of all that it holds. Cost: none
    where all counts are those of the step; else a listing and two short reads for each file.
    """
    number = opened.step.number
    if number is None or not counts_training_steps(opened.step.layout):
        return
    for path, content in contents.items():
        held = content if isinstance(content, Mapping) else {}
        count = next((held[key] for key in COUNTS if key in held), None)
        if type(count) is not int or count >= number:
            continue
        for named in (one for one in neighbours.older() if one.number == count):
            with suppress(StorageError):
                before = neighbours.open(opened.store, named)
                then = _path_then(opened, before, path, count)
                if _end(opened, path) == _end(before, then):
                    from ckptctl.inspection.rank_files import file_of_another_step

                    yield file_of_another_step(opened.step, path, count, named.name)


def _path_then(opened: OpenStep, before: OpenStep, path: str, count: int) -> str:
    """The path in step `count` of the file that the open step has at `path`."""
    number = opened.step.number or 0
    if opened.is_file:
        return before.name
    if not is_scattered(opened.name):
        return path_in_step(path, number, count)
    then = re.sub(rf"(?<![0-9])0*{number}(?![0-9])", f"0*{count}", re.escape(path))
    return next((file.path for file in before.files if re.fullmatch(then, file.path)), path)


def _end(opened: OpenStep, path: str) -> tuple[int, bytes] | None:
    """The size and the last bytes of a file; None for a file that is not there."""
    size = next((file.size for file in opened.files if file.path == path), 0)
    n_bytes = min(size, MAX_END)
    end = read_range(opened.store, opened.in_store(path), size - n_bytes, n_bytes)
    return size, end


def check_renamed(opened: OpenStep, part: OpenPart, neighbours: Neighbours) -> Iterator[Finding]:
    """Yield a `state.renamed` where tensors have other names than in the step before.

    Storage errors of the older step are passed over. Cost: one metadata; of rank files and
    safetensors three short reads of one file, or its header.
    """
    for named in islice(neighbours.older(), 1):
        now, then = {}, {}
        with suppress(StorageError, MemoryError):
            before = neighbours.open(opened.store, named)
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
    number, number_before = opened.step.number, before.step.number
    if number is None or number_before is None:
        return {}, {}
    for held in part.safetensors:
        for path, header in held.headers.items():
            then = path_in_step(held.in_step(path), number, number_before)
            files = [file for file in before.files if file.path == then]
            for _, other in read_headers(opened.store, before.folder, files):
                states = (tensors_in_header(header), tensors_in_header(other))
                now_held, then_held = (_shapes(leaves_of(state or {})) for state in states)
                return now_held, then_held
    for sidecar in opened.sidecars:
        now_held = _shapes(leaves_of(sidecar.content))
        if now_held:
            then = _path_then(opened, before, sidecar.path, number_before)
            sizes = {before.in_store(file.path): file.size for file in before.files}
            path = then if opened.is_file else before.in_store(then)
            if path not in sizes:
                return {}, {}
            return now_held, _shapes(leaves_of(value_in_archive(opened.store, path, sizes[path])))
    return {}, {}


def check_step_before(
    opened: OpenStep, part: OpenPart, neighbours: Neighbours
) -> Iterator[Finding]:
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
    steps = iter(neighbours.older())
    before = _compared(neighbours, steps, part, first)
    if before is None:
        return
    suspects = check.suspects(before.crcs)
    if not suspects:
        return
    try:
        before = before.with_more(part, check.closer(suspects, before.crcs))
    except (StorageError, MemoryError):
        return
    found = check.confirmed(suspects, before.crcs)
    unproven = [one for one in found if not one.has_moments]
    still_before = None
    if unproven:
        numbers = [number for one in unproven for number in one.numbers]
        still_before = _compared(neighbours, steps, part, numbers)
    moved = {part.ranges.files[n] for n, crc in before.crcs.items() if crc != part.crcs[n]}
    for one in found:
        proven = one.has_moments or (
            one.n_mixed == 0
            and still_before is not None
            and has_moved(one, before.crcs, still_before.crcs)
        )
        if proven:
            command = command_line("diff", before.opened.url, opened.url, "--values")
            yield stale(part.ranges, one, len(moved), part.path, before.opened.name, command)


def check_wrong_step(opened: OpenStep, number: int, neighbours: Neighbours) -> Iterator[Finding]:
    """Yield `step.wrong-step` for what is step `number`, if one that is as far lies beside it.

    Cost: a listing of the root, and the metadata of `MAX_TRIED` steps at most.
    """
    part = next(part for part in opened.parts if part.own_number is not None)
    beside = [named for named in neighbours.older() if named.number >= number]
    for named in beside[:MAX_TRIED]:
        with suppress(StorageError, MemoryError):
            metadata = _metadata(neighbours.open(opened.store, named), part)
            if metadata is not None and own_number(metadata) == named.number:
                yield wrong_step(opened.step, number, named.name)
                return


@dataclass(frozen=True, slots=True)
class _Before:
    """What was read of one older step: checksums by our own ranges."""

    opened: OpenStep
    metadata: Metadata
    crcs: dict[int, int]

    def with_more(self, part: OpenPart, numbers: Iterable[int]) -> _Before:
        """The same with the checksums of more records."""
        more = _crcs(_folder(self.opened, part), self.metadata, part, numbers)
        return _Before(self.opened, self.metadata, {**self.crcs, **more})


def _compared(
    neighbours: Neighbours, steps: Iterator[StepName], part: OpenPart, numbers: Sequence[int]
) -> _Before | None:
    """The checksums of records in the next of `steps` that can be read, None where none can."""
    for named in islice(steps, MAX_TRIED):
        with suppress(StorageError, MemoryError):
            before = neighbours.open(part.store, named)
            metadata = _metadata(before, part)
            if metadata is not None:
                crcs = _crcs(_folder(before, part), metadata, part, numbers)
                if crcs:
                    return _Before(before, metadata, crcs)
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
