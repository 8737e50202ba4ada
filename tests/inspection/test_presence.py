"""What the metadata names against what a listing shows: each code, one finding for one cause."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_parts import listing, metadata, tensor

from ckptctl.findings import Finding, Severity
from ckptctl.inspection.presence import check_key_paths, check_presence, escape_reason
from ckptctl.model import (
    ByteRange,
    BytesEntry,
    Chunks,
    FileInfo,
    Metadata,
    RangeColumns,
    TensorEntry,
)
from ckptctl.records.ranges import Ranges

FILE = "__0_0.distcp"
OTHER = "__1_0.distcp"


def sound() -> Metadata:
    """Two tensors in two files and one bytes entry: 1,000 bytes in each file."""
    halves = (((0,), (8,)), ((8,), (8,)))
    return metadata(
        BytesEntry("lr", ByteRange(FILE, 0, 400)),
        tensor("w", (16,), *halves, ranges=[ByteRange(FILE, 400, 600), ByteRange(OTHER, 0, 600)]),
        tensor("b", (4,), ((0,), (4,)), ranges=[ByteRange(OTHER, 600, 400)]),
    )


def check(
    *metadatas: Metadata, files: list[FileInfo] | None = None, part_path: str = ""
) -> list[Finding]:
    files = listing({FILE: 1_000, OTHER: 1_000}) if files is None else files
    return list(check_presence(Ranges(metadatas), files, part_path))


def one_tensor(*ranges: ByteRange | None, dtype: str = "float32") -> Metadata:
    boxes = [((i,), (1,)) for i in range(len(ranges))]
    return metadata(tensor("w", (len(ranges),), *boxes, ranges=ranges, dtype=dtype))


def test_a_part_in_which_everything_is_in_its_place_draws_no_finding():
    assert check(sound()) == []


def test_files_that_are_no_shards_are_not_looked_at():
    files = listing({FILE: 1_000, OTHER: 1_000, ".metadata": 300, "train_state.pt": 9})
    assert check(sound(), files=files) == []


def test_a_part_without_entries_is_sound():
    assert check(metadata(), files=[]) == []


def test_a_missing_file_is_one_finding_with_what_was_in_it():
    (finding,) = check(sound(), files=listing({FILE: 1_000}))
    assert (finding.code, finding.where) == ("shard.missing", OTHER)
    assert finding.message == "2 tensors cannot be read"


def test_bytes_entries_are_counted_apart_from_chunks():
    (finding,) = check(sound(), files=listing({OTHER: 1_000}))
    assert finding.message == "1 tensor and 1 other entry cannot be read"


def test_a_short_file_says_how_short_and_what_is_lost():
    (finding,) = check(sound(), files=listing({FILE: 1_000, OTHER: 999}))
    assert (finding.code, finding.where) == ("shard.truncated", OTHER)
    assert finding.message == "999 of 1,000 bytes exist; 1 tensor cannot be read"
    assert (finding.expected, finding.found) == ("1,000 bytes", "999 bytes")


def test_an_emptied_file_that_the_metadata_names_is_short_and_not_merely_empty():
    (finding,) = check(sound(), files=listing({FILE: 1_000, OTHER: 0}))
    assert (finding.code, finding.where) == ("shard.truncated", OTHER)


def test_the_place_of_a_finding_is_relative_to_the_step():
    (finding,) = check(sound(), files=listing({FILE: 1_000}), part_path="pp0")
    assert finding.where == f"pp0/{OTHER}"


def test_many_missing_files_are_told_one_by_one_and_then_in_sum():
    names = [f"__{rank:03}_0.distcp" for rank in range(256)]
    (*single, rest) = check(one_tensor(*(ByteRange(name, 0, 100) for name in names)), files=[])
    assert [finding.where for finding in single] == names[:20]
    assert rest.where == "__020_0.distcp, __021_0.distcp, __022_0.distcp and 233 more"
    assert rest.message == "a shard file is missing: the same in 236 more places"


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "is empty"),
        ("/etc/passwd", "is absolute"),
        ("C:\\shard", "is absolute"),
        ("../step_1/__0_0.distcp", "leads upwards"),
        ("a/../../__0_0.distcp", "leads upwards"),
        ("..", "leads upwards"),
        ("..\\__0_0.distcp", "contains a character that no shard file's name contains"),
        ("__0_0\0.distcp", "contains a character that no shard file's name contains"),
    ],
)
def test_a_path_that_leads_out_of_the_step_is_unsafe_even_if_it_were_there(path, reason):
    assert escape_reason(path) == reason
    files = [FileInfo(path, 1_000)]
    (finding,) = check(one_tensor(ByteRange(path, 0, 100)), files=files)
    assert (finding.code, finding.where) == ("path.escape", path)
    assert finding.message == f"the path {reason}; torch would follow it for 1 tensor"


@pytest.mark.parametrize(
    "path", [".metadata", "a/__0_0.distcp", "%2e%2e/x", "...", "s3://other/x", "‥/x", "x" * 5_000]
)
def test_an_odd_path_that_stays_inside_is_only_missing(path):
    assert escape_reason(path) is None
    (finding,) = check(one_tensor(ByteRange(path, 0, 100)))[:1]
    assert (finding.code, finding.where) == ("shard.missing", path)


def test_a_link_or_a_pipe_in_the_place_of_a_shard_is_not_followed():
    for kind, link, said in (
        ("link", "/etc/passwd", "it is a link to /etc/passwd, which is not followed; "),
        ("other", None, "it is not a regular file, which is not followed; "),
    ):
        files = [*listing({FILE: 1_000}), FileInfo(OTHER, 0, kind=kind, link=link)]
        (finding,) = check(sound(), files=files)
        assert (finding.code, finding.where) == ("path.escape", OTHER)
        assert finding.message == said + "2 tensors not inspected"


def test_a_folder_in_the_place_of_a_shard_is_a_missing_shard():
    files = [*listing({FILE: 1_000}), FileInfo(OTHER, 0, kind="dir")]
    (finding,) = check(sound(), files=files)
    assert (finding.code, finding.where) == ("shard.missing", OTHER)


def test_a_chunk_without_a_byte_range_is_told_once_for_all():
    (finding,) = check(
        metadata(
            tensor("w", (2,), ((0,), (1,)), ((1,), (1,))),
            tensor("b", (1,), ((0,), (1,))),
            BytesEntry("lr", None),
        ),
        files=[],
    )
    assert finding.code == "range.missing"
    assert finding.message == (
        "the metadata has no byte range for 3 chunks in 2 tensors and 1 other entry; "
        "the first is w at (0,)"
    )


@pytest.mark.parametrize(
    ("offset", "length"), [(-1, 100), (0, 0), (0, -5), (2**63 - 1, 100), (2**62, 2**62)]
)
def test_a_byte_range_that_no_file_can_hold_is_told(offset, length):
    (finding,) = check(one_tensor(ByteRange(FILE, offset, length)), files=listing({FILE: 0}))
    assert (finding.code, finding.where) == ("range.outside", FILE)
    assert f"{length:,} bytes from byte {offset:,} on" in finding.message


def test_byte_ranges_that_overlap_are_told_once_for_each_file():
    ranges = [ByteRange(FILE, 0, 400), ByteRange(FILE, 300, 400), ByteRange(FILE, 650, 350)]
    (finding,) = check(one_tensor(*ranges), files=listing({FILE: 1_000}))
    assert (finding.code, finding.where) == ("range.overlap", FILE)
    assert finding.message == (
        "2 byte ranges begin inside another; the first are those of w at (0,) and w at (1,)"
    )
    assert (finding.expected, finding.found) == ("bytes from 400 on", "bytes from 300 on")


def test_equal_and_nested_byte_ranges_overlap():
    for second in (ByteRange(FILE, 0, 1_000), ByteRange(FILE, 200, 10)):
        metadatas = one_tensor(ByteRange(FILE, 0, 1_000), second)
        (finding,) = check(metadatas, files=listing({FILE: 1_000}))
        assert finding.code == "range.overlap"


def test_byte_ranges_of_several_ranks_in_one_file_overlap_all_the_same():
    ranks = [one_tensor(ByteRange(FILE, 0, 100)), one_tensor(ByteRange(FILE, 50, 100))]
    (finding,) = check(*ranks, files=listing({FILE: 150}))
    assert finding.code == "range.overlap"


BOUNDS = st.tuples(st.integers(-1, 9), st.integers(-1, 5))


@settings(deadline=None)
@given(st.lists(BOUNDS, min_size=1, max_size=5), st.lists(st.integers(1, 4)), st.randoms())
def test_any_byte_ranges_are_counted_as_byte_by_byte(drawn, lengths, random):
    """Ranges at random, and ranges that follow each other, in order and not."""
    following = [*zip(accumulate(lengths, initial=0), lengths, strict=False)]
    shuffled = random.sample(following, len(following))
    for bounds in filter(None, (drawn, following, shuffled, [*following, drawn[0]])):
        held = Counter(n for start, length in bounds for n in range(start, start + length))
        expected = [] if len(held) == 10 else ["shard.trailing"]
        if max(held, default=0) >= 10:
            expected = ["shard.truncated"]
        if max(held.values(), default=0) > 1:
            expected = [*filter("shard.truncated".__eq__, expected), "range.overlap"]
        if any(start < 0 or length <= 0 for start, length in bounds):
            expected = ["range.outside"]
        ranges = [ByteRange(FILE, *place) for place in bounds]
        # Ranges as long as the elements would be those of safetensors.
        found = check(one_tensor(*ranges, dtype="complex128"), files=listing({FILE: 10}))
        assert [finding.code for finding in found] == expected, bounds


def test_a_byte_range_of_no_entry_is_told():
    stray = ("gone", (4,), ByteRange(FILE, 0, 100))
    part = metadata(*sound().tensors.values(), *sound().bytes_entries.values(), strays=[stray])
    (finding,) = check(part)
    assert (finding.code, finding.where) == ("range.stray", "gone")
    assert finding.message == (
        f"1 byte range belongs to no entry; the first is that of gone at (4,) in {FILE}"
    )


def test_a_byte_range_of_no_entry_may_not_lead_out_either():
    part = metadata(strays=[("gone", None, ByteRange("/etc/passwd", 0, 100))])
    assert [f.code for f in check(part, files=[])] == ["path.escape", "range.stray"]


def test_bytes_that_belong_to_no_entry_are_a_warning():
    (finding,) = check(sound(), files=listing({FILE: 1_000, OTHER: 1_234}))
    assert (finding.code, finding.where) == ("shard.trailing", OTHER)
    assert finding.severity is Severity.WARNING
    assert finding.message == "234 bytes after its last record belong to no entry"


def test_bytes_between_records_are_told_apart_from_those_after_them():
    part = one_tensor(ByteRange(FILE, 10, 40), ByteRange(FILE, 60, 40))
    (finding,) = check(part, files=listing({FILE: 101}))
    assert finding.message == (
        "1 byte after its last record and 20 bytes before or between its records belong to no entry"
    )


def test_an_empty_shard_file_that_nothing_names_is_a_remark():
    files = listing({FILE: 1_000, OTHER: 1_000, "__2_0.distcp": 0, "__3_0.distcp": 0})
    (finding,) = check(sound(), files=files)
    assert finding.code == "shard.empty"
    assert finding.severity is Severity.NOTE
    assert finding.where == "__2_0.distcp, __3_0.distcp"
    assert finding.message == "2 shard files of 0 bytes, from ranks that had nothing to write"


def test_a_shard_file_that_nothing_names_is_a_remark():
    files = listing({FILE: 1_000, OTHER: 1_000, "__2_0.distcp": 500})
    (finding,) = check(sound(), files=files)
    assert (finding.code, finding.where) == ("shard.orphan", "__2_0.distcp")
    assert finding.severity is Severity.NOTE
    assert "1 shard file with 500 bytes that no metadata names" in finding.message


def test_the_files_of_all_ranks_are_named_between_them():
    ranks = [one_tensor(ByteRange(FILE, 0, 100)), one_tensor(ByteRange(OTHER, 0, 100))]
    assert check(*ranks, files=listing({FILE: 100, OTHER: 100})) == []
    assert [f.code for f in check(ranks[0], files=listing({FILE: 100, OTHER: 100}))] == [
        "shard.orphan"
    ]


@pytest.mark.parametrize(
    ("paths", "n_wrong"),
    [
        ({"model.w": ("model", "w"), "a.0.lr": ("a", 0, "lr")}, 0),
        ({"model.w": ("model", "w"), "a.0.lr": ("a", 1, "lr")}, 1),
        ({"model.w": ("modem", "w"), "model.b": ("modem", "b")}, 2),
        ({"model.w": ("model",), "model.b": ("model", "b")}, 1),
        ({"model.w": ("module", "the", "w"), "model.b": ()}, 0),  # another planner's
        ({}, 0),
    ],
)
def test_a_key_path_that_contradicts_its_name_is_found(paths, n_wrong):
    found = [*check_key_paths([replace(sound(), planner_paths=paths)], "actor")]
    assert [one.code for one in found] == ["metadata.path"] * bool(n_wrong)
    for one in found:
        assert one.where == "actor/.metadata"
        entries = "entry" if n_wrong == 1 else "entries"
        assert one.message.startswith(f"the key paths of {n_wrong} {entries} in actor/.metadata")


def test_a_hundred_thousand_files_of_one_entry_each_are_one_pass():
    # torch can write one file for each entry; all tensors share one list of their names.
    n = 100_000
    names = [f"__0_{i}.distcp" for i in range(n)]
    tensors = {}
    for i in range(n):
        one, zero = array("q", [1]), array("q", [0])
        chunks = Chunks(1, zero, one, RangeColumns(array("i", [i]), zero, array("q", [100]), names))
        tensors[f"w{i}"] = TensorEntry(f"w{i}", "float32", (1,), chunks)
    part = Metadata(tensors, {}, names)
    assert check(part, files=listing(dict.fromkeys(names, 100))) == []
