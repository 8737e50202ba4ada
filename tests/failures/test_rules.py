"""The rules of `classify`: generated from TOML, unique, and each with patterns that compile."""

from __future__ import annotations

import runpy
from collections import Counter
from pathlib import Path

import pytest
from every_case import all_cases
from test_accelerators import ACCELERATORS
from test_calibration import FORMS

from ckptctl.failures.matching import FailureLogReader
from ckptctl.failures.results import CLASSES
from ckptctl.failures.rules import RULES, find_literals

REPOSITORY = Path(__file__).resolve().parent.parent.parent
TOOL = runpy.run_path(str(REPOSITORY / "tools" / "failure_rules.py"))


def test_the_generated_rules_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["failure_rules.py", "--check"])
    assert TOOL["main"]() == 0


@pytest.mark.parametrize("pattern", ["[Ff]ailed to", "(?:S3|gs|s3).*timeout", "loss (?:NaN|nan)"])
def test_a_text_in_two_cases_is_refused(pattern: str) -> None:
    with pytest.raises(SystemExit, match="in another case"):
        TOOL["_bounded"](pattern)


def test_a_rule_names_a_class_and_compiles() -> None:
    with all_cases() as case:
        for rule in RULES:
            with case(f"{rule.name} {rule.role.value}"):
                assert rule.failure in CLASSES or rule.failure == "unknown"
                assert rule.literals or rule.ending
                assert rule.pattern.groups >= 0


def test_no_two_rules_of_one_name_have_the_same_role() -> None:
    counted = Counter((rule.name, rule.role) for rule in RULES)
    assert [name for name, n in counted.items() if n > 1] == []


CORPUS = Path(__file__).parent
_FRAME = 'Traceback (most recent call last):\\n  File "/job/a.py", line 1, in f\\n    '
# Lines for the rules that no line of the corpus is for, in words of the project.
EXAMPLES = {
    "gpu.driver": "n5:240:240 [0] misc/nvmlwrap.cc:100 NCCL WARN nvmlInit_v2() failed: "
    "Driver/library version mismatch",
    "slurm.folder": "slurmstepd: error: couldn't chdir to `/home/u': No such file or directory",
    "slurm.script-start": "slurmstepd: error: execve(): /var/spool/slurmd/job8123/slurm_script: No "
    "such file or directory",
    "hub.name": "OSError: Can't load tokenizer for 'llama-7b'. If you were trying to load it from",
    "cuda.ordinal": "RuntimeError: CUDA error: invalid device ordinal",
    "network.route": "n5:240:240 [6] misc/socket.cc:533 NCCL WARN socketPollConnect: Connect to "
    "10.0.0.4<56849> returned 113(No route to host) errno 115(Operation now in progress)",
    "neuron.driver": "2026-Nov-20 03:12:44.0082 11:11 ERROR NRT:nrt_init   Unable to determine "
    "Neuron Driver version. Please check aws-neuron-dkms package is installed.",
    "ckptctl.storage": "ckptctl.errors.StorageUnavailable: s3://runs: no answer",
    "ckptctl.damaged": "ckptctl.errors.StepDamaged: run step 40: a shard is cut short",
    "ckptctl.fenced": "ckptctl.errors.Fenced: another attempt owns the root",
    "ckptctl.refused": "ckptctl.errors.StateRefused: the step has no optimizer",
    "ckptctl.gpu": "ckptctl.errors.GpuFailed: rank 3 on node017: wrong product",
    "ckptctl.ranks-lost": "ckptctl.errors.RanksLost: ranks 3 and 7 sent no heartbeat",
    "scheduler.node": "job preempted (node failure)",
    "storage.short-write": "OSError: 3276800 requested and 12345 written",
    "storage.stream": "OSError: (('curl -s https://b/1.tar',)): exit 56 (read) {'rank': 3}",
    "xid.other": "NVRM: Xid (PCI:0000:3b:00): 199, pid=7, name=python",
    "kernel.amd": "[  71.5] amdgpu 0000:c1:00.0: amdgpu: 2 uncorrectable hardware errors detected",
    "kernel.panic": "[  71.5] Kernel panic - not syncing: stop",
    "kernel.sxid-nonfatal": "[  71.5] nvidia-nvswitch3: SXid (PCI:0000:85:00.0): 19999, Non-fatal",
    "gpu.not-visible": "RuntimeError: No CUDA GPUs are available",
    "config.compiler": "RuntimeError: Failed to find C compiler. Please specify via CC",
    "nccl.plugin-setup": "n5:7:7 [0] NCCL WARN NET/OFI OFI fi_getinfo() call failed: No data",
    "nccl.system": "ncclSystemError: a call to the system failed",
    "kubernetes.container": "    Reason:       StartError",
    "gpu.container": "nvidia-container-cli: initialization error: nvml error: driver not loaded",
    "gpu.dcgm": "dcgm diagnostic of node017: memory Result: Fail",
    "slurm.cancelled-state": "JobState=CANCELLED ExitCode=0:0",
    "slurm.task-killed": "srun: error: node017: task 3: Killed",
    "slurm.comm": "srun: error: step: Zero Bytes were transmitted or received",
    "kubernetes.storage-limit": "Container train exceeded its local ephemeral storage limit",
    "kubernetes.deleted": "Job was deleted by the owner",
    "kubernetes.unscheduled": "Warning  FailedScheduling  no node fits",
    "nccl.cuda": "ncclUnhandledCudaError: a call to CUDA failed",
    "nccl.internal": "ncclInternalError: a check within the library failed",
    "collective.lagging": "[3] are the lagging ranks",
    "nvrx.stopped": "maximum restarts without progress: terminating",
    "ray.disk": "ray.exceptions.OutOfDiskError: no room is left to spill objects",
    "ray.environment": "ray.exceptions.RuntimeEnvSetupError: pip failed on a node",
    "ray.cancelled": "ray.exceptions.TaskCancelledError: task 41f0",
    "service.request": "requests.exceptions.ReadTimeout: the hub did not answer in 10 s",
    "service.timeout": "concurrent.futures._base.TimeoutError",
    "nccl.environment": "node017:7:7 [0] NCCL WARN Error : no algorithm/protocol available",
    "nccl.fabric-manager": "Failed to bind NVLink SHARP (NVLS) Multicast memory of size 4096",
    "nccl.locked-memory": "NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory",
    "slurm.node-drained": "Kill task failed   root   2026-11-20T03:12:44 gpu[12-14]",
    "slurm.task-launch": "srun: error: Task launch for 7.0 failed on node gpu12: Bad credential",
    "stop.preempted": "controller.py:118] Cluster is preempted (status: STOPPED). Recovering",
    "checkpoint.not-allowed": "WeightsUnpickler error: Unsupported global: GLOBAL app.Config",
    "checkpoint.weights-only": "_pickle.UnpicklingError: Weights only load failed.",
    "gaudi.exception": "RuntimeError: [Rank:3] FATAL ERROR :: MODULE:PT_DEVICE a node failed",
    "scheduler.quota": "An error occurred (ResourceLimitExceeded): 2 instances are the limit",
    "scheduler.platform": "Failed Reason: InternalServerError: We encountered an internal error.",
    "python.other": r"Traceback (most recent call last):\n  File _, line 1, in f\nqueue.Empty",
    "program.abort": "panic: runtime error: index out of range [3] with length 3",
    **{rule: line for rule, _, line in ACCELERATORS},
    "errno.full": "OSError: [Errno 28] Auf dem Ger\u00e4t ist kein Speicherplatz mehr: '/ckpt/a'",
    "errno.storage": "OSError: [Errno 5] Eingabe-/Ausgabefehler: '/ckpt/a'",
    "errno.storage-alone": "OSError: [Errno 5] Eingabe-/Ausgabefehler",
    "errno.memory": "OSError: [Errno 12] Nicht gen\u00fcgend Hauptspeicher verf\u00fcgbar",
    "errno.limit": "OSError: [Errno 24] Zu viele offene Dateien: 'a'",
    "errno.path": "FileNotFoundError: [Errno 2] Datei oder Verzeichnis nicht gefunden: 'a'",
    "errno.config": "OSError: [Errno 98] Die Adresse wird bereits verwendet",
    "errno.unreachable": "OSError: [Errno 113] Keine Route zum Zielrechner",
    "errno.peer": "OSError: [Errno 104] Verbindung zur\u00fcckgesetzt",
    "python.tensor": "RuntimeError: The size of tensor a (8) must match the size of tensor b (4)",
    "python.raised": rf"{_FRAME}raise Stop(7)\napp.errors.StopError: 7",
    "python.called": rf"{_FRAME}f(7)\napp.errors.StopError: 7",
    "python.unnamed": "app.errors.StopError: 7",
    "python.other-called": rf"{_FRAME}f(7)\nqueue.Empty",
    "stop.hangup": "api.py:719] Received 1 death signal, shutting down workers",
}


