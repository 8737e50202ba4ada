"""Tables of the results by category: level of detection, misses, false alarms."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

Found = Mapping[str, object]

ABOUT = {
    "A": "bytes of a shard changed",
    "B": "a file truncated or extended",
    "C": "files missing, renamed, of another kind, superfluous",
    "D": "an interrupted save",
    "F": "the storage fails in the k-th call",
    "G": "commands with too little memory",
    "I": "an object store fails in the k-th request",
    "J": "the step changes during its inspection",
    "K": "hostile metadata and records",
    "L": "well-formed but wrong",
    "M": "random mutations of metadata, records, seals, marks",
    "N": "names, numbers, times of steps",
    "O": "sound steps",
    "P": "retention of random roots",
    "Q": "records of a runbook found under a root",
    "R": "rank-file steps of frameworks",
    "S": "runs in unknown file names: lost, mixed, renamed, abandoned, whole",
}
HEAD = (
    "| category | cases | harmed | listing | structure | content | a seal alone | "
    "missed | suspected | not promised | false alarms | at most missed |"
)


def bound(n: int, missed: int) -> str:
    """How large the rate of misses may be, with 95 % confidence, after so many cases."""
    if not n:
        return "-"
    if missed:
        return f"{missed / n:.2%} seen"
    return f"{1 - 0.05 ** (1 / n):.2%}"


def rows(found: Sequence[Found]) -> list[str]:
    """A line for each category, and one for all of them."""
    by: dict[str, list[Found]] = defaultdict(list)
    for outcome in found:
        by[str(outcome["category"])].append(outcome)
    lines = [HEAD, "|---|" + "---:|" * (HEAD.count("|") - 2)]
    for category in sorted(by):
        lines.append(_row(f"{category}: {ABOUT[category]}", by[category]))
    lines.append(_row("all", found))
    return lines


def _row(name: str, some: Sequence[Found]) -> str:
    harmed = [one for one in some if one["harm"] == "values"]
    caught = {
        level: sum(one["caught"] == level for one in harmed)
        for level in ("listing", "structure", "content", "seal")
    }
    missed = sum(one["problem"] == "missed" for one in some)
    alarms = sum(one["problem"] in ("false alarm", "suspected for nothing") for one in some)
    silent = [one for one in harmed if one["caught"] is None and one["problem"] is None]
    promised = len(harmed) - len(silent)
    suspected = sum(bool(one.get("suspected")) for one in silent)
    cells = [len(some), len(harmed), *caught.values(), missed]
    cells += [suspected, len(silent) - suspected, alarms]
    numbers = " | ".join(f"{cell:,}" for cell in cells)
    return f"| {name} | {numbers} | {bound(promised, missed)} |"


PEERS = "| check | harmed steps checked | detected | not detected | share not detected |"


def peers(found: Sequence[Found]) -> list[str]:
    """The answers of other checks on the same damaged steps."""
    harmed = [one for one in found if one["harm"] == "values" and one["category"] in "ABCDL"]
    loaded = [one for one in harmed if one["loaded"] is not None]
    raised = sum(one["loaded"] in ("raised", "hung") for one in loaded)
    exists = sum(not one["metadata_exists"] for one in harmed)
    ours = [one for one in harmed if one["sealed"]]
    told = sum(one["caught"] is not None for one in ours)
    bare = [one for one in harmed if not one["sealed"]]
    told_bare = sum(one["caught"] is not None for one in bare)
    return [
        PEERS,
        "|---|---:|---:|---:|---:|",
        _peer("`ckptctl verify --level content`, sealed", len(ours), told),
        _peer("`ckptctl verify --level content`, no seal", len(bare), told_bare),
        _peer("`dcp.load` raises, or hangs", len(loaded), raised),
        _peer("`.metadata` exists", len(harmed), exists),
        _peer("the tracker file names the step", len(harmed), 0),
    ]


def _peer(name: str, n: int, told: int) -> str:
    silent = n - told
    return f"| {name} | {n:,} | {told:,} | {silent:,} | {silent / n if n else 0:.1%} |"


def summary(found: Sequence[Found]) -> str:
    """Both tables, as text."""
    return "\n".join([*rows(found), "", *peers(found)])


def published(page: Path, found: Sequence[Found], n_planned: int, seed: int) -> None:
    """Put the tables between the marks of a page."""
    text = page.read_text()
    run = f"Run for this table: {len(found):,} of the {n_planned:,} cases of seed {seed}."
    for name, lines in (("campaign", [run, "", *rows(found)]), ("peers", peers(found))):
        block = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        body = "\n".join(lines)
        text = block.sub(lambda match, body=body: f"{match[1]}{body}\n{match[2]}", text)
    page.write_text(text)
