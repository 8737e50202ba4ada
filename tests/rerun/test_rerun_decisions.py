"""What runs of the same steps prove about a suspicious value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from ckptctl.logs.rows import LogPosition, Number, Row
from ckptctl.rerun.deciding import Record, ReplayNodes, RerunDecision, ValueOrigin, compare, decide

STEP = 5
NAN = math.nan
SOUND = (2.5, 2.4, 2.45, 2.35, 2.3)
SPIKE = (2.5, 2.4, 2.45, 2.35, 7.9)


def run(losses: Sequence[float], quantum: float = 0.0, **more: object) -> Record:
    """A run that logged these losses, from step 1 on."""
    rows = {
        step: Row(step, LogPosition("log", step), loss=Number(loss, quantum), **more)
        for step, loss in enumerate(losses, 1)
    }
    return {"log": rows}


def off(losses: Sequence[float], relative: float, since: int) -> list[float]:
    """The losses, off by so much from a step on."""
    return [loss * (1 + relative * (step >= since)) for step, loss in enumerate(losses, 1)]


def led(
    record: Record, same: Sequence[Record], others: Sequence[Record]
) -> tuple[RerunDecision, int]:
    """The decision as `rerun` reaches it, and after how many replays."""
    waiting = {ReplayNodes.SAME: list(same), ReplayNodes.OTHER: list(others)}
    done: dict[ReplayNodes, list[Record]] = {ReplayNodes.SAME: [], ReplayNodes.OTHER: []}
    found = RerunDecision(ValueOrigin.UNDECIDED, "", ReplayNodes.SAME)
    while found.more is not None:
        done[found.more].append(waiting[found.more].pop(0))
        found = decide(record, *done.values(), STEP, has_others=bool(others))
    return found, sum(map(len, done.values()))


def scattered(losses: Sequence[float], seed: int) -> list[float]:
    """The losses of a job whose runs differ by up to 1e-5 from the second step on."""
    return [
        loss * (1 + 1e-5 * math.sin(seed * step) * (step > 1)) for step, loss in enumerate(losses)
    ]


GONE = [run(SOUND)] * 2
REPEATED = [run(SPIKE)] * 2
NOISY = [run(scattered(SOUND, seed)) for seed in (3, 4, 5, 6)]
NOISY_SPIKE = [run(scattered(SPIKE, seed)) for seed in (7, 8, 9, 10)]
EARLIER = [run(off(SPIKE, 0.3, since=2))] * 2


@pytest.mark.parametrize(
    ("record", "same", "others", "answer", "n_replays"),
    [
        pytest.param(SPIKE, GONE, GONE, "transient", 2, id="only the record differs"),
        pytest.param((*SOUND[:4], NAN), GONE, GONE, "transient", 2, id="a NaN that is gone"),
        pytest.param(SPIKE, GONE, [], "transient", 2, id="transient without other nodes"),
        pytest.param(SPIKE, REPEATED, GONE, "persistent", 3, id="the same nodes repeat it"),
        pytest.param(SPIKE, EARLIER, GONE, "persistent", 4, id="broken from then on"),
        pytest.param(
            SPIKE,
            [run(off(SPIKE, each, since=2)) for each in (0.3, 0.4)],
            GONE,
            "persistent",
            4,
            id="other wrong values each time",
        ),
        pytest.param(SPIKE, REPEATED, REPEATED, "job", 2, id="all nodes repeat it"),
        pytest.param(SPIKE, EARLIER, REPEATED, "job", 2, id="others repeat it, the same broke"),
        pytest.param(SPIKE, REPEATED, [], "undecided", 1, id="repeated, and no other nodes"),
        # The other nodes are the bad ones, or nothing shows which are.
        pytest.param(SPIKE, GONE, [run((*SOUND[:4], NAN))] * 2, "undecided", 3, id="others NaN"),
        pytest.param(
            SPIKE, GONE, [run((*SOUND[:4], 3.1))] * 2, "undecided", 4, id="each group its own"
        ),
        pytest.param(
            SPIKE, REPEATED, [run(SOUND), run((*SOUND[:4], 3.1))], "undecided", 4, id="others vary"
        ),
        # Runs that differ by little agree by chance where few outcomes are possible.
        pytest.param(off(SOUND, 1e-4, 4), GONE, GONE, "transient", 4, id="small"),
        pytest.param(off(SOUND, 1e-7, 4), GONE, GONE, "undecided", 2, id="in the last bits"),
        pytest.param(
            SOUND, GONE, [run(off(SOUND, 1e-4, 1))] * 2, "undecided", 4, id="other arithmetic"
        ),
        # A resume that is not exact differs from the first step on; a spike still decides.
        pytest.param(off(SOUND, 1e-4, 1), GONE, GONE, "undecided", 2, id="not exact"),
        pytest.param(off(SPIKE, 1e-4, 1), GONE, GONE, "transient", 2, id="not exact, a spike"),
        # Not deterministic: only what is far beyond the scatter of the runs decides.
        pytest.param(scattered(SOUND, 2), NOISY[:2], NOISY[2:], "undecided", 4, id="noise"),
        pytest.param(scattered(SPIKE, 2), NOISY[:2], NOISY[2:], "transient", 4, id="noise, gone"),
        pytest.param(
            scattered(SPIKE, 2), NOISY_SPIKE[:2], NOISY[2:], "persistent", 4, id="noise, repeated"
        ),
        pytest.param(
            scattered(SPIKE, 2), NOISY_SPIKE[:2], NOISY_SPIKE[2:], "job", 4, id="noise, everywhere"
        ),
    ],
)
def test_the_answer_follows_from_which_runs_agree(record, same, others, answer, n_replays):
    found, n_led = led(run(record), same, others)
    assert (found.answer.value, n_led) == (answer, n_replays), found.reason


def test_equal_digits_of_a_low_precision_prove_nothing_but_a_spike_does():
    def printed(losses: Sequence[float]) -> Record:
        return run([round(loss, 1) for loss in losses], 0.1)

    sound, spike = printed(SOUND), printed(SPIKE)
    assert led(sound, [sound], [sound])[0].answer is ValueOrigin.UNDECIDED
    assert "the log prints losses to" in led(sound, [sound], [sound])[0].reason
    assert led(spike, [spike], [spike])[0].answer is ValueOrigin.JOB
    assert led(spike, [sound], [sound])[0].answer is ValueOrigin.TRANSIENT
    assert led(spike, [spike], [sound] * 2)[0].answer is ValueOrigin.PERSISTENT


def test_the_log_of_the_rank_that_differs_is_named():
    def ranks(second: Sequence[float]) -> Record:
        return {"0.log": run(SOUND)["log"], "1.log": run(second)["log"]}

    found = compare(ranks(SPIKE), ranks(SOUND), STEP)
    assert found.first is not None
    assert (found.first.step, found.first.log, found.first.name) == (STEP, "1.log", "loss")
    assert (found.n_values, found.starts_equal) == (10, True)
    # One log of the mean is compared with the first of several.
    assert compare(ranks(SPIKE), run(SOUND), STEP).is_equal


def test_a_replay_over_other_samples_proves_nothing():
    one, other = run(SPIKE, samples_digest="aa"), run(SOUND, samples_digest="bb")
    found, _ = led(one, [other], [other])
    assert found.answer is ValueOrigin.UNDECIDED
    assert "consumes other samples than the record from step 1 on" in found.reason


def test_gradient_norms_are_compared_as_well():
    one = run(SOUND, grad_norm=Number(1.5, 0.0))
    assert compare(one, run(SOUND, grad_norm=Number(1.5, 0.0)), STEP).is_equal
    first = compare(one, run(SOUND, grad_norm=Number(1.25, 0.0)), STEP).first
    assert first is not None
    assert first.name == "grad_norm"
