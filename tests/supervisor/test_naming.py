"""What the evidence of ranks proves: who is named, and whether it speaks against hardware."""

from __future__ import annotations

import pytest

from ckptctl.failures.rank_dumps import Frame
from ckptctl.supervisor.evidence import NodeDocument, RankEvidence, documents_in, line_of
from ckptctl.supervisor.hangs import name_ranks

WAITS = (Frame("all_reduce", "/x/torch/distributed/distributed_c10d.py", 3), Frame("f", "t.py", 9))
LOADS = (Frame("next", "loader.py", 7), Frame("f", "t.py", 8))
SLEEPS = (Frame("sleep", "wait.py", 1), Frame("f", "t.py", 5))
WRITES = (Frame("write_data", "/x/torch/distributed/checkpoint/filesystem.py", 4),)


def rank(number: int, stack: tuple[Frame, ...] | None = WAITS, **about: object) -> RankEvidence:
    return RankEvidence(number, f"n{number // 2}", stack=stack, **about)


@pytest.mark.parametrize(
    ("wait", "hardware"),
    [("io_schedule", True), ("", True), ("rpc_wait_bit_killable", False), ("fuse_simple", False)],
)
def test_a_wait_in_the_kernel_speaks_against_hardware_but_for_a_storage(wait: str, hardware: bool):
    named = name_ranks([rank(0), rank(1, state="D", wait=wait)])
    assert (named.ranks, named.hardware) == ((1,), hardware)


def test_where_all_ranks_wait_in_the_kernel_nobody_is_named():
    assert name_ranks([rank(0, state="D"), rank(1, state="D")]).ranks == ()


def test_of_two_ranks_outside_at_different_places_neither_is_named():
    ranks = [rank(0), rank(1), rank(2, LOADS), rank(3, SLEEPS)]
    assert name_ranks(ranks).ranks == ()
    assert name_ranks([*ranks[:3], rank(3, LOADS)]).ranks == (2, 3)


def test_a_rank_that_writes_a_checkpoint_is_not_in_a_collective():
    assert name_ranks([rank(0, WRITES), rank(1)]).ranks == (0,)


def test_without_the_stacks_of_all_ranks_no_stack_names_one():
    named = name_ranks([rank(0), rank(1, LOADS), rank(2, None)])
    assert (named.ranks, "not all ranks showed their stacks" in named.why) == ((), True)


@pytest.mark.parametrize("unseen", [2, None])
def test_with_ranks_that_were_not_seen_only_a_dead_or_stopped_one_is_named(unseen: int | None):
    for about in ({"alive": False}, {"state": "T"}):
        assert name_ranks([rank(0), rank(1, **about)], unseen=unseen).ranks == (1,)
    for ranks in ([rank(0), rank(1, LOADS)], [rank(0), rank(1, state="D")], [rank(0, LOADS)]):
        assert name_ranks(ranks, unseen=unseen).ranks == ()


def test_the_only_rank_of_a_job_is_named_unless_it_waits_in_a_collective():
    assert name_ranks([rank(0, LOADS)]).ranks == (0,)
    assert name_ranks([rank(0)]).ranks == ()


def test_the_evidence_of_another_node_is_read_as_it_was_found():
    ranks = [
        rank(2, SLEEPS, moves=True, stuck=("a loader",)),
        rank(3, None, state="D", wait="fuse"),
    ]
    sent = NodeDocument(works=True, ranks=ranks, world_size=4)
    assert documents_in(f"srun: a warning\n{line_of(sent)}") == [sent]
    assert name_ranks([rank(0), rank(1, LOADS), *sent["ranks"]]).ranks == (3,)
