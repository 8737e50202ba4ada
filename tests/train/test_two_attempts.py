"""Two attempts on one root: what the older one may still do, and when the newer one takes over."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from command_line import clean_environment, torch_server
from services.counting_proxy import CountingProxy, Fault
from services.plugin import S3Server

torch = pytest.importorskip("torch")

from one_process import Job, run  # noqa: E402

import ckptctl  # noqa: E402
from ckptctl.errors import CkptctlError, Fenced, ModelDiffers, StateRefused  # noqa: E402
from ckptctl.findings import Verdict  # noqa: E402
from ckptctl.formats.own.ledger import StartedLine  # noqa: E402
from ckptctl.selection.history import check_token, take_token  # noqa: E402
from ckptctl.storage.opening import open_store  # noqa: E402
from ckptctl.train import LossGuard, abandoning, resuming  # noqa: E402
from ckptctl.train.ledger import Ledger, new_attempt  # noqa: E402

pytestmark = [pytest.mark.torch]


class Root:
    """An empty root, and what opens it."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        self.url = url
        self.options = options

    def job(self, **options: Any) -> Job:
        return Job(self.url, **self.options, **options)

    def run(self, last: int, **options: Any) -> Job:
        return run(self.url, last, **self.options, **options)

    def step(self) -> int | None:
        chosen = ckptctl.pick(self.url, grace_s=0.0, **self.options).chosen
        return None if chosen is None else chosen.number

    def verdicts(self) -> dict[str, Verdict]:
        found = ckptctl.scan(self.url, grace_s=0.0, **self.options)
        return {report.url.rpartition("/")[2]: report.verdict for report in found.reports}


@pytest.fixture(
    params=["local", pytest.param("s3_moto", marks=[pytest.mark.server, pytest.mark.slow])]
)
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    if request.param == "local":
        (tmp_path / "run").mkdir()
        return Root(str(tmp_path / "run"), {})
    return in_bucket(request.getfixturevalue(request.param))


def in_bucket(s3: S3Server) -> Root:
    return Root(f"s3://{s3.bucket}/{uuid.uuid4().hex}", {"storage_options": s3.options})


# The older attempt


def before(monkeypatch: pytest.MonkeyPatch, module: Any, name: str, act: Any, *, nth: int = 1):
    """Have `act` done right before the `nth` call of a function."""
    real, n_calls = getattr(module, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        if n_calls == nth:
            act()
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)


def test_an_attempt_that_was_overtaken_while_it_loaded_marks_nothing(root, monkeypatch):
    root.run(6)
    ckptctl.mark(f"{root.url}@6", "rejected", reason="it diverges", **root.options)
    heirs = []
    older = root.job()
    before(monkeypatch, abandoning, "supersede", lambda: heirs.append(root.run(9)))
    with pytest.raises(Fenced, match="took the root over"):
        older.resume()
    assert heirs[0].start.step == 3
    assert root.step() == 9
    assert Verdict.SUPERSEDED not in root.verdicts().values()
    older.die()


def test_an_attempt_that_was_overtaken_between_two_marks_leaves_the_second(root, monkeypatch):
    root.run(9)
    older = root.job()
    # The first two calls are those for the step that is loaded and for the first mark.
    before(monkeypatch, abandoning, "check_token", lambda: root.run(12), nth=2)
    with pytest.raises(Fenced):
        older.resume(3)
    assert root.step() == 12
    older.die()


def test_the_history_states_that_an_attempt_was_overtaken(root):
    older = root.job()
    older.resume()
    root.run(3)
    with pytest.raises(Fenced), older.ckpt:
        older.train(1, 3)
    found = ckptctl.run_history(root.url, **root.options)
    assert [each.cause for each in found.attempts if each.failed] == ["root.fenced"]


