"""`timeout_s` bounds a request of every stage, and a save aborts what a killed one has left."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable

import pytest
from command_line import clean_environment, torch_server
from services.counting_proxy import CountingProxy, Fault
from services.plugin import S3Server
from services.processes import started, wait_until

torch = pytest.importorskip("torch")

from one_process import Job, run  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import CkptctlError, SaveFailed  # noqa: E402
from ckptctl.options import StorageOptions  # noqa: E402
from ckptctl.storage import waiting  # noqa: E402
from ckptctl.storage.objects import PART_BYTES  # noqa: E402
from ckptctl.storage.opening import open_store  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.server]

CLIENTS = pytest.mark.parametrize("client", ["s3fs", "obstore"])


@pytest.fixture
def root(s3_moto: S3Server) -> str:
    return f"s3://{s3_moto.bucket}/{uuid.uuid4().hex}"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(waiting, "LONGEST_PAUSE_S", 0.01)


def patient(s3: S3Server, client: str, **options: object) -> dict[str, object]:
    return {"storage_options": {**s3.options, "client": client, **options}}


def check_short(message: str) -> None:
    """Each try would have taken as long as the default, had the shorter limit not reached it."""
    found = re.search(r"no answer after ([0-9]+) tries in ([0-9]+) s", message)
    assert found, message
    n_tries, took_s = map(int, found.groups())
    assert took_s < n_tries * StorageOptions().timeout_s


@CLIENTS
@pytest.mark.parametrize("name", [".metadata", ".distcp"])
def test_a_load_from_a_server_that_goes_silent_ends_after_timeout_s(
    s3_moto: S3Server,
    root: str,
    counting_proxy: Callable[[str], CountingProxy],
    client: str,
    name: str,
):
    run(root, 3, storage_options=s3_moto.options)
    proxy = counting_proxy(s3_moto.endpoint)
    given = patient(s3_moto, client)
    job = Job(root, **given, endpoint_url=proxy.url, timeout_s=0.5)
    path = ".metadata" if name == ".metadata" else "__0_0.distcp"
    proxy.break_request("GET", Fault.SILENT, path=path, lasts=True)
    with pytest.raises(CkptctlError) as lost:
        job.resume()
    assert lost.value.exit_code == 75
    check_short(str(lost.value))
    job.die()


@CLIENTS
def test_a_save_to_a_server_that_goes_silent_ends_after_timeout_s(
    s3_moto: S3Server, root: str, counting_proxy: Callable[[str], CountingProxy], client: str
):
    proxy = counting_proxy(s3_moto.endpoint)
    given = patient(s3_moto, client, retry_for_s=0)
    job = Job(root, **given, endpoint_url=proxy.url, timeout_s=0.5)
    job.resume()
    proxy.break_request("PUT", Fault.SILENT, lasts=True)
    with pytest.raises(SaveFailed) as lost:
        job.train(1, 3)
    check_short(str(lost.value))
    job.die()


SAVES = """
import sys, torch
from ckptctl.train import Checkpointer

root, endpoint, n_numbers = sys.argv[1:]
model = torch.nn.Linear(int(n_numbers), 1, bias=False)
options = {"client": "s3fs"}
ckpt = Checkpointer(root, model=model, storage_options=options, endpoint_url=endpoint)
ckpt.resume()
ckpt.save(5)
"""


def test_a_save_aborts_the_uploads_that_a_killed_save_of_its_number_has_left(
    s3_ceph: S3Server, counting_proxy: Callable[[str], CountingProxy]
):
    root = f"s3://{s3_ceph.bucket}/{uuid.uuid4().hex}"
    proxy = counting_proxy(s3_ceph.endpoint)
    # The first part arrives, the second never ends: then the job is killed.
    proxy.break_request("PUT", Fault.SILENT, path="partNumber=2", lasts=True)
    n_numbers = str(3 * PART_BYTES // 4)
    command = [torch_server().python, "-c", SAVES, root, proxy.url, n_numbers]
    env = clean_environment(**s3_ceph.environment)
    options = {**s3_ceph.options, "client": "s3fs"}
    with open_store(root, storage_options=options) as store:
        with started(command, env=env) as process:
            wait_until(lambda: len(store.list_uploads()) > 0, what="the upload")
            process.kill()
        (left,) = store.list_uploads()
        assert left.path == "step_5.attempt-1/__0_0.distcp"
        job = Job(root, storage_options=options)
        job.resume()
        job.train(1, 4, save_every=4)
        assert [*store.list_uploads()] == [left]  # the save of another number leaves it
        job.train(5, 5, save_every=5)
        assert [*store.list_uploads()] == []
        job.die()
    assert ckptctl.pick(root, storage_options=options).step == 5
