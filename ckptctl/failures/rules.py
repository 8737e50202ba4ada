"""The rules that turn lines of a log into evidence, and a search for the lines they may match.

The rules are data: `rules/*.toml` are edited by hand, `tools/failure_rules.py` writes
`rules.json` from them, and a test compares the two.

Each rule has literals, hundreds in all, and nearly every line contains none. A block is
searched as one text: the set of its words shows which literals it can contain, and only those
are searched for. A line that is returned need not match: `matching` tries the patterns.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from itertools import accumulate

import msgspec

from ckptctl.failures.results import Role


class Rule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """Patterns in the text of a line, and the evidence that they give.

    One of `patterns` is searched for, ignoring case, in the message, without timestamps,
    rank prefixes and logger names. Groups `host`, `device` and `rank` name what failed.
    `literals` are texts in lower case, derived from the patterns; these are tried only on a
    line that contains one of them. `quotable`: the form itself is proof, so it also counts
    inside quotes and advice, and beside words such as `skipping`. `level` is the lowest level
    of a logging line that counts: 10 debug, 20 info, 30 warning, 40 error. `reporter`: the
    process that prints it waited for another, so its rank and host are not those that failed.
    `process`: the line is about one process of a machine, which may be one of another job.
    `frames`: only where the innermost frame of the traceback is of the program, not of a library:
    any line that does not wait for a device (`own`), or a `raise` or `assert` (`raise`).
    `lasting`: the state outlives the process, so it is a suspicion also where Python ignored the
    exception, as at the exit. `follows`: on a device on which the program failed within the same
    minute, it is a consequence. `check` names a further condition in `matching`. `ending`: tried
    only on the line that ends a traceback, which needs no literal. `restart` and `action` are set
    if they differ from those of the class.
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
    process: bool = False
    lasting: bool = False
    follows: bool = False
    frames: str = ""
    check: str = ""
    ending: bool = False
    action: str = ""
    restart: str = ""

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """All patterns as one, on first use: compiling every rule takes 100 ms."""
        return re.compile("|".join(self.patterns), re.IGNORECASE)


RULES = msgspec.json.decode(
    (resources.files("ckptctl.failures") / "rules.json").read_bytes(), type=tuple[Rule, ...]
)
"""Every rule in the order in which they are tried: the first that matches a line decides."""
FOLLOWING = frozenset(rule.name for rule in RULES if rule.follows)
"""The names of the rules that `follows`."""
ENDING = tuple(number for number, rule in enumerate(RULES) if rule.ending)


# Frequent text of healthy logs that contains a literal. All patterns require `hpu` and `inf` as
# words, or `infinity`; the others are columns of Megatron-LM's line of a step.
_HEALTHY_TEXTS = {
    b"hpu": b"throughput",
    b"inf": b"info",
    b"nan": b"number of nan iterations:",
    b"loss scale": b"| loss scale:",
}
_FRAMES = (
    *(b"traceback (most recent", b'", line ', b"root cause (first", b"(most recent call first)"),
    *(b"fatal python error", b"exception ignored ", b"--- logging error ---"),
    *(b"error in atexit._run_exitfuncs", b"in _run_finalizers"),
)


@dataclass(frozen=True, slots=True)
class Hits:
    """The matches in the lines of a block, by index in it.

    `rules`: the rules of which the line contains a literal; empty if the literal is part of
    healthy output. `frames`: lines that may begin a traceback or a report. `losses`: lines
    that mention a loss.
    """

    rules: Mapping[int, frozenset[int]]
    frames: frozenset[int]
    losses: frozenset[int]
    inits: frozenset[int]


def _by_literal() -> Mapping[bytes, frozenset[int]]:
    found: dict[str, set[int]] = defaultdict(set)
    for number, rule in enumerate(RULES):
        for literal in rule.literals:
            found[literal].add(number)
    return {literal.encode(): frozenset(numbers) for literal, numbers in found.items()}


def _by_word(literals: Mapping[bytes, frozenset[int]]) -> Mapping[bytes, tuple[bytes, ...]]:
    """The literals by the longest run of letters in each; `b""` for those without letters."""
    found: dict[bytes, list[bytes]] = defaultdict(list)
    for literal in literals:
        found[max(re.findall(b"[a-z]*", literal), key=len)].append(literal)
    return {word: tuple(texts) for word, texts in found.items()}


_LITERALS = _by_literal()
_BY_WORD = _by_word(_LITERALS)
_LETTERS = b"abcdefghijklmnopqrstuvwxyz"
_ONLY_LETTERS = bytes(byte if byte in _LETTERS else 32 for byte in range(256))


def find_literals(texts: Sequence[str]) -> Hits:
    """Return what `matching` has to try on these lines; no text contains a line end.

    Cost: finding the words of the block, and one search per literal whose word occurs.
    """
    block = "\n".join(texts).lower().encode("utf-8", "surrogatepass")
    ends = tuple(accumulate(len(line) + 1 for line in block.split(b"\n")))
    words = b" ".join({*block.translate(_ONLY_LETTERS).split()})
    rules: dict[int, frozenset[int]] = defaultdict(frozenset)
    for word, literals in _BY_WORD.items():
        if word not in words:
            continue
        for literal in literals:
            for line in _lines_with(literal, block, ends):
                is_healthy = literal in _HEALTHY_TEXTS and _is_healthy(literal, block, line, ends)
                rules[line] |= frozenset() if is_healthy else _LITERALS[literal]
    return Hits(
        rules,
        frozenset(line for frame in _FRAMES for line in _lines_with(frame, block, ends)),
        frozenset(_lines_with(b"loss", block, ends)),
        frozenset(_lines_with(b" nranks ", block, ends)),
    )


def _lines_with(literal: bytes, block: bytes, ends: Sequence[int]) -> Iterator[int]:
    at = block.find(literal)
    while at >= 0:
        line = bisect_right(ends, at)
        yield line
        at = block.find(literal, ends[line])


def _is_healthy(literal: bytes, block: bytes, line: int, ends: Sequence[int]) -> bool:
    within = (ends[line - 1] if line else 0, ends[line])
    return block.count(literal, *within) == block.count(_HEALTHY_TEXTS[literal], *within)
