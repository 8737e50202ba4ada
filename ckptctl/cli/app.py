"""Run one command and return its exit code.

Every error becomes two lines and an exit code here, and nowhere else. A command
is imported only when it is the one that was called: `ckptctl pick` stands in
front of every training job.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import typer

import ckptctl
from ckptctl.cli.commands import (
    COMMANDS,
    VERSION,
    command_group,
    sets_option,
    shared_help_lines,
    source_of,
)
from ckptctl.cli.main import Stopped
from ckptctl.cli.output import Output, without_secrets
from ckptctl.errors import CkptctlError, OutOfMemory, StorageUnavailable, UsageError
from ckptctl.formatting import command_line, path_word
from ckptctl.redaction import hide_arguments, hide_environment, shell_command

_COMPLETION = "_CKPTCTL_COMPLETE"
_USAGE = 2
_PATIENT_S = 120
_READER_LEFT = 128 + signal.SIGPIPE


@without_secrets()
def run(argv: Sequence[str]) -> int:
    """Run one command line, print its answer, and give its exit code.

    Without arguments it prints the help, but a job script that lost its arguments
    must not take that for an answer: 2.
    """
    if _COMPLETION in os.environ:
        return _complete(argv)
    command = _command(argv)
    out = Output(command, as_json=_asked(argv, "--json", "CKPTCTL_JSON"))
    try:
        hide_arguments(argv, lambda option: sets_option(option, command))
        # A job inherits the variables of other commands.
        commands = (command, None)
        hide_environment(
            os.environ, lambda name: any(sets_option(name, command) for command in commands)
        )
        exit_code = _answer([*argv] or ["--help"], out)
        out.flush()
    except BrokenPipeError:
        return _READER_LEFT
    except BaseException as error:  # noqa: BLE001 - the one place that answers for all of them
        return _failed(error, argv, out)
    return exit_code if argv else _USAGE


def _answer(argv: list[str], out: Output) -> int:
    if argv == ["--version"]:
        out.bare([VERSION])
        return 0
    if argv == ["help", "options"]:
        out.lines(shared_help_lines())
        return 0
    if argv[0] == "help":
        argv = [*argv[1:], "--help"]
    group = command_group()
    try:
        with group.make_context("ckptctl", argv, obj=out) as context:
            exit_code: int = group.invoke(context)
    except typer.Exit as done:
        return done.exit_code
    return exit_code


def _complete(words: Sequence[str]) -> int:
    """Print what the last word may become; nothing where that is not known."""
    with suppress(CkptctlError, OSError):
        from ckptctl.cli.completion import candidates

        Output().bare(candidates(words))
    return 0


def _command(argv: Sequence[str]) -> str | None:
    name = next((word for word in argv if not word.startswith("-")), None)
    return name if name in COMMANDS else None


def _asked(argv: Sequence[str], option: str, variable: str) -> bool:
    value = os.environ.get(variable, "").lower()
    own = argv[: argv.index("--")] if "--" in argv else argv  # behind it, another's command line
    return option in own or value in ("1", "true", "t", "yes", "y", "on")


def _failed(error: BaseException, argv: Sequence[str], out: Output) -> int:
    """Print what went wrong in two lines, and return the exit code."""
    known = _in_our_words(error, argv)
    if known.next_command is None and not isinstance(known, _EndedBySignal):
        known.next_command = _next(known, argv)
        out.keep_commands()  # it has the caller's options
    # A message that cannot be written (full disk, closed pipe) changes no exit code.
    with suppress(OSError, CkptctlError):
        if _asked(argv, "--debug", "CKPTCTL_DEBUG"):
            out.trace(error)
        if isinstance(known, _EndedBySignal) and known.exit_code == 128 + signal.SIGINT:
            out.begin_line()
        out.error(known)
    return known.exit_code


def _in_our_words(error: BaseException, argv: Sequence[str]) -> CkptctlError:
    if isinstance(error, CkptctlError):
        return error
    if isinstance(error, KeyboardInterrupt):  # of `run`, which receives signals itself
        error = Stopped(signal.SIGINT)
    if isinstance(error, Stopped):
        return _EndedBySignal(error.exit_code, error.next_command)
    if isinstance(error, typer.TyperException):
        return _mistake(error, argv)
    # CPython raises `SystemError` where the exception of a failed allocation is lost ("returned
    # NULL without setting an exception") or in the way ("returned a result with an exception").
    lost = isinstance(error, SystemError) and "exception" in str(error)
    if lost or isinstance(error, MemoryError):
        return OutOfMemory("there is not enough memory; nothing is known, good or bad")
    return CkptctlError(
        f"{type(error).__name__}: {error}; this is a bug in ckptctl {ckptctl.__version__}",
        next_command="ckptctl explain 1" if "--debug" in argv else _same(argv, "--debug"),
    )


def _mistake(error: Any, argv: Sequence[str]) -> UsageError:
    """What typer refuses in a command line."""
    command = _command(argv)
    message = error.format_message()
    if hasattr(error, "possibilities"):  # an unknown option
        if command is not None and argv[0] != command:
            at = argv.index(command)
            behind = command_line(*argv[at:], *argv[:at])
            return UsageError("options stand behind the command", next_command=behind)
        close = error.possibilities
        meant = f"; did you mean {', '.join(close)}?" if close else ""
        message = error.message + meant
    option = getattr(error, "param", None)
    source = source_of(error.ctx, option) if option is not None and error.ctx is not None else None
    if source is not None:
        message = f"invalid value for {source}: {error.message}"
    message = " ".join(message.split()).removesuffix(".")
    return UsageError(message[:1].lower() + message[1:], next_command=_help_command(argv))


def _next(error: CkptctlError, argv: Sequence[str]) -> str:
    """The next command where the error has none: the caller's own, corrected, or a page."""
    if isinstance(error, UsageError) and (error.instead is not None or error.without):
        return _mended(argv, error)
    if isinstance(error, StorageUnavailable):
        again = _same(argv, f"--timeout {_PATIENT_S}")
        return command_line("explain", error.exit_code) if again == _same(argv) else again
    if isinstance(error, OutOfMemory):
        return "ckptctl explain step.no-memory"
    if error.exit_code == _USAGE:
        return _help_command(argv)
    return command_line("explain", error.exit_code)


