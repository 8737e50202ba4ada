"""The requests of a store on S3, and the meaning of answers that are wrong.

Every test runs with both clients, through a proxy that counts and breaks.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_line import clean_environment, forked_python
from services.counting_proxy import CountingProxy, Fault
from services.moto_server import moto_server
from services.plugin import PAGE, S3Server
from services.processes import free_port, started, wait_until

from ckptctl.errors import (
    AccessDenied,
    AlreadyExists,
    PathNotFound,
    StorageUnavailable,
    UsageError,
)
from ckptctl.storage import obstore_client, waiting
from ckptctl.storage.contract import Replaced, ShortRead, Span, Store
from ckptctl.storage.objects import PART_BYTES
from ckptctl.storage.opening import open_store

pytestmark = pytest.mark.server

RETRIES = 2
PASSING = (Fault.UNAVAILABLE, Fault.RESET, Fault.SHORT, Fault.LOST)


@pytest.fixture(autouse=True)
def _short_pauses_and_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(obstore_client, "PAGE_KEYS", PAGE)


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test uses."""
    return uuid.uuid4().hex


@pytest.fixture
def store(s3_moto: S3Server, proxy: CountingProxy, prefix: str, client: str) -> Iterator[Store]:
    """A root with one step of four files, counted from zero."""
    for name, data in (
        (".metadata", b"metadata"),
        ("__0_0.distcp", b"0123456789" * 1000),
        ("__1_0.distcp", b"abcdefghij" * 1000),
        ("__2_0.distcp", b""),
    ):
        s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=f"{prefix}/step_1/{name}", Body=data)
    with open_store(
        f"s3://{s3_moto.bucket}/{prefix}",
        storage_options={**s3_moto.options, "client": client},
        endpoint_url=proxy.url,
        timeout_s=600,
        retries=RETRIES,
    ) as opened:
        yield opened


def put_many(server: S3Server, prefix: str, names: list[str]) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda name: server.client.put_object(
                    Bucket=server.bucket, Key=f"{prefix}/{name}", Body=b"x"
                ),
                names,
            )
        )


# Requests


def test_a_tree_costs_one_listing_request_for_each_page_of_keys_and_obstore_one_to_be_sure(
    store, s3_moto, proxy, prefix, client
):
    put_many(s3_moto, prefix, [f"step_2/{n:04}" for n in range(PAGE + 10)])
    assert len(store.list_tree()) == PAGE + 14
    assert proxy.counts == {"LIST": 2 if client == "s3fs" else 3}


