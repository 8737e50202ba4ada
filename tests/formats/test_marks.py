"""Marks are read strictly, and only a mark that names another one lifts it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from command_line import schema
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from ckptctl.errors import OwnFileUnreadable, OwnFileUnsupported
from ckptctl.formats.own.files import canonical, digest_of
from ckptctl.formats.own.marks import (
    Mark,
    MarkKind,
    in_force,
    mark_bytes,
    metadata_digest,
    parse_mark,
)

MARK = Mark(
    id="20261121T031244Z-rejected-0011223344556677",
    word=MarkKind.REJECTED,
    by="ann@node7",
    at="2026-11-21T03:12:44Z",
    reason="the loss jumped by 0.4 \u2192 1.2",
    url="/ckpt/run/step_1200",
    number=1200,
    metadata="ab" * 32,
    evidence=("https://runs.example/1234",),
)


def said(word: MarkKind, name: str, at: str = "10:00", lifts: tuple[str, ...] = ()) -> Mark:
    return replace(MARK, word=word, id=name, at=f"2026-11-21T{at}:00Z", lifts=lifts)


@pytest.mark.parametrize("mark", [MARK, replace(MARK, number=None, metadata=None, reason="")])
def test_a_mark_comes_back_as_it_was_written_in_one_line(mark):
    data = mark_bytes(mark)
    assert parse_mark(data) == mark
    assert data.count(b"\n") == 1
    Draft202012Validator(schema("mark")).validate(json.loads(data))


@given(st.integers(min_value=0), st.integers(1, 255))
def test_no_changed_byte_gives_another_mark(at, flip):
    data = bytearray(mark_bytes(MARK))
    data[at % len(data)] ^= flip
    try:
        assert parse_mark(bytes(data)) == MARK
    except OwnFileUnreadable:
        return


@pytest.mark.parametrize(
    "change",
    [{"word": "doubted"}, {"word": []}, {"extra": 1}, {"step": {}}, {"lifts": "x"}, {"by": 1}],
    ids=str,
)
def test_a_document_that_is_no_mark_is_refused(change):
    document = {**json.loads(mark_bytes(MARK)), **change}
    del document["digest"]
    with pytest.raises(OwnFileUnreadable):
        parse_mark(canonical({**document, "digest": digest_of(document)}))


def test_a_mark_of_a_newer_version_is_told_from_a_damaged_one():
    data = mark_bytes(MARK).replace(b"ckptctl.mark/1", b"ckptctl.mark/2")
    with pytest.raises(OwnFileUnsupported):
        parse_mark(data)


def test_an_acceptance_lifts_the_rejections_that_it_names_and_no_other():
    one, two = said(MarkKind.REJECTED, "one"), said(MarkKind.REJECTED, "two")
    accepted = said(MarkKind.ACCEPTED, "three", "09:00", lifts=("one",))
    assert in_force([one, two, accepted]) == (accepted, two)


def test_the_order_of_clocks_decides_nothing():
    rejected = said(MarkKind.REJECTED, "one", "12:00")
    accepted = said(MarkKind.ACCEPTED, "two", "08:00", lifts=("one",))
    assert in_force([rejected, accepted]) == (accepted,)
    later = said(MarkKind.ACCEPTED, "two", "14:00")
    assert rejected in in_force([rejected, later])


@pytest.mark.parametrize(
    ("word", "lifter"),
    [
        (MarkKind.PINNED, MarkKind.ACCEPTED),
        (MarkKind.REJECTED, MarkKind.UNPINNED),
        (MarkKind.REJECTED, MarkKind.PINNED),
    ],
)
def test_a_word_lifts_only_what_it_takes_back(word, lifter):
    one = said(word, "one")
    assert one in in_force([one, said(lifter, "two", lifts=("one",))])


def test_a_mark_applies_to_one_save_of_one_step():
    assert MARK.applies_to(1200, "ab" * 32)
    assert not MARK.applies_to(1200, "cd" * 32)
    assert not MARK.applies_to(1300, "ab" * 32)
    assert not MARK.applies_to(1200, None)


def test_one_digest_stands_for_all_metadata_files_in_any_order():
    one, two = ("pp0/.metadata", "ab" * 32), ("pp1/.metadata", "cd" * 32)
    assert metadata_digest([one, two]) == metadata_digest([two, one])
    assert metadata_digest([one]) != metadata_digest([two])
    assert metadata_digest([]) is None
