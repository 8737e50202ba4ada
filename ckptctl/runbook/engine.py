"""Run a runbook: open or continue its record, then follow the tables of the page.

`Position` is where a run is, computed from its recorded events, so that an interrupted run
continues where it stopped. `executing` runs commands; the caller's `Talk` informs and asks
the operator.

A record is untrusted. An operator confirms a command that is an input (`eval "$RESUME"`)
before it runs with a recorded value, and what blocks set is determined again before such a
command uses it.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from ckptctl.errors import AccessDenied, CkptctlError, UsageError
from ckptctl.findings import EXIT_NONE_USABLE
from ckptctl.formats.digests import sha256_of
from ckptctl.formats.own.files import as_fields
from ckptctl.formats.own.run_events import (
    MAX_TEXT,
    BackEvent,
    BeganEvent,
    DecidedEvent,
    EndedEvent,
    Event,
    FinishedEvent,
    OpenedEvent,
    ResumedEvent,
)
from ckptctl.formatting import command_line
from ckptctl.model import ExitCode
from ckptctl.options import StorageOptions
from ckptctl.redaction import hide_words, words_of
from ckptctl.runbook.document import (
    DONE,
    STOP,
    Block,
    Input,
    Outcome,
    Runbook,
    State,
    Value,
    shown,
    used_names,
)
from ckptctl.runbook.executing import CommandResult, as_typed, dropped_variables, execute
from ckptctl.runbook.record import (
    TRANSCRIPT,
    Position,
    RunRecord,
    Unwritten,
    begun,
    is_argument,
    newest,
    position_of,
    transcript,
)
from ckptctl.selection.empty_roots import check_empty, is_step_itself
from ckptctl.selection.history import has_sentinel
from ckptctl.selection.marking import user_name
from ckptctl.selection.roots import list_root
from ckptctl.selection.targets import SeenRoots, check_root_there
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import local_path, open_store, parent_url

_ASSUMED = "dry run"
_LEFT = "left"

MAX_BLOCKS = 200
"""A run that has executed more blocks than this is stopped."""

EXIT_DO_NOT_RESTART = 93
EXIT_OVERRIDDEN = 35
"""A run that reached its end with a decision against what a check found."""


class NoTerminal(UsageError, code="runbook.nobody-to-ask"):
    """A decision is needed, but no terminal is attached."""


class Talk(Protocol):
    """How a run informs and asks its operator."""

    @property
    def attended(self) -> bool:
        """Whether a person can be asked."""

    @property
    def assumes(self) -> bool:
        """Whether this is a dry run, which assumes the decisions that the page expects."""

    @property
    def repeated(self) -> Sequence[str]:
        """The options of this call that a next command must repeat."""

    @property
    def columns(self) -> int | None:
        """The width of a block's output; None if unknown."""

    def report(self, text: str) -> None:
        """Report a fact about the run that belongs to no block."""

    def continues(self, run: str, begun: str) -> bool | None:
        """Whether to continue the unfinished run that was found; None to leave.

        False starts a new run. Raises `NoTerminal`.
        """

    def entering(self, state: State) -> None:
        """A state begins."""

    def about_to(self, block: Block, command: str | None, values: Mapping[str, Value]) -> None:
        """A block is about to run, or would be in a dry run.

        `command` is what bash makes of it, None if it is more than one simple command;
        `values` are those of the names in it.
        """

    def silent(self, waited_s: float) -> None:
        """The command of the block has run for so long, and printed nothing for a while."""

    def printed(self, text: str) -> None:
        """The command printed a line, on standard output or standard error."""

    def ended(self, block: Block, outcome: Outcome, exit_code: int | None) -> None:
        """A block ended or was not run (`exit_code` is None); `outcome` follows."""

    def decided(self, block: Block, decision: Input) -> str | None:
        """The person's decision for a block that needs one; empty for no, None to leave the run.

        Raises `NoTerminal`.
        """

    def asked(self, wanted: Input, suggestion: str | None) -> Value | None:
        """The value of an input that the next block needs; empty for none, None to leave the run.

        Called only where a person can be asked.
        """

    def may(self, block: Block, *, again: bool, found: Sequence[str]) -> bool | None:
        """Whether the block that was just shown may change something; None to leave the run.

        `again` means that the command was started before and its end is unknown. `found`
        are the names whose values come from an existing record, not from this call. Raises
        `NoTerminal`.
        """


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
    call = _Invocation(book, root, _checked_inputs(book, inputs), talk, how)
    # A block would take the last line of a path for all of it.
    _check_text("ROOT", root, is_command=False)
    with open_store(root, storage) as store:
        _check_is_root(book, store)
        if dropped := dropped_variables():
            talk.report(
                f"not passed to the blocks: {', '.join(dropped)}; the page alone defines the checks"
            )
        record, goes_on = (Unwritten(store), True) if how == "dry" else call.record(store)
        n_found = len(record.events)
        if not goes_on:
            position = position_of(book, record.events, n_found)
            position.over = None
            return call.result(record, position, n_found)
        try:
            call.open(record)
            handed_on = _handed_on(storage, talk.columns)
            position = Engine(book, record, talk, handed_on, n_found).run()
            if how != "dry":
                text = transcript(record.events).encode("utf-8", "backslashreplace")
                store.put(f"{record.folder}/{TRANSCRIPT}", text, replace=True)
        except AccessDenied as error:
            if how == "dry":
                raise
            raise AccessDenied(
                f"{error.message}; a runbook writes its record under the root; --dry-run writes "
                "none",
                next_command=f"{call.again(root)} --dry-run",
            ) from error
        return call.result(record, position, n_found)


