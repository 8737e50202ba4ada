"""Print the results of a command without secrets: the only module that writes to the terminal.

The one place that prints. Data goes to standard output, everything else to standard error.
On a terminal rich draws colour and progress (`console`), and prose is wrapped at its width; off
a terminal every line stays whole, and progress is a plain line every 30 seconds. With `--json`
there is one document on standard output and nothing else.
`rendering` and `documents` decide what is printed.
"""

from __future__ import annotations

import os
import re
import stat
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    suppress,
)
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TextIO, TypeAlias, cast

from ckptctl.cli.documents import Document, as_text, document, error_document
from ckptctl.cli.rendering import Line, error_lines, in_shell, line, made_safe, wrapped
from ckptctl.errors import CkptctlError, OptionError, UsageError
from ckptctl.formatting import command_line, duration, size
from ckptctl.redaction import RedactedStream, redacted, redacted_values

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from ckptctl.cli.console import Activity
    from ckptctl.distributed.process_group import ProcessGroup

MakeDocument: TypeAlias = Callable[[], Document]
"""Makes a document where `--json`, `--report` or `--notify` needs it."""


def document_of(
    name: str,
    result: DataclassInstance | None = None,
    *,
    exit_code: int | None = None,
    **beside: object,
) -> MakeDocument:
    """What makes the document that `documents.document` describes."""
    return partial(document, name, result, exit_code=exit_code, **beside)


_STRIP_WIDTH = 80
"""How wide pictures are where there is no terminal to fit them to."""


Color = Literal["auto", "always", "never"]
"""When to colour."""


class Channel(NamedTuple):
    """One of the standard streams, and what can be shown on it.

    `width` is None off a terminal, except where a runbook passes the width of the one that it
    shows our output on. `stream` is None where the caller closed it. What is written to
    standard output `must_arrive`; talk may be lost, where a terminal was closed or a disk is
    full, and changes neither what a command does nor how it ends.
    """

    stream: TextIO | None
    terminal: bool
    width: int | None
    unicode: bool
    color: bool
    must_arrive: bool

    @classmethod
    def on(cls, stream: TextIO | None, color: Color, *, must_arrive: bool) -> Channel:
        """Find out what a stream can show."""
        if stream is None:
            return cls(None, False, None, unicode=False, color=False, must_arrive=must_arrive)
        terminal, unicode = stream.isatty(), False
        with suppress(UnicodeEncodeError, LookupError):
            unicode = bool("✓✗○·∆⋯◌◒⊘»±↑◇□".encode(stream.encoding or "ascii"))
        colored = color == "always"
        if color == "auto" and not os.environ.get("NO_COLOR"):
            colored = bool(os.environ.get("FORCE_COLOR")) or (terminal and not _is_dumb())
        return cls(
            stream,
            terminal=terminal,
            width=_terminal_width(stream) if terminal else _columns("CKPTCTL_COLUMNS"),
            unicode=unicode,
            color=colored,
            must_arrive=must_arrive,
        )

    @property
    def picture_width(self) -> int:
        """How many cells a picture may take."""
        return self.width or _STRIP_WIDTH

    @property
    def current_width(self) -> int:
        """How many cells the terminal has by now: its window may have changed."""
        if self.stream is None or not self.terminal:
            return self.picture_width
        return _terminal_width(self.stream)

    def columns_inside(self, indent: int) -> int | None:
        """How wide an indented part of a terminal is; None off a terminal."""
        return max(1, self.width - indent) if self.terminal and self.width else None

    def write(self, text: str) -> None:
        """Write and flush, whatever the encoding of the stream."""
        if self.stream is None:
            return
        encoding = self.stream.encoding or "utf-8"
        with nullcontext() if self.must_arrive else suppress(CkptctlError, OSError):
            _write(self.stream, text.encode(encoding, "backslashreplace").decode(encoding))


