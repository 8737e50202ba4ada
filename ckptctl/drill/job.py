"""The user's job in one trial: started by `ckptctl run`, on a copy of the root.

`ckptctl run`, RB-7, the launcher and its ranks are in sessions of their own. While a drill
runs, this process adopts orphans, so that all of them remain below it and are found there.
`Ending` ends them all, also after a signal.

The copy shares no inode with the step: what a fault does to a hard link would reach the real
step. A reflink (btrfs, XFS, bcachefs) shares blocks until one of both is written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeVar

from ckptctl.distributed.commands import run_bounded
from ckptctl.distributed.process_table import Process, is_alive
from ckptctl.errors import CkptctlError, PathNotFound, UsageError
from ckptctl.failures.rank_dumps import PREFIX_VARIABLES
from ckptctl.findings import Verdict
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formats.own.supervision import Attempt, SupervisorDocument
from ckptctl.formatting import command_line
from ckptctl.inspection.seals import ROOT_FILE
from ckptctl.logs.rows import Marker, Row
from ckptctl.loss.following import FileTail
from ckptctl.model import FileInfo
from ckptctl.options import StorageOptions
from ckptctl.selection.picking import pick
from ckptctl.selection.roots import list_root
from ckptctl.starting import OwnCommand, find_program, own_command
from ckptctl.storage.contract import Span, Store
from ckptctl.storage.files import FULL, error_of, full
from ckptctl.storage.opening import absolute_url, is_local, open_store
from ckptctl.storage.shared_places import open_folder, open_named, open_place
from ckptctl.supervisor.heartbeats import beats_of_launched, process_of
from ckptctl.supervisor.holding import STATE_FOLDER, Revisions, marker_of
from ckptctl.supervisor.nodes import NodeOptions
from ckptctl.supervisor.processes import (
    GRACE_S,
    CtrlC,
    children,
    descendants,
    end_processes,
    marked,
    receiving,
    signal_all,
)

ROOT_WORD, STEP_WORD = "{root}", "{step}"
_POLL_S = 0.2
_REST = 4.0
"""How many times as long as a poll took the next one is waited for."""
_MOST_REFUSED = 3
"""So many steps in a row that are saved and not usable are no fault that a drill injected."""
_FOUND = TypeVar("_FOUND")


def new_work_folder(
    name: str, command: Sequence[str], root: str, root_env: str | None, folder: str
) -> Path:
    """The work folder of the command `ckptctl NAME`, which does not exist yet.

    Raises `UsageError` where it exists or lies in the root, and where the job would not get
    the copy of its root.
    """
    usage = command_line(name, "--help")
    if not command:
        raise UsageError("the command is missing", next_command=usage)
    if root_env is None and not any(ROOT_WORD in word for word in command):
        raise UsageError(
            "the command names no place for its root, and would train in the real one: "
            "write {root} in it, or give --root-env NAME",
            next_command=usage,
        )
    with suppress(OSError):
        open_place(folder)[0].close()  # raises for another user's link
    work = Path(folder).resolve()
    if work.exists():
        raise UsageError(f"{work} already exists; give another folder with --work")
    if is_local(root) and Path(absolute_url(root)).resolve() in (work, *work.parents):
        raise UsageError(f"{work} is in the root; give another folder with --work")
    return work


def make_work_folder(work: Path) -> None:
    """Create the work folder, which nobody else can write; its parents where they are missing.

    Raises `FileExistsError` where somebody has created it meanwhile, and `PathUntrusted`.
    """
    with open_folder(str(work.parent), make=True) as parent:
        os.mkdir(work.name, 0o755, dir_fd=parent.fd)


class LoggedSteps:
    """The steps whose loss a growing log of the job holds; each `read` continues the last."""

    def __init__(self, log: Path) -> None:
        self.n = 0
        """How many rows have a loss."""
        self.last: int | None = None
        """The largest step; None where the log has none."""
        self._tail = FileTail(str(log), str(log))

    def read(self, *, to_end: bool = False) -> LoggedSteps:
        """Read what was added; `to_end` also what waits for more bytes."""
        with suppress(CkptctlError):  # it may become readable
            self._take(self._tail.new_items())
            if to_end:
                self._take(self._tail.end())
        return self

    def _take(self, items: Iterable[Row | Marker]) -> None:
        for row in items:
            if isinstance(row, Row) and row.has_loss:
                self.n += 1
                self.last = row.step if self.last is None else max(self.last, row.step)


class TrialFailed(Exception):
    """The trial cannot continue; the message is the problem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """How the job is called, and how long anything is waited for.

    `read_only` are the words that make the real root read-only for the command. `root_env` is
    the variable with the root. `nodes` are those of the job, and its numbers of ranks. A job
    hangs after `step_s` seconds without a step, and after `silence_s` without anything else.
    """

    command: Sequence[str]
    read_only: Sequence[str] = ()
    root_env: str | None = None
    nodes: NodeOptions = NodeOptions()
    step_s: float = 0.0
    silence_s: float = 0.0
    patience_s: float = 1800.0


