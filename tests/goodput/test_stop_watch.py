"""The record of a real training that was killed twice agrees with a stop-watch in the job.

The stop-watch is pressed before and after each thing that the record times, so that it gives
bounds for each duration however busy the machine is. Times between them are compared within 5 %,
or the resolution of the record: 0.1 s for each line that a duration is made of.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from command_line import COMMAND, clean_environment

import ckptctl

pytestmark = [pytest.mark.torch, pytest.mark.slow]

JOB = Path(__file__).parent / "timed_job.py"
RESOLUTION_S = 0.1


@pytest.fixture(scope="module")
def drill(tmp_path_factory: pytest.TempPathFactory):
    """The root of a run that was killed after steps 7 and 14, its stop-watch, and when it ran."""
    folder = tmp_path_factory.mktemp("drill")
    began_s = time.monotonic()
    words = [*COMMAND, "run", "--root", "ckpt", "--create", "--backoff", "2", "--"]
    job = [sys.executable, JOB, "ckpt", "watch", "7,14"]
    done = subprocess.run(
        [*words, *job], cwd=folder, env=clean_environment(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr
    watch: dict[int, list[tuple[str, int, float]]] = defaultdict(list)
    for line in (folder / "watch").read_text().splitlines():
        attempt, event, step, seconds = line.split()
        watch[int(attempt)].append((event, int(step), float(seconds)))
    return folder / "ckpt", watch, (began_s, time.monotonic())


def at(pressed: list[tuple[str, int, float]], event: str, step: int | None = None) -> float:
    return next(s for name, n, s in pressed if name == event and step in (None, n))


def agree(recorded: float | None, low_s: float, high_s: float, n_lines: int = 2) -> None:
    """Fail unless the record lies within the bounds of the stop-watch, 5 % and its resolution."""
    assert recorded is not None
    slack_s = n_lines * RESOLUTION_S
    assert low_s - max(0.05 * low_s, slack_s) <= recorded <= high_s + max(0.05 * high_s, slack_s)


def test_each_time_of_the_record_agrees_with_the_stop_watch(drill):
    root, watch, (began_s, ended_s) = drill
    found = ckptctl.run_history(str(root))
    assert [each.exit_code for each in found.attempts] == [137, 137, 0]
    before_s = began_s
    for number, attempt in enumerate(found.attempts):
        pressed = watch[number]
        saves = [
            (at(pressed, "save", n), at(pressed, "saved", n)) for e, n, _ in pressed if e == "saved"
        ]
        stalled_s = sum(after - before for before, after in saves)
        # The launcher starts the process after the attempt before has ended.
        agree(
            attempt.startup_s,
            at(pressed, "resume") - at(pressed, "process"),
            at(pressed, "resume") - before_s,
        )
        agree(
            attempt.load_s,
            at(pressed, "resumed") - at(pressed, "resume"),
            at(pressed, "resumed") - at(pressed, "resume"),
        )
        agree(attempt.save_s, stalled_s, stalled_s, 2 * len(saves))
        before_s = at(pressed, "end")
    # The pause of two seconds, and what `run` needs to notice and to inspect.
    for one, two, attempt in ((0, 1, found.attempts[1]), (1, 2, found.attempts[2])):
        agree(attempt.restart_s, 2, at(watch[two], "process") - at(watch[one], "end"))
    agree(found.goodput.elapsed_s, at(watch[2], "end") - at(watch[0], "process"), ended_s - began_s)


def test_kept_and_lost_training_agree_with_the_stop_watch(drill):
    root, watch, _ = drill
    found = ckptctl.run_history(str(root))
    for number, kept in ((0, 4), (1, 12)):
        attempt, pressed = found.attempts[number], watch[number]
        assert attempt.kept == kept
        start = at(pressed, "resumed")
        stalls = [
            (at(pressed, "save", n), at(pressed, "saved", n))
            for event, n, _ in pressed
            if event == "saved"
        ]
        trained_s = at(pressed, "save", kept) - start
        trained_s -= sum(
            after - before for before, after in stalls if after < at(pressed, "save", kept)
        )
        agree(attempt.productive_s + attempt.first_step_s, trained_s, trained_s, 2 * len(stalls))
        lost_s = at(pressed, "end") - at(pressed, "saved", kept)
        ended = max(at(pressed, "end"), at(watch[number + 1], "process") - 2)
        agree(attempt.lost_s, lost_s, ended - at(pressed, "saved", kept))


def test_the_cost_needs_no_number_and_states_how_certain_it_is(drill):
    root, watch, _ = drill
    found = ckptctl.recovery_cost(str(root))
    given = {each.name: each for each in found.given}
    assert found.unknown == ()
    assert {given[name].source for name in ("interval", "save", "mtbf", "load", "lost")} == {
        "recorded"
    }
    assert (given["mtbf"].n, given["save"].n) == (2, 4)
    assert given["mtbf"].low < given["mtbf"].value < given["mtbf"].high
    assert found.share_low < found.share < found.share_high
    lost = [at(watch[n], "end") - at(watch[n], "saved", kept) for n, kept in ((0, 4), (1, 12))]
    assert found.rollback_s >= sum(lost) / 2 - 2 * RESOLUTION_S
    typed = ckptctl.recovery_cost(str(root), mtbf_s=3600, load_s=7)
    sources = {each.name: (each.value, each.source) for each in typed.given}
    assert sources["mtbf"] == (3600, "given")
    assert sources["load"] == (7, "given")
    assert sources["save"][1] == "recorded"
