"""Follow a loader of torchdata: its passes over its data, the ids of its samples, and other data.

torchdata (0.11) saves how much of a pass was taken. The rest of a pass whose last batch was taken
is empty, so a script that begins the next epoch after a resume would train nothing in it; one that
continues the epoch of the step expects just that. The epoch that a script sets shows which it is.

The class of a loader is replaced by one that derives from it: scripts keep their loader, and its
`__iter__` begins a pass.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import StateRefused
from ckptctl.options import TrainOptions
from ckptctl.train.samples import GlobalLoader, owner_of_epoch, samplers_of
from ckptctl.train.state import kept_random_states, leaves, reseed

if TYPE_CHECKING:
    from ckptctl.train.data_ledger import DataLedger

RECORD = "ckptctl"
"""The key of the record in the state of a loader: its pass, and a description of its data."""

_PASSES = "ckptctl_passes"
"""The attribute of a loader that is followed."""

_END = object()
_COUNTS = ("epoch", "before", "n_ended")


class _RestoredEpoch(int):
    """The epoch that a resume has set; `set_epoch` of the script replaces it by another object."""


@dataclass(frozen=True, slots=True)
class SavedPass:
    """The pass that a step was saved in.

    `epoch` is that of a sampler or of the data set, None without one, and before the first pass;
    `before` is that of the pass before. `n_ended` passes had ended before it, and it had itself
    if `finished`: the script had asked for more than its last batch.
    """

    epoch: int | None
    before: int | None
    n_ended: int
    finished: bool


@dataclass(slots=True)
class Passes:
    """The passes of one loader: the current one, and that of the step until it is continued.

    `data` describes the data. `state` is what was loaded, of which `n_to_skip` batches of a stream
    are taken again, and left out. The generator of the loader that `is_main` is saved with the
    random numbers of its rank. `numbers` returns the whole numbers that the script keeps in
    `extra`; `counters` are those that rose with the passes. `data_ledger` records the samples that
    are returned.
    """

    data: Mapping[str, Any]
    options: TrainOptions
    tell: Callable[[str], None]
    epoch: int | None = None
    before: int | None = None
    n_ended: int = 0
    saved: SavedPass | None = None
    state: Mapping[str, Any] = field(default_factory=dict)
    n_to_skip: int = 0
    is_main: bool = False
    numbers: Callable[[], dict[str, int]] = dict
    counters: Collection[str] = ()
    data_ledger: DataLedger | None = None
    _offsets: Mapping[str, int] = field(default_factory=dict)
    _restored: object = None

    def begin(self, epoch: int | None, *, ended: bool) -> None:
        """Count a pass; `ended` states whether the one before was taken to its end."""
        if ended:
            self.n_ended += 1
            self.before = self.epoch
        self.epoch = epoch
        offsets = self._offsets
        self.read_numbers()
        if ended:
            pairs = self._offsets.items()
            self.counters = [name for name, offset in pairs if offsets.get(name) == offset]

    def read_numbers(self) -> None:
        """Read the numbers of the script, as a pass begins or when all of them are restored."""
        self._offsets = {name: one - self.n_ended for name, one in self.numbers().items()}

    def record(self, *, finished: bool) -> dict[str, Any]:
        """What a step holds of the passes and the data, in plain values."""
        counts = {name: getattr(self, name) for name in _COUNTS}
        others = {"counters": list(self.counters), "data": dict(self.data)}
        return {**counts, "finished": finished, **others}

    def load(self, state: Mapping[str, Any], loader: Any) -> dict[str, Any]:
        """Continue the pass of a step, and set its epoch; returns what torchdata has to load."""
        loaded = dict(state)
        record = loaded.pop(RECORD, None)
        self.saved, self.state, self._restored = None, state, None
        # The step was saved before there were records, or before the first pass.
        if record is None or not loaded:
            return loaded
        self.epoch, self.before, self.n_ended = (record[name] for name in _COUNTS)
        self.saved = saved = SavedPass(self.epoch, self.before, self.n_ended, record["finished"])
        self.counters = record["counters"]
        if "generator" in record and loader.generator is not None:
            loader.generator.set_state(record["generator"])
        owner = owner_of_epoch(loader)
        if owner is not None and saved.epoch is not None:
            owner.set_epoch(saved.epoch)
            if "epoch" in getattr(owner, "__dict__", {}):
                owner.epoch = self._restored = _RestoredEpoch(saved.epoch)
        self.n_to_skip = _n_to_skip(loaded)
        if "_iterator_finished" in loaded:
            # torchdata would begin the next pass by itself, with another seed of its workers.
            loaded["_iterator_finished"] = False
        return {} if self.n_to_skip else loaded

    def begins_next(self, saved: SavedPass, loader: Any) -> bool:
        """Whether the script, after a pass that has ended, expects the next one.

        Otherwise it expects the rest of that pass, which is empty. Raises `StateRefused` if the
        script sets an epoch that is neither, and if nothing shows what it expects.
        """
        owner, epoch, before = owner_of_epoch(loader), saved.epoch, saved.before
        is_set = owner is not None and owner.epoch is not self._restored
        if self._restored is None:  # the epoch of the step, set again, looks the same
            is_set = is_set and owner.epoch != epoch
        if is_set and epoch is not None and epoch != before:
            if owner.epoch == epoch and not saved.finished:
                return False
            known = before is not None and owner.epoch != 2 * epoch - before
            if owner.epoch <= epoch or known:
                self.refuse_epoch("at the end of", saved, owner)
            return True
        if saved.finished:
            return True
        if self.options.epoch_end is not None:
            return self.options.epoch_end == "next"
        numbers = {name: one - saved.n_ended for name, one in self.numbers().items()}
        for name in self.counters:
            return numbers.get(name) != self._offsets.get(name)
        for name, offset in self._offsets.items():
            # In the first pass nothing shows yet whether a number counts them.
            if not saved.n_ended and offset in (0, 1) and numbers.get(name) == offset:
                self._refuse(
                    "the step was saved at the last batch of the first pass over the data, and "
                    f"{name} of extra, {offset}, may count the passes. If the script begins with "
                    "the pass that it counts, of which nothing is left, pass epoch_end='rest'; if "
                    "it computes its epoch from the step, pass epoch_end='next'. "
                )
        return True

    def refuse_epoch(self, where: str, saved: SavedPass, owner: Any) -> None:
        """Raise `StateRefused` for the epoch that the script has set, unless it is accepted."""
        self._refuse(
            f"the step was saved {where} epoch {saved.epoch} of the {type(owner).__name__}, and "
            f"the script has set epoch {owner.epoch}: samples would be repeated or left out. "
            "resume() sets the epoch of the step; begin with it:\n"
            "    for epoch in range(sampler.epoch, n_epochs):\n"
            "        sampler.set_epoch(epoch)\n"
        )

    def _refuse(self, why: str) -> None:
        if not self.options.accept_repetition:
            raise StateRefused(f"{why}accept_repetition=True continues nevertheless")
        self.tell(f"note: {why}")


def _epoch_of(loader: Any) -> int | None:
    owner = owner_of_epoch(loader)
    return None if owner is None else int(owner.epoch)


def _n_to_skip(state: Mapping[str, Any]) -> int:
    """The batches that were taken of a stream without a state, by the state of its loader.

    torchdata takes as many again, and then counts them twice: a second resume would skip more.
    """
    snapshot = state.get("_snapshot", {})
    one: Any = next(iter(snapshot.get("_worker_snapshots", {}).values()), state) or {}
    stream = one.get("fetcher_state")
    if not stream or stream["dataset_iter_state"] is not None or one["dataset_state"] is not None:
        return 0
    if "_num_yielded" in state:
        return int(state["_num_yielded"])
    return int(snapshot["_snapshot_step"] + state["_steps_since_snapshot"])


def record_in(state: Any) -> Mapping[str, Any]:
    """The record in the state of a loader; empty where there is none."""
    record: Mapping[str, Any] = state.get(RECORD, {}) if isinstance(state, Mapping) else {}
    return record


def passes_of(loader: Any) -> Passes | None:
    """The passes of a loader that is followed; None of another one."""
    passes: Passes | None = getattr(loader, _PASSES, None)
    return passes


def follow_all(
    main: Any,
    extra: Mapping[str, Any],
    group: ProcessGroup,
    dp_rank: int,
    options: TrainOptions,
    tell: Callable[[str], None],
) -> None:
    """Describe the data of the loaders of a script, and follow their passes.

    Every rank calls it. What ranks whose loaders have one state describe differently, such as
    samples with random transforms, is left out: a step holds it once.
    """
    torchdata = sys.modules.get("torchdata.stateful_dataloader")
    classes = (GlobalLoader, *(() if torchdata is None else (torchdata.StatefulDataLoader,)))
    loaders = [one for one in (main, *extra.values()) if isinstance(one, classes)]
    places = [
        None if one is not main or isinstance(one, GlobalLoader) else dp_rank for one in loaders
    ]
    ranks = group.from_all(lambda: list(zip(places, map(describe, loaders), strict=True)))
    for number, loader in enumerate(loaders):
        place, data = ranks[group.rank][number]
        others = [rank[number] for rank in ranks if number < len(rank)]
        same = [other for where, other in others if where == place]
        for name in [*data]:
            if any(other.get(name) != data[name] for other in same):
                del data[name]
        if isinstance(loader, GlobalLoader):
            loader.data = data
            continue
        passes = passes_of(loader)
        if passes is None:
            passes = Passes(data, options, tell)
            loader.__class__ = _followed(type(loader))
            setattr(loader, _PASSES, passes)
        passes.options = options
        passes.tell = tell if group.is_first else lambda _: None
        passes.is_main, passes.numbers = loader is main, partial(_numbers_of, extra)


def _numbers_of(extra: Mapping[str, Any]) -> dict[str, int]:
    """The whole numbers in the states of a script's own objects, by name."""
    import torch

    others = (torch.nn.Module, torch.optim.Optimizer, GlobalLoader)
    own = {
        name: part.state_dict()
        for name, part in extra.items()
        if not isinstance(part, others) and passes_of(part) is None
    }
    values = (leaf for name, state in own.items() for leaf in leaves(state, name, in_tuples=True))
    return {name: value for name, value in values if type(value) is int}


