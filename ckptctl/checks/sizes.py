"""Check that each byte range is long enough for its elements.

A record is the elements and some 500 bytes of framing, so that a range shorter
than the elements cannot be one. Ranges that are exactly as long are the sign
of torch's safetensors serialization inside DCP, which is recognised here and
not inspected further: its byte ranges do not say where the tensors are, and
torch itself cannot load it.

Source: torch 2.13 `torch/distributed/checkpoint/filesystem.py`, `_write_item`
with `SerializationFormat.SAFETENSORS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from operator import gt, mul

from ckptctl.findings import Finding
from ckptctl.formatting import at_most_few, counted, inside
from ckptctl.model import DTYPE_SIZES, NO_FILE, TensorEntry
from ckptctl.records.ranges import Ranges


def check_sizes(ranges: Ranges, part_path: str = "") -> Iterator[Finding]:
    """Yield a finding for each tensor with byte ranges too short for its elements.

    Yields `record.mismatch`, since the file is as it may be and the metadata
    contradicts itself; `format.unsupported`, and nothing else, for tensors in
    safetensors form. A dtype that ckptctl does not know has one byte per
    element here. Chunks whose bytes were compressed may be of any length.
    """
    if holds_safetensors(ranges):
        yield Finding(
            "format.unsupported",
            part_path,
            "the tensors were written in safetensors form inside DCP's shard files; its metadata "
            "does not say where they lie there, and torch's own reader cannot load them",
        )
        return
    yield from at_most_few(_check_tensors(ranges, part_path))


def holds_safetensors(ranges: Ranges) -> bool:
    """Every chunk's range is exactly as long as its elements, and there is one."""
    found = False
    for entry in ranges.entries:
        if not isinstance(entry, TensorEntry) or not entry.chunks:
            continue
        needed = _bytes_needed(entry)
        if entry.chunks.transforms or list(entry.chunks.lengths) != needed:
            return False
        found = found or any(needed)
    return found


def _check_tensors(ranges: Ranges, part_path: str) -> Iterator[Finding]:
    for entry in ranges.entries:
        if not isinstance(entry, TensorEntry):
            continue
        chunks = entry.chunks
        needed = _bytes_needed(entry)
        if not any(map(gt, needed, chunks.lengths)):
            continue
        short = [
            i
            for i, n_bytes in enumerate(needed)
            if n_bytes > chunks.lengths[i]
            and chunks.files[i] != NO_FILE
            and i not in chunks.transforms
        ]
        if short:
            yield Finding(
                "record.mismatch",
                inside(part_path, entry.fqn),
                f"{counted(len(short), 'chunk')} of {len(chunks):,} cannot fit into the byte "
                f"range in the metadata; the first is at {chunks.offsets_of(short[0])}",
                expected=f"more than {needed[short[0]]:,} bytes",
                found=f"{chunks.lengths[short[0]]:,} bytes",
            )


def _bytes_needed(tensor: TensorEntry) -> Sequence[int]:
    """Bytes of each chunk's elements."""
    chunks = tensor.chunks
    n_bytes = [DTYPE_SIZES.get(tensor.dtype, 1)] * len(chunks)
    for dim in range(chunks.n_dims):
        n_bytes = list(map(mul, n_bytes, chunks.sizes[dim :: chunks.n_dims]))
    return n_bytes
