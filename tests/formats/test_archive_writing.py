"""A record that ckptctl writes equals the one that torch writes."""

from __future__ import annotations

import io
import random
from math import prod
from pathlib import Path

import pytest
from every_case import all_cases
from zlib_ng.zlib_ng import crc32, crc32_combine

from ckptctl.formats.archive.directory import View, check_headers, parse_directory
from ckptctl.formats.archive.writing import WRITABLE, check_frame, tensor_frame
from ckptctl.formats.pickles.values import decode_tensor_pickle
from ckptctl.model import DTYPE_SIZES
from ckptctl.records.verification import check_whole

HERE = Path(__file__).parent
SHAPES = [(), (3,), (4, 4), (2, 3, 4), (1, 2, 3, 4, 5), (300, 7), (70_000,), (1,) * 13]
EMPTY = [(0,), (0, 4), (4, 0, 3)]


def written(dtype: str, shape: tuple[int, ...], data: bytes) -> bytes:
    frame = tensor_frame(dtype, shape)
    record = frame.between(()) + data + frame.between((crc32(data),))
    assert len(record) == frame.n_bytes
    return record


@pytest.mark.torch
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_a_record_is_byte_for_byte_what_torch_saves(shape):
    import torch

    with all_cases() as case:
        for dtype in sorted(WRITABLE):
            data = random.Random(f"{dtype} {shape}").randbytes(prod(shape) * DTYPE_SIZES[dtype])
            if dtype == "bool":
                data = bytes(byte & 1 for byte in data)
            flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            saved = io.BytesIO()
            torch.save(flat.view(getattr(torch, dtype)).reshape(shape), saved)
            with case(dtype):
                assert written(dtype, shape, data) == saved.getvalue()


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_a_record_without_elements_is_what_torch_saves_but_for_its_last_digits(dtype, shape):
    import torch

    saved = io.BytesIO()
    torch.save(torch.zeros(shape, dtype=getattr(torch, dtype)), saved)
    ours, theirs = written(dtype, shape, b""), saved.getvalue()
    assert len(ours) == len(theirs)
    directory = parse_directory(ours, len(ours))
    assert ours[: directory.members[-1].start] == theirs[: directory.members[-1].start]
    assert torch.load(io.BytesIO(ours), weights_only=True).shape == shape


@pytest.mark.parametrize("shape", [*SHAPES, *EMPTY], ids=str)
def test_a_record_is_sound_and_describes_its_tensor(shape):
    with all_cases() as case:
        for dtype in sorted(WRITABLE):
            with case(dtype):
                record = written(dtype, shape, bytes(prod(shape) * DTYPE_SIZES[dtype]))
                checked = check_whole(memoryview(record))
                assert (checked.unproven, checked.unreadable, checked.wrong) == (None, None, None)
                assert checked.folds is None or checked.folds[0] == checked.folds[1]
                pickle = parse_directory(record, len(record)).members[0]
                stub = decode_tensor_pickle(record[pickle.start : pickle.end])
                assert (stub.dtype, stub.shape) == (dtype, shape)


def test_what_surrounds_more_than_four_gigabytes_is_what_torch_writes():
    n_bytes = 2**32 + 1_000
    frame = tensor_frame("uint8", (n_bytes,))
    head = (HERE / "over_four_gib/head.bin").read_bytes()
    tail = (HERE / "over_four_gib/tail.bin").read_bytes()
    crc, length = crc32(bytes(1_000)), 1_000
    zeros, n_zeros = crc32(bytes(1 << 20)), 1 << 20
    for _ in range(2**32 >> 20):
        crc, length = crc32_combine(crc, zeros, n_zeros), length + n_zeros
    assert (length, frame.between(()), frame.between((crc,))) == (n_bytes, head, tail)
    directory = parse_directory(tail, frame.n_bytes)
    view = View(frame.n_bytes, head, tail)
    check_headers(directory, view)
    check_frame(directory, view)
