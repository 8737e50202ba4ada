"""What a long-running command shows on a terminal, and writes to a log."""

import contextlib
import io
import os
import pty
import re
import signal
import subprocess
import sys
import termios
import threading
from itertools import pairwise

import pytest
from command_line import COMMAND, clean_environment
from test_cli_process import on_a_terminal, plain

from ckptctl.cli import console, output
from ckptctl.cli.output import ProgressLines

# A command that is longer silent than the terminal waits, then compares bytes for a while.
AT_WORK = """
import sys, time
from ckptctl.cli.output import Output
from ckptctl.storage.waiting import Operation
out = Output("verify")
with out.at_work("verify"):
    with Operation("/shared/a-root-with-a-name-that-is-long/and-longer/step_100/__0_0.distcp"):
        time.sleep(2.5)
    total = 10 << 40
    for turn in range(1, 60):
        message = "compared with the checksums of the records"
        out.progress(message, turn * total // 80, total, unit="B")
        time.sleep(0.05)
    out.tell("a note")
"""


@pytest.fixture
def clock(monkeypatch):
    """A clock that a test sets."""
    now = [1000.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    return now


def logged(clock, *, until_s: float, every_s: float = 0.05, unit: str = "") -> str:
    stream = io.StringIO()
    lines = ProgressLines(stream.write)
    for turn in range(int(until_s / every_s) + 1):
        clock[0] = 1000.0 + turn * every_s
        total = int(until_s / every_s)
        lines.update(f"{turn} steps inspected", turn, total, is_bytes=unit == "B")
    return stream.getvalue()


def test_a_quick_command_logs_no_progress(clock):
    assert logged(clock, until_s=29) == ""


def test_a_log_gets_a_plain_line_every_half_minute(clock):
    lines = logged(clock, until_s=100).splitlines()
    assert len(lines) == 3
    assert all("\x1b" not in text and "\r" not in text for text in lines)
    counts = [int(text.split()[0]) for text in lines]
    assert all(later - earlier >= 600 for earlier, later in pairwise(counts))
    assert ", 30 %, 70 s left" in lines[0]


def test_bytes_are_logged_with_their_rate(clock):
    first = logged(clock, until_s=100, unit="B").splitlines()[0]
    assert first == "600 steps inspected 600 B of 2.0 KiB, 20 B/s, 30 %, 70 s left"


@pytest.fixture(scope="module", params=[80, 120])
def drawn(request) -> tuple[int, list[str]]:
    """The width of a terminal, and what stood in its last line one after the other."""
    _, shown = on_a_terminal("-c", AT_WORK, columns=request.param, command=(sys.executable,))
    pieces = re.split(r"\r|\n|\x1b\[2K|\x1b\[1A", shown)
    frames = [re.sub(r"\x1b\[\??[0-9;]*[a-zA-Z]", "", piece) for piece in pieces]
    return request.param, [*filter(None, frames)]


def test_the_line_fits_the_terminal(drawn):
    columns, frames = drawn
    assert max(map(len, frames)) < columns


def test_a_silent_wait_has_a_spinner_the_elapsed_time_and_what_is_waited_for(drawn):
    _, frames = drawn
    waits = [frame for frame in frames if " verify: /shared/" in frame]
    assert len({frame[0] for frame in waits}) > 1
    assert all(re.search(r" \d:\d\d:\d\d$", frame) for frame in waits)


def test_the_remaining_time_is_never_cut(drawn):
    _, frames = drawn
    bars = [frame for frame in frames if " of 10.0 TiB" in frame]
    assert len(bars) > 3
    assert all(re.search(r"\d+ % [\d:-]+ left$", frame) for frame in bars)


def test_the_line_is_gone_before_something_is_printed(drawn):
    assert drawn[1][-1] == "ckptctl: a note"


def test_a_dumb_terminal_and_no_color_are_obeyed():
    _, dumb = on_a_terminal("-c", AT_WORK, command=(sys.executable,), env={"TERM": "dumb"})
    assert dumb == "ckptctl: a note\n"
    _, bare = on_a_terminal("-c", AT_WORK, command=(sys.executable,), env={"NO_COLOR": "1"})
    assert not re.search(r"\x1b\[[0-9;]*(3[0-8]|4[0-8])[;m]", bare)


def test_an_ascii_terminal_gets_ascii():
    env = {"PYTHONIOENCODING": "ascii"}
    _, shown = on_a_terminal("-c", AT_WORK, command=(sys.executable,), env=env)
    assert " verify: /shared/" in plain(shown)
    assert shown.isascii()
    assert "\\u" not in shown


def test_a_terminal_that_is_closed_changes_no_exit_code(tmp_path):
    """Nobody reads the other end any more: every write to the terminal fails."""
    ours, theirs = pty.openpty()
    code = AT_WORK + "open('done', 'w').close()"
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
        env=clean_environment(TERM="xterm-256color"),
    )
    os.close(theirs)
    os.read(ours, 1)  # the line is drawn
    os.close(ours)
    assert process.wait() == 0
    assert (tmp_path / "done").exists()


def test_a_wait_for_a_log_names_it_and_its_end_by_any_signal_leaves_a_cursor(tmp_path):
    os.mkfifo(tmp_path / "train.log")  # nobody writes to it
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "classify", "train.log"],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        cwd=tmp_path,
        env=clean_environment(TERM="xterm-256color"),
    )
    os.close(theirs)
    shown = b""
    while b"classify: train.log" not in shown:
        shown += os.read(ours, 65536)
    process.send_signal(signal.SIGINT)
    # Python runs no handler if the signal comes right before `open` begins to wait.
    again = threading.Timer(20, process.send_signal, [signal.SIGINT])
    again.start()
    with contextlib.suppress(OSError):  # the end of a terminal
        while piece := os.read(ours, 65536):
            shown += piece
    os.close(ours)
    assert process.wait() == 130
    again.cancel()
    assert "error: ended by SIGINT" in plain(shown.decode())
    assert b"\x1b[?25l" not in shown  # a stop or a kill could not bring it back


def test_the_line_follows_the_width_of_the_terminal(monkeypatch):
    """A shell and a terminal multiplexer set another size while the command works."""
    monkeypatch.delenv("COLUMNS", raising=False)
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    with open(theirs, "w", encoding="utf-8") as stream:
        channel = output.Channel.on(stream, "never", must_arrive=False)
        activity = console.Activity(channel, "verify")
        try:
            drawn_on = activity._made().console
            assert drawn_on.width == 117
            termios.tcsetwinsize(theirs, (24, 60))
            assert drawn_on.width == drawn_on.options.max_width == 57
        finally:
            activity.close()
    os.close(ours)
