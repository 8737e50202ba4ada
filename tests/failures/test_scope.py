"""Evidence has a place and a time: what counts for an attempt, what is set aside, what is doubted.

Each test begins with a job that trained for minutes and ended with an exception, or in silence,
and adds one line of a machine.
"""

from __future__ import annotations

import pytest

import ckptctl
from ckptctl.failures.results import Action

STEPS = "".join(
    f"[2026-11-20 09:{n // 10:02}:{n % 10 * 6:02}] step {100 + n} | loss {2.5 - n / 1000:.4f}\n"
    for n in range(40)
)
KEY_ERROR = (
    "[rank3]: Traceback (most recent call last):\n"
    '[rank3]:   File "/opt/app/train.py", line 12, in main\n'
    "[rank3]: KeyError: 'caption'\n"
)
LOGGED = (
    "2026-11-20 09:03:56 ERROR trainer: Traceback (most recent call last):\n"
    '2026-11-20 09:03:56 ERROR trainer:   File "/opt/app/data.py", line 8, in __getitem__\n'
    "2026-11-20 09:03:56 ERROR trainer: KeyError: 'caption'\n"
)
STAMPED = (
    "[2026-11-20 09:03:56] Traceback (most recent call last):\n"
    '[2026-11-20 09:03:56]   File "/opt/app/data.py", line 8, in __getitem__\n'
    "[2026-11-20 09:03:56]     return self.rows[key]\n"
    "[2026-11-20 09:03:56] KeyError: 'caption'\n"
)
TIMEOUT = (
    "[rank0]:[E1120 09:13:56.120331234 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=3311, OpType=ALLREDUCE)\n"
)
MACHINE = {
    "a lost GPU": "NVRM: Xid (PCI:0000:9a:00): 79, pid=1, name=python, GPU has fallen off the bus.",
    "an ECC error": "NVRM: Xid (PCI:0000:9a:00): 48, pid=1, name=python, DBE (double bit error)",
    "a link": "mlx5_core 0000:41:00.0 ib3: Link down",
    "an NVSwitch": "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault",
    "a server": "nfs: server 10.1.0.9 not responding, still trying",
    "an OOM kill": "Out of memory: Killed process 7711 (python3) total-vm:9kB, anon-rss:8kB",
    "memory": "mce: [Hardware Error]: CPU 3: Machine Check Exception: 5 Bank 7: be00000000800400",
}


def _classify(folder, job, *kernel, host="node013", name="job.log"):
    (folder / name).write_text(job)
    (folder / "kern.txt").write_text(
        "".join(f"{at} {host} kernel: {text}\n" for at, text in kernel)
    )
    return ckptctl.classify([str(folder / name), str(folder / "kern.txt")])


@pytest.mark.parametrize("text", MACHINE.values(), ids=MACHINE.keys())
@pytest.mark.parametrize("at", ["Nov 20 01:03:56", "Nov 20 08:35:00", "Nov 21 05:03:56"])
@pytest.mark.parametrize("error", [KEY_ERROR, LOGGED, STAMPED], ids=["untimed", "logged", "timed"])
def test_a_line_of_another_time_does_not_decide(tmp_path, text, at, error):
    answer = _classify(tmp_path, STEPS + error, (at, text))
    assert (answer.failure, answer.confidence, answer.nodes) == ("job-code", "medium", ())
    (reason,) = answer.set_aside
    assert "kern.txt:1: " in reason
    assert ("before the first" if at < "Nov 20 09" else "after the last") in reason


CLOCKS = (
    "11/20/2026 09:0{}:00 - INFO - __main__ -   ",
    "Fri Nov 20 09:0{}:00 2026 ",
    "Nov 20 09:0{}:00 ",
    " [2026-11-20 09:0{}:00] ",
    "[rank0]:[titan] 2026-11-20 09:0{}:00,123 - root - INFO - ",
    "I1120 09:0{}:00.123456 140 train.py:10] ",
    '{{"time": "2026-11-20T09:0{}:00", "msg": "',
)


