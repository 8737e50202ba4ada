"""Read every pickle of a step with one policy: what would run where it is loaded.

A framework gives its files to `torch.load` or `pickle.load`, which run what a pickle names. So
all of them are read here: the bytes entries of DCP shards, rank files, sidecars whether their
names are known or not, the pickles in bytes and in small tensors of bytes. The policy is that of
`formats.pickles.policy`; nothing of a pickle runs. Whether the files are whole is checked by
`structure` and `sidecars`: here damage only means that a pickle counts as unread.

At `listing`, files of a file system beside the tensors are read; bytes entries and rank files
are not, nor is anything of an object store. What was not read is counted, never called harmless.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from ckptctl.errors import CkptctlError, MetadataUnreadable, MetadataUnsafe, RecordUnreadable
from ckptctl.findings import Finding, at_most_few, explained
from ckptctl.formats.archive.directory import (
    ZIP_MAGIC,
    Member,
    RecordDirectory,
    View,
    parse_directory,
    read_member,
    tail_needed,
)
from ckptctl.formats.archive.foreign import NotRead, is_tar, pickles_in_tar, pickles_in_zip
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.parts import archives_in
from ckptctl.formats.pickles.stubs import shown
from ckptctl.formats.pickles.values import Decoded, TensorStub, check_bytes, decode_all
from ckptctl.formatting import command_line, counted, inside, some_of
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.sidecars import MAX_PICKLE_BYTES, unsafe_file
from ckptctl.inspection.structure import readable_ranges
from ckptctl.model import (
    SHARDED,
    ByteRange,
    BytesEntry,
    FileInfo,
    Metadata,
    PartFormat,
    TensorEntry,
)
from ckptctl.records.opening import MAX_ENTRY_BYTES, Need, Unfit, unpack
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import ReadCost, RecordSource, open_records
from ckptctl.storage.contract import Span

MAX_TENSOR_BYTES = 1 << 20
MAX_TENSORS = 4096
"""Tensors of bytes that may hold a pickle: Transformer Engine keeps its state in some of KiB."""

MAX_OTHER_FILES = 4096
"""So many files beside the tensors are opened."""

_NEVER_UNPICKLED = (
    r".*\.(?:json|jsonl|txt|md|ya?ml|toml|cfg|ini|csv|tsv|log|safetensors|py|sh|html|jinja"
    r"|png|jpe?g|svg|gif|proto|tfevents\..*)"
)
"""Files that no framework unpickles, by their names."""


def inspect_pickles(opened: OpenStep, *, is_deep: bool, reads_files: bool) -> PickleReader:
    """Read the pickles of a step, as far as the level reads them.

    Storage errors pass through. Cost: of each bytes entry, rank file and other file its head and
    its tail, merged as `open_records` does, and the rest of a pickle that is longer.
    """
    reader = PickleReader(opened)
    for part in opened.parts:
        if part.part.format in SHARDED:
            reader.read_part(part, read=is_deep)
    files = [
        file
        for file in opened.files
        if file.kind == "file"
        and file.size
        and not layouts.is_own(file.path)
        and not file.path.endswith((".distcp", ".metadata", layouts.METADATA_TMP))
        and not re.fullmatch(_NEVER_UNPICKLED, file.path.rpartition("/")[2])
    ]
    in_ranks = {
        part.in_step(file.path)
        for part in opened.parts
        if part.part.format is PartFormat.RANK_FILES
        for file in archives_in(part.part, opened.step.layout)
    }
    archives = [file for file in files if file.path in in_ranks]
    others = [file for file in files if file.path not in in_ranks]
    if opened.beside is not None and opened.beside.file.size:
        archives.append(opened.beside.file)
    reader.read_files(archives, read=is_deep)
    reader.read_files(others[:MAX_OTHER_FILES], read=reads_files)
    reader.n_unread += len(others[MAX_OTHER_FILES:])
    return reader


@dataclass(slots=True)
class PickleReader:
    """What was read of the pickles of one step so far; `n_unread` were not read at this level."""

    opened: OpenStep
    n_read: int = 0
    n_unread: int = 0
    unsafe: dict[tuple[str, str], list[tuple[str, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    unknown: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    tensors: list[tuple[str, str, Span]] = field(default_factory=list)
    too_long: list[str] = field(default_factory=list)

    def read_part(self, part: OpenPart, *, read: bool) -> None:
        """Read the bytes entries of a part of DCP, and its small tensors of bytes."""
        small = [_of_bytes(metadata) for metadata in part.metadata]
        ranges = Ranges(small)
        if not read:
            self.n_unread += sum(len(metadata.bytes_entries) for metadata in small)
            return
        by_file = readable_ranges(ranges, part.part.files)
        source = RecordSource(part.store, part.folder, ranges)
        self._read(source, by_file, part.path, "record.unsafe")

    def read_files(self, files: Sequence[FileInfo], *, read: bool) -> None:
        """Read files as one record each."""
        entries = {
            file.path: BytesEntry(file.path, ByteRange(self._stored(file.path), 0, file.size))
            for file in files
        }
        ranges = Ranges([Metadata({}, entries, tuple(entries))])
        if not read:
            self.n_unread += sum(self._may_be_pickle(file.path) for file in files)
            return
        by_file = ranges.by_file
        source = RecordSource(self.opened.store, "", ranges)
        self._read(source, by_file, "", "file.unsafe")

    def _stored(self, path: str) -> str:
        beside = self.opened.beside
        if beside is not None and path == beside.file.path:
            return beside.in_store(beside.part.files[0].path)
        return self.opened.in_store(path)

    def _may_be_pickle(self, path: str) -> bool:
        """Whether the name is one of a pickle: nobody has looked into the file."""
        layout = self.opened.step.layout
        is_named = re.search(r"\.(?:pt|pth|ckpt|bin|pkl|pickle|tar)$", path) is not None
        return is_named or kind_of_file(layout, path) is not None

    def _read(
        self, source: RecordSource, by_file: Sequence[Sequence[int]], part_path: str, code: str
    ) -> None:
        ranges = source.ranges
        is_entry = code == "record.unsafe"

        def open_one(number: int, view: View) -> Need | None:
            owner = ranges.owner(number)
            entry = owner.entry
            where = entry.fqn
            if is_entry:
                where = inside(part_path, ranges.file_names[ranges.files[number]])
            try:
                found = self._decoded(view, owner.transforms, entry.fqn, is_entry=is_entry)
                if isinstance(entry, TensorEntry) and not isinstance(found, Need):
                    elements = _elements(view)
                    if isinstance(elements, Need):
                        return elements
                    check_bytes(elements or b"")
                    return None
            except MetadataUnsafe as error:
                self.unsafe[where, code].append((entry.fqn, error.message))
                self.n_read += 1
                return None
            except (Unfit, CkptctlError):
                # What is damaged is reported by `structure`; a file of another format is none.
                is_framed = view.head[:1] in (b"\x80", b"P") and self._may_be_pickle(entry.fqn)
                self.n_unread += isinstance(entry, BytesEntry) and is_framed
                return None
            if isinstance(found, Need):
                return found
            if found is None:
                return None
            self.n_read += isinstance(entry, BytesEntry)
            for name in found.unknown:
                self.unknown[name].append(where)
            self._note_tensors(found.value, view, number, source, where, code)
            return None

        for _ in open_records(source, by_file, open_one, ReadCost()):
            pass
        self._read_tensors(source)

    def _decoded(
        self, view: View, transforms: Sequence[str], path: str, *, is_entry: bool
    ) -> Decoded | Need | None:
        """The pickle in a record or a file; None where there is none that is read."""
        if transforms:
            if view.length > MAX_PICKLE_BYTES:
                raise RecordUnreadable("it is too long")
            if len(view.head) < view.length:
                return Need(view.length, view.length)
            data = unpack(view.head, transforms, MAX_ENTRY_BYTES)
            view = View(len(data), data, data)
        if view.head[:4] == ZIP_MAGIC:
            return _in_archive(view)
        if is_tar(view.head):
            return self._in_tar(view, path)
        if not is_entry and not _begins_as_pickle(view.head):
            return None
        needed = min(view.length, MAX_PICKLE_BYTES)
        if len(view.head) < needed:
            return Need(needed, 1)
        try:
            return decode_all(view.head)
        except MetadataUnreadable:
            is_cut = view.length > MAX_PICKLE_BYTES
            if is_cut and (is_entry or self._may_be_pickle(path)):
                self.too_long.append(path)
            raise

    def _in_tar(self, view: View, path: str) -> Decoded | Need | None:
        if view.length > MAX_PICKLE_BYTES:
            if not self._may_be_pickle(path):
                return None
            raise MetadataUnsafe(
                "is a tar file of more bytes than are read, under the name of a pickle"
            )
        if len(view.head) < view.length:
            return Need(view.length, 1)
        return _joined(decode_all(pickle) for pickle in pickles_in_tar(view.head))

    def _note_tensors(
        self, value: object, view: View, number: int, source: RecordSource, where: str, code: str
    ) -> None:
        """Keep where the elements of small tensors of bytes are, in an archive."""
        stubs = [stub for stub in _stubs_in(value) if _may_hold_pickle(stub)]
        if not stubs or view.head[:4] != ZIP_MAGIC:
            return
        ranges = source.ranges
        file = inside(source.folder, ranges.file_names[ranges.files[number]])
        try:
            directory = parse_directory(view.tail, view.length)
        except RecordUnreadable:
            self.n_unread += 1  # several archives in one file, or one that no `torch.save` wrote
            return
        members = {member.name: member for member in directory.members}
        for key in sorted({stub.storage_key for stub in stubs}):
            member = members.get(f"data/{key}")
            if member is None or member.size > MAX_TENSOR_BYTES:
                continue
            if len(self.tensors) >= MAX_TENSORS:
                self.n_unread += 1
                continue
            span = Span(file, ranges.starts[number] + member.start, member.size)
            self.tensors.append((where, code, span))

    def _read_tensors(self, source: RecordSource) -> None:
        tensors, self.tensors = self.tensors, []
        spans = [span for _, _, span in tensors]
        for (where, code, _), (_, data) in zip(
            tensors, source.store.read_spans(spans), strict=True
        ):
            try:
                unknown = check_bytes(data)
            except MetadataUnsafe as error:
                self.unsafe[where, code].append((where, error.message))
                continue
            for name in unknown:
                self.unknown[name].append(where)

    def findings(self, allowed: Collection[str]) -> Iterator[Finding]:
        """Yield `file.unsafe` and `record.unsafe` by file, and `pickle.unknown` by global.

        The unknown globals among `allowed` have none.
        """
        yield from at_most_few(self._unsafe())
        yield from at_most_few(self._unknown(allowed))

    def _unsafe(self) -> Iterator[Finding]:
        for (where, code), reasons in sorted(self.unsafe.items()):
            fqn, reason = reasons[0]
            if code == "file.unsafe":
                yield unsafe_file(where, reason)
                continue
            others = len(reasons) - 1
            more = f"; so do {counted(others, 'other record')} of it" if others else ""
            yield explained(
                code,
                where,
                f"the record of {fqn} in {where} {reason}: loading it would run code{more}. "
                "Nothing of it was run. Do not load this step with any other tool, and find out "
                "who wrote it",
            )

    def _unknown(self, allowed: Collection[str]) -> Iterator[Finding]:
        for path in sorted(set(self.too_long)):
            yield explained(
                "pickle.unknown",
                path,
                f"{path} holds a pickle of more than the {MAX_PICKLE_BYTES:,} bytes that are read: "
                "what it names after them is not known",
            )
        for name, places in sorted(self.unknown.items()):
            if name in allowed:
                continue
            files = list(dict.fromkeys(places))
            yield Finding(
                "pickle.unknown",
                files[0],
                f"{shown(name)} in {some_of(files)} is in no list of classes that frameworks "
                "save; a load that runs pickles imports it",
                next_command=command_line("verify", self.opened.url, "--allow-globals", name[:200]),
            )


def _begins_as_pickle(head: bytes) -> bool:
    """Whether bytes could be a pickle of any protocol."""
    if head[:1] == b"\x80":
        return head[1:2] <= b"\x05"
    # An unpickler wants no mark in front: every opcode that needs nothing on the stack will do.
    return re.match(rb"[(\]}c)IKJMLSUVXTNFGBC\x88-\x8b\x8c-\x8f\x95\x96]", head) is not None


def _joined(found: Iterable[Decoded]) -> Decoded | None:
    """Several pickles of one file; None where there is none."""
    every = list(found)
    unknown = sorted({name for decoded in every for name in decoded.unknown})
    return Decoded(every[0].value, tuple(unknown)) if every else None


def _in_archive(view: View) -> Decoded | Need | None:
    try:
        needed = tail_needed(view.tail, view.length)
        if needed > len(view.tail):
            return Need(len(view.head), needed)
        directory = parse_directory(view.tail, view.length)
    except RecordUnreadable as error:
        return _in_foreign_archive(view, error)
    names = [member.name for member in directory.members if member.name.lower() == "data.pkl"]
    if names != ["data.pkl"]:
        return _in_foreign_archive(view, RecordUnreadable("it has another `data.pkl`"))
    member = directory.find("data.pkl")
    data = read_member(directory, "data.pkl", view)
    if data is not None:
        return decode_all(data)
    return None if member is None else _need(member, directory, view)


def _in_foreign_archive(view: View, error: RecordUnreadable) -> Decoded | Need | None:
    """The pickles in an archive that `torch.save` did not write; raises `error` without one."""
    found = pickles_in_zip(view)
    if isinstance(found, NotRead):
        from_end = view.length - found.start
        if min(found.end, from_end) > MAX_PICKLE_BYTES:
            raise MetadataUnsafe(
                "is an archive that torch.save did not write, with a pickle too far inside"
            )
        if from_end < found.end:
            return Need(len(view.head), min(view.length, max(from_end, 1 << 17)))
        return Need(min(view.length, max(found.end, 1 << 17)), len(view.tail))
    decoded = _joined(decode_all(pickle) for pickle in found)
    if decoded is None:
        raise error
    return decoded


def _need(member: Member, directory: RecordDirectory, view: View) -> Need:
    """How much of a record to read for a member: from the nearer end."""
    from_end = directory.length - member.start
    if min(member.end, from_end) > MAX_PICKLE_BYTES:
        if member.size <= MAX_PICKLE_BYTES:
            # `torch.save` writes it first, before the tensors.
            raise MetadataUnsafe(f"has {member.name} too far inside to be read")
        raise RecordUnreadable(f"{member.name} is too long")
    if member.end <= from_end:
        return Need(member.end, len(view.tail))
    return Need(len(view.head), from_end)


def _elements(view: View) -> bytes | Need | None:
    """The elements of a tensor's record."""
    directory = parse_directory(view.tail, view.length)
    members = [member for member in directory.members if member.name.startswith("data/")]
    if len(members) != 1:
        return None
    data = read_member(directory, members[0].name, view)
    return _need(members[0], directory, view) if data is None else data


