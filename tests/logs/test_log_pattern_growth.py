"""No line holds `loss`: each pattern takes linear time at most, and each line is bounded."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from pattern_growth import MOST_GROWTH, N_LOOKS, TOO_SHORT_S, seconds, too_slow

from ckptctl.logs.formats import TABLE, joined
from ckptctl.logs.reading import LogReader
from ckptctl.storage.logs import MAX_MATCHED

N_CHARS = MAX_MATCHED // 8
FILLERS = (" ", "a", "7", "x=", "a: ", "/", ":", "| ", "[", "{", "'", "1,", "a1 ", "━")


def patterns() -> Iterator[tuple[str, re.Pattern[str]]]:
    """Every regular expression that reads logs, by where it is."""
    for form in TABLE.lines:
        for name in ("head", "pairs", "tail"):
            if getattr(form, name):
                yield f"{form.name}.{name}", re.compile(joined(getattr(form, name)))
    for block in TABLE.blocks:
        yield f"{block.name}.head", re.compile(block.head)
        yield f"{block.name}.metric", re.compile(block.metric)
    for number, marker in enumerate(TABLE.markers):
        yield f"marker.{number}", re.compile(joined(marker.pattern), re.IGNORECASE)
    for package in ("ckptctl.logs", "ckptctl.loss"):
        for module in pkgutil.iter_modules(importlib.import_module(package).__path__):
            if module.name == "log_lines":
                continue  # its patterns match at the beginning of a line only
            for name, value in vars(importlib.import_module(f"{package}.{module.name}")).items():
                if isinstance(value, re.Pattern) and isinstance(value.pattern, str):
                    yield f"{package}.{module.name}.{name}", value


def texts_of(pattern: str) -> list[str]:
    """What a pattern looks for, as far as it is literal, at most eight pieces."""
    plain = re.sub(r"\(\?P<\w+>|\(\?[:=!<]+|\\[bswdD]|\{\d+(?:,\d+)?\}|\[[^\]]*\]|[?*+^$()]", " ",
                   pattern)  # fmt: skip
    plain = plain.replace("\\", "")
    found = [piece.strip() for part in plain.split("|") for piece in part.split("  ")]
    return list(dict.fromkeys(piece for piece in found if piece))[:8]


def lines(texts: list[str], n_chars: int) -> Iterator[str]:
    """Lines that begin a pattern over and over, and never end it."""
    for filler in FILLERS:
        yield (filler * n_chars)[:n_chars]
    for text in texts:
        yield (text * n_chars)[:n_chars]
        for filler in (" ", " 1 ", "1/2 ", "a", ": 1 ", "=1 "):
            yield ((text + filler) * n_chars)[:n_chars]
            yield text + (filler * n_chars)[: n_chars - len(text)]


def test_a_pattern_takes_linear_time_on_long_lines():
    slow = {}
    for name, compiled in patterns():
        search = compiled.findall if name.endswith(".pairs") else compiled.search
        slow[name] = too_slow(search, partial(lines, texts_of(compiled.pattern)), N_CHARS)
    assert len(slow) > 100
    assert {name: found for name, found in slow.items() if found} == {}


WHOLE = {
    "a word behind a row": "step 5 loss 2.5 " + "a",
    "a word behind a row of Megatron": "iteration 5/ 10 | ",
    "steps": "step 1 ",
    "epochs and steps": "epoch 1 step 1 ",
    "announcements": "Loaded checkpoint from ",
    "bars": "| 1/2 [00:00<",
    "dictionaries": "{'loss': 1, 'a': ",
    "rows of fairseq": "epoch 1: 1 / 2 ",
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_long_line_costs_no_more_than_its_bytes(kind):
    """A line that is eight times as long is matched no further than the shorter one."""

    def read(n_chars: int) -> Callable[[str], object]:
        text = (WHOLE[kind] + "a " * (n_chars // 2)) if kind.startswith("a word") else ""
        text = text or (WHOLE[kind] * n_chars)[:n_chars] + " loss 1"
        data = f"{text}\n".encode() * 3

        def search(_: str) -> object:
            reader = LogReader("train.log")
            return [*reader.feed(data), *reader.end()]

        return search

    short, long = (read(n) for n in (MAX_MATCHED, 8 * MAX_MATCHED))
    # One busy moment is no growth: an excess counts if every look finds it.
    assert any(
        seconds(long, "", 3) < max(TOO_SHORT_S, MOST_GROWTH * seconds(short, "", 3))
        for _ in range(N_LOOKS)
    )