def test_steps_that_another_attempt_saves_during_a_load_are_resumed_from(root, monkeypatch):
    root.run(6)
    other = root.job()
    other.resume()
    later = root.job()
    before(monkeypatch, resuming, "read_into", lambda: other.train(7, 12))
    assert later.resume().step == 12
    assert later.start.report["superseded"] == []
    assert set(root.verdicts().values()) == {Verdict.COMPLETE}
    for job in (other, later):
        job.die()


@pytest.mark.parametrize("function", ["take_token", "check_token"])
def test_a_step_that_is_removed_while_it_is_loaded_has_no_newer_one_marked(
    root, monkeypatch, function
):
    root.run(6)
    later = root.job()

    def prune() -> None:
        """For retention step 6 is good, and step 3 is old."""
        found = ckptctl.prune(root.url, 1, apply=True, **root.options)
        assert {decision.number for decision in found.decisions if decision.removed} == {3}

    # The resume calls `check_token` itself once, right before the marks.
    before(monkeypatch, resuming, function, prune)
    with pytest.raises(CkptctlError):
        later.resume(3)
    later.die()
    assert root.step() == 6


def test_a_guard_of_an_attempt_that_was_overtaken_rejects_nothing(root):
    older = root.job()
    older.resume()
    older.train(1, 3)
    code = f"{FINDING}from one_process import run; run({root.url!r}, 6, **{root.options!r})"
    done = torch_server().run(["-c", code], env=clean_environment())
    assert done.returncode == 0, done.stderr
    guard = LossGuard("stop", root=root.url, **root.options)
    verdict = guard.check(4, math.nan)
    assert verdict.stop
    assert verdict.rejected == ()
    assert "took the root over" in verdict.message
    assert root.step() == 6
    older.die()


FINDING = f"import sys; sys.path.insert(1, {str(Path(__file__).parent)!r})\n"


# What the older attempt had on the way


@pytest.mark.server
@pytest.mark.parametrize("resumed_from", ["step 3", "the beginning"])
def test_metadata_that_arrives_late_does_not_bring_the_abandoned_branch_back(
    s3: S3Server, counting_proxy: Callable[[str], CountingProxy], resumed_from: str
):
    root = in_bucket(s3)
    last = 6 if resumed_from == "step 3" else 3
    held, released = threading.Event(), threading.Event()
    proxy = counting_proxy(s3.endpoint)
    proxy.break_request(
        "PUT",
        lambda: (held.set(), released.wait()),
        path=f"/step_{last}.attempt-1/.metadata",
    )
    code = f"""{FINDING}
from one_process import Job
job = Job({root.url!r}, storage_options={s3.options!r}, endpoint_url={proxy.url!r})
job.resume()
job.train(1, {last})
"""
    with process(code) as older:
        while not held.wait(0.1):
            assert older.poll() is None
        older.kill()
        older.wait()
    heir = root.job()
    assert heir.resume().step == last - 3
    assert heir.start.report["superseded"] == [last]
    released.set()
    with open_store(root.url, **root.options) as store:
        while f"step_{last}.attempt-1/.metadata" not in [file.path for file in store.list_tree()]:
            assert not proxy.closing.wait(0.05)
    assert root.verdicts()[f"step_{last}.attempt-1"] is Verdict.SUPERSEDED
    assert root.step() == (3 if last == 6 else None)
    heir.die()
    later = root.run(last)  # the number comes again
    assert later.start.fresh is (last == 3)
    assert root.step() == last
    assert next(iter(root.verdicts())) == f"step_{last}.attempt-3"


def test_an_orphan_on_a_file_system_finds_no_folder_to_publish_in(tmp_path, monkeypatch):
    from ckptctl.train.writer import Writer

    root = Root(str(tmp_path / "run"), {})
    root.run(3)
    orphan, heirs = root.job(), []
    orphan.resume()

    def take_over() -> None:
        heir = root.job()
        heirs.append((heir, heir.resume()))

    # As if the process had been stopped right after its check of the token.
    before(monkeypatch, Writer, "finish", take_over)
    with pytest.raises(Fenced):
        orphan.train(4, 6)
    heir, start = heirs[0]
    assert (start.step, start.report["superseded"]) == (3, [6])
    assert root.verdicts() == {"step_3": Verdict.COMPLETE}
    heir.train(4, 6)
    assert root.step() == 6
    for job in (orphan, heir):
        job.die()


