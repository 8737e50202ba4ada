"""A small training that saves and loads with megatron-core; run by torchrun, see `job_options`.

The trainer of Megatron-LM is in no package and needs a GPU. Its line of the log is printed here.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from datetime import UTC, datetime
from types import SimpleNamespace

import torch
from job_options import die, job_options, run_recipe
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor

from ckptctl import CkptctlError

# The two calls with which megatron-core 0.16 needs a GPU for a save of tensors on the CPU.
torch.cuda.synchronize = lambda: None
torch.cuda.current_device = lambda: "cpu"


def train() -> None:
    options = job_options()
    torch.distributed.init_process_group("gloo")
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    adam = torch.optim.AdamW(model.parameters(), lr=0.01)
    for parameter in model.parameters():  # the moments exist before the first load
        parameter.grad = torch.zeros_like(parameter)
    adam.step()

    def sharded(name, tensor):
        """Rows of a tensor that each rank saves; every rank loads the whole."""
        n = len(tensor) // world
        return ShardedTensor.from_rank_offsets(
            name, tensor[rank * n : rank * n + n], (0, rank, world)
        )

    def state_dict(iteration):
        state = {"model": {}, "optimizer": {}, "iteration": iteration, "checkpoint_version": 3.0}
        for name, parameter in model.named_parameters():
            state["model"][name] = sharded(f"model.{name}", parameter.detach())
            for key in ("exp_avg", "exp_avg_sq"):
                moment = adam.state[parameter][key]
                state["optimizer"][f"{key}.{name}"] = sharded(
                    f"optimizer.state.{key}.{name}", moment
                )
        rng = {"torch_rng_state": torch.get_rng_state()}
        state["rng_state"] = ShardedObject("rng_state", [rng], (world,), (rank,))
        state["opt_param_scheduler"] = {"num_steps": iteration}
        return state

    def load(path):
        loaded = dist_checkpointing.load(state_dict(0), path)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                torch.distributed.all_gather_into_tensor(parameter.data, loaded["model"][name])
                for key in ("exp_avg", "exp_avg_sq"):
                    moment = adam.state[parameter][key]
                    torch.distributed.all_gather_into_tensor(
                        moment, loaded["optimizer"][f"{key}.{name}"]
                    )
                adam.state[parameter]["step"].fill_(loaded["iteration"] + 1)
        torch.set_rng_state(loaded["rng_state"][0]["torch_rng_state"])
        return loaded["iteration"]

    try:
        args = SimpleNamespace(load=options.root)
        run_recipe("megatron", {}, args=args)
        step = args.ckpt_step or 0
        if step:
            step = load(f"{options.root}/iter_{step:07d}")
        if options.wrong:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(3)
        while step < options.steps:
            step += 1
            batch = torch.randn(4, 16, generator=torch.Generator().manual_seed(step * world + rank))
            loss = (model(batch) - batch[:, :4].sin()).pow(2).mean()
            loss.backward()
            torch.distributed.all_reduce(loss.detach())
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
            adam.step()
            adam.zero_grad()
            if rank == world - 1:  # as `training_log` of Megatron-LM prints it
                print(
                    f" [{datetime.now(UTC):%Y-%m-%d %H:%M:%S.%f}]"
                    f" iteration {step:8d}/{options.steps:8d} |"
                    f" consumed samples: {step * 4 * world:12d} |"
                    f" elapsed time per iteration (ms): 9.1 | learning rate: 1.000000E-02 |"
                    f" global batch size: {4 * world:5d} | lm loss: {loss.item() / world:.6E} |"
                    " loss scale: 1.0 | grad norm: 1.000 | number of skipped iterations:   0 |"
                    " number of nan iterations:   0 |",
                    flush=True,
                )
            if step % options.save_every == 0:
                path = f"{options.root}/iter_{step:07d}"
                if rank == 0:
                    os.makedirs(path, exist_ok=True)
                torch.distributed.barrier()
                dist_checkpointing.save(state_dict(step), path)
                if rank == 0:
                    with open(
                        os.path.join(options.root, "latest_checkpointed_iteration.txt"), "w"
                    ) as tracker:
                        tracker.write(str(step))
            if step == options.kill_at:
                for process in multiprocessing.active_children():  # of megatron-core's writer
                    process.kill()
                die()
        torch.distributed.destroy_process_group()
    except CkptctlError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":  # megatron-core starts a process that imports this module
    train()
