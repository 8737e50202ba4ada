"""Saving to an object store, and going on from it."""

from __future__ import annotations

import json
import math
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from services.counting_proxy import CountingProxy, Fault
from services.plugin import S3Server

torch = pytest.importorskip("torch")

from one_process import Job, run  # noqa: E402
from running import codes_of, losses, rows_of, run_job, samples  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import Fenced, SaveFailed, UsageError  # noqa: E402
from ckptctl.findings import Verdict  # noqa: E402
from ckptctl.formats.own.data_ledger import DATA_FILE  # noqa: E402
from ckptctl.storage import waiting  # noqa: E402
from ckptctl.storage.opening import open_store  # noqa: E402
from ckptctl.train import LossGuard  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.server]


@pytest.fixture
def root(s3: S3Server) -> str:
    return f"s3://{s3.bucket}/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Job:
    """What the run comes to that nobody kills, on a file system."""
    return run(tmp_path_factory.mktemp("unbroken") / "run")


def keys(s3: S3Server, root: str) -> list[str]:
    """What lies below the root, past ckptctl."""
    prefix = root.removeprefix(f"s3://{s3.bucket}/") + "/"
    pages = s3.client.get_paginator("list_objects_v2").paginate(Bucket=s3.bucket, Prefix=prefix)
    return [one["Key"].removeprefix(prefix) for page in pages for one in page.get("Contents", ())]


def steps(s3: S3Server, root: str) -> dict[str, Verdict]:
    """The folders of steps and what they are, in the order in which they are taken."""
    found = ckptctl.scan(root, grace_s=0.0, storage_options=s3.options)
    return {report.url.rpartition("/")[2]: report.verdict for report in found.reports}


def test_a_run_in_a_bucket_goes_on_to_the_last_bit(s3: S3Server, root: str, unbroken: Job):
    run(root, 6, storage_options=s3.options)
    job = run(root, storage_options=s3.options)
    assert job.start.path == f"{root}/step_6.attempt-1"
    assert job.losses == {step: unbroken.losses[step] for step in range(7, 13)}
    assert job.samples == {step: unbroken.samples[step] for step in range(7, 13)}
    whole = Verdict.COMPLETE
    assert steps(s3, root) == {
        "step_12.attempt-2": whole,
        "step_9.attempt-2": whole,
        "step_6.attempt-1": whole,
        "step_3.attempt-1": whole,
    }
    report = ckptctl.verify(
        f"{root}@12", level=ckptctl.Level.CONTENT, require_seal=True, storage_options=s3.options
    )
    assert (report.exit_code, report.seal is not None) == (0, True)
    shard = f"{root}/step_12.attempt-2/__0_0.distcp".removeprefix(f"s3://{s3.bucket}/")
    head = s3.client.head_object(Bucket=s3.bucket, Key=shard, ChecksumMode="ENABLED")
    said = ckptctl.verify(f"{root}@12", remote_checksums=True, storage_options=s3.options)
    assert said.exit_code == (0 if "ChecksumCRC32" in head else 22)
    ledger = [key for key in keys(s3, root) if key.endswith(".jsonl")]
    assert len(ledger) == 2


def test_a_loss_guard_rejects_steps_in_a_bucket(s3: S3Server, root: str):
    run(root, 6, storage_options=s3.options)
    keys_only = {key: value for key, value in s3.options.items() if key != "endpoint_url"}
    guard = LossGuard("stop", root=root, storage_options=keys_only, endpoint_url=s3.endpoint)
    verdict = guard.check(7, math.nan)
    assert verdict.rejected == (f"{root}/step_6.attempt-1",), verdict.message
    assert verdict.next_command == (
        f"ckptctl pick {root} --endpoint-url {s3.endpoint} "
        '--storage-option key="$CKPTCTL_STORAGE_KEY" '
        '--storage-option secret="$CKPTCTL_STORAGE_SECRET" '
        """--storage-option 'client_kwargs={"region_name": "us-east-1"}'"""
    )
    assert ckptctl.pick(root, storage_options=s3.options).step == 3


