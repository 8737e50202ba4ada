"""Start from a good checkpoint, break one thing, expect exactly that finding and exit code."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ckptctl
from ckptctl import Level, Report, Severity, Verdict

pytestmark = pytest.mark.torch

Copy = Callable[[Path], Path]
Break = Callable[[Path], None]


def faults(report: Report) -> list[str]:
    return sorted({finding.code for finding in report.with_severity(Severity.FAULT)})


def patch(path: Path, offset: int, *, flip: int = 0xFF) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= flip
    write(path, bytes(data))


def write(path: Path, data: bytes) -> None:
    """Replace the content, and keep the time of the last write: nothing is in flight."""
    before = path.stat() if path.exists() else None
    path.write_bytes(data)
    if before is not None:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(path, (1.7e9, 1.7e9))


def first_header(shard: bytes) -> int:
    return shard.index(b"PK\x03\x04")


# Each breaks a step of four ranks. Level `listing` sees them.

LISTING: dict[str, tuple[Break, list[str], int]] = {}
STRUCTURE: dict[str, tuple[Break, list[str], int]] = {}


def seen_by(table: dict, codes: str, exit_code: int) -> Callable[[Break], Break]:
    def register(breaks: Break) -> Break:
        table[breaks.__name__] = (breaks, codes.split(), exit_code)
        return breaks

    return register


@seen_by(LISTING, "metadata.missing", 20)
def metadata_deleted(step: Path) -> None:
    (step / ".metadata").unlink()


@seen_by(LISTING, "metadata.missing", 20)
def only_temporary_metadata(step: Path) -> None:
    (step / ".metadata").rename(step / ".metadata.tmp")


@seen_by(LISTING, "metadata.unreadable", 21)
def metadata_empty(step: Path) -> None:
    write(step / ".metadata", b"")


@seen_by(LISTING, "metadata.unreadable", 21)
def metadata_cut_in_half(step: Path) -> None:
    data = (step / ".metadata").read_bytes()
    write(step / ".metadata", data[: len(data) // 2])


@seen_by(LISTING, "metadata.unreadable", 21)
def metadata_without_its_last_byte(step: Path) -> None:
    write(step / ".metadata", (step / ".metadata").read_bytes()[:-1])


@seen_by(LISTING, "metadata.unreadable", 21)
def metadata_of_zeros(step: Path) -> None:
    write(step / ".metadata", bytes((step / ".metadata").stat().st_size))


@seen_by(LISTING, "metadata.ambiguous metadata.unreadable", 21)
def metadata_cut_beside_rank_local_metadata(step: Path) -> None:
    data = (step / ".metadata").read_bytes()
    write(step / "__0.metadata", data)
    write(step / ".metadata", data[: len(data) // 2])


@seen_by(LISTING, "metadata.ambiguous", 20)
def metadata_beside_rank_local_metadata(step: Path) -> None:
    write(step / "__0.metadata", (step / ".metadata").read_bytes())


@seen_by(LISTING, "metadata.ambiguous", 20)
def temporary_metadata_of_a_save_over_the_step(step: Path) -> None:
    other = step.parent / "step_400" / ".metadata"
    write(step / ".metadata.tmp", other.read_bytes())


@seen_by(LISTING, "metadata.unsafe", 25)
def metadata_that_calls_something(step: Path) -> None:
    class Call:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(step / "it ran"),)

    write(step / ".metadata", pickle.dumps(Call()))


@seen_by(LISTING, "shard.missing", 20)
def shard_deleted(step: Path) -> None:
    (step / "__1_0.distcp").unlink()


@seen_by(LISTING, "shard.truncated", 20)
def shard_of_no_bytes(step: Path) -> None:
    write(step / "__1_0.distcp", b"")


@seen_by(LISTING, "shard.truncated", 20)
def shard_without_its_last_byte(step: Path) -> None:
    write(step / "__1_0.distcp", (step / "__1_0.distcp").read_bytes()[:-1])


@seen_by(LISTING, "shard.truncated", 20)
def shard_cut_in_half(step: Path) -> None:
    data = (step / "__1_0.distcp").read_bytes()
    write(step / "__1_0.distcp", data[: len(data) // 2])


@seen_by(LISTING, "path.escape", 25)
def shard_replaced_by_a_pipe(step: Path) -> None:
    (step / "__1_0.distcp").unlink()
    os.mkfifo(step / "__1_0.distcp")


@seen_by(LISTING, "shard.missing", 20)
def shard_replaced_by_a_folder(step: Path) -> None:
    (step / "__1_0.distcp").unlink()
    (step / "__1_0.distcp").mkdir()


@seen_by(LISTING, "path.escape", 25)
def metadata_that_names_a_file_outside(step: Path) -> None:
    data = (step / ".metadata").read_bytes()
    write(step / ".metadata", data.replace(b"__1_0.distcp", b"../1_0.distcp"[:12]))


def rewritten(step: Path, change: Callable[[object], None]) -> None:
    """Change the metadata with torch's own classes, as a writer with a bug would."""
    path = step / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    write(path, pickle.dumps(metadata))


