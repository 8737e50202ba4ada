"""The results of `classify`: classes of failure, the evidence, and what it adds up to.

Each class (`classes.toml`) states the domain of the failure, what to do, and whether a restart can
help.
`rules` maps evidence to classes; `classifying` chooses among several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import resources

import msgspec

from ckptctl.model import Message, Ordered, Positive


class Domain(StrEnum):
    """What failed: the infrastructure, the job, or neither."""

    INFRASTRUCTURE = "infrastructure"
    JOB = "job"
    STOPPED = "stopped"
    NONE = "none"
    UNKNOWN = "unknown"


class Action(StrEnum):
    """What to do before, or instead of, the next start."""

    DRAIN = "drain"
    CHECK_STORAGE = "check-storage"
    FIX = "fix"
    FALL_BACK = "fall-back"
    RESUME = "resume"
    RESUME_ELSEWHERE = "resume-elsewhere"
    WAIT = "wait"
    INVESTIGATE = "investigate"
    NOTHING = "nothing"


class Restart(StrEnum):
    """Whether a restart without human action can help.

    `free` does not count against a restart budget; `once` allows a single restart, because
    the same failure twice from the same step is caused by the job.
    """

    FREE = "free"
    YES = "yes"
    ONCE = "once"
    NO = "no"


class Role(Ordered):
    """The role of a piece of evidence in the chain of a failure, the strongest first.

    A `cause` is reported by the kernel, the driver or the scheduler. A `root` is an error
    in the program that explains the end. A `suspect` explains it if nothing better does. A
    `cascade` is a consequence in other processes; a `note` is shown but decides nothing.
    """

    CAUSE = "cause"
    ROOT = "root"
    SUSPECT = "suspect"
    CASCADE = "cascade"
    NOTE = "note"


class FailureClass(msgspec.Struct, frozen=True):
    """The meaning of a class of failures, and what to do about it."""

    name: str
    domain: Domain
    action: Action
    restart: Restart
    means: str
    advice: str


class ExitMeaning(msgspec.Struct, frozen=True):
    """What an exit code or a signal shows; `action` and `restart` if they differ from the class."""

    failure: str
    means: str
    role: Role = Role.SUSPECT
    action: str = ""
    restart: str = ""


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entries of `classes.toml`."""

    classes: tuple[FailureClass, ...]
    exits: Mapping[str, ExitMeaning]


_TABLE = msgspec.toml.decode(
    (resources.files("ckptctl.failures") / "classes.toml").read_bytes(), type=_Table
)
CLASSES: Mapping[str, FailureClass] = {failure.name: failure for failure in _TABLE.classes}
"""Every class by name, in the order of the documentation."""
EXITS = _TABLE.exits
"""What exit codes show, by the number or the name of the signal."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation: its place, its text, and the class that it supports."""

    rule: str
    """The rule that found it, such as `xid.79`."""
    failure: str
    """The class that it supports."""
    role: Role
    """Its place in the chain of a failure."""
    description: str
    """A description of the observation."""
    file: str
    """The log as given, or the option."""
    line: int
    """Line, counted from 1; 0 where there are no lines."""
    text: str
    """The message of the line, without prefixes; at most 400 characters."""
    at_s: float | None = None
    """Seconds since 1970 by the clock of the log."""
    host: str | None = None
    """The node that the line names."""
    device: str | None = None
    """The device that the line names."""
    rank: int | None = None
    """The rank that the line names."""
    ranks: tuple[int, ...] = ()
    """The ranks that it names, where there are several."""
    count: Positive = 1
    """The number of identical observations."""
    survived: bool = False
    """Training continued after it."""
    doubt: str = ""
    """Why it may be of another time or place than the attempt; empty if it is of the attempt."""
    action: str = ""
    """What to do, if it differs from the action of the class; else empty."""
    restart: str = ""
    """Whether to restart, if it differs from the class; else empty."""


CONFIDENCES = ("low", "medium", "high")


@dataclass(frozen=True, slots=True)
class Suspect:
    """Hardware named in the logs: a node, its devices, the ranks that ran there."""

    node: str | None
    """The name of the node; null if the logs name only a device."""
    devices: tuple[str, ...]
    """The devices that the logs name."""
    ranks: tuple[int, ...]
    """The ranks that the logs name."""
    confidence: str
    """How certain it is that this hardware failed: `high`, `medium` or `low`."""


