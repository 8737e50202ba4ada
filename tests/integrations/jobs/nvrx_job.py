"""Ask NVRx which local checkpoint it would load; run by torchrun with a folder and a session."""

from __future__ import annotations

import sys

import torch
from job_options import run_recipe
from nvidia_resiliency_ext.checkpointing.local.basic_state_dict import BasicTensorAwareStateDict


class OnCpu(BasicTensorAwareStateDict):
    """The class that `fixtures/rank_files.py` saves, which keeps its tensors on the CPU."""

    def restore_tensor_device(self, non_blocking=True):
        pass


torch.distributed.init_process_group("gloo")
changes = {"/local/checkpoints": sys.argv[1], "run-7": sys.argv[2]}
iteration = run_recipe("nvrx", changes)["iteration"]
found = [None, None]
torch.distributed.all_gather_object(found, iteration)
if torch.distributed.get_rank() == 0:
    print(f"found {found}")
torch.distributed.destroy_process_group()
