"""Inspection on a real object store: the number of requests, and answers when it fails."""

from __future__ import annotations

import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import clean_environment
from next_commands import follow
from services.counting_proxy import CountingProxy, Fault
from services.plugin import PAGE, S3Server

import ckptctl
from ckptctl import AccessDenied, Answer, Level, StorageUnavailable, UsageError, Verdict
from ckptctl.errors import CkptctlError
from ckptctl.findings import Report, Severity
from ckptctl.selection.branches import to_compare

pytestmark = [pytest.mark.torch, pytest.mark.server]


def upload(s3: S3Server, folder: Path, prefix: str) -> str:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "expected.json":
            key = f"{prefix}/{path.relative_to(folder)}"
            s3.client.put_object(Bucket=s3.bucket, Key=key, Body=path.read_bytes())
    return f"s3://{s3.bucket}/{prefix}"


def asked(s3: S3Server, name: str, url: str, **options: Any) -> Any:
    """The answer or the error of a function of the library, after its next commands were run.

    The storage answers by then; a process finds it as a person's does, in the environment.
    """
    try:
        answer = getattr(ckptctl, name)(url, **{"storage_options": s3.options, **options})
    except CkptctlError as error:
        answer = error
    is_report = isinstance(answer, Report)  # whose findings stand in the answer of `scan`, too
    words = ["scan" if is_report else name, url]
    leads = answer.findings if is_report else (answer,)
    for command in filter(None, (each.next_command for each in leads)):
        variables = clean_environment(**s3.environment)
        follow(words, answer.exit_code, f"next: {command}", cwd=Path.cwd(), env=variables)
    return answer


@pytest.fixture
def run(s3: S3Server, checkpoints: Path) -> str:
    """The address of a run of four ranks, steps 100 to 500."""
    return upload(s3, checkpoints / "run_fsdp4", uuid.uuid4().hex)


def through(proxy: CountingProxy, s3: S3Server) -> dict[str, object]:
    return {**s3.options, "endpoint_url": proxy.url}


def test_the_answer_is_the_one_that_the_same_files_on_disk_get(s3, run, checkpoints):
    on_disk = ckptctl.scan(str(checkpoints / "run_fsdp4"), level=Level.STRUCTURE)
    remote = ckptctl.scan(run, level=Level.STRUCTURE, storage_options=s3.options)
    assert [r.number for r in remote.reports] == [r.number for r in on_disk.reports]
    for there, here in zip(remote.reports, on_disk.reports, strict=True):
        assert there.verdict is Verdict.COMPLETE
        assert there.digests == here.digests
        assert there.state == here.state
    assert remote.chosen == f"{run}/step_500"


def test_scan_lists_the_root_and_all_files_once_and_reads_each_metadata_once(
    s3, run, counting_proxy
):
    proxy = counting_proxy(s3.endpoint)
    scanned = ckptctl.scan(run, storage_options=through(proxy, s3))
    assert len(scanned.reports) == 5
    # The root first: of thousands of steps only the newest are listed.
    assert dict(proxy.counts) == {"LIST": 2, "GET": 5}


def test_pick_looks_at_the_listing_and_says_what_more_would_cost(s3, run):
    chosen = ckptctl.pick(run, storage_options=s3.options)
    assert (chosen.path, chosen.level) == (f"{run}/step_500", Level.LISTING)
    assert chosen.level_reason is not None
    assert "requests" in chosen.level_reason


