"""A small training job, its launcher, and a killer: what the tests of `train/` run.

    python small_job.py --root DIR --out FILE --ranks 4 --steps 12 --save-every 3

trains a transformer with dropout, AdamW and a schedule on shuffled data, spread by
`fully_shard`. The launcher has torch loaded once and forks the ranks. It kills all of
them with SIGKILL where `--kill` says, and starts them again until the run is done.
Every rank-0 line of FILE is one step: its loss in all digits, and its samples.

    --kill 0.7            seconds after the first step of an attempt
    --kill claim:2        in the second save, right before its folder is made
    --kill metadata:2     ... when all shards are there and the metadata is not
    --kill seal:2         ... when the metadata is there and the seal is not
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from contextlib import suppress
from typing import Any

N_SAMPLES = 96
WIDTH = 16
LENGTH = 8
LETTERS = 11


def main() -> None:
    options = parse()
    import torch  # once, before the ranks are forked
    import torch.distributed.checkpoint
    import torch.distributed.checkpoint.state_dict
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    kills = list(options.kill)
    codes = []
    for life in range(len(kills) + 1):
        kill = kills[life] if life < len(kills) else None
        ranks = options.ranks[min(life, len(options.ranks) - 1)]
        codes.append(live(options, ranks, kill, life))
        if codes[-1] == 0 or (kill is None):
            break
    print(json.dumps({"codes": codes}))
    sys.exit(0 if codes[-1] == 0 else 1)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", required=True)
    parser.add_argument("--other-root", nargs="*", default=[])
    parser.add_argument("--out", required=True)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4])
    parser.add_argument("--meshes", nargs="+", default=[], help="one for each life, such as 2x2")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="samples, over all ranks")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--resume-from", default="auto")
    parser.add_argument("--replay", type=int, help="train so many steps again, and end")
    parser.add_argument("--kill", nargs="*", default=[])
    parser.add_argument("--forget", default="", help="what the script forgets to give")
    parser.add_argument("--lazy", action="store_true", help="save beside the training")
    parser.add_argument("--keep", type=int)
    parser.add_argument("--options", default="{}", help="more for Checkpointer, as JSON")
    parser.add_argument("--hook", default="", help="a file to run in each rank, given the scope")
    return parser.parse_args()


def live(options: argparse.Namespace, n_ranks: int, kill: str | None, life: int) -> int:
    """Run one attempt: fork the ranks, kill them where asked, wait; returns the worst exit code."""
    meet = tempfile.mktemp(prefix="ckptctl-meet-")
    began = tempfile.mktemp(prefix="ckptctl-began-")
    pids = []
    for rank in range(n_ranks):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = rank_main(options, rank, n_ranks, meet, began, kill, life)
            except BaseException:  # noqa: BLE001 - a forked rank must not go on as the launcher
                sys.excepthook(*sys.exc_info())
            finally:
                sys.stderr.flush()
                sys.stdout.flush()
                os._exit(code)
        # By the launcher: the group must be there before the next rank is.
        os.setpgid(pid, pids[0] if pids else pid)
        pids.append(pid)
    if kill is not None and ":" not in kill:
        while not os.path.exists(began) and not ended(pids):
            time.sleep(0.005)
        time.sleep(float(kill))
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    worst = 0
    for pid in pids:
        try:
            _, status = os.waitpid(pid, 0)
        except ChildProcessError:
            continue
        code = os.waitstatus_to_exitcode(status)
        worst = worst if code == 0 else code
    return worst


def ended(pids: list[int]) -> bool:
    return any(os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) for pid in pids)


def rank_main(
    options: argparse.Namespace,
    rank: int,
    n_ranks: int,
    meet: str,
    began: str,
    kill: str | None,
    life: int,
) -> int:
    import logging
    import warnings

    import torch
    import torch.distributed as dist

    from ckptctl.errors import CkptctlError
    from ckptctl.train import Checkpointer, GlobalLoader

    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.ERROR)
    if n_ranks > 1:
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=n_ranks)
    if kill is not None and ":" in kill:
        arm(kill)
    torch.manual_seed(1)
    model = build(options.dropout)
    if n_ranks > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        meshes = options.meshes or [str(n_ranks)]
        shape = meshes[min(life, len(meshes) - 1)].split("x")
        names = ("replicas", "shards")[-len(shape) :]
        mesh = init_device_mesh("cpu", tuple(map(int, shape)), mesh_dim_names=names)
        fully_shard(model.layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.steps)
    loader = GlobalLoader(Lines(), options.batch, seed=3, rank=rank, n_ranks=n_ranks)
    torch.manual_seed(100 + rank)  # every rank has dropout of its own
    random.seed(100 + rank)

    given: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "dataloader": loader,
    }
    given = {name: part for name, part in given.items() if name != options.forget}
    scope = {**globals(), **locals()}
    if options.hook:
        with open(options.hook) as file:
            exec(compile(file.read(), options.hook, "exec"), scope)
    ckpt = Checkpointer(
        [options.root, *options.other_root],
        **given,
        keep=options.keep,
        seed=7,
        **json.loads(options.options),
    )
    try:
        start = ckpt.resume(options.resume_from, replay=options.replay)
        if options.forget == "rng-of-one-rank" and rank == n_ranks - 1 and not start.fresh:
            torch.manual_seed(5)
        begin = 0 if options.forget == "step" else start.step
        batches = iter(loader)
        with open(options.out, "a") as out:
            for step in range(begin + 1, (start.last or options.steps) + 1):
                batch, ids = next(batches)
                loss = train_one(model, optimizer, scheduler, batch)
                shown = told(loss, ids, loader.digest, n_ranks)
                if rank == 0:
                    out.write(json.dumps({"life": life, "step": step, **shown}) + "\n")
                    out.flush()
                    if not os.path.exists(began):
                        open(began, "w").close()
                ckpt.note(step, loss=shown["loss"])
                if step % options.save_every == 0:
                    save = ckpt.save_async if options.lazy else ckpt.save
                    save(step, tokens=step * options.batch * LENGTH, loss=shown["loss"])
        ckpt.close()
    except CkptctlError as error:
        # In one piece: the ranks share the stream.
        os.write(2, f"rank {rank}: {type(error).__name__}: {error.message}\n".encode())
        return error.exit_code
    if n_ranks > 1:
        dist.destroy_process_group()
    return 0


def train_one(model: Any, optimizer: Any, scheduler: Any, batch: Any) -> Any:
    from torch.nn import functional

    logits = model(batch[:, :-1])
    loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    return loss.detach()


def told(loss: Any, ids: Any, digest: Any, n_ranks: int) -> dict[str, Any]:
    """Loss, samples in global order and their digest, over all ranks."""
    import torch.distributed as dist

    own = (loss.item(), ids.tolist(), digest)
    every: list[Any] = [own]
    if n_ranks > 1:
        every = [None] * n_ranks
        dist.all_gather_object(every, own)
    n_samples = sum(len(ids) for _, ids, _ in every)
    mean = sum(loss * len(ids) for loss, ids, _ in every) / n_samples
    total = every[0][2]
    for _, _, more in every[1:]:
        total = total + more
    return {
        "loss": mean,
        "ids": [each for _, ids, _ in every for each in ids],
        "samples_digest": str(total),
    }


def arm(kill: str) -> None:
    """Have all ranks killed at a moment of a save: when rank 0 proves that the root is its own."""
    from ckptctl.train import saving

    phase, _, number = kill.partition(":")
    nth = 3 * (int(number) - 1) + ("claim", "metadata", "seal").index(phase) + 1
    asked = 0
    check = saving.check_token

    def counted(*args: Any) -> None:
        nonlocal asked
        asked += 1
        if asked == nth:
            os.killpg(os.getpgid(0), signal.SIGKILL)
        check(*args)

    saving.check_token = counted


class Lines:
    """`N_SAMPLES` lines of letters; each comes with its number."""

    def __len__(self) -> int:
        return N_SAMPLES

    def __getitem__(self, index: int) -> Any:
        import torch

        draw = random.Random(index)
        line = [draw.randrange(LETTERS)]
        while len(line) <= LENGTH:
            line.append((line[-1] * 3 + draw.randrange(2)) % LETTERS)
        return torch.tensor(line), index


def build(dropout: float = 0.2) -> Any:
    import torch
    from torch import nn

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters = nn.Embedding(LETTERS, WIDTH)
            self.layer = nn.TransformerEncoderLayer(
                WIDTH, 2, 2 * WIDTH, dropout=dropout, batch_first=True
            )
            self.head = nn.Linear(WIDTH, LETTERS)

        def forward(self, letters: Any) -> Any:
            mask = torch.triu(torch.full((letters.shape[1],) * 2, float("-inf")), 1)
            return self.head(self.layer(self.letters(letters), src_mask=mask))

    return Small()


if __name__ == "__main__":
    main()
