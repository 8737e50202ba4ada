"""Headers of safetensors files: what the library reads is read, what it refuses is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors import SafetensorError
from safetensors import deserialize as read_by_the_library
from safetensors.numpy import save

from ckptctl.errors import RecordUnreadable
from ckptctl.formats.archive.safetensors import (
    MAX_HEADER,
    PREFIX,
    StoredTensor,
    header_length,
    parse_header,
    parse_index,
)


def header(**tensors: object) -> bytes:
    return json.dumps(tensors).encode()


def entry(dtype: object = "F32", shape: object = (2, 3), at: object = (0, 24)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": at}


def sharding(**offsets: list[int]) -> dict[str, str]:
    """What DCP's writer adds, as it writes it: JSON inside JSON."""
    places = {name: {"saved_offsets": at} for name, at in offsets.items()}
    return {"DCP_SHARDING_INFO": json.dumps(places), "DCP_VERSION": "1.0", "format": "pt"}


def test_a_file_of_the_library_is_read():
    data = save({"w": np.zeros((2, 3), np.float32), "b": np.ones(5, np.int64)}, {"by": "numpy"})
    length = header_length(data)
    b, w = parse_header(data[PREFIX : PREFIX + length])
    assert b == StoredTensor("b", "I64", (5,), (0,), 0, 40)
    assert w == StoredTensor("w", "F32", (2, 3), (0, 0), 40, 24)
    assert PREFIX + length + 64 == len(data)


def test_the_place_of_a_box_in_its_tensor_is_what_dcp_says():
    (w,) = parse_header(header(__metadata__=sharding(w=[4, 0]), w=entry()))
    assert (w.shape, w.offsets) == ((2, 3), (4, 0))


def test_a_file_without_tensors_and_tensors_without_elements_are_read():
    assert parse_header(b"{}") == ()
    (scalar, empty) = parse_header(
        header(s=entry(shape=(), at=(0, 4)), e=entry("F32", (0,), (4, 4)))
    )
    assert (scalar.shape, empty.n_bytes) == ((), 0)


def test_a_dtype_of_a_newer_library_is_not_refused():
    (w,) = parse_header(header(w=entry(dtype="F3")))
    assert w.n_bytes == 24


def test_half_bytes_are_counted():
    (w,) = parse_header(header(w=entry("F4", (2, 3), (0, 3))))
    assert w.n_bytes == 3


BROKEN = {
    "not JSON": b"{",
    "no object": b"[]",
    "not UTF-8": b'{"\xff": 1}',
    "a key twice": b'{"w": 1, "w": 1}',
    "very deep": b'{"w":' + b"[" * 100_000,
    "a fraction": header(w=entry(at=(0, 24.0))),
    "not a number": b'{"w": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 4]}}',
    "a number beyond all": b'{"w": {"dtype": "F32", "shape": [' + b"9" * 5_000 + b"]}}",
    "a tensor that is none": header(w=1),
    "fields missing": header(w={"dtype": "F32"}),
    "a field too many": header(w=entry() | {"offset": 0}),
    "a negative size": header(w=entry(shape=(-2, -3))),
    "a size beyond 64 bits": header(w=entry(shape=(2**64,))),
    "a truth for a size": header(w=entry(shape=(True, 6))),
    "a text for a shape": header(w=entry(shape="2")),
    "too many dimensions": header(w=entry(shape=(1,) * 1_000)),
    "a dtype that is no text": header(w=entry(dtype=3)),
    "ends before it begins": header(w=entry(at=(24, 0))),
    "three places": header(w=entry(at=(0, 12, 24))),
    "more bytes than elements": header(w=entry(at=(0, 25))),
    "fewer bytes than elements": header(w=entry(at=(0, 23))),
    "a gap": header(w=entry(), v=entry(at=(25, 49))),
    "a gap in front": header(w=entry(at=(1, 25))),
    "an overlap": header(w=entry(), v=entry(at=(23, 47))),
    "one place for two": header(w=entry(), v=entry()),
    "metadata that is no text": header(__metadata__={"a": 1}),
    "metadata that is no object": header(__metadata__=[]),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_header_that_says_what_cannot_be_is_refused(case):
    with pytest.raises(RecordUnreadable):
        parse_header(BROKEN[case])


@pytest.mark.parametrize("case", BROKEN)
def test_the_library_accepts_nothing_of_what_is_refused_that_has_one_meaning(case):
    # Refused here alone: what the library reads by ignoring a part of it.
    ours_alone = {"a key twice", "a field too many", "too many dimensions"}
    text = BROKEN[case]
    data = len(text).to_bytes(PREFIX, "little") + text + bytes(24)
    if case in ours_alone:
        return
    with pytest.raises(SafetensorError):
        read_by_the_library(data)


SHARDED = {
    "a tensor without a place": {"w": [0, 0]},
    "a place without a tensor": {"w": [0, 0], "b": [0], "gone": [0]},
    "other dimensions": {"w": [0], "b": [0]},
}


@pytest.mark.parametrize("case", SHARDED)
def test_places_that_do_not_go_with_the_tensors_are_refused(case):
    tensors = {"w": entry(), "b": entry(shape=(1,), at=(24, 28))}
    with pytest.raises(RecordUnreadable):
        parse_header(header(__metadata__=sharding(**SHARDED[case]), **tensors))


@pytest.mark.parametrize(
    "text", ["{", "[]", '{"w": 1}', '{"w": {}}', '{"w": {"saved_offsets": 1}}']
)
def test_places_that_are_no_places_are_refused(text):
    with pytest.raises(RecordUnreadable):
        parse_header(header(__metadata__={"DCP_SHARDING_INFO": text}, w=entry()))


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER + 1, 2**63, 2**64 - 1])
def test_the_length_of_a_header_is_bounded_before_anything_is_read(length):
    with pytest.raises(RecordUnreadable, match="bytes long"):
        header_length(length.to_bytes(PREFIX, "little"))


def test_a_file_too_short_for_a_length_is_refused():
    with pytest.raises(RecordUnreadable):
        header_length(b"\2\0\0")


def test_an_archive_in_front_of_the_header_is_told_for_what_it_is():
    with pytest.raises(RecordUnreadable, match="entries that are no tensors in front"):
        header_length(b"PK\3\4\0\0\0\0")


def test_an_index_names_a_file_for_each_tensor():
    text = b'{"metadata": {"total_size": 24}, "weight_map": {"w": "model.safetensors"}}'
    assert parse_index(text) == ({"w": "model.safetensors"}, 24)
    with_bool = b'{"metadata": {"total_size": 24.125}, "weight_map": {}}'
    assert parse_index(with_bool) == ({}, None)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b'{"weight_map": []}', b'{"weight_map": {"w": 1}}', b"\xff"]
)
def test_a_damaged_index_is_refused(text):
    with pytest.raises(RecordUnreadable):
        parse_index(text)
