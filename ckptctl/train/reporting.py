"""Print messages of ckptctl in a training job.

On standard error of rank 0, a few lines at a resume, unless the script gives a function
of its own. The one module below `train/` that writes anywhere but into the root.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Tell = Callable[[str], None]


def to_stderr(line: str) -> None:
    """One line, at once."""
    sys.stderr.write(f"ckptctl: {line}\n")
    sys.stderr.flush()


def lines_of(report: Mapping[str, Any], notes: list[str], age_s: float | None) -> Iterator[str]:
    """What a resume says: from where, how old, what was refused and why; then the inventory."""
    if report["step"] is None:
        what = "no save has come to its end there" if report["rejected"] else "it holds no step"
        yield f"fresh run in {report['root']}: {what}"
    else:
        age = "" if age_s is None else f", saved {_ago(age_s)} ago"
        ranks = report["saved_world_size"]
        by = "" if ranks is None else f" by {ranks} rank{'' if ranks == 1 else 's'}"
        tokens = "" if report["tokens"] is None else f", {report['tokens']:,} tokens"
        back = ", falling back" if report["fell_back"] else ""
        yield f"resumed from step {report['step']}{back}: {report['path']}{age}{by}{tokens}"
    for refused in report["rejected"]:
        yield f"not from step {refused['step']}: {refused['reason']}"
    if report["superseded"]:
        steps = ", ".join(str(step) for step in report["superseded"])
        yield f"superseded from now on: step {steps}"
    for warning in report["warnings"]:
        yield f"warning: {warning}"
    for word, names in report["state"].items():
        if names:
            yield f"{word}: {', '.join(names)}"
    if report["resharding"] is not None:
        saved, now = report["saved_world_size"], report["world_size"]
        yield f"note: saved by {saved}, loaded on {now}: {report['resharding']['message']}"
    for note in notes:
        yield f"note: {note}"


def _ago(age_s: float) -> str:
    for unit, size in (("days", 86_400), ("h", 3_600), ("min", 60)):
        if age_s >= 2 * size:
            return f"{age_s / size:.0f} {unit}"
    return f"{max(0.0, age_s):.0f} s"
