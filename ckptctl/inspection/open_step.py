"""One step of an open store: what is read of it is read on first use, and kept.

Every command that works on a step takes this handle, so that its listing, its metadata
and its sidecars are read and decoded once, however many checks, plans or loads use them.
Code that must detect that the step changed calls `list_again`, which reads again.

A part of rank files has no metadata: each file of `torch.save` is one archive, as a record of DCP
is, so the listing serves as metadata with one entry for each file, which fills that file.

Some steps have no folder of their own: NVRx writes the file of each rank into a folder of
that rank, with those of other steps, and Composer's ranks write theirs side by side. Such a
step is named `ROOT@1200`.

The steps beside a step (`Neighbours`), which many checks compare, are listed once, and the last
ones stay open.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from typing import TypeVar

import msgspec

from ckptctl.errors import (
    MetadataUnreadable,
    MetadataUnsafe,
    OwnFileUnreadable,
    PathNotFound,
    StorageError,
)
from ckptctl.findings import Finding, explained
from ckptctl.formats.archive.directory import ZIP_MAGIC
from ckptctl.formats.archive.safetensors import INDEX_SUFFIX, MAX_HEADER, SUFFIX
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.layout_tables import TABLES, full_match
from ckptctl.formats.frameworks.layouts import METADATA, METADATA_TMP, NO_RUN_BELOW, StepName
from ckptctl.formats.frameworks.parts import (
    archives_in,
    in_parts,
    may_be_archive,
    parts_of,
    unnamed_archives,
    with_archives,
)
from ckptctl.formats.frameworks.state_keys import StateMap, entry_kinds, optimizer_steps
from ckptctl.formats.own.contract import (
    CONTRACT_FILE,
    MAX_CONTRACT_BYTES,
    ContractFields,
    Terms,
    parse_contract,
)
from ckptctl.formats.own.data_ledger import DATA_FILE, MAX_DATA_BYTES, DataFields, parse_data
from ckptctl.formats.own.seals import SEAL
from ckptctl.formatting import command_line, counted, inside
from ckptctl.inspection.marks import ReadMarks, read_marks
from ckptctl.inspection.seals import ReadSeal, read_seal
from ckptctl.inspection.shape import check_unchanged, own_number, sidecars_of
from ckptctl.inspection.sidecars import (
    HeldTensor,
    Sidecar,
    held_tensors,
    read_numbers,
    read_sidecars,
    value_in_archive,
)
from ckptctl.inspection.structure import (
    Structure,
    archive_digest,
    n_structure_reads,
    read_structure,
)
from ckptctl.model import SHARDED, ByteRange, BytesEntry, FileInfo, Metadata, Part, PartFormat, Step
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource, read_headers
from ckptctl.storage.contract import ShortRead, Store, TooLarge, list_if_there, read_range
from ckptctl.storage.opening import join_url, parent_url

MAX_METADATA_BYTES = 2**32
"""Larger metadata is refused. 512,000 chunks take 89 MB: this is enough for 24 million."""

MAX_KINDS = 64
"""So many kinds of files are opened to see whether they are of `torch.save`."""


OfSave = TypeVar("OfSave", DataFields, ContractFields)


class OpenStep:
    """A step under the root that `store` is opened on.

    `named` is its folder, with the number in its name where it has one; an empty name is
    the root itself. `files` is its listing where the caller has one, `metadata` the bytes of
    its own metadata file. Attributes that read raise `StorageError`; after an error the next
    use reads again.
    """

    def __init__(
        self,
        store: Store,
        named: StepName | str,
        files: Sequence[FileInfo] | None = None,
        *,
        metadata: bytes | None = None,
    ) -> None:
        self.store = store
        self.named = named
        self._given = files
        self._given_metadata = metadata
        self.neighbours = NO_NEIGHBOURS
        """The steps beside it, where an inspection compares them."""

    @property
    def name(self) -> str:
        """The step's folder under the root."""
        return self.named if isinstance(self.named, str) else self.named.name

    @property
    def url(self) -> str:
        """The step's address."""
        return join_url(self.store.url, self.name) if self.name else self.store.url

    @property
    def is_file(self) -> bool:
        """The step is one file, and no folder."""
        if not self.name.endswith(layouts.STEP_SUFFIXES):
            return False
        return any(layouts.is_flat_file(file) and file.path == self.name for file in self.files)

    @property
    def has_folder(self) -> bool:
        """The step's files lie in a folder of its own, and not elsewhere in the root."""
        return not self.is_file and not layouts.is_scattered(self.name)

    @property
    def folder(self) -> str:
        """The folder of the step's files in the store: of a step without one, the root."""
        return self.name if self.has_folder else ""

    def in_store(self, path: str) -> str:
        """The path in the store of a file of the step."""
        if not self.has_folder and layouts.is_own(path):
            return layouts.own_file_of_lone(self.name, path)
        return inside(self.folder, path)

    @cached_property
    def files(self) -> tuple[FileInfo, ...]:
        """The files of the step, paths relative to it. Cost: one listing."""
        return self.list_again() if self._given is None else tuple(self._given)

    def size_of(self, path: str) -> int:
        """The size of a file of the step; 0 where it has none of that name."""
        return next((file.size for file in self.files if file.path == path), 0)

    @property
    def has_seal(self) -> bool:
        """Whether there is a seal, of whichever save it is."""
        return any(file.path == SEAL for file in self.files)

    def list_again(self) -> tuple[FileInfo, ...]:
        """The files as they are now; kept nowhere. Cost: one listing."""
        return list_step(self.store, self.name)

    def changes(self) -> Iterator[Finding]:
        """Yield a `step.changed` if the files are not as they were listed. Cost: one listing."""
        try:
            now = self.list_again()
        except PathNotFound:
            now = ()
        return check_unchanged(self.url, self.files, now)

    @cached_property
    def step(self) -> Step:
        """The step by its names: layout, parts and files.

        Cost: one listing; of NVRx, those of the folders of its ranks; of files whose names do not
        show whether they are of `torch.save`, a short read of one of each kind.
        """
        files = self.files
        named = self.named if isinstance(self.named, StepName) else None
        number = named.number if named else None
        layout, stated = layouts.layout_of(named, files), None
        if number is not None and layout == "nvrx":
            beside = _files_below(self.store, self.store.list_dir(""))
            stated = {"rank": layouts.ranks_beside(beside, number)}
        parts = tuple(
            with_archives(part, self._archives_in(part, layout), layout, stated)
            for part in parts_of(files, layout, stated=stated)
        )
        return Step(self.url, self.name, number, layout, parts, files)

    def _archives_in(self, part: Part, layout: str) -> Iterator[str]:
        """Files of `torch.save` whose names do not show it. Cost: a short read of each kind."""
        for paths in [*unnamed_archives(part, layout).values()][:MAX_KINDS]:
            # One may be the damaged one.
            ends = dict.fromkeys((paths[0], paths[-1]))
            if any(self._is_archive(inside(part.path, path)) for path in ends):
                yield from paths

    def _is_archive(self, path: str) -> bool:
        """Whether a file begins as one of `torch.save`; one that is shorter does not."""
        with suppress(ShortRead, PathNotFound):
            return read_range(self.store, self.in_store(path), 0, len(ZIP_MAGIC)) == ZIP_MAGIC
        return False

    @property
    def listed(self) -> Step:
        """The step as far as it is known without reading: with files if it was listed."""
        if "files" in self.__dict__:
            with suppress(StorageError):
                return self.step
        number = None if isinstance(self.named, str) else self.named.number
        return Step(self.url, self.name, number, "dcp", (), ())

    @cached_property
    def parts(self) -> tuple[OpenPart, ...]:
        """The folders of tensors in the step."""
        return tuple(OpenPart(self, part) for part in self.step.parts)

    @cached_property
    def beside(self) -> BesidePart | None:
        """The train state that torchtune keeps beside its steps, where it is of this one.

        Each save replaces it, so no seal or mark is bound to it. It is of the step after whose
        epoch it was saved; one that is damaged counts for the newest step. Cost: none for other
        layouts; else two listings and three short reads.
        """
        if isinstance(self.named, str) or self.step.layout != "torchtune":
            return None
        entries = self.store.list_dir("")
        folders = [e.path for e in entries if e.kind == "dir" and layouts.is_beside(e.path)]
        for file in (one for folder in folders for one in list_if_there(self.store, folder)):
            if file.path != layouts.STATE_BESIDE:
                continue
            content = value_in_archive(self.store, file.path, file.size) if file.size else None
            names = [layouts.step_name(entry.path) for entry in entries]
            newest = max(one.number for one in names if one and one.layout == "torchtune")
            if layouts.number_beside(content, newest) == self.named.number:
                return BesidePart(self, file, content)
        return None

    @cached_property
    def archives_beside(self) -> OpenPart | None:
        """The files of `torch.save` beside shards or safetensors, as a part of their own.

        None where there are none. Cost: a short read of each file that may be one.
        """
        step = self.step
        if step.has_rank_files:
            return None  # it has them all
        files = tuple(
            file
            for file in sidecars_of(step)
            if file.kind == "file" and layouts.is_saved(file.path) and may_be_archive(file.path)
        )
        held = frozenset(file.path for file in files if file.size and self._is_archive(file.path))
        if not held:
            return None
        listed = tuple(file for file in files if file.path in held)
        return OpenPart(self, Part("", PartFormat.RANK_FILES, listed, archives=held))

    @cached_property
    def tensors_in_files(self) -> tuple[Sequence[HeldTensor], Sequence[str]]:
        """The tensors in files that no metadata describes, and the files not listed.

        Cost: see `held_tensors`.
        """
        return held_tensors(part for part in self.parts if part.part.format not in SHARDED)

    @cached_property
    def n_structure_reads(self) -> int:
        """How many reads the structure of all parts takes, counted as `n_structure_reads` does."""
        return sum(n_structure_reads(part.ranges) for part in self.parts if part.metadata)

    @cached_property
    def metadata(self) -> Metadata:
        """The global metadata of the step's own folder; what most steps have alone.

        It is not listed for this. Raises `PathNotFound`, `MetadataUnreadable`,
        `MetadataUnsafe`. Cost: one read, none if the parts were read or its bytes were given.
        """
        data, self._given_metadata = self._given_metadata, None
        if data is not None:
            return decode_metadata(data)
        for part in self.parts if "parts" in self.__dict__ else ():
            if not part.path and part.metadata and part.metadata[0].rank is None:
                return part.metadata[0]
        path = self.in_store(METADATA)
        return decode_metadata(self.store.read(path, limit=MAX_METADATA_BYTES))

    @property
    def has_metadata(self) -> bool:
        """Whether `metadata` takes no read and no part."""
        return self._given_metadata is not None or "metadata" in self.__dict__

    @cached_property
    def sidecars(self) -> tuple[Sidecar, ...]:
        """The files that hold train state, as far as they are small; see `read_sidecars`."""
        step = self.step
        return tuple(read_sidecars(self.store, self.folder, step, sidecars_of(step)))

    @property
    def has_sidecars(self) -> bool:
        """Whether `sidecars` takes no read."""
        return "sidecars" in self.__dict__

    @cached_property
    def seal(self) -> ReadSeal:
        """The seal in the step, of whichever save it is; see `read_seal`."""
        return read_seal(self)

    @cached_property
    def marks(self) -> ReadMarks:
        """The marks in the step, on whichever save they are; see `read_marks`."""
        return read_marks(self)

    @property
    def digests(self) -> dict[str, str]:
        """The digest of each metadata file that decodes, by its path in the step."""
        return {path: digest for part in self.parts for path, digest in part.digests.items()}

    def read_data_ledger(self) -> tuple[DataFields | None, str | None]:
        """The data ledger of this save; None with the reason. Cost: one read."""
        try:
            fields = self._of_save(DATA_FILE, MAX_DATA_BYTES, parse_data, "data ledger")
        except OwnFileUnreadable as error:
            return None, error.message
        return fields, f"{self.name} has no data ledger" if fields is None else None

    def read_contract(self) -> Terms | None:
        """The terms of the contract of this save; None without one. Cost: one read.

        Raises `OwnFileUnreadable` for one that is damaged, or of another save.
        """
        fields = self._of_save(CONTRACT_FILE, MAX_CONTRACT_BYTES, parse_contract, "contract")
        return None if fields is None else Terms(fields["terms"])

    def _of_save(
        self, path: str, limit: int, parse: Callable[[bytes], OfSave], what: str
    ) -> OfSave | None:
        """A document in the step that names the metadata with which it was saved."""
        try:
            fields = parse(self.store.read(self.in_store(path), limit=limit))
        except PathNotFound:
            return None
        except (OwnFileUnreadable, TooLarge) as error:
            raise OwnFileUnreadable(
                f"the {what} of {self.name} cannot be read: {error.message}"
            ) from error
        if [fields["metadata"]] != list(self.digests.values()):
            raise OwnFileUnreadable(f"the {what} of {self.name} is that of another save")
        return fields


