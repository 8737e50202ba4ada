"""Run Python modules in processes forked from one that has imported what they need.

Starting Python and importing costs 0.2 s of processor time for a command of ckptctl, often more
than the test's own work. A `ForkServer` imports once and forks for every call. A forked process
has arguments, variables, a folder, streams, a process number and an exit code of its own, as a
started one has, finds modules by its own PYTHONPATH, and is killed when its caller is. All of them
share one seed of string hashes, and what else Python reads when it starts (`PYTHON…`, the
encoding) is the server's: tests of these start a process.

The workers of a run of pytest share their servers, each started by the worker that needs it first.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import importlib
import marshal
import os
import runpy
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, NoReturn

import forked_call
from forked_call import ask, at_start

_RUN = "CKPTCTL_TEST_RUN"


@cache
def whole_run() -> tuple[int, Path]:
    """The process that was first to ask, before it started workers, and a folder that they share.

    The folder is gone with that process.
    """
    if _RUN not in os.environ:
        folder = tempfile.mkdtemp(prefix="ckptctl-tests-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        os.environ[_RUN] = f"{os.getpid()} {folder}"
    number, folder = os.environ[_RUN].split(" ", 1)
    return int(number), Path(folder)


class ForkServer:
    """A process that imports `modules` at the first call and forks for every call.

    It begins with `variables`; each forked process then gets its own. Servers of one `name` are
    one in all workers of a run, with whose end it ends.
    """

    def __init__(self, name: str, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._modules = modules
        self._variables = dict(variables)
        number, folder = whole_run()
        self._run = number
        self._folder = folder / name
        self._at_start: Mapping[str, str] | None = None

    @property
    def python(self) -> str:
        """A program in the place of `python` whose processes are forked, too, for `-c` and `-m`."""
        self._start()
        return str(self._folder / "python")

    def forks(self, variables: Mapping[str, str]) -> bool:
        """Whether a process with these variables, if started, would begin as a forked one does."""
        self._start()
        return at_start(variables) == self._at_start

    def run(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None = None,
        input: str = "",  # noqa: A002 - as `subprocess.run` names it
    ) -> subprocess.CompletedProcess[str]:
        """Run `python WORDS` to its end, as `subprocess.run` with `capture_output` does."""
        self._start()
        with _file() as out, _file() as err:
            reading, writing = os.pipe()
            try:
                streams = (reading, out.fileno(), err.fileno())
                reply = ask(self._folder, words, env, os.path.abspath(cwd or os.curdir), streams)
            finally:
                os.close(reading)
            with suppress(BrokenPipeError), os.fdopen(writing, "wb") as stdin:
                stdin.write(input.encode("utf-8", "surrogateescape"))
            with os.fdopen(reply, "rb") as file:
                code = file.read()
            if not code:
                raise ChildProcessError(f"the fork server has ended; it was to run {words}")
            texts = [_read(stream) for stream in (out, err)]
        return subprocess.CompletedProcess(list(words), int(code), *texts)

    def _start(self) -> None:
        """Start it unless this worker or another one has."""
        if self._at_start is not None:
            return
        self._folder.mkdir(exist_ok=True)
        about = self._folder / "server"
        with (self._folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not about.exists():
                self._start_first()
                about.write_bytes(marshal.dumps((sys.executable, at_start(self._variables))))
        _, self._at_start = marshal.loads(about.read_bytes())

    def _start_first(self) -> None:
        command = shlex.join([sys.executable, "-IS", forked_call.__file__, str(self._folder)])
        program = self._folder / "python"
        program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        program.chmod(0o755)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"{self._folder}/socket")
            listener.listen(64)
            numbers = (str(listener.fileno()), str(self._run))
            # It outlives what starts it, and whoever reads the output of that to its end.
            with open(self._folder / "log", "wb") as log:
                self._process = subprocess.Popen(
                    [sys.executable, __file__, *numbers, *self._modules],
                    env=self._variables,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=[listener.fileno()],
                )


def _file() -> IO[str]:
    return TemporaryFile("w+", encoding="utf-8", errors="surrogateescape")


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _serve(listener: socket.socket, run: int, modules: Sequence[str]) -> list[str]:
    """Fork for every call; returns in each forked process, with the words of its command line.

    It ends with the process `run`.
    """
    run_end = os.pidfd_open(run)
    for module in modules:
        with suppress(ImportError):  # an extra that is not installed
            importlib.import_module(module)
    for each in weakref.finalize._registry:  # type: ignore[attr-defined]
        each.atexit = False  # torch would take itself apart
    gc.freeze()
    # Ctrl-C is for the tests; this process ends with them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waiting = select.poll()
    waiting.register(listener)
    waiting.register(run_end, select.POLLIN)
    running: dict[int, tuple[int, int, int]] = {}
    while True:
        number, _ = waiting.poll()[0]
        if number == run_end:
            for pid, _, _ in running.values():
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if number == listener.fileno():
            (words, variables, cwd), (*standard, reply) = _accepted(listener)
            if (pid := os.fork()) == 0:
                for each in (listener.fileno(), run_end, reply, *running):
                    os.close(each)
                return _become(words, variables, cwd, standard)
            for each in standard:
                os.close(each)
            end = os.pidfd_open(pid)
            for each, event in ((end, select.POLLIN), (reply, 0)):
                waiting.register(each, event)
                running[each] = (pid, end, reply)
            continue
        pid, end, reply = running[number]
        if number == reply:  # an error of this pipe is that its reader has ended
            waiting.unregister(reply)
            os.kill(pid, signal.SIGKILL)
            continue
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(BrokenPipeError):
            os.write(reply, b"%d" % code)
        for each in (end, reply):
            with suppress(KeyError):
                waiting.unregister(each)
            os.close(each)
            del running[each]


def _accepted(listener: socket.socket) -> tuple[Any, Sequence[int]]:
    """The next call, and its streams with the pipe for its exit code."""
    call, _ = listener.accept()
    with call:
        head, streams, _, _ = socket.recv_fds(call, 4, 4)
        body = b""
        while len(body) < int.from_bytes(head, "big"):
            body += call.recv(int.from_bytes(head, "big") - len(body))
    return marshal.loads(body), streams


def _become(
    words: list[str], variables: Mapping[str, str], cwd: str, streams: Sequence[int]
) -> list[str]:
    """Be the process that was asked for: with its streams, folder and variables."""
    for target, number in enumerate(streams):
        os.dup2(number, target)
        os.close(number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(cwd)
    ours, theirs = (_found_by(each) for each in (os.environ, variables))
    sys.path[1 : 1 + len(ours)] = theirs
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()
    return words


def _found_by(variables: Mapping[str, str]) -> list[str]:
    return [path for path in variables.get("PYTHONPATH", "").split(":") if path]


def _execute(flag: str, what: str, *words: str) -> int:
    """Run a module or code as `python` does with these words; returns an exit code."""
    if flag == "-P":
        flag, what, *words = (what, *words)
        del sys.path[0]
    else:
        sys.path[0] = os.getcwd() if flag == "-m" else ""
    sys.argv = [what if flag == "-m" else flag, *words]
    try:
        if flag == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    return 0


def _end(code: int) -> NoReturn:
    """End as Python does, but leave the memory to the system.

    To free each object of torch takes 0.3 s of processor time.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for stream in (sys.stdout, sys.stderr):
            if not stream.closed:
                stream.flush()
    except OSError:
        os._exit(120)
    os._exit(code)


if __name__ == "__main__":
    _end(_execute(*_serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), sys.argv[3:])))
