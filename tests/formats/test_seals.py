"""A seal that was changed in any way is refused."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from itertools import pairwise

import pytest
import xxhash
from command_line import schema
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from ckptctl.errors import OwnFileUnreadable, OwnFileUnsupported
from ckptctl.formats import digests
from ckptctl.formats.digests import BLOCK_BYTES, Algorithm, Digester, Digests
from ckptctl.formats.own.files import canonical, digest_of
from ckptctl.formats.own.seals import (
    Identity,
    Seal,
    SealedFile,
    Stored,
    is_authentic,
    parse_seal,
    seal_bytes,
)

KEY = b"a key of thirty-two bytes or so."
SHA = "ab" * 32
XXH = "cd" * 16


def made(algorithm: Algorithm = Algorithm.XXH3, **changes: object) -> Seal:
    one = XXH if algorithm is Algorithm.XXH3 else SHA
    seal = Seal(
        algorithm,
        Identity(
            1200,
            "step_1200",
            "dcp",
            "content",
            {".metadata": SHA},
            ("1f0c",),
            4,
            ("model", "step"),
            10**12,
        ),
        (
            SealedFile(".metadata", 10, 1_767_255_600_000, Digests(one)),
            SealedFile(
                "__0_0.distcp",
                BLOCK_BYTES + 1,
                None,
                Digests(one, (one, one)),
                Stored("crc32", "b1fc4bbc", True, "7a08b07e-2", "3sL4kqtJlcpXroDTDmJ+rmSpXd3"),
            ),
            SealedFile("na\u00efve \udcff.pt", 0, 0, Digests(one)),
        ),
        "2026-11-21T03:12:44Z",
        "ckptctl 0.1.0",
    )
    return replace(seal, **changes)


def changed(data: bytes, change, *, resealed: bool = True) -> bytes:
    """The seal with its JSON changed, by one who knows how its digest is made, or by chance."""
    document = json.loads(data)
    change(document)
    if resealed:
        rest = {k: v for k, v in document.items() if k not in ("digest", "hmac", "signature")}
        document["digest"] = digest_of(rest)
    return canonical(document)


def test_a_seal_comes_back_as_it_was_written():
    assert parse_seal(seal_bytes(made(), None)) == made()


def test_a_seal_with_a_key_comes_back_and_is_known_by_its_key_alone():
    seal = parse_seal(seal_bytes(made(Algorithm.SHA256), KEY))
    assert replace(seal, hmac=None) == made(Algorithm.SHA256)
    assert is_authentic(seal, KEY)
    assert not is_authentic(seal, KEY[:-1])
    assert not is_authentic(made(), KEY)


@pytest.mark.parametrize("key", [None, KEY])
def test_a_seal_is_as_the_schema_says(key):
    algorithm = Algorithm.SHA256 if key else Algorithm.XXH3
    validator = Draft202012Validator(schema("seal"))
    validator.validate(json.loads(seal_bytes(made(algorithm), key)))


def test_no_value_of_a_signed_seal_can_be_changed_by_who_has_no_key():
    data = seal_bytes(made(Algorithm.SHA256), KEY)

    def another_number(document):
        document["step"]["number"] = 1300

    assert not is_authentic(parse_seal(changed(data, another_number)), KEY)


def test_a_seal_that_was_laid_out_for_people_is_the_same_seal():
    data = json.dumps(json.loads(seal_bytes(made(), None)), indent=4).encode()
    assert parse_seal(data) == made()


@pytest.mark.parametrize("cut", [0, 1, 17, 200, -3, -2])
def test_a_seal_that_was_cut_short_is_none(cut):
    with pytest.raises(OwnFileUnreadable, match="JSON"):
        parse_seal(seal_bytes(made(), None)[:cut])


@given(st.integers(min_value=0), st.integers(1, 255))
def test_no_changed_byte_gives_another_seal(at, flip):
    data = bytearray(seal_bytes(made(), None))
    data[at % len(data)] ^= flip
    try:
        assert parse_seal(bytes(data)) == made()
    except OwnFileUnreadable:
        return


@given(st.binary(max_size=300))
def test_bytes_that_are_no_seal_are_refused_and_nothing_else_happens(data):
    with pytest.raises(OwnFileUnreadable):
        parse_seal(data)


def put(path: str, value: object):
    """A change that sets the field at `path` (`files.0.size`)."""
    *folders, name = path.split(".")

    def change(document):
        inside = document
        for folder in folders:
            inside = inside[int(folder) if folder.isdigit() else folder]
        inside[int(name) if name.isdigit() else name] = value

    return change


def drop(path: str):
    *folders, name = path.split(".")

    def change(document):
        inside = document
        for folder in folders:
            inside = inside[int(folder) if folder.isdigit() else folder]
        del inside[name]

    return change


def twice(document):
    document["files"].append(document["files"][0])


def backwards(document):
    document["files"].reverse()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (put("extra", 1), "has other fields"),
        (put("step.extra", 1), "has other fields"),
        (put("files.0.extra", 1), "has other fields"),
        (drop("sequence"), "has other fields"),
        (drop("tool"), "missing required field `tool`"),
        (drop("step.metadata"), "missing required field `metadata`"),
        (drop("files.1.digests.whole"), "missing required field `whole`"),
        (put("files.0.size", -1), "`int` >= 0"),
        (put("files.0.size", True), "Expected `int`"),
        (put("files.0.size", "10"), "Expected `int`"),
        (put("files.0.size", BLOCK_BYTES + 1), "blocks, not 2"),
        (put("files.1.digests.blocks", []), "blocks, not 2"),
        (put("files.0.digests.whole", "cd" * 15), "hexadecimal"),
        (put("files.0.digests.whole", "CD" * 16), "regex"),
        (put("files.0.path", ["a"]), "Expected `str`"),
        (put("files", {}), "Expected `array`"),
        (put("files.0", 7), "Expected `object`"),
        (put("files.1.stored", []), "Expected `object"),
        (put("files.1.stored.extra", 1), "has other fields"),
        (drop("files.1.stored.etag"), "has other fields"),
        (put("files.1.stored.checksum", "B1FC4BBC"), "regex"),
        (put("files.1.stored.compared", 1), "Expected `bool`"),
        (put("step", []), "Expected `object`"),
        (put("step.metadata", {".metadata": "00"}), "regex"),
        (put("step.number", 1.0), "1.0 is not a number that is allowed here"),
        (put("sequence", 2**54), "`int` <= "),
        (twice, "there twice"),
        (backwards, "not in order"),
        (put("schema", "ckptctl.mark/1"), "does not say that it is"),
        (put("schema", None), "does not say that it is"),
        (put("hmac", SHA), "have neither HMAC nor signature"),
    ],
)
def test_a_document_that_is_no_seal_says_why(change, why):
    with pytest.raises(OwnFileUnreadable, match=why):
        parse_seal(changed(seal_bytes(made(), None), change))


def test_a_seal_that_lost_its_hmac_is_one_without_a_key():
    seal = parse_seal(changed(seal_bytes(made(Algorithm.SHA256), KEY), drop("hmac")))
    assert (seal.kind, is_authentic(seal, KEY)) == ("sha256", False)


@pytest.mark.parametrize(
    "change",
    [
        put("schema", "ckptctl.seal/2"),
        put("algorithm", "crc32"),
        put("algorithm", "none"),
        put("algorithm", None),
        put("block_bytes", 1 << 20),
    ],
)
def test_another_version_or_a_weaker_algorithm_is_not_supported(change):
    with pytest.raises(OwnFileUnsupported):
        parse_seal(changed(seal_bytes(made(), None), change))


def test_a_seal_that_was_changed_and_not_resealed_contradicts_itself():
    data = changed(seal_bytes(made(), None), put("files.0.size", 11), resealed=False)
    with pytest.raises(OwnFileUnreadable, match="its own digest"):
        parse_seal(data)


def test_a_field_that_is_there_twice_is_refused():
    data = seal_bytes(made(), None).replace(b'{"algorithm":', b'{"algorithm":"x","algorithm":')
    with pytest.raises(OwnFileUnreadable, match="twice"):
        parse_seal(data)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-32-be", "utf-8-sig"])
def test_a_seal_has_one_encoding(encoding):
    data = seal_bytes(made(), None).decode().encode(encoding)
    with pytest.raises(OwnFileUnreadable, match="not JSON"):
        parse_seal(data)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[[],[]" + b",[]" * 2_000_000 + b"]",
        b"1" * 100_000,
        b'{"schema":NaN}',
        b'{"schema":1e999}',
        b'"\\ud800"',
        b"\xff\xfe{}",
    ],
    ids=["deep lists", "deep objects", "many lists", "digits", "nan", "inf", "surrogate", "utf-16"],
)
def test_hostile_json_is_refused(data):
    with pytest.raises(OwnFileUnreadable):
        parse_seal(data)


# Digests.


def whole_and_blocks(data: bytes, block: int, new) -> Digests:
    blocks = [new(data[at : at + block]).hexdigest() for at in range(0, len(data), block)]
    return Digests(new(data).hexdigest(), tuple(blocks) if len(data) > block else ())


@pytest.mark.parametrize(
    ("algorithm", "new"),
    [(Algorithm.XXH3, xxhash.xxh3_128), (Algorithm.SHA256, hashlib.sha256)],
)
@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_pieces_of_any_length_come_to_the_same_digests(algorithm, new, data, cuts):
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "BLOCK_BYTES", 16)
        digester = Digester(algorithm)
        for start, end in pairwise(edges):
            digester.update(data[start:end])
        assert digester.digests() == whole_and_blocks(data, 16, new)


@pytest.mark.parametrize(("size", "expected"), [(0, 1), (1, 1), (64 << 20, 1), ((64 << 20) + 1, 2)])
def test_a_file_has_a_block_for_each_64_mib(size, expected):
    assert digests.n_blocks(size) == expected
