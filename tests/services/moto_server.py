"""moto's S3 server as a process of its own: S3's rules without S3's reality."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from forking import ForkServer
from services.processes import answers, end, free_port, wait_until

_SERVE = "import sys; from services import moto_s3; moto_s3.serve(sys.argv[1], int(sys.argv[2]))"


@contextmanager
def moto_server(folder: Path, host: str = "127.0.0.1", page: int = 1000) -> Iterator[str]:
    """Run the server while the context is open; gives its endpoint, logs into `folder`.

    One answer to a listing holds at most `page` names.
    """
    port = free_port()
    with (folder / "moto.log").open("w") as log:
        process = subprocess.Popen(
            [_server().python, "-c", _SERVE, host, str(port)],
            env={**_variables(), "MOTO_S3_DEFAULT_MAX_KEYS": str(page)},
            stdout=log,
            stderr=log,
        )

        def ready() -> bool:
            if process.poll() is not None:
                raise ChildProcessError(Path(log.name).read_text())
            return answers(port, host)

        try:
            wait_until(ready, what="moto's server")
            yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        finally:
            end(process)


@cache
def _server() -> ForkServer:
    """Forks servers that have imported moto: each would take a second."""
    return ForkServer("moto", ["services.moto_s3"], _variables())


def _variables() -> dict[str, str]:
    return {name: each for name, each in os.environ.items() if not name.startswith("PYTHON")}
