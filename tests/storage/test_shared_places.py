"""Paths in places that others can write: what another user puts there is not used."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from second_user import UID, as_second_user, give, needs_root, open_to_all

from ckptctl.errors import PathUntrusted, UsageError
from ckptctl.storage.files import append_line, replace_file
from ckptctl.storage.shared_places import (
    FoundIn,
    HeldFolder,
    make_private_folder,
    new_private_folder,
    open_folder,
    open_found,
    open_log,
    open_named,
    open_private_folder,
)


def content_of(fd: int) -> bytes:
    with os.fdopen(fd, "rb") as file:
        return file.read()


# Links


def test_links_of_this_user_are_followed_on_the_way_and_by_the_name(tmp_path: Path):
    real = tmp_path / "real" / "deep"
    real.mkdir(parents=True)
    (real / "log").write_text("mine")
    (tmp_path / "absolute").symlink_to(real)
    (tmp_path / "real" / "relative").symlink_to("../absolute/.")
    (tmp_path / "file").symlink_to("real/relative/log")
    assert content_of(open_named(str(tmp_path / "file"))) == b"mine"
    with open_folder(str(tmp_path / "real" / "relative")) as folder:
        assert os.path.samestat(folder.about, real.stat())
        assert folder.names() == ["log"]
        assert folder.is_there()


def test_a_path_is_relative_to_the_current_folder_and_may_lead_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "log").write_text("mine")
    monkeypatch.chdir(tmp_path / "a" / "b")
    assert content_of(open_named("../log")) == b"mine"
    with open_folder("../new/one", make=True):
        pass
    assert (tmp_path / "a" / "new" / "one").is_dir()


def test_links_in_a_circle_are_an_error(tmp_path: Path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for path in (tmp_path / "a", tmp_path / "a" / "c"):
        with pytest.raises(OSError, match="levels of symbolic links"):
            open_named(str(path))


@needs_root
@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o755])
def test_a_link_of_another_user_is_not_followed(place: Path, mode: int):
    folder = open_to_all(place / "open", mode)
    (place / "target").mkdir()
    (place / "target" / "log").write_text("secret")
    (folder / "dir").symlink_to(place / "target")
    (folder / "log").symlink_to(place / "target" / "log")
    give(folder / "dir", folder / "log")
    for call in (
        lambda: open_folder(str(folder / "dir")),
        lambda: open_named(str(folder / "dir" / "log")),
        lambda: open_named(str(folder / "log")),
        lambda: open_log(str(folder / "log")),
        lambda: append_line(str(folder / "log"), b"line\n"),
    ):
        with pytest.raises(PathUntrusted, match=f"is a link that uid {UID} created"):
            call()
    with pytest.raises(UsageError, match=f"is a link that uid {UID} created"):
        replace_file(str(folder / "log"), b"overwritten", "the report")
    assert (place / "target" / "log").read_text() == "secret"


# Files


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_regular_files_are_opened_and_nothing_waits(
    tmp_path: Path, make: Callable[[Path], None]
):
    make(tmp_path / "name")
    with open_folder(str(tmp_path)) as folder:
        for flags in (os.O_RDONLY, os.O_WRONLY, os.O_RDWR):
            with pytest.raises((PathUntrusted, IsADirectoryError)):
                folder.open("name", flags)
        with pytest.raises((PathUntrusted, IsADirectoryError)):
            folder.append("name")


def test_a_file_with_a_second_name_is_read_and_not_written_to(tmp_path: Path):
    (tmp_path / "mine").write_text("text")
    os.link(tmp_path / "mine", tmp_path / "log")
    with open_folder(str(tmp_path)) as folder:
        assert folder.read("log", 9) == b"text"
        with pytest.raises(PathUntrusted, match="second name"):
            folder.append("log")


def test_a_file_of_this_user_is_appended_to_and_replaced(tmp_path: Path):
    with open_folder(str(tmp_path)) as folder:
        for _ in range(2):
            fd = folder.append("log")
            os.write(fd, b"line\n")
            os.close(fd)
        assert folder.read("log", 99) == b"line\nline\n"
        folder.write("log", b"other")
        assert folder.read("log", 99) == b"other"
    assert os.listdir(tmp_path) == ["log"]


@needs_root
def test_a_file_of_another_user_is_no_evidence(place: Path):
    folder = open_to_all(place / "open")
    as_second_user("open(sys.argv[1], 'w').write('forged')", folder / "log")
    (folder / "mine").write_text("sound")
    with open_folder(str(folder)) as held:
        for call in (lambda: held.read("log", 9), lambda: held.append("log")):
            with pytest.raises(PathUntrusted, match=f"log belongs to uid {UID}"):
                call()
        assert held.read("mine", 9) == b"sound"
        assert held.read("log", 9, users={UID}) == b"forged"
    # Named by a person, it is read.
    assert content_of(open_named(str(folder / "log"))) == b"forged"


def test_a_file_that_everybody_can_write_is_no_evidence(tmp_path: Path):
    (tmp_path / "log").write_text("text")
    (tmp_path / "log").chmod(0o666)
    with open_folder(str(tmp_path)) as folder, pytest.raises(PathUntrusted, match="every user"):
        folder.read("log", 9)


@needs_root
@pytest.mark.parametrize("below", ["log", "of-another/log"])
def test_what_is_found_where_everybody_can_write_must_be_of_a_trusted_user(place: Path, below: str):
    folder = open_to_all(place / "open")
    path = folder / below
    path.parent.mkdir(exist_ok=True)
    path.write_text("found")
    give(path.parent, path) if "/" in below else give(path)
    with pytest.raises(PathUntrusted, match=f"belongs to uid {UID}"):
        open_found(str(path), FoundIn(str(folder)))
    assert content_of(open_found(str(path), FoundIn(str(folder), frozenset({UID})))) == b"found"
    folder.chmod(0o755)
    assert content_of(open_found(str(path), FoundIn(str(folder)))) == b"found"


# Folders


@needs_root
def test_a_private_folder_is_this_users_and_nobody_else_can_write_it(place: Path):
    with new_private_folder("made-", (str(place),)) as folder:
        assert (folder.about.st_uid, folder.about.st_mode & 0o777) == (0, 0o700)
        open_private_folder(folder.path).close()
        os.chmod(folder.path, 0o777)
        with pytest.raises(PathUntrusted, match="others can write it"):
            open_private_folder(folder.path)
        os.chmod(folder.path, 0o700)
        give(folder.path)
        with pytest.raises(PathUntrusted, match=f"belongs to uid {UID}"):
            open_private_folder(folder.path)


def test_a_folder_that_is_there_is_not_taken_for_a_new_one(tmp_path: Path):
    make_private_folder(str(tmp_path / "new")).close()
    for name in ("new", "link"):
        (tmp_path / "link").symlink_to("new") if name == "link" else None
        with pytest.raises(FileExistsError):
            make_private_folder(str(tmp_path / name))


@needs_root
def test_a_folder_that_was_swapped_keeps_what_another_user_has(place: Path):
    open_to_all(place / "open", 0o777)
    held = make_private_folder(str(place / "open" / "held"))
    held.write("mine", b"")
    (place / "kept").mkdir()
    (place / "kept" / "theirs").write_text("kept")
    for swapped in ("os.symlink(sys.argv[3], sys.argv[1])", "os.mkdir(sys.argv[1])"):
        as_second_user(
            f"os.rename(sys.argv[1], sys.argv[2])\n{swapped}",
            *(place / "open" / "held", place / "open" / "moved", place / "kept"),
        )
        assert not held.is_there()
        assert held.names() == ["mine"], "what is done in it is done in the folder that is held"
        os.lchown(place / "open" / "held", 0, 0)
        shutil.rmtree(place / "open" / "held", ignore_errors=True)
        (place / "open" / "held").unlink(missing_ok=True)
        (place / "open" / "moved").rename(place / "open" / "held")
    as_second_user(
        "os.rename(sys.argv[1], sys.argv[2])\nos.symlink(sys.argv[3], sys.argv[1])",
        *(place / "open" / "held", place / "open" / "moved", place / "kept"),
    )
    held.remove()
    assert (place / "kept" / "theirs").read_text() == "kept"
    assert list((place / "open" / "moved").iterdir()) == []


def test_a_held_folder_is_removed_with_its_files(tmp_path: Path):
    held = make_private_folder(str(tmp_path / "held"))
    held.write("a", b"")
    held.remove()
    assert not (tmp_path / "held").exists()


def test_the_path_through_the_descriptor_survives_a_move(tmp_path: Path):
    held: HeldFolder = make_private_folder(str(tmp_path / "held"))
    held.write("a", b"text")
    (tmp_path / "held").rename(tmp_path / "moved")
    assert Path(held.held_path, "a").read_text() == "text"
    held.close()


# Reports


def test_a_report_goes_through_a_link_of_this_user_to_its_file(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real/report")
    replace_file(str(tmp_path / "link"), b"text", "the report")
    assert (tmp_path / "real" / "report").read_bytes() == b"text"
    assert (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("target", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"])
@pytest.mark.parametrize("to_file", [False, True])
def test_a_report_goes_to_the_standard_output(tmp_path: Path, target: str, to_file: bool):
    call = f"replace_file({target!r}, b'text', 'the report')"
    program = f"from ckptctl.storage.files import replace_file\n{call}"
    words = [sys.executable, "-c", program]
    if to_file:
        with open(tmp_path / "out", "wb") as out:
            subprocess.run(words, stdout=out, check=True)
        assert (tmp_path / "out").read_bytes() == b"text"
    else:
        assert subprocess.run(words, capture_output=True, check=True).stdout == b"text"


@needs_root
def test_a_report_does_not_wait_for_the_pipe_of_another_user(place: Path):
    os.mkfifo(place / "report")
    give(place / "report")
    with pytest.raises(UsageError, match=f"a pipe of uid {UID}"):
        replace_file(str(place / "report"), b"text", "the report")


def test_a_report_goes_to_a_pipe_of_this_user(tmp_path: Path):
    os.mkfifo(tmp_path / "report")
    reader = subprocess.Popen(["cat", tmp_path / "report"], stdout=subprocess.PIPE)
    replace_file(str(tmp_path / "report"), b"text", "the report")
    assert reader.communicate()[0] == b"text"
