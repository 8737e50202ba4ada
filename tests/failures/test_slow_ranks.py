"""Slow ranks by step times, and by what NVRx and Megatron print."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl.failures.slow_ranks import slow_among, slow_in_logs, slow_ranks_finding
from ckptctl.formats.own.heartbeats import Heartbeat
from ckptctl.supervisor.heartbeats import StepTimes


def named(slow) -> list[tuple[int | None, str]]:
    return [(each.rank, each.node) for each in slow]


def test_a_rank_below_seven_tenths_of_the_fastest_is_slow():
    times = {0: 1.0, 1: 1.4, 2: 1.5, 3: 1.0}
    (slow,) = slow_among(times, times, {2: "node-1"}, "heartbeats")
    assert (slow.rank, slow.node, slow.relative, slow.individual) == (2, "node-1", 1 / 1.5, 1)


def test_a_rank_that_was_faster_is_slow_also_where_all_are_alike():
    slow = slow_among({0: 2.0, 1: 2.0}, {0: 1.0, 1: 1.9}, {}, "heartbeats")
    assert [(each.rank, each.relative, each.individual) for each in slow] == [(0, 1, 0.5)]


def test_one_rank_alone_is_compared_with_itself():
    assert slow_among({0: 5.0}, {0: 5.0}, {}, "heartbeats") == ()
    assert slow_among({}, {}, {}, "heartbeats") == ()


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


NVRX = """\
GPU relative performance:
 Worst performing 2/4 ranks:
  Rank=2 Node=gpu-007 Score=0.31
  Rank=1 Node=gpu-006 Score=0.94
 Best performing 2/4 ranks:
  Rank=0 Node=gpu-006 Score=1.00

GPU individual performance:
 Worst performing 2/4 ranks:
  Rank=2 Node=gpu-007 Score=0.98
"""
LATER = NVRX.replace("Score=0.31", "Score=0.96").replace("Score=0.98", "Score=0.65")
ALL_RANKS = """\
times across ranks (ms):
  forward-compute:
     rank  0: 100.10
     rank  1: 103.00
     rank  2: 210.00
  all-grads-sync:
     rank  0: 120.00
     rank  1: 117.00
     rank  2: 10.00
 [2026-11-01 10:00:00] iteration 10/ 100 | elapsed time per iteration (ms): 220.1 |
"""
BOUNDS = """\
(min, max) time across ranks (ms):
    forward-compute ................................: (100.10, 210.00)
    all-grads-sync .................................: (1.10, 210.00)
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (NVRX, [(2, "gpu-007")]),
        (NVRX + LATER, [(2, "gpu-007")]),
        (NVRX.replace("0.31", "0.70"), []),
        (ALL_RANKS, [(2, "")]),
        (ALL_RANKS + ALL_RANKS.replace("210.00", "101.00"), []),
        (BOUNDS, [(None, "")]),
        (BOUNDS.replace("100.10", "200.10"), []),
        ("Rank=2 Node=gpu-007 Score=0.1\nrank 2: 1.0\n", []),
        ("GPU relative performance:\nRank=99999999999 Node=x Score=0.1\nScore=", []),
    ],
)
def test_reports_of_other_programs_are_read(tmp_path: Path, text: str, found: list):
    (tmp_path / "train.log").write_text(text)
    assert named(slow_in_logs([str(tmp_path / "train.log")])) == found


def test_the_newest_report_counts_and_the_finding_names_ranks_nodes_and_scores(tmp_path: Path):
    (tmp_path / "train.log").write_text(NVRX + LATER)
    (slow,) = slow_in_logs([str(tmp_path)])
    assert (slow.relative, slow.individual, slow.source) == (0.96, 0.65, "nvrx")
    finding = slow_ranks_finding([slow], "train.log")
    assert finding.code == "rank.slow"
    assert finding.message == (
        "rank 2 on gpu-007 (0.96 of the fastest, 0.65 of its best): below 0.7"
    )
