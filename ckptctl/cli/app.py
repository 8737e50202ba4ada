"""Run one command and return its exit code.

Every error becomes two lines and an exit code here, and nowhere else. A command
is imported only when it is the one that was called: `ckptctl pick` stands in
front of every training job.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import suppress
from inspect import cleandoc
from typing import Annotated

import typer

import ckptctl
from ckptctl.cli.binding import TRUE, with_common
from ckptctl.cli.commands import COMMANDS, SUMMARIES, load
from ckptctl.cli.exit_codes import EXIT_CODES
from ckptctl.cli.main import Stopped
from ckptctl.cli.output import Output
from ckptctl.cli.values import without_secrets
from ckptctl.errors import CkptctlError, OutOfMemory, StorageUnavailable, UsageError

_COMPLETION = "_CKPTCTL_COMPLETE"
_USAGE = 2
_PATIENT_S = 120
_READER_LEFT = 128 + signal.SIGPIPE


def run(argv: Sequence[str]) -> int:
    """Run one command line, print its answer, and give its exit code.

    Without arguments it prints the help, but a job script that lost its arguments
    must not take that for an answer: 2.
    """
    command = _command(argv)
    out = Output(command, as_json=_asked(argv, "--json", "CKPTCTL_JSON"))
    try:
        # Completion asks for the options of a command that no argument names.
        whole = command is not None or _COMPLETION in os.environ
        app = build_app(COMMANDS if command is None else (command,), out, whole=whole)
        exit_code: int = app(
            args=list(argv or ["--help"]), prog_name="ckptctl", standalone_mode=False
        )
        out.flush()
    except BrokenPipeError:
        return _READER_LEFT
    except SystemExit as left:
        # typer leaves so after completion, and when the reader of a help text has left.
        gone = isinstance(left.__context__, BrokenPipeError)
        return _READER_LEFT if gone else int(left.code or 0)
    except BaseException as error:  # noqa: BLE001 - the one place that answers for all of them
        return _failed(error, argv, out)
    return exit_code if argv else _USAGE


def _command(argv: Sequence[str]) -> str | None:
    name = next((word for word in argv if not word.startswith("-")), None)
    return name if name in COMMANDS else None


def _asked(argv: Sequence[str], option: str, variable: str) -> bool:
    """Whether a flag is set, for when the command line could not be parsed."""
    value = os.environ.get(variable, "").lower()
    own = argv[: argv.index("--")] if "--" in argv else argv  # behind it, another's command line
    return option in own or value in TRUE


def build_app(commands: Sequence[str], out: Output, *, whole: bool = True) -> typer.Typer:
    """The command line with the commands named, or with no more than their names and summaries."""
    app = typer.Typer(
        help="Which checkpoint do we resume from, and did the resume work?",
        epilog="Every finding code, verdict and exit code is explained by: ckptctl explain",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings=_HELP_NAMES,
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[
            bool, typer.Option("--version", help="Print the version and exit.")
        ] = False,
    ) -> None:
        if version:
            out.bare([f"ckptctl {ckptctl.__version__}"])
            raise typer.Exit
        if context.invoked_subcommand is None:
            raise UsageError("no command is given", next_command="ckptctl --help")

    for name in commands:
        if not whole:
            app.command(name, short_help=SUMMARIES[name])(lambda: None)
            continue
        command = load(name)
        app.command(
            name,
            help=cleandoc(command.function.__doc__ or ""),
            epilog=_end(command.examples, command.exit_codes),
            short_help=SUMMARIES[name],
            context_settings=_HELP_NAMES,
        )(with_common(command.function, out))
    return app


_HELP_NAMES = {"help_option_names": ["-h", "--help"]}


def _end(examples: Sequence[str], exit_codes: Sequence[int]) -> str:
    """The end of the help of a command."""
    # A backspace on a line of its own keeps typer from filling the block below it.
    variables = (
        "Options have variables (--max-fallback: CKPTCTL_MAX_FALLBACK);\n"
        "switches that change or remove something have none."
    )
    shown = "\n".join(f"  {line}" for example in examples for line in _folded(example))
    codes = "\n".join(f"  {code:<3} {EXIT_CODES[code].title}" for code in exit_codes)
    return f"{variables}\n\n\b\nExamples:\n{shown}\n\n\b\nExit codes:\n{codes}"


_WORD = r"""(?:"[^"]*"|'[^']*'|[^\s"'])+"""
_PIECE = re.compile(rf"-\S+ (?!-){_WORD}|{_WORD}")
"""A word, or an option with its value, which stay on one line."""

