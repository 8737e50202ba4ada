"""A disk that is really full, and what is tried on it.

    unshare -rm python full_disk.py save|inodes|others|answers FOLDER [ROOT]

mounts a megabyte of memory at FOLDER, where only this process sees it, fills it up, and
prints what came of each try as a line of JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import ckptctl
from ckptctl.errors import CkptctlError

PAGE = 4096


class Disk:
    """The folder, and how full it is."""

    def __init__(self, folder: Path, limits: str = "size=1m") -> None:
        self.folder = folder
        mounting = ("mount", "-t", "tmpfs", "-o", limits, "tmpfs", str(folder))
        subprocess.run(mounting, check=True)

    def fill(self, n_free: int) -> None:
        """Leave so many bytes."""
        ballast = self.folder / "ballast"
        ballast.unlink(missing_ok=True)
        about = os.statvfs(self.folder)
        ballast.write_bytes(b"x" * (about.f_bavail * about.f_frsize - n_free))

    def free(self) -> None:
        """Give the room back."""
        (self.folder / "ballast").unlink()


def tried(what: str, work: Callable[[], object], root: Path) -> None:
    """Print how it ended, and what the root is like."""
    row: dict[str, object] = {"what": what, "raised": None}
    try:
        work()
    except CkptctlError as error:
        row |= {"raised": type(error).__name__, "code": error.exit_code, "said": error.message}
        row |= {"next": error.next_command}
    row["picked"] = ckptctl.pick(str(root), grace_s=0.0).step
    row["steps"] = sorted(path.name for path in root.glob("step_*"))
    row["left"] = [path.name for path in root.parent.rglob("*.tmp")]
    print(json.dumps(row), flush=True)


def save(disk: Disk) -> None:
    """A training job whose disk is full for a while, at every page of what it saves."""
    from one_process import Job

    root = disk.folder / "run"
    job = Job(root)
    job.resume()
    job.train(1, 3)
    n_bytes = sum(path.stat().st_size for path in (root / "step_3").rglob("*") if path.is_file())
    step, n_free = 3, 0
    while n_free < n_bytes + 6 * PAGE:
        disk.fill(n_free)
        step += 1
        tried(f"save with {n_free}", partial(job.train, step, step, save_every=1), root)
        if (root / f"step_{step}").exists():
            # Whole and not sealed, or whole: in the next round it is in the way.
            shutil.rmtree(root / f"step_{step}")
        n_free += PAGE if n_free < 2 * PAGE or n_free > n_bytes - 2 * PAGE else 8 * PAGE
    disk.free()
    tried("save", lambda: job.train(step + 1, step + 1, save_every=1), root)
    report = ckptctl.verify(f"{root}@{step + 1}", level="content", require_seal=True)
    print(json.dumps({"what": "verify", "code": report.exit_code}))


def inodes(disk: Disk) -> None:
    """A training job on a disk that has space, and room for a few more files only."""
    from one_process import Job

    root = disk.folder / "run"
    job = Job(root)
    job.resume()
    job.train(1, 3)
    while os.statvfs(disk.folder).f_favail > 1:
        (disk.folder / f"file-{os.statvfs(disk.folder).f_favail}").touch()
    tried("save", partial(job.train, 4, 4, save_every=1), root)


def others(disk: Disk, source: Path) -> None:
    """What writes little: and a reshard during which somebody fills the disk."""
    from ckptctl.resharding import executing

    root = disk.folder / "run"
    shutil.copytree(source, root)
    step, marks = str(root / "step_20"), str(disk.folder / "marks.jsonl")
    (disk.folder / "other").mkdir()
    new = str(disk.folder / "other" / "step_20")
    ways: dict[str, Callable[[], object]] = {
        "reshard": lambda: ckptctl.reshard(step, new, world_size=2),
        "seal": lambda: ckptctl.seal(step, replace=True),
        "pin": lambda: ckptctl.mark(step, "pinned"),
        "pin in a file": lambda: ckptctl.mark(step, "pinned", marks=marks),
    }
    tried("reshard, asked before", ways["reshard"], root)
    executing.check_space = lambda *asked: None
    for n_free in (0, PAGE, 16 * PAGE):
        for what, work in ways.items():
            disk.fill(n_free)
            tried(f"{what} with {n_free}", work, root)
    disk.free()
    for what, work in ways.items():
        tried(what, work, root)
    report = ckptctl.verify(new, level="content", require_seal=True)
    print(json.dumps({"what": "verify", "code": report.exit_code}))


def answers(disk: Disk, source: Path) -> None:
    """Files beside the root, marks, and a removal of steps that must make room."""
    from ckptctl.storage.files import replace_file

    root = disk.folder / "run"
    shutil.copytree(source, root)
    for seal in root.rglob("seal.json"):
        seal.unlink()
    for place, step in enumerate(sorted(root.glob("step_*"))):
        for file in step.rglob("*"):
            os.utime(file, (1e9 + 3600 * place, 1e9 + 3600 * place))
    if os.statvfs(disk.folder).f_files < 1000:
        for number in range(1000):
            if not os.statvfs(disk.folder).f_favail:
                break
            (disk.folder / f"file-{number}").touch()
    else:
        disk.fill(0)
    report = str(root / "report.json")
    tried("report", lambda: replace_file(report, b"x" * PAGE, "the report"), root)
    tried("pin", lambda: ckptctl.mark(str(root / "step_20"), "pinned"), root)
    tried("prune", lambda: ckptctl.prune(str(root), 1, apply=True, unsealed=True), root)


if __name__ == "__main__":
    if sys.argv[1] == "save":
        save(Disk(Path(sys.argv[2])))
    elif sys.argv[1] == "inodes":
        inodes(Disk(Path(sys.argv[2]), "size=9m,nr_inodes=90"))
    elif sys.argv[1] == "answers":
        answers(Disk(Path(sys.argv[2]), sys.argv[4]), Path(sys.argv[3]))
    else:
        others(Disk(Path(sys.argv[2])), Path(sys.argv[3]))
