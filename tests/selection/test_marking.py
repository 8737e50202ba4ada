"""A mark on a step is obeyed, shown, lifted and never lost, and applies to one save only."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import clean_environment
from services.plugin import S3Server

import ckptctl
from ckptctl import (
    AccessDenied,
    Level,
    Mark,
    MarkKind,
    Report,
    Severity,
    StorageUnavailable,
    UsageError,
    Verdict,
)
from ckptctl.errors import PathNotFound
from ckptctl.formats.own.marks import MARKS_FOLDER, mark_bytes
from ckptctl.inspection.marks import MAX_MARKS
from ckptctl.storage.files import append_line
from ckptctl.storage.local import LocalStore
from ckptctl.storage.opening import open_store

pytestmark = pytest.mark.torch

Copy = Callable[[Path], Path]


@pytest.fixture(params=["in the step", "in a file"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Where marks are kept, as an argument of every function."""
    return {} if request.param == "in the step" else {"marks": str(tmp_path / "marks.jsonl")}


def codes(report: Report) -> list[str]:
    return [finding.code for finding in report.findings]


def said(report: Report, code: str) -> str:
    return next(finding.message for finding in report.findings if finding.code == code)


def saved_anew(step: Path, other: Path) -> None:
    """As a save of other values would leave the step: its own name is in the metadata."""
    for path in other.iterdir():
        shutil.copy2(path, step / path.name)
    metadata = (other / ".metadata").read_bytes()
    assert other.name.encode() in metadata
    (step / ".metadata").write_bytes(metadata.replace(other.name.encode(), step.name.encode()))


def test_pick_passes_over_a_rejected_step_and_says_who_and_why(root, where):
    marked = ckptctl.mark(
        f"{root}@500", "rejected", reason="loss spike", evidence=["run 7"], by="ann", **where
    )
    assert (marked.exit_code, marked.mark.word, marked.number) == (0, MarkKind.REJECTED, 500)
    chosen = ckptctl.pick(str(root), **where)
    assert (chosen.step, chosen.answer.value) == (400, "fell-back")
    over = chosen.passed_over[0]
    assert over.reason == f"rejected: rejected by ann at {marked.mark.at}: loss spike; see run 7"
    report = ckptctl.verify(f"{root}@500", **where)
    assert (report.verdict, report.exit_code) == (Verdict.REJECTED, 27)
    assert ckptctl.scan(str(root), **where).chosen == str(root / "step_400")


def test_a_rejection_is_not_damage(root, where):
    for number in (500, 400, 300):
        ckptctl.mark(f"{root}@{number}", "rejected", reason="spike", **where)
    chosen = ckptctl.pick(str(root), **where)
    assert (chosen.step, chosen.findings) == (200, ())


def test_an_acceptance_lifts_what_stood_and_keeps_it_on_record(root, where):
    for word in ("rejected", "superseded"):
        ckptctl.mark(f"{root}@500", word, reason="spike", **where)
    marked = ckptctl.mark(f"{root}@500", "accepted", reason="the data", by="bob", **where)
    assert {one.word for one in marked.lifted} == {MarkKind.REJECTED, MarkKind.SUPERSEDED}
    report = ckptctl.verify(f"{root}@500", **where)
    assert (report.exit_code, codes(report)) == (0, ["step.accepted"])
    assert "rejected and superseded, and accepted by bob" in said(report, "step.accepted")
    assert ckptctl.pick(str(root), **where).step == 500


def test_a_step_can_be_rejected_again(root, where):
    for word in ("rejected", "accepted", "rejected"):
        ckptctl.mark(f"{root}@500", word, reason="spike", **where)
    assert ckptctl.pick(str(root), **where).step == 400


def test_accepting_what_was_never_rejected_writes_nothing(root, where):
    marked = ckptctl.mark(f"{root}@500", "accepted", **where)
    assert (marked.mark, marked.path, marked.exit_code) == (None, None, 0)
    assert not (root / "step_500" / ".ckptctl").exists()
    assert not any(Path(file).exists() for file in where.values())


def test_a_superseded_step_has_a_verdict_of_its_own(root, where):
    ckptctl.mark(f"{root}@500", MarkKind.SUPERSEDED, reason="resumed from step 400", **where)
    report = ckptctl.verify(f"{root}@500", **where)
    assert (report.verdict, report.exit_code) == (Verdict.SUPERSEDED, 27)
    assert ckptctl.pick(str(root), **where).step == 400


def test_a_pin_is_a_remark_until_it_is_taken_off(root, where):
    ckptctl.mark(f"{root}@500", "pinned", reason="published", **where)
    report = ckptctl.verify(f"{root}@500", **where)
    assert (report.exit_code, codes(report)) == (0, ["step.pinned"])
    ckptctl.mark(f"{root}@500", "unpinned", **where)
    assert ckptctl.verify(f"{root}@500", **where).findings == ()