@pytest.mark.parametrize("clock", CLOCKS)
@pytest.mark.parametrize("at", ["Fri 2026-11-20 01:00:00 UTC", "2026-11-20T01:00:00,123456+00:00"])
def test_the_time_of_a_log_is_read_in_every_form(tmp_path, clock, at):
    end = '"}' if clock.startswith("{") else ""
    steps = "".join(f"{clock.format(n)}step {n} loss 2.{n}{end}\n" for n in range(9))
    answer = _classify(tmp_path, steps + KEY_ERROR, (at, MACHINE["a lost GPU"]))
    assert answer.failure == "job-code"
    assert "8 h before the first line" in answer.set_aside[0]


@pytest.mark.parametrize(
    "text", [MACHINE["a lost GPU"], MACHINE["an ECC error"], MACHINE["memory"]]
)
def test_the_same_line_as_the_job_stopped_decides(tmp_path, text):
    answer = _classify(tmp_path, STEPS + TIMEOUT, ("Nov 20 09:03:58", text))
    assert (answer.failure, answer.nodes) == ("infra-node", ("node013",))


def test_of_two_equal_lines_the_one_of_the_attempt_counts(tmp_path):
    lines = [(at, MACHINE["a lost GPU"]) for at in ("Nov 20 01:00:00", "Nov 20 09:03:58")]
    answer = _classify(tmp_path, STEPS + TIMEOUT, *lines)
    assert (answer.failure, answer.evidence[0].line) == ("infra-node", 2)
    assert len(answer.set_aside) == 1


@pytest.mark.parametrize("text", [MACHINE["a lost GPU"], MACHINE["a link"], MACHINE["an NVSwitch"]])
def test_steps_that_were_trained_after_a_line_disprove_it(tmp_path, text):
    answer = _classify(tmp_path, STEPS + KEY_ERROR, ("Nov 20 09:01:00", text))
    assert (answer.failure, answer.nodes) == ("job-code", ())
    assert [each.file.rpartition("/")[2] for each in answer.survived] == ["kern.txt"]


def test_a_server_that_does_not_answer_may_still_stop_the_next_save(tmp_path):
    line = ("Nov 20 09:01:00", MACHINE["a server"])
    assert _classify(tmp_path, STEPS + KEY_ERROR, line).failure == "job-code"
    answer = _classify(tmp_path, STEPS + TIMEOUT, line)
    assert (answer.failure, answer.confidence) == ("infra-storage", "low")


def test_a_log_without_times_leaves_open_whether_a_line_is_of_it(tmp_path):
    steps = "".join(f"step: {n}  loss: 2.{n}\n" for n in range(100, 140))
    line = ("Nov 20 02:00:00", MACHINE["a lost GPU"])
    answer = _classify(tmp_path, steps + "[rank1]: NCCL communicator was aborted\n", line)
    assert (answer.failure, answer.confidence) == ("infra-node", "medium")
    assert "the job's logs have no times" in answer.message
    assert _classify(tmp_path, steps + KEY_ERROR, line).failure == "job-code"


def test_a_clock_of_another_zone_leaves_the_time_open(tmp_path):
    line = ("Nov 20 11:04:00", MACHINE["a lost GPU"])  # Two hours later, at the end of the job
    utc = STEPS.replace("] step", "Z] step")
    answer = _classify(tmp_path, utc, line)
    assert (answer.failure, answer.confidence) == ("infra-node", "medium")
    assert "only one of the two logs has times with a zone" in answer.message
    assert _classify(tmp_path, utc + KEY_ERROR, line).failure == "job-code"
    assert _classify(tmp_path, STEPS, line).failure == "unknown"
    at_another = ("Nov 20 11:17:00", MACHINE["a lost GPU"])
    assert _classify(tmp_path, utc, at_another).failure == "unknown"


