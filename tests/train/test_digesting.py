"""The digests in a seal are those of what was written, whatever writes it."""

from __future__ import annotations

import os
import uuid
import zlib
from itertools import pairwise
from pathlib import Path

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from one_process import Job  # noqa: E402
from torch.distributed.checkpoint import filesystem  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import SaveFailed  # noqa: E402
from ckptctl.findings import Verdict  # noqa: E402
from ckptctl.formats import digests  # noqa: E402
from ckptctl.formats.digests import Algorithm  # noqa: E402
from ckptctl.formats.own.seals import SEAL, parse_seal  # noqa: E402
from ckptctl.model import Checksum, Kept  # noqa: E402
from ckptctl.storage.fsspec_client import FsspecClient  # noqa: E402
from ckptctl.storage.local import LocalStore  # noqa: E402
from ckptctl.train import saving  # noqa: E402
from ckptctl.train.writing import DigestedFiles  # noqa: E402

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


@given(data=st.binary(max_size=200), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_pieces_of_any_kind_come_to_the_digests_of_the_file(tmp_path_factory, data, cuts):
    path = tmp_path_factory.mktemp("files") / "__0_0.distcp"
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    kinds = (bytes, bytearray, memoryview)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "BLOCK_BYTES", 16)
        files = DigestedFiles(filesystem.FileSystem(), Algorithm.XXH3, "crc32")
        with files.create_stream(path, "wb") as stream:
            for number, (start, end) in enumerate(pairwise(edges)):
                stream.write(kinds[number % 3](data[start:end]))
                assert stream.tell() == end
        found = files.written[path.name]
    whole = path.read_bytes()
    blocks = [whole[at : at + 16] for at in range(0, len(whole), 16)]
    assert (found.size, found.digests.whole) == (len(whole), xxhash.xxh3_128(whole).hexdigest())
    expected = [xxhash.xxh3_128(block).hexdigest() for block in blocks] if len(whole) > 16 else []
    assert found.digests.blocks == tuple(expected)
    assert found.checksum == f"{zlib.crc32(whole):08x}"


@pytest.mark.parametrize(
    "act",
    [
        lambda stream: (stream.seek(0), stream.write(b"X")),
        lambda stream: stream.truncate(1),
        lambda stream: (stream.flush(), os.write(stream.fileno(), b"more")),
    ],
    ids=["gone back", "cut off", "written past it"],
)
def test_a_stream_that_was_not_written_in_order_is_not_vouched_for(tmp_path, act):
    files = DigestedFiles(filesystem.FileSystem(), Algorithm.XXH3)
    with files.create_stream(tmp_path / "__0_0.distcp", "wb") as stream:
        stream.write(b"0123456789")
        act(stream)
    assert files.written == {}


def test_no_shard_is_read_again_for_its_seal(job, read_back):
    step = Path(job.ckpt.save(2))
    assert read_back == [".metadata"]
    assert content(step).verdict is Verdict.COMPLETE
    sealed = parse_seal((step / SEAL).read_bytes())
    ckptctl.seal(str(step), replace=True)
    assert parse_seal((step / SEAL).read_bytes()).files == sealed.files
    assert {file.path for file in sealed.files} == {".metadata", "__0_0.distcp"}


def test_a_writer_that_goes_back_over_its_file_has_it_read_again(job, read_back, monkeypatch):
    write_item = filesystem._write_item

    def twice(transforms, stream, *args, **kwargs):
        at = stream.tell()
        write_item(transforms, stream, *args, **kwargs)
        stream.seek(at)
        return write_item(transforms, stream, *args, **kwargs)

    monkeypatch.setattr(filesystem, "_write_item", twice)
    step = Path(job.ckpt.save(2))
    assert sorted(read_back) == [".metadata", "__0_0.distcp"]
    assert content(step).verdict is Verdict.COMPLETE


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
