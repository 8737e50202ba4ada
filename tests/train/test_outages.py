"""A storage that fails, hangs or throttles while a job trains and saves."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import pytest
from services.counting_proxy import CountingProxy, Fault
from services.plugin import S3Server

torch = pytest.importorskip("torch")

from one_process import Job  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import SaveFailed, StorageError, UsageError  # noqa: E402
from ckptctl.selection.history import read_attempts  # noqa: E402
from ckptctl.storage import waiting  # noqa: E402
from ckptctl.storage.opening import open_store  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.server]


@pytest.fixture
def root(s3: S3Server) -> str:
    return f"s3://{s3.bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(s3: S3Server, counting_proxy: Callable[[str], CountingProxy]) -> CountingProxy:
    return counting_proxy(s3.endpoint)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(waiting, "LONGEST_PAUSE_S", 0.01)


def begun(s3: S3Server, root: str, proxy: CountingProxy, **options: object) -> Job:
    """A job that has saved step 3, and reaches its storage through the proxy."""
    job = Job(root, storage_options=s3.options | options, endpoint_url=proxy.url)
    job.resume()
    job.train(1, 3)
    return job


def events(s3: S3Server, root: str) -> list[str]:
    with open_store(root, storage_options=s3.options) as store:
        return [line.event for _, lines in read_attempts(store) for line in lines]


def test_what_is_written_beside_the_training_does_not_wait_for_the_storage(
    s3: S3Server, root: str, proxy: CountingProxy
):
    held, released = threading.Event(), threading.Event()
    job = Job(root, storage_options=s3.options, endpoint_url=proxy.url)
    job.resume()
    proxy.break_request("PUT", lambda: (held.set(), released.wait()), path=".jsonl", lasts=True)
    job.ckpt.note(1, loss=1.0)
    job.ckpt.note(2, loss=float("nan"))
    assert held.wait()  # the line is on its way, and the training past it
    assert "progress" not in events(s3, root)
    released.set()
    job.ckpt.close()
    assert events(s3, root) == ["started", "resumed", "progress", "failed", "ended"]


def test_a_line_that_could_not_be_written_is_written_with_the_next(
    s3: S3Server, root: str, proxy: CountingProxy
):
    job = Job(root, storage_options=s3.options, endpoint_url=proxy.url)
    job.resume()
    proxy.break_request("PUT", Fault.UNAVAILABLE)
    job.ckpt.note(1, loss=1.0)
    job.ckpt.close()
    assert proxy.counts["PUT"] > 1
    assert events(s3, root) == ["started", "resumed", "progress", "ended"]


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.BROKEN, Fault.RESET])
def test_a_save_outlasts_an_outage_that_a_resume_would_not(
    s3: S3Server, root: str, proxy: CountingProxy, fault: Fault
):
    job = begun(s3, root, proxy)
    for verb in ("PUT", "LIST"):
        for nth in range(1, 12):
            proxy.break_request(verb, fault, nth=nth)
    job.train(4, 6)
    assert ckptctl.pick(root, storage_options=s3.options).step == 6
    job.die()


@pytest.mark.parametrize("save", ["save", "save_async"])
@pytest.mark.parametrize("verb", ["LIST", "PUT"])
def test_every_failure_of_a_save_is_a_save_failed_with_its_cause(
    s3: S3Server, root: str, proxy: CountingProxy, verb: str, save: str
):
    job = begun(s3, root, proxy, retry_for_s=0)
    proxy.break_request(verb, Fault.BROKEN, lasts=True)
    job.train(4, 5)
    said = r"step 6 was not saved: .*no answer after 5 tries"

    def save_and_wait() -> None:
        getattr(job.ckpt, save)(6)
        job.ckpt.flush()

    with pytest.raises(SaveFailed, match=said) as lost:
        save_and_wait()
    assert lost.value.exit_code == 75
    assert lost.value.next_command
    assert lost.value.__cause__ is not None
    assert ckptctl.pick(root, grace_s=0, storage_options=s3.options).step == 3
    proxy.reset()
    job.train(7, 9)
    assert ckptctl.pick(root, storage_options=s3.options).step == 9
    job.die()


def test_a_save_that_is_not_allowed_is_not_one_to_repeat(
    s3: S3Server, root: str, proxy: CountingProxy
):
    job = begun(s3, root, proxy)
    proxy.break_request("LIST", Fault.DENIED, lasts=True)
    with pytest.raises(SaveFailed, match="access denied") as lost:
        job.train(4, 6)
    assert isinstance(lost.value.__cause__, StorageError)
    assert lost.value.exit_code == 77
    proxy.reset()
    proxy.break_request("PUT", Fault.DENIED, lasts=True)
    with pytest.raises(SaveFailed, match="access denied") as lost:
        job.train(7, 9)
    assert lost.value.exit_code == 77
    job.die()


@pytest.mark.parametrize("given", ["long", -1, "inf", None])
def test_how_long_a_save_is_repeated_is_a_number_of_seconds(s3: S3Server, root: str, given: object):
    options = s3.options | {"retry_for_s": given}
    if given is None:
        open_store(root, storage_options=options).close()
        return
    with pytest.raises(UsageError, match=r"retry_for_s is .*; a number of seconds is expected"):
        open_store(root, storage_options=options)
