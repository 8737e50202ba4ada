"""Remove steps, and prove those that stay.

No reader uses a partly removed step: its metadata goes first, so from then on it is an
interrupted save, is never chosen, and the next retention removes the rest. A format without
DCP metadata gets a note instead, which goes last: without it, the rest could pass for a
weights-only step. Then what ckptctl wrote about the step, then everything else. `pruning`
decides which steps go.

A killed save leaves multipart uploads. Listings do not show their parts, which are billed
until the upload is aborted. An upload of an attempt that no longer holds the root is
abandoned, because its writer may not publish any more. One under a name without an attempt
is another tool's, and counts as abandoned after a day. Everything else may still be
running, and stays.

A step that stays is proven once, by every byte: by a seal, or by the note
`.ckptctl/proof.json` that retention writes into it after comparing them. Both apply to the
proven files, by names, sizes and write times, and to one metadata: a step that was written to
since, or copied without its times, must be proven again. A proof describes the bytes at that
time. Bytes that a disk has lost since, without a write, are detected only when read again
(`--level content`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress

from ckptctl import __version__
from ckptctl.errors import (
    AccessDenied,
    OwnFileUnreadable,
    PathNotFound,
    StorageError,
    StorageFull,
    StorageUnavailable,
)
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.layouts import (
    METADATA,
    OWN_FOLDER,
    REMOVING,
    is_flat_file,
    is_own,
    is_saved,
    is_scattered,
    own_file_of_lone,
    step_name,
)
from ckptctl.formats.own.documents import ProofDocument
from ckptctl.formats.own.files import as_stored, canonical, read_back, time_now
from ckptctl.formats.own.marks import metadata_digest
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.open_step import list_step
from ckptctl.inspection.seals import is_unwritten, written_ms
from ckptctl.model import FileInfo
from ckptctl.selection.fencing import holder
from ckptctl.storage.contract import NotSupported, Store, TooLarge, Upload
from ckptctl.storage.in_flight import act_in_flight
from ckptctl.storage.opening import join_url


def remove_step(store: Store, name: str, *, seen: Sequence[FileInfo] | None = None) -> bool:
    """Remove a step; False, removing nothing, if its files differ from those of `seen`.

    No link is followed, neither in the step nor in the place of one of its folders. Raises
    `AccessDenied` or `StorageUnavailable` if something cannot be removed; what is left then
    is an interrupted save, or the complete step. Cost: one listing; on an object store a
    request per object, several at once.
    """
    listed = list_step(store, name)
    if seen is not None and tuple(seen) != listed:
        return False
    files = [file.path for file in listed]
    markers = [path for path in files if _is_marker(path)]
    # A seal without its shards would make a partial removal look like damage.
    own = [path for path in files if is_own(path) and path not in (*markers, REMOVING)]
    rest = sorted(set(files).difference(markers, own, [REMOVING]))
    try:
        if is_scattered(name) or any(is_flat_file(file) and file.path == name for file in listed):
            act_in_flight(store.remove, rest)
            act_in_flight(store.remove, [own_file_of_lone(name, path) for path in own])
            return True
        noted = [] if markers else _note(store, name)
        if store.folders is not None:
            store.folders.remove_folder(name, first=(markers, own, rest if noted else ()))
        else:
            for paths in (markers, own, rest, noted):
                act_in_flight(store.remove, [f"{name}/{path}" for path in paths])
    except StorageError as error:
        kind = AccessDenied if isinstance(error, AccessDenied) else StorageUnavailable
        url = join_url(store.url, name)
        why = error.message.removeprefix(f"{url}: ")
        raise kind(f"{url} could not be removed completely: {why}") from error
    return True


def _note(store: Store, name: str) -> list[str]:
    """Write a note into a step that it is being removed; its path, if there was space."""
    with suppress(StorageUnavailable):
        store.put(f"{name}/{REMOVING}", b"being removed\n", replace=True)
        return [REMOVING]
    return []


def _is_marker(path: str) -> bool:
    return path.rsplit("/", 1)[-1].endswith(METADATA)


MAX_AGE_S = 24 * 3600.0
"""No single object takes a day to write."""


def abandoned_uploads(
    store: Store, pattern: re.Pattern[str] | None = None, *, number: int | None = None
) -> Sequence[Upload]:
    """The abandoned uploads into steps of a root; with `number`, into that step.

    Empty if the client cannot list them or is not permitted to: a lifecycle rule of the
    bucket has to abort them then. Cost: a listing of the fence, and one request per 1,000
    uploads.
    """
    found: Sequence[Upload] = ()
    with suppress(NotSupported, AccessDenied, PathNotFound):
        found = store.list_uploads()
    if not found:
        return ()
    held = holder(store)
    token = held.number if held else 0
    abandoned = []
    for upload in found:
        named = step_name(upload.path.partition("/")[0], pattern)
        if named is None or (number is not None and named.number != number):
            continue
        old = upload.begun_s is not None and time.time() - upload.begun_s > MAX_AGE_S
        if 0 < named.attempt < token or (not named.attempt and old):
            abandoned.append(upload)
    return abandoned


PROOF = f"{OWN_FOLDER}/proof.json"
"""The path of the note in its step."""

SCHEMA = "ckptctl.proof/1"

_MAX_BYTES = 64 << 10


def has_seal(inspected: Inspection) -> bool:
    """Whether a seal lists all files that the step needs, and applies to this save of it."""
    notes = inspected.notes
    is_partial = any(finding.code == "seal.partial" for finding in notes.findings)
    return notes.seal is not None and not is_partial


def is_proven(store: Store, inspected: Inspection) -> bool:
    """Whether a seal or a note proves the bytes of the present files.

    Storage errors are passed on. Cost: one short read if there is a note.
    """
    seal = inspected.notes.seal if has_seal(inspected) else None
    return (seal is not None and is_unwritten(seal, inspected.step)) or _noted(store, inspected)


def write_proof(store: Store, inspected: Inspection) -> None:
    """Leave a note that all bytes of the step have been compared, if there is space for it.

    A full storage is what steps are removed for. Cost: one write.
    """
    path = inspected.opened.in_store(PROOF)
    with suppress(StorageFull):
        store.put(path, as_stored(SCHEMA, _fields(inspected)), replace=True)


def _noted(store: Store, inspected: Inspection) -> bool:
    if not any(file.path == PROOF and file.kind == "file" for file in inspected.step.files):
        return False
    try:
        data = store.read(inspected.opened.in_store(PROOF), limit=_MAX_BYTES)
        noted = read_back(data, SCHEMA, ProofDocument, max_objects=8)
    except (OwnFileUnreadable, PathNotFound, TooLarge):
        return False
    now = _fields(inspected)
    was = (noted["number"], noted["metadata"], noted["files"])
    return was == (now["number"], now["metadata"], now["files"])


def files_digest(files: Iterable[FileInfo]) -> str:
    """A SHA-256 over the files of a step by path, each with its size and write time."""
    saved = {f.path: [f.size, written_ms(f)] for f in files if is_saved(f.path)}
    return sha256_of(canonical(saved))


def _fields(inspected: Inspection) -> ProofDocument:
    report = inspected.report
    return {
        "tool": f"ckptctl {__version__}",
        "at": time_now(),
        "number": report.number,
        "metadata": metadata_digest(report.digests),
        "files": files_digest(inspected.step.files),
    }