def test_one_level_costs_one_listing_request_however_much_lies_below(store, s3_moto, proxy, prefix):
    put_many(s3_moto, prefix, [f"step_{n}/{m}" for n in range(2, 12) for m in range(PAGE // 10)])
    assert len(store.list_dir()) == 11
    assert proxy.counts == {"LIST": 1}


def test_a_read_costs_one_request_and_no_look_before(store, proxy):
    store.read("step_1/.metadata", limit=100)
    assert proxy.counts == {"GET": 1}


def test_spans_cost_one_request_each(store, proxy):
    spans = [Span("step_1/__0_0.distcp", n * 10, 10) for n in range(40)]
    assert all(data == b"0123456789" for _, data in store.read_spans(spans))
    assert proxy.counts == {"GET": 40}


def test_a_write_costs_one_request_and_one_look_where_it_must_not_replace(store, proxy):
    store.put("a", b"1", replace=True)
    assert proxy.counts == {"PUT": 1}
    proxy.reset()
    store.put("b", b"1")
    assert proxy.counts == {"HEAD": 1, "PUT": 1}


def test_what_is_kept_costs_one_look_for_each_file_and_no_read(store, proxy):
    assert len([*store.kept(f"step_1/__{n}_0.distcp" for n in range(3))]) == 3
    assert proxy.counts == {"HEAD": 3}


def test_a_look_at_what_is_kept_is_asked_again_and_ends_after_bounded_tries(store, proxy):
    proxy.break_request("HEAD", Fault.UNAVAILABLE)
    (kept,) = store.kept(["step_1/.metadata"])
    assert kept.etag
    proxy.break_request("HEAD", Fault.UNAVAILABLE, lasts=True)
    with pytest.raises(StorageUnavailable, match="no answer after 3 tries"):
        [*store.kept(["step_1/.metadata"])]


def test_a_server_that_keeps_no_checksum_of_a_whole_gets_the_parts_without(store, proxy, client):
    data = os.urandom(9 << 20)
    proxy.break_request("POST", Fault.NOT_IMPLEMENTED, lasts=True)
    store.put_pieces("big", lambda: iter([memoryview(data)]), len(data))
    assert store.read("big", limit=len(data)) == data
    # To begin, in vain where a checksum is asked for, and to complete.
    assert proxy.counts["POST"] == (3 if client == "s3fs" else 2)


# Answers that heal


@pytest.mark.parametrize("fault", PASSING, ids=str)
@pytest.mark.parametrize("verb", ["LIST", "GET"])
def test_what_fails_once_is_asked_again(store, proxy, verb, fault):
    proxy.break_request(verb, fault)
    if verb == "LIST":
        assert len(store.list_tree()) == 4
    else:
        (read,) = store.read_spans([Span("step_1/__1_0.distcp", 5, 4000)])
        assert read[1] == (b"abcdefghij" * 401)[5:4005]
    assert proxy.counts == {verb: 2}


def test_a_server_that_is_silent_once_is_asked_again(s3_moto, proxy, store, client):
    proxy.break_request("GET", Fault.SILENT)
    with open_store(
        store.url,
        storage_options={**s3_moto.options, "client": client, "endpoint_url": proxy.url},
        timeout_s=0.5,
    ) as impatient:
        assert impatient.read("step_1/.metadata", limit=100) == b"metadata"
    assert proxy.counts == {"GET": 2}


def test_the_second_page_is_asked_again_and_the_first_is_not(store, s3_moto, proxy, prefix, client):
    put_many(s3_moto, prefix, [f"step_2/{n:04}" for n in range(PAGE + 10)])
    proxy.break_request("LIST", Fault.UNAVAILABLE, nth=2)
    assert len(store.list_tree()) == PAGE + 14
    # obstore hides its pages, so that all of them are asked for again.
    assert proxy.counts == {"LIST": 3 if client == "s3fs" else 5}


PARTS = 4


@pytest.mark.parametrize(
    "fault",
    [Fault.BROKEN, pytest.param(Fault.UNAVAILABLE, marks=pytest.mark.slow), Fault.LOST],
    ids=str,
)
def test_a_part_that_fails_is_sent_again_and_the_others_are_not(
    s3_moto, proxy, store, client, fault
):
    data = os.urandom(PART_BYTES * (PARTS - 1) + 1)
    asked: list[int] = []

    def pieces() -> Iterator[memoryview]:
        asked.append(1)
        yield memoryview(data)

    # More failures than any single request may have, and one of each.
    for number in range(1, PARTS + 1):
        proxy.break_request("PUT", fault, path=f"partNumber={number}")
    store.put_pieces("step_1/big", pieces, len(data))
    assert asked == [1]
    assert proxy.counts["POST"] == 2
    assert PARTS < proxy.counts["PUT"] <= 2 * PARTS + 2
    assert store.read("step_1/big", limit=len(data)) == data


def test_an_upload_whose_part_never_passes_ends_after_bounded_tries_and_is_aborted(
    s3_moto, proxy, store, prefix
):
    data = bytes(PART_BYTES * 2)
    proxy.break_request("PUT", Fault.BROKEN, nth=2, lasts=True)
    with pytest.raises(StorageUnavailable, match=r"step_1/big"):
        store.put_pieces("step_1/big", lambda: iter([memoryview(data)]), len(data))
    assert RETRIES + 2 <= proxy.counts["PUT"] <= 2 * (RETRIES + 2)
    assert not uploads(s3_moto, f"{prefix}/")


def test_a_part_that_fails_more_often_than_the_count_is_sent_again_while_there_is_time(
    s3_moto, proxy, store, client
):
    data = os.urandom(PART_BYTES + 1)
    for nth in range(1, 2 * RETRIES + 4):
        proxy.break_request("PUT", Fault.BROKEN, nth=nth)
    with open_store(
        store.url,
        storage_options={**s3_moto.options, "client": client},
        endpoint_url=proxy.url,
        retries=RETRIES,
        retry_for_s=600,
    ) as patient:
        patient.put_pieces("big", lambda: iter([memoryview(data)]), len(data))
        assert patient.read("big", limit=len(data)) == data
    assert proxy.counts["POST"] == 2


@pytest.mark.parametrize("fault", [Fault.BROKEN, Fault.LOST, Fault.RESET], ids=str)
def test_an_upload_whose_end_is_not_answered_is_whole_all_the_same(
    store, s3_moto, proxy, prefix, fault
):
    data = os.urandom(PART_BYTES + 1)
    for nth in (1, 3):  # to begin, and to complete
        proxy.break_request("POST", fault, nth=nth)
    store.put_pieces("step_1/big", lambda: iter([memoryview(data)]), len(data))
    assert store.read("step_1/big", limit=len(data)) == data


_UPLOAD = """
import sys
from ckptctl.storage.opening import open_store
url, endpoint, client = sys.argv[1:]
def pieces():
    while True:
        yield memoryview(bytes(1 << 20))
store = open_store(url, storage_options={"client": client}, endpoint_url=endpoint)
store.put_pieces("step_2/__0_0.distcp", pieces, 1 << 40)
"""


def uploads(server: S3Server, prefix: str) -> list[str]:
    """The keys of unfinished uploads below `prefix`."""
    found = server.client.list_multipart_uploads(Bucket=server.bucket, Prefix=prefix)
    return [item["Key"] for item in found.get("Uploads", ())]


@pytest.fixture(params=["moto", "ceph"])
def server(request: pytest.FixtureRequest) -> S3Server:
    """Each server in turn."""
    found: S3Server = request.getfixturevalue(f"s3_{request.param}")
    return found


def test_uploads_that_a_killed_save_left_are_listed_and_aborted(
    server, counting_proxy, prefix, client
):
    proxy = counting_proxy(server.endpoint)
    url = f"s3://{server.bucket}/{prefix}"
    command = [forked_python(), "-c", _UPLOAD, url, proxy.url, client]
    with started(command, env=clean_environment(**server.environment)) as process:
        wait_until(lambda: proxy.counts["PUT"] > 1, what="the first part")
        process.kill()
    options = {**server.options, "client": "s3fs"}
    with open_store(url, storage_options=options, endpoint_url=proxy.url) as store:
        assert [*store.list_uploads("step_1")] == [*store.list_uploads("step_")] == []
        proxy.break_request("GET", Fault.BROKEN)
        (left,) = store.list_uploads("step_2")
        assert [left] == [*store.list_uploads()]
        assert left.path == "step_2/__0_0.distcp"
        assert left.begun_s is not None
        assert left.begun_s > 1.2e9  # moto gives one date of 2010 to all
        proxy.break_request("DELETE", Fault.LOST)
        store.abort_upload(left)
        store.abort_upload(left)
        assert [*store.list_uploads()] == []


def test_unfinished_uploads_are_listed_over_more_than_one_page(s3_ceph, prefix):
    keys = [f"step_1/{n:04}" for n in range(1003)]

    def begin(key: str) -> None:
        s3_ceph.client.create_multipart_upload(Bucket=s3_ceph.bucket, Key=f"{prefix}/{key}")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(begin, [*keys, keys[5]]))
    options = {**s3_ceph.options, "client": "s3fs"}
    with open_store(f"s3://{s3_ceph.bucket}/{prefix}", storage_options=options) as store:
        assert [found.path for found in store.list_uploads()] == sorted([*keys, keys[5]])


# Answers that do not heal


@pytest.mark.parametrize(
    ("verb", "fault"),
    [
        *((verb, fault) for verb in ("LIST", "GET") for fault in PASSING),
        ("PUT", Fault.UNAVAILABLE),
        ("PUT", Fault.LOST),
    ],
    ids=str,
)
def test_a_storage_that_does_not_heal_is_unavailable_after_bounded_tries(
    store, proxy, verb, fault, client
):
    proxy.break_request(verb, fault, lasts=True)
    use = {
        "LIST": store.list_tree,
        "GET": lambda: store.read("step_1/__0_0.distcp", limit=1 << 20),
        "PUT": lambda: store.put("a", b"1", replace=True),
    }[verb]
    with pytest.raises(StorageUnavailable, match=r"no answer after 3 tries in \d+ s \(.+\)$"):
        use()
    # s3fs's HTTP client sends once more by itself where a connection that was kept
    # open turns out to be closed.
    resent = client == "s3fs" and fault is Fault.LOST
    assert RETRIES < proxy.counts[verb] <= (RETRIES + 1) * (2 if resent else 1)


def test_a_storage_that_is_away_for_more_tries_than_the_count_is_waited_for_while_there_is_time(
    s3_moto, proxy, store, client
):
    for verb in ("LIST", "GET", "PUT"):
        for nth in range(1, 8):
            proxy.break_request(verb, Fault.BROKEN, nth=nth)
    with open_store(
        store.url,
        storage_options={**s3_moto.options, "client": client},
        endpoint_url=proxy.url,
        retries=RETRIES,
        retry_for_s=600,
    ) as patient:
        assert len(patient.list_tree()) == 4
        assert patient.read("step_1/.metadata", limit=100) == b"metadata"
        patient.put("seal", b"ours", replace=True)
    assert proxy.counts == {"LIST": 8, "GET": 8, "PUT": 8}


def test_a_listing_whose_second_page_fails_is_an_error_and_not_half_a_listing(
    store, s3_moto, proxy, prefix
):
    put_many(s3_moto, prefix, [f"step_2/{n:04}" for n in range(PAGE + 10)])
    proxy.break_request("LIST", Fault.UNAVAILABLE, nth=2, lasts=True)
    with pytest.raises(StorageUnavailable):
        store.list_tree()


def test_a_page_in_html_is_no_empty_listing(store, proxy):
    for verb in ("LIST", "HEAD", "GET"):
        proxy.break_request(verb, Fault.NO_LISTING, lasts=True)
    with pytest.raises(StorageUnavailable):
        store.list_dir()
    with pytest.raises(StorageUnavailable):
        store.list_tree()


def test_a_server_that_never_answers_is_unavailable(s3_moto, proxy, client):
    proxy.break_request("LIST", Fault.SILENT, lasts=True)
    with (
        open_store(
            f"s3://{s3_moto.bucket}/any",
            storage_options={**s3_moto.options, "client": client},
            endpoint_url=proxy.url,
            timeout_s=0.3,
            retries=1,
        ) as store,
        pytest.raises(StorageUnavailable, match="after 2 tries"),
    ):
        store.list_dir()


def test_a_port_where_nobody_listens_is_unavailable(s3_moto, client):
    with (
        open_store(
            "s3://bucket/run",
            storage_options={**s3_moto.options, "client": client},
            endpoint_url=f"http://127.0.0.1:{free_port()}",
            retries=1,
        ) as store,
        pytest.raises(StorageUnavailable, match=r"^s3://bucket/run: no answer after 2 tries"),
    ):
        store.list_dir()


def test_a_bucket_that_does_not_exist_is_not_found_and_says_so(s3_moto, client):
    options = {**s3_moto.options, "client": client}
    with open_store("s3://no-such-bucket/run", storage_options=options) as store:
        for use in (
            store.list_dir,
            lambda: store.list_tree("step_1"),
            lambda: store.read("a", limit=1),
        ):
            with pytest.raises(PathNotFound, match=r"no-such-bucket: the bucket does not exist$"):
                use()


@pytest.mark.parametrize("size", [1000, PART_BYTES + 1])
def test_what_arrives_changed_is_refused_by_a_real_server_and_sent_again(
    s3_ceph, counting_proxy, prefix, client, size
):
    proxy, data = counting_proxy(s3_ceph.endpoint), os.urandom(size)
    options = {**s3_ceph.options, "client": client}
    url = f"s3://{s3_ceph.bucket}/{prefix}"
    with open_store(url, storage_options=options, endpoint_url=proxy.url, retries=1) as store:
        proxy.break_request("PUT", Fault.FLIPPED)
        store.put_pieces("shard", lambda: iter([memoryview(data)]), size)
        assert proxy.counts["PUT"] > 1
        assert store.read("shard", limit=size) == data


@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_wrong_keys_are_access_denied_and_never_shown(s3_ceph, client, wrong):
    options = {**s3_ceph.options, wrong: "a-wrong-and-secret-one", "client": client}
    with open_store(f"s3://{s3_ceph.bucket}/run", storage_options=options) as store:
        for use in (
            store.list_dir,
            lambda: store.read("a", limit=1),
            lambda: store.put("a", b""),
        ):
            with pytest.raises(AccessDenied, match="AWS_SECRET_ACCESS_KEY") as caught:
                use()
            assert "a-wrong-and-secret-one" not in caught.value.message


def test_a_public_bucket_needs_no_keys_when_told_so(s3_ceph, url, client):
    bucket = s3_ceph.bucket
    s3_ceph.client.put_bucket_acl(Bucket=bucket, ACL="public-read")
    endpoint = {"AWS_ENDPOINT_URL": s3_ceph.endpoint, "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        assert listed(url, client, "anon=true", **endpoint) == "a"
    finally:
        s3_ceph.client.put_bucket_acl(Bucket=bucket, ACL="private")
    assert "AccessDenied" in listed(url, client, "anon=true", **endpoint)


def test_no_keys_at_all_is_access_denied_and_says_what_to_set(
    s3_moto, client, monkeypatch, tmp_path
):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    # Outside of a cloud no service answers for the machine's role.
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    options = {"client": client, "client_kwargs": {"region_name": "us-east-1"}}
    with (
        open_store(
            "s3://bucket/run", storage_options=options, endpoint_url=s3_moto.endpoint
        ) as store,
        pytest.raises(AccessDenied, match=r"no credentials found; set AWS_ACCESS_KEY_ID"),
    ):
        store.list_dir()


def test_an_endpoint_that_is_no_url_is_a_usage_error(client):
    options = {"key": "a", "secret": "b", "client": client}
    with (
        pytest.raises(UsageError, match="nowhere"),
        open_store("s3://bucket/run", storage_options=options, endpoint_url="nowhere") as store,
    ):
        store.list_dir()


_WAIT = """
import os, sys
from ckptctl.storage.contract import Span
from ckptctl.storage.opening import open_store
url, endpoint, client, verb = sys.argv[1:]
options = {"key": "a", "secret": "b", "client": client}
store = open_store(url, storage_options=options, endpoint_url=endpoint, timeout_s=1000)
print(os.getpid(), flush=True)
store.list_dir() if verb == "LIST" else list(store.read_spans([Span("a", 0, 1)]))
"""


@pytest.mark.parametrize("verb", ["LIST", "GET"])
def test_ctrl_c_does_not_wait_for_a_server_that_does_not_answer(s3_moto, proxy, client, verb):
    proxy.break_request(verb, Fault.SILENT, lasts=True)
    command = [forked_python(), "-c", _WAIT, f"s3://{s3_moto.bucket}", proxy.url, client, verb]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with started(command, env=clean_environment(), **streams) as process:
        forked = int(process.stdout.readline())
        wait_until(lambda: proxy.counts[verb] == 1, what="the request")
        os.kill(forked, signal.SIGINT)
        assert process.wait() == -signal.SIGINT


def test_an_answer_that_comes_slowly_is_waited_for(s3_moto, proxy, store, client):
    proxy.break_request("GET", Fault.DRIBBLE)
    with open_store(
        store.url,
        storage_options={**s3_moto.options, "client": client},
        endpoint_url=proxy.url,
        timeout_s=1.9,
        retries=0,
    ) as patient:
        # Two seconds in all, a quarter of one between bytes.
        assert patient.read("step_1/.metadata", limit=100) == b"metadata"


@pytest.mark.parametrize("option", ["nonsense", "username"])
def test_an_option_that_the_client_does_not_know_is_a_usage_error(s3_moto, client, option):
    options = {**s3_moto.options, "client": client, option: "1"}
    with (
        pytest.raises(UsageError),
        open_store("s3://bucket/run", storage_options=options) as store,
    ):
        store.list_dir()


def test_a_listing_that_lost_its_next_page_is_asked_for_again(store, proxy, monkeypatch):
    monkeypatch.setattr(obstore_client, "PAGE_KEYS", 1)
    proxy.break_request("LIST", Fault.NO_TOKEN)
    assert len(store.list_tree()) == 4


def test_half_an_object_that_is_sent_as_all_of_it_is_asked_for_again(store, proxy):
    proxy.break_request("GET", Fault.CUT)
    assert store.read("step_1/.metadata", limit=100) == b"metadata"
    assert proxy.counts["GET"] == 2


@pytest.mark.parametrize("verb", ["LIST", "PUT"])
def test_a_404_is_no_answer_to_a_request_that_needs_no_object(store, proxy, verb):
    proxy.break_request(verb, Fault.NOT_THERE, lasts=True)
    with pytest.raises(StorageUnavailable):
        store.list_dir() if verb == "LIST" else store.put("seal", b"ours")


# Writes that must not replace


def test_a_write_that_is_refused_as_there_already_and_is_not_is_tried_again(store, proxy):
    proxy.break_request("PUT", Fault.THERE)
    store.put("seal", b"ours")
    assert store.read("seal", limit=10) == b"ours"


def test_a_write_whose_answer_was_lost_is_known_as_our_own(store, proxy):
    proxy.break_request("PUT", Fault.LOST)
    store.put("seal", b"ours")
    assert store.read("seal", limit=10) == b"ours"
    assert proxy.counts["PUT"] == 2
    with pytest.raises(AlreadyExists):
        store.put("seal", b"ours")


def test_a_write_that_lost_the_race_finds_the_other_one(store, s3_moto, proxy, prefix):
    proxy.break_request("PUT", Fault.RESET)
    s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=f"{prefix}/seal", Body=b"theirs")
    with pytest.raises(AlreadyExists):
        store.put("seal", b"ours")
    assert store.read("seal", limit=10) == b"theirs"


def test_the_store_itself_refuses_to_replace_what_appears_after_the_look(
    store, s3_moto, proxy, prefix
):
    s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=f"{prefix}/seal", Body=b"theirs")
    proxy.break_request("HEAD", Fault.NOT_THERE)
    with pytest.raises(AlreadyExists):
        store.put("seal", b"ours")
    assert proxy.counts == {"HEAD": 2, "PUT": 1, "GET": 1}  # listed again before it is accepted
    assert store.read("seal", limit=10) == b"theirs"


def test_a_store_without_conditional_writes_is_written_and_read_back(store, proxy):
    proxy.break_request("PUT", Fault.NOT_IMPLEMENTED, lasts=True)
    store.put("seal", b"ours")
    assert store.read("seal", limit=10) == b"ours"
    with pytest.raises(AlreadyExists):
        store.put("seal", b"ours")


# Keys that other tools make


def test_folder_markers_are_not_files(store, s3_moto, prefix):
    for key in (f"{prefix}/", f"{prefix}/step_1/", f"{prefix}/step_9/"):
        s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=key, Body=b"")
    s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=f"{prefix}/step_9/a", Body=b"")
    assert [i.path for i in store.list_tree()][-1] == "step_9/a"
    assert len(store.list_tree()) == 5
    assert [(i.path, i.kind) for i in store.list_dir()] == [("step_1", "dir"), ("step_9", "dir")]
    assert [i.path for i in store.list_tree("step_9")] == ["step_9/a"]
    assert [i.path for i in store.list_dir("step_9")] == ["step_9/a"]


