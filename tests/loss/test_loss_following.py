"""Watching a log that grows, and deciding as early as it safely can."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from math import sin

import pytest
from command_line import COMMAND, clean_environment, validated
from made_losses import DIED, SAVED, resumed, rows, times
from msgspec.structs import replace
from next_commands import run_and_follow as run_ckptctl

from ckptctl.errors import UsageError
from ckptctl.logs.rows import Marker, Number, Row
from ckptctl.loss.checking import check_loss, check_rows
from ckptctl.loss.following import FollowOptions, follow_loss, is_settled
from ckptctl.loss.resumes import NamedCheckpoint
from ckptctl.loss.verdict import LossVerdict


def line(each: Row) -> str:
    fields = {"step": each.step, "loss": each.loss.value, "lr": each.lr.value}
    return json.dumps({**fields, "tokens": int(each.tokens.value)}) + "\n"


def parts(items):
    """What the job that died logged, and what the resumed one does."""
    at = next(i for i, each in enumerate(items) if isinstance(each, Marker))
    return items[:at], items[at + 1 :]


def rows_until_settled(items) -> tuple[int, str]:
    """After how many rows of the resumed job the verdict is settled, and what it is."""
    before, after = parts(items)
    mark = items[len(before)]
    for n in range(1, len(after) + 1):
        report = check_rows([*before, mark, *after[:n]])
        if is_settled(report.worst):
            return n, report.verdict.value
    raise AssertionError("never settled")


def test_five_steps_that_agree_settle_it():
    assert rows_until_settled(resumed()) == (5, "continuous")


def test_where_only_three_steps_can_agree_three_settle_it():
    assert rows_until_settled(resumed(died=SAVED + 3)) == (3, "continuous")


def test_a_wrong_counter_settles_it_at_once():
    def warm(each):
        return replace(each, lr=Number(1e-6, 1e-12))

    assert rows_until_settled(resumed(warm)) == (1, "discontinuous")


def test_wrong_weights_take_five_rows():
    assert rows_until_settled(resumed(times(1.012))) == (5, "discontinuous")


def test_what_the_level_says_takes_all_the_rows_that_it_looks_at():
    assert rows_until_settled(resumed(died=SAVED, noise=0.004)) == (20, "no-jump")
    jump = resumed(times(1.2), died=SAVED, noise=0.004)
    assert rows_until_settled(jump) == (10, "discontinuous")


def test_a_verdict_that_is_settled_is_that_of_all_rows():
    for change in (times(1), times(1.012), times(0.99), times(1.2)):
        for died in (SAVED, SAVED + 4, DIED):
            items = resumed(change, died=died, noise=0.004)
            assert rows_until_settled(items)[1] == check_rows(items).verdict.value


def test_no_number_of_rows_settles_it_as_another_verdict_than_all_rows(tmp_path):
    old, new = tmp_path / "old.log", tmp_path / "new.log"

    def text(steps):
        return "".join(f'{{"step": {n}, "loss": {0.7 + 0.05 * sin(7 * n)}}}\n' for n in steps)

    old.write_text(text(range(1, 41)))
    settled = set()
    for last in range(22, 50):  # as many as a job may have logged at the first read
        new.write_text(text(range(21, last + 1)))
        worst = check_loss([str(old), str(new)], resume_step=20).worst
        settled |= {(last, worst.verdict.value)} if is_settled(worst) else set()
    assert settled == {(last, "continuous") for last in range(41, 50)}


def test_rows_that_were_written_twice_settle_it_once_a_new_step_follows(tmp_path):
    old, new = tmp_path / "old.log", tmp_path / "new.log"

    def text(steps):
        rows = [(n, 0.7 + 0.05 * sin(7 * n), 0.5 + 0.1 * sin(3 * n)) for n in steps]
        return "".join(f"step {n}, loss {loss}, step_time {took}\n" for n, loss, took in rows)

    old.write_text(text(range(1, 41)))
    settled = {}
    for last in range(22, 50):
        new.write_text(text(range(21, last + 1)))
        worst = check_loss([str(old), str(new)], resume_step=20).worst
        if worst is not None and is_settled(worst):
            settled[last] = [finding.code for finding in worst.findings]
    assert settled == {last: ["loss.copied"] for last in range(41, 50)}


def test_a_log_that_grows_is_followed_to_the_verdict(tmp_path):
    before, after = parts(resumed())
    log = tmp_path / "train.jsonl"
    log.write_text("".join(map(line, before)))

    def train():
        with log.open("a") as file:
            for each in after:
                text = line(each)
                # A row may be half written when it is read.
                for piece in (text[:7], text[7:]):
                    file.write(piece)
                    file.flush()
                time.sleep(0.005)

    job = threading.Thread(target=train)
    job.start()
    *_, last = follow_loss(
        [str(log)], NamedCheckpoint(SAVED), follow=FollowOptions(60, poll_s=0.01)
    )
    job.join()
    assert last.verdict.value == "continuous"
    assert 5 <= len(last.worst.replay.rows) <= DIED - SAVED


def test_a_log_that_is_rotated_while_it_is_followed_loses_nothing(tmp_path):
    before, after = parts(resumed())
    log = tmp_path / "train.jsonl"
    log.write_text("".join(map(line, before)))
    reports = follow_loss([str(log)], NamedCheckpoint(SAVED), follow=FollowOptions(60, poll_s=0.01))
    # What the job that died logged behind its checkpoint is no resume.
    assert next(reports).worst is None
    os.rename(log, tmp_path / "train.jsonl.1")
    log.write_text("".join(map(line, after)))
    *_, last = reports
    assert last.verdict.value == "continuous"


def test_two_short_logs_are_read_one_after_the_other(tmp_path):
    rows = {"a.log": range(1, 31), "b.log": range(21, 33)}
    for name, steps in rows.items():
        text = "".join(f"step: {n} loss: {2 + 1 / n:.5f} lr: 1e-4\n" for n in steps)
        (tmp_path / name).write_text(text)
    logs = [str(tmp_path / name) for name in rows]
    *_, last = follow_loss(logs, follow=FollowOptions(max_wait_s=1, poll_s=0.1))
    whole = check_loss(logs)
    assert (last.verdict, last.n_resumes) == (whole.verdict, 1)
    assert last.worst.resume.first_step == 21


def test_an_older_attempt_in_the_log_is_not_taken_for_the_one_that_is_awaited(tmp_path):
    log = tmp_path / "train.jsonl"
    log.write_text("".join(map(line, [*rows(1, 150), *rows(101, DIED)])))
    reports = follow_loss([str(log)], NamedCheckpoint(SAVED), follow=FollowOptions(60, poll_s=0.01))
    assert next(reports).verdict.value == "discontinuous"  # as far as the log goes, and not final
    with log.open("a") as file:
        file.writelines(map(line, rows(SAVED + 1, 260)))
    *_, last = reports
    assert last.verdict.value == "continuous"


def test_a_log_that_is_not_there_yet_is_waited_for_and_the_time_is_bounded(tmp_path):
    *_, last = follow_loss([str(tmp_path / "none.log")], follow=FollowOptions(0.1, poll_s=0.01))
    assert last.verdict.value == "inconclusive"
    assert last.findings[0].code == "loss.none"


def test_so_many_steps_after_the_resume_it_decides_whatever_is_known(tmp_path):
    log = tmp_path / "train.jsonl"
    before, after = parts(resumed(died=SAVED, noise=0.004))
    log.write_text("".join(map(line, before)))
    reports = follow_loss(
        [str(log)], NamedCheckpoint(SAVED), follow=FollowOptions(60, 7, poll_s=0.01)
    )
    assert next(reports).worst is None
    # The reader holds a row back until the next one begins.
    log.write_text("".join(map(line, [*before, *after[:8]])))
    *_, last = reports
    assert last.verdict.value == "no-jump"


def test_an_object_store_is_not_watched():
    with pytest.raises(UsageError, match="not object stores"):
        list(follow_loss(["s3://bucket/train.log"]))


def test_the_command_gives_a_document_a_line_and_the_exit_code(tmp_path):
    log = tmp_path / "train.jsonl"
    before, after = parts(resumed(times(1.012)))
    log.write_text("".join(map(line, before)))
    command = [*COMMAND, "loss", "--follow", str(log), "--resume-step", str(SAVED)]
    with subprocess.Popen(
        [*command, "--timeout", "60", "--json"],
        stdout=subprocess.PIPE,
        text=True,
        env=clean_environment(),
    ) as job:
        first = validated(job.stdout.readline())
        assert first["verdict"] == "inconclusive"
        with log.open("a") as file:
            file.writelines(map(line, after))
        *_, last = job.stdout.read().splitlines()
        assert validated(last)["verdict"] == "discontinuous"
        assert job.wait(60) == 30


def test_standard_input_can_be_followed(tmp_path):
    items = [each for each in resumed(times(1.012)) if isinstance(each, Row)]
    done = subprocess.run(
        [*COMMAND, "loss", "--follow", "-", "-q"],
        input="".join(map(line, items)),
        capture_output=True,
        text=True,
        env=clean_environment(),
    )
    assert (done.stdout, done.returncode) == ("discontinuous\n", 30)


def test_a_wait_names_what_it_waits_for_and_that_a_log_does_not_exist_yet(tmp_path):
    (tmp_path / "old.jsonl").write_text("".join(map(line, parts(resumed())[0])))
    done = run_ckptctl(
        *("loss", tmp_path / "old.jsonl", "new.jsonl", "--follow", "--timeout", "1"), cwd=tmp_path
    )
    first, last = done.stderr.splitlines()[0], done.stderr.splitlines()[-1]
    assert first.startswith("waiting for steps after the resume in new.jsonl, for up to 1 s; ")
    assert first.endswith("new.jsonl does not exist yet")
    assert last == "the wait has ended; new.jsonl does not exist yet"
    assert done.returncode == 31


# The canary.


def unchanged(each):
    return each


def canary(tmp_path, change=unchanged, first=SAVED - 5, last=SAVED + 3):
    before, _ = parts(resumed(died=SAVED + 3))
    run, own = tmp_path / "train.jsonl", tmp_path / "canary.jsonl"
    run.write_text("".join(map(line, before)))
    rows = [change(each) for each in before if first <= each.step <= last]
    own.write_text("".join(map(line, rows)))
    return run, own


def test_a_canary_that_agrees_with_the_log_of_the_run_proves_the_resume(tmp_path):
    done = run_ckptctl("loss", "--canary", *canary(tmp_path))
    assert done.returncode == 0
    assert done.stdout.startswith("continuous: 9 steps were logged twice")


def test_a_canary_that_drifts_is_a_suspicion(tmp_path):
    drift = times(1.004, since=SAVED - 4)
    assert run_ckptctl("loss", "--canary", *canary(tmp_path, drift)).returncode == 32


def test_a_canary_over_other_steps_says_nothing(tmp_path):
    done = run_ckptctl("loss", "--canary", *canary(tmp_path, first=SAVED + 2))
    assert done.returncode == 31
    assert "at least 3 steps must be in both" in done.stdout


def test_how_to_make_a_canary_is_explained():
    done = run_ckptctl("loss", "--canary")
    assert done.returncode == 0
    assert "ckptctl loss --canary train.log canary.log" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_a_canary_without_a_log_to_compare_with_is_refused(tmp_path):
    assert run_ckptctl("loss", "--canary", tmp_path / "a.log").returncode == 2


def test_few_equal_steps_that_exclude_too_little_are_waited_for():
    """Without a learning rate, an update may be as small as the last digit."""
    bare = [
        each
        if isinstance(each, Marker)
        else replace(
            each, lr=None, grad_norm=None, loss=Number(round(each.loss.value + 8, 3), 1e-3)
        )
        for each in resumed(died=SAVED + 40)
    ]
    cut = next(i for i, each in enumerate(bare) if isinstance(each, Marker)) + 1
    (early,) = check_rows([*bare[:cut], *bare[cut : cut + 5]]).assessments
    assert early.replay.is_proof
    assert early.verdict is LossVerdict.NO_JUMP
    assert not is_settled(early)
    (late,) = check_rows([*bare[:cut], *bare[cut : cut + 20]]).assessments
    assert is_settled(late)


def test_few_rows_from_before_the_resume_are_not_waited_for(tmp_path):
    """The log from before does not grow; its format is also that of the new log at once."""
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    old.write_text("".join(f"step {n} loss {2 + 1 / n:.3f}\n" for n in range(10, 90, 10)))
    text = "ckptctl: resumed from step 60: /ckpt/step_60\n"
    new.write_text(text + "".join(f"step {n} loss {2 + 1 / n:.3f}\n" for n in range(70, 130, 10)))
    reports = [*follow_loss([str(old), str(new)], NamedCheckpoint(60))]
    assert len(reports) == 1
    assert (reports[0].n_rows, reports[0].verdict) == (14, LossVerdict.INCONCLUSIVE)
