"""The verdict and the findings of a resume: each test breaks one thing and expects that finding."""

from __future__ import annotations

import dataclasses
import json
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_losses import (
    DIED,
    END,
    SAVED,
    TOKENS,
    printed,
    resumed,
    row,
    rows,
    times,
    with_decimals,
)
from msgspec.structs import replace

from ckptctl.findings import CODES
from ckptctl.logs.rows import LogPosition, Marker, Number, Row
from ckptctl.loss.checking import CheckOptions, check_loss, check_rows
from ckptctl.loss.evidence import measure_update
from ckptctl.loss.plots import curve_of
from ckptctl.loss.replay import Agreement
from ckptctl.loss.resumes import ResumePoint, resumes
from ckptctl.loss.segments import split
from ckptctl.loss.verdict import FORCES, LossVerdict

CLEAN = SAVED  # no step is logged twice


def found(report):
    """The codes that force a verdict, and the verdict."""
    findings = [*report.findings, *(f for each in report.assessments for f in each.findings)]
    return report.verdict.value, sorted(f.code for f in findings if f.code in FORCES)


def assess(change=lambda each: each, **how):
    return check_rows(resumed(change, **how))


def changed(**fields):
    return lambda each: replace(each, **{name: make(each) for name, make in fields.items()})


# The sound cases.


def test_steps_logged_twice_that_agree_to_the_last_digit_are_continuous():
    report = assess()
    assert found(report) == ("continuous", [])
    (assessment,) = report.assessments
    assert assessment.replay.agreement is Agreement.IDENTICAL
    assert len(assessment.replay.rows) == DIED - SAVED
    assert report.exit_code == 0
    assert report.message == "12 steps were logged twice and agree to the last printed digit"


def test_what_the_order_of_additions_does_is_continuous():
    wobbly = times(1)
    report = assess(lambda each: times(1 + 1e-4 * math.sin(each.step))(wobbly(each)))
    assert found(report) == ("continuous", [])
    assert report.assessments[0].replay.agreement is Agreement.WITHIN_NUMERICS


def test_other_batches_that_begin_equal_by_chance_show_no_other_update():
    before, after = (with_decimals(rows(1, END, seed=n, attempt=n), 2) for n in (1, 2))
    first = next(n for n in range(SAVED, END) if before[n].loss == after[n].loss)
    report = check_rows([*before[: first + 12], *after[first:]])
    (assessment,) = report.assessments
    assert assessment.replay.rows[0].difference == 0
    assert assessment.replay.agreement is Agreement.OTHER_DATA
    assert report.verdict.value == "inconclusive"


def test_without_a_step_logged_twice_there_is_no_continuous():
    report = assess(died=CLEAN, noise=0.004)
    assert found(report) == ("no-jump", [])
    assert report.exit_code == 0
    assert check_rows(resumed(died=CLEAN, noise=0.004), CheckOptions(strict=True)).exit_code == 31
    assert "a jump below" in report.message
    assert 0.005 < report.assessments[0].level.smallest_jump < 0.05


def test_three_digits_prove_nothing_though_they_agree():
    report = check_rows(with_decimals(resumed(), 2))
    assert found(report) == ("no-jump", [])
    assert [f.code for f in report.assessments[0].findings] == ["loss.low-precision"]


def smaller(factor, decimals, **how):
    """A log of a loss that is smaller by `factor`, with so many decimals."""
    made = [
        replace(each, loss=Number(each.loss.value * factor, 0.0), grad_norm=None)
        if isinstance(each, Row)
        else each
        for each in resumed(**how)
    ]
    return check_rows(with_decimals(made, decimals))


def test_a_small_loss_with_many_decimals_lacks_digits_and_not_decimals():
    report = smaller(1 / 5000, 6)
    (assessment,) = report.assessments
    assert [f.code for f in assessment.findings] == ["loss.low-precision"]
    assert "agree, but the log rounds the loss by 0." in report.message
    (lacks,) = [each for each in report.missing if "of the loss" in each.what]
    assert lacks.what == "five significant digits of the loss"


def test_the_axis_of_a_small_loss_is_straight_and_begins_at_zero():
    curve = curve_of(smaller(1 / 5000, 8, died=CLEAN).assessments[0])
    assert curve.losses[0] >= 0
    assert dataclasses.replace(curve, base=1e-9).losses[0] == 0


