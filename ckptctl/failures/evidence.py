"""What is one piece of evidence, and what is a rule that finds it?

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
class Rule:
    """Patterns in the text of a line, and what they are evidence of.

    One of `patterns` is searched for, without regard to case, in the message: timestamps,
    rank prefixes and logger names are taken off before. Groups `host`, `device`, `rank`
    say who is meant. `needles` are texts in lower case of which the line holds one, or
    the pattern is not tried. `quotable`: also inside of quotes and in advice, since the
    form itself is proof. `level` is the lowest level of a logging line that counts:
    10 debug, 20 info, 30 warning, 40 error. `restart` and `action` are given where they
    differ from those of the class.
    """

    name: str
    failure: str
    role: Role
    needles: tuple[str, ...]
    patterns: tuple[str, ...]
    says: str
    quotable: bool = False
    level: int = 30
    kernel: bool = False
    action: str = ""
    restart: str = ""


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