def test_a_mark_lapses_when_the_step_is_saved_anew(root, where):
    ckptctl.mark(f"{root}@500", "rejected", reason="spike", by="ann", **where)
    saved_anew(root / "step_500", root / "step_400")
    for other in (100, 200, 300):  # beside them, a count of 400 is that of another step
        shutil.rmtree(root / f"step_{other}")
    report = ckptctl.verify(f"{root}@500", **where)
    assert report.exit_code == 0
    assert "an earlier save of this step was rejected by ann" in said(report, "mark.outdated")
    assert ckptctl.pick(str(root), **where).step == 500


def test_a_mark_that_was_copied_with_other_files_does_not_count(root):
    ckptctl.mark(f"{root}@400", "rejected", reason="spike")
    shutil.copytree(root / "step_400" / ".ckptctl", root / "step_500" / ".ckptctl")
    assert ckptctl.pick(str(root)).step == 500


def test_marks_move_with_the_root(root, where):
    ckptctl.mark(f"{root}@500", "rejected", reason="spike", **where)
    moved = root.rename(root.parent / "elsewhere")
    assert ckptctl.pick(str(moved), **where).step == 400


def test_marks_of_other_steps_in_the_same_file_are_not_heard(root, tmp_path):
    marks = str(tmp_path / "marks.jsonl")
    ckptctl.mark(f"{root}@300", "rejected", reason="spike", marks=marks)
    assert ckptctl.verify(f"{root}@500", marks=marks).findings == ()
    assert ckptctl.verify(f"{root}@300", marks=marks).exit_code == 27
    assert ckptctl.verify(f"{root}@300").exit_code == 0


def test_a_step_without_metadata_can_be_marked(root, where):
    (root / "step_500" / ".metadata").unlink()
    ckptctl.mark(f"{root}@500", "rejected", reason="cut off", **where)
    report = ckptctl.verify(f"{root}@500", **where)
    assert (report.verdict, report.exit_code) == (Verdict.INCOMPLETE, 20)
    assert "step.rejected" in codes(report)
    shutil.copy2(root / "step_400" / ".metadata", root / "step_500" / ".metadata")
    assert "mark.outdated" in codes(ckptctl.verify(f"{root}@500", **where))


def test_a_mark_makes_no_old_save_look_young(root):
    (root / "step_500" / ".metadata").unlink()
    ckptctl.mark(f"{root}@500", "rejected", reason="cut off")
    assert ckptctl.verify(f"{root}@500").verdict is Verdict.INCOMPLETE


def test_nothing_else_in_the_step_is_touched(root):
    before = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    marked = ckptctl.mark(f"{root}@500", "rejected", reason="spike")
    after = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}
    assert set(after) - set(before) == {Path(marked.path)}
    assert {path: after[path] for path in before} == before


def test_auto_heeds_the_file_of_marks(root, tmp_path):
    marks = str(tmp_path / "marks.jsonl")
    ckptctl.mark(f"{root}@500", "rejected", reason="spike", marks=marks)
    assert ckptctl.verify(f"{root}@auto", marks=marks).number == 400


# Two writers at once.

WRITER = """
import sys, ckptctl
root, marks, name = sys.argv[1:]
where = {"marks": marks} if marks else {}
for n in range(10):
    ckptctl.mark(f"{root}@500", "rejected", reason=f"{name} {n}", by=name, **where)
"""


def test_two_processes_that_mark_at_once_lose_nothing(root, where):
    names = ("ann", "bob")
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(root), where.get("marks", ""), name],
            env=clean_environment(),
        )
        for name in names
    ]
    assert [writer.wait(60) for writer in writers] == [0, 0]
    report = ckptctl.verify(f"{root}@500", **where)
    reasons = {f.message.rpartition(": ")[2] for f in report.findings}
    assert reasons == {f"{name} {n}" for name in names for n in range(10)}
    assert set(codes(report)) == {"step.rejected"}


def test_a_rejection_that_an_acceptance_did_not_see_stands(root, where):
    first = ckptctl.mark(f"{root}@500", "rejected", reason="spike", **where)
    accepted = ckptctl.mark(f"{root}@500", "accepted", reason="the data", **where)
    # Written by somebody whose clock is a day behind.
    late = Mark(
        id="20200101T000000Z-rejected-00",
        word=MarkKind.REJECTED,
        by="bob",
        at="2020-01-01T00:00:00Z",
        reason="NaN",
        url=first.mark.url,
        number=500,
        metadata=first.mark.metadata,
    )
    if where:
        append_line(where["marks"], mark_bytes(late))
    else:
        LocalStore(str(root)).put(f"step_500/{MARKS_FOLDER}/{late.id}.json", mark_bytes(late))
    assert [one.id for one in accepted.lifted] == [first.mark.id]
    assert ckptctl.pick(str(root), **where).step == 400


