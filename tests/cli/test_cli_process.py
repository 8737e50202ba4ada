"""How the process behaves: streams, signals, terminals, errors."""

import contextlib
import fcntl
import os
import pty
import shlex
import signal
import struct
import subprocess
import termios
import time

import pytest
from command_line import COMMAND, clean_environment, run_program

import ckptctl as package


def on_a_terminal(*args, columns=80, cwd=None, env=None, command=COMMAND) -> tuple[int, str]:
    """Run a command on a terminal of its own; its exit code, and all that it wrote."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    process = subprocess.Popen(
        [*command, *map(str, args)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=cwd,
        env=clean_environment(**{"TERM": "xterm-256color", **(env or {})}),
    )
    os.close(theirs)
    written = b""
    # Linux ends a terminal that nobody holds any more with an error.
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 65536):
            written += piece
    os.close(ours)
    return process.wait(), written.decode().replace("\r\n", "\n")


@pytest.mark.parametrize("columns", [80, 200])
def test_on_a_terminal_no_line_is_longer_than_it_but_paths(broken_root, columns):
    _, shown = on_a_terminal("scan", "run", columns=columns, cwd=broken_root.parent)
    assert "\x1b[" in shown
    assert all(len(each) <= columns for each in plain(shown).splitlines())


def plain(text: str) -> str:
    pieces = text.split("\x1b[")
    return pieces[0] + "".join(piece.partition("m")[2] for piece in pieces[1:])


def test_colour_says_nothing_that_words_do_not_say(broken_root):
    _, colored = on_a_terminal("scan", "run", cwd=broken_root.parent)
    _, bare = on_a_terminal("scan", "run", cwd=broken_root.parent, env={"NO_COLOR": "1"})
    assert "\x1b" not in bare
    assert plain(colored) == bare


def test_pick_uses_no_colour_even_on_a_terminal(broken_root):
    code, shown = on_a_terminal("pick", "run", cwd=broken_root.parent)
    assert code == 0
    assert "\x1b" not in shown


@pytest.mark.parametrize(
    ("arguments", "env", "colored"),
    [
        ([], {}, False),
        ([], {"FORCE_COLOR": "1"}, True),
        ([], {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        (["--color", "always"], {"NO_COLOR": "1"}, True),
        (["--color", "never"], {"FORCE_COLOR": "1"}, False),
    ],
)
def test_colour_in_a_pipe_is_only_there_on_request(ckptctl, broken_root, arguments, env, colored):
    done = ckptctl("scan", broken_root, *arguments, env=env)
    assert ("\x1b[" in done.stdout) is colored


def test_a_dumb_terminal_gets_no_colour(broken_root):
    _, shown = on_a_terminal("scan", "run", cwd=broken_root.parent, env={"TERM": "dumb"})
    assert "\x1b" not in shown


def test_off_a_terminal_nothing_is_cut_and_nothing_is_wrapped(ckptctl, broken_root):
    done = ckptctl("scan", broken_root, env={"COLUMNS": "40"})
    (row,) = [each for each in done.stdout.splitlines() if each.startswith("!    30")]
    assert "cannot be read" in row
    assert "…" not in done.stdout


def test_an_ascii_locale_gets_ascii(ckptctl, broken_root):
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = ckptctl("scan", broken_root, env=env)
    assert done.returncode == 0
    assert done.stdout.isascii()
    assert "<- pick" in done.stdout


def test_a_reader_that_leaves_ends_it_quietly(ckptctl, sound_root, tmp_path):
    script = f"{shlex.join(COMMAND)} scan run | true; echo ${{PIPESTATUS[0]}}"
    done = run_program("bash", "-c", script, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout in ("141\n", "0\n")  # 0 where the reader was slower to leave


def test_a_pipe_that_nobody_reads_is_141(sound_root, tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    for command in (["scan", "run"], ["pick", "run"], ["show", "run@30", "--json"], ["--help"]):
        done = subprocess.run(
            [*COMMAND, *command],
            cwd=tmp_path,
            env=clean_environment(),
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert done.returncode == 141, command
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr
    os.close(writing)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize(
    "arguments",
    [["pick", "run"], ["scan", "run"], ["pick", "run", "--json"], ["--help"], ["scan", "--help"]],
)
def test_an_answer_that_cannot_be_written_is_a_failure(ckptctl, sound_root, arguments):
    with open("/dev/full", "w") as full:
        done = ckptctl(*arguments, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 2
    assert "the output cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_talk_that_cannot_be_written_changes_no_answer(ckptctl, broken_root):
    with open("/dev/full", "w") as full:
        picked = ckptctl("pick", "run", capture_output=False, stdout=subprocess.PIPE, stderr=full)
        missing = ckptctl("verify", "run@31", capture_output=False, stderr=full)
        ended = ckptctl(
            *("run", "--root", "run", "--no-restart-on", "3", "--", "sh", "-c", "exit 3"),
            capture_output=False,
            stderr=full,
        )
    assert (picked.returncode, picked.stdout) == (0, "run/step_10\n")
    assert missing.returncode == 2
    assert ended.returncode == 3


def test_a_closed_standard_output_is_a_failure_not_a_crash(sound_root, tmp_path):
    done = run_program("bash", "-c", f"{shlex.join(COMMAND)} pick run >&-", cwd=tmp_path)
    assert done.returncode == 2
    assert "standard output is closed" in done.stderr


def test_closed_standard_streams_are_no_crash(sound_root, tmp_path):
    done = subprocess.run(
        ["bash", "-c", f"{shlex.join(COMMAND)} verify run@30 -q >&- 2>&-"],
        cwd=tmp_path,
        env=clean_environment(),
    )
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["INT", "TERM", "HUP"],
)
def test_a_signal_ends_it_cleanly(sound_root, tmp_path, number, exit_code):
    # A pipe that is full and that nobody reads holds the command up while it writes.
    reading, writing = os.pipe()
    filler = b"x" * 65536
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, filler)
    os.set_blocking(writing, True)
    process = subprocess.Popen(
        [*COMMAND, "scan", "run"],
        cwd=tmp_path,
        env=clean_environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writing)
    wait_until_it_sleeps_in_a_write(process.pid)
    process.send_signal(number)
    _, stderr = process.communicate()
    os.close(reading)
    assert process.returncode == exit_code
    assert stderr == f"error: ended by {number.name}; no file was left half written\n"


def wait_until_it_sleeps_in_a_write(pid: int) -> None:
    for _ in range(600):
        with open(f"/proc/{pid}/wchan") as wchan:
            if "pipe" in wchan.read():
                return
        time.sleep(0.05)
    pytest.fail("the command did not get to write its answer")


def test_an_error_is_two_lines_and_never_a_traceback(ckptctl):
    done = ckptctl("verify", "nowhere@30")
    assert done.returncode == 2
    first, second = done.stderr.splitlines()
    assert first.startswith("error: ")
    assert second.startswith("next:  ckptctl ")


def test_debug_shows_where_an_error_comes_from(ckptctl):
    done = ckptctl("verify", "nowhere@30", "--debug")
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.splitlines()[-2].startswith("error: ")
    assert "Traceback" in ckptctl("verify", "nowhere@30", env={"CKPTCTL_DEBUG": "1"}).stderr


@pytest.mark.parametrize(
    ("arguments", "said", "command"),
    [
        (["sacn"], "did you mean 'scan'?", "ckptctl scan"),
        (["pick", "x", "--lvl", "y"], "--level", "ckptctl pick --help"),
        (["pick"], "missing argument 'ROOT...'", "ckptctl pick --help"),
        (["verify", "x", "--timeout", "0"], "is less than 0.1", "ckptctl verify --help"),
        (
            ["explain", "shard.truncted"],
            "did you mean shard.truncated",
            "ckptctl explain shard.truncated",
        ),
        (["scan", "x", "--storage-option", "y"], "KEY=VALUE", "--storage-option anon=true"),
        (["pick", "x", "--skip", "y"], "step numbers, not 'y'", "--skip 1400,1600"),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(ckptctl, arguments, said, command):
    done = ckptctl(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said.lower() in done.stderr.lower()
    assert done.stderr.rstrip().endswith(command)


def test_a_bug_is_one_line_without_a_traceback(ckptctl, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import ckptctl.selection.picking as p\n"
        "def pick(*args, **kwargs): raise ZeroDivisionError('for the test')\n"
        "p.pick = pick\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{clean_environment()['PYTHONPATH']}"}
    done = ckptctl("pick", "my run", env=env)
    assert done.returncode == 1
    assert done.stderr == (
        "error: ZeroDivisionError: for the test; "
        f"this is a bug in ckptctl {package.__version__}\n"
        "next:  ckptctl pick 'my run' --debug\n"
    )


@pytest.mark.parametrize(
    "error",
    [
        "MemoryError()",
        "SystemError('error return without exception set')",
        "SystemError('<method> returned NULL without setting an exception')",
        "SystemError('<method> returned a result with an exception set')",
    ],
)
def test_too_little_memory_is_no_bug(ckptctl, tmp_path, error):
    (tmp_path / "sitecustomize.py").write_text(
        "import ckptctl.selection.picking as p\n"
        f"def pick(*args, **kwargs): raise {error}\n"
        "p.pick = pick\n"
    )
    env = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{clean_environment()['PYTHONPATH']}"}
    done = ckptctl("pick", "my run", env=env)
    assert done.returncode == 75
    assert done.stderr.startswith("error: there is not enough memory; nothing is known")


def test_without_arguments_it_helps_but_does_not_succeed(ckptctl):
    done = ckptctl()
    assert done.returncode == 2
    assert "Usage: ckptctl" in done.stdout


def test_the_version_is_said(ckptctl):
    done = ckptctl("--version")
    assert (done.returncode, done.stdout) == (0, f"ckptctl {package.__version__}\n")


def test_a_variable_that_states_a_version_asks_for_nothing(ckptctl, sound_root):
    variables = {"CKPTCTL_VERSION": "1", "CKPTCTL_HELP": "1", "CKPTCTL_SHOW_COMPLETION": "bash"}
    assert ckptctl("pick", sound_root, env=variables).stdout == f"{sound_root}/step_30\n"
