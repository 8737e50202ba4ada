"""Each way in which a step can differ from its seal, and no finding for one that does not."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from ckptctl.formats.digests import BLOCK_BYTES, Algorithm
from ckptctl.formats.own.seals import Identity, Seal, SealedFile, parse_seal, seal_bytes
from ckptctl.inspection import seals as checks
from ckptctl.inspection.content import SealComparison
from ckptctl.inspection.seals import (
    InspectedStep,
    applies_to_step,
    check_seal,
    is_unwritten,
    written_ms,
)
from ckptctl.model import Step
from ckptctl.options import Requirements
from ckptctl.records.byte_pass import DigestRun, Limits, Piece, Stretch, read_runs
from ckptctl.storage.contract import ShortRead
from ckptctl.storage.local import LocalStore

KEY = b"k" * 32
METADATA = "ab" * 32


@pytest.fixture
def root(tmp_path: Path) -> Path:
    step = tmp_path / "step_5"
    step.mkdir()
    for name, size in ((".metadata", 40), ("__0_0.distcp", 3000), ("__1_0.distcp", 3000)):
        (step / name).write_bytes(random.Random(name).randbytes(size))
        os.utime(step / name, (1.7e9, 1.7e9))
    (step / "empty.distcp").touch()
    return tmp_path


def listed(root: Path, number: int | None = 5) -> Step:
    files = LocalStore(str(root / "step_5")).list_tree()
    return Step(str(root / "step_5"), "step_5", number, "dcp", (), tuple(files))


def sealed(root: Path, *, algorithm: Algorithm = Algorithm.XXH3, key: bytes | None = None) -> Seal:
    """The seal of the step as it lies there now."""
    step = listed(root)
    runs = [DigestRun(Stretch(file.path, 0, file.size), algorithm) for file in step.files]
    read_runs(LocalStore(str(root / "step_5")), runs, Limits())
    files = tuple(
        SealedFile(file.path, file.size, written_ms(file), run.digests)
        for file, run in zip(step.files, runs, strict=True)
    )
    about = Identity(5, "step_5", "dcp", "structure", {".metadata": METADATA})
    seal = Seal(algorithm, about, files, "2026-11-21T03:12:44Z", "ckptctl 0.1.0")
    return parse_seal(seal_bytes(seal, key))


def seen(
    root: Path, metadata: str | None = METADATA, number: int | None = 5, named: str | None = None
) -> InspectedStep:
    digests = {".metadata": metadata} if metadata else {}
    return InspectedStep(
        listed(root, number), digests, (named or "__0_0.distcp __1_0.distcp").split()
    )


def codes(findings) -> list[str]:
    return [finding.code for finding in findings]


def compared(root: Path, seal: Seal, jobs: int | None = None) -> SealComparison:
    """The comparison after every byte was read."""
    comparison = SealComparison("step_5", seal, listed(root).files)
    read_runs(LocalStore(str(root)), comparison.runs(), Limits(jobs))
    assert comparison.whole
    return comparison


def test_a_step_that_is_as_it_was_sealed_has_no_finding(root):
    seal = sealed(root)
    assert codes(check_seal(seal, seen(root))) == []
    found = compared(root, seal)
    assert [*found.findings()] == []
    assert found.proven == {".metadata", "__0_0.distcp", "__1_0.distcp", "empty.distcp"}


@pytest.mark.parametrize("jobs", [1, 2, 8])
@pytest.mark.parametrize("algorithm", Algorithm)
def test_one_flipped_bit_is_found_and_its_file_is_named(root, algorithm, jobs):
    key = KEY if algorithm is Algorithm.SHA256 else None
    seal = sealed(root, algorithm=algorithm, key=key)
    data = bytearray((root / "step_5" / "__1_0.distcp").read_bytes())
    data[1234] ^= 4
    (root / "step_5" / "__1_0.distcp").write_bytes(data)
    (finding,) = compared(root, seal, jobs).findings()
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
    (finding,) = compared(root, seal).findings()
    assert finding.message == (
        "__0_0.distcp: block 2 of 3 (bytes 67,108,864 to 134,217,728) is not what was sealed: "
        "damaged, or of another save"
    )
    assert finding.expected.endswith(seal.files[1].digests.blocks[1])
    with large.open("r+b") as file:
        file.seek(2 * BLOCK_BYTES + 999)
        file.write(b"\1")
    (finding,) = compared(root, seal).findings()
    assert "2 of 3 blocks, the first being block 2 of 3" in finding.message


def test_two_swapped_files_are_known_for_each_other(root):
    seal = sealed(root)
    one, two = root / "step_5" / "__0_0.distcp", root / "step_5" / "__1_0.distcp"
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    findings = list(compared(root, seal).findings())
    assert codes(findings) == ["seal.digest", "seal.digest"]
    assert "it holds what was sealed as __1_0.distcp" in findings[0].message


def test_a_sealed_file_that_is_gone_or_shorter_is_incomplete(root):
    seal = sealed(root)
    (root / "step_5" / "__1_0.distcp").unlink()
    os.truncate(root / "step_5" / "__0_0.distcp", 2999)
    findings = list(check_seal(seal, seen(root)))
    assert codes(findings) == ["seal.gone", "seal.gone"]
    assert findings[0].message == "__0_0.distcp was sealed with 3,000 bytes; now it is 2,999 bytes"
    assert [*compared(root, seal).findings()] == []  # each is told once


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
    assert applies_to_step(findings)


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
    assert codes(findings) == ["seal.outdated"]
    assert not applies_to_step(findings)


def test_one_shard_that_was_not_written_anew_is_enough_to_be_corrupt(root):
    seal = sealed(root)
    os.utime(root / "step_5" / "__0_0.distcp", (1.7e9 + 60, 1.7e9 + 60))
    findings = list(check_seal(seal, seen(root, metadata="cd" * 32)))
    assert codes(findings) == ["seal.digest"]
    assert "(__1_0.distcp) is unchanged since the seal" in findings[0].message


@pytest.mark.parametrize(
    ("path", "unwritten"), [("__0_0.distcp", False), (".metadata", True), (None, True)]
)
def test_a_file_with_another_write_time_may_have_been_written_since(root, path, unwritten):
    seal = sealed(root)
    if path is not None:
        os.utime(root / "step_5" / path, (1.7e9 + 60, 1.7e9 + 60))
    assert is_unwritten(seal, listed(root)) is unwritten


def test_without_write_times_nothing_proves_that_a_file_is_unwritten(root):
    seal, step = sealed(root), listed(root)
    untimed = replace(step, files=tuple(replace(file, mtime_s=None) for file in step.files))
    of_copy = replace(seal, files=tuple(replace(file, written_ms=None) for file in seal.files))
    assert not is_unwritten(seal, untimed)
    assert not is_unwritten(of_copy, untimed)


def test_a_seal_copied_from_another_step_proves_nothing_and_damns_nothing(root):
    findings = list(check_seal(sealed(root), seen(root, metadata="cd" * 32, number=6)))
    assert codes(findings) == ["seal.foreign"]
    assert not applies_to_step(findings)


def test_a_whole_step_under_another_number_is_corrupt(root):
    assert codes(check_seal(sealed(root), seen(root, number=6))) == ["step.foreign"]
    assert codes(check_seal(sealed(root), seen(root, number=None))) == []


def test_metadata_that_does_not_decode_is_left_to_the_finding_that_says_so(root):
    assert codes(check_seal(sealed(root), seen(root, metadata=None))) == []


def test_the_key_decides_who_may_have_made_the_seal(root):
    plain, signed = sealed(root), sealed(root, algorithm=Algorithm.SHA256, key=KEY)
    assert codes(check_seal(signed, seen(root), Requirements(key=KEY))) == []
    assert codes(check_seal(signed, seen(root))) == ["seal.no-key"]
    assert codes(check_seal(plain, seen(root), Requirements(key=KEY))) == ["seal.unkeyed"]
    assert codes(check_seal(signed, seen(root), Requirements(key=b"x" * 32))) == [
        "seal.bad-signature"
    ]


def test_a_forged_seal_is_not_asked_anything_further(root):
    signed = sealed(root, algorithm=Algorithm.SHA256, key=b"x" * 32)
    (root / "step_5" / "__1_0.distcp").unlink()
    findings = list(check_seal(signed, seen(root), Requirements(key=KEY)))
    assert codes(findings) == ["seal.bad-signature"]
    assert not applies_to_step(findings)


def test_many_files_that_differ_are_told_together(tmp_path):
    step = tmp_path / "step_5"
    step.mkdir()
    for number in range(50):
        (step / f"__{number:02}_0.distcp").write_bytes(b"%d" % number)
    seal = sealed(tmp_path)
    for file in step.iterdir():
        file.write_bytes(b"!!"[: file.stat().st_size])
    findings = list(compared(tmp_path, seal).findings())
    assert len(findings) == 21
    assert "30 more places" in findings[-1].message


class Failing(LocalStore):
    """A store whose n-th file cannot be opened."""

    def __init__(self, root: Path, n: int) -> None:
        super().__init__(str(root))
        self._left = n

    def open_file(self, path: str):
        self._left -= 1
        if self._left < 0:
            raise ShortRead("gone")
        return super().open_file(path)


@pytest.mark.parametrize("n", range(3))
def test_a_read_that_fails_is_an_error_and_proves_nothing(root, n):
    comparison = SealComparison("step_5", sealed(root), listed(root).files)
    with pytest.raises(ShortRead):
        read_runs(Failing(root, n), comparison.runs(), Limits(jobs=1))
    assert not comparison.whole
    assert [*comparison.findings()] == []


def test_a_pass_that_is_stopped_proves_what_it_read_and_damns_nothing(root):
    comparison = SealComparison("step_5", sealed(root), listed(root).files)
    read_runs(LocalStore(str(root)), comparison.runs(), Limits(until_s=0))
    assert (comparison.whole, comparison.proven) == (False, {"empty.distcp"})
    assert [*comparison.findings()] == []


class Reading:
    """A run that reads bytes for another reason, some of them twice."""

    def __init__(self, path: str, start: int, length: int) -> None:
        self.path, self.start, self.n_bytes = path, start, length
        self.taken = b""

    def pieces(self, limit: int):
        yield Piece(self.start + self.n_bytes - 10, 10, ahead=True)
        yield Piece(self.start, 100)
        yield Piece(self.start + 100, self.n_bytes - 100)

    def take(self, piece: Piece, data: memoryview) -> None:
        self.taken += bytes(data)


def test_bytes_that_are_read_for_another_reason_are_not_read_again(root):
    records = Reading("step_5/__0_0.distcp", 0, 3000)
    comparison = SealComparison("step_5", sealed(root), listed(root).files)
    n_read = read_runs(LocalStore(str(root)), comparison.runs([records]), Limits())
    data = (root / "step_5" / "__0_0.distcp").read_bytes()
    assert records.taken == data[-10:] + data
    assert (n_read, comparison.whole, [*comparison.findings()]) == (6040, True, [])


@pytest.mark.parametrize(("start", "length"), [(0, 2900), (100, 2900)])
def test_a_run_that_is_no_block_is_read_besides(root, start, length):
    records = Reading("step_5/__0_0.distcp", start, length)
    comparison = SealComparison("step_5", sealed(root), listed(root).files)
    n_read = read_runs(LocalStore(str(root)), comparison.runs([records]), Limits())
    assert (n_read, comparison.whole) == (6040 + length, True)
    assert "__0_0.distcp" in comparison.proven


def test_the_codes_that_prove_nothing_are_codes_of_seals():
    assert all(code.startswith("seal.") for code in checks.PROVES_NOTHING)
