"""Copy one step of a root, and show that a root has not changed.

A copy shares no inode with the step: what a fault does to a hard link would reach the real
step. A reflink (btrfs, XFS, bcachefs) shares blocks until one of both is written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from ckptctl.distributed.commands import run_bounded
from ckptctl.errors import PathNotFound
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.inspection.seals import ROOT_FILE
from ckptctl.options import StorageOptions
from ckptctl.starting import find_program
from ckptctl.storage.contract import Span
from ckptctl.storage.files import FULL, error_of, full
from ckptctl.storage.opening import absolute_url, is_local, open_store
from ckptctl.storage.shared_places import open_named

_FICLONE = 0x40049409
"""Source: `FICLONE` of `linux/fs.h`."""
_BESIDE_BYTES = 1 << 20
"""Files beside steps up to this size are copied: a tracker (`latest`), a configuration."""
_PIECE = 16 << 20


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise the error of a storage where a file system fails, such as one without space."""
    try:
        yield
    except OSError as error:
        name = str(error.filename or path)
        if error.errno in FULL:
            there = next(each for each in (path, *path.parents) if each.exists())
            raise full(name, error, str(there), None) from error
        raise error_of(name, error) from error


def fingerprint(root: str, storage: StorageOptions) -> str:
    """A digest of all names below a root with their sizes and times, and of no contents.

    In a file system the change time is part of it, which no call can set back: every write,
    rename and change of permissions shows. In an object store the ETag is.
    """
    digest = hashlib.sha256()
    for entry in sorted(_entries(root, storage)):
        digest.update(f"{entry}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _entries(root: str, storage: StorageOptions) -> Iterator[str]:
    if not is_local(root):
        with open_store(root, storage) as store:
            for info in store.list_tree():
                yield f"{info.path} {info.size} {info.identity}"
        return
    path = absolute_url(root)
    for folder, folders, files in os.walk(path):
        for name in (".", *folders, *files):
            with suppress(FileNotFoundError):  # a job of this root may remove a step meanwhile
                about = os.lstat(os.path.join(folder, name))
                yield (
                    f"{os.path.join(folder, name)} {about.st_mode} {about.st_ino} {about.st_size} "
                    f"{about.st_mtime_ns} {about.st_ctime_ns}"
                )


def path_in(root: str, url: str) -> str:
    """The path of a step in its root, by the addresses of both."""
    if is_local(url):
        return os.path.relpath(absolute_url(url), absolute_url(root))
    return url[len(root.rstrip("/")) + 1 :]


def copy_step(root: str, step: str, target: Path, storage: StorageOptions) -> str:
    """Copy the step at the path `step` of a root, and small files beside it; by which means.

    The copy has the sentinel of the root, and none of the other records of ckptctl. Raises
    `StorageError` where a file cannot be read or written.
    """
    above = [*Path(step).parents]  # the folder of the step, up to the root itself
    with storage_errors(target):
        if is_local(root):
            return _copy_local(Path(absolute_url(root)), step, above, target)
        _download(root, step, above, target, storage)
        return "download"


def _download(
    root: str, step: str, above: Sequence[Path], target: Path, storage: StorageOptions
) -> None:
    with open_store(root, storage) as store:
        wanted = [*store.list_tree(step)]
        for folder in above:
            beside = store.list_dir("" if str(folder) == "." else str(folder))
            wanted += [each for each in beside if each.size <= _BESIDE_BYTES]
        with suppress(PathNotFound):
            wanted += [each for each in store.list_dir(OWN_FOLDER) if each.path == ROOT_FILE]
        for info in wanted:
            if info.kind != "file":
                continue
            out = target / info.path
            out.parent.mkdir(parents=True, exist_ok=True)
            spans = [
                Span(info.path, at, min(_PIECE, info.size - at))
                for at in range(0, info.size, _PIECE)
            ]
            with out.open("wb") as file:
                for _, data in store.view_spans(spans):
                    file.write(data)


def _copy_local(real: Path, step: str, above: Sequence[Path], target: Path) -> str:
    # A pipe would be read forever, and a link that leads nowhere is not part of a step.
    cloned = [
        _copy_file(path, target / path.relative_to(real))
        for folder, _, files in os.walk(real / step, followlinks=True)
        for name in files
        if (path := Path(folder) / name).is_file()
    ]
    for beside in above:
        for entry in os.scandir(real / beside):
            if entry.is_file() and entry.stat().st_size <= _BESIDE_BYTES:
                _copy_file(Path(entry.path), target / Path(entry.path).relative_to(real))
    if (real / ROOT_FILE).is_file():
        _copy_file(real / ROOT_FILE, target / ROOT_FILE)
    return "reflink" if cloned and all(cloned) else "copy"


def _copy_file(source: Path, target: Path) -> bool:
    """Copy one file; whether both share their blocks now."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(open_named(str(source)), "rb") as old, target.open("wb") as new:
        with suppress(OSError):
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            return True
        shutil.copyfileobj(old, new, _PIECE)
    return False


_READ_ONLY = '"$0" --bind "$1" "$1" && "$0" -o remount,ro,bind "$1" && shift && exec "$@"'


def read_only_launcher(root: str) -> Sequence[str]:
    """The words before a command that make a local root read-only for it; none if impossible.

    The command gets a mount namespace of its own, in which the root is mounted read-only. That
    takes root, or user namespaces; then the command sees itself as root.
    """
    if not is_local(root):
        return ()
    path = absolute_url(root)
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    unshare, shell, mount = map(find_program, ("unshare", "sh", "mount"))
    if unshare is None or shell is None or mount is None:
        return ()
    words = (unshare, *as_root, "--mount", shell, "-c", _READ_ONLY, mount, path)
    with suppress(OSError):
        if run_bounded([*words, "true"], 60.0).code == 0:
            return words
    return ()
