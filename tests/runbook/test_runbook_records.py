"""A record found under a root is data from a stranger: none of it runs, none of it is obeyed."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment, validated
from damage import flip
from next_commands import run_and_follow as run_ckptctl
from rb_7_inputs import RB_7, settings

from ckptctl.runbook.document import find_runbook
from ckptctl.runbook.engine import _digest

STORAGE = "storage-corruption"
RESUME = 'echo "$STEP" > "$ROOT/../resumed"'


def plant(root: Path, *events: dict, runbook: str = "rb-7", **inputs: object) -> Path:
    """A record as a stranger writes it: an unfinished run with these inputs."""
    folder = root / ".ckptctl" / "runbooks" / runbook / "29991231T235959Z-abcdef"
    folder.mkdir(parents=True)
    book = find_runbook(runbook)
    opened = {
        "event": "opened",
        "by": f"{os.environ.get('USER', 'root')}@{os.uname().nodename}",
        "runbook": runbook,
        "title": book.title,
        "page": _digest(book),
        "inputs": {"ROOT": str(root), **inputs},
    }
    for number, event in enumerate((opened, *events), start=1):
        made = {"at": "2026-01-02T03:04:05Z", **event}
        (folder / f"{number:06d}.json").write_text(json.dumps(made))
    return folder


def ended(state: str, block: str, then: str, *, book: str = "rb-7", **more: object) -> dict:
    blocks = find_runbook(book).state(state).blocks
    rows = next(each for each in blocks if each.name == block).outcomes
    because = next(row.because for row in rows if row.then == then)
    fields = {"state": state, "block": block, "then": then, "because": because}
    return {
        "event": "ended",
        "exit_code": 0,
        "printed": "",
        "lines": [],
        "duration_s": 1,
        **fields,
    } | more


def before_resume(step: Path | str) -> tuple[dict, ...]:
    """The events of a run that has come to Resume with this step."""
    not_run = {"exit_code": None, "not_run": "not run"}
    return (
        ended("Classify", "classify", "MendJob", **not_run),
        ended("MendJob", "mended", "DrainNode"),
        ended("DrainNode", "suspects", "Locate", exit_code=1),
        ended("Locate", "suspect-steps", "next", **not_run),
        ended("Locate", "reject-suspect", "next", **not_run),
        ended("Locate", "preflight", "Nodes", printed=[str(step)]),
        ended("Nodes", "old-enough", "next", **not_run),
        ended("Nodes", "nodes", "Capacity"),
        ended("Capacity", "capacity", "Verify"),
        ended("Verify", "verify", "Resume"),
    )


def run(root: Path, *options: str, mended: str | None = RB_7["MENDED"], **kwargs: object):
    given = settings(**RB_7 | {"MENDED": mended})
    return run_ckptctl("runbook", "run", "rb-7", root, *given, *options, **kwargs)


def resumed(root: Path) -> str | None:
    path = root.parent / "resumed"
    return path.read_text().strip() if path.exists() else None


def at_a_terminal(
    root: Path,
    answers: list[bytes],
    *options: str,
    book: str = "rb-7",
    mended: str | None = RB_7["MENDED"],
) -> tuple[int, str]:
    """Run with a person at a terminal who types these answers, each to one question.

    Inputs that were not given are not typed.
    """
    ours, theirs = pty.openpty()
    given = settings(**RB_7 | {"MENDED": mended}) if book == "rb-7" else ()
    process = subprocess.Popen(
        [*COMMAND, "runbook", "run", book, str(root), *given, *options],
        env=clean_environment(TERM="dumb"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    seen, n_seen, answers = b"", 0, [*answers]
    while True:
        try:
            data = os.read(ours, 4096)
        except OSError:
            break
        if not data:
            break
        seen += data
        if b"[l]eave" in seen[n_seen:]:
            is_input = b"was not given" in seen[n_seen:]
            os.write(ours, (b"n" if is_input else answers.pop(0)) + b"\n")
            n_seen = len(seen)
    code = process.wait()
    os.close(ours)
    return code, seen.decode(errors="replace")


def test_variables_of_shells_and_loaders_do_not_come_from_a_record(root, tmp_path):
    hook, taken = tmp_path / "hook.sh", tmp_path / "taken"
    hook.write_text(f"touch {taken}\n")
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(f"open({str(taken)!r}, 'w')\n")
    plant(
        root,
        BASH_ENV=str(hook),
        ENV=str(hook),
        PYTHONPATH=str(site),
        PATH=str(site),
        LD_PRELOAD=str(hook),
        CKPTCTL_PYTHON=str(hook),
        CKPTCTL_ALLOW_MISSING_STATE="1",
    )
    done = run(root, "--continue", "--yes")
    assert done.returncode == 31, done.stderr
    assert not taken.exists()


def test_an_option_in_a_planted_input_reaches_no_command(root, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine\n")
    for planted in (f"x --report {victim}", [f"--report={victim}"], ["x", f"--report={victim}"]):
        folder = plant(root, LOG=planted, NEW_LOG=f"--report={victim}")
        done = run(root, "--continue", "--yes")
        assert done.returncode == 21, done.stderr
        assert "does not match the page" in done.stderr
        shutil.rmtree(folder)
    assert victim.read_text() == "mine\n"


def test_a_list_reaches_its_command_as_arguments(root, tmp_path):
    victim = tmp_path / "victim"
    name = f"x --report {victim}"
    (tmp_path / name.replace("/", "_")).write_text("Xid 79\n")
    (tmp_path / "other $(touch victim).log").write_text("")
    logs = [tmp_path / name.replace("/", "_"), tmp_path / "other $(touch victim).log"]
    options = [word for log in logs for word in ("--set", f"LOG={log}")]
    document = validated(run(root, "--dry-run", "--json", *options).stdout)
    (began,) = [
        each for each in document["events"] if each.get("command", "")[:17] == "ckptctl classify "
    ]
    assert began["values"]["LOG"] == [str(log) for log in logs]
    (ends,) = [
        each
        for each in document["events"]
        if each["event"] == "ended" and each["block"] == "classify"
    ]
    assert ends["exit_code"] == 0, ends["lines"]
    assert not victim.exists()


def test_a_command_in_a_record_is_never_run_without_a_person(root):
    plant(root, RESUME=RESUME)
    done = run(root, "--continue", "--yes")
    assert done.returncode == 2
    assert "RESUME from the record" in done.stderr
    assert resumed(root) is None


def test_a_command_in_a_record_is_shown_and_asked_for(root):
    plant(root, RESUME=RESUME)
    code, seen = at_a_terminal(root, [b"n"], "--continue")
    assert "From the record of the run, and not from you: RESUME" in seen
    assert resumed(root) is None
    assert code == 31
    code, seen = at_a_terminal(root, [b"y"], "--new", "--set", f"RESUME={RESUME}")
    assert "From the record" not in seen
    assert resumed(root) == str(root / "step_500")


def test_a_found_run_is_continued_only_after_it_was_named(root):
    plant(root, CANARY="old.log")
    done = run(root, "--yes", "--set", f"RESUME={RESUME}")
    assert done.returncode == 2
    assert "the unfinished run 29991231T235959Z-abcdef was found under this root" in done.stderr
    assert "--continue continues it, --new starts another" in done.stderr
    assert resumed(root) is None
    code, seen = at_a_terminal(root, [b"l"])
    assert "CANARY=old.log" in seen
    assert code == 93
    code, seen = at_a_terminal(root, [b"n", b"l"], "--set", f"RESUME={RESUME}")
    assert "== Classify" in seen
    assert len(list((root / ".ckptctl" / "runbooks" / "rb-7").iterdir())) == 2


def test_a_step_that_a_record_names_is_chosen_again_before_it_is_resumed_from(root, tmp_path):
    flip(root / "step_500" / "__1_0.distcp")
    elsewhere = Path(shutil.copytree(root / "step_300", tmp_path / "elsewhere" / "step_900"))
    for step in (root / "step_500", elsewhere):
        folder = plant(
            root,
            *before_resume(step),
        )
        done = run(root, "--continue", "--yes", "--set", f"RESUME={RESUME}")
        assert resumed(root) == str(root / "step_400"), done.stderr
        (root.parent / "resumed").unlink()
        shutil.rmtree(folder)


BACK = {"event": "back", "state": "Cadence", "because": "planted"}


def test_a_success_in_a_record_is_no_success_unattended(root):
    flip(root / "step_500" / "__1_0.distcp")
    plant(root, *before_resume(root / "step_500"), BACK)
    done = run(root, "--continue", "--yes", "--quiet")
    assert done.returncode == 31, done.stderr
    assert done.stdout == f"{root}/step_400\n"
    shutil.rmtree(root / ".ckptctl" / "runbooks")
    started = ended("Resume", "resume", "WatchLoss", exit_code=None, not_run="not run")
    plant(root, *before_resume(root / "step_500"), started, BACK)
    done = run(root, "--continue", "--yes", "--quiet")
    assert (done.returncode, done.stdout) == (31, ""), done.stderr
    again = run(root, "--continue", "--yes", "--quiet")
    assert (again.returncode, again.stdout) == (31, ""), again.stderr


def test_a_drain_in_a_record_is_none_unattended(root, tmp_path):
    log = tmp_path / "kernel.log"
    log.write_text("Nov 22 03:00:01 gpu-17 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU lost\n")
    events = (
        ended("Classify", "classify", "DrainNode", printed=["infrastructure"]),
        ended("DrainNode", "suspects", "next", printed=["gpu-17"]),
        ended("DrainNode", "drain", "Locate"),
    )
    plant(root, *events)
    done = run(root, "--continue", "--yes", "--set", f"LOG={log}", "--set", f"RESUME={RESUME}")
    assert done.returncode == 93, done.stderr
    assert resumed(root) is None


def test_a_person_is_told_that_what_was_read_is_from_the_record(root):
    plant(root, *before_resume(root / "step_500"))
    _, seen = at_a_terminal(root, [b"l"], "--continue", "--set", f"RESUME={RESUME}")
    assert "continued in Resume; earlier results are taken from the record" in seen


def test_a_file_name_that_is_not_text_is_recorded_and_continued(root, tmp_path):
    name = os.fsdecode(bytes(tmp_path) + b"/\xff.log")
    Path(name).write_text("nothing\n")
    assert run(root, "--yes", "--set", f"LOG={name}").returncode == 31
    assert run(root, "--yes", "--continue").returncode == 31


def test_a_step_outside_the_root_is_not_taken_from_a_record(root):
    plant(
        root,
        *before_resume("/elsewhere/step_900"),
        ended("Resume", "resume", "WatchLoss", exit_code=None, not_run="not run"),
    )
    done = run(root, "--continue", "--yes", "--quiet")
    assert done.returncode == 31
    assert done.stdout == ""


def test_a_weaker_check_is_not_taken_from_a_record_unattended(root):
    plant(root, LEVEL="listing")
    done = run(root, "--continue", "--yes")
    assert done.returncode == 2
    assert "LEVEL=listing" in done.stderr
    assert run(root, "--continue", "--yes", "--set", "LEVEL=content").returncode == 31


def test_variables_that_loosen_a_check_are_dropped_and_named(root):
    done = run(root, "--yes", env={"CKPTCTL_MAX_FALLBACK": "1000", "CKPTCTL_LEVEL": "listing"})
    assert done.returncode == 31
    assert "not passed to the blocks: CKPTCTL_LEVEL, CKPTCTL_MAX_FALLBACK" in done.stderr


def test_the_environment_of_the_operator_stays(root):
    command = 'echo "$KUBECONFIG" > "$ROOT/../resumed"'
    run(root, "--yes", "--set", f"RESUME={command}", env={"KUBECONFIG": "/k/config"})
    assert resumed(root) == "/k/config"


def test_a_module_that_lies_in_the_current_folder_is_not_imported(root, tmp_path):
    for name in ("ckptctl.py", "typer.py", "json.py"):
        (root / name).write_text(f"open({str(tmp_path / 'taken')!r}, 'w')\n")
    # From here the blocks start; the outer command is started as it is installed.
    done = run_ckptctl(
        *(
            "runbook",
            "run",
            "rb-7",
            root,
            "--yes",
            "--set",
            f"RESUME=cd {root} && ckptctl --version",
            *settings(**RB_7),
        ),
    )
    assert "exit code 0: the job was started" in done.stderr, done.stderr
    assert not (tmp_path / "taken").exists()


DAMAGED = {
    "not JSON": b"{",
    "no object": b"[]",
    "deep": b"[" * 100_000,
    "unknown kind": b'{"event": "x", "at": "2026-01-02T03:04:05Z"}',
    "lacks fields": b'{"event": "ended", "at": "2026-01-02T03:04:05Z"}',
    "month 13": b'{"event":"back","at":"2026-13-02T03:04:05Z","state":"Locate","because":""}',
    "NaN": b'{"event": "finished", "at": "2026-01-02T03:04:05Z", "exit_code": NaN, "because": ""}',
    "opened twice": b'{"event": "opened", "at": "2026-01-02T03:04:05Z"}',
    "off the page": json.dumps(
        {"at": "2026-01-02T03:04:05Z", **ended("Resume", "resume", "WatchLoss")}
    ).encode(),
    "no such state": b'{"event":"back","at":"2026-01-02T03:04:05Z","state":"X","because":""}',
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_record_is_an_error_that_names_the_way_out(root, name):
    folder = plant(root)
    (folder / "000002.json").write_bytes(DAMAGED[name])
    done = run(root, "--yes", "--continue")
    assert done.returncode == 21, done.stderr
    assert "--new starts a new run" in done.stderr


def test_a_new_run_passes_over_a_damaged_record(root):
    (plant(root) / "000002.json").write_bytes(DAMAGED["not JSON"])
    assert run(root, "--yes", "--new").returncode == 31


def test_an_event_that_is_missing_is_noticed(root):
    folder = plant(root, before_resume("x")[0])
    (folder / "000001.json").rename(folder / "000003.json")
    done = run(root, "--continue")
    assert done.returncode == 21
    assert "event 1 is missing" in done.stderr


def test_what_a_stranger_wrote_cannot_break_the_run(root, tmp_path):
    report = {
        "schema": "ckptctl.verify/1",
        "report": {
            "world_size": {"size": "x"},
            "ranks": [1, ["a"], ["a", [None, "b"]]],
            "findings": 3,
        },
    }
    plant(
        root,
        *before_resume("x")[:3],
        ended(
            "Locate",
            "suspect-steps",
            "next",
            report={"schema": "ckptctl.scan/1", "reports": [{}, 3]},
        ),
        before_resume("x")[4],
        ended("Locate", "preflight", "Nodes", printed=[str(root / "step_500")], report=report),
    )
    done = run(root, "--continue", "--yes", "--transcript", str(tmp_path / "t"))
    assert done.returncode == 31, done.stderr


@pytest.mark.parametrize(
    "event",
    [
        ended("Classify", "classify", "DrainNode") | {"because": "`; rm -rf $HOME`"},
        ended("Classify", "classify", "DrainNode") | {"state": "# ok"},
        {"event": "began", "state": "Locate", "block": "preflight", "command": "x", "values": {}},
    ],
)
def test_a_reason_or_a_state_that_the_page_does_not_have_is_refused(root, event):
    plant(root, event)
    done = run(root, "--continue", "--yes")
    assert done.returncode == 21
    assert "does not match the page of rb-7" in done.stderr


def test_what_a_log_holds_remains_text_in_the_transcript(root, tmp_path):
    text = "```\n# done\n<img src=x>\x1b[8m\u202egnp|`x`"
    hostile = ended("Classify", "classify", "DrainNode", lines=text.split("\n"))
    folder = plant(root, hostile, LOG=["a`b|c\u202e.log"])
    opened = json.loads((folder / "000001.json").read_text())
    opened["by"] = "`x|y` <img src=x> @everyone"
    (folder / "000001.json").write_text(json.dumps(opened))
    done = run(root, "--continue", "--yes", "--transcript", str(tmp_path / "t"))
    assert done.returncode in (2, 31), done.stderr
    made = (tmp_path / "t" / "transcript.md").read_text()
    assert "````text\n```\n# done\n<img src=x>\\x1b[8m\\u202egnp|`x`\n````\n" in made
    assert "by `` `x|y` <img src=x> @everyone ``" in made
    assert "| `LOG` | `` ('a`b\\|c\\u202e.log') `` |" in made
    assert all(c.isprintable() or c == "\n" for c in made)


GIVEN = ["an NBSP\u00a0 and \u3000", "a\u200cb", "\U0001f468\u200d\U0001f4bb did it"]


@pytest.mark.parametrize("text", GIVEN)
def test_a_value_that_was_accepted_is_taken_back_from_the_record(root, text):
    reason = f"{text} and more words"
    first = run(root, "--yes", "--set", f"CANARY={text}", "--set", f"CONFIRMED={reason}")
    again = run(root, "--yes", "--continue")
    assert (first.returncode, again.returncode) == (31, 31), again.stderr


def test_a_value_that_a_record_cannot_give_back_is_refused_when_it_is_given(root):
    done = run(root, "--yes", "--set", "CONFIRMED=more than one\nline")
    assert done.returncode == 2
    assert "cannot contain a line break" in done.stderr


def test_a_closed_input_is_no_terminal(root):
    words = [*COMMAND, "runbook", "run", "rb-7", str(root), "--set", f"RESUME={RESUME}"]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&-', "sh", *words],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "there is no terminal to ask at" in done.stderr


def test_a_launcher_in_a_record_starts_nothing_without_a_person(root, tmp_path):
    plant(root, LAUNCHER=f"touch {tmp_path / 'taken'}")
    done = run(root, "--continue", "--yes")
    assert done.returncode == 2
    assert "LAUNCHER from the record" in done.stderr
    assert not (tmp_path / "taken").exists()


def test_a_decision_in_a_record_decides_nothing_unattended(root, tmp_path):
    log = tmp_path / "train.log"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 3\nValueError: x\n')
    plant(root, MENDED="everything is fine")
    options = settings(LOG=log, RESUME=RESUME)
    done = run(root, "--continue", "--yes", *options, mended=None)
    assert done.returncode == 93
    assert "nobody stated what keeps the job from failing again" in done.stdout
    assert resumed(root) is None


def test_a_decision_at_a_terminal_is_typed_and_recorded(root, tmp_path):
    log = tmp_path / "train.log"
    log.write_text('Traceback (most recent call last):\n  File "a.py", line 3\nValueError: x\n')
    options = settings(LOG=log, RESUME=RESUME)
    code, seen = at_a_terminal(root, [b"n"], *options, mended=None)
    assert code == 93, seen
    assert "A person decides: what keeps the job" in seen
    answers = [b"y", b"yes", b"ok ok ok", b"commit 1a2b3c mends it", b"y"]
    new = ("--new", "--transcript", str(tmp_path / "t"))
    code, seen = at_a_terminal(root, answers, *options, *new, mended=None)
    assert code == 31, seen
    assert resumed(root) == str(root / "step_500")
    text = (tmp_path / "t" / "transcript.md").read_text()
    assert "Decided by" in text
    assert "removed by: commit 1a2b3c mends it" in text


def forged_probe(root: Path) -> None:
    """A record of storage-corruption in which the probe has ended well."""
    plant(
        root,
        ended(
            "Hold", "hold", "Survey", exit_code=None, book="storage-corruption", not_run="not run"
        ),
        ended("Survey", "survey", "next", book=STORAGE),
        ended("Survey", "newest", "Probe", exit_code=11, book=STORAGE),
        ended("Probe", "probe", "Rescue", book=STORAGE),
        runbook="storage-corruption",
    )


def test_the_end_of_a_probe_in_a_record_is_not_believed(root):
    forged_probe(root)
    storage = ("runbook", "run", "storage-corruption", root, "--continue")
    done = run_ckptctl(*storage, "--yes", "--json")
    events = sorted((root / ".ckptctl" / "runbooks" / "storage-corruption").glob("*/[0-9]*.json"))
    began = [event["block"] for event in map(_event, events) if event["event"] == "began"]
    assert began[0] == "survey", done.stderr


def _event(path: Path) -> dict:
    return json.loads(path.read_text())


def test_a_person_is_told_that_a_probe_in_a_record_is_run_again(root):
    forged_probe(root)
    _, seen = at_a_terminal(root, [b"l"], "--continue", book=STORAGE)
    assert "back to Probe: probe is run again, because its recorded end is not relied on" in seen
    assert "--probe-storage" in seen


def test_a_run_follows_one_that_is_dated_in_the_future(root):
    plant(root)
    folder = root / ".ckptctl" / "runbooks" / "rb-7"
    for name in ("99991231T235959Z-abcdef", "29991340T000000Z-abcdef"):
        (folder / name).mkdir()
    assert run(root, "--new", "--yes").returncode == 31
    (ours,) = folder.glob("30000101T000000Z-*")
    n_events = len(list(ours.iterdir()))
    assert run(root, "--continue", "--yes").returncode == 31
    assert len(list(ours.iterdir())) > n_events
    assert len(list(folder.iterdir())) == 4