def test_what_is_saved_beside_the_training_is_sealed_too(s3: S3Server, root: str):
    job = Job(root, storage_options=s3.options)
    job.resume()
    job.train(1, 6, save=job.ckpt.save_async)
    job.ckpt.close()
    for step in (3, 6):
        assert f"step_{step}.attempt-1/.ckptctl/seal.json" in keys(s3, root)


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["metadata:2", "seal:2"])
def test_ranks_killed_in_a_save_go_on_and_lose_nothing(
    s3: S3Server, root: str, tmp_path: Path, moment: str
):
    assert codes_of(run_job(tmp_path, "--ranks", 2, "--steps", 9, name="unbroken")) == [0]
    options = json.dumps({"storage_options": s3.options})
    done = run_job(
        tmp_path,
        *("--root", root, "--options", options),
        *("--ranks", 2, "--steps", 9, "--kill", moment),
    )
    assert codes_of(done) == [-9, 0], done.stderr
    rows, wanted = rows_of(tmp_path), rows_of(tmp_path, "unbroken")
    assert losses(rows) == losses(wanted)
    assert samples(rows) == samples(wanted)
    there = steps(s3, root)
    if moment == "metadata:2":  # shards without metadata: step 3 is taken, and 6 comes again
        assert list(there) == [
            *("step_9.attempt-2", "step_6.attempt-2", "step_6.attempt-1", "step_3.attempt-1"),
        ]
        assert there.pop("step_6.attempt-1") is Verdict.INCOMPLETE
        left = [key for key in keys(s3, root) if key.startswith("step_6.attempt-1/")]
        data, marked, *shards = left
        assert data == f"step_6.attempt-1/{DATA_FILE}"
        # Its metadata could still be on the way when the job went on from step 3.
        assert "-superseded-" in marked
        assert shards == ["step_6.attempt-1/__0_0.distcp", "step_6.attempt-1/__1_0.distcp"]
    assert set(there.values()) == {Verdict.COMPLETE}


def test_a_step_of_an_abandoned_branch_stays_and_the_new_one_is_taken(s3: S3Server, root: str):
    run(root, 6, storage_options=s3.options)
    ckptctl.mark(
        f"{root}/step_6.attempt-1", "rejected", reason="it diverges", storage_options=s3.options
    )
    run(root, 6, storage_options=s3.options)
    assert steps(s3, root) == {
        "step_6.attempt-2": Verdict.COMPLETE,
        "step_6.attempt-1": Verdict.REJECTED,
        "step_3.attempt-1": Verdict.COMPLETE,
    }
    found = ckptctl.pick(root, storage_options=s3.options)
    assert found.chosen is not None
    assert found.chosen.url == f"{root}/step_6.attempt-2"
    assert (found.exit_code, found.passed_over) == (0, ())
    assert ckptctl.verify(f"{root}@6", storage_options=s3.options).url == found.chosen.url


def test_of_two_whole_attempts_the_last_that_may_be_taken_is(s3: S3Server, root: str):
    run(root, 6, storage_options=s3.options)
    ckptctl.mark(f"{root}@6", "rejected", reason="doubted", storage_options=s3.options)
    run(root, 6, storage_options=s3.options)
    ckptctl.mark(f"{root}@6", "rejected", reason="worse", storage_options=s3.options)
    ckptctl.mark(f"{root}/step_6.attempt-1", "accepted", storage_options=s3.options)
    found = ckptctl.pick(root, storage_options=s3.options)
    assert found.chosen is not None
    assert found.chosen.url == f"{root}/step_6.attempt-1"
    codes = [finding.code for finding in ckptctl.scan(root, storage_options=s3.options).findings]
    assert "step.duplicate" not in codes


def test_a_whole_step_is_not_saved_again(s3: S3Server, root: str):
    run(root, 3, storage_options=s3.options)
    job = Job(root, storage_options=s3.options)
    job.resume()
    job.ckpt._attempt.saved = 0  # a script that counts its steps wrongly
    before = keys(s3, root)
    with pytest.raises(UsageError, match=r"step_3\.attempt-1 already exists and is complete"):
        job.ckpt.save(3)
    assert keys(s3, root) == before
    job.die()


def test_a_save_that_failed_leaves_no_metadata_and_can_be_repeated(
    s3: S3Server, root: str, counting_proxy: Callable[[str], CountingProxy]
):
    proxy = counting_proxy(s3.endpoint)
    options = {**s3.options, "retry_for_s": 0}
    job = Job(root, storage_options=options, endpoint_url=proxy.url, retries=0)
    job.resume()
    job.train(1, 2)
    proxy.break_request("PUT", Fault.BROKEN, path=".distcp", lasts=True)
    with pytest.raises(SaveFailed, match="step 2 was not saved") as caught:
        job.ckpt.save(2)
    assert caught.value.exit_code == 75
    assert not [key for key in keys(s3, root) if key.startswith("step_")]
    proxy.reset()
    job.ckpt.save(2)
    assert steps(s3, root) == {"step_2.attempt-1": Verdict.COMPLETE}
    job.die()