class OpenPart:
    """A folder of tensors in an open step; only DCP and rank files have metadata."""

    def __init__(self, opened: OpenStep, part: Part) -> None:
        self.opened = opened
        self.part = part

    @property
    def path(self) -> str:
        """Where the part is in the step; empty for the step's own folder."""
        return self.part.path

    @property
    def folder(self) -> str:
        """Where the part is in the store."""
        return self.opened.in_store(self.path) if self.path else self.opened.folder

    @property
    def store(self) -> Store:
        """The store of the step's root."""
        return self.opened.store

    @property
    def url(self) -> str:
        """The address of the step, for messages."""
        return self.opened.url

    def in_store(self, name: str) -> str:
        """The path of one of the part's files in the store."""
        return inside(self.folder, name)

    def in_step(self, name: str) -> str:
        """The path of one of the part's files in the step: what findings name."""
        return inside(self.path, name)

    def metadata_path(self, rank: int | None) -> str:
        """The path of a metadata file in the step: the global one, or a rank's own."""
        return self.in_step(METADATA if rank is None else f"__{rank}.metadata")

    @cached_property
    def decoded(self) -> tuple[Metadata | Finding, ...]:
        """The metadata of the part, one per rank where it is rank-local, and findings.

        They are `metadata.missing`, `metadata.unreadable`, `metadata.unsafe`,
        `metadata.ambiguous`, `path.escape`, `step.changed`. Storage errors pass through.
        Cost: one read for each metadata file; one more where a save left a `.metadata.tmp`
        beside it; none for rank files.
        """
        if self.part.format is PartFormat.RANK_FILES:
            # Those without a byte are left out.
            found = archives_in(self.part, self.opened.step.layout)
            entries = {
                file.path: BytesEntry(file.path, ByteRange(file.path, 0, file.size))
                for file in found
            }
            return (Metadata({}, entries, tuple(entries)),)
        return tuple(self._read_metadata()) if self.part.format in SHARDED else ()

    def _read_metadata(self) -> Iterator[Metadata | Finding]:
        files = {file.path: file for file in self.part.files}
        ranks = sorted(
            rank for name in files if (rank := layouts.rank_local_rank(name)) is not None
        )
        if METADATA in files:
            yield self._decode(files[METADATA], None)
            if ranks:
                other = "the one of a save without collectives"
                yield self._ambiguous(f"__{ranks[0]}.metadata", other)
            if METADATA_TMP in files:
                yield from self._check_unfinished(files[METADATA_TMP], files[METADATA])
            return
        for rank in ranks:
            yield self._decode(files[f"__{rank}.metadata"], rank)
        n_ranks = max(ranks, default=-1) + 1
        missing = sorted(set(range(n_ranks)) - set(ranks))
        if missing:
            shown = ", ".join(f"__{rank}.metadata" for rank in missing[:4])
            why = f"{len(missing)} of {n_ranks} ranks wrote no metadata of their own ({shown})"
            yield self._without_metadata("metadata.missing", self.metadata_path(missing[0]), why)
        elif not ranks:
            tmp = METADATA_TMP in files
            found = counted(len(files) - tmp, "shard file")
            found += f" and {METADATA_TMP}" if tmp else ""
            where = self.in_step(METADATA)
            why = f"{where} is missing beside {found}: the save was interrupted"
            yield self._without_metadata("metadata.missing", where, why)

    def _decode(self, file: FileInfo, rank: int | None) -> Metadata | Finding:
        where, size = self.in_step(file.path), f"{file.size:,} bytes"
        if file.kind != "file":
            return explained(
                "path.escape", where, f"{where} is {file.what}, not a file; it was not followed"
            )
        try:
            if file.size > MAX_METADATA_BYTES:
                raise MetadataUnreadable(f"{size}, more than any metadata takes")
            opened, path = self.opened, self.in_store(file.path)
            known = opened.metadata if where == METADATA and opened.has_metadata else None
            data = b"" if known else self.store.read(path, limit=MAX_METADATA_BYTES)
            n_bytes = known.n_bytes if known else len(data)
            if n_bytes != file.size:
                return _changed(where, size, f"{n_bytes:,} bytes")
            return known or decode_metadata(data, rank=rank)
        except (PathNotFound, ShortRead):
            return _changed(where, size, "missing or shorter")
        except MetadataUnreadable as error:
            why = f"{where} cannot be decoded: {error.message}"
            return self._without_metadata("metadata.unreadable", where, why)
        except MetadataUnsafe as error:
            return explained(
                "metadata.unsafe",
                where,
                f"{where} {error.message}; nothing of it was run. Do not load this step with any "
                "other tool, and find out who wrote it",
            )

    def _without_metadata(self, code: str, where: str, why: str) -> Finding:
        return Finding(code, where, why, next_command=command_line("pick", parent_url(self.url)))

    def _ambiguous(self, other: str, what: str) -> Finding:
        where = self.in_step(METADATA)
        return explained(
            "metadata.ambiguous",
            where,
            f"{where} and {other} ({what}) both exist: a load uses the first if it can be read, "
            "else the other, and they may belong to two saves",
        )

    def _check_unfinished(self, tmp: FileInfo, final: FileInfo) -> Iterator[Finding]:
        # A store without rename copies the temporary file and then deletes it: what
        # is left of that is equal. Anything else is a save over this step.
        if tmp.size == final.size and tmp.kind == "file" and final.size <= MAX_METADATA_BYTES:
            try:
                read = partial(self.store.read, limit=MAX_METADATA_BYTES)
                if read(self.in_store(METADATA_TMP)) == read(self.in_store(METADATA)):
                    return
            except (PathNotFound, ShortRead):
                where = self.in_step(METADATA_TMP)
                yield _changed(where, f"{tmp.size:,} bytes", "missing or shorter")
                return
        yield self._ambiguous(METADATA_TMP, "that of an interrupted save over this step")

    @cached_property
    def metadata(self) -> tuple[Metadata, ...]:
        """The decoded metadata: one, or one for each rank, or none that could be decoded.

        Cost: one read for each metadata file.
        """
        return tuple(one for one in self.decoded if isinstance(one, Metadata))

    @cached_property
    def safetensors(self) -> tuple[OpenPart, ...]:
        """The folders of safetensors: the part itself, or those in a part of rank files."""
        if self.part.format is PartFormat.RANK_FILES:
            return tuple(OpenPart(self.opened, held) for held in safetensors_in(self.part))
        return (self,) if self.part.format is PartFormat.SAFETENSORS else ()

    @cached_property
    def headers(self) -> Mapping[str, bytes]:
        """The header of each safetensors file, with its length in front; see `read_headers`."""
        found = read_headers(self.store, self.folder, self.part.files)
        return {file.path: header for file, header in found}

    @cached_property
    def digests(self) -> Mapping[str, str]:
        """The digest of each metadata file that decodes, or of each archive; by path in the step.

        That of an archive is the SHA-256 of its directory, which holds the size and the CRC-32 of
        every member, so it identifies the save; of a file that is no archive, of its last bytes.
        Cost: none for metadata, and for archives whose structure was read; else one short read for
        each archive, and a second one where the directory is long.
        """
        if self.part.format is not PartFormat.RANK_FILES:
            return {
                self.metadata_path(metadata.rank): metadata.digest for metadata in self.metadata
            }
        known, digests = self._structure_read.digests if self._structure_read else {}, {}
        for file in self.part.files:
            if file.path in self.metadata[0].bytes_entries and file.kind == "file":
                read_tail = partial(_read_tail, self.store, self.in_store(file.path), file.size)
                digest = known.get(file.path) or archive_digest(read_tail, file.size)
                digests[self.in_step(file.path)] = digest
        return digests

    def read_named(self) -> Mapping[str, bytes]:
        """The small files of a rank-file part that name others; see `check_named`.

        Cost: one read each.
        """
        names = (TABLES.tag, TABLES.torch_index)
        return {
            file.path: self.store.read(self.in_store(file.path), limit=MAX_HEADER)
            for file in self.part.files
            if file.kind == "file" and file.size <= MAX_HEADER
            if any(full_match(name, file.path) for name in names)
        }

    @property
    def own_number(self) -> int | None:
        """The step that the metadata names as its own, None where it names none."""
        return own_number(self.metadata[0]) if self.metadata else None

    @cached_property
    def ranges(self) -> Ranges:
        """The byte ranges of all metadata of the part."""
        return Ranges(self.metadata)

    @property
    def source(self) -> RecordSource:
        """The records of the part, for the record engine."""
        return RecordSource(self.store, self.folder, self.ranges)

    def numbers(self, mapped: StateMap = ()) -> Mapping[str, int]:
        """The values of the `step` and `tokens` entries, by FQN. Cost: one read for each."""
        if not self.metadata:
            return {}
        metadata = self.metadata[0]
        kinds = entry_kinds(metadata, self.path, mapped)
        return read_numbers(self.store, self.folder, metadata, kinds)

    @cached_property
    def structure(self) -> Structure:
        """What the heads and tails of the records hold. Cost: `n_structure_reads` reads."""
        wanted = {fqn for metadata in self.metadata for fqn in optimizer_steps(metadata)}
        return read_structure(
            self.source,
            self.part.files,
            self.path,
            wanted=wanted.__contains__,
            archives=self.part.format is PartFormat.RANK_FILES,
        )

    @property
    def crcs(self) -> Sequence[int]:
        """The checksums that the records state of their elements, once `structure` was read."""
        return self._structure_read.crcs if self._structure_read else array("q")

    @property
    def _structure_read(self) -> Structure | None:
        """The structure, if it was read."""
        return self.structure if "structure" in self.__dict__ else None

    @property
    def bytes_read(self) -> int:
        """Bytes of metadata and, once it was read, of structure."""
        n_bytes = sum(one.n_bytes for one in self.metadata)
        return n_bytes + (self._structure_read.n_bytes if self._structure_read else 0)


