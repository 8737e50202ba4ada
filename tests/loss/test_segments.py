"""Segments of a log, and the rows of each resume."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_losses import row, rows
from msgspec.structs import replace

from ckptctl.logs.rows import LogPosition, Marker
from ckptctl.loss import segments as segments_module
from ckptctl.loss.resumes import ResumePoint, resume_at, resumes
from ckptctl.loss.segments import Boundary, Splitter, log_interval, split


def spans(items):
    return [
        (segment.first_step, segment.last_step, segment.boundary.value)
        for segment in split(items).segments
    ]


def marker(step=None, *, fresh=False):
    return Marker(LogPosition("train.log", 1), "loaded", step=step, fresh=fresh)


def test_a_step_that_goes_back_begins_a_segment():
    assert spans([*rows(1, 9), *rows(6, 12)]) == [(1, 9, "start"), (6, 12, "step")]


def test_a_marker_begins_a_segment_even_where_the_steps_go_on():
    assert spans([*rows(1, 9), marker(9), *rows(10, 12)]) == [(1, 9, "start"), (10, 12, "marker")]


def test_a_file_begins_a_segment():
    assert spans([*rows(1, 9), *rows(10, 12, file="b.log")]) == [(1, 9, "start"), (10, 12, "file")]


def test_of_several_lines_that_announce_one_start_the_one_that_names_a_step_counts():
    (_, segment) = split([*rows(1, 9), marker(8), marker(), *rows(9, 12)]).segments
    assert segment.marker == marker(8)


def test_one_step_logged_twice_is_a_resume():
    assert spans([*rows(1, 9), *rows(9, 12)]) == [(1, 9, "start"), (9, 12, "step")]


def test_rows_of_several_ranks_in_one_log_are_one_segment():
    items = [copy for each in rows(1, 20) for copy in (each, each, each)]
    (segment,) = split(items).segments
    assert [each.step for each in segment.rows] == list(range(1, 21))


def test_rows_of_one_step_with_different_values_become_one():
    whole = row(1, 3.0)
    parts = [replace(whole, lr=None), replace(whole, loss=None)]
    (segment,) = split(parts).segments
    assert segment.rows == (whole,)


def test_what_is_kept_of_a_segment_is_bounded_and_keeps_both_ends(monkeypatch):
    monkeypatch.setattr(segments_module, "KEEP_FIRST", 10)
    monkeypatch.setattr(segments_module, "KEEP_LAST", 20)
    (segment,) = split(rows(1, 1000)).segments
    assert [each.step for each in segment.rows] == [*range(1, 11), *range(981, 1001)]
    assert segment.n_rows == 1000


def test_the_neighbours_of_a_step_that_was_asked_for_are_kept(monkeypatch):
    monkeypatch.setattr(segments_module, "KEEP_FIRST", 10)
    monkeypatch.setattr(segments_module, "KEEP_LAST", 20)
    monkeypatch.setattr(segments_module, "_AROUND", 5)
    (segment,) = split(rows(1, 1000), around=500).segments
    assert [each.step for each in segment.rows] == [
        *range(1, 11),
        *range(495, 506),
        *range(981, 1001),
    ]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=80))
def test_within_a_segment_steps_rise_and_no_row_with_a_new_step_is_lost(steps):
    parts = split(row(step, 3.0, line=i) for i, step in enumerate(steps))
    for segment in parts.segments:
        own = [each.step for each in segment.rows]
        assert own == sorted(set(own))
    if parts.n_segments == len(parts.segments):
        assert {each.step for segment in parts.segments for each in segment.rows} == set(steps)


def test_a_log_can_be_checked_while_it_is_being_read():
    splitter = Splitter()
    for each in [*rows(1, 9), *rows(6, 7)]:
        splitter.feed(each)
    assert [segment.n_rows for segment in splitter.split().segments] == [9, 2]
    splitter.feed(row(8, 3.0))
    assert [segment.n_rows for segment in splitter.split().segments] == [9, 3]


def test_two_runs_in_one_log_are_recognised():
    a, b = rows(1, 20), rows(1001, 1020)
    items = [each for pair in zip(a, b, strict=True) for each in pair]
    assert split(items).interleaved
    assert not split([*rows(1, 50), *rows(30, 80), *rows(70, 90)]).interleaved


def test_the_interval_is_that_of_most_rows():
    assert log_interval(rows(1, 50)[::10]) == 10
    assert log_interval(rows(1, 1)) == 1


# Resumes.


def test_rows_before_twice_and_after_are_separated():
    (resume,) = resumes(split([*rows(1, 9), *rows(6, 12)]))
    assert [each.step for each in resume.before] == [1, 2, 3, 4, 5]
    assert [each.step for each in resume.overwritten] == [6, 7, 8, 9]
    assert resume.first_step == 6


def test_a_job_that_dies_twice_is_compared_with_the_segment_that_made_the_checkpoint():
    bad = rows(6, 8, seed=2)
    first, second = resumes(split([*rows(1, 9), *bad, marker(5), *rows(6, 12)]))
    assert first.overwritten == second.overwritten
    assert [each.step for each in second.before] == [1, 2, 3, 4, 5]
    assert second.number == 2


def test_a_short_segment_is_filled_up_with_those_that_it_came_from():
    _, second = resumes(split([*rows(1, 50), marker(50), *rows(51, 55), marker(55), *rows(56, 60)]))
    assert [each.step for each in second.before] == list(range(1, 56))
    assert second.overwritten == ()


def test_a_job_that_started_from_the_beginning_did_not_resume():
    (resume,) = resumes(split([*rows(1, 50), *rows(1, 20, attempt=2)]))
    assert resume.restarted


def test_a_second_resume_from_one_checkpoint_is_no_fresh_start():
    (resume,) = resumes(split([*rows(51, 58), marker(50), *rows(51, 60, attempt=2)]))
    assert not resume.restarted
    assert (resume.before, resume.overwritten) == ((), ())


def test_a_marker_gives_the_resume_point():
    (resume,) = resumes(split([*rows(1, 9), marker(5), *rows(6, 12)]))
    assert resume.resume_point == ResumePoint(5, "log")


def test_a_log_without_a_trace_of_the_resume_is_divided_at_the_named_step():
    resume = resume_at(split(rows(1, 100)), ResumePoint(60, "asked"))
    assert resume.boundary is Boundary.ASKED
    assert resume.before[-1].step == 60
    assert resume.first_step == 61


@pytest.mark.parametrize("source", ["asked", "report"])
@pytest.mark.parametrize("step", [40, 70])
def test_the_claim_is_about_the_newest_segment_even_where_an_older_one_fits(step, source):
    parts = split([*rows(1, 60), *rows(41, 80), *rows(71, 90)])
    assert resume_at(parts, ResumePoint(step, source)).number == 2


def test_the_newest_log_is_never_divided_at_the_claim():
    parts = split([*rows(1, 60), *rows(61, 200, file="new.log")])
    assert resume_at(parts, ResumePoint(150, "asked")).first_step == 61


def test_a_segment_is_divided_only_where_no_earlier_one_came_near_the_claim():
    items = [*rows(1, 60), *rows(41, 200)]
    assert resume_at(split(items), ResumePoint(150, "asked")).boundary is Boundary.ASKED
    # The job that ended after step 60 may have saved step 70, and lost its last rows.
    assert resume_at(split(items), ResumePoint(70, "asked")).first_step == 41


# Copies.


@pytest.mark.parametrize("first", [1, 5, 9])
def test_rows_that_are_written_again_with_their_times_are_no_resume(first):
    whole = rows(1, 12)
    items = [*whole[:9], *whole[first - 1 : 9], *whole[9:]]
    parts = split(items)
    assert parts.n_segments == 1
    assert parts.segments[0].rows == tuple(whole)
    assert parts.n_copies == max(0, 9 - first)  # the last row again is one of several ranks


def test_copies_of_an_older_segment_do_not_end_the_newer_one():
    old, new = rows(1, 9), rows(6, 20)
    items = [*old, marker(5), *new[:8], marker(5), *old[6:9], *new[8:]]
    assert spans(items) == [(1, 9, "start"), (6, 20, "marker")]


def test_equal_rows_at_another_time_are_a_resume():
    assert split([*rows(1, 9), *rows(6, 12)]).n_copies == 0


def test_a_report_that_fits_no_segment_means_the_last_one():
    resume = resume_at(split([*rows(1, 60), *rows(41, 80)]), ResumePoint(50, "report"))
    assert resume.first_step == 41


def test_nothing_logged_after_a_resume_point_is_no_resume():
    assert resume_at(split(rows(1, 60)), ResumePoint(60, "report")) is None


def test_a_report_divides_a_log_only_where_the_clock_shows_that_the_resume_lies_there():
    parts = split(rows(1, 100))
    assert resume_at(parts, ResumePoint(60, "report")) is None
    assert resume_at(parts, ResumePoint(60, "report", at_s=1_000.0)) is None
    assert resume_at(parts, ResumePoint(60, "report", at_s=1_060.5)).first_step == 61


def test_a_log_is_not_divided_where_that_is_not_allowed():
    assert resume_at(split(rows(1, 100)), ResumePoint(60, "asked"), may_divide=False) is None


# What is no resume, or the same one.


def announced(line, step):
    return Marker(LogPosition("train.log", line), f"rank resumed at step {step}", step)


def test_a_resume_that_a_second_rank_announces_later_is_one_resume():
    items = [*rows(1, 41), announced(42, 32), *rows(33, 35), announced(46, 32), *rows(36, 64)]
    assert [(each.first_step, each.last_step) for each in split(items).segments] == [
        (1, 41),
        (33, 64),
    ]


def test_the_same_checkpoint_loaded_again_is_another_resume():
    again, last = rows(33, 40, attempt=2), rows(33, 64, attempt=3)
    items = [*rows(1, 41), announced(42, 32), *again, announced(51, 32), *last]
    assert [each.first_step for each in split(items).segments] == [1, 33, 33]


def of_file(name, first, last):
    return [replace(each, position=LogPosition(name, each.step)) for each in rows(first, last)]


def test_a_rotated_log_that_continues_is_the_same_attempt():
    items = [*of_file("train.log.1", 1, 100), *of_file("train.log", 101, 140)]
    assert len(split(items).segments) == 1
    again = [*of_file("train.log.1", 1, 100), *of_file("train.log", 91, 140)]
    assert [each.first_step for each in split(again).segments] == [1, 91]
    for names in (
        ("first.log", "second.log"),
        ("run-1", "run-2"),
        ("slurm-71.out", "slurm-72.out"),
    ):
        other = [*of_file(names[0], 1, 100), *of_file(names[1], 101, 140)]
        assert len(split(other).segments) == 2


def test_a_file_whose_rows_follow_at_once_is_a_part_of_the_log_before():
    def part(name, first, last, start):
        return [
            replace(each, position=LogPosition(name, each.step), at=start + each.step)
            for each in rows(first, last)
        ]

    parts = [*part("a", 1, 100, 0.0), *part("b", 101, 140, 1.0)]
    assert len(split(parts).segments) == 1
    assert len(split(parts, around=100).segments) == 2
    later = [*part("a", 1, 100, 0.0), *part("b", 101, 140, 60.0)]
    assert len(split(later).segments) == 2


def test_the_segment_that_others_repeat_is_kept():
    items = [*rows(1, 320)]
    for attempt in range(2, 82):
        items += [announced(1, 300), *rows(301, 330, attempt=attempt)]
    parts = split(items)
    assert parts.segments[0].first_step == 1
    assert parts.n_segments == 81
    assert parts.segments[-1].number == 81
