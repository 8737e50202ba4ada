"""Check that each record is one sound archive that holds what the metadata says.

The head and the tail of each record are read, not its elements: its frame, the tensor
that it describes, and the checksum of every member that was read whole. `content`
checks the elements.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.checks.formatting import at_most_few, counted, inside
from ckptctl.checks.presence import escape_reason
from ckptctl.checks.sizes import holds_safetensors
from ckptctl.errors import RecordUnreadable
from ckptctl.findings import Finding
from ckptctl.formats.archive.directory import View, read_member
from ckptctl.formats.pickles.values import TensorStub
from ckptctl.model import ByteRange, FileInfo, TensorEntry
from ckptctl.records.opening import (
    MAX_PICKLE_BYTES,
    Expected,
    OpenRecord,
    Unfit,
    is_plain_pickle,
    open_record,
)
from ckptctl.records.ranges import Owner, Ranges
from ckptctl.records.reads import Need, Reading, RecordSource, n_reads, open_records
from ckptctl.records.zstd import ZSTD, ZSTD_MAGIC
from ckptctl.storage.contract import Store

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


@dataclass(frozen=True, slots=True)
class Structure:
    """What looking at the records of one part found, and what it cost.

    `n_records` were looked at. `values` are those of the entries that were wanted,
    as far as they are small; of the several ranks of a step saved without
    collectives each has its own. `crcs` are what the records say of their elements, by the
    number of their range, `NO_CRC` where one says nothing.
    """

    findings: tuple[Finding, ...]
    values: tuple[RecordValue, ...]
    crcs: array[int]
    n_records: int
    n_reads: int
    n_bytes: int


def check_structure(
    store: Store,
    folder: str,
    ranges: Ranges,
    files: Sequence[FileInfo],
    part_path: str = "",
    *,
    wanted: Callable[[str], bool] = lambda _: False,
) -> Structure:
    """Look at every record of a part that `files`, the part's listing, has room for.

    `folder` is where the part is in the store, `part_path` where it is in the step.
    The values of entries whose FQN is `wanted` are handed out. What is missing or
    cut short is the finding of `presence`, and passed over here.

    Findings are `record.framing`, `record.mismatch`, `record.crc`, `record.unsafe`
    and `format.unsupported`, one for each file and code; `record.no-crc`,
    `record.transformed` and `format.no-checksums`, one for the part.

    Storage errors pass through: a file that has changed since the listing is one.
    Cost: `n_structure_reads` reads, and a second one for the rare record whose
    directory or pickle is long.
    """
    look = _Inspector(ranges, part_path, {id(e) for e in ranges.entries if wanted(e.fqn)})
    reading = Reading()
    source = RecordSource(store, folder, ranges)
    for _ in open_records(source, readable_ranges(ranges, files), look.at, reading):
        pass  # `inspect_step` keeps what each record says
    return Structure(
        tuple(look.findings()),
        tuple(look.values),
        look.crcs,
        look.n_records,
        reading.n_reads,
        reading.n_bytes,
    )


def n_structure_reads(ranges: Ranges) -> int:
    """How many reads `check_structure` takes where no file is missing; none are made here."""
    return 0 if holds_safetensors(ranges) else n_reads(ranges, ranges.by_file())


def readable_ranges(ranges: Ranges, files: Sequence[FileInfo]) -> list[list[int]]:
    """The numbers of the ranges of each file, without those that the listing has no room for."""
    if holds_safetensors(ranges):
        return []
    sizes = {file.path: file.size for file in files if file.kind == "file"}
    readable = []
    for name, numbers in zip(ranges.file_names, ranges.by_file(), strict=True):
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
class _Alike:
    """Records of one file with findings of one code: how many, and what the first is."""

    n_records: int
    first: Owner
    start: int
    reason: str

    def told(self, code: str) -> str:
        """One sentence for all of them."""
        one, many = SAYS[code]
        first = f"that of {self.first.name}, from byte {self.start:,} on: {self.reason}"
        if self.n_records == 1:
            return f"a record {one}, {first}"
        return f"{self.n_records:,} records {many}; the first is {first}"


@dataclass(slots=True)
class _Inspector:
    """What the records looked at so far had to say."""

    ranges: Ranges
    part_path: str
    wanted: set[int]
    n_records: int = 0
    n_without_crcs: int = 0
    n_transformed: int = 0
    n_plain: int = 0
    values: list[RecordValue] = field(default_factory=list)
    crcs: array[int] = field(init=False)
    alike: dict[tuple[int, str], _Alike] = field(default_factory=dict)
    by_order: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.crcs = array("q", [NO_CRC]) * len(self.ranges)

    def at(self, number: int, view: View) -> Need | None:
        """Look at one record; what more of it must be read first, if anything."""
        try:
            need = self._inspect(number, view)
        except (RecordUnreadable, Unfit) as error:
            self._note(error.code, number, error.message)
            need = None
        self.n_records += need is None
        return need

    def _note(self, code: str, number: int, reason: str) -> None:
        key = (self.ranges.files[number], code)
        if key in self.alike:
            self.alike[key].n_records += 1
            return
        start = self.ranges.starts[number]
        self.alike[key] = _Alike(1, self.ranges.owner(number), start, reason)

    def _inspect(self, number: int, view: View) -> Need | None:
        owner = self.ranges.owner(number)
        if owner.transforms:
            self._inspect_transformed(owner, view)
            return None
        tensor = owner.entry if isinstance(owner.entry, TensorEntry) else None
        if tensor is None and is_plain_pickle(view):
            self.n_plain += 1
            return None
        wanted = id(owner.entry) in self.wanted
        expected = None if tensor is None else Expected.chunk(tensor, owner.chunk)
        found = open_record(view, expected, with_pickle=wanted)
        if isinstance(found, Need):
            return found
        self.n_without_crcs += not found.directory.has_crcs
        if found.byte_order is not None:
            self.by_order.setdefault(found.byte_order, []).append(number)
        crc = found.crc
        if crc is not None:
            self.crcs[number] = crc
        if wanted:
            self._hand_out(number, found, view)
        return None

    def _inspect_transformed(self, owner: Owner, view: View) -> None:
        if owner.transforms != (ZSTD,):
            through = ", ".join(owner.transforms)
            raise Unfit("format.unsupported", f"it went through {through} when it was saved")
        if not view.head.startswith(ZSTD_MAGIC):
            raise RecordUnreadable("it is said to be compressed and does not begin as zstd does")
        self.n_transformed += 1

    def _hand_out(self, number: int, found: OpenRecord, view: View) -> None:
        stub = found.stub
        name, limit = "data.pkl", MAX_PICKLE_BYTES
        if stub is not None:
            name, limit = f"data/{stub.storage_key}", MAX_ELEMENT_BYTES
        data = read_member(found.directory, name, view)
        if data is not None and len(data) <= limit:
            ranges = self.ranges
            byte_range = ByteRange(
                ranges.file_names[ranges.files[number]],
                ranges.starts[number],
                ranges.lengths[number],
            )
            fqn = ranges.owner(number).entry.fqn
            byte_order = found.byte_order or "little"
            self.values.append(RecordValue(fqn, byte_range, stub, data, byte_order))

    def findings(self) -> Iterator[Finding]:
        """What all records together had to say: one finding for each file and code."""
        self._compare_byte_orders()
        yield from at_most_few(
            Finding(code, inside(self.part_path, self.ranges.file_names[file]), alike.told(code))
            for (file, code), alike in sorted(self.alike.items())
        )
        for code, number, says in (
            ("record.no-crc", self.n_without_crcs, "saved without checksums"),
            ("record.transformed", self.n_transformed, f"compressed by {ZSTD}, and not read"),
            ("format.no-checksums", self.n_plain, "plain pickles, without frame and checksums"),
        ):
            if number:
                yield Finding(code, self.part_path, f"{counted(number, 'record')} {says}")

    def _compare_byte_orders(self) -> None:
        """One machine writes one byte order: torch swaps the bytes of the others at a load."""
        usual = max(self.by_order, key=lambda order: len(self.by_order[order]), default="")
        for order, numbers in self.by_order.items():
            for number in numbers if order != usual else ():
                reason = f"its bytes are in {order}-endian order, those of others {usual}-endian"
                self._note("record.mismatch", number, reason)


# What is wrong with one record, and with several.
SAYS: Mapping[str, tuple[str, str]] = {
    "record.framing": ("is not as torch.save writes it", "are not as torch.save writes them"),
    "record.mismatch": ("is not what the metadata says", "are not what the metadata says"),
    "record.crc": (
        "does not match the checksum saved with it",
        "do not match the checksums saved with them",
    ),
    "record.unsafe": ("asks for code to run", "ask for code to run"),
    "format.unsupported": (
        "is in a form that ckptctl does not read",
        "are in a form that ckptctl does not read",
    ),
}