@pytest.mark.parametrize("first", [SAVED, SAVED + 1])
def test_counting_from_zero_or_from_one_are_both_right(first):
    assert found(assess(first=first)) == ("continuous", [])


# Counters.


def test_a_job_that_started_from_the_beginning_is_reported():
    report = check_rows([*rows(1, 100), *rows(1, 60, attempt=2)])
    assert found(report) == ("discontinuous", ["loss.restarted"])
    assert report.exit_code == 30


def test_two_logs_that_begin_at_one_late_step_may_hide_that_a_checkpoint_was_passed_over():
    items = [*rows(110, 500)[::10], *rows(110, 300, attempt=2)[::10]]
    report = check_rows(items)
    assert found(report) == ("discontinuous", ["loss.restarted"])
    assert "up to step 500, or that log saved nothing" in report.message
    named = check_rows(items, CheckOptions(ResumePoint(100, "asked")))
    assert "loss.restarted" not in found(named)[1]


def test_logs_named_newest_first_are_distinguished_from_a_fresh_start():
    newest_first = check_rows([*rows(90, 160), *rows(1, 100)])
    assert newest_first.message.endswith("or the logs were not given oldest first")
    anew = check_rows([*rows(1, 100), *rows(1, 60, attempt=2)])
    assert anew.message.endswith("it did not resume")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_reported(value):
    def broken(each):
        return replace(each, loss=Number(value, 0)) if each.step > 230 else each

    assert found(assess(broken)) == ("discontinuous", ["loss.not-finite"])


def test_a_counter_that_goes_back_before_the_checkpoint_is_reported():
    report = check_rows(resumed(first=191), CheckOptions(ResumePoint(SAVED, "report")))
    assert "loss.step" in found(report)[1]


def test_a_gap_after_the_checkpoint_is_a_suspicion_where_no_tokens_are_logged():
    untold = changed(tokens=lambda _: None)
    items = [untold(each) if not isinstance(each, Marker) else each for each in resumed(first=206)]
    assert found(check_rows(items)) == ("suspect", ["loss.gap"])


def test_rows_that_are_missing_in_the_log_are_no_gap_where_tokens_go_on():
    assert found(assess(first=206)) == ("continuous", [])


@pytest.mark.parametrize("died", [DIED, CLEAN])
def test_tokens_that_start_again_are_reported(died):
    lost = changed(tokens=lambda each: Number((each.step - SAVED) * TOKENS, 1))
    assert found(assess(lost, died=died, noise=0.004)) == ("discontinuous", ["loss.tokens"])


def test_tokens_are_compared_with_the_checkpoint_where_the_log_of_before_has_none():
    untold = changed(tokens=lambda _: None)
    before = [untold(each) for each in rows(1, DIED)]
    saved = ResumePoint(SAVED, "report", tokens=SAVED * TOKENS)
    assert found(check_rows([*before, *rows(SAVED + 1, 260)], CheckOptions(saved)))[1] == []
    wrong = ResumePoint(SAVED, "report", tokens=3 * SAVED * TOKENS)
    report = check_rows([*before, *rows(SAVED + 1, 260)], CheckOptions(wrong))
    assert found(report) == ("discontinuous", ["loss.tokens"])


def test_half_the_batch_is_detected_by_the_tokens_of_a_step():
    half = changed(tokens=lambda each: Number(SAVED * TOKENS + (each.step - SAVED) * TOKENS / 2, 1))
    assert found(assess(half, died=CLEAN, noise=0.004)) == ("discontinuous", ["loss.batch"])
    assert found(assess(half)) == ("discontinuous", ["loss.tokens"])


def test_batches_that_vary_by_themselves_are_no_other_batch():
    def uneven(each):
        if isinstance(each, Marker):
            return each
        return replace(each, tokens=Number(each.step * TOKENS + 900 * (each.step % 3), 1))

    items = [uneven(each) for each in resumed(died=CLEAN, noise=0.004)]
    assert found(check_rows(items)) == ("no-jump", [])


@pytest.mark.parametrize("died", [DIED, CLEAN])
def test_a_learning_rate_that_warms_up_again_is_reported(died):
    warm = changed(lr=lambda each: Number(1e-6 * (each.step - SAVED), 1e-12))
    assert found(assess(warm, died=died, noise=0.004)) == ("discontinuous", ["loss.lr"])


