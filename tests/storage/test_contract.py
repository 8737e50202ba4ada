"""Every store fulfils the contract: one suite, run on each of them."""

from __future__ import annotations

import os
import uuid
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from services.plugin import PAGE

from ckptctl.errors import AlreadyExists, PathEscape, PathNotFound
from ckptctl.model import Checksum
from ckptctl.storage.contract import NotSupported, ShortRead, Span, Store, StoreKind, TooLarge
from ckptctl.storage.opening import join_url, open_store
from ckptctl.storage.waiting import Retries

LOCAL = ("local",)
CLIENTS = ("s3fs", "obstore")
ON_S3 = tuple(
    pytest.param(f"{server}-{client}", marks=pytest.mark.server)
    for server in ("moto", "ceph")
    for client in CLIENTS
)
OF_OBJECTS = ("memory", *ON_S3)

Open = Callable[[str], Store]


@pytest.fixture
def opened(
    request: pytest.FixtureRequest, where: str, tmp_path: Path
) -> Iterator[Callable[[str], Store]]:
    """A function that opens `NAME` within one fresh folder or prefix of the storage `where`."""
    options: dict[str, object] = {}
    if where == "local":
        base = str(tmp_path)
        (tmp_path / "runs").mkdir()
    elif where == "memory":
        base = f"memory://{uuid.uuid4().hex}"
    else:
        server_name, client = where.split("-")
        server = request.getfixturevalue(f"s3_{server_name}")
        base = f"s3://{server.bucket}/{uuid.uuid4().hex}"
        options = {**server.options, "client": client}
    stores: list[Store] = []

    def open_one(name: str) -> Store:
        stores.append(open_store(join_url(base, name), storage_options=options, retries=1))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()


@pytest.fixture
def store(opened: Open) -> Store:
    """A root with two steps and a file of its own."""
    root = created(opened("runs/a"))
    for name, data in (
        ("step_1/.metadata", b"meta of 1"),
        ("step_1/__0_0.distcp", bytes(range(256)) * 40),
        ("step_10/.metadata", b"meta of 10"),
        ("latest", b"step_10"),
    ):
        root.put(name, data, replace=True)  # without the request whether it is there
    return root


@pytest.fixture
def empty(opened: Open) -> Store:
    """A root that nothing was written to."""
    return created(opened("runs/a"))


def created(store: Store) -> Store:
    """The store of a root that exists, where the storage has folders."""
    if store.folders is not None:
        store.folders.create_root()
    return store


@pytest.fixture(params=[*LOCAL, *OF_OBJECTS])
def where(request: pytest.FixtureRequest) -> str:
    """Each storage in turn."""
    name: str = request.param
    return name


def test_a_listing_of_one_level_shows_files_with_sizes_and_folders(store):
    found = {info.path: (info.kind, info.size) for info in store.list_dir()}
    assert found == {"latest": ("file", 7), "step_1": ("dir", 0), "step_10": ("dir", 0)}


def test_a_listing_of_one_level_can_start_below_the_root(store):
    assert [info.path for info in store.list_dir("step_1")] == [
        "step_1/.metadata",
        "step_1/__0_0.distcp",
    ]


def test_a_listing_of_a_tree_shows_files_only_and_paths_from_the_root(store):
    assert [(info.path, info.size, info.kind) for info in store.list_tree()] == [
        ("latest", 7, "file"),
        ("step_1/.metadata", 9, "file"),
        ("step_1/__0_0.distcp", 10240, "file"),
        ("step_10/.metadata", 10, "file"),
    ]


def test_a_tree_below_a_folder_does_not_take_in_its_longer_namesake(store):
    assert [info.path for info in store.list_tree("step_1")] == [
        "step_1/.metadata",
        "step_1/__0_0.distcp",
    ]


def test_every_file_of_a_listing_has_a_time_and_an_identity(store):
    for info in store.list_tree():
        assert info.mtime_s is not None
        assert info.mtime_s > 1.6e9
        assert info.identity


def test_the_identity_changes_when_a_file_is_replaced(store):
    (before,) = (info for info in store.list_dir() if info.path == "latest")
    store.put("latest", b"step_11", replace=True)
    (after,) = (info for info in store.list_dir() if info.path == "latest")
    assert after.size == before.size
    assert after.identity != before.identity