@contextmanager
def process(code: str) -> Iterator[subprocess.Popen[bytes]]:
    running = subprocess.Popen([torch_server().python, "-c", code], env=clean_environment())
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            running.kill()
        running.wait()


# The newer attempt


@pytest.mark.parametrize("why", ["another model", "lost state", "damage", "storage"])
def test_a_job_that_cannot_resume_does_not_end_one_that_trains(root, monkeypatch, why):
    healthy = root.job(forget="scheduler") if why == "lost state" else root.job()
    healthy.resume()
    healthy.train(1, 3)
    newer = root.job(forget="optimizer") if why == "another model" else root.job()
    if why == "another model":
        newer.ckpt._job.parts.model.head = torch.nn.Linear(16, 7)
    errors = {"another model": ModelDiffers, "lost state": StateRefused}
    if why in ("damage", "storage"):
        # What the bytes or the storage do while they are read.
        error = ckptctl.errors.LoadFailed if why == "damage" else ckptctl.errors.StorageUnavailable

        def broken(*args: object) -> None:
            raise error("so it is")

        monkeypatch.setattr(resuming, "read_into", broken)
    with pytest.raises(errors.get(why, CkptctlError)):
        newer.resume()
    monkeypatch.undo()
    healthy.train(4, 6)
    assert root.step() == 6
    for job in (healthy, newer):
        job.die()


@pytest.mark.server
def test_where_a_store_ignores_conditions_one_attempt_alone_holds_a_number(
    s3_moto: S3Server, counting_proxy: Callable[[str], CountingProxy]
):
    root = in_bucket(s3_moto)  # Ceph compares the signature, in which the condition is
    held, released = threading.Event(), threading.Event()
    slow = counting_proxy(s3_moto.endpoint)
    ignoring = counting_proxy(slow.url)
    ignoring.break_request("PUT", Fault.UNCONDITIONAL, lasts=True)
    slow.break_request(
        "PUT", lambda: (held.set(), released.wait()), path="/0000000001.json", lasts=True
    )
    first: list[Any] = []
    with (
        open_store(root.url, **root.options, endpoint_url=ignoring.url) as late,
        open_store(root.url, **root.options) as early,
    ):
        thread = threading.Thread(target=lambda: first.append(take_token(late, lambda _: "late")))
        thread.start()
        assert held.wait()
        token = take_token(early, lambda _: "early")
        assert token.number == 1
        released.set()
        thread.join()
        holders = []
        for store, one in ((late, first[0]), (early, token)):
            with suppress(Fenced):
                check_token(store, one)
                holders.append(one.attempt)
        assert holders == ["late"]


# The order of attempts


def test_attempts_are_in_the_order_of_their_numbers_whatever_the_clocks_say(root):
    with open_store(root.url, **root.options) as store:
        ahead = take_token(store, lambda _: "20991231T235959.999999Z-00000000")
        started = StartedLine(
            token=ahead.number, resume_from=None, world_size=1, cluster=None, supervised=None
        )
        Ledger(store, ahead.attempt).add(started)
    job = root.job()
    start = job.resume()
    assert start.report["previous_attempt"] == ahead.attempt
    assert start.report["attempt"] > ahead.attempt
    later = root.job()
    assert later.resume().report["previous_attempt"] == start.report["attempt"]
    for each in (job, later):
        each.die()


def test_the_name_of_an_attempt_is_the_time_where_the_clocks_agree():
    first = new_attempt()
    assert new_attempt(first) > first
    assert new_attempt("number 3")[:8] == first[:8]
    assert new_attempt("99991231T235959.999999Z-00000000")[:8] == first[:8]
    json.dumps(first)