class BesidePart(OpenPart):
    """A file of train state beside the step's folder, as a part of its own; see `beside`."""

    def __init__(self, opened: OpenStep, file: FileInfo, content: object | None) -> None:
        folder, _, name = file.path.rpartition("/")
        held = file.at(name)
        super().__init__(opened, Part(f"../{folder}", PartFormat.RANK_FILES, (held,)))
        self.content = content

    @property
    def folder(self) -> str:
        """See `OpenPart.folder`."""
        return self.part.path.removeprefix("../")

    @property
    def file(self) -> FileInfo:
        """The file, by its path from the step."""
        (file,) = self.part.files
        return file.at(self.in_step(file.path))


def _changed(where: str, expected: str, found: str) -> Finding:
    message = (
        f"{where} changed between the listing and the read: another process writes or deletes "
        "files here"
    )
    return Finding("step.changed", where, message, expected, found)


def _read_tail(store: Store, path: str, size: int, n_bytes: int) -> bytes:
    return read_range(store, path, size - n_bytes, n_bytes)


def safetensors_in(part: Part) -> Iterator[Part]:
    """The folders of safetensors in a rank-file part, each as a part of the step."""
    files = [file for file in part.files if file.path.endswith((SUFFIX, INDEX_SUFFIX))]
    return in_parts(files, PartFormat.SAFETENSORS)


