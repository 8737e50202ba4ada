"""Train a few steps under NVRx's launcher; in the first attempt rank 1 is stopped in one."""

from __future__ import annotations

import os
import signal

import torch
from job_options import run_recipe
from nvidia_resiliency_ext import fault_tolerance

torch.distributed.init_process_group("gloo")
run_recipe("nvrx", {}, part=1)
client = fault_tolerance.RankMonitorClient()
client.init_workload_monitoring()
client.start_section("setup")
client.end_section("setup")
for step in range(1, 6):
    client.start_section("step")
    is_first = os.environ["CKPTCTL_RESTART_COUNT"] == "0"
    if is_first and step == 3 and torch.distributed.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    torch.distributed.all_reduce(torch.ones(4))
    client.end_section("step")
    client.start_section("checkpointing")
    client.end_section("checkpointing")
client.shutdown_workload_monitoring()
torch.distributed.destroy_process_group()
