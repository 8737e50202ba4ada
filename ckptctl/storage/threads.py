"""Start daemon threads.

Daemon threads do not delay Ctrl-C when a storage does not answer. If the system cannot
start a thread because of a limit on memory or processes, the error states this and blames
neither storage nor checkpoint.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckptctl.errors import OutOfMemory


def start_daemon(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    """Start a thread that runs `target(*args)`; raises `OutOfMemory` if none can be started."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OutOfMemory(
            "no thread can be started: memory or the number of processes is limited (ulimit -v, "
            "ulimit -u, the job's cgroup)"
        ) from error
    return thread
