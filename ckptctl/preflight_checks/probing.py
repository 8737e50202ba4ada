"""Check that a storage returns what was written to it.

Files with a content that anyone can work out again are written to a folder of their own
below the root's `.ckptctl/`, flushed, dropped from the cache of this node, read back and
compared: by the node that wrote them, and by another where there are several. Bounded in
bytes and in time; the folder is removed, whatever happened.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from ckptctl.errors import StorageError, UsageError
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.model import NonNegative
from ckptctl.preflight_checks.results import Check, Outcome
from ckptctl.storage.contract import Span, Store
from ckptctl.storage.local import LocalStore
from ckptctl.storage.opening import absolute_url, is_local

FILE_BYTES = 8 << 20
N_FILES = 8
LIMIT_S = 60.0
_BLOCK = 1 << 20
_WRONG_CONTENT = 11  # as for damaged steps: page someone, and trust nothing from here


@dataclass(frozen=True, slots=True)
class Written:
    """What one process wrote for a probe."""

    host: str
    """The name of the machine."""
    token: str
    """`ID/N`, of a probe that wrote N files."""
    seconds: NonNegative
    """How long that took."""
    error: str | None = None
    """Why it could not be done; null where it could."""
    error_code: int = 0
    """The exit code of that error; 0 without one."""

    @property
    def folder(self) -> str:
        """The folder of the files, under the root."""
        return f"{OWN_FOLDER}/probe-{self.token.partition('/')[0]}"

    @property
    def seeds(self) -> range:
        """The seed of each file's content."""
        name, _, n_files = self.token.partition("/")
        return range(int(name, 16), int(name, 16) + int(n_files))

    @property
    def names(self) -> tuple[str, ...]:
        """The files, under the root."""
        return tuple(f"{self.folder}/{number}.bin" for number in range(len(self.seeds)))


@dataclass(frozen=True, slots=True)
class Compared:
    """What one process read back of a probe."""

    host: str
    """The name of the machine."""
    n_bytes: int
    """Bytes that were read."""
    seconds: NonNegative
    """How long that took."""
    wrong: tuple[str, ...] = ()
    """What differs from what was written, in words."""
    error: str | None = None
    """Why it could not be done; null where it could."""
    error_code: int = 0
    """The exit code of that error; 0 without one."""


class StorageProbe:
    """The probe of one process. Its folder is removed at the end of the `with`."""

    def __init__(self, store: Store, *, limit_s: float = LIMIT_S) -> None:
        if not isinstance(store, LocalStore) or not is_local(store.url):
            raise UsageError(
                f"{store.url}: --probe-storage is for file systems: object stores compare "
                "what they receive with its checksum"
            )
        self._store = store
        self._limit_s = limit_s
        # A seed and a name that no other process has; nothing here is a secret.
        self._id = os.urandom(6).hex()
        self._folder = f"{OWN_FOLDER}/probe-{self._id}"
        self._names: list[str] = []
        self._own_existed = os.path.isdir(f"{absolute_url(store.url)}/{OWN_FOLDER}")

    def __enter__(self) -> StorageProbe:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove(Written("", f"{self._id}/{len(self._names)}", 0.0))
        if not self._own_existed:
            # Made by the probe; where something else is in it by now, it stays.
            with suppress(StorageError):
                self._store.remove(OWN_FOLDER)

    def remove(self, written: Written) -> None:
        """Remove what this or another process wrote."""
        with suppress(StorageError):
            for name in written.names:
                self._store.remove(name)
            self._store.remove(written.folder)

    def write(self) -> Written:
        """Write the files, each durably; an error is part of the answer."""
        began_s = time.monotonic()
        n_files = 0
        failed: StorageError | None = None
        try:
            for number in range(N_FILES):
                if time.monotonic() - began_s > self._limit_s:
                    break
                name = f"{self._folder}/{number}.bin"
                self._names.append(name)
                self._store.put_pieces(
                    name, partial(_pieces, int(self._id, 16) + number), FILE_BYTES
                )
                n_files += 1
                self._forget(name)
        except StorageError as error:
            failed = error
        return Written(
            socket.gethostname(),
            f"{self._id}/{n_files}",
            time.monotonic() - began_s,
            failed.message if failed else None,
            failed.exit_code if failed else 0,
        )

    def compare(self, written: Written) -> Compared:
        """Read what this or another process wrote; an error is part of the answer."""
        host = socket.gethostname()
        began_s = time.monotonic()
        n_bytes = 0
        wrong: list[str] = []
        try:
            for number, seed in enumerate(written.seeds):
                if time.monotonic() - began_s > self._limit_s:
                    break
                name = f"{written.folder}/{number}.bin"
                for offset, expected in enumerate(_content(seed)):
                    span = Span(name, offset * _BLOCK, _BLOCK)
                    ((_, found),) = self._store.read_spans([span])
                    n_bytes += len(found)
                    if found != expected:
                        wrong.append(_difference(number, offset * _BLOCK, expected, found))
        except StorageError as error:
            took_s = time.monotonic() - began_s
            return Compared(host, n_bytes, took_s, tuple(wrong), error.message, error.exit_code)
        return Compared(host, n_bytes, time.monotonic() - began_s, tuple(wrong))

    def _forget(self, name: str) -> None:
        """Ask the system to drop the file from its cache, so that the storage is what is read."""
        fd = os.open(f"{absolute_url(self._store.url)}/{name}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _pieces(seed: int) -> Iterator[memoryview]:
    return (memoryview(block) for block in _content(seed))


def _content(seed: int) -> Iterator[bytes]:
    made = random.Random(seed)  # noqa: S311 - the same bytes again are what is wanted
    for _ in range(FILE_BYTES // _BLOCK):
        yield made.randbytes(_BLOCK)


def _difference(number: int, offset: int, expected: bytes, found: bytes) -> str:
    places = [at for at in range(len(expected)) if expected[at] != found[at]]
    zeros = " of zeros" if not any(found[places[0] : places[-1] + 1]) else ""
    return (
        f"file {number}: {len(places):,} bytes{zeros} from {offset + places[0]:,} "
        f"to {offset + places[-1]:,} are not what was written"
    )


def check_probe(written: Sequence[Written], compared: Sequence[Compared]) -> Check:
    """What the probes of all processes add up to."""
    each: tuple[Written | Compared, ...] = (*written, *compared)
    failed = [one for one in each if one.error is not None]
    wrong = [(one, words) for one in compared for words in one.wrong]
    if wrong:
        one, words = wrong[0]
        more = f", and {len(wrong) - 1} more places" if len(wrong) > 1 else ""
        return Check(
            "probe",
            Outcome.FAILED,
            f"the storage does not return what was written: {one.host}: {words}{more}",
            _WRONG_CONTENT,
            "dmesg --level err,warn",
        )
    if failed:
        first = failed[0]
        words = f"{first.host}: {first.error}"
        return Check("probe", Outcome.FAILED, words, first.error_code, "findmnt --real")
    n_bytes = sum(one.n_bytes for one in compared)
    wrote = [len(one.seeds) * FILE_BYTES / max(one.seconds, 1e-6) / 1e6 for one in written]
    read = [one.n_bytes / max(one.seconds, 1e-6) / 1e6 for one in compared]
    return Check(
        "probe",
        Outcome.OK,
        f"{n_bytes / 1e6:,.0f} MB written, read back and compared: written at "
        f"{min(wrote):,.0f} MB/s, read at {min(read):,.0f} MB/s, the slowest of "
        f"{len(written)} process{'' if len(written) == 1 else 'es'}",
    )
