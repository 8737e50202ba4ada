"""Everything that ckptctl writes, and what must hold after a power cut at any moment.

Each writer is a call of the library on a root with steps 2, 4, 6 and 8. The truth about
a step is found without ckptctl: by its bytes, or by what stock torch loads from it.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ckptctl
from ckptctl.errors import NothingToResume, UsageError
from ckptctl.formats.own.marks import MarkKind, in_force, parse_mark
from ckptctl.formats.own.run_events import BeganEvent, DecidedEvent, Event, OpenedEvent
from ckptctl.runbook import record
from ckptctl.storage.opening import open_store

STEPS = (2, 4, 6, 8)
OLD_S = 1.7e9
"""When all steps were saved, in seconds since 1970: none of them is in flight."""

OWN = ".ckptctl"


def make_base(folder: Path) -> None:
    """The root `run` that all begin with: four sealed steps, saved by one process."""
    from one_process import Job

    job = Job(folder / "run")
    job.resume()
    job.train(1, 8, save_every=2)
    job.die()
    for path in folder.rglob("*"):
        os.utime(path, (OLD_S, OLD_S))


def one_life(root: Path, last: int, **options: Any) -> Any:
    """A job that resumed, and trained up to a step without a save."""
    from one_process import Job

    job = Job(root, **options)
    start = job.resume()
    job.train(start.step + 1, last, save_every=100)
    return job


class Writer:
    """A writer of ckptctl. `kept` are the steps that it must not touch.

    `disk` is the folder on which the power goes; the root in it is `run`, and `base` is the
    same root elsewhere, as it was.
    """

    name = ""
    kept: tuple[int, ...] = STEPS

    def __init__(self, base: Path) -> None:
        self.base = base / "run"

    def prepare(self, disk: Path) -> None:
        """Prepare the disk for the writer."""
        shutil.copytree(self.base, disk / "run")

    def ready(self, disk: Path) -> Any:
        """Run what precedes the watched writes in the writing process."""

    def write(self, disk: Path, ready: Any) -> None:
        """Write."""
        raise NotImplementedError

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        """The faults after the cut; `returned` states that the call had returned."""
        raise NotImplementedError

    def judged(self, disk: Path, *, returned: bool) -> Iterator[str]:
        """The same, and whether the writer left all else unchanged."""
        for step in self.kept:
            if files(disk / f"run/step_{step}") != files(self.base / f"step_{step}"):
                yield f"step {step} is not what it was"
        yield from self.judge(disk, returned=returned)

    def again(self, disk: Path) -> None:
        """What a user does next in this state."""
        self.write(disk, self.ready(disk))


def files(folder: Path) -> dict[str, bytes]:
    """A step without the files of ckptctl."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and OWN not in path.relative_to(folder).parts
    }


def picked(root: Path, **options: Any) -> int | None:
    """The step that `pick` takes; None where it finds none at all."""
    try:
        return ckptctl.pick(str(root), grace_s=0.0, **options).step
    except NothingToResume as error:
        if error.exit_code != 10:
            raise
        return None


def refused(root: Path) -> int:
    """The exit code with which `pick` finds none; 0 where it takes one."""
    try:
        return ckptctl.pick(str(root), grace_s=0.0).exit_code
    except NothingToResume as error:
        return error.exit_code


def ends_in_a_line(root: Path) -> bool:
    """Whether the power went within a line of a ledger after the first, which comes whole."""
    for ledger in root.glob(f"{OWN}/attempts/*.jsonl"):
        first, *others = ledger.read_bytes().splitlines(keepends=True)
        json.loads(first)
        if any(not line.endswith(b"}\n") or b"\0" in line for line in others):
            return True
    return False


def proven(step: Path) -> bool:
    """Whether a seal proves the step, by every byte."""
    return ckptctl.verify(str(step), level="content", require_seal=True).exit_code == 0


def loads_as(step: Path, other: Path) -> bool:
    """Whether stock torch loads the same tensors from both."""
    import torch

    loaded, wanted = stock_load(step), stock_load(other)
    return (
        loaded is not None
        and wanted is not None
        and set(loaded) == set(wanted)
        and all(torch.equal(loaded[name], tensor) for name, tensor in wanted.items())
    )


def stock_load(step: Path) -> dict[str, Any] | None:
    """All tensors of a step, or None where torch cannot read them."""
    import warnings

    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.api import CheckpointException

    if not (step / ".metadata").exists():
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            entries = FileSystemReader(step).read_metadata().state_dict_metadata
            state = {
                name: torch.empty(entry.size, dtype=entry.properties.dtype)
                for name, entry in entries.items()
                if hasattr(entry, "chunks")
            }
            dcp.load(state, storage_reader=FileSystemReader(step), no_dist=True)
        except (Exception, CheckpointException):  # noqa: BLE001 - whatever torch makes of damage
            return None
    return state


