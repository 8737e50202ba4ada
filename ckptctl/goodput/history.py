"""Report what the attempts of a run, or of several, did and what they cost."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ckptctl.errors import CkptctlError, OptionError, UsageError
from ckptctl.formatting import counted, duration, percent
from ckptctl.goodput.records import read_records
from ckptctl.goodput.timeline import Goodput, PastAttempt, attempts_of, goodput_of
from ckptctl.model import ExitCode, Message, NextCommand
from ckptctl.options import StorageKeywords, StorageOptions, options_from
from ckptctl.selection.empty_roots import check_has_steps
from ckptctl.selection.roots import list_root
from ckptctl.storage.opening import open_store

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True, slots=True)
class RootHistory:
    """The history of one root of several."""

    root: str
    """Its address."""
    goodput: Goodput | None
    """What became of its time; null where it could not be read."""
    warnings: tuple[str, ...]
    """What of its record could not be read, and why."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """The attempts of one run or several, and how their time was spent."""

    attempts: tuple[PastAttempt, ...]
    """Every attempt, root by root, the oldest first."""
    goodput: Goodput
    """How the time of all of them was spent; the sum over several roots."""
    roots: tuple[RootHistory, ...]
    """The roots, in the order in which they were given."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand


def run_history(
    *roots: str,
    state: str | None = None,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> RunHistory:
    """The attempts of one run or several, and how their time was spent.

    Reads the ledgers that `ckptctl.train` keeps in a root, and the state of `ckptctl run`; either
    is enough. `state` is the folder or URL where `run --state` kept it. Of several roots, one
    that cannot be read does not keep the others from being reported: the exit code is its.

    Raises `UsageError` without a root, and the error of a single root that cannot be read.
    """
    if not roots:
        raise UsageError("the root of a run is missing", next_command="ckptctl history ROOT")
    if state is not None and len(roots) > 1:
        raise OptionError("--state", "is the state of one root; give one", without=("--state",))
    storage = options_from(keywords, storage)
    attempts: list[PastAttempt] = []
    histories: list[RootHistory] = []
    exit_code = 0
    for root in roots:
        try:
            own, warnings = _read(root, state, storage)
        except CkptctlError as error:
            if len(roots) == 1:
                raise
            exit_code = max(exit_code, error.exit_code)
            histories.append(RootHistory(root, None, (error.message,)))
            continue
        attempts += own
        histories.append(RootHistory(root, goodput_of(own), tuple(warnings)))
    goodput = goodput_of(attempts)
    return RunHistory(
        attempts=tuple(attempts),
        goodput=goodput,
        roots=tuple(histories),
        message="; ".join(_message(attempts, goodput)),
        exit_code=exit_code,
        next_command=None,
    )


def _read(
    root: str, state: str | None, storage: StorageOptions
) -> tuple[tuple[PastAttempt, ...], list[str]]:
    with ExitStack() as stack:
        store = stack.enter_context(open_store(root, storage))
        kept = None if state is None else stack.enter_context(open_store(state, storage))
        records, warnings = read_records(store, kept, time.time())
        if not records:
            # A wrong path is an error; a root without a record is not.
            check_has_steps(store, list_root(store))
    return attempts_of(root, records), warnings


def _message(attempts: list[PastAttempt], goodput: Goodput) -> Iterator[str]:
    if not attempts:
        yield "no attempt is recorded: ckptctl.train and ckptctl run record them"
        return
    yield counted(len(attempts), "attempt") + f" in {duration(goodput.elapsed_s, digits=3)}"
    yield counted(goodput.disruptions, "disruption")
    share = goodput.goodput
    yield "goodput unknown" if share is None else f"goodput {percent(share)}"
