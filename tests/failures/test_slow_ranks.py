"""Slow ranks by the step times in their heartbeats."""

from __future__ import annotations

from ckptctl.failures.slow_ranks import SlowRank, slow_among, slow_ranks_finding
from ckptctl.formats.own.heartbeats import Heartbeat
from ckptctl.supervisor.heartbeats import StepTimes


def test_a_rank_below_seven_tenths_of_the_fastest_is_slow():
    times = {0: 1.0, 1: 1.4, 2: 1.5, 3: 1.0}
    (slow,) = slow_among(times, times, {2: "node-1"})
    assert (slow.rank, slow.node, slow.relative, slow.individual) == (2, "node-1", 1 / 1.5, 1)


def test_a_rank_that_was_faster_is_slow_also_where_all_are_alike():
    slow = [*slow_among({0: 2.0, 1: 2.0}, {0: 1.0, 1: 1.9}, {})]
    assert [(each.rank, each.relative, each.individual) for each in slow] == [(0, 1, 0.5)]


def test_one_rank_alone_is_compared_with_itself():
    assert [*slow_among({0: 5.0}, {0: 5.0}, {})] == []
    assert [*slow_among({}, {}, {})] == []


def beats(counts: dict[int, tuple[int, int]], pid: int = 7) -> dict[int, Heartbeat]:
    return {
        rank: Heartbeat(
            rank=rank,
            local_world_size=None,
            node="node-1",
            pid=pid + rank,
            started=1,
            count=steps,
            section="step",
            step=steps,
            saving=None,
            stack_signal=None,
            steps=steps,
            work_ms=work_ms,
        )
        for rank, (steps, work_ms) in counts.items()
    }


def test_windows_show_a_rank_that_becomes_slow():
    times = StepTimes()
    times.take(beats({0: (0, 0), 1: (0, 0)}), 0)
    times.take(beats({0: (10, 1000), 1: (10, 1000)}), 61)
    assert times.slow() == ()
    times.take(beats({0: (20, 2000), 1: (20, 3000)}), 122)
    (slow,) = times.slow()
    assert (slow.rank, slow.relative, slow.individual) == (1, 0.5, 0.5)
    (document,) = times.documents()
    assert (document["relative_percent"], document["individual_percent"]) == (50, 50)


def test_few_steps_show_nothing_and_a_new_process_begins_anew():
    times = StepTimes()
    times.close(beats({0: (4, 400), 1: (4, 4000)}))
    assert times.slow() == ()
    times.close(beats({0: (100, 1000), 1: (100, 1000)}))
    times.close(beats({0: (10, 100), 1: (10, 100)}, pid=900))
    assert times.slow() == ()
    times.reset()
    assert times.documents() == []


def test_the_finding_names_ranks_nodes_and_scores():
    slow = SlowRank(2, "gpu-007", 0.96, 0.65)
    finding = slow_ranks_finding([slow], "run attempt 1")
    assert finding.code == "rank.slow"
    assert finding.message == (
        "rank 2 on gpu-007 (0.96 of the fastest, 0.65 of its best): below 0.7"
    )