def _checked_inputs(book: Runbook, inputs: Mapping[str, str | Sequence[str]]) -> dict[str, Value]:
    checked: dict[str, Value] = {}
    for name, value in inputs.items():
        declared = book.input(name)
        if declared is None:
            raise UsageError(
                f"the runbook {book.name} has no input {name!r}; it has "
                f"{', '.join(declared.name for declared in book.inputs)}",
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


_OF_A_LOG = (30, 31, 32)
"""Exit codes about the resumed job, after which this run goes on and not another command."""
_ROOTS = ("OTHER_ROOTS", "OPTIONAL_ROOTS")
_STEP_HOLDS = (0, 31, 32, EXIT_OVERRIDDEN, None)
"""Exit codes of a run after which the chosen step remains verified; None where it is unfinished."""


@dataclass(frozen=True, slots=True)
class _Invocation:
    """One call of a runbook: its page, its root and its inputs as they were given."""

    book: Runbook
    root: str
    given: Mapping[str, Value]
    talk: Talk
    how: How

    def again(self, root: str, **changed: Value) -> str:
        """The command of this call."""
        return command_line(
            *_words(self.book.name, root, {**self.given, **changed}), *self.talk.repeated
        )

    def record(self, store: Store) -> tuple[RunRecord, bool]:
        """The record to write to, of the run that was found or of a new one; False to leave."""
        book, talk, how = self.book, self.talk, self.how
        new = begun(store, book.name)
        try:
            last = None if how == "new" else newest(store, book.name)
        except AccessDenied as error:
            raise AccessDenied(
                f"{error.message}; only the account that runs a runbook can read its record; --new "
                "starts another run",
                next_command=f"{self.again(store.url)} --new",
            ) from error
        if how == "continue" and last is None:
            raise UsageError(
                f"{store.url}: no run of the runbook {book.name} was started here",
                next_command=command_line("runbook", "run", book.name, store.url),
            )
        if last is None or (last.is_over and how == "auto"):
            return new, True
        opened = last.opened
        if opened.page != _digest(book):
            raise UsageError(
                f"the page of the runbook {book.name} has changed since the run {last.name} was "
                "started; its position can no longer be determined",
                next_command=command_line("runbook", "run", book.name, store.url, "--new"),
            )
        dates = f"started by {opened.by} at {opened.at}, last entry at {last.events[-1].at}"
        talk.report(f"a run of {book.name} was found under this root: {last.name}, {dates}")
        position = position_of(book, last.events, len(last.events))
        recorded = {
            declared: position.variables[declared.name]
            for declared in book.inputs
            if declared.name in position.found and declared.name not in self.given
        }
        taken = [
            f"{declared.name}={shown(value)}"
            for declared, value in recorded.items()
            if value and declared.name != "ROOT"
        ]
        talk.report(
            f"its record sets {', '.join(taken)}; --set NAME=VALUE changes one"
            if taken
            else "its record sets no input"
        )
        if how == "auto":
            try:
                continues = talk.continues(last.name, opened.by)
            except NoTerminal as error:
                again = f"{self.again(store.url)} --continue"
                raise NoTerminal(error.message, next_command=again) from error
            return (new, True) if continues is False else (last, continues is not None)
        for declared, value in recorded.items() if not talk.attended else ():
            # `LEVEL=listing` in a record would weaken the checks of an unattended run.
            if declared.default is not None:
                name, usual = declared.name, declared.default
                raise NoTerminal(
                    f"the record of the run {last.name} gives {name}={shown(value)}, and the page "
                    f"{usual!r}; with --yes a recorded value is not used; give it with --set",
                    next_command=f"{self.again(store.url, **{name: usual})} --continue",
                )
        return last, True

    def open(self, record: RunRecord) -> None:
        """Record that the run begins or goes on, with the inputs of this call."""
        book, given = self.book, {**self.given, "ROOT": self.root}
        if record.events:
            record.add(ResumedEvent(by=who(), inputs=given))
            return
        defaults = {
            declared.name: declared.default
            for declared in book.inputs
            if declared.default is not None
        }
        record.add(
            OpenedEvent(
                by=who(),
                runbook=book.name,
                title=book.title,
                page=_digest(book),
                inputs={**defaults, **given},
            )
        )

    def next(self, position: Position) -> str | None:
        """The next command after a run that ended so; never the command that just ran."""
        book, root, given, over = self.book, self.root, dict(self.given), position.over
        if over in (0, EXIT_OVERRIDDEN):
            return None
        if position.leads:
            roots = {
                name: position.variables[name] for name in _ROOTS if name in position.variables
            }
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
            given.pop(position.block.decides or "", None)
        # Consent to a change is not a decision: without --yes a person is asked.
        dropped = {"--dry-run", *(["--yes"] if undecided else [])}
        repeated = [word for word in self.talk.repeated if word not in dropped]
        if self.how == "dry":
            # There is no record, so the inputs must be given again.
            return command_line(*_words(book.name, root, given), *repeated)
        is_same = self.how == "continue" and not missing and repeated == list(self.talk.repeated)
        if is_same and over is not None:
            return None
        # With --yes nothing is taken from the record, so it must be given again.
        if "--yes" not in repeated:
            given = {name: value for name, value in given.items() if name in _ROOTS}
        return command_line(*_words(book.name, root, {**given, **missing}), *repeated, "--continue")

    def result(self, record: RunRecord, position: Position, n_found: int) -> Ran:
        """The result of the run, of which `n_found` events were found."""
        over = position.over
        return Ran(
            self.book.name,
            record.name,
            None if isinstance(record, Unwritten) else record.url,
            EXIT_DO_NOT_RESTART if over is None else over,
            over is not None,
            "left by the operator" if over is None else position.because,
            position.state,
            position.step(attended=self.talk.attended) if over in _STEP_HOLDS else None,
            n_found > 0,
            tuple(record.events),
            self.next(position),
        )


def _digest(book: Runbook) -> str:
    return sha256_of(book.text.encode())


def _handed_on(storage: StorageOptions, columns: int | None) -> dict[str, str]:
    """Variables with which the commands of the blocks reach the storage, and the output width."""
    width = {} if columns is None else {"CKPTCTL_COLUMNS": str(columns)}
    return {**width, **storage.variables()}


def _words(called: str, root: str, inputs: Mapping[str, Value]) -> list[str]:
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


class Engine:
    """A run in progress: each event is recorded first, and then moves the position.

    `handed_on` are unrecorded variables for the commands (addresses and credentials of a
    storage); the first `n_found` events were found under the root. Raises `RunUnreadable` where
    they are not those of the page.
    """

    def __init__(
        self,
        book: Runbook,
        record: RunRecord,
        talk: Talk,
        handed_on: Mapping[str, str],
        n_found: int = 0,
    ) -> None:
        self.book = book
        self.record = record
        self.talk = talk
        self.handed_on = handed_on
        self.n_found = n_found
        self._seen_roots = SeenRoots()
        self._declined: set[str] = set()
        self.position = position_of(book, record.events, n_found, attended=talk.attended)

    def _check_root(self) -> None:
        """Raise `StorageUnavailable` if the root is gone, or another one, since the last check.

        A question may be open for hours. A block that ran meanwhile, or after it, would
        find a root without steps and call the run fresh.
        """
        self._seen_roots.check(self.record.store, list_root(self.record.store))

    def run(self) -> Position:
        """Run the blocks until the run ends or its operator leaves it; the position then.

        Every block is recorded before and after it runs. Raises `NoTerminal`, `TakenOver`, and
        storage errors of the record.
        """
        position, talk = self.position, self.talk
        self._check_root()
        if self.n_found:
            self._read_again()
            self._return_to_changed()
        shown_state = ""
        for _ in range(MAX_BLOCKS):
            if position.over is not None:
                return position
            if self._went_back():
                continue
            if shown_state != position.state:
                shown_state = position.state
                talk.entering(self.book.state(position.state))
            if not self._take_block():
                return position
        raise CkptctlError(
            f"the runbook {self.book.name} ran {MAX_BLOCKS} blocks without reaching an end, so its "
            "tables form a loop"
        )

    def _add(self, event: Event) -> None:
        self.position.apply(self.record.add(event), found=False)

    def _back(self, because: str, state: str, block: str | None = None) -> None:
        self.talk.report(f"back to {state}: {because}")
        self._add(BackEvent(state=state, block=block, because=because))

    def _read_again(self) -> None:
        """Return to the position after the last change of an existing run, if nobody can be asked.

        Whoever can write to the root can write that a step was verified or that the loss
        continues. Blocks that only read are therefore run again, so that this call itself
        proves an exit code of 0.
        """
        position = self.position
        state, index, _ = position.after_change
        if (position.state, position.index) == (state, index):
            return
        if not self.talk.attended:
            name = self.book.state(state).blocks[index].name
            self._back("results in the record are determined again", state, block=name)
        elif position.repeats is not None:
            state, name = position.repeats
            because = f"{name} is run again, because its recorded end is not relied on"
            self._back(because, state, block=name)
        else:
            self.talk.report(
                f"continued in {position.state}; earlier results are taken from the record"
            )

    def _return_to_changed(self) -> None:
        """Return to the first block that uses an input which this call changes.

        Not to one before the last change: that is not done twice.
        """
        position = self.position
        if not position.changed or not self.talk.attended:
            return
        for state, block in position.since_change:
            used = {*used_names(block.code), *block.needs, *block.asks, block.decides}
            if changed := sorted(position.changed.intersection(filter(None, used))):
                self._back(f"{', '.join(changed)} changed", state, block=block.name)
                return

    def _went_back(self) -> bool:
        """Return to where a value is determined that a command of the next block would use.

        A step that a record names is not passed to a command: it is chosen and checked again.
        """
        position = self.position
        if not position.block.commands or set(position.missing) - position.found:
            return False
        used = position.used(self.record.url).keys() & position.found
        for state in self.book.states:
            for each in state.blocks:
                if each.sets in used and self.book.input(each.sets) is None:
                    because = f"{each.sets} comes from the record and is determined again"
                    self._back(because, state.name)
                    return True
        return False

    def _take_block(self) -> bool:
        """Run the next block, or decide that it is not to be run; False if the operator leaves."""
        position, talk = self.position, self.talk
        block = position.block
        if not self._ask(block):
            return False
        used = position.used(self.record.url)
        reason = None
        if talk.assumes and block.on(_ASSUMED) is not None:
            reason = _ASSUMED
        elif position.missing:
            reason = "not run"
        elif block.at_most and position.times.get(block.name, 0) >= block.at_most:
            reason = "too often"
        if reason is None and block.decides is not None:
            reason = self._decide(block, block.decides)
            if reason == _LEFT:
                return False
            used = position.used(self.record.url)
        names = position.names(self.record.url)
        if reason is None and block.decides is None:
            talk.about_to(block, as_typed(block.code, names), used)
        # The names whose values a command of the block would take from the record.
        found = tuple(name for name in used if name in position.found) if block.commands else ()
        if reason is None and (block.changes or found):
            answer = talk.may(block, again=block.name in position.begun, found=found)
            if answer is None:
                return False
            reason = None if answer else _ASSUMED if talk.assumes else "not run"
        self._check_root()
        if reason is None:
            state = position.state
            self.record.add(
                BeganEvent(state=state, block=block.name, command=block.code, values=used)
            )
            ended = execute(block.code, names, self.handed_on, talk.printed, talk.silent)
            self._check_root()
            outcome = block.outcome(ended.exit_code, ended.printed[-1] if ended.printed else "")
        else:
            ended = None
            outcome = block.on(reason)
            if outcome is None and reason == _ASSUMED:  # as the page expects it, without changes
                is_decision = block.attended or block.decides
                outcome = block.outcomes[0] if is_decision else block.on("not run")
        if outcome is None:
            raise UsageError(
                f"the runbook {self.book.name} does not define what follows when {block.name!r} "
                f"{f'ends with {ended.exit_code}' if ended else f'is {reason}'}"
            )
        talk.ended(block, outcome, None if ended is None else ended.exit_code)
        result: Mapping[str, Any] = {} if ended is None else as_fields(ended)
        self._add(
            EndedEvent(
                state=position.state,
                block=block.name,
                then=outcome.then,
                because=outcome.because,
                not_run=reason,
                **result,
            )
        )
        if outcome.then in (DONE, STOP):
            position.leads = outcome.leads
            position.advice = _advice_of(ended)
            exit_code, because = self._end(outcome, ended)
            self._add(FinishedEvent(exit_code=exit_code, because=because))
        return True

    def _end(self, outcome: Outcome, ended: CommandResult | None) -> tuple[int, str]:
        """The exit code of the run and why it ended, with what a person accepted."""
        because = outcome.because
        if self.position.overridden:
            accepted = "; ".join(self.position.overridden.values())
            because = f"accepted against what was found: {accepted}. {because}"
        if outcome.then != STOP:
            return EXIT_OVERRIDDEN if self.position.overridden else 0, because
        own_code = EXIT_DO_NOT_RESTART if ended is None else ended.exit_code
        return own_code if outcome.code is None else outcome.code, because

    def _ask(self, block: Block) -> bool:
        """Ask for the inputs that the block asks for and that have no value; False to leave."""
        position, talk = self.position, self.talk
        if not talk.attended or talk.assumes:
            return True
        for name in block.asks:
            wanted = self.book.input(name)
            if wanted is None or position.variables.get(name) or name in self._declined:
                continue
            value = talk.asked(wanted, suggestion(wanted, position.variables))
            if value is None:
                return False
            if value:
                self._add(DecidedEvent(by=who(), inputs={name: value}))
            else:
                self._declined.add(name)
        return True

    def _decide(self, block: Block, name: str) -> str | None:
        """Ask for a decision and record it; the reason not to run the block if there is none.

        A recorded decision counts only if a person can review it.
        """
        decision = self.book.input(name)
        if decision is None:
            raise UsageError(f"the runbook {self.book.name} has no input {name!r} for a decision")
        is_found = name in self.position.found
        if self.position.variables.get(name) and (not is_found or self.talk.attended):
            return None
        if self.talk.assumes:
            return _ASSUMED
        made = self.talk.decided(block, decision)
        if not made:
            return _LEFT if made is None else "not run"
        self._add(DecidedEvent(by=who(), inputs={name: made}))
        return None


def who() -> str:
    """The user and host of this process."""
    return f"{user_name()}@{socket.gethostname()}"


def _advice_of(ended: CommandResult | None) -> str | None:
    """The next command of a command that failed; None if it has none."""
    if ended is None or not ended.exit_code or ended.report is None:
        return None
    advice = ended.report.get("next_command")
    if ended.report.get("exit_code") != ended.exit_code:
        return None
    return advice if isinstance(advice, str) and "runbook" not in advice else None


_LOG_SUFFIXES = frozenset({".log", ".out", ".err", ".jsonl"})
_OF_SLURM = {
    "WORLD_SIZE": ("SLURM_NTASKS", "{}"),
    "LAUNCHER": ("SLURM_JOB_ID", "srun --jobid {} --overlap --ntasks-per-node=1"),
}


def suggestion(wanted: Input, variables: Mapping[str, Value]) -> str | None:
    """A value for an input, which a person confirms; None if nothing was found."""
    if wanted.name in _OF_SLURM:
        variable, form = _OF_SLURM[wanted.name]
        value = os.environ.get(variable, "")
        return form.format(value) if value.isascii() and value.isdigit() else None
    if wanted.type not in ("log", "new-log"):
        return None
    logs = variables.get("LOG", ())
    known = {os.path.abspath(log) for log in ((logs,) if isinstance(logs, str) else logs)}
    root = variables.get("ROOT")
    beside = local_path(root) if isinstance(root, str) else None
    folders = () if beside is None else (Path(beside), Path(beside).parent)
    found: list[tuple[float, str]] = []
    for folder in (*folders, Path.cwd()):
        with suppress(OSError):
            for file in folder.iterdir():
                is_new = file.suffix in _LOG_SUFFIXES and os.path.abspath(file) not in known
                if is_new and file.is_file() and (about := file.stat()).st_size:
                    found.append((about.st_mtime, str(file)))
    return max(found)[1] if found else None
