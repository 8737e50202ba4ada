"""`ckptctl classify`: its answers, documents and exit codes."""

from __future__ import annotations

import gzip
import subprocess

import pytest
from command_line import run_ckptctl as run_alone
from command_line import validated
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl.errors import PathNotFound, UsageError
from ckptctl.failures.classifying import host_names
from ckptctl.failures.matching import FailureLogReader
from ckptctl.logs.log_lines import Deadline

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


SCANCEL = (
    "Nov 20 01:00:00 login1 slurmctld[77]: _slurm_rpc_kill_job: REQUEST_KILL_JOB JobId=4711 "
    "uid=1000\n"
)
CODE = (
    "2026-11-20 01:00:00 Traceback (most recent call last):\n"
    '  File "train.py", line 3, in main\n'
    "2026-11-20 01:00:00 KeyError: 'tokens'\n"
)
CONTAINED = LOST_GPU.replace("79, pid=1234, GPU has fallen off the bus.", "94, Contained error")


def test_the_suspected_nodes_are_printed_one_a_line_with_the_evidence_beside(tmp_path):
    other = LOST_GPU.replace("node017", "node018")
    (tmp_path / "dmesg.log").write_text(LOST_GPU + LOST_GPU.replace("3b", "af") + other)
    ran = run_ckptctl("classify", "--print-nodes", tmp_path / "dmesg.log")
    assert (ran.stdout, ran.returncode) == ("node017\nnode018\n", 0)
    assert "suspected: node017 (PCI:0000:3b:00, PCI:0000:af:00)" in ran.stderr
    assert "dmesg.log:1" in ran.stderr
    quiet = run_ckptctl("classify", "--print-nodes", "-q", tmp_path / "dmesg.log")
    assert (quiet.stdout, quiet.stderr) == ("node017\nnode018\n", "")
    document = validated(run_ckptctl("classify", tmp_path / "dmesg.log", "--json").stdout)
    assert document["suspects"] == [
        {
            "node": "node017",
            "devices": ["PCI:0000:3b:00", "PCI:0000:af:00"],
            "ranks": [],
            "confidence": "high",
        },
        {"node": "node018", "devices": ["PCI:0000:3b:00"], "ranks": [], "confidence": "high"},
    ]


def test_the_word_is_printed_alone_with_the_evidence_beside(tmp_path):
    (tmp_path / "dmesg.log").write_text(LOST_GPU)
    ran = run_ckptctl("classify", "--print-word", tmp_path / "dmesg.log")
    assert (ran.stdout, ran.returncode) == ("infrastructure\n", 0)
    assert "Xid 79" in ran.stderr


def test_no_node_is_printed_for_a_failure_of_the_job(tmp_path):
    (tmp_path / "job.log").write_text("srun: error: node016: task 3: Exited\n" + CODE)
    ran = run_ckptctl("classify", "--print-nodes", tmp_path / "job.log")
    assert (ran.stdout, ran.returncode) == ("", 0)


UNSURE = "node016:812:0 [3] NCCL WARN NET/OFI Request completed with error. RC: 15\n"
COMMUNICATORS = "".join(
    f"node{16 + rank // 2:03}:8{rank}:9{rank} [{rank % 2}] NCCL INFO ncclCommInitRank comm 0x55 "
    f"rank {rank} nranks 4 cudaDev {rank % 2} - Init COMPLETE\n"
    f"node{16 + rank // 2:03}:8{rank}:9{rank} [{rank % 2}] NCCL INFO comm 0x77 rank 0 nranks 1\n"
    for rank in range(4)
)


def test_a_node_of_low_confidence_is_printed_only_when_asked_for(tmp_path):
    (tmp_path / "job.log").write_text(UNSURE)
    ran = run_ckptctl("classify", "--print-nodes", tmp_path / "job.log")
    assert (ran.stdout, ran.returncode) == ("", 0)
    assert "suspected: node016 (GPU 3); confidence low" in ran.stderr
    asked = run_ckptctl(
        "classify", "--print-nodes", "--min-confidence", "low", tmp_path / "job.log"
    )
    assert asked.stdout == "node016\n"


