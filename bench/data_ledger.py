"""Recording the samples of a step in a data ledger, beside a training step of 10 ms.

The limit is the hash of each id alone, from bytes that are ready. The peer is not measured: it is
the shortest step that is assumed, on one rank that takes the whole global batch.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

import xxhash
from measuring import Row, Size

STEP_US = 10_000.0
N_IDS, N_BATCHES = 1_000, 100
GOAL = 0.01


def rows(size: Size) -> Iterator[Row]:
    """`add` of numbers, of a tensor and of texts; what a `GlobalLoader` adds; one save."""
    import torch

    from ckptctl.distributed.process_group import ProcessGroup
    from ckptctl.formats.own.data_ledger import data_bytes, keys_of
    from ckptctl.train import DataLedger

    numbers = random.Random(0).sample(range(10**8), N_IDS)
    texts = [f"shard-{number:08d}" for number in numbers]
    for name, ids in (
        ("a list of numbers", numbers),
        ("a tensor", torch.tensor(numbers)),
        ("texts", texts),
    ):
        ledger, step = DataLedger(), iter(range(1, 1 << 60))
        keys = list(keys_of(texts if ids is texts else numbers))
        hashes = least_us(size, lambda keys=keys: [*map(xxhash.xxh3_128_digest, keys)])
        ours = least_us(size, lambda ledger=ledger, step=step, ids=ids: ledger.add(next(step), ids))
        what = f"{N_IDS:,} ids, {name}"
        yield Row(what, ours, "µs a step", STEP_US, "a step of 10 ms", limit=hashes, goal=GOAL)
    kept = DataLedger(keep_ids=True)
    step = iter(range(1, 1 << 60))
    ours = least_us(size, lambda: kept.add(next(step), numbers))
    yield Row(f"{N_IDS:,} ids, kept", ours, "µs a step", STEP_US, "a step of 10 ms")
    added = least_us(size, passes(recorded=True), 1) - least_us(size, passes(recorded=False), 1)
    what = f"{N_IDS:,} ids, added by a StatefulDataLoader"
    yield Row(what, added / N_BATCHES, "µs a step", STEP_US, "a step of 10 ms", goal=GOAL)
    ledger = DataLedger(samples=10**6)
    for number in range(1, 101):
        ledger.add(number, numbers)
    fields = ledger.collect(100, ProcessGroup(), 0, 1)
    n_bytes = len(data_bytes({**fields, "metadata": "0" * 64})) if fields is not None else 0
    yield Row("a step after 100 steps, in the file", n_bytes / 100, "bytes a step")


def passes(*, recorded: bool) -> Callable[[], object]:
    """A pass over a data set that costs nothing, with or without a ledger."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    from ckptctl.distributed.process_group import ProcessGroup
    from ckptctl.options import TrainOptions
    from ckptctl.train import DataLedger
    from ckptctl.train.passes import follow_all

    loader = StatefulDataLoader(Nothing(), batch_size=N_IDS, collate_fn=len)
    follow_all(loader, {}, ProcessGroup(), 0, TrainOptions(), lambda _: None)
    if recorded:
        DataLedger().follow(loader, 1)
    return lambda: [*loader]


class Nothing:
    """A data set of empty samples."""

    def __len__(self) -> int:
        return N_BATCHES * N_IDS

    def __getitem__(self, index: int) -> None:
        return None

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


def least_us(size: Size, act: Callable[[], object], n_calls: int | None = None) -> float:
    """The processor time of a call, the least of several rounds, in microseconds."""
    n_calls = n_calls or size.of(200)
    found = []
    for _ in range(max(size.rounds, 5)):
        began_s = time.process_time()
        for _ in range(n_calls):
            act()
        found.append((time.process_time() - began_s) / n_calls)
    return 1e6 * min(found)