def test_a_line_without_a_time_decides_with_less_confidence(tmp_path):
    (tmp_path / "job.log").write_text(STEPS + TIMEOUT)
    (tmp_path / "dmesg").write_text(f"[1234567.123456] {MACHINE['a lost GPU']}\n")
    answer = ckptctl.classify([str(tmp_path / "job.log"), str(tmp_path / "dmesg")])
    assert (answer.failure, answer.confidence) == ("infra-node", "medium")
    assert "its time is unknown" in answer.message
    (tmp_path / "job.log").write_text(STEPS + KEY_ERROR)
    answer = ckptctl.classify([str(tmp_path / "job.log"), str(tmp_path / "dmesg")])
    assert (answer.failure, answer.action) == ("job-code", Action.FIX)


def test_a_log_that_began_without_times_leaves_open_when_the_job_began(tmp_path):
    steps = "".join(f"step: {n}  loss: 2.{n}\n" for n in range(100, 140))
    answer = _classify(tmp_path, steps + TIMEOUT, ("Nov 20 02:00:00", MACHINE["a lost GPU"]))
    assert (answer.failure, answer.confidence) == ("infra-node", "medium")
    assert "do not show when it began" in answer.message


@pytest.mark.parametrize(("job", "doubted"), [("JobId=8032", False), ("the step", True)])
def test_a_node_in_the_log_of_a_scheduler_is_of_the_job_if_the_line_names_it(
    tmp_path, job, doubted
):
    (tmp_path / "slurm-8032.out").write_text(STEPS + TIMEOUT)
    (tmp_path / "slurmctld.log").write_text(
        f"[2026-11-20T09:04:30.000] error: {job}: Node failure on node013\n"
    )
    answer = ckptctl.classify(str(tmp_path))
    assert (answer.failure, answer.confidence) == ("infra-node", "medium" if doubted else "high")
    assert bool(answer.evidence[0].doubt) is doubted


INIT = "".join(
    f"node0{20 + rank // 2}:4{rank}:77 [0] NCCL INFO comm 0x5 rank {rank} nranks 4 cudaDev 0\n"
    for rank in range(4)
)


def test_a_node_that_is_none_of_the_job_is_set_aside(tmp_path):
    line = ("Nov 20 09:03:58", MACHINE["a lost GPU"])
    answer = _classify(tmp_path, INIT + STEPS + TIMEOUT, line)
    assert (answer.failure, answer.nodes) == ("hang", ())
    assert "node013 is none of the 2 nodes of the job" in answer.set_aside[0]
    answer = _classify(tmp_path, INIT + STEPS + TIMEOUT, line, host="node021")
    assert (answer.failure, answer.confidence) == ("infra-node", "high")
    # A container has a name of its own.
    assert _classify(tmp_path, INIT + STEPS + TIMEOUT, line, host="gke-a-1").failure == "infra-node"


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        ("Out of memory: Killed process 7711 (jupyter-lab) total-vm:9kB", "job-code"),
        ("Out of memory: Killed process 7711 (python3) total-vm:9kB", "job-code"),
        ("Out of memory: Killed process 42 (python3) total-vm:9kB", "job-oom"),
        (
            "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/slurm/job_9999,task=python,pid=7",
            "job-code",
        ),
        (
            "oom-kill:constraint=CONSTRAINT_MEMCG,oom_memcg=/slurm/job_8032,task=python,pid=7",
            "job-oom",
        ),
        ("NVRM: Xid (PCI:0000:5d:00): 31, pid=999, name=other_app, MMU Fault", "job-code"),
    ],
)
def test_a_killed_process_counts_only_if_it_is_of_the_job(tmp_path, text, failure):
    job = INIT + STEPS + KEY_ERROR
    answer = _classify(tmp_path, job, ("Nov 20 09:03:58", text), host="x1", name="slurm-8032.out")
    assert answer.failure == failure
    assert answer.evidence[0].file.endswith("kern.txt") == (failure == "job-oom")


def test_the_log_of_an_earlier_attempt_is_set_aside(tmp_path):
    before = STEPS.replace("2026-11-20 09", "2026-11-20 05")
    (tmp_path / "1.log").write_text(
        before + "[rank1]: torch.OutOfMemoryError: CUDA out of memory.\n"
    )
    (tmp_path / "2.log").write_text(STEPS + KEY_ERROR)
    answer = ckptctl.classify(str(tmp_path))
    assert answer.failure == "job-code"
    assert "1.log:41: " in answer.set_aside[0]