@dataclass(frozen=True, slots=True)
class StalledCollective:
    """A collective that did not complete, as the flight recorder of the ranks shows it."""

    group: str
    """The name of the process group."""
    description: str
    """The purpose of the process group."""
    operation: str
    """The collective that most members called."""
    sequence: int
    """Its number in the process group."""
    shape: str
    """Sizes of the inputs and the outputs, in elements."""
    types: str
    """Types of the elements."""
    frame: str | None
    """The line of the program that called it; null if the dump has no stacks."""
    joined: tuple[int, ...]
    """Members that reached it."""
    missing: tuple[int, ...]
    """Members with a dump that did not reach it."""
    differing: tuple[int, ...]
    """Members that called something else under the same number."""
    behind: tuple[int, ...]
    """Members where a collective of the group is pending that others completed."""
    without_dump: tuple[int, ...]
    """Members without a dump."""


@dataclass(frozen=True, slots=True)
class Classification:
    """Why a job ended, as far as its logs show."""

    failure: str
    """The class of the failure, such as `infra-node`, `job-oom` or `unknown`."""
    domain: Domain
    """What failed: the infrastructure, the job, or neither."""
    action: Action
    """The first thing to do."""
    restart: Restart
    """Whether a restart can help: `free` does not count against a budget, `once` is a single
    time."""
    confidence: str
    """How certain the class is: `high`, `medium` or `low`."""
    message: Message
    advice: str
    """What to do, in a sentence."""
    node: str | None = None
    """The node that is suspected."""
    device: str | None = None
    """The device that is suspected."""
    rank: int | None = None
    """The rank that failed first, if known."""
    suspects: tuple[Suspect, ...] = ()
    """The hardware that the logs name, the decisive first; without errors that training
    survived."""
    evidence: tuple[Evidence, ...] = ()
    """What decided, then what supports the same class."""
    consequences: tuple[Evidence, ...] = ()
    """What followed from the cause."""
    others: tuple[Evidence, ...] = ()
    """What supports another class, and notes."""
    survived: tuple[Evidence, ...] = ()
    """Errors after which training continued."""
    collectives: tuple[StalledCollective, ...] = ()
    """Collectives that did not complete, by the dumps of the flight recorder: those that name a
    rank first, at most 50."""
    ranks_without_dump: tuple[int, ...] = ()
    """Members of any process group that left no dump."""
    n_files: int = 0
    """Logs that were read."""
    n_dumps: int = 0
    """Dumps of the flight recorder that were read."""
    n_lines: int = 0
    """Lines that were classified."""
    not_dumps: tuple[str, ...] = ()
    """Why files that were named as dumps were not read."""
    set_aside: tuple[str, ...] = ()
    """What was found and is no evidence, with the reasons, at most 50: another user may have put it
    there, or it is of another time, node, process or job than the attempt."""
    unread: tuple[str, ...] = ()
    """What ckptctl itself failed to read, a file, a line or a rule, and why: a failure there is not
    in the answer."""
    deadline_reached: bool = False
    """Whether the deadline passed before the end of the logs; the rest was not read."""
    next_command: str | None = None
    """The command to run next; null if nothing is left to do."""
    exit_code: int = 0

    @classmethod
    def stated(
        cls, failure: str, message: str, confidence: str = CONFIDENCES[0], nodes: Sequence[str] = ()
    ) -> Classification:
        """The class of an end that somebody states; no log was read for it."""
        about = CLASSES[failure]
        return cls(
            failure,
            about.domain,
            about.action,
            about.restart,
            confidence,
            message,
            about.advice,
            suspects=tuple(Suspect(node, (), (), confidence) for node in nodes),
        )

    @property
    def rule(self) -> str:
        """The rule that decided; empty where none did."""
        return self.evidence[0].rule if self.evidence else ""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The names of the suspected nodes, without those of low confidence."""
        return self.nodes_from("medium")

    def nodes_from(self, confidence: str) -> tuple[str, ...]:
        """The names of the nodes that are suspected with at least this confidence."""
        enough = CONFIDENCES[CONFIDENCES.index(confidence) :]
        return tuple(
            suspect.node
            for suspect in self.suspects
            if suspect.node and suspect.confidence in enough
        )
