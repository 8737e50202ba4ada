"""Format counts and lists of names in messages of findings.

One cause, one finding: a lost rank is one sentence with numbers in it, not a
thousand. What the finding is about is the business of the checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ckptctl.findings import CODES, Finding

MAX_ALIKE = 20
"""So many findings of one code are told one by one."""

_EXAMPLES = 3


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """`1 chunk`, `12,000 chunks`, `2 entries`."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def verb(number: int, one: str, many: str) -> str:
    """The form of a verb that goes with a number of things."""
    return one if number == 1 else many


def some_of(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    shown = ", ".join(names[:_EXAMPLES])
    more = len(names) - _EXAMPLES
    return f"{shown} and {more:,} more" if more > 0 else shown


def inside(part_path: str, name: str) -> str:
    """`name` of a part, relative to the step."""
    return f"{part_path}/{name}" if part_path else name


def at_most_few(findings: Iterable[Finding]) -> Iterator[Finding]:
    """The findings, but of each code only the first few and one for all others together."""
    others: dict[str, list[str]] = {}
    n_seen: dict[str, int] = {}
    for finding in findings:
        n_seen[finding.code] = n_seen.get(finding.code, 0) + 1
        if n_seen[finding.code] <= MAX_ALIKE:
            yield finding
        else:
            others.setdefault(finding.code, []).append(finding.where)
    for code, places in others.items():
        yield Finding(
            code,
            some_of(places),
            f"{CODES[code].title}: the same in {len(places):,} more places",
        )
