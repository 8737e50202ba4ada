"""Start `ckptctl run` in a process of its own, with short pauses: killed at a write, or with a
short lease.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

KILL_AT = "TEST_KILL_AT"
"""`N` kills before write N of the state, `N+` after it."""
LEASE = "TEST_LEASE_S"
"""How long a holder that does not renew its lease is waited for."""


def states(root: Path) -> list[dict]:
    """The revisions of the state in a root, oldest first."""
    folder = root / ".ckptctl" / "supervisor"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("0*.json"))]


def until(holds: Callable[[], object]) -> None:
    """Wait; the time limit of every test ends a wait in vain."""
    while not holds():
        time.sleep(0.05)


def processes_with(word: str) -> list[int]:
    """The living processes with a word in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if not entry.name.isdecimal() or int(entry.name) == os.getpid():
                continue
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and word.encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def main() -> None:
    """Run the command line, and kill this process at the write that the environment names."""
    from ckptctl.supervisor import holding, processes

    # Before other modules are imported, which take these over.
    if not any(word.startswith("s3://") for word in sys.argv):  # requests cost more than the wait
        processes._ASK_S = 0.2
    if LEASE in os.environ:
        holding.LEASE_S = float(os.environ.pop(LEASE))
        holding.RENEW_S = holding.LEASE_S / 12

    from ckptctl.cli.main import main as run
    from ckptctl.supervisor.holding import LocalCopy, Revisions

    wanted = os.environ.pop(KILL_AT, "")
    n_writes = 0

    def counted(write: Callable[..., object]) -> Callable[..., object]:
        def counting(*args: object) -> object:
            nonlocal n_writes
            n_writes += 1
            if wanted == str(n_writes):
                os.kill(os.getpid(), signal.SIGKILL)
            done = write(*args)
            if wanted == f"{n_writes}+":
                os.kill(os.getpid(), signal.SIGKILL)
            return done

        return counting

    Revisions.write = counted(Revisions.write)  # type: ignore[method-assign]
    Revisions.renew = counted(Revisions.renew)  # type: ignore[method-assign]
    LocalCopy.write = counted(LocalCopy.write)  # type: ignore[method-assign]
    sys.exit(run())


if __name__ == "__main__":
    main()
