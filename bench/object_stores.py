"""Object stores: content beside raw HTTP, and obstore beside s3fs behind ckptctl's store.

A real gateway on loopback (Ceph where it is installed, moto's server otherwise), behind a
proxy in a process of its own that delays every answer by 30 ms. By the clock. Raw HTTP reads
the same ranges, as many of them in flight, and compares nothing.
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from content_check import FILES, SAVE
from measuring import (
    REPOSITORY,
    Row,
    Size,
    called,
    ckptctl,
    folder,
    in_turns,
    least,
    process,
    processes,
    python,
)

sys.path.insert(0, str(REPOSITORY / "tests"))
from services import ceph
from services.counting_proxy import CountingProxy
from services.moto_server import moto_server
from services.plugin import S3Server

from ckptctl.records.byte_pass import OBJECT_PIECE_BYTES
from ckptctl.storage.contract import Span
from ckptctl.storage.opening import open_store

DELAY_S, IN_FLIGHT, GIGABYTES = 0.03, 16, 0.5
N_STEPS, N_SHARDS = 50, 64
SMALL, N_SMALL = 1 << 10, 500
LARGE, N_LARGE = 8 << 20, 16
CLIENTS = ("obstore", "s3fs")

BY_S3FS = """
import sys, s3fs
fs = s3fs.S3FileSystem()
for path in fs.find(sys.argv[1]):
    with fs.open(path) as file:
        while file.read(1 << 20):
            pass
"""
RAW = """
import http.client, sys, threading
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import urlsplit
piece, in_flight = int(sys.argv[1]), int(sys.argv[2])
own = threading.local()

def read(url, start):
    at = urlsplit(url)
    if not hasattr(own, "connection"):
        own.connection = http.client.HTTPConnection(at.netloc)
        own.buffer = memoryview(bytearray(1 << 20))
    own.connection.request(
        "GET", f"{at.path}?{at.query}", headers={"Range": f"bytes={start}-{start + piece - 1}"})
    answer = own.connection.getresponse()
    assert answer.status == 206, answer.status
    while answer.readinto(own.buffer):
        pass

with ThreadPoolExecutor(in_flight) as pool:
    jobs = [pool.submit(read, url, start)
            for url, size in zip(sys.argv[3::2], map(int, sys.argv[4::2]))
            for start in range(0, size, piece)]
    for job in jobs:
        job.result()
"""


def rows(size: Size) -> Iterator[Row]:
    """Content of one step, then the clients' lists and reads."""
    with (
        folder() as name,
        gateway(Path(name)) as (server_name, server),
        proxied(_answer_late, server.endpoint) as endpoint,
    ):
        near = S3Server(endpoint, server.access_key, server.secret_key)
        yield from _content(size, Path(name), server_name, server, near)
        yield from _clients(size, server_name, server, near)


def _content(
    size: Size, parent: Path, server_name: str, server: S3Server, near: S3Server
) -> Iterator[Row]:
    step = parent / "step_100"
    process(python(SAVE, step, GIGABYTES * size.scale))
    n_bytes = put_step(server, step)
    signed: list[object] = []
    for file in sorted(step.glob("*.distcp")):
        wanted = {"Bucket": server.bucket, "Key": f"run/step_100/{file.name}"}
        signed.append(near.client.generate_presigned_url("get_object", wanted, 36_000))
        signed.append(file.stat().st_size)
    url = f"s3://{server.bucket}/run/step_100"
    verify = ckptctl("verify", "--quiet", "--level", "content", url, "--storage-option")
    taken = processes(
        {
            "raw HTTP": python(RAW, OBJECT_PIECE_BYTES, IN_FLIGHT, *signed),
            **{client: [*verify, f"client={client}"] for client in CLIENTS},
            "`s3fs` alone": python(BY_S3FS, f"{server.bucket}/run/step_100"),
        },
        size.rounds,
        near.environment,
    )
    what = f"content of {n_bytes / 1e9:.1f} GB in {FILES} files on {server_name}, {{}}"
    for client in CLIENTS:
        for peer, goal in (("raw HTTP", 1.5), ("`s3fs` alone", None)):
            ours, theirs = (least(taken, who, "clock_s") for who in (client, peer))
            yield Row(what.format(client), ours, "s", theirs, peer, goal=goal)
        yield Row(f"memory, {what.format(client)}", least(taken, client, "peak_mib"), "MiB")


