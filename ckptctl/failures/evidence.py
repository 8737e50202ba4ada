"""One piece of evidence of a failure.

Plain data. `rules` holds the rules, `matching` applies them to lines, `deciding`
weighs what they found.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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
    """One observation: where, what, and what it is evidence of.

    `file` is the log as the caller named it, or what was given instead of one
    (`--exit-code`); `line` counts from 1 and is 0 where there are no lines. `at_s` is
    seconds since 1970 by the log's own clock, None where the line has none. `count` is
    how often the same was seen since. `survived`: training went on after it.
    """

    rule: str
    failure: str
    role: Role
    says: str
    file: str
    line: int
    text: str
    at_s: float | None = None
    host: str | None = None
    device: str | None = None
    rank: int | None = None
    count: int = 1
    survived: bool = False
    action: str = ""
    restart: str = ""