def sharded(metadata: object) -> str:
    """The name of a tensor of several chunks."""
    return next(
        fqn
        for fqn, entry in metadata.state_dict_metadata.items()
        if len(getattr(entry, "chunks", ())) > 2 and all(entry.chunks[1].sizes)
    )


@seen_by(LISTING, "coverage.gap", 20)
def metadata_that_drops_a_chunk(step: Path) -> None:
    def change(metadata):
        fqn = sharded(metadata)
        gone = metadata.state_dict_metadata[fqn].chunks.pop(1)
        for index in list(metadata.storage_data):
            if index.fqn == fqn and index.offset == gone.offsets:
                del metadata.storage_data[index]

    rewritten(step, change)


@seen_by(LISTING, "range.missing", 20)
def metadata_that_drops_a_byte_range(step: Path) -> None:
    def change(metadata):
        fqn = sharded(metadata)
        index = next(index for index in metadata.storage_data if index.fqn == fqn)
        del metadata.storage_data[index]

    rewritten(step, change)


@seen_by(LISTING, "range.stray", 21)
def metadata_that_drops_a_tensor_but_not_its_ranges(step: Path) -> None:
    rewritten(step, lambda metadata: metadata.state_dict_metadata.pop(sharded(metadata)))


@seen_by(LISTING, "range.overlap", 21)
def metadata_that_gives_two_chunks_the_same_bytes(step: Path) -> None:
    def change(metadata):
        fqn = sharded(metadata)
        first, second = [i for i in metadata.storage_data if i.fqn == fqn][:2]
        metadata.storage_data[second] = metadata.storage_data[first]

    rewritten(step, change)


@seen_by(LISTING, "range.outside", 21)
def metadata_with_a_negative_offset(step: Path) -> None:
    def change(metadata):
        index = next(iter(metadata.storage_data))
        metadata.storage_data[index].offset = -1

    rewritten(step, change)


@seen_by(STRUCTURE, "record.mismatch", 21)
def metadata_of_another_dtype(step: Path) -> None:
    def change(metadata):
        import torch

        metadata.state_dict_metadata[sharded(metadata)].properties.dtype = torch.float16

    rewritten(step, change)


@seen_by(STRUCTURE, "record.framing", 21)
def local_header_damaged(step: Path) -> None:
    path = step / "__1_0.distcp"
    patch(path, first_header(path.read_bytes()))


@seen_by(STRUCTURE, "record.framing", 21)
def end_of_an_archive_damaged(step: Path) -> None:
    path = step / "__1_0.distcp"
    patch(path, path.read_bytes().index(b"PK\x05\x06"))


@seen_by(STRUCTURE, "record.framing", 21)
def checksum_in_the_directory_damaged(step: Path) -> None:
    path = step / "__1_0.distcp"
    patch(path, path.read_bytes().index(b"PK\x01\x02") + 16)


