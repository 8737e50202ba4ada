"""Run Python modules in processes forked from one that has imported what they need.

Starting Python and importing costs 0.2 s of processor time for a command of ckptctl, often more
than the test's own work. A `ForkServer` imports once and forks for every call. A forked process
has arguments, variables, a folder, streams, a process number and an exit code of its own, as a
started one has, finds modules by its own PYTHONPATH, and is killed when its caller is. All of them
share one seed of string hashes, and what else Python reads when it starts (`PYTHON…`, the
encoding) is the server's: tests of these start a process.
"""

from __future__ import annotations

import atexit
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

import forked_call
from forked_call import ask, at_start


class ForkServer:
    """A process that imports `modules` at the first call and forks for every call.

    Its processes get `variables` when it starts; each forked one then gets its own.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._modules = modules
        self._variables = dict(variables)
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._folder = Path(tempfile.mkdtemp(prefix="ckptctl-forks-"))
        atexit.register(shutil.rmtree, self._folder, ignore_errors=True)

    @property
    def python(self) -> str:
        """A program in the place of `python` whose processes are forked, too, for `-c` and `-m`."""
        self._start()
        return str(self._folder / "python")

    def forks(self, variables: Mapping[str, str]) -> bool:
        """Whether a process with these variables, if started, would begin as a forked one does."""
        return at_start(variables) == at_start(self._variables)

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
        with self._lock:
            if self._process is not None:
                return
            about = (sys.executable, at_start(self._variables))
            (self._folder / "server").write_bytes(marshal.dumps(about))
            command = shlex.join([sys.executable, "-IS", forked_call.__file__, str(self._folder)])
            program = self._folder / "python"
            program.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
            program.chmod(0o755)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{self._folder}/socket")
                listener.listen(64)
                self._process = subprocess.Popen(
                    [sys.executable, __file__, str(listener.fileno()), *self._modules],
                    env=self._variables,
                    stdin=subprocess.PIPE,
                    pass_fds=[listener.fileno()],
                )
            atexit.register(self._process.wait)
            atexit.register(self._process.stdin.close)  # it ends when nobody can call it any more


def _file() -> IO[str]:
    return TemporaryFile("w+", encoding="utf-8", errors="surrogateescape")


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _serve(listener: socket.socket, modules: Sequence[str]) -> list[str]:
    """Fork for every call; returns in each forked process, with the words of its command line."""
    for module in modules:
        with suppress(ImportError):  # an extra that is not installed
            importlib.import_module(module)
    gc.freeze()
    # Ctrl-C is for the tests; this process ends with them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    waiting = select.poll()
    waiting.register(listener)
    waiting.register(sys.stdin)
    running: dict[int, tuple[int, int, int]] = {}
    while True:
        number, _ = waiting.poll()[0]
        if number == sys.stdin.fileno():
            for pid, _, _ in running.values():
                os.kill(pid, signal.SIGKILL)
            os._exit(0)
        if number == listener.fileno():
            (words, variables, cwd), (*standard, reply) = _accepted(listener)
            if (pid := os.fork()) == 0:
                for each in (listener.fileno(), reply, *running):
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


def _execute(flag: str, what: str, *words: str) -> None:
    """Run a module or code as `python` does with these words."""
    sys.argv, sys.path[0] = [what if flag == "-m" else flag, *words], os.getcwd()
    if flag == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = ""
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})


if __name__ == "__main__":
    _execute(*_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
