"""Errors of accelerators other than NVIDIA's: none is answered with "fix the code"."""

from __future__ import annotations

import pytest

import ckptctl
from ckptctl.failures.results import Action

NPU = "RuntimeError: operator():build/torch_npu.dir/x.ts:47 NPU function error: "
ACCELERATORS = (
    ("ascend.memory", "infra-node", f"{NPU}HBM MULTI BIT ECC ERROR, error code is 507054"),
    ("ascend.unhealthy", "infra-node", "device health change: Ascend910-3 is Unhealthy"),
    ("ascend.link", "infra-fabric", f"{NPU}HCCS LINK ERROR, error code is 507056"),
    ("ascend.remote", "infra-fabric", f"{NPU}SUSPECT REMOTE ERROR, error code is 507057"),
    ("ascend.device", "infra-node", f"{NPU}aclrtSynchronizeStream, error code is 507899"),
    ("ascend.held", "infra-node", "EJ0001: Failed to initialize the HCCP process."),
    ("ascend.config", "job-config", "EI0001: Value 1000 for HCCL_RDMA_SL is invalid."),
    ("ascend.core", "unknown", f"{NPU}aclrtSynchronizeStream, error code is 507015"),
    ("ascend.timeout", "hang", f"{NPU}aclrtSynchronizeStream, error code is 507046"),
    ("ascend.timeout", "hang", "EI0002: The wait execution of the Notify register times out."),
    ("amd.hang", "infra-node", "HW Exception by GPU node-9 (Agent: 0x6) reason :GPU Hang"),
    ("amd.hardware", "infra-node", "RuntimeError: HIP error: the device is lost"),
    ("amd.lost", "infra-node", "[   7.5] amdgpu 0000:c1:00.0: amdgpu: device lost from bus!"),
    ("intel.reset", "infra-node", "[   7.5] xe 0000:2b:00.0: [drm] GT0: trying reset from x"),
    ("intel.lost", "infra-node", "level_zero failed: 20 (UR_RESULT_ERROR_DEVICE_LOST)"),
    ("gaudi.device", "infra-node", "[   7.5] habanalabs hl2: Device heartbeat failed!"),
    ("gaudi.reset", "infra-node", "[   7.5] habanalabs hl3: Going to reset device"),
    ("gaudi.lost", "infra-node", "RuntimeError: synStatus=21 [Device reset] Synchronize failed."),
    ("gaudi.held", "infra-node", "RuntimeError: synStatus=20 [Device already acquired]"),
    ("tpu.slice", "infra-node", "Detected failure SLICE_FAILURE_CHIP_DRIVER_ERROR in session"),
    ("tpu.task", "unknown", "The tasks are unhealthy (stopped sending heartbeats): task:3"),
    ("neuron.device", "infra-node", "nrt_execute failed: NRT_EXEC_HW_ERR_HBM_UE on nc 3"),
    ("accelerator.unknown", "unknown", f"{NPU}aclnnFoo, error code is 599999"),
)  # fmt: skip
MEMORY = (
    f"{NPU}aclrtMalloc, error code is 207018",
    "RuntimeError: level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "RuntimeError: [Rank:0] FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::2147 (2)MB",
    "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Error loading program: Attempting to reserve",
    "XlaRuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 17.21G",
)
IN_A_CALL = (
    "Traceback (most recent call last):\n"
    '  File "/opt/train.py", line 88, in <module>\n'
    "    torch.npu.synchronize()\n"
)


def _classify(folder, text):
    (folder / "job.log").write_text(text + "\n")
    return ckptctl.classify(str(folder / "job.log"))


@pytest.mark.parametrize(("rule", "failure", "line"), ACCELERATORS)
def test_no_error_of_an_accelerator_accuses_the_program(tmp_path, rule, failure, line):
    alone, ending = _classify(tmp_path, line), _classify(tmp_path, IN_A_CALL + line)
    assert {alone.failure, ending.failure} == {failure}
    if failure != "job-config":
        assert Action.FIX not in (alone.action, ending.action)
    found = [each.rule for each in (*alone.evidence, *alone.consequences)]
    assert found[0] == rule


def test_a_named_error_below_an_unnamed_one_of_the_runtime_decides(tmp_path):
    unnamed = "RuntimeError: ACL stream synchronize failed."
    report = _classify(tmp_path, f"{IN_A_CALL}{unnamed}\nEI0002: [PID: 7] Notify wait timeout.")
    assert report.failure == "hang"


