"""The guarantees of a storage that `doctor` confirms: folders, a real S3, wrong answers."""

from __future__ import annotations

import os
import time

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl.diagnostics import diagnosing
from ckptctl.storage.local import LocalStore


def names(root) -> list[str]:
    return [each.name for each in ckptctl.doctor("storage", str(root)).advice]


def test_nothing_is_wrong_with_a_folder_and_nothing_is_left_in_it(tmp_path):
    (tmp_path / "step_100").mkdir()
    assert names(tmp_path) == []
    left = {name for _, folders, files in os.walk(tmp_path) for name in (*folders, *files)}
    assert left <= {"step_100", ".ckptctl"}


def test_a_root_that_is_not_there_is_an_error(tmp_path):
    assert run_ckptctl("doctor", "storage", tmp_path / "none").returncode == 2


def test_the_document_is_as_its_schema_says(tmp_path):
    document = validated(run_ckptctl("doctor", "storage", tmp_path, "--json").stdout)
    assert document["facts"]["a reader sees the old file or the new one"] == "yes"


class Forgetful(LocalStore):
    """A listing that does not show what was just written."""

    def list_dir(self, path=""):
        return [info for info in super().list_dir(path) if "listed" not in info.path]


class Stale(LocalStore):
    """A cache of reads that never ends."""

    def __init__(self, root, *, url=None):
        super().__init__(root, url=url)
        self.kept = {}

    def read(self, path, *, limit):
        return self.kept.setdefault(path, super().read(path, limit=limit))


class Generous(LocalStore):
    """Reports to every writer that it is the first."""

    def put(self, path, data, *, replace=False):
        super().put(path, data, replace=True)


class Torn(LocalStore):
    """Removes a file before it writes it anew."""

    def put(self, path, data, *, replace=False):
        if replace:
            self.remove(path)
            time.sleep(0.01)  # a reader looks meanwhile
        super().put(path, data, replace=replace)


class Yesterday(LocalStore):
    """A clock that is a day behind."""

    def put(self, path, data, *, replace=False):
        super().put(path, data, replace=replace)
        if path.endswith("/clock"):
            os.utime(os.path.join(self.url, path), (1_000_000_000, 1_000_000_000))


@pytest.mark.parametrize(
    ("store", "name"),
    [
        (Forgetful, "storage.listing"),
        (Stale, "storage.stale"),
        (Generous, "storage.exclusive"),
        (Torn, "storage.atomic"),
        (Yesterday, "storage.clock"),
    ],
)
def test_what_a_storage_does_not_keep_is_named(store, name, tmp_path, monkeypatch):
    monkeypatch.setattr(
        diagnosing, "open_store", lambda url, *_: store(str(tmp_path), url=str(tmp_path))
    )
    assert name in names(tmp_path)
