"""Gloo jobs in which some ranks do not do what the others do; every rank dumps its recorder.

flight_recorder_job.py FOLDER WORLD_SIZE CASE ...

The ranks of all cases run at once, forked from a process that has imported torch.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json
from torch.utils._traceback import CapturedTraceback


def main() -> None:
    folder, world_size, cases = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    # The first stack that a process names loads the symbols of torch, a second of processor time.
    CapturedTraceback.extract(script=True).summary()
    started = []
    for case in cases:
        (folder / case).mkdir()
        for rank in range(world_size):
            pid = os.fork()
            if pid == 0:
                try:
                    rank_main(folder / case, case, rank, world_size)
                except BaseException:  # noqa: BLE001 - a forked rank must not go on as the launcher
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            started.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
    sys.exit(any(codes))


def rank_main(folder: Path, case: str, rank: int, world_size: int) -> None:
    store = dist.FileStore(str(folder / f"store-{case}"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(minutes=5)
    )
    values = torch.ones(4)
    for _ in range(3):
        dist.all_reduce(values)
    if case == "grid":
        # Rows and columns of a square: every rank meets its neighbours in two groups.
        rows = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        columns = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        groups = (rows[rank // 2], columns[rank % 2])
        for group in groups * 2:
            dist.all_reduce(values, group=group)
        dist.barrier()
        begun: list[dist.ProcessGroup] = []
        arguments = (groups, rank, values, begun)
        threading.Thread(target=cross, args=arguments, daemon=True).start()
        # Rank 2 waits for rank 3 in its second row, the others in their second column.
        while len(begun) < (4, 4, 3, 2)[rank]:
            time.sleep(0.05)
    else:
        misbehaving = threading.Thread(target=misbehave, args=(case, rank, values), daemon=True)
        misbehaving.start()
    # The ranks that wait are waiting by then: each has told the others that it will.
    store.add("ready", 1)
    while store.add("ready", 0) < world_size:
        time.sleep(0.05)
    time.sleep(2)
    (folder / f"nccl_trace_rank_{rank}").write_bytes(_dump_fr_trace())
    (folder / f"trace_{rank}.json").write_bytes(_dump_fr_trace_json())
    store.add("dumped", 1)
    while store.add("dumped", 0) < world_size:
        time.sleep(0.05)
    os._exit(0)


def cross(
    groups: tuple[dist.ProcessGroup, ...],
    rank: int,
    values: torch.Tensor,
    begun: list[dist.ProcessGroup],
) -> None:
    """Rows and columns in turn, until the neighbours of rank 3 wait, and theirs."""
    for group in groups * 3 if rank != 3 else groups:
        begun.append(group)
        dist.all_reduce(values, group=group)


def misbehave(case: str, rank: int, values: torch.Tensor) -> None:
    if case == "absent" and rank == 2:
        return
    if case == "operation" and rank == 2:
        dist.broadcast(values, src=2)
        return
    dist.all_reduce(torch.ones(8) if case == "shape" and rank == 2 else values)


if __name__ == "__main__":
    main()
