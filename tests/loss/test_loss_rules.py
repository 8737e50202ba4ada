"""The verdicts on resumes of a real training job, each with a fault that is known."""

from __future__ import annotations

import json
import lzma
import runpy
from collections import Counter
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench():
    return runpy.run_path(str(REPOSITORY / "bench" / "loss_rules.py"))


@pytest.fixture(scope="module")
def document(bench):
    return json.loads(lzma.decompress(bench["FIXTURE"].read_bytes()))


@pytest.fixture(scope="module")
def verdicts(bench, document):
    """How often each verdict was given, by fault and habit of the log."""
    found: dict[tuple, dict[str, Counter]] = {}

    def of(replay=True, interval=1, decimals=4):
        habit = {"replay": replay, "interval": interval, "decimals": decimals}
        key = tuple(habit.values())
        if key not in found:
            counts: dict[str, Counter] = {}
            for case in bench["cases"](document, **habit):
                said = bench["verdict"](case.before, case.after, case.saved)
                counts.setdefault(case.fault, Counter())[said] += 1
            found[key] = counts
        return found[key]

    return of


@pytest.mark.parametrize("interval", [1, 10])
def test_correct_resumes_are_continuous(verdicts, interval):
    assert set(verdicts(interval=interval)["correct"]) == {"continuous"}


@pytest.mark.parametrize("interval", [1, 10])
def test_noise_that_could_hide_an_older_tensor_is_no_proof_and_no_fault(verdicts, interval):
    """The noise is 0.003 %; at half of the peak learning rate a tensor may change no more."""
    counts = verdicts(interval=interval)["correct, other additions"]
    expected = {1: {"continuous": 5, "no-jump": 3}, 10: {"continuous": 1, "no-jump": 7}}
    assert counts == expected[interval]


def test_a_lost_optimizer_is_seen_in_every_resume(verdicts, bench):
    for fault in bench["OPTIMIZER"]:
        assert set(verdicts()[fault]) == {"suspect"}


def test_counters_are_seen_with_and_without_steps_that_were_logged_twice(verdicts, bench):
    for replay in (True, False):
        for fault in bench["COUNTERS"]:
            assert set(verdicts(replay=replay)[fault]) == {"discontinuous"}


@pytest.mark.parametrize("fault", ["older weights", "shard zeroed", "tensors swapped"])
def test_wrong_weights_are_never_continuous(verdicts, fault):
    assert verdicts()[fault]["continuous"] == 0
    assert verdicts()[fault]["discontinuous"] >= 6


@pytest.mark.parametrize("fault", ["other batch order", "data restarted", "data skipped"])
def test_other_batches_are_reported_and_not_blamed(verdicts, fault):
    assert set(verdicts()[fault]) == {"inconclusive"}


def test_nothing_loaded_is_seen_by_the_level_alone(verdicts):
    assert set(verdicts(replay=False)["nothing loaded"]) == {"discontinuous"}


def test_what_no_curve_shows_is_never_a_plain_yes(verdicts):
    every = verdicts(replay=False)
    assert all(counts["continuous"] == 0 for counts in every.values())


def test_two_decimals_never_prove_anything(verdicts):
    every = verdicts(decimals=2)
    assert all(counts["continuous"] == 0 for counts in every.values())


def test_where_nothing_happened_there_is_no_alarm(bench, document):
    said = Counter()
    for run in document["runs"]:
        rows = bench["as_logged"](run["before"], 1, 4)
        for cut in range(60, len(rows) - 30, 23):
            said[bench["verdict"](rows[:cut], rows[cut : cut + 60], rows[cut - 1].step)] += 1
    assert sum(said.values()) > 90
    assert set(said) <= {"no-jump", "inconclusive"}


def test_the_rules_of_others_are_what_the_page_says(bench, document):
    cases = list(bench["cases"](document))
    losses, rules = bench["losses"], bench["RULES"]
    fired = Counter()
    for case in cases:
        before = losses([row for row in case.before if row.step <= case.saved])
        for name, rule in rules.items():
            fired[name] += rule(before, losses(case.after))
    assert fired == {"megatron": 0, "first row": 8, "ema z": 10}


# Late in the schedule.


@pytest.fixture(scope="module")
def late(bench):
    return json.loads(lzma.decompress(bench["LATE_FIXTURE"].read_bytes()))


def late_reports(bench, late):
    """Each resume as eight and twenty rows, with four decimals and the whole float.

    The gradient norms are in the log of eight rows with four decimals once more.
    """
    for run in late["runs"]:
        for resume in run["resumes"]:
            if resume["fault"] == "random numbers lost" and not run["random"]:
                continue
            for n_twice, decimals, with_norm in (
                *((8, 4, False), (8, 16, False), (20, 4, False), (20, 16, False)),
                (8, 4, True),
            ):
                with_rate = "learning rate" not in resume["fault"]
                report = bench["late_report"](
                    run, resume, n_twice, decimals, with_rate=with_rate, with_norm=with_norm
                )
                yield resume["fault"], decimals, report


def test_no_fault_late_in_a_schedule_is_continuous_or_excluded(bench, late):
    for fault, _, report in late_reports(bench, late):
        if fault in bench["LISTED"]:
            excluded = {each.name for each in report.faults if each.excluded}
            assert bench["LISTED"][fault] not in excluded, (fault, report.message)
            if fault != "rounded weights":
                assert report.verdict.value != "continuous", fault


def test_right_resumes_late_in_a_schedule_are_continuous_or_name_what_the_log_cannot_show(
    bench, late
):
    for fault, decimals, report in late_reports(bench, late):
        if fault == "correct, other ranks":
            # Another number of ranks may draw other random numbers.
            assert report.verdict.value in ("continuous", "no-jump", "inconclusive")
        elif fault not in bench["LISTED"]:
            assert report.verdict.value in ("continuous", "no-jump")
            if decimals > 4:
                assert report.verdict.value == "continuous", report.message
