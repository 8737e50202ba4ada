"""Prove every byte of a step, and record the proof.

A proof is made once: a seal, or the note `.ckptctl/proof.json` that retention writes into a
step after comparing all of its bytes. Both apply to the proven files, by names, sizes and
write times, and to one metadata: a step that was written to since, or copied without its
times, must be proven again.

A proof describes the bytes at that time. Bytes that a disk has lost since, without a write,
are detected only when read again (`--level content`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from ckptctl import __version__
from ckptctl.checks.seals import written_ms
from ckptctl.errors import OwnFileUnreadable, PathNotFound
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, is_own
from ckptctl.formats.own.documents import ProofDocument
from ckptctl.formats.own.files import as_stored, canonical, read_back, time_now
from ckptctl.formats.own.marks import metadata_digest
from ckptctl.formats.own.seals import Seal
from ckptctl.inspection.inspecting import Inspection
from ckptctl.model import FileInfo, Step
from ckptctl.storage.contract import Store, TooLarge

PROOF = f"{OWN_FOLDER}/proof.json"
"""The path of the note in its step."""

SCHEMA = "ckptctl.proof/1"

_MAX_BYTES = 64 << 10


def has_seal(looked: Inspection) -> bool:
    """Whether a seal lists all files that the step needs, and applies to this save of it."""
    notes = looked.notes
    if notes is None or notes.seal is None:
        return False
    return not any(finding.code == "seal.partial" for finding in notes.findings)


def is_proven(store: Store, looked: Inspection) -> bool:
    """Whether a seal or a note proves the bytes of the present files.

    Storage errors are passed on. Cost: one short read if there is a note.
    """
    seal = looked.notes.seal if looked.notes and has_seal(looked) else None
    return (seal is not None and _as_sealed(seal, looked.step)) or _noted(store, looked)


def write_proof(store: Store, looked: Inspection) -> None:
    """Leave a note that all bytes of the step have been compared. Cost: one write."""
    path = looked.opened.in_store(PROOF)
    store.put(path, as_stored(SCHEMA, _fields(looked)), replace=True)


def _as_sealed(seal: Seal, step: Step) -> bool:
    """Whether a sealed file was not written to since; metadata is compared by its digest."""
    there = {file.path: file for file in step.files}
    metadata = dict(seal.step.metadata)
    return all(
        (now := there.get(file.path)) is not None
        and (now.size, written_ms(now)) == (file.size, file.written_ms)
        for file in seal.files
        if file.path not in metadata
    )


def _noted(store: Store, looked: Inspection) -> bool:
    if not any(file.path == PROOF and file.kind == "file" for file in looked.step.files):
        return False
    try:
        data = store.read(looked.opened.in_store(PROOF), limit=_MAX_BYTES)
        noted = read_back(data, SCHEMA, ProofDocument, max_objects=8)
    except (OwnFileUnreadable, PathNotFound, TooLarge):
        return False
    now = _fields(looked)
    was = (noted["number"], noted["metadata"], noted["files"])
    return was == (now["number"], now["metadata"], now["files"])


def files_digest(files: Iterable[FileInfo]) -> str:
    """A SHA-256 over the files of a step by path, each with its size and write time."""
    saved = {f.path: [f.size, written_ms(f)] for f in files if not is_own(f.path)}
    return hashlib.sha256(canonical(saved)).hexdigest()


def _fields(looked: Inspection) -> ProofDocument:
    report = looked.report
    return {
        "tool": f"ckptctl {__version__}",
        "at": time_now(),
        "number": report.number,
        "metadata": metadata_digest(report.digests),
        "files": files_digest(looked.step.files),
    }
