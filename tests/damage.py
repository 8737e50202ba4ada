"""Damage the files of a step."""

import os
import pickle
from pathlib import Path

from ckptctl.formats.dcp.metadata import decode_metadata


def flip(path: Path, at: int | None = None, mask: int = 0xFF) -> None:
    """Flip the bits of `mask` in one byte of a file: the one at `at`, or that in the middle.

    The file keeps its write time, as where a disk flips them.
    """
    about = path.stat()
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= mask
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def flip_tensor(step: Path, mask: int = 0xFF) -> None:
    """Flip a byte in the middle of the largest record: only reading the bytes shows it."""
    metadata = decode_metadata((step / ".metadata").read_bytes())
    ranges = [c.byte_range for t in metadata.tensors.values() for c in t.chunks]
    largest = max((one for one in ranges if one is not None), key=lambda one: one.length)
    path = step / largest.file
    about = path.stat()
    flip(path, largest.offset + largest.length // 2, mask)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def name_step(step: Path) -> None:
    """Let the metadata of a copied step name the folder that it lies in now. Needs torch."""
    path = step / ".metadata"
    about = path.stat()
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_meta.checkpoint_id = str(step)
    path.write_bytes(pickle.dumps(metadata))
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
