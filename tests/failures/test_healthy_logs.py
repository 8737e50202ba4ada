"""Messages of jobs that are well, and look like failures: none is a certain cause.

Each text is in the form that its program prints.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import ckptctl
from ckptctl.failures.results import Action

PROGRESS = "".join(f"step {step} loss {4 - step / 100:.4f}\n" for step in range(10, 14))
HEALTHY = {
    "NCCL without a plugin": "node1:100:120 [0] NCCL INFO NET/Plugin : dlerror=libnccl-net.so: "
    "cannot open shared object file: No such file or directory No plugin found\n",
    "a pipe that closed at the end": "Exception ignored in: <_io.TextIOWrapper name='<stdout>'>\n"
    "BrokenPipeError: [Errno 32] Broken pipe\n",
    "a warning that names an error": "pytree.py:185: FutureWarning: optree is too old. This will "
    "raise RuntimeError in future versions.\n  warnings.warn(\n",
    "a retried read of an object": "DEBUG urllib3.connectionpool Retrying (Retry(total=4)) after "
    "connection broken by 'ReadTimeoutError(\"HTTPSConnectionPool(host='s3', port=443): Read timed "
    "out. (read timeout=60)\")': /bucket/shard-0001.tar\n" + PROGRESS,
    "a retried upload": "WARNING: failed to upload checkpoint to s3://b/c/step-100: SlowDown, "
    "please reduce your request rate; retrying (1/5)\nINFO: uploaded checkpoint step-100\n",
    "an elastic job that grew": "[INFO] elastic.agent.server.api: [default] Detected 1 new nodes "
    "from group_rank=0; will restart worker group\n" + PROGRESS,
    "a store that was not up yet": "[W socket.cpp:663] [c10d] The client socket has failed to "
    "connect to [node1]:29500 (errno: 111 - Connection refused).\n" + PROGRESS,
    "a store that closed at the end": "[rank1]: Training finished at step 1000\n"
    "[rank1]:[W ProcessGroupNCCL.cpp:1728] [PG ID 0 PG GUID 0(default_pg) Rank 1] Failed to check "
    'the "should dump" flag on TCPStore, (maybe TCPStore server has shut down too early), with '
    "error: Connection reset by peer\n",
    "a process group that was left": "[rank0]:[W1122 03:00:00.1 ProcessGroupNCCL.cpp:1496] "
    "Warning: WARNING: destroy_process_group() was not called before program exit\n",
    "a barrier that may hang": "[rank3]:[W ProcessGroupNCCL.cpp:4115] [PG ID 0 Rank 3] using GPU 3 "
    "to perform barrier. This can potentially cause a hang if this rank to GPU mapping is "
    "incorrect.\n",
    "a loss scale that overflowed": "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss "
    "scale: 65536, reducing to 32768.0\n" + PROGRESS,
    "counters of NaN that are zero": " iteration 100/ 1000 | lm loss: 2.2E+00 | number of skipped "
    "iterations:   0 | number of nan iterations:   0 |\n",
    "a batch size that was tried": "torch.cuda.OutOfMemoryError caught while profiling batch size "
    "64, retrying with batch size 32\n" + PROGRESS,
    "an import that is optional": 'Traceback (most recent call last):\n  File "model.py", line 3, '
    "in <module>\n    import flash_attn\nModuleNotFoundError: No module named 'flash_attn'\n"
    + PROGRESS,
    "options that name failures": "Namespace(error_on_nan=True, fail_on_oom=False, timeout=1800, "
    "killed_job_resume=True)\n",
    "a file system mounted at boot": "[   10.0] EXT4-fs (nvme0n1p1): mounted filesystem with "
    "ordered data mode. Opts: errors=remount-ro\n",
    "a corrected error of PCI Express": "[ 100.0] pcieport 0000:64:02.0: AER: Corrected error "
    "received: 0000:65:00.0\n[ 100.1] nvidia 0000:65:00.0: PCIe Bus Error: severity=Corrected, "
    "type=Physical Layer, (Receiver ID)\n",
    "a corrected error of the memory": "[ 200.0] EDAC MC0: 1 CE memory read error on "
    "CPU_SrcID#0_MC#0_Chan#0_DIMM#0 (channel:0 slot:0)\n[ 201.0] mce: [Hardware Error]: Machine "
    "check events logged\n",
    "a server that answers again": "[ 1.0] nfs: server fs1 not responding, still trying\n"
    "[ 9.0] nfs: server fs1 OK\n",
    "a target that reconnected": "[ 300.0] LustreError: 11-0: scratch-OST0001: operation ost_read "
    "to node failed: rc = -107\n[ 300.1] Lustre: scratch-OST0001: Connection to scratch-OST0001 "
    "was lost; in progress operations using this service will wait for recovery to complete\n"
    "[ 310.0] Lustre: scratch-OST0001: Connection restored to 10.0.0.2@o2ib\n",
    "a link that came up": "[ 5.0] mlx5_core 0000:5e:00.0: Port module event: module 0, Cable "
    "plugged\n[ 6.0] IPv6: ADDRCONF(NETDEV_CHANGE): ib0: link becomes ready\n",
    "a diagnosis that passed": "| Memory | Pass - All |\n| PCIe | Pass - All |\nXID errors: 0\n"
    "ECC double bit errors: 0\n",
    "a table of nvidia-smi": "    ECC Errors\n        Volatile\n            SRAM Uncorrectable "
    "Parity : 0\n            DRAM Uncorrectable        : 0\n",
    "a check of the nodes that passed": "network check round 1 passed on node 3: elapsed 1.2 s\n"
    "node 3 is not a straggler; fault nodes: [], stragglers: []\n",
    "a pod that waited": "Warning  FailedScheduling  40s  default-scheduler  0/12 nodes are "
    "available: 12 Insufficient nvidia.com/gpu.\nNormal  Started  9s  kubelet  Started container\n",
    "a pod that was not ready": "Warning  Unhealthy  1s (x3 over 10s)  kubelet  Readiness probe "
    "failed: dial tcp 10.1.1.1:8080: connect: connection refused\n",
    "a tracker that was offline": "wandb: Network error (ConnectionError), entering retry loop.\n"
    "wandb: Network error resolved after 0:00:12.5, resuming normal operation.\n",
    "samples that are broken": "WARNING:webdataset: ('truncated file', shard-0012.tar) skipped\n"
    + PROGRESS,
    "a limit that is announced": "NCCL watchdog timeout is set to 1800 seconds; collective "
    "operation timeout will abort the job\n",
    "libraries of an accelerator": "E cuda_fft.cc:477] Unable to register cuFFT factory: "
    "Attempting to register factory for plugin cuFFT when one has already been registered\n",
    "workers that may be too many": "UserWarning: This DataLoader will create 16 worker processes. "
    "Excessive worker creation might get DataLoader running slow or even freeze.\n",
    "a compiler that gave up": "W convert_frame.py:844] [2/8] torch._dynamo hit "
    "config.cache_size_limit (8)\n" + PROGRESS,
    "a spike that was skipped": "WARNING loss spike detected: 3.9 (threshold 3.5); skipping batch\n"
    + PROGRESS,
}

TRACEBACK = 'Traceback (most recent call last):\n  File "worker.py", line 9, in '
IGNORED = {
    "a table of the program's own": "| name | state | seconds |\n| run | TIMEOUT | 30 |\n"
    "|run|CANCELLED|30|\n",
    "a cache that makes room": "step 12  Evicted 40 blocks\nstep 13  Suspended 2 sequences\n",
    "an error of a destructor": "Exception ignored in: <function Loader.__del__ at 0x7f2b>\n"
    f"{TRACEBACK}__del__\n    self.close()\nAssertionError: can only test a child process\n",
    "an error at the exit": f"Error in atexit._run_exitfuncs:\n{TRACEBACK}close\n"
    "    unlink(name)\nFileNotFoundError: [Errno 2] No such file or directory: '/tmp/x'\n",
    "an error of a finalizer": f"{TRACEBACK}_run_finalizers\n    finalizer()\n"
    "FileNotFoundError: [Errno 2] No such file or directory\n",
    "an error of a handler of logging": f"--- Logging error ---\n{TRACEBACK}emit\n"
    "    stream.write(msg)\nValueError: I/O operation on closed file.\n",
    "a signal handler that Lightning sets": "SLURM auto-requeueing enabled. Setting signal "
    "handlers.\n",
}


@pytest.mark.parametrize("name", IGNORED)
def test_what_is_no_failure_is_no_cause(name, tmp_path: Path):
    log = tmp_path / "job.log"
    log.write_text(IGNORED[name])
    assert ckptctl.classify(str(log)).failure == "unknown"
    # The same exception ends a program where nothing ignores it, also later in the same log.
    log.write_text(IGNORED[name] + f"{TRACEBACK}main\n    train()\nKeyError: 'lm_head'\n")
    assert ckptctl.classify(str(log)).failure == "job-code"


def test_an_ignored_error_that_reports_a_full_disk_is_a_suspicion(tmp_path: Path):
    log = tmp_path / "job.log"
    log.write_text(
        f"Error in atexit._run_exitfuncs:\n{TRACEBACK}put\n    with open(path, 'wb') as file:\n"
        "OSError: [Errno 122] Disk quota exceeded: '/cache/kernel.pickle.tmp'\n"
    )
    answer = ckptctl.classify(str(log))
    assert (answer.failure, answer.confidence) == ("infra-storage", "low")


def test_what_python_ignores_on_one_rank_hides_no_cause_on_another(tmp_path: Path):
    ignored, *rest = IGNORED["an error of a destructor"].splitlines()
    failed = f"{TRACEBACK}main\n    train()\ntorch.OutOfMemoryError: CUDA out of memory. Tried to"
    lines = [f"[rank0]: {ignored}"]
    lines += [f"[rank1]: {line}" for line in failed.splitlines()]
    lines += [f"[rank0]: {line}" for line in rest]
    log = tmp_path / "job.log"
    log.write_text("\n".join(lines) + "\n")
    assert ckptctl.classify(str(log)).failure == "job-oom"


@pytest.mark.parametrize("name", HEALTHY)
def test_a_message_of_a_job_that_is_well_is_no_certain_cause(name, tmp_path: Path):
    log = tmp_path / "job.log"
    log.write_text(HEALTHY[name])
    answer = ckptctl.classify(str(log))
    assert answer.confidence != "high", answer.message
    assert answer.action not in (Action.DRAIN, Action.FIX), answer.message


def test_a_file_system_that_fails_after_it_answered_again_is_a_certain_cause(tmp_path: Path):
    lost, back = "nfs: server fs1 not responding, still trying\n", "nfs: server fs1 OK\n"
    log = tmp_path / "kern.log"
    log.write_text("".join(f"[ {n}.0] {text}" for n, text in enumerate((lost, back, lost))))
    answer = ckptctl.classify(str(log))
    assert (answer.failure, answer.confidence) == ("infra-storage", "high")
    log.write_text(f"[ 1.0] {lost}[ 2.0] nfs: server fs2 OK\n")
    assert ckptctl.classify(str(log)).confidence == "high"
