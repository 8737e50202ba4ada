"""The marks of steps and the map of ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_results import VERDICTS, report, short, state

from ckptctl.cli.pictures import (
    LACKING,
    MAX_CELLS,
    RANK_MARKS,
    STEP_MARKS,
    VERIFIED,
    map_of_ranks,
    rank_states,
    step_state,
)
from ckptctl.findings import CODES, Finding, Verdict
from ckptctl.model import Level, WorldSize


def test_every_verdict_has_a_mark_of_its_own():
    assert set(STEP_MARKS) == {verdict.value for verdict in Verdict} | {LACKING, VERIFIED}
    for marks in (STEP_MARKS, RANK_MARKS):
        for look in ("glyph", "ascii", "word"):
            seen = [getattr(mark, look) for mark in marks.values()]
            assert len(set(seen)) == len(seen), look
        assert all(mark.ascii.isascii() for mark in marks.values())


@pytest.mark.parametrize(("verdict", "finding"), VERDICTS.items())
def test_the_state_of_a_step_is_its_verdict(verdict, finding):
    assert step_state(report(1, finding)) == verdict.value


def test_a_whole_step_that_lacks_what_was_asked_for_has_a_state_of_its_own():
    assert step_state(report(1, exit_code=23)) == LACKING


def test_each_rank_is_as_bad_as_its_worst_file():
    findings = [
        short(1),
        Finding("record.framing", "__1_1.distcp", "1 record is not well-formed"),
        Finding("shard.missing", "__2_0.distcp", "3 chunks cannot be read"),
        Finding("shard.empty", "__3_0.distcp", "0 bytes"),
        Finding("shard.orphan", "__4_0.distcp", "no metadata names it"),
        Finding("shard.trailing", "__5_0.distcp", "12 bytes after its last record"),
    ]
    made = report(1, *findings, ranks=(("", (0, 1, 3, 4, 5)),), world_size=WorldSize(7, "x"))
    assert rank_states(made) == {
        "": ["present", "damaged", "missing", "empty", "extra", "long", "none"]
    }


def test_the_map_has_a_glyph_for_each_rank_and_counts_the_states():
    title, glyphs, legend = (each.text for each in map_of_ranks(report(1, short(3)), unicode=True))
    assert title == "ranks 0 to 7"
    assert glyphs == "  □□□!□□□□"
    assert legend == "  ! 1 truncated   □ 7 present, not checked"


def test_many_ranks_share_glyphs_and_the_worst_of_them_shows():
    made = report(1, short(500), n_ranks=512)
    title, glyphs, legend = (each.text for each in map_of_ranks(made, unicode=False))
    assert title == "ranks 0 to 511; 8 to a glyph, the worst shows"
    assert len(glyphs.strip()) == MAX_CELLS
    assert glyphs.count("!") == 1
    assert legend == "  ! 1 truncated   p 511 present, not checked"


def test_each_part_of_a_step_has_a_row():
    lost = Finding("shard.missing", "pp1/__0_0.distcp", "3 chunks cannot be read")
    made = report(1, lost, ranks=(("pp0", (0, 1)), ("pp1", (1,))), parts=("pp0", "pp1"))
    lines = [each.text for each in map_of_ranks(made, unicode=True)]
    assert lines[1:3] == ["  pp0  □□", "  pp1  ○□"]


def test_a_part_that_no_rank_wrote_has_no_row():
    made = report(1, ranks=(("", ()), ("sharded", (0, 1))), parts=("", "sharded"))
    assert [each.text for each in map_of_ranks(made, unicode=True)][1:2] == ["  sharded  □□"]


PARTS = st.sampled_from(["", "pp0", "model", "sharded"])
PLACES = st.sampled_from(["", ".metadata", "__0_0.distcp", "pp1/__7_0.distcp", "model_2.pt", "x/y"])


@given(
    st.dictionaries(PARTS, st.sets(st.integers(0, 200), max_size=5)),
    st.none() | st.integers(0, 300),
    st.lists(st.tuples(st.sampled_from(sorted(CODES)), PLACES), max_size=4),
    st.booleans(),
)
def test_the_pictures_of_any_step_can_be_drawn(ranks, size, found, unicode):
    made = report(
        1,
        *(Finding(code, where, "a message") for code, where in found),
        ranks=tuple((part, tuple(sorted(held))) for part, held in ranks.items()),
        world_size=None if size is None else WorldSize(size, "x"),
        parts=tuple(ranks),
    )
    assert all(states for states in rank_states(made).values())
    assert all(each.width < 100 for each in map_of_ranks(made, unicode=unicode))


def test_a_step_of_one_rank_needs_no_map():
    assert map_of_ranks(report(1, n_ranks=1), unicode=True) == []
    assert map_of_ranks(report(1, ranks=(), world_size=None), unicode=True) == []


def test_a_shard_file_with_an_absurd_rank_does_not_make_an_absurd_map():
    made = report(1, ranks=(("", (0, 999_999_999)),))
    lines = map_of_ranks(made, unicode=True)
    assert all(each.width < 100 for each in lines)


@pytest.mark.parametrize(
    ("changes", "state"),
    [
        ({"level": Level.LISTING}, "present"),
        ({"level": Level.STRUCTURE}, "framed"),
        ({"level": Level.CONTENT}, "verified"),
        ({"level": Level.CONTENT, "verdict": Verdict.UNVERIFIABLE}, "framed"),
        # The level was asked for, and the storage did not answer.
        ({"level": Level.CONTENT, "verdict": Verdict.UNKNOWN}, "present"),
    ],
)
def test_a_shard_that_nobody_compared_is_never_verified(changes, state):
    assert rank_states(report(1, n_ranks=2, **changes)) == {"": [state, state]}


def test_a_shard_that_the_storage_denies_is_not_readable():
    denied = Finding("step.denied", "__1_0.distcp", "permission denied")
    made = report(1, denied, n_ranks=2, level=Level.CONTENT)
    assert rank_states(made) == {"": ["present", "unreadable"]}


@pytest.mark.parametrize(
    "code", ["record.no-crc", "record.transformed", "format.no-checksums", "record.unverifiable"]
)
def test_records_without_checksums_are_not_verified_at_any_level(code):
    made = report(1, Finding(code, "", "nothing to compare with"), level=Level.CONTENT, n_ranks=2)
    assert rank_states(made) == {"": ["framed", "framed"]}


def test_a_step_is_verified_only_where_every_byte_was():
    assert step_state(report(1, level=Level.CONTENT)) == VERIFIED
    assert step_state(report(1, level=Level.STRUCTURE)) == "complete"
    part = report(1, level=Level.CONTENT, bytes_in_records=10, bytes_proven=9)
    assert step_state(part) == "complete"


def test_a_step_of_weights_alone_is_never_shown_as_a_good_one():
    weights = report(1, state=state("model", "step"), level=Level.CONTENT)
    assert step_state(weights) == LACKING
    assert STEP_MARKS[LACKING].style != "good"
