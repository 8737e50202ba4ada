"""A disk that loses power at a chosen moment.

A file system in a file, mounted over a loop device. The shutdown call of ext4 and XFS
cuts it off at any moment; the next mount replays its journal. It requires root and a
mount namespace of its own (`unshare --mount`), so that nothing stays mounted when this
process ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import struct
import subprocess
from enum import Enum, StrEnum
from pathlib import Path

_SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN, which has the number of XFS_IOC_GOINGDOWN."""

_MIB = 1 << 20


class Left(int, Enum):
    """The part of the unflushed data that is on the disk."""

    ALL = 0
    NAMES = 1
    NOTHING = 2


class System(StrEnum):
    """A file system, with the options that flush least."""

    EXT4 = "ext4"
    XFS = "xfs"

    @property
    def size(self) -> int:
        return 24 * _MIB if self is System.EXT4 else 320 * _MIB

    @property
    def make(self) -> tuple[str, ...]:
        if self is System.EXT4:
            return ("mkfs.ext4", "-q", "-F", "-O", "fast_commit")
        return ("mkfs.xfs", "-q", "-f")

    @property
    def options(self) -> str:
        # noauto_da_alloc: no file is flushed because it takes the place of another.
        ext4 = "loop,commit=600,noauto_da_alloc,data=writeback"
        return ext4 if self is System.EXT4 else "loop"


def why_not(system: System) -> str | None:
    """Why no disk can be cut off here; None where one can."""
    if os.geteuid() != 0:
        return "it takes root to mount a file system"
    for program in ("unshare", "mount", "umount", system.make[0]):
        if shutil.which(program) is None:
            return f"there is no {program}"
    if not Path("/dev/loop-control").exists():
        return "there are no loop devices"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    return None if tried.returncode == 0 else f"no mount namespace: {tried.stderr.strip()}"


class Disk:
    """A file system in `folder`, mounted at `mounted`."""

    def __init__(self, folder: Path) -> None:
        self._image, self._kept = folder / "image", folder / "kept"
        self.mounted = folder / "disk"
        self.mounted.mkdir()
        self._system = System.EXT4

    def make(self, system: System) -> None:
        """An empty file system, mounted."""
        self._system = system
        self._image.unlink(missing_ok=True)
        with self._image.open("wb") as file:
            file.truncate(self._system.size)
        _run(*self._system.make, str(self._image))
        self.mount()

    def keep(self) -> None:
        """Keep the present content for `restore`."""
        self.unmount()
        _run("cp", "--sparse=always", str(self._image), str(self._kept))

    def restore(self) -> None:
        """Mount what was kept."""
        _run("cp", "--sparse=always", str(self._kept), str(self._image))
        self.mount()

    def mount(self) -> None:
        _run("mount", "-o", self._system.options, str(self._image), str(self.mounted))

    def unmount(self) -> None:
        _run("umount", str(self.mounted))

    def settle(self) -> None:
        """Flush everything that was written so far."""
        fd = os.open(self.mounted, os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).syncfs(fd):
                raise OSError(ctypes.get_errno(), "syncfs")
        finally:
            os.close(fd)

    def cut(self, left: Left) -> None:
        """Let no later write reach the disk."""
        fd = os.open(self.mounted, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, _SHUTDOWN, struct.pack("I", left))
        finally:
            os.close(fd)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
