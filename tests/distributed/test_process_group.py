"""Four processes, one verdict: they share the bytes, and none is missed when it is gone."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, run_program, torch_server, validated
from damage import flip
from huge_step import bytes_read, make_huge
from services.processes import free_port

from ckptctl.distributed.launcher import LaunchedRank, launched_rank
from ckptctl.distributed.process_group import ranks_lost

SIZE = 4

Copy = Callable[[Path], Path]


@pytest.fixture
def step(checkpoints: Path, copy_of: Copy) -> Path:
    return copy_of(checkpoints / "run_fsdp4") / "step_500"


def damage(step: Path) -> None:
    """Change one byte in each of two files."""
    for name in ("__0_0.distcp", "__3_0.distcp"):
        before = (step / name).stat()
        flip(step / name)
        os.utime(step / name, ns=(before.st_atime_ns, before.st_mtime_ns))


def torchrun(*words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` in four processes, forked from one that has imported torch."""
    python = torch_server().python
    launcher = (python, "-m", "torch.distributed.run", "--nproc-per-node", SIZE, "--no-python")
    return run_program(*launcher, python, *words, OMP_NUM_THREADS="1", **variables)


@contextmanager
def processes(step: Path, *args: object) -> Iterator[Sequence[subprocess.Popen[str]]]:
    """Four of the command, told their places as a launcher does, without one that ends them."""
    port = str(free_port())
    started = [
        subprocess.Popen(
            [*COMMAND, "verify", step, "--level", "content", *map(str, args)],
            env=clean_environment(
                RANK=str(rank), WORLD_SIZE=str(SIZE), MASTER_ADDR="127.0.0.1", MASTER_PORT=port
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


# Who is it?


def test_torchrun_says_the_place():
    told = {"RANK": "2", "WORLD_SIZE": "8", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
    assert launched_rank(told) == LaunchedRank(2, 8)
    assert launched_rank({**told, "WORLD_SIZE": "1", "RANK": "0"}) is None


def test_srun_says_the_place_and_its_first_node_is_where_to_meet():
    told = {
        "SLURM_PROCID": "3",
        "SLURM_STEP_NUM_TASKS": "16",
        "SLURM_JOB_ID": "1234567",
        "SLURM_STEP_NODELIST": "gpu-[007-009,012]",
    }
    launched = launched_rank({**told, "SLURM_STEP_ID": "0"})
    assert (launched.rank, launched.size, launched.step) == (3, 16, "1234567.0")
    assert launched.address[0] == "gpu-007"
    assert launched_rank({**told, "SLURM_STEP_NODELIST": "alpha,beta"}).address[0] == "alpha"


def test_two_steps_of_one_job_meet_on_different_ports_and_on_those_that_srun_reserved():
    step = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_JOB_ID": "7"}
    ports = {launched_rank({**step, "SLURM_STEP_ID": str(n)}).address[1] for n in range(8)}
    assert len(ports) == 8
    for reserved in ("12000-12003", "12000,12004", "12000"):
        launched = launched_rank({**step, "SLURM_STEP_RESV_PORTS": reserved})
        assert launched.address[1] == 12000


def test_a_batch_script_of_a_large_job_is_one_process():
    assert launched_rank({"SLURM_PROCID": "0", "SLURM_NTASKS": "64", "SLURM_JOB_ID": "7"}) is None
    assert launched_rank({}) is None


def test_what_a_training_process_starts_stays_out_of_its_job():
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    code = (
        "import os, subprocess, sys\n"
        "said = 'import os; from ckptctl.distributed.launcher import launched_rank; '\n"
        "said += 'print(launched_rank(os.environ))'\n"
        "subprocess.run([sys.executable, '-c', said], check=True)\n"
    )
    done = run_program(sys.executable, "-c", code, **told)
    assert done.stdout == "None\n"


@pytest.mark.torch
@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, "MASTER_PORT is not set"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT is 'x'"),
        ({"MASTER_PORT": "70000"}, "MASTER_PORT is '70000'"),
        ({"MASTER_PORT": "29500", "RANK": "5"}, "RANK is 5, and WORLD_SIZE is 2"),
    ],
)
def test_variables_that_no_launcher_sets_are_a_usage_error(changed, wrong, tmp_path):
    place = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", **changed}
    done = run_program(*COMMAND, "verify", tmp_path, "--level", "content", **place)
    assert done.returncode == 2, done.stderr
    assert wrong in done.stderr


# Four real processes


@pytest.mark.torch
@pytest.mark.slow
def test_torchrun_gives_one_report_in_which_every_byte_is_proven(step, tmp_path):
    report_file = tmp_path / "report.json"
    words = ("verify", step, "--level", "content", "--json", "--report", report_file)
    done = torchrun("-m", "ckptctl", *words)
    assert done.returncode == 0, done.stderr
    report = validated(done.stdout)["report"]
    assert (report["verdict"], report["level"]) == ("complete", "content")
    assert report["bytes_proven"] == report["bytes_in_records"] > 0
    assert report["records_proven"] == report["n_records"]
    assert json.loads(report_file.read_text())["report"] == report


@pytest.mark.torch
@pytest.mark.slow
def test_all_processes_end_with_the_code_that_the_bytes_of_two_of_them_give(step):
    damage(step)
    with processes(step, "--json") as started:
        said = [process.communicate() for process in started]
    assert [process.returncode for process in started] == [21] * SIZE
    assert [out for out, _ in said[1:]] == [""] * (SIZE - 1)
    report = validated(said[0][0])["report"]
    faults = [one["where"] for one in report["findings"] if one["severity"] == "fault"]
    assert faults == ["__0_0.distcp", "__3_0.distcp"]
    assert report["records_proven"] == report["n_records"] - 2


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 2])
def test_a_process_that_is_killed_is_an_error_in_all_others_and_never_a_pass(step, tmp_path, lost):
    make_huge(step)
    report_file = tmp_path / "report.json"
    with processes(step, "--report", report_file) as started:
        # What torch itself reads when it is imported is far below a gigabyte.
        reader = reading(started)
        victim = started[lost] if started[lost] is not reader else started[lost + 1]
        victim.send_signal(signal.SIGKILL)
        codes = [process.wait() for process in started]
        said = started[0].stderr.read()
    assert sorted(codes) == [-9, 75, 75, 75]
    if victim is not started[0]:
        document = validated(report_file.read_text())
        assert (document["exit_code"], document["ok"]) == (75, False)
        assert "a rank of this job has ended" in said + report_file.read_text()
    else:
        assert not report_file.exists()


