"""Recognize storage that each node sees for itself: every step lacks the files of the same ranks.

Where the root is on a disk of each node, or a mount is missing on one, each node sees the files of
its own ranks. Every step then looks like an interrupted save or a damaged one, and all of them
lack the same ranks; on a node without rank 0 they have no metadata either, and begin at `__2_0`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ckptctl.findings import Finding, Severity
from ckptctl.formats.frameworks.layouts import shard_rank
from ckptctl.formatting import counted, some_of, verb
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.rank_files import ranks_in

MIN_STEPS = 2
"""So many steps that lack the same ranks are a pattern."""

_LACKING = frozenset({"shard.missing", "file.missing", "metadata.missing"})


class NotShared(msgspec.Struct, frozen=True):
    """Steps that all lack the files of the same ranks."""

    numbers: tuple[int, ...]
    """The steps, newest first."""
    lacking: tuple[int, ...]
    """The ranks whose files no step has here."""
    present: tuple[int, ...]
    """The ranks whose files every step has here."""

    @property
    def message(self) -> str:
        """What is seen, and what it means, in one line."""
        do = verb(len(self.lacking), "rank", "ranks")
        return (
            f"{counted(len(self.numbers), 'step')} ({some_of(self.numbers)}) lack the files of the "
            f"same {do} ({some_of(self.lacking)}), and have those of {some_of(self.present)}: the "
            "root may not be shared, and the other files lie on other nodes"
        )

    @property
    def finding(self) -> Finding:
        """The finding `root.not-shared`."""
        return Finding(
            "root.not-shared",
            "",
            self.message,
            expected="the files of all ranks on each node",
            found=f"those of {counted(len(self.present), 'rank')}",
            next_command="ckptctl explain root.not-shared",
        )


def not_shared(inspections: Sequence[Inspection]) -> NotShared | None:
    """The pattern of storage that is not shared in steps that cannot be used, newest first.

    None unless `MIN_STEPS` lack the files of the same ranks, and none lacks those of others.
    """
    seen = [(one.report.number, *_ranks(one)) for one in inspections if _lacks_files(one)]
    seen = [(number, lacking, present) for number, lacking, present in seen if lacking]
    kinds = {(lacking, present) for _, lacking, present in seen}
    if len(seen) < MIN_STEPS or len(kinds) != 1:
        return None
    ((lacking, present),) = kinds
    numbers = tuple(number for number, _, _ in seen if number is not None)
    return NotShared(numbers, tuple(sorted(lacking)), tuple(sorted(present)))


def _lacks_files(inspection: Inspection) -> bool:
    faults = inspection.report.with_severity(Severity.FAULT)
    return any(one.code in _LACKING for one in faults)


def _ranks(inspection: Inspection) -> tuple[frozenset[int], frozenset[int]]:
    """The ranks of which files are missing, and those of which files are there."""
    present: set[int] = set()
    named: set[int] = set()
    for part in inspection.parts:
        there = ranks_in(part.part)
        present |= there
        names = part.ranges.file_names if part.metadata else ()
        named.update(rank for name in names if (rank := shard_rank(name)) is not None)
        named.update(range(max((one.n_ranks or 0 for one in part.part.grids), default=0)))
    # Without metadata nothing states the number of ranks, but the first is always 0.
    named.update(range(min(present, default=0)))
    return frozenset(named - present), frozenset(present)
