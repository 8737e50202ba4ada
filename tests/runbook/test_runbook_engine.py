"""A run goes where the tables say, can be left anywhere, and is never done twice."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import pytest
from page_checks import problems

import ckptctl
from ckptctl.errors import PathNotFound, UsageError
from ckptctl.formats.own.run_events import BeganEvent
from ckptctl.runbook.document import Block, Input, Outcome, Runbook, State, parse
from ckptctl.runbook.engine import Ran, run_runbook, who
from ckptctl.runbook.executing import as_typed, execute
from ckptctl.runbook.record import (
    RunRecord,
    TakenOver,
    newest,
)
from ckptctl.storage.opening import open_store

PAGE = """# RB-1: Try it

## Trigger

## Severity

## Inputs

| input | what it is | if not given |
|---|---|---|
| `ROOT` | the root | required |
| `CODE` | how the first look ends | `0` |
| `WORD` | what it says | - |

## Flow

```mermaid
stateDiagram-v2
    [*] --> Look
    Look --> Act: something is there
    Act --> Look: look again
    Look --> [*]: nothing is left
```

## Procedure

### Look

What is there?

```sh name=look reads sets=FOUND
echo "look" >> "$ROOT/log"
[ -z "$WORD" ] || echo "$WORD"
exit "$CODE"
```

| ends with | prints | then | because |
|---|---|---|---|
| 0 | nothing | done | nothing is left |
| 0 | | Act | there is something |
| 20-22 | | stop | it is broken |
| other | | stop 75 | nobody knows |

### Act

```sh name=act changes at-most=2
echo "act $FOUND" >> "$ROOT/log"
```

| ends with | prints | then | because |
|---|---|---|---|
| 0 | | Look | one less |
| too often | | stop 11 | it does not get less |
| not run | | stop 93 | a person said no |
| other | | stop 93 | it failed |

## Rollback

## References
"""
BOOK = parse(PAGE, "rb-1.md")


class Person:
    """Somebody who answers what is asked, in turn, and remembers what was shown."""

    def __init__(self, *answers: bool | BaseException | None) -> None:
        self.answers = list(answers)
        self.shown: list[str] = []
        self.again: list[bool] = []
        self.found: list[Sequence[str]] = []

    def entering(self, state: State) -> None:
        self.shown.append(f"== {state.name}")

    def about_to(self, block: Block, command: str | None, values: Mapping[str, str]) -> None:
        self.shown.append(f"$ {block.name} {dict(values)}")

    def printed(self, text: str) -> None:
        self.shown.append(text)

    def ended(self, block: Block, outcome: Outcome, exit_code: int | None) -> None:
        self.shown.append(f"{block.name}: {outcome.because}")

    def silent(self, waited_s: float) -> None:
        pass

    def asked(self, wanted: Input, suggestion: str | None) -> str | None:
        return ""

    attended = True
    assumes = False
    columns = None
    repeated = ()

    def decided(self, block: Block, decision: Input) -> str | None:
        return self.answers.pop(0)

    def report(self, text: str) -> None:
        self.shown.append(text)

    def continues(self, run: str, begun: str) -> bool | None:
        return True

    def may(self, block: Block, *, again: bool, found: Sequence[str]) -> bool | None:
        self.again.append(again)
        self.found.append(found)
        answer = self.answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def go(root: Path, person: Person, book: Runbook = BOOK, how: str = "auto", **inputs: str) -> Ran:
    return run_runbook(book, str(root), inputs, person, how=how)


def log(root: Path) -> list[str]:
    path = root / "log"
    return path.read_text().splitlines() if path.exists() else []


DECISION = """## Decisions

| decision | what a person states | if nobody does |
|---|---|---|
| `WHY: reason` | why it may burn | 11 |

## Flow
"""
DECIDES = (
    PAGE.replace("## Flow\n", DECISION)
    .replace(
        """```sh name=act changes at-most=2
echo "act $FOUND" >> "$ROOT/log"
```