def list_step(store: Store, name: str) -> tuple[FileInfo, ...]:
    """The files of a step, paths relative to it. Cost: one listing.

    A step that is one file is listed as that file. Raises `PathNotFound` where
    there is neither a folder nor a file of that name.
    """
    prefix = f"{name}/" if name else ""
    if layouts.is_scattered(name):
        steps = list_scattered(store, store.list_dir(""))
        files = next((held for step, held in steps.items() if step.name == name), ())
        if files:
            return (*files, *_beside(store, name))
    found = True
    try:
        files = tuple(_below(file, prefix) for file in store.list_tree(name))
    except PathNotFound:
        if not name:
            raise
        files, found = (), False
    if files or not name:
        return files
    for entry in store.list_dir(""):
        if entry.path == name and entry.kind != "dir":
            return (entry, *_beside(store, name))
        if entry.path == name:
            # Not there a moment ago, and there now: no empty folder before it is asked again.
            return () if found else tuple(_below(file, prefix) for file in store.list_tree(name))
    url = join_url(store.url, name)
    scan = command_line("scan", store.url)
    raise PathNotFound(f"{url} does not exist", next_command=scan)


def _beside(store: Store, name: str) -> tuple[FileInfo, ...]:
    """What ckptctl keeps about a step that is one file, as if it lay in the step."""
    folder = layouts.own_file_of_lone(name, layouts.OWN_FOLDER)
    try:
        files = store.list_tree(folder)
        return tuple(_below(file, f"{folder}/", f"{layouts.OWN_FOLDER}/") for file in files)
    except PathNotFound:
        return ()