def put_step(server: S3Server, step: Path) -> int:
    """Put the files of a step under `run/step_100`; returns how many bytes they have."""
    for file in step.iterdir():
        with file.open("rb") as body:
            key = f"run/step_100/{file.name}"
            server.client.put_object(Bucket=server.bucket, Key=key, Body=body)
    return sum(file.stat().st_size for file in step.iterdir())


def _clients(size: Size, server_name: str, server: S3Server, near: S3Server) -> Iterator[Row]:
    n_steps = size.of(N_STEPS)
    keys = [f"many/step_{s}/__{r}_0.distcp" for s in range(n_steps) for r in range(N_SHARDS)]

    def put(key: str, data: bytes) -> None:
        server.client.put_object(Bucket=server.bucket, Key=key, Body=data)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: put(key, b"x"), keys))
        list(pool.map(lambda n: put(f"large/{n}", bytes(LARGE)), range(4)))
    n_small = size.of(N_SMALL)
    small = [Span(f"large/{n % 4}", n * 4096 % LARGE, SMALL) for n in range(n_small)]
    large = [Span(f"large/{n % 4}", 0, LARGE) for n in range(N_LARGE)]
    with ExitStack() as stack:
        stores = {
            client: stack.enter_context(
                open_store(
                    f"s3://{server.bucket}", storage_options={**near.options, "client": client}
                )
            )
            for client in CLIENTS
        }
        for what, verb, argument in (
            ("list one level", "list_dir", "many"),
            (f"list {len(keys):,} objects", "list_tree", "many"),
            (f"{n_small:,} reads of 1 KiB", "read_spans", small),
            (f"{N_LARGE} reads of 8 MiB", "read_spans", large),
        ):

            def act(client: str, verb: str = verb, argument: object = argument) -> object:
                return list(getattr(stores[client], verb)(argument))

            acts: dict[str, Callable[[], object]] = {
                client: lambda client=client, act=act: called(lambda: act(client))  # type: ignore[misc]
                for client in CLIENTS
            }
            taken = in_turns(acts, size.rounds)  # type: ignore[arg-type]
            ours, theirs = (1_000 * least(taken, client, "clock_s") for client in CLIENTS)
            yield Row(f"obstore on {server_name}: {what}", ours, "ms", theirs, "s3fs")


def _answer_late(endpoint: str, url_sent: Connection) -> None:
    proxy = CountingProxy(endpoint, delay_s=DELAY_S)
    url_sent.send(proxy.url)
    proxy.closing.wait()


@contextmanager
def proxied(serve: Callable[[str, Connection], None], endpoint: str) -> Iterator[str]:
    """The address of a proxy in its own process, so that it takes no peer's interpreter."""
    here, there = multiprocessing.Pipe()
    proxy = multiprocessing.Process(target=serve, args=(endpoint, there), daemon=True)
    proxy.start()
    try:
        yield here.recv()
    finally:
        proxy.kill()
        proxy.join()


@contextmanager
def gateway(parent: Path) -> Iterator[tuple[str, S3Server]]:
    if ceph.why_not():
        with moto_server(parent) as endpoint:
            yield "moto", S3Server(endpoint, "test", "test")
        return
    started = ceph.start(parent / "ceph")
    try:
        yield "Ceph", S3Server(started.endpoint, started.access_key, started.secret_key)
    finally:
        ceph.stop(parent / "ceph")
