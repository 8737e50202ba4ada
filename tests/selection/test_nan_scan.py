"""NaN and infinity in real steps: counted for each tensor, a warning and never a verdict."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl import Level, Report, Severity, Verdict
from ckptctl.records import byte_pass

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

pytestmark = pytest.mark.torch

NAN, INF = float("nan"), float("inf")


def saved(folder: Path, state: dict[str, object]) -> Path:
    """A step of one rank, as torch saves it."""
    dcp.save(state, checkpoint_id=str(folder / "step_7"), no_dist=True)
    return folder / "step_7"


def scan(step: Path, **asked: object) -> Report:
    return ckptctl.verify(str(step), level=Level.CONTENT, nan_scan=True, **asked)


def said(report: Report) -> dict[str, str]:
    return {f.where: str(f.found) for f in report.findings if f.code == "values.not-finite"}


@pytest.fixture
def state() -> dict[str, object]:
    torch.manual_seed(1)
    weight = torch.randn(300, 40)
    weight[3, 4], weight[7], weight[299, 39] = NAN, INF, -INF
    small = torch.zeros(5, dtype=torch.bfloat16)
    small[2] = NAN
    return {
        "weight": weight,
        "small": small,
        "whole": torch.arange(1 << 12),
        "sound": torch.randn(2000).to(torch.float16),
        "mask": torch.tensor(-INF, dtype=torch.float64),
        "empty": torch.zeros(0),
        "rate": NAN,
    }


EXPECTED = {
    "weight": "1 NaN, 41 infinite",
    "small": "1 NaN, 0 infinite",
    "mask": "0 NaN, 1 infinite",
}


@pytest.mark.parametrize("pieces", ["whole", "in pieces", "cut into blocks"])
def test_each_tensor_is_told_with_its_counts_and_the_step_stays_complete(
    tmp_path, state, pieces, monkeypatch
):
    if pieces != "whole":
        monkeypatch.setattr(byte_pass, "PIECE_BYTES", 1301)
    if pieces == "cut into blocks":
        monkeypatch.setattr("ckptctl.records.verification.BLOCK_BYTES", 4098 + 1)
    report = scan(saved(tmp_path, state))
    assert (report.verdict, report.exit_code, report.level) == (Verdict.COMPLETE, 0, Level.CONTENT)
    assert said(report) == EXPECTED
    assert {f.code for f in report.with_severity(Severity.WARNING)} == {"values.not-finite"}
    assert report.values_scanned == 300 * 40 + 5 + 2000 + 1


def test_nothing_is_looked_at_unless_it_is_asked_for(tmp_path, state):
    report = ckptctl.verify(str(saved(tmp_path, state)), level=Level.CONTENT)
    assert report.with_severity(Severity.WARNING) == ()
    assert report.values_scanned == 0


def test_values_of_damaged_records_are_not_told(tmp_path, state):
    step = saved(tmp_path, state)
    file = step / "__0_0.distcp"
    data = file.read_bytes()
    at = data.index(state["weight"].numpy().tobytes())
    file.write_bytes(data[: at + 8] + b"\0\0\xc0\x7f" + data[at + 12 :])
    report = scan(step)
    assert report.verdict is Verdict.CORRUPT
    assert "weight" not in said(report)
    assert "small" in said(report)


def test_parts_of_a_step_tell_of_each_tensor_once(tmp_path, state):
    step = saved(tmp_path, state)
    reports = [scan(step, subset=f"{number}/3") for number in (1, 2, 3)]
    told = [pair for report in reports for pair in said(report).items()]
    assert sorted(told) == sorted(EXPECTED.items())
    assert sum(report.values_scanned for report in reports) == 300 * 40 + 5 + 2000 + 1


def test_the_chunks_of_a_tensor_are_counted_together(checkpoints):
    report = scan(checkpoints / "uneven_4" / "step_100")
    assert said(report) == {}
    assert report.values_scanned > 0


def test_compressed_records_are_looked_through(checkpoints):
    report = scan(checkpoints / "zstd_2" / "step_100")
    assert report.exit_code == 0
    assert report.values_scanned > 0


def test_the_command_says_it_and_asks_for_a_person(tmp_path, state):
    step = saved(tmp_path, state)
    done = run_ckptctl("verify", step, "--level", "content", "--nan-scan")
    assert done.returncode == 0
    assert "14,006 floating-point values scanned: see below" in done.stdout
    assert "1 is NaN and 41 are infinite" in done.stdout
    document = validated(
        run_ckptctl("verify", step, "--level", "content", "--nan-scan", "--json").stdout
    )
    assert document["report"]["values_scanned"] == 14_006


@pytest.mark.parametrize(
    "asked", [["--subset", "1/7"], ["--deadline", "90s"], ["--jobs", "2"], ["--nan-scan"]]
)
def test_what_only_reads_bytes_names_the_command_that_does(asked):
    done = run_ckptctl("verify", "a run/step_7", *asked)
    assert done.returncode == 2
    words = " ".join(asked)
    assert f"next:  ckptctl verify 'a run/step_7' --level content {words}\n" in done.stderr


def test_the_scan_reads_no_byte_more(tmp_path, state):
    step = saved(tmp_path, state)
    assert scan(step).bytes_read == ckptctl.verify(str(step), level=Level.CONTENT).bytes_read
