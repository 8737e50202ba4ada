"""Copy elements between records and tensors.

They are read directly into a tensor's memory if it has the same layout as the record;
otherwise torch copies (and casts) them from a buffer. They are written in the same way.
"""

from __future__ import annotations

import ctypes
import io
import threading
from collections.abc import Iterator, Sequence

import torch

from ckptctl.records.loading import QUANTIZED, TensorRecord, fills_storage, is_row_major
from ckptctl.records.slices import ByteSlice, Dims, TensorSlice, flattened, position, row_major

_WRITABLE = 0x200
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)

_pinned = threading.local()

_PIECE_BYTES = 1 << 20
"""Bytes that are written at once: they stay in the cache from one pass over them to the next."""

_STAGING_BYTES = 4 << 20
"""Bytes of a tensor that is copied before it is written: from a GPU, or out of a view."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""What every torch can copy, by the size of an element in bytes; newer dtypes it may not."""


def memory_of(tensor: torch.Tensor) -> memoryview | None:
    """The memory of a contiguous CPU tensor; None for any other tensor.

    The caller keeps the tensor alive as long as it uses the memory.
    """
    if not is_plain(tensor) or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return None
    if not tensor.numel():
        return memoryview(bytearray())
    n_bytes = tensor.numel() * tensor.element_size()
    found: memoryview = _memory_at(tensor.data_ptr(), n_bytes, _WRITABLE)
    return found


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether memory holds the values unchanged: no subclass, not sparse, no pending sign."""
    is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided
    return is_dense and not tensor.is_conj() and not tensor.is_neg()


def saved_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides in elements with which torch saves a tensor: without gaps, in its order."""
    if tensor.is_contiguous():
        return tensor.stride()
    return torch.empty_like(tensor, device="meta").stride()


def elements_of(tensor: torch.Tensor, strides: Sequence[int]) -> Iterator[memoryview]:
    """The bytes of a plain tensor's elements in the order of `strides`, piece by piece.

    Each piece is overwritten by the next one where the elements do not lie in that order in
    the memory of this machine: they pass through a buffer then.
    """
    tensor = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    memory = memory_of(tensor)
    if memory is not None:
        yield from _pieces(memory)
        return
    bits = tensor.view(_BITS[tensor.itemsize])
    n_most = min(bits.numel(), _STAGING_BYTES // bits.itemsize)
    staged = torch.empty(n_most, dtype=bits.dtype, pin_memory=bits.device.type == "cuda")
    for part in parts_of(bits, n_most):
        copied = staged[: part.numel()]
        copied.view(part.shape).copy_(part)
        memory = memory_of(copied)
        assert memory is not None  # noqa: S101 - it is contiguous, and on this machine
        yield from _pieces(memory)


def _pieces(memory: memoryview) -> Iterator[memoryview]:
    for at in range(0, len(memory), _PIECE_BYTES):
        yield memory[at : at + _PIECE_BYTES]


def parts_of(tensor: torch.Tensor, n_most: int) -> Iterator[torch.Tensor]:
    """Parts of at most `n_most` elements that follow one another in row-major order."""
    if tensor.numel() <= n_most:
        yield tensor
        return
    n_rows = max(1, n_most * len(tensor) // tensor.numel())
    for at in range(0, len(tensor), n_rows):
        rows = tensor[at : at + n_rows]
        yield from parts_of(rows if rows.numel() <= n_most else rows[0], n_most)


class TensorSink:
    """Copies the elements in `wanted` of one record into a tensor; see `ElementSink`.

    `shape` and `wanted` are given with the record's dimensions, and `order` names these
    from the slowest to the fastest. The attributes `shape` and `wanted` are in that order,
    with as few dimensions as the memory of the tensor allows.
    """

    def __init__(
        self,
        shape: Dims,
        wanted: TensorSlice,
        order: Sequence[int],
        dtype: torch.dtype,
        target: torch.Tensor,
    ) -> None:
        target = target.permute(tuple(order))
        shape = tuple(shape[dim] for dim in order)
        wanted = wanted.permuted(order)
        if target.is_contiguous():
            shape, wanted = flattened(shape, wanted)
            target = target.view(wanted.sizes)
        self.shape = shape
        self.wanted = wanted
        self.item_bytes = dtype.itemsize
        self._dtype = dtype
        self._target = target
        self._strides = row_major(shape)
        self._memory = memory_of(target) if target.dtype == dtype else None
        self._target_strides = row_major(wanted.sizes)

    def memory_for(self, piece: ByteSlice) -> memoryview | None:
        if self._memory is None or not piece.contiguous or not self.wanted.contains(piece.elements):
            return None
        within = piece.elements.relative_to(self.wanted)
        at = position(within.offsets, self._target_strides) * self.item_bytes
        return self._memory[at : at + piece.length]

    def staging(self, n_bytes: int, limit: int) -> memoryview | None:
        """Pinned memory of this thread if the tensor is on a GPU."""
        if self._target.device.type != "cuda":
            return None
        kept: torch.Tensor | None = getattr(_pinned, "buffer", None)
        if kept is None or kept.numel() < limit:
            kept = _pinned.buffer = torch.empty(limit, dtype=torch.uint8, pin_memory=True)
        memory = memory_of(kept)
        return None if memory is None else memory[:n_bytes]

    def copy(self, piece: ByteSlice, data: memoryview) -> None:
        common = piece.elements.overlap(self.wanted)
        if common is None:
            return
        first = position(common.relative_to(piece.elements).offsets, self._strides)
        source = elements(data, self._dtype).as_strided(common.sizes, self._strides, first)
        into = common.relative_to(self.wanted)
        index = tuple(slice(at, end) for at, end in zip(into.offsets, into.ends, strict=True))
        self._target[index].copy_(source)


def elements(data: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """The elements in a buffer as a 1-d tensor, which shares its memory if that is writable."""
    if data.readonly:
        data = memoryview(bytearray(data))
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype)


def copy_from_record(record: TensorRecord, wanted: TensorSlice, target: torch.Tensor) -> None:
    """Copy a slice of the tensor of a record that is in memory and verified."""
    if not target.numel():
        return
    view, stub = record.view, record.stub
    assert view is not None  # noqa: S101 - of a record that is in memory
    if QUANTIZED in stub.signs:
        # The record also holds its scales; `open_record` has allowed every name in its pickle.
        source = torch.load(io.BytesIO(view.head), map_location="cpu", weights_only=True)
    else:
        data, dtype = record.elements or memoryview(b""), getattr(torch, stub.dtype)
        as_saved = wanted.sizes == stub.shape and target.dtype == dtype and not stub.signs
        in_order = fills_storage(stub) and is_row_major(stub)
        memory = memory_of(target) if as_saved and in_order else None
        if memory is not None:
            memory[:] = data
            return
        source = elements(data, dtype)
        source = source.as_strided(stub.shape, stub.strides, stub.storage_offset)
    there = tuple(
        slice(at, at + size) for at, size in zip(wanted.offsets, wanted.sizes, strict=True)
    )
    with torch.no_grad():
        target.copy_(signed(source[there], stub.signs))


def signed(elements: torch.Tensor, signs: tuple[str, ...]) -> torch.Tensor:
    """The elements with their conjugation and their sign applied."""
    if "conj" in signs:
        elements = elements.conj()
    return -elements if "neg" in signs else elements
