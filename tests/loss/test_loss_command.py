"""`ckptctl loss` as a user meets it: real processes, real files, real exit codes."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from command_line import validated
from made_losses import DIED, SAVED, TOKENS, loss_at, resumed, rows, times
from next_commands import next_command
from next_commands import run_and_follow as run_ckptctl

from ckptctl.errors import UsageError
from ckptctl.logs.rows import Row
from ckptctl.loss.checking import SuspectSteps, check_loss


def written(path: Path, items) -> Path:
    """The rows as JSON lines; markers are left out."""
    lines = []
    for each in items:
        if isinstance(each, Row):
            fields = {"step": each.step, "loss": each.loss.value, "lr": each.lr.value}
            fields |= {"tokens": int(each.tokens.value), "timestamp": each.at}
            lines.append(json.dumps(fields))
    path.write_text("".join(f"{each}\n" for each in lines))
    return path


def drift(each):
    return times(1 + 3e-3 * math.sin(each.step), since=SAVED + 2)(each)


@pytest.fixture
def log(tmp_path):
    return lambda *args, **how: written(tmp_path / "train.jsonl", resumed(*args, **how))


@pytest.mark.parametrize(
    ("change", "verdict", "exit_code"),
    [
        (times(1), "continuous", 0),
        (times(1.012), "discontinuous", 30),
        (drift, "suspect", 32),
    ],
    ids=["continuous", "discontinuous", "suspect"],
)
def test_the_verdict_comes_first_and_is_the_exit_code(log, change, verdict, exit_code):
    done = run_ckptctl("loss", log(change))
    assert done.returncode == exit_code
    assert done.stdout.startswith(f"{verdict}: ")
    assert done.stderr == ""


def test_the_pattern_of_step_names_is_none_of_log_lines(log, tmp_path):
    path, pattern = log(times(1)), r"ckpt-(?P<step>[0-9]+)"
    done = run_ckptctl("loss", path, "--quiet", env={"CKPTCTL_PATTERN": pattern})
    assert (done.returncode, done.stdout) == (0, "continuous\n")
    settings = tmp_path / "ckptctl.toml"
    settings.write_text(f"pattern = '{pattern}'\n\n[loss]\nlog_pattern = '(?P<step>x)'\n")
    done = run_ckptctl("loss", path, "--quiet", "--config", settings)
    assert "settings from" in done.stderr
    assert ": log_pattern\n" in done.stderr


def test_a_resume_without_a_finite_loss_is_drawn_and_reported(tmp_path):
    old, new = tmp_path / "old.log", tmp_path / "new.log"
    old.write_text("".join(f"step {n} loss {2.5 if n < 13 else 'nan'}\n" for n in range(1, 61)))
    new.write_text("".join(f"step {n} loss nan\n" for n in range(61, 75)))
    done = run_ckptctl("loss", old, new, "--resume-step", 60)
    assert done.returncode == 30, done.stdout + done.stderr
    assert "the last finite one is that of step 12" in done.stdout
    assert "resume" in done.stdout


def test_strict_wants_steps_that_were_logged_twice(log):
    path = log(died=SAVED, noise=0.004)
    plain = run_ckptctl("loss", path, "--resume-step", SAVED)
    strict = run_ckptctl("loss", path, "--resume-step", SAVED, "--strict")
    assert (plain.returncode, strict.returncode) == (0, 31)
    assert plain.stdout.startswith("no-jump: ")


def test_the_document_is_as_its_schema_says(log):
    done = run_ckptctl("loss", log(times(1.012)), "--json")
    document = validated(done.stdout)
    assert document["verdict"] == "discontinuous"
    assert len(document["assessments"][0]["replay"]["rows"]) == DIED - SAVED
    assert document["next_command"] == "ckptctl explain loss.higher"


def test_the_document_of_a_log_without_a_loss_is_as_its_schema_says(tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("")
    done = run_ckptctl("loss", empty, "--json")
    assert done.returncode == 31
    assert validated(done.stdout)["findings"][0]["code"] == "loss.none"


def test_the_resume_report_gives_the_resume_point_and_the_next_commands(tmp_path, log):
    attempts = tmp_path / "run" / ".ckptctl" / "attempts"
    attempts.mkdir(parents=True)
    step = str(tmp_path / "run" / "step_200")
    report = {
        "schema": "ckptctl.resume/1",
        "at": "2026-11-21T00:00:00.000000Z",
        "step": SAVED,
        "tokens": None,
        "root": str(tmp_path / "run"),
        "path": step,
    }
    (attempts / "20261121T000000.000000Z-00000000.resume.json").write_text(json.dumps(report))
    path = log(times(1.012))
    done = run_ckptctl("loss", path, "--resume-report", tmp_path / "run", "--json")
    document = validated(done.stdout)
    assert document["assessments"][0]["resume"]["resume_point"] == {
        "step": SAVED,
        "source": "report",
        "tokens": None,
        "samples": None,
        "at_s": 1795219200.0,
        "world_size": None,
        "saved_world_size": None,
    }
    reject, pick = document["next_commands"]
    assert reject.startswith(f"ckptctl reject {step} --reason ")
    assert pick == f"ckptctl pick {tmp_path / 'run'}"


def test_a_root_without_a_report_is_no_error_where_the_step_is_given(tmp_path, log):
    given = ("--resume-step", SAVED, "--resume-report")
    assert f"resumed after step {SAVED}" in run_ckptctl("loss", log(), *given, tmp_path).stdout
    wrong = run_ckptctl("loss", log(), *given, tmp_path / "no-such-root")
    assert (wrong.returncode, "no resume report" in wrong.stderr) == (2, True)
    assert run_ckptctl("loss", log(), *given, tmp_path / "no.resume.json").returncode == 2


@pytest.mark.parametrize("what", ["tokens", "samples"])
def test_the_counts_of_the_checkpoint_are_held_against_the_log_of_after(tmp_path, what):
    """The log of before lacks them, so that nothing else tells where the count goes on."""
    before = [{"step": step, "loss": loss_at(step)} for step in range(1, SAVED + 1)]
    after = [
        {"step": step, "loss": loss_at(step), what: 1_000_000 + 64 * (step - SAVED)}
        for step in range(SAVED + 1, SAVED + 41)
    ]
    logs = []
    for name, lines in (("before", before), ("after", after)):
        logs.append(tmp_path / f"{name}.jsonl")
        logs[-1].write_text("".join(json.dumps(line) + "\n" for line in lines))
    right, wrong = (
        check_loss([*map(str, logs)], resume_step=SAVED, **{f"resume_{what}": count})
        for count in (1_000_000, 900_000)
    )
    codes = [[one.code for one in report.assessments[0].findings] for report in (right, wrong)]
    assert ("loss.tokens" in codes[0], "loss.tokens" in codes[1]) == (False, True)
    assert wrong.exit_code == 30
    (finding,) = [one for one in wrong.assessments[0].findings if one.code == "loss.tokens"]
    assert finding.expected == f"900,064 {what}"
    assert finding.found == f"1,000,064 {what}"


def test_the_step_that_was_resumed_from_gives_its_number_and_its_counts(tmp_path, checkpoints):
    step = checkpoints / "run_fsdp4" / "step_100"
    old = written(tmp_path / "old.jsonl", rows(1, 140))
    new = written(tmp_path / "new.jsonl", rows(101, 160))
    done = run_ckptctl("loss", old, new, "--resume-from", step, "--json")
    point = validated(done.stdout)["assessments"][0]["resume"]["resume_point"]
    held = int(run_ckptctl("show", step, "--print", "tokens").stdout)
    assert (point["step"], point["tokens"], point["saved_world_size"]) == (100, held, 4)
    other = run_ckptctl("loss", old, new, "--resume-from", step, "--resume-step", 20)
    assert other.returncode == 30
    assert run_ckptctl("loss", old, new, "--resume-from", tmp_path / "step_9").returncode == 2


def test_the_verdict_alone_is_for_a_script_and_the_report_for_a_person(log):
    done = run_ckptctl("loss", log(), "--print", "verdict")
    assert (done.returncode, done.stdout) == (0, "continuous\n")
    assert done.stderr.startswith("continuous: ")


def test_a_root_without_a_report_is_a_usage_error(tmp_path, log):
    done = run_ckptctl("loss", log(), "--resume-report", tmp_path)
    assert done.returncode == 2
    assert "--resume-step" in done.stderr


@pytest.mark.parametrize("words", [["--resume", "0"], ["--resume", "9"], ["--key", "loss"]])
def test_an_argument_that_makes_no_sense_is_refused(log, words):
    done = run_ckptctl("loss", log(), *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")


def test_a_terminal_that_knows_ascii_alone_gets_ascii(log):
    done = run_ckptctl("loss", log(), env={"PYTHONIOENCODING": "ascii"})
    assert done.stdout.isascii()
    assert "logged twice" in done.stdout


def test_the_picture_is_well_formed_and_asks_for_nothing_outside_itself(tmp_path, log):
    path = log(times(1.012))
    run_ckptctl("loss", path, "--plot", tmp_path / "loss.svg")
    text = (tmp_path / "loss.svg").read_text()
    circles = ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(circles)) > 100
    assert re.findall(r"(?:href|src|url)\s*[=(]", text) == []


def test_a_picture_of_an_unknown_kind_is_refused_before_anything_is_read(tmp_path):
    done = run_ckptctl("loss", tmp_path / "none.log", "--plot", "loss.png")
    assert done.returncode == 2
    assert "ends in .svg" in done.stderr


def test_of_several_resumes_each_has_its_line_and_the_worst_its_table(tmp_path):
    again = [each for each in resumed(times(1.012)) if isinstance(each, Row)]
    third = rows(SAVED + 1, 260, attempt=3)
    path = written(tmp_path / "train.jsonl", [*again, *third])
    done = run_ckptctl("loss", path, "--resume", "all")
    assert done.returncode == 30
    assert "resume 1: discontinuous: " in done.stdout
    assert "resume 2: continuous: " in done.stdout
    assert "resume 1: 12 steps logged twice" in done.stdout


def test_a_loss_with_all_digits_of_a_double_is_shown_with_seven(tmp_path):
    log = tmp_path / "train.log"
    lines = [f"step:{n} - train/loss:{3 + n / 7:.14f} - train/lr:0.01\n" for n in range(1, 21)]
    log.write_text("".join([*lines, "ckptctl: resuming from step 10: r/step_10\n", *lines[10:]]))
    done = run_ckptctl("loss", log)
    assert re.search(r"\n +11  4\.571429  4\.571429 ", done.stdout), done.stdout


@pytest.mark.parametrize("norm", ["inf", "nan"])
def test_a_gradient_norm_that_is_not_finite_is_shown_beside_the_other(tmp_path, norm):
    log = tmp_path / "train.log"
    lines = [f"step {n} loss: {3 + 1 / n:.6f} grad_norm: 1.5\n" for n in range(1, 21)]
    again = [line.replace("1.5", norm) if " 15 " in line[:8] else line for line in lines[10:]]
    log.write_text("".join([*lines, "ckptctl: resuming from step 10: r/step_10\n", *again]))
    done = run_ckptctl("loss", log)
    assert re.search(rf"\n +15 .* 1\.5 \S+ {norm}\n", done.stdout), (done.stdout, done.stderr)


def test_rows_of_megatron_that_are_no_single_step_are_left_out(tmp_path):
    def logged(first, last):
        both, begun = [], False
        for step in range(first, last + 1):
            both.append(loss_at(step))
            # Its second row is the mean of the first two steps of the process.
            yield (
                f" iteration {step:8d}/    1000 | consumed samples: {32 * step:12d} | "
                f"learning rate: 3.000000E-04 | lm loss: {sum(both) / len(both):.6E} | "
                "loss scale: 1.0 | grad norm: 1.350 |\n"
            )
            both, begun = (both, True) if not begun else ([], True)

    log = tmp_path / "train.log"
    loaded = " successfully loaded checkpoint from /ckpt [ t 1/1, p 1/1 ] at iteration 200\n"
    log.write_text("".join([*logged(1, DIED), loaded, *logged(SAVED + 1, 260)]))
    done = run_ckptctl("loss", log, "--strict")
    assert done.stdout.startswith("continuous: ")
    assert "resumed after step 200 (from the log)" in done.stdout
    assert "not compared: 1 step whose rows are means" in done.stdout


# The step that was picked, what it counts, and how fast the job is


def reported(root: Path, step: int, at: str = "2026-11-21T00:00:00.000000Z") -> Path:
    """A root with the report of one resume."""
    attempts = root / ".ckptctl" / "attempts"
    attempts.mkdir(parents=True, exist_ok=True)
    report = {"schema": "ckptctl.resume/1", "at": at, "step": step, "tokens": step * TOKENS}
    report |= {"root": str(root), "path": str(root / f"step_{step}")}
    (attempts / "20261121T000000.000000Z-00000000.resume.json").write_text(json.dumps(report))
    return root


def test_a_numbered_resume_keeps_the_step_that_the_report_names(tmp_path):
    items = [*rows(1, 112), *rows(101, 212), *rows(201, 260)]
    path = written(tmp_path / "train.jsonl", items)
    root = reported(tmp_path / "run", SAVED)
    done = run_ckptctl("loss", path, "--resume", "2", "--resume-report", root, "--json")
    (assessment,) = validated(done.stdout)["assessments"]
    resume = assessment["resume"]
    assert (resume["number"], resume["resume_point"]["step"]) == (2, SAVED)
    assert resume["resume_point"]["tokens"] == SAVED * TOKENS
    # The report of the newest resume says nothing of the one before it.
    done = run_ckptctl("loss", path, "--resume", "1", "--resume-report", root, "--json")
    (assessment,) = validated(done.stdout)["assessments"]
    assert (assessment["resume"]["number"], assessment["resume"]["resume_point"]) == (1, None)


@pytest.mark.parametrize("loaded", [150, 207], ids=["older", "newer"])
def test_a_job_that_loaded_another_step_than_was_named_is_discontinuous(tmp_path, loaded):
    old = written(tmp_path / "old.jsonl", rows(1, 212))
    new = written(tmp_path / "new.jsonl", rows(loaded + 1, 260))
    assert run_ckptctl("loss", old, new, "--resume-step", loaded).returncode == 0
    done = run_ckptctl("loss", old, new, "--resume-step", SAVED, "--json")
    document = validated(done.stdout)
    assert done.returncode == 30
    assert document["assessments"][0]["findings"][0]["code"] == "loss.step"
    assert document["assessments"][0]["resume"]["position"]["file"] == str(new)


@pytest.mark.parametrize("what", ["tokens", "samples"])
def test_the_counts_of_the_checkpoint_are_compared_with_the_new_log(tmp_path, what):
    new = tmp_path / "new.jsonl"
    lines = [{"step": n, "loss": loss_at(n), what: n * TOKENS} for n in range(SAVED + 1, 260)]
    new.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    at_saved = {f"resume_{what}": SAVED * TOKENS}
    right = check_loss([str(new)], resume_step=SAVED, **at_saved)
    assert "loss.tokens" not in str(right)
    wrong = check_loss([str(new)], resume_step=SAVED, **{f"resume_{what}": TOKENS})
    assert wrong.exit_code == 30 or "no-resume" in str(wrong)
    with pytest.raises(UsageError, match="need resume_step"):
        check_loss([str(new)], **at_saved)


def paced(path: Path, before: float, after: float, key: str = "tokens_per_second") -> Path:
    """A log with the speed in every row, and the process that wrote it."""
    attempts = ((1, range(1, 213), before), (2, range(201, 260), after))
    lines = [
        {
            "step": n,
            "loss": round(loss_at(n), 4),
            key: speed * (1 + 0.01 * math.sin(attempt * n)),
            "attempt": attempt,
        }
        for attempt, steps, speed in attempts
        for n in steps
    ]
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines))
    return path


@pytest.mark.parametrize(
    ("key", "after", "word"),
    [
        ("tokens_per_second", 1000.0, "in-band"),
        ("tokens_per_second", 500.0, "slower"),
        ("tokens_per_second", 2000.0, "faster"),
        ("step_time_s", 2000.0, "slower"),
        ("step_time_s", 500.0, "faster"),
        ("something_else", 500.0, "unknown"),
    ],
)
def test_the_speed_after_the_resume_is_a_word_to_branch_on(tmp_path, key, after, word):
    path = paced(tmp_path / "train.jsonl", 1000.0, after, key)
    done = run_ckptctl("loss", path, "--print", "throughput")
    assert (done.stdout, done.returncode) == (f"{word}\n", 0)
    assert done.stderr.startswith("continuous: ")
    document = validated(run_ckptctl("loss", path, "--json").stdout)
    found = document["assessments"][0]
    assert found["throughput"]["pace"] == word
    codes = {finding["code"] for finding in found["findings"]}
    assert ("loss.throughput" in codes) == (word in ("slower", "faster"))


def test_the_work_that_is_done_again_is_counted(tmp_path, log):
    done = run_ckptctl("loss", log(), "--resume-step", SAVED)
    assert "recomputed: 12 steps, 49,152 tokens, 12 s (from step 200 to step 212)" in done.stdout
    document = validated(run_ckptctl("loss", log(), "--resume-step", SAVED, "--json").stdout)
    assert document["recomputed"] == {
        "from_step": SAVED,
        "to_step": DIED,
        "steps": DIED - SAVED,
        "tokens": (DIED - SAVED) * TOKENS,
        "samples": None,
        "seconds": 12.0,
    }


def test_following_waits_for_the_speed_where_it_is_asked_for(tmp_path):
    path = paced(tmp_path / "train.jsonl", 1000.0, 500.0)
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[: 212 + 14]))  # enough to settle the loss, and not the speed
    plain = run_ckptctl("loss", path, "--follow", "--timeout", "60", "-q")
    assert (plain.stdout, plain.returncode) == ("continuous\n", 0)
    path.write_text("".join(text))
    done = run_ckptctl("loss", path, "--follow", "--timeout", "60", "--print", "throughput", "-q")
    assert (done.stdout, done.returncode) == ("slower\n", 0)


def test_a_pattern_that_fits_nothing_does_not_lead_to_a_pattern(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("epoch 1 done\n" * 20)
    guess = run_ckptctl("loss", path)
    assert "--pattern" in (next_command(guess.stdout + guess.stderr) or "")
    done = run_ckptctl("loss", path, "--pattern", r"step (?P<step>\d+) loss (?P<loss>\S+)")
    assert next_command(done.stdout + done.stderr) == "ckptctl loss --help"


def test_a_key_that_no_log_has_is_a_warning(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"step": {n}, "loss": {3 - n / 100:.3f}}}\n' for n in range(1, 30)))
    done = run_ckptctl("loss", path, "--key", "loss=train/cee", "--json")
    codes = [finding["code"] for finding in json.loads(done.stdout)["findings"]]
    assert codes.count("loss.unused-key") == 1


def test_a_format_that_fits_nothing_leads_to_a_pattern_alone(tmp_path):
    path = tmp_path / "a.log"
    path.write_text("".join(f"loss {3 - n / 100:.3f} at step {n}\n" for n in range(1, 30)))
    done = run_ckptctl("loss", path, "--format", "megatron")
    command = next_command(done.stdout + done.stderr) or ""
    assert "--pattern" in command
    assert "--format" not in command


@pytest.mark.parametrize(
    ("losses", "printed"),
    [
        ({1: 2.0, 2: 1.9, 3: math.nan, 4: math.nan}, "2 5\n"),
        ({10: 2.0, 20: 1.9, 30: math.inf, 40: math.nan}, "20 50\n"),
        ({1: math.nan, 2: math.nan}, "0 3\n"),
        ({1: 2.0, 2: math.nan, 3: 1.9}, ""),
        ({1: 2.0, 2: 1.9}, ""),
    ],
    ids=["each-step", "sparse", "none-finite", "one-row", "finite"],
)
def test_the_first_suspect_step_is_the_last_before_the_losses_are_not_finite(
    tmp_path, losses, printed
):
    path = tmp_path / "train.log"
    path.write_text("".join(f"step: {step} loss: {loss}\n" for step, loss in losses.items()))
    done = run_ckptctl("loss", path, "--print", "suspect")
    assert (done.stdout, done.returncode) == (printed, 0)


def test_a_resume_from_lost_weights_makes_the_step_that_it_loaded_suspect(tmp_path):
    rows = [(step, 2.0) for step in range(1, 51)] + [(step, math.nan) for step in range(31, 41)]
    path = tmp_path / "train.log"
    path.write_text("".join(f"step: {step} loss: {loss}\n" for step, loss in rows))
    assert check_loss(str(path)).suspect == SuspectSteps(30, 51)


def test_the_first_suspect_step_is_found_behind_more_rows_than_are_kept(tmp_path):
    path = tmp_path / "train.log"
    losses = (math.nan if step > 3_000 else 2.0 for step in range(1, 26_001))
    path.write_text("".join(f"step: {n} loss: {loss}\n" for n, loss in enumerate(losses, 1)))
    suspect = check_loss(str(path)).suspect
    assert suspect is not None
    assert 2_900 <= suspect.first <= 3_000
    assert suspect.last == 26_001


def test_the_last_loss_of_several_runs_in_one_log_is_not_known(tmp_path):
    path = tmp_path / "train.log"
    steps = (step for n in range(60) for step in (n, n + 500))
    path.write_text("".join(f"step: {step} loss: nan\n" for step in steps))
    done = run_ckptctl("loss", path, "--print", "suspect")
    assert (done.stdout, done.returncode) == ("", 31)


def test_following_reports_a_key_that_no_log_has(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"step": {n}, "loss": {3 - n / 100:.3f}}}\n' for n in range(1, 30)))
    watched = ("loss", path, "--follow", "--timeout", "1", "--json")
    done = run_ckptctl(*watched, "--key", "loss=train/cee")
    findings = json.loads(done.stdout.splitlines()[-1])["findings"]
    assert [finding["code"] for finding in findings].count("loss.unused-key") == 1
    known = run_ckptctl(*watched, "--key", "loss=loss")
    assert "loss.unused-key" not in known.stdout
