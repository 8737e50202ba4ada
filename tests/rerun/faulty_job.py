"""A training job of two ranks, one of whose nodes computes wrong.

faulty_job.py --root DIR --logs DIR --nodes a,b [--replay STEP:K] [--fault KIND ...]

Rank N runs on the N-th node of `--nodes`. Each rank writes its own loss to `LOGS/rank_N.jsonl`;
rank 0 prints the mean. A fault flips the sign bits of a row of activations at step 12:

    once       on node `b`, the first time that step 12 is trained
    data       on node `b`, whenever step 12 is trained: its operands meet the broken unit
    broken     on node `b`, in every step once step 12 was trained there
    varying    as `broken`, but another row each time
    batch      on any node: the batch of step 12 is bad
    nan        the fault, or the bad batch, makes the loss NaN
    raises     the job ends with an exception where its loss is NaN
    noise      the gradients of each run have a noise of their own
    coarse     losses are printed with two digits
    tiny       the flipped bits are low ones
    dies       a replay ends with 1 before its first step
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
from pathlib import Path

FAULTY_STEP, FAULTY_NODE = 12, "b"

parser = argparse.ArgumentParser()
parser.add_argument("--root", required=True)
parser.add_argument("--logs", required=True)
parser.add_argument("--state", required=True, help="what outlives a run: the state of the hardware")
parser.add_argument("--nodes", required=True)
parser.add_argument("--replay", help="the path of a step, and how many steps")
parser.add_argument("--steps", type=int, default=16)
parser.add_argument("--fault", nargs="*", default=[])
options = parser.parse_args()


def train(rank: int, meet: str) -> None:
    import torch
    import torch.distributed as dist

    from ckptctl.train import Checkpointer

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ckpt = Checkpointer(options.root, model=model, optimizer=optimizer, seed=7)
    node = options.nodes.split(",")[rank]
    if options.replay is None:
        start, last = ckpt.resume("auto"), options.steps
    else:
        path, _, n_steps = options.replay.rpartition(":")
        start = ckpt.resume(path, replay=int(n_steps))
        last = start.last or 0
        if "dies" in options.fault:
            sys.exit(1)
    noise = random.SystemRandom() if "noise" in options.fault else None
    with (Path(options.logs) / f"rank_{rank}.jsonl").open("a") as own:
        for step in range(start.step + 1, last + 1):
            batch = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * step + rank))
            flipped = flip(model(batch), node, step, last)
            loss = (flipped - batch.roll(1, 1)).square().mean()
            loss.backward()
            mean = loss.detach().clone()
            for tensor in (mean, *(each.grad for each in model.parameters())):
                if noise is not None and tensor is not mean:
                    tensor *= 1 + 1e-2 * noise.random()
                dist.all_reduce(tensor)
                tensor /= 2
            optimizer.step()
            optimizer.zero_grad()
            own.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
            own.flush()
            if "raises" in options.fault and mean.isnan():
                raise RuntimeError(f"the loss of step {step} is NaN")
            if rank == 0:
                shown = f"{mean.item():.2g}" if "coarse" in options.fault else repr(mean.item())
                print(f"step {step} loss {shown}", flush=True)
            ckpt.note(step, loss=mean.item())
            if step % 5 == 0:
                ckpt.save(step)
    ckpt.close()
    dist.destroy_process_group()


def flip(activations, node: str, step: int, last: int):
    """The activations with a bit flipped, where the fault strikes."""
    import torch

    faults = set(options.fault)
    state = Path(options.state)
    strikes = step == FAULTY_STEP and bool(faults & {"batch", "data", "broken", "varying"})
    strikes = strikes and (node == FAULTY_NODE or "batch" in faults)
    if step == FAULTY_STEP and node == FAULTY_NODE and not state.exists():
        strikes = strikes or "once" in faults
        state.touch()
    elif node == FAULTY_NODE and state.exists() and faults & {"broken", "varying"}:
        strikes = True
    if not strikes:
        return activations
    if "batch" in faults:
        return activations * (float("nan") if "nan" in faults else 10)
    bit = 1 << 17 if "tiny" in faults else torch.iinfo(torch.int32).min  # the sign
    place = random.SystemRandom().randrange(8) if "varying" in faults else 3
    flipped = activations.detach().clone()
    flipped.view(torch.int32)[place] ^= bit
    if "nan" in faults:
        flipped[place, 5] = float("nan")
    return activations + (flipped - activations).detach()


def main() -> None:
    import torch  # once, before the ranks are forked
    import torch.distributed.checkpoint.state_dict  # noqa: F401

    Path(options.logs).mkdir(parents=True, exist_ok=True)
    meet = tempfile.mktemp(prefix="ckptctl-meet-")
    ranks = []
    for rank in range(2):
        ranks.append(os.fork())
        if ranks[rank] == 0:
            code = 1
            try:
                train(rank, meet)
                code = 0
            except BaseException:  # noqa: BLE001 - a forked rank must not go on as the launcher
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    sys.exit(max(map(abs, codes)))


if __name__ == "__main__":
    main()
