"""Check that each byte range lies in a file and is long enough, and find bytes that no range names.

Only the metadata and one listing are inspected: names, sizes, offsets, lengths. A record is the
elements and some 500 bytes of framing, so a range shorter than the elements cannot be one. Ranges
that are exactly as long are the sign of torch's safetensors serialization inside DCP, which does
not state where the tensors are, and which torch itself cannot load.

Source: torch 2.13 `torch/distributed/checkpoint/filesystem.py`: records follow each other in a
shard file without a gap, from its first byte to its last; `_write_item` with
`SerializationFormat.SAFETENSORS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from operator import add, gt, mul

from ckptctl.findings import Finding, at_most_few, explained
from ckptctl.formats.frameworks.layouts import METADATA
from ckptctl.formats.pickles.stubs import shown
from ckptctl.formatting import counted, inside, some_of, verb
from ckptctl.model import DTYPE_SIZES, NO_FILE, BytesEntry, FileInfo, Metadata, TensorEntry
from ckptctl.records.ranges import Ranges


def check_sizes(ranges: Ranges, part_path: str = "") -> Iterator[Finding]:
    """Yield a finding for each tensor with byte ranges too short for its elements.

    Yields `record.mismatch`, since the file is as it may be and the metadata
    contradicts itself; `format.unsupported`, and nothing else, for tensors in
    safetensors form. A dtype that is not in the table has one byte per
    element here. Chunks whose bytes were compressed may be of any length.
    """
    if holds_safetensors(ranges):
        yield Finding(
            "format.unsupported",
            part_path,
            "the tensors were written in safetensors form inside DCP's shard files; its metadata "
            "does not say where they lie there, and torch's own reader cannot load them",
        )
        return
    yield from at_most_few(_check_tensors(ranges, part_path))


def holds_safetensors(ranges: Ranges) -> bool:
    """Every chunk's range is exactly as long as its elements, and there is one."""
    found = False
    for entry in ranges.entries:
        if not isinstance(entry, TensorEntry) or not entry.chunks:
            continue
        needed = _bytes_needed(entry)
        if entry.chunks.transforms or list(entry.chunks.lengths) != needed:
            return False
        found = found or any(needed)
    return found


def _check_tensors(ranges: Ranges, part_path: str) -> Iterator[Finding]:
    for entry in ranges.entries:
        if not isinstance(entry, TensorEntry):
            continue
        chunks = entry.chunks
        needed = _bytes_needed(entry)
        if not any(map(gt, needed, chunks.lengths)):
            continue
        short = [
            i
            for i, n_bytes in enumerate(needed)
            if n_bytes > chunks.lengths[i]
            and chunks.files[i] != NO_FILE
            and i not in chunks.transforms
        ]
        if short:
            yield Finding(
                "record.mismatch",
                inside(part_path, entry.fqn),
                f"{counted(len(short), 'chunk')} of {len(chunks):,} cannot fit into the byte "
                f"range in the metadata; the first is at {chunks.offsets_of(short[0])}",
                expected=f"more than {needed[short[0]]:,} bytes",
                found=f"{chunks.lengths[short[0]]:,} bytes",
            )


def _bytes_needed(tensor: TensorEntry) -> Sequence[int]:
    """Bytes of each chunk's elements."""
    chunks = tensor.chunks
    element_bytes = DTYPE_SIZES.get(tensor.dtype, 1)
    first = chunks.sizes[: chunks.n_dims]
    if chunks.sizes == first * len(chunks):
        return [element_bytes * prod(first)] * len(chunks)
    n_bytes = [element_bytes] * len(chunks)
    for dim in range(chunks.n_dims):
        n_bytes = list(map(mul, n_bytes, chunks.sizes[dim :: chunks.n_dims]))
    return n_bytes


SHARD_SUFFIX = ".distcp"

_DRIVE = re.compile(r"[A-Za-z]:")
_LARGEST_OFFSET = 2**63 - 1