def test_a_step_of_lost_weights_that_cannot_be_marked_is_not_published(
    s3: S3Server, root: str, counting_proxy: Callable[[str], CountingProxy]
):
    proxy = counting_proxy(s3.endpoint)
    job = Job(root, storage_options=s3.options, endpoint_url=proxy.url)
    job.resume()
    job.train(1, 3)
    next(job.model.parameters()).data.fill_(math.nan)
    proxy.break_request("PUT", Fault.DENIED, path=".json", lasts=True)
    with pytest.raises(SaveFailed, match=r"step 4 was not saved: .*access denied") as failed:
        job.ckpt.save(4, loss=math.nan)
    assert failed.value.exit_code == 77
    assert not [key for key in keys(s3, root) if key.startswith("step_4") and "distcp" not in key]
    proxy.reset()
    job.ckpt.save(4, loss=math.nan)
    assert steps(s3, root)["step_4.attempt-1"] is Verdict.REJECTED
    assert ckptctl.pick(root, storage_options=s3.options).step == 3
    job.die()


def test_an_attempt_that_was_overtaken_publishes_nothing(s3: S3Server, root: str):
    old = Job(root, storage_options=s3.options)
    old.resume()
    old.train(1, 2)
    new = run(root, 3, storage_options=s3.options)
    with pytest.raises(Fenced):
        old.ckpt.save(3)
    assert list(steps(s3, root)) == ["step_3.attempt-2"]
    assert new.start.fresh
    old.die()


def test_what_is_kept_is_the_newest_the_pinned_and_the_one_resumed_from(s3: S3Server, root: str):
    run(root, 6, storage_options=s3.options)
    ckptctl.mark(f"{root}@3", "pinned", reason="published", storage_options=s3.options)
    run(root, 15, keep=2, storage_options=s3.options)
    assert list(steps(s3, root)) == [
        *("step_15.attempt-2", "step_12.attempt-2", "step_6.attempt-1", "step_3.attempt-1")
    ]
    assert not [key for key in keys(s3, root) if key.startswith("step_9")]
    assert {verdict.value for verdict in steps(s3, root).values()} == {"complete"}


def test_a_removal_that_is_cut_short_leaves_no_step_and_is_ended_by_the_next_save(
    s3: S3Server,
    root: str,
    counting_proxy: Callable[[str], CountingProxy],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.01)
    proxy = counting_proxy(s3.endpoint)
    job = Job(root, keep=2, storage_options=s3.options, endpoint_url=proxy.url)
    job.resume()
    job.train(1, 6)
    proxy.break_request("DELETE", Fault.UNAVAILABLE, nth=2, lasts=True)
    job.train(7, 9)
    (told,) = (line for line in job.said if "not removed" in line)
    assert f"{root}/step_3.attempt-1 could not be removed completely" in told
    assert "step_3.attempt-1/.metadata" not in keys(s3, root)
    assert "step_3.attempt-1/__0_0.distcp" in keys(s3, root)
    assert steps(s3, root)["step_3.attempt-1"] is Verdict.INCOMPLETE
    assert ckptctl.pick(root, before=6, storage_options=s3.options).chosen is None
    proxy.reset()
    job.train(10, 12)
    assert list(steps(s3, root)) == ["step_12.attempt-1", "step_9.attempt-1"]
    assert not [key for key in keys(s3, root) if key.startswith("step_3")]
    job.die()


def test_a_bucket_that_lets_nobody_remove_keeps_its_steps_and_the_run_goes_on(
    s3: S3Server, root: str, counting_proxy: Callable[[str], CountingProxy]
):
    proxy = counting_proxy(s3.endpoint)
    job = Job(root, keep=1, storage_options=s3.options, endpoint_url=proxy.url)
    job.resume()
    proxy.break_request("DELETE", Fault.DENIED, lasts=True)
    job.train(1, 6)
    assert [line for line in job.said if "not removed" in line and "access denied" in line]
    assert set(steps(s3, root).values()) == {Verdict.COMPLETE}
    assert len(steps(s3, root)) == 2
    job.die()


def test_a_large_step_is_uploaded_in_pieces(s3: S3Server, root: str):
    from ckptctl.storage.objects import PART_BYTES
    from ckptctl.train import Checkpointer

    n_numbers = 3 * PART_BYTES // 4  # three parts, and the rest of the file
    model = torch.nn.Linear(n_numbers, 1, bias=False)
    with Checkpointer(root, model=model, storage_options=s3.options, tell=print) as ckpt:
        ckpt.resume()
        ckpt.save(1)
    saved = model.weight.detach().clone()
    torch.nn.init.zeros_(model.weight)
    with Checkpointer(root, model=model, storage_options=s3.options, tell=print) as ckpt:
        assert ckpt.resume().step == 1
    assert torch.equal(model.weight, saved)
    with open_store(root, storage_options=s3.options) as store:
        (shard,) = [one for one in store.list_tree() if one.path.endswith(".distcp")]
    assert shard.size > 3 * PART_BYTES
