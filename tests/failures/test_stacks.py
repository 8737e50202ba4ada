"""Stacks of py-spy and faulthandler: which rank is elsewhere, and where."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import ckptctl

WAITING = """Process {pid}: python train.py
Python v3.11.7 (/usr/bin/python3.11)

Thread {pid} (active): "MainThread"
    all_reduce (torch/distributed/distributed_c10d.py:2810)
    wrapper (torch/distributed/c10d_logger.py:83)
    reduce_loss (train.py:{line})
    main (train.py:120)
    <module> (train.py:140)
Thread {pid} (idle): "QueueFeederThread"
    wait (threading.py:320)
    _feed (multiprocessing/queues.py:231)
"""
LOADING = """Process 903: python train.py
Thread 903 (active): "MainThread"
    read (data.py:77)
    next_batch (data.py:31)
    main (train.py:118)
    <module> (train.py:140)
"""
# A process that stops in one function, and prints its stacks by faulthandler after a while.
PROGRAM = """
import faulthandler, sys, threading, time
faulthandler.dump_traceback_later(0.5, exit=True, file=open(sys.argv[1], "w"))
class reduce:
    def wait(self):
        time.sleep(60)
def {function}():
    {body}
{function}()
"""


def write(folder: Path, stacks: dict[int, str]) -> str:
    for rank, text in stacks.items():
        (folder / f"stack-rank{rank}.txt").write_text(text)
    return f"{folder}/"


def test_the_rank_that_is_not_in_a_collective_is_named_with_its_place(tmp_path):
    stacks = {rank: WAITING.format(pid=900 + rank, line=52) for rank in (0, 1, 2)} | {3: LOADING}
    answer = ckptctl.classify(write(tmp_path, stacks))
    assert (answer.failure, answer.confidence) == ("hang", "low")
    assert answer.evidence[0].ranks == (3,)
    assert "read (data.py:77)" in answer.message
    assert "3 other ranks wait at reduce_loss (train.py:52)" in answer.message


def test_the_rank_that_waits_at_another_line_than_the_others_is_named(tmp_path):
    stacks = {rank: WAITING.format(pid=900 + rank, line=52) for rank in range(5)}
    stacks[4] = WAITING.format(pid=904, line=97)
    answer = ckptctl.classify(write(tmp_path, stacks))
    assert answer.evidence[0].ranks == (4,)
    assert "reduce_loss (train.py:97)" in answer.message


@pytest.mark.parametrize("ranks", [(0, 1), (0, 1, 2, 3)])
def test_stacks_that_are_alike_name_no_rank(tmp_path, ranks):
    stacks = {rank: WAITING.format(pid=900 + rank, line=52) for rank in ranks}
    answer = ckptctl.classify(write(tmp_path, stacks))
    assert answer.failure == "hang"
    assert answer.suspects == ()


# Dumped by py-spy 0.4.3 from a job of four ranks (DistributedDataParallel, gloo, torch 2.13 on
# Python 3.11) whose rank 2 stops in its fourth step.
STOPPED = {
    "collective": ("train (train.py:63), in barrier", "train (train.py:60), in Tensor.backward"),
    "data-loader": (
        "train (train.py:58), in _BaseDataLoaderIter.__next__",
        "train (train.py:60), in Tensor.backward",
    ),
    "dcp-save": ("save_dcp (train.py:50), in Path.open", "save_dcp (train.py:50), in all_gather"),
    "save": ("SlowDisk.__reduce__ (train.py:33)", "save (train.py:42), in barrier"),
}


@pytest.mark.parametrize("place", STOPPED)
def test_the_rank_that_stops_is_named_from_real_dumps(place):
    answer = ckptctl.classify(f"{Path(__file__).parent / 'stacks' / place}/")
    here, others = STOPPED[place]
    assert (answer.failure, answer.evidence[0].ranks) == ("hang", (2,))
    assert answer.message == (
        f"the main thread is at {here}, and 3 other ranks wait at {others} (rank 2)"
    )


def test_ranks_at_one_place_wait_for_the_rank_that_is_elsewhere(tmp_path):
    # `loss.item()` waits in C++, so its stack has no frame of torch.
    item = LOADING.replace("    read (data.py:77)\n    next_batch (data.py:31)\n", "")
    folder = write(tmp_path, {0: item, 1: item, 2: LOADING, 3: item})
    assert ckptctl.classify(folder).evidence[0].ranks == (2,)


def test_a_save_of_torch_is_no_wait_for_other_ranks(tmp_path):
    saving = WAITING.replace(
        "    all_reduce (torch/distributed/distributed_c10d.py:2810)\n"
        "    wrapper (torch/distributed/c10d_logger.py:83)\n",
        "    write_data (torch/distributed/checkpoint/filesystem.py:700)\n"
        "    save (torch/distributed/checkpoint/state_dict_saver.py:170)\n",
    )
    stacks = {rank: WAITING.format(pid=900 + rank, line=52) for rank in (0, 1, 3)}
    answer = ckptctl.classify(write(tmp_path, stacks | {2: saving.format(pid=902, line=52)}))
    assert answer.evidence[0].ranks == (2,)


def test_a_stack_with_the_prefix_of_a_launcher_is_of_that_rank(tmp_path):
    stacks = {rank: WAITING.format(pid=900 + rank, line=52) for rank in (0, 1, 2)} | {3: LOADING}
    lines = [f"[rank{rank}]: {line}" for rank, text in stacks.items() for line in text.split("\n")]
    (tmp_path / "job.log").write_text("\n".join(lines))
    assert ckptctl.classify(str(tmp_path / "job.log")).evidence[0].ranks == (3,)


def test_stacks_of_faulthandler_are_read(tmp_path):
    for rank in range(4):
        module = tmp_path / "torch" / "distributed" if rank < 3 else tmp_path
        module.mkdir(parents=True, exist_ok=True)
        name = "all_reduce" if rank < 3 else "load_sample"
        program = module / f"{name}.py"
        program.write_text(PROGRAM.format(function=name, body="reduce().wait()"))
        dump = tmp_path / "dumps" / f"stack-rank{rank}.txt"
        dump.parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, str(program), str(dump)], check=False)
    answer = ckptctl.classify(f"{tmp_path / 'dumps'}/")
    assert answer.evidence[0].ranks == (3,)
    assert "wait" in answer.message


def test_the_stacks_of_a_crash_are_no_hang(tmp_path):
    crash = (
        "Fatal Python error: Segmentation fault\n\n"
        "Current thread 0x00007f1 (most recent call first):\n"
        '  File "train.py", line 7 in step\n'
        '  File "train.py", line 9 in <module>\n'
    )
    answer = ckptctl.classify(write(tmp_path, dict.fromkeys(range(4), crash)))
    assert answer.failure != "hang"


def test_the_rank_of_a_stack_is_not_taken_from_a_folder(tmp_path):
    folder = tmp_path / "attempt-rank3"
    folder.mkdir()
    for rank in range(4):
        text = LOADING if rank == 2 else WAITING.format(pid=900 + rank, line=99)
        (folder / f"stack-rank{rank}.txt").write_text(text)
    answer = ckptctl.classify(str(folder))
    assert [each.ranks for each in answer.suspects] == [(2,)]
