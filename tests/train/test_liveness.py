"""A rank that does not answer is detected: real ranks, one of which sleeps or is gone."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from train_ranks import ends, ranks, wait_for

from ckptctl.errors import UsageError
from ckptctl.train import Liveness, check_gpu, ping

pytestmark = pytest.mark.torch

PING = """
from ckptctl.train import Liveness, ping, make_group
from ckptctl.errors import RanksLost
alive = Liveness(every=2)
say("looked", [alive.check(step) for step in range(1, 5)])
"""


def test_one_process_answers_itself():
    assert ping() == 0.0
    assert Liveness(every=1).check(1)
    assert not Liveness(every=2).check(1)


@pytest.mark.parametrize("wrong", [0, -1])
def test_what_makes_no_sense_is_refused(wrong: int):
    with pytest.raises(UsageError, match="every is"):
        Liveness(every=wrong)
    with pytest.raises(UsageError, match="timeout_s is"):
        ping(timeout_s=wrong)


def test_a_device_that_computes_has_no_fault():
    report = check_gpu("cpu")
    assert (report.device, report.fault) == ("cpu", None)


def test_a_device_that_is_not_there_is_a_fault_and_no_traceback():
    report = check_gpu("cuda:99")
    assert report.fault.startswith("failed: ")


def test_a_device_that_does_not_answer_is_a_fault_when_the_time_is_over():
    answers = threading.Event()
    threading.setprofile(lambda *_: answers.wait())  # holds the thread that asks the device
    try:
        assert check_gpu("cpu", timeout_s=0.1).fault == "gave no answer in 0.1 s"
    finally:
        threading.setprofile(None)
        answers.set()


@pytest.mark.slow
def test_ranks_that_answer_cost_little_and_one_that_does_not_is_named(tmp_path: Path):
    code = """
group = make_group()
if rank == 2:
    sys.stdin.read()
try:
    ping(group, timeout_s=2.0)
except RanksLost as error:
    say("lost", error.message)
"""
    with ranks(PING + code, 3, tmp_path) as started:
        for process in started[:2]:
            wait_for(process, "looked [False, True, False, True]")
        ended = ends(started[:2])
    assert [code for code, _, _ in ended] == [0, 0], ended
    (lost,) = ended[0][1]
    assert "Ranks 2 failed to pass monitoredBarrier in 2000 ms" in lost
    assert ended[1][1][0].startswith("lost a rank of this job has ended, or did not answer in time")


@pytest.mark.slow
def test_a_process_group_that_hangs_while_gloo_answers_is_told_apart(tmp_path: Path):
    # Rank 1 has a collective of its own underway: the next one waits behind it forever.
    code = """
import torch
from ckptctl.train import liveness
group = make_group()
if rank == 1:
    dist.all_reduce = lambda *args, **kwargs: sys.stdin.read()
try:
    ping(group, timeout_s=2.0)
except RanksLost as error:
    say("lost", error.message)
    os._exit(0)
os._exit(0)
"""
    with ranks(PING + code, 2, tmp_path) as started:
        wait_for(started[0], "looked")
        ((status, (lost,), _),) = ends(started[:1])
    assert status == 0
    assert lost == (
        "lost the ranks answer over gloo, but gloo gave no answer in 2 s: "
        "a GPU or its network hangs"
    )


@pytest.mark.slow
def test_a_gpu_without_memory_is_no_lost_rank(tmp_path: Path):
    code = """
import torch
group = make_group()
def full(*args, **kwargs):
    raise torch.OutOfMemoryError("CUDA out of memory")
torch.ones = full
try:
    ping(group, timeout_s=20.0)
except (RanksLost, torch.OutOfMemoryError) as error:
    say("problem", error)
"""
    with ranks(PING + code, 2, tmp_path) as started:
        for process in started:
            wait_for(process, "looked")
        ended = ends(started)
    assert [(code, out) for code, out, _ in ended] == [(0, ["problem CUDA out of memory"])] * 2
