"""Start or continue a runbook, and report how it ended.

Opens the record of the run under the checkpoint root, and calls the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ckptctl.errors import AccessDenied, UsageError
from ckptctl.findings import EXIT_NONE_USABLE
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.own.run_events import MAX_TEXT, Event, OpenedEvent, ResumedEvent
from ckptctl.formatting import command_line
from ckptctl.model import ExitCode
from ckptctl.options import StorageOptions
from ckptctl.redaction import hide_words, words_of
from ckptctl.runbook.document import Runbook, Value, shown
from ckptctl.runbook.engine import (
    EXIT_DO_NOT_RESTART,
    EXIT_OVERRIDDEN,
    Engine,
    NoTerminal,
    Talk,
    who,
)
from ckptctl.runbook.executing import dropped_variables
from ckptctl.runbook.record import (
    Position,
    RunRecord,
    Unwritten,
    begun,
    is_argument,
    newest,
    position_of,
)
from ckptctl.runbook.transcript import TRANSCRIPT, transcript
from ckptctl.selection.empty_roots import check_empty, is_step_itself
from ckptctl.selection.history import has_sentinel
from ckptctl.selection.roots import list_root
from ckptctl.selection.targets import check_root_there
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store, parent_url

How = Literal["auto", "new", "continue", "dry"]
"""`auto` asks whether to continue an unfinished run, and starts a run if there
is none; `new` always starts one; `continue` continues the last one without asking, even if it
stopped; `dry` changes nothing."""


@dataclass(frozen=True, slots=True)
class Ran:
    """The result of a run of a runbook."""

    runbook: str
    """The name of the runbook."""
    run: str
    """The name of the run."""
    url: str | None
    """The folder of the record; null for a dry run."""
    exit_code: ExitCode
    finished: bool
    """Whether the run ended."""
    reason: str
    """Why it ended."""
    state: str
    """The current state."""
    step: str | None
    """The chosen step; null if none was chosen."""
    continued: bool
    """Whether an earlier run was continued."""
    events: tuple[Event, ...]
    """Every event, oldest first."""
    next_command: str | None
    """The command to run next; null if nothing is left to do."""


def run_runbook(
    book: Runbook,
    root: str,
    inputs: Mapping[str, str | Sequence[str]],
    talk: Talk,
    *,
    how: How = "auto",
    storage: StorageOptions = StorageOptions(),
) -> Ran:
    """Run a runbook on the checkpoint root `root`, from where its last run stopped.

    `inputs` are values by name. Raises `UsageError` for inputs that the page does not
    declare, `PathNotFound` if the root does not exist, `AccessDenied` if no record can be
    written, `RunUnreadable`, `TakenOver`, `NoTerminal`, and storage errors.
    """
    given = _checked_inputs(book, inputs)
    # A block would take the last line of a path for all of it.
    _check_text("ROOT", root, is_command=False)
    handed_on = _handed_on(storage, talk.columns)
    with open_store(root, storage) as store:
        _check_is_root(book, store)
        if dropped := dropped_variables():
            talk.report(
                f"not passed to the blocks: {', '.join(dropped)}; the page alone defines the checks"
            )
        if how == "dry":
            unwritten = Unwritten(store)
            _open(book, unwritten, root, given)
            position = Engine(book, unwritten, talk, handed_on).run()
            again = _next(book, root, given, talk, how, position)
            return _ran(unwritten, position, talk, again, n_found=0)
        found, record = _record(book, store, how, talk, given)
        if record is None:
            position = position_of(book, found.events, len(found.events))
            position.over = None
            again = _next(book, root, given, talk, how, position)
            return _ran(found, position, talk, again, n_found=len(found.events))
        n_found = len(record.events)
        try:
            _open(book, record, root, given)
            position = Engine(book, record, talk, handed_on, n_found).run()
            text = transcript(record.events).encode("utf-8", "backslashreplace")
            store.put(f"{record.folder}/{TRANSCRIPT}", text, replace=True)
        except AccessDenied as error:
            again = _called(book, root, given, talk)
            raise AccessDenied(
                f"{error.message}; a runbook writes its record under the root; --dry-run writes "
                "none",
                next_command=f"{again} --dry-run",
            ) from error
        again = _next(book, root, given, talk, how, position)
        return _ran(record, position, talk, again, n_found=n_found)


def _checked_inputs(book: Runbook, inputs: Mapping[str, str | Sequence[str]]) -> dict[str, Value]:
    """The inputs in the form that the page declares: one text, or the items of a list."""
    checked: dict[str, Value] = {}
    for name, value in inputs.items():
        declared = book.input(name)
        if declared is None:
            raise UsageError(
                f"the runbook {book.name} has no input {name!r}; it has "
                f"{', '.join(each.name for each in book.inputs)}",
                next_command=command_line("runbook", "show", book.name),
            )
        items = (value,) if isinstance(value, str) else tuple(value)
        if len(items) != 1 and not declared.is_list:
            raise UsageError(f"the input {name} takes one value, but {len(items)} were given")
        for item in items:
            _check_text(name, item, is_command=name in book.commands)
            # An empty text is no value, so that a script can pass on one that is not set.
            if item and (mistake := declared.mistake(item)) is not None:
                raise UsageError(
                    f"the input {name} is {item[:60]!r}, and must be {mistake}: {declared.meaning}",
                    next_command=command_line("runbook", "show", book.name),
                )
            if name in book.commands:
                hide_words(words_of(item))
        checked[name] = items if declared.is_list else items[0]
    return checked


def _check_text(name: str, text: str, *, is_command: bool) -> None:
    """Refuse a text that could not be taken back from the record of the run."""
    if "\0" in text or len(text) > MAX_TEXT:
        raise UsageError(
            f"the input {name} contains a NUL character or more than {MAX_TEXT:,} characters"
        )
    # Blocks pass it to commands, which would parse it as an option.
    if text.startswith("-") and not is_command:
        raise UsageError(f"the input {name} is {text[:60]!r}; a value cannot begin with a hyphen")
    if not (is_command or is_argument(text)):
        raise UsageError(
            f"the input {name} is {text[:60]!r}; a value cannot contain a line break or another "
            "control character"
        )


def _check_is_root(book: Runbook, store: Store) -> None:
    """Raise for an address under which no record may be written: not there, a file, a step."""
    listing = list_root(store)
    check_root_there(store, listing)
    if listing.steps or has_sentinel(store):
        return
    if is_step_itself(store, listing):
        raise UsageError(
            f"{store.url} is a step itself, not a root that holds steps; a runbook writes its "
            "record under the root",
            next_command=command_line("runbook", "run", book.name, parent_url(store.url)),
        )
    if not listing.known:  # else the runbook itself states what the content means
        check_empty(store, listing)


def _record(
    book: Runbook, store: Store, how: How, talk: Talk, given: Mapping[str, Value]
) -> tuple[RunRecord, RunRecord | None]:
    """The existing run or a new one, and the record to write to; None to leave."""
    new = begun(store, book.name)
    try:
        last = None if how == "new" else newest(store, book.name)
    except AccessDenied as error:
        raise AccessDenied(
            f"{error.message}; only the account that runs a runbook can read its record; --new "
            "starts another run",
            next_command=f"{_called(book, store.url, given, talk)} --new",
        ) from error
    if how == "continue" and last is None:
        raise UsageError(
            f"{store.url}: no run of the runbook {book.name} was started here",
            next_command=command_line("runbook", "run", book.name, store.url),
        )
    if last is None or (last.is_over and how == "auto"):
        return new, new
    if last.opened.page != _digest(book):
        raise UsageError(
            f"the page of the runbook {book.name} has changed since the run {last.name} was "
            "started; its position can no longer be determined",
            next_command=command_line("runbook", "run", book.name, store.url, "--new"),
        )
    opened = last.opened
    dates = f"started by {opened.by} at {opened.at}, last entry at {last.events[-1].at}"
    talk.report(f"a run of {book.name} was found under this root: {last.name}, {dates}")
    taken = _taken(book, last, given)
    talk.report(
        f"its record sets {', '.join(taken)}; --set NAME=VALUE changes one"
        if taken
        else "its record sets no input"
    )
    if how == "auto":
        continues = _continues(book, last, talk, given)
        return last, None if continues is None else last if continues else new
    _check_unattended(book, last, talk, given)
    return last, last


def _taken(book: Runbook, record: RunRecord, given: Mapping[str, Value]) -> list[str]:
    """The inputs that a run would take from its record, formatted."""
    position = position_of(book, record.events, len(record.events))
    names = [each.name for each in book.inputs if each.name != "ROOT"]
    return [
        f"{name}={shown(position.variables[name])}"
        for name in names
        if name in position.found and name not in given and position.variables[name]
    ]


def _continues(
    book: Runbook, record: RunRecord, talk: Talk, given: Mapping[str, Value]
) -> bool | None:
    try:
        return talk.continues(record.name, record.opened.by)
    except NoTerminal as error:
        again = _called(book, record.store.url, given, talk)
        raise NoTerminal(error.message, next_command=f"{again} --continue") from error


def _check_unattended(
    book: Runbook, record: RunRecord, talk: Talk, given: Mapping[str, Value]
) -> None:
    """Refuse to take an input with a default from a record if nobody can be asked.

    `LEVEL=listing` in a record would weaken the checks of an unattended run.
    """
    if talk.attended:
        return
    position = position_of(book, record.events, len(record.events))
    for each in book.inputs:
        if each.default is not None and each.name in position.found and each.name not in given:
            raise NoTerminal(
                f"the record of the run {record.name} gives {each.name}="
                f"{shown(position.variables[each.name])}, and the page {each.default!r}; "
                "with --yes a recorded value is not used; give it with --set",
                next_command=_called(
                    book, record.store.url, {**given, each.name: each.default}, talk
                )
                + " --continue",
            )


def _open(book: Runbook, record: RunRecord, root: str, inputs: Mapping[str, Value]) -> None:
    given = {**inputs, "ROOT": root}
    if record.events:
        record.add(ResumedEvent(by=who(), inputs=given))
        return
    defaults = {each.name: each.default for each in book.inputs if each.default is not None}
    record.add(
        OpenedEvent(
            by=who(),
            runbook=book.name,
            title=book.title,
            page=_digest(book),
            inputs={**defaults, **given},
        )
    )


def _digest(book: Runbook) -> str:
    return sha256_of(book.text.encode())


def _handed_on(storage: StorageOptions, columns: int | None) -> dict[str, str]:
    """Variables with which the commands of the blocks reach the storage, and the output width."""
    width = {} if columns is None else {"CKPTCTL_COLUMNS": str(columns)}
    return {**width, **storage.variables()}


def _called(book: Runbook, root: str, inputs: Mapping[str, Value], talk: Talk) -> str:
    """The command with which the runbook was called."""
    return command_line(*_words(book.name, root, inputs), *talk.repeated)


_OF_A_LOG = (30, 31, 32)
"""Exit codes about the resumed job, after which this run goes on and not another command."""
_ROOTS = ("OTHER_ROOTS", "OPTIONAL_ROOTS")


def _words(called: str, root: str, inputs: Mapping[str, Value]) -> list[str]:
    """The arguments that run a runbook on these roots with these inputs."""
    words = ["runbook", "run", called, root]
    for name, value in sorted(inputs.items(), key=lambda each: each[0] != "OTHER_ROOTS"):
        for item in (value,) if isinstance(value, str) else value:
            if name == "OTHER_ROOTS":
                words.append(item)
            elif name == "OPTIONAL_ROOTS":
                words += ["--optional-root", item]
            else:
                words += ["--set", f"{name}={item}"]
    return words


_STEP_HOLDS = (0, 31, 32, EXIT_OVERRIDDEN, None)
"""Exit codes of a run after which the chosen step remains verified; None where it is unfinished."""


def _next(
    book: Runbook,
    root: str,
    given: Mapping[str, Value],
    talk: Talk,
    how: How,
    position: Position,
) -> str | None:
    """The next command after a run that ended so; never the command that just ran."""
    over = position.over
    if over in (0, EXIT_OVERRIDDEN):
        return None
    if position.leads:
        roots = {name: position.variables[name] for name in _ROOTS if name in position.variables}
        return command_line(*_words(position.leads, root, roots))
    if position.advice is not None and over not in _OF_A_LOG:
        return position.advice
    if over == UsageError.exit_code:
        return command_line("runbook", "show", book.name)
    undecided = over is not None and position.undecided
    # The operator fills in what is missing, such as a log.
    missing = {name: name.rpartition("_")[2] for name in position.missing if over is not None}
    if over == EXIT_NONE_USABLE and not (undecided or missing):
        # No command makes a step usable: a person looks for one elsewhere.
        return command_line("explain", EXIT_NONE_USABLE)
    if over is not None:
        given = {name: value for name, value in given.items() if name != position.block.decides}
    # Consent to a change is not a decision: without --yes a person is asked.
    dropped = {"--dry-run", *(["--yes"] if undecided else [])}
    repeated = [word for word in talk.repeated if word not in dropped]
    if how == "dry":
        # There is no record, so the inputs must be given again.
        return command_line(*_words(book.name, root, given), *repeated)
    if how == "continue" and over is not None and not missing and repeated == list(talk.repeated):
        return None
    # With --yes nothing is taken from the record, so it must be given again.
    if "--yes" not in repeated:
        given = {name: value for name, value in given.items() if name in _ROOTS}
    return command_line(*_words(book.name, root, {**given, **missing}), *repeated, "--continue")


def _ran(
    record: RunRecord, position: Position, talk: Talk, again: str | None, *, n_found: int
) -> Ran:
    over = position.over
    return Ran(
        position.book.name,
        record.name,
        None if isinstance(record, Unwritten) else record.url,
        EXIT_DO_NOT_RESTART if over is None else over,
        over is not None,
        "left by the operator" if over is None else position.because,
        position.state,
        position.step(attended=talk.attended) if over in _STEP_HOLDS else None,
        n_found > 0,
        tuple(record.events),
        again,
    )