@pytest.mark.parametrize("n_steps", [10, pytest.param(200, marks=pytest.mark.long)])
def test_a_root_of_many_steps_of_64_shards_takes_few_requests(
    n_steps, s3_moto, checkpoints, counting_proxy
):
    prefix = uuid.uuid4().hex
    newest = f"{prefix}/step_{n_steps}"
    root = upload(s3_moto, checkpoints / "run_fsdp4" / "step_500", newest)
    root = root.removesuffix(f"/step_{n_steps}")
    keys = [f"{prefix}/step_{n}/__{rank}_0.distcp" for n in range(1, n_steps) for rank in range(64)]
    keys += [f"{newest}/__{rank}_0.distcp" for rank in range(4, 64)]
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda k: s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=k), keys):
            pass

    proxy = counting_proxy(s3_moto.endpoint)
    assert ckptctl.pick(root, storage_options=through(proxy, s3_moto)).step == n_steps
    # The root, the newest step twice, and the older ones whose write times are compared.
    n_compared = sum(map(len, to_compare([str(n) for n in range(1, n_steps)], {}, 0.0)[:1]))
    assert proxy.counts["LIST"] <= 2 + n_compared + -(-n_steps // PAGE)
    assert proxy.counts["GET"] <= 3
    assert proxy.counts["HEAD"] == 0

    proxy.reset()
    scanned = ckptctl.scan(root, last=None, storage_options=through(proxy, s3_moto))
    assert len(scanned.reports) == n_steps
    n_objects = len(keys) + 5
    assert proxy.counts["LIST"] == -(-n_objects // PAGE)
    assert proxy.counts["GET"] == 2  # the one metadata, and one that the listing lacks
    assert proxy.counts["HEAD"] == 0


def test_a_storage_that_stutters_once_is_asked_again(s3, run, counting_proxy):
    for verb in ("LIST", "GET"):
        for fault in (Fault.UNAVAILABLE, Fault.RESET, Fault.SHORT):
            proxy = counting_proxy(s3.endpoint)
            proxy.break_request(verb, fault)
            assert ckptctl.pick(run, storage_options=through(proxy, s3)).step == 500


def test_a_listing_that_fails_for_good_is_an_error_and_never_an_empty_root(s3, run, counting_proxy):
    proxy = counting_proxy(s3.endpoint)
    proxy.break_request("LIST", Fault.UNAVAILABLE, lasts=True)
    error = asked(s3, "pick", run, storage_options=through(proxy, s3), timeout_s=2, retries=1)
    assert isinstance(error, StorageUnavailable)


def test_metadata_that_cannot_be_read_stops_the_search(s3, run, counting_proxy):
    proxy = counting_proxy(s3.endpoint)
    proxy.break_request("GET", Fault.UNAVAILABLE, lasts=True)
    about = {"storage_options": through(proxy, s3), "timeout_s": 2, "retries": 1}
    stopped = asked(s3, "pick", run, **about)
    assert (stopped.answer, stopped.exit_code, stopped.chosen) == (Answer.UNKNOWN, 75, None)
    assert asked(s3, "verify", f"{run}/step_500", **about).exit_code == 75


def test_a_wrong_key_is_denied_access(s3_ceph):
    options = {**s3_ceph.options, "secret": "wrong"}
    error = asked(s3_ceph, "pick", f"s3://{s3_ceph.bucket}/run", storage_options=options)
    assert isinstance(error, AccessDenied)
    assert error.exit_code == 77


def test_a_prefix_without_objects_is_a_fresh_run_and_a_missing_bucket_is_none(s3):
    fresh = asked(s3, "pick", f"s3://{s3.bucket}/nothing-here")
    assert (fresh.answer, fresh.exit_code) == (Answer.FRESH, 10)
    error = asked(s3, "pick", "s3://no-such-bucket-anywhere/x")
    assert isinstance(error, ckptctl.PathNotFound)
    assert "bucket" in error.message


def test_a_path_given_too_high_up_is_a_wrong_path(s3, checkpoints):
    alone = replace(s3)  # with a bucket of its own: that of the other tests is listed whole
    run = upload(alone, checkpoints / "run_fsdp4", "run")
    error = asked(alone, "pick", run.rsplit("/", 1)[0])
    assert isinstance(error, UsageError)
    assert "holds no steps itself" in error.message


def test_a_step_that_does_not_exist_is_a_usage_error(s3, run):
    for name in ("verify", "seal"):
        error = asked(s3, name, f"{run}@7")
        assert isinstance(error, UsageError)
        assert "holds no step 7" in error.message
        assert isinstance(asked(s3, name, f"{run}/step_7"), ckptctl.PathNotFound)


def test_a_save_in_flight_is_told_by_the_stores_own_times(s3, checkpoints):
    prefix = uuid.uuid4().hex
    root = upload(s3, checkpoints / "run_bare4", prefix)
    s3.client.delete_object(Bucket=s3.bucket, Key=f"{prefix}/step_20/.metadata")
    report = asked(s3, "verify", f"{root}@20")
    assert (report.verdict, report.exit_code) == (Verdict.IN_PROGRESS, 26)
    time.sleep(1.1)
    assert asked(s3, "verify", f"{root}@20", grace_s=1).exit_code == 20


def test_a_step_that_is_damaged_rejected_or_sealed_leads_on(s3, run):
    key = f"{run.removeprefix(f's3://{s3.bucket}/')}/step_500/__0_0.distcp"
    whole = s3.client.get_object(Bucket=s3.bucket, Key=key)["Body"].read()
    s3.client.put_object(Bucket=s3.bucket, Key=key, Body=whole[: len(whole) // 2])
    for name, exit_code in (("verify", 20), ("seal", 20)):
        assert asked(s3, name, f"{run}@500").exit_code == exit_code
    assert asked(s3, "pick", run).step == 400
    assert asked(s3, "pick", run, max_fallback=0).exit_code == 11
    ckptctl.mark(f"{run}@400", "rejected", reason="a spike", storage_options=s3.options)
    assert asked(s3, "verify", f"{run}@400").exit_code == 27
    assert asked(s3, "verify", f"{run}@300", require_seal=True).exit_code == 22
    assert asked(s3, "seal", f"{run}@300").exit_code == 0
    error = asked(s3, "seal", f"{run}@300")
    assert isinstance(error, UsageError)
    assert "already sealed" in error.message


# Archive tiers


def archive(s3: S3Server, step: str, *, restore: bool = False) -> None:
    """Move the shards of a step to an archive tier, as a lifecycle rule does.

    Objects below 128 KiB, such as small metadata, stay where they are by default.
    """
    prefix = step.removeprefix(f"s3://{s3.bucket}/")
    for found in s3.client.list_objects_v2(Bucket=s3.bucket, Prefix=prefix)["Contents"]:
        at = {"Bucket": s3.bucket, "Key": found["Key"]}
        if found["Key"].endswith(".distcp"):
            s3.client.copy_object(**at, CopySource=at, StorageClass="DEEP_ARCHIVE")
            if restore:
                s3.client.restore_object(**at, RestoreRequest={"Days": 7})


@pytest.fixture
def archivable(s3_moto: S3Server, checkpoints: Path) -> str:
    """The same run on a server with storage classes."""
    return upload(s3_moto, checkpoints / "run_fsdp4", uuid.uuid4().hex)


@pytest.mark.parametrize("level", [Level.LISTING, Level.STRUCTURE])
def test_a_step_whose_shards_are_archived_is_not_chosen_and_no_older_one_either(
    s3_moto, archivable, level
):
    archive(s3_moto, f"{archivable}/step_500")
    options = {"storage_options": s3_moto.options, "level": level}
    picked = ckptctl.pick(archivable, **options)
    assert (picked.chosen, picked.exit_code) == (None, 75)
    assert picked.next_command.startswith("aws s3api restore-object")
    (finding,) = picked.passed_over[0].report.with_severity(Severity.FAULT)
    assert finding.code == "step.archived"
    if level is Level.LISTING:
        assert finding.message.startswith("4 files (")
    assert ckptctl.pick(archivable, skip=[500], **options).step == 400


@pytest.mark.parametrize("level", [Level.LISTING, Level.STRUCTURE])
def test_a_restored_step_is_chosen(s3_moto, archivable, level):
    archive(s3_moto, f"{archivable}/step_500", restore=True)
    assert ckptctl.pick(archivable, storage_options=s3_moto.options, level=level).step == 500


def test_old_archived_steps_exclude_no_newer_one_and_are_removed(s3_moto, archivable):
    for number in (100, 200, 300, 400):
        archive(s3_moto, f"{archivable}/step_{number}")
    options = {"storage_options": s3_moto.options}
    assert ckptctl.pick(archivable, **options).step == 500
    ckptctl.seal(f"{archivable}@500", **options)
    pruned = ckptctl.prune(archivable, 1, unsealed=True, apply=True, **options)
    assert [one.number for one in pruned.decisions if one.removed] == [400, 300, 200, 100]


def test_an_archived_step_is_not_counted_as_kept(s3_moto, archivable):
    ckptctl.seal(f"{archivable}@400", storage_options=s3_moto.options)
    archive(s3_moto, f"{archivable}/step_500")
    pruned = ckptctl.prune(archivable, 1, unsealed=True, storage_options=s3_moto.options)
    assert [one.number for one in pruned.decisions if one.counts] == [400]
