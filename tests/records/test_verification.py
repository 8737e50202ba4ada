"""Every byte of every record: what changed is found, what is sound draws nothing."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from struct import pack
from zlib import crc32

import pytest
from made_parts import metadata, tensor
from made_records import Made, archive, members_of
from storage.faulty import FaultyStore

from ckptctl.findings import Finding
from ckptctl.formats.archive.directory import parse_directory
from ckptctl.formats.archive.writing import fold_of, tensor_frame
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.formats.digests import BLOCK_BYTES
from ckptctl.inspection.content import ContentCheck
from ckptctl.model import ByteRange, BytesEntry, Metadata
from ckptctl.records import byte_pass
from ckptctl.records.byte_pass import Limits, Piece, Stop, read_runs
from ckptctl.records.opening import ZSTD
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource
from ckptctl.records.verification import RecordRun, record_runs
from ckptctl.storage.contract import ShortRead, Store, StoreKind
from ckptctl.storage.local import LocalStore

FILE = "__0_0.distcp"


def record(n_bytes: int, *, seed: int = 0, crc: int | None = None) -> bytes:
    """A record of a tensor of `n_bytes` bytes, as torch writes it."""
    data = random.Random(seed).randbytes(n_bytes)
    members = [
        Made("data.pkl", b"\x80\x02stand-in."),
        Made(".format_version", b"1"),
        Made(".storage_alignment", b"64"),
        Made("byteorder", b"little"),
        Made("data/0", data),
        Made("version", b"3\n"),
    ]
    if crc is not None:
        for member in members:
            member.crc = crc
    without_id = archive([*members, Made(".data/serialization_id", b"0" * 40, crc=crc)])
    fold = fold_of(parse_directory(without_id, len(without_id)))
    return archive([*members, Made(".data/serialization_id", b"7" * 20 + b"%020d" % fold, crc=crc)])


def part_of(records: Sequence[bytes], transforms: tuple[str, ...] = ()) -> tuple[bytes, Metadata]:
    """The records one after the other in one file, and metadata that names each `t0`, `t1`, …"""
    entries = []
    at = 0
    for number, data in enumerate(records):
        place = ByteRange(FILE, at, len(data), transforms)
        entries.append(tensor(f"t{number}", (1 << 20,), ((0,), (1 << 20,)), ranges=[place]))
        at += len(data)
    return b"".join(records), metadata(*entries)


def runs_of(store: Store, check: ContentCheck) -> tuple[RecordRun, ...]:
    return record_runs(RecordSource(store, "", check.ranges), check.by_file, check.report)


def compare(
    folder: Path, data: bytes, saved: Metadata, *, kind: StoreKind | None = None, **limits: object
) -> tuple[ContentCheck, list[Finding]]:
    (folder / FILE).write_bytes(data)
    inner = LocalStore(str(folder))
    store = FaultyStore(inner, kind=kind) if kind else inner
    check = ContentCheck(Ranges([saved]), inner.list_tree())
    read_runs(store, runs_of(store, check), Limits(**limits))
    return check, list(check.findings())


def codes(findings: Sequence[Finding]) -> list[str]:
    return [finding.code for finding in findings]


@pytest.fixture(params=["whole", "in pieces", "cut into blocks"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The records fit the buffer; do not fit it; lie in several runs of several threads."""
    if request.param != "whole":
        monkeypatch.setattr(byte_pass, "PIECE_BYTES", 1300)
        monkeypatch.setattr(byte_pass, "OBJECT_PIECE_BYTES", 1700)
    if request.param == "cut into blocks":
        monkeypatch.setattr("ckptctl.records.verification.BLOCK_BYTES", 4096)
    return str(request.param)


@pytest.mark.parametrize("kind", [StoreKind.LOCAL, StoreKind.NETWORK, StoreKind.OBJECT])
@pytest.mark.parametrize("jobs", [1, 3])
def test_sound_records_are_proven_to_the_last_byte(tmp_path, pieces, kind, jobs):
    data, saved = part_of([record(n, seed=n) for n in (1, 100, 5000, 20_000, 4, 9999, 1)])
    check, findings = compare(tmp_path, data, saved, kind=kind, jobs=jobs)
    assert findings == []
    assert check.whole
    assert (check.proven.n_bytes, check.proven.n_records) == (len(data), 7)
    assert check.proven.n_asked == len(data)


