"""`ckptctl runbook`: a runbook, read, checked or run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

from ckptctl.cli.documents import Document, ShownRunbook, document
from ckptctl.cli.options import OptionalRootOpt, argument, option
from ckptctl.cli.output import Output
from ckptctl.cli.prompts import TerminalPrompts
from ckptctl.cli.rendering import next_line, page_lines
from ckptctl.cli.text import EMPTY, Line, Span, line, padded
from ckptctl.errors import UsageError
from ckptctl.formatting import counted
from ckptctl.options import StorageOptions
from ckptctl.runbook.document import Runbook
from ckptctl.runbook.linting import problems
from ckptctl.runbook.reading import find_runbook, runbook_names
from ckptctl.runbook.running import How, Ran, run_runbook
from ckptctl.runbook.transcript import write_transcript

EXAMPLES = (
    "ckptctl runbook run rb-7 /shared/ckpt/run-1234 --set LOG=train.log",
    "ckptctl runbook run rb-7 s3://bucket/run-1234 --set 'RESUME=sbatch job.sh' --yes",
    "ckptctl runbook lint my-runbooks/rb-12.md",
)
EXIT_CODES = (0, 2, 10, 11, 20, 21, 22, 25, 26, 27, 30, 31, 32, 75, 77, 93)


class Action(str, Enum):
    """What to do with a runbook."""

    LIST = "list"
    SHOW = "show"
    LINT = "lint"
    RUN = "run"


def runbook(
    action: Annotated[
        Action,
        argument(
            metavar="ACTION",
            help="list: all runbooks; show: print one; lint: check the form of one; run: run "
            "one step by step.",
        ),
    ],
    name: Annotated[
        str | None,
        argument(metavar="NAME", help="The runbook: its name, or a file that ends in .md."),
    ] = None,
    roots: Annotated[
        list[str] | None,
        argument(
            metavar="ROOT",
            help="The checkpoint root that it is run on, where its record is kept; more roots that "
            "hold steps of the same run become OTHER_ROOTS.",
        ),
    ] = None,
    optional_root: OptionalRootOpt = None,
    given: Annotated[
        list[str] | None,
        option(
            "--set",
            metavar="NAME=VALUE",
            help="The value of an input; several times for several inputs, or for the items of a "
            "list. The runbook's page lists its inputs.",
        ),
    ] = None,
    yes: Annotated[
        bool, option("--yes", help="Make changes without asking, for automation.")
    ] = False,
    dry_run: Annotated[
        bool,
        option(
            "--dry-run", help="Run blocks that only read, show the others, and write no record."
        ),
    ] = False,
    new: Annotated[
        bool, option("--new", help="Start a new run, even if there is an unfinished one.")
    ] = False,
    go_on: Annotated[
        bool,
        option("--continue", help="Continue the last run where it stopped, whoever started it."),
    ] = False,
    take_over: Annotated[
        bool, option("--take-over", help="Continue a run that another person is working on.")
    ] = False,
    transcript: Annotated[
        str | None,
        option(
            "--transcript",
            metavar="DIR",
            help="Also write the transcript to this folder: Markdown, JSON Lines and HTML.",
        ),
    ] = None,
    folder: Annotated[
        str | None,
        option("--folder", metavar="DIR", help="A folder with your own runbooks."),
    ] = None,
    *,
    storage: StorageOptions,
    out: Output,
) -> int:
    """List, show and run runbooks.

    Blocks that only read run without a question; for a block that changes something the exact
    command is shown and confirmed. The record is kept under the root, so that anybody can
    continue the run. With --quiet only the chosen step is printed.
    """
    if action is Action.LIST:
        return _list(folder, out)
    if name is None:
        raise UsageError(f"{action.value} which runbook?", next_command="ckptctl runbook list")
    book = find_runbook(name, folder)
    if action is Action.SHOW:
        return _show(book, out)
    if action is Action.LINT:
        return _lint(book, out)
    if not roots:
        raise UsageError(
            f"on which checkpoint root is {book.name} run?",
            next_command=f"ckptctl runbook run {shlex.quote(book.called)} ROOT",
        )
    if found := problems(book):
        raise UsageError(
            f"the runbook {book.name} is not sound: {found[0]}",
            next_command=f"ckptctl runbook lint {shlex.quote(book.called)}",
        )
    repeated = [*(["--yes"] if yes else ()), *(["--dry-run"] if dry_run else ())]
    repeated += [] if transcript is None else ["--transcript", transcript]
    ran = run_runbook(
        book,
        roots[0],
        _inputs(
            [
                *(f"OTHER_ROOTS={each}" for each in roots[1:]),
                *(f"OPTIONAL_ROOTS={each}" for each in optional_root or ()),
                *(given or ()),
            ]
        ),
        TerminalPrompts(out, yes=yes, dry_run=dry_run, repeated=repeated),
        how=_how(dry_run=dry_run, new=new, go_on=go_on),
        take_over=take_over,
        storage=storage,
    )
    if transcript is not None:
        write_transcript(Path(transcript), ran.events, ran.step)
    return _answer(ran, transcript, out)


def _list(folder: str | None, out: Output) -> int:
    books = [find_runbook(name, folder) for name in runbook_names(folder)]
    out.answer(
        lambda: _runbooks(books),
        lambda: list_lines(books),
        bare=(book.name for book in books),
    )
    return 0


def _show(book: Runbook, out: Output) -> int:
    out.answer(
        lambda: _runbooks((book,)),
        lambda: page_lines(book.text, out.out.width),
        bare=book.text.splitlines(),
    )
    return 0


def _lint(book: Runbook, out: Output) -> int:
    found = problems(book)
    exit_code = UsageError.exit_code if found else 0
    out.answer(
        lambda: _runbooks((book,), found, exit_code),
        lambda: lint_lines(book, found),
        bare=found,
    )
    return exit_code


def _runbooks(
    books: Iterable[Runbook], problems: Iterable[str] = (), exit_code: int = 0
) -> Document:
    shown = tuple(
        ShownRunbook(
            name=book.name,
            title=book.title,
            states=tuple(state.name for state in book.states),
            inputs=book.inputs,
            text=book.text,
        )
        for book in books
    )
    return document("runbooks", exit_code=exit_code, runbooks=shown, problems=tuple(problems))


def _answer(ran: Ran, transcript: str | None, out: Output) -> int:
    out.answer(
        lambda: document("runbook", ran),
        lambda: ran_lines(ran, transcript),
        bare=() if ran.step is None else (ran.step,),
    )
    return ran.exit_code


def _inputs(given: Sequence[str]) -> dict[str, list[str]]:
    """The values by name; the library knows which of them are lists."""
    inputs: dict[str, list[str]] = {}
    for pair in given:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise UsageError(f"--set is NAME=VALUE, not {pair!r}", instead="--set LOG=train.log")
        inputs.setdefault(name, []).append(value)
    return inputs


def _how(*, dry_run: bool, new: bool, go_on: bool) -> How:
    if sum((dry_run, new, go_on)) > 1:
        raise UsageError("--dry-run, --new and --continue exclude each other")
    return "dry" if dry_run else "new" if new else "continue" if go_on else "auto"


def list_lines(books: Sequence[Runbook]) -> Iterator[Line]:
    """Every runbook by its name and title."""
    width = max((len(book.name) for book in books), default=0)
    for book in books:
        yield line(padded(book.name, width, "name"), "  ", book.title, hang=width + 2)
    yield EMPTY
    main = next((book for book in books if book.name == "rb-7"), books[0])
    yield from next_line(f"ckptctl runbook show {shlex.quote(main.called)}")


def lint_lines(book: Runbook, problems: Sequence[str]) -> Iterator[Line]:
    """Whether a runbook is sound, and what is not."""
    if not problems:
        yield line(Span("sound", "good"), f": {book.name}, {counted(len(book.states), 'state')}")
        return
    yield line(Span(f"not sound: {counted(len(problems), 'problem')}", "bad"))
    yield from (line(f"  {problem}", hang=4) for problem in problems)


def ran_lines(ran: Ran, transcript: str | None) -> Iterator[Line]:
    """How the run went, where its record lies, and what comes next."""
    yield EMPTY
    if not ran.finished:
        yield line(Span("left", "warn"), f" in {ran.state}; the run {ran.run} waits for you")
    elif ran.exit_code == 0:
        yield line(Span("done", "good"), f": {ran.reason}", hang=2)
    else:
        said = Span(f"stopped in {ran.state} with exit code {ran.exit_code}", "bad")
        yield line(said, f": {ran.reason}", hang=2)
    if ran.step is not None:
        yield line("  step: ", Span(ran.step, "name"), solid=True)
    if ran.url is not None:
        yield line("  record: ", ran.url, solid=True)
    if transcript is not None:
        yield line("  transcript: ", transcript, solid=True)
    yield from next_line(ran.next_command)