class Output:
    """Standard output, standard error, and how they are used."""

    def __init__(self, command: str | None = None, *, as_json: bool = False) -> None:
        self.command = command
        self.configure(as_json=as_json)

    def configure(
        self,
        *,
        as_json: bool = False,
        quiet: bool = False,
        color: Color = "auto",
        report_file: str | None = None,
        complete: Callable[[str], str] = str,
    ) -> None:
        """Take the caller's options; `complete` repeats in a next command those that it needs."""
        self.as_json = as_json
        self.quiet = quiet
        self._aside = False
        self._report_file = report_file
        self._complete = complete
        # What `pick` prints ends up in the logs of jobs.
        color = "never" if self.command == "pick" else color
        self.out = Channel.on(sys.stdout, color, must_arrive=True)
        self.err = Channel.on(sys.stderr, color, must_arrive=False)
        self._activity: Activity | None = None
        self._progress_lines = ProgressLines(self.err.write)

    @contextmanager
    def at_work(self, message: str) -> Iterator[None]:
        """Show on a terminal that the command is at work while it prints nothing."""
        if not (self.talks and self.err.terminal) or _is_dumb():
            yield
            return
        from ckptctl.cli.console import Activity

        activity = self._activity = Activity(self.err, message)
        try:
            yield
        finally:
            activity.close()

    @property
    def draws(self) -> bool:
        """Whether a terminal shows that the command is at work, and for how long."""
        return self._activity is not None

    def paused(self) -> AbstractContextManager[None]:
        """Show nothing, while a person types or another program writes to the terminal."""
        return nullcontext() if self._activity is None else self._activity.paused()

    def keep_commands(self) -> None:
        """Print next commands as they are from now on."""
        self._complete = str

    def step_aside(self) -> None:
        """Print errors only, and those on standard error: rank 0 prints the answer."""
        self.as_json, self.quiet, self._report_file = False, True, None
        self._aside = True
        if self._activity is not None:
            self._activity.close()

    @property
    def talks(self) -> bool:
        """The reader is a person: there is no `--json` and no `--quiet`."""
        return not (self.as_json or self.quiet)

    def answer(
        self,
        document: MakeDocument,
        lines: Callable[[], Iterable[Line]],
        *,
        bare: Iterable[str] = (),
        bare_only: bool = False,
        has_failed: bool = False,
    ) -> None:
        """Give the answer of a command: the document, the lines, or with `--quiet` the `bare`.

        With `bare_only` the lines go to standard error, and the `bare` to standard output: a
        script reads the one, and its transcript holds both. Of an answer that `has_failed` the
        lines are there with `--quiet` too.
        """
        if self._aside:
            return
        self.save(document)
        if self.as_json:
            self.document(document)
        elif self.quiet or bare_only:
            if not self.quiet or has_failed:
                # In one piece: a reader of both streams shows the bare answer behind it.
                self._clear_progress()
                self.err.write(self._text(lines(), self.err))
            self.bare(bare)
        else:
            self.lines(lines())

    def lines(self, lines: Iterable[Line], *, to: Channel | None = None) -> None:
        """Print lines for a person, on standard output unless `to` is another stream."""
        channel = to or self.out
        self._clear_progress()
        for a_line in lines:
            channel.write(self._text((a_line,), channel))

    def say(self, *lines: Line) -> None:
        """Print lines beside the answer, for a person alone."""
        if self.talks:
            self.lines(lines, to=self.err)

    def tell(self, message: str) -> None:
        """Print a message beside the answer; a warning also with `--quiet` and `--json`."""
        if self.talks or message.startswith("warning: "):
            self.lines([line(f"ckptctl: {message}", hang=2)], to=self.err)

    def document(self, document: MakeDocument) -> None:
        """Print the one document of `--json`."""
        _write(self._stdout(), self._as_text(document()))

    def document_line(self, document: MakeDocument) -> None:
        """Print one of several documents, each on a line of its own."""
        import json

        whole = json.loads(self._as_text(document()))
        _write(self._stdout(), f"{json.dumps(whole)}\n")

    def bare(self, texts: Iterable[str]) -> None:
        """Print each text on a line of its own, as it is: a script takes it as a path.

        `check_address` has refused paths with secrets.
        """
        self._clear_progress()
        for text in texts:
            stream = self._stdout()
            with _writing():
                stream.buffer.write(os.fsencode(text) + b"\n")
                stream.flush()

    def save(self, document: MakeDocument) -> None:
        """Write the document to the file of `--report`, if there is one."""
        if self._report_file is not None:
            self._write_report(self._report_file, document)

    def error(self, error: CkptctlError) -> None:
        """Report why ckptctl could not do its work; with `--json` as a document too."""
        self.lines(error_lines(error.message, error.next_command), to=self.err)
        report_file, self._report_file = self._report_file, None
        if not self.as_json and report_file is None:
            return
        document = partial(error_document, error, self.command)
        if self.as_json and self.out.stream is not None:
            self.document(document)
        if report_file is not None:
            self._write_report(report_file, document)

    def _write_report(self, path: str, document: MakeDocument) -> None:
        from ckptctl.storage.files import replace_file

        replace_file(path, self._as_text(document()).encode("ascii"), "the report")

    def begin_line(self) -> None:
        """Begin a line on a terminal, which has echoed `^C` behind whatever was printed."""
        self._clear_progress()
        if self.err.terminal:
            self.err.write("\n")

    def trace(self, error: BaseException) -> None:
        """Print the traceback of an error, with its causes."""
        import traceback

        self.lines(
            (
                line(text_line, solid=True)
                for text in traceback.format_exception(error)
                for text_line in text.splitlines()
            ),
            to=self.err,
        )

    def progress(self, message: str, done: int = 0, total: int = 0, *, unit: str = "") -> None:
        """Show the progress, if a person may be waiting; `unit` `B` counts in bytes."""
        if self.talks and self.err.stream is not None:
            shown = self._activity or self._progress_lines
            shown.update(message, done, total, is_bytes=unit == "B")

    def flush(self) -> None:
        """Bring out what is still held back, so that a failure to do so is noticed."""
        self._clear_progress()
        for channel in (self.out, self.err):
            channel.write("")

    def _text(self, lines: Iterable[Line], channel: Channel) -> str:
        return "".join(f"{text}\n" for a_line in lines for text in self._rendered(a_line, channel))

    def _to_run(self, command: str) -> str:
        from ckptctl.starting import as_started

        return as_started(self._complete(command))

    def completed(self, a_line: Line) -> Line:
        """The line with its commands as the caller can run them: with their own options."""
        spans = tuple(
            span._replace(text=in_shell(self._to_run(span.text)))
            if span.style == "command"
            else span
            for span in a_line.spans
        )
        return a_line._replace(spans=spans)

    def _rendered(self, a_line: Line, channel: Channel) -> Iterable[str]:
        completed = self.completed(a_line)
        spans = tuple(span._replace(text=redacted(span.text)) for span in completed.spans)
        for part in wrapped(made_safe(completed._replace(spans=spans)), channel.width):
            if channel.color:
                from ckptctl.cli.console import styled

                yield styled(part)
            else:
                yield part.text

    def _as_text(self, document: Document) -> str:
        completed = {key: self._with_options(key, value) for key, value in document.items()}
        return as_text(redacted_values(completed))

    def _with_options(self, key: str, value: object) -> object:
        if key == "next_command" and isinstance(value, str):
            return self._to_run(value)
        if isinstance(value, dict):
            return {name: self._with_options(name, item) for name, item in value.items()}
        if isinstance(value, list):
            return [self._with_options(key, item) for item in value]
        return value

    def _stdout(self) -> TextIO:
        if self.out.stream is None:
            raise UsageError("standard output is closed, so there is nowhere to put the answer")
        return self.out.stream

    def _clear_progress(self) -> None:
        if self._activity is not None:
            self._activity.clear()


