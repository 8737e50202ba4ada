"""What does it cost to list a root of many steps, next to `find` and a bare `os.scandir`?

`LocalStore` gives size, mtime and identity of every file, and never follows a link.
The peers give the same facts: `find -printf` prints name, size and mtime; the
`os.scandir` loop asks `stat` for each name and keeps a tuple. `newest` is what `pick`
needs: the names in the root, then the files of one step.

    python bench/listing.py [--steps 200] [--shards 64] [--rounds 7]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ckptctl.storage.local import LocalStore


def make(root: Path, n_steps: int, n_shards: int) -> None:
    """Write the steps; what is in the files does not matter to a listing."""
    for step in range(n_steps):
        folder = root / f"step_{step}"
        folder.mkdir()
        for name in (".metadata", *(f"__{rank}_0.distcp" for rank in range(n_shards - 1))):
            (folder / name).write_bytes(b"x")


def with_find(folder: str, *options: str) -> int:
    """How many names `find` prints, with size and mtime."""
    command = ["find", folder, "-mindepth", "1", *options, "-printf", "%p %s %T@\\n"]
    return subprocess.run(command, capture_output=True, check=True).stdout.count(b"\n")


def with_scandir(folder: str, *, deep: bool) -> int:
    """How many names a bare loop keeps, with size and mtime."""
    kept, folders = [], [folder]
    while folders:
        with os.scandir(folders.pop()) as entries:
            for entry in entries:
                if deep and entry.is_dir(follow_symlinks=False):
                    folders.append(entry.path)
                else:
                    about = entry.stat(follow_symlinks=False)
                    kept.append((entry.path, about.st_size, about.st_mtime_ns))
    return len(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    newest = f"step_{chosen.steps - 1}"
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), chosen.steps, chosen.shards)
        store = LocalStore(folder)
        n_files = chosen.steps * chosen.shards
        work: dict[str, dict[str, Callable[[], int]]] = {
            f"all {n_files:,} files": {
                "ckptctl": lambda: len(store.list_tree()),
                "find": lambda: with_find(folder, "-type", "f"),
                "scandir": lambda: with_scandir(folder, deep=True),
            },
            "newest": {
                "ckptctl": lambda: len(store.list_dir()) + len(store.list_tree(newest)),
                "find": lambda: (
                    with_find(folder, "-maxdepth", "1")
                    + with_find(f"{folder}/{newest}", "-type", "f")
                ),
                "scandir": lambda: (
                    with_scandir(folder, deep=False) + with_scandir(f"{folder}/{newest}", deep=True)
                ),
            },
        }
        print(
            f"page cache warm, median of {chosen.rounds} rounds; in brackets the ratio to ckptctl"
        )
        for what, peers in work.items():
            measure(what, peers, chosen.rounds)


def measure(what: str, peers: dict[str, Callable[[], int]], rounds: int) -> None:
    """Print seconds and ratios; peers take turns in each round, and must find the same."""
    if len(found := {count() for count in peers.values()}) != 1:
        raise SystemExit(f"{what}: the peers find {sorted(found)} names")
    seconds: dict[str, list[float]] = {peer: [] for peer in peers}
    for _ in range(rounds):
        for peer, count in peers.items():
            began = time.perf_counter()
            count()
            seconds[peer].append(time.perf_counter() - began)
    medians = {peer: statistics.median(taken) for peer, taken in seconds.items()}
    shown = "  ".join(
        f"{peer} {taken * 1000:.1f} ms ({taken / medians['ckptctl']:.2f})"
        for peer, taken in medians.items()
    )
    print(f"{what:<18} {shown}", flush=True)


if __name__ == "__main__":
    main()
