"""Samplers and loaders whose order does not depend on the number of ranks.

A position counts the samples of the whole run, over all ranks and epochs. The sample at a
position depends on the seed only, so a run continues from its position on any number of
ranks, and no sample is repeated or left out.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ckptctl.errors import UsageError

if TYPE_CHECKING:
    from ckptctl.train.data_ledger import DataLedger

_MASK = 2**64 - 1
_ROUNDS = 4


class Order:
    """A shuffled order of `n_samples`, new in each epoch, computed without a table.

    A Feistel network over the next power of four, applied until the result is in range: the
    same on every machine and in every version of torch, in microseconds per sample.
    """

    def __init__(self, n_samples: int, seed: int, *, shuffle: bool = True) -> None:
        if n_samples < 1:
            raise UsageError(f"the data set has {n_samples} samples")
        self.n_samples = n_samples
        self.seed = seed
        self.shuffle = shuffle
        self._half = max(1, ((n_samples - 1).bit_length() + 1) // 2)
        self._keys: tuple[int, tuple[int, ...]] = (-1, ())

    def sample_at(self, position: int) -> int:
        """The index in the data set of the sample at a position of the run, from 0 on."""
        epoch, index = divmod(position, self.n_samples)
        if not self.shuffle:
            return index
        if self._keys[0] != epoch:
            words = hashlib.sha256(f"ckptctl order {self.seed} {epoch}".encode()).digest()
            keys = (words[8 * i : 8 * i + 8] for i in range(_ROUNDS))
            self._keys = (epoch, tuple(int.from_bytes(key, "big") for key in keys))
        low_mask = (1 << self._half) - 1
        while True:
            left, right = index >> self._half, index & low_mask
            for key in self._keys[1]:
                left, right = right, left ^ (_mixed(right ^ key) & low_mask)
            index = left << self._half | right
            if index < self.n_samples:
                return index


def _mixed(word: int) -> int:
    # The finalizer of splitmix64: every bit of the result depends on every bit of `word`.
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & _MASK
    return word ^ word >> 31


def share_of(start: int, n: int, rank: int, n_ranks: int) -> range:
    """The positions of a global batch, `n` from `start` on, that one of `n_ranks` takes.

    Each rank gets adjacent positions, as evenly as possible; in rank order they form the
    global batch.
    """
    return range(start + n * rank // n_ranks, start + n * (rank + 1) // n_ranks)


@dataclass(slots=True)
class SamplesDigest:
    """The digest of the samples consumed in one step, by position and index.

    Each rank adds its own samples; the digests of all ranks are added with `+`. It depends
    on the order of the samples, but not on the number of ranks.
    """

    value: int = 0

    def add(self, position: int, sample: int) -> None:
        word = _mixed(_mixed(position + 0x9E3779B97F4A7C15 & _MASK) ^ sample & _MASK)
        self.value = (self.value + word) & _MASK

    def __add__(self, other: SamplesDigest) -> SamplesDigest:
        return SamplesDigest((self.value + other.value) & _MASK)

    def __str__(self) -> str:
        return f"{self.value:016x}"


def samples_digest(start: int, samples: Iterable[int]) -> str:
    """The digest, 16 hexadecimal digits, of samples in a row from position `start` on."""
    digest = SamplesDigest()
    for position, sample in enumerate(samples, start):
        digest.add(position, sample)
    return str(digest)


class GlobalLoader:
    """Batches of a data set, in an order that any number of ranks can share.

    Each step takes `global_batch` samples, of which every rank gets its share. `position`
    counts what the whole run has consumed; a batch counts when it is returned, not when a
    worker has prefetched it. The data ends after `n_epochs`; None is endless. `rank` and
    `n_ranks` are those among the data-parallel ranks, by default of the whole job. All
    other options are those of `torch.utils.data.DataLoader`.

    Workers get seeds from the loader's own generator: iterating does not change the random
    numbers of the training.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch: int,
        *,
        seed: int,
        shuffle: bool = True,
        n_epochs: int | None = None,
        rank: int | None = None,
        n_ranks: int | None = None,
        fingerprint: str | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(dataset, Sized):
            raise UsageError("the data set has no length, so positions in it are undefined")
        self.rank, self.n_ranks = _place(rank, n_ranks)
        if global_batch < self.n_ranks:
            raise UsageError(
                f"a global batch of {global_batch} samples leaves some of {self.n_ranks} ranks "
                "without one"
            )
        self.dataset: Any = dataset
        self.global_batch = global_batch
        self.order = Order(len(dataset), seed, shuffle=shuffle)
        self.stated_fingerprint = fingerprint
        self.fingerprint = fingerprint or f"{type(dataset).__qualname__}, {len(dataset):,} samples"
        self.data: Mapping[str, Any] = {}  # what a Checkpointer describes of the data set
        self.data_ledger: DataLedger | None = None
        self.position = 0
        self.digest = SamplesDigest()
        self._end = None if n_epochs is None else n_epochs * len(dataset)
        self.options = options

    @property
    def epoch(self) -> int:
        """The epoch that the next sample belongs to, from 0 on."""
        return self.position // self.order.n_samples

    def batch_at(self, position: int) -> int:
        """The number of samples in the global batch at a position; 0 at the end of the data.

        A last batch that is too small to give every rank a sample is left out.
        """
        left = self.global_batch if self._end is None else self._end - position
        return min(self.global_batch, left) if left >= self.n_ranks else 0

    def own(self, start: int, size: int) -> range:
        return share_of(start, size, self.rank, self.n_ranks)

    def __iter__(self) -> Iterator[Any]:
        import torch
        from torch.utils.data import DataLoader

        requested: deque[list[int]] = deque()  # of the batches that are not returned yet

        def batches() -> Iterator[list[int]]:
            start = self.position
            while size := self.batch_at(start):
                requested.append([self.order.sample_at(p) for p in self.own(start, size)])
                yield requested[-1]
                start += size

        generator = torch.Generator()
        words = hashlib.sha256(f"{self.order.seed} {self.position} {self.rank}".encode()).digest()
        generator.manual_seed(int.from_bytes(words[:8], "big") >> 1)
        loader: DataLoader[Any] = DataLoader(
            self.dataset, batch_sampler=batches(), generator=generator, **self.options
        )
        for batch in loader:
            size = self.batch_at(self.position)
            self.digest = SamplesDigest()
            positions, samples = self.own(self.position, size), requested.popleft()
            for position, sample in zip(positions, samples, strict=True):
                self.digest.add(position, sample)
            if self.data_ledger is not None:
                for epoch, own in self._by_epoch(positions, samples):
                    self.data_ledger.take(epoch, own)
                for epoch, at in self._by_epoch(range(self.position, self.position + size)):
                    self.data_ledger.take_span(epoch, at.start % self.order.n_samples, len(at))
            self.position += size
            yield batch

    def _by_epoch(self, positions: range, samples: Sequence[Any] | None = None) -> Iterator[Any]:
        """Each epoch of some positions, with its part of them, or of the samples there."""
        n, at = self.order.n_samples, 0
        values = positions if samples is None else samples
        while at < len(positions):
            epoch, place = divmod(positions.start + at, n)
            yield epoch, values[at : at + n - place]
            at += n - place

    def state_dict(self) -> dict[str, Any]:
        """The position and what it depends on: the same on every rank."""
        return {
            "position": self.position,
            "seed": self.order.seed,
            "shuffle": self.order.shuffle,
            "n_samples": self.order.n_samples,
            "global_batch": self.global_batch,
            "fingerprint": self.fingerprint,
            "num_workers": int(self.options.get("num_workers", 0)),
            "data": dict(self.data),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position, with the seed that the order was created with."""
        self.position = int(state["position"])
        self.order = Order(self.order.n_samples, int(state["seed"]), shuffle=bool(state["shuffle"]))


def check_order(loader: Any) -> None:
    """Raise `UsageError` for a loader with state that does not restore the order of its samples.

    torchdata (0.11) saves how many batches were taken, and takes as many again from the sampler at
    a resume. A sampler of torch that draws its order from random numbers has another order then:
    samples would be repeated and others left out. A loader of torchdata that shuffles by itself
    saves the order.
    """
    from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

    drawn = [one.__iter__ for one in (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)]
    for sampler in samplers_of(loader):
        if type(sampler).__iter__ in drawn and not hasattr(sampler, "state_dict"):
            raise UsageError(
                f"the {type(loader).__name__} takes its samples from a {type(sampler).__name__} of "
                "torch, whose order cannot be saved: a resume would repeat some samples and leave "
                "others out. Use GlobalLoader, shuffle=True of torchdata's StatefulDataLoader, or "
                "torchdata.stateful_dataloader.sampler.RandomSampler; accept_repetition=True "
                "allows it"
            )


def note_on_order(loader: Any) -> str | None:
    """What has to hold for samplers of the script's own, which have no state; None without one."""
    found = [one for one in samplers_of(loader) if not hasattr(one, "state_dict")]
    classes, torchs = {type(one) for one in found}, ("torch", "torchdata")
    names = sorted(one.__name__ for one in classes if one.__module__.split(".")[0] not in torchs)
    if not names:
        return None
    return (
        f"the order of {', '.join(names)} is not saved, and has to be that of the attempt before: "
        "if it is drawn anew, samples are repeated and others left out"
    )


def samplers_of(loader: Any) -> Iterator[Any]:
    """The samplers of a loader, also those within another."""
    for name in ("batch_sampler", "sampler"):
        sampler = getattr(loader, name, None)
        if sampler is not None:
            yield sampler
            yield from samplers_of(sampler)


def owner_of_epoch(loader: Any) -> Any:
    """The sampler of a loader, or its data set, that has `set_epoch`; None without one."""
    for one in (*samplers_of(loader), getattr(loader, "dataset", None)):
        if callable(getattr(one, "set_epoch", None)) and isinstance(
            getattr(one, "epoch", None), int
        ):
            return one
    return None


def _place(rank: int | None, n_ranks: int | None) -> tuple[int, int]:
    if rank is not None and n_ranks is not None:
        return rank, n_ranks
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1