class Seal(Writer):
    """A first seal."""

    name = "seal"

    def prepare(self, disk: Path) -> None:
        super().prepare(disk)
        (disk / f"run/step_8/{OWN}/seal.json").unlink()

    def write(self, disk: Path, ready: Any) -> None:
        ckptctl.seal(str(disk / "run/step_8"), replace=True)

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        there = (disk / f"run/step_8/{OWN}/seal.json").exists()
        if returned and not there:
            yield "the seal is gone"
        if there and not proven(disk / "run/step_8"):
            yield "there is a seal that proves nothing"
        if picked(disk / "run") != 8:
            yield "the step is not taken"


class SealAnew(Seal):
    """A seal in the place of another."""

    name = "seal, in the place of another"

    def prepare(self, disk: Path) -> None:
        Writer.prepare(self, disk)

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        yield from super().judge(disk, returned=True)


class Reject(Writer):
    """A mark in the step."""

    name = "reject"
    word = MarkKind.REJECTED
    takes = (6, 8)  # with the word, and without it

    def write(self, disk: Path, ready: Any) -> None:
        ckptctl.mark(str(disk / "run/step_8"), self.word, reason="a spike")

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        words = self.words(disk)
        if returned and self.word not in words:
            yield "the mark is gone"
        takes = self.takes[0 if self.word in words else 1]
        if picked(disk / "run") != takes:
            yield f"{picked(disk / 'run')} is taken, and not {takes}"

    def words(self, disk: Path) -> set[MarkKind]:
        """The marks of the step. Raises for a file that is no mark."""
        written = (disk / f"run/step_8/{OWN}/marks").glob("*.json")
        return {mark.word for mark in in_force(parse_mark(path.read_bytes()) for path in written)}


class Accept(Reject):
    """A mark that lifts another."""

    name = "accept"
    word = MarkKind.ACCEPTED
    takes = (8, 6)

    def prepare(self, disk: Path) -> None:
        super().prepare(disk)
        ckptctl.mark(str(disk / "run/step_8"), MarkKind.REJECTED, reason="a spike")

    def words(self, disk: Path) -> set[MarkKind]:
        return set() if MarkKind.REJECTED in super().words(disk) else {MarkKind.ACCEPTED}


class Pin(Reject):
    """A mark that changes nothing for `pick`."""

    name = "pin"
    word = MarkKind.PINNED
    takes = (8, 8)


class RejectInFile(Writer):
    """A line at the end of a file of marks."""

    name = "reject --marks FILE"

    def prepare(self, disk: Path) -> None:
        super().prepare(disk)
        ckptctl.mark(
            str(disk / "run/step_4"), MarkKind.REJECTED, reason="x", marks=str(disk / "marks.jsonl")
        )

    def write(self, disk: Path, ready: Any) -> None:
        marks = str(disk / "marks.jsonl")
        ckptctl.mark(str(disk / "run/step_8"), MarkKind.REJECTED, reason="a spike", marks=marks)

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        first, *others = (disk / "marks.jsonl").read_bytes().splitlines()
        if parse_mark(first).number != 4:
            yield "the mark before it is not what it was"
        said = any(line.endswith(b"}") for line in others)
        if returned and not said:
            yield "the mark is gone"
        marks = str(disk / "marks.jsonl")
        if others and not said:
            # The line may be a rejection of any step: a person decides.
            try:
                yield f"a line was cut short, and {picked(disk / 'run', marks=marks)} is taken"
            except UsageError as error:
                if "line 2 is not a mark" not in error.message:
                    yield error.message
            return
        takes = 6 if said else 8
        taken = picked(disk / "run", marks=marks)
        if taken != takes:
            yield f"{taken} is taken, and not {takes}"

    def again(self, disk: Path) -> None:
        """Delete the line that was cut short, as the error says, and reject the step again."""
        marks = disk / "marks.jsonl"
        lines = marks.read_bytes().splitlines(keepends=True)
        marks.write_bytes(b"".join(line for line in lines if line.rstrip().endswith(b"}")))
        super().again(disk)


class Prune(Writer):
    """Steps that are removed."""

    name = "prune --apply"
    kept = (6, 8)

    def write(self, disk: Path, ready: Any) -> None:
        ckptctl.prune(str(disk / "run"), 2, apply=True)

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        if picked(disk / "run") != 8:
            yield "the newest step is not taken"
        for step in (2, 4):
            folder = disk / f"run/step_{step}"
            if returned and folder.exists():
                yield f"step {step} is back"
            whole = files(folder) == files(self.base / f"step_{step}")
            usable = folder.exists() and ckptctl.verify(str(folder), grace_s=0.0).exit_code == 0
            if usable and not whole:
                yield f"step {step} is half removed, and passes for whole"