def test_no_learning_rate_below_zero_is_expected():
    def falls_to_zero(each):
        if isinstance(each, Marker):
            return each
        rate = 1e-5 * (SAVED + 2 - each.step) if each.step <= SAVED else 1e-3
        return replace(each, lr=Number(rate, 1e-12))

    report = check_rows([falls_to_zero(each) for each in resumed(first=SAVED + 5, died=CLEAN)])
    (wrong,) = [f for each in report.assessments for f in each.findings if f.code == "loss.lr"]
    assert (wrong.expected, wrong.found) == ("0", "0.001")


def test_a_learning_rate_that_drops_without_a_replay_may_be_a_stage():
    lower = changed(lr=lambda each: Number(each.lr.value / 10, 1e-12))
    assert found(assess(lower, died=CLEAN, noise=0.004)) == ("suspect", ["loss.lr-lower"])


def test_a_coarsely_printed_learning_rate_is_no_fault():
    def coarse(each):
        return each if isinstance(each, Marker) else replace(each, lr=Number(3e-4, 1e-4))

    assert found(check_rows([coarse(each) for each in resumed()])) == ("continuous", [])


# Samples.


def with_digests(shift=0, unknown=False):
    def of(step):
        return f"{step:016x}"

    def change(each):
        if isinstance(each, Marker):
            return each
        return replace(each, samples_digest=of(each.step))

    items = [change(each) for each in resumed()]
    cut = next(i for i, each in enumerate(items) if isinstance(each, Marker))
    seen = (lambda step: "f" * 16) if unknown else (lambda step: of(step + shift))
    return [
        *items[: cut + 1],
        *(replace(each, samples_digest=seen(each.step)) for each in items[cut + 1 :]),
    ]


def test_digests_that_agree_prove_the_data():
    report = check_rows(with_digests())
    assert found(report) == ("continuous", [])
    (fault,) = [f for f in report.faults if f.name == "data repeated or skipped"]
    assert fault.excluded
    assert fault.why == "the digests of the samples agree"


def test_data_that_is_repeated_is_found_exactly():
    report = check_rows(with_digests(-120))
    assert found(report) == ("discontinuous", ["loss.data"])
    assert "repeats 120 steps" in report.message


def test_data_that_is_skipped_is_found_exactly():
    report = check_rows(with_digests(3))
    assert found(report) == ("discontinuous", ["loss.data"])
    assert "skips 3 steps" in report.message


def test_samples_that_no_step_consumed_before_are_a_suspicion():
    assert found(check_rows(with_digests(unknown=True))) == ("suspect", ["loss.other-samples"])


# Replayed steps.


def test_an_equal_first_step_and_a_drift_is_an_update_that_differs():
    def drift(each):
        return times(1 + 3e-3 * math.sin(each.step), since=SAVED + 2)(each)

    report = assess(drift)
    assert found(report) == ("suspect", ["loss.drift"])
    assert report.exit_code == 32


def test_the_same_batches_at_a_higher_loss_are_wrong_weights():
    assert found(assess(times(1.012))) == ("discontinuous", ["loss.higher"])


def test_a_difference_is_relative_to_the_loss_before_the_resume():
    report = assess(times(2.25))
    (finding,) = (each for each in report.worst.findings if each.code == "loss.higher")
    assert "differ by +125 % in the median" in finding.message
    assert finding.found == "median difference 125 %, largest 125 %"
    assert {round(row.difference, 2) for row in report.worst.replay.rows} == {1.25}


def test_the_same_batches_at_a_lower_loss_are_other_weights():
    assert found(assess(times(0.99))) == ("suspect", ["loss.lower"])


def test_other_dropout_differs_without_a_direction():
    def wobble(each):
        return times(1 + 3e-3 * math.cos(2.4 * each.step))(each)

    assert found(assess(wobble)) == ("suspect", ["loss.differs"])


def test_other_batches_cannot_be_compared():
    after = rows(SAVED + 1, 260, seed=5)
    report = check_rows([*rows(1, DIED), *after])
    assert found(report) == ("inconclusive", ["loss.other-data"])
    assert report.exit_code == 31


def test_other_batches_that_all_are_higher_are_no_mere_other_order():
    after = [times(1.15)(each) for each in rows(SAVED + 1, 260, seed=5, noise=0.02)]
    report = check_rows([*rows(1, DIED, noise=0.02), *after])
    assert found(report)[0] == "discontinuous"
    assert "loss.jump" in found(report)[1]


