"""Test the properties of a storage that checkpoints need.

Small files in a folder under `.ckptctl/` are written, listed, read, replaced and created by
several concurrent writers, and removed. Neither speed nor large amounts of data are tested.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

from ckptctl.diagnostics.advice import Advice, fault, warning
from ckptctl.errors import AlreadyExists, PathNotFound, StorageError
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.options import StorageOptions
from ckptctl.selection.roots import list_root
from ckptctl.selection.targets import check_root_there
from ckptctl.storage.contract import Store, read_range, storage_time_s
from ckptctl.storage.opening import join_url, open_store

_BYTES = 65536
_ROUNDS = 3
_WRITERS = 4
_REPLACEMENTS = 10
_CLOCK_S = 60.0


def check_storage(
    url: str, storage: StorageOptions
) -> tuple[tuple[Advice, ...], tuple[tuple[str, str], ...]]:
    """The faults of the storage under a root, and facts about it.

    Raises `StorageUnavailable` and `AccessDenied` if the storage did not answer or is not
    writable, `PathNotFound` and `UsageError` if the root does not exist. Written files are
    always removed.
    """
    with open_store(url, storage) as store:
        begun = time.monotonic()
        check_root_there(store, list_root(store))
        answered = time.monotonic() - begun
        folder = f"{OWN_FOLDER}/doctor-{secrets.token_hex(6)}"
        facts = [("kind", store.kind.value), ("a listing takes", f"{answered * 1000:.0f} ms")]
        try:
            advice = [each for each in _observations(store, folder, facts) if each is not None]
        finally:
            left = _removed(store, url, folder, storage)
    if left is not None:
        advice.append(left)
    return tuple(advice), tuple(facts)


def _observations(
    store: Store, folder: str, facts: list[tuple[str, str]]
) -> Iterator[Advice | None]:
    for name, test in (
        ("a listing shows new files at once", _listing),
        ("a read after an overwrite returns the new bytes", _overwriting),
        ("one of several concurrent writers succeeds, the others get an error", _exclusive),
        ("a reader sees the old file or the new one", _atomic),
        ("the clock agrees with this machine", _clock),
    ):
        found = test(store, folder)
        facts.append((name, "yes" if found is None else "no"))
        yield found


def _listing(store: Store, folder: str) -> Advice | None:
    names = [f"{folder}/listed-{number}" for number in range(_ROUNDS)]
    for name in names:
        store.put(name, bytes(_BYTES))
    listed = {info.path: info.size for info in store.list_dir(folder)}
    if all(listed.get(name) == _BYTES for name in names):
        return None
    missing = sum(listed.get(name) != _BYTES for name in names)
    return fault(
        "storage.listing",
        store.url,
        f"{missing} of {_ROUNDS} new files are missing from the listing: a complete step would "
        "look incomplete",
    )


def _overwriting(store: Store, folder: str) -> Advice | None:
    name = f"{folder}/replaced"
    for fill in (b"a", b"b", b"c"):
        store.put(name, fill * _BYTES, replace=True)
        if store.read(name, limit=_BYTES) != fill * _BYTES:
            return fault(
                "storage.stale",
                store.url,
                "a read after an overwrite returned the old bytes",
            )
    if read_range(store, name, _BYTES - 10, 10) != b"c" * 10:
        return fault("storage.ranges", store.url, "a read of a range returned other bytes")
    return None


def _exclusive(store: Store, folder: str) -> Advice | None:
    for number in range(_ROUNDS):
        name = f"{folder}/won-{number}"
        won: list[int] = []
        _at_once(_WRITERS, lambda writer, name=name, won=won: _try(store, name, writer, won))  # type: ignore[misc]
        if len(won) != 1:
            return fault(
                "storage.exclusive",
                store.url,
                f"{len(won)} of {_WRITERS} writers of one new file succeeded",
            )
    return None


def _try(store: Store, name: str, writer: int, won: list[int]) -> None:
    with suppress(AlreadyExists):
        store.put(name, bytes([writer]) * 100)
        won.append(writer)


def _atomic(store: Store, folder: str) -> Advice | None:
    name = f"{folder}/swapped"
    store.put(name, b"0" * _BYTES)
    wrong: list[str] = []
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            try:
                data = store.read(name, limit=_BYTES)
            except PathNotFound:
                wrong.append("the file was briefly missing")
                return
            if len(set(data)) != 1 or len(data) != _BYTES:
                wrong.append("a reader saw part of the new file")
                return

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        for number in range(_REPLACEMENTS):
            store.put(name, str(number).encode() * _BYTES, replace=True)
    finally:
        done.set()
        reader.join()
    if not wrong:
        return None
    return fault(
        "storage.atomic",
        store.url,
        f"while a file was replaced, {wrong[0]}",
    )


def _clock(store: Store, folder: str) -> Advice | None:
    before = time.time()
    at = storage_time_s(store, f"{folder}/clock")
    if before - _CLOCK_S <= at <= time.time() + _CLOCK_S:
        return None
    return warning(
        "storage.clock",
        store.url,
        f"a new file has a time {at - before:+.0f} s from the clock of this machine: a save in "
        "progress may be taken for an interrupted one",
    )


def _at_once(count: int, run: Callable[[int], None]) -> None:
    ready = threading.Barrier(count)
    failed: list[StorageError] = []

    def one(number: int) -> None:
        ready.wait()
        try:
            run(number)
        except StorageError as error:
            failed.append(error)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]


def _removed(store: Store, url: str, folder: str, storage: StorageOptions) -> Advice | None:
    """Remove what was written; the advice lists what could not be removed."""
    try:
        if store.folders is not None:
            with suppress(PathNotFound):
                for info in store.list_dir(folder):
                    store.remove(info.path)
            store.remove(folder)
        else:
            _remove_objects(join_url(url, folder), storage)
    except (StorageError, OSError, ImportError) as error:
        return warning(
            "storage.left",
            join_url(url, folder),
            f"what was written could not be removed ({error})",
        )
    return None


def _remove_objects(url: str, storage: StorageOptions) -> None:
    from fsspec.core import url_to_fs

    given = dict(storage.storage_options or {})
    if storage.endpoint_url:
        given["endpoint_url"] = storage.endpoint_url
    client, path = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **given)
    with suppress(FileNotFoundError):
        client.rm(path, recursive=True)
