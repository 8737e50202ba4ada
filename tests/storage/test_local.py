"""The store of a folder on a file system: links, special files, errors and writes."""

from __future__ import annotations

import errno
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from command_line import forked_python, run_program

from ckptctl.errors import (
    AccessDenied,
    AlreadyExists,
    PathEscape,
    PathNotFound,
    StorageUnavailable,
)
from ckptctl.storage import files, local, waiting
from ckptctl.storage.contract import Span, StoreKind, TooLarge
from ckptctl.storage.local import LocalStore
from ckptctl.storage.opening import open_store


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "FIRST_PAUSE_S", 0.001)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root with one step of one file, and a file outside of it."""
    root = tmp_path / "run"
    (root / "step_1").mkdir(parents=True)
    (root / "step_1/.metadata").write_bytes(b"metadata")
    (tmp_path / "outside").write_bytes(b"not yours")
    return root


def uses(store: LocalStore, path: str) -> tuple[Callable[[], object], ...]:
    """Every way to read what lies at `path`."""
    return (
        lambda: store.read(path, limit=100),
        lambda: list(store.read_spans([Span(path, 0, 1)])),
    )


# Links


@pytest.mark.parametrize("target", ["../outside", "step_1/.metadata", "/etc/passwd", "nowhere"])
def test_a_link_is_shown_with_its_target_and_not_read(root, target):
    (root / "link").symlink_to(target)
    store = LocalStore(str(root))
    (shown,) = (info for info in store.list_dir() if info.path == "link")
    assert (shown.kind, shown.link, shown.size) == ("link", target, 0)
    for use in uses(store, "link"):
        with pytest.raises(PathEscape, match=f"link is a link to {target}; links are not followed"):
            use()


@pytest.mark.parametrize("target", ["step_1", "..", "/etc"])
def test_a_link_in_the_middle_of_a_path_is_not_followed(root, target):
    (root / "step_2").symlink_to(target)
    store = LocalStore(str(root))
    for use in (
        *uses(store, "step_2/.metadata"),
        *uses(store, "step_2/passwd"),
        lambda: store.list_dir("step_2"),
        lambda: store.list_tree("step_2"),
        lambda: store.put("step_2/new", b""),
    ):
        with pytest.raises(PathEscape):
            use()
    assert sorted(os.listdir(root.parent)) == ["outside", "run"]


def test_a_tree_does_not_go_through_links_to_folders(root):
    (root / "loop").symlink_to(".")
    (root / "step_1/up").symlink_to("../..")
    assert [(i.path, i.kind) for i in LocalStore(str(root)).list_tree()] == [
        ("loop", "link"),
        ("step_1/.metadata", "file"),
        ("step_1/up", "link"),
    ]


def test_the_root_itself_may_be_a_link_or_lie_behind_one(root):
    (root.parent / "to-run").symlink_to("run")
    (root.parent / "to-parent").symlink_to(".")
    for way in ("to-run", "to-parent/run"):
        store = LocalStore(str(root.parent / way))
        assert [i.path for i in store.list_tree()] == ["step_1/.metadata"]
        assert store.read("step_1/.metadata", limit=100) == b"metadata"


def test_replacing_a_link_replaces_the_link_and_not_what_it_points_to(root):
    (root / "latest").symlink_to("../outside")
    LocalStore(str(root)).put("latest", b"step_1", replace=True)
    assert (root.parent / "outside").read_bytes() == b"not yours"
    assert not (root / "latest").is_symlink()


# Things that are no files


def test_pipes_and_sockets_are_shown_and_reading_them_does_not_block(root):
    os.mkfifo(root / "pipe")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "socket"))
        store = LocalStore(str(root))
        kinds = {info.path: info.kind for info in store.list_dir()}
        assert kinds == {"pipe": "other", "socket": "other", "step_1": "dir"}
        for name in ("pipe", "socket", "step_1"):
            for use in uses(store, name):
                with pytest.raises(PathNotFound, match=name):
                    use()


def test_what_nfs_keeps_of_removed_files_is_not_shown(root):
    (root / "step_1/.nfs00000000012345670000abcd").write_bytes(b"")
    assert [i.path for i in LocalStore(str(root)).list_tree()] == ["step_1/.metadata"]


def test_names_that_are_no_utf_8_are_listed_and_read(root):
    name = os.fsdecode(b"caf\xe9")
    (root / name).write_bytes(b"x")
    store = LocalStore(str(root))
    assert name in [info.path for info in store.list_dir()]
    assert store.read(name, limit=1) == b"x"


def test_folders_nested_without_end_are_refused(tmp_path):
    deep = tmp_path
    for _ in range(102):
        deep = deep / "d"
    deep.mkdir(parents=True)
    with pytest.raises(TooLarge, match="more than 100 deep"):
        LocalStore(str(tmp_path)).list_tree()


# A root that is not there


def test_a_missing_root_below_a_folder_that_is_there_is_not_found(tmp_path):
    with pytest.raises(PathNotFound, match=r"run does not exist$"):
        LocalStore(str(tmp_path / "run")).list_dir()


def test_a_missing_root_below_a_missing_folder_is_a_storage_that_is_not_there(tmp_path):
    store = LocalStore(str(tmp_path / "mnt/run"))
    for use in (store.list_dir, store.list_tree, lambda: store.put("a", b"")):
        with pytest.raises(
            StorageUnavailable, match="check that its file system is mounted"
        ) as caught:
            use()
        assert str(tmp_path / "mnt") in caught.value.message
        assert caught.value.next_command
    assert os.listdir(tmp_path) == []


def test_a_root_that_is_a_dangling_link_is_judged_by_where_it_points(tmp_path):
    (tmp_path / "unmounted").symlink_to("mnt/run")
    (tmp_path / "empty").symlink_to("run")
    with pytest.raises(StorageUnavailable, match="check that its file system is mounted"):
        LocalStore(str(tmp_path / "unmounted")).list_dir()
    store = LocalStore(str(tmp_path / "empty"))
    with pytest.raises(PathNotFound):
        store.list_dir()
    store.create_root()
    store.put("a", b"1")
    assert (tmp_path / "run/a").read_bytes() == b"1"


def _writes(store: LocalStore) -> Iterator[Callable[[], object]]:
    yield lambda: store.put("a", b"1")
    yield lambda: store.put("a/b", b"1", replace=True)
    yield lambda: store.put_pieces("a", lambda: iter([memoryview(b"1")]), 1)
    yield lambda: store.make_folder("a")
    yield lambda: store.write_in_place("a", lambda: iter([memoryview(b"1")]), 1)
    yield lambda: store.append_line("a", b"1\n")
    yield lambda: store.move("step_1", "a")


def test_no_write_creates_the_root(tmp_path):
    store = LocalStore(str(tmp_path / "run"))
    for write in _writes(store):
        with pytest.raises(PathNotFound):
            write()
    assert os.listdir(tmp_path) == []
    store.create_root()
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize("replaced", [False, True], ids=["gone", "replaced"])
def test_a_root_that_vanishes_while_it_is_open_is_never_used_again(root, replaced):
    store = LocalStore(str(root))
    assert [info.path for info in store.list_dir()] == ["step_1"]
    root.rename(root.parent / "moved")
    if replaced:
        root.mkdir()
    reads = [store.list_dir, store.list_tree, lambda: store.read("step_1/.metadata", limit=9)]
    for use in (*reads, store.root_id, store.create_root, *_writes(store)):
        with pytest.raises(StorageUnavailable, match="not the folder that was opened before"):
            use()
    assert not root.exists() or os.listdir(root) == []


def test_a_root_that_is_a_file_is_not_found(tmp_path):
    (tmp_path / "run").write_bytes(b"")
    with pytest.raises(PathNotFound, match="Not a directory"):
        LocalStore(str(tmp_path / "run")).list_dir()


# Errors of the system


def test_a_read_error_is_unavailable_and_tried_twice(monkeypatch):
    # Address 0 of a process's memory: a regular file whose first byte gives EIO.
    n_reads = 0
    real = os.pread

    def counted(fd: int, length: int, offset: int) -> bytes:
        nonlocal n_reads
        n_reads += 1
        return real(fd, length, offset)

    monkeypatch.setattr(local.os, "pread", counted)
    with pytest.raises(StorageUnavailable, match="Input/output error"):
        LocalStore("/proc/self").read("mem", limit=10)
    assert n_reads == 2


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOENT, PathNotFound),
        (errno.ENOTDIR, PathNotFound),
        (errno.ENAMETOOLONG, PathNotFound),
        (errno.EACCES, AccessDenied),
        (errno.EPERM, AccessDenied),
        (errno.EROFS, AccessDenied),
        (errno.EIO, StorageUnavailable),
        (errno.ETIMEDOUT, StorageUnavailable),
        (errno.EHOSTDOWN, StorageUnavailable),
        (errno.EMFILE, StorageUnavailable),
        (errno.ENOMEM, StorageUnavailable),
        (errno.EINVAL, StorageUnavailable),
    ],
)
def test_every_error_number_is_one_of_three_answers(root, monkeypatch, number, kind):
    def fails(*arguments: object) -> bytes:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(local.os, "pread", fails)
    with pytest.raises(kind, match=os.strerror(number)):
        LocalStore(str(root)).read("step_1/.metadata", limit=100)


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EAGAIN, errno.EIO])
def test_an_error_that_passes_is_not_seen(root, monkeypatch, number):
    real, failures = os.pread, [number]

    def fails_once(fd: int, length: int, offset: int) -> bytes:
        if failures:
            raise OSError(failures.pop(), "passes")
        return real(fd, length, offset)

    monkeypatch.setattr(local.os, "pread", fails_once)
    store = LocalStore(str(root))
    assert store.read("step_1/.metadata", limit=100) == b"metadata"
    failures.append(number)
    (read,) = store.read_spans([Span("step_1/.metadata", 0, 4)])
    assert read[1] == b"meta"


def test_a_stale_handle_that_stays_stale_is_given_up_after_four_tries(root, monkeypatch):
    def fails(*arguments: object) -> bytes:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(local.os, "pread", fails)
    with pytest.raises(StorageUnavailable, match=r"after 4 tries in \d+ s \(Stale file handle\)"):
        LocalStore(str(root)).read("step_1/.metadata", limit=100)


_AS_NOBODY = """
import os, sys
from ckptctl.errors import AccessDenied
from ckptctl.storage import local
from ckptctl.storage.opening import open_store
os.setgid(65534), os.setuid(65534)
for path, use in (
    (sys.argv[1], lambda s: s.list_dir()),
    (sys.argv[1], lambda s: s.read("step_1/.metadata", limit=1)),
    (sys.argv[2], lambda s: s.put("new", b"")),
):
    try:
        use(open_store(path))
    except AccessDenied as exc:
        print(exc.message)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_what_another_user_may_not_do_is_access_denied(root):
    for parent in root.parents:
        if parent.stat().st_mode & 0o001 == 0:
            parent.chmod(parent.stat().st_mode | 0o001)
    root.chmod(0o700)
    command = [sys.executable, "-c", _AS_NOBODY, str(root), str(root.parent)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    denied = done.stdout.splitlines()
    assert len(denied) == 3
    assert all("Permission denied (as user 65534)" in line for line in denied)


_NO_DESCRIPTOR = """
import os, resource, sys
from ckptctl.errors import StorageUnavailable
from ckptctl.storage.local import LocalStore
lowest = os.dup(0)
os.close(lowest)
resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, lowest))
try:
    LocalStore(sys.argv[1]).list_dir()
except StorageUnavailable as error:
    print(error.message)
"""


def test_running_out_of_descriptors_is_unavailable(root):
    # In a process of its own: what other tests left open here may be closed at any moment.
    done = run_program(forked_python(), "-c", _NO_DESCRIPTOR, root)
    assert "Too many open files" in done.stdout, done.stderr


# Folders that change meanwhile


def test_a_listing_starts_again_when_a_name_vanishes_under_it(root, monkeypatch):
    (root / "a.tmp").write_bytes(b"")
    real, renamed = files._info, []

    def rename_first(entry: os.DirEntry[str], *rest: object) -> object:
        if entry.name == "a.tmp" and not renamed:
            renamed.append((root / "a.tmp").rename(root / "a"))
        return real(entry, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(files, "_info", rename_first)
    assert [i.path for i in LocalStore(str(root)).list_tree()] == ["a", "step_1/.metadata"]


def test_a_tree_starts_again_when_a_folder_vanishes_under_it(root, monkeypatch):
    real, renamed = local.scan, []

    def rename_first(folder: object, parts: tuple[str, ...], in_root: object) -> object:
        yield from real(folder, parts, in_root)  # type: ignore[arg-type]
        if not parts and not renamed:
            renamed.append((root / "step_1").rename(root / "step_2"))

    monkeypatch.setattr(local, "scan", rename_first)
    assert [i.path for i in LocalStore(str(root)).list_tree()] == ["step_2/.metadata"]


def opened_below(folder: Path) -> list[str]:
    """The files and folders there that this process has open."""
    found = []
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of another test
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return [path for path in found if path.startswith(str(folder))]


def test_no_descriptor_is_left_open(root):
    os.mkfifo(root / "pipe")
    store = LocalStore(str(root))
    store.list_tree()
    list(store.read_spans([Span("step_1/.metadata", 0, 1), Span("step_1/.metadata", 1, 1)]))
    next(iter(store.read_spans([Span("step_1/.metadata", 0, 1)] * 2)))
    store.put("a/b", b"")
    for path in ("pipe", "nothing", "step_1/nothing/x"):
        with pytest.raises(PathNotFound):
            store.read(path, limit=1)
    assert opened_below(root.parent) == []


# Writing


@pytest.mark.parametrize("replace", [True, False])
def test_a_write_that_fails_leaves_things_as_they_were(root, monkeypatch, replace):
    (root / "seal").write_bytes(b"old")

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageUnavailable, match="No space left"):
        LocalStore(str(root)).put("seal", b"new", replace=replace)
    assert (root / "seal").read_bytes() == b"old"
    assert sorted(os.listdir(root)) == ["seal", "step_1"]


def test_a_file_system_that_is_full_is_unavailable_and_nothing_is_left(root):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(StorageUnavailable, match="File too large"):
            LocalStore(str(root)).put("seal", b"x" * 1001)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(root) == ["step_1"]


def test_of_many_writers_of_one_name_exactly_one_succeeds(root):
    store, won, lost = LocalStore(str(root)), [], []
    together = threading.Barrier(8)

    def write(n: int) -> None:
        together.wait()
        try:
            store.put("token", str(n).encode())
            won.append(n)
        except AlreadyExists:
            lost.append(n)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(won), len(lost)) == (1, 7)
    assert (root / "token").read_bytes() == str(won[0]).encode()
    assert sorted(os.listdir(root)) == ["step_1", "token"]


