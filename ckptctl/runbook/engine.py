"""Run a runbook: a state machine that follows the tables of the page.

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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ckptctl.errors import CkptctlError, UsageError
from ckptctl.formats.own.files import as_fields
from ckptctl.formats.own.run_events import (
    BackEvent,
    BeganEvent,
    DecidedEvent,
    EndedEvent,
    Event,
    FinishedEvent,
)
from ckptctl.runbook.document import (
    DONE,
    STOP,
    Block,
    Input,
    Outcome,
    Runbook,
    State,
    Value,
    used_names,
)
from ckptctl.runbook.executing import CommandResult, as_typed, execute
from ckptctl.runbook.record import Position, RunRecord, position_of
from ckptctl.selection.marking import user_name
from ckptctl.selection.roots import list_root
from ckptctl.selection.targets import SeenRoots
from ckptctl.storage.opening import local_path

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
        reason = self._reason_not_to_run()
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
            outcome = block.on(reason) or _assumed(block, reason)
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
        if outcome.then == STOP:
            return _exit_code(outcome, ended), because
        return EXIT_OVERRIDDEN if self.position.overridden else 0, because

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

    def _reason_not_to_run(self) -> str | None:
        position, block = self.position, self.position.block
        if self.talk.assumes and block.on(_ASSUMED) is not None:
            return _ASSUMED
        if position.missing:
            return "not run"
        is_too_often = block.at_most and position.times.get(block.name, 0) >= block.at_most
        return "too often" if is_too_often else None

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


def _assumed(block: Block, reason: str) -> Outcome | None:
    """What follows in a dry run: decisions as the page expects them, and no changes."""
    if reason != _ASSUMED:
        return None
    return block.outcomes[0] if block.attended or block.decides else block.on("not run")


def _advice_of(ended: CommandResult | None) -> str | None:
    """The next command of a command that failed; None if it has none."""
    report = None if ended is None or not ended.exit_code else ended.report
    if ended is None or report is None or report.get("exit_code") != ended.exit_code:
        return None
    advice = report.get("next_command")
    return advice if isinstance(advice, str) and "runbook" not in advice else None


def _exit_code(outcome: Outcome, ended: CommandResult | None) -> int:
    """The exit code that a stop states, else that of the command."""
    if outcome.code is not None:
        return outcome.code
    return ended.exit_code if ended is not None else EXIT_DO_NOT_RESTART


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
    found = [log for log in _logs_beside(beside) if os.path.abspath(log) not in known]
    return str(max(found, key=lambda log: log.stat().st_mtime)) if found else None


def _logs_beside(root: str | None) -> Iterator[Path]:
    """The logs in the root, beside it, and in the current folder."""
    folders = [Path.cwd()] if root is None else [Path(root), Path(root).parent, Path.cwd()]
    for folder in folders:
        try:
            files = [file for file in folder.iterdir() if file.suffix in _LOG_SUFFIXES]
            yield from (file for file in files if file.is_file() and file.stat().st_size)
        except OSError:
            continue
