"""Inspect a broken step with every command, and compare the answers with the truth about it.

A case is a step that was changed. It is inspected at each level until one finds a fault,
with a seal and without, and `pick` must choose accordingly. A wrong answer is a
`Problem`: a bad step that a level should have detected, a good one that was refused,
anything that was changed, run or left behind.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path

from sound_steps import Harm, Sound

import ckptctl
from ckptctl import Level, Verdict
from ckptctl.cli.commands import exit_codes
from ckptctl.errors import CkptctlError

CANARY = "campaign-canary"

SUSPICIONS = frozenset({"shard.stale", "step.times", "shard.trailing", "metadata.foreign"})
"""Warnings that a step may not be what it seems; they change no verdict."""

SEEN = {Verdict.UNSAFE, Verdict.CHANGED, Verdict.CORRUPT, Verdict.INCOMPLETE}
SEEN |= {Verdict.IN_PROGRESS, Verdict.UNVERIFIABLE}


class Claim(StrEnum):
    """What must detect the damage: reading every byte, a seal alone, or nothing."""

    CONTENT = "content"
    SEAL = "seal"


@dataclass
class Case:
    """A change to a step.

    `harm` None is found out from the tree, for a step whose metadata was left alone.
    `may_refuse` is a step that is whole and may be refused all the same: beside it lies
    what makes it unsafe or ambiguous. `suspicions` are the warnings that count here.
    """

    about: str
    spoil: Callable[[Path], object]
    harm: Harm | None = None
    claim: Claim = Claim.CONTENT
    sealed: bool = False
    may_refuse: bool = False
    suspicions: frozenset[str] = SUSPICIONS


@dataclass
class Outcome:
    """The recorded outcome of a case."""

    category: str
    number: int
    step: str
    about: str
    sealed: bool
    harm: str
    claim: str
    caught: str | None = None
    verdict: str = ""
    codes: list[str] = field(default_factory=list)
    suspected: list[str] = field(default_factory=list)
    said: str = ""
    problem: str | None = None
    metadata_exists: bool = True
    loaded: str | None = None

    def as_dict(self) -> dict[str, object]:
        """For a line of JSON."""
        return asdict(self)


class Watch:
    """Records the audit events that no reader has a reason to cause."""

    NEVER = (
        "exec",
        "compile",
        "pickle.find_class",
        "ctypes",
        "subprocess",
        "socket.connect",
        "os.system",
        "os.exec",
        "os.fork",
        "os.posix_spawn",
    )

    def __init__(self) -> None:
        self.on = False
        self.events: list[str] = []
        sys.addaudithook(self._note)

    def _note(self, event: str, args: tuple[object, ...]) -> None:
        if not (self.on and event.startswith(self.NEVER)):
            return
        # Servers and clients of other cases run in threads of this process.
        if threading.current_thread().name.startswith(("MainThread", "ckptctl")):
            self.events.append(event)

    def __enter__(self) -> Watch:
        self.events.clear()
        self.on = True
        return self

    def __exit__(self, *exc: object) -> None:
        self.on = False


def digest_of(folder: Path) -> str:
    """All names, sizes and bytes below a folder."""
    digest = hashlib.blake2b()
    for path in sorted(folder.rglob("*")):
        digest.update(str(path.relative_to(folder)).encode())
        if path.is_file() and not path.is_symlink():
            digest.update(path.read_bytes())
    return digest.hexdigest()


def judge(case: Case, outcome: Outcome, subject: Sound, step: Path, watch: Watch) -> None:
    """Inspect the step, and record in `outcome` the answers and their faults."""
    harm = subject.harm(step) if case.harm is None else case.harm
    outcome.harm, outcome.claim = harm.value, case.claim.value
    outcome.metadata_exists = (step / ".metadata").is_file()
    older = None if subject.older is None else step.parent / subject.older.name
    before = digest_of(older) if older else ""
    try:
        with watch:
            _look(case, outcome, step)
            _choose(case, outcome, harm, step, older)
    except CkptctlError as error:
        outcome.problem = f"raised {type(error).__name__}: {error.message[:200]}"
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a bug
        outcome.problem = f"crashed with {type(error).__name__}: {str(error)[:200]}"
    if watch.events:
        outcome.problem = f"caused {', '.join(sorted(set(watch.events)))}"
    if older and digest_of(older) != before:
        outcome.problem = "changed the step before it"
    outcome.problem = outcome.problem or _wrong(case, outcome, harm)


def _look(case: Case, outcome: Outcome, step: Path) -> None:
    for level in Level:
        report = ckptctl.verify(str(step), level=level)
        outcome.verdict = report.verdict.value
        outcome.codes = sorted({f.code for f in report.findings if f.verdict is not None})
        told = {f.code for f in report.findings} & case.suspicions
        outcome.suspected = sorted({*outcome.suspected, *told})
        outcome.said = next((f.message[:300] for f in report.findings if f.verdict), "")
        if case.may_refuse and "step.linked" in outcome.codes:
            return  # a link is not followed: nothing is known of the step
        if report.exit_code not in exit_codes():
            outcome.problem = f"exit code {report.exit_code} is not documented"
        if report.verdict in SEEN:
            by_seal = all(code.startswith("seal.") for code in outcome.codes)
            outcome.caught = "seal" if by_seal else level.value
            return
        if report.verdict is not Verdict.COMPLETE:
            outcome.problem = f"the verdict is {report.verdict.value}"


def _choose(case: Case, outcome: Outcome, harm: Harm, step: Path, older: Path | None) -> None:
    """`pick` chooses a step without faults, unless an older one holds more state."""
    chosen = ckptctl.pick(str(step.parent), level=Level.CONTENT)
    path = None if chosen.chosen is None else Path(chosen.chosen.url).name
    if "step.linked" in outcome.codes:
        if (path, chosen.exit_code) != (None, 2):
            outcome.problem = f"pick takes {path} with {chosen.exit_code}, beside a linked step"
        return
    expected = step.name if outcome.caught is None else older.name if older else None
    if outcome.caught is None and harm is Harm.VALUES and older and path == older.name:
        outcome.caught, outcome.codes, expected = "listing", ["state.missing"], older.name
    if path != expected:
        outcome.problem = f"pick takes {path}, where {expected} is right"
    if path is None and chosen.exit_code != 11:
        outcome.problem = f"pick ends with {chosen.exit_code} where steps are there"


def _wrong(case: Case, outcome: Outcome, harm: Harm) -> str | None:
    if harm is Harm.VALUES and outcome.caught is None:
        claimed = case.claim is Claim.CONTENT or case.sealed
        return "missed" if claimed else None
    if harm is Harm.NONE and outcome.caught is not None and not case.may_refuse:
        return "false alarm"
    if harm is Harm.NONE and "shard.stale" in outcome.suspected:
        return "suspected for nothing"
    return None