def test_a_file_system_without_hard_links_still_keeps_what_is_there(root, monkeypatch):
    def unsupported(*arguments: object, **options: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", unsupported)
    store = LocalStore(str(root))
    store.put("seal", b"first")
    with pytest.raises(AlreadyExists):
        store.put("seal", b"second")
    assert (root / "seal").read_bytes() == b"first"


def test_a_link_whose_answer_was_lost_is_known_as_our_own(root, monkeypatch):
    real = os.link

    def twice(*arguments: object, **options: object) -> None:
        real(*arguments, **options)  # type: ignore[arg-type]
        real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", twice)
    LocalStore(str(root)).put("seal", b"ours")
    assert (root / "seal").read_bytes() == b"ours"
    assert sorted(os.listdir(root)) == ["seal", "step_1"]


# What a read costs


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/", StoreKind.LOCAL),
        ("/home/me", StoreKind.LOCAL),
        ("/mnt/nfs", StoreKind.NETWORK),
        ("/mnt/nfs/run", StoreKind.NETWORK),
        ("/mnt/nfs-not/run", StoreKind.LOCAL),
        ("/mnt/nfs/scratch/run", StoreKind.LOCAL),
        ("/mnt/with space/run", StoreKind.NETWORK),
        ("/mnt/gcs/run", StoreKind.NETWORK),
        ("/mnt/stick", StoreKind.LOCAL),
        ("/auto/run", StoreKind.NETWORK),
    ],
)
def test_the_innermost_mount_says_whether_a_server_answers(folder, kind, tmp_path, monkeypatch):
    table = tmp_path / "mounts"
    table.write_text("""\
/dev/sda1 / ext4 rw 0 0
server:/export /mnt/nfs nfs4 rw,hard 0 0
/dev/nvme0n1 /mnt/nfs/scratch xfs rw 0 0
10.0.0.1@tcp:/fs /mnt/with\\040space lustre rw 0 0
gcsfuse /mnt/gcs fuse.gcsfuse rw 0 0
/dev/sdb1 /mnt/stick fuseblk rw 0 0
systemd-1 /auto autofs rw 0 0
server:/auto /auto nfs rw 0 0
""")
    monkeypatch.setattr(files, "_MOUNT_TABLE", str(table))
    assert LocalStore(folder).kind is kind


