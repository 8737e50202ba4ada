"""A line that was added is there whole, whoever adds to the file besides."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from command_line import clean_environment

from ckptctl.errors import AccessDenied, PathNotFound, StorageUnavailable
from ckptctl.storage import files
from ckptctl.storage.files import append_line


def test_lines_come_one_after_the_other_in_a_file_that_is_made(tmp_path):
    path = tmp_path / "lines"
    for line in (b"one\n", b"two\n"):
        append_line(str(path), line)
    assert path.read_bytes() == b"one\ntwo\n"


def test_the_file_appears_with_its_first_line_and_is_never_empty(tmp_path, monkeypatch):
    path = tmp_path / "lines"
    real = os.write
    seen: list[bool] = []

    def write(fd: int, data: bytes) -> int:
        seen.append(path.exists())
        return real(fd, data)

    monkeypatch.setattr(files.os, "write", write)
    append_line(str(path), b"one\n")
    assert seen == [False]
    assert path.read_bytes() == b"one\n"
    assert os.listdir(tmp_path) == ["lines"]


def test_a_line_that_was_cut_short_is_closed_off(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"one\ntw")
    append_line(str(path), b"three\n")
    assert path.read_bytes() == b"one\ntw\nthree\n"


WRITER = """
import sys
from ckptctl.storage.files import append_line
path, name = sys.argv[1:]
for n in range(50):
    append_line(path, (f"{name}{n} " + name * 5000 + "\\n").encode())
"""


def test_processes_that_add_at_once_lose_nothing_and_mix_nothing(tmp_path):
    path = tmp_path / "lines"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, path, name], env=clean_environment())
        for name in "abc"
    ]
    assert [writer.wait() for writer in writers] == [0, 0, 0]
    expected = {f"{name}{n} {name * 5000}" for name in "abc" for n in range(50)}
    lines = path.read_text().splitlines()
    assert (len(lines), set(lines)) == (150, expected)


def test_a_folder_that_is_not_there_is_told_from_one_that_denies(tmp_path):
    with pytest.raises(PathNotFound, match="folder"):
        append_line(str(tmp_path / "missing" / "lines"), b"x\n")
    with pytest.raises(AccessDenied):
        append_line(str(tmp_path), b"x\n")


def test_a_disk_that_takes_half_a_line_is_an_error(tmp_path, monkeypatch):
    def half(fd: int, data: bytes) -> int:
        return write(fd, data[: len(data) // 2])

    write = os.write
    lines = tmp_path / "lines"
    lines.write_bytes(b"the first line\n")
    monkeypatch.setattr(files.os, "write", half)
    with pytest.raises(StorageUnavailable, match="No space left"):
        append_line(str(lines), b"a whole line\n")
