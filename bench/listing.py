"""Listing a root of many steps, beside `find` and a bare loop over `os.scandir`.

All three give name, size and mtime; `LocalStore` gives the identity of each file too, and
follows no link.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from measuring import Row, Size, called, folder, in_turns, least

from ckptctl.storage.local import LocalStore

N_STEPS, N_SHARDS = 200, 64


def make(root: Path, n_steps: int) -> None:
    """Write the steps; what is in the files does not matter to a listing."""
    for step in range(n_steps):
        at = root / f"step_{step}"
        at.mkdir()
        for name in (".metadata", *(f"__{rank}_0.distcp" for rank in range(N_SHARDS - 1))):
            (at / name).write_bytes(b"x")


def with_find(at: str) -> int:
    """How many files `find` prints, with size and mtime."""
    command = ["find", at, "-type", "f", "-printf", "%p %s %T@\\n"]
    return subprocess.run(command, capture_output=True, check=True).stdout.count(b"\n")


def with_scandir(at: str) -> int:
    """How many files a bare loop keeps, with size and mtime."""
    kept, folders = [], [at]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    about = entry.stat(follow_symlinks=False)
                    kept.append((entry.path, about.st_size, about.st_mtime_ns))
    return len(kept)


def rows(size: Size) -> Iterator[Row]:
    """The whole root, and one step of it."""
    with folder() as root:
        make(Path(root), size.of(N_STEPS))
        store = LocalStore(root)
        for what, below in (("all steps", ""), ("one step", "step_0")):
            at = str(Path(root, below))
            n_files = len(store.list_tree(below))
            assert n_files == with_find(at) == with_scandir(at)
            taken = in_turns(
                {
                    "ours": lambda below=below: called(lambda: store.list_tree(below)),
                    "find": lambda at=at: called(lambda: with_find(at)),
                    "scandir": lambda at=at: called(lambda: with_scandir(at)),
                },
                2 * size.rounds,
            )
            yield Row(
                f"list {what}, {n_files:,} files",
                1_000 * least(taken, "ours", "clock_s"),
                "ms",
                1_000 * least(taken, "find", "clock_s"),
                "`find -printf`",
                limit=1_000 * least(taken, "scandir", "clock_s"),
            )
