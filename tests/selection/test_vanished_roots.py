"""A file system that is unmounted while ckptctl works on it leaves no new run behind.

Real mounts, in a mount namespace of their own: below the mount point lies an empty folder, and
`umount -l` takes the file system away although files in it are open.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from command_line import run_program

import ckptctl
from ckptctl.errors import StorageUnavailable
from ckptctl.selection.history import put_sentinel
from ckptctl.selection.roots import list_root
from ckptctl.selection.targets import SeenRoots
from ckptctl.storage.opening import open_store


def _no_namespace() -> str:
    if shutil.which("unshare") is None:
        return "there is no unshare"
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)
    return tried.stderr.strip() if tried.returncode else ""


needs_mounts = pytest.mark.skipif(bool(_no_namespace()), reason="no mount namespace")

SETUP = """
import os, subprocess, sys
from contextlib import suppress
from pathlib import Path
import ckptctl
from ckptctl.errors import StorageUnavailable
from ckptctl.storage.opening import open_store

disk, source, is_below = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "below"

def mount():
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", disk], check=True)

def unmount():
    subprocess.run(["umount", "-l", disk], check=True)

mount()
root = disk / "run" if is_below else disk
subprocess.run(["mkdir", "-p", root], check=True)
if source:
    subprocess.run(["cp", "-r", f"{source}/.", root], check=True)
