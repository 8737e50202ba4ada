"""How do elements that were read come into the tensor that wants them?

Straight into its memory, where they lie there as they lie in the record; otherwise
through a buffer, from which torch copies (and casts) them. Which bytes are read is the
question of `boxes`, whether they are right that of `record_runs`.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import torch

from ckptctl.train.boxes import Box, Cut, Dims, row_major

_WRITABLE = 0x200
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

_pinned = threading.local()


def memory_of(tensor: torch.Tensor) -> memoryview | None:
    """The memory of a contiguous tensor of this machine, None for any other tensor.

    It is that of the tensor only while the tensor is there.
    """
    if not is_plain(tensor) or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    if not tensor.numel():
        return memoryview(bytearray())
    n_bytes = tensor.numel() * tensor.element_size()
    found: memoryview = _memory_at(tensor.data_ptr(), n_bytes, _WRITABLE)
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """The elements lie in memory as they are: no subclass, not sparse, no pending sign."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def dense_order(shape: Dims, strides: Dims) -> tuple[int, ...] | None:
    """The dimensions from the slowest to the fastest; None where the elements are not dense."""
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] > 1, -strides[dim], dim))
    in_order = row_major([shape[dim] for dim in order])
    if any(
        shape[dim] > 1 and strides[dim] != step for dim, step in zip(order, in_order, strict=True)
    ):
        return None
    return tuple(order)


class Placing:
    """Takes the elements of one record, and puts those in `wanted` into a tensor.

    `order` are the dimensions of the record from the slowest to the fastest; `wanted` is
    given in the record's own. `shape` and `wanted` are in that order afterwards, in as few
    dimensions as the memory of the tensor allows.
    """

    def __init__(
        self, wanted: Box, order: Sequence[int], dtype: torch.dtype, target: torch.Tensor
    ) -> None:
        target = target.permute(tuple(order))
        wanted = Box(*(tuple(dims[dim] for dim in order) for dims in wanted))
        if target.is_contiguous():
            wanted = wanted.flattened()
            target = target.view(wanted.lengths)
        self.wanted = wanted
        self.dtype = dtype
        self._target = target
        self._strides = row_major(wanted.shape)
        self._memory = memory_of(target) if target.dtype == dtype else None
        self._steps = row_major(wanted.lengths)

    @property
    def whole(self) -> Box:
        """All of the record, in the dimensions of `wanted`."""
        shape = self.wanted.shape
        return Box(shape, (0,) * len(shape), shape)

    def room(self, start: Dims, cut: Cut) -> memoryview | None:
        """The memory for the elements of a cut that begins at `start` of the record.

        None where they cannot be read straight to where they belong.
        """
        if self._memory is None or not cut.dense or not self._holds(start, cut.sizes):
            return None
        at = sum(
            (first - offset) * step
            for first, offset, step in zip(start, self.wanted.offsets, self._steps, strict=True)
        )
        at *= self.dtype.itemsize
        return self._memory[at : at + cut.length]

    def _holds(self, start: Dims, sizes: Dims) -> bool:
        return all(
            offset <= first and first + size <= offset + length
            for first, size, offset, length in zip(
                start, sizes, self.wanted.offsets, self.wanted.lengths, strict=True
            )
        )

    def staging(self, n_bytes: int, limit: int) -> memoryview | None:
        """Memory of this thread that a device reads fast; None where the tensor is on no device."""
        if self._target.device.type != "cuda":
            return None
        kept: torch.Tensor | None = getattr(_pinned, "buffer", None)
        if kept is None or kept.numel() < limit:
            kept = _pinned.buffer = torch.empty(limit, dtype=torch.uint8, pin_memory=True)
        memory = memory_of(kept)
        return None if memory is None else memory[:n_bytes]

    def copy(self, start: Dims, cut: Cut, data: memoryview) -> None:
        """Copy what is wanted of a cut that begins at `start` of the record."""
        low = tuple(map(max, start, self.wanted.offsets))
        high = [
            min(first + size, offset + length)
            for first, size, offset, length in zip(
                start, cut.sizes, self.wanted.offsets, self.wanted.lengths, strict=True
            )
        ]
        sizes = [end - begin for begin, end in zip(low, high, strict=True)]
        if any(size <= 0 for size in sizes):
            return
        moved = [begin - at for begin, at in zip(low, start, strict=True)]
        first = sum(n * stride for n, stride in zip(moved, self._strides, strict=True))
        source = elements(data, self.dtype).as_strided(sizes, self._strides, first)
        there = tuple(
            slice(begin - offset, end - offset)
            for begin, end, offset in zip(low, high, self.wanted.offsets, strict=True)
        )
        self._target[there].copy_(source)


def elements(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The elements in some bytes, as a row; it shares the memory where that can be written."""
    if data.readonly:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype)
