"""Run commands with too little memory, each in a process that is forked for it.

    python tests/campaign/starved.py FOLDER

Reads a line of JSON for each command from standard input, and answers each with one.
Only `ckptctl` is loaded here, once for all commands, so that the limit is reached in the
command and hardly ever in the start of an interpreter. `limit` is RLIMIT_AS in bytes.
`from` and `to` are numbers of Python's allocations: those between them fail, all later
ones if `to` is 0. This requires `_testcapi`, which Linux distributions may leave out.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from loaded_modules import load_all_modules

PATIENCE_S = 300.0


def run(order: dict[str, Any], folder: Path) -> dict[str, object]:
    """Run one command line in a child; returns its exit code and output."""
    out, err = folder / "out", folder / "err"
    child = os.fork()
    if child == 0:
        _be(order, out, err)
    code = _ended(child, PATIENCE_S)
    return {
        "code": code,
        "out": out.read_text(errors="replace"),
        "err": err.read_text(errors="replace"),
    }


def _be(order: dict[str, Any], out: Path, err: Path) -> NoReturn:
    try:
        for path, number in ((out, 1), (err, 2)):
            made = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(made, number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        sys.argv = ["ckptctl", *order["argv"]]
        from ckptctl.cli.main import main

        if order.get("limit"):
            resource.setrlimit(resource.RLIMIT_AS, (order["limit"], order["limit"]))
        if order.get("from"):
            import _testcapi

            _testcapi.set_nomemory(order["from"], order["to"])
        main()
    except BaseException:  # noqa: BLE001 - `main` lets nothing out, and ends the process itself
        if order.get("from"):
            _testcapi.remove_mem_hooks()
        traceback.print_exc()
    finally:
        os._exit(99)


def _ended(child: int, patience_s: float) -> int | None:
    """The exit code, minus the signal, or None for one that had to be killed."""
    until_s = time.monotonic() + patience_s
    while time.monotonic() < until_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    """Answer until standard input ends."""
    load_all_modules()
    folder = Path(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(run(json.loads(line), folder)), flush=True)


if __name__ == "__main__":
    main()