"""
END = """
assert not os.path.ismount(disk)
assert os.listdir(disk) == [], os.listdir(disk)
"""

PLACES = pytest.mark.parametrize("place", ["below", "mount point"])


def in_namespace(code: str, tmp_path: Path, place: str, source: Path | str = "") -> str:
    """The output of `code` in a mount namespace, with a disk that `unmount()` takes away.

    The code must leave the folder below the mount point empty.
    """
    (tmp_path / "disk").mkdir()
    script = tmp_path / "script.py"
    script.write_text(SETUP + textwrap.dedent(code) + END)
    done = run_program(
        *("unshare", "--mount", sys.executable, script, tmp_path / "disk", source, place),
        PYTHONPATH=f"{Path(ckptctl.__file__).parent.parent}:{Path(__file__).parents[1]}",
        XDG_STATE_HOME=str(tmp_path / "state"),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def run(checkpoints: Path) -> Path:
    """The root of a run with whole steps."""
    return checkpoints / "run_fsdp4"


@needs_mounts
@PLACES
def test_a_runbook_with_an_open_question_ends_with_75_and_creates_nothing(tmp_path, run, place):
    code = """
    from runbook.test_runbook_engine import Person
    from ckptctl.runbook.document import find_runbook
    from ckptctl.runbook.engine import run_runbook

    class Slow(Person):
        def decided(self, block, decision):
            unmount()
            return "kept away"
        def may(self, block, **about):
            unmount()
            return True

    try:
        run_runbook(find_runbook("rb-7"), str(root), {"NODE": "node7"}, Slow("yes"))
    except StorageUnavailable as error:
        print(error.exit_code, error.message)
    """
    printed = in_namespace(code, tmp_path, place, run)
    assert printed.startswith("75 "), printed
    assert "not the folder that was opened before" in printed


@needs_mounts
@PLACES
@pytest.mark.parametrize("steps", [True, False], ids=["steps", "fresh"])
def test_a_supervised_job_whose_storage_vanishes_is_not_started_again(tmp_path, run, place, steps):
    code = """
    from ckptctl.supervisor.policy import BudgetOptions
    job = ["sh", "-c", f"umount -l {disk}; exit 1"]
    done = ckptctl.keep_running(
        job, str(root), wait_s=0.0, create=True, log_dir=str(root / "logs")
    )
    print(done.exit_code, len(done.attempts), done.message)
    """
    printed = in_namespace(code, tmp_path, place, run if steps else "")
    assert printed.startswith("75 1 "), printed


WRITERS = {
    "mark": """
        from ckptctl.selection import marking
        sound = marking.put_mark
        def put_mark(*about):
            unmount()
            return sound(*about)
        marking.put_mark = put_mark
        act = lambda: ckptctl.mark(f"{root}@500", "rejected", reason="bad")
    """,
    "seal": """
        gone = []
        def on_progress(done, total):
            if not gone:
                gone.append(unmount())
        def act():
            sealed = ckptctl.seal(f"{root}@500", on_progress=on_progress)
            assert sealed.path is None and sealed.exit_code == 75, sealed
            raise StorageUnavailable(sealed.message)
    """,
    "sentinel": """
        from ckptctl.selection.history import put_sentinel
        act = opened(put_sentinel)
    """,
    "usable step": """
        from ckptctl.selection.history import record_usable
        act = opened(lambda store: record_usable(store, 500))
    """,
    "fence": """
        from ckptctl.selection.history import take_token
        act = opened(lambda store: take_token(store, lambda _: "20261122T031011.000000Z-0123abcd"))
    """,
    "ledger": """
        from ckptctl.formats.own.ledger import ResumedLine
        from ckptctl.train.ledger import Ledger
        act = opened(lambda store: Ledger(store, "20261122T031011.000000Z-0123abcd").add(
            ResumedLine(step=None, metadata={}, load_s=0.0)
        ))
    """,
    "resume report": """
        from ckptctl.train.ledger import put_report
        act = opened(lambda store: put_report(store, "20261122T031011.000000Z-0123abcd", {}))
    """,
    "new root": "act = opened(lambda store: store.folders.create_root())",
    "storage probe": """
        from ckptctl.diagnostics import diagnosing
        from ckptctl.options import StorageOptions
        sound = diagnosing.check_root_there
        def check_root_there(*about):
            sound(*about)
            unmount()
        diagnosing.check_root_there = check_root_there
        act = lambda: diagnosing.check_storage(str(root), StorageOptions())
    """,
    "runbook record": """
        from ckptctl.formats.own.run_events import BackEvent
        from ckptctl.runbook.record import begun
        act = opened(lambda store: begun(store, "rb-7").add(
            BackEvent(state="a", block=None, because="b")
        ))
    """,
}


@needs_mounts
@PLACES
@pytest.mark.parametrize("writer", WRITERS)
def test_no_writer_writes_below_the_bare_mount_point(tmp_path, run, place, writer):
    code = """
    def opened(write):
        store = open_store(str(root))
        store.list_dir("")
        def act():
            unmount()
            write(store)
        return act
    """
    act = """
    try:
        act()
    except StorageUnavailable as error:
        print(error.exit_code, error.message)
    """
    code = textwrap.dedent(code) + textwrap.dedent(WRITERS[writer]) + textwrap.dedent(act)
    printed = in_namespace(code, tmp_path, place, run)
    assert printed.startswith("75 "), printed


@needs_mounts
@PLACES
def test_a_watch_reports_that_the_storage_is_gone_and_writes_nothing(tmp_path, run, place):
    code = """
    found = ckptctl.watch(str(root), interval_s=0.0, grace_s=0.0)
    print(next(found).event.value)
    unmount()
    for event in found:
        print(event.event.value, event.exit_code, event.message)
        break
    """
    first, second = in_namespace(code, tmp_path, place, run).splitlines()
    assert first == "sealed"
    assert second.startswith("no-answer 75 "), second


@needs_mounts
@PLACES
def test_a_resume_whose_storage_vanishes_before_it_is_recorded_creates_nothing(tmp_path, place):
    code = """
    from ckptctl.train import resuming
    sound = resuming.Resume._load_and_restore
    def load(self, *about):
        restored = sound(self, *about)
        unmount()
        return restored
    resuming.Resume._load_and_restore = load
    import torch
    from ckptctl.train import Checkpointer
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    checkpointer = Checkpointer(str(root), model=model, optimizer=optimizer)
    try:
        checkpointer.resume("auto")
    except StorageUnavailable as error:
        print(error.exit_code, error.message)
    """
    pytest.importorskip("torch")
    assert in_namespace(code, tmp_path, place).startswith("75 ")


@needs_mounts
def test_the_same_disk_that_is_there_all_the_time_is_no_change(tmp_path, run):
    code = """
    with open_store(str(root)) as store:
        before = store.folders.root_id()
        store.put("train.log", b"x")
        ckptctl.mark(f"{root}@500", "rejected", reason="bad")
        assert store.folders.root_id() == before
        print(ckptctl.pick(str(root)).step)
    unmount()
    """
    assert in_namespace(code, tmp_path, "below", run) == "400\n"


# Without a mount


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def looked(seen: SeenRoots, root: Path) -> None:
    with open_store(str(root)) as store:
        seen.check(store, list_root(store))


def test_what_was_seen_and_is_gone_is_unknown_and_says_what(root, run):
    seen = SeenRoots()
    looked(seen, root)
    shutil.copytree(run / "step_500", root / "step_500")
    looked(seen, root)
    shutil.rmtree(root / "step_500")
    with pytest.raises(StorageUnavailable, match="it held 1 step, and now none"):
        looked(seen, root)
    shutil.copytree(run / "step_500", root / "step_500")
    with open_store(str(root)) as store:
        put_sentinel(store)
    looked(seen, root)
    (root / ".ckptctl" / "root.json").unlink()
    with pytest.raises(StorageUnavailable, match=r"its record \.ckptctl/root\.json is gone"):
        looked(seen, root)
    root.rename(root.parent / "moved")
    with pytest.raises(StorageUnavailable, match="it does not exist any more"):
        looked(seen, root)
    root.mkdir()
    with pytest.raises(StorageUnavailable, match="another folder is in its place"):
        looked(seen, root)
    root.rmdir()
    (root.parent / "moved").rename(root)


def test_a_root_that_appears_between_two_looks_is_no_change(tmp_path):
    seen = SeenRoots()
    looked(seen, tmp_path / "new")
    (tmp_path / "new").mkdir()
    looked(seen, tmp_path / "new")
    looked(seen, tmp_path / "new")
