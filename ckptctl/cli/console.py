"""Draw on a terminal with rich, which is imported there only, and only when something is drawn.

Text is wrapped before (`rendering.wrapped`): rich would break commands and paths.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import IO, TYPE_CHECKING, Any, cast

from ckptctl.cli.rendering import Line, Style
from ckptctl.formatting import safe, size
from ckptctl.storage.waiting import operation_in_flight, start_daemon

if TYPE_CHECKING:
    from rich.console import Console, OverflowMethod
    from rich.progress import Progress, ProgressColumn

    from ckptctl.cli.output import Channel

# Of 256 colours those that can be read on a white and on a black background, with a contrast of
# 3.8 at least; rich takes the nearest where a terminal has fewer. Glyphs and words carry the
# same information.
_STYLES: Mapping[Style, str] = {
    "good": "color(28)",
    "warn": "color(166)",
    "bad": "bold color(160)",
    "strong": "bold",
    "name": "bold",
    "command": "bold color(32)",
    "code": "bold color(32)",
}


def styled(a_line: Line) -> str:
    """The line with its styles as the terminal shows them."""
    from rich.text import Text

    text = Text.assemble(*((span.text, _STYLES.get(span.style, "")) for span in a_line.spans))
    console = _styles_console()
    with console.capture() as capture:
        console.print(text, soft_wrap=True, end="")
    return capture.get()


@cache
def _styles_console() -> Console:
    """What draws styles; whether there are any is decided before."""
    from rich.console import Console

    is_dumb = os.environ.get("TERM") in ("dumb", "unknown")
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        no_color=False,
        color_system="standard" if is_dumb else "auto",
        highlight=False,
        legacy_windows=False,
    )


_SHOWN_AFTER_S = 1.0
_CHECKED_EVERY_S = 0.2
_DRAWN_PER_S = 8
_BAR_CELLS = 12


class Activity:
    """One line at the foot of a terminal while a command works and prints nothing.

    After a second of silence it has a spinner, what is waited for and the elapsed time; with
    `update` a bar, the remaining time, and for bytes their number and rate. Its message is
    shortened to the width, nothing else. A thread of its own draws it.
    """

    def __init__(self, channel: Channel, message: str) -> None:
        self._channel = channel
        self._message = message
        self._done = self._total = 0
        self._is_bytes = False
        self._began_s = self._silent_since_s = time.monotonic()
        self._progress: Progress | None = None
        self._task: Any = None
        self._is_drawn = False
        self._is_paused = False
        self._lock = threading.RLock()
        self._closed = threading.Event()
        start_daemon("ckptctl-activity", self._watch)

    def update(self, message: str, done: int, total: int, *, is_bytes: bool) -> None:
        """Show `message`, and a bar where `total` is known; may be called at any rate."""
        with self._lock:
            self._message, self._done, self._total = message, done, total
            self._is_bytes = is_bytes
            if self._progress is not None:
                self._progress.update(
                    self._task,
                    description=message,
                    completed=done,
                    total=total or None,
                    is_bytes=is_bytes,
                )

    def clear(self) -> None:
        """Take the line away, before something else is printed."""
        with self._lock:
            self._silent_since_s = time.monotonic()
            if self._is_drawn and self._progress is not None:
                self._is_drawn = False
                self._progress.stop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Draw nothing, while a person types or another program writes."""
        with self._lock:
            self._is_paused = True
            self.clear()
        try:
            yield
        finally:
            with self._lock:
                self._is_paused = False
                self._silent_since_s = time.monotonic()

    def close(self) -> None:
        """Take the line away for good."""
        self._closed.set()
        self.clear()

    def _watch(self) -> None:
        while not self._closed.wait(_CHECKED_EVERY_S):
            with self._lock:
                silent_s = time.monotonic() - self._silent_since_s
                if silent_s < _SHOWN_AFTER_S or self._is_drawn or self._is_paused:
                    continue
                if self._closed.is_set():
                    return
                if self._progress is None:
                    self._progress = self._made()
                self._is_drawn = True
                self._progress.start()

    def _made(self) -> Progress:
        from rich.console import Console, ConsoleDimensions
        from rich.progress import Progress

        channel = self._channel

        class Terminal(Console):
            """The terminal as it is at the moment, with its cursor.

            Nobody would show a hidden one again after Ctrl-Z, a quit or a kill.
            """

            def show_cursor(self, show: bool = True) -> bool:  # noqa: ARG002
                """Change nothing."""
                return False

            @property  # type: ignore[misc]  # nothing sets it
            def size(self) -> ConsoleDimensions:
                """The `^C` that a terminal echoes fits behind: two rows cannot be cleared."""
                return ConsoleDimensions(max(1, channel.current_width - 3), 25)

        progress = Progress(
            *_columns(unicode=channel.unicode),
            console=Terminal(
                file=cast("IO[str]", _Lossy(channel)),
                force_terminal=True,
                no_color=bool(os.environ.get("NO_COLOR")),
                legacy_windows=False,
            ),
            transient=True,
            refresh_per_second=_DRAWN_PER_S,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        self._task = progress.add_task(
            self._message,
            completed=self._done,
            total=self._total or None,
            is_bytes=self._is_bytes,
            start=False,
        )
        progress.tasks[0].start_time = self._began_s
        return progress


class _Lossy(io.TextIOBase):
    """The stream of a channel as rich writes to it: what a closed terminal loses is no error."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """`ascii` has rich draw with its characters."""
        return "utf-8" if self._channel.unicode else "ascii"

    def write(self, text: str) -> int:
        """Write and flush."""
        self._channel.write(text)
        return len(text)


def _columns(*, unicode: bool) -> list[ProgressColumn]:
    """The columns of the line: all keep their width, but for the message."""
    from rich.progress import (
        BarColumn,
        ProgressColumn,
        SpinnerColumn,
        Task,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )
    from rich.table import Column
    from rich.text import Text

    class Message(ProgressColumn):
        """What the command does, and the file or address that it waits for."""

        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            awaited = "" if task.total else operation_in_flight()
            message = f"{task.description}: {awaited}" if awaited else task.description
            cut: OverflowMethod = "ellipsis" if unicode else "crop"
            return Text(safe(message), no_wrap=True, overflow=cut)

    class Bar(BarColumn):
        """The share as a bar, where the total is known."""

        def render(self, task: Task) -> Any:
            return super().render(task) if task.total else Text()

    class Facts(TimeRemainingColumn):
        """The share and the remaining time, of bytes their number and rate; or the elapsed time."""

        def render(self, task: Task) -> Text:
            if not task.total:
                return Text(TimeElapsedColumn().render(task).plain)
            counted = ""
            if task.fields["is_bytes"]:
                counted = f"{size(int(task.completed))} of {size(int(task.total))}, "
                counted += f"{size(int(task.speed))}/s, " if task.speed else ""
            return Text(f"{counted}{task.percentage:.0f} % {super().render(task).plain} left")

    def fixed() -> Column:
        return Column(no_wrap=True)

    return [
        SpinnerColumn("dots" if unicode else "line", style=_STYLES["code"], table_column=fixed()),
        Message(),
        Bar(bar_width=_BAR_CELLS, complete_style=_STYLES["good"], table_column=fixed()),
        Facts(table_column=fixed()),
    ]