def test_two_rows_that_agree_are_no_proof():
    report = assess(died=SAVED + 2, noise=0.004)
    assert found(report) == ("no-jump", [])
    assert "only 2 of at least 3 steps" in report.message


def test_an_equal_first_step_and_a_second_that_differs_is_not_taken_for_a_mean():
    """Megatron prints such means, and its rows say so; in other logs the row is a drift."""
    first, second = (each.loss.value for each in rows(SAVED + 1, SAVED + 2))

    def averaged(each):
        return replace(each, loss=printed((first + second) / 2)) if each.step == SAVED + 2 else each

    assert found(assess(averaged)) == ("suspect", ["loss.drift"])


def test_means_over_different_numbers_of_steps_are_not_compared():
    def single(each):
        if isinstance(each, Marker):
            return each
        return replace(each, interval=10)

    items = [single(each) for each in resumed()]
    at = next(i for i, each in enumerate(items) if isinstance(each, Marker)) + 1
    items[at] = replace(items[at], interval=1, loss=printed(9.9))
    report = check_rows(items)
    assert found(report) == ("continuous", [])
    assert report.assessments[0].replay.not_compared == (SAVED + 1,)


# The level.


def test_a_loss_that_jumps_up_is_reported_without_any_replay():
    report = assess(times(1.2), died=CLEAN, noise=0.004)
    assert found(report) == ("discontinuous", ["loss.jump"])


def test_one_spike_is_no_fault():
    def spike(each):
        return times(1.8)(each) if each.step == SAVED + 3 else each

    assert found(assess(spike, died=CLEAN, noise=0.004)) == ("no-jump", [])


def test_two_spikes_are_one():
    def spike(each):
        return times(1.8)(each) if each.step in (SAVED + 3, SAVED + 4) else each

    assert found(assess(spike, died=CLEAN, noise=0.004)) == ("discontinuous", ["loss.spike"])


def test_a_rise_behind_steps_that_agree_is_a_suspicion():
    report = assess(times(1.5, since=SAVED + 6), died=SAVED + 5)
    assert found(report) == ("suspect", ["loss.later"])
    assert "the earlier steps agree" in report.message


def test_a_rise_that_the_dead_job_logged_as_well_is_none():
    """The steps that agree hold the rise, so the resumed job repeats what happened before."""
    high = times(1.5, since=SAVED + 6)
    items = [each if isinstance(each, Marker) else high(each) for each in resumed()]
    assert found(check_rows(items)) == ("continuous", [])


def test_a_gradient_norm_ten_times_as_large_is_a_suspicion():
    large = changed(grad_norm=lambda each: Number(10.4 * each.grad_norm.value, 1e-4))
    assert found(assess(large, died=CLEAN, noise=0.004)) == ("suspect", ["loss.grad-norm"])


def test_a_loss_that_varies_too_much_shows_nothing():
    report = assess(died=CLEAN, noise=0.08)
    assert found(report) == ("inconclusive", ["loss.noisy"])


def test_too_few_rows_are_inconclusive_with_how_many_are_needed():
    report = check_rows(
        [*rows(1, 10), Marker(LogPosition("a", 1), "loaded", step=10), *rows(11, 13)]
    )
    assert found(report) == ("inconclusive", ["loss.too-little"])
    assert "10 more rows before the resume and 2 more rows after it" in report.message


def test_a_loss_that_may_be_negative_is_checked_too():
    def lowered(items):
        return [
            each if isinstance(each, Marker) else replace(each, loss=printed(each.loss.value - 4))
            for each in items
        ]

    assert found(check_rows(lowered(resumed()))) == ("continuous", [])
    assert found(check_rows(lowered(resumed(times(1.05)))))[0] == "discontinuous"


# Logs that are no resume.


def test_a_log_of_one_process_has_nothing_to_compare():
    report = check_rows(rows(1, 100))
    assert found(report) == ("inconclusive", ["loss.no-resume"])
    assert report.exit_code == 31


def test_an_empty_log_has_no_loss():
    assert found(check_rows([])) == ("inconclusive", ["loss.none"])


def test_a_log_without_a_loss_is_reported():
    items = [row(step, None) for step in range(1, 50)]
    assert found(check_rows(items)) == ("inconclusive", ["loss.none"])


def test_two_runs_in_one_log_are_not_checked():
    pairs = zip(rows(1, 40), rows(1001, 1040), strict=True)
    report = check_rows([each for pair in pairs for each in pair])
    assert found(report) == ("inconclusive", ["loss.interleaved"])
    assert report.assessments == ()
    assert report.next_commands == ("ckptctl explain loss.interleaved",)


