"""Find the pickles in archives that torch loads and that `torch.save` did not write.

`torch.load` finds `data.pkl` in any zip file: compressed, with other members before it, under a
name in capital letters; of two it takes one. It also loads the tar files of torch before 0.2.
`directory` reads only what `torch.save` writes. Here every member that could be a pickle for
torch is read, to see what loading it would run.

Source: torch 2.13 `caffe2/serialize/inline_container.cc` (`getRecordID`),
`torch/serialization.py` (`_load`, `legacy_load`).
"""

from __future__ import annotations

import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ckptctl.errors import MetadataUnsafe
from ckptctl.formats.archive.directory import View

MAX_MEMBER = 64 << 20
_IN_TAR = frozenset({"storages", "tensors", "pickle"})
_UNREADABLE = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, ValueError, EOFError, NotImplementedError),
    *(RuntimeError, zlib.error, OverflowError, OSError),
)


class _UnreadBytes(Exception):
    def __init__(self, start: int, end: int) -> None:
        super().__init__()
        self.bytes = NotRead(start, end)


class _Sparse(io.RawIOBase):
    """A file of which only the head and the tail are there; raises `_UnreadBytes` elsewhere."""

    def __init__(self, view: View) -> None:
        self._view = view
        self._at = 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = offset + (0, self._at, self._view.length)[whence]
        if self._at < 0:
            raise OSError("a place before the beginning")
        return self._at

    def read(self, size: int = -1) -> bytes:
        view = self._view
        end = view.length if size < 0 else min(view.length, self._at + size)
        if end <= self._at:
            return b""
        data = view.get(self._at, end)
        if data is None:
            raise _UnreadBytes(self._at, end)
        self._at = end
        return data


class NotRead(NamedTuple):
    """Bytes of a file that were not read, and that are needed."""

    start: int
    end: int


def pickles_in_archive(data: bytes) -> Iterator[bytes]:
    """Each pickle in a zip or tar file that is in memory as a whole; none in a damaged one.

    Raises `MetadataUnsafe` for a pickle that is too long to be read.
    """
    if is_tar(data):
        yield from pickles_in_tar(data)
        return
    found = pickles_in_zip(View(len(data), data, data))
    if not isinstance(found, NotRead):
        yield from found


def pickles_in_zip(view: View) -> Sequence[bytes] | NotRead:
    """Each pickle in a zip file of which the head and the tail were read; none in a damaged one.

    Raises as `pickles_in_archive`.
    """
    file = _Sparse(view)
    pickles = []
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.filename.lower().endswith("data.pkl"):
                    pickles.append(_member(archive, member))
    except _UnreadBytes as missing:
        return missing.bytes
    except _UNREADABLE:
        pass  # torch cannot read it either
    return [pickle for pickle in pickles if pickle is not None]


def is_tar(head: bytes) -> bool:
    """Whether a file is a tar archive, by its first 512 bytes: their checksum is right."""
    if len(head) < tarfile.BLOCKSIZE or not head[0]:
        return False
    try:
        tarfile.TarInfo.frombuf(head[: tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return False
    return True


def _member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes | None:
    try:
        with archive.open(member) as file:
            # torch is built without a check of checksums (`MINIZ_DISABLE_ZIP_READER_CRC32_CHECKS`).
            file._expected_crc = None  # type: ignore[attr-defined]
            return _bounded(file.read(MAX_MEMBER + 1), member.filename)
    except _UNREADABLE:
        return None


def pickles_in_tar(data: bytes) -> Iterator[bytes]:
    """Each pickle in a tar file, as torch before 0.2 named them."""
    try:
        with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as archive:
            for member in archive:
                if member.name.rstrip("/") in _IN_TAR and member.isfile():
                    file = archive.extractfile(member)
                    if file is not None:
                        yield _bounded(file.read(MAX_MEMBER + 1), member.name)
    except (tarfile.TarError, ValueError, OSError, EOFError):
        return


def _bounded(pickle: bytes, name: str) -> bytes:
    if len(pickle) > MAX_MEMBER:
        raise MetadataUnsafe(
            f"holds a pickle {ascii(name)[:100]} that is too long to be read, in an archive that "
            "torch.save did not write"
        )
    return pickle
