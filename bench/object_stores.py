"""Is obstore a faster client for S3 than s3fs, and what does ckptctl add to either?

Both clients behind ckptctl's store, and both on their own (`s3fs.find` and
`cat_ranges`, `obstore.list` and `get_range` in 16 threads), against moto's server and,
where it is installed, a real Ceph object gateway, all on loopback: requests cost what the
client, the server and this machine's cores make them cost, and nothing for distance.
`--delay` adds a wait of that many milliseconds before each answer.

    python bench/object_stores.py [--steps 200] [--shards 64] [--rounds 3] [--delay 0]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from services import ceph
from services.counting_proxy import CountingProxy
from services.moto_server import moto_server
from services.plugin import S3Server

from ckptctl.storage.contract import Span
from ckptctl.storage.opening import open_store

CLIENTS = ("s3fs", "obstore")
SMALL, N_SMALL = 1 << 10, 1000
LARGE, N_LARGE = 8 << 20, 16

START = """
import sys
from ckptctl.storage.opening import open_store
options = {"key": sys.argv[2], "secret": sys.argv[3], "client": sys.argv[5],
           "client_kwargs": {"region_name": "us-east-1"}}
with open_store(sys.argv[1], storage_options=options, endpoint_url=sys.argv[4]) as store:
    assert store.list_dir()
"""

Measures = dict[str, dict[str, Callable[[], object]]]


def fill(server: S3Server, n_steps: int, n_shards: int) -> None:
    """One root of many small objects, and one of a few large ones."""

    def put(key: str, data: bytes) -> None:
        server.client.put_object(Bucket=server.bucket, Key=key, Body=data)

    keys = [f"run/step_{s}/__{r}_0.distcp" for s in range(n_steps) for r in range(n_shards)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: put(key, b"x"), keys))
        list(pool.map(lambda n: put(f"large/{n}", bytes(LARGE)), range(4)))


def measures(server: S3Server, endpoint: str, stack: ExitStack) -> Measures:
    """What is measured, by name and by who does it."""
    import obstore
    import s3fs
    from obstore.store import S3Store

    options = {**server.options, "endpoint_url": endpoint}
    stores = {
        client: stack.enter_context(
            open_store(f"s3://{server.bucket}", storage_options={**options, "client": client})
        )
        for client in CLIENTS
    }
    fs = s3fs.S3FileSystem(**options, use_listings_cache=False, skip_instance_cache=True)
    raw = S3Store(
        server.bucket,
        config={
            "endpoint": endpoint,
            "access_key_id": server.access_key,
            "secret_access_key": server.secret_key,
            "region": "us-east-1",
        },
        client_options={"allow_http": True},
    )
    pool = stack.enter_context(ThreadPoolExecutor(16))

    def ours(client: str, verb: str, *arguments: object) -> Callable[[], object]:
        return lambda: list(getattr(stores[client], verb)(*arguments))

    def by_s3fs(spans: list[Span]) -> object:
        paths = [f"{server.bucket}/{span.path}" for span in spans]
        starts = [span.offset for span in spans]
        ends = [span.offset + span.length for span in spans]
        return fs.cat_ranges(paths, starts, ends, batch_size=16)

    def by_obstore(spans: list[Span]) -> object:
        return list(
            pool.map(
                lambda s: bytes(obstore.get_range(raw, s.path, start=s.offset, length=s.length)),
                spans,
            )
        )

    def start(client: str) -> Callable[[], object]:
        url = f"s3://{server.bucket}/run"
        command = [
            *(sys.executable, "-c", START, url),
            *(server.access_key, server.secret_key, endpoint, client),
        ]
        return lambda: subprocess.run(command, check=True)

    small = [Span(f"large/{n % 4}", n * 4096 % LARGE, SMALL) for n in range(N_SMALL)]
    large = [Span(f"large/{n % 4}", 0, LARGE) for n in range(N_LARGE)]
    return {
        "start, list one level": {client: start(client) for client in CLIENTS},
        "list one level": {
            **{client: ours(client, "list_dir", "run") for client in CLIENTS},
            "s3fs alone": lambda: fs.ls(f"{server.bucket}/run", detail=True, refresh=True),
            "obstore alone": lambda: obstore.list_with_delimiter(raw, "run"),
        },
        "list the tree": {
            **{client: ours(client, "list_tree", "run") for client in CLIENTS},
            "s3fs alone": lambda: fs.find(f"{server.bucket}/run", detail=True),
            "obstore alone": lambda: list(obstore.list(raw, "run")),
        },
        f"read {N_SMALL} x 1 KiB": {
            **{client: ours(client, "read_spans", small) for client in CLIENTS},
            "s3fs alone": lambda: by_s3fs(small),
            "obstore alone": lambda: by_obstore(small),
        },
        f"read {N_LARGE} x 8 MiB": {
            **{client: ours(client, "read_spans", large) for client in CLIENTS},
            "s3fs alone": lambda: by_s3fs(large),
            "obstore alone": lambda: by_obstore(large),
        },
    }


def measure(name: str, server: S3Server, delay_s: float, rounds: int) -> None:
    """Print seconds and the ratio to ckptctl over s3fs; peers take turns in each round."""
    with ExitStack() as stack:
        endpoint = stack.enter_context(_delayed(server.endpoint, delay_s))
        for what, peers in measures(server, endpoint, stack).items():
            seconds: dict[str, list[float]] = {peer: [] for peer in peers}
            for _ in range(rounds):
                for peer, work in peers.items():
                    began = time.perf_counter()
                    work()
                    seconds[peer].append(time.perf_counter() - began)
            medians = {peer: statistics.median(taken) for peer, taken in seconds.items()}
            shown = "  ".join(
                f"{peer} {taken:.3f} s ({taken / medians['s3fs']:.2f})"
                for peer, taken in medians.items()
            )
            print(f"{name:<5} {what:<22} {shown}", flush=True)


@contextmanager
def _delayed(endpoint: str, delay_s: float) -> Iterator[str]:
    if not delay_s:
        yield endpoint
        return
    proxy = CountingProxy(endpoint, delay_s=delay_s)
    try:
        yield proxy.url
    finally:
        proxy.close()


@contextmanager
def _servers(folder: Path) -> Iterator[dict[str, S3Server]]:
    with moto_server(folder) as endpoint:
        servers = {"moto": S3Server(endpoint, "test", "test")}
        if reason := ceph.why_not():
            print(f"no Ceph: {reason}")
            yield servers
            return
        gateway = ceph.start(folder / "ceph")
        try:
            servers["ceph"] = S3Server(gateway.endpoint, gateway.access_key, gateway.secret_key)
            yield servers
        finally:
            ceph.stop(folder / "ceph")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", type=float, default=0, help="milliseconds before each answer")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, _servers(Path(folder)) as servers:
        print(
            f"{chosen.steps} steps of {chosen.shards} objects, median of {chosen.rounds} rounds, "
            f"{chosen.delay:g} ms of delay; in brackets the ratio to ckptctl with s3fs"
        )
        for name, server in servers.items():
            fill(server, chosen.steps, chosen.shards)
            measure(name, server, chosen.delay / 1000, chosen.rounds)


if __name__ == "__main__":
    main()