_HELP_COLUMNS = 74


def _folded(example: str) -> Iterator[str]:
    """A command in as many lines as help has room for, continued as in a shell."""
    line, indent = "", ""
    for piece in _PIECE.findall(example):
        if line and len(indent) + len(line) + 1 + len(piece) > _HELP_COLUMNS:
            yield f"{indent}{line} \\"
            line, indent = "", "  "
        line = f"{line} {piece}" if line else piece
    yield indent + line


def _failed(error: BaseException, argv: Sequence[str], out: Output) -> int:
    """Say what went wrong in two lines, and give the exit code."""
    known = _in_our_words(error, argv)
    if known.next_command is None and not isinstance(known, _Ended):
        known.next_command = _next(known, argv)
        out.keep_commands()  # it has the caller's options
    # What cannot be said, for a full disk or a reader that left, changes no exit code.
    with suppress(OSError, CkptctlError):
        if _asked(argv, "--debug", "CKPTCTL_DEBUG"):
            out.trace(error)
        out.error(known)
    return known.exit_code


def _in_our_words(error: BaseException, argv: Sequence[str]) -> CkptctlError:
    if isinstance(error, CkptctlError):
        return error
    if isinstance(error, Stopped):
        return _Ended(error.exit_code)
    if isinstance(error, typer.TyperException):
        message = " ".join(error.format_message().split())
        message = message[:1].lower() + message[1:]
        command = _command(argv)
        if command is not None and argv[0] != command:
            at = argv.index(command)
            behind = shlex.join(["ckptctl", *without_secrets([*argv[at:], *argv[:at]])])
            return UsageError("options stand behind the command", next_command=behind)
        return UsageError(message, next_command=_help_command(argv))
    if isinstance(error, MemoryError):
        return OutOfMemory("there is not enough memory; nothing is known, good or bad")
    return CkptctlError(
        f"{type(error).__name__}: {error}; this is a bug in ckptctl {ckptctl.__version__}",
        next_command="ckptctl explain 1" if "--debug" in argv else _same(argv, "--debug"),
    )


def _next(error: CkptctlError, argv: Sequence[str]) -> str:
    """What helps where the error does not say: the caller's own command, made good, or a page."""
    if isinstance(error, UsageError) and (error.instead is not None or error.without):
        return _mended(argv, error)
    if isinstance(error, StorageUnavailable):
        again = _same(argv, f"--timeout {_PATIENT_S}")
        return f"ckptctl explain {error.exit_code}" if again == _same(argv) else again
    if isinstance(error, OutOfMemory):
        return "ckptctl explain step.no-memory"
    if error.exit_code == _USAGE:
        return _help_command(argv)
    return f"ckptctl explain {error.exit_code}"


def _help_command(argv: Sequence[str]) -> str:
    command = _command(argv)
    return f"ckptctl {command} --help" if command else "ckptctl --help"


def _mended(argv: Sequence[str], error: UsageError) -> str:
    """The caller's own words, made good."""
    words = [*argv]
    for name in error.without:
        words = _without(words, name)
    if error.instead_of is None:
        return _same(words, error.instead or "")
    better = error.instead or ""
    return _same([better if word == error.instead_of else word for word in words])


def _same(argv: Sequence[str], option: str = "") -> str:
    """The caller's own words with `option`, as a shell reads it, added or in place of its like."""
    at = argv.index("--") if "--" in argv else len(argv)  # behind it, another's command line
    words = _without(argv[:at], option.partition(" ")[0]) if option else argv[:at]
    again = (shlex.join(["ckptctl", *without_secrets(words)]), option, shlex.join(argv[at:]))
    return " ".join(part for part in again if part)


def _without(words: Sequence[str], name: str) -> list[str]:
    """Words of a command line without an option and its value."""
    kept, is_value = [], False
    for word in words:
        if not is_value and word.partition("=")[0] != name:
            kept.append(word)
        is_value = word == name
    return kept


class _Ended(CkptctlError):
    """A signal ended the command."""

    code = "ended"

    def __init__(self, exit_code: int) -> None:
        name = signal.Signals(exit_code - 128).name
        super().__init__(f"ended by {name}; no file was left half written")
        self.exit_code = exit_code