| ends with | prints | then | because |
|---|---|---|---|
| 0 | | Look | one less |
| too often | | stop 11 | it does not get less |
| not run | | stop 93 | a person said no |
| other | | stop 93 | it failed |
""",
        """```sh name=act decides=WHY overrides
echo "burns because $WHY"
```

| ends with | prints | then | because |
|---|---|---|---|
| 0 | | next | it burns |
| not run | | stop 11 | nobody accepts that it burns |

```sh name=last reads asks=WORD needs=WORD
test "$WORD" != again
```

| ends with | prints | then | because |
|---|---|---|---|
| 0 | | done | nothing is left |
| 1 | | Look | look again |
| not run | | done | nobody was asked |
| other | | stop 75 | nobody knows |
""",
    )
    .replace("    Act --> Look", "    Act --> [*]: done\n    Act --> Look")
)


def test_a_decision_against_what_was_found_is_no_plain_success(tmp_path):
    book = parse(DECIDES, "rb-1.md")
    assert problems(book) == ()
    ran = go(tmp_path, Person(), book, WORD="fire", WHY="it is a fireplace")
    assert ran.exit_code == 35
    accepted = f"accepted against what was found: it burns ({who()}: it is a fireplace)"
    assert ran.reason == f"{accepted}. nothing is left"
    assert ran.next_command is None


@pytest.mark.parametrize("reflex", ["y", "yes", "ok", "yes yes yes", "no ok y", "it burns"])
def test_a_reflex_is_no_reason(tmp_path, reflex):
    with pytest.raises(UsageError, match="must be a reason in three words or more"):
        go(tmp_path, Person(), parse(DECIDES, "rb-1.md"), WHY=reflex)
    assert not (tmp_path / ".ckptctl").exists()


@pytest.mark.parametrize(
    ("type_", "sound", "wrong"),
    [
        ("number", ["0", "512"], ["", "four", "-1", "1.5", "\u0663"]),
        ("duration", ["90", "1.5h", "2 d", "5min"], ["eight hours", "0", "h", "1e3"]),
        ("yes/no", ["yes", "no"], ["y", "YES", ""]),
        ("text", ["x"], ["", " "]),
    ],
)
def test_a_value_has_the_type_that_the_page_states(type_, sound, wrong):
    given = Input("N", False, "", False, None, "", type_)
    assert [text for text in sound if given.mistake(text)] == []
    assert [text for text in wrong if not given.mistake(text)] == []


class Asked(Person):
    """Somebody who is asked for inputs that were not given."""

    def asked(self, wanted: Input, suggestion: str | None) -> str | None:
        self.shown.append(f"asked for {wanted.name}")
        return self.answers.pop(0)


@pytest.mark.parametrize(("answer", "reason"), [("fire", "nothing is left"), ("", "nobody was")])
def test_an_input_that_is_missing_is_asked_for_where_it_is_needed(tmp_path, answer, reason):
    person = Asked(answer)
    ran = go(tmp_path, person, parse(DECIDES, "rb-1.md"), WHY="it is a fireplace")
    assert person.shown.count("asked for WORD") == 1
    assert reason in ran.reason


def test_a_call_that_changes_an_input_returns_to_the_block_that_uses_it(tmp_path):
    book = parse(DECIDES, "rb-1.md")
    left = go(tmp_path, Person(None), book, WORD="fire")
    assert not left.finished
    person = Person("it is a fireplace")
    ran = go(tmp_path, person, book, how="continue", WORD="nothing")
    assert "back to Look: WORD changed" in person.shown
    assert (ran.exit_code, ran.reason) == (0, "nothing is left")
    assert log(tmp_path) == ["look", "look"]


def test_a_decision_at_which_a_run_stopped_is_made_again(tmp_path):
    book = parse(DECIDES, "rb-1.md")
    assert go(tmp_path, Person(""), book, WORD="fire").exit_code == 11
    again = Person("it is a fireplace")
    assert go(tmp_path, again, book, how="continue").exit_code == 35


def test_a_command_is_shown_as_bash_expands_it():
    names = {"ROOT": "/a b", "LOG": ("x", "y z"), "EMPTY": "", "LEVEL": "content"}
    code = 'ckptctl pick "$ROOT" "${LOG[@]/#/--log=}" ${EMPTY:+--x "$EMPTY"} --level "$LEVEL"'
    shown = "ckptctl pick '/a b' --log=x --log='y z' --level content"
    assert as_typed(code, names) == shown
    assert as_typed('eval "$LEVEL"', names) == "content"
    assert as_typed("ckptctl pick; touch /tmp/never", names) is None
    assert as_typed('ckptctl pick "$(touch /tmp/never)"', names) is None


def test_a_command_that_prints_nothing_for_a_while_is_reported(monkeypatch):
    monkeypatch.setattr("ckptctl.runbook.executing._SILENT_S", 0.2)
    waited: list[float] = []
    execute("sleep 0.9; echo over", {}, {}, lambda _: None, waited.append)
    assert len(waited) >= 2
    assert waited == sorted(waited)
    assert waited[0] >= 0.2


def test_the_page_of_these_tests_is_sound():
    assert problems(BOOK) == ()


def test_a_run_goes_where_the_tables_say(tmp_path):
    ran = go(tmp_path, Person(), WORD="nothing")
    assert (ran.exit_code, ran.finished, ran.reason) == (0, True, "nothing is left")
    assert log(tmp_path) == ["look"]
    assert ran.next_command is None


@pytest.mark.parametrize(("code", "exit_code"), [("20", 20), ("22", 22), ("23", 75), ("7", 75)])
def test_a_stop_ends_with_the_code_of_the_command_or_with_the_one_stated(tmp_path, code, exit_code):
    assert go(tmp_path, Person(), CODE=code).exit_code == exit_code


def test_what_a_block_prints_last_is_handed_on(tmp_path):
    go(tmp_path, Person(True, False), WORD="a fire")
    assert log(tmp_path) == ["look", "act a fire", "look"]


def test_a_block_runs_at_most_so_often(tmp_path):
    ran = go(tmp_path, Person(True, True, True), WORD="a fire")
    assert (ran.exit_code, ran.reason) == (11, "it does not get less")
    assert log(tmp_path).count("act a fire") == 2


def test_nothing_is_changed_that_was_not_agreed_to(tmp_path):
    ran = go(tmp_path, Person(False), WORD="a fire")
    assert (ran.exit_code, ran.reason) == (93, "a person said no")
    assert log(tmp_path) == ["look"]


def test_a_run_that_was_left_goes_on_where_it_was_also_for_somebody_else(tmp_path):
    left = go(tmp_path, Person(None), WORD="a fire")
    assert not left.finished
    ran = go(tmp_path, Person(False))
    assert ran.run == left.run
    assert ran.continued
    assert log(tmp_path) == ["look"]


def test_a_run_that_stopped_is_gone_on_with_only_when_asked_for(tmp_path):
    stopped = go(tmp_path, Person(), CODE="20")
    assert go(tmp_path, Person(), CODE="20").run != stopped.run
    again = go(tmp_path, Person(), how="continue", CODE="0", WORD="nothing")
    assert again.exit_code == 0
    assert again.continued


def test_a_command_that_was_cut_off_is_asked_about_again(tmp_path):
    class Killed(BaseException):
        pass

    class Dying(Person):
        def ended(self, block, outcome, ended):
            if block.name == "act":
                raise Killed

    with pytest.raises(Killed):
        go(tmp_path, Dying(True), WORD="a fire")
    person = Person(False)
    go(tmp_path, person)
    assert person.again == [True]
    assert log(tmp_path) == ["look", "act a fire"]


def test_a_run_that_is_killed_behind_any_event_ends_as_it_would_have(tmp_path):
    """Behind each event a root is left as SIGKILL leaves it, and the run is continued."""
    whole = go(tmp_path, Person(True, True), WORD="a fire")
    assert (whole.exit_code, whole.finished) == (11, True)
    for n_written, last in enumerate(whole.events, start=1):
        root = tmp_path / f"killed-{n_written}"
        folder = root / Path(whole.url).relative_to(tmp_path)
        folder.mkdir(parents=True)
        for number in range(1, n_written + 1):
            name = f"{number:06d}.json"
            shutil.copy(Path(whole.url) / name, folder / name)
        person = Person(True, True)
        again = go(root, person, how="continue", ROOT=str(root))
        assert (again.exit_code, again.reason) == (11, whole.reason), n_written
        acted = [isinstance(e, BeganEvent) and e.block == "act" for e in again.events]
        was_cut_off = isinstance(last, BeganEvent) and last.block == "act"
        assert sum(acted) == 2 + was_cut_off, n_written
        assert person.again[:1] in ([], [was_cut_off]), n_written


def test_a_dry_run_reads_and_leaves_no_record(tmp_path):
    ran = go(tmp_path, Person(False), how="dry", WORD="a fire")
    assert ran.url is None
    assert log(tmp_path) == ["look"]
    assert not (tmp_path / ".ckptctl").exists()


def test_a_root_of_which_a_block_would_read_only_the_last_line_is_refused(tmp_path):
    (tmp_path / "one\nline").mkdir()
    with pytest.raises(UsageError, match="cannot contain a line break"):
        go(tmp_path / "one\nline", Person())


def test_a_root_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(PathNotFound):
        go(tmp_path / "unmounted", Person())
    assert list(tmp_path.iterdir()) == []


def test_an_input_that_the_page_does_not_know_is_refused(tmp_path):
    with pytest.raises(UsageError, match="no input 'COLOR'; it has ROOT, CODE, WORD"):
        go(tmp_path, Person(), COLOR="red")


def test_what_the_shell_outside_calls_so_does_not_come_in(tmp_path, monkeypatch):
    monkeypatch.setenv("WORD", "nothing")
    ran = go(tmp_path, Person(False))
    assert ran.reason == "a person said no"


def test_a_page_that_changed_is_not_gone_on_with(tmp_path):
    go(tmp_path, Person(None), WORD="a fire")
    with pytest.raises(UsageError, match="the page of the runbook rb-1 has changed"):
        go(tmp_path, Person(), parse(PAGE.replace("What is there?", "What?"), "rb-1.md"))


def test_of_two_people_on_one_run_the_first_stops_at_its_next_entry(tmp_path):
    go(tmp_path, Person(None), WORD="a fire")
    with open_store(str(tmp_path)) as store:
        record = newest(store, "rb-1")
        taken = run_runbook(BOOK, str(tmp_path), {}, Person(None))
        assert taken.continued
        with pytest.raises(TakenOver):
            record.add(record.opened)


def test_of_two_calls_that_write_the_same_event_at_once_one_stops(monkeypatch):
    store = open_store(f"memory://{uuid.uuid4().hex}")
    event = BeganEvent(state="Act", block="act", command="sbatch job.sh", values={})
    RunRecord(store, "run").add(event)
    exists = type(store._client).exists
    # As both calls saw the storage before either had written.
    answers = iter([False])
    monkeypatch.setattr(
        type(store._client), "exists", lambda self, key: next(answers, None) or exists(self, key)
    )
    with pytest.raises(TakenOver):
        RunRecord(store, "run").add(event)


def test_a_job_in_the_background_does_not_hold_the_run_up(tmp_path):
    page = PAGE.replace('echo "act $FOUND" >> "$ROOT/log"', "sleep 60 & echo $! > $ROOT/pid")
    ran = go(tmp_path, Person(True, None), parse(page, "rb-1.md"), WORD="a fire")
    assert not ran.finished
    pid = int((tmp_path / "pid").read_text())
    assert Path(f"/proc/{pid}").exists()
    import signal

    os.kill(pid, signal.SIGKILL)


BLOCK_OF_AN_ARCHIVE = """
import sys
sys.path[:0] = {path!r}
if sys.argv[1:]:
    from ckptctl.cli.main import main
    main()