def _followed(base: Any) -> type:
    """A class of loaders whose passes are followed."""

    class Followed(base):  # type: ignore[misc]
        def __iter__(self) -> Iterator[Any]:
            passes: Passes = getattr(self, _PASSES)
            saved, passes.saved = passes.saved, None
            if saved is None:
                passes.begin(_epoch_of(self), ended=self._is_finished())
                begun = iter(super().__iter__())
                return begun if passes.data_ledger is None else self._recorded(passes, begun)
            # A pass draws the seed of its workers when it begins, and was counted once. If it were
            # drawn again, all that is drawn later would differ from an uninterrupted run.
            drawn = None if self.generator is None else self.generator.get_state()
            with kept_random_states():
                rest = super().__iter__()
                for _ in range(passes.n_to_skip):
                    next(rest, None)
            if drawn is not None:
                self.generator.set_state(drawn)
            return self._recorded(passes, self._continued(passes, saved, rest))

        def _get_iterator(self) -> Any:
            passes: Passes = getattr(self, _PASSES)
            with ids_returned(self, wanted=passes.data_ledger is not None):
                return super()._get_iterator()

        def _recorded(self, passes: Passes, batches: Iterator[Any]) -> Iterator[Any]:
            """The batches of a pass, whose samples are recorded as they are returned."""
            for batch in batches:
                if not isinstance(batch, IndexedBatch):
                    yield batch
                    continue
                if passes.data_ledger is not None:
                    epoch = passes.n_ended if passes.epoch is None else passes.epoch
                    passes.data_ledger.take(epoch, as_ids(batch.ids))
                yield batch.batch

        def _continued(self, passes: Passes, saved: SavedPass, rest: Any) -> Iterator[Any]:
            """The rest of the pass of a step, or the next pass."""
            first = next(rest, _END)
            if first is not _END and not saved.finished:
                owner = owner_of_epoch(self)
                if owner is not None and saved.epoch not in (None, owner.epoch):
                    passes.refuse_epoch("within", saved, owner)  # the order of another epoch
            elif passes.begins_next(saved, self):
                passes.begin(_epoch_of(self), ended=True)
                if first is _END:
                    yield from super().__iter__()
            if first is not _END:
                yield first
                yield from rest

        def _is_finished(self) -> bool:
            iterator = self._iterator
            return iterator is not None and bool(getattr(iterator, "_finished", True))

        def state_dict(self) -> dict[str, Any]:
            """The state of the loader, with a record of its passes and its data."""
            passes: Passes = getattr(self, _PASSES)
            if passes.saved is not None:  # nothing was taken since
                return dict(passes.state)
            if self._iterator is None:
                # torchdata would begin a pass for it, which the next `set_epoch` does not reach.
                state = dict(self.next_iter_state or {})  # what was loaded, and not yet continued
            else:
                state = super().state_dict()
            record = passes.record(finished=self._is_finished())
            # That of the main loader is among the random numbers of its rank.
            if self.generator is not None and not passes.is_main:
                record["generator"] = self.generator.get_state()
            return {**state, RECORD: record}

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            """Continue at a position; the state may be one without a record."""
            super().load_state_dict(getattr(self, _PASSES).load(state_dict, self))

    Followed.__name__, Followed.__qualname__ = base.__name__, base.__qualname__
    Followed.__module__ = base.__module__
    return Followed


