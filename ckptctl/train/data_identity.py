"""Describe the data of a loader, so that a resume notices other data at the same position.

A description holds plain values by name. It is made before the first step, when a sampler holds
its settings and has not moved yet. Of the samples only the first and the last are read, from a data
set that has an index, and where the loader reads them itself: in a worker if it has workers,
because a file that is opened before the workers are forked is shared by them.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

from ckptctl.train.samples import GlobalLoader, samplers_of

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
        values |= {SAMPLES: samples_digest(loader)}
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


def differences(saved: Mapping[str, Any], loader: Any, now: Mapping[str, Any]) -> list[str]:
    """What the data of a step and that of a loader have both, and have not alike.

    Samples that are not read alike twice, as those with random transforms may be, prove nothing.
    """
    names = [name for name in saved if name in now and saved[name] != now[name]]
    if names == [SAMPLES]:
        n_times = 4
        if any(samples_digest(loader) != now[SAMPLES] for _ in range(n_times)):
            return []
    return [f"{name} was {saved[name]} and is {now[name]} now" for name in names]


def samples_digest(loader: Any) -> str | None:
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
        with _seeded():
            first_and_last: Any = [0, len(dataset) - 1]
            read = DataLoader(
                dataset, batch_size=None, sampler=first_and_last, collate_fn=digest_of, **worker
            )
            return " ".join(read)
    except Exception:  # noqa: BLE001 - what a data set raises: its samples are not compared
        return None


def _begin_worker(then: Callable[[int], None] | None, worker: int) -> None:
    _seed()
    if then is not None:
        then(worker)


@contextmanager
def _seeded() -> Iterator[None]:
    """Seed the generators that transforms use, alike in each attempt, and set them back."""
    import torch

    state = random.getstate(), torch.get_rng_state()
    numpy_state = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        _seed()
        yield
    finally:
        random.setstate(state[0])
        torch.set_rng_state(state[1])
        if numpy_state is not None:
            sys.modules["numpy"].random.set_state(numpy_state)


def _seed() -> None:
    import torch

    random.seed(0)
    torch.default_generator.manual_seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)


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