def corpus() -> list[str]:
    tables = [(CORPUS / name).read_text() for name in ("lines_a.tsv", "lines_b.tsv")]
    lines = [row.split("\t", 1)[1] for table in tables for row in table.splitlines()]
    for log in (CORPUS / "logs").rglob("*"):
        lines += log.read_text().splitlines() if log.is_file() else []
    return lines + [line for _, text, _ in FORMS for line in text.splitlines()]


def answered() -> set[str]:
    """The rules that a line of the corpus is evidence by."""
    return {name for line in corpus() for name in rules_of(line)}


def rules_of(line: str) -> set[str]:
    return {found.rule for found in FailureLogReader("line").take([(1, line)])}


def test_every_line_that_a_pattern_matches_contains_a_literal_of_its_rule() -> None:
    lines = [*corpus(), *EXAMPLES.values()]
    hits = find_literals(lines)
    assert [
        (rule.name, line)
        for index, line in enumerate(lines)
        for number, rule in enumerate(RULES)
        if number not in hits.rules.get(index, ()) and rule.pattern.search(line)
        if not rule.ending
        if rule.failure != "job-divergence"  # `loss scale:` of Megatron-LM is left out on purpose
    ] == []


def test_a_rule_answers_its_example() -> None:
    assert {name: rules_of(line) for name, line in EXAMPLES.items()} == {
        name: {name} for name in EXAMPLES
    }


def test_a_rule_of_an_xid_answers_a_line_with_its_number() -> None:
    numbers = [name for rule in RULES if (name := rule.name.removeprefix("xid.")).isdecimal()]
    assert numbers
    assert {
        number: rules_of(f"NVRM: Xid (PCI:0000:3b:00): {number}, pid=7, name=python")
        for number in numbers
    } == {number: {f"xid.{number}"} for number in numbers}


def test_every_rule_has_a_line_that_it_answers() -> None:
    covered = {*answered(), *EXAMPLES}
    assert [
        rule.name for rule in RULES if rule.name not in covered and not rule.name.startswith("xid.")
    ] == []