# Several resumes.


def twice():
    mark = Marker(LogPosition("train.log", 1), "loaded", step=100)
    bad = [times(1.3)(each) for each in rows(101, 140)]
    return [*rows(1, 112), mark, *bad, Marker(LogPosition("train.log", 2), "loaded", step=100),
            *rows(101, 150)]  # fmt: skip


def test_of_several_resumes_the_last_is_checked_and_the_number_is_stated():
    report = check_rows(twice())
    assert report.verdict is LossVerdict.CONTINUOUS
    assert "loss.several" in {f.code for f in report.findings}
    assert report.assessments[0].resume.number == 2


def test_every_resume_can_be_checked_and_the_worst_counts():
    report = check_rows(twice(), CheckOptions(which="all"))
    assert [each.verdict.value for each in report.assessments] == ["discontinuous", "continuous"]
    assert report.verdict is LossVerdict.DISCONTINUOUS


def test_a_resume_can_be_chosen_by_its_number():
    assert check_rows(twice(), CheckOptions(which=1)).verdict is LossVerdict.DISCONTINUOUS


def test_a_slower_job_is_a_remark():
    def timed(each, factor=1.0):
        return replace(each, step_time_s=Number((1 + 0.01 * math.sin(each.step)) * factor, 0))

    items = [*map(timed, rows(1, DIED)), *(timed(each, 1.5) for each in rows(SAVED + 1, 260))]
    report = check_rows(items)
    assert found(report) == ("continuous", [])
    assert [f.code for f in report.assessments[0].findings] == ["loss.throughput"]


# What the answer says of itself.


def test_what_is_excluded_and_what_is_missing_is_stated():
    report = assess()
    excluded = {fault.name for fault in report.faults if fault.excluded}
    assert "optimizer state lost" in excluded
    assert [each.what for each in report.missing] == ["which samples were consumed"]
    bare = [
        replace(each, lr=None, tokens=None, grad_norm=None)
        if not isinstance(each, Marker)
        else each
        for each in resumed(died=CLEAN, noise=0.004)
    ]
    report = check_rows(bare)
    assert "optimizer state lost" in {f.name for f in report.faults if not f.excluded}
    assert {"the learning rate", "tokens or samples"} <= {each.what for each in report.missing}


def test_every_verdict_that_a_code_forces_is_of_a_code_that_exists():
    assert set(FORCES) <= set(CODES)
    assert {code for code in CODES if code.startswith("loss.")} >= set(FORCES)


numbers = st.floats(allow_nan=True, allow_infinity=True, width=32)
counts = st.floats(0, 1e18)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.builds(
                lambda step, loss, lr, tokens, at: Row(
                    step,
                    LogPosition("a", 1),
                    loss=None if loss is None else Number(loss, 1e-4),
                    lr=None if lr is None else Number(lr, 0),
                    tokens=None if tokens is None else Number(tokens, 1),
                    at=at,
                ),
                st.integers(-5, 60),
                st.none() | numbers,
                st.none() | numbers,
                st.none() | counts,
                st.none() | st.floats(0, 1e9),
            ),
            st.builds(
                lambda step, fresh: Marker(LogPosition("a", 1), "m", step=step, fresh=fresh),
                st.none() | st.integers(-5, 60),
                st.booleans(),
            ),
        ),
        max_size=120,
    ),
    st.booleans(),
)
def test_whatever_the_log_holds_there_is_an_answer(items, every):
    report = check_rows(items, CheckOptions(which="all" if every else "last"))
    assert report.exit_code in (0, 30, 31, 32)
    assert report.message


# How far an update moves the loss.


def update_of(change):
    items = [each if isinstance(each, Marker) else change(each) for each in resumed()]
    (resume,) = resumes(split(items))
    return measure_update(resume).size


def test_the_gradient_norm_of_an_adaptive_optimizer_tells_how_far_an_update_moves_the_loss():
    without = update_of(lambda each: replace(each, grad_norm=None))
    of_norm = 3e-4 * 5 / 2.7
    with_norm = update_of(lambda each: replace(each, grad_norm=printed(5)))
    assert with_norm > 2 * of_norm > without
    # The loss falls by far less than that with another optimizer.
    assert update_of(lambda each: replace(each, grad_norm=printed(50))) == without


