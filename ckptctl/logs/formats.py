"""The programs that print a training step as text, and the lines that mark the start of a process.

`formats.toml` is the table: `console` reads the lines of steps, `fields` the names of metrics,
`text_logs` the markers, `log_lines` the prefixes of lines. Programs that save no checkpoints of
several ranks are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources

import msgspec

from ckptctl.logs.clocks import CLOCK, MONTH, ZONE

Pattern = str | tuple[str, ...]
"""A regular expression, or the parts of one."""


def joined(pattern: Pattern) -> str:
    """The whole regular expression."""
    return "".join(pattern)


class LineFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one program prints a step; `head`, `pairs` and `tail` are regular expressions.

    Every line contains `hint`. `head` matches the beginning of the line with the step, in
    the group `step`, or as `it` of `per` iterations of the epoch `epoch`; other groups are
    fields of the row. `pairs` matches names and values after it. `tail` matches in complete
    lines only.

    `averages`: the loss is the mean since the row before. `trimmed`: trailing zeros are
    left out. `fallback`: formats of one program are preferred. `rounds`: steps may start again in
    each `epoch`, or after `per` of them. `redrawn`: a step may be printed several times,
    and the last one counts. `epochs_above`: a line of its own may name the epoch in which the
    steps below it are.
    """

    name: str
    hint: str
    head: Pattern
    pairs: Pattern = ""
    tail: str = ""
    keys: Mapping[str, str] = {}
    averages: bool = False
    trimmed: bool = False
    fallback: bool = False
    rounds: bool = False
    redrawn: bool = False
    epochs_above: bool = False


class BlockFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one program prints a step over several lines.

    `head` matches the heading with the step, `metric` a name and a value. With `gaps`, at most so
    many other lines lie between the metrics.
    """

    name: str
    hint: str
    head: str
    metric: str
    gaps: int = 0


class MarkerFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line that marks the start of a process: `fresh` if it loads no checkpoint.

    The group `step` is the last step that the checkpoint holds; with `first_step`, the first one
    that will run.
    """

    pattern: Pattern
    fresh: bool = False
    first_step: bool = False


class FormatTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entries of `formats.toml`.

    Each line of a marker contains one of `marker_hints`; the first marker that matches counts. A
    pattern of `prefixes` matches what is in front of a line; its groups name the parts.
    """

    fields: Mapping[str, str]
    fragments: Mapping[str, str]
    record_keys: Mapping[str, str]
    marker_hints: tuple[str, ...]
    prefixes: tuple[str, ...]
    lines: tuple[LineFormat, ...]
    blocks: tuple[BlockFormat, ...]
    markers: tuple[MarkerFormat, ...]


def _table() -> FormatTable:
    text = (resources.files("ckptctl.logs") / "formats.toml").read_text("utf-8")
    fragments = msgspec.toml.decode(text.partition("\n[[")[0])["fragments"]
    fragments = {"clock": CLOCK, "zone": ZONE, "month": MONTH, **fragments}
    for name, fragment in reversed(fragments.items()):
        text = text.replace(f"<<{name}>>", fragment)
    return msgspec.toml.decode(text, type=FormatTable)


TABLE = _table()
