"""Comparing every byte with its checksum, beside a bare loop and programs that digest files.

The step is written by torch into a folder that is removed afterwards, and is in the page
cache: the processor is measured, not the disk. A second step of half the size shows what
each further gigabyte costs. Programs that are not installed are left out.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from measuring import Measure, Row, Size, ckptctl, folder, least, process, processes, python

GIGABYTES, FILES = 1.6, 4
SAVE = f"""
import sys, torch, torch.distributed.checkpoint as dcp
folder, gigabytes = sys.argv[1], float(sys.argv[2])
torch.manual_seed(0)
n = int(gigabytes * 1e9 / 4 / 48)
state = {{f"layers.{{i}}.weight": torch.randn(n) for i in range(48)}}
state |= {{f"layers.{{i}}.bias": torch.randn(512) for i in range(48)}}
writer = dcp.FileSystemWriter(folder, thread_count={FILES})
dcp.save({{"model": state}}, storage_writer=writer, no_dist=True)
"""
LOAD = """
import sys, torch, torch.distributed.checkpoint as dcp
n = int(float(sys.argv[2]) * 1e9 / 4 / 48)
state = {f"layers.{i}.weight": torch.empty(n) for i in range(48)}
state |= {f"layers.{i}.bias": torch.empty(512) for i in range(48)}
dcp.load({"model": state}, storage_reader=dcp.FileSystemReader(sys.argv[1]), no_dist=True)
"""
BARE = """
import os, sys
from zlib_ng.zlib_ng import crc32
n = int(sys.argv[1])
own = next((number for number in range(1, n) if not os.fork()), 0)
buffer = memoryview(bytearray(1 << 20))
for path in sys.argv[2 + own :: n]:
    crc = 0
    with open(path, "rb", buffering=0) as file:
        while n_read := file.readinto(buffer):
            crc = crc32(buffer[:n_read], crc)
if own == 0:
    for _ in range(1, n):
        os.wait()
"""
"""In so many processes, each of which reads some of the files."""
DIGESTS = ("xxhsum", "b3sum", "sha256sum")


def commands(parent: Path, step: Path, gigabytes: float) -> dict[str, list[object]]:
    """Each program, on one step."""
    shards = sorted(step.glob("*.distcp"))
    verify = ckptctl("verify", "--quiet", "--level", "content")
    table: dict[str, list[object]] = {
        "bare": python(BARE, 1, *shards),
        "bare, divided": python(BARE, min(FILES, os.cpu_count() or 1), *shards),
        "one": [*verify, "--jobs", "1", step],
        "all": [*verify, step],
        "`cat`": ["sh", "-c", 'cat "$@" >/dev/null', "sh", *shards],
        "`dcp.load`": python(LOAD, step, gigabytes),
    }
    for program in filter(shutil.which, DIGESTS):
        sums = parent / f"{program}-{step.name}"
        sums.write_text(process([program, *shards]).printed)
        table[f"`{program} -c`"] = [program, "-c", sums]
    return table


def rows(size: Size) -> Iterator[Row]:
    """The cost of each further gigabyte, of the whole process, and memory."""
    gigabytes = GIGABYTES * size.scale
    with folder() as name:
        taken = {}
        n_bytes = {}
        for step, share in (("large", 1.0), ("small", 0.5)):
            at = Path(name, step)
            process(python(SAVE, at, gigabytes * share))
            taken[step] = processes(commands(Path(name), at, gigabytes * share), size.rounds)
            n_bytes[step] = sum(file.stat().st_size for file in at.iterdir())
    further = (n_bytes["large"] - n_bytes["small"]) / 1e9

    def each(what: str, measure: Measure = "cpu_s") -> float:
        large, small = (least(taken[step], what, measure) for step in ("large", "small"))
        return (large - small) / further

    bare = "bare loop: read, CRC-32"
    shown = f"{n_bytes['large'] / 1e9:.1f} GB"
    yield Row("content, each further GB, 1 thread", each("one"), "s", each("bare"), bare, goal=1.15)
    large = taken["large"]
    yield Row(
        f"content of {shown}, default threads, by the clock",
        least(large, "all", "clock_s"),
        "s",
        least(large, "bare", "clock_s"),
        bare,
        least(large, "bare, divided", "clock_s"),
        goal=0.7,
    )
    goals = {"`cat`": 2.0, "`dcp.load`": 0.05}
    for peer in (what for what in large if what.startswith("`")):
        theirs = least(large, peer)
        ours, limit = least(large, "one"), least(large, "bare")
        name = f"content of {shown}, 1 thread"
        yield Row(name, ours, "s", theirs, peer, limit, goals.get(peer))
    peaks = [least(large, what, "peak_mib") for what in ("all", "`dcp.load`")]
    yield Row(f"memory, content of {shown}", peaks[0], "MiB", peaks[1], "`dcp.load`")
