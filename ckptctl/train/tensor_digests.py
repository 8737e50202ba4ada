"""Digest the elements of tensors where they lie, to compare them between ranks.

`quick_digests` reads the memory of this machine in place, with several threads, and lets another
device digest its own memory, from which one number a tensor is copied. It depends on the device
and on the order of the elements in memory. `exact_digest` depends on the values alone, and takes
longer: it tells whether tensors differ whose quick digests do.

No digest needs more than a few pieces of memory. NaN is equal to itself, bit by bit.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
import xxhash

from ckptctl.formats.archive.writing import WRITABLE
from ckptctl.records.slices import row_major
from ckptctl.train.tensor_copy import elements_of, is_plain, memory_of, parts_of

_PIECE_BYTES = 16 << 20
"""Bytes that one thread digests at once."""

_N_THREADS = 4

_PIECE_ELEMENTS = 2 << 20
"""Elements that a device digests at once: some 64 MiB of its memory."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Odd numbers of splitmix64, as signed ones."""


def number_of(data: bytes | memoryview | str) -> int:
    """The digest of bytes or of a text, as a signed number of 64 bits."""
    encoded = data.encode() if isinstance(data, str) else data
    found: int = xxhash.xxh3_64_intdigest(encoded)
    return found - (found >> 63 << 64)


def quick_digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The quick digest of each tensor, in their order."""
    waiting: list[list[Future[int]] | list[int] | torch.Tensor] = []
    n_threads = min(_N_THREADS, os.cpu_count() or 1)
    with torch.no_grad(), ThreadPoolExecutor(n_threads, "ckptctl-digest") as pool:
        for tensor in tensors:
            tensor = tensor.detach()
            if not _has_plain_memory(tensor):
                waiting.append([exact_digest(tensor)])
                continue
            order = sorted(range(tensor.dim()), key=[-step for step in tensor.stride()].__getitem__)
            inner = tensor.permute(order)
            layout = number_of(str([dim for dim in order if tensor.shape[dim] > 1]))
            memory = memory_of(inner)
            if memory is not None and len(memory) > _PIECE_BYTES:
                pieces = range(0, len(memory), _PIECE_BYTES)
                futures = [pool.submit(number_of, memory[at : at + _PIECE_BYTES]) for at in pieces]
                waiting.append([_done(layout), *futures])
            elif memory is not None:
                waiting.append([layout, number_of(memory)])
            elif tensor.device.type == "cpu":
                waiting.append([exact_digest(tensor)])
            else:
                waiting.append(device_digest(inner).add_(layout))
    return _collected(waiting)


def _done(number: int) -> Future[int]:
    done: Future[int] = Future()
    done.set_result(number)
    return done


def _collected(waiting: Sequence[list[Future[int]] | list[int] | torch.Tensor]) -> list[int]:
    """The numbers of tensors, with one copy from each device."""
    found = [0] * len(waiting)
    on_devices: dict[torch.device, list[int]] = {}
    for place, one in enumerate(waiting):
        if isinstance(one, torch.Tensor):
            on_devices.setdefault(one.device, []).append(place)
            continue
        numbers = [each if isinstance(each, int) else each.result() for each in one]
        found[place] = number_of(str(numbers))
    for places in on_devices.values():
        digests = torch.stack(
            [one for at in places if isinstance(one := waiting[at], torch.Tensor)]
        )
        for place, number in zip(places, digests.tolist(), strict=True):
            found[place] = number
    return found


def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """The quick digest of a plain tensor on its device: the sum of a hash of each element.

    The hash is of the element's bits and of its position, mixed as by splitmix64.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    if tensor.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_WORDS[tensor.itemsize])
    n_most = min(bits.numel(), _PIECE_ELEMENTS)
    places = torch.arange(n_most, dtype=torch.int64, device=bits.device).mul_(_FACTORS[0])
    at = 0
    for part in parts_of(bits, n_most):
        words = part.reshape(-1).to(torch.int64, copy=True)
        # A difference of positions is one of hashes, also where all elements are 0.
        words.mul_(_FACTORS[1]).add_(places[: len(words)]).add_(_wrapped(at * _FACTORS[0]))
        for shift, factor in zip((30, 27), _FACTORS[1:], strict=True):
            words.bitwise_xor_(words >> shift).mul_(factor)
        total += words.bitwise_xor_(words >> 31).sum()
        at += len(words)
    return total


def _wrapped(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def exact_digest(tensor: torch.Tensor) -> int:
    """A digest that equal values have, wherever and in whatever order they lie in memory."""
    tensor = tensor.detach()
    if not _has_plain_memory(tensor) and type(tensor) is torch.Tensor:
        tensor = tensor.resolve_conj().resolve_neg()
    digest = xxhash.xxh3_64()
    if _has_plain_memory(tensor):
        for piece in elements_of(tensor, row_major(tuple(tensor.shape))):
            digest.update(piece)
    else:  # a quantized tensor, or one of another class, which is written in this form
        saved = io.BytesIO()
        torch.save(tensor, saved)
        digest.update(saved.getbuffer())
    return number_of(digest.digest())


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and str(tensor.dtype).removeprefix("torch.") in WRITABLE
