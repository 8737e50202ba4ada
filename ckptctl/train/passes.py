"""Follow the passes of a `StatefulDataLoader` over its data, and continue the right one.

torchdata (0.11) saves how much of a pass was taken. The rest of a pass whose last batch was taken
is empty, so a script that begins the next epoch after a resume would train nothing in it; one that
continues the epoch of the step expects just that. Which of them a script is shows in the epoch
that it sets, if a sampler or the data set has `set_epoch`. A sampler of another epoch than that of
the step has another order, too.

The class of a loader is replaced by one that derives from it: scripts keep their loader, and it is
its `__iter__` that begins a pass.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import StateRefused
from ckptctl.options import TrainOptions
from ckptctl.train.batch_ids import IndexedBatch, as_ids, ids_returned
from ckptctl.train.data_identity import describe
from ckptctl.train.random_states import restore_rng, rng_state
from ckptctl.train.samples import GlobalLoader, owner_of_epoch

if TYPE_CHECKING:
    from ckptctl.train.data_ledger import DataLedger

RECORD = "ckptctl"
"""The key of the record in the state of a loader: its pass, and a description of its data."""

_PASSES = "ckptctl_passes"
"""The attribute of a loader that is followed."""

_END = object()


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
    are taken again, and left out. The generator of the loader that `is_main` is restored, too.
    `numbers` returns the whole numbers that the script keeps in `extra`; `counters` are those that
    rose with the passes. `data_ledger` records the samples that are returned.
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
        numbers = {"epoch": self.epoch, "before": self.before, "n_ended": self.n_ended}
        others = {"counters": list(self.counters), "data": dict(self.data)}
        return {**numbers, "finished": finished, **others}

    def load(self, state: Mapping[str, Any], loader: Any) -> dict[str, Any]:
        """Continue the pass of a step, and set its epoch; returns what torchdata has to load."""
        loaded = dict(state)
        record = loaded.pop(RECORD, None)
        self.saved, self.state, self._restored = None, state, None
        # The step was saved before there were records, or before the first pass.
        if record is None or not loaded:
            return loaded
        saved = SavedPass(*(record[name] for name in ("epoch", "before", "n_ended", "finished")))
        self.epoch, self.before, self.n_ended = saved.epoch, saved.before, saved.n_ended
        self.saved, self.counters = saved, record["counters"]
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

    def check_rest(self, saved: SavedPass, loader: Any) -> None:
        """Raise `StateRefused` if the script continues a pass in the order of another epoch."""
        owner = owner_of_epoch(loader)
        if owner is not None and saved.epoch not in (None, owner.epoch):
            self._refuse_epoch("within", saved, owner)

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
                self._refuse_epoch("at the end of", saved, owner)
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

    def _refuse_epoch(self, where: str, saved: SavedPass, owner: Any) -> None:
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


@contextmanager
def _random_numbers_kept(generator: Any) -> Iterator[None]:
    """Undo what is drawn as the rest of a pass begins.

    A pass draws the seed of its workers when it begins, and was counted once. If it were drawn
    again, all that is drawn later would differ from an uninterrupted run.
    """
    states = rng_state(), None if generator is None else generator.get_state()
    yield
    restore_rng(states[0])
    if generator is not None:
        generator.set_state(states[1])


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
        data = {
            name: value
            for name, value in data.items()
            if all(other.get(name) == value for other in same)
        }
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
    found: dict[str, int] = {}
    for name, part in extra.items():
        if not isinstance(part, others) and passes_of(part) is None:
            found.update(_numbers(part.state_dict(), name))
    return found


def _numbers(value: Any, name: str) -> Iterator[tuple[str, int]]:
    if type(value) is int:
        yield name, value
    elif isinstance(value, Mapping | list | tuple):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _numbers(one, f"{name}.{key}")


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
            with _random_numbers_kept(self.generator if passes.is_main else None):
                rest = super().__iter__()
                for _ in range(passes.n_to_skip):
                    next(rest, None)
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
                passes.check_rest(saved, self)
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
            return {**state, RECORD: passes.record(finished=self._is_finished())}

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            """Continue at a position; the state may be one without a record."""
            super().load_state_dict(getattr(self, _PASSES).load(state_dict, self))

    Followed.__name__, Followed.__qualname__ = base.__name__, base.__qualname__
    Followed.__module__ = base.__module__
    return Followed
