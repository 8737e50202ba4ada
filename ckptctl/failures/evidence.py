"""One piece of evidence of a failure.

Plain data. `rules` holds the rules, `matching` applies them to lines, `deciding`
weighs what they found.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ckptctl.model import Positive


class Role(str, Enum):
    """What a piece of evidence can be in the chain of a failure.

    A `cause` comes from whoever knows: the kernel, the driver, the scheduler. A `root`
    is an error that the program met and that explains the end. A `suspect` explains it
    where nothing better does. A `cascade` is what other processes say once one is gone;
    a `remark` is worth showing and decides nothing.
    """

    CAUSE = "cause"
    ROOT = "root"
    SUSPECT = "suspect"
    CASCADE = "cascade"
    REMARK = "remark"

    @property
    def weight(self) -> int:
        """0 for the weightiest."""
        return list(Role).index(self)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One observation: where, what, and what it is evidence of."""

    rule: str
    """The rule that found it, such as `xid.79`."""
    failure: str
    """The class that it supports."""
    role: Role
    """Its place in the chain of a failure."""
    says: str
    """What was observed, in words."""
    file: str
    """The log as it was named, or the option."""
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
    """How often the same was observed."""
    survived: bool = False
    """Training continued after it."""
    action: str = ""
    """What to do, where it differs from the action of the class; empty otherwise."""
    restart: str = ""
    """Whether to restart, where it differs from the class; empty otherwise."""
