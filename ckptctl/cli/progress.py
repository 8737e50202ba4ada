"""Show progress.

On a terminal a bar on standard error, once a second has gone by; elsewhere a
plain line every 30 seconds, so that a log shows life and nothing more.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ckptctl.formatting import duration, size

_BAR_AFTER_S = 1.0
_BAR_EVERY_S = 0.1
_LINE_EVERY_S = 30.0
_BAR_CELLS = 24


class Progress:
    """Tells by `write` how far something is; `update` as often as you like."""

    def __init__(self, write: Callable[[str], None], *, terminal: bool) -> None:
        self._write = write
        self._terminal = terminal
        self._started_s = time.monotonic()
        self._next_s = self._started_s + (_BAR_AFTER_S if terminal else _LINE_EVERY_S)
        self._shown = False

    def update(self, said: str, done: int = 0, total: int = 0, *, unit: str = "") -> None:
        """Show `said`, with a bar where `total` is known; at most as often as is useful.

        With `unit` `B`, `done` and `total` are bytes, and are shown, with their rate.
        """
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        text = f"{said}{self._bytes(done, total, now_s)}" if unit == "B" else said
        if total:
            text = f"{text}, {100 * done // total} %{self._left(done, total, now_s)}"
        if self._terminal:
            bar = _bar(done, total) if total else ""
            self._write(f"\r\x1b[K{bar}{text}"[: _BAR_CELLS + 56])
            self._next_s = now_s + _BAR_EVERY_S
        else:
            self._write(f"{text}\n")
            self._next_s = now_s + _LINE_EVERY_S
        self._shown = True

    def clear(self) -> None:
        """Take the bar away, before something else is printed."""
        if self._shown and self._terminal:
            self._write("\r\x1b[K")
            self._shown = False

    def _bytes(self, done: int, total: int, now_s: float) -> str:
        rate = done / max(now_s - self._started_s, 1e-3)
        return f" {size(done)} of {size(total)}, {size(int(rate))}/s"

    def _left(self, done: int, total: int, now_s: float) -> str:
        if not done:
            return ""
        left_s = (now_s - self._started_s) * (total - done) / done
        return f", {duration(left_s)} left"


def _bar(done: int, total: int) -> str:
    filled = _BAR_CELLS * done // total
    return f"[{'#' * filled}{'.' * (_BAR_CELLS - filled)}] "