class Reshard(Writer):
    """A new step, written aside and renamed."""

    name = "reshard --apply"

    def write(self, disk: Path, ready: Any) -> None:
        ckptctl.reshard(str(disk / "run/step_8"), str(disk / "other/step_8"), world_size=2)

    def prepare(self, disk: Path) -> None:
        super().prepare(disk)
        (disk / "other").mkdir()

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        step = disk / "other/step_8"
        if returned and not step.exists():
            yield "the new step is gone"
        if step.exists() and not proven(step):
            yield "there is a new step that nothing proves"
        if step.exists() and not loads_as(step, self.base / "step_8"):
            yield "the new step holds other values"
        takes = 8 if step.exists() else None
        if picked(disk / "other") != takes:
            yield f"{picked(disk / 'other')} is taken of the new root, and not {takes}"

    def again(self, disk: Path) -> None:
        if not (disk / "other/step_8").exists():
            super().again(disk)


class Export(Writer):
    """A step as safetensors."""

    name = "convert, to safetensors"

    def __init__(self, base: Path) -> None:
        super().__init__(base)
        self.wanted = base / "flat"
        if not self.wanted.exists():
            self.convert(self.base / "step_8", self.wanted)

    def convert(self, step: Path, target: Path) -> None:
        ckptctl.convert(str(step), str(target), only_model=True)

    def write(self, disk: Path, ready: Any) -> None:
        self.convert(disk / "run/step_8", disk / "flat")

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        there = (disk / "flat").exists()
        if returned and not there:
            yield "what was written is gone"
        if there and files(disk / "flat") != files(self.wanted):
            yield "what was written is not whole"

    def again(self, disk: Path) -> None:
        if not (disk / "flat").exists():
            super().again(disk)


class Import(Export):
    """A file of torch.save as a step."""

    name = "convert, from a file of torch.save"

    def __init__(self, base: Path) -> None:
        self.file = base / "model.pt"
        Writer.__init__(self, base)
        self.wanted = base / "imported/step_8"
        if not self.file.exists():
            import torch
            from small_job import build

            torch.save(build().state_dict(), self.file)
            self.wanted.parent.mkdir()
            self.convert(self.file, self.wanted)

    def convert(self, step: Path, target: Path) -> None:
        ckptctl.convert(str(step), str(target), world_size=2)

    def prepare(self, disk: Path) -> None:
        super().prepare(disk)
        (disk / "imported").mkdir()

    def write(self, disk: Path, ready: Any) -> None:
        self.convert(self.file, disk / "imported/step_8")

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        step = disk / "imported/step_8"
        if returned and not step.exists():
            yield "the new step is gone"
        if step.exists() and not (proven(step) and loads_as(step, self.wanted)):
            yield "there is a new step that is not whole"

    def again(self, disk: Path) -> None:
        if not (disk / "imported/step_8").exists():
            Writer.again(self, disk)


class Resume(Writer):
    """Sentinel, fence, record, marks on what is superseded, and the report."""

    name = "resume"
    takes: int | None = 6

    def prepare(self, disk: Path) -> None:
        super().prepare(disk)
        for folder in ("attempts", "fence"):
            shutil.rmtree(disk / f"run/{OWN}/{folder}")
        (disk / f"run/{OWN}/root.json").unlink()
        (disk / f"run/{OWN}").rmdir()
        ckptctl.mark(str(disk / "run/step_8"), MarkKind.REJECTED, reason="a spike")

    def ready(self, disk: Path) -> Any:
        from one_process import Job

        return Job(disk / "run")

    def write(self, disk: Path, ready: Any) -> None:
        ready.resume()

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        if picked(disk / "run") != self.takes:
            yield f"{picked(disk / 'run')} is taken, and not {self.takes}"
        own = disk / f"run/{OWN}"
        for path in (own / "root.json", *own.glob("fence/*.json"), *own.glob("attempts/*.json")):
            if path.exists():
                json.loads(path.read_bytes())
            elif returned:
                yield f"{path.name} is gone"
        if not returned:
            return
        n_each = [len(list(own.glob(each))) for each in ("fence/*.json", "attempts/*.resume.json")]
        if 0 in n_each:
            yield "the fence or the report is gone"
        # An attempt that the power ended before has a record that just ends.
        newest = max(own.glob("attempts/*.jsonl"), default=None)
        lines = newest.read_bytes().splitlines() if newest else []
        events = [json.loads(line)["event"] for line in lines]
        if events[:1] + events[-1:] != ["started", "resumed"]:
            yield f"the record says {events}"


