"""Forms from outside incidents, in words of the project: the domain, and how certain it is.

No answer with confidence `high` may be wrong: it drains a node, or stops a job for good.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import ckptctl
from ckptctl.failures.results import CLASSES

OUTSIDE = Path(__file__).parent / "outside.tsv"

OOM = (
    "[rank5]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.00 GiB. GPU 5 has "
    "a total capacity of 79.10 GiB of which 100.00 MiB is free. Including non-PyTorch memory, "
    "this process has {} GiB memory in use."
)
OOM_OLD = (
    "RuntimeError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 1024.00 MiB total "
    "capacity; 440.00 MiB already allocated; 20.00 MiB free; 26.00 MiB cached)"
)
LOW_DISK = ("infra-storage", "low")
BAD_DATA = ("job-data", "medium")
FORMS = (
    (
        "an error in an object that is printed over several lines",
        (
            '[ERROR] error_handler: {\n  "message": {\n    "message": "OutOfMemoryError: CUDA out '
            'of memory. Tried to allocate 1.00 GiB. The \\"pool\\" is full",\n    "extraInfo": {'
        ),
        ("job-oom", "medium"),
    ),
    (
        "the notice of a spot instance",
        (
            '{"level":"warn","message":"Spot interruption payload received: {}"}\n'
            '{"level":"warn","message":"Instance is going to be interrupted in 2 minutes."}'
        ),
        ("preemption", "high"),
    ),
    (
        "a failed connection before a segmentation fault",
        (
            "node3:812:0 ucp_worker.c:1855 UCX ERROR Input/output error on the way to node4\n"
            "node3:812 Signal: Segmentation fault (11)"
        ),
        ("job-code", "low"),
    ),
    (
        "a receiver that does not answer on EFA",
        (
            "node7:44:45 [2] NCCL WARN NET/OFI Request completed with error. RC: 15. Error: "
            "Unresponsive receiver"
        ),
        ("infra-fabric", "low"),
    ),
    ("a device that others fill", OOM.format("9.50"), ("infra-node", "low")),
    ("a device that the job fills", OOM.format("78.50"), ("job-oom", "medium")),
    (
        "shared memory of the container",
        "ERROR: Unexpected bus error encountered in worker. insufficient shared memory (shm).",
        ("job-config", "low"),
    ),
    ("an error without a name", "  what():  CUDA error: unknown error", ("infra-node", "low")),
    (
        "a launcher that found a slow node",
        "[ERROR] RuntimeError: The node is a straggler and leaves the job.",
        ("infra-node", "medium"),
    ),
    (
        "a driver of Ray that lists why a worker may have died",
        (
            "ray.exceptions.ActorDiedError: The actor died unexpectedly before it finished.\n"
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
            "Worker exit detail: End of file. (1) The process is killed by the OOM killer."
        ),
        ("unknown", "low"),
    ),
    (
        "a node that Ray lost because it was preempted",
        (
            "The actor died because its node has died. Node Id: b157\n"
            "\tthe actor's node was preempted: the zone has no capacity"
        ),
        ("preemption", "medium"),
    ),
    (
        "a pod that was evicted because it used the memory of its node",
        "Reason:   Evicted\nMessage:  The node was low on resource: memory. Container train.",
        ("job-oom", "high"),
    ),
    ("a pod that was evicted for an unknown reason", "Reason:   Evicted", ("infra-node", "low")),
    ("a failed network check", "RuntimeError: Node network check failed", ("infra-node", "medium")),
    (
        "an I/O error of safetensors",
        "safetensors_rust.SafetensorError: I/O error: Bad address (os error 14)",
        ("infra-storage", "medium"),
    ),
    (
        "an I/O error without a file",
        "OSError: [Errno 5] Input/output error",
        ("infra-storage", "low"),
    ),
    (
        "an Xid in the words of a monitor",
        (
            "node66 | ERROR: nhc: check_gpu_xid: found: [ 3606.8] NVRM: Xid (PCI:0002:00:00): 119, "
            "pid=7, Timeout waiting for RPC from GSP1!"
        ),
        ("infra-node", "high"),
    ),
    (
        "an Xid in a line that a monitor quotes",
        '[event found] "NVRM: Xid (PCI:0002:00:00): 79, pid=7, name=python, the GPU is gone"',
        ("infra-node", "high"),
    ),
    (
        "an Xid in a text about it",
        'the runbook of the site lists "NVRM: Xid (PCI:0002:00:00): 79, the GPU is gone"',
        ("unknown", "low"),
    ),
    (
        "a call of NCCL that the driver refused",
        "node66:7:7 [0] transport/nvls.cc:2 NCCL WARN Cuda failure 1 'invalid argument'",
        ("unknown", "low"),
    ),
    (
        "a request that a hub outside the job did not answer",
        (
            'Traceback (most recent call last):\n  File "t.py", line 2, in <module>\n'
            "requests.exceptions.ConnectionError: ('Connection aborted.', RemoteDisconnected(''))"
        ),
        ("infra-storage", "low"),
    ),
    ("an Xid without the driver", "Xid 79: GPU has fallen off the bus", ("infra-node", "high")),
    (
        "stacks of py-spy",
        'Thread 4711 (active): "MainThread"\n    all_reduce (distributed_c10d.py:1320)',
        ("hang", "low"),
    ),
    (
        "a device that the driver lost without an Xid",
        "[  12.5] NVRM: the adapter\n          NVRM: fallen off the bus, no answer",
        ("infra-node", "high"),
    ),
    (
        "an adapter that the driver cannot start",
        "[  40.1] NVRM: rm_init_adapter failed for device 2",
        ("infra-node", "high"),
    ),
    (
        "tensors that some ranks did not submit",
        "Stalled ops:\ngrads.layer3 [missing ranks: 3, 6]",
        ("hang", "low"),
    ),
    (
        "an error of EFA",
        "libfabric:8:efa:cq:efa_rdm_rxe_handle_error():71<warn> err: 5, message: no such peer",
        ("infra-fabric", "low"),
    ),
    ("a checkpoint that is not opened", "RuntimeError: File out/7.pt cannot be opened.", LOW_DISK),
    (
        "an image that is not one",
        "stopped: cannot identify image file 'data/7.png'",
        ("job-data", "medium"),
    ),
    ("an image cut short", "OSError: image file is truncated (3 bytes left)", BAD_DATA),
    ("a small device that the job fills", OOM_OLD, ("job-oom", "medium")),
    ("a jump of the loss", "at step 900 the lm loss spiked to 7.9", ("job-divergence", "low")),
    ("less throughput", "throughput dropped from 140 to 70 TFLOPs", ("infra-node", "low")),
    ("a hang without an error", "training hangs after step 1200", ("hang", "low")),
    (
        "a shortened error of a socket",
        "node1:22:33 [0] include/socket.h:403 NCCL WARN Connect to 10.1.1.2<56821> failed",
        ("infra-fabric", "low"),
    ),
    (
        "a cancelled step without a reason",
        "slurmstepd: error: *** STEP 1931.0 ON node1 CANCELLED AT 2026-11-01T10:10:10 ***",
        ("user", "low"),
    ),
    (
        "a step whose processes outlived SIGKILL",
        (
            "[2026-11-01T10:10:10.5] [8.0] error: *** STEP 8.0 ON gpu12 CANCELLED AT "
            "2026-11-01T10:10:10 ***\n[2026-11-01T10:11:10.5] [8.0] error: *** STEP 8.0 STEPD "
            "TERMINATED ON gpu12 AT 2026-11-01T10:11:10 DUE TO JOB NOT ENDING WITH SIGNALS ***"
        ),
        ("infra-node", "medium"),
    ),
    (
        "a message of the kernel with a number named msg",
        "[  71.5] [drm:mes_submit [amdgpu]] *ERROR* MES failed to response msg=14",
        ("infra-node", "medium"),
    ),
    (
        "a quoted message that continues on the next line",
        'time="2026-11-01T10:10:10Z" level=error msg="upload: s3aws: SlowDown:\n\tcode: 503"',
        ("infra-storage", "medium"),
    ),
    (
        "an answer of an S3 client as a dict",
        "upload of step 9 failed: {'Error': {'Code': 'SlowDown', 'Message': 'too many'}}",
        ("infra-storage", "medium"),
    ),
    (
        "a socket of SLURM",
        "srun: error: slurm_receive_msgs: Transport endpoint is not connected",
        ("infra-fabric", "low"),
    ),
    (
        "devices that cannot reach each other",
        (
            "node1:7:9 [0] transport/p2p.cc:9 NCCL WARN Cuda failure 217 'peer access is not "
            "supported between these two devices'\nRuntimeError: NCCL error: unhandled cuda error"
        ),
        ("job-config", "medium"),
    ),
    (
        "a fabric manager that is not running, and the launcher's exception",
        (
            "[rank3]: Cuda failure 802 'system not yet initialized'\n"
            "subprocess.CalledProcessError: Command '['torchrun', 't.py']' returned non-zero exit "
            "status 1."
        ),
        ("infra-node", "medium"),
    ),
    (
        "a gradient that is not a number, and no skipped step",
        (
            " iteration 9/ 90 | loss scale: 1.0 | grad norm: nan | number of skipped iterations:   "
            "0 | number of nan iterations:   0 |"
        ),
        ("job-divergence", "low"),
    ),
    (
        "a checkpoint with a type that is not allowed",
        (
            "_pickle.UnpicklingError: Weights only load failed. This file can still be loaded\n"
            "\tWeightsUnpickler error: Unsupported global: GLOBAL app.Config was not allowed"
        ),
        ("job-config", "medium"),
    ),
    (
        "a damaged checkpoint that was loaded with weights_only",
        (
            "_pickle.UnpicklingError: Weights only load failed. Re-running without it may help\n"
            "\tWeightsUnpickler error: Unsupported operand 118"
        ),
        ("bad-checkpoint", "medium"),
    ),
    (
        "a service that limits requests, as rich prints the exception",
        "HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api",
        ("infra-storage", "low"),
    ),
    (
        "a context that a fault of the program broke",
        (
            "[Fri Nov 20 11:43:09 2026] NVRM: Xid (PCI:0000:cb:00): 13, pid=7, name=python, "
            "Graphics SM Warp Exception on (GPC 7, TPC 7, SM 0): Illegal Instruction Parameter\n"
            "[Fri Nov 20 11:43:14 2026] NVRM: Xid (PCI:0000:cb:00): 109, pid=7, name=python, Ch "
            "00000008, errorString CTX SWITCH TIMEOUT, Info 0x58005"
        ),
        ("job-code", "medium"),
    ),
    (
        "a context switch that timed out by itself",
        (
            "[Fri Nov 20 11:43:14 2026] NVRM: Xid (PCI:0000:cb:00): 109, pid=7, name=python, Ch "
            "00000008, errorString CTX SWITCH TIMEOUT, Info 0x58005"
        ),
        ("infra-node", "medium"),
    ),
    (
        "shared memory that ran out behind a bus error",
        (
            "Bus error (core dumped)\n"
            "ERROR: Unexpected bus error encountered in worker. This might be caused by "
            "insufficient shared memory (shm)."
        ),
        ("job-config", "low"),
    ),
    (
        "shared memory of NCCL that ran out",
        "node3:7:9 [1] include/shm.h:28 NCCL WARN Call to posix_fallocate failed : No space left",
        ("job-config", "low"),
    ),
    (
        "a program that finds no device",
        "RuntimeError: No CUDA GPUs are available",
        ("infra-node", "low"),
    ),
    (
        "a library of the driver that was upgraded under a running node",
        (
            "    Reason:    StartError\n"
            "nvidia-container-cli: initialization error: nvml error: driver/library version "
            "mismatch: unknown"
        ),
        ("infra-node", "medium"),
    ),
    (
        "a name of a peer that is not known",
        "ValueError: host not found: Name or service not known",
        ("infra-fabric", "low"),
    ),
    (
        "a system call of NCCL without its warning",
        "torch.distributed.DistBackendError: NCCL error in: a.cpp:7, unhandled system error",
        ("unknown", "low"),
    ),
    (
        "a peer that closed its connection",
        "n0:7:9 [0] misc/socket.cc:49 NCCL WARN socketProgress: Connection closed by remote peer",
        ("unknown", "low"),
    ),
    (
        "an address that no interface of the node has",
        "n0:7:7 [0] NCCL WARN Call to bind failed : Cannot assign requested address",
        ("job-config", "medium"),
    ),
    (
        "a driver as NCCL's tests print it",
        "Cuda failure common.cu:891 'CUDA driver version is insufficient for CUDA runtime version'",
        ("job-config", "medium"),
    ),
    (
        "the path of a file that was translated for HIP",
        "n0:7:9 [1] /src/hipify/p2p.cc:239 NCCL WARN hipIpcGetMemHandle failed : invalid argument",
        ("unknown", "low"),
    ),
    (
        "a compiler that is missing, behind the name of the compiler",
        (
            "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\n"
            "RuntimeError: Cannot find a working triton installation."
        ),
        ("job-config", "low"),
    ),
    (
        "a disk that is full while a graph is compiled",
        (
            "torch._dynamo.exc.BackendCompilerFailed: backend='inductor' raised:\n"
            "OSError: [Errno 28] No space left on device"
        ),
        ("infra-storage", "low"),
    ),
    (
        "devices that Lightning does not find",
        "lightning.fabric.utilities.exceptions.MisconfigurationException: You requested gpu: [1]",
        ("job-config", "medium"),
    ),
    (
        "batches of DeepSpeed that do not fit, wrapped",
        "AssertionError: Check batch related parameters. train_batch_size is not equal to",
        ("job-config", "medium"),
    ),
    (
        "a store that the SDK of TensorFlow cannot reach",
        (
            "2026-11-20 03:12:44.1: E core/platform/s3/aws_logging.cc:60] Curl returned error code "
            "55\nERROR - training - uncaught exception during training: : Unable to connect"
        ),
        ("infra-storage", "medium"),
    ),
    ("a script that goes on", "run.sh: line 13: sudo: command not found", ("job-config", "low")),
)


@pytest.mark.parametrize(
    ("text", "expected"), [form[1:] for form in FORMS], ids=[f[0] for f in FORMS]
)
def test_forms_of_outside_incidents_are_answered_with_their_confidence(tmp_path, text, expected):
    log = tmp_path / "job.log"
    log.write_text(text + "\n")
    answer = ckptctl.classify(str(log))
    assert (answer.failure, answer.confidence) == expected


def test_the_outside_corpus_holds_addresses_classes_and_digests_and_no_text():
    rows = [row.split("\t") for row in OUTSIDE.read_text().splitlines()]
    assert len(rows) >= 150
    assert len({source_of(address) for _, _, address, _ in rows}) >= 30
    for _, failure, address, digest in rows:
        assert failure in CLASSES
        in_file = re.fullmatch(r"https://\S+/[0-9a-f]{40}/\S+#L\d+-L\d+", address)
        in_thread = re.fullmatch(r"https://github.com/\S+/issues/\d+#[0-9a-f]{12}\+\d+", address)
        assert in_file or in_thread
        assert re.fullmatch(r"[0-9a-f]{64}", digest)


def source_of(address: str) -> str:
    """The repository, as `OWNER/NAME`."""
    return "/".join(address.split("/")[3:5])


def test_no_source_of_the_held_part_was_looked_at_for_rules():
    rows = [row.split("\t") for row in OUTSIDE.read_text().splitlines()]
    sources = {part: {source_of(row[2]) for row in rows if row[0] == part} for part, *_ in rows}
    assert sources.keys() == {"seen", "held"}
    assert not sources["seen"] & sources["held"]


def test_a_suspicion_takes_no_node_out_of_the_pool(tmp_path):
    log = tmp_path / "job.log"
    log.write_text("  what():  CUDA error: unknown error\n")
    assert ckptctl.classify(str(log)).action.value == "investigate"


def test_a_suspicion_changes_no_program(tmp_path):
    log = tmp_path / "job.log"
    log.write_text("terminate called after throwing an instance of 'std::runtime_error'\n")
    answer = ckptctl.classify(str(log))
    assert (answer.failure, answer.action.value) == ("job-code", "investigate")


def test_where_nothing_is_known_the_advice_names_what_to_collect(tmp_path):
    log = tmp_path / "job.log"
    log.write_text("Connection reset by peer\n")
    answer = ckptctl.classify(str(log))
    assert answer.failure == "unknown"
    assert "dmesg -T" in answer.advice


def test_a_line_about_the_network_explains_the_exception_around_it(tmp_path: Path):
    log = tmp_path / "job.log"
    log.write_text(
        "[rank508]: torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:70\n"
        "[rank508]: ncclRemoteError: A call failed possibly due to a network error or a remote "
        "process exiting prematurely.\n"
        "[rank508]: Last error:\n"
        "[rank508]: socketPollConnect: connect to 10.2.2.174<42307> returned Connection timed out, "
        "exceeded error retry count after 35 attempts\n"
    )
    answer = ckptctl.classify(str(log))
    assert (answer.failure, answer.confidence) == ("infra-fabric", "low")
