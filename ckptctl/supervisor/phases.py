"""Read a job file, and run the phases of a job one after the other.

A phase begins only after the one before it was done. Each has its own command, budget and
state, so that a later invocation continues with the first phase that is not done. A phase that
only validates has nothing to resume from: it starts again from its beginning.
"""

from __future__ import annotations

import importlib
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ckptctl.errors import (
    MissingExtra,
    OwnFileUnreadable,
    PathNotFound,
    StorageUnavailable,
    UsageError,
)
from ckptctl.storage.opening import is_local, join_url
from ckptctl.storage.shared_places import open_named
from ckptctl.supervisor.options import RunOptions
from ckptctl.supervisor.restarting import supervise
from ckptctl.supervisor.results import Attempt, Decision, Supervised
from ckptctl.supervisor.state import STATE_FOLDER, stored_state

_MAX_BYTES = 64 << 10
_PAUSE_S = 10.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_FIELDS = {"name": str, "command": list, "root": str, "max-restarts": int, "log": list}


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a job; `root` and `max_restarts` are None where the command line decides."""

    name: str
    command: tuple[str, ...]
    root: str | None = None
    max_restarts: int | None = None
    logs: tuple[str, ...] = ()


def read_job(path: str) -> tuple[Phase, ...]:
    """The phases of a job file in order; raises `UsageError` where it is not one.

    A job file is TOML with a table `[[phase]]` for each phase: `name`, `command` (a list of
    words), and optionally `root`, `max-restarts` and `log` (a list of files).
    """
    tables = _parsed(path)
    phases = [_phase(path, n, table) for n, table in enumerate(tables, 1)]
    names = [phase.name for phase in phases]
    if len(set(names)) < len(names):
        raise UsageError(f"{path}: two phases have the same name")
    return tuple(phases)


def _parsed(path: str) -> list[Any]:
    try:
        tomllib = importlib.import_module("tomllib")
    except ImportError as error:
        raise MissingExtra("--job needs Python 3.11 or later, which reads TOML") from error
    try:
        with os.fdopen(open_named(path), "rb") as file:
            data = file.read(_MAX_BYTES + 1)
        document = tomllib.loads(data.decode("utf-8")) if len(data) <= _MAX_BYTES else {}
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not TOML: {str(error)[:200]}") from error
    tables = document.get("phase")
    if not isinstance(tables, list) or not tables or document.keys() != {"phase"}:
        raise UsageError(f"{path}: a job file holds one table [[phase]] for each phase")
    return tables


def _phase(path: str, n: int, table: object) -> Phase:
    where = f"{path}, phase {n}"
    if not isinstance(table, dict):
        raise UsageError(f"{where}: it is no table")
    for field, value in table.items():
        kind = _FIELDS.get(field)
        if kind is None:
            raise UsageError(f"{where}: {field!r} is none of {', '.join(_FIELDS)}")
        words = kind is not list or all(isinstance(each, str) for each in value)
        if type(value) is not kind or not words:
            what = {str: "a string", int: "an integer", list: "a list of strings"}[kind]
            raise UsageError(f"{where}: {field} must be {what}")
    name, command = table.get("name", ""), table.get("command", [])
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{where}: the name {name!r} is the name of a folder: letters, digits, '.', '_' and "
            "'-', 64 at most"
        )
    if not command:
        raise UsageError(f"{where}: the command is missing")
    if table.get("max-restarts", 0) < 0:
        raise UsageError(f"{where}: max-restarts must be 0 or more")
    return Phase(
        name,
        tuple(command),
        table.get("root"),
        table.get("max-restarts"),
        tuple(table.get("log", ())),
    )


def run_phases(
    phases: Sequence[Phase], root: str | Sequence[str], options: RunOptions
) -> Supervised:
    """Run the phases in order, each as `keep_running` does, until one is not done.

    A phase that an earlier call saw done is passed over. The result holds the attempts of
    all phases that ran, and the end of the last. Logs go to `log_dir`, or below the first root;
    a root in an object store needs `log_dir`. A reset of the budget is for the first phase that
    is not done.
    """
    attempts: tuple[Attempt, ...] = ()
    found: Supervised | None = None
    for phase in phases:
        roots = phase.root or root
        first = roots if isinstance(roots, str) else roots[0]
        own = _of_phase(phase, first, options)
        if _is_done(first, own):
            options.tell(f"{phase.name}: done before")
            continue
        found = supervise(phase.command, roots, own)
        options = replace(options, budget=replace(options.budget, reset_budget=None))
        attempts += found.attempts
        message = f"{phase.name}: {found.message}"
        if found.exit_code:
            return replace(found, attempts=attempts, message=message)
        options.tell(message)
    if found is None:
        first = root if isinstance(root, str) else root[0]
        return Supervised((), first, (), (), "all phases were done before", 0, None)
    return replace(found, attempts=attempts, message=f"all {len(phases)} phases are done")


def _of_phase(phase: Phase, root: str, options: RunOptions) -> RunOptions:
    """The options of a phase whose first root is `root`."""
    output, budget = options.output, options.budget
    if output.log_dir is None and not is_local(root):
        raise UsageError(
            f"{root}: logs are not written to an object store", instead="--log-dir DIR"
        )
    if phase.max_restarts is not None:
        budget = replace(budget, max_restarts=phase.max_restarts)
    output = replace(
        output,
        phase=phase.name,
        logs=(*output.logs, *phase.logs),
        log_dir=output.log_dir or join_url(root, f"{STATE_FOLDER}/logs"),
    )
    return replace(options, output=output, budget=budget)


def _is_done(root: str, options: RunOptions) -> bool:
    """Whether the last attempt of a phase succeeded; not where its state is missing or damaged.

    Waits for a storage that does not answer, and raises `StorageError` in the end: the phase
    may be done.
    """
    until_s = time.monotonic() + options.wait_s
    while True:
        try:
            with stored_state(root, options) as revisions:
                state = revisions.newest()
        except (PathNotFound, OwnFileUnreadable):
            return False
        except StorageUnavailable as error:
            if time.monotonic() >= until_s:
                raise
            options.tell(f"waiting for {root}, at most {options.wait_s:.0f} s: {error.message}")
            time.sleep(_PAUSE_S)
        else:
            attempts = state["attempts"] if state else []
            return bool(attempts) and attempts[-1]["decision"] == Decision.DONE.value
