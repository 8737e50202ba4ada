"""Content of one step shared among processes, from a store with little bandwidth a connection.

A real gateway on loopback, behind a proxy in a process of its own that passes on so many bytes
a second on each connection: what one node gets from a large store, where the sum is not the
limit. Process n of 8 runs `verify --subset n/8`. By the clock, start-up included.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from content_check import SAVE
from measuring import Row, Size, Spent, ckptctl, folder, in_turns, least, process, python
from object_stores import S3Server, gateway, proxied, put_step

N_PROCESSES, IN_FLIGHT = 8, 4
BYTES_PER_S, MEGABYTES = 512 << 10, 128
PIECE = 16 << 10
GOAL = 1 / 6


def rows(size: Size) -> Iterator[Row]:
    """The time of 8 processes beside that of one."""
    with (
        folder() as name,
        gateway(Path(name)) as (server_name, server),
        proxied(_serve, server.endpoint) as endpoint,
    ):
        near = S3Server(endpoint, server.access_key, server.secret_key)
        step = Path(name, "step_100")
        process(python(SAVE, step, MEGABYTES * size.scale / 1_000))
        n_bytes = put_step(server, step)
        url = f"s3://{server.bucket}/run/step_100"
        verify = ckptctl("verify", "--quiet", "--level", "content", "--jobs", IN_FLIGHT, url)
        shares = [[*verify, "--subset", f"{n}/{N_PROCESSES}"] for n in range(1, N_PROCESSES + 1)]
        taken = in_turns(
            {
                "one": lambda: _at_once([verify], near),
                "shared": lambda: _at_once(shares, near),
            },
            1,
        )
    limit = n_bytes / (N_PROCESSES * IN_FLIGHT * BYTES_PER_S)
    yield Row(
        f"content of {n_bytes / 1e6:,.0f} MB on {server_name}, shared among {N_PROCESSES} "
        f"processes of {IN_FLIGHT} connections, {BYTES_PER_S >> 10} KiB/s each",
        least(taken, "shared", "clock_s"),
        "s",
        least(taken, "one", "clock_s"),
        "1 process",
        limit,
        GOAL,
    )


def _at_once(commands: list[list[object]], server: S3Server) -> Spent:
    began_s = time.perf_counter()
    with ThreadPoolExecutor(len(commands)) as pool:
        list(pool.map(lambda command: process(command, server.environment), commands))
    return Spent(0.0, time.perf_counter() - began_s)


def _serve(endpoint: str, url_sent: Connection) -> None:
    asyncio.run(_relay(urlsplit(endpoint), url_sent))


async def _relay(target: SplitResult, url_sent: Connection) -> None:
    async def connected(client: asyncio.StreamReader, answer: asyncio.StreamWriter) -> None:
        server, request = await asyncio.open_connection(target.hostname, target.port)
        await asyncio.gather(_pass_on(client, request), _pass_on(server, answer, BYTES_PER_S))

    proxy = await asyncio.start_server(connected, "127.0.0.1")
    url_sent.send(f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
    await proxy.serve_forever()


async def _pass_on(
    source: asyncio.StreamReader, target: asyncio.StreamWriter, bytes_per_s: float | None = None
) -> None:
    free_s = time.monotonic()
    try:
        while data := await source.read(PIECE):
            if bytes_per_s:
                free_s = max(free_s, time.monotonic()) + len(data) / bytes_per_s
                await asyncio.sleep(free_s - time.monotonic())
            target.write(data)
            await target.drain()
    except ConnectionError:
        pass
    finally:
        target.close()