def test_a_marker_alone_is_an_empty_folder(store, s3_moto, prefix, client):
    s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=f"{prefix}/step_9/", Body=b"")
    assert [(i.path, i.kind) for i in store.list_dir()] == [("step_1", "dir"), ("step_9", "dir")]
    assert list(store.list_tree("step_9")) == []
    shown = [i.path for i in store.list_tree() if i.path.startswith("step_9")]
    assert shown == ([] if client == "s3fs" else ["step_9"])


def test_keys_with_empty_names_are_listed_and_read_or_refused_whole(store, s3_moto, prefix, client):
    s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=f"{prefix}/step_1//x", Body=b"1")
    if client == "s3fs":
        assert "step_1//x" in [i.path for i in store.list_tree()]
        assert store.read("step_1//x", limit=1) == b"1"
    else:
        with pytest.raises(StorageUnavailable, match="client=s3fs can"):
            store.list_tree()


def test_an_object_beside_a_folder_of_its_name_is_shown_as_both(store, s3_moto, prefix):
    s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=f"{prefix}/step_1", Body=b"1")
    found = [(info.path, info.kind) for info in store.list_dir()]
    assert sorted(found) == [("step_1", "dir"), ("step_1", "file")]


def replaced(server: S3Server, prefix: str) -> Callable[[], object]:
    """What puts another shard of the same size in the place of one."""
    return lambda: server.client.put_object(
        Bucket=server.bucket, Key=f"{prefix}/step_1/__0_0.distcp", Body=b"9876543210" * 1000
    )