def test_a_loss_that_still_falls_is_moved_further_by_an_update():
    def falling(each):
        return replace(each, loss=printed(each.loss.value - 0.002 * each.step))

    assert update_of(falling) > 1.2 * update_of(lambda each: each)


# Another number of ranks, rows that are missing, counters of a process.

OTHER_RANKS = ResumePoint(SAVED, "asked", world_size=4, saved_world_size=8)


def test_other_results_on_another_number_of_ranks_are_no_fault_and_no_proof():
    def wobble(each):
        return times(1 + 3e-3 * math.cos(2.4 * each.step))(each)

    report = check_rows(resumed(wobble), CheckOptions(OTHER_RANKS))
    assert found(report) == ("inconclusive", ["loss.other-ranks"])
    assert check_rows(resumed(), CheckOptions(OTHER_RANKS)).verdict is LossVerdict.CONTINUOUS


def test_a_first_loss_that_is_equal_by_chance_is_no_drift_on_another_number_of_ranks():
    def wobble(first):
        def change(each):
            factor = first if each.step == SAVED + 1 else 3e-3 * math.cos(2.4 * each.step)
            return times(1 + factor)(each)

        return change

    by_chance = check_rows(resumed(wobble(4e-5)), CheckOptions(OTHER_RANKS))
    assert found(by_chance) == ("inconclusive", ["loss.other-ranks"])
    same_ranks = CheckOptions(ResumePoint(SAVED, "asked"))
    assert "loss.drift" in found(check_rows(resumed(wobble(4e-5)), same_ranks))[1]


def test_an_exactly_equal_first_loss_is_a_drift_on_any_number_of_ranks():
    def drift(each):
        return times(1 + 9e-3 * math.sin(each.step), since=SAVED + 2)(each)

    items = [
        each if isinstance(each, Marker) else replace(each, loss=Number(each.loss.value, 0))
        for each in resumed(drift)
    ]
    assert found(check_rows(items, CheckOptions(OTHER_RANKS))) == ("suspect", ["loss.drift"])


def test_a_loss_that_is_much_higher_is_a_fault_on_any_number_of_ranks():
    report = check_rows(resumed(times(1.05)), CheckOptions(OTHER_RANKS))
    assert "loss.higher" in found(report)[1]


def test_a_first_row_that_is_missing_before_equal_rows_is_a_note():
    named = CheckOptions(ResumePoint(SAVED, "asked"))
    untold = changed(tokens=lambda _: None)
    items = [
        each if isinstance(each, Marker) else untold(each)
        for each in resumed(first=SAVED + 2, died=DIED + 8)
    ]
    report = check_rows(items, named)
    assert found(report) == ("continuous", [])
    assert "loss.row-missing" in {f.code for f in report.assessments[0].findings}
    further = check_rows(resumed(first=SAVED + 4, died=DIED + 8), named)
    assert "loss.step" in found(further)[1]


def test_a_first_row_one_step_behind_the_interval_leaves_no_gap():
    before = [each for each in rows(1, DIED + 50) if each.step % 10 == 1 or each.step == SAVED]
    after = [each for each in rows(SAVED + 11, END + 100) if each.step % 10 == 1]
    report = check_rows([*before, *after], CheckOptions(ResumePoint(SAVED, "asked")))
    assert "loss.step" not in found(report)[1]


def with_counter_of_process(first, last, since):
    def count(step):
        return sum(400 + 37 * (each * each % 11) for each in range(since, step + 1))

    return [replace(each, tokens=Number(count(each.step), 1)) for each in rows(first, last)]


def test_a_counter_that_each_process_restarts_is_compared_by_its_increments():
    before, after = (
        with_counter_of_process(1, DIED, 1),
        with_counter_of_process(SAVED + 1, END, SAVED + 1),
    )
    report = check_rows([*before, *after], CheckOptions(ResumePoint(SAVED, "asked")))
    assert found(report) == ("continuous", [])


def test_a_schedule_that_restarts_behind_equal_rows_as_it_did_before_is_no_fault():
    period = 52

    def cyclic(each):
        if isinstance(each, Marker):
            return each
        return replace(each, lr=Number(1e-3 * (1 - 0.9 * (each.step % period) / period), 1e-9))

    died = 4 * period - 1
    report = check_rows([cyclic(each) for each in resumed(died=died)])
    assert "loss.lr" not in found(report)[1]


# A log of the resumed job alone.