def test_what_is_kept_of_files_comes_in_the_order_asked_for(store, where):
    paths = ["latest", "step_1/.metadata"]
    kept = [*store.kept(paths)]
    assert [one.path for one in kept] == paths
    # moto stands for Amazon; Ceph 16 takes a checksum, and does not keep it.
    assert [len(one.checksums) for one in kept] == [where == "moto-s3fs"] * 2
    assert all(bool(one.checksums) == (not one.why_none) for one in kept)
    if where in ("moto-s3fs", "moto-obstore", "ceph-s3fs", "ceph-obstore"):
        tags = {info.path: info.identity.strip('"') for info in store.list_tree()}
        assert [one.etag for one in kept] == [tags[path] for path in paths]
        with pytest.raises(PathNotFound):
            [*store.kept([*paths, "nothing"])]


def test_what_another_writer_adds_is_in_the_next_listing(store, opened):
    assert len(store.list_dir()) == 3
    opened("runs/a").put("step_11/.metadata", b"m")
    assert [info.path for info in store.list_dir()][-2:] == ["step_10", "step_11"]
    assert len(store.list_tree()) == 5


def test_a_store_opened_on_a_step_lists_relative_to_it(store, opened):
    step = opened("runs/a/step_1")
    assert [info.path for info in step.list_tree()] == [".metadata", "__0_0.distcp"]
    assert step.read(".metadata", limit=100) == b"meta of 1"


def test_a_folder_that_is_not_there_is_not_found_or_empty_where_there_are_no_folders(store):
    if store.kind is StoreKind.OBJECT:
        assert list(store.list_dir("step_2")) == []
        assert list(store.list_tree("step_2")) == []
    else:
        with pytest.raises(PathNotFound):
            store.list_dir("step_2")
        with pytest.raises(PathNotFound):
            store.list_tree("step_2")


def test_a_root_that_is_not_there_is_not_found_or_empty_where_there_are_no_folders(store, opened):
    root = opened("runs/b")
    if store.kind is StoreKind.OBJECT:
        assert list(root.list_dir()) == []
    else:
        with pytest.raises(PathNotFound, match=r"runs/b does not exist"):
            root.list_dir()


@pytest.mark.parametrize(
    ("where", "page"),
    [
        *((where, PAGE) for where in (*LOCAL, "memory")),
        *(pytest.param(f"moto-{client}", PAGE, marks=pytest.mark.server) for client in CLIENTS),
        *(
            pytest.param(f"ceph-{client}", 1000, marks=[pytest.mark.server, pytest.mark.slow])
            for client in CLIENTS
        ),
    ],
)
def test_a_listing_goes_on_after_the_first_page_of_names(opened, page):
    root = created(opened("many"))
    names = [f"s/{n:04}" for n in range(page + 3)]
    for name in names:
        root.put(name, b"", replace=True)
    assert [info.path for info in root.list_dir("s")] == names
    assert [info.path for info in root.list_tree()] == names


def test_a_whole_file_is_read(store):
    assert store.read("latest", limit=7) == b"step_10"
    assert store.read("step_1/__0_0.distcp", limit=1 << 20) == bytes(range(256)) * 40


def test_a_store_with_other_retries_is_the_same_store(store):
    again = store.retrying(Retries(0))
    assert again.url == store.url
    assert again.list_tree() == store.list_tree()
    again.put("new", b"1")
    assert store.read("new", limit=1) == b"1"


def test_a_file_over_the_limit_is_refused(store):
    with pytest.raises(TooLarge, match="latest"):
        store.read("latest", limit=6)


def test_an_empty_file_is_written_listed_and_read(store):
    store.put("step_1/__1_0.distcp", b"")
    assert store.read("step_1/__1_0.distcp", limit=10) == b""
    assert ("step_1/__1_0.distcp", 0) in [(i.path, i.size) for i in store.list_tree("step_1")]


def test_a_file_that_is_not_there_is_not_found(store):
    with pytest.raises(PathNotFound):
        store.read("step_1/nothing", limit=10)
    with pytest.raises(PathNotFound):
        list(store.read_spans([Span("nothing", 0, 1)]))


def test_the_root_itself_is_not_a_file(store):
    with pytest.raises(PathNotFound):
        store.read("", limit=1)
    with pytest.raises(PathNotFound):
        list(store.read_spans([Span("", 0, 1)]))