@seen_by(STRUCTURE, "record.framing", 21)
def second_half_of_zeros(step: Path) -> None:
    path = step / "__1_0.distcp"
    data = path.read_bytes()
    write(path, data[: len(data) // 2] + bytes(len(data) - len(data) // 2))


@seen_by(STRUCTURE, "record.crc", 21)
def pickle_of_a_record_damaged(step: Path) -> None:
    path = step / "__1_0.distcp"
    patch(path, path.read_bytes().index(b"FloatStorage"))


@seen_by(STRUCTURE, "record.framing record.mismatch", 21)
def shards_of_two_ranks_swapped(step: Path) -> None:
    one, two = step / "__1_0.distcp", step / "__2_0.distcp"
    size = max(one.stat().st_size, two.stat().st_size)
    first, second = one.read_bytes(), two.read_bytes()
    # Padded to one size: the listing alone must not show it.
    write(one, second.ljust(size, b"\0"))
    write(two, first.ljust(size, b"\0"))


@pytest.mark.parametrize("name", LISTING)
def test_the_listing_shows_it(root, name):
    breaks, codes, exit_code = LISTING[name]
    breaks(root / "step_500")
    report = ckptctl.verify(f"{root}@500")
    assert faults(report) == codes
    assert report.exit_code == exit_code
    assert not (root / "step_500" / "it ran").exists()


@pytest.mark.parametrize("name", STRUCTURE)
def test_the_structure_shows_it_and_the_listing_does_not(root, name):
    breaks, codes, exit_code = STRUCTURE[name]
    breaks(root / "step_500")
    assert faults(ckptctl.verify(f"{root}@500", level=Level.LISTING)) == []
    report = ckptctl.verify(f"{root}@500", level=Level.STRUCTURE)
    assert set(faults(report)) <= set(codes)
    assert codes[0] in faults(report) or len(codes) > 1
    assert faults(report) != []
    assert report.exit_code == exit_code


@pytest.mark.parametrize("name", [*LISTING, *STRUCTURE])
def test_pick_falls_back_to_the_step_before_it(root, name):
    breaks, _, _ = (LISTING | STRUCTURE)[name]
    breaks(root / "step_500")
    chosen = ckptctl.pick(str(root))
    assert (chosen.step, chosen.answer.value) == (400, "fell-back")
    assert chosen.exit_code == 0


def test_the_run_itself_is_sound(root):
    for number in (100, 200, 300, 400, 500):
        report = ckptctl.verify(f"{root}@{number}", level=Level.STRUCTURE)
        assert (report.verdict, report.exit_code) == (Verdict.COMPLETE, 0)
        assert report.with_severity(Severity.WARNING) == ()


def test_a_shard_of_another_step_is_told_by_the_optimizers_counts(root):
    shutil.copy2(root / "step_400" / "__1_0.distcp", root / "step_500" / "__1_0.distcp")
    report = ckptctl.verify(f"{root}@500", level=Level.STRUCTURE)
    assert faults(report) == ["state.mixed"]
    assert report.exit_code == 21


def test_metadata_of_another_step_is_suspected_by_its_name(root):
    shutil.copy2(root / "step_400" / ".metadata", root / "step_500" / ".metadata")
    report = ckptctl.verify(f"{root}@500")
    assert "metadata.foreign" in [f.code for f in report.with_severity(Severity.WARNING)]


def test_an_extra_shard_is_a_remark_and_nothing_more(root):
    shutil.copy2(root / "step_500" / "__1_0.distcp", root / "step_500" / "__9_0.distcp")
    report = ckptctl.verify(f"{root}@500", level=Level.STRUCTURE)
    assert (report.verdict, report.exit_code) == (Verdict.COMPLETE, 0)
    assert [f.code for f in report.findings] == ["shard.orphan"]


def test_a_step_that_holds_nothing_is_nothing_to_resume_from(root):
    import torch.distributed.checkpoint as dcp

    dcp.save({}, checkpoint_id=str(root / "step_600"), no_dist=True)
    report = ckptctl.verify(f"{root}@600", level=Level.LISTING)
    assert faults(report) == ["metadata.empty"]
    assert (report.verdict, report.exit_code) == (Verdict.INCOMPLETE, 20)
    assert ckptctl.pick(str(root)).step == 500


def test_a_part_that_is_empty_beside_others_is_no_fault(root):
    import torch.distributed.checkpoint as dcp

    saved = (root / "step_500").rename(root / "model")
    (root / "step_500").mkdir()
    saved.rename(root / "step_500" / "model")
    dcp.save({}, checkpoint_id=str(root / "step_500" / "optimizer"), no_dist=True)
    at_s = (root / "step_500" / "model" / ".metadata").stat().st_mtime
    for path in (root / "step_500" / "optimizer").iterdir():
        os.utime(path, (at_s, at_s))
    assert faults(ckptctl.verify(f"{root}@500", level=Level.LISTING)) == []


def test_a_save_without_metadata_is_in_progress_while_it_is_young(root):
    step = root / "step_500"
    (step / ".metadata").unlink()
    os.utime(step / "__0_0.distcp", (time.time(), time.time()))
    report = ckptctl.verify(str(step))
    assert faults(report) == ["step.in-progress"]
    assert (report.verdict, report.exit_code) == (Verdict.IN_PROGRESS, 26)
    assert ckptctl.verify(str(step), grace_s=0).exit_code == 20


@pytest.mark.parametrize("ahead_s", [60, 3600, 11 * 3600])
def test_where_the_clock_of_the_storage_is_ahead_a_save_may_still_be_running(root, ahead_s):
    step = root / "step_500"
    (step / ".metadata").unlink()
    os.utime(step / "__0_0.distcp", (time.time() + ahead_s, time.time() + ahead_s))
    found = ckptctl.verify(str(step))
    assert (found.exit_code, found.verdict) == (26, Verdict.IN_PROGRESS)
    assert "s in the future" in found.findings[0].message
    assert ckptctl.verify(str(step), grace_s=0).exit_code == 20


def test_a_write_in_the_future_is_a_wrong_clock_and_not_a_save(root):
    step = root / "step_500"
    (step / ".metadata").unlink()
    os.utime(step / "__0_0.distcp", (time.time() + 86_400, time.time() + 86_400))
    assert ckptctl.verify(str(step)).exit_code == 20


def test_two_damaged_steps_make_the_storage_path_suspect(root):
    shard_deleted(root / "step_500")
    local_header_damaged(root / "step_400")
    chosen = ckptctl.pick(str(root))
    assert chosen.step == 300
    assert "root.suspect" in [finding.code for finding in chosen.findings]


def test_three_damaged_steps_end_the_search(root):
    for number in (500, 400, 300):
        shard_deleted(root / f"step_{number}")
    chosen = ckptctl.pick(str(root))
    assert (chosen.exit_code, chosen.chosen) == (11, None)
    assert ckptctl.pick(str(root), max_fallback=3).step == 200


def test_an_equal_temporary_metadata_is_what_a_store_without_rename_left(root):
    step = root / "step_500"
    write(step / ".metadata.tmp", (step / ".metadata").read_bytes())
    assert ckptctl.verify(str(step)).exit_code == 0


def test_a_save_over_an_older_step_that_was_killed_is_seen_by_its_times(root):
    step = root / "step_500"
    for number in (100, 200, 300, 400, 500):  # ten minutes of training between two saves
        for file in (root / f"step_{number}").iterdir():
            os.utime(file, (6 * number, 1_700_000_000 + 6 * number))
    assert ckptctl.verify(str(step)).findings == ()
    os.utime(step / "__1_0.distcp", (0, 1_700_000_000 + 6 * 500 + 3600))
    report = ckptctl.verify(str(step))
    (finding,) = report.with_severity(Severity.FAULT)
    assert (finding.code, finding.where) == ("step.two-saves", "__1_0.distcp")
    assert (report.verdict, report.exit_code) == (Verdict.INCOMPLETE, 20)
    assert "60 min after 4 other files" in finding.message
    for other in (100, 200, 300, 400):
        shutil.rmtree(root / f"step_{other}")
    report = ckptctl.verify(str(step))
    (finding,) = report.with_severity(Severity.WARNING)
    assert (finding.code, report.exit_code) == ("step.times", 0)
