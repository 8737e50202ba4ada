"""What promises never to fail reports a fault as unknown, and goes on."""

from __future__ import annotations

import json
import tempfile

import pytest

import ckptctl
from ckptctl.cli.monitoring import Sample, metrics_text
from ckptctl.errors import Unknown, guarded
from ckptctl.failures import matching
from ckptctl.failures.rules import RULES
from ckptctl.supervisor.attempts import Logs
from ckptctl.supervisor.processes import JobLog

XID = "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."
SOUND = f"Nov 26 12:00:00 node017 kernel: {XID}\n"
HOSTILE = {
    "day": f"Nov {'9' * 26} 12:00:00 node017 kernel: {XID}\n",
    "day with very many digits": f"Nov {'9' * 700} 12:00:00 node017 kernel: {XID}\n",
    "dmesg": f"[Fri Nov {'9' * 26} 12:00:00 2026] {XID}\n",
    "dmesg without a year": f"[Fri Nov 20 12:00:00 0000] {XID}\n",
    "zone": f"2026-11-26T12:00:00+99:99 node017 kernel: {XID}\n",
    "year 1": f"0001-01-01T00:00:00+23:59 node017 kernel: {XID}\n",
    "rank": f"[rank{'9' * 26}]: RuntimeError: CUDA error\n",
    "rank in JSON": json.dumps({"message": "CUDA error", "rank": 10**400}) + "\n",
    "time in JSON": f'{{"message": "CUDA error", "time": {"9" * 400}}}\n',
    "rank of a report": f"Root Cause (first observed failure):\n  rank: {'9' * 5000}\n",
    "rank that is no ASCII": "Root Cause (first observed failure):\n  rank: ²\n",
    "device": f"2026-Nov-20 03:12:44.1 900:901 [{'9' * 700}] CCOM WARN CUDA error\n",
    "journal": '{"MESSAGE": ["9999999999999999999999", "²"], "_HOSTNAME": "a"}\n',
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_number_out_of_bounds_hides_no_other_line(line, tmp_path):
    log = tmp_path / "a.log"
    log.write_text(line + SOUND)
    answer = ckptctl.classify(str(log))
    assert (answer.failure, answer.nodes, answer.unread) == ("infra-node", ("node017",), ())


def test_a_sound_line_without_a_year_has_its_time(tmp_path):
    (tmp_path / "a.log").write_text(SOUND)
    (evidence, *_) = ckptctl.classify(str(tmp_path / "a.log")).evidence
    assert evidence.at_s is not None


def test_a_leap_day_without_a_year_is_the_latest_one_or_unknown(tmp_path):
    (tmp_path / "a.log").write_text(SOUND.replace("Nov 26", "Feb 29"))
    assert ckptctl.classify(str(tmp_path / "a.log")).failure == "infra-node"


def test_a_fault_in_one_rule_leaves_the_others_and_is_named(tmp_path, monkeypatch):
    rule = next(rule for rule in RULES if rule.check)

    def fail(_message: str) -> bool:
        raise OverflowError("too large")

    monkeypatch.setitem(matching._CHECKS, rule.check, fail)
    oom = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a "
    oom += "total capacity of 79.1 GiB of which 1.5 GiB is free. this process has 10.0 GiB\n"
    (tmp_path / "a.log").write_text(oom + SOUND)
    answer = ckptctl.classify(str(tmp_path / "a.log"), exit_code=0)
    rules = {each.rule for each in (*answer.evidence, *answer.others, *answer.consequences)}
    assert "xid.79" in rules
    (message,) = answer.unread
    assert "a.log:1" in message
    assert "OverflowError: too large (test_unexpected.py:" in message


def test_exit_code_0_is_not_nothing_failed_where_the_logs_were_not_read(tmp_path):
    (tmp_path / "a.log").write_text("step 1 loss 2.5\n")
    log = str(tmp_path / "a.log")
    assert ckptctl.classify(log, exit_code=0).failure == "none"
    assert ckptctl.classify(log, exit_code=0, deadline_s=-1.0).failure == "unknown"


def test_an_attempt_whose_logs_cannot_be_read_has_an_unknown_cause(tmp_path, monkeypatch):
    log = tmp_path / "a.log"
    logs = Logs([JobLog(str(log))], tell=lambda _: None)
    log.write_text(SOUND)
    assert logs.cause(1).failure == "infra-node"
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    cause = logs.cause(1)
    assert (cause.failure, cause.confidence, cause.nodes) == ("unknown", "low", ())
    assert "FileNotFoundError" in cause.message


def test_a_figure_that_no_float_holds_has_no_sample():
    samples = [
        Sample("ckptctl_root_steps", {"root": "a"}, value)
        for value in (3.0, 10**400, float("nan"), float("inf"))
    ]
    text = metrics_text(samples)
    assert [line for line in text.splitlines() if "#" not in line] == [
        'ckptctl_root_steps{root="a"} 3'
    ]


def test_only_what_ends_the_process_passes():
    def fail(error: BaseException) -> None:
        raise error

    for error in (ValueError("a\nb"), MemoryError(), RecursionError(), KeyError("k")):
        result = guarded("a test", lambda error=error: fail(error))
        assert isinstance(result, Unknown)
        assert result.message.startswith(f"a test failed: {type(error).__name__}")
        assert "\n" not in result.message
    for error in (KeyboardInterrupt(), SystemExit(1)):
        with pytest.raises(type(error)):
            guarded("a test", lambda error=error: fail(error))
    with pytest.raises(ValueError, match="its own"):
        guarded("a test", lambda: fail(ValueError("its own")), raises=ValueError)
    assert guarded("a test", lambda: 3) == 3