def test_a_shard_that_is_replaced_between_two_reads_is_never_read_as_one(
    store, s3_moto, proxy, prefix
):
    proxy.break_request("GET", replaced(s3_moto, prefix), nth=20)
    spans = [Span("step_1/__0_0.distcp", n * 10, 10) for n in range(40)]
    with pytest.raises(Replaced, match=r"__0_0\.distcp was replaced while it was read"):
        list(store.read_spans(spans))
    # Whoever begins anew reads the new one, and that alone.
    assert {data for _, data in store.read_spans(spans)} == {b"9876543210"}


def test_an_open_shard_that_is_replaced_is_not_read_on(store, s3_moto, prefix):
    buffer = memoryview(bytearray(10))
    with store.open_file("step_1/__0_0.distcp") as file:
        file.read_into(0, buffer)
        replaced(s3_moto, prefix)()
        with pytest.raises(Replaced):
            file.read_into(10, buffer)


def test_a_range_that_outgrew_its_object_says_how_large_it_is(store):
    with pytest.raises(ShortRead) as caught:
        list(store.read_spans([Span("step_1/.metadata", 4, 100)]))
    assert caught.value.size == 8
    assert re.search(r"bytes 4 to 104 were requested, it ends at 8$", caught.value.message)


# Settings as users have them