XID_154 = "NVRM: Xid (PCI:0000:9a:00): 154, GPU recovery action changed from "


@pytest.mark.parametrize(
    ("text", "failure"),
    [
        (f"{XID_154}0x1 (GPU Reset Required) to 0x0 (None)", "unknown"),
        (f"{XID_154}0x0 (None) to 0x1 (GPU Reset Required)", "infra-node"),
        ("mlx5_core 0000:41:00.0: Port state changed from down to active", "unknown"),
        ("mlx5_core 0000:41:00.0: Port state changed from active to down", "infra-fabric"),
    ],
)
def test_a_transition_reports_its_new_state(tmp_path, text, failure):
    (tmp_path / "kern.txt").write_text(f"Nov 20 09:03:58 node013 kernel: {text}\n")
    assert ckptctl.classify(str(tmp_path / "kern.txt")).failure == failure


ENDED = "slurmstepd: error: *** JOB {job} ON n017 CANCELLED AT {at} DUE TO {why} ***\n"
OOM = (
    "Traceback (most recent call last):\n"
    '  File "/opt/app/train.py", line 12, in main\n'
    "    loss.backward()\n"
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
)
MISMATCH = (
    "Traceback (most recent call last):\n"
    '  File "/opt/app/train.py", line 12, in main\n'
    "    model.load_state_dict(state)\n"
    "RuntimeError: Error(s) in loading state_dict for GPT:\n"
)


@pytest.mark.parametrize(
    ("before", "after", "failure"),
    [
        (("2026-11-20T09:05:00", "PREEMPTION"), "[2026-11-20 09:20:10] loading\n" + OOM, "job-oom"),
        (
            ("2026-11-19T09:05:00", "NODE FAILURE"),
            "[2026-11-20 09:00:10] loading\n" + OOM,
            "job-oom",
        ),
        (("2026-11-20T09:05:00", "PREEMPTION"), "loading step 120\n" + MISMATCH, "job-config"),
        (
            ("2026-11-19T09:05:00", "NODE FAILURE"),
            ENDED.format(job=8, at="2026-11-20T10:00:00", why="TIME LIMIT"),
            "walltime",
        ),
    ],
    ids=["later", "of another day", "before the first time", "another end"],
)
def test_of_attempts_in_one_log_the_last_one_counts(tmp_path, before, after, failure):
    at, why = before
    log = tmp_path / "slurm-8.out"
    log.write_text(STEPS + ENDED.format(job=8, at=at, why=why) + after)
    answer = ckptctl.classify(str(log))
    assert (answer.failure, answer.nodes) == (failure, ())
    assert "slurm-8.out:41: " in answer.set_aside[0]
    assert "ended that attempt" in answer.set_aside[0]


@pytest.mark.parametrize(
    "after",
    [
        OOM,
        "[2026-11-20 09:05:20] saving\n" + OOM,
        # The clock of the program is UTC, and that of SLURM is not.
        "[2026-11-20 14:05:40] saving\n" + OOM,
        ENDED.replace("JOB", "STEP").format(job="8.0", at="2026-11-20T09:05:01", why="PREEMPTION"),
    ],
    ids=["untimed", "at once", "another zone", "its step"],
)
def test_what_follows_the_end_of_a_job_at_once_is_of_the_same_attempt(tmp_path, after):
    log = tmp_path / "slurm-8.out"
    end = ENDED.format(job=8, at="2026-11-20T09:05:00", why="PREEMPTION")
    log.write_text(STEPS + end + after)
    answer = ckptctl.classify(str(log))
    assert (answer.failure, answer.set_aside) == ("preemption", ())


LATE_IMPORT = (
    "Traceback (most recent call last):\n"
    '  File "/opt/app/train.py", line 12, in save\n'
    "    import boto3\n"
    "ModuleNotFoundError: No module named 'boto3'\n"
)
NO_REPOSITORY = LATE_IMPORT.replace("ModuleNotFoundError: No", "RepositoryNotFoundError: 404, no")


