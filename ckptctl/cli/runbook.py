"""`ckptctl runbook`: list, show, check and run a page, and ask the person at the terminal."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypedDict

from ckptctl.cli.main import Stopped
from ckptctl.cli.monitoring import Notifier
from ckptctl.cli.options import NotifyOpt, OptionalRootOpt
from ckptctl.cli.output import MakeDocument, Output, document_of
from ckptctl.cli.rendering import (
    EMPTY,
    Line,
    Style,
    StyledText,
    line,
    next_line,
    padded,
    page_lines,
    prose,
    wrapped,
)
from ckptctl.errors import OptionError, UsageError
from ckptctl.formatting import command_line, counted, duration
from ckptctl.options import Parameter, StorageOptions
from ckptctl.runbook.document import (
    DONE,
    NEXT,
    STOP,
    Block,
    Input,
    Outcome,
    Runbook,
    State,
    Value,
    find_runbook,
    runbook_names,
    shown,
    used_names,
)
from ckptctl.runbook.engine import EXIT_OVERRIDDEN, NoTerminal, Ran, run_runbook
from ckptctl.runbook.record import TRANSCRIPT, is_argument, write_transcript
from ckptctl.storage.opening import local_path

EXAMPLES = (
    "ckptctl runbook run rb-7 /shared/ckpt/run-1234 --set LOG=train.log",
    "ckptctl runbook run rb-7 s3://bucket/run-1234 --set 'RESUME=sbatch job.sh' --yes",
    "ckptctl runbook show rb-7",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 25, 26, 27, 30, 31, 32, 35, 75, 77, 93)


def runbook(
    action: Annotated[
        Literal["list", "show", "run"],
        Parameter(
            "ACTION",
            "list: all runbooks; show: print one; run: run one step by step.",
        ),
    ],
    name: Annotated[str | None, Parameter("NAME", "The name of the runbook.")] = None,
    roots: Annotated[
        list[str] | None,
        Parameter(
            "ROOT",
            "The checkpoint root that it is run on, where its record is kept; more roots that "
            "hold steps of the same run become OTHER_ROOTS. NAME=VALUE gives an input, as --set.",
        ),
    ] = None,
    optional_root: OptionalRootOpt = None,
    given: Annotated[
        list[str] | None,
        Parameter(
            "--set NAME=VALUE",
            "The value of an input; several times for several inputs, or for the items of a "
            "list. The runbook's page lists its inputs.",
        ),
    ] = None,
    yes: Annotated[
        bool, Parameter("--yes", "Make changes without asking, for automation.")
    ] = False,
    dry_run: Annotated[
        bool,
        Parameter("--dry-run", "Run blocks that only read, show the others, and write no record."),
    ] = False,
    new: Annotated[
        bool, Parameter("--new", "Start a new run, even if there is an unfinished one.")
    ] = False,
    go_on: Annotated[
        bool, Parameter("--continue", "Continue the last run where it stopped, whoever started it.")
    ] = False,
    transcript: Annotated[
        str | None,
        Parameter(
            "--transcript DIR",
            "Also write the transcript to this folder, as Markdown.",
            common=False,
        ),
    ] = None,
    verbose: Annotated[
        bool,
        Parameter(
            "--verbose", "Also show what each state is for, and each block as the page has it."
        ),
    ] = False,
    notify: NotifyOpt = None,
    *,
    storage: StorageOptions,
    out: Output,
) -> int:
    """List, show and run runbooks.

    Blocks that only read run without a question; for a block that changes something the exact
    command is shown and confirmed. The record is kept under the root, so that anybody can
    continue the run. With --quiet only the chosen step is printed.
    """
    if action == "list":
        books = [find_runbook(name) for name in runbook_names()]
        names = (book.name for book in books)
        out.answer(_runbooks(books), lambda: list_lines(books), bare=names)
        return 0
    if name is None:
        raise UsageError(f"{action} which runbook?", next_command="ckptctl runbook list")
    book = find_runbook(name)
    if action == "show":
        page = book.text
        out.answer(
            _runbooks((book,)), lambda: page_lines(page, out.out.width), bare=page.splitlines()
        )
        return 0
    if sum((dry_run, new, go_on)) > 1:
        raise OptionError("--dry-run", ", --new and --continue exclude each other")
    typed = [word for word in roots or () if _INPUT.match(word)]
    roots = [word for word in roots or () if word not in typed]
    if not roots:
        raise UsageError(
            f"on which checkpoint root is {book.name} run?",
            next_command=command_line("runbook", "run", book.name, "ROOT", *typed),
        )
    for root in roots[1:]:
        if os.path.isfile(local_path(root) or ""):
            raise UsageError(
                f"{root} is a file, and no checkpoint root; an input is given as NAME={root}",
                next_command=command_line("runbook", "show", book.name),
            )
    repeated = [*(["--yes"] if yes else ()), *(["--dry-run"] if dry_run else ())]
    repeated += [] if transcript is None else ["--transcript", transcript]
    inputs = [
        *(f"OTHER_ROOTS={root}" for root in roots[1:]),
        *(f"OPTIONAL_ROOTS={root}" for root in optional_root or ()),
        *(given or ()),
        *typed,
    ]
    with Notifier(notify, out) as notifier:
        try:
            ran = run_runbook(
                book,
                roots[0],
                _inputs(inputs),
                TerminalPrompts(out, yes=yes, dry_run=dry_run, verbose=verbose, repeated=repeated),
                how="dry" if dry_run else "new" if new else "continue" if go_on else "auto",
                storage=storage,
            )
        except Stopped as stopped:
            if not dry_run:
                words = ["runbook", "run", book.name, roots[0]]
                # With --yes no command is taken from the record.
                words += [f"--set={value}" for value in inputs] if yes else []
                stopped.next_command = command_line(*words, *repeated, "--continue")
            raise
        if transcript is not None:
            write_transcript(Path(transcript), ran.events)
        if ran.exit_code or not ran.finished:
            notifier.send(document_of("runbook", ran))
        out.answer(
            document_of("runbook", ran),
            lambda: ran_lines(ran, transcript),
            bare=() if ran.step is None else (ran.step,),
        )
    return ran.exit_code


_INPUT = re.compile(r"[A-Z][A-Z0-9_]*=")


class ShownRunbook(TypedDict):
    """A runbook."""

    name: str
    """Its name."""
    title: str
    """Its title."""
    states: tuple[str, ...]
    """The names of its states, in order."""
    inputs: tuple[Input, ...]
    """What it asks for."""
    text: str
    """The document itself, in Markdown."""


class Runbooks(TypedDict):
    """The answer of `runbook list` and `show`."""

    runbooks: tuple[ShownRunbook, ...]
    """The runbooks."""


def _runbooks(books: Iterable[Runbook]) -> MakeDocument:
    shown: tuple[ShownRunbook, ...] = tuple(
        {
            "name": book.name,
            "title": book.title,
            "states": tuple(state.name for state in book.states),
            "inputs": book.inputs,
            "text": book.text,
        }
        for book in books
    )
    return document_of("runbooks", exit_code=0, runbooks=shown)


def _inputs(given: Sequence[str]) -> dict[str, list[str]]:
    inputs: dict[str, list[str]] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise OptionError(
                "--set", f"is NAME=VALUE, not {pair!r}", instead="--set LOG=train.log"
            )
        inputs.setdefault(name, []).append(value)
    return inputs


def list_lines(books: Sequence[Runbook]) -> Iterator[Line]:
    """Every runbook by its name and title."""
    width = max((len(book.name) for book in books), default=0)
    for book in books:
        yield line(padded(book.name, width, "name"), "  ", book.title, hang=width + 2)
    yield EMPTY
    main = next((book for book in books if book.name == "rb-7"), books[0])
    yield from next_line(command_line("runbook", "show", main.name))


def ran_lines(ran: Ran, transcript: str | None) -> Iterator[Line]:
    """How the run went, where its record lies, and what comes next."""
    yield EMPTY
    if not ran.finished:
        yield line(StyledText("left", "warn"), f" in {ran.state}; the run {ran.run} waits for you")
    elif ran.exit_code == 0:
        yield line(StyledText("done", "good"), f": {ran.reason}", hang=2)
    elif ran.exit_code == EXIT_OVERRIDDEN:
        done = StyledText(f"done with exit code {ran.exit_code}", "warn")
        yield line(done, f": {ran.reason}", hang=2)
    else:
        stop = StyledText(f"stopped in {ran.state} with exit code {ran.exit_code}", "bad")
        yield line(stop, f": {ran.reason}", hang=2)
    if ran.step is not None:
        yield line("  step: ", StyledText(ran.step, "name"), solid=True)
    if ran.url is not None:
        yield line("  record: ", StyledText(ran.url, "name"), solid=True)
    folder = ran.url if transcript is None else transcript
    if folder is not None:
        yield line(
            "  transcript: ",
            StyledText(f"{folder.rstrip('/')}/{TRANSCRIPT}", "name"),
            solid=True,
        )
    yield from next_line(ran.next_command)


_RULE = 80
"""How long the rule is at most with which a terminal separates the states."""

BLOCK_INDENT = 4
"""How far what a command prints is indented."""

_ANSWERS = {"y": True, "yes": True, "n": False, "no": False, "l": None, "leave": None}
_WAYS = {DONE: "done", STOP: "stop", NEXT: "continue"}


class TerminalPrompts:
    """Shows each step as it is done; without a terminal it asks nobody.

    `yes` agrees to every change that the page allows; `dry_run` to none. `verbose` also shows
    what each state is for, and the blocks as the page has them. `repeated` are the options of
    the call that a next command needs again.
    """

    def __init__(
        self,
        out: Output,
        *,
        yes: bool,
        dry_run: bool,
        verbose: bool = False,
        repeated: Sequence[str] = (),
    ) -> None:
        self.out = out
        self.verbose = verbose
        self.yes = yes
        self.dry_run = dry_run
        self.repeated = repeated
        self._explained: set[str] = set()
        self._burst = _Burst()
        self._has_asked = False

    @property
    def attended(self) -> bool:
        """Whether a person can be asked."""
        is_typed = sys.stdin is not None and sys.stdin.isatty()
        return not self.yes and is_typed and self.out.err.terminal and self.out.talks

    @property
    def columns(self) -> int | None:
        """How wide the blocks may write, beside their indentation."""
        return self.out.err.columns_inside(BLOCK_INDENT)

    def report(self, text: str) -> None:
        """A fact about the run, on a line of its own."""
        self.out.say(line(StyledText(text, "warn"), hang=2))

    def continues(self, run: str, begun: str) -> bool | None:
        """Ask whether a run that was found is continued."""
        if not self.attended:
            raise NoTerminal(
                f"the unfinished run {run} was found under this root, started by {begun}; "
                "--continue continues it, --new starts another"
            )
        return self._asked("Continue it? [y]es, [n]o, start another, [l]eave: ")

    def entering(self, state: State) -> None:
        """The heading of a state; with `verbose` also what it is for, the first time."""
        heading = f"== {state.name}"
        if self.out.draws and self.out.err.unicode:
            heading = f"── {state.name} ".ljust(min(self.out.err.picture_width, _RULE), "─")
        self.out.say(EMPTY, line(StyledText(heading, "strong"), solid=True))
        if state.name in self._explained or not self.verbose:
            return
        self._explained.add(state.name)
        for paragraph in state.about.split("\n\n"):
            self.out.say(line("  ", prose(paragraph), hang=2))

    def about_to(self, block: Block, command: str | None, values: Mapping[str, Value]) -> None:
        """The command that runs; the block of the page if it is several, or with `verbose`."""
        self._burst = _Burst(block.brief and self._is_short)
        if self._is_short and command is None and not block.changes:
            return  # what it prints and what follows is enough of a script that only reads
        text = block.code if command is None or self.verbose else command
        self.out.say(*(_command(text_line) for text_line in text.splitlines()))
        self.out.say(
            *(
                line("    ", StyledText(f"{name}={shown(value)}", "name"), solid=True)
                for name, value in values.items()
                if self.verbose or (value and name in used_names(text))
            )
        )

    def silent(self, waited_s: float) -> None:
        """That the command still runs."""
        leave = "Ctrl-C leaves the run here"
        if self.out.draws:
            self.out.progress(f"still running; {leave}")
            return
        text = f"still running after {duration(waited_s, digits=2)}; {leave}"
        self.out.say(line(" " * BLOCK_INDENT, text))

    def printed(self, text: str) -> None:
        """A line of the command, indented below it.

        Not its next command, except with `verbose`: the run itself decides what is next.
        """
        is_next = text.startswith("next:")
        if text and (self.verbose or not is_next) and self._burst.shows(text):
            self.out.say(_printed(text))

    def ended(self, block: Block, outcome: Outcome, exit_code: int | None) -> None:
        """What was found, and what was expected if that is something else."""
        has_asked, self._has_asked = self._has_asked, False
        is_beside = exit_code is None and not has_asked and outcome.then != STOP
        if is_beside and self._is_short and not self.dry_run:
            return
        usual = block.outcomes[0]
        is_usual = exit_code is not None and exit_code == usual.first
        if self._is_short and is_usual and outcome.then != STOP:
            if hidden := self._burst.hidden:
                self.out.say(_printed(f"({counted(len(hidden), 'more line')}: see the transcript)"))
            mark = StyledText("✓" if self.out.err.unicode else "ok", "good")
            self.out.say(line("  ", mark, f" {outcome.because}", hang=4))
            return
        if exit_code is None:
            how = "assumed in a dry run" if self.dry_run and outcome is usual else "not run"
        else:
            how = f"exit code {exit_code}"
            hidden = self._burst.hidden
            self.out.say(*map(_printed, hidden))
            if not is_usual:
                expected = f"  expected: exit code {usual.first}: {usual.because}"
                self.out.say(line(expected, hang=4))
        leads = _WAYS.get(outcome.then, f"next: {outcome.then}")
        style: Style = "good" if is_usual else "warn"
        self.out.say(
            line(
                f"  {block.name}: ",
                StyledText(how, style),
                f": {outcome.because} ({leads})",
                hang=4,
            )
        )

    @property
    def _is_short(self) -> bool:
        """Whether not everything is shown: a person reads along, and the transcript has it all."""
        return self.out.err.terminal and not self.verbose

    @property
    def assumes(self) -> bool:
        """A dry run assumes the decisions that the page expects."""
        return self.dry_run

    def decided(self, block: Block, decision: Input) -> str | None:
        """Have a person type a decision."""
        if self.yes:
            return ""
        if not self.attended:
            raise NoTerminal(
                f"the block {block.name!r} needs a decision, and there is no terminal to ask at; "
                f"--set {decision.name}=TEXT makes it, --yes makes none"
            )
        wanted = "" if decision.type == "text" else f" ({decision.mistake('')})"
        self.report(f"  A person decides: {decision.meaning}{wanted}")
        return self._answer(decision, "  Type it, or [n]o, [l]eave here: ")

    def asked(self, wanted: Input, suggestion: str | None) -> Value | None:
        """Ask for an input that was not given."""
        self.report(f"  {wanted.name} was not given: {wanted.meaning}")
        found = "" if suggestion is None else f"Enter for {suggestion}, "
        typed = self._answer(wanted, f"  Type it, or {found}[n]one, [l]eave here: ", suggestion)
        return typed if not typed or not wanted.is_list else tuple(typed.split())

    def _answer(self, wanted: Input, question: str, suggestion: str | None = None) -> str | None:
        """A value of an input; empty for none, None to leave the run."""
        self._has_asked = True
        while True:
            typed = self._typed(question)
            text = typed.strip() or (suggestion or "" if typed else "")
            if not typed or text.lower() in ("l", "leave"):
                return None
            if text.lower() in ("n", "no", "none") and text not in wanted.words:
                return ""
            if mistake := wanted.mistake(text):
                self.report(f"  {wanted.name} must be {mistake}.")
            elif absent := _absent_logs(wanted, text):
                self.report(f"  {absent[0]} does not exist.")
            elif is_argument(text):
                return text
            else:
                self.report("  It cannot begin with a hyphen or hold control characters.")

    def may(self, block: Block, *, again: bool, found: Sequence[str]) -> bool | None:
        """Ask whether a block may change something."""
        if self.dry_run or (self.yes and block.attended):
            return False
        if again and self.yes:
            raise NoTerminal(
                f"the block {block.name!r} was started before and its result is unknown; "
                "check it, then run this without --yes, or start another run with --new"
            )
        if found and not self.attended:
            raise NoTerminal(
                f"the block {block.name!r} would run a command with {', '.join(found)} from the "
                "record of the run, which anybody who can write to the root can change; give "
                "these again with --set, or run this at a terminal"
            )
        if self.yes:
            return True
        if not self.attended:
            raise NoTerminal(
                f"the block {block.name!r} changes something, and there is no terminal to ask at; "
                "--yes agrees to every change"
            )
        if again:
            self.report("  It was started before, and its result is unknown.")
        if found:
            self.report(f"  From the record of the run, and not from you: {', '.join(found)}.")
        return self._asked("This changes something. Run it? [y]es, [n]o, [l]eave here: ")

    def _asked(self, question: str) -> bool | None:
        self._has_asked = True
        while True:
            typed = self._typed(f"  {question}")
            if not typed:
                return None
            if typed.strip().lower() in _ANSWERS:
                return _ANSWERS[typed.strip().lower()]

    def _typed(self, prompt: str) -> str:
        """The line that a person types, and nothing where the input ends."""
        lines = wrapped(line(prompt, hang=2), self.out.err.width)
        self.out.err.write("\n".join(part.text for part in lines) + " ")
        with self.out.paused():
            return os.fsdecode(sys.stdin.buffer.readline())


def _absent_logs(wanted: Input, text: str) -> list[str]:
    if wanted.type != "log":
        return []
    paths = text.split() if wanted.is_list else [text]
    files = [(path, local_path(path)) for path in paths]
    return [path for path, file in files if file is not None and not os.path.exists(file)]


_SHOWN_LINES = 6
_PAUSE_S = 2.0


class _Burst:
    """What a brief block prints at once: after the first lines the others are held back.

    A line after a pause begins anew, so that a wait shows what it waits for.
    """

    def __init__(self, is_brief: bool = False) -> None:
        self.hidden: list[str] = []
        self._is_brief = is_brief
        self._last_s = 0.0
        self._n_lines = 0

    def shows(self, text: str) -> bool:
        """Whether this line is shown now."""
        now_s = time.monotonic()
        if now_s - self._last_s > _PAUSE_S:
            self._n_lines, self.hidden = 0, []
        self._last_s, self._n_lines = now_s, self._n_lines + 1
        if not self._is_brief or self._n_lines <= _SHOWN_LINES:
            return True
        self.hidden.append(text)
        return False


def _printed(text: str) -> Line:
    return line(" " * BLOCK_INDENT, text, hang=BLOCK_INDENT, solid=text.startswith("next:"))


def _command(text: str) -> Line:
    return line("  ", StyledText(f"$ {text}", "code"), solid=True)