_LIST = (
    "import sys; from ckptctl.storage.opening import open_store\n"
    "options = {'client': sys.argv[2]} | dict(a.split('=', 1) for a in sys.argv[3:])\n"
    "with open_store(sys.argv[1], storage_options=options, retries=0) as store:\n"
    "    print(*(info.path for info in store.list_dir()))\n"
)


def listed(url: str, client: str, *options: str, **environment: str) -> str:
    """What a process of its own, with nothing but these variables, lists."""
    clean = {n: v for n, v in clean_environment().items() if not n.startswith(("AWS_", "FSSPEC_"))}
    # fsspec reads its configuration when it is imported.
    python = sys.executable if environment.keys() & {"FSSPEC_CONFIG_DIR"} else forked_python()
    done = subprocess.run(
        [python, "-c", _LIST, url, client, *options],
        env={**clean, "HOME": "/nonexistent", "AWS_EC2_METADATA_DISABLED": "true", **environment},
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


@pytest.fixture
def url(s3_ceph: S3Server, prefix: str) -> str:
    """A root on a server that checks every signature, with one file in it."""
    s3_ceph.client.put_object(Bucket=s3_ceph.bucket, Key=f"{prefix}/a", Body=b"x")
    return f"s3://{s3_ceph.bucket}/{prefix}"


def test_the_aws_environment_is_enough(s3_ceph, url, client):
    assert listed(url, client, **s3_ceph.environment) == "a"


def test_an_option_wins_over_the_environment(s3_ceph, url, client):
    wrong = {**s3_ceph.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    assert "AccessDenied" in listed(url, client, **wrong)
    right = (f"key={s3_ceph.access_key}", f"secret={s3_ceph.secret_key}")
    assert listed(url, client, *right, **wrong) == "a"


def test_requests_go_through_the_http_proxy_of_the_environment(
    s3_ceph, counting_proxy, url, client
):
    proxy = counting_proxy(s3_ceph.endpoint)
    assert listed(url, client, **s3_ceph.environment, http_proxy=proxy.url) == "a"
    assert proxy.counts == {"LIST": 1}
    direct = {**s3_ceph.environment, "http_proxy": f"http://127.0.0.1:{free_port()}"}
    assert "no answer after 1 try" in listed(url, client, **direct)
    assert listed(url, client, **direct, no_proxy="127.0.0.1") == "a"


def _has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        try:
            probe.bind(("::1", 0))
        except OSError:
            return False
        return True


@pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6 loopback")
def test_an_endpoint_of_ipv6_is_listed_read_and_written(tmp_path, client):
    data = os.urandom(PART_BYTES + 1)
    with moto_server(tmp_path, "::1") as endpoint:
        server = S3Server(endpoint, "test", "test")
        options = {**server.options, "client": client}
        with open_store(f"s3://{server.bucket}/run", storage_options=options) as store:
            store.put("a", b"1")
            store.put_pieces("big", lambda: iter([memoryview(data)]), len(data))
            assert [info.path for info in store.list_tree()] == ["a", "big"]
            assert store.read("big", limit=len(data)) == data


def test_a_bucket_with_object_lock_is_written_replaced_and_removed_and_keeps_every_version(
    s3_ceph, client
):
    bucket = f"locked-{uuid.uuid4().hex[:12]}"
    s3_ceph.client.create_bucket(Bucket=bucket, ObjectLockEnabledForBucket=True)
    days = {"DefaultRetention": {"Mode": "COMPLIANCE", "Days": 1}}
    s3_ceph.client.put_object_lock_configuration(
        Bucket=bucket, ObjectLockConfiguration={"ObjectLockEnabled": "Enabled", "Rule": days}
    )
    data = bytes(PART_BYTES + 1)
    options = {**s3_ceph.options, "client": client}
    with open_store(f"s3://{bucket}/run", storage_options=options) as store:
        store.put("step_1/.metadata", b"1")
        store.put("step_1/.metadata", b"2", replace=True)
        store.put_pieces("step_1/shard", lambda: iter([memoryview(data)]), len(data))
        store.remove("step_1/.metadata")
        assert [info.path for info in store.list_tree()] == ["step_1/shard"]
        store.put("step_1/.metadata", b"3")
        assert store.read("step_1/.metadata", limit=1) == b"3"
    versions = s3_ceph.client.list_object_versions(Bucket=bucket)["Versions"]
    assert len(versions) == 4


def test_an_s3a_url_is_the_same_storage(s3_ceph, url, client):
    assert listed(url.replace("s3://", "s3a://"), client, **s3_ceph.environment) == "a"


def test_a_profile_is_found_by_s3fs_and_refused_by_obstore(s3_ceph, url, tmp_path):
    config = tmp_path / "config"
    config.write_text(
        f"[profile lab]\nregion = us-east-1\nendpoint_url = {s3_ceph.endpoint}\n"
        f"aws_access_key_id = {s3_ceph.access_key}\n"
        f"aws_secret_access_key = {s3_ceph.secret_key}\n"
    )
    assert listed(url, "s3fs", AWS_CONFIG_FILE=str(config), AWS_PROFILE="lab") == "a"
    assert listed(url, "s3fs", "profile=lab", AWS_CONFIG_FILE=str(config)) == "a"
    assert "none" in listed(url, "s3fs", "profile=none", AWS_CONFIG_FILE=str(config))
    assert "obstore reads no profiles" in listed(url, "obstore", "profile=lab")


def test_the_configuration_of_fsspec_is_found_by_s3fs(s3_ceph, url, tmp_path):
    (tmp_path / "s3.json").write_text(
        '{"s3": {"client_kwargs": {"region_name": "us-east-1"}, "config_kwargs": {"s3": {}}}}'
    )
    found = listed(
        url,
        "s3fs",
        FSSPEC_CONFIG_DIR=str(tmp_path),
        FSSPEC_S3_KEY=s3_ceph.access_key,
        FSSPEC_S3_SECRET=s3_ceph.secret_key,
        FSSPEC_S3_ENDPOINT_URL=s3_ceph.endpoint,
    )
    assert found == "a"
