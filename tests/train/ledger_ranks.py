"""Four ranks that share two data-parallel positions, and the ledger that they save together.

    python ledger_ranks.py '{"missing": []}'

Ranks 0 and 1, and 2 and 3, train the same samples. Prints the ledger of step 2; the ranks that are
`missing` record nothing in step 2.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist

from ckptctl.distributed.process_group import make_group
from ckptctl.train import DataLedger


def main(missing: list[int]) -> int:
    torch.set_num_threads(1)
    meet = tempfile.mktemp(prefix="ckptctl-meet-")
    pids = []
    for rank in range(4):
        pid = os.fork()
        if pid == 0:
            run(rank, meet, missing)
            sys.stdout.flush()
            os._exit(0)
        pids.append(pid)
    return max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)


def run(rank: int, meet: str, missing: list[int]) -> None:
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=4)
    ledger = DataLedger(samples=8, keep_ids=True)
    for step in (1, 2):
        if step == 1 or rank not in missing:
            first = 4 * (step - 1) + 2 * (rank // 2)
            ledger.add(step, [first, first + 1])
    fields = ledger.collect(2, make_group(60), rank // 2, 2)
    if fields is not None:
        print(json.dumps(fields))
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main(**json.loads(sys.argv[1])))
