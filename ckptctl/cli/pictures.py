"""Draw claims, steps and ranks as symbols.

In the map of ranks a glyph stands for one rank, or for the worst of several where there is no
room. A glyph has the meaning of its colour, so nothing is lost without colour; ASCII replaces it
where the terminal supports nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ckptctl.cli.rendering import Line, Style, StyledText, line
from ckptctl.findings import (
    CODES,
    NO_METADATA,
    Claim,
    ClaimName,
    ClaimState,
    Report,
    Severity,
    Verdict,
)
from ckptctl.formats.frameworks.file_names import rank_file, rank_in_name
from ckptctl.formats.frameworks.layouts import rank_local_rank, shard_rank
from ckptctl.formatting import counted
from ckptctl.model import Level


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

MAX_CELLS = 64
"""A row of ranks is never longer: more cells cannot be distinguished."""

_MAX_RANKS = 100_000  # a file may be named __999999999_0.distcp


CLAIM_MARKS: Mapping[ClaimState, Symbol] = {
    ClaimState.PROVEN: Symbol("✓", "+", "good", "proven"),
    ClaimState.UNKNOWN: Symbol("○", "?", "", "unknown"),
    ClaimState.CONTRADICTED: Symbol("✗", "X", "bad", "contradicted"),
}

RANK_MARKS: Mapping[str, Symbol] = {
    "damaged": Symbol("✗", "X", "bad", "damaged"),
    "missing": Symbol("○", "o", "bad", "missing"),
    "short": Symbol("!", "!", "bad", "truncated"),
    "unreadable": Symbol("?", "?", "warn", "not readable"),
    "long": Symbol("»", ">", "warn", "too long"),
    "extra": Symbol("±", "x", "", "extra"),
    "empty": Symbol("·", ".", "", "empty"),
    "none": Symbol("-", "-", "", "no file"),
    "present": Symbol("□", "p", "", "present, not checked"),
    "framed": Symbol("◇", "=", "", "structure only"),
    "verified": Symbol("✓", "+", "good", "verified"),
}

_RANK_STATES = {
    "shard.missing": "missing",
    "file.missing": "missing",
    "shard.truncated": "short",
    "shard.trailing": "long",
    "shard.orphan": "extra",
    "shard.empty": "empty",
    "step.archived": "unreadable",
    "step.denied": "unreadable",
    "step.unknown": "unreadable",
    "record.unverifiable": "present",
}
_PROVE_NOTHING = frozenset({"record.no-crc", "record.transformed", "format.no-checksums"})
"""Notes on shards whose bytes no checksum of theirs proves."""


def step_state(report: Report, *, is_lacking: bool = False) -> str:
    """The key of a step in `STEP_MARKS`; `is_lacking`: it lacks what other steps have.

    A step without an optimizer is never shown as a good one: a resume would reset it.
    """
    verdict: str = report.verdict.value
    if report.verdict is not Verdict.COMPLETE:
        return verdict
    held = report.state.held
    if is_lacking or not report.usable or (held and "optimizer" not in held):
        return LACKING
    return verdict if not_proven(report, CLAIMED_BY_VERIFIED) else VERIFIED


CLAIMED_BY_VERIFIED = (ClaimName.WHOLE, ClaimName.BYTES, ClaimName.ONE_SAVE)
"""What is claimed of a step that is called verified: all of it is there, as one save wrote it."""


def not_proven(report: Report, names: Sequence[ClaimName]) -> str:
    """Those of the claims `names` that are not proven, in words; empty where all are."""
    return ", ".join(name.value for name in names if not report.claim(name).is_proven)


def warnings_of(report: Report) -> str:
    """`, 1 warning` for a usable step that has one, else nothing."""
    n_warnings = len(report.with_severity(Severity.WARNING)) if report.usable else 0
    return f", {counted(n_warnings, 'warning')}" if n_warnings else ""


def claim_lines(claims: Sequence[Claim], *, unicode: bool) -> list[Line]:
    """A line for each claim: whether it is proven, and by what; of a finding its code."""
    return [
        line(
            "  ",
            f"{claim.name.value:<9}",
            glyph(CLAIM_MARKS[claim.state], unicode),
            f" {claim.finding or claim.by}",
            hang=13,
        )
        for claim in claims
    ]


def claim_glyphs(claims: Sequence[Claim], *, unicode: bool) -> str:
    """A glyph for each claim, in the order of `ClaimName`."""
    return "".join(glyph(CLAIM_MARKS[claim.state], unicode).text for claim in claims)


def claims_legend(*, unicode: bool) -> str:
    """The claims in the order of their glyphs, and what each glyph says."""
    words = "  ".join(
        f"{glyph(symbol, unicode).text} {symbol.word}" for symbol in CLAIM_MARKS.values()
    )
    return f"claims: {', '.join(name.value for name in ClaimName)}; {words}"


def map_of_ranks(report: Report, *, unicode: bool) -> list[Line]:
    """A row of glyphs for each part of the step, one for each rank that wrote it.

    Nothing where only one rank wrote the step, or where the number is unknown.
    """
    rows = rank_states(report)
    if not any(len(states) > 1 for states in rows.values()):
        return []
    label_width = max(len(part) for part in rows) + 2
    lines: list[Line] = []
    longest = 1
    for part, states in rows.items():
        per_cell = -(-len(states) // MAX_CELLS)
        longest = max(longest, per_cell)
        cells = [
            glyph(RANK_MARKS[_worst(states[i : i + per_cell])], unicode)
            for i in range(0, len(states), per_cell)
        ]
        label = part.ljust(label_width) if label_width > 2 else ""
        lines.append(line("  ", label, *cells, solid=True))
    n_ranks = max(len(states) for states in rows.values())
    title = f"ranks 0 to {n_ranks - 1}"
    if longest > 1:
        title += f"; {longest} to a glyph, the worst shows"
    counts = Counter(state for states in rows.values() for state in states)
    return [line(title), *lines, _legend(counts, unicode)]


def rank_states(report: Report) -> dict[str, list[str]]:
    """For each part of the step the state of every rank's files: a key of `RANK_MARKS` each.

    A rank has the worst state that a finding gives one of its files. The state of the others is
    how far the inspection came. A part that no rank's file is in has no row.
    """
    reached = _reached(report)
    # A part without its metadata is read only where a seal lists its files.
    not_read = {
        finding.where.rpartition("/")[0]
        for finding in report.findings
        if finding.code in NO_METADATA
        and report.seal is None
        and _rank(finding.where.rpartition("/")[2]) is None
    }
    lacking = [finding.where for finding in report.findings if finding.code == "file.missing"]
    of_ranks = (rank_file(path, report.layout) or rank_in_name(path) for path in lacking)
    absent = "missing" if any(rank is not None for rank in of_ranks) else "none"
    here = {part: set(ranks) for part, ranks in report.ranks}
    states: dict[tuple[str, int], list[str]] = {}
    for finding in report.findings:
        part, _, name = finding.where.rpartition("/")
        rank = _rank(name)
        if rank is None and here.keys() == {""}:  # rank files lie below one part, the step
            part, rank = "", rank_in_name(finding.where)
        state = _RANK_STATES.get(finding.code)
        if state is None and CODES[finding.code].severity is Severity.FAULT:
            state = "damaged"
        if rank is not None and state is not None:
            states.setdefault((part, rank), []).append(state)
    here |= {part: set() for part, _ in states if part not in here}
    size = report.world_size.size if report.world_size and len(here) == 1 else 0
    rows: dict[str, list[str]] = {}
    for part, present in sorted(here.items()):
        named = {rank for in_part, rank in states if in_part == part}
        n_ranks = min(_MAX_RANKS, max(size, max(present | named, default=-1) + 1))
        if n_ranks == 0:
            continue  # the consolidated model beside the shards of the ranks
        there = "present" if part in not_read else reached
        rows[part] = [
            _worst([*states.get((part, rank), ()), there if rank in present else absent])
            for rank in range(n_ranks)
        ]
    return rows


def _reached(report: Report) -> str:
    """What is known of a shard file without findings."""
    if report.level is Level.LISTING or report.verdict in (Verdict.UNKNOWN, Verdict.CHANGED):
        return "present"
    unproven = any(f.code in _PROVE_NOTHING for f in report.findings) and report.seal is None
    if report.level is Level.STRUCTURE or unproven or report.verdict is Verdict.UNVERIFIABLE:
        return "framed"
    return "verified"


def _rank(name: str) -> int | None:
    rank = shard_rank(name)
    return rank_local_rank(name) if rank is None else rank


def _legend(counts: Mapping[str, int], unicode: bool) -> Line:
    pieces: list[StyledText] = []
    for state, mark in RANK_MARKS.items():
        if counts.get(state):
            pieces += [
                StyledText("   " if pieces else ""),
                glyph(mark, unicode),
                StyledText(f" {counts[state]:,} {mark.word}"),
            ]
    return line("  ", *pieces, hang=2)


def glyph(mark: Symbol, unicode: bool) -> StyledText:
    """The glyph of a state, in its colour."""
    return StyledText(mark.glyph if unicode else mark.ascii, mark.style)


def _worst(states: Sequence[str]) -> str:
    return min(states, key=list(RANK_MARKS).index)
