"""Read the seals beside a step, and find the place of a new one among them.

Each seal names the run of its root, its place in the order of the root's seals, and the seals that
it found there when it was made. So an older save in the place of a newer one contradicts a file
that only the holder of the key can make. `inspection.seals` compares them; this module reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ckptctl.data_classes import dataclass
from ckptctl.errors import AccessDenied, OwnFileUnreadable, PathEscape
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, step_name
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
from ckptctl.storage.contract import Store, list_if_there, read_if_there
from ckptctl.storage.in_flight import in_flight
from ckptctl.storage.opening import base_name

if TYPE_CHECKING:
    from ckptctl.inspection.open_step import OpenStep

MAX_NEIGHBOURS = 8
"""Seals that are read below a step, above it, and at the end of the root. Each names all that
were there when it was made, so that a few are enough."""

MAX_EARLIER = 256
"""A seal names so many others, the newest: some 50 KB."""

MAX_SEALS = 1_000
"""Seals that are read where the newest of the root is asked for."""


@dataclass(frozen=True, slots=True)
class SealedStep:
    """A seal beside the one that is inspected, and its digest."""

    seal: Seal
    digest: str


def seals_beside(
    opened: OpenStep,
    run: str | None,
    key: bytes | None,
    *,
    every: bool = False,
    root: Store | None = None,
) -> tuple[SealedStep, ...]:
    """The seals of other steps of the root that are of the run, and made with the key.

    Without a key, all that can be read. A seal that is damaged, or of another run, shows
    nothing and is left out, as one that may not be read: who can damage a seal can remove it.
    Those nearest to the step and the newest are read, at most
    `3 * MAX_NEIGHBOURS`; with `every` all, at most `MAX_SEALS`. `root` is where the step will
    be, if it is not published yet. Storage errors pass through:
    what did not answer may be what contradicts. Cost: one listing or two, and a read of each.
    """
    store = root or opened.store
    number = None if isinstance(opened.named, str) else opened.named.number
    paths = _paths_beside(opened, store)
    chosen = paths[:MAX_SEALS] if every else _nearest(paths, number)
    found: list[SealedStep] = []
    for _, data in in_flight(partial(_read, store), (path for _, path in chosen)):
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


def _paths_beside(opened: OpenStep, store: Store) -> list[tuple[int, str]]:
    """Where the seals of the other numbered folders are, with their numbers, newest first."""
    folder = opened.name.rpartition("/")[0] if opened.has_folder else ""
    lone = f"{OWN_FOLDER}/steps"
    names = [(entry.path, inside(entry.path, SEAL)) for entry in _folders(store, folder)]
    names += [(entry.path, inside(entry.path, base_name(SEAL))) for entry in _folders(store, lone)]
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