def reading(started: Sequence[subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """The process whose share is the huge record, once it reads it."""
    while all(process.poll() is None for process in started):
        for process in started:
            if bytes_read(process.pid) > 2 << 30:
                return process
        time.sleep(0.05)
    raise AssertionError("a process has ended before the bytes were read")


def steps_of_slurm(*steps: tuple[str, Path, str]) -> list[tuple[int, str, str]]:
    """Verify in two processes of each of these steps (id, what, port of the step) at one time.

    The exit code, standard output and standard error of each process, step by step.
    """
    started = [
        subprocess.Popen(
            [*COMMAND, "verify", target, "--level", "content", "--json"],
            env=clean_environment(
                SLURM_JOB_ID="88123",
                SLURM_STEP_ID=number,
                SLURM_STEP_NUM_TASKS="2",
                SLURM_STEP_NODELIST="localhost",
                SLURM_PROCID=str(rank),
                SLURM_STEP_RESV_PORTS=port,
            ),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number, target, port in steps
        for rank in range(2)
    ]
    said = [process.communicate() for process in started]
    return [(process.returncode, *texts) for process, texts in zip(started, said, strict=True)]


@pytest.mark.torch
@pytest.mark.slow
def test_two_steps_of_one_job_verify_different_steps_at_one_time(step, checkpoints, copy_of):
    sound = copy_of(checkpoints / "run_fsdp4") / "step_500"
    damage(step)
    ended = steps_of_slurm(("0", step, ""), ("1", sound, ""))
    assert [code for code, _, _ in ended] == [21, 21, 0, 0]
    assert validated(ended[2][1])["report"]["verdict"] == "complete"


@pytest.mark.torch
@pytest.mark.slow
def test_processes_that_verify_different_steps_as_one_group_refuse(step, tmp_path):
    # One after the other: the two processes of one step are given different commands.
    port = str(free_port())
    variables = {"RANK": "", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [*COMMAND, "verify", target, "--level", "content"],
            env=clean_environment(**{**variables, "RANK": str(rank)}),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, target in enumerate((step, tmp_path))
    ]
    said = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert f"runs `ckptctl verify {tmp_path} --level content`" in said[0]
    assert said[0].count(str(step)) >= 1


SHARING = """
import os, sys, time
from ckptctl.distributed.launcher import launched_rank
from ckptctl.distributed.process_group import joined
from ckptctl.errors import CkptctlError, StorageUnavailable

def work():
    if group.rank == 2:
        raise StorageUnavailable("the mount is stale")
    # Ends by the failure of rank 2 alone.
    while True:
        on_progress(1, 2)
        time.sleep(0.01)

with joined(launched_rank(os.environ)) as group:
    on_progress = group.watch(None)
    try:
        group.share(work)
    except CkptctlError as error:
        print(f"{type(error).__name__} {error.exit_code} {error.message}")
"""


@pytest.mark.torch
@pytest.mark.slow
def test_the_error_of_one_process_ends_the_work_of_all_and_names_its_rank():
    done = torchrun("-c", SHARING)
    assert done.returncode == 0, done.stderr
    line = f"StorageUnavailable 75 rank 2 on {socket.gethostname()}: the mount is stale"
    assert done.stdout.count(line) == SIZE


UNSEEN = """
import os, sys
from ckptctl import Level, verify
from ckptctl.distributed.launcher import launched_rank
from ckptctl.distributed.process_group import joined
from ckptctl.errors import CkptctlError

step, missing = sys.argv[1:]
with joined(launched_rank(os.environ)) as group:
    own = missing if group.rank == int(os.environ["BLIND"]) else step
    try:
        verify(own, level=Level.CONTENT, group=group)
    except CkptctlError as error:
        said = f"{type(error).__name__} {error.exit_code} {error.message}\\n"
    said += f"again {verify(step, level=Level.CONTENT, group=group).exit_code}\\n"
    os.write(1, said.encode())  # in one piece: four processes write here
"""


UNSEEN_SOURCE = (
    UNSEEN.replace("import Level, verify", "import reshard")
    .replace("verify(own, level=Level.CONTENT, ", "reshard(own, target, world_size=2, ")
    .replace("verify(step, level=Level.CONTENT, ", "reshard(step, target, world_size=2, ")
    .replace("step, missing = sys.argv[1:]", "step, missing = sys.argv[1:]\ntarget = step + '-new'")
)


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "blind"), [(UNSEEN, 0), (UNSEEN, 2), (UNSEEN_SOURCE, 2)], ids=["0", "2", "reshard"]
)
def test_a_process_that_does_not_find_the_step_ends_all_with_its_error(step, tmp_path, code, blind):
    missing = tmp_path / "step_5"
    done = torchrun("-c", code, step, missing, BLIND=str(blind))
    assert done.returncode == 0, done.stderr
    line = f"PathNotFound 2 rank {blind} on {socket.gethostname()}: {missing} does not exist"
    assert done.stdout.count(line) == SIZE, done.stdout
    assert done.stdout.count("again 0") == SIZE


@pytest.mark.parametrize(("restarts", "named"), [("0", "classify"), ("1", "TORCH_DISABLE_SHARE")])
def test_ranks_that_do_not_meet_after_a_restart_by_torchrun_need_a_store_of_their_own(
    monkeypatch, restarts, named
):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", restarts)
    lost = ranks_lost(RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] refused"))
    assert named in (lost.next_command or "")
    assert ("store" in lost.message) is (restarts != "0")


@pytest.mark.torch
@pytest.mark.parametrize("lost", [(), ("lost",)], ids=["ended", "failed"])
def test_a_rank_ends_with_its_own_exit_code_right_after_a_collective(
    tmp_path: Path, lost: tuple[str, ...]
):
    program = Path(__file__).with_name("ending_ranks.py")
    result = run_program(sys.executable, program, tmp_path, 10, *lost)
    assert (result.returncode, result.stdout) == (0, ""), result.stderr