def test_spans_come_in_the_order_asked_for(store):
    data = bytes(range(256)) * 40
    spans = [Span("step_1/__0_0.distcp", (n * 7919) % 10000, 1 + n) for n in range(50)]
    spans.insert(20, Span("latest", 5, 2))
    expected = [data[s.offset : s.offset + s.length] for s in spans]
    expected[20] = b"10"
    read = [*store.read_spans(spans)]
    assert read == list(zip(spans, expected, strict=True))
    assert {type(data) for _, data in read} == {bytes}
    assert [*store.view_spans(spans)] == read


def test_a_span_of_no_bytes_is_empty(store):
    assert list(store.read_spans([Span("latest", 3, 0)])) == [(Span("latest", 3, 0), b"")]


def test_an_open_file_fills_a_buffer_from_any_offset(store):
    buffer = memoryview(bytearray(1000))
    with store.open_file("step_1/__0_0.distcp") as file:
        for offset in (0, 9240, 77):
            file.read_into(offset, buffer)
            assert buffer == (bytes(range(256)) * 40)[offset : offset + 1000]
        file.read_into(10240, buffer[:0])


def test_an_open_file_that_ends_within_the_buffer_is_a_short_read(store):
    with store.open_file("step_1/__0_0.distcp") as file, pytest.raises(ShortRead):
        file.read_into(9241, memoryview(bytearray(1000)))


def test_a_file_that_is_not_there_is_not_found_when_it_is_opened_or_read(store):
    with pytest.raises(PathNotFound), store.open_file("step_1/nothing") as file:
        file.read_into(0, memoryview(bytearray(1)))


def test_spans_may_be_left_before_the_last(store):
    spans = (Span("latest", 0, 1) for _ in range(1000))
    reading = iter(store.read_spans(spans))
    assert next(reading)[1] == b"s"
    del reading
    assert sum(1 for _ in spans) > 900


def test_a_span_over_the_end_is_a_short_read_after_the_sound_ones(store):
    reading = iter(store.read_spans([Span("latest", 0, 7), Span("latest", 5, 3)]))
    assert next(reading)[1] == b"step_10"
    with pytest.raises(ShortRead) as caught:
        next(reading)
    assert caught.value.size == 7


@pytest.mark.parametrize("span", [Span("latest", 7, 1), Span("latest", 1 << 40, 1 << 40)])
def test_a_span_beyond_the_end_is_a_short_read(store, span):
    with pytest.raises(ShortRead):
        list(store.read_spans([span]))


@pytest.mark.parametrize("span", [Span("latest", -1, 2), Span("latest", 0, -1)])
def test_a_span_that_no_file_can_have_is_a_short_read(store, span):
    with pytest.raises(ShortRead):
        list(store.read_spans([span]))


def test_what_is_there_is_not_replaced(store):
    with pytest.raises(AlreadyExists, match="latest"):
        store.put("latest", b"other")
    assert store.read("latest", limit=100) == b"step_10"
    assert len(store.list_dir()) == 3


def test_what_is_there_is_replaced_when_asked(store):
    store.put("latest", b"other", replace=True)
    assert store.read("latest", limit=100) == b"other"
    assert len(store.list_dir()) == 3


def test_a_file_that_is_removed_is_gone_and_the_others_are_not(store):
    for _ in range(2):  # there, and not there
        store.remove("step_1/.metadata")
    assert [info.path for info in store.list_tree()] == [
        *("latest", "step_1/__0_0.distcp", "step_10/.metadata")
    ]


def test_a_root_that_is_not_there_yet_is_created_where_the_storage_has_folders(opened):
    root = created(opened("new"))
    root.put("a/b/c", b"1")
    assert [info.path for info in root.list_tree()] == ["a/b/c"]


