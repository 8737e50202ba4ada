"""Read what binds the seals of a root: the id of its run, and what the seals say of each other.

The sentinel `.ckptctl/root.json` holds the id of the run. Each seal names the run, its place in
the order of the root's seals, and the seals that it found there when it was made. So a seal of
another run, and an older save in the place of a newer one, contradict a file that only the holder
of the key can make. `checks.seals` compares them; this module reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.data_classes import dataclass
from ckptctl.errors import AccessDenied, OwnFileUnreadable, PathEscape, PathNotFound
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, step_name
from ckptctl.formats.own.documents import RootDocument
from ckptctl.formats.own.files import read_back
from ckptctl.formats.own.seals import (
    MAX_SEAL_BYTES,
    MAX_SEQUENCE,
    SEAL,
    EarlierSeal,
    Seal,
    is_authentic,
    parse_seal,
    seal_digest,
)
from ckptctl.formatting import inside
from ckptctl.model import FileInfo
from ckptctl.storage.contract import Store, TooLarge, list_if_there, read_if_there
from ckptctl.storage.in_flight import in_flight
from ckptctl.storage.opening import base_name

if TYPE_CHECKING:
    from ckptctl.inspection.open_step import OpenStep

ROOT_FILE = f"{OWN_FOLDER}/root.json"
ROOT_SCHEMA = "ckptctl.root/1"
_MAX_SENTINEL = 64 << 10

MAX_NEIGHBOURS = 8
"""Seals that are read below a step, above it, and at the end of the root. Each names all that
were there when it was made, so that a few are enough."""

MAX_EARLIER = 256
"""A seal names so many others, the newest: some 50 KB."""

MAX_SEALS = 1_000
"""Seals that are read where the newest of the root is asked for."""


def read_sentinel(store: Store) -> RootDocument | None:
    """The fields of the sentinel, None without one. Raises `OwnFileUnreadable`, `StorageError`."""
    try:
        data = store.read(ROOT_FILE, limit=_MAX_SENTINEL)
    except PathNotFound:
        return None
    except PathEscape as error:
        raise OwnFileUnreadable(error.message) from error
    except TooLarge as error:
        raise OwnFileUnreadable(f"it is larger than {_MAX_SENTINEL:,} bytes") from error
    return read_back(data, ROOT_SCHEMA, RootDocument, max_objects=4)


def run_of(store: Store) -> str | None:
    """The id of the run whose root this is; None where none is recorded. Cost: one read."""
    try:
        fields = read_sentinel(store)
    except OwnFileUnreadable:
        return None
    return None if fields is None else fields.get("run")


@dataclass(frozen=True, slots=True)
class SealedStep:
    """A seal beside the one that is inspected, and its digest."""

    seal: Seal
    digest: str


def seals_beside(
    opened: OpenStep, run: str | None, key: bytes | None, *, every: bool = False
) -> tuple[SealedStep, ...]:
    """The seals of other steps of the root that are of the run, and made with the key.

    Without a key, all that can be read. A seal that is damaged, or of another run, shows
    nothing and is left out, as one that may not be read: who can damage a seal can remove it.
    Those nearest to the step and the newest are read, at most
    `3 * MAX_NEIGHBOURS`; with `every` all, at most `MAX_SEALS`. Storage errors pass through:
    what did not answer may be what contradicts. Cost: one listing or two, and a read of each.
    """
    paths = _paths_beside(opened)
    chosen = paths[:MAX_SEALS] if every else _nearest(paths, opened.step.number)
    found: list[SealedStep] = []
    for _, data in in_flight(partial(_read, opened.store), (path for _, path in chosen)):
        try:
            seal = parse_seal(data or b"")
        except OwnFileUnreadable:
            continue
        if seal.run == run and (key is None or is_authentic(seal, key)):
            found.append(SealedStep(seal, seal_digest(seal)))
    return tuple(found)


def _read(store: Store, path: str) -> bytes | None:
    try:
        return read_if_there(store, path, limit=MAX_SEAL_BYTES)
    except (PathEscape, AccessDenied):
        return None


_LAST_NUMBER = re.compile(r"([0-9]{1,18})[^0-9]*")


def _paths_beside(opened: OpenStep) -> list[tuple[int, str]]:
    """Where the seals of the other numbered folders are, with their numbers, newest first."""
    folder = opened.name.rpartition("/")[0] if opened.has_folder else ""
    lone = f"{OWN_FOLDER}/steps"
    names = [(entry.path, inside(entry.path, SEAL)) for entry in _folders(opened.store, folder)]
    names += [
        (entry.path, inside(entry.path, base_name(SEAL))) for entry in _folders(opened.store, lone)
    ]
    own = opened.in_store(SEAL)
    numbered = (
        (number, path)
        for name, path in names
        if path != own and (number := _number_in(base_name(name))) is not None
    )
    return sorted(numbered, reverse=True)


def _folders(store: Store, folder: str) -> list[FileInfo]:
    try:
        return [entry for entry in list_if_there(store, folder) if entry.kind == "dir"]
    except PathEscape:
        return []


def _number_in(name: str) -> int | None:
    named = step_name(name)
    if named is not None:
        return named.number
    numbers = _LAST_NUMBER.findall(name)
    return int(numbers[-1]) if numbers else None


def _nearest(paths: Sequence[tuple[int, str]], number: int | None) -> list[tuple[int, str]]:
    """The newest, and those that are nearest to a number on both sides."""
    if number is None:
        return [*paths[: 3 * MAX_NEIGHBOURS]]
    above = [one for one in paths if one[0] >= number]
    below = [one for one in paths if one[0] < number]
    chosen = (*paths[:MAX_NEIGHBOURS], *above[-MAX_NEIGHBOURS:], *below[:MAX_NEIGHBOURS])
    return list(dict.fromkeys(chosen))


def next_place(beside: Iterable[SealedStep], own: Seal | None) -> tuple[int, list[EarlierSeal]]:
    """The place of a new seal in the order of its root, and the seals that it names.

    `own` is the seal that it replaces.
    """
    newest: dict[str, EarlierSeal] = {}
    known = 0 if own is None else own.sequence
    for one in beside:
        about = one.seal.step
        itself = EarlierSeal(about.name, about.number, one.seal.sequence, one.digest)
        for earlier in (itself, *one.seal.earlier):
            known = max(known, earlier.sequence)
            if earlier.name not in newest or newest[earlier.name].sequence < earlier.sequence:
                newest[earlier.name] = earlier
    kept = sorted(newest.values(), key=lambda one: -one.sequence)[:MAX_EARLIER]
    return min(known + 1, MAX_SEQUENCE), sorted(kept, key=lambda one: one.name)
