"""The options of `ckptctl run`, as frozen objects that are made once at the edge.

How long a rank may stay in a section without a report is given by a person, or learned from
earlier attempts of the root, or built in. What was learned comes from a file that others can
write, so it never goes below a built-in bound.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, NamedTuple

from ckptctl.errors import UsageError
from ckptctl.formats.frameworks.layouts import compile_pattern
from ckptctl.formats.own.heartbeats import SECTIONS, Section
from ckptctl.formats.own.supervision import Attempt, SectionTimes
from ckptctl.inspection.marks import check_marks_file
from ckptctl.model import Level
from ckptctl.options import (
    Parameter,
    PickKeywords,
    PickPolicy,
    Requirements,
    StorageOptions,
    not_negative,
    options_from,
)
from ckptctl.selection.watching import ALARM_AFTER, Watched
from ckptctl.supervisor.nodes import NodeOptions
from ckptctl.supervisor.policy import BudgetOptions

FACTOR = 5.0
"""A learned limit is this many times the longest time seen. Source: NVRx, `safety_factor`."""

LONGEST_S = 7200.0
"""How long a limit is extended while the job shows that it works. Source: DLRover waits up to
120 minutes for a first step and for an evaluation."""

SHORTEST_S = 2.0
"""A shorter limit cannot be kept: heartbeats are written and read once a second."""


class _BuiltIn(NamedTuple):
    """`first_s` applies until enough was seen; a learned limit is never below `least_s`.

    `enough` is how many reports from the section that takes.
    """

    first_s: float
    least_s: float
    enough: int


_BUILT_IN: Mapping[Section, _BuiltIn] = {
    # DLRover: 120 min until the first step, with all that comes before it. NVRx and Megatron
    # Bridge give setup 600 s in their example.
    "setup": _BuiltIn(7200.0, 600.0, 3),
    # DLRover: 120 min; a compile takes long. torch ends a collective after 30 min.
    "first-step": _BuiltIn(7200.0, 1800.0, 3),
    # DLRover: 10 min without a step. Megatron Bridge's example: 180 s.
    "step": _BuiltIn(600.0, 180.0, 1000),
    # DLRover: 15 min. Megatron Bridge's example: 420 s.
    "checkpoint": _BuiltIn(900.0, 420.0, 10),
    # A background save is in nobody's way. torch ends its collectives after 30 min
    # (`default_pg_timeout`); DLRover's 15 min for a save is the least.
    "async-save": _BuiltIn(1800.0, 900.0, 10),
    # DLRover: 120 min for an evaluation; 30 min is torch's bound of a collective.
    "evaluation": _BuiltIn(7200.0, 1800.0, 10),
    # Whatever comes before, between and after: as long as the start of a job. Megatron Bridge's
    # example for time out of sections: 300 s.
    "outside": _BuiltIn(7200.0, 300.0, 10),
}


class Limit(NamedTuple):
    """`given` by a person: such a limit is never extended."""

    seconds: float
    given: bool

    @property
    def longest_s(self) -> float:
        """How long the limit is extended at most."""
        return self.seconds if self.given else max(self.seconds, LONGEST_S)


class SectionLimits:
    """The limits of one run.

    `given` are those of the options, in seconds; raises `UsageError` for a section that does not
    exist and a limit that cannot be kept. `seen` is what earlier attempts of the root
    needed; it grows while attempts are watched.
    """

    def __init__(
        self, given: Mapping[Section, float], seen: Mapping[str, SectionTimes] | None = None
    ) -> None:
        for section, seconds in given.items():
            if section not in SECTIONS:
                raise UsageError(
                    f"{section!r} is no section of a job; the sections are {', '.join(SECTIONS)}"
                )
            if not seconds >= SHORTEST_S:
                raise UsageError(
                    f"the limit of {section} is {seconds:g} s, and must be {SHORTEST_S:g} s or "
                    "more: heartbeats are written and read once a second"
                )
        self.given = dict(given)
        self.seen = dict(seen or {})

    def of(self, section: Section) -> Limit:
        """The limit of a section."""
        if section in self.given:
            return Limit(self.given[section], given=True)
        built_in, seen = _BUILT_IN[section], self.seen.get(section, SectionTimes())
        least_s = built_in.least_s if seen.n >= built_in.enough else built_in.first_s
        return Limit(max(least_s, FACTOR * seen.longest_s), given=False)

    def learn(self, section: Section, seconds: float, n: int) -> None:
        """Take in the longest time between two of `n` reports of a sound rank."""
        seen = self.seen.get(section, SectionTimes())
        self.seen[section] = SectionTimes(seen.n + n, max(seen.longest_s, seconds))

    def recall(self, seen: Mapping[str, SectionTimes]) -> None:
        """Go on from what the state of the run holds; unknown sections are passed over."""
        for section in SECTIONS:
            if section in seen:
                self.learn(section, seen[section].longest_s, seen[section].n)


WAIT_S = 900.0
"""How long to wait for a storage that does not answer: longer than `pick`'s grace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """Where the output of the job goes, and which of it is read.

    `stdout` is the descriptor for the command's output, by default the one of this process.
    """

    logs: Annotated[
        Sequence[str],
        Parameter(
            "--log FILE",
            "A log that the command writes to; may be given several times. What an attempt "
            "adds is classified, and a failure that a restart would meet again ends the run.",
        ),
    ] = ()
    log_dir: Annotated[
        str | None,
        Parameter(
            "--log-dir DIR",
            "Write the output of each attempt to DIR/ATTEMPT/output.log, and the "
            "decisions to DIR/run.log; with --torchrun in DIR/NODE.",
        ),
    ] = None
    evidence_dir: Annotated[
        str | None,
        Parameter(
            "--evidence-dir DIR",
            "Keep the stacks and flight-recorder dumps of a hang in DIR/attempt-N; by default "
            "in a new folder for temporary files on this node. DIR must not be on a storage that "
            "can hang.",
            setting=True,
        ),
    ] = None
    stdout: int | None = None


def _nothing(_: object) -> None:
    """Report to nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How a job is supervised.

    `budget` bounds the restarts, `output` sets what becomes of the logs, `nodes` how nodes are
    excluded and with how many ranks the job can run. `policy` and `requirements` are those of
    `pick`; steps are inspected at `structure` if no level is given and no seal required.
    `optional_roots` may be absent, as for `pick`. The state of the run is kept in the first
    root, or in the folder or URL `state`. With `create`, a missing root is created. `wait_s`
    bounds the wait for a storage that does not answer, before the first attempt and after a
    failed one.
    `section_timeouts` are limits in seconds: a job with a rank that reports nothing for longer
    hangs, and is ended and restarted; other sections have limits that are learned or built
    in. `on_attempt` gets each attempt when it has ended, `tell` the messages between them, and
    `on_alarm` the event that no newer usable step came for `alarm_after` save intervals; 0 turns
    that off.
    """

    budget: BudgetOptions = field(default_factory=BudgetOptions)
    output: OutputOptions = OutputOptions()
    nodes: NodeOptions = NodeOptions()
    policy: PickPolicy = PickPolicy()
    requirements: Requirements = Requirements()
    storage: StorageOptions = StorageOptions()
    optional_roots: Collection[str] = ()
    state: str | None = None
    create: bool = False
    wait_s: float = WAIT_S
    section_timeouts: Mapping[Section, float] = field(default_factory=dict)
    alarm_after: float = ALARM_AFTER
    on_attempt: Callable[[Attempt], None] = _nothing
    on_alarm: Callable[[Watched], None] = _nothing
    tell: Callable[[str], None] = _nothing

    def __post_init__(self) -> None:
        not_negative("wait-storage", self.wait_s)
        not_negative("alarm-after", self.alarm_after)
        # What is invalid must be refused before the first attempt, not after it.
        SectionLimits(self.section_timeouts)
        compile_pattern(self.requirements.pattern)
        check_marks_file(self.requirements.marks)

    @property
    def pick_policy(self) -> PickPolicy:
        """The policy with the level at which `run` inspects steps."""
        if self.policy.level is None and not self.requirements.reads_every_byte(None):
            return replace(self.policy, level=Level.STRUCTURE)
        return self.policy

    def with_keywords(self, keywords: Mapping[str, Any]) -> RunOptions:
        """The options with those fields that are given, of this object or of one in it.

        Raises `TypeError` for a keyword that is a field of none.
        """
        names = ("budget", "output", "policy", "requirements", "storage")
        left = dict(keywords)
        own = {each.name: left.pop(each.name) for each in fields(self) if each.name in left}
        whole = replace(self, **own)
        parts = options_from(left, *(getattr(whole, name) for name in names))
        return replace(whole, **dict(zip(names, parts, strict=True)))


class RunKeywords(PickKeywords, total=False):
    """The fields of `RunOptions` and of the objects in it as keywords of a function."""

    budget: BudgetOptions
    output: OutputOptions
    nodes: NodeOptions
    policy: PickPolicy
    requirements: Requirements
    storage: StorageOptions
    optional_roots: Collection[str]
    state: str | None
    create: bool
    wait_s: float
    section_timeouts: Mapping[Section, float]
    alarm_after: float
    on_attempt: Callable[[Attempt], None]
    on_alarm: Callable[[Watched], None]
    tell: Callable[[str], None]
    max_restarts: int
    max_free_restarts: int
    no_restart: Collection[int]
    backoff_s: float
    reset_budget: str | None
    logs: Sequence[str]
    log_dir: str | None
    evidence_dir: str | None
    stdout: int | None
