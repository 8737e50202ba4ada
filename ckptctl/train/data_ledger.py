"""Record which samples a run trains, as digests that travel with each step.

Each rank counts its own samples. At a save the counts and sums of all ranks are added, and rank 0
writes them into the step before its metadata: the ledger of a step is that of exactly the steps
before it, whenever the job is killed. A resume continues the ledger of the step that it loads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from operator import index
from typing import Any

import xxhash

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import UsageError
from ckptctl.formats.own.data_ledger import (
    MODULUS,
    DataFields,
    EpochFields,
    ExpectedFields,
    LedgerRow,
    SampleId,
    SpanFields,
    UnrecordedFields,
    as_hex,
    joined_rows,
    keys_of,
)
from ckptctl.formats.own.files import MAX_STRING
from ckptctl.train.passes import has_ids, passes_of, samples_of_epoch
from ckptctl.train.samples import GlobalLoader

MOST_IDS = 1_000_000
"""Ids of one epoch that a step keeps; of an epoch with more, none."""
_LIMBS = 4


def _added(ids: Sequence[SampleId]) -> int:
    """`sum_of`, in half of its time: numpy adds the four 32-bit parts of each hash."""
    if not ids:
        return 0
    import numpy as np

    digests = b"".join(map(xxhash.xxh3_128_digest, keys_of(ids)))
    parts = np.frombuffer(digests, dtype=">u4").reshape(-1, _LIMBS).sum(0, dtype=np.uint64)
    first, second, third, fourth = map(int, parts)
    return ((first << 96) + (second << 64) + (third << 32) + fourth) % MODULUS


@dataclass(slots=True)
class _Taken:
    """The samples of some steps and one epoch, on this rank or over all.

    `ids` are empty where they are not kept; of an epoch, they are those besides a whole one.
    """

    count: int = 0
    total: int = 0
    ids: list[SampleId] = field(default_factory=list)
    is_whole: bool = False

    def take(self, ids: Sequence[SampleId], *, keeps: bool) -> None:
        self.count += len(ids)
        self.total = (self.total + _added(ids)) % MODULUS
        if keeps:
            self.ids += ids


@dataclass(slots=True)
class _SavedLedger:
    """What the last step that was saved holds; on rank 0."""

    since: int = 0
    after: int = 0
    epochs: dict[int, _Taken] = field(default_factory=dict)
    without_ids: set[int] = field(default_factory=set)
    unrecorded: UnrecordedFields | None = None
    spans: dict[int, list[SpanFields]] = field(default_factory=dict)


class DataLedger:
    """Records the samples of each step; a `Checkpointer` saves it with its steps.

    A `GlobalLoader`, and a `StatefulDataLoader` over a data set with an index, record what they
    return by themselves. Any other loop, and one with `follow_loader=False`, calls `add` in each
    step, on every data-parallel rank. `samples` is the number of samples of the data set, whose
    ids are 0, 1, 2, …, or all its ids; without it, and without a loader that shows it, nothing
    shows that an epoch is complete. With `keep_ids` a step also holds the ids of epochs that are
    not complete or not right, so that `ckptctl data` names them.
    """

    def __init__(
        self,
        *,
        samples: int | Iterable[SampleId] | None = None,
        keep_ids: bool = False,
        follow_loader: bool = True,
    ) -> None:
        self.keep_ids = keep_ids
        self.follow_loader = follow_loader
        self._expected: ExpectedFields | None = None
        if isinstance(samples, int):
            self._expected = {"count": samples, "sum": None, "order": None}
        elif samples is not None:
            ids = list(samples)
            self._expected = {"count": len(ids), "sum": as_hex(_added(ids)), "order": None}
        self._loader: Any = None
        self._rows: dict[tuple[int, int, int], _Taken] = {}
        self._open: dict[int, _Taken] = {}
        self._marked = 0
        self._history = _SavedLedger()
        self._interval: list[LedgerRow] = []
        self._unrecorded: set[int] = set()
        self._spans: dict[int, list[SpanFields]] = {}

    def add(self, step: int, ids: Sequence[SampleId], *, epoch: int = 0) -> None:
        """Record the samples of this rank in a step: integers of 64 bits, or texts.

        It may be called several times in a step, and `ids` may be empty, a tensor or an array.
        Raises `UsageError` for other ids, for a step that was saved before, and if a
        loader records the samples itself.
        """
        if self._loader is not None:
            raise UsageError(
                f"the {type(self._loader).__name__} records its samples itself: do not call "
                "add, or create the DataLedger with follow_loader=False"
            )
        step, epoch = index(step), index(epoch)
        if epoch < 0:
            raise UsageError(f"epoch is {epoch}; epochs count from 0 on")
        if step <= self._history.after:
            raise UsageError(
                f"step {step} is recorded, and the run is already at step {self._history.after}"
            )
        if isinstance(ids, str | bytes):
            raise UsageError(f"ids is {ids[:80]!r}; expected a list of the ids of samples")
        listed = ids.tolist() if hasattr(ids, "tolist") else list(ids)
        self._rows.setdefault((step, step, epoch), _Taken()).take(listed, keeps=self.keep_ids)

    # What loaders and the Checkpointer call

    def follow(self, loader: Any, dp_size: int) -> bool:
        """Record what a loader returns: in the step that is noted or saved next.

        Returns False for a loader whose samples have no ids, or if it is not to be followed.
        """
        passes = passes_of(loader)
        if not self.follow_loader:
            return False
        if isinstance(loader, GlobalLoader):
            loader.data_ledger = self
        elif passes is not None and has_ids(loader):
            passes.data_ledger = self
            n = samples_of_epoch(loader, dp_size) if self._expected is None else None
            if n is not None:
                self._expected = {"count": n, "sum": None, "order": None}
        else:
            return False
        self._loader = loader
        return True

    def take(self, epoch: int, ids: Sequence[SampleId]) -> None:
        """Record samples of this rank in the step that is noted or saved next."""
        self._open.setdefault(epoch, _Taken()).take(ids, keeps=self.keep_ids)

    def take_span(self, epoch: int, start: int, count: int) -> None:
        """Record the positions in an epoch that all ranks take together."""
        spans = self._spans.setdefault(epoch, [])
        if spans and spans[-1]["start"] + spans[-1]["count"] == start:
            spans[-1]["count"] += count
        else:
            spans.append({"start": start, "count": count, "after": self._marked})

    def note(self, step: int) -> None:
        """Assign what was taken since the step that was noted before."""
        for epoch, taken in self._open.items():
            self._rows[min(self._marked + 1, step), step, epoch] = taken
        self._open, self._marked = {}, step

    def begin(self, step: int, fields: DataFields | None) -> bool:
        """Continue the ledger of the step that was resumed from; on rank 0 with its `fields`.

        Without them, and if the data set or its order differs, the ledger begins after the step.
        Returns whether it continues.
        """
        self._marked = step
        self._rows, self._open, self._interval, self._spans = {}, {}, [], {}
        self._history = _SavedLedger(step, step)
        if fields is None:
            return False
        now, before = self._expected_now(), fields["expected"]
        has_order = isinstance(self._loader, GlobalLoader)
        if now is None or (before is None and not has_order):
            self._expected = None  # no epoch of both can be proven to be complete
        elif now != before:
            return False
        self._history = _history_of(fields)
        self._spans = {epoch: [*spans] for epoch, spans in self._history.spans.items()}
        return True

    def collect(
        self, step: int, group: ProcessGroup, dp_rank: int, dp_size: int
    ) -> DataFields | None:
        """The ledger of a step that is about to be saved, over all ranks; None on other ranks.

        Every rank calls it. Ranks that share a `dp_rank` trained the same samples: the first of
        them counts. `metadata` is left empty.
        """
        if self._loader is not None:
            self.note(step)
        own = {key: taken for key, taken in self._rows.items() if key[1] <= step}
        self._rows = {key: taken for key, taken in self._rows.items() if key[1] > step}
        ranks = group.gather((dp_rank, _digest(own), self.keep_ids))
        keys = sorted(own)
        if any(one[1:] != ranks[0][1:] for one in ranks):
            keys = sorted({key for rank in group.gather(tuple(own)) for key in rank})
        counts = [one[0] for one in ranks].index(dp_rank) == group.rank
        mine = own if counts else {}
        sums = group.added(*(part for key in keys for part in _parts(mine.get(key))))
        keeps = all(one[2] for one in ranks)
        kept = group.gather([mine[key].ids if key in mine else [] for key in keys]) if keeps else ()
        if not group.is_first:
            self._history.after = step
            return None
        for place, key in enumerate(keys):
            n_ranks, count, *limbs = sums[place * (2 + _LIMBS) : (place + 1) * (2 + _LIMBS)]
            total = sum(limb << 32 * i for i, limb in enumerate(limbs)) % MODULUS
            ids = tuple(one for rank in kept for one in rank[place]) if keeps else None
            self._interval.append(LedgerRow(*key, count, total, ids))
            if self._loader is None and n_ranks < dp_size:
                self._unrecorded.add(key[1])
        return self._fields(step)

    def saved(self, fields: DataFields | None) -> None:
        """Begin the next interval: the step of these fields was saved. On rank 0."""
        if fields is None:
            return
        self._history = _history_of(fields)
        self._interval = [row for row in self._interval if row.last > fields["step"]]
        self._unrecorded = {step for step in self._unrecorded if step > fields["step"]}

    # The ledger of a step

    def _fields(self, step: int) -> DataFields:
        history, rows = self._history, [row for row in self._interval if row.last <= step]
        epochs = {epoch: replace(one, ids=[*one.ids]) for epoch, one in history.epochs.items()}
        without = set() if self.keep_ids else {*epochs, *(row.epoch for row in rows)}
        without |= history.without_ids
        for row in rows:
            # No reader would accept longer ids.
            texts = (sample for sample in row.ids or () if isinstance(sample, str))
            if row.ids is None or any(len(text) > MAX_STRING for text in texts):
                without.add(row.epoch)
        for row in rows:
            one = epochs.setdefault(row.epoch, _Taken())
            one.count += row.n_samples
            one.total = (one.total + row.total) % MODULUS
            one.ids += row.ids or ()
        expected = self._expected_now()
        stored: list[EpochFields] = []
        for epoch, one in sorted(epochs.items()):
            is_full = expected is not None and one.count == expected["count"]
            if expected is not None and is_full and not one.is_whole and epoch not in without:
                total = expected["sum"] or as_hex(_added(range(one.count)))
                if as_hex(one.total) == total:  # proven: its ids are not needed any more
                    one.is_whole, one.ids = True, []
            without |= {epoch} if len(one.ids) > MOST_IDS else set()
            kept: EpochFields = {
                "epoch": epoch,
                "count": one.count,
                "sum": as_hex(one.total),
                "is_whole": one.is_whole,
                "ids": None if epoch in without else one.ids,
                "spans": [*map(copy, self._spans[epoch])] if epoch in self._spans else None,
            }
            stored.append(kept)
        return {
            "metadata": "",
            "step": step,
            "since": history.since,
            "after": history.after,
            "expected": expected,
            "unrecorded": self._unrecorded_until(step, rows),
            "epochs": stored,
            "rows": [row.fields() for row in joined_rows(rows)],
        }

    def _expected_now(self) -> ExpectedFields | None:
        loader = self._loader
        if self._expected is not None or not isinstance(loader, GlobalLoader):
            return self._expected
        order = loader.order
        return {
            "count": order.n_samples,
            "sum": None,
            "order": {"seed": order.seed, "shuffle": order.shuffle},
        }

    def _unrecorded_until(self, step: int, rows: Sequence[LedgerRow]) -> UnrecordedFields | None:
        before = self._history.unrecorded
        missing: set[int] = set()
        if self._loader is None:
            recorded = {row.last for row in rows}
            steps = range(self._history.after + 1, step + 1)
            missing = {one for one in steps if one not in recorded or one in self._unrecorded}
        if not missing:
            return before
        return {
            "count": len(missing) + (0 if before is None else before["count"]),
            "first": min(missing) if before is None else before["first"],
            "last": max(missing),
        }


def _history_of(fields: DataFields) -> _SavedLedger:
    history = _SavedLedger(fields["since"], fields["step"], unrecorded=fields["unrecorded"])
    for taken in fields["epochs"]:
        epoch, ids, total = taken["epoch"], list(taken["ids"] or ()), int(taken["sum"], 16)
        history.epochs[epoch] = _Taken(taken["count"], total, ids, taken["is_whole"])
        if taken["ids"] is None:
            history.without_ids.add(epoch)
        if taken["spans"] is not None:
            history.spans[epoch] = [*map(copy, taken["spans"])]
    return history


def _digest(rows: dict[tuple[int, int, int], _Taken]) -> int:
    return xxhash.xxh3_64_intdigest(repr(sorted(rows)).encode())


def _parts(taken: _Taken | None) -> list[int]:
    """What is added over the ranks: 1 for a rank with the row, its count, its sum in parts."""
    if taken is None:
        return [0] * (2 + _LIMBS)
    return [1, taken.count, *(taken.total >> 32 * i & 0xFFFFFFFF for i in range(_LIMBS))]