def test_spans_on_a_network_are_the_same_and_in_order(root, monkeypatch):
    monkeypatch.setattr(local, "kind_of", lambda folder: StoreKind.NETWORK)
    store = LocalStore(str(root))
    assert store.kind is StoreKind.NETWORK
    spans = [Span("step_1/.metadata", n % 8, 1) for n in range(100)]
    assert b"".join(data for _, data in store.read_spans(spans)) == (b"metadata" * 13)[:100]
    with pytest.raises(PathNotFound):
        list(store.read_spans([*spans, Span("nothing", 0, 1)]))


def test_a_folder_is_opened_without_what_servers_need():
    code = (
        "import sys\n"
        "from ckptctl.storage.opening import open_store\n"
        "store = open_store('.')\n"
        "store.list_dir()\n"
        "heavy = {'fsspec', 'asyncio', 'concurrent.futures', 'http', 's3fs', 'obstore',\n"
        "         'socket', 'ssl', 'random', 'pathlib'}\n"
        "print(*sorted(heavy & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_open_store_gives_a_local_store_for_a_path(root):
    assert isinstance(open_store(str(root)), LocalStore)


def test_a_folder_is_moved_as_a_whole_and_never_onto_another(tmp_path):
    store = LocalStore(str(tmp_path))
    store.put("aside/step_1/.metadata", b"new")
    store.move("aside/step_1", "runs/step_1")
    assert store.read("runs/step_1/.metadata", limit=10) == b"new"
    assert not (tmp_path / "aside/step_1").exists()
    store.put("aside/step_1/.metadata", b"another")
    (tmp_path / "runs/step_2").mkdir()
    for target in ("runs/step_1", "runs/step_2"):
        with pytest.raises(AlreadyExists):
            store.move("aside/step_1", target)
    assert store.read("runs/step_1/.metadata", limit=10) == b"new"
    assert store.read("aside/step_1/.metadata", limit=10) == b"another"


def test_a_file_and_an_empty_folder_are_removed_and_a_full_one_is_not(tmp_path):
    store = LocalStore(str(tmp_path))
    store.put("a/b", b"")
    with pytest.raises(StorageUnavailable):
        store.remove("a")
    store.remove("a/b")
    store.remove("a/b")
    store.remove("a")
    assert not (tmp_path / "a").exists()


def test_the_space_that_is_left_is_that_of_the_file_system(tmp_path):
    about = os.statvfs(tmp_path)
    free = LocalStore(str(tmp_path / "not-there-yet")).file_system().free_bytes
    assert abs(free - about.f_bavail * about.f_frsize) < 1 << 30
