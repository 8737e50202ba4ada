"""Whose root is it, and may this process still write to it?

A root that ckptctl writes to bears a sentinel, `.ckptctl/root.json`, from the first
start on: a job that finds neither it nor steps has lost its storage. Every attempt
takes the next number in `.ckptctl/fence/`, which no two can have; the highest holds the
root. A process of an older attempt that is still alive, or wakes up, sees that before
each thing it would publish, and stops.

Between the look and the act remains a moment that no file system closes: an orphan
that sleeps exactly there publishes one last thing, into a folder of its own attempt.
"""

from __future__ import annotations

import os
import re
import shlex
import socket
from dataclasses import dataclass

from ckptctl import __version__
from ckptctl.errors import AlreadyExists, Fenced, OwnFileUnreadable, PathNotFound
from ckptctl.formats.layouts import OWN_FOLDER
from ckptctl.formats.own_files import read_back, text_in, time_now, with_digest
from ckptctl.storage.contract import Store

ROOT_FILE = f"{OWN_FOLDER}/root.json"
FENCE_FOLDER = f"{OWN_FOLDER}/fence"

_TOKEN = re.compile(r"(?P<number>[0-9]{10})\.json")
_MAX_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class Token:
    """A place in the order of attempts; the highest number holds the root."""

    number: int
    attempt: str


def put_sentinel(store: Store) -> None:
    """Write `.ckptctl/root.json` where it is not there yet. Cost: one write at most."""
    fields: dict[str, object] = {
        "schema": "ckptctl.root/1",
        "tool": f"ckptctl {__version__}",
        "created_at": time_now(),
    }
    try:
        store.put(ROOT_FILE, with_digest(fields))
    except AlreadyExists:
        return


def take_token(store: Store, attempt: str) -> Token:
    """Take the root over for `attempt`: whoever held it before may write no more.

    Two that come at the same moment get different numbers, and the higher one holds.
    Cost: a listing and a write, again for each that came first.
    """
    put_sentinel(store)
    number = _highest(store)
    while True:
        number += 1
        fields: dict[str, object] = {
            "schema": "ckptctl.fence/1",
            "number": number,
            "attempt": attempt,
            "at": time_now(),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        try:
            store.put(f"{FENCE_FOLDER}/{number:010}.json", with_digest(fields))
        except AlreadyExists:
            continue
        return Token(number, attempt)


def check_token(store: Store, token: Token) -> None:
    """Raise `Fenced` where a newer attempt holds the root. Cost: one listing of a small folder."""
    highest = _highest(store)
    if highest <= token.number:
        return
    raise Fenced(
        f"{store.url}: attempt {_attempt_of(store, highest)} has taken the root over from "
        f"{token.attempt}, which is this one; nothing more is written by it",
        next_command=f"ckptctl scan {shlex.quote(store.url)}",
    )


def holder(store: Store) -> Token | None:
    """The token that holds the root; None for a root that no attempt has ever held."""
    highest = _highest(store)
    return Token(highest, _attempt_of(store, highest)) if highest else None


def _highest(store: Store) -> int:
    try:
        entries = store.list_dir(FENCE_FOLDER)
    except PathNotFound:
        return 0
    names = (_TOKEN.fullmatch(entry.path.rpartition("/")[2]) for entry in entries)
    return max((int(match["number"]) for match in names if match), default=0)


def _attempt_of(store: Store, number: int) -> str:
    path = f"{FENCE_FOLDER}/{number:010}.json"
    names = ("schema", "number", "attempt", "at", "host", "pid")
    try:
        fields, _ = read_back(
            store.read(path, limit=_MAX_BYTES), "ckptctl.fence/1", names, max_objects=8
        )
        return text_in(fields["attempt"], "attempt")
    except (OwnFileUnreadable, PathNotFound):
        return f"number {number}"
