"""Run Python programs in processes forked from one that has imported what they need.

Starting Python and importing costs 0.2 s of processor time for a command of ckptctl and more
than 2 s for torch, often more than the test's own work. A `ForkServer` imports once and forks
for every call. A forked process has arguments, variables, a folder, streams, a process number
and an exit code of its own, as a started one has. It shares the seed of string hashes with
its brothers, and what Python reads when it starts (`PYTHON…`, the encoding) is the server's:
tests of these start a process.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO


class Forked:
    """A forked process, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, args: Sequence[str], reply: IO[bytes]) -> None:
        self.args = args
        self._reply = reply
        first = reply.readline()
        if not first:
            raise ChildProcessError(f"the fork server has ended; it was to run {args}")
        self.pid = int(first)
        self.returncode: int | None = None
        self.stdin: IO[str] | None = None
        self.stdout: IO[str] | None = None
        self.stderr: IO[str] | None = None

    def wait(self) -> int:
        """Wait for the end; the exit code, negative for a signal."""
        if self.returncode is None:
            self.returncode = int(self._reply.readline())
            self._reply.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended and somebody has waited for it."""
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[str, str]:
        """Close its input, read both outputs to their ends, and wait for it."""
        said: dict[str, str] = {}

        def read(name: str) -> None:
            stream = getattr(self, name)
            if not stream.closed:
                said[name] = stream.read()
                stream.close()

        if not self.stdin.closed:
            with suppress(BrokenPipeError):
                self.stdin.close()
        beside = threading.Thread(target=read, args=("stderr",))
        beside.start()
        read("stdout")
        beside.join()
        self.wait()
        return said.get("stdout", ""), said.get("stderr", "")


class ForkServer:
    """A process that imports `modules` at the first call and forks for every call.

    Its processes get `variables` when it starts; each forked one then gets its own.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._modules = modules
        self._variables = dict(variables)
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()

    def run(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None = None,
        input: str = "",  # noqa: A002 - as `subprocess.run` names it
    ) -> subprocess.CompletedProcess[str]:
        """Run `python ARGS` to its end, as `subprocess.run` with `capture_output` does."""
        with _file() as out, _file() as err:
            reading, writing = os.pipe()
            try:
                started = self._start(args, env, cwd, (reading, out.fileno(), err.fileno()))
            finally:
                os.close(reading)
            with suppress(BrokenPipeError), os.fdopen(writing, "wb") as stdin:
                stdin.write(input.encode("utf-8", "surrogateescape"))
            code = started.wait()
            texts = [_read(stream) for stream in (out, err)]
        return subprocess.CompletedProcess(list(args), code, *texts)

    def popen(self, args: Sequence[str], *, env: Mapping[str, str], new_session: bool) -> Forked:
        """Start `python ARGS` with pipes to its three streams."""
        pipes = [os.pipe() for _ in range(3)]
        theirs = (pipes[0][0], pipes[1][1], pipes[2][1])
        try:
            started = self._start(args, env, None, theirs, new_session)
        finally:
            for number in theirs:
                os.close(number)
        started.stdin = os.fdopen(pipes[0][1], "w")
        started.stdout = os.fdopen(pipes[1][0])
        started.stderr = os.fdopen(pipes[2][0])
        return started

    def _start(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        streams: tuple[int, int, int],
        new_session: bool = False,
    ) -> Forked:
        request = {
            "args": list(map(str, args)),
            "env": dict(env),
            "cwd": os.path.abspath(cwd or os.curdir),
            "new_session": new_session,
        }
        body = json.dumps(request).encode()
        reading, writing = os.pipe()
        try:
            with self._lock:
                to = self._connection()
                socket.send_fds(to, [len(body).to_bytes(4, "big")], [*streams, writing])
                to.sendall(body)
        finally:
            os.close(writing)
        return Forked(request["args"], os.fdopen(reading, "rb"))

    def _connection(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), *self._modules],
                    env=self._variables,
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                )
            atexit.register(process.wait)
            atexit.register(self._socket.close)  # it ends when nobody can call it any more
        return self._socket


def _file() -> IO[str]:
    return TemporaryFile("w+", encoding="utf-8", errors="surrogateescape")


def _read(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _serve(calls: socket.socket, modules: Sequence[str]) -> list[str]:
    """Fork for every call; returns in each forked process, with the words of its command line."""
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    # Ctrl-C is for the tests; this process ends with them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        head, streams, _, _ = socket.recv_fds(calls, 4, 4)
        if not head:
            os._exit(0)
        body = b""
        while len(body) < int.from_bytes(head, "big"):
            body += calls.recv(int.from_bytes(head, "big") - len(body))
        if os.fork() == 0:
            calls.close()
            return _become(json.loads(body), streams)
        for number in streams:
            os.close(number)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _become(request: dict, streams: Sequence[int]) -> list[str]:
    """Fork the process that was asked for; its parent stays to report how it ends."""
    *standard, reply = streams
    pid = os.fork()
    if pid:
        for number in (0, 1, 2, *standard):
            os.close(number)
        os.write(reply, b"%d\n" % pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(BrokenPipeError):
            os.write(reply, b"%d\n" % code)
        os._exit(0)
    os.close(reply)
    for target, number in enumerate(standard):
        os.dup2(number, target)
        os.close(number)
    if request["new_session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    time.tzset()
    return request["args"]


def _execute(args: Sequence[str]) -> None:
    """Run a module (`-m`), a text (`-c`) or a file, as Python does with these words."""
    kind, *rest = args
    if kind == "-m":
        sys.argv, sys.path[0] = rest, os.getcwd()
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if kind == "-c":
        text, name = rest[0], "<string>"
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
    else:
        text, name = Path(kind).read_text(), kind
        sys.argv, sys.path[0] = [kind, *rest], os.path.dirname(kind)
        main.__file__ = kind
    exec(compile(text, name, "exec"), main.__dict__)


if __name__ == "__main__":
    _execute(_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
