"""One piece of evidence of a failure.

Plain data: `rules` holds the rules, `matching` applies them to lines, `deciding` weighs the
results.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ckptctl.model import Positive


class Role(str, Enum):
    """The role of a piece of evidence in the chain of a failure.

    A `cause` is reported by the kernel, the driver or the scheduler. A `root` is an error
    in the program that explains the end. A `suspect` explains it if nothing better does. A
    `cascade` is a consequence in other processes; a `remark` is shown but decides nothing.
    """

    CAUSE = "cause"
    ROOT = "root"
    SUSPECT = "suspect"
    CASCADE = "cascade"
    REMARK = "remark"

    @property
    def weight(self) -> int:
        """The rank of this role; 0 is the strongest."""
        return list(Role).index(self)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation: its place, its text, and the class that it supports."""

    rule: str
    """The rule that found it, such as `xid.79`."""
    failure: str
    """The class that it supports."""
    role: Role
    """Its place in the chain of a failure."""
    says: str
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
    action: str = ""
    """What to do, if it differs from the action of the class; else empty."""
    restart: str = ""
    """Whether to restart, if it differs from the class; else empty."""
