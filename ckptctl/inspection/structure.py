"""Check that each record is one sound archive with the dtype and shape that the metadata states.

The head and the tail of each record are read, not its elements: its frame, the tensor
that it describes, and the checksum of every member that was read whole. `content`
checks the elements.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.errors import MetadataUnsafe, RecordUnreadable
from ckptctl.findings import Finding, at_most_few
from ckptctl.formats.archive.directory import TAIL, View, read_directory, read_member, tail_needed
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.formatting import counted, inside
from ckptctl.inspection.presence import escape_reason, holds_safetensors
from ckptctl.model import ByteRange, FileInfo, TensorEntry
from ckptctl.records.opening import (
    MAX_PICKLE_BYTES,
    ZSTD,
    ZSTD_MAGIC,
    Expected,
    Need,
    OpenRecord,
    Templates,
    Unfit,
    check_transforms,
    is_plain_pickle,
)
from ckptctl.records.ranges import Owner, Ranges
from ckptctl.records.reads import ReadCost, RecordSource, n_reads, open_records

MAX_ELEMENT_BYTES = 64
"""Elements that are handed out for a wanted tensor: small enough to be a step number."""


NO_CRC = -1
"""Instead of a checksum: of a bytes entry, and of a record that has none or was not read."""


@dataclass(frozen=True, slots=True)
class RecordValue:
    """The content of one small record that was asked for.

    `data` is the tensor's elements, in the byte order `byte_order` (`little` or
    `big`), with `stub` saying what they are; or the pickle of a bytes entry, then
    `stub` is None. Its checksum was right, where it has one.
    """

    fqn: str
    byte_range: ByteRange
    stub: TensorStub | None
    data: bytes
    byte_order: str


def readable_ranges(ranges: Ranges, files: Sequence[FileInfo]) -> list[list[int]]:
    """The numbers of the ranges of each file, without those that the listing has no room for."""
    if holds_safetensors(ranges):
        return []
    sizes = {file.path: file.size for file in files if file.kind == "file"}
    readable = []
    for name, numbers in zip(ranges.file_names, ranges.by_file, strict=True):
        size = -1 if escape_reason(name) else sizes.get(name, -1)
        readable.append(
            [
                n
                for n in numbers
                if ranges.starts[n] >= 0 < ranges.lengths[n]
                and ranges.starts[n] + ranges.lengths[n] <= size
            ]
        )
    return readable


@dataclass(slots=True)
class _RepeatedFinding:
    """Records of one file with findings of one code: how many, and what the first is."""

    n_records: int
    first: Owner
    start: int
    reason: str

    def message(self, code: str) -> str:
        """One sentence for all of them."""
        one, many = SAYS[code]
        where = f"of {self.first.name}, from byte {self.start:,} on"
        if self.n_records == 1:
            return f"the record {where}, {one}: {self.reason}"
        return f"{self.n_records:,} records {many}; the first is that {where}: {self.reason}"


class Structure:
    """What the records of one part hold, each checked from a view of it, and what that cost.

    `values` are those of the small entries whose FQN is `wanted`; of the several ranks of a step
    saved without collectives each has its own. `crcs` are the checksums of the elements, by the
    number of the range. `digests` are those of the archives that fill a file, by its name in the
    part, where `archives` asks for them. `findings` are there once all records were taken.
    """

    def __init__(
        self, ranges: Ranges, part_path: str, wanted: Callable[[str], bool], *, archives: bool
    ) -> None:
        self.findings: tuple[Finding, ...] = ()
        self.digests: dict[str, str] = {}
        self.n_reads = self.n_bytes = 0
        self._archives = archives
        self._ranges = ranges
        self._part_path = part_path
        self._wanted = {id(entry) for entry in ranges.entries if wanted(entry.fqn)}
        self._n_without_crcs = self._n_transformed = self._n_plain = 0
        self._templates = Templates()
        self._alike_in: dict[int, Expected | None] = {}
        self._alike: dict[tuple[int, str], _RepeatedFinding] = {}
        self._by_order: dict[str, list[int]] = defaultdict(list)
        self.n_records = 0
        self.values: list[RecordValue] = []
        self.crcs = array("q", [NO_CRC]) * len(ranges)

    def take(self, number: int, view: View) -> Need | None:
        """Check one record; returns what more of it must be read first, if anything."""
        try:
            need = self._inspect(number, view)
        except (RecordUnreadable, Unfit) as error:
            self._note(error.code, number, error.message)
            need = None
        except MetadataUnsafe:
            need = None  # `inspection.pickles` reports it
        self.n_records += need is None
        if self._archives and need is None and _holds_directory(view):
            file = self._ranges.file_names[self._ranges.files[number]]
            tail = view.tail
            self.digests[file] = archive_digest(lambda n: tail[len(tail) - n :], view.length)
        return need

    def _note(self, code: str, number: int, reason: str) -> None:
        key = (self._ranges.files[number], code)
        if key in self._alike:
            self._alike[key].n_records += 1
            return
        start = self._ranges.starts[number]
        self._alike[key] = _RepeatedFinding(1, self._ranges.owner(number), start, reason)

    def _inspect(self, number: int, view: View) -> Need | None:
        at = self._ranges.entry_number(number)
        if at not in self._alike_in:
            self._alike_in[at] = self._expected_in_all(at)
        expected = self._alike_in[at]
        alike = expected and self._templates.like(view, expected)
        if alike:
            self._keep(number, alike.template.opened.byte_order, alike.crc)
            return None
        return self._inspect_alone(number, view)

    def _expected_in_all(self, at: int) -> Expected | None:
        """What each record of an entry holds, where it is the same in all and not wanted."""
        entry = self._ranges.entries[at]
        if not isinstance(entry, TensorEntry) or id(entry) in self._wanted:
            return None
        chunks = entry.chunks
        alike = chunks.sizes == chunks.sizes[: chunks.n_dims] * len(chunks)
        return Expected.chunk(entry, 0) if chunks and alike and not chunks.transforms else None

    def _inspect_alone(self, number: int, view: View) -> Need | None:
        owner = self._ranges.owner(number)
        if owner.transforms:
            self._inspect_transformed(owner, view)
            return None
        tensor = owner.entry if isinstance(owner.entry, TensorEntry) else None
        if tensor is None and is_plain_pickle(view.head, view.tail):
            self._n_plain += 1
            return None
        wanted = id(owner.entry) in self._wanted
        expected = None if tensor is None else Expected.chunk(tensor, owner.chunk)
        alike = None if expected is None or wanted else self._templates.like(view, expected)
        if alike is not None:
            self._keep(number, alike.template.opened.byte_order, alike.crc)
            return None
        found = self._templates.open(view, expected, with_pickle=wanted)
        if isinstance(found, Need):
            return found
        self._n_without_crcs += not found.directory.has_crcs
        self._keep(number, found.byte_order, found.crc)
        if wanted:
            self._hand_out(number, found, view)
        return None

    def _keep(self, number: int, byte_order: str | None, crc: int | None) -> None:
        if byte_order is not None:
            self._by_order[byte_order].append(number)
        if crc is not None:
            self.crcs[number] = crc

    def _inspect_transformed(self, owner: Owner, view: View) -> None:
        check_transforms(owner.transforms)
        if not view.head.startswith(ZSTD_MAGIC):
            raise RecordUnreadable("it should be compressed, but does not begin like zstd")
        self._n_transformed += 1

    def _hand_out(self, number: int, found: OpenRecord, view: View) -> None:
        stub = found.stub
        name, limit = "data.pkl", MAX_PICKLE_BYTES
        if stub is not None:
            name, limit = f"data/{stub.storage_key}", MAX_ELEMENT_BYTES
        data = read_member(found.directory, name, view)
        if data is not None and len(data) <= limit:
            ranges = self._ranges
            byte_range = ByteRange(
                ranges.file_names[ranges.files[number]],
                ranges.starts[number],
                ranges.lengths[number],
            )
            fqn = ranges.owner(number).entry.fqn
            byte_order = found.byte_order or "little"
            self.values.append(RecordValue(fqn, byte_range, stub, data, byte_order))

    def finish(self, reading: ReadCost) -> None:
        """Add up the findings once all records were taken, and what reading them cost."""
        self.findings = tuple(self._added_up())
        self.n_reads, self.n_bytes = reading.n_reads, reading.n_bytes
        # An open step keeps its structure, and no longer what only reading needs.
        self._by_order.clear()
        self._alike_in.clear()
        self._templates = Templates()

    def _added_up(self) -> Iterator[Finding]:
        """Yield one finding for each file and code, and for what is no fault one for the part.

        `record.framing`, `record.mismatch`, `record.crc`, `record.unsafe`, `format.unsupported`;
        `record.no-crc`, `record.transformed`, `format.no-checksums`.
        """
        self._compare_byte_orders()
        yield from at_most_few(
            Finding(
                code, inside(self._part_path, self._ranges.file_names[file]), alike.message(code)
            )
            for (file, code), alike in sorted(self._alike.items())
        )
        for code, number, says in (
            ("record.no-crc", self._n_without_crcs, "saved without checksums"),
            ("record.transformed", self._n_transformed, f"compressed with {ZSTD}, and not read"),
            ("format.no-checksums", self._n_plain, "plain pickles, without framing and checksums"),
        ):
            if number:
                yield Finding(code, self._part_path, f"{counted(number, 'record')} {says}")

    def _compare_byte_orders(self) -> None:
        """One machine writes one byte order: torch swaps the bytes of the others at a load."""
        usual = max(self._by_order, key=lambda order: len(self._by_order[order]), default="")
        for order, numbers in self._by_order.items():
            for number in numbers if order != usual else ():
                reason = f"its bytes are in {order}-endian order, those of others {usual}-endian"
                self._note("record.mismatch", number, reason)


# What is wrong with one record, and with several.
SAYS: Mapping[str, tuple[str, str]] = {
    "record.framing": (
        "does not have the form that torch.save writes",
        "do not have the form that torch.save writes",
    ),
    "record.mismatch": ("does not match the metadata", "do not match the metadata"),
    "record.crc": (
        "does not match the checksum saved with it",
        "do not match the checksums saved with them",
    ),
    "record.unsafe": ("would run code when loaded", "would run code when loaded"),
    "format.unsupported": (
        "has a form that ckptctl does not read",
        "have a form that ckptctl does not read",
    ),
}


def read_structure(
    source: RecordSource,
    files: Sequence[FileInfo],
    part_path: str = "",
    *,
    wanted: Callable[[str], bool] = lambda _: False,
    archives: bool = False,
) -> Structure:
    """Check every record of a part that `files`, the part's listing, has room for.

    `part_path` is where the part is in the step. The values of entries whose FQN is
    `wanted` are kept, and with `archives` the digest of each record, which fills its file.
    What is missing or truncated has a finding of `presence`, and is passed over here.

    Storage errors pass through: a file that has changed since the listing is one.
    Cost: `n_structure_reads` reads, and a second one for the rare record whose
    directory or pickle is long.
    """
    structure, reading = Structure(source.ranges, part_path, wanted, archives=archives), ReadCost()
    readable = readable_ranges(source.ranges, files)
    for _ in open_records(source, readable, structure.take, reading):
        pass  # the structure keeps what each record holds
    structure.finish(reading)
    return structure


MAX_QUICK_READS = 10_000
"""Up to so many reads on a file system, `structure` is the default level."""


def n_structure_reads(ranges: Ranges) -> int:
    """How many reads `read_structure` takes if no file is missing; none are made here.

    Counts to `MAX_QUICK_READS` and one more: planning the reads of two million records takes
    as long as decoding their metadata.
    """
    if holds_safetensors(ranges):
        return 0
    return n_reads(ranges, ranges.by_file, MAX_QUICK_READS + 1)


def archive_digest(read_tail: Callable[[int], bytes], size: int) -> str:
    """The SHA-256 of the directory of an archive; of a file that is none, of its last bytes."""
    try:
        directory, tail = read_directory(read_tail, size)
        held = tail[len(tail) - (size - directory.at) :]
    except RecordUnreadable:
        held = read_tail(min(TAIL, size))
    return sha256_of(held)


def _holds_directory(view: View) -> bool:
    """Whether the tail that was read of a record holds all that its digest is of."""
    if len(view.tail) < min(TAIL, view.length):
        return False
    try:
        return tail_needed(view.tail, view.length) <= len(view.tail)
    except RecordUnreadable:
        return True  # it is no archive, or a damaged one
