"""Have a loader of torchdata return the ids of its samples with each batch.

Batches are requested ahead of their turn, by several workers, and some again after a resume. So the
ids travel with the samples: while torchdata makes an iterator, the data set and the function that
makes batches are replaced by those of this module. The ids are the indices that the sampler drew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from operator import index
from typing import Any, NamedTuple


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


class _IndexedCollate:
    """The function that makes a batch of samples, for samples with their indices."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: IndexedBatch) -> IndexedBatch:
        return IndexedBatch(samples.ids, self._collate(samples.batch))


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
    fields["collate_fn"] = _IndexedCollate(before[1])
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
    if isinstance(sampler, DistributedSampler):
        n_shares = sampler.num_replicas
    elif isinstance(sampler, SequentialSampler | RandomSampler) or _is_shuffled(sampler):
        n_shares = 1
        if getattr(sampler, "replacement", False) or getattr(sampler, "num_samples", n) != n:
            return None
    else:
        return None
    drops = loader.drop_last and loader.batch_size and (n // n_shares) % loader.batch_size
    return None if n_shares != dp_size or n % n_shares or drops else n


def _is_shuffled(sampler: Any) -> bool:
    kind = type(sampler)
    return kind.__name__ == "RandomSampler" and kind.__module__.startswith("torchdata.")


def as_ids(indices: Sequence[Any]) -> list[Any]:
    """The indices as ids: those that are no numbers by their text."""
    try:
        return list(map(index, indices))
    except TypeError:
        return [index(one) if hasattr(one, "__index__") else str(one) for one in indices]
