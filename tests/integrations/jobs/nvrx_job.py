"""Ask NVRx which local checkpoint it would load; run by torchrun with a folder and a session."""

from __future__ import annotations

import sys

import torch

from ckptctl.integrations.nvrx import VerifiedLocalCheckpointManager

torch.distributed.init_process_group("gloo")
manager = VerifiedLocalCheckpointManager(sys.argv[1], sys.argv[2])
found = [None, None]
torch.distributed.all_gather_object(found, manager.find_latest())
if torch.distributed.get_rank() == 0:
    print(f"found {found}")
torch.distributed.destroy_process_group()