def _of_bytes(metadata: Metadata) -> Metadata:
    """The bytes entries of a part's metadata, and its tensors of bytes that may hold a pickle."""
    tensors: dict[str, TensorEntry] = {}
    for fqn, tensor in metadata.tensors.items():
        is_bytes = tensor.dtype in ("uint8", "int8") and len(tensor.shape) == 1
        if is_bytes and 8 <= prod(tensor.shape) <= MAX_TENSOR_BYTES and len(tensors) < MAX_TENSORS:
            tensors[fqn] = tensor
    return Metadata(tensors, metadata.bytes_entries, metadata.file_names)


def _may_hold_pickle(stub: TensorStub) -> bool:
    is_bytes = stub.dtype in ("uint8", "int8") and len(stub.shape) == 1
    return is_bytes and 8 <= stub.n_elements_in_storage <= MAX_TENSOR_BYTES


def _stubs_in(value: object) -> Iterator[TensorStub]:
    """The tensors in the plain containers of a decoded value."""
    pending, seen = [value], {id(value)}
    while pending:
        holder = pending.pop()
        if isinstance(holder, TensorStub):
            yield holder
            continue
        if isinstance(holder, Mapping):
            items: Iterable[object] = holder.values()
        elif isinstance(holder, (list, tuple, set, frozenset)):
            items = holder
        else:
            continue
        for item in items:
            if id(item) not in seen and isinstance(
                item, (TensorStub, Mapping, list, tuple, set, frozenset)
            ):
                seen.add(id(item))
                pending.append(item)