# The ids of samples, returned with each batch
#
# Batches are requested ahead of their turn, by several workers, and some again after a resume. So
# the ids travel with the samples: while torchdata makes an iterator, the data set and the function
# that makes batches are replaced by those below. The ids are the indices that the sampler drew.


class IndexedBatch(NamedTuple):
    """A batch as the script gets it, and the indices of its samples."""

    ids: list[Any]
    batch: Any


class _IndexedData:
    """A data set whose samples come with their indices; everything else is that of the data set."""

    def __init__(self, dataset: Any) -> None:
        self.ckptctl_dataset = dataset

    def __getitem__(self, key: Any) -> IndexedBatch:
        return IndexedBatch([key], self.ckptctl_dataset[key])

    def __getitems__(self, indices: Any) -> IndexedBatch:
        dataset = self.ckptctl_dataset
        indices = list(indices)
        take = getattr(dataset, "__getitems__", None)
        return IndexedBatch(indices, take(indices) if take else [dataset[one] for one in indices])

    def __len__(self) -> int:
        return len(self.ckptctl_dataset)

    def __getattr__(self, name: str) -> Any:
        if name == "ckptctl_dataset":  # while a worker unpickles it
            raise AttributeError(name)
        return getattr(self.ckptctl_dataset, name)


def _indexed(collate: Callable[[Any], Any], samples: IndexedBatch) -> IndexedBatch:
    """What makes a batch of samples, for samples with their indices."""
    return IndexedBatch(samples.ids, collate(samples.batch))


