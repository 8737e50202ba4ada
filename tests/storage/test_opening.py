"""The store that an address opens, and the errors of addresses that open none."""

from __future__ import annotations

import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from every_case import all_cases

from ckptctl.errors import StorageUnavailable, UsageError
from ckptctl.storage import waiting
from ckptctl.storage.contract import ShortRead, Span, StoreKind
from ckptctl.storage.objects import ObjectStore
from ckptctl.storage.opening import (
    SharedStores,
    base_name,
    is_local,
    join_url,
    open_store,
    parent_url,
)


@pytest.mark.parametrize(
    ("url", "parent", "name"),
    [
        ("/a/b", "/a", "b"),
        ("/a/b/", "/a", "b"),
        ("/a", "/", "a"),
        ("/", "/", ""),
        ("a/b", "a", "b"),
        ("a", ".", "a"),
        ("a//b", "a", "b"),
        ("file:///a/b", "file:///a", "b"),
        ("file:///a", "file:///", "a"),
        ("s3://bucket", "s3://bucket", ""),
        ("s3://bucket/", "s3://bucket", ""),
        ("s3://bucket/run", "s3://bucket", "run"),
        ("s3://bucket/run/step_1/", "s3://bucket/run", "step_1"),
        ("memory://a/b", "memory://a", "b"),
        ("https://host:80/a/b", "https://host:80/a", "b"),
        ("not:a/scheme", "not:a", "scheme"),
    ],
)
def test_an_address_comes_apart_into_folder_and_name(url, parent, name):
    assert parent_url(url) == parent
    assert base_name(url) == name


@pytest.mark.parametrize(
    ("base", "name", "joined"),
    [
        ("/a", "b", "/a/b"),
        ("/", "b", "/b"),
        ("/a", "", "/a"),
        ("s3://bucket", "b/c", "s3://bucket/b/c"),
        ("s3://bucket/", "b", "s3://bucket/b"),
        ("file:///", "b", "file:///b"),
        ("memory://", "b", "memory://b"),
    ],
)
def test_a_name_is_put_behind_an_address(base, name, joined):
    assert join_url(base, name) == joined


@pytest.mark.parametrize("url", ["/a/b", "a", ".", "~/a", "/", "s3://bucket/a/b", "file:///a/b"])
def test_taking_apart_and_putting_together_is_no_change(url):
    name = base_name(url)
    assert not name or join_url(parent_url(url), name) in (url, f"./{url}")


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("/a", True),
        ("a", True),
        ("file:///a", True),
        ("FILE:///a", True),
        ("not:a", True),
        ("s3://a", False),
        ("abfss://c@account/x", False),
    ],
)
def test_a_scheme_tells_what_is_not_on_this_machine(url, local):
    assert is_local(url) is local


def test_a_path_keeps_its_name_and_loses_its_last_slash(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "run").mkdir()
    (tmp_path / "run/a").write_bytes(b"x")
    for address, url in (
        ("run", "run"),
        ("./run/", "./run"),
        (f"{tmp_path}/run//", f"{tmp_path}/run"),
        (f"file://{tmp_path}/run/", f"file://{tmp_path}/run"),
        ("~/run", f"{tmp_path}/run"),
    ):
        store = open_store(address)
        assert store.url == url
        assert [info.path for info in store.list_dir()] == ["a"]


def test_the_root_of_the_file_system_is_an_address():
    assert open_store("/").url == "/"
    assert "proc" in [info.path for info in open_store("/").list_dir()]


