"""Tell local disks from network file systems.

Decided by the mount table, once links on the way to the folder are resolved.
Whether the server is there is not asked.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from ckptctl.storage.contract import Kind

_NETWORK_TYPES = frozenset(
    {
        "9p",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "mmfs",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "pvfs2",
        "smb3",
        "smbfs",
        "virtiofs",
        "wekafs",
    }
)
_MOUNT_TABLE = "/proc/self/mounts"


class Mount(NamedTuple):
    """What is mounted where: `nfs:/export`, `/shared`, `nfs4`."""

    source: str
    at: str
    type: str


def mount_of(folder: str) -> Mount | None:
    """The mount that `folder` lies on, None where there is no mount table to read (macOS)."""
    try:
        with open(_MOUNT_TABLE, encoding="utf-8", errors="surrogateescape") as table:
            return _mount_in(table.read(), os.path.realpath(folder))
    except OSError:
        return None


def kind_of(folder: str) -> Kind:
    """`NETWORK` where a server or a FUSE process answers for `folder`, else `LOCAL`.

    `LOCAL` too where there is no mount table to read.
    """
    mount = mount_of(folder)
    return Kind.LOCAL if mount is None else _kind_of_type(mount.type)


def _kind_in(table: str, folder: str) -> Kind:
    mount = _mount_in(table, folder)
    return Kind.LOCAL if mount is None else _kind_of_type(mount.type)


def _mount_in(table: str, folder: str) -> Mount | None:
    best: Mount | None = None
    for line in table.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        at = _unescaped(fields[1])
        inside = folder == at or folder.startswith(at.rstrip("/") + "/")
        # Of mounts on one place, the last in the table lies on top.
        if inside and (best is None or len(at) >= len(best.at)):
            best = Mount(_unescaped(fields[0]), at, fields[2])
    return best


def _kind_of_type(name: str) -> Kind:
    # `fuseblk` is a disk of this machine behind a driver in user space.
    fuse = name == "fuse" or name.startswith("fuse.")
    return Kind.NETWORK if fuse or name in _NETWORK_TYPES else Kind.LOCAL


def _unescaped(field: str) -> str:
    # Blank, tab, newline and backslash are octal in the table.
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field
