"""Records against the metadata, by head and tail: break one thing, find that and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import pytest
from damage import flip
from made_parts import metadata, tensor
from made_records import Made, archive, members_of

from ckptctl.findings import Finding, Verdict, verdict_of
from ckptctl.formats.archive.directory import parse_directory
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.inspection.structure import (
    MAX_QUICK_READS,
    Structure,
    n_structure_reads,
    read_structure,
)
from ckptctl.model import ByteRange, BytesEntry, FileInfo, Metadata, TensorEntry
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource
from ckptctl.storage.contract import ShortRead, Span
from ckptctl.storage.local import LocalStore

FILE = "__0_0.distcp"


@dataclass
class Counting:
    """A store that records the reads."""

    inner: LocalStore
    spans: list[Span]

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        for span, data in self.inner.read_spans(spans):
            self.spans.append(span)
            yield span, data


def look(
    folder: Path,
    *metadatas: Metadata,
    files: Sequence[FileInfo] | None = None,
    wanted: Callable[[str], bool] = lambda _: False,
) -> Structure:
    store = LocalStore(str(folder))
    files = store.list_tree() if files is None else files
    return read_structure(RecordSource(store, "", Ranges(metadatas)), files, wanted=wanted)


def found(folder: Path, *metadatas: Metadata) -> list[Finding]:
    return list(look(folder, *metadatas).findings)


@dataclass
class Step:
    """A private copy of a real step, its metadata decoded."""

    folder: Path
    metadata: Metadata

    def range_of(self, fqn: str) -> ByteRange:
        entry = self.metadata.tensors.get(fqn)
        byte_range = (
            entry.chunks[0].byte_range if entry else self.metadata.bytes_entries[fqn].byte_range
        )
        assert byte_range is not None
        return byte_range

    def record(self, fqn: str) -> bytes:
        at = self.range_of(fqn)
        return (self.folder / at.file).read_bytes()[at.offset : at.end]

    def flip(self, fqn: str, offset: int) -> None:
        """Flip a byte of the record of `fqn`."""
        at = self.range_of(fqn)
        path = self.folder / at.file
        flip(path, at.offset + offset)

    def with_tensor(self, fqn: str, **changes: object) -> Metadata:
        """The metadata with other values for one tensor."""
        changed = replace(self.metadata.tensors[fqn], **changes)
        return replace(self.metadata, tensors={**self.metadata.tensors, fqn: changed})


@pytest.fixture
def step(framework_roots: Path, copy_of: Callable[[Path], Path]) -> Step:
    folder = copy_of(framework_roots / "kempnerforge/checkpoints/step_10")
    return Step(folder, decode_metadata((folder / ".metadata").read_bytes()))


def some_tensor(step: Step) -> str:
    """A tensor of two dimensions with more than a few elements in each chunk."""
    return next(
        fqn
        for fqn, entry in step.metadata.tensors.items()
        if len(entry.shape) == 2 and all(prod(chunk.sizes) > 16 for chunk in entry.chunks)
    )


def test_a_sound_step_draws_no_finding(step):
    structure = look(step.folder, step.metadata)
    assert structure.findings == ()
    assert structure.values == []
    assert structure.n_records == len(Ranges([step.metadata]))


@pytest.mark.parametrize("member", ["data.pkl", "version", "data/0"])
def test_a_flipped_byte_of_a_member_is_a_wrong_checksum(step, member):
    fqn = some_tensor(step)
    record = step.record(fqn)
    place = parse_directory(record, len(record)).find(member)
    assert place is not None
    step.flip(fqn, place.start)
    (finding,) = found(step.folder, step.metadata)
    assert (finding.code, finding.where) == ("record.crc", step.range_of(fqn).file)
    assert finding.message.startswith(f"the record of {fqn} at ")
    assert finding.message.endswith(
        f" on, does not match the checksum saved with it: {member} in it"
    )


def test_a_flipped_byte_of_the_frame_is_a_framing_finding(step):
    fqn = some_tensor(step)
    for offset in (0, len(step.record(fqn)) - 1):
        step.flip(fqn, offset)
        (finding,) = found(step.folder, step.metadata)
        assert (finding.code, finding.where) == ("record.framing", step.range_of(fqn).file)
        step.flip(fqn, offset)
    assert found(step.folder, step.metadata) == []


def test_a_file_of_zeros_is_one_finding_that_counts(step):
    file = step.range_of(some_tensor(step)).file
    path = step.folder / file
    path.write_bytes(bytes(path.stat().st_size))
    (finding,) = found(step.folder, step.metadata)
    ranges = Ranges([step.metadata])
    n_records = len(ranges.by_file[ranges.file_names.index(file)])
    assert (finding.code, finding.where) == ("record.framing", file)
    assert finding.message.startswith(
        f"{n_records} records do not have the form that torch.save writes; the first is "
    )
    assert finding.message.endswith(": it does not end as an archive does")


def test_a_dtype_that_the_metadata_denies_is_a_mismatch(step):
    fqn = some_tensor(step)
    n_chunks = len(step.metadata.tensors[fqn].chunks)
    findings = found(step.folder, step.with_tensor(fqn, dtype="float16"))
    assert [f.code for f in findings] == ["record.mismatch"] * n_chunks
    assert findings[0].message.endswith(": it holds bfloat16, but its metadata has float16")


def test_a_shape_that_the_metadata_denies_is_a_mismatch(step):
    fqn = some_tensor(step)
    chunks = [replace(c, sizes=(c.sizes[1], c.sizes[0])) for c in step.metadata.tensors[fqn].chunks]
    shape = step.metadata.tensors[fqn].shape
    other = tensor(
        fqn,
        shape[::-1],
        *((c.offsets[::-1], c.sizes) for c in chunks),
        ranges=[c.byte_range for c in chunks],
    )
    findings = found(step.folder, step.with_tensor(fqn, shape=other.shape, chunks=other.chunks))
    assert {f.code for f in findings} == {"record.mismatch"}
    assert "it holds a tensor of shape (" in findings[0].message


def test_the_record_of_a_bytes_entry_in_the_place_of_a_tensor_is_a_mismatch(step):
    fqn = some_tensor(step)
    entry = step.metadata.tensors[fqn]
    one = next(iter(step.metadata.bytes_entries.values()))
    chunks = [replace(chunk, byte_range=one.byte_range) for chunk in entry.chunks][:1]
    wrong = tensor(fqn, entry.shape, (chunks[0].offsets, chunks[0].sizes), ranges=[one.byte_range])
    (finding,) = found(step.folder, step.with_tensor(fqn, chunks=wrong.chunks))
    assert finding.code == "record.mismatch"
    assert ": it holds no tensor: " in finding.message


def test_a_range_that_begins_or_ends_elsewhere_is_no_archive(step):
    fqn = some_tensor(step)
    entry = step.metadata.tensors[fqn]
    for offset, length in ((1, -1), (0, -1), (0, 1), (1, 0)):
        ranges = [chunk.byte_range for chunk in entry.chunks]
        first = ranges[0]
        assert first is not None
        ranges[0] = replace(first, offset=first.offset + offset, length=first.length + length)
        boxes = ((chunk.offsets, chunk.sizes) for chunk in entry.chunks)
        moved = tensor(fqn, entry.shape, *boxes, ranges=ranges)
        (finding,) = found(step.folder, step.with_tensor(fqn, chunks=moved.chunks))
        assert finding.code == "record.framing"


def test_files_that_are_missing_short_or_links_are_passed_over(step):
    whole = look(step.folder, step.metadata)
    listed = LocalStore(str(step.folder)).list_tree()
    (first,) = (file for file in listed if file.path == FILE)
    others = [file for file in listed if file.path != FILE]
    link = replace(first, kind="link", link="/etc/passwd")
    for files in (others, [replace(first, size=1), *others], [link, *others]):
        structure = look(step.folder, step.metadata, files=files)
        assert structure.findings == ()
        assert 0 < structure.n_records < whole.n_records


def test_a_file_that_shrinks_after_the_listing_is_a_storage_error(step):
    files = LocalStore(str(step.folder)).list_tree()
    path = step.folder / step.range_of(some_tensor(step)).file
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ShortRead):
        look(step.folder, step.metadata, files=files)


def test_the_place_of_a_finding_is_relative_to_the_step(step):
    fqn = some_tensor(step)
    step.flip(fqn, 0)
    store = LocalStore(str(step.folder.parent))
    structure = read_structure(
        RecordSource(store, step.folder.name, Ranges([step.metadata])),
        LocalStore(str(step.folder)).list_tree(),
        "model",
    )
    (finding,) = structure.findings
    assert finding.where == f"model/{step.range_of(fqn).file}"


# Parts that are made for one test: one file, records side by side.


def put(folder: Path, *records: bytes) -> list[ByteRange]:
    """Write the records into one file; where each of them lies."""
    (folder / FILE).write_bytes(b"".join(records))
    ends = [sum(map(len, records[: i + 1])) for i in range(len(records))]
    return [
        ByteRange(FILE, end - len(record), len(record))
        for end, record in zip(ends, records, strict=True)
    ]


def tensor_pickle(
    shape: tuple[int, ...],
    *,
    n_elements: int | None = None,
    offset: int = 0,
    strides: tuple[int, ...] | None = None,
    key: str = "0",
    rebuild: str = "torch._utils\n_rebuild_tensor_v2\n",
) -> bytes:
    """The pickle of a float32 tensor, opcode by opcode as torch writes it."""
    n = 1
    row_major = []
    for size in reversed(shape):
        row_major.insert(0, n)
        n *= size

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    def text(value: str) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value.encode()

    def numbers(values: Iterable[int]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu")
    storage += number(n if n_elements is None else n_elements) + b"tQ"
    arguments = storage + number(offset) + numbers(shape)
    arguments += numbers(row_major if strides is None else strides)
    arguments += b"\x89" + b"ccollections\nOrderedDict\n" + b")R"
    return b"\x80\x02" + b"c" + rebuild.encode() + b"(" + arguments + b"tR."


def tensor_record(
    shape: tuple[int, ...], *, elements: bytes | None = None, byte_order: bytes = b"little", **says
) -> bytes:
    n = 4
    for size in shape:
        n *= size
    return archive(
        [
            Made("data.pkl", tensor_pickle(shape, **says)),
            Made("byteorder", byte_order),
            Made("data/0", bytes(n) if elements is None else elements),
            Made("version", b"3\n"),
            Made(".data/serialization_id", b"0" * 40),
        ]
    )


def part_of(folder: Path, shape: tuple[int, ...], *records: bytes) -> Metadata:
    """One tensor of `shape` for each record."""
    places = put(folder, *records)
    origin = (0,) * len(shape)
    return metadata(
        *(tensor(f"w{i}", shape, (origin, shape), ranges=[at]) for i, at in enumerate(places))
    )


def test_records_that_are_made_here_are_sound(tmp_path):
    for shape in ((), (0,), (3,), (2, 3)):
        assert found(tmp_path, part_of(tmp_path, shape, tensor_record(shape))) == []


@pytest.mark.parametrize(
    ("says", "reason"),
    [
        ({"elements": bytes(20)}, "it holds 20 bytes of elements instead of 24"),
        ({"n_elements": 7}, "it holds 24 bytes of elements instead of 28"),
        ({"offset": 1}, "its last element is number 6 of 6 in its storage"),
        ({"strides": (4, 1)}, "its last element is number 6 of 6 in its storage"),
        ({"strides": (-3, 1)}, "it holds no tensor: "),
        ({"offset": -1}, "it holds no tensor: "),
        ({"strides": (1,)}, "it holds no tensor: "),
        ({"key": "1"}, "it holds no elements: data/1 is missing"),
        ({"key": "../version"}, "it holds no elements: data/../version is missing"),
    ],
)
def test_a_tensor_that_does_not_fit_its_elements_is_a_mismatch(tmp_path, says, reason):
    (finding,) = found(tmp_path, part_of(tmp_path, (2, 3), tensor_record((2, 3), **says)))
    assert (finding.code, finding.where) == ("record.mismatch", FILE)
    assert reason in finding.message


def test_strides_other_than_row_by_row_are_sound(tmp_path):
    record = tensor_record((2, 3), strides=(1, 2))
    assert found(tmp_path, part_of(tmp_path, (2, 3), record)) == []


def test_a_record_that_asks_for_code_is_unsafe_and_nothing_has_run(tmp_path):
    record = tensor_record((2, 3), rebuild="os\nsystem\n")
    (finding,) = found(tmp_path, part_of(tmp_path, (2, 3), record))
    assert (finding.code, finding.where) == ("record.unsafe", FILE)
    assert "os.system" in finding.message
    assert verdict_of([finding]) is Verdict.UNSAFE


def test_a_pickle_too_long_for_a_tensor_is_a_mismatch(tmp_path):
    for n_bytes in (100_000, 3_000_000):
        members = members_of(tensor_record((2, 3)))
        members[0] = Made("data.pkl", bytes(n_bytes))
        (finding,) = found(tmp_path, part_of(tmp_path, (2, 3), archive(members)))
        assert finding.code == "record.mismatch"
        assert "its pickle is too long for a tensor" in finding.message


def test_a_tensor_of_a_class_of_its_own_is_not_supported_and_not_unsafe(tmp_path):
    record = tensor_record((2, 3), rebuild="torch._utils\n_rebuild_wrapper_subclass\n")
    (finding,) = found(tmp_path, part_of(tmp_path, (2, 3), record))
    assert finding.code == "format.unsupported"


def test_records_without_checksums_are_one_remark_that_counts(tmp_path):
    bare = archive([replace(m, crc=0) for m in members_of(tensor_record((2, 3)))])
    part = part_of(tmp_path, (2, 3), bare, bare, tensor_record((2, 3)))
    (finding,) = found(tmp_path, part)
    assert (finding.code, finding.message) == ("record.no-crc", "2 records saved without checksums")


def test_one_record_in_another_byte_order_is_a_mismatch(tmp_path):
    little, big = tensor_record((3,)), tensor_record((3,), byte_order=b"big")
    (finding,) = found(tmp_path, part_of(tmp_path, (3,), little, big, little))
    assert finding.code == "record.mismatch"
    assert finding.message.startswith("the record of w1, ")
    assert finding.message.endswith(
        "its bytes are in big-endian order, those of others little-endian"
    )


def test_a_step_of_a_big_endian_machine_is_sound_and_its_values_say_so(tmp_path):
    part = part_of(tmp_path, (), *[tensor_record((), byte_order=b"big")] * 2)
    structure = look(tmp_path, part, wanted=lambda fqn: fqn == "w1")
    assert structure.findings == ()
    (value,) = structure.values
    assert (value.fqn, value.byte_order) == ("w1", "big")


def test_an_unknown_byte_order_is_a_framing_finding(tmp_path):
    record = tensor_record((3,), byte_order=b"middle")
    (finding,) = found(tmp_path, part_of(tmp_path, (3,), record))
    assert finding.code == "record.framing"


def test_bytes_that_a_planner_pickled_itself_are_a_remark(tmp_path):
    at, _ = put(tmp_path, b"\x80\x04]q\0.", tensor_record((3,)))
    (finding,) = found(tmp_path, metadata(BytesEntry("lr", at)))
    assert finding.code == "format.no-checksums"
    # In the place of a tensor they are no record.
    part = metadata(tensor("w", (3,), ((0,), (3,)), ranges=[at]))
    assert [f.code for f in found(tmp_path, part)] == ["record.framing"]


def test_what_torch_wrote_before_it_wrote_archives_is_not_supported_and_not_damaged(tmp_path):
    magic = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
    record = magic + b"\x80\x02M\xe9\x03." + bytes(600)
    at, _ = put(tmp_path, record, tensor_record((3,)))
    part = metadata(tensor("w", (3,), ((0,), (3,)), ranges=[at]))
    (finding,) = found(tmp_path, part)
    assert finding.code == "format.unsupported"
    assert "before torch 1.6" in finding.message


def test_a_bytes_entry_of_garbage_is_a_framing_finding(tmp_path):
    for data in (b"", b"garbage", bytes(3_000), b"\x80\x04 cut short"):
        (at,) = put(tmp_path, data + b"!")
        assert [f.code for f in found(tmp_path, metadata(BytesEntry("lr", at)))] == [
            "record.framing"
        ]


def test_compressed_records_are_a_remark_and_their_beginning_is_looked_at(dcp_versions, copy_of):
    folder = copy_of(dcp_versions / "torch-2.9.1/zstd-2/step_10")
    step = Step(folder, decode_metadata((folder / ".metadata").read_bytes()))
    (finding,) = found(folder, step.metadata)
    n_records = len(Ranges([step.metadata]))
    assert (finding.code, finding.message) == (
        "record.transformed",
        f"{n_records} records compressed with stream.zstd/1, and not read",
    )
    fqn = next(iter(step.metadata.tensors))
    step.flip(fqn, 0)
    framing, note = found(folder, step.metadata)
    assert (framing.code, framing.where) == ("record.framing", step.range_of(fqn).file)
    assert note.message.startswith(f"{n_records - 1} records ")


def test_records_that_went_through_something_unknown_cannot_be_verified(tmp_path):
    at, *_ = put(tmp_path, tensor_record((3,)))
    through = replace(at, transforms=("stream.zstd/1", "cipher/3"))
    part = metadata(tensor("w", (3,), ((0,), (3,)), ranges=[through]))
    (finding,) = found(tmp_path, part)
    assert finding.code == "format.unsupported"
    assert verdict_of([finding]) is Verdict.UNVERIFIABLE
    assert finding.message.endswith(
        "it was transformed by stream.zstd/1, cipher/3 when it was saved"
    )


def test_small_values_that_were_asked_for_are_handed_out(step):
    large = some_tensor(step)
    structure = look(
        step.folder,
        step.metadata,
        wanted=lambda fqn: fqn.endswith((".step", ".lr")) or fqn == large,
    )
    assert structure.findings == ()
    values = {value.fqn: value for value in structure.values}
    steps = [value for fqn, value in values.items() if fqn.endswith(".step")]
    assert steps
    for value in steps:
        assert value.stub is not None
        assert (value.stub.shape, value.stub.dtype) == ((), "float32")
        assert struct.unpack("<f", value.data) == (10.0,)
        assert value.byte_range == step.range_of(value.fqn)
    rates = [value for fqn, value in values.items() if fqn.endswith(".lr")]
    assert rates
    assert all(value.stub is None and value.data.startswith(b"\x80") for value in rates)
    assert large not in values


def test_values_of_records_with_wrong_checksums_are_not_handed_out(step):
    fqn = next(fqn for fqn in step.metadata.tensors if fqn.endswith(".step"))
    record = step.record(fqn)
    place = parse_directory(record, len(record)).find("data/0")
    assert place is not None
    step.flip(fqn, place.start)
    structure = look(step.folder, step.metadata, wanted=lambda name: name == fqn)
    assert structure.values == []
    assert [f.code for f in structure.findings] == ["record.crc"]


def test_the_tail_of_a_record_and_the_head_of_the_next_are_one_read(tmp_path):
    record = tensor_record((50_000,))
    part = part_of(tmp_path, (50_000,), *[record] * 10)
    store = Counting(LocalStore(str(tmp_path)), [])
    ranges = Ranges([part])
    structure = read_structure(RecordSource(store, "", ranges), store.inner.list_tree())
    assert structure.findings == ()
    assert structure.n_reads == len(store.spans) == n_structure_reads(ranges) == 11
    assert structure.n_bytes == sum(span.length for span in store.spans) == 10 * 2_048
    between = store.spans[1:-1]
    assert all(span.offset % len(record) == len(record) - 1_024 for span in between)
    assert all(span.length == 2_048 for span in between)


def test_reads_are_counted_as_far_as_decides_the_level():
    far_apart = [ByteRange(FILE, 1_000_000 * n, 500_000) for n in range(MAX_QUICK_READS)]
    part = metadata(*(BytesEntry(f"b{n}", one) for n, one in enumerate(far_apart)))
    assert n_structure_reads(Ranges([part])) == MAX_QUICK_READS + 1


def test_small_records_are_read_together_in_pieces_of_64_kilobytes(tmp_path):
    record = tensor_record((8,))
    n = 1_000
    part = part_of(tmp_path, (8,), *[record] * n)
    structure = look(tmp_path, part)
    assert structure.findings == ()
    n_reads = -(-n // (65_536 // len(record)))
    assert structure.n_reads == n_structure_reads(Ranges([part])) == n_reads
    assert structure.n_bytes == n * len(record)


@pytest.mark.torch
@pytest.mark.parametrize("alignment", [1, 64, 4_096])
def test_records_of_any_alignment_are_sound_and_the_farther_ones_read_twice(tmp_path, alignment):
    import torch
    from torch.utils.serialization import config

    with config.patch({"save.storage_alignment": alignment}):
        torch.save(torch.zeros(50_000), tmp_path / "record.pt")
    record = (tmp_path / "record.pt").read_bytes()
    structure = look(tmp_path, part_of(tmp_path, (50_000,), record, record))
    assert structure.findings == ()
    assert structure.n_reads == (3 if alignment <= 64 else 6)


def test_a_long_directory_takes_a_second_read(tmp_path):
    members = [Made("data.pkl", b"x" * 50_000), Made("byteorder", b"little")]
    members += [Made(f"data/{i}", bytes(100)) for i in range(1_000)]
    members += [Made("version", b"3\n"), Made(".data/serialization_id", b"0" * 40)]
    (at,) = put(tmp_path, archive(members))
    structure = look(tmp_path, metadata(BytesEntry("rng", at)))
    assert structure.findings == ()
    assert structure.n_reads > 1
    assert structure.n_bytes < at.length / 2


def test_a_long_pickle_is_read_when_it_is_wanted(tmp_path):
    pickle = b"\x80\x02" + b"x" * 60_000
    members = [Made("data.pkl", pickle), Made("data/0", bytes(100_000)), Made("version", b"3\n")]
    (at,) = put(tmp_path, archive(members))
    part = metadata(BytesEntry("loader", at))
    assert look(tmp_path, part).n_bytes < 5_000
    (value,) = look(tmp_path, part, wanted=lambda _: True).values
    assert value.data == pickle


def test_a_pickle_too_long_for_a_step_number_is_not_handed_out(tmp_path):
    members = [Made("data.pkl", b"x" * 70_000), Made("version", b"3\n")]
    (at,) = put(tmp_path, archive(members))
    structure = look(tmp_path, metadata(BytesEntry("loader", at)), wanted=lambda _: True)
    assert structure.values == []


def test_many_damaged_files_are_told_one_by_one_and_then_in_sum(tmp_path):
    tensors: list[TensorEntry] = []
    for i in range(30):
        name = f"__{i:02}_0.distcp"
        (tmp_path / name).write_bytes(bytes(2_000))
        at = ByteRange(name, 0, 2_000)
        tensors.append(tensor(f"w{i}", (3,), ((0,), (3,)), ranges=[at]))
    findings = found(tmp_path, metadata(*tensors))
    assert len(findings) == 21
    assert findings[-1].message == (
        "a record is not a well-formed archive: the same in 10 more places"
    )


def test_ranges_that_overlap_are_still_looked_at(tmp_path):
    record = tensor_record((50_000,))
    at, *_ = put(tmp_path, record)
    boxes = [((0,), (50_000,)), ((50_000,), (50_000,))]
    inner = ByteRange(FILE, 10, len(record) - 20)
    part = metadata(tensor("w", (100_000,), *boxes, ranges=[at, inner]))
    (finding,) = found(tmp_path, part)
    assert finding.code == "record.framing"
    assert finding.message.startswith("the record of w at (50000,), from byte ")
