"""How the verdict of a step is drawn: the same glyph on the terminal, on pages and in pictures."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ckptctl.findings import Verdict

Style = Literal["", "good", "warn", "bad", "strong", "name", "command", "code"]
"""A `command` is to be run next, with the caller's options; `code` stays as it is."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """How one state is drawn, and the word for it."""

    glyph: str
    ascii: str
    style: Style
    word: str


LACKING = "lacking"
VERIFIED = "verified"

# Worst first, as `Verdict` has it; a step that is whole but lacks what was asked
# for comes before the good ones.
STEP_MARKS: Mapping[str, Symbol] = {
    Verdict.UNSAFE.value: Symbol("⊘", "U", "bad", "unsafe"),
    Verdict.UNKNOWN.value: Symbol("?", "?", "warn", "unknown"),
    Verdict.CHANGED.value: Symbol("∆", "c", "warn", "changed"),
    Verdict.CORRUPT.value: Symbol("✗", "X", "bad", "corrupt"),
    Verdict.INCOMPLETE.value: Symbol("!", "!", "bad", "incomplete"),
    Verdict.IN_PROGRESS.value: Symbol("⋯", "~", "warn", "in-progress"),
    Verdict.UNVERIFIABLE.value: Symbol("◌", "u", "warn", "unverifiable"),
    Verdict.REJECTED.value: Symbol("⨯", "R", "bad", "rejected"),
    Verdict.SUPERSEDED.value: Symbol("»", "S", "warn", "superseded"),
    LACKING: Symbol("◒", "-", "warn", "lacks state"),
    Verdict.COMPLETE.value: Symbol("◇", "=", "good", "complete, not all proven"),
    VERIFIED: Symbol("✓", "+", "good", "complete, every byte verified"),
}
