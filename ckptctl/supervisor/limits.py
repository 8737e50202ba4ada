"""How long a rank may stay in a section without a report.

A limit is given by a person, or learned from earlier attempts of the root, or built in. What
was learned comes from a file that others can write, so it never goes below a built-in bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ckptctl.errors import UsageError
from ckptctl.formats.own.heartbeats import SECTIONS, Section
from ckptctl.formats.own.supervision import SectionDocument

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


class SectionTimes(NamedTuple):
    """What earlier attempts needed in a section: reports, and the longest time between two."""

    n: int = 0
    longest_s: float = 0.0


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
        self, given: Mapping[Section, float], seen: Mapping[Section, SectionTimes] | None = None
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

    def recall(self, documents: Mapping[str, SectionDocument]) -> None:
        """Go on from what the state of the run holds; unknown sections are passed over."""
        for section in SECTIONS:
            if section in documents:
                kept = documents[section]
                self.learn(section, kept["longest_milliseconds"] / 1000, kept["n"])

    def documents(self) -> dict[str, SectionDocument]:
        """What the state of the run keeps."""
        return {
            section: {"n": seen.n, "longest_milliseconds": int(1000 * seen.longest_s)}
            for section, seen in self.seen.items()
        }
