"""Each way in which a step can differ from its seal, and nothing said of one that does not."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl.checks import sealed as checks
from ckptctl.checks.digest_reads import Stretch, read_digests
from ckptctl.checks.sealed import Seen, check_seal, compare_bytes, speaks_of_step, written_ms
from ckptctl.errors import StorageError
from ckptctl.formats.digests import BLOCK_BYTES, Algorithm
from ckptctl.formats.seals import Identity, Seal, SealedFile, parse_seal, seal_bytes
from ckptctl.model import Step
from ckptctl.storage.contract import ShortRead, Store
from ckptctl.storage.local import LocalStore

KEY = b"k" * 32
METADATA = "ab" * 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    step = tmp_path / "step_5"
    step.mkdir()
    for name, size in ((".metadata", 40), ("__0_0.distcp", 3000), ("__1_0.distcp", 3000)):
        (step / name).write_bytes(os.urandom(size))
        os.utime(step / name, (1.7e9, 1.7e9))
    (step / "empty.distcp").touch()
    return tmp_path


def listed(root: Path, number: int | None = 5) -> Step:
    files = LocalStore(str(root / "step_5")).list_tree()
    return Step(str(root / "step_5"), "step_5", number, "dcp", (), tuple(files))


def sealed(root: Path, *, algorithm: Algorithm = Algorithm.XXH3, key: bytes | None = None) -> Seal:
    """The seal of the step as it lies there now."""
    step = listed(root)
    stretches = [Stretch(file.path, 0, file.size) for file in step.files]
    store = LocalStore(str(root / "step_5"))
    digests = {s.path: d for s, d in read_digests(store, stretches, algorithm)}
    files = tuple(
        SealedFile(file.path, file.size, written_ms(file), digests[file.path])
        for file in step.files
    )
    about = Identity(5, "step_5", "dcp", "structure", ((".metadata", METADATA),))
    seal = Seal(algorithm, about, files, "2026-11-21T03:12:44Z", "ckptctl 0.1.0")
    return parse_seal(seal_bytes(seal, key))


def seen(
    root: Path, metadata: str | None = METADATA, number: int | None = 5, named: str | None = None
) -> Seen:
    digests = {".metadata": metadata} if metadata else {}
    return Seen(listed(root, number), digests, (named or "__0_0.distcp __1_0.distcp").split())


def codes(findings) -> list[str]:
    return [finding.code for finding in findings]


def compared(root: Path, seal: Seal, **options: object):
    store = LocalStore(str(root))
    return compare_bytes(store, "step_5", seal, listed(root).files, **options)


def test_a_step_that_is_as_it_was_sealed_has_no_finding(root):
    seal = sealed(root)
    assert codes(check_seal(seal, seen(root))) == []
    found = compared(root, seal)
    assert (found.findings, found.n_bytes) == ((), 6040)


@pytest.mark.parametrize("jobs", [1, 2, 8])
@pytest.mark.parametrize("algorithm", Algorithm)
def test_one_flipped_bit_is_found_and_its_file_is_named(root, algorithm, jobs):
    key = KEY if algorithm is Algorithm.SHA256 else None
    seal = sealed(root, algorithm=algorithm, key=key)
    data = bytearray((root / "step_5" / "__1_0.distcp").read_bytes())
    data[1234] ^= 4
    (root / "step_5" / "__1_0.distcp").write_bytes(data)
    (finding,) = compared(root, seal, jobs=jobs).findings
    assert (finding.code, finding.where) == ("seal.digest", "__1_0.distcp")
    assert finding.message == (
        "__1_0.distcp: its 3,000 bytes are not what was sealed: damaged, or of another save"
    )


def test_damage_in_a_large_file_is_placed_in_its_block(root):
    large = root / "step_5" / "__0_0.distcp"
    os.truncate(large, 2 * BLOCK_BYTES + 1000)
    seal = sealed(root)
    assert len(seal.files[1].digests.blocks) == 3
    with large.open("r+b") as file:
        file.seek(BLOCK_BYTES)
        file.write(b"\1")
    (finding,) = compared(root, seal).findings
    assert finding.message == (
        "__0_0.distcp: block 2 of 3 (bytes 67,108,864 to 134,217,728) is not what was sealed: "
        "damaged, or of another save"
    )
    assert finding.expected.endswith(seal.files[1].digests.blocks[1])
    with large.open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 999)
        file.write(b"\1")
    (finding,) = compared(root, seal).findings
    assert "2 of 3 blocks, the first being block 2 of 3" in finding.message


def test_two_swapped_files_are_known_for_each_other(root):
    seal = sealed(root)
    one, two = root / "step_5" / "__0_0.distcp", root / "step_5" / "__1_0.distcp"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    findings = compared(root, seal).findings
    assert codes(findings) == ["seal.digest", "seal.digest"]
    assert "it holds what was sealed as __1_0.distcp" in findings[0].message


def test_a_sealed_file_that_is_gone_or_shorter_is_incomplete(root):
    seal = sealed(root)
    (root / "step_5" / "__1_0.distcp").unlink()
    os.truncate(root / "step_5" / "__0_0.distcp", 2999)
    findings = list(check_seal(seal, seen(root)))
    assert codes(findings) == ["seal.gone", "seal.gone"]
    assert findings[0].message == "__0_0.distcp was sealed with 3,000 bytes; now it is 2,999 bytes"
    assert compared(root, seal).findings == ()  # each is told once


def test_a_file_that_grew_or_became_something_else_is_corrupt(root):
    seal = sealed(root)
    with (root / "step_5" / "__0_0.distcp").open("ab") as file:
        file.write(b"x")
    (root / "step_5" / "__1_0.distcp").unlink()
    (root / "step_5" / "__1_0.distcp").symlink_to("__0_0.distcp")
    assert codes(check_seal(seal, seen(root))) == ["seal.digest", "seal.digest"]


def test_files_that_came_later_are_a_remark_unless_the_step_needs_them(root):
    seal = sealed(root)
    (root / "step_5" / "notes.txt").write_text("x")
    (root / "step_5" / ".ckptctl").mkdir()
    (root / "step_5" / ".ckptctl" / "seal.json").write_text("ours")
    assert codes(check_seal(seal, seen(root))) == ["seal.extra"]
    needed = seen(root, named="__0_0.distcp notes.txt")
    assert codes(check_seal(seal, needed)) == ["seal.partial"]


def test_a_seal_that_lists_nothing_covers_nothing(root):
    nothing = replace(sealed(root), files=())
    findings = list(check_seal(nothing, seen(root)))
    assert codes(findings) == ["seal.partial", "seal.extra"]
    assert "3 files that the step needs" in findings[0].message
    assert speaks_of_step(findings)


def test_metadata_that_was_replaced_under_old_shards_is_corrupt(root):
    (finding,) = check_seal(sealed(root), seen(root, metadata="cd" * 32))
    assert (finding.code, finding.where) == ("seal.digest", ".metadata")
    assert "2 shard files that it names" in finding.message
    assert finding.expected == f"SHA-256 {METADATA}"


def test_a_seal_lapses_when_metadata_and_all_its_shards_were_written_anew(root):
    seal = sealed(root)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        os.utime(root / "step_5" / name, (1.7e9 + 60, 1.7e9 + 60))
    findings = list(check_seal(seal, seen(root, metadata="cd" * 32)))
    assert codes(findings) == ["seal.lapsed"]
    assert not speaks_of_step(findings)


def test_one_shard_that_was_not_written_anew_is_enough_to_be_corrupt(root):
    seal = sealed(root)
    os.utime(root / "step_5" / "__0_0.distcp", (1.7e9 + 60, 1.7e9 + 60))
    findings = list(check_seal(seal, seen(root, metadata="cd" * 32)))
    assert codes(findings) == ["seal.digest"]
    assert "(__1_0.distcp) is as old as the seal says" in findings[0].message


def test_a_seal_copied_from_another_step_proves_nothing_and_damns_nothing(root):
    findings = list(check_seal(sealed(root), seen(root, metadata="cd" * 32, number=6)))
    assert codes(findings) == ["seal.foreign"]
    assert not speaks_of_step(findings)


def test_a_whole_step_under_another_number_is_corrupt(root):
    assert codes(check_seal(sealed(root), seen(root, number=6))) == ["step.foreign"]
    assert codes(check_seal(sealed(root), seen(root, number=None))) == []


def test_metadata_that_does_not_decode_is_left_to_the_finding_that_says_so(root):
    assert codes(check_seal(sealed(root), seen(root, metadata=None))) == []


def test_the_key_decides_who_may_have_made_the_seal(root):
    plain, signed = sealed(root), sealed(root, algorithm=Algorithm.SHA256, key=KEY)
    assert codes(check_seal(signed, seen(root), key=KEY)) == []
    assert codes(check_seal(signed, seen(root))) == ["seal.no-key"]
    assert codes(check_seal(plain, seen(root), key=KEY)) == ["seal.weak"]
    assert codes(check_seal(signed, seen(root), key=b"x" * 32)) == ["seal.forged"]


def test_a_forged_seal_is_not_asked_anything_further(root):
    signed = sealed(root, algorithm=Algorithm.SHA256, key=b"x" * 32)
    (root / "step_5" / "__1_0.distcp").unlink()
    findings = list(check_seal(signed, seen(root), key=KEY))
    assert codes(findings) == ["seal.forged"]
    assert not speaks_of_step(findings)


def test_many_files_that_differ_are_told_together(tmp_path):
    step = tmp_path / "step_5"
    step.mkdir()
    for number in range(50):
        (step / f"__{number:02}_0.distcp").write_bytes(b"%d" % number)
    seal = sealed(tmp_path)
    for file in step.iterdir():
        file.write_bytes(b"!!"[: file.stat().st_size])
    findings = compared(tmp_path, seal).findings
    assert len(findings) == 21
    assert "30 more places" in findings[-1].message


class Breaking:
    """A store whose reads break at the n-th span."""

    def __init__(self, store: Store, n: int, error: StorageError) -> None:
        self._store, self._n, self._error = store, n, error
        self.kind = store.kind

    def read_spans(self, spans):
        for number, result in enumerate(self._store.read_spans(spans)):
            if number == self._n:
                raise self._error
            yield result


@pytest.mark.parametrize("n", range(4))
def test_a_read_that_fails_is_an_error_and_never_a_finding(root, n):
    broken = Breaking(LocalStore(str(root)), n, ShortRead("gone"))
    with pytest.raises(ShortRead):
        compare_bytes(broken, "step_5", sealed(root), listed(root).files, jobs=1)


def test_every_file_is_read_however_many_threads_there_are(root):
    for number in range(40):
        (root / "step_5" / f"__{number}_1.distcp").write_bytes(os.urandom(number * 1000))
    told: list[int] = []
    found = compared(root, sealed(root), jobs=7, on_bytes=told.append)
    assert found.findings == ()
    assert sum(told) == found.n_bytes == sum(file.size for file in listed(root).files)


def test_what_is_taken_no_further_stops_the_threads(root):
    store = LocalStore(str(root / "step_5"))
    stretches = [Stretch(file.path, 0, file.size) for file in listed(root).files]
    results = read_digests(store, stretches, Algorithm.XXH3, jobs=1)
    next(results)
    results.close()  # type: ignore[attr-defined]
    for thread in threading.enumerate():
        if thread.name == "ckptctl-digest":
            thread.join(10)
            assert not thread.is_alive()


def test_the_codes_that_prove_nothing_are_codes_of_seals():
    assert all(code.startswith("seal.") for code in checks.PROVES_NOTHING)