def check_presence(
    ranges: Ranges, files: Sequence[FileInfo], part_path: str = ""
) -> Iterator[Finding]:
    """Yield what is missing, short, out of place or left over in one part.

    `ranges` are those of all metadata of the part, `files` its listing with
    paths relative to it. Yields `path.escape`, `shard.missing`, `shard.truncated`,
    `range.missing`, `range.outside`, `range.overlap`, `range.stray`, and
    `shard.trailing`, `shard.empty`, `shard.orphan` about what is legitimate.

    Cost: n log n for n chunks; no bytes are read.
    """
    listed = {file.path: file for file in files}
    yield from at_most_few(_check_files(ranges, listed, part_path))
    yield from _check_unplaced(ranges, part_path)
    yield from _check_leftovers(ranges, files, part_path)


def check_holds_anything(parts: Sequence[Sequence[Metadata]]) -> Iterator[Finding]:
    """Yield `metadata.empty` where the metadata of all parts of a step name no entry at all.

    One part may be empty beside others; a part without metadata proves nothing.
    """
    if not parts or not all(parts):
        return
    if any(one.tensors or one.bytes_entries for part in parts for one in part):
        return
    yield explained(
        "metadata.empty",
        METADATA,
        "the metadata lists no tensor and no other entry: there is nothing to resume from",
    )


def check_key_paths(metadatas: Sequence[Metadata], part_path: str = "") -> Iterator[Finding]:
    """Yield one `metadata.path` where key paths contradict the names of their entries.

    torch names an entry by the keys that lead to it, joined with dots, and keeps the keys too: a
    load into nested state and a conversion go by them, and no record shows them. The planner of
    another tool may keep other paths: then none of them is even as long as its name.
    Source: torch 2.13 `torch/distributed/checkpoint/_nested_dict.py`.
    """
    names = [
        (fqn, ".".join(map(str, path)))
        for metadata in metadatas
        for fqn, path in metadata.planner_paths.items()
    ]
    wrong = [(fqn, joined) for fqn, joined in names if joined != fqn]
    if not wrong or not any(len(fqn) == len(joined) for fqn, joined in names):
        return
    (fqn, joined), where = wrong[0], inside(part_path, METADATA)
    yield Finding(
        "metadata.path",
        where,
        f"the key paths of {counted(len(wrong), 'entry', 'entries')} in {where} contradict their "
        f"names; the first is that of {shown(fqn)}: bytes of the metadata were changed",
        expected=shown(fqn),
        found=shown(joined),
    )


def escape_reason(path: str) -> str | None:
    """Why a path that the metadata gives may not be opened; None for one that may.

    torch joins it to the folder unchecked: an absolute one is opened as it stands.
    """
    if not path:
        return "is empty"
    if path.startswith("/") or _DRIVE.match(path):
        return "is absolute"
    if ".." in path.split("/"):
        return "leads upwards"
    if "\\" in path or "\0" in path:
        return "contains a character that no shard file's name contains"
    return None


def _check_files(
    ranges: Ranges, listed: Mapping[str, FileInfo], part_path: str
) -> Iterator[Finding]:
    tiled = not holds_safetensors(ranges)
    ends = _ends_in_order(ranges)
    for number, name in enumerate(ranges.file_names):
        file, reason = listed.get(name), escape_reason(name)
        if file is not None and (file.kind, file.size) == ("file", ends[number]) and not reason:
            continue
        numbers = ranges.by_file[number]
        if not numbers:
            continue
        where = inside(part_path, name)
        if reason is not None:
            message = f"the path {reason}; torch would follow it for {_lost(ranges, numbers)}"
            yield Finding("path.escape", where, message)
            continue
        if file is not None and file.kind == "file":
            yield from _check_extents(ranges, numbers, file, where, tiled=tiled)
            continue
        lost = _lost(ranges, numbers)
        if file is None or file.kind == "dir":
            what = "" if file is None else "it is a folder; "
            yield Finding("shard.missing", where, f"{what}{lost} cannot be read")
        else:
            is_link = file.kind == "link"
            what = f"is a link to {file.link}" if is_link else "is not a regular file"
            message = f"it {what}, which is not followed; {lost} not inspected"
            yield Finding("path.escape", where, message)