class ResumeFresh(Resume):
    """The first start of a job, in a root that was not there."""

    name = "resume, in an empty root"
    kept = ()
    takes = None
    _is_refused = False

    def prepare(self, disk: Path) -> None:
        pass

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        if not (disk / "run").exists():
            if returned:
                yield "the root is gone"
            return
        if ends_in_a_line(disk / "run") and (self._is_refused or not returned):
            # The line may have been that of a save: a person decides.
            if refused(disk / "run") != 11:
                yield "a root with half a line in its ledger is not refused"
            return
        yield from super().judge(disk, returned=returned)

    def again(self, disk: Path) -> None:
        self._is_refused = ends_in_a_line(disk / "run")
        if not self._is_refused:
            super().again(disk)


class Save(Writer):
    """A step of a training job."""

    name = "save"
    kept = (2, 4, 6)
    keep: int | None = None

    def prepare(self, disk: Path) -> None:
        super().prepare(disk)
        shutil.rmtree(disk / "run/step_8")

    def ready(self, disk: Path) -> Any:
        return one_life(disk / "run", last=8, keep=self.keep)

    def write(self, disk: Path, ready: Any) -> None:
        ready.ckpt.save(8)

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        step = disk / "run/step_8"
        whole = loads_as(step, self.base / "step_8")
        if returned and not (whole and proven(step)):
            yield "the step that was saved is not there, whole and sealed"
        takes = 8 if whole else 6
        if picked(disk / "run") != takes:
            yield f"{picked(disk / 'run')} is taken, and not {takes}"
        if (step / OWN / "seal.json").exists() and not proven(step):
            yield "there is a seal that proves nothing"

    def again(self, disk: Path) -> None:
        from one_process import Job

        job = Job(disk / "run", keep=self.keep)
        start = job.resume()
        if start.step == 8:
            if not proven(disk / "run/step_8"):
                ckptctl.seal(str(disk / "run/step_8"), replace=True)
            return
        job.train(start.step + 1, 8, save_every=8)


class SaveOver(Save):
    """The same, where an earlier save was interrupted."""

    name = "save, where one was interrupted"

    def prepare(self, disk: Path) -> None:
        Writer.prepare(self, disk)
        for written_last in (".metadata", f"{OWN}/seal.json"):
            (disk / "run/step_8" / written_last).unlink()


class SaveBeside(Save):
    """The same, beside the training."""

    name = "save_async"

    def write(self, disk: Path, ready: Any) -> None:
        ready.ckpt.save_async(8)
        ready.ckpt.flush()


class SaveAndKeep(Save):
    """The same, with older steps that go."""

    name = "save, keep=2"
    kept = (6,)
    keep = 2

    def write(self, disk: Path, ready: Any) -> None:
        ready.ckpt.save(8)
        ready.ckpt.flush()  # older steps are removed beside the training

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        yield from super().judge(disk, returned=returned)
        if returned and any((disk / f"run/step_{step}").exists() for step in (2, 4)):
            yield "older steps are back"
        if picked(disk / "run", skip=(8,)) != 6:
            yield "step 6 is not taken where 8 is left out"

    def again(self, disk: Path) -> None:
        super().again(disk)
        ckptctl.prune(str(disk / "run"), 2, apply=True)


class Runbook(Writer):
    """The record of a run, an event a file."""

    name = "events of a runbook"
    events: tuple[Event, ...] = (
        OpenedEvent(by="me", runbook="rb-7", title="", page="", inputs={}),
        BeganEvent(state="Classify", block="suspects", command="", values={}),
        DecidedEvent(by="me", inputs={"CONFIRMED": "x" * 1000}),
    )

    def write(self, disk: Path, ready: Any) -> None:
        with open_store(str(disk / "run")) as store:
            found = record.newest(store, "rb-7") or record.begun(store, "rb-7")
            for event in self.events[len(found.events) :]:
                found.add(event)

    def judge(self, disk: Path, *, returned: bool) -> Iterator[str]:
        with open_store(str(disk / "run")) as store:
            found = record.newest(store, "rb-7")
        events = [event.event for event in found.events] if found else []
        if events != [event.event for event in self.events][: len(events)]:
            yield f"the events are {events}"
        if returned and len(events) < len(self.events):
            yield f"of the events only {events} are left"


WRITERS: tuple[type[Writer], ...] = (
    *(Seal, SealAnew, Reject, Accept, Pin, RejectInFile, Prune, Reshard, Export, Import),
    *(ResumeFresh, Resume, Save, SaveOver, SaveBeside, SaveAndKeep, Runbook),
)


def scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory, where there is one."""
    return tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
