"""No pattern takes more than linear time on a long line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import pattern_growth
import pytest
from pattern_growth import Search

from ckptctl.failures import matching, rank_dumps
from ckptctl.failures.rules import RULES
from ckptctl.logs import log_lines
from ckptctl.storage.logs import MAX_MATCHED

N_CHARS = MAX_MATCHED // 8
FILLERS = (" ", "a", "7", "x=", "A1b-", "/", ":", "-", ".", "a ", "a.", '"')
FEW = FILLERS[:5]


def lines(texts: list[str], n_chars: int) -> Iterator[str]:
    """Lines of `n_chars` that start a pattern over and over and never end it."""
    for filler in FILLERS:
        yield (filler * n_chars)[:n_chars]
    for text in texts:
        yield (text * n_chars)[:n_chars]
        for filler in FEW:
            yield ((text + filler) * n_chars)[:n_chars]
            yield text + (filler * n_chars)[: n_chars - len(text)]
            yield (filler * n_chars)[: n_chars - len(text)] + text


def texts_of(pattern: str) -> list[str]:
    """The literal runs in a pattern, at most six."""
    found = re.findall(r"[A-Za-z][A-Za-z /:_-]{2,}", re.sub(r"\\.|\?P<\w+>", " ", pattern))
    return list(dict.fromkeys(text.strip() for text in found))[:6]


def too_slow(search: Search, texts: list[str]) -> list[str]:
    """The lines on which a search takes more than linear time."""
    return pattern_growth.too_slow(search, partial(lines, texts), N_CHARS)


PATTERNS = {f"{rule.name}-{n}": each for rule in RULES for n, each in enumerate(rule.patterns)}
ONE_OF_EACH = {each: name for name, each in PATTERNS.items() if not name.startswith("xid.1")}


def test_a_pattern_of_a_rule_takes_linear_time_on_long_lines() -> None:
    slow = {
        name: too_slow(re.compile(pattern, re.IGNORECASE).search, texts_of(pattern))
        for pattern, name in ONE_OF_EACH.items()
    }
    assert {name: found for name, found in slow.items() if found} == {}


WHOLE_MESSAGE = ("_STEP", "_FINITE", "_RETRIED", "_GAVE_UP", "_CODE", "_COMMUNICATOR")


@pytest.mark.parametrize("name", WHOLE_MESSAGE)
def test_a_pattern_for_whole_messages_takes_linear_time_on_long_lines(name: str) -> None:
    pattern = getattr(matching, name)
    assert too_slow(pattern.search, texts_of(pattern.pattern)) == []


@pytest.mark.parametrize(
    "pattern", [rank_dumps._THREAD, rank_dumps._FRAME], ids=["thread", "frame"]
)
def test_a_pattern_for_stacks_takes_linear_time_on_long_lines(pattern: re.Pattern[str]) -> None:
    assert too_slow(pattern.match, texts_of(pattern.pattern)) == []


@pytest.mark.parametrize("pattern", log_lines._PREFIXES, ids=lambda pattern: pattern.pattern[:30])
def test_a_prefix_takes_linear_time_on_long_lines(pattern: re.Pattern[str]) -> None:
    assert too_slow(pattern.match, texts_of(pattern.pattern)) == []


def test_a_rule_without_a_limit_on_its_repeats_would_be_found() -> None:
    assert too_slow(re.compile("CUDA.*error.*memory").search, ["CUDA error "])