@pytest.mark.parametrize(
    "url",
    ["", "a\0b", "s3://", "s3:///key", "s3://a bucket/run", "s3://../run", "s3://./run", "gs:///run",
     "az:///run", "memory://", "memory:///", "s3:////"],
)  # fmt: skip
def test_an_address_that_names_nothing_is_a_usage_error(url):
    with pytest.raises(UsageError):
        open_store(url)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("bucket//run", "empty name between two slashes"),
        ("bucket//", "empty name"),
        ("bucket/run//", "empty name"),
        ("bucket/a//b/run/", "empty name"),
        ("bucket/./run", r"\. and \.\."),
        ("bucket/../run", r"\. and \.\."),
        ("bucket/run/..", r"\. and \.\."),
        ("bucket/run/.", r"\. and \.\."),
        ("bucket/run\r", "white space"),
        ("bucket/run\n", "white space"),
        ("bucket/run ", "white space"),
        ("bucket/a\nb", "control character"),
        ("bucket/a\x7fb", "control character"),
        ("bucket/\udcff", "not UTF-8"),
    ],
)
def test_an_address_that_clients_read_in_different_ways_is_a_usage_error(path, says):
    clients = [{"client": "s3fs"}, {"client": "obstore"}]
    addresses = [
        *product(("s3", "S3", "s3a"), clients),
        *product(("gs", "az", "memory", "https", "hdfs"), [{}]),
    ]
    with all_cases() as case:
        for scheme, options in addresses:
            with case((scheme, options)), pytest.raises(UsageError, match=says):
                open_store(f"{scheme}://{path}", storage_options=options)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("file://localhost/a/b", "without a host"),
        ("file://runs/a", "without a host"),
        ("file://~/a", "without a host"),
        ("file:///a%20b", "plain path"),
        ("file:/a/b", "two slashes"),
        ("s3:/bucket/run", "two slashes"),
        ("S3:bucket/run", "two slashes"),
        ("gs:/bucket/run", "two slashes"),
        ("/a/run\r", "white space"),
        ("/a/run\n", "white space"),
        (" s3://bucket/run", "white space"),
        ("\ts3://bucket/run", "white space"),
    ],
)
def test_an_address_that_looks_local_and_is_meant_otherwise_is_a_usage_error(url, says):
    with pytest.raises(UsageError, match=says):
        open_store(url)


