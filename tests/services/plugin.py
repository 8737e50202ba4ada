"""Services for tests: S3 servers and a Slurm.

A server of S3 is an `S3Server`: a real one on loopback with a bucket of its own for each
caller. Checkpoints to upload are in the `conftest.py` of `tests`.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from services import ceph
from services.counting_proxy import CountingProxy
from services.moto_server import moto_server
from services.slurm import Slurm
from services.slurm import why_not as why_no_slurm

PAGE = 100
"""Names in one answer of `s3_moto` to a listing; a thousand would take long to write."""


@dataclass(frozen=True)
class S3Server:
    """Where it listens, and the keys of a user who may do everything."""

    endpoint: str
    access_key: str
    secret_key: str

    @cached_property
    def bucket(self) -> str:
        """A bucket for tests that keep to a prefix of their own."""
        return self.new_bucket()

    @property
    def options(self) -> dict[str, object]:
        """Storage options for `open_store`, endpoint included."""
        return {
            "key": self.access_key,
            "secret": self.secret_key,
            "endpoint_url": self.endpoint,
            "client_kwargs": {"region_name": "us-east-1"},
        }

    @property
    def environment(self) -> dict[str, str]:
        """The same as variables, for a process."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    @cached_property
    def client(self) -> Any:
        """botocore's own client, with which a test inspects a bucket without ckptctl."""
        import botocore.session
        import services.botocore_data  # noqa: F401 - fewer seconds for each client

        return botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )

    def new_bucket(self) -> str:
        """The name of a bucket that was not there before."""
        name = f"test-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name

    def upload(self, folder: Path, prefix: str, bucket: str | None = None) -> str:
        """Put a folder into a bucket in the order in which a job saves; its URL.

        On a busy machine it takes seconds: in another order a shard would be newer than its
        metadata, or an earlier step newer than a later one, as in a run that went back.
        """
        bucket = bucket or self.bucket
        for at, folders, files in os.walk(folder):
            folders.sort()
            for path in (Path(at, name) for name in sorted(files, reverse=True)):
                key = f"{prefix}/{path.relative_to(folder)}"
                self.client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())
        return f"s3://{bucket}/{prefix}"


@pytest.fixture(scope="session")
def s3_moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """moto's server, over HTTP, with small pages."""
    with moto_server(tmp_path_factory.mktemp("moto"), page=PAGE) as endpoint:
        yield S3Server(endpoint, "test", "test")


@pytest.fixture(scope="session")
def s3_ceph(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A real Ceph object gateway, one for all workers; skips where it cannot run.

    With `CKPTCTL_TEST_CEPH=required` it fails there instead.
    """
    if reason := ceph.why_not():
        if os.environ.get("CKPTCTL_TEST_CEPH") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    base = tmp_path_factory.getbasetemp()
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "ceph"
    users = shared.with_name("ceph.users")
    with _locked(users):
        known = json.loads(users.read_text() or "null") or {"n": 0, "endpoint": ""}
        if not known["n"]:
            known["endpoint"] = ceph.start(shared).endpoint
        known["n"] += 1
        users.write_text(json.dumps(known))
    yield S3Server(known["endpoint"], ceph.ACCESS_KEY, ceph.SECRET_KEY)
    with _locked(users):
        known = json.loads(users.read_text())
        known["n"] -= 1
        if not known["n"]:
            ceph.stop(shared)
        users.write_text(json.dumps(known))


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """A real Slurm with four nodes, one for each worker; skips where it cannot run.

    With `CKPTCTL_TEST_SLURM=required` it fails there instead.
    """
    if reason := why_no_slurm():
        if os.environ.get("CKPTCTL_TEST_SLURM") == "required":
            pytest.fail(reason)
        pytest.skip(reason)
    cluster = Slurm(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


@pytest.fixture(params=["s3_moto", pytest.param("s3_ceph", marks=pytest.mark.slow)])
def s3(request: pytest.FixtureRequest) -> S3Server:
    """moto's server and a Ceph object gateway in turn.

    `tests/storage/test_contract.py` runs every call of a store on both; a whole job or command
    on the second one is slow.
    """
    server: S3Server = request.getfixturevalue(request.param)
    return server


@pytest.fixture
def counting_proxy() -> Iterator[Callable[[str], CountingProxy]]:
    """A function that puts a counting proxy in front of an endpoint."""
    proxies: list[CountingProxy] = []

    def put_in_front(endpoint: str) -> CountingProxy:
        proxies.append(CountingProxy(endpoint))
        return proxies[-1]

    yield put_in_front
    for proxy in proxies:
        proxy.close()


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    file.touch()
    with file.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
