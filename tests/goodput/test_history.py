"""What a record says of the time of a run: exact on made ledgers, bounded on damaged ones."""

from __future__ import annotations

import datetime
import json
import shutil
from pathlib import Path

import pytest
from command_line import validated
from next_commands import run_and_follow as run_ckptctl

import ckptctl
from ckptctl.errors import CkptctlError
from ckptctl.formats.own.files import as_stored
from ckptctl.formats.own.supervision import STATE_SCHEMA
from ckptctl.supervisor.holding import new_state

BEGAN_S = 1_760_000_000.0


def iso(seconds: float) -> str:
    moment = datetime.datetime.fromtimestamp(BEGAN_S + seconds, datetime.UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


class Made:
    """A root with ledgers and a state, made by hand; times in seconds after the first start."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = {**new_state(str(root)), "best": 40}
        (root / ".ckptctl" / "attempts").mkdir(parents=True)

    def ledger(
        self,
        began_s: float,
        resumed_from: int | None,
        rows: list[tuple[float, str, dict[str, object]]],
        *,
        number: int | None = None,
        startup_s: float = 20,
        load_s: float = 10,
    ) -> Path:
        """One attempt: processes begin, resume, and write `rows` (age, event, fields)."""
        moment = datetime.datetime.fromtimestamp(BEGAN_S + began_s, datetime.UTC)
        name = f"{moment.strftime('%Y%m%dT%H%M%S.%fZ')}-{int(began_s) % 0xFFFF:08x}"
        supervised = None if number is None else f"{self.state['run']}/{number}"
        resumed_s = startup_s + load_s
        first = [
            (resumed_s - 0.1, "started", {"supervised": supervised, "world_size": 8}),
            (resumed_s, "resumed", {"step": resumed_from, "load_s": load_s}),
        ]
        path = self.root / ".ckptctl" / "attempts" / f"{name}.jsonl"
        lines = [
            json.dumps(
                {"at": iso(began_s + age), "event": event, "attempt": name, "process_s": age} | more
            )
            for age, event, more in [*first, *rows]
        ]
        path.write_text("".join(f"{line}\n" for line in lines))
        return path

    def attempt(
        self, began_s: float, ran_s: float, code: int | None, decision: str, **more: object
    ) -> int:
        """One attempt of `ckptctl run`; returns its number."""
        number = len(self.state["attempts"]) + 1
        self.state["attempts"].append(
            {
                "number": number,
                "started_at": iso(began_s),
                "host": "node-1",
                "seconds": float(ran_s),
                "exit_code": code,
                "step": None,
                "inspected": True,
                "progress": False,
                "free": False,
                "left": None,
                "decision": decision,
                "reason": "",
                "cause": None,
                "section": None,
                "ranks": [],
                "nodes": [],
                "allocation": "node-[1-2]",
                "world_size": None,
            }
            | more
        )
        folder = self.root / ".ckptctl" / "supervisor"
        folder.mkdir(exist_ok=True)
        (folder / f"{1:010}.json").write_bytes(as_stored(STATE_SCHEMA, self.state))
        return number

    def history(self) -> ckptctl.RunHistory:
        return ckptctl.run_history(str(self.root))


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "ckpt")


def trained(first: int, last: int, began_s: float, step_s: float = 10, first_s: float = 25):
    """Lines of training: the first step is slow, every tenth is saved and stalls for 4 s."""
    age, stalled, rows = began_s, 0.0, []
    for step in range(first, last + 1):
        age += first_s if step == first else step_s
        if step == first:
            rows.append((age, "progress", {"step": step, "stalled_s": stalled}))
        if step % 10 == 0:
            rows.append((age, "saving", {"step": step, "stalled_s": stalled}))
            age, stalled = age + 4, stalled + 4
            rows.append((age, "saved", {"step": step, "stalled_s": stalled, "took_s": 4}))
    return rows


def test_an_attempt_whose_supervisor_was_killed_has_a_known_cause(made):
    made.attempt(0, 60, None, "restart", reason="its supervisor was killed")
    made.attempt(70, 60, 0, "done")
    printed = run_ckptctl("history", made.root).stdout
    assert "`ckptctl run` was killed, restart" in printed
    assert "unknown cause" not in printed


def test_every_second_of_a_supervised_run_is_in_its_bucket(made):
    # 30 s until trained, 25 + 24 steps of 10 s and 2 saves: step 25 is reached at 30 + 265 + 8.
    # 17 s later it is killed. The launcher begins 5 s before the processes.
    one = made.attempt(-5, 325, 137, "restart", cause="infra-node", nodes=["node-2"])
    made.ledger(0, None, trained(1, 25, 30), number=one)
    two = made.attempt(350, 400, 0, "done")
    end = [(399.0, "ended", {"step": 45, "stalled_s": 12.0, "how": "closed"})]
    made.ledger(351, 20, [*trained(21, 45, 30)[:-1], *trained(21, 45, 30)[-1:], *end], number=two)
    found = made.history()
    first, second = found.attempts
    assert (first.startup_s, first.load_s, first.first_step_s, first.save_s) == pytest.approx(
        (25, 10, 15, 8)
    )
    # Steps 1 to 20 are kept: 10 s each.
    assert first.productive_s == pytest.approx(200)
    assert first.lost_s == pytest.approx(325 - 25 - 10 - 15 - 8 - 200)
    assert (first.restart_s, second.restart_s) == (None, pytest.approx(30))
    assert (first.failed, first.cause, first.nodes, first.kept) == (
        True,
        "infra-node",
        ("node-2",),
        20,
    )
    assert (second.failed, second.lost_s, second.step) == (False, 0, 45)
    whole = found.goodput
    parts = [*vars_of(whole.badput), whole.goodput_s]
    assert sum(parts) == pytest.approx(whole.elapsed_s) == pytest.approx(325 + 30 + 400)
    assert (whole.disruptions, whole.mtbf.failures, whole.max_productive_step) == (1, 1, 45)
    assert whole.mtbf.low_s == pytest.approx(725 / 5.5716, rel=1e-3)
    assert whole.mtbf.high_s == pytest.approx(725 / 0.025318, rel=1e-3)


def vars_of(badput: object) -> list[float]:
    return [value for name in badput.__slots__ if (value := getattr(badput, name)) is not None]


def test_the_ledger_alone_gives_the_same_but_for_the_time_until_the_end(made):
    made.ledger(0, None, trained(1, 25, 30))
    made.ledger(350, 20, trained(21, 39, 30))
    first, second = made.history().attempts
    assert first.productive_s == pytest.approx(200)
    assert first.failed
    assert first.exit_code is None
    assert first.startup_s == pytest.approx(20)
    # The last line of the first is the end of the save of step 20.
    assert second.restart_s == pytest.approx(350 - (30 + 25 + 19 * 10 + 8))
    # The second never ended; what it trained after its last save is lost.
    assert second.kept == 30


def test_the_state_alone_gives_disruptions_and_no_goodput(made):
    made.attempt(0, 100, 1, "restart")
    made.attempt(110, 100, 0, "done")
    found = made.history()
    assert (found.goodput.goodput, found.goodput.disruptions) == (None, 1)
    assert found.goodput.badput.wasted_progress_from_disruption is None
    assert found.goodput.badput.infrastructure_recovery_from_disruption == pytest.approx(10)
    assert "goodput unknown" in found.message


def test_an_attempt_that_never_resumed_is_startup_where_others_keep_ledgers(made):
    made.ledger(0, None, trained(1, 10, 30), number=made.attempt(0, 200, 1, "restart"))
    made.attempt(210, 50, 1, "restart")
    three = made.attempt(270, 200, 0, "done")
    made.ledger(270, 10, trained(11, 20, 30), number=three)
    second = made.history().attempts[1]
    assert (second.startup_s, second.lost_s) == (pytest.approx(50), None)


def test_a_stop_by_a_signal_is_no_failure_and_what_it_had_not_saved_is_lost(made):
    made.ledger(0, None, trained(1, 25, 30), number=made.attempt(0, 325, 143, "stopped"))
    found = made.history()
    assert (found.goodput.mtbf.failures, found.attempts[0].kept) == (0, 20)
    assert found.attempts[0].lost_s > 0
    assert found.goodput.mtbf.mean_s is None
    assert found.goodput.mtbf.low_s == pytest.approx(325 / 3.6889, rel=1e-3)


def test_a_job_that_never_saved_kept_nothing(made):
    made.ledger(0, None, [(60.0, "progress", {"step": 1}), (90.0, "progress", {"step": 4})])
    made.ledger(200, None, [(60.0, "progress", {"step": 1}), (90.0, "progress", {"step": 4})])
    found = made.history()
    assert found.goodput.goodput == 0
    assert found.goodput.max_productive_step == 0
    assert ckptctl.run_history(str(made.root)).attempts[0].lost_s > 0


@pytest.mark.server
def test_a_root_in_a_bucket_gives_the_same_as_one_in_a_folder(made, s3):
    one = made.attempt(-5, 325, 137, "restart", cause="infra-node")
    made.ledger(0, None, trained(1, 25, 30), number=one)
    made.ledger(351, 20, trained(21, 45, 30), number=made.attempt(350, 400, 0, "done"))
    url = s3.upload(made.root, f"history-{made.state['run']}")
    there = ckptctl.run_history(url, storage_options=s3.options)
    assert there.goodput == made.history().goodput
    assert [each.cause for each in there.attempts] == ["infra-node", None]


@pytest.mark.slow
def test_a_thousand_attempts_of_run_and_as_many_ledgers_without_its_name(made):
    for place in range(1000):
        made.ledger(place * 100, place, trained(place + 1, place + 2, 30), startup_s=1, load_s=1)
        made.attempt(place * 100 - 1, 90, 1, "restart")
    found = made.history()
    assert len(found.attempts) == 1000
    assert {each.exit_code for each in found.attempts} == {1}


def test_falling_back_further_loses_what_earlier_attempts_had_trained(made):
    made.ledger(0, None, trained(1, 25, 30))
    made.ledger(400, 20, trained(21, 35, 30))
    made.ledger(800, 10, trained(11, 15, 30))
    first, second, _ = made.history().attempts
    assert (first.kept, first.productive_s) == (10, pytest.approx(100))
    assert second.productive_s == 0


def test_time_after_a_planned_end_is_not_counted(made):
    made.ledger(0, None, trained(1, 10, 30), number=made.attempt(0, 200, 0, "done"))
    later = made.attempt(86_400, 200, 0, "done")
    made.ledger(86_400, 10, trained(11, 20, 30), number=later)
    found = made.history().goodput
    assert (found.disruptions, found.excluded_s) == (0, pytest.approx(86_200))
    assert found.ettr < 0.01 < found.goodput


def test_a_background_save_counts_as_trained_until_it_was_called(made):
    rows = [
        (40.0, "progress", {"step": 1, "stalled_s": 0.0}),
        (130.0, "saving", {"step": 10, "stalled_s": 0.0}),
        # It is done when step 18 is trained.
        (211.0, "saved", {"step": 10, "stalled_s": 1.0, "took_s": 80.0}),
    ]
    made.ledger(0, None, rows)
    made.ledger(300, 10, trained(11, 12, 30))
    first = made.history().attempts[0]
    assert first.productive_s + first.first_step_s == pytest.approx(100)
    assert first.save_s == 1


def test_a_clock_that_jumps_changes_no_duration_and_is_reported(made):
    path = made.ledger(0, None, trained(1, 25, 30))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows[3:]:
        row["at"] = iso(row["process_s"] - 40_000)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    made.ledger(350, 20, trained(21, 25, 30))
    found = made.history()
    assert found.attempts[0].productive_s == pytest.approx(200)
    (warning,) = found.roots[0].warnings
    assert warning.startswith("the clock jumped during 1 of 2 attempts, by up to 40000 s")


def test_two_attempts_at_once_do_not_count_the_same_time_twice(made):
    made.ledger(0, None, trained(1, 45, 30))
    made.ledger(200, 10, trained(11, 40, 30))
    first, second = made.history().attempts
    assert first.seconds == pytest.approx(200)
    assert (first.kept, second.restart_s) == (10, 0)


DAMAGE = {
    "cut short": lambda data: data[: len(data) * 2 // 3],
    "not text": lambda data: b"\xff\xfe\x00" + data,
    "numbers of other types": lambda data: data.replace(
        b'"process_s": 30', b'"process_s": "30"'
    ).replace(b'"step": 2', b'"step": -2'),
    "infinite": lambda data: data.replace(b'"load_s": 10', b'"load_s": 1e999'),
    "times out of bounds": lambda data: data.replace(b'"at": "2025', b'"at": "9999'),
    "nothing": lambda _: b"",
    "lines twice": lambda data: data + data,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_ledger_is_left_out_and_the_others_are_read(made, damage):
    path = made.ledger(0, None, trained(1, 25, 30))
    made.ledger(350, 20, trained(21, 45, 30))
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    found = made.history()
    assert found.attempts[-1].saved == 40
    whole = found.goodput
    assert whole.goodput is not None
    assert sum([*vars_of(whole.badput), whole.goodput_s]) <= whole.elapsed_s * 1.000001


def test_a_damaged_state_is_a_warning(made):
    made.ledger(0, None, trained(1, 25, 30))
    made.attempt(0, 300, 1, "restart")
    for file in (made.root / ".ckptctl" / "supervisor").iterdir():
        file.write_bytes(file.read_bytes()[:-20])
    found = made.history()
    assert "cut short" in found.roots[0].warnings[0] or found.roots[0].warnings
    assert found.attempts[0].exit_code is None


@pytest.mark.slow
def test_three_thousand_attempts_are_read_and_the_table_shows_the_newest(made):
    for place in range(3000):
        made.ledger(place * 100, place, trained(place + 1, place + 2, 30), startup_s=1, load_s=1)
    done = run_ckptctl("history", made.root)
    assert done.returncode == 0
    assert done.stdout.startswith("3,000 attempts in ")
    assert "2,980 earlier attempts: --json has all" in done.stdout
    assert len(done.stdout.splitlines()) < 50


def test_a_fleet_reports_each_root_and_the_exit_code_of_the_one_that_fails(made, tmp_path):
    made.ledger(0, None, trained(1, 25, 30))
    other = tmp_path / "other"
    shutil.copytree(made.root, other)
    gone = tmp_path / "gone" / "root"
    done = run_ckptctl("history", made.root, other, gone)
    with pytest.raises(CkptctlError) as alone:
        ckptctl.run_history(str(gone))
    assert done.returncode == alone.value.exit_code != 0
    assert f"{other}  goodput" in done.stdout
    assert "warning:" in done.stdout
    document = validated(run_ckptctl("history", made.root, other, "--json").stdout)
    assert [each["root"] for each in document["roots"]] == [str(made.root), str(other)]
    assert len(document["attempts"]) == 2
    one, both = document["roots"][0]["goodput"], document["goodput"]
    assert both["goodput_s"] == pytest.approx(2 * one["goodput_s"])


def test_a_root_without_a_record_says_so_and_a_wrong_path_is_an_error(tmp_path):
    (tmp_path / "new").mkdir()
    done = run_ckptctl("history", tmp_path / "new")
    assert (done.returncode, done.stdout.split(":")[0]) == (0, "no attempt is recorded")
    (tmp_path / "file").write_text("")
    assert run_ckptctl("history", tmp_path / "file").returncode == 2


def test_the_answer_fits_80_columns_and_says_the_same_without_colour(made):
    made.ledger(0, None, trained(1, 25, 30), number=made.attempt(0, 325, 137, "restart"))
    two = made.attempt(350, 400, 1, "restart", cause="hang", ranks=[3], nodes=["node-2"])
    made.ledger(350, 20, trained(21, 45, 30), number=two)
    plain = run_ckptctl("history", made.root)
    assert max(map(len, plain.stdout.splitlines()[:-2])) <= 80
    assert "\x1b" not in plain.stdout
    assert "hang (rank 3 and node-2), restart\n" in plain.stdout
    ascii_only = run_ckptctl("history", made.root, env={"PYTHONIOENCODING": "ascii"})
    assert ascii_only.stdout.isascii()
    quiet = run_ckptctl("history", made.root, "-q").stdout
    assert 0 < float(quiet) < 1


def test_the_metrics_are_in_the_form_of_prometheus_and_replaced_as_a_whole(made, tmp_path):
    made.ledger(0, None, trained(1, 25, 30), number=made.attempt(0, 325, 137, "restart"))
    file = tmp_path / "ckptctl.prom"
    file.write_text("# HELP ckptctl_old")
    root = tmp_path / 'a"b\\c'
    shutil.copytree(made.root, root)
    assert run_ckptctl("history", root, "--metrics", file, "-q").returncode == 0
    lines = file.read_text().splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE ")]
    assert len(names) == len(set(names))
    for line in lines:
        if not line.startswith("#"):
            name, _, rest = line.partition("{")
            assert name in names
            labels, _, value = rest.rpartition("} ")
            assert 'a\\"b\\\\c"' in labels
            float(value)
    typed = dict(line.split()[2:4] for line in lines if line.startswith("# TYPE "))
    assert {name for name, kind in typed.items() if kind == "counter"} == {
        name for name in names if name.endswith("_total")
    }
    assert [each.name for each in tmp_path.iterdir() if ".prom" in each.name] == ["ckptctl.prom"]
    broken = run_ckptctl("history", root, "--metrics", tmp_path / "no" / "file")
    assert broken.returncode == 2


@pytest.mark.parametrize("columns", ["1", "2", "3"])
def test_a_terminal_may_be_as_narrow_as_any(made, columns):
    made.attempt(0, 100, 9, "given-up")
    done = run_ckptctl("history", made.root, env={"CKPTCTL_COLUMNS": columns})
    assert done.returncode == 0, done.stderr
