"""A storage in which one call fails (F), or a step that changes between two calls (J).

F: the k-th call of the store fails, or the k-th system call below it. J: before the
k-th call another process writes, deletes or renames. In every case, an unknown state is
never reported as damage or as a fresh run, and a change is reported.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

from oracle import Outcome
from sound_steps import Sound, put
from storage.faulty import VERBS, FaultyStore

import ckptctl
from ckptctl import Level, Verdict
from ckptctl.errors import AccessDenied, CkptctlError, PathNotFound, StorageUnavailable
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.options import Requirements
from ckptctl.selection import marking, sealing, targets, verifying
from ckptctl.storage import files, local
from ckptctl.storage.contract import ShortRead
from ckptctl.storage.local import LocalStore
from ckptctl.storage.opening import open_store

N_FAULTS, N_CHANGES = 3000, 1500

ERRORS = (
    StorageUnavailable("no answer after 4 tries in 31 s"),
    AccessDenied("denied"),
    PathNotFound("gone"),
    ShortRead("shorter than it was"),
)
ERRNOS = ("EIO", "ESTALE", "EACCES", "EPERM", "ETIMEDOUT", "EINTR", "EAGAIN", "EMFILE", "ENOMEM")
ERRNOS += ("ENOSPC", "EROFS", "EDQUOT", "ENOENT")
CALLS = ("open", "pread", "preadv", "fstat", "scandir", "stat")

Ask = Callable[[Path], object]
QUESTIONS: dict[str, Ask] = {
    "pick": lambda root: ckptctl.pick(str(root), level=Level.STRUCTURE),
    "scan": lambda root: ckptctl.scan(str(root), level=Level.STRUCTURE),
    "verify": lambda root: ckptctl.verify(f"{root}@20", level=Level.CONTENT, jobs=1),
    "seal": lambda root: ckptctl.seal(f"{root}@20"),
    "mark": lambda root: ckptctl.mark(f"{root}@20", "pinned", by="campaign"),
}


@contextmanager
def store_that(order: Callable[[FaultyStore], None]) -> Iterator[list[FaultyStore]]:
    """Within this context, every store that a command opens is a real one that fails on demand."""
    made: list[FaultyStore] = []

    def opened(url: str, *args: Any, **kwargs: Any) -> FaultyStore:
        store = FaultyStore(open_store(url, *args, **kwargs))
        order(store)
        made.append(store)
        return store

    modules: list[ModuleType] = [marking, sealing, targets, verifying]
    before = [(module, module.open_store) for module in modules if hasattr(module, "open_store")]
    for module, _ in before:
        module.open_store = opened
    try:
        yield made
    finally:
        for module, original in before:
            module.open_store = original


class _System:
    """`os`, where the k-th call of what a store asks for fails, once or from then on."""

    def __init__(self, nth: int, number: int, *, lasts: bool) -> None:
        self.n_calls = 0
        self._nth, self._number, self._lasts = nth, number, lasts

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CALLS:
            return real

        def call(*args: Any, **kwargs: Any) -> Any:
            self.n_calls += 1
            if self.n_calls == self._nth or (self._lasts and self.n_calls > self._nth):
                raise OSError(self._number, os.strerror(self._number), str(args[0]))
            return real(*args, **kwargs)

        return call


@contextmanager
def system_that_fails(nth: int, number: int, *, lasts: bool) -> Iterator[_System]:
    """While this lasts, the file system below local stores fails."""
    system = _System(nth, number, lasts=lasts)
    modules: list[Any] = [local, files]
    try:
        for module in modules:
            module.os = system
        yield system
    finally:
        for module in modules:
            module.os = os


class Counts:
    """How many calls each command makes if nothing fails."""

    def __init__(self, make_root: Callable[[], Path]) -> None:
        self.of_store: dict[str, dict[str, int]] = {}
        self.of_system: dict[str, int] = {}
        for name, ask in QUESTIONS.items():
            with store_that(lambda store: None) as made:
                ask(make_root())
            verbs = (*VERBS, "span")
            calls = {verb: sum(store.calls[verb] for store in made) for verb in verbs}
            self.of_store[name] = {verb: n for verb, n in calls.items() if n}
            with system_that_fails(1 << 60, errno.EIO, lasts=False) as system:
                ask(make_root())
            self.of_system[name] = system.n_calls


def failing(number: int, chance: Random, counts: Counts, root: Path, outcome: Outcome) -> None:
    """Run a command while the storage fails in one call, then again when it works."""
    name = chance.choice(list(QUESTIONS))
    lasts = chance.random() < 0.4
    if number % 2:
        verb = chance.choice(list(counts.of_store[name]))
        nth = chance.randint(1, counts.of_store[name][verb])
        error = chance.choice(ERRORS[:2] if lasts else ERRORS)
        outcome.about = f"{name}: {verb} {nth} {'on ' if lasts else ''}{type(error).__name__}"
        with store_that(lambda store: store.fail(verb, error, nth=nth, lasts=lasts)):
            gone = isinstance(error, PathNotFound)
            outcome.problem = _asked(name, root, outcome, gone=gone)
    else:
        nth = chance.randint(1, counts.of_system[name])
        why = chance.choice([one for one in ERRNOS if one != "ENOENT"] if lasts else ERRNOS)
        outcome.about = f"{name}: system call {nth} {'on ' if lasts else ''}{why}"
        with system_that_fails(nth, getattr(errno, why), lasts=lasts):
            outcome.problem = _asked(name, root, outcome, gone=why == "ENOENT")
    chosen = ckptctl.pick(str(root), level=Level.CONTENT)
    if chosen.chosen is None or chosen.step != 20:
        outcome.problem = outcome.problem or f"healed, pick ends with {chosen.exit_code}"
    if any(path.suffix in (".tmp", ".part") for path in (root / "step_20").rglob("*")):
        outcome.problem = outcome.problem or "left something half-written"


def _asked(name: str, root: Path, outcome: Outcome, *, gone: bool) -> str | None:
    """The fault of the answer, if any; `gone` is a path that is reported as missing."""
    try:
        answer: Any = QUESTIONS[name](root)
    except CkptctlError as error:
        outcome.verdict = f"error {error.exit_code}"
        right = error.exit_code in (75, 77, 26) or (gone and error.exit_code == 2)
        return None if right else f"ended with {error.exit_code}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a bug
        return f"crashed with {type(error).__name__}: {str(error)[:200]}"
    outcome.verdict = f"exit {answer.exit_code}"
    if name == "verify":
        return _not_damaged([answer])
    if name == "scan":
        return _not_damaged(answer.reports)
    if name == "pick":
        if answer.chosen is None and answer.exit_code not in (75, 77):
            return f"pick ends {answer.exit_code}"
        if answer.chosen is not None and answer.step != 20:
            return f"pick takes {answer.step}"
    elif answer.exit_code not in (0, 26, 75, 77):
        return f"{name} ends with {answer.exit_code}"
    return None


def _not_damaged(reports: Any) -> str | None:
    good = {Verdict.COMPLETE, Verdict.UNKNOWN, Verdict.CHANGED}
    wrong = [report.verdict.value for report in reports if report.verdict not in good]
    return f"a sound step is called {wrong[0]}" if wrong else None


class _Disturbed(FaultyStore):
    """Change the step before the k-th call, whichever it is."""

    def __init__(self, root: Path, nth: int, happens: Callable[[], object]) -> None:
        super().__init__(LocalStore(str(root)))
        self._nth, self._happens = nth, happens
        self.n_calls = 0

    def _count(self, verb: str, path: str | None) -> None:
        self.n_calls += 1
        if self.n_calls == self._nth:
            self._happens()
        super()._count(verb, path)


def changing(number: int, chance: Random, subject: Sound, step: Path, outcome: Outcome) -> None:
    """Inspect a step that changes meanwhile: it is reported neither as damaged nor as whole."""
    level = (Level.STRUCTURE, Level.CONTENT)[number % 2]
    quiet = _Disturbed(step.parent, 0, lambda: None)
    inspect_step(OpenStep(quiet, step.name), Requirements(), level=level)
    nth = chance.randint(1, quiet.n_calls)
    name = chance.choice([*subject.shards, ".metadata"])
    data = subject.files[name]
    older = subject.older_bytes(name) or data
    what = chance.choice(["saved over", "cut", "deleted", "added", "renamed", "removed"])
    acts: dict[str, Callable[[], object]] = {
        "saved over": lambda: put(step / name, older),
        "cut": lambda: put(step / name, data[: len(data) // 2]),
        "deleted": (step / name).unlink,
        "added": lambda: put(step / "__55_0.distcp", data),
        "renamed": lambda: step.rename(step.with_name("gone")),
        "removed": lambda: shutil.rmtree(step),
    }
    outcome.about = f"{what} ({name}) before call {nth} of {quiet.n_calls} at {level.value}"
    store = _Disturbed(step.parent, nth, acts[what])
    report = inspect_step(OpenStep(store, step.name), Requirements(), level=level).report
    outcome.verdict = report.verdict.value
    outcome.codes = sorted({f.code for f in report.findings if f.verdict is not None})
    if nth == 1:
        return  # it happened before the inspection
    if report.verdict not in (Verdict.CHANGED, Verdict.UNKNOWN):
        outcome.problem = f"it changed, and is called {report.verdict.value}"