# Marks that are wrong.


DAMAGED: dict[str, Callable[[Path], object]] = {
    "cut short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "enormous": lambda path: os.truncate(path, 1 << 40),
    "a flipped bit": lambda path: path.write_bytes(path.read_bytes().replace(b"spike", b"spikf")),
    "a link": lambda path: (path.rename(path.parent / "x"), path.symlink_to("x")),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "not text": lambda path: path.write_bytes(b"\x80\x04\x95"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_mark_is_a_warning_and_the_others_count(root, name):
    for step in (500, 400):
        damaged = ckptctl.mark(f"{root}@{step}", "pinned", reason="spike")
        DAMAGED[name](Path(damaged.path))
    ckptctl.mark(f"{root}@400", "rejected", reason="another")
    report = ckptctl.verify(f"{root}@500")
    assert (report.exit_code, codes(report)) == (0, ["mark.damaged"])
    assert codes(ckptctl.verify(f"{root}@400")) == ["step.rejected", "mark.damaged"]


@pytest.mark.parametrize("word", ["rejected", "superseded"])
@pytest.mark.parametrize("name", DAMAGED)
def test_a_rejection_that_is_damaged_still_counts_and_can_be_lifted(root, name, word):
    damaged = ckptctl.mark(f"{root}@500", word, reason="spike")
    DAMAGED[name](Path(damaged.path))
    report = ckptctl.verify(f"{root}@500")
    assert (report.exit_code, codes(report)) == (27, [f"step.{word}", "mark.damaged"])
    assert ckptctl.pick(str(root)).step == 400
    lifted = ckptctl.mark(f"{root}@500", "accepted", reason="the data was bad")
    assert [one.id for one in lifted.lifted] == [damaged.mark.id]
    assert ckptctl.pick(str(root)).step == 500


def test_marks_beyond_the_bound_are_reported_and_not_read(root):
    folder = root / "step_500" / MARKS_FOLDER
    ckptctl.mark(f"{root}@500", "pinned", reason="release")
    for number in range(MAX_MARKS):
        (folder / f"99990101T000000Z-pinned-{number:04}.json").write_bytes(b"{}")
    report = ckptctl.verify(f"{root}@500")
    assert set(codes(report)) == {"mark.damaged"}


@pytest.mark.parametrize("later", ["pinned", "accepted", "superseded"])
def test_a_rejection_is_not_forgotten_behind_later_marks(root, later):
    folder = root / "step_500" / MARKS_FOLDER
    rejected = ckptctl.mark(f"{root}@500", "rejected", reason="spike")
    kept = Path(rejected.path).read_bytes()
    for number in range(2 * MAX_MARKS):
        (folder / f"99990101T000000Z-{later}-{number:04}.json").write_bytes(kept)
    assert "step.rejected" in codes(ckptctl.verify(f"{root}@500"))
    assert ckptctl.pick(str(root)).step == 400


@pytest.mark.parametrize("line", [b"{", b"\x00" * 50, b"[]", b'{"schema":"ckptctl.mark/2"}'])
def test_a_damaged_line_of_a_file_of_marks_is_an_error_for_every_step(root, tmp_path, line):
    marks = tmp_path / "marks.jsonl"
    ckptctl.mark(f"{root}@500", "rejected", reason="spike", marks=str(marks))
    marks.write_bytes(marks.read_bytes() + line + b"\n\n")
    for decide in (ckptctl.verify, ckptctl.pick):
        with pytest.raises(UsageError, match="line 2 is not a mark") as raised:
            decide(f"{root}@400" if decide is ckptctl.verify else str(root), marks=str(marks))
        assert raised.value.next_command == f"sed -n 2p {marks}"


def test_a_rejection_that_a_crash_cut_short_is_not_passed_over(root, tmp_path):
    marks = tmp_path / "marks.jsonl"
    ckptctl.mark(f"{root}@500", "rejected", reason="spike", marks=str(marks))
    os.truncate(marks, marks.stat().st_size - 7)
    with pytest.raises(UsageError, match="line 1 is not a mark"):
        ckptctl.pick(str(root), marks=str(marks))


def test_a_mark_begins_a_line_of_its_own_behind_one_that_was_cut_short(tmp_path):
    marks = tmp_path / "marks.jsonl"
    marks.write_bytes(b"{")
    append_line(str(marks), b"{}\n")
    assert marks.read_bytes() == b"{\n{}\n"


def test_a_file_of_marks_that_cannot_be_read_is_an_error(root, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match="cannot be read"):
            ckptctl.pick(str(root), marks=str(path))
    missing = tmp_path / "missing" / "marks.jsonl"
    with pytest.raises(PathNotFound):
        ckptctl.mark(f"{root}@500", "rejected", reason="spike", marks=str(missing))


# Arguments, and storages.


def test_what_no_mark_can_say_is_refused(root):
    for word, how in (
        ("doubted", {}),
        ("rejected", {}),
        ("rejected", {"reason": "  "}),
        ("pinned", {"reason": "x" * 5000}),
        ("pinned", {"evidence": ["x"] * 33}),
    ):
        with pytest.raises(UsageError):
            ckptctl.mark(f"{root}@500", word, **how)
    assert not (root / "step_500" / ".ckptctl").exists()


def test_no_mark_is_put_on_what_could_not_be_looked_at(root, monkeypatch):
    class Silent(LocalStore):
        def read(self, path: str, *, limit: int) -> bytes:
            raise StorageUnavailable("no answer")

    monkeypatch.setattr("ckptctl.storage.opening.LocalStore", Silent)
    with pytest.raises(StorageUnavailable, match="no mark was written"):
        ckptctl.mark(f"{root}@500", "rejected", reason="spike")
    assert not (root / "step_500" / ".ckptctl").exists()


def test_a_step_that_is_one_file_is_marked_beside_it(root, tmp_path):
    (root / "step_600.pt").write_bytes(b"of no format" * 9)
    made = ckptctl.mark(f"{root}/step_600.pt", "rejected", reason="spike")
    assert str(made.path).startswith(f"{root}/.ckptctl/steps/step_600.pt/marks/")
    assert "step.rejected" in codes(ckptctl.verify(f"{root}@600"))
    where = {"marks": str(tmp_path / "marks.jsonl")}
    ckptctl.mark(f"{root}/step_600.pt", "accepted", **where)
    assert "step.rejected" not in codes(ckptctl.verify(f"{root}@600", **where))


def test_no_marks_cost_no_request(root, monkeypatch):
    reads: list[str] = []

    class Counting(LocalStore):
        def read(self, path: str, *, limit: int) -> bytes:
            reads.append(path)
            return super().read(path, limit=limit)

    monkeypatch.setattr("ckptctl.storage.opening.LocalStore", Counting)
    ckptctl.verify(f"{root}@500", level=Level.LISTING)
    assert reads == ["step_500/.metadata"]


@pytest.mark.server
@pytest.mark.parametrize("server_name", ["s3_moto", "s3_ceph"])
def test_a_step_in_an_object_store_is_rejected_and_accepted(request, root, server_name):
    server: S3Server = request.getfixturevalue(server_name)
    url = f"s3://{server.bucket}/{uuid.uuid4().hex}"
    how = {"storage_options": server.options}
    with open_store(url, **how) as store:
        for path in sorted(root.glob("step_[45]00/*")):
            store.put(str(path.relative_to(root)), path.read_bytes())
    marked = ckptctl.mark(f"{url}@500", "rejected", reason="spike", **how)
    assert marked.path.startswith(f"{url}/step_500/{MARKS_FOLDER}/")
    assert ckptctl.pick(url, **how).step == 400
    assert [r.exit_code for r in ckptctl.scan(url, **how).reports] == [27, 0]
    ckptctl.mark(f"{url}@500", "accepted", reason="the data", **how)
    assert ckptctl.pick(url, **how).step == 500


class ReadOnly(LocalStore):
    """A folder on a file system that was mounted to be read."""

    def put(self, path: str, data: bytes, *, replace: bool = False) -> None:
        raise AccessDenied(f"{self.url}/{path}: Read-only file system")


def test_a_read_only_root_says_where_marks_can_go_and_obeys_them_there(root, tmp_path, monkeypatch):
    monkeypatch.setattr("ckptctl.storage.opening.LocalStore", ReadOnly)
    with pytest.raises(AccessDenied) as refused:
        ckptctl.mark(f"{root}@500", "rejected", reason="spike")
    assert "--marks" in refused.value.next_command
    with pytest.raises(AccessDenied, match="the seal was not written"):
        ckptctl.seal(f"{root}@500")
    marks = str(tmp_path / "marks.jsonl")
    ckptctl.mark(f"{root}@500", "rejected", reason="spike", marks=marks)
    assert ckptctl.pick(str(root), marks=marks).step == 400


def test_marks_and_seals_go_together(root):
    ckptctl.mark(f"{root}@500", "pinned", reason="published")
    assert ckptctl.seal(f"{root}@500").exit_code == 0
    ckptctl.mark(f"{root}@500", "rejected", reason="spike")
    report = ckptctl.verify(f"{root}@500", level=Level.STRUCTURE, require_seal=True)
    assert (report.exit_code, codes(report)) == (27, ["step.rejected", "step.pinned"])
    assert report.with_severity(Severity.WARNING) == ()
    assert ckptctl.seal(f"{root}@400").exit_code == 0
    assert ckptctl.seal(f"{root}@500", replace=True).exit_code == 27