class RankProcess(NamedTuple):
    """The process of a rank, and its node."""

    process: Process
    node: str


@dataclass(slots=True)
class DrillJob:
    """A job on the copy `root` of a root; logs and records lie in `folder`.

    `stop` ends the job, its `ckptctl run` and RB-7, and waits for all of them.
    """

    options: JobOptions
    root: Path
    folder: Path
    stop: Callable[[], None]
    names: dict[str, int] = field(default_factory=dict)
    """The steps up to the newest that was usable, by the paths of their folders."""
    copied_by: str = ""
    """How the copy of the root was made; see `copy_step`."""
    saving: bool = False
    refused: tuple[str, ...] = ()
    """Why the saved steps behind the newest usable one are not usable, newest first."""
    logged: LoggedSteps = field(init=False)
    """The steps in the output of the first attempt."""
    _run: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.logged = LoggedSteps(self.log)

    @property
    def log(self) -> Path:
        """The output of the first attempt."""
        return self.folder / "logs" / "1" / "output.log"

    @property
    def resumed_log(self) -> Path:
        """The output of all later attempts: the first may fail as well."""
        return self.folder / "resumed.log"

    def run_command(self, backoff: str, *log: str, without: Sequence[str] = ()) -> OwnCommand:
        """`ckptctl run` with the command of the job, and without some of its nodes."""
        limits: list[str] = []
        if self.options.silence_s:
            step, silence = f"{self.options.step_s:.0f}", f"{self.options.silence_s:.0f}"
            sections = {"setup": silence, "first-step": silence, "step": step, "checkpoint": step}
            limits += ["--section-timeouts", ",".join(":".join(each) for each in sections.items())]
            limits += ["--out-of-section-timeout", silence]
        nodes = self.options.nodes.without(without)
        node_words = ["--nodes", ",".join(nodes.nodes)] if nodes.nodes else []
        if nodes.world_sizes:
            node_words += ["--world-sizes", ",".join(map(str, nodes.world_sizes))]
        if nodes.hosts_file is not None:
            node_words += ["--hosts-file", nodes.hosts_file]
        command = [word.replace(ROOT_WORD, str(self.root)) for word in self.options.command]
        return own_command(
            *("run", "--config", "none", "--quiet", "--root", str(self.root)),
            *("--backoff", backoff, *log),
            *("--evidence-dir", str(self.folder / "evidence"), *limits, *node_words),
            *("--", *self.options.read_only, *command),
            environment=self.environment(),
        )

    def environment(self) -> dict[str, str]:
        """The environment of `ckptctl run`, of RB-7 and of the job; no argument holds a secret."""
        own = {"XDG_STATE_HOME": str(self.folder / "state")}
        if not any(name in os.environ for name in PREFIX_VARIABLES):
            # Otherwise the ranks leave their dumps in /tmp.
            own |= dict.fromkeys(PREFIX_VARIABLES, str(self.folder / "nccl_trace_rank_"))
        if self.options.root_env is not None:
            own[self.options.root_env] = str(self.root)
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CKPTCTL_")}
        return {**kept, **own}

    def start(self) -> None:
        """Start the job; after a failure `ckptctl run` waits and restarts nothing yet."""
        path = self.path_of(self.newest())
        own = self.run_command("1h", "--log-dir", str(self.folder / "logs"))
        words = [word.replace(STEP_WORD, str(self.root / path)) for word in own.words]
        with (self.folder / "run.log").open("ab") as out:
            self._run = subprocess.Popen(
                words, stdout=out, stderr=out, env=own.environment, start_new_session=True
            )

    def resume_command(self, without: Sequence[str]) -> str:
        """The shell command with which RB-7 resumes the job from `$STEP`, in the background.

        It runs `without` these nodes.
        """
        log = str(self.resumed_log)
        run = self.run_command("0", "--log", log, without=without)
        words = (shlex.quote(word) for word in run.words)
        line = " ".join(word.replace(STEP_WORD, "'\"$STEP\"'") for word in words)
        return f"{line} >> {shlex.quote(log)} 2>&1 &"

    def newest(self) -> int | None:
        """The number of the newest usable step of the copy; notes all steps up to it.

        Sets `saving` where a newer step is there, which is not usable yet, and `refused`.
        """
        answer = pick(str(self.root), allow_fresh=True, grace_s=0.0)
        self.refused = tuple(
            f"step {one.report.number}: {one.reason}"
            for one in answer.passed_over
            if one.report.verdict is not Verdict.IN_PROGRESS
        )
        found = answer.chosen
        if found is None or found.number is None:
            return None
        with open_store(str(self.root)) as store:
            steps = list_root(store).steps
        self.saving = any(step.number > found.number for step in steps)
        self.names |= {
            step.name: step.number
            for step in steps
            if step.number <= found.number and not step.unfinished
        }
        self.names[os.path.relpath(found.url, self.root)] = found.number
        return found.number

    def path_of(self, step: int | None) -> str:
        """The path of the folder of a step; empty without one."""
        return next((name for name, number in self.names.items() if number == step), "")

    def files_of(self, path: str) -> list[Path]:
        """The files of a step, without ckptctl's own."""
        found = (file for file in (self.root / path).rglob("*") if file.is_file())
        return sorted(file for file in found if ".ckptctl" not in file.parts)

    def state(self) -> SupervisorDocument | None:
        """The state that `ckptctl run` keeps of the job."""
        with open_store(str(self.root)) as store:
            return Revisions(store, STATE_FOLDER, of_root=True).newest()

    def attempts(self) -> Sequence[Attempt]:
        """The attempts so far."""
        state = self.state()
        return state["attempts"] if state else ()

    def processes(self) -> list[Process]:
        """The living processes of the job."""
        state = self.state()
        return marked(marker_of(state["run"], str(self.root))) if state else []

    def ranks(self) -> Mapping[int, RankProcess]:
        """The process of each rank; the oldest process alone where no launcher started ranks."""
        found = self.processes()
        beats = beats_of_launched(found)
        if beats:
            return {n: RankProcess(process_of(each), each["node"]) for n, each in beats.items()}
        oldest = min(found, key=lambda each: (each.started, each.pid), default=None)
        return {} if oldest is None else {0: RankProcess(oldest, "")}

    def await_(self, what: str, found: Callable[[], _FOUND | None]) -> _FOUND:
        """What `found` returns as soon as it is something; raises `TrialFailed` in vain.

        The time between two calls grows with that of a call, which may list a large root.
        """
        began_s = asked_s = time.monotonic()
        until_s = began_s + self.options.patience_s
        while (one := found()) is None:
            now_s = time.monotonic()
            if now_s > until_s or len(self.refused) >= _MOST_REFUSED:
                waited = f"no {what} within {min(now_s, until_s) - began_s:.0f} s"
                reasons = f", as saved steps are refused: {self.refused[0]}" if self.refused else ""
                raise TrialFailed(waited + reasons)
            time.sleep(max(_POLL_S, _REST * (now_s - asked_s)))
            asked_s = time.monotonic()
        return one

    def is_over(self) -> bool:
        """Whether an attempt of the job has ended, or `ckptctl run` before there was one."""
        attempts = self.attempts()
        if attempts and attempts[-1].decision is not None:
            return True
        return self._run is not None and self._run.poll() is not None

    def has_ended(self) -> bool:
        """Whether no `ckptctl run` supervises the job any more."""
        state = self.state()
        owner = state["owner"] if state else None
        return owner is None or not is_alive(Process(owner["pid"], owner["started"]))