@contextmanager
def without_secrets() -> Iterator[None]:
    """Hide secrets in what libraries, warnings and `logging` write to standard error."""
    if sys.stderr is None:
        yield
        return
    with redirect_stderr(cast("TextIO", RedactedStream(sys.stderr))):
        yield


@contextmanager
def _writing() -> Iterator[None]:
    """Turn a full disk under an output into an error; a reader that left stays what it is."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(
            f"the output cannot be written: {error.strerror}", next_command="df -h"
        ) from error


def _write(stream: TextIO, text: str) -> None:
    with _writing():
        stream.write(text)
        stream.flush()


def _is_dumb() -> bool:
    """Whether the terminal can neither colour nor take a line away."""
    return os.environ.get("TERM") == "dumb"


def _terminal_width(stream: TextIO) -> int:
    if (columns := _columns("COLUMNS")) is not None:
        return columns
    try:
        return os.get_terminal_size(stream.fileno()).columns or _STRIP_WIDTH
    except OSError:
        return _STRIP_WIDTH


def _columns(variable: str) -> int | None:
    """A width that an environment variable states."""
    columns = os.environ.get(variable, "")
    fits = columns.isascii() and columns.isdigit() and int(columns[:6]) > 0
    return int(columns[:6]) if fits else None


def replace_text(path: str, text: str, what: str = "the report") -> None:
    """Replace a file by a text without secrets; see `replace_file`."""
    from ckptctl.storage.files import replace_file

    replace_file(path, redacted(text).encode("utf-8", "backslashreplace"), what)


_BEGINNINGS: Mapping[str, tuple[str, bytes]] = {
    "--metrics": ("metrics", rb"# HELP ckptctl_"),
    "--report": ("a document", rb'\{\s*"schema": "ckptctl\.'),
    "--plot": ("a plot", rb'<svg [^>]*class="ckptctl" '),
    "--hosts-file": ("a list of nodes", rb"[\w.\n-]*\Z"),
}


def check_output_file(option: str, path: str) -> None:
    """Raise `UsageError` where the FILE of an option is one that ckptctl did not write.

    It is known by the first bytes of the file: a list of nodes has nothing but names. An empty
    file, a pipe and a device may be written. Cost: one read.
    """
    what, beginning = _BEGINNINGS[option]
    if not path:
        raise OptionError(option, "has an empty name of a file")
    from ckptctl.storage.shared_places import open_named

    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return
        with os.fdopen(open_named(path), "rb") as file:
            first = file.read(_LONGEST_BEGINNING)
    except FileNotFoundError:
        return
    except OSError as error:
        raise OptionError(option, f"{path}: {error.strerror}") from error
    if first and re.match(beginning, first) is None:
        raise OptionError(
            option, f"{path}: the file exists and is not {what} of ckptctl; it is not overwritten"
        )


_LONGEST_BEGINNING = 96


def process_group(stack: ExitStack, out: Output) -> ProcessGroup:
    """The processes in which torchrun or srun started this command; only rank 0 prints."""
    from ckptctl.distributed.launcher import launched_rank
    from ckptctl.distributed.process_group import joined

    launched = launched_rank(os.environ)
    if launched is not None and launched.rank > 0:
        out.step_aside()
    return stack.enter_context(joined(launched, redacted(command_line(*sys.argv[1:]))))


class ProgressLines:
    """Reports through `write` how far a command is, every 30 seconds, in a log or a pipe."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._started_s = time.monotonic()
        self._next_s = self._started_s + _LINE_EVERY_S

    def update(self, message: str, done: int, total: int, *, is_bytes: bool) -> None:
        """Report `message`, with the share and the remaining time where `total` is known."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + _LINE_EVERY_S
        elapsed_s = max(now_s - self._started_s, 1e-3)
        if is_bytes:
            rate = size(int(done / elapsed_s))
            message += f" {size(done)} of {size(total)}, {rate}/s"
        if total:
            message += f", {100 * done // total} %"
        if total and done:
            message += f", {duration(elapsed_s * (total - done) / done)} left"
        self._write(f"{message}\n")


_LINE_EVERY_S = 30.0
