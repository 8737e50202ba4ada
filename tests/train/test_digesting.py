"""The digests in a seal are those of what the training held."""

from __future__ import annotations

import os
import uuid
import zlib
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from one_process import Job  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import SaveFailed  # noqa: E402
from ckptctl.findings import Verdict  # noqa: E402
from ckptctl.formats.own.seals import SEAL, parse_seal  # noqa: E402
from ckptctl.model import Checksum, Kept  # noqa: E402
from ckptctl.storage.fsspec_client import FsspecClient  # noqa: E402
from ckptctl.storage.local import LocalStore  # noqa: E402
from ckptctl.train import saving  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def job(tmp_path: Path):
    """A job that has trained two steps, and saved none."""
    made = Job(tmp_path / "run")
    made.resume()
    made.train(1, 2)
    yield made
    made.die()


@pytest.fixture
def read_back(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were read again for their digests."""
    seen: list[str] = []

    def digested(store, name, files, algorithm, limits):
        seen.extend(file.path for file in files)
        return original(store, name, files, algorithm, limits)

    original = saving.digested
    monkeypatch.setattr(saving, "digested", digested)
    return seen


def content(step: Path):
    return ckptctl.verify(str(step), level=ckptctl.Level.CONTENT, require_seal=True)


def test_nothing_is_read_again_for_its_seal(job, read_back):
    step = Path(job.ckpt.save(2))
    assert read_back == []
    assert content(step).verdict is Verdict.COMPLETE
    sealed = parse_seal((step / SEAL).read_bytes())
    ckptctl.seal(str(step), replace=True)
    assert parse_seal((step / SEAL).read_bytes()).files == sealed.files
    assert {file.path for file in sealed.files} == {".metadata", "__0_0.distcp"}


def meanwhile(monkeypatch: pytest.MonkeyPatch, act) -> None:
    """Let something happen between the last byte and the seal."""
    sync_folder = LocalStore.sync_folder

    def acted(store, path):
        if path:
            act(Path(store.path_of(path)) / "__0_0.distcp")
        sync_folder(store, path)

    monkeypatch.setattr(LocalStore, "sync_folder", acted)


def test_what_a_storage_changes_before_the_seal_is_not_sealed_as_good(job, monkeypatch):
    def flip(shard: Path) -> None:
        data = bytearray(shard.read_bytes())
        data[data.index(b"ZZZZ")] ^= 0xFF  # torch's padding, which no record's checksum covers
        shard.write_bytes(data)

    meanwhile(monkeypatch, flip)
    step = Path(job.ckpt.save(2))
    report = content(step)
    assert report.verdict is Verdict.CORRUPT
    assert "seal.digest" in {finding.code for finding in report.findings}


@pytest.mark.parametrize("change", [-1, 1])
def test_a_shard_of_another_size_than_was_written_fails_the_save(job, monkeypatch, change):
    meanwhile(monkeypatch, lambda shard: os.truncate(shard, shard.stat().st_size + change))
    with pytest.raises(SaveFailed, match=r"step 2 was not saved: __0_0\.distcp is .* were written"):
        job.ckpt.save(2)


@pytest.mark.parametrize("flips", [0, 1])
def test_the_checksum_that_a_store_keeps_is_sealed_where_it_is_that_of_what_was_written(
    monkeypatch, flips
):
    def kept(client, key):
        data, _ = client.get(key, 0, 1 << 30)
        crc = zlib.crc32(data) ^ flips
        return Kept(key, (Checksum("crc32", f"{crc:08x}", whole=True),))

    monkeypatch.setattr(FsspecClient, "kept", kept)
    job = Job(f"memory://{uuid.uuid4().hex}")
    job.resume()
    job.train(1, 2)
    if flips:
        with pytest.raises(SaveFailed, match="do not match the crc32 that the store reports"):
            job.ckpt.save(2)
    else:
        report = ckptctl.verify(job.ckpt.save(2), remote_checksums=True)
        assert (report.exit_code, report.by_store.n_same, report.by_store.n_reported) == (0, 1, 0)
    job.die()
