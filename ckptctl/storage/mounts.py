"""Is a folder on this machine's own disk, or does a server answer for it?

Decided by the mount table, once links on the way to the folder are resolved.
Whether the server is there is not asked.
"""

from __future__ import annotations

import os

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


def kind_of(folder: str) -> Kind:
    """`NETWORK` where a server or a FUSE process answers for `folder`, else `LOCAL`.

    `LOCAL` too where there is no mount table to read (macOS).
    """
    try:
        with open(_MOUNT_TABLE, encoding="utf-8", errors="surrogateescape") as table:
            return _kind_in(table.read(), os.path.realpath(folder))
    except OSError:
        return Kind.LOCAL


def _kind_in(table: str, folder: str) -> Kind:
    best, kind = "", Kind.LOCAL
    for line in table.splitlines():
        fields = line.split(" ")
        if len(fields) < 3:
            continue
        at = _unescaped(fields[1])
        inside = folder == at or folder.startswith(at.rstrip("/") + "/")
        # Of mounts on one place, the last in the table lies on top.
        if inside and len(at) >= len(best):
            best, kind = at, _kind_of_type(fields[2])
    return kind


def _kind_of_type(name: str) -> Kind:
    # `fuseblk` is a disk of this machine behind a driver in user space.
    fuse = name == "fuse" or name.startswith("fuse.")
    return Kind.NETWORK if fuse or name in _NETWORK_TYPES else Kind.LOCAL


def _unescaped(field: str) -> str:
    # Blank, tab, newline and backslash are octal in the table.
    for code, char in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(code, char)
    return field