def _ends_in_order(ranges: Ranges) -> Sequence[int | None]:
    """Where the last range of each file ends, if each begins where the one before it ends.

    None for a file whose ranges are in another order, or do not fill it: these are sorted.
    """
    ends: list[int | None] = [0] * (len(ranges.file_names) + 1)  # `NO_FILE`, -1, is the last
    for file, start, length in zip(ranges.files, ranges.starts, ranges.lengths, strict=True):
        ends[file] = start + length if ends[file] == start and length > 0 else None
    return ends[:-1]


def _check_extents(
    ranges: Ranges, numbers: Sequence[int], file: FileInfo, where: str, *, tiled: bool
) -> Iterator[Finding]:
    """Ranges that no file can hold, that overlap, or that go over the end of this one."""
    starts, lengths = ranges.starts, ranges.lengths
    begins = list(map(starts.__getitem__, numbers))
    extents = list(map(lengths.__getitem__, numbers))
    sound = numbers
    if min(begins) < 0 or min(extents) <= 0:
        sound = [n for n in numbers if starts[n] >= 0 and lengths[n] > 0]
        begins = list(map(starts.__getitem__, sound))
        extents = list(map(lengths.__getitem__, sound))
    ends = list(map(add, begins, extents))
    needed = max(ends, default=0)
    if needed > _LARGEST_OFFSET or (tiled and len(sound) < len(numbers)):
        yield _outside(ranges, numbers, where)
        return
    if needed > file.size:
        cut = [n for n in sound if starts[n] + lengths[n] > file.size]
        yield Finding(
            "shard.truncated",
            where,
            f"{file.size:,} of {needed:,} bytes exist; {_lost(ranges, cut)} cannot be read",
            expected=f"{needed:,} bytes",
            found=f"{file.size:,} bytes",
        )
    if not tiled:
        return
    # Sorted apart from each other, beginnings and ends show an overlap all the same:
    # somewhere a range begins before as many have ended as began before it.
    begins.sort()
    ends.sort()
    if any(map(gt, ends, begins[1:])):
        yield _overlap(ranges, sound, where)
    elif needed <= file.size and sum(extents) < file.size:
        named = sum(extents)
        after, between = file.size - needed, needed - named
        counts = [f"{counted(after, 'byte')} after its last record"] if after else []
        counts += [f"{counted(between, 'byte')} before or between its records"] if between else []
        yield Finding(
            "shard.trailing",
            where,
            f"{' and '.join(counts)} {verb(after + between, 'belongs', 'belong')} to no entry",
            expected=f"{named:,} bytes",
            found=f"{file.size:,} bytes",
        )


def _outside(ranges: Ranges, numbers: Sequence[int], where: str) -> Finding:
    starts, lengths = ranges.starts, ranges.lengths
    wrong = [
        n
        for n in numbers
        if starts[n] < 0 or lengths[n] <= 0 or starts[n] + lengths[n] > _LARGEST_OFFSET
    ]
    first = wrong[0]
    return Finding(
        "range.outside",
        where,
        f"{counted(len(wrong), 'byte range')} that no file can contain; the first is that of "
        f"{ranges.owner(first).name}: {lengths[first]:,} bytes from byte {starts[first]:,} on",
    )


