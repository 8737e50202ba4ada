"""`ckptctl classify`: its answers, documents and exit codes."""

from __future__ import annotations

import gzip

import pytest
from command_line import run_ckptctl, validated

import ckptctl
from ckptctl.errors import PathNotFound, UsageError

LOST_GPU = (
    "Nov 20 03:12:44 node017 kernel: [12345.678901] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, "
    "GPU has fallen off the bus.\n"
)
WATCHDOG = (
    "[rank0]:[E1120 03:22:44.120331234 ProcessGroupNCCL.cpp:632] [Rank 0] Watchdog caught "
    "collective operation timeout: WorkNCCL(SeqNum=3311, OpType=ALLREDUCE)\n"
)


def test_the_first_root_beats_what_other_ranks_say_of_it(tmp_path):
    (tmp_path / "job.log").write_text(WATCHDOG)
    (tmp_path / "dmesg.log").write_text(LOST_GPU)
    answer = ckptctl.classify([str(tmp_path / "job.log"), str(tmp_path / "dmesg.log")])
    assert answer.failure == "infra-node"
    assert (answer.node, answer.device) == ("node017", "PCI:0000:3b:00")
    assert answer.evidence[0].line == 1
    assert [each.failure for each in answer.consequences] == ["hang"]


def test_the_document_is_as_its_schema_says(tmp_path):
    (tmp_path / "dmesg.log").write_text(LOST_GPU + WATCHDOG)
    ran = run_ckptctl("classify", tmp_path / "dmesg.log", "--json")
    document = validated(ran.stdout)
    assert (ran.returncode, document["failure"], document["domain"]) == (
        0,
        "infra-node",
        "infrastructure",
    )


def test_quiet_prints_whose_failure_it_is_from_standard_input():
    ran = run_ckptctl("classify", "-q", "-", input=LOST_GPU)
    assert (ran.stdout, ran.stderr, ran.returncode) == ("infrastructure\n", "", 0)


def test_a_packed_log_reads_like_a_plain_one(tmp_path):
    (tmp_path / "dmesg.log.gz").write_bytes(gzip.compress(LOST_GPU.encode()))
    assert ckptctl.classify(str(tmp_path / "dmesg.log.gz")).failure == "infra-node"


def test_a_log_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(PathNotFound, match=r"none\.log"):
        ckptctl.classify(str(tmp_path / "none.log"))


def test_nothing_to_classify_is_a_usage_error():
    with pytest.raises(UsageError, match="neither a log nor an exit code"):
        ckptctl.classify()
    assert run_ckptctl("classify").returncode == 2


@pytest.mark.parametrize(
    ("given", "failure"),
    [
        ({"exit_code": 0}, "none"),
        ({"exit_code": 1}, "unknown"),
        ({"exit_code": 1, "scheduler": "torchrun"}, "unknown"),
        ({"exit_code": 16}, "job-divergence"),
        ({"exit_code": 17}, "job-divergence"),
        ({"exit_code": 93}, "job-code"),
        ({"exit_code": 127}, "job-config"),
        ({"exit_code": 130}, "user"),
        ({"exit_code": 134}, "unknown"),
        ({"exit_code": 135}, "infra-storage"),
        ({"exit_code": 137}, "unknown"),
        ({"exit_code": -9}, "unknown"),
        ({"exit_code": "0:9"}, "unknown"),
        ({"exit_code": "0:125", "scheduler": "slurm"}, "job-oom"),
        ({"exit_code": 139}, "job-code"),
        ({"exit_code": 143}, "preemption"),
        ({"exit_code": 152}, "walltime"),
        ({"state": "OOMKilled", "exit_code": 137}, "job-oom"),
        ({"state": "OUT_OF_MEMORY"}, "job-oom"),
        ({"state": "NODE_FAIL"}, "infra-node"),
        ({"state": "TIMEOUT"}, "walltime"),
        ({"state": "PREEMPTED"}, "preemption"),
        ({"state": "Evicted"}, "infra-node"),
        ({"state": "DeadlineExceeded"}, "walltime"),
        ({"state": "COMPLETED", "exit_code": "0:0"}, "none"),
    ],
)
def test_exit_codes_and_states_say_what_they_can(given, failure):
    assert ckptctl.classify(**given).failure == failure


def test_what_is_no_exit_code_is_a_usage_error():
    with pytest.raises(UsageError, match="137, -9 or 0:9"):
        ckptctl.classify(exit_code="SIGKILL")