_ENDS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class _Interrupted(BaseException):
    """A signal asks to end; no handler of errors may catch it."""


class Ending:
    """What this process has started since, and the signal that asked it to end, if one did.

    `tell` gets what happens to these processes after a signal.
    """

    def __init__(self, tell: Callable[[str], None]) -> None:
        self.asked: signal.Signals | None = None
        self._tell = tell
        self._bystanders = children()
        self._interrupts = self._hurries = False
        self._ctrl_c = CtrlC()

    def _receive(self, number: int, _frame: object) -> None:
        self.asked = self.asked or signal.Signals(number)
        self._hurries = self._hurries or self._ctrl_c.is_second(number)
        if self._interrupts:
            # A second signal must not interrupt what ends the processes.
            self._interrupts = False
            raise _Interrupted

    def lead(self, work: Callable[[], None], folder: Path, *, keep: bool) -> None:
        """Call a function that a signal interrupts; `asked` holds the signal afterwards.

        Receives signals and adopts orphans meanwhile. Then every process that was started has
        ended, and without `keep` the copies of the root in `folder` are removed.
        """
        with receiving(_ENDS, self._receive):
            try:
                self._call(work)
            finally:
                self.end()
                for copy in () if keep else folder.glob("*/root"):
                    shutil.rmtree(copy, ignore_errors=True)

    def _call(self, work: Callable[[], None]) -> None:
        try:
            try:
                self._interrupts = True
                if self.asked is None:
                    work()
            finally:
                self._interrupts = False
        except _Interrupted:
            self._tell(
                f"{self.asked.name if self.asked else 'a signal'}: the job gets SIGTERM, and what "
                f"is left after {GRACE_S:.0f} s SIGKILL; after another Ctrl-C at once"
            )

    def end(self) -> None:
        """End every process that was started, and wait for it."""
        signal_all(self._started(), signal.SIGCONT)  # a stopped process ignores SIGTERM
        end_processes(self._started, GRACE_S, lambda: self._hurries)
        for pid in children() - self._bystanders:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def _started(self) -> list[Process]:
        return descendants(self._bystanders)