def _overlap(ranges: Ranges, numbers: Sequence[int], where: str) -> Finding:
    in_order = sorted(numbers, key=ranges.starts.__getitem__)
    pairs = []
    holder, reached = in_order[0], -1
    for number in in_order:
        if ranges.starts[number] < reached:
            pairs.append((holder, number))
        if ranges.starts[number] + ranges.lengths[number] > reached:
            holder, reached = number, ranges.starts[number] + ranges.lengths[number]
    one, other = pairs[0]
    begin = verb(len(pairs), "begins", "begin")
    return Finding(
        "range.overlap",
        where,
        f"{counted(len(pairs), 'byte range')} {begin} inside another; the first are those of "
        f"{ranges.owner(one).name} and {ranges.owner(other).name}",
        expected=f"bytes from {ranges.starts[one] + ranges.lengths[one]:,} on",
        found=f"bytes from {ranges.starts[other]:,} on",
    )


def _check_unplaced(ranges: Ranges, part_path: str) -> Iterator[Finding]:
    """Entries without a byte range, and byte ranges without an entry."""
    if NO_FILE in ranges.files:
        missing = [n for n, file in enumerate(ranges.files) if file == NO_FILE]
        first = ranges.owner(missing[0])
        yield Finding(
            "range.missing",
            inside(part_path, first.entry.fqn),
            f"the metadata has no byte range for {_lost(ranges, missing)}; the first is "
            f"{first.name}",
        )
    strays = [stray for metadata in ranges.metadatas for stray in metadata.strays]
    for name in sorted({found.file for _, _, found in strays} - set(ranges.file_names)):
        reason = escape_reason(name)
        if reason is not None:
            message = f"the path {reason}; the byte range belongs to no entry"
            yield Finding("path.escape", inside(part_path, name), message)
    if strays:
        fqn, offsets, found = strays[0]
        at = f" at {offsets}" if offsets else ""
        yield Finding(
            "range.stray",
            inside(part_path, fqn),
            f"{counted(len(strays), 'byte range')} {verb(len(strays), 'belongs', 'belong')} to no "
            f"entry; the first is that of "
            f"{fqn}{at} in {found.file}",
        )


def _check_leftovers(
    ranges: Ranges, files: Sequence[FileInfo], part_path: str
) -> Iterator[Finding]:
    """Shard files that no metadata names: of idle ranks, or left over from another save."""
    named = set(ranges.file_names)
    named.update(found.file for m in ranges.metadatas for _, _, found in m.strays)
    unnamed = [
        file
        for file in files
        if file.kind == "file" and file.path.endswith(SHARD_SUFFIX) and file.path not in named
    ]
    empty = [file.path for file in unnamed if file.size == 0]
    if empty:
        yield Finding(
            "shard.empty",
            inside(part_path, some_of(empty)),
            f"{counted(len(empty), 'shard file')} of 0 bytes, from ranks that had nothing to write",
        )
    orphans = [file for file in unnamed if file.size > 0]
    if orphans:
        n_bytes = sum(file.size for file in orphans)
        yield Finding(
            "shard.orphan",
            inside(part_path, some_of([file.path for file in orphans])),
            f"{counted(len(orphans), 'shard file')} with {n_bytes:,} bytes that no metadata "
            "names: left by a save over this step, or by another world size",
        )


def _lost(ranges: Ranges, numbers: Sequence[int]) -> str:
    """The tensors that the chunks belong to, and the other entries, counted."""
    entries = {id(owner.entry): owner.entry for owner in map(ranges.owner, numbers)}
    n_bytes_entries = sum(isinstance(entry, BytesEntry) for entry in entries.values())
    n_tensors = len(entries) - n_bytes_entries
    n_chunks = len(numbers) - n_bytes_entries
    counts = []
    if n_tensors:
        chunks = f"{counted(n_chunks, 'chunk')} in " if n_chunks != n_tensors else ""
        counts.append(f"{chunks}{counted(n_tensors, 'tensor')}")
    if n_bytes_entries:
        other = "other " if n_tensors else ""
        counts.append(counted(n_bytes_entries, f"{other}entry", f"{other}entries"))
    return " and ".join(counts)
