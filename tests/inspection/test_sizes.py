"""Byte ranges against the elements that they are to hold, by arithmetic alone."""

from __future__ import annotations

from made_parts import listing, metadata, tensor

from ckptctl.findings import Finding, Verdict, verdict_of
from ckptctl.inspection.presence import check_presence, check_sizes, holds_safetensors
from ckptctl.model import ByteRange, BytesEntry, TensorEntry
from ckptctl.records.ranges import Ranges

FILE = "__0_0.distcp"


def check(*entries: TensorEntry | BytesEntry) -> list[Finding]:
    return list(check_sizes(Ranges([metadata(*entries)])))


def vector(fqn: str, n: int, *places: ByteRange, dtype: str = "float32") -> TensorEntry:
    """A tensor of `n` elements for each of its chunks."""
    boxes = [((i * n,), (n,)) for i in range(len(places))]
    return tensor(fqn, (n * len(places),), *boxes, ranges=places, dtype=dtype)


def test_records_longer_than_their_elements_draw_no_finding():
    assert check(vector("w", 100, ByteRange(FILE, 0, 1_900))) == []
    assert check(vector("empty", 0, ByteRange(FILE, 0, 1_500))) == []
    assert check(tensor("step", (), ((), ()), ranges=[ByteRange(FILE, 0, 1_504)])) == []
    assert check(BytesEntry("lr", ByteRange(FILE, 0, 1_200))) == []
    assert check() == []


def test_a_byte_range_shorter_than_its_elements_contradicts_the_metadata():
    ranges = [ByteRange(FILE, 0, 1_900), ByteRange(FILE, 1_900, 399)]
    (finding,) = check(vector("w", 100, *ranges))
    assert (finding.code, finding.where) == ("record.mismatch", "w")
    assert finding.message == (
        "1 chunk of 2 cannot fit into the byte range in the metadata; the first is at (100,)"
    )
    assert (finding.expected, finding.found) == ("more than 400 bytes", "399 bytes")


def test_the_size_of_the_dtype_counts():
    place = ByteRange(FILE, 0, 1_900)
    assert check(vector("w", 1_000, place, dtype="int8")) == []
    assert [f.code for f in check(vector("w", 1_000, place, dtype="float64"))] == [
        "record.mismatch"
    ]


def test_a_dtype_of_a_newer_torch_is_not_refused():
    assert check(vector("w", 100, ByteRange(FILE, 0, 1_900), dtype="float3_e1m1")) == []
    assert [
        f.code for f in check(vector("w", 2_000, ByteRange(FILE, 0, 1_900), dtype="float3_e1m1"))
    ] == ["record.mismatch"]


def test_more_elements_than_any_memory_are_no_trouble():
    huge = tensor("w", (2**62, 2**62), ((0, 0), (2**62, 2**62)), ranges=[ByteRange(FILE, 0, 1_900)])
    assert [f.code for f in check(huge)] == ["record.mismatch"]


def test_compressed_records_may_be_of_any_length():
    assert check(vector("w", 100, ByteRange(FILE, 0, 50, ("stream.zstd/1",)))) == []


def test_a_chunk_without_a_byte_range_is_not_measured():
    other = vector("v", 1, ByteRange(FILE, 0, 1_500))
    assert check(tensor("w", (100,), ((0,), (100,))), other) == []


# As torch 2.13 writes it: `lr` first, then all tensors after one header, at one offset.
SAFETENSORS = (
    BytesEntry("lr", ByteRange(FILE, 0, 1_261)),
    vector("w", 32, ByteRange(FILE, 1_261, 128)),
    vector("b", 3, ByteRange(FILE, 1_261, 12)),
    vector("empty", 0, ByteRange(FILE, 1_261, 0)),
)


def test_tensors_in_safetensors_form_are_recognised_and_never_complete():
    ranges = Ranges([metadata(*SAFETENSORS)])
    assert holds_safetensors(ranges)
    (finding,) = check_sizes(ranges)
    assert finding.code == "format.unsupported"
    assert verdict_of([finding]) is Verdict.UNVERIFIABLE
    assert "torch's own reader cannot load them" in finding.message


def test_the_byte_ranges_of_safetensors_overlap_and_that_is_not_told_as_well():
    ranges = Ranges([metadata(*SAFETENSORS)])
    assert list(check_presence(ranges, listing({FILE: 2_021}))) == []
    assert [f.code for f in check_presence(ranges, listing({FILE: 1_300}))] == ["shard.truncated"]


def test_one_record_longer_than_its_elements_is_enough_to_know_torch_save():
    real = vector("v", 3, ByteRange(FILE, 1_389, 1_516))
    assert not holds_safetensors(Ranges([metadata(*SAFETENSORS, real)]))
    assert not holds_safetensors(Ranges([metadata(BytesEntry("lr", ByteRange(FILE, 0, 9)))]))
