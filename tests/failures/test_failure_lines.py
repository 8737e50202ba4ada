"""Single lines, labelled: what each is evidence of, alone."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

import ckptctl
from ckptctl import errors
from ckptctl.failures.results import CLASSES

HERE = Path(__file__).parent


def labelled(name: str) -> list[tuple[str, str]]:
    """Class and text of every line; `none` for a line that is evidence of nothing."""
    rows = [line.split("\t", 1) for line in (HERE / name).read_text().splitlines()]
    return [(failure, text) for failure, text in rows]


def said(tmp_path: Path, text: str) -> str:
    log = tmp_path / "one.log"
    log.write_text(text + "\n")
    answer = ckptctl.classify(str(log))
    return answer.failure if answer.evidence else "none"


HALVES = ("lines_a.tsv", "lines_b.tsv")
LOGS = sorted(path for path in (HERE / "logs").iterdir() if path.is_dir())


@pytest.mark.parametrize("name", HALVES)
def test_every_line_is_evidence_of_what_its_label_says(name, tmp_path):
    wrong = [
        f"{want} is taken for {got}: {text}"
        for want, text in labelled(name)
        if (got := said(tmp_path, text)) != want
    ]
    assert wrong == []


OTHER_PROGRAMS = {
    # A stream from a store that ends early is the storage's, an archive on disk the data's.
    "tarfile.ReadError: unexpected end of data": "job-data",
    "tarfile.ReadError: (\"unexpected end of data @ <Pipe (('aws s3 cp s3://b/1.tar -',))>\")": (
        "infra-storage"
    ),
    "OSError: (('curl -s https://b/1.tar',), {'bufsize': 8192}): exit 56 (read) {'rank': 3}": (
        "infra-storage"
    ),
    "Exception: (\"((' gsutil cat gs://b/1.tar',)): exit 1 (read) {}\", <gopen.Pipe object>)": (
        "infra-storage"
    ),
    "urllib3.exceptions.IncompleteRead: IncompleteRead(12 bytes read, 34 more expected)": (
        "infra-storage"
    ),
    "OSError: 3276800 requested and 12345 written": "infra-storage",
    "File.lua:210: write error: wrote 397 blocks instead of 412": "infra-storage",
    "RESOURCE_EXHAUSTED: Attempting to reserve 6.48G at the bottom of memory.": "job-oom",
    "(1) Resource exhausted: Attempting to allocate 180.59M. That was not possible.": "job-oom",
    "job preempted (node failure)": "infra-node",
    "node n7 requested job terminate - received SISTER_EOF from its sister": "infra-node",
    # The letters of a store within other words are none.
    "RuntimeError: received errors from rank 3. Please check rank 3 logs: Timed out": "unknown",
    "RuntimeError: the settings of class3 timed out": "unknown",
    "attributes of the link: the downlink is down": "none",
}


@pytest.mark.parametrize(("text", "failure"), OTHER_PROGRAMS.items())
def test_a_line_of_another_program_is_what_its_words_say(tmp_path, text, failure):
    assert said(tmp_path, text) == failure


@pytest.mark.parametrize(
    "text",
    [
        "task:37 heartbeat timeout. This indicates that the remote task has failed, got killed",
        "Terminating process because the coordinator detected missing heartbeats.",
        "ShutdownHook: lame workers found: HeartbeatManager(/job:worker/task:0)",
    ],
)
def test_a_task_that_lost_another_one_is_a_consequence(tmp_path, text):
    log = tmp_path / "one.log"
    log.write_text(text + "\n")
    answer = ckptctl.classify(str(log))
    assert answer.failure == "unknown"
    assert "only consequences" in answer.message


OWN = {
    errors.StorageUnavailable: "infra-storage",
    errors.SaveFailed: "infra-storage",
    errors.StepDamaged: "bad-checkpoint",
    errors.LoadFailed: "bad-checkpoint",
    errors.RecordUnsafe: "bad-checkpoint",
    errors.NothingToResume: "bad-checkpoint",
    errors.Fenced: "job-config",
    errors.ModelDiffers: "job-config",
    errors.StateRefused: "job-config",
    errors.AccessDenied: "job-config",
    errors.UsageError: "job-config",
    errors.GpuFailed: "infra-node",
    errors.RanksLost: "hang",
}


@pytest.mark.parametrize(("error", "failure"), OWN.items())
def test_a_job_that_ckptctl_itself_ended_is_known_by_its_error(tmp_path, error, failure):
    name = f"{error.__module__}.{error.__qualname__}"
    said_last = f"[rank0]: {name}: rank 1 on node-3: no space is left for step 200"
    assert said(tmp_path, f"Traceback (most recent call last):\n{said_last}") == failure


def test_a_step_that_could_not_be_inspected_is_a_failure_of_the_storage(tmp_path):
    words = "step 60 could not be inspected, so no older one is chosen"
    assert said(tmp_path, f"ckptctl.errors.NothingToResume: {words}") == "infra-storage"


def test_the_labels_are_classes_and_every_class_has_lines():
    lines = [row for name in HALVES for row in labelled(name)]
    assert {failure for failure, _ in lines} == set(CLASSES) - {"unknown"}
    assert len(lines) >= 400


@pytest.mark.parametrize("folder", LOGS, ids=lambda path: path.name)
def test_whole_logs_are_of_the_class_that_their_folder_is_named_after(folder):
    answer = ckptctl.classify(f"{folder}/")
    assert answer.failure == folder.name.split("--")[0]


@pytest.mark.parametrize("folder", LOGS, ids=lambda path: path.name)
def test_the_order_of_the_files_changes_nothing(folder):
    files = sorted(map(str, folder.iterdir()))
    assert ckptctl.classify(files[::-1]).failure == ckptctl.classify(files).failure


def test_a_program_that_prints_what_a_kernel_says_is_not_believed(tmp_path):
    text = "[rank0]: INFO NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."
    assert said(tmp_path, text) == "none"


def test_the_driver_that_a_kernel_log_names_is_not_taken_for_a_host(tmp_path):
    text = "nvidia-nvswitch3: SXid (PCI:0000:c5:00.0): 20034, Fatal, Link 30 LTSSM Fault Up"
    log = tmp_path / "one.log"
    for front, node in (("Nov 20 13:00:00 dgx-04 kernel: ", "dgx-04"), ("[ 1234.567890] ", None)):
        log.write_text(front + text + "\n")
        answer = ckptctl.classify(str(log))
        assert (answer.failure, answer.node) == ("infra-fabric", node)


def test_the_hang_that_ends_the_watchdog_itself_is_a_hang(tmp_path):
    text = (
        "[rank2]:[F1120 03:00:00.000 ProcessGroupNCCL.cpp:1557] [PG ID 0 PG GUID 0(default_pg) "
        "Rank 2] Terminating the process after attempting to dump debug info, due to "
        "ProcessGroupNCCL watchdog hang."
    )
    assert said(tmp_path, text) == "hang"


def test_the_scores_in_the_documents_are_those_of_the_corpus():
    tool = runpy.run_path(str(HERE.parents[1] / "tools" / "classify_scores.py"))
    text = tool["PAGE"].read_text()
    assert tool["renewed"](text) == text, "run: python tools/classify_scores.py"


FRAMES = 'Traceback (most recent call last):\n  File "train.py", line 9, in step\n    raise error\n'
RAISED = {
    "job-code": "KeyError: 'lm_head'",
    "job-oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "infra-storage": "botocore.exceptions.ReadTimeoutError: Read timeout on endpoint URL: "
    '"https://b.s3.amazonaws.com/step-40"\n\nDuring handling of the above exception, another '
    f"exception occurred:\n\n{FRAMES}AttributeError: 'ReadTimeoutError' has no attribute 'code'",
}
ONE_LINE = {
    "the message of a record": lambda text: json.dumps({"level": "ERROR", "message": text}),
    "a field of a record": lambda text: json.dumps(
        {"level": "error", "message": "step 40 failed", "exc_info": text}
    ),
    "a record within a record": lambda text: json.dumps(
        {"log": json.dumps({"severity": "ERROR", "message": f"rank 3 failed: {text}"})}
    ),
    "the bytes of a process": lambda text: f"worker 3 failed: {text.encode()!r}",
    "a field that is escaped twice": lambda text: f"reason={json.dumps(json.dumps(text))}",
}


@pytest.mark.parametrize("form", ONE_LINE)
@pytest.mark.parametrize("failure", RAISED)
def test_a_traceback_within_one_line_is_read_like_one_of_several_lines(failure, form, tmp_path):
    text = FRAMES + RAISED[failure] + "\n"
    assert said(tmp_path, text) == failure
    assert said(tmp_path, ONE_LINE[form](text)) == failure


@pytest.mark.parametrize(
    "record",
    [
        {"level": "WARNING", "message": "no kernel was built, the slow path is used"},
        {"level": "ERROR", "message": "upload failed, retrying in 3 s"},
        {"level": "ERROR", "message": "the previous attempt failed:"},
    ],
)
def test_a_traceback_after_which_the_program_goes_on_decides_nothing(record, tmp_path):
    log = tmp_path / "one.log"
    log.write_text(json.dumps({**record, "exc_info": FRAMES + RAISED["job-code"]}) + "\n")
    assert ckptctl.classify(str(log)).failure == "unknown"


@pytest.mark.parametrize("fault", [13, 31])
@pytest.mark.parametrize(("device", "failure"), [("3b", "infra-node"), ("5e", "job-code")])
def test_a_fault_of_a_program_yields_to_the_failure_of_the_same_device(
    fault, device, failure, tmp_path
):
    log = tmp_path / "dmesg.log"
    log.write_text(
        f"[  71.5] NVRM: Xid (PCI:0000:3b:00): {fault}, pid=7, name=python, Ch 00000010\n"
        f"[  99.5] NVRM: Xid (PCI:0000:{device}:00): 62, pid=7, name=python, 20238a3a\n"
    )
    assert ckptctl.classify(str(log)).failure == failure


@pytest.mark.parametrize(
    "text",
    [
        "3 reads met a timeout of 30 s",
        "17 of 64 pods Preempted",
        "12 requests past their deadline",
        "WARNING Sequence group 17 is preempted by PreemptionMode.RECOMPUTE mode",
        "2026-Aug-01 16:14 loader met a timeout",
    ],
)
def test_a_sentence_with_a_word_of_the_scheduler_is_no_report_of_it(text, tmp_path):
    assert said(tmp_path, text) == "none"


OF_OTHER_SYSTEMS = {
    "EI0002: The wait execution of the Notify register times out. Reason: no record": "hang",
    "[rank1]: RuntimeError: OPS function error: HcclAllreduce, error code is 6\n"
    "[rank1]: EI0006: [PID: 7] 2026-04-08-18:07:20.436 Getting socket times out.": "hang",
    "2026-Aug-01 16:14:43.0241 77:78 [29] bootstrap.cc:89 CCOM WARN Timeout waiting for incoming "
    "connection (waited 120 sec)": "hang",
    "Warning  Evicted  4m51s  kubelet  Pod ephemeral local storage usage exceeds the total limit "
    "of containers 5Gi.": "job-config",
    'Warning  Evicted  3s  kubelet  Usage of EmptyDir volume "scratch" exceeds the limit '
    '"1Gi".': "job-config",
    "Message:  The node was low on resource: ephemeral-storage.": "infra-storage",
}


@pytest.mark.parametrize(("text", "failure"), OF_OTHER_SYSTEMS.items())
def test_collectives_and_limits_of_other_systems_are_told_apart(text, failure, tmp_path):
    assert said(tmp_path, text) == failure


TASK_FAILED = "srun: error: n097: task 5: Exited with exit code 255\n"
STEP_ENDED = "slurmstepd: error: *** STEP 403.0 ON n096 CANCELLED AT 2026-11-20T17:52:24 ***\n"


@pytest.mark.parametrize(
    ("text", "failure"),
    [(TASK_FAILED + STEP_ENDED, "unknown"), (STEP_ENDED + TASK_FAILED, "user")],
)
def test_a_step_that_srun_cancels_behind_a_failed_task_was_not_cancelled_by_hand(
    text, failure, tmp_path
):
    log = tmp_path / "job.log"
    log.write_text(text)
    assert ckptctl.classify(str(log)).failure == failure


def test_a_batch_script_that_cannot_be_started_drains_no_node(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(
        "slurmstepd: error: execve(): /spool/job81/slurm_script: No such file or directory"
    )
    found = ckptctl.classify(str(log))
    assert (found.action.value, found.confidence) == ("investigate", "low")


def test_a_configuration_that_is_not_json_does_not_accuse_the_data(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(
        "Traceback (most recent call last):\n"
        '  File "/opt/lib/python3.11/site-packages/accelerate/deepspeed.py", line 68, in load\n'
        "    config = json.load(file)\n"
        '  File "/usr/lib/python3.11/json/decoder.py", line 355, in raw_decode\n'
        "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)\n"
    )
    found = ckptctl.classify(str(log))
    assert (found.action.value, found.confidence, found.restart.value) == (
        "investigate",
        "low",
        "once",
    )


def test_words_of_argparse_do_not_make_its_error_harmless(tmp_path):
    log = tmp_path / "job.log"
    log.write_text("train.py: error: argument --fp8: ignored explicit argument 'true'\n")
    assert ckptctl.classify(str(log)).failure == "job-config"


def test_an_import_while_python_ends_is_no_configuration(tmp_path):
    log = tmp_path / "job.log"
    log.write_text("ImportError: sys.meta_path is None, Python is likely shutting down\n")
    assert ckptctl.classify(str(log)).failure == "unknown"


def test_a_closed_terminal_counts_where_the_handler_of_a_log_met_the_signal(tmp_path):
    log = tmp_path / "job.log"
    error = (
        "torch.distributed.elastic.multiprocessing.api.SignalException: Process 161 got signal: "
    )
    log.write_text(
        "--- Logging error ---\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/torch/distributed/elastic/multiprocessing/api.py", line 85, in handler\n'
        "    raise SignalException(sigval)\n"
        f"{error}1\n\n"
        "During handling of the above exception, another exception occurred:\n\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/torch/distributed/elastic/multiprocessing/api.py", line 85, in handler\n'
        "    raise SignalException(sigval)\n"
        f"{error}15\n"
    )
    assert ckptctl.classify(str(log)).failure == "user"


TRIED = (
    "[W socket.cpp:663] [c10d] The client socket has failed to connect to [localhost]:29500 "
    "(errno: 99 - Cannot assign requested address)."
)
REPLACED = (
    "slurmstepd: error: couldn't chdir to `/home/u': No such file or directory: going to /tmp"
)


@pytest.mark.parametrize("before", [TRIED, REPLACED])
def test_a_warning_of_the_start_hides_no_error(before, tmp_path):
    log = tmp_path / "job.log"
    log.write_text(
        f"{before}\n"
        "Traceback (most recent call last):\n"
        '  File "/opt/app/train.py", line 80, in main\n'
        "    loss.backward()\n"
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    )
    assert ckptctl.classify(str(log)).failure == "job-oom"


def test_a_program_that_reports_a_memory_error_of_a_gpu_is_no_driver(tmp_path):
    log = tmp_path / "job.log"
    error = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
    log.write_text(error + "\n")
    assert (ckptctl.classify(str(log)).failure, ckptctl.classify(str(log)).confidence) == (
        "infra-node",
        "medium",
    )
    log.write_text(f"sample 3: How do I fix {error}?\n")
    assert ckptctl.classify(str(log)).failure == "unknown"


def test_torch_writes_the_month_without_a_zero(tmp_path):
    log = tmp_path / "job.log"
    log.write_text(
        "[rank4]:[E602 11:18:52.536602063 ProcessGroupNCCL.cpp:1896] [PG ID 1 Rank 4] Watchdog "
        "caught collective operation timeout: WorkNCCL(SeqNum=158, OpType=ALLREDUCE) ran for 60004 "
        "milliseconds before timing out.\n"
    )
    (evidence,) = ckptctl.classify(str(log)).evidence
    assert evidence.at_s is not None
    assert evidence.text.startswith("[PG ID 1 Rank 4]")


ASKING = {
    "node1: fatal: what is left of the disk: write failed: [Errno 28] No space left on device": (
        "infra-storage"
    ),
    "ERROR: what is this? CUDA error: an illegal memory access was encountered": "job-code",
    "Checking why is the GPU lost: NVML: GPU is lost": "infra-node",
    "RuntimeError: I know what is wrong: [Errno 28] No space left on device": "infra-storage",
    "RuntimeError: I do not know what is wrong: NCCL error: unhandled system error": "unknown",
    "How can I avoid RuntimeError: CUDA error: an illegal memory access was encountered": "none",
    "sample 3: why is there NCCL error: unhandled system error?": "none",
    "sample 3: what does [Errno 28] No space left on device mean?": "none",
}


@pytest.mark.parametrize(("text", "failure"), ASKING.items())
def test_only_a_question_about_an_error_is_no_report(text, failure, tmp_path):
    assert said(tmp_path, text) == failure
