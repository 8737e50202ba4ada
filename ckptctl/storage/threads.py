"""Start daemon threads.

A daemon: Ctrl-C must not wait for a storage that does not answer. Where the system
has no thread to give, for a limit on memory or on processes, that is told apart from
everything that a storage or a checkpoint may do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from ckptctl.errors import OutOfMemory


def start_daemon(name: str, target: Callable[..., None], *args: object) -> threading.Thread:
    """A thread that runs `target(*args)`; raises `OutOfMemory` where none can be had."""
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise OutOfMemory(
            "no thread can be started: memory or the number of processes is limited here "
            "(ulimit -v, ulimit -u, the job's cgroup)"
        ) from error
    return thread