def _below(file: FileInfo, prefix: str, instead: str = "") -> FileInfo:
    return file.at(instead + file.path.removeprefix(prefix))


MAX_FOLDERS = 2_000
"""So many folders are listed; a node has a folder for each of its ranks."""


def list_scattered(
    store: Store, entries: Sequence[FileInfo]
) -> Mapping[StepName, tuple[FileInfo, ...]]:
    """The steps of a root without folders of their own, and the files of each.

    `entries` is the listing of the root. Cost: one listing for each folder in it, and for
    each folder of a rank in those.
    """
    return layouts.scattered_steps(_files_below(store, entries))


def _files_below(store: Store, entries: Sequence[FileInfo]) -> Iterator[FileInfo]:
    yield from entries
    folders = (
        entry.path
        for entry in entries
        if entry.kind == "dir" and entry.path[0] != "." and entry.path not in NO_RUN_BELOW
    )
    for folder in islice(folders, MAX_FOLDERS):
        inside = list_if_there(store, folder)
        yield from inside
        ranks = (one.path for one in inside if one.kind == "dir")
        of_ranks = (path for path in ranks if layouts.may_hold_scattered(path.rpartition("/")[2]))
        for rank in islice(of_ranks, MAX_FOLDERS):
            yield from list_if_there(store, rank)


