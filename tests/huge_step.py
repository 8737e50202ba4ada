"""A step whose bytes take long to read: one record of it is many sparse gigabytes."""

from __future__ import annotations

import pickle
import shutil
import time
from pathlib import Path


def make_huge(step: Path, n_bytes: int = 200 << 30) -> None:
    """Move the largest record of a step into a file of its own that goes on with nothing."""
    metadata = pickle.loads((step / ".metadata").read_bytes())
    place = max(metadata.storage_data.values(), key=lambda place: place.length)
    shutil.copy2(step / place.relative_path, step / "huge.distcp")
    with (step / "huge.distcp").open("r+b") as file:
        file.truncate(n_bytes)
    place.relative_path, place.offset, place.length = "huge.distcp", 0, n_bytes
    (step / ".metadata").write_bytes(pickle.dumps(metadata))


def bytes_read(pid: int) -> int:
    """How many bytes a process has read so far, from any file."""
    counts = Path(f"/proc/{pid}/io").read_text()
    return int(counts.split("rchar: ")[1].split()[0])


def wait_until_it_has_read(pid: int, n_bytes: int) -> None:
    """Return when a process has read so many bytes."""
    for _ in range(1200):
        if bytes_read(pid) > n_bytes:
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} does not read")
