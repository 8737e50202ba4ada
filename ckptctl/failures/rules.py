"""The rules that turn lines of a log into evidence.

The rules are data: `rules/*.toml` are edited by hand, `tools/failure_rules.py` writes
`rules.json` from them, and a test compares the two.
"""

from __future__ import annotations

import json
import re
from functools import cache
from importlib import resources

from ckptctl.data_classes import dataclass
from ckptctl.failures.results import Role


@dataclass(frozen=True, slots=True)
class Rule:
    """Patterns in the text of a line, and the evidence that they give.

    One of `patterns` is searched for, ignoring case, in the message, without timestamps,
    rank prefixes and logger names. Groups `host`, `device` and `rank` name what failed.
    `literals` are texts in lower case; the patterns are tried only on a line that contains
    one of them. `quotable`: the form itself is proof, so it also counts inside quotes and
    advice. `level` is the lowest level of a logging line that counts: 10 debug, 20 info, 30
    warning, 40 error. `reporter`: the process that prints it waited for another, so its
    rank and host are not those that failed. `check` names a further condition in
    `matching`. `restart` and `action` are set if they differ from those of the class.
    """

    name: str
    failure: str
    role: Role
    message: str
    literals: tuple[str, ...]
    patterns: tuple[str, ...]
    quotable: bool = False
    level: int = 30
    kernel: bool = False
    reporter: bool = False
    check: str = ""
    action: str = ""
    restart: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        """All patterns as one."""
        return _compiled(self.patterns)


@cache
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    # On first use: compiling every rule takes 100 ms.
    return re.compile("|".join(patterns), re.IGNORECASE)


def _rules() -> tuple[Rule, ...]:
    text = (resources.files("ckptctl") / "failures" / "rules.json").read_text("utf-8")
    lists = ("literals", "patterns")
    return tuple(
        Rule(**{**entry, "role": Role(entry["role"]), **{key: tuple(entry[key]) for key in lists}})
        for entry in json.loads(text)
    )


RULES = _rules()
"""Every rule in the order in which they are tried: the first that matches a line decides."""