MAX_END = 64 << 10
"""Bytes of the end of two files that are compared."""


def end_of_file(opened: OpenStep, path: str) -> tuple[int, bytes]:
    """The size and the last bytes of a file of a step: an archive ends with its checksums.

    Raises `StorageError`. Cost: one read of at most `MAX_END` bytes.
    """
    size = opened.size_of(path)
    n_bytes = min(size, MAX_END)
    return size, read_range(opened.store, opened.in_store(path), size - n_bytes, n_bytes)


MAX_LISTED = 16
"""The listings of so many steps are kept: more than are beside one that is inspected."""

MAX_OPEN = 2
"""So many steps stay open, with their decoded metadata: the inspected one and the one before."""


MAX_BEFORE = 4
"""So many steps before are listed to see whether one of them lacks a file too, or has more."""


class RootSteps(msgspec.Struct):
    """Steps of one root that were listed or opened last, shared by inspections of several."""

    known_files: Mapping[str, Sequence[FileInfo]] = {}
    """The files of each step, by its name, where a listing of the whole root holds them."""
    listed: dict[str, Sequence[FileInfo]] = {}
    """The files of the `MAX_LISTED` steps that were listed last."""
    opened: dict[str, OpenStep] = {}
    """The `MAX_OPEN` steps that were opened last."""

    def files(self, name: str) -> Sequence[FileInfo] | None:
        """The files of a step as they were listed; None where they were not."""
        return self.known_files.get(name) or self.listed.get(name)

    def open(self, store: Store, named: StepName) -> OpenStep:
        """A step. Cost: its listing, unless its files are known; raises `StorageError`."""
        opened = self.opened.get(named.name)
        if opened is None:
            opened = OpenStep(store, named, self.files(named.name))
        self.add(opened)
        return opened

    def add(self, opened: OpenStep) -> None:
        """Keep a step that was opened. Cost: its listing, if it was not listed."""
        files = opened.files
        self.forget(opened.name)
        self.opened[opened.name], self.listed[opened.name] = opened, files
        for kept, at_most in ((self.opened, MAX_OPEN), (self.listed, MAX_LISTED)):
            for name in [*kept][: len(kept) - at_most]:
                del kept[name]

    def forget(self, name: str) -> None:
        """List a step anew at its next use."""
        self.listed.pop(name, None)
        self.opened.pop(name, None)


