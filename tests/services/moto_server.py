"""moto's S3 server as a process of its own: S3's rules without S3's reality."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from services.processes import answers, end, free_port, wait_until


@contextmanager
def moto_server(folder: Path, host: str = "127.0.0.1", page: int = 1000) -> Iterator[str]:
    """Run the server while the context is open; gives its endpoint, logs into `folder`.

    One answer to a listing holds at most `page` names.
    """
    port = free_port()
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)],
            env={**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(page)},
            stdout=log,
            stderr=log,
        )
        try:
            wait_until(lambda: answers(port, host), what="moto's server")
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            end(process)
