"""What the store's own checksums prove of a sealed step, and what they do not, on real servers."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from services.plugin import S3Server

import ckptctl
from ckptctl import Level, Report, Severity
from ckptctl.formats.own.seals import SEAL, Seal, parse_seal, seal_bytes
from ckptctl.inspection.open_step import list_step
from ckptctl.model import Checksum, Kept
from ckptctl.options import Requirements
from ckptctl.records.byte_pass import Limits
from ckptctl.selection.sealing import seal_found
from ckptctl.selection.verifying import OpenTarget
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store

pytestmark = [pytest.mark.torch, pytest.mark.server]

KEY = b"a key of thirty-two bytes or so."
SHARD = "__1_0.distcp"


@dataclass(frozen=True)
class Bucket:
    """A step in a bucket, and what lies there past ckptctl."""

    server: S3Server
    prefix: str

    @property
    def url(self) -> str:
        return f"s3://{self.server.bucket}/{self.prefix}/step_200"

    def get(self, name: str) -> bytes:
        key = f"{self.prefix}/step_200/{name}"
        data: bytes = self.server.client.get_object(Bucket=self.server.bucket, Key=key)[
            "Body"
        ].read()
        return data

    def put(self, name: str, data: bytes, **arguments: str) -> None:
        key = f"{self.prefix}/step_200/{name}"
        self.server.client.put_object(Bucket=self.server.bucket, Key=key, Body=data, **arguments)

    def put_without_checksum(self, name: str, data: bytes) -> None:
        """As writers do that send none, on a store that adds none."""
        with open_store(self.url, storage_options=self.plain) as store:
            store.put(name, data, replace=True)

    @property
    def plain(self) -> dict[str, object]:
        off = {"request_checksum_calculation": "when_required"}
        return {**self.server.options, "client": "s3fs", "config_kwargs": off}

    def seal(self, **asked: object) -> Seal:
        done = ckptctl.seal(self.url, storage_options=self.server.options, **asked)
        assert done.exit_code == 0, done.message
        seal = parse_seal(self.get(SEAL))
        assert done.n_stored == sum(bool(f.stored and f.stored.checksum) for f in seal.files)
        return seal

    def verify(self, **asked: object) -> Report:
        options = asked.pop("storage_options", self.server.options)
        return ckptctl.verify(self.url, remote_checksums=True, storage_options=options, **asked)


def uploaded(server: S3Server, step: Path) -> Bucket:
    bucket = Bucket(server, uuid.uuid4().hex)
    for path in step.iterdir():
        if path.is_file() and path.name != "expected.json":
            bucket.put(path.name, path.read_bytes())
    return bucket


@pytest.fixture
def step(s3_moto: S3Server, checkpoints: Path) -> Bucket:
    """A small step of two ranks on a server that keeps the checksums that writers send."""
    return uploaded(s3_moto, checkpoints / "async_2" / "step_200")


def faults(report: Report) -> list[tuple[str, str]]:
    return [(f.code, f.where) for f in report.with_severity(Severity.FAULT)]


def flipped(data: bytes) -> bytes:
    """The same but for one bit in the middle."""
    changed = bytearray(data)
    changed[len(data) // 2] ^= 1
    return bytes(changed)


def test_a_sealed_step_is_proven_by_the_store_and_none_of_its_shards_is_read(step, counting_proxy):
    seal = step.seal(key=KEY)
    kept = [file.stored for file in seal.files]
    assert {(one.algorithm, one.compared) for one in kept if one} == {("crc32", True)}
    proxy = counting_proxy(step.server.endpoint)
    through = {**step.server.options, "endpoint_url": proxy.url}
    report = step.verify(key=KEY, storage_options=through)
    assert (report.exit_code, report.level, faults(report)) == (0, Level.LISTING, [])
    found = report.by_store
    assert found is not None
    assert (found.n_files, found.n_same, found.n_reported) == (2, 2, 0)
    # The metadata and the seal are read, and no shard; the root is listed for a step before it.
    assert dict(proxy.counts) == {"LIST": 2, "GET": 2, "HEAD": 2}
    assert found.n_bytes + report.bytes_read == report.n_bytes


def test_an_object_that_was_replaced_has_another_checksum(step):
    step.seal()
    step.put(SHARD, step.get(SHARD))
    assert step.verify().exit_code == 0  # written again, with the same bytes
    step.put(SHARD, flipped(step.get(SHARD)))
    without = ckptctl.verify(step.url, storage_options=step.server.options)
    assert without.exit_code in (0, 20)  # its write time shows it, unless in the same second
    report = step.verify()
    assert (report.exit_code, faults(report)) == (21, [("seal.digest", SHARD)])
    assert report.by_store is not None
    assert report.by_store.n_same == 1
    both = step.verify(level=Level.CONTENT)
    assert [fault for fault in faults(both) if fault[0] == "seal.digest"] == [
        ("seal.digest", SHARD)
    ]


def test_an_object_that_was_replaced_without_a_checksum_is_rewritten_and_not_proven(step):
    step.seal()
    step.put_without_checksum(SHARD, flipped(step.get(SHARD)))
    report = step.verify()
    assert (report.exit_code, faults(report)) == (22, [("store.rewritten", SHARD)])
    assert report.findings[0].next_command == f"ckptctl verify {step.url} --level content"


def test_without_a_seal_there_is_nothing_to_compare_with(step):
    report = step.verify()
    assert (report.exit_code, faults(report)) == (22, [("store.unverifiable", SEAL)])
    assert report.findings[0].next_command == f"ckptctl seal {step.url}"


def test_a_seal_of_before_checksums_were_sealed_is_still_one_and_says_so(step):
    seal = step.seal()
    older = replace(seal, files=tuple(replace(file, stored=None) for file in seal.files))
    step.put(SEAL, seal_bytes(older, None))
    assert ckptctl.verify(step.url, storage_options=step.server.options).exit_code == 0
    report = step.verify()
    assert (report.exit_code, [code for code, _ in faults(report)]) == (22, ["store.unverifiable"])
    assert report.findings[0].next_command == f"ckptctl seal {step.url} --replace"
    step.seal(replace=True)
    assert step.verify().exit_code == 0


def test_a_sealed_checksum_cannot_be_changed_by_who_has_no_key(step):
    seal = step.seal(key=KEY)
    other = flipped(step.get(SHARD))
    step.put(SHARD, other)
    with open_store(step.url, storage_options=step.server.options) as store:
        (kept,) = store.kept([SHARD])
    forged = [
        replace(file, stored=replace(file.stored, checksum=kept.checksums[0].value))
        if file.stored and file.path == SHARD
        else file
        for file in seal.files
    ]
    step.put(SEAL, seal_bytes(replace(seal, files=tuple(forged)), b"a key of somebody else"))
    report = step.verify(key=KEY)
    assert report.exit_code == 22
    assert faults(report) == [("seal.bad-signature", SEAL), ("store.unverifiable", SEAL)]


def test_a_client_that_is_told_no_checksums_says_which_one_is(step):
    step.seal()
    through = {**step.server.options, "client": "obstore"}
    report = step.verify(storage_options=through)
    assert (report.exit_code, [code for code, _ in faults(report)]) == (22, ["store.unverifiable"])
    assert "--storage-option client=s3fs does" in report.findings[0].message
    assert "their ETags are unchanged" in report.findings[0].message


def test_a_store_that_keeps_no_checksums_still_knows_what_was_written_again(s3_ceph, checkpoints):
    step = uploaded(s3_ceph, checkpoints / "async_2" / "step_200")
    assert {file.stored.checksum for file in step.seal().files if file.stored} == {""}
    report = step.verify()
    assert (report.exit_code, [code for code, _ in faults(report)]) == (22, ["store.unverifiable"])
    assert "the store keeps no checksums; their ETags are unchanged" in report.findings[0].message
    step.put(SHARD, flipped(step.get(SHARD)))
    assert ("store.rewritten", SHARD) in faults(step.verify())


def test_a_file_system_keeps_none(checkpoints, copy_of):
    root = copy_of(checkpoints / "async_2")
    ckptctl.seal(f"{root}@200")
    sealed = json.loads((root / "step_200" / SEAL).read_text())
    assert {file["stored"] for file in sealed["files"]} == {None}
    report = ckptctl.verify(f"{root}@200", remote_checksums=True)
    assert (report.exit_code, [code for code, _ in faults(report)]) == (22, ["store.unverifiable"])
    assert "a file system keeps no checksums" in report.findings[0].message


class Saying:
    """A store that reports another checksum of one file than the server does."""

    def __init__(self, store: Store, path: str, checksum: Checksum) -> None:
        self._store, self._path, self._checksum = store, path, checksum

    def kept(self, paths: Iterable[str]) -> Iterator[Kept]:
        for kept in self._store.kept(paths):
            says = kept.path.endswith(self._path)
            yield replace(kept, checksums=(self._checksum,)) if says else kept

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


@pytest.mark.parametrize(
    ("checksum", "exit_code", "sealed"),
    [
        (Checksum("crc32", "00c0ffee", whole=True), 21, None),
        # ckptctl cannot compute it; the report states that it is the store's claim.
        (Checksum("xxhash64", "00c0ffee", whole=True), 0, ("xxhash64", "00c0ffee", False)),
        (Checksum("crc32", "00c0ffee", whole=False), 0, ("", "", False)),
    ],
    ids=str,
)
def test_a_checksum_is_sealed_where_the_bytes_come_to_it(step, checksum, exit_code, sealed):
    root = step.url.removesuffix("/step_200")
    with open_store(root, storage_options=step.server.options) as store:
        saying = Saying(store, SHARD, checksum)
        found = OpenTarget(saying, "step_200", list_step(store, "step_200"))
        done = seal_found(found, Requirements(), Limits())
    assert done.exit_code == exit_code
    if sealed is None:
        assert faults(done.report) == [("store.contradicts", SHARD)]
        assert done.path is None
        return
    (stored,) = [f.stored for f in parse_seal(step.get(SEAL)).files if f.path == SHARD]
    assert stored is not None
    assert (stored.algorithm, stored.checksum, stored.compared) == sealed