class Neighbours(msgspec.Struct, frozen=True):
    """The finished steps beside one, each side nearest first; listed when asked."""

    older: Callable[[], Sequence[StepName]]
    """Those with lower numbers."""
    newer: Callable[[], Sequence[StepName]]
    """Those with higher numbers."""
    steps: RootSteps = msgspec.field(default_factory=RootSteps)
    are_known: bool = True
    """The root was listed: where there are none, the step is alone."""

    def open(self, store: Store, named: StepName) -> OpenStep:
        """One of them; see `RootSteps.open`."""
        return self.steps.open(store, named)

    def numbered(self, number: int) -> StepName | None:
        """The nearest step of a number; None without one."""
        beside = (*self.older(), *self.newer())
        return next((named for named in beside if named.number == number), None)


NO_NEIGHBOURS = Neighbours(older=tuple, newer=tuple, are_known=False)
"""Those of a step that is inspected without its root."""


def steps_before(opened: OpenStep, at_most: int) -> Iterator[OpenStep]:
    """The nearest older steps, nearest first, without those that do not answer.

    Cost: a listing of each, unless it is known, and the first bytes of files of unknown names.
    """
    yield from _opened(opened, opened.neighbours.older()[:at_most])


def steps_beside(opened: OpenStep, at_most: int) -> Iterator[OpenStep]:
    """The nearest older steps, then as many newer ones; see `steps_before`."""
    yield from steps_before(opened, at_most)
    yield from _opened(opened, opened.neighbours.newer()[:at_most])


def _opened(opened: OpenStep, names: Sequence[StepName]) -> Iterator[OpenStep]:
    for named in names:
        with suppress(StorageError):
            other = opened.neighbours.open(opened.store, named)
            _ = other.step  # what a step consists of may need reads
            yield other
