"""What follows an attempt, one case for each clause that decides; no process and no storage."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ckptctl.errors import OptionError
from ckptctl.failures.results import Action, Classification, Domain, Restart
from ckptctl.formats.own.supervision import Attempt, Decision
from ckptctl.supervisor.policy import (
    LONGEST_PAUSE_S,
    AttemptEnd,
    Budget,
    BudgetOptions,
    Conclusion,
    RootState,
    budget_of,
    decide,
    is_progress,
    series,
    since_progress,
)
from ckptctl.supervisor.processes import Hang

SOUND = RootState(0, "", 300, holds_steps=True)
FAILED = AttemptEnd(1, 10.0, None, None, asked=False)
HANG = Hang("no report")
USUAL = BudgetOptions()


def attempt(number: int = 1, **about: object) -> Attempt:
    given = {"exit_code": 1, "decision": Decision.RESTART, **about}
    return Attempt(number=number, started_at="2026-01-01T00:00:00Z", **given)


def cause(**about: object) -> Classification:
    job = Classification("job-code", Domain.JOB, Action.FIX, Restart.ONCE, "high", "it broke", "")
    return replace(job, **about)


def state(*attempts: Attempt, resets: tuple[int, ...] = (), **about: object) -> dict:
    given = {"best": None, "not_finite": [], "resets": [{"after": n} for n in resets]}
    return {**given, "attempts": list(attempts), **about}


def after(
    ended: AttemptEnd = FAILED,
    *past: Attempt,
    seen: RootState = SOUND,
    best: int | None = 300,
    options: BudgetOptions = USUAL,
    **about: object,
) -> Conclusion:
    return decide(past, ended._replace(**about), seen, best, options)


def outcome(conclusion: Conclusion) -> tuple[Decision, int, bool]:
    return conclusion.decision, conclusion.exit_code, conclusion.free


# How the attempt ended


def test_a_failure_costs_a_restart_and_says_how_many_are_left():
    found = after()
    assert outcome(found) == (Decision.RESTART, 1, False)
    assert found.reason == "2 of 3 restarts left without a newer step"


def test_an_attempt_that_lost_a_node_is_not_done_whatever_the_other_nodes_end_with():
    lost = Classification.stated("infra-node", "the agent on b is gone", "high", ["b"])
    found = after(code=0, cause=lost, lost_node=True)
    assert outcome(found) == (Decision.RESTART, 0, False)


def test_an_asked_end_is_the_last_whatever_its_code():
    for code in (0, 1, 17):
        assert outcome(after(code=code, asked=True)) == (Decision.STOPPED, code, True)


@pytest.mark.parametrize(
    ("code", "failure", "ends_with"),
    [
        (0, None, 143),
        (1, None, 1),
        (1, "job-code", 1),
        (1, "preemption", 94),
        (0, "walltime", 94),
    ],
)
def test_a_job_that_its_scheduler_ends_is_continued_where_it_lost_its_place(
    code: int, failure: str | None, ends_with: int
):
    why = None if failure is None else cause(failure=failure)
    found = after(code=code, stopped="time limit", cause=why)
    assert (outcome(found), found.reason) == ((Decision.STOPPED, ends_with, True), "time limit")


def test_success_is_the_end_but_not_of_an_attempt_that_was_ended_for_a_hang():
    assert outcome(after(code=0)) == (Decision.DONE, 0, True)
    assert after(code=0, hang=HANG).decision is Decision.RESTART


@pytest.mark.parametrize("code", [2, 11, 17, 23, 24, 25, 77, 93, 94, 126, 127, 40])
def test_a_code_that_would_come_again_stops_at_once(code: int):
    options = BudgetOptions(no_restart=[40])
    assert outcome(after(code=code, options=options)) == (Decision.NEVER, code, False)
    assert after(code=code, hang=HANG, options=options).decision is Decision.RESTART
    assert after(code=41, options=options).decision is Decision.RESTART


# The root after it


@pytest.mark.parametrize("code", [75, 77])
def test_a_root_that_could_not_be_inspected_stops_and_costs_nothing(code: int):
    seen = RootState(code, "no answer", holds_steps=True)
    found = after(seen=seen)
    assert (outcome(found), found.reason) == ((Decision.NEVER, code, True), "no answer")


def test_a_root_whose_steps_are_gone_is_no_new_run():
    gone = RootState(10, "no step")
    assert outcome(after(seen=gone)) == (Decision.NEVER, 75, False)
    assert after(seen=gone, best=None).decision is Decision.RESTART
    assert after(seen=gone._replace(holds_steps=True)).decision is Decision.RESTART
    assert after(seen=RootState(2, "a wrong path")).decision is Decision.RESTART


def test_without_a_usable_step_nothing_is_started():
    seen = RootState(11, "all are damaged", holds_steps=True)
    assert outcome(after(seen=seen)) == (Decision.NEVER, 11, False)


# The budget


def test_a_rerun_is_made_once_between_two_steps():
    assert outcome(after(code=16)) == (Decision.RESTART, 16, True)
    assert outcome(after(FAILED, attempt(exit_code=16), code=16)) == (Decision.NEVER, 16, False)
    assert after(FAILED, attempt(exit_code=16)).decision is Decision.RESTART
    assert after(FAILED, attempt(exit_code=1), code=16).decision is Decision.RESTART
    assert after(FAILED, attempt(exit_code=16), code=16, hang=HANG).decision is Decision.RESTART


@pytest.mark.parametrize(
    ("about", "free"),
    [
        ({"code": 75}, True),
        ({"code": 75, "hang": HANG}, False),
        ({"cause": cause(restart=Restart.FREE)}, True),
        ({"cause": cause(restart=Restart.FREE, confidence="low")}, False),
        ({"cause": cause(restart=Restart.FREE), "hang": HANG}, False),
        ({"cause": cause()}, False),
    ],
)
def test_a_cause_outside_the_job_costs_nothing(about: dict, free: bool):
    assert outcome(after(**about))[::2] == (Decision.RESTART, free)


def test_the_last_restart_of_each_kind_is_the_last():
    options = BudgetOptions(max_restarts=1, max_free_restarts=1)
    paid, free = attempt(), attempt(free=True)
    outside = cause(restart=Restart.FREE)
    assert after(FAILED, free, options=options).decision is Decision.RESTART
    assert outcome(after(FAILED, paid, options=options)) == (Decision.GIVEN_UP, 93, False)
    assert after(FAILED, paid, cause=outside, options=options).decision is Decision.RESTART
    assert outcome(after(FAILED, free, cause=outside, options=options)) == (
        Decision.GIVEN_UP,
        93,
        True,
    )
    running = attempt(decision=None)
    assert after(FAILED, running, options=options).decision is Decision.RESTART


def test_an_attempt_that_runs_is_not_counted():
    found = budget_of([attempt(), attempt(free=True), attempt(decision=None)])
    assert found == Budget(spent=1, free=1)
    assert found.left(BudgetOptions(max_restarts=1)) == 0
    assert found.left(BudgetOptions(max_restarts=0)) == 0


# A failure that would come again


@pytest.mark.parametrize(
    ("about", "before", "decision"),
    [
        # Certain, and a restart cannot remove it.
        ({"restart": Restart.NO}, (), Decision.NEVER),
        ({"restart": Restart.NO, "confidence": "medium"}, (), Decision.RESTART),
        (
            {"restart": Restart.NO, "confidence": "medium", "domain": Domain.STOPPED},
            (),
            Decision.NEVER,
        ),
        # Less certain: when it comes again without a newer step.
        ({"restart": Restart.NO, "confidence": "medium"}, ("job-code",), Decision.NEVER),
        ({"restart": Restart.NO, "confidence": "medium"}, ("job-oom",), Decision.RESTART),
        ({}, (), Decision.RESTART),
        ({}, ("job-code",), Decision.NEVER),
        ({}, ("hang", "job-code"), Decision.NEVER),
        ({"domain": Domain.INFRASTRUCTURE}, ("job-code",), Decision.RESTART),
        ({"restart": Restart.YES}, ("job-code",), Decision.RESTART),
    ],
)
def test_a_failure_that_comes_again_stops(about: dict, before: tuple[str, ...], decision: Decision):
    past = [attempt(cause=failure) for failure in before]
    assert after(FAILED, *past, cause=cause(**about)).decision is decision
    assert after(FAILED, *past, cause=cause(**about), hang=HANG).decision is Decision.RESTART


def test_the_budget_is_used_up_before_a_failure_comes_again():
    past = [attempt(cause="job-code")] * 3
    assert after(FAILED, *past, cause=cause()).decision is Decision.GIVEN_UP


# What attempts share


def test_an_end_with_success_and_a_word_of_a_person_begin_a_new_budget():
    first, done, last = attempt(1), attempt(2, decision=Decision.DONE), attempt(3)
    assert series(state(first, attempt(2), last)) == [first, attempt(2), last]
    assert series(state(first, done, last)) == [last]
    assert series(state(first, attempt(2), last, resets=(1,))) == [attempt(2), last]
    assert series(state(first, done, last, resets=(1,))) == [last]
    assert series(state(first, done, last, resets=(1, 3, 2))) == []


def test_the_attempt_that_made_progress_last_is_the_first_that_counts():
    made = [attempt(1), attempt(2, progress=True), attempt(3, progress=True), attempt(4)]
    assert since_progress(state(*made)) == made[2:]
    assert since_progress(state(made[0], made[3])) == [made[0], made[3]]


def test_progress_is_a_newer_step_that_was_saved_while_losses_were_finite():
    assert is_progress(state(), 1)
    assert is_progress(state(best=1), 2)
    assert not is_progress(state(best=2), 2)
    assert not is_progress(state(), None)
    assert not is_progress(state(best=1, not_finite=[2]), 2)


def test_pauses_double_with_each_end_without_progress_and_have_a_limit():
    options = BudgetOptions(backoff_s=10)
    assert [options.pause_s(Budget(n, 0)) for n in (0, 1, 2, 3)] == [10, 10, 20, 40]
    assert options.pause_s(Budget(1, 3)) == options.pause_s(Budget(3, 1)) == 40
    assert options.pause_s(Budget(1000, 0)) == LONGEST_PAUSE_S


def test_budgets_that_no_state_can_hold_are_refused():
    with pytest.raises(OptionError, match="0 or more"):
        BudgetOptions(max_restarts=-1)
    with pytest.raises(OptionError, match="0 or more"):
        BudgetOptions(max_free_restarts=-1)
    with pytest.raises(OptionError, match="less than 1,000"):
        BudgetOptions(max_restarts=500, max_free_restarts=500)
    assert BudgetOptions(max_restarts=500, max_free_restarts=499).max_free_restarts == 499
    with pytest.raises(OptionError, match="needs the reason"):
        BudgetOptions(reset_budget=" ")


@pytest.mark.parametrize("code", [0, 1, 17, 143])
def test_a_change_of_the_nodes_costs_nothing_whatever_their_ranks_end_with(code: int):
    found = after(FAILED, attempt(), code=code, nodes_change="another node joins")
    assert outcome(found) == (Decision.RESTART, code, True)
    assert found.reason == "another node joins; 2 of 3 restarts left"


def test_a_job_whose_nodes_change_all_the_time_ends():
    past = [attempt(n, free=True) for n in range(1, 51)]
    found = after(FAILED, *past, nodes_change="another node joins")
    assert outcome(found) == (Decision.GIVEN_UP, 93, True)