@pytest.mark.parametrize(
    ("failure", "line"),
    [
        (
            "infra-node",
            "[7.5] nvme: Unable to change power state from D3hot to D0, device inaccessible",
        ),
        (
            "job-config",
            "n:7:8 [0] NCCL WARN NET/OFI Unable to insert remote address into address vector",
        ),
        ("job-config", "RuntimeError: received 0 items of ancdata"),
        ("job-config", "NCCL WARN Call to ibv_reg_mr failed with error Cannot allocate memory"),
        ("job-config", "UCX ERROR mlx5_0: ibv_create_cq() failed: Cannot allocate memory."),
        ("job-data", "lmdb.CorruptedError: mdb_get: MDB_CORRUPTED: Located page was wrong type"),
        ("unknown", "RuntimeError: UR backend returns:40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
        ("unknown", "RuntimeError: miopenStatusUnknownError"),
        (
            "infra-node",
            "11:11 ERROR NRT:nrt_init   Unable to determine Neuron Driver version. Please check",
        ),
        ("job-config", "RuntimeError: CUDA error: invalid device ordinal"),
        ("infra-node", "RuntimeError: No XPU devices are available."),
        ("walltime", "MOAB_INFO:  job exceeded wallclock limit"),
        ("walltime", "Job exceeded its walltime limit. Job was aborted"),
        (
            "infra-fabric",
            "n5:2:2 [6] x.cc:5 NCCL WARN Connect to 10.0.0.4<5684> returned 113(No route to host)",
        ),
    ],
)
def test_devices_addresses_and_limits_that_are_reported_in_other_words(tmp_path, failure, line):
    assert _classify(tmp_path, line).failure == failure


@pytest.mark.parametrize(
    "failure",
    [
        "Cuda failure 'invalid argument'",
        "Cuda failure 1 'invalid argument'",
        "hipIpcGetMemHandle failed : invalid argument",
    ],
)
def test_an_argument_that_nccl_passed_to_the_driver_accuses_nobody(tmp_path, failure):
    line = f"n7:1:2 [0] transport/p2p.cc:237 NCCL WARN {failure}"
    assert _classify(tmp_path, line).action is not Action.FIX


def test_a_kernel_that_the_device_stopped_without_a_reason_accuses_nobody(tmp_path):
    report = _classify(tmp_path, f"{IN_A_CALL}RuntimeError: HIP error: unspecified launch failure")
    assert (report.confidence, report.action) == ("low", Action.INVESTIGATE)


@pytest.mark.parametrize("line", MEMORY)
def test_the_memory_of_an_accelerator_that_runs_out_is_the_jobs(tmp_path, line):
    assert _classify(tmp_path, IN_A_CALL + line).failure == "job-oom"


@pytest.mark.parametrize(
    "line",
    [
        '{"action": "terminate", "time": "2026-10-16T03:14:22Z"}',
        "2026/12/17 16:03:58 GCP Metadata Service says termination is imminent",
        "http://metadata.google.internal/computeMetadata/v1/instance/preempted: TRUE",
        '{"Events":[{"EventType":"Preempt","ResourceType":"VirtualMachine"}]}',
        "reason: Server.SpotInstanceTermination",
    ],
)
def test_a_notice_of_a_cloud_is_a_preemption(tmp_path, line):
    assert _classify(tmp_path, line).failure == "preemption"


KILLED = "E1120 03:12:44.1 7 api.py:882] failed (exitcode: -9) local_rank: 3 (pid: 71) of binary: x"
ASKED = "W1120 03:12:45.1 7 api.py:719] Received 15 death signal, shutting down workers"


def test_ranks_that_sigkill_ended_were_not_preempted(tmp_path):
    assert _classify(tmp_path, f"{KILLED}\n{ASKED}").failure == "unknown"
    assert _classify(tmp_path, f"{ASKED}\n{KILLED}").failure == "preemption"


@pytest.mark.parametrize(
    "line", ["low 0 high 0 max 9 oom 3 oom_kill 1 oom_group_kill 0", '{"max": 9, "oom_kill": 2}']
)
def test_the_memory_events_of_a_cgroup_show_a_kill(tmp_path, line):
    assert _classify(tmp_path, f"memory.events: {line}").failure == "job-oom"
    none = line.replace("oom_kill 1", "oom_kill 0").replace(": 2", ": 0")
    assert _classify(tmp_path, f"memory.events: {none}").failure == "unknown"