_FICLONE = 0x40049409
"""Source: `FICLONE` of `linux/fs.h`."""
_BESIDE_BYTES = 1 << 20
"""Files beside steps up to this size are copied: a tracker (`latest`), a configuration."""
_PIECE = 16 << 20


@contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Raise the error of a storage where a file system fails, such as one without space."""
    try:
        yield
    except OSError as error:
        name = str(error.filename or path)
        if error.errno in FULL:
            there = next(each for each in (path, *path.parents) if each.exists())
            raise full(name, error, str(there), None) from error
        raise error_of(name, error) from error


def fingerprint(root: str, storage: StorageOptions) -> str:
    """A digest of all names below a root with their sizes and times, and of no contents.

    In a file system the change time is part of it, which no call can set back: every write,
    rename and change of permissions shows. In an object store the ETag is.
    """
    digest = hashlib.sha256()
    for entry in sorted(_entries(root, storage)):
        digest.update(f"{entry}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _entries(root: str, storage: StorageOptions) -> Iterator[str]:
    if not is_local(root):
        with open_store(root, storage) as store:
            for info in store.list_tree():
                yield f"{info.path} {info.size} {info.identity}"
        return
    path = absolute_url(root)
    for folder, folders, files in os.walk(path):
        for name in (".", *folders, *files):
            with suppress(FileNotFoundError):  # a job of this root may remove a step meanwhile
                about = os.lstat(os.path.join(folder, name))
                yield (
                    f"{os.path.join(folder, name)} {about.st_mode} {about.st_ino} {about.st_size} "
                    f"{about.st_mtime_ns} {about.st_ctime_ns}"
                )


def path_in(root: str, url: str) -> str:
    """The path of a step in its root, by the addresses of both."""
    if is_local(url):
        return os.path.relpath(absolute_url(url), absolute_url(root))
    return url[len(root.rstrip("/")) + 1 :]


def copy_step(root: str, step: str, target: Path, storage: StorageOptions) -> str:
    """Copy the step at the path `step` of a root, and small files beside it; by which means.

    The copy has the sentinel of the root, and none of the other records of ckptctl. Raises
    `StorageError` where a file cannot be read or written.
    """
    cloned: list[bool] = []
    with storage_errors(target), open_store(root, storage) as store:
        wanted = [*_files(store, store.list_tree(step))]
        for above in Path(step).parents:  # the folder of the step, up to the root itself
            beside = store.list_dir("" if str(above) == "." else str(above))
            wanted += [info for info in _files(store, beside) if info.size <= _BESIDE_BYTES]
        with suppress(PathNotFound):
            own = _files(store, store.list_dir(OWN_FOLDER))
            wanted += [info for info in own if info.path == ROOT_FILE]
        for info in wanted:
            out = target / info.path
            out.parent.mkdir(parents=True, exist_ok=True)
            if store.folders is not None:
                cloned.append(_copy_file(store.folders.path_of(info.path), out))
                continue
            starts = range(0, info.size, _PIECE)
            spans = [Span(info.path, at, min(_PIECE, info.size - at)) for at in starts]
            with out.open("wb") as file:
                for _, data in store.view_spans(spans):
                    file.write(data)
        if store.folders is None:
            return "download"
    return "reflink" if cloned and all(cloned) else "copy"


def _files(store: Store, listed: Iterable[FileInfo]) -> Iterator[FileInfo]:
    """The files, and those to which links of a local root lead: the job reads them, too."""
    for info in listed:
        found = info
        if info.kind == "link" and store.folders is not None:
            path = store.folders.path_of(info.path)
            if os.path.isfile(path):  # a link that leads nowhere is not part of a step
                found = replace(info, kind="file", size=os.path.getsize(path))
        if found.kind == "file":  # a pipe would be read forever
            yield found


def _copy_file(source: str, target: Path) -> bool:
    """Copy one file; whether both share their blocks now."""
    with os.fdopen(open_named(source), "rb") as old, target.open("wb") as new:
        with suppress(OSError):
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            return True
        shutil.copyfileobj(old, new, _PIECE)
    return False


_READ_ONLY = '"$0" --bind "$1" "$1" && "$0" -o remount,ro,bind "$1" && shift && exec "$@"'


def read_only_launcher(root: str) -> Sequence[str]:
    """The words before a command that make a local root read-only for it; none if impossible.

    The command gets a mount namespace of its own, in which the root is mounted read-only. That
    takes root, or user namespaces; then the command sees itself as root.
    """
    if not is_local(root):
        return ()
    path = absolute_url(root)
    as_root = () if os.geteuid() == 0 else ("--user", "--map-root-user")
    unshare, shell, mount = map(find_program, ("unshare", "sh", "mount"))
    if unshare is None or shell is None or mount is None:
        return ()
    words = (unshare, *as_root, "--mount", shell, "-c", _READ_ONLY, mount, path)
    with suppress(OSError):
        if run_bounded([*words, "true"], 60.0).code == 0:
            return words
    return ()
