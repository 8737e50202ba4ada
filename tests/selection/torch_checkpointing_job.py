"""Two ranks save with torch_checkpointing: `torch_checkpointing_job.py ROOT STEP...`.

FSDP2 and AdamW; the manifest is written at the first save of a process.
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch_checkpointing import CheckpointManager, ItemSpec
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

make_tensor = torch.tensor


def on_the_processor(*values: object, device: str | None = None, **options: object):
    """torch_checkpointing 0.1.1 gathers its metadata in tensors on a GPU, whatever the group is."""
    return make_tensor(*values, device=None if device == "cuda" else device, **options)


torch.tensor = on_the_processor
torch.Tensor.cuda = lambda tensor: tensor


def main() -> None:
    root, *steps = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters())
    config = CheckpointManager.Config.with_sync_save()
    sharded = ItemSpec(resharder=DefaultResharder())
    config.storage_config = LocalFileSystemStorageConfig(use_direct_io=False)
    config.items = {"model": sharded, "optimizer": sharded, "train_state": ItemSpec()}
    manager = config.build()
    for step in map(int, steps):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        payload = {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
            "train_state": {"step": step},
        }
        manager.save(f"{root}/step-{step}", payload)
        dist.barrier()
    manager.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
