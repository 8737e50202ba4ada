"""Every bit around the elements of a record, flipped: what torch rejects or reads as something
else is found, unless it lies in bytes that carry a value and no checksum.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import pytest
from made_parts import metadata, tensor

from ckptctl.findings import Severity
from ckptctl.formats.archive.directory import parse_directory
from ckptctl.inspection.structure import read_structure
from ckptctl.model import ByteRange, FileInfo
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource
from ckptctl.storage.contract import Span
from ckptctl.storage.local import LocalStore

if TYPE_CHECKING:
    import torch

pytestmark = [pytest.mark.torch, pytest.mark.slow]

FILE = "__0_0.distcp"


class Loaded(Enum):
    SAME = "same"
    OTHER = "other"
    NOT = "not"


@dataclass
class Flipping:
    """A store in which one bit of one file is wrong."""

    inner: LocalStore
    at: int = 0
    bit: int = 0

    def read_spans(self, spans: Iterable[Span]) -> Iterator[tuple[Span, bytes]]:
        for span, data in self.inner.read_spans(spans):
            offset = self.at - span.offset
            if 0 <= offset < len(data):
                flipped = data[offset] ^ 1 << self.bit
                data = data[:offset] + bytes([flipped]) + data[offset + 1 :]
            yield span, data


def loaded(record: bytes, saved: torch.Tensor) -> Loaded:
    """What DCP's reader makes of a record: it loads to the CPU, tensors only."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            value = torch.load(io.BytesIO(record), map_location="cpu", weights_only=True)
        except Exception:  # noqa: BLE001  torch raises whatever its readers meet
            return Loaded.NOT
    same = (
        isinstance(value, torch.Tensor)
        and (value.dtype, value.shape) == (saved.dtype, saved.shape)
        and torch.equal(value, saved)
    )
    return Loaded.SAME if same else Loaded.OTHER


@pytest.mark.parametrize("with_crcs", [True, False])
def test_no_flipped_bit_around_the_elements_is_missed(tmp_path, with_crcs):
    import torch

    saved = torch.arange(10_000, dtype=torch.float32).reshape(100, 100)
    torch.serialization.set_crc32_options(with_crcs)
    try:
        torch.save(saved, tmp_path / FILE)
    finally:
        torch.serialization.set_crc32_options(True)
    record = (tmp_path / FILE).read_bytes()
    directory = parse_directory(record, len(record))
    elements, pickle = directory.find("data/0"), directory.find("data.pkl")
    assert elements is not None
    assert pickle is not None
    at = ByteRange(FILE, 0, len(record))
    ranges = Ranges([metadata(tensor("w", (100, 100), ((0, 0), (100, 100)), ranges=[at]))])
    files = [FileInfo(FILE, len(record))]
    store = Flipping(LocalStore(str(tmp_path)))
    missed = []
    n_rejected = 0
    for position in (*range(elements.start), *range(elements.end, len(record))):
        for bit in range(8):
            broken = bytearray(record)
            broken[position] ^= 1 << bit
            outcome = loaded(bytes(broken), saved)
            if outcome is Loaded.SAME:
                continue
            n_rejected += outcome is Loaded.NOT
            store.at, store.bit = position, bit
            structure = read_structure(RecordSource(store, "", ranges), files)
            if all(f.severity is not Severity.FAULT for f in structure.findings):
                missed.append((position, outcome))
    assert n_rejected > 3_000
    if with_crcs:
        assert missed == []
    else:
        # Strides that still lie within the storage: a value, and nothing to check it by.
        assert all(pickle.start <= at < pickle.end for at, _ in missed)
        assert {outcome for _, outcome in missed} <= {Loaded.OTHER}
