"""Told to stop, all ranks stop at the same step: real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_line import clean_environment
from train_ranks import JOIN, ends, ranks, wait_for

from ckptctl.errors import UsageError
from ckptctl.train.graceful import GracefulStop

TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}

TRAIN = """
from ckptctl.train import GracefulStop
with GracefulStop() as stop:
    for step in range(1, 2000):
        say("step", step)
        time.sleep(0.01)
        if stop.agreed():
            say("saved", step, stop.stopped_by.name)
            break
sys.exit(stop.exit_code)
"""


# Deadlines against notices


def test_a_deadline_behind_the_kill_is_refused():
    with pytest.raises(UsageError, match="the kill comes 120 s after the signal"):
        GracefulStop(deadline_s=600, notice_s=120)


def test_the_deadline_is_nine_tenths_of_the_notice(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    assert GracefulStop(notice_s=100).deadline_s == 90
    assert GracefulStop().deadline_s == 600


@pytest.mark.slow
def test_under_torchrun_the_kill_comes_after_its_own_timeout(monkeypatch: pytest.MonkeyPatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert GracefulStop().deadline_s == 27
    with pytest.raises(UsageError, match="30 s after the signal") as caught:
        GracefulStop(deadline_s=60)
    assert "--shutdown-timeout 120" in caught.value.next_command
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "200")
    assert GracefulStop(deadline_s=60).deadline_s == 60
    assert GracefulStop(deadline_s=100, notice_s=300).deadline_s == 100


@pytest.mark.parametrize("wrong", [{"deadline_s": 0}, {"notice_s": -1}, {"every": 0}])
def test_a_number_that_makes_no_sense_is_refused(wrong: dict[str, float]):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        GracefulStop(**wrong)


def test_whoever_asks_before_entering_is_told_how():
    with pytest.raises(UsageError, match="with GracefulStop"):
        GracefulStop().agreed()


# One process


@pytest.mark.torch
def test_handlers_are_given_back_and_a_stop_that_nobody_asked_for_ends_with_0():
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        with GracefulStop() as stop:
            assert not stop.agreed()
            assert stop.exit_code == 0
            os.kill(os.getpid(), signal.SIGUSR1)
            while not stop.asked:
                time.sleep(0.001)
            assert stop.agreed()
            assert stop.agreed()
            assert (stop.exit_code, stop.stopped_by) == (128 + signal.SIGUSR1, signal.SIGUSR1)
            assert 0 < stop.left_s <= 600
        assert heard == []
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1]
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("ends_in_s", "least_s", "most_s"),
    [(-3600, 500, 600), (-120, 500, 600), (-45, 20, 27), (0, 20, 27), (60, 60, 87)],
)
def test_a_time_limit_that_is_over_was_extended(
    ends_in_s: int, least_s: int, most_s: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + ends_in_s))
    with GracefulStop() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        while stop.left_s == float("inf"):
            time.sleep(0.001)
        assert least_s < stop.left_s <= most_s


@pytest.mark.slow
@pytest.mark.torch
def test_further_signals_do_not_end_the_save(tmp_path: Path):
    saves = """
from ckptctl.train import GracefulStop
class Stop(GracefulStop):
    signals = []
    def _on_signal(self, number):
        super()._on_signal(number)
        self.signals.append(number)
with Stop() as stop:
    say("ready")
    while not stop.asked:
        time.sleep(0.01)
    say("saving")
    while len(stop.signals) < 3:
        time.sleep(0.01)
    stop.agreed()
sys.exit(stop.exit_code)
"""
    with ranks(saves, 1, tmp_path) as (process,):
        wait_for(process, "ready")
        process.terminate()
        wait_for(process, "saving")
        for number in (signal.SIGUSR1, signal.SIGTERM):
            process.send_signal(number)
        ((code, _, err),) = ends([process])
    assert code == 128 + signal.SIGTERM, err


@pytest.mark.torch
@pytest.mark.slow
def test_a_rank_that_hangs_in_a_collective_is_ended_before_the_kill_and_says_where(tmp_path: Path):
    # The main thread is in C: no Python handler would ever run.
    hang = """
import torch
from ckptctl.train import GracefulStop
with GracefulStop(deadline_s=1.0) as stop:
    say("ready")
    if rank == 0:
        dist.all_reduce(torch.zeros(1))
    time.sleep(600)
"""
    with ranks(hang, 2, tmp_path) as started:
        wait_for(started[0], "ready")
        time.sleep(0.5)
        started[0].terminate()
        ((code, _, err),) = ends(started[:1])
    assert code == 143
    assert "still running 1 s after the signal: ending now, with code 143" in err
    assert "all_reduce" in err


@pytest.mark.torch
@pytest.mark.slow
def test_a_rank_that_hangs_where_no_thread_can_be_started_is_ended(tmp_path: Path):
    hang = """