def test_no_upload_is_left_by_writes_that_ended(opened, where):
    store = created(opened("runs/uploads"))
    data = bytes(18 << 20)
    store.put_pieces("step_1/__0_0.distcp", lambda: iter([memoryview(data)]), len(data))
    with pytest.raises(ZeroDivisionError):
        store.put_pieces("step_1/x", lambda: (memoryview(data)[: 1 // n] for n in (1, 0)), 18 << 20)
    if where.endswith("obstore"):
        with pytest.raises(NotSupported, match="client=s3fs can"):
            store.list_uploads()
    else:
        assert [*store.list_uploads()] == [*store.list_uploads("step_1")] == []
        with pytest.raises(PathEscape):
            store.list_uploads("../other")


@pytest.mark.parametrize(
    "path",
    ["/etc/passwd", "../up", "step_1/../../up", "a/..", ".", "step_1/./.metadata", "a\0b", "a/"],
)
def test_a_path_that_leads_out_or_is_not_plain_is_refused(empty, path):
    for use in (
        lambda: empty.read(path, limit=1),
        lambda: list(empty.read_spans([Span(path, 0, 1)])),
        lambda: empty.list_dir(path),
        lambda: empty.list_tree(path),
        lambda: empty.put(path, b""),
    ):
        with pytest.raises(PathEscape):
            use()


@pytest.mark.parametrize(
    "name", ["sp ace", "pl+us", "per%2ecent", "ümlaut", "quo'te\"", "q?x=1&y", "#hash", "$(x)", "…"]
)
def test_odd_names_are_kept(empty, name):
    empty.put(f"odd/{name}", b"x")
    assert [info.path for info in empty.list_dir("odd")] == [f"odd/{name}"]
    assert empty.read(f"odd/{name}", limit=1) == b"x"


@pytest.mark.parametrize(
    "name",
    ["sp ace", "pl+us", "per%2ecent", "%2F", "ümlaut", "u\u0308mlaut", "q?x=1&y", "#hash", "a:b",
     "*", "~", "{x}", "b@ck\\slash"],
)  # fmt: skip
def test_a_root_of_an_odd_name_is_the_same_root_for_every_client(empty, opened, name):
    empty.put(f"{name}/step_1/a", b"x")
    assert empty.list_dir(name)
    root = opened(f"runs/a/{name}")
    assert [info.path for info in root.list_dir()] == ["step_1"]
    assert root.read("step_1/a", limit=1) == b"x"
    root.put("step_1/b", b"y")
    assert [info.path for info in opened(f"runs/a/{name}/").list_tree()] == ["step_1/a", "step_1/b"]
    assert len(empty.list_tree(name)) == 2


def test_a_name_that_cannot_be_text_is_not_found(store):
    with pytest.raises(PathNotFound):
        store.read("lone \ud800 surrogate", limit=1)


def test_a_name_longer_than_any_storage_takes_is_not_found(store):
    with pytest.raises(PathNotFound):
        store.read("x" * 5000, limit=1)


def test_the_url_is_what_the_user_wrote(store):
    assert store.url.endswith("runs/a")
    with store as same:
        assert same is store


@pytest.mark.parametrize("where", OF_OBJECTS)
def test_reads_are_priced_as_requests(store):
    assert store.kind is StoreKind.OBJECT


@pytest.mark.parametrize("where", LOCAL)
def test_a_file_shows_up_in_no_folder_before_it_is_whole(store, tmp_path):
    store.put("step_11/.metadata", b"m")
    assert os.listdir(tmp_path / "runs/a/step_11") == [".metadata"]


@pytest.mark.parametrize("where", [*LOCAL, *OF_OBJECTS], indirect=False)
@pytest.mark.parametrize("size", [0, 5, 3 << 20, 18 << 20])
def test_a_file_written_in_pieces_is_the_pieces_in_order(opened, where, size):
    store = created(opened("runs/pieces"))
    data = os.urandom(size)
    buffer = bytearray(1 << 20)

    def pieces() -> Iterator[memoryview]:
        for at in range(0, size, 1 << 20):
            n = min(1 << 20, size - at)
            buffer[:n] = data[at : at + n]
            yield memoryview(buffer)[:n]

    store.put_pieces("step_1/__0_0.distcp", pieces, size)
    assert store.read("step_1/__0_0.distcp", limit=size) == data
    if where == "moto-s3fs":
        (kept,) = store.kept(["step_1/__0_0.distcp"])
        assert kept.checksums == (Checksum("crc32", f"{zlib.crc32(data):08x}", whole=True),)
    store.put_pieces("step_1/__0_0.distcp", lambda: iter([memoryview(b"anew")]), 4)
    assert store.read("step_1/__0_0.distcp", limit=size + 4) == b"anew"


class Broken(Exception):
    pass


@pytest.mark.parametrize("where", [*LOCAL, *OF_OBJECTS], indirect=False)
@pytest.mark.parametrize("size", [100, 18 << 20])
def test_a_file_whose_pieces_fail_is_not_there(opened, where, size):
    store = created(opened("runs/pieces"))

    def pieces() -> Iterator[memoryview]:
        yield memoryview(bytes(size - 1))
        raise Broken

    store.put("step_1/.metadata", b"beside it")
    with pytest.raises(Broken):
        store.put_pieces("step_1/__0_0.distcp", pieces, size)
    assert [file.path for file in store.list_tree()] == ["step_1/.metadata"]