def test_what_the_kernel_reports_is_printed_beside_an_unsure_answer(tmp_path):
    (tmp_path / "job.log").write_text(UNSURE)
    (tmp_path / "dmesg.log").write_text(LOST_GPU)
    answer = ckptctl.classify([str(tmp_path / "job.log"), str(tmp_path / "dmesg.log")])
    assert answer.nodes == ("node017",)


def test_the_node_of_a_named_rank_is_found_by_the_lines_of_its_communicator(tmp_path):
    lagging = "[Rank 0] [2, 3] finished collective #6, but didn't join collective #7\n"
    (tmp_path / "job.log").write_text(COMMUNICATORS + lagging)
    (suspect,) = ckptctl.classify(str(tmp_path / "job.log")).suspects
    assert (suspect.node, suspect.ranks) == ("node017", (2, 3))


@pytest.mark.slow
def test_an_endless_log_ends_at_the_deadline_and_the_answer_reports_it(tmp_path):
    endless = subprocess.Popen(["yes", "RuntimeError: shapes differ"], stdout=subprocess.PIPE)
    try:
        ran = run_alone("classify", "-", "--deadline", "10s", stdin=endless.stdout)
    finally:
        endless.kill()
        endless.communicate()
    assert ran.returncode == 0
    assert "the deadline was reached, and the rest was not read" in ran.stdout
    assert "shapes differ" in ran.stdout


def test_no_line_is_read_after_the_deadline(tmp_path):
    (tmp_path / "job.log").write_text(LOST_GPU)
    answer = ckptctl.classify(str(tmp_path / "job.log"), deadline_s=-1.0)
    assert (answer.deadline_reached, answer.n_lines, answer.failure) == (True, 0, "unknown")


def test_only_lines_before_the_deadline_are_counted():
    reader = FailureLogReader("job.log", Deadline(limit_s=-1.0))
    assert list(reader.take([(1, "step 1 loss 2.5"), (2, LOST_GPU), (3, "step 2 loss 2.4")])) == []
    assert reader.n_lines == 1


def test_hardware_that_the_kernel_names_decides_over_an_earlier_stop(tmp_path):
    (tmp_path / "a.log").write_text(SCANCEL + LOST_GPU)
    answer = ckptctl.classify(str(tmp_path / "a.log"))
    assert (answer.failure, answer.nodes) == ("infra-node", ("node017",))


def test_a_failure_of_the_job_keeps_its_word_and_the_lost_device_is_named(tmp_path):
    (tmp_path / "a.log").write_text(CODE + LOST_GPU)
    answer = ckptctl.classify(str(tmp_path / "a.log"))
    assert (answer.domain.value, answer.nodes) == ("job", ("node017",))


def test_the_worst_of_several_demands_on_a_device_decides(tmp_path):
    (tmp_path / "a.log").write_text(CONTAINED + LOST_GPU.replace("79, pid=1234, GPU has", "95, x"))
    answer = ckptctl.classify(str(tmp_path / "a.log"))
    assert (answer.action.value, answer.restart.value) == ("drain", "yes")
    alone = tmp_path / "b.log"
    alone.write_text(CONTAINED)
    assert ckptctl.classify(str(alone)).action.value == "resume"


@pytest.mark.parametrize(
    ("host", "nodes"),
    [
        ("node031", ("node031",)),
        ("node[009-011,20],gpu-a.b", ("node009", "node010", "node011", "node20", "gpu-a.b")),
        ("node[0-9999999]", ()),
        ("-rf", ()),
        ("$(reboot)", ()),
        ("a b", ()),
        ("a;b", ()),
        ("node[", ()),
        ("node[1-x]", ()),
        ("", ()),
    ],
)
def test_only_host_names_are_taken_for_nodes(host, nodes):
    assert host_names(host) == nodes


def test_a_device_without_its_node_is_a_suspect_without_a_name(tmp_path):
    (tmp_path / "dmesg.log").write_text(LOST_GPU.replace("Nov 20 03:12:44 node017 kernel: ", ""))
    answer = ckptctl.classify(str(tmp_path / "dmesg.log"))
    assert [(each.node, each.devices) for each in answer.suspects] == [(None, ("PCI:0000:3b:00",))]
    ran = run_ckptctl("classify", "--print-nodes", tmp_path / "dmesg.log")
    assert ran.stdout == ""
    assert "a node that the logs do not name (PCI:0000:3b:00)" in ran.stderr
