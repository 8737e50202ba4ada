"""Run Python modules in processes forked from one that has imported what they need.

Starting Python and importing costs 0.2 s of processor time for a command of ckptctl, often more
than the test's own work. A `ForkServer` imports once and forks for every call. A forked process
has arguments, variables, a folder, streams, a process number and an exit code of its own, as a
started one has. All of them share one seed of string hashes, and what Python reads when it
starts (`PYTHON…`, the encoding) is the server's: tests of these start a process.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from tempfile import TemporaryFile
from typing import IO


class ForkServer:
    """A process that imports `modules` at the first call and forks for every call.

    Its processes get `variables` when it starts; each forked one then gets its own.
    """

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        self._modules = modules
        self.variables = dict(variables)
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
        """Run `python -m ARGS` to its end, as `subprocess.run` with `capture_output` does."""
        with _file() as out, _file() as err:
            reading, writing = os.pipe()
            try:
                reply = self._call(args, env, cwd, (reading, out.fileno(), err.fileno()))
            finally:
                os.close(reading)
            with suppress(BrokenPipeError), os.fdopen(writing, "wb") as stdin:
                stdin.write(input.encode("utf-8", "surrogateescape"))
            with reply:
                code = reply.read()
            if not code:
                raise ChildProcessError(f"the fork server has ended; it was to run {args}")
            texts = [_read(stream) for stream in (out, err)]
        return subprocess.CompletedProcess(list(args), int(code), *texts)

    def _call(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        streams: tuple[int, int, int],
    ) -> IO[bytes]:
        """Have a process forked; gives the pipe in which its exit code will be."""
        call = {"args": list(args), "env": dict(env), "cwd": os.path.abspath(cwd or os.curdir)}
        body = json.dumps(call).encode()
        reading, writing = os.pipe()
        try:
            with self._lock:
                to = self._connection()
                socket.send_fds(to, [len(body).to_bytes(4, "big")], [*streams, writing])
                to.sendall(body)
        finally:
            os.close(writing)
        return os.fdopen(reading, "rb")

    def _connection(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair()
            with theirs:
                process = subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno()), *self._modules],
                    env=self.variables,
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
        with suppress(ImportError):  # an extra that is not installed
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


def _become(call: dict, streams: Sequence[int]) -> list[str]:
    """Fork the process that was asked for; its parent stays to report its exit code."""
    *standard, reply = streams
    if pid := os.fork():
        for number in (0, 1, 2, *standard):
            os.close(number)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(BrokenPipeError):
            os.write(reply, b"%d" % code)
        os._exit(0)
    os.close(reply)
    for target, number in enumerate(standard):
        os.dup2(number, target)
        os.close(number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(call["cwd"])
    os.environ.clear()
    os.environ.update(call["env"])
    time.tzset()
    return call["args"]


def _execute(args: Sequence[str]) -> None:
    """Run a module as `python -m` does with these words."""
    sys.argv, sys.path[0] = [*args], os.getcwd()
    runpy.run_module(args[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _execute(_serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))