import resource
from ckptctl.train import GracefulStop
with GracefulStop(deadline_s=1.0) as stop:
    n_pages = int(open("/proc/self/statm").read().split()[0])
    n_most = n_pages * resource.getpagesize() + (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (n_most, resource.RLIM_INFINITY))
    say("ready")
    time.sleep(600)
"""
    with ranks(hang, 1, tmp_path) as (process,):
        wait_for(process, "ready")
        process.terminate()
        ((code, _, err),) = ends([process])
    assert code == 143, err
    assert "still running 1 s after the signal: ending now, with code 143" in err


# Several ranks


@pytest.mark.torch
@pytest.mark.slow
def test_one_rank_that_is_told_stops_all_at_the_same_step(tmp_path: Path):
    with ranks(TRAIN, 3, tmp_path) as started:
        wait_for(started[1], "step 5")
        started[1].send_signal(signal.SIGUSR1)
        ended = ends(started)
    assert [code for code, _, _ in ended] == [128 + signal.SIGUSR1] * 3
    saved = {line for _, out, _ in ended for line in out if line.startswith("saved")}
    assert len(saved) == 1
    assert saved.pop().endswith("SIGUSR1")


@pytest.mark.torch
@pytest.mark.slow
def test_a_rank_that_is_gone_is_an_error_in_the_others_and_no_stop(tmp_path: Path):
    with ranks(TRAIN, 2, tmp_path) as started:
        wait_for(started[1], "step 5")
        started[1].kill()
        ((code, out, err),) = ends(started[:1])
    assert code == 1
    assert "RanksLost: a rank of this job has ended" in err
    assert not any(line.startswith("saved") for line in out)


VALIDATE = """
from ckptctl.train import GracefulStop
def validate(stop):
    for batch in range(2000):
        say("batch", batch)
        time.sleep(0.01)
        if stop.agreed():
            return
with GracefulStop() as stop:
    for step in range(1, 4):
        say("step", step)
        if step == 2:
            validate(stop)
        if stop.agreed():
            say("saved", step)
            break
sys.exit(stop.exit_code)
"""


@pytest.mark.torch
@pytest.mark.slow
def test_a_stop_in_the_middle_of_validation_saves_the_training_step_before_it(tmp_path: Path):
    with ranks(VALIDATE, 2, tmp_path) as started:
        wait_for(started[0], "batch 3")
        started[0].terminate()
        ended = ends(started)
    assert [code for code, _, _ in ended] == [143, 143], ended
    assert [out[-1] for _, out, _ in ended] == ["saved 2", "saved 2"]


# Workers

LOADER = """
from torch.utils.data import DataLoader, Dataset
from ckptctl.train import GracefulStop, outlive_stop
class Slow(Dataset):
    def __len__(self):
        return 10_000
    def __getitem__(self, index):
        time.sleep(0.02)
        return index
loader = DataLoader(
    Slow(), num_workers=2, worker_init_fn=outlive_stop, multiprocessing_context="fork"
)
with GracefulStop() as stop:
    batches = iter(loader)
    for step, batch in enumerate(batches, 1):
        say("step", step)
        if step == 3:
            say("worker", batches._workers[0].pid)
        if stop.agreed():
            time.sleep(2)
            say("saved", step)
            break
sys.exit(stop.exit_code)
"""


@pytest.mark.torch
@pytest.mark.slow
def test_workers_outlive_a_signal_to_all_processes_of_the_job(tmp_path: Path):
    with ranks(LOADER, 1, tmp_path) as (process,):
        wait_for(process, "step 5")
        os.killpg(process.forked, signal.SIGTERM)
        ((code, out, err),) = ends([process])
    assert (code, err) == (143, "")
    assert out[-1].startswith("saved")


@pytest.mark.torch
@pytest.mark.slow
def test_a_worker_that_alone_is_told_dies_and_the_trainer_is_not_told_to_stop(tmp_path: Path):
    with ranks(LOADER, 1, tmp_path) as (process,):
        while not (line := process.stdout.readline()).startswith("worker"):
            assert line
        os.kill(int(line.split()[1]), signal.SIGTERM)
        ((code, out, err),) = ends([process])
    assert code == 1
    assert "is killed by signal: Terminated" in err
    assert not any(each.startswith("saved") for each in out)


# Under torchrun


@pytest.mark.torch
@pytest.mark.slow
def test_torchrun_that_is_told_to_end_lets_its_processes_save(tmp_path: Path):
    script = tmp_path / "train.py"
    joined = JOIN.replace(
        "rank, size, meet = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]\n", "size = 1\n"
    )
    script.write_text(joined + 'dist.init_process_group("gloo")\n' + TRAIN)
    started = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)],
        env=clean_environment(OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(started, "step 5")
        started.terminate()
        out, _ = started.communicate()
    finally:
        started.kill()
    saved = [line for line in out.splitlines() if line.startswith("saved")]
    assert saved == saved[:1] * 2, out