def test_a_loss_that_is_not_finite_needs_no_rows_before_the_resume():
    lost = [replace(each, loss=Number(math.nan, 0)) for each in rows(SAVED, SAVED + 2)]
    named = CheckOptions(ResumePoint(SAVED, "asked"))
    assert "loss.not-finite" in found(check_rows(lost, named))[1]
    mark = Marker(LogPosition("a", 1), "Resuming training from out", None)
    assert found(check_rows([mark, *lost]))[0] == "discontinuous"


def test_a_first_step_before_the_checkpoint_needs_no_rows_before_the_resume():
    mark = Marker(LogPosition("a", 1), "loaded", step=SAVED)
    report = check_rows([mark, *rows(SAVED - 19, SAVED + 40)])
    assert "loss.step" in found(report)[1]
    report = check_rows([mark, *rows(SAVED + 1, SAVED + 40)])
    assert found(report) == ("inconclusive", ["loss.no-resume"])


def test_a_log_without_a_row_before_the_resume_is_named(tmp_path):
    for name, steps in (("a", ()), ("b", range(41, 80))):
        lines = [json.dumps({"step": step, "loss": 2 + 1 / step}) for step in steps]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, ""]))
    logs = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    report = check_loss(logs, resume_step=40)
    assert report.verdict is LossVerdict.INCONCLUSIVE
    assert f"no row from before the resume ({logs[0]} holds none)" in report.message


# What each answer rests on.


def test_a_learning_rate_that_could_not_be_compared_is_not_excluded():
    bare = changed(lr=lambda _: None)
    before = [bare(each) for each in rows(1, SAVED)]
    report = check_rows([*before, *rows(SAVED + 1, SAVED + 3)], CheckOptions(OTHER_RANKS))
    (rate,) = [f for f in report.faults if f.name == "learning rate of another step"]
    assert rate.state == "open"


def test_the_loss_of_averaged_weights_is_compared():
    def averaged(shift):
        def change(each):
            if isinstance(each, Marker) or each.step % 5:
                return each
            moved = shift if each.position.line > 10_000 else 0
            return replace(each, ema_loss=Number(2 + 1 / each.step + moved, 1e-6))

        return change

    def report(shift):
        items = [averaged(0)(each) for each in resumed()]
        cut = next(i for i, each in enumerate(items) if isinstance(each, Marker)) + 1
        moved = [
            replace(each, ema_loss=Number(each.ema_loss.value + shift, 1e-6))
            if each.ema_loss
            else each
            for each in items[cut:]
        ]
        return check_rows([*items[:cut], *moved])

    assert found(report(0)) == ("continuous", [])
    assert found(report(0.01)) == ("suspect", ["loss.ema"])


def _plain(steps: range, seed: int = 1) -> list[str]:
    noise = random.Random(seed)
    return [f"step {n} loss {2 + 3 / n + noise.gauss(0, 0.02):.9f}\n" for n in steps]


def test_rows_that_a_shipper_wrote_twice_exclude_nothing(tmp_path):
    log, rows = tmp_path / "train.log", _plain(range(1, 81))
    for later in ([], _plain(range(81, 120), seed=2)):
        log.write_text("".join([*rows, *rows[60:], *later]))
        (assessment,) = check_loss([str(log)]).assessments
        excluded = [fault.name for fault in assessment.faults if fault.excluded]
        assert not {"other or older weights", "random numbers lost"} & set(excluded), excluded
        assert not any(name.startswith("random") for name in excluded)


@pytest.mark.parametrize(("digits", "is_proof"), [(9, True), (5, False)])
def test_two_equal_steps_are_enough_in_single_precision(tmp_path, digits, is_proof):
    """A log with a row in ten steps has two or three of them again after a resume."""
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    rows = {
        n: f"step {n} loss {2 + 3 / n + math.sin(n) / 20:.{digits}f}\n" for n in range(10, 400, 10)
    }
    old.write_text("".join(rows[n] for n in range(10, 310, 10)))
    new.write_text("".join(rows[n] for n in range(290, 400, 10)))
    report = check_loss([str(old), str(new)], resume_step=280)
    assert (report.verdict is LossVerdict.CONTINUOUS) == is_proof
    wrong = [rows[n].replace("loss 2", "loss 2.01") for n in range(290, 400, 10)]
    new.write_text("".join(wrong))
    assert check_loss([str(old), str(new)], resume_step=280).verdict is not LossVerdict.CONTINUOUS
