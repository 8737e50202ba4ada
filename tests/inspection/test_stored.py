"""What a store keeps now against what it kept at the seal: each difference, and none."""

from __future__ import annotations

import pytest

from ckptctl.findings import ByStore, Finding
from ckptctl.formats.digests import Digests
from ckptctl.formats.own.seals import SealedFile, Stored
from ckptctl.inspection.content import check_stored
from ckptctl.model import Checksum, Kept

URL = "s3://runs/a/step_5"
CRC = Checksum("crc32", "b1fc4bbc", whole=True)
SEALED = Stored("crc32", "b1fc4bbc", True, "tag", "v1")


def compared(was: Stored | None, now: Kept) -> tuple[ByStore, list[Finding]]:
    file = SealedFile("a", 10, None, Digests("cd" * 16), was)
    by_store, findings = check_stored([file], {"a": now}, URL)
    return by_store, [*findings]


@pytest.mark.parametrize(
    ("was", "now"),
    [
        (SEALED, Kept("a", (CRC,), "tag", "v1")),
        # Copied to another bucket, in parts of another size.
        (SEALED, Kept("a", (CRC,), "tag-2", "v7")),
        (SEALED, Kept("a", (Checksum("sha1", "00", whole=False), CRC))),
    ],
)
def test_an_equal_checksum_of_the_whole_proves_the_file(was, now):
    assert compared(was, now) == (ByStore(1, 1, 10, 0), [])


def test_a_checksum_that_was_sealed_on_the_store_s_word_is_counted():
    was = Stored("crc32", "b1fc4bbc", False, "tag", "")
    assert compared(was, Kept("a", (CRC,))) == (ByStore(1, 1, 10, 1), [])


def test_another_checksum_of_the_whole_is_another_file():
    by_store, (finding,) = compared(SEALED, Kept("a", (Checksum("crc32", "00c0ffee", whole=True),)))
    assert (by_store, finding.code, finding.where) == (ByStore(1, 0, 0, 0), "seal.digest", "a")
    assert (finding.expected, finding.found) == ("crc32 b1fc4bbc", "crc32 00c0ffee")


@pytest.mark.parametrize(
    ("etag", "version", "why_none"),
    [
        ("other", "v1", "the store keeps no checksums"),
        ("tag", "v2", "the store keeps no checksums"),
    ],
)
def test_a_file_that_was_written_again_is_told_where_no_checksum_decides(etag, version, why_none):
    _, (finding,) = compared(SEALED, Kept("a", (), etag, version, why_none))
    assert (finding.code, finding.where) == ("store.rewritten", "a")
    assert finding.message.startswith("1 sealed file was written again after the step was sealed")


OF_PARTS = Checksum("crc32", "b1fc4bbc", whole=False)


@pytest.mark.parametrize(
    ("was", "now", "says"),
    [
        (
            SEALED,
            Kept("a", (), "tag", "v1", "the store keeps no checksums"),
            "no checksums; their ETags are unchanged",
        ),
        (
            SEALED,
            Kept("a", (), "", "", "the store keeps no checksums"),
            "the store keeps no checksums",
        ),
        (SEALED, Kept("a", (OF_PARTS,), "tag"), "the store has only checksums of its parts"),
        (SEALED, Kept("a", (Checksum("sha1", "00", whole=True),)), "and the store keeps sha1"),
        (None, Kept("a", (CRC,), "tag"), "the seal has no checksum of the store's"),
        (Stored(etag="tag"), Kept("a", (CRC,), "tag"), "of the store's; their ETags are unchanged"),
    ],
)
def test_what_cannot_be_compared_is_told_and_why(was, now, says):
    _, (finding,) = compared(was, now)
    assert (finding.code, finding.where) == ("store.unverifiable", "a")
    assert says in finding.message


def test_files_with_one_reason_are_one_finding_and_a_thousand_replaced_ones_a_few():
    files = [SealedFile(f"{n:04}", 1, None, Digests("cd" * 16), SEALED) for n in range(1000)]
    none = {file.path: Kept(file.path, why_none="the store keeps no checksums") for file in files}
    _, findings = check_stored(files, none, URL)
    assert [finding.code for finding in findings] == ["store.unverifiable"]
    other = (Checksum("crc32", "00c0ffee", whole=True),)
    by_store, findings = check_stored(files, {f.path: Kept(f.path, other) for f in files}, URL)
    assert {finding.code for finding in findings} == {"seal.digest"}
    assert (by_store.n_files, by_store.n_same, len(findings)) == (1000, 0, 21)