def test_a_flip_anywhere_in_the_elements_is_found_with_its_place(tmp_path, pieces):
    records = [record(n, seed=n) for n in (100, 12_000, 50)]
    data, saved = part_of(records)
    begin = len(records[0])
    directory = parse_directory(records[1], len(records[1]))
    elements = directory.find("data/0")
    assert elements is not None
    for at in (elements.start, elements.start + 7000, elements.end - 1):
        broken = bytearray(data)
        broken[begin + at] ^= 0x40
        check, (finding,) = compare(tmp_path, bytes(broken), saved)
        assert finding.code == "record.crc"
        assert finding.where == FILE
        assert "of t1, bytes" in finding.message
        place = f"bytes {begin + elements.start:,} to {begin + elements.end:,} of the file"
        assert f"data/0 ({place})" in finding.message
        assert finding.expected == f"CRC-32 {elements.crc:08x}"
        assert check.proven.n_records == 2


def test_each_byte_of_a_file_is_compared_with_something(tmp_path, pieces):
    """Also those that no reader looks at: padding, times, attributes."""
    data, saved = part_of([record(30, seed=1), record(5000, seed=2)])
    missed = []
    for at in range(0, len(data), 7 if pieces == "whole" else 89):
        broken = bytearray(data)
        broken[at] ^= 0xFF
        _, findings = compare(tmp_path, bytes(broken), saved)
        if not findings:
            missed.append(at)
    # The version fields of the zip64 end, four bytes: nothing there says what they should be.
    ends = [len(record(30, seed=1)) - 98, len(data) - 98]
    assert {at - end for at in missed for end in ends if 0 <= at - end < 98} <= {12, 13, 14, 15}
    assert len(missed) <= 8


def test_damage_in_many_records_of_one_file_is_one_finding(tmp_path):
    records = [record(500, seed=n) for n in range(10)]
    data = bytearray(b"".join(records))
    _, saved = part_of(records)
    data[800:6000] = bytes(5200)
    _, findings = compare(tmp_path, bytes(data), saved)
    assert set(codes(findings)) <= {"record.crc", "record.framing"}
    assert len(findings) == len(set(codes(findings)))
    assert any("records" in finding.message for finding in findings)


@pytest.mark.parametrize("code", ["record.crc"])
def test_a_block_of_zeros_in_the_elements_does_not_match(tmp_path, pieces, code):
    data, saved = part_of([record(9000)])
    _, findings = compare(tmp_path, data[:2000] + bytes(4096) + data[6096:], saved)
    assert codes(findings) == [code]


def test_records_without_checksums_are_unverifiable_and_never_corrupt(tmp_path, pieces):
    data, saved = part_of([record(9000, crc=0), record(40, crc=0)])
    check, (finding,) = compare(tmp_path, data, saved)
    assert finding.code == "record.unverifiable"
    assert "2 records saved without checksums" in finding.message
    assert check.whole
    assert check.proven.n_bytes == 0


def test_a_seal_that_covers_the_file_stands_in_for_checksums(tmp_path):
    data, saved = part_of([record(9000, crc=0)])
    check, _ = compare(tmp_path, data, saved)
    assert list(check.findings({FILE})) == []
    assert codes(list(check.findings({"__1_0.distcp"}))) == ["record.unverifiable"]


def test_a_record_rewritten_with_new_checksums_contradicts_its_serialization_id(tmp_path):
    records = [record(500, seed=n) for n in range(3)]
    members = members_of(records[1])
    changed = [Made(m.name, b"\x11" * 500 if m.name == "data/0" else m.data) for m in members]
    records[1] = archive(changed)
    data, saved = part_of(records)
    _, (finding,) = compare(tmp_path, data, saved)
    assert finding.code == "record.crc"
    assert "serialization_id" in finding.message
    assert "of t1, bytes" in finding.message


def test_a_torch_that_makes_serialization_ids_in_another_way_is_not_accused(tmp_path):
    records = []
    for seed in range(3):
        members = members_of(record(500, seed=seed))
        members[-1] = Made(members[-1].name, b"5" * 40)
        records.append(archive(members))
    data, saved = part_of(records)
    check, findings = compare(tmp_path, data, saved)
    assert findings == []
    assert check.proven.n_records == 3


def test_an_empty_member_takes_nothing_from_the_proof(tmp_path):
    data, saved = part_of([record(0), record(10)])
    check, findings = compare(tmp_path, data, saved)
    assert findings == []
    assert check.proven.n_records == 2


def test_a_plain_pickle_of_a_planner_of_its_own_is_unverifiable(tmp_path, pieces):
    data = b"\x80\x04" + b"x" * 3000 + b"."
    saved = metadata(BytesEntry("state", ByteRange(FILE, 0, len(data))))
    _, (finding,) = compare(tmp_path, data, saved)
    assert finding.code == "record.unverifiable"
    assert "plain pickle" in finding.message


def test_bytes_that_are_no_record_at_all_are_a_finding(tmp_path, pieces):
    _, saved = part_of([bytes(9000)])
    check, findings = compare(tmp_path, bytes(9000), saved)
    assert codes(findings) == ["record.framing"]
    assert check.whole


