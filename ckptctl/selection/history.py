"""Read and write what a root records: the steps that it has contained, and who may write to it.

The sentinel `.ckptctl/root.json` states whether the root was empty when ckptctl first wrote
to it, the first step that was found usable, and the id of the run, which seals name. The
ledgers of `ckptctl.train` below `.ckptctl/attempts/` state which steps were saved and resumed
from. Together they distinguish a run that has never finished a save from one whose steps are
gone. A record that cannot be read in full proves nothing.

Every attempt takes the next number in `.ckptctl/fence/`, which is unique; the highest holds the
root. A surviving process of an older attempt detects that before each publication, and stops. One
that is suspended between the check and the publication publishes one last file, into a folder of
its own attempt.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from secrets import token_hex
from typing import TYPE_CHECKING

from ckptctl import __version__
from ckptctl.errors import (
    AlreadyExists,
    Fenced,
    OwnFileUnreadable,
    PathEscape,
    PathNotFound,
    StorageError,
    StorageUnavailable,
    UsageError,
)
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.documents import FenceDocument, RootDocument
from ckptctl.formats.own.files import ATTEMPTS_FOLDER, REPORT_SUFFIX, as_stored, read_back, time_now
from ckptctl.formatting import command_line
from ckptctl.inspection.seals import ROOT_FILE, ROOT_SCHEMA, read_sentinel, run_of
from ckptctl.model import FileInfo
from ckptctl.selection.roots import ASIDE_FOLDER, list_root
from ckptctl.storage.contract import NumberedFiles, Store, TooLarge, list_if_there, read_if_there
from ckptctl.storage.in_flight import in_flight
from ckptctl.storage.opening import absolute_url, base_name, join_url

if TYPE_CHECKING:
    from ckptctl.formats.own.ledger import LedgerLine

FENCE_FOLDER = f"{OWN_FOLDER}/fence"

_MAX_LEDGER = 16 << 20
_MAX_LEDGERS = 1_000
_MAX_RESUMES = 20

MAX_ATTEMPTS = 20
"""The number of newest attempts whose ledgers a resume reads."""
MAX_LEDGER_BYTES = 256 << 20
"""Bytes of ledgers that are read at most; a month of training writes 13 MB."""

_OF_ATTEMPT = re.compile(
    r"(?P<attempt>[0-9]{8}T[0-9]{6}\.[0-9]{6}Z-[0-9a-f]{8})"
    r"(?P<rest>\.jsonl|\.rank[0-9]+\.jsonl|\.resume\.json)"
)


@dataclass(frozen=True, slots=True)
class History:
    """The record of one root; each field is a clause for a message.

    `used`: ckptctl has used the root before. `held` is the evidence that the root contained
    a usable step, None without one. `doubt` is why the record cannot prove that it never
    did, None if it can.
    """

    used: bool = False
    held: str | None = None
    doubt: str | None = "ckptctl keeps no record there"

    @property
    def never_held(self) -> bool:
        """Whether the record proves that no step of the root was ever usable."""
        return self.used and self.held is None and self.doubt is None


def begin_run(stores: Iterable[Store], step: int | None) -> None:
    """Write the sentinel of each mandatory root of a run, or record the usable step.

    Without a step, a missing root is created: nothing else creates one, and the caller has
    asked `without_steps`. A root that cannot be written to can still be resumed from: a
    `StorageError` is raised only without a step.
    """
    stores = tuple(stores)
    run = _run_of_any(stores) if len(stores) > 1 else None
    for store in stores:
        if step is None:
            if store.folders is not None:
                store.folders.create_root()
            put_sentinel(store, run)
        else:
            with suppress(StorageError):
                record_usable(store, step, run)


def _run_of_any(stores: Iterable[Store]) -> str:
    """The id that one of the roots of a run has; a new one if none has."""
    for store in stores:
        with suppress(StorageError):
            run = run_of(store)
            if run is not None:
                return run
    return token_hex(16)


def put_sentinel(store: Store, run: str | None = None) -> None:
    """Write `.ckptctl/root.json` if it is missing, with the id of the `run` or a new one.

    Cost: a read; then a listing and a write.
    """
    with suppress(OwnFileUnreadable):
        if read_sentinel(store) is not None:
            return
    with suppress(AlreadyExists):
        began_empty = not list_root(store).steps
        store.put(ROOT_FILE, as_stored(ROOT_SCHEMA, _new(run, began_empty=began_empty)))


def run_for_seal(store: Store) -> str:
    """The id of the run of a root, which is recorded if it is not yet.

    It is read back: of two processes that record one at once, the last write counts. Cost: a
    read; once a listing, a write and a read more. Raises `StorageError`.
    """
    run = run_of(store)
    if run is None:
        put_sentinel(store)
        run = run_of(store)
    if run is None:  # the sentinel is damaged, or has none yet
        new = _new(None, began_empty=False)
        with suppress(OwnFileUnreadable):
            known = read_sentinel(store)
            new = new if known is None else {**known, "run": new["run"]}
        store.put(ROOT_FILE, as_stored(ROOT_SCHEMA, new), replace=True)
        run = run_of(store)
    return run or ""


def check_sentinel(store: Store) -> None:
    """Raise `StorageUnavailable` if a root that had a sentinel has none now.

    The storage is not mounted any more then, and what is written would go to the disk below
    the mount point. Cost: one listing.
    """
    if not has_sentinel(store):
        raise StorageUnavailable(
            f"{join_url(store.url, ROOT_FILE)} is gone: the storage is not mounted any more, or "
            "the root was emptied",
            next_command="findmnt --real" if store.folders is not None else None,
        )


def has_sentinel(store: Store) -> bool:
    """Whether a root has a sentinel, readable or not. Cost: one listing."""
    return any(entry.path == ROOT_FILE for entry in list_if_there(store, OWN_FOLDER))


def record_usable(store: Store, step: int, run: str | None = None) -> None:
    """Record once that a step of the root is usable; creates a missing sentinel.

    From then on the root never counts as that of a new run. Cost: a read, and once a write.
    """
    try:
        fields = read_sentinel(store)
    except OwnFileUnreadable:
        fields = None
    if fields is None or fields.get("usable_step") is None:
        fields = {**(fields or _new(run, began_empty=False)), "usable_step": step}
        store.put(ROOT_FILE, as_stored(ROOT_SCHEMA, fields), replace=True)


def _new(run: str | None, *, began_empty: bool) -> RootDocument:
    return {
        "tool": f"ckptctl {__version__}",
        "created_at": time_now(),
        "began_empty": began_empty,
        "run": run or token_hex(16),
    }


def read_history(store: Store) -> History:
    """The root's own record. Raises `StorageError` if it does not answer.

    Cost: one read, one listing, and one read per attempt, at most `_MAX_LEDGERS`; two or
    three more listings without a sentinel.
    """
    try:
        fields = read_sentinel(store)
        if fields is None:
            _check_absent(store, ROOT_FILE, "file")
    except OwnFileUnreadable as error:
        return History(True, doubt=f"{ROOT_FILE} cannot be read: {error.message}")
    step = None if fields is None else fields.get("usable_step")
    if step is not None:
        return History(True, held=f"{ROOT_FILE} records that step {step} was usable")
    held, doubt = _read_ledgers(store)
    doubt = doubt or _about_a_step(store)
    if fields is None:
        # The sentinel is written before anything else, so it existed and is gone.
        used = held is not None or doubt is not None or _is_used(store)
        return History(used, held, doubt or f"there is no {ROOT_FILE}")
    if doubt is None and not fields.get("began_empty"):
        doubt = f"{ROOT_FILE} records that it was not empty when ckptctl first used it"
    return History(True, held, doubt)


def resumed_from(store: Store, holder: str | None) -> frozenset[int]:
    """The steps that the attempt `holder`, and the newest attempt by name, resumed from.

    The report of a resume names it, or the ledger if the report is damaged. An attempt that
    ended before it resumed leaves neither; then the one before it counts. Raises
    `OwnFileUnreadable` if there is a record but none of it can be read. Cost: one listing,
    one read for each of the two; more if a report is damaged.
    """
    try:
        files = {base_name(entry.path) for entry in store.list_dir(ATTEMPTS_FOLDER)}
    except PathNotFound:
        return frozenset()
    except PathEscape as error:
        raise OwnFileUnreadable(error.message) from error
    by_name = {name.removesuffix(REPORT_SUFFIX) for name in files if name.endswith(REPORT_SUFFIX)}
    by_name |= {name.removesuffix(".jsonl") for name in files if name.endswith(".jsonl")}
    newest = sorted(by_name, reverse=True)[:_MAX_RESUMES]
    steps: set[int | None] = set()
    for attempts in ([holder] if holder in by_name else [], newest):
        for attempt in attempts:
            resumed = _resume_of(store, attempt, files)
            steps |= resumed
            if resumed:
                break
    return frozenset(step for step in steps if step is not None)


def _resume_of(store: Store, attempt: str, files: Collection[str]) -> AbstractSet[int | None]:
    """The step that an attempt resumed from, None for a fresh run; empty if it has not resumed."""
    from ckptctl.formats.own.ledger import ResumedLine, read_line, read_report  # few need them

    report, ledger = f"{attempt}{REPORT_SUFFIX}", f"{attempt}.jsonl"
    if report in files:
        with suppress(OwnFileUnreadable, PathNotFound):
            return {read_report(store, f"{ATTEMPTS_FOLDER}/{report}").step}
    path = f"{ATTEMPTS_FOLDER}/{ledger}"
    data = read_if_there(store, path, limit=_MAX_LEDGER) if ledger in files else None
    for line in (data or b"").splitlines():
        with suppress(OwnFileUnreadable):
            found = read_line(line)
            if isinstance(found, ResumedLine):
                return {found.step}
    if report in files:
        raise OwnFileUnreadable(f"{ATTEMPTS_FOLDER}/{report} cannot be read")
    return set()


def read_attempts(
    store: Store, *, last: int = MAX_ATTEMPTS, events: Collection[str] = ()
) -> Iterator[tuple[str, tuple[LedgerLine, ...]]]:
    """The newest attempts with their lines in order of time, oldest attempt first.

    With `events`, only the lines of these kinds are decoded. No decision depends on a single
    line: truncated lines and unreadable files are ignored. Attempts beyond `MAX_LEDGER_BYTES`
    are left out, the oldest first. Raises `StorageError` if the folder of the attempts cannot
    be listed. Cost: one listing, and one read per attempt.
    """
    try:
        entries = store.list_dir(ATTEMPTS_FOLDER)
    except (PathNotFound, PathEscape):
        return
    files: dict[str, list[FileInfo]] = {}
    for entry in entries:
        match = _OF_ATTEMPT.fullmatch(base_name(entry.path))
        if match and match["rest"] != REPORT_SUFFIX:
            files.setdefault(match["attempt"], []).append(entry)
    kept: list[str] = []
    n_bytes = 0
    for attempt in sorted(files, reverse=True)[:last]:
        n_bytes += sum(file.size for file in files[attempt])
        if kept and n_bytes > MAX_LEDGER_BYTES:
            break
        kept.append(attempt)
    words = [f'"{event}"'.encode() for event in events]
    yield from in_flight(lambda one: _lines(store, files[one], one, words), reversed(kept))


def _lines(
    store: Store, files: Iterable[FileInfo], attempt: str, words: Collection[bytes]
) -> tuple[LedgerLine, ...]:
    from ckptctl.formats.own.ledger import read_line

    lines: list[LedgerLine] = []
    for file in files:
        try:
            data = store.read(file.path, limit=_MAX_LEDGER)
        except StorageError:
            continue
        for each in data.splitlines():
            if words and not any(word in each for word in words):
                continue
            with suppress(OwnFileUnreadable):
                line = read_line(each)
                if line.attempt == attempt:
                    lines.append(line)
    return tuple(sorted(lines, key=lambda line: line.at or ""))


def _check_absent(store: Store, path: str, kind: str) -> None:
    """Raise `OwnFileUnreadable` if something other than the expected file exists there.

    For a folder in the place of a file, a store reports that the file does not exist.
    """
    folder, _, name = path.rpartition("/")
    try:
        entries = store.list_dir(folder)
    except PathNotFound:
        if folder:
            _check_absent(store, folder, "dir")
        return
    if any(base_name(one.path) == name and one.kind != kind for one in entries):
        raise OwnFileUnreadable(f"{path} is not a {'folder' if kind == 'dir' else 'regular file'}")


def _is_used(store: Store) -> bool:
    """Whether an attempt has taken the root over, or kept a ledger in it."""
    for folder in (FENCE_FOLDER, ATTEMPTS_FOLDER):
        with suppress(PathNotFound):
            if store.list_dir(folder):
                return True
    return False


def _about_a_step(store: Store) -> str | None:
    """What ckptctl keeps about a step that is gone: the marks of a file, a step moved aside."""
    for folder in (f"{OWN_FOLDER}/steps", ASIDE_FOLDER):
        with suppress(PathEscape):
            kept = [base_name(entry.path) for entry in list_if_there(store, folder)]
            there = {entry.path for entry in store.list_dir("")} if kept else ()
            for name in kept:
                if name not in there:
                    return f"{folder}/{name} is of a step that is gone"
    return None


def _read_ledgers(store: Store) -> tuple[str | None, str | None]:
    """`held` and `doubt` of the ledgers: only those of rank 0, which records saves and resumes."""
    try:
        entries = store.list_dir(ATTEMPTS_FOLDER)
    except PathEscape as error:
        return None, f"its ledgers cannot be read: {error.message}"
    except PathNotFound:
        try:
            _check_absent(store, ATTEMPTS_FOLDER, "dir")
        except OwnFileUnreadable as error:
            return None, f"its ledgers cannot be read: {error.message}"
        return None, None
    files = [entry.path for entry in entries]
    attempts = {
        match["attempt"]: None
        for path in files
        if (match := _OF_ATTEMPT.fullmatch(path.rpartition("/")[2]))
    }
    if len(attempts) > _MAX_LEDGERS:
        return None, f"it has {len(attempts):,} attempts, of which {_MAX_LEDGERS:,} are read"
    paths = [f"{ATTEMPTS_FOLDER}/{attempt}.jsonl" for attempt in sorted(attempts)]
    doubt = next((f"the ledger {path} is missing" for path in paths if path not in files), None)
    linked = next((entry.path for entry in entries if entry.kind == "link"), None)
    if linked is not None:
        return None, f"the ledger {linked} cannot be read: it is a link, which is not followed"
    there = [path for path in paths if path in files]
    for path, data in in_flight(partial(read_if_there, store, limit=_MAX_LEDGER), there):
        try:
            step = _step_in(data)
        except OwnFileUnreadable as error:
            doubt = f"the ledger {path} cannot be read: {error.message}"
            continue
        if step is not None:
            return f"the ledger {path} records step {step}", None
    return None, doubt


def _step_in(data: bytes | None) -> int | None:
    """A step that an attempt saved, resumed from or loaded; None without one.

    Raises `OwnFileUnreadable` for an empty ledger or an unreadable line.
    """
    from ckptctl.formats.own.ledger import FailedLine, ResumedLine, SavedLine, read_line

    if not data:
        raise OwnFileUnreadable("it is empty" if data is not None else "it is missing or too large")
    for line in data.splitlines():
        match read_line(line):
            case SavedLine(step=int(step)) | ResumedLine(step=int(step)):
                return step
            case FailedLine(step=int(step), phase="loading"):
                return step
    return None


_MAX_NUMBER = 9_999_999_999  # the digits of a token, and of `step_N.attempt-M`
_FENCE_SCHEMA = "ckptctl.fence/1"
_MAX_FENCE_BYTES = 64 << 10


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
            "host": os.uname().nodename,
            "pid": os.getpid(),
        }
        try:
            _tokens(store).add(number, as_stored(_FENCE_SCHEMA, fields))
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
        data = _tokens(store).read(number, _MAX_FENCE_BYTES)
        return read_back(data, _FENCE_SCHEMA, FenceDocument, max_objects=8)["attempt"]
    except (OwnFileUnreadable, PathNotFound, TooLarge):
        return None