def test_a_local_folder_may_bear_a_name_that_an_address_may_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("s3:", "a b ", "per%20cent", "new\nline", "tab\t"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run/a").write_bytes(b"x")
        for address in (f"./{name}/run", f"./{name}//run//", f"./{name}/./run/../run"):
            assert [info.path for info in open_store(address).list_dir()] == ["a"]


def test_credentials_in_an_address_are_refused_and_not_shown():
    with pytest.raises(UsageError) as caught:
        open_store("s3://AKIA:very-secret@bucket/run")
    assert "very-secret" not in caught.value.message


def test_an_unknown_scheme_is_a_usage_error():
    with pytest.raises(UsageError, match="nosuch"):
        open_store("nosuch://a/b")


def test_a_chained_url_is_refused_because_a_cache_could_answer():
    with pytest.raises(UsageError, match="chained"):
        open_store("simplecache::s3://bucket/run")


def test_a_client_that_does_not_exist_is_a_usage_error():
    with pytest.raises(UsageError, match="client=boto3 is not one of s3fs, obstore"):
        open_store("s3://bucket/run", storage_options={"client": "boto3"})


_WITHOUT = """
import sys
from importlib.abc import MetaPathFinder
missing = sys.argv[2].split(",")
class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name in missing else real(name, *a)
from ckptctl.errors import MissingExtra
from ckptctl.storage.opening import open_store
options = dict(pair.split("=") for pair in sys.argv[3:])
try:
    store = open_store(sys.argv[1], storage_options=options)
    print(type(store._client).__name__)
except MissingExtra as exc:
    print(exc.message, "|", exc.next_command)
"""


def opened_without(url: str, missing: str, *options: str) -> str:
    """What `open_store` makes of a URL in a process that lacks these packages."""
    command = [sys.executable, "-c", _WITHOUT, url, missing, *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_without_its_package_a_storage_names_what_to_install():
    assert "pip install 'ckptctl[s3]'" in opened_without("s3://b/r", "s3fs,obstore")
    assert "pip install 'ckptctl[s3]'" in opened_without("s3://b/r", "s3fs", "client=s3fs")
    assert "pip install 'ckptctl[obstore]'" in opened_without(
        "s3://b/r", "obstore", "client=obstore"
    )
    assert "pip install gcsfs" in opened_without("gs://b/r", "gcsfs")
    assert "pip install adlfs" in opened_without("az://c/r", "adlfs")
    assert "pip install fsspec" in opened_without("memory://r", "fsspec")


def test_s3fs_is_taken_where_it_is_installed_and_obstore_where_it_is_alone():
    pytest.importorskip("s3fs")
    pytest.importorskip("obstore")
    assert opened_without("s3://b/r", "nothing") == "S3fsClient"
    assert opened_without("s3://b/r", "obstore") == "S3fsClient"
    assert opened_without("s3://b/r", "s3fs,fsspec", "region=us-east-1") == "ObstoreClient"


# Other implementations of fsspec


def test_any_other_scheme_is_opened_by_fsspec():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    assert isinstance(store, ObjectStore)
    assert store.kind is StoreKind.OBJECT


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A plain web server over a folder with one step: it knows no byte ranges."""
    import http.server
    import threading

    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.001)
    (tmp_path / "run/step_1").mkdir(parents=True)
    (tmp_path / "run/step_1/meta").write_bytes(b"metadata")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(tmp_path))  # type: ignore[arg-type]

        def log_message(self, *arguments: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/run"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.server
def test_a_web_server_is_listed_and_read_and_never_written(web):
    with open_store(web, retries=0) as store:
        assert [i.path for i in store.list_dir()] == ["step_1"]
        assert [(i.path, i.size) for i in store.list_tree()] == [("step_1/meta", 8)]
        assert store.read("step_1/meta", limit=100) == b"metadata"
        with pytest.raises(UsageError, match="read-only"):
            store.put("x", b"")


@pytest.mark.server
def test_a_server_that_ignores_byte_ranges_is_an_error_and_not_wrong_bytes(web):
    with (
        open_store(web, retries=0) as store,
        pytest.raises(StorageUnavailable, match="sent 8 bytes instead"),
    ):
        list(store.read_spans([Span("step_1/meta", 2, 3)]))


def test_what_an_implementation_raises_is_one_of_our_errors(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.001)
    store = open_store(f"memory://{uuid.uuid4().hex}", retries=1)
    store.put("a", b"1")

    def fails_with(error: Exception) -> StorageUnavailable:
        def fails(*arguments: object, **options: object) -> None:
            raise error

        monkeypatch.setattr(MemoryFileSystem, "cat_file", fails)
        with pytest.raises(StorageUnavailable) as caught:
            store.read("a", limit=1)
        return caught.value

    assert "after 2 tries" in fails_with(TimeoutError("slow")).message
    assert "after 2 tries" in fails_with(ConnectionResetError("reset")).message
    blind = fails_with(RuntimeError("https://host/a?sig=c2VjcmV0 went wrong\nmore"))
    assert "RuntimeError: https://host/a?sig=*** went wrong" in blind.message
    assert "c2VjcmV0" not in blind.message
    assert "more" not in blind.message


def test_an_empty_range_of_an_implementation_is_a_short_read():
    store = open_store(f"memory://{uuid.uuid4().hex}")
    store.put("a", b"1")
    with pytest.raises(ShortRead):
        list(store.read_spans([Span("a", 5, 1)]))


def test_shared_stores_retry_each_in_their_own_way_over_the_same_connections(monkeypatch):
    from fsspec.implementations.memory import MemoryFileSystem

    def fails(*_: object, **__: object) -> None:
        raise TimeoutError("slow")

    url = f"memory://{uuid.uuid4().hex}"
    shared = SharedStores(retries=1)
    stores = [open_store(url, each) for each in (shared, replace(shared, retries=0))]
    stores[0].put("a", b"1")
    monkeypatch.setattr(MemoryFileSystem, "cat_file", fails)
    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.001)
    for store, tries in zip(stores, ("after 2 tries", "after 1 try"), strict=True):
        with pytest.raises(StorageUnavailable, match=tries):
            store.read("a", limit=1)
    assert len(shared.stores) == 1
    # A client has one timeout for all its requests.
    open_store(url, replace(shared, timeout_s=5.0))
    assert len(shared.stores) == 2
    shared.close()
    assert not shared.stores