# Compressed records


def compressed(*records: bytes, shape: int, dtype: str = "float32") -> tuple[bytes, Metadata]:
    """Compressed records, one after the other, of tensors that the metadata says are `shape`."""
    zstandard = pytest.importorskip("zstandard")
    entries, packed = [], b""
    for number, inner in enumerate(records):
        data = zstandard.compress(inner)
        place = ByteRange(FILE, len(packed), len(data), (ZSTD,))
        box = ((0,), (shape,))
        entries.append(tensor(f"t{number}", (shape,), box, ranges=[place], dtype=dtype))
        packed += data
    return packed, metadata(*entries)


def tensor_record(n_elements: int, seed: int = 0) -> bytes:
    frame = tensor_frame("float32", (n_elements,))
    data = random.Random(seed).randbytes(4 * n_elements)
    return frame.between(()) + data + frame.between((crc32(data),))


def test_compressed_records_are_read_through(tmp_path, pieces):
    inner = tensor_record(2000)
    data, saved = compressed(inner, tensor_record(2000, seed=1), shape=2000)
    check, findings = compare(tmp_path, data, saved)
    assert findings == []
    assert check.proven.n_bytes == len(data)

    broken = bytearray(inner)
    broken[3000] ^= 1
    _, findings = compare(tmp_path, *compressed(bytes(broken), shape=2000))
    assert codes(findings) == ["record.crc"]


@pytest.mark.parametrize(
    ("shape", "dtype", "says"),
    [
        (2001, "float32", "it holds a tensor of shape (2000,), but its metadata has (2001,)"),
        (2000, "int32", "it holds float32, but its metadata has int32"),
    ],
)
def test_a_compressed_record_of_another_tensor_is_a_finding(tmp_path, shape, dtype, says):
    data, saved = compressed(tensor_record(2000), shape=shape, dtype=dtype)
    check, (finding,) = compare(tmp_path, data, saved)
    assert finding.code == "record.mismatch"
    assert finding.message.endswith(says)
    assert check.whole


@pytest.mark.parametrize("cut", [1, 500])
def test_compressed_bytes_that_end_too_early_are_a_finding(tmp_path, pieces, cut):
    zstandard = pytest.importorskip("zstandard")
    data, saved = part_of([zstandard.compress(record(9000))[:-cut]], (ZSTD,))
    _, findings = compare(tmp_path, data, saved)
    assert codes(findings) == ["record.framing"]


def test_a_bomb_is_refused_when_it_comes_to_more_than_its_tensor(tmp_path):
    zstandard = pytest.importorskip("zstandard")
    data, saved = part_of([zstandard.compress(bytes(1 << 28), 19)], (ZSTD,))
    assert len(data) < 1 << 16
    _, (finding,) = compare(tmp_path, data, saved)
    assert finding.code == "record.framing"
    assert "more than the" in finding.message


def test_compressed_records_are_unverifiable_without_the_extra(tmp_path, monkeypatch):
    zstandard = pytest.importorskip("zstandard")
    data, saved = part_of([zstandard.compress(record(900))], (ZSTD,))
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    _, (finding,) = compare(tmp_path, data, saved)
    assert finding.code == "record.unverifiable"
    assert finding.next_command == "pip install 'ckptctl[zstd]'"


# The pass


def test_runs_are_cut_where_a_seal_digests(tmp_path):
    entries = [
        tensor(f"t{n}", (4,), ((0,), (4,)), ranges=[ByteRange(FILE, start, length)])
        for n, (start, length) in enumerate(
            [(0, 100), (100, 2 * BLOCK_BYTES), (2 * BLOCK_BYTES + 100, 50)]
        )
    ]
    with (tmp_path / FILE).open("wb") as file:
        file.truncate(2 * BLOCK_BYTES + 150)
    store = LocalStore(str(tmp_path))
    check = ContentCheck(Ranges([metadata(*entries)]), store.list_tree())
    assert [run.n_bytes for run in runs_of(store, check)] == [BLOCK_BYTES, BLOCK_BYTES, 150]


class Noting:
    """A run that notes what it is given."""

    path = FILE

    def __init__(self, n_bytes: int, on_take: Callable[[], None] = lambda: None) -> None:
        self.n_bytes = n_bytes
        self.taken: list[tuple[int, bytes]] = []
        self._on_take = on_take

    def pieces(self, limit: int):
        yield Piece(self.n_bytes - 10, 10, ahead=True)
        for at in range(0, self.n_bytes, limit):
            yield Piece(at, min(limit, self.n_bytes - at))

    def take(self, piece: Piece, data: memoryview) -> None:
        self._on_take()
        self.taken.append((piece.start, bytes(data)))