@pytest.mark.parametrize("error", [LATE_IMPORT, NO_REPOSITORY])
@pytest.mark.parametrize(
    ("why", "failure"), [("PREEMPTION", "preemption"), ("TIME LIMIT", "walltime")]
)
@pytest.mark.parametrize(
    "before",
    [
        "[2026-11-20 09:05:03] SIGTERM: saving\n",
        "[2026-11-20 09:05:03] saving; the next start will resume from step 139\n",
        "[2026-11-20 09:05:03] SLURM_JOB_ID=8\n",
        "".join(f"[2026-11-20 09:05:03] step {n} | loss 2.4\n" for n in (140, 139, 140, 141)),
        "",
    ],
)
def test_an_error_of_the_handler_that_saves_at_the_end_is_not_its_cause(
    tmp_path, error, why, failure, before
):
    log = tmp_path / "slurm-8.out"
    log.write_text(STEPS + ENDED.format(job=8, at="2026-11-20T09:05:00", why=why) + before + error)
    answer = ckptctl.classify(str(log))
    assert (answer.failure, answer.restart.value, answer.set_aside) == (failure, "free", ())


@pytest.mark.parametrize(
    "before",
    [
        "[2026-11-20 09:20:10] hello\n",
        "[2026-11-20 09:07:10] INFO Resuming from checkpoint step_120\n",
        "Loaded the model\n",
        "SLURM_JOB_ID=9\n",
        "step 120 | loss 2.41\n",
    ],
)
def test_an_error_of_an_import_counts_where_another_attempt_began(tmp_path, before):
    log = tmp_path / "slurm-8.out"
    end = ENDED.format(job=8, at="2026-11-20T09:05:00", why="PREEMPTION")
    log.write_text(STEPS + end + before + LATE_IMPORT)
    answer = ckptctl.classify(str(log))
    assert (answer.failure, len(answer.set_aside)) == ("job-config", 1)


def test_an_attempt_without_evidence_leaves_that_of_the_one_before(tmp_path):
    log = tmp_path / "slurm-8.out"
    end = ENDED.format(job=8, at="2026-11-20T09:05:00", why="NODE FAILURE")
    log.write_text(STEPS + end + "[2026-11-20 09:45:10] loading\n")
    assert ckptctl.classify(str(log)).failure == "infra-node"


@pytest.mark.parametrize("why", ["TIME LIMIT", "PREEMPTION"])
@pytest.mark.parametrize("timed", [True, False])
def test_steps_that_are_trained_while_a_job_is_ended_do_not_disprove_it(tmp_path, why, timed):
    steps = STEPS if timed else "".join(f"step {n} | loss {2.5 - n / 1e3:.4f}\n" for n in range(9))
    later = "".join(
        (f"[2026-11-20 09:04:1{n}] " if timed else "") + f"step {200 + n} | loss 2.1{n}\n"
        for n in range(5)
    )
    end = ENDED.format(job=8, at="2026-11-20T09:04:05", why=why)
    log = tmp_path / "slurm-8.out"
    log.write_text(steps + end + later)
    expected = "walltime" if why == "TIME LIMIT" else "preemption"
    assert ckptctl.classify(str(log)).failure == expected
    again = later.replace("09:04:", "09:44:").replace("step 20", "step 10" if timed else "step ")
    log.write_text(steps + end + again)
    assert ckptctl.classify(str(log)).failure == "unknown"


@pytest.mark.parametrize("per_epoch", [10, 950])
def test_steps_of_the_hugging_face_trainer_disprove_an_error(tmp_path, per_epoch):
    rows = "".join(f"{{'loss': 1.4{n}, 'lr': 1e-05, 'epoch': {n / per_epoch}}}\n" for n in range(5))
    log = tmp_path / "job.log"
    log.write_text(OOM + rows)
    answer = ckptctl.classify(str(log))
    assert (answer.failure, len(answer.survived)) == ("unknown", 1)
