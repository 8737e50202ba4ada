"""Files that are numbered and created only if absent: the first writer of a number has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckptctl.errors import AlreadyExists
from ckptctl.storage.contract import NumberedFiles
from ckptctl.storage.local import LocalStore


@pytest.mark.parametrize("other", [b"x", b"of another", b"of another writer, and longer" * 9])
def test_a_number_that_another_writer_took_is_taken_however_long_the_file(
    tmp_path: Path, other: bytes
) -> None:
    files = NumberedFiles(LocalStore(str(tmp_path)), "numbered")
    files.add(1, other)
    with pytest.raises(AlreadyExists):
        files.add(1, b"of this one")
    assert files.store.read(files.path(1), limit=1000) == other


def test_a_write_that_is_repeated_finds_its_own_file(tmp_path: Path) -> None:
    files = NumberedFiles(LocalStore(str(tmp_path)), "numbered")
    for _ in range(2):
        files.add(1, b"of this one")
