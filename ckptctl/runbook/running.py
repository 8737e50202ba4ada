"""How is a runbook begun, gone on with, and left?

Opens the record of the run under the checkpoint root, keeps others from doing
the same at the same time, and hands over to the engine. The answer says how the
run was left and where its record lies.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckptctl.errors import AccessDenied, PathNotFound, UsageError
from ckptctl.runbook.document import Runbook
from ckptctl.runbook.engine import Left, Talk, proceed
from ckptctl.runbook.holding import held, myself
from ckptctl.runbook.record import Event, Record, Unwritten, begun, newest
from ckptctl.runbook.transcript import transcript
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store, parent_url

How = Literal["auto", "new", "continue", "dry"]
"""`auto` goes on with a run that was left in the middle, and begins one otherwise; `new`
begins one always; `continue` goes on also with one that stopped; `dry` changes nothing."""


@dataclass(frozen=True, slots=True)
class Ran:
    """How a run went: `over` says that it came to an end, `exit_code` to which.

    `url` is the folder of its record, None for a dry run. `step` is the step that it
    chose, if it chose one. `went_on` says that others, or earlier calls, had begun it.
    """

    runbook: str
    run: str
    url: str | None
    exit_code: int
    over: bool
    because: str
    state: str
    step: str | None
    went_on: bool
    events: tuple[Event, ...]
    next_command: str | None


def run_runbook(
    book: Runbook,
    root: str,
    inputs: Mapping[str, str],
    talk: Talk,
    *,
    how: How = "auto",
    take_over: bool = False,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
    columns: int | None = None,
) -> Ran:
    """Lead through a runbook on the checkpoint root `root`, from where the run is.

    `inputs` are values by name; `columns` is how wide the terminal is that `talk` writes to.
    Raises `UsageError` for inputs that the page does not know, `PathNotFound` where the root
    is not there, `AccessDenied` where no record can be kept, `RunHeld` where another person
    is at the run, `TakenOver`, `NobodyToAsk`, and storage errors.
    """
    _check_inputs(book, inputs)
    handed_on = _handed_on(storage_options, endpoint_url, columns)
    with open_store(
        root, storage_options=storage_options, endpoint_url=endpoint_url, timeout_s=timeout_s
    ) as store:
        # A root that is not there must not be made by looking for it.
        _check_there(store)
        record, went_on = _record(book, store, how)
        if how == "dry":
            _open(book, record, root, inputs, went_on=False)
            left = proceed(book, record, talk, handed_on)
            return _ran(book, record, left, root, inputs, went_on=False)
        try:
            with held(record, take_over=take_over):
                _open(book, record, root, inputs, went_on=went_on)
                left = proceed(book, record, talk, handed_on)
                _write_transcript(record, left)
        except AccessDenied as error:
            again = _called(book, root, inputs)
            raise AccessDenied(
                f"{error.message}; a runbook keeps its record under the root, --dry-run keeps none",
                next_command=f"{again} --dry-run",
            ) from error
        return _ran(book, record, left, root, inputs, went_on=went_on)


def _write_transcript(record: Record, left: Left) -> None:
    step = left.variables.get("STEP")
    for name, text in transcript(record.events, step).items():
        record.store.put(f"{record.folder}/{name}", text.encode(), replace=True)


def _check_inputs(book: Runbook, inputs: Mapping[str, str]) -> None:
    known = [given.name for given in book.inputs]
    for name in inputs:
        if name not in known:
            raise UsageError(
                f"the runbook {book.name} has no input {name!r}; it has {', '.join(known)}",
                next_command=f"ckptctl runbook show {shlex.quote(book.called)}",
            )


def _check_there(store: Store) -> None:
    try:
        store.list_dir()
    except PathNotFound as error:
        raise PathNotFound(
            f"{error.message}; a runbook keeps its record under the checkpoint root",
            next_command=f"ckptctl scan {shlex.quote(parent_url(store.url))}",
        ) from error


def _record(book: Runbook, store: Store, how: How) -> tuple[Record, bool]:
    """The record to write to, and whether the run had begun before."""
    if how == "dry":
        return Unwritten(store), False
    last = None if how == "new" else newest(store, book.name)
    if how == "continue" and last is None:
        raise UsageError(
            f"{store.url}: no run of the runbook {book.name} was begun here",
            next_command=shlex.join(["ckptctl", "runbook", "run", book.called, store.url]),
        )
    if last is None or not last.events or (last.is_over and how == "auto"):
        return begun(store, book.name), False
    _check_page(book, last)
    return last, True


def _check_page(book: Runbook, record: Record) -> None:
    if record.events[0].get("page") != _digest(book):
        raise UsageError(
            f"the page of the runbook {book.name} has changed since the run {record.name} began, "
            "so that its record no longer says where it is",
            next_command=shlex.join(
                ["ckptctl", "runbook", "run", book.called, record.store.url, "--new"]
            ),
        )


def _open(
    book: Runbook, record: Record, root: str, inputs: Mapping[str, str], *, went_on: bool
) -> None:
    given = {**inputs, "ROOT": root}
    me = myself()
    who = f"{me.by}@{me.host}"
    if went_on:
        record.add("resumed", by=who, inputs=given)
        return
    defaults = {each.name: each.default for each in book.inputs if each.default is not None}
    record.add(
        "opened",
        by=who,
        runbook=book.name,
        title=book.title,
        page=_digest(book),
        inputs={**defaults, **given},
    )


def _digest(book: Runbook) -> str:
    return hashlib.sha256(book.text.encode()).hexdigest()


def _handed_on(
    storage_options: Mapping[str, object] | None, endpoint_url: str | None, columns: int | None
) -> dict[str, str]:
    """How the commands of the blocks reach the same storage, and how wide they may write."""
    import json

    found: dict[str, str] = {}
    if columns is not None:
        found["CKPTCTL_COLUMNS"] = str(columns)
    if endpoint_url is not None:
        found["CKPTCTL_ENDPOINT_URL"] = endpoint_url
    if storage_options:
        pairs = (
            f"{name}={json.dumps(value, separators=(',', ':'))}"
            for name, value in storage_options.items()
        )
        found["CKPTCTL_STORAGE_OPTION"] = " ".join(pairs)
    return found


def _called(book: Runbook, root: str, inputs: Mapping[str, str]) -> str:
    """The command that runs a runbook."""
    words = ["ckptctl", "runbook", "run", book.called, root]
    for name, value in inputs.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def _ran(
    book: Runbook,
    record: Record,
    left: Left,
    root: str,
    inputs: Mapping[str, str],
    *,
    went_on: bool,
) -> Ran:
    dry = isinstance(record, Unwritten)
    # Of a dry run nobody has a record: what it was given is to be given again.
    again = _called(book, root, inputs if dry else {})
    finished = left.over and left.exit_code == 0
    return Ran(
        book.name,
        record.name,
        None if dry else record.url,
        left.exit_code,
        left.over,
        left.because,
        left.state,
        left.variables.get("STEP") or None,
        went_on,
        tuple(record.events),
        None if finished else f"{again} --continue" if left.over and not dry else again,
    )
