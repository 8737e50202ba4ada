"""How fast is every byte of a step in an object store compared, with a network before it?

Whole processes over one step of real torch (`dcp.save`, four files) in a Ceph object
gateway on loopback, or in moto's server where there is none. A proxy in a process of its
own delays every answer by 30 ms, and all peers go through it: `ckptctl verify --level
content` with each of its clients; s3fs with its defaults, file by file; and raw HTTP with
the same ranges and as many of them in flight, which compares nothing. The table has the
fastest of all rounds, in turns.

    python bench/object_content.py [--gigabytes 1] [--rounds 3] [--delay 30]
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from content_check import FILES, SAVE, run
from services import ceph
from services.counting_proxy import CountingProxy
from services.moto_server import moto_server
from services.plugin import S3Server

from ckptctl.records.byte_pass import OBJECT_PIECE_BYTES

IN_FLIGHT = 16

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


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--delay", type=float, default=30, help="milliseconds before each answer")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ckptctl-bench-") as made:
        folder = Path(made)
        step = folder / "step_100"
        run([sys.executable, "-c", SAVE % FILES, str(step), str(asked.gigabytes)])
        with _server(folder) as (name, server), _delayed(server.endpoint, asked.delay) as endpoint:
            bucket = server.bucket
            sizes = {file.name: file.stat().st_size for file in step.iterdir()}
            for file in sizes:
                with (step / file).open("rb") as body:
                    server.client.put_object(Bucket=bucket, Key=f"run/step_100/{file}", Body=body)
            near = S3Server(endpoint, server.access_key, server.secret_key)
            print(
                f"{sum(sizes.values()) / 1e9:.2f} GB in {FILES} files on {name}, "
                f"{asked.delay:g} ms before each answer; "
                f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
            )
            measure(commands(near, bucket, sizes), near.environment, asked.rounds)
    return 0


def commands(server: S3Server, bucket: str, sizes: dict[str, int]) -> dict[str, list[str]]:
    """What is run, by the name of who does it; raw HTTP is the first."""
    signed = [
        word
        for file, size in sizes.items()
        if file.endswith(".distcp")
        for word in (
            server.client.generate_presigned_url(
                "get_object", {"Bucket": bucket, "Key": f"run/step_100/{file}"}, 36_000
            ),
            str(size),
        )
    ]
    python = [sys.executable, "-c"]
    verify = [sys.executable, "-m", "ckptctl", "verify", "--quiet", "--level", "content"]
    step = f"s3://{bucket}/run/step_100"
    return {
        "raw HTTP": [*python, RAW, str(OBJECT_PIECE_BYTES), str(IN_FLIGHT), *signed],
        "ckptctl, obstore": [*verify, step, "--storage-option", "client=obstore"],
        "ckptctl, s3fs": [*verify, step, "--storage-option", "client=s3fs"],
        "s3fs": [*python, BY_S3FS, f"{bucket}/run/step_100"],
    }


def measure(table: dict[str, list[str]], environment: dict[str, str], rounds: int) -> None:
    os.environ.update(environment)
    best: dict[str, float] = {}
    peak: dict[str, int] = {}
    for _ in range(rounds):
        for name, command in table.items():
            seconds, peak[name] = run(command)
            best[name] = min(seconds, best.get(name, seconds))
    raw, defaults = best["raw HTTP"], best["s3fs"]
    print(f"{'':18} {'process':>9} {'x raw HTTP':>11} {'s3fs x':>7} {'peak':>9}")
    for name, seconds in best.items():
        print(
            f"{name:18} {seconds:7.3f} s {seconds / raw:11.2f} {defaults / seconds:7.2f} "
            f"{peak[name] / 1024:5.0f} MiB"
        )


def _answer_late(endpoint: str, delay_s: float, told: Connection) -> None:
    proxy = CountingProxy(endpoint, delay_s=delay_s)
    told.send(proxy.url)
    proxy.closing.wait()


@contextmanager
def _delayed(endpoint: str, delay_ms: float) -> Iterator[str]:
    """The proxy's own process, so that it takes no peer's interpreter."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.Process(
        target=_answer_late, args=(endpoint, delay_ms / 1000, there), daemon=True
    )
    process.start()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


@contextmanager
def _server(folder: Path) -> Iterator[tuple[str, S3Server]]:
    if reason := ceph.why_not():
        print(f"no Ceph: {reason}")
        with moto_server(folder) as endpoint:
            yield "moto", S3Server(endpoint, "test", "test")
        return
    gateway = ceph.start(folder / "ceph")
    try:
        yield "Ceph", S3Server(gateway.endpoint, gateway.access_key, gateway.secret_key)
    finally:
        ceph.stop(folder / "ceph")


if __name__ == "__main__":
    sys.exit(main())