@pytest.mark.parametrize("kind", [StoreKind.LOCAL, StoreKind.OBJECT])
def test_a_pass_gives_each_run_its_pieces_in_order(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(byte_pass, "PIECE_BYTES", 1000)
    monkeypatch.setattr(byte_pass, "OBJECT_PIECE_BYTES", 1000)
    data = random.Random(1).randbytes(5500)
    (tmp_path / FILE).write_bytes(data)
    runs = [Noting(5500), Noting(2500)]
    store = FaultyStore(LocalStore(str(tmp_path)), kind=kind)
    assert read_runs(store, runs, Limits()) == 8000
    for run in runs:
        starts = [start for start, _ in run.taken]
        assert starts == [run.n_bytes - 10, *range(0, run.n_bytes, 1000)]
        assert b"".join(piece for _, piece in run.taken[1:]) == data[: run.n_bytes]


def test_a_pass_ends_within_a_piece_when_it_is_asked_to(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_pass, "PIECE_BYTES", 100)
    (tmp_path / FILE).write_bytes(bytes(10_000))
    stop = Stop()
    run = Noting(10_000, on_take=stop.ask)
    assert read_runs(LocalStore(str(tmp_path)), [run], Limits(stop=stop)) < 200
    assert len(run.taken) == 1
    assert not stop.listening


def test_a_pass_whose_time_is_up_reads_nothing(tmp_path):
    (tmp_path / FILE).write_bytes(bytes(1000))
    assert read_runs(LocalStore(str(tmp_path)), [Noting(1000)], Limits(until_s=0.0)) == 0


@pytest.mark.parametrize("kind", [StoreKind.LOCAL, StoreKind.OBJECT])
def test_a_file_that_was_cut_short_since_it_was_listed_ends_the_pass(tmp_path, kind):
    (tmp_path / FILE).write_bytes(bytes(1000))
    store = FaultyStore(LocalStore(str(tmp_path)), kind=kind)
    with pytest.raises(ShortRead):
        read_runs(store, [Noting(1001)], Limits())


def test_what_a_run_raises_is_raised_by_the_pass(tmp_path):
    def fail() -> None:
        raise ZeroDivisionError

    (tmp_path / FILE).write_bytes(bytes(1000))
    with pytest.raises(ZeroDivisionError):
        read_runs(LocalStore(str(tmp_path)), [Noting(1000, fail)], Limits())


# Real records


@pytest.mark.torch
@pytest.mark.slow
def test_a_flip_in_a_real_shard_is_found_but_in_versions_that_torch_never_reads(
    tmp_path, checkpoints
):
    step = checkpoints / "run_fsdp4" / "step_100"
    whole = (step / FILE).read_bytes()
    saved = decode_metadata((step / ".metadata").read_bytes())
    missed = []
    for at in range(0, len(whole), 53):
        broken = bytearray(whole)
        broken[at] ^= 1 << at % 8
        (tmp_path / FILE).write_bytes(broken)
        store = LocalStore(str(tmp_path))
        check = ContentCheck(Ranges([saved]), store.list_tree())
        read_runs(store, runs_of(store, check), Limits(jobs=1))
        if not list(check.findings()):
            missed.append(at)
    ends = [at + 12 for at in _ends64(whole)]
    assert all(any(end <= at < end + 4 for end in ends) for at in missed)


def _ends64(data: bytes) -> list[int]:
    """Where the zip64 ends of the records lie; torch reads neither version that stands there."""
    found, at = [], data.find(b"PK\6\6")
    while at >= 0:
        if data[at + 4 : at + 16] == pack("<Q2H", 44, 798, 45):
            found.append(at)
        at = data.find(b"PK\6\6", at + 1)
    return found


_LITTLE_MEMORY = """
import resource, zstandard
from ckptctl.errors import OutOfMemory
from ckptctl.records.opening import Unpacker

window = zstandard.ZstdCompressionParameters(window_log=25)
packed = zstandard.ZstdCompressor(compression_params=window).compress(bytes(48 << 20))
taken = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmSize:")) << 10
resource.setrlimit(resource.RLIMIT_AS, (taken + (8 << 20), taken + (8 << 20)))
try:
    for _ in Unpacker(1 << 30).feed(memoryview(packed)):
        pass
except OutOfMemory as error:
    print(error.message)
"""


def test_a_record_that_cannot_be_unpacked_for_want_of_memory_is_not_damaged():
    pytest.importorskip("zstandard")
    done = subprocess.run([sys.executable, "-c", _LITTLE_MEMORY], capture_output=True, text=True)
    assert "not enough memory" in done.stdout, done.stderr
