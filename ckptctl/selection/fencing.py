"""Fencing: the token of a root, and whether this process may still write.

A root that ckptctl writes to has a sentinel, `.ckptctl/root.json`, from the first start on:
a job that finds neither sentinel nor steps has lost its storage. Every attempt takes the
next number in `.ckptctl/fence/`, which is unique; the highest holds the root. A surviving
process of an older attempt detects that before each publication, and stops.

Between the check and the publication remains a moment that no file system closes: an orphan
that is suspended exactly there publishes one last file, into a folder of its own attempt.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import dataclass

from ckptctl.errors import AlreadyExists, Fenced, OwnFileUnreadable, PathNotFound, UsageError
from ckptctl.formats.own.documents import FenceDocument
from ckptctl.formats.own.files import as_stored, read_back, time_now
from ckptctl.formatting import command_line
from ckptctl.selection.history import FENCE_FOLDER, put_sentinel
from ckptctl.storage.contract import NumberedFiles, Store, TooLarge
from ckptctl.storage.opening import absolute_url, join_url

_MAX_NUMBER = 9_999_999_999  # the digits of a token, and of `step_N.attempt-M`
_SCHEMA = "ckptctl.fence/1"
_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Token:
    """A place in the order of attempts; the highest number holds the root."""

    number: int
    attempt: str


_held: dict[str, Token] = {}
"""The newest token that this process took, by the address of the root."""


def held_token(root: str) -> Token | None:
    """The token that this process took for a root; None if it took none."""
    return _held.get(absolute_url(root).rstrip("/"))


def take_token(store: Store, name_attempt: Callable[[str | None], str]) -> Token:
    """Take the root over: its previous holder may no longer write.

    `name_attempt` returns the name of the attempt, given that of the previous attempt or
    None. Concurrent attempts get different numbers, and the highest one holds the root. If
    a store ignores the condition of a conditional write, two attempts may write the same
    number: the token is read back, and the one that wrote last holds it.

    Raises `UsageError` if a stray token has the highest possible number.

    Cost: a listing, two reads and a write; again for each attempt that came first.
    """
    put_sentinel(store)
    number = _tokens(store).newest()
    while True:
        attempt = name_attempt(_attempt_of(store, number) if number else None)
        number += 1
        if number > _MAX_NUMBER:
            raise UsageError(
                f"{join_url(store.url, FENCE_FOLDER)}/{_MAX_NUMBER}.json has the highest possible "
                "number, so no attempt can take the root over; remove it "
                "once no job writes to the root",
                next_command=command_line("scan", store.url),
            )
        fields: FenceDocument = {
            "number": number,
            "attempt": attempt,
            "at": time_now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            _tokens(store).add(number, as_stored(_SCHEMA, fields))
        except AlreadyExists:
            continue
        token = Token(number, attempt)
        if _other_under(store, token) is None:
            _held[absolute_url(store.url).rstrip("/")] = token
            return token


def check_token(store: Store, token: Token) -> None:
    """Raise `Fenced` if another attempt holds the root.

    A token that somebody deleted ends no attempt. An attempt that took the root over since
    then may have a lower number; its name is later.

    Cost: one listing of a small folder, and one small read.
    """
    highest = _tokens(store).newest()
    if highest > token.number:
        other: str | None = _attempt_of(store, highest)
    else:
        other = _other_under(store, token)
    if other is None and 0 < highest < token.number:
        below = _read_attempt(store, highest)
        other = below if below is not None and below > token.attempt else None
    if other is not None:
        raise Fenced(
            f"{store.url}: attempt {other} took the root over from this attempt, "
            f"{token.attempt}, which no longer writes",
            next_command=command_line("scan", store.url),
        )


def _other_under(store: Store, token: Token) -> str | None:
    """The attempt that has the number of `token` by now; None if no other has.

    A store may ignore the condition of a write, and a deleted token leaves its number to
    the next attempt. A token that is gone or damaged names no other attempt.
    """
    found = _read_attempt(store, token.number)
    return found if found not in (None, token.attempt) else None


def holder(store: Store) -> Token | None:
    """The token that holds the root; None if no attempt has ever held it."""
    highest = _tokens(store).newest()
    return Token(highest, _attempt_of(store, highest)) if highest else None


def _tokens(store: Store) -> NumberedFiles:
    return NumberedFiles(store, FENCE_FOLDER)


def _attempt_of(store: Store, number: int) -> str:
    return _read_attempt(store, number) or f"number {number}"


def _read_attempt(store: Store, number: int) -> str | None:
    try:
        data = _tokens(store).read(number, _MAX_BYTES)
        return read_back(data, _SCHEMA, FenceDocument, max_objects=8)["attempt"]
    except (OwnFileUnreadable, PathNotFound, TooLarge):
        return None