def _help_command(argv: Sequence[str]) -> str:
    command = _command(argv)
    return command_line(command, "--help") if command else "ckptctl --help"


def _mended(argv: Sequence[str], error: UsageError) -> str:
    """The caller's own words, made good."""
    words = [*argv]
    for name in error.without:
        words = _without(words, name)
    if error.instead_of is None:
        return _same(words, error.instead or "")
    better, wrong = error.instead or "", error.instead_of

    def is_wrong(word: str) -> bool:
        return wrong in (word, path_word(word), path_word(word.rstrip("/")))

    return _same([better if is_wrong(word) else word for word in words])


def _same(argv: Sequence[str], option: str = "") -> str:
    """The caller's own words with `option`, as a shell reads it, added or in place of its like."""
    at = argv.index("--") if "--" in argv else len(argv)  # behind it, another's command line
    words = _without(argv[:at], option.partition(" ")[0]) if option else argv[:at]
    again = (command_line(*words), option, shell_command(argv[at:]))
    return " ".join(part for part in again if part)


def _without(words: Sequence[str], name: str) -> list[str]:
    kept, is_value = [], False
    for word in words:
        if not is_value and word.partition("=")[0] != name:
            kept.append(word)
        is_value = word == name
    return kept


class _EndedBySignal(CkptctlError, code="ended"):
    def __init__(self, exit_code: int, next_command: str | None) -> None:
        name = signal.Signals(exit_code - 128).name
        message = f"ended by {name}; no file was left half written"
        super().__init__(message, next_command=next_command)
        self.exit_code = exit_code
