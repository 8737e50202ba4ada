"""One record: what torch writes is read, contradictions are refused.

Real records come from checkpoints that torch 2.2 and 2.9 wrote; those with a
wrong field are built by `made_records`, which is shown here to build the same bytes as torch.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_records import Made, archive, members_of

from ckptctl.errors import RecordUnreadable
from ckptctl.formats.archive.directory import (
    TAIL,
    RecordDirectory,
    View,
    check_headers,
    check_texts,
    parse_directory,
    read_member,
    tail_needed,
    wrong_crcs,
)
from ckptctl.formats.dcp.metadata import decode_metadata

HERE = Path(__file__).parent

Change = Callable[[bytearray], None]


def whole(data: bytes) -> tuple[RecordDirectory, View]:
    return parse_directory(data, len(data)), View(len(data), data, data)


def refusal(data: bytes) -> str:
    """Why a record is refused; the whole of it was read."""
    with pytest.raises(RecordUnreadable) as refused:
        read_whole(data)
    return refused.value.message


def read_whole(data: bytes) -> None:
    directory, view = whole(data)
    check_headers(directory, view)
    check_texts(directory, view)


def records_of(step: Path) -> list[bytes]:
    metadata = decode_metadata((step / ".metadata").read_bytes())
    ranges = [chunk.byte_range for entry in metadata.tensors.values() for chunk in entry.chunks] + [
        entry.byte_range for entry in metadata.bytes_entries.values()
    ]
    found = []
    for byte_range in ranges:
        assert byte_range is not None
        data = (step / byte_range.file).read_bytes()
        found.append(data[byte_range.offset : byte_range.end])
    return found


@pytest.fixture(scope="module")
def new_records(dcp_versions: Path) -> list[bytes]:
    return records_of(dcp_versions / "torch-2.9.1/plain-1/step_10")


@pytest.fixture(scope="module")
def old_records(dcp_versions: Path) -> list[bytes]:
    return records_of(dcp_versions / "torch-2.2.2/plain-1/step_10")


@pytest.fixture(scope="module")
def record(new_records: list[bytes]) -> bytes:
    """A record of a tensor with elements."""
    return next(r for r in new_records if b"archive/data/0" in r and len(r) > 2_000)


def changed(record: bytes, change: Change) -> bytes:
    data = bytearray(record)
    change(data)
    return bytes(data)


def test_records_of_old_and_new_torch_are_read_whole_and_match_their_checksums(
    new_records, old_records
):
    for data in new_records + old_records:
        directory, view = whole(data)
        check_headers(directory, view)
        check_texts(directory, view)
        assert wrong_crcs(directory, view) == ()
        assert directory.has_crcs
        assert read_member(directory, "version", view) == b"3\n"
        assert read_member(directory, "byteorder", view) == b"little"


def test_one_kilobyte_of_tail_holds_the_directory_of_a_tensor(new_records, old_records):
    for data in new_records + old_records:
        tail = data[-TAIL:]
        assert tail_needed(tail, len(data)) <= TAIL
        assert parse_directory(tail, len(data)) == parse_directory(data, len(data))


def test_the_archives_that_these_tests_build_are_those_of_torch(new_records, old_records):
    for data in new_records + old_records:
        assert archive(members_of(data)) == data


def test_a_tail_shorter_than_the_directory_says_how_much_it_needs(record):
    with pytest.raises(RecordUnreadable, match="was not read"):
        parse_directory(record[-98:], len(record))
    needed = tail_needed(record[-98:], len(record))
    assert parse_directory(record[-needed:], len(record)) == parse_directory(record, len(record))
    with pytest.raises(RecordUnreadable):
        parse_directory(record[-needed + 1 :], len(record))


def test_only_the_headers_that_were_read_are_checked(record):
    directory = parse_directory(record, len(record))
    data = directory.find("data/0")
    assert data is not None
    broken = changed(record, lambda r: flip(r, data.header))
    check_headers(directory, View(len(record), broken[:64], broken[-TAIL:]))
    with pytest.raises(RecordUnreadable, match="'data/0' does not begin with a header"):
        check_headers(directory, View(len(record), broken[: data.start], broken[-TAIL:]))


def test_a_member_that_was_read_in_part_is_not_handed_out(record):
    directory = parse_directory(record, len(record))
    data = directory.find("data/0")
    assert data is not None
    view = View(len(record), record[: data.end - 1], record[data.start + 1 :])
    assert read_member(directory, "data/0", view) is None
    assert read_member(directory, "no such member", view) is None
    assert wrong_crcs(directory, view) == ()


def test_a_flipped_byte_of_a_member_is_a_wrong_checksum(record):
    directory = parse_directory(record, len(record))
    for member in directory.members:
        broken = changed(record, lambda r, at=member.start: flip(r, at))
        assert wrong_crcs(directory, View(len(record), broken, broken)) == (member.name,)


def test_a_record_saved_without_checksums_is_known_by_its_version(record):
    bare = archive([replace(member, crc=0) for member in members_of(record)])
    directory, view = whole(bare)
    check_headers(directory, view)
    assert not directory.has_crcs
    assert wrong_crcs(directory, view) == ()


def test_an_empty_tensor_has_a_member_without_bytes(record):
    members = [replace(m, data=b"") if m.name == "data/0" else m for m in members_of(record)]
    directory, view = whole(archive(members))
    check_headers(directory, view)
    assert wrong_crcs(directory, view) == ()
    assert read_member(directory, "data/0", view) == b""


@pytest.mark.parametrize("n_bytes", [0, 1, 21, 97])
def test_what_is_shorter_than_any_archive_is_refused(record, n_bytes):
    assert refusal(record[-n_bytes:] if n_bytes else b"") == (
        f"it is {n_bytes} bytes, an archive has at least 98"
    )


def flip(data: bytearray, at: int, n_bytes: int = 1) -> None:
    for i in range(n_bytes):
        data[at + i] ^= 0xFF


# Offsets from the end of the record, sizes in bytes: each field, and the report of an error in it.
END = {
    "signature": (22, 4, "does not end as an archive does"),
    "disk": (18, 2, "contradict each other"),
    "disk of the directory": (16, 2, "contradict each other"),
    "members on the disk": (14, 2, "contradict each other"),
    "members": (12, 2, "contradict each other"),
    "size of the directory": (10, 4, "contradict each other"),
    "offset of the directory": (6, 4, "contradict each other"),
    "length of the comment": (2, 2, "contradict each other"),
    "zip64 locator: signature": (42, 4, "no zip64 end"),
    "zip64 locator: disk": (38, 4, "contradict each other"),
    "zip64 locator: offset": (34, 8, "contradict each other"),
    "zip64 locator: disks": (26, 4, "contradict each other"),
    "zip64 end: signature": (98, 4, "no zip64 end"),
    "zip64 end: its size": (94, 8, "contradict each other"),
    "zip64 end: disk": (82, 4, "contradict each other"),
    "zip64 end: disk of the directory": (78, 4, "contradict each other"),
    "zip64 end: members on the disk": (74, 8, "contradict each other"),
    "zip64 end: members": (66, 8, "contradict each other"),
    "zip64 end: size of the directory": (58, 8, "contradict each other"),
    "zip64 end: offset of the directory": (50, 8, "contradict each other"),
}


@pytest.mark.parametrize("field", END)
def test_each_field_at_the_end_that_is_flipped_is_told(record, field):
    from_end, n_bytes, said = END[field]
    for i in range(n_bytes):
        broken = changed(record, lambda r, i=i: flip(r, len(r) - from_end + i))
        assert said in refusal(broken)


# Offsets in an entry of the directory.
ENTRY = {
    "signature": (0, 4),
    "flags": (8, 2),
    "method": (10, 2),
    "crc": (16, 4),
    "stored size": (20, 4),
    "size": (24, 4),
    "length of the name": (28, 2),
    "length of the extra field": (30, 2),
    "length of the comment": (32, 2),
    "disk": (34, 2),
    "attributes of DOS": (38, 1),
    "offset of the local header": (42, 4),
    "name": (46, 1),
}
LOCAL = {
    "signature": (0, 4),
    "flags": (6, 2),
    "method": (8, 2),
    "crc": (14, 4),
    "stored size": (18, 4),
    "size": (22, 4),
    "length of the name": (26, 2),
    "length of the extra field": (28, 2),
    "name": (30, 1),
}


@pytest.mark.parametrize("field", ENTRY)
def test_each_field_of_a_directory_entry_that_is_flipped_is_told(record, field):
    offset, n_bytes = ENTRY[field]
    for position in entries_of(record):
        for i in range(n_bytes):
            assert refusal(changed(record, lambda r, at=position + offset + i: flip(r, at)))


@pytest.mark.parametrize("field", LOCAL)
def test_each_field_of_a_local_header_that_is_flipped_is_told(record, field):
    offset, n_bytes = LOCAL[field]
    for member in parse_directory(record, len(record)).members:
        for i in range(n_bytes):
            at = member.header + offset + i
            said = refusal(changed(record, lambda r, at=at: flip(r, at)))
            assert f"{member.name!r}" in said


def test_each_byte_of_a_descriptor_that_is_flipped_is_told(record):
    for member in parse_directory(record, len(record)).members:
        assert member.following - member.end == 16
        for at in range(member.end, member.following):
            said = refusal(changed(record, lambda r, at=at: flip(r, at)))
            assert said == f"what follows its member {member.name!r} contradicts its directory"


def entries_of(record: bytes) -> list[int]:
    positions = []
    at = parse_directory(record, len(record)).at
    while record[at : at + 4] == b"PK\1\2":
        positions.append(at)
        at += 46 + sum(struct.unpack_from("<3H", record, at + 28))
    return positions


def rebuilt(record: bytes, member: str, /, **changes: object) -> bytes:
    """The record with other values in one member."""
    return archive([replace(m, **changes) if m.name == member else m for m in members_of(record)])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": 8}, "its member 'data/0' is compressed (method 8)"),
        ({"flags": 0x0809}, "its member 'data/0' has flags 0x0809"),
        ({"flags": 0x0828}, "its member 'data/0' has flags 0x0828"),
        ({"flags": 0x2848}, "its member 'data/0' has flags 0x2848"),
        ({"attributes": 0x10}, "its member 'data/0' is not a plain file in one piece"),
        (
            {"local_path": b"archive/data/1"},
            "the header of its member 'data/0' contradicts its directory",
        ),
        ({"folder": "elsewhere"}, "its members lie in more than one folder"),
        ({"name": "version"}, "two of its members have one name"),
        ({"name": "VERSION"}, "two of its members have one name"),
        ({"name": "../../etc/passwd"}, "a member is called 'archive/../../etc/passwd'"),
        ({"name": "data//0"}, "a member is called 'archive/data//0'"),
        ({"name": "data/0/"}, "a member is called 'archive/data/0/'"),
        ({"flags": 0x0800}, "bytes has flags 0x0800"),
    ],
)
def test_a_member_that_torch_would_not_write_is_refused(record, changes, said):
    assert said in refusal(rebuilt(record, "data/0", **changes))


@pytest.mark.parametrize("name", ["version", "data.pkl"])
def test_an_archive_without_the_members_that_torch_needs_is_refused(record, name):
    members = [member for member in members_of(record) if member.name != name]
    assert refusal(archive(members)) == (
        "it holds no `version` and `data.pkl`, as torch's archives do"
    )


def test_bytes_before_or_after_an_archive_are_refused(record):
    assert refusal(b"junk" + record)
    assert refusal(record + b"junk")
    assert refusal(archive(members_of(record), prefix=b"junk")) == (
        "4 bytes lie before its first member"
    )


def test_two_archives_in_one_range_are_refused(record):
    assert "contradict each other" in refusal(record + record)
    second = archive(members_of(record), prefix=record)
    assert refusal(second) == f"{len(record):,} bytes lie before its first member"


def test_an_end_inside_a_comment_is_refused(record):
    commented = changed(record, lambda r: r.__setitem__(slice(-2, None), b"\x16\0"))
    assert refusal(commented + record[-22:])


def test_members_that_overlap_or_leave_a_gap_are_refused(record):
    data = next(m for m in members_of(record) if m.name == "data/0")
    for wrong in (len(data.data) - 1, len(data.data) + 1):
        assert refusal(rebuilt(record, "data/0", size=wrong))


def test_two_sizes_of_one_member_are_refused(record):
    said = refusal(rebuilt(record, "data/0", stored=1))
    assert said.startswith("its member 'data/0' has two sizes, ")


def test_zip64_fields_that_lie_are_refused(record):
    data = next(m for m in members_of(record) if m.name == "data/0")
    wide = rebuilt(record, "data/0", zip64=True, size=2**62)
    assert "does not end where the next one begins" in refusal(wide)
    short = rebuilt(record, "data/0", size=0xFFFFFFFF)
    assert refusal(short) == "the zip64 field of its member 'data/0' is damaged"
    # A small member may have wide fields: they are read, and then say the same.
    sound, view = whole(rebuilt(record, "data/0", zip64=True))
    assert read_member(sound, "data/0", view) == data.data


@pytest.mark.parametrize("n_members", [0, 6, 8, 65_536, 2**40])
def test_a_wrong_number_of_members_is_refused(record, n_members):
    data = bytearray(record)
    struct.pack_into("<2Q", data, len(data) - 74, n_members, n_members)
    struct.pack_into("<2H", data, len(data) - 14, *[min(n_members, 0xFFFF)] * 2)
    assert refusal(bytes(data))


def test_a_directory_beyond_all_measure_is_refused_before_it_is_read():
    length = 2**40
    size = 2**39
    trailer = bytearray(98)
    struct.pack_into("<4sQ2H2I4Q", trailer, 0, *(b"PK\6\6", 44, 798, 45, 0, 0, 9, 9, size, 0))
    struct.pack_into("<Q", trailer, 48, length - 98 - size)
    struct.pack_into("<4sIQI", trailer, 56, b"PK\6\7", 0, length - 98, 1)
    struct.pack_into("<4s4H2IH", trailer, 76, *(b"PK\5\6", 0, 0, 9, 9), *[0xFFFFFFFF] * 2, 0)
    with pytest.raises(RecordUnreadable, match="9 members takes 549,755,813,888 bytes"):
        tail_needed(bytes(trailer), length)


def test_many_members_are_read_in_time_linear_in_their_number():
    members = [Made("data.pkl", b"."), Made("version", b"3\n")]
    members += [Made(f"data/{i}", b"x") for i in range(70_000 - 2)]
    directory, view = whole(archive(members))
    check_headers(directory, view)
    assert len(directory.members) == 70_000


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("version", b"three\n"),
        ("version", b"0"),
        ("byteorder", b"middle"),
        (".format_version", b"x"),
        (".storage_alignment", b"-64"),
        (".data/serialization_id", b"\xff" * 40),
    ],
)
def test_a_text_that_torch_cannot_read_is_refused(record, name, text):
    said = refusal(rebuilt(record, name, data=text))
    assert said == f"its {name} is {text!r}"


# What surrounds a record of this many bytes of elements; `over_four_gib/write.py` wrote it.
N_LARGE = 2**32 + 1_000
LARGE_HEAD = (HERE / "over_four_gib/head.bin").read_bytes()
LARGE_TAIL = (HERE / "over_four_gib/tail.bin").read_bytes()


def test_records_over_four_gigabytes_are_read_from_their_head_and_tail():
    head, tail = LARGE_HEAD, LARGE_TAIL
    length = len(head) + N_LARGE + len(tail)
    assert tail_needed(tail[-TAIL:], length) <= TAIL
    directory = parse_directory(tail[-TAIL:], length)
    view = View(length, head, tail)
    check_headers(directory, view)
    check_texts(directory, view)
    assert wrong_crcs(directory, view) == ()
    data = directory.find("data/0")
    version = directory.find("version")
    assert data is not None
    assert version is not None
    assert (data.start, data.size) == (len(head), N_LARGE)
    # Beyond 4 GiB even a small member has wide fields.
    assert version.following - version.end == 24


def test_each_byte_of_a_wide_field_that_is_flipped_is_told():
    length = len(LARGE_HEAD) + N_LARGE + len(LARGE_TAIL)
    sound = parse_directory(LARGE_TAIL, length)
    at = LARGE_TAIL.index(b"PK\1\2")
    n_wide = 0
    while LARGE_TAIL[at : at + 4] == b"PK\1\2":
        n_name, n_extra = struct.unpack_from("<2H", LARGE_TAIL, at + 28)
        for i in range(at + 46 + n_name, at + 46 + n_name + n_extra):
            broken = changed(LARGE_TAIL, lambda tail, i=i: flip(tail, i))
            with pytest.raises(RecordUnreadable):
                parse_directory(broken, length)
            n_wide += 1
        at += 46 + n_name + n_extra
    assert len(sound.members) == 7
    assert n_wide == 20 + 12 + 12