def has_ids(loader: Any) -> bool:
    """Whether a loader takes its samples by index, and nothing else of it needs the data set."""
    from torch.utils.data import IterableDataset, MapDataPipe

    dataset = loader.dataset
    is_indexed = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    if not is_indexed or isinstance(dataset, IterableDataset | MapDataPipe):
        return False
    # A state is loaded into the data set itself, and a worker may be set up by the script.
    return not hasattr(dataset, "state_dict") and loader.worker_init_fn is None


@contextmanager
def ids_returned(loader: Any, *, wanted: bool) -> Iterator[None]:
    """Have an iterator that is made meanwhile return each batch as an `IndexedBatch`."""
    if not wanted:
        yield
        return
    fields = loader.__dict__  # a loader refuses another data set
    before = fields["dataset"], fields["collate_fn"]
    fields["dataset"] = _IndexedData(before[0])
    fields["collate_fn"] = partial(_indexed, before[1])
    try:
        yield
    finally:
        fields["dataset"], fields["collate_fn"] = before


def samples_of_epoch(loader: Any, dp_size: int) -> int | None:
    """The samples of the data set, if each pass of all ranks takes each of them once; or None.

    A sampler that repeats samples to fill the ranks, and a loader that drops the last batch, do
    not; of samplers of a script's own it is not known.
    """
    from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

    n, sampler = len(loader.dataset), loader.sampler
    if loader.batch_size is None and loader.batch_sampler is not None:
        return None
    kind = type(sampler)
    is_of_torchdata = kind.__name__ == "RandomSampler" and kind.__module__.startswith("torchdata.")
    if isinstance(sampler, DistributedSampler):
        n_shares = sampler.num_replicas
    elif is_of_torchdata or isinstance(sampler, SequentialSampler | RandomSampler):
        n_shares = 1
        if getattr(sampler, "replacement", False) or getattr(sampler, "num_samples", n) != n:
            return None
    else:
        return None
    drops = loader.drop_last and loader.batch_size and (n // n_shares) % loader.batch_size
    return None if n_shares != dp_size or n % n_shares or drops else n


def as_ids(indices: Sequence[Any]) -> list[Any]:
    """The indices as ids: those that are no numbers by their text."""
    try:
        return list(map(index, indices))
    except TypeError:
        return [index(one) if hasattr(one, "__index__") else str(one) for one in indices]


# What a loader takes its samples from, so that a resume notices other data at the same position
#
# A description holds plain values by name. It is made before the first step, when a sampler holds
# its settings and has not moved yet. Of the samples only the first and the last are read, from a
# data set that has an index, and where the loader reads them itself: in a worker if it has workers,
# because a file that is opened before the workers are forked is shared by them.


SAMPLES = "the first and last sample"
_READ_TIMEOUT_S = 60.0
_PLAIN = (bool, int, float, str)


def describe(loader: Any) -> dict[str, Any]:
    """What a loader of torchdata, or a `GlobalLoader`, takes its samples from, and how.

    Cost: two samples, and the start of a worker if the loader has workers; none for a data set that
    states a `fingerprint`. Draws no random numbers.
    """
    dataset, is_global = loader.dataset, isinstance(loader, GlobalLoader)
    values: dict[str, Any] = {"data set": type(dataset).__qualname__}
    with suppress(Exception):  # a stream has no length, or an unknown one
        values["length"] = len(dataset)
    stated = loader.stated_fingerprint if is_global else getattr(dataset, "fingerprint", None)
    if isinstance(stated, _PLAIN):
        values["fingerprint"] = stated
    else:
        values |= {SAMPLES: edge_samples_digest(loader)}
    if not is_global:
        values |= {name: getattr(loader, name) for name in ("batch_size", "drop_last")}
        samplers = list(samplers_of(loader))
        values["sampler"] = " of ".join(type(one).__name__ for one in samplers)
        for sampler in samplers:
            if sampler is not loader.batch_sampler or loader.batch_size is None:
                values |= dict(_settings(sampler))
    return {name: value for name, value in values.items() if value is not None}


def _settings(sampler: Any) -> Iterator[tuple[str, Any]]:
    """The public plain values of a sampler, without its epoch and what it saves as its state."""
    varying: set[str] = {"epoch"} if hasattr(sampler, "set_epoch") else set()
    if hasattr(sampler, "state_dict"):
        varying |= set(sampler.state_dict())
    for name, value in getattr(sampler, "__dict__", {}).items():
        if not name.startswith("_") and name not in varying and type(value) in _PLAIN:
            yield f"{name} of {type(sampler).__name__}", value


def data_differences(saved: Mapping[str, Any], loader: Any, now: Mapping[str, Any]) -> list[str]:
    """What the data of a step and that of a loader have both, and have not alike.

    Samples that are not read alike twice, as those with random transforms may be, prove nothing.
    """
    names = [name for name in saved if name in now and saved[name] != now[name]]
    if names == [SAMPLES]:
        n_times = 4
        if any(edge_samples_digest(loader) != now[SAMPLES] for _ in range(n_times)):
            return []
    return [f"{name} was {saved[name]} and is {now[name]} now" for name in names]


def edge_samples_digest(loader: Any) -> str | None:
    """A digest of the first and the last sample of a data set with an index; None without one.

    None as well for samples that cannot be read or have no bytes, and for a data set with a state,
    which a read might change.
    """
    from torch.utils.data import DataLoader, IterableDataset

    dataset = loader.dataset
    is_indexed = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    if not is_indexed or isinstance(dataset, IterableDataset) or hasattr(dataset, "state_dict"):
        return None
    options = loader.options if isinstance(loader, GlobalLoader) else vars(loader)
    worker: dict[str, Any] = {}
    if options.get("num_workers"):
        worker = {"num_workers": 1, "timeout": _READ_TIMEOUT_S}
        worker["multiprocessing_context"] = options.get("multiprocessing_context")
        worker["worker_init_fn"] = partial(_begin_worker, options.get("worker_init_fn"))
    try:
        with kept_random_states():
            reseed(0, 0, 0)  # the generators that transforms use, alike in each attempt
            first_and_last: Any = [0, len(dataset) - 1]
            read = DataLoader(
                dataset, batch_size=None, sampler=first_and_last, collate_fn=digest_of, **worker
            )
            return " ".join(read)
    except Exception:  # noqa: BLE001 - what a data set raises: its samples are not compared
        return None


def _begin_worker(then: Callable[[int], None] | None, worker: int) -> None:
    reseed(0, 0, 0)
    if then is not None:
        then(worker)


def digest_of(sample: Any) -> str:
    """A digest of plain values, tensors, arrays and images, and what is made of them.

    Raises `TypeError` for a value whose bytes are not known.
    """
    digest = hashlib.sha256()
    for text in _bytes_of(sample):
        digest.update(text)
    return digest.hexdigest()[:16]


def _bytes_of(value: Any) -> Iterator[bytes]:
    import torch

    if value is None or isinstance(value, (*_PLAIN, bytes)):
        yield f"{type(value).__name__} {value!r};".encode()
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else value
        yield f"{len(value)} in {type(value).__name__};".encode()
        for item in items:
            yield from _bytes_of(item)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)};".encode()
        yield value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    elif hasattr(value, "tobytes") and str(getattr(value, "dtype", "")) != "object":
        form = [getattr(value, name, None) for name in ("dtype", "mode", "shape", "size")]
        yield f"{form};".encode()
        yield value.tobytes()
    else:
        raise TypeError(f"the bytes of a {type(value).__name__} are not known")
