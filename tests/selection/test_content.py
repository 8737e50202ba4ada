"""Level content on real steps: sound ones are proven whole, each damage is found, also on S3."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, validated
from huge_step import make_huge, wait_until_it_has_read
from next_commands import run_and_follow as run_ckptctl
from storage.faulty import FaultyStore

import ckptctl
from ckptctl import Level, Report, Severity, UsageError, Verdict
from ckptctl.formats.archive.directory import parse_directory
from ckptctl.formats.dcp.metadata import decode_metadata
from ckptctl.inspection.content import parse_subset
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.options import Requirements
from ckptctl.records.byte_pass import Stop
from ckptctl.storage.contract import OpenFile
from ckptctl.storage.local import LocalStore

pytestmark = pytest.mark.torch

Copy = Callable[[Path], Path]

UNVERIFIABLE = {
    "no_crc_2": ["record.unverifiable"],
    # `shard-00001-model-00001-of-00001` does not state how many ranks wrote a shard.
    "hf_2": ["format.unlisted", "record.unverifiable"],
    "hf_consolidated_2": ["format.unlisted", "record.unverifiable"],
    "hf_whole_2": ["record.unverifiable"],
    "safetensors_2": ["format.unsupported"],
}


def verify(step: Path | str, **asked: object) -> Report:
    return ckptctl.verify(str(step), level=Level.CONTENT, **asked)


def faults(report: Report) -> list[str]:
    return sorted({finding.code for finding in report.with_severity(Severity.FAULT)})


@pytest.fixture
def step(checkpoints: Path, copy_of: Copy) -> Path:
    """A private copy of a step of four FSDP2 ranks, beside its predecessors."""
    return copy_of(checkpoints / "run_fsdp4") / "step_500"


def record_of(step: Path, fqn: str, chunk: int = 0) -> tuple[Path, int, int]:
    """The file, begin and length of a record."""
    metadata = decode_metadata((step / ".metadata").read_bytes())
    if fqn in metadata.tensors:
        place = metadata.tensors[fqn].chunks[chunk].byte_range
    else:
        place = metadata.bytes_entries[fqn].byte_range
    assert place is not None
    return step / place.file, place.offset, place.length


def change(path: Path, at: int, new: bytes) -> None:
    """Change bytes, and keep the time of the last write: nothing is in flight."""
    before = path.stat()
    data = bytearray(path.read_bytes())
    assert data[at : at + len(new)] != new
    data[at : at + len(new)] = new
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def large_tensor(step: Path) -> str:
    metadata = decode_metadata((step / ".metadata").read_bytes())
    return max(metadata.tensors.values(), key=lambda t: t.chunks.lengths[0]).fqn


def elements_of(step: Path, fqn: str) -> tuple[Path, int, int]:
    path, begin, length = record_of(step, fqn)
    member = parse_directory(path.read_bytes()[begin : begin + length], length).find("data/0")
    assert member is not None
    return path, begin + member.start, member.size


# Sound steps


def steps_below(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("step_*") if path.is_dir())


def assert_whole(report: Report) -> None:
    assert (report.verdict, report.exit_code) == (Verdict.COMPLETE, 0), report.findings
    assert report.level is Level.CONTENT
    assert report.with_severity(Severity.WARNING) == ()
    assert report.bytes_proven == report.bytes_in_records > 0
    assert report.records_proven == report.n_records


def test_steps_of_older_versions_are_proven_whole(dcp_versions):
    steps = steps_below(dcp_versions)
    assert len(steps) > 60
    for one in steps:
        assert_whole(verify(one))


def test_every_way_to_save_today_is_proven_whole(checkpoints):
    steps = [one for one in steps_below(checkpoints) if one.parent.name not in UNVERIFIABLE]
    assert len(steps) > 25
    for one in steps:
        assert_whole(verify(one))


@pytest.mark.parametrize("name", UNVERIFIABLE)
def test_what_has_no_checksums_is_unverifiable_and_can_be_taken_all_the_same(checkpoints, name):
    (one, *_) = steps_below(checkpoints / name)
    report = verify(one)
    assert (report.verdict, report.exit_code) == (Verdict.UNVERIFIABLE, 22)
    assert faults(report) == UNVERIFIABLE[name]
    root = str(checkpoints / name)
    assert ckptctl.pick(root, level=Level.CONTENT).exit_code == 11
    taken = ckptctl.pick(root, level=Level.CONTENT, accept_unverifiable=True)
    assert taken.exit_code == 0


def test_checkpoints_of_six_frameworks_are_proven_whole(framework_roots):
    n_looked = 0
    for about in framework_roots.rglob("about.json"):
        roots = {path.parent.parent for path in about.parent.rglob(".metadata")}
        names = {part.parent.name for part in about.parent.rglob(".metadata")}
        for root in roots:
            for folder in sorted(root.iterdir()):
                if folder.is_dir() and folder.name in names:
                    report = verify(folder)
                    assert report.exit_code == 0, (folder, report.findings)
                    assert report.bytes_proven == report.bytes_in_records
                    n_looked += 1
    assert n_looked > 15


# Damage that torch loads without an error


def test_a_flipped_exponent_is_found_with_its_tensor(step):
    fqn = large_tensor(step)
    path, start, _ = elements_of(step, fqn)
    change(path, start + 7, bytes([path.read_bytes()[start + 7] ^ 0x40]))
    assert ckptctl.verify(str(step), level=Level.LISTING).exit_code == 0
    report = verify(step)
    assert (report.verdict, report.exit_code) == (Verdict.CORRUPT, 21)
    (finding,) = report.with_severity(Severity.FAULT)
    assert (finding.code, finding.where) == ("record.crc", path.name)
    assert fqn in finding.message
    assert report.records_proven == report.n_records - 1


@pytest.mark.parametrize("bit", range(8))
def test_a_flipped_bit_of_a_mantissa_is_found(step, bit):
    path, start, _ = elements_of(step, large_tensor(step))
    change(path, start + 4, bytes([path.read_bytes()[start + 4] ^ 1 << bit]))
    assert faults(verify(step)) == ["record.crc"]


def test_a_block_that_reads_as_zeros_is_found(step):
    path, start, size = elements_of(step, large_tensor(step))
    change(path, start + size // 4, bytes(min(4096, size // 2)))
    assert faults(verify(step)) == ["record.crc"]


def test_a_nan_written_over_an_element_is_found(step):
    path, start, _ = elements_of(step, large_tensor(step))
    change(path, start + 8, b"\0\0\xc0\x7f")
    assert faults(verify(step)) == ["record.crc"]


def test_a_changed_value_of_a_bytes_entry_is_found(step):
    metadata = decode_metadata((step / ".metadata").read_bytes())
    fqn = next(iter(metadata.bytes_entries))
    path, begin, length = record_of(step, fqn)
    member = parse_directory(path.read_bytes()[begin : begin + length], length).find("data.pkl")
    assert member is not None
    at = begin + member.end - 2
    change(path, at, bytes([path.read_bytes()[at] ^ 1]))
    report = verify(step)
    assert faults(report) == ["record.crc"]
    assert fqn in report.findings[0].message


@pytest.mark.parametrize("where", ["padding", "descriptor", "header time", "directory time"])
def test_a_flip_around_the_members_is_found_though_torch_ignores_it(step, where):
    path, begin, length = record_of(step, large_tensor(step))
    directory = parse_directory(path.read_bytes()[begin : begin + length], length)
    member = directory.find("data/0")
    assert member is not None
    at = {
        "padding": member.start - 3,
        "descriptor": member.end + 5,
        "header time": member.header + 11,
        "directory time": directory.at + 13,
    }[where]
    change(path, begin + at, bytes([path.read_bytes()[begin + at] ^ 0xFF]))
    assert faults(verify(step)) == ["record.framing"]


def test_damage_that_the_structure_shows_already_is_told_once(step):
    path, begin, _ = record_of(step, large_tensor(step))
    change(path, begin, b"QK")
    report = verify(step)
    assert [f.code for f in report.with_severity(Severity.FAULT)] == ["record.framing"]


def test_pick_at_content_passes_over_a_step_whose_bytes_are_wrong(step):
    path, start, _ = elements_of(step, large_tensor(step))
    change(path, start + 8, b"\0\0\xc0\x7f")
    root = str(step.parent)
    assert ckptctl.pick(root, level=Level.LISTING).step == 500
    chosen = ckptctl.pick(root, level=Level.CONTENT)
    assert (chosen.step, chosen.level) == (400, Level.CONTENT)


# A step that changes while it is read


class Disturbed(FaultyStore):
    """A store in which something happens when the first shard file is opened."""

    def __init__(self, root: Path, happens: Callable[[], object]) -> None:
        super().__init__(LocalStore(str(root)))
        self._happens: Callable[[], object] | None = happens

    def open_file(self, path: str) -> OpenFile:
        opened = super().open_file(path)
        happens, self._happens = self._happens, None
        if happens is not None:
            happens()
        return opened


@pytest.mark.parametrize("doing", ["write", "rename", "delete", "cut"])
def test_a_step_that_another_process_changes_meanwhile_is_changed_and_not_corrupt(step, doing):
    command = {
        "write": ["cp", str(step / "__0_0.distcp"), str(step / "__2_0.distcp")],
        "rename": ["mv", str(step), str(step.with_name("gone"))],
        "delete": ["rm", "-r", str(step)],
        "cut": ["truncate", "-s", "100", str(step / "__2_0.distcp")],
    }[doing]
    store = Disturbed(step.parent, lambda: subprocess.run(command, check=True))
    report = inspect_step(OpenStep(store, "step_500"), Requirements(), level=Level.CONTENT).report
    assert (report.verdict, report.exit_code) == (Verdict.CHANGED, 26)


# A part of the bytes


def test_seven_parts_compare_each_record_once(checkpoints):
    one = checkpoints / "run_fsdp4" / "step_500"
    reports = [verify(one, subset=f"{number}/7") for number in range(1, 8)]
    assert sum(report.records_proven for report in reports) == reports[0].n_records
    assert sum(report.bytes_proven for report in reports) == reports[0].bytes_in_records
    for report in reports:
        assert report.level is Level.STRUCTURE
        assert report.exit_code == 0
        assert "content.partial" in [finding.code for finding in report.findings]
        assert 0.05 < report.bytes_proven / report.bytes_in_records < 0.3


def test_ten_percent_are_spread_over_the_files_and_always_the_same():
    choose = parse_subset("10%")
    assert choose is not None
    lengths = [100 + n % 7 for n in range(1000)]
    chosen = list(choose(lengths))
    assert chosen == list(choose(lengths))
    n_bytes = sum(lengths[place] for place in chosen)
    assert n_bytes == pytest.approx(sum(lengths) / 10, rel=0.02)
    assert max(b - a for a, b in pairwise(chosen)) < 20


@pytest.mark.parametrize("words", ["0/7", "8/7", "0%", "101%", "ten", "1/0"])
def test_a_part_that_is_none_is_refused(words):
    with pytest.raises(UsageError, match="--subset"):
        parse_subset(words)


def test_parts_and_deadlines_are_for_level_content_only(checkpoints):
    one = str(checkpoints / "run_fsdp4" / "step_500")
    for asked in ({"subset": "1/7"}, {"deadline_s": 5.0}, {"jobs": 2}):
        with pytest.raises(UsageError, match="is for level content"):
            ckptctl.verify(one, level=Level.STRUCTURE, **asked)


def test_a_deadline_that_came_first_proves_nothing_and_is_no_success(checkpoints):
    report = verify(checkpoints / "run_fsdp4" / "step_500", deadline_s=0.0)
    assert (report.level, report.verdict) == (Level.STRUCTURE, Verdict.UNVERIFIABLE)
    assert report.exit_code == 22
    assert faults(report) == ["content.unfinished"]
    assert report.bytes_proven == 0
    assert report.bytes_in_records > 0


def test_damage_in_the_part_that_was_compared_is_a_fault(step):
    for file in step.glob("*.distcp"):
        data = bytearray(file.read_bytes())
        for at in range(700, len(data), 1500):
            data[at] ^= 0x10
        file.write_bytes(data)
    # Flipped bits may also make a pickle name what acts.
    assert verify(step, subset="2/7").verdict in (Verdict.CORRUPT, Verdict.UNSAFE)


def test_a_look_that_was_stopped_tells_what_it_has(checkpoints):
    stop = Stop()
    stop.ask()
    report = verify(checkpoints / "run_fsdp4" / "step_500", stop=stop)
    assert report.level is Level.STRUCTURE
    assert faults(report) == ["content.unfinished"]


def test_scan_compares_the_bytes_of_the_newest_steps_only(step):
    path, start, _ = elements_of(step, large_tensor(step))
    change(path, start + 8, b"\0\0\xc0\x7f")
    older = step.with_name("step_200")
    path, start, _ = elements_of(older, large_tensor(older))
    change(path, start + 8, b"\0\0\xc0\x7f")
    scanned = ckptctl.scan(str(step.parent), level=Level.CONTENT, last=2)
    assert [(r.number, r.verdict) for r in scanned.reports] == [
        (500, Verdict.CORRUPT),
        (400, Verdict.COMPLETE),
    ]
    assert {report.level for report in scanned.reports} == {Level.CONTENT}
    assert all(report.bytes_proven for report in scanned.reports)
    assert (scanned.n_steps, scanned.chosen) == (5, str(step.with_name("step_400")))
    done = run_ckptctl("scan", step.parent, "--level", "content", "--last", 2, "--json")
    document = validated(done.stdout)
    assert [report["number"] for report in document["reports"]] == [500, 400]
    assert document["reports"][1]["bytes_proven"] == scanned.reports[1].bytes_proven


# The command


def test_the_command_tells_how_much_is_proven(checkpoints):
    one = checkpoints / "run_fsdp4" / "step_500"
    done = run_ckptctl("verify", one, "--level", "content", "--jobs", 2)
    assert done.returncode == 0
    assert "bytes in records match their checksums (163 records)" in done.stdout
    document = validated(run_ckptctl("verify", one, "--level", "content", "--json").stdout)
    report = document["report"]
    assert report["level"] == "content"
    assert report["bytes_proven"] == report["bytes_in_records"] > 0
    partial = run_ckptctl("verify", one, "--level", "content", "--subset", "1/3", "--json")
    assert validated(partial.stdout)["report"]["level"] == "structure"


@pytest.mark.parametrize("given", ["soon", "5 parsecs", "-3s", "1.2.3"])
def test_a_deadline_that_is_no_time_is_refused(checkpoints, given):
    one = checkpoints / "run_fsdp4" / "step_500"
    done = run_ckptctl("verify", one, "--level", "content", f"--deadline={given}")
    assert done.returncode == 2
    assert "--deadline" in done.stderr


@pytest.mark.slow
def test_ctrl_c_keeps_what_is_proven_in_the_report(step, tmp_path):
    make_huge(step)
    report_file = tmp_path / "report.json"
    process = subprocess.Popen(
        [
            *COMMAND,
            "verify",
            str(step),
            "--level",
            "content",
            "--json",
            "--report",
            str(report_file),
        ],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until_it_has_read(process.pid, 1 << 30)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate()
    assert process.returncode == 130
    document = validated(said)
    assert document["exit_code"] == 130
    assert document["report"]["level"] == "structure"
    assert "content.unfinished" in [one["code"] for one in document["report"]["findings"]]
    assert validated(report_file.read_text())["exit_code"] == 130


# On an object store


@pytest.mark.server
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_the_bytes_of_objects_are_compared_like_those_of_files(s3_moto, step, client):
    def upload(folder: Path) -> str:
        prefix = uuid.uuid4().hex
        for path in sorted(folder.iterdir()):
            key = f"{prefix}/step_500/{path.name}"
            s3_moto.client.put_object(Bucket=s3_moto.bucket, Key=key, Body=path.read_bytes())
        return f"s3://{s3_moto.bucket}/{prefix}/step_500"

    options = {**s3_moto.options, "client": client}
    # What is uploaded now was written now: no save is in flight all the same.
    assert_whole(verify(upload(step), storage_options=options))
    path, start, _ = elements_of(step, large_tensor(step))
    change(path, start + 8, b"\0\0\xc0\x7f")
    report = verify(upload(step), storage_options=options)
    assert faults(report) == ["record.crc"]
