"""Run the benchmarks, print their rows, and write the tables of `bench/results.md`.

    python bench/run.py                     all areas
    python bench/run.py start loading       two of them
    python bench/run.py scale --scale 10    larger than by default
    python bench/run.py --write             also into bench/results.md
    python bench/run.py --minutes 5         fewer rounds, but each at least once

Each row has our figure, that of the peer in the same run, the limit (what a bare loop over
the same bytes and the caller's own work cost), the ratio to the peer, and the goal. Where the
limit is above the goal, 1.15 times the limit is the goal. An area that fails, because a peer is
not installed or for another reason, is reported in its table, and the others are measured.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import checkpointer
import content_check
import data_ledger
import devices
import listing
import loss_reading
import metadata_decode
import object_stores
import reader
import reshard
import scale
import shared_content
import startup
import structure_check
from measuring import LIMIT_ALLOWANCE, REPOSITORY, Area, Row, Size, limit_rounds

AREAS: dict[str, Area] = {
    "start": startup.rows,
    "metadata": metadata_decode.rows,
    "scale": scale.rows,
    "listing": listing.rows,
    "structure": structure_check.rows,
    "content": content_check.rows,
    "object-stores": object_stores.rows,
    "shared": shared_content.rows,
    "loading": reader.rows,
    "logs": loss_reading.rows,
    "saving": checkpointer.rows,
    "replicas": checkpointer.comparisons,
    "ledger": data_ledger.rows,
    "resharding": reshard.rows,
    "devices": devices.rows,
}
"""What is measured, by the name of its table."""

DOCUMENT = REPOSITORY / "bench" / "results.md"
HEAD = ("what", "ours", "peer", "limit", "ours / peer", "goal", "")
IDLE = 0.1
"""The share of the processors that others may use on a machine that is called idle."""


def main() -> int:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("areas", nargs="*", metavar="AREA", help=", ".join(AREAS))
    parser.add_argument("--scale", type=float, default=1.0, help="times the default sizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=20.0, help="shared among the areas")
    parser.add_argument("--write", action="store_true", help="write the tables")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    asked = parser.parse_args()
    if unknown := set(asked.areas) - set(AREAS):
        parser.error(f"{', '.join(sorted(unknown))}: the areas are {', '.join(AREAS)}")
    size = Size(asked.scale, asked.rounds)
    ends_s = time.monotonic() + 60 * asked.minutes
    names = asked.areas or list(AREAS)
    failed = []
    for number, name in enumerate(names):
        # What a fast area leaves is shared among those behind it.
        limit_rounds((ends_s - time.monotonic()) / (len(names) - number))
        print(f"\n== {name}", flush=True)
        others = Others()
        rows, why = measured(AREAS[name](size))
        print(condition := f"Measured {others.condition()}.{why}", flush=True)
        if why:
            failed.append(name)
        if asked.write:
            text = asked.document.read_text()
            asked.document.write_text(replaced(text, name, f"{condition}\n\n{table(rows)}"))
    if failed:
        print(f"\nnot measured whole: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


def measured(area: Iterator[Row]) -> tuple[list[Row], str]:
    """The rows of an area as they come, and why there are no more."""
    rows = []
    try:
        for row in area:
            rows.append(row)
            print(" | ".join(filter(None, cells(row))), flush=True)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the other areas are still measured
        traceback.print_exc()
        reason = (str(error).split("\n") or [""])[-1].strip() or type(error).__name__
        return rows, f" The rest of the rows could not be measured here: {reason}"
    return rows, ""


class Others:
    """How busy other programs keep the machine while an area is measured."""

    def __init__(self) -> None:
        self._began_s = time.perf_counter()
        self._all_s, self._own_s = _busy_s(), _own_s()

    def share(self) -> float:
        """The part of all processors that programs outside this run used."""
        wall_s = time.perf_counter() - self._began_s
        theirs_s = (_busy_s() - self._all_s) - (_own_s() - self._own_s)
        return max(0.0, theirs_s / wall_s / (os.cpu_count() or 1))

    def condition(self) -> str:
        """Commit, date, machine, and whether it was idle."""
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
        share = self.share()
        state = "idle" if share < IDLE else f"busy: other programs used {100 * share:.0f} % of it"
        return (
            f"on commit {_commit()}, {datetime.now(UTC):%Y-%m-%d}, "
            f"{os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB of memory, "
            f"Python {platform.python_version()}; the machine was {state}"
        )


def _commit() -> str:
    but_tables = ["--", ".", f":!{DOCUMENT.relative_to(REPOSITORY)}"]
    commands = (
        ["git", "rev-parse", "--short=7", "HEAD"],
        ["git", "status", "--porcelain", *but_tables],
    )
    commit, changed = (
        subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()
        for command in commands
    )
    return f"{commit} with changes" if changed else commit


def _busy_s() -> float:
    """Seconds that all processors worked since the machine started (Linux)."""
    user, nice, system, _, _, irq, soft, *_ = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + soft) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    return sum(os.times()[:4])


def cells(row: Row) -> tuple[str, ...]:
    """The columns of a row."""
    allowed = row.allowed
    goal = "" if allowed is None else f"{shown(allowed)}"
    if allowed is not None and allowed != row.goal:
        goal = f"{shown(allowed)} ({LIMIT_ALLOWANCE} × limit; {shown(row.goal or 0)})"
    unit = f" {row.unit}" if row.unit else ""
    return (
        row.name,
        f"{shown(row.ours)}{unit}",
        f"{row.peer_name}: {shown(row.peer)}" if row.peer else "",
        shown(row.limit) if row.limit is not None else "",
        shown(row.ratio) if row.peer else "",
        goal,
        row.verdict if row.verdict == "met" else row.verdict and f"**{row.verdict}**",
    )


def shown(value: float) -> str:
    """Three digits, or all before the point."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 0.001 else f"{value:.4f}"


def table(rows: Iterable[Row]) -> str:
    """The rows as a table of Markdown."""
    lines: list[Sequence[str]] = [HEAD, ("---",) * len(HEAD), *map(cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def replaced(text: str, name: str, content: str) -> str:
    """The document with the table of an area between its markers."""
    start, end = f"<!-- bench: {name} -->\n", "\n<!-- /bench -->"
    before, found, rest = text.partition(start)
    if not found or end not in rest:
        raise SystemExit(f"the document has no markers {start.strip()} and {end.strip()}")
    return f"{before}{start}{content}{end}{rest.partition(end)[2]}"


if __name__ == "__main__":
    sys.exit(main())