from ckptctl.runbook.executing import execute
sys.exit(execute("ckptctl --version", {{}}, {{}}, print).exit_code)
"""


def test_a_block_calls_the_archive_that_runs_the_runbook(tmp_path):
    libraries = (ckptctl, msgspec)
    path = [str(Path(str(each.__file__)).parents[1]) for each in libraries]
    with zipfile.ZipFile(tmp_path / "a b.pyz", "w") as archive:
        archive.writestr("__main__.py", BLOCK_OF_AN_ARCHIVE.format(path=path))
    # This Python has no ckptctl of its own, and the archive is named from its folder.
    words = (os.path.realpath(sys.executable), "-I", "-S", "a b.pyz")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"ckptctl {ckptctl.__version__}\n"), done.stderr


def test_lines_that_a_command_writes_at_once_stay_together():
    program = (
        "import os; os.write(2, b''.join(b'%d\\n' % n for n in range(2000))); os.write(1, b'x\\n')"
    )
    lines: list[str] = []

    def shown(line: str) -> None:
        lines.append(line)
        time.sleep(1e-5)  # a terminal is slow: the reader of the other stream gets its turn

    done = execute(f'{sys.executable} -c "{program}"', {}, {}, shown)
    assert (done.exit_code, done.printed) == (0, ("x",))
    assert lines.index("x") in (0, 2000)
    assert [each for each in lines if each != "x"] == [str(n) for n in range(2000)]


def test_what_a_command_printed_counts_also_where_the_terminal_stalls():
    stalls = iter([2.5])
    done = execute(
        "echo talk >&2; echo job; sleep 60 & printf infrastructure; kill %1",
        {},
        {},
        lambda _: time.sleep(next(stalls, 0.0)),
    )
    assert done.printed == ("job", "infrastructure")
    assert done.lines == ("talk", "job", "infrastructure")


def test_a_file_name_that_is_not_text_is_handed_on_as_it_is():
    done = execute(r"printf '/run\xff/step_1\n'", {}, {}, lambda _: None)
    assert os.fsencode(done.printed[-1]) == b"/run\xff/step_1"
    assert done.lines == ("/run\\xff/step_1",)


@pytest.mark.parametrize(
    "output",
    [
        r"printf 'a\0b\n'",
        "head -c 3M /dev/zero | tr '\\0' '\\1' | fold -w 4000",
        "yes \U0001f525\U0001f525\U0001f525 | head -400000 | tr -d '\\n' | fold -w 8000",
        'head -c 2M /dev/zero > "$PICTURE"',
        """: ckptctl ; echo '{"n": 1e999}' > "$CKPTCTL_REPORT" """,
    ],
)
def test_a_run_is_continued_whatever_its_commands_have_printed(tmp_path, output):
    page = PAGE.replace('echo "look" >> "$ROOT/log"', output)
    left = go(tmp_path, Person(None), parse(page, "rb-1.md"))
    assert (left.exit_code, left.finished) == (93, False)
    assert go(tmp_path, Person(True, None), parse(page, "rb-1.md")).continued


def test_a_machine_without_bash_is_no_fault_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="bash could not be started"):
        go(tmp_path, Person())


def test_a_block_without_a_temporary_folder_is_no_missing_bash(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(UsageError, match="without a temporary folder: No such file"):
        go(tmp_path, Person())


def test_an_output_that_is_gone_is_no_missing_bash():
    def gone(_line: str) -> None:
        raise BrokenPipeError(32, "Broken pipe")

    with pytest.raises(BrokenPipeError):
        execute("echo a", {}, {}, gone)


def test_a_run_that_goes_in_circles_is_ended(tmp_path):
    page = PAGE.replace(" at-most=2", "").replace(
        "| too often | | stop 11 | it does not get less |\n", ""
    )
    everything = Person()
    everything.answers = itertools.repeat(True)  # type: ignore[assignment]
    everything.may = lambda block, *, again, found: True  # type: ignore[method-assign]
    with pytest.raises(Exception, match="its tables form a loop"):
        go(tmp_path, everything, parse(page, "rb-1.md"), WORD="a fire")
