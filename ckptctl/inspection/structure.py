"""Read the heads and tails of a part's records, and check their structure."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ckptctl.checks.sizes import holds_safetensors
from ckptctl.checks.structure import RecordValue, StructureCheck, readable_ranges
from ckptctl.findings import Finding
from ckptctl.model import FileInfo
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import Reading, RecordSource, n_reads, open_records


@dataclass(frozen=True, slots=True)
class Structure:
    """What the records of one part hold and the findings about them, and what that cost.

    `values` are those of the small entries that were wanted, `crcs` the checksums of
    elements by the number of the range; see `StructureCheck`.
    """

    findings: tuple[Finding, ...]
    values: tuple[RecordValue, ...]
    crcs: array[int]
    n_records: int
    n_reads: int
    n_bytes: int


def read_structure(
    source: RecordSource,
    files: Sequence[FileInfo],
    part_path: str = "",
    *,
    wanted: Callable[[str], bool] = lambda _: False,
) -> Structure:
    """Check every record of a part that `files`, the part's listing, has room for.

    `part_path` is where the part is in the step. The values of entries whose FQN is
    `wanted` are kept. What is missing or truncated has a finding of `presence`, and is
    passed over here.

    Storage errors pass through: a file that has changed since the listing is one.
    Cost: `n_structure_reads` reads, and a second one for the rare record whose
    directory or pickle is long.
    """
    check = StructureCheck(source.ranges, part_path, wanted)
    reading = Reading()
    for _ in open_records(source, readable_ranges(source.ranges, files), check.take, reading):
        pass  # the check keeps what each record holds
    return Structure(
        tuple(check.findings()),
        tuple(check.values),
        check.crcs,
        check.n_records,
        reading.n_reads,
        reading.n_bytes,
    )


def n_structure_reads(ranges: Ranges) -> int:
    """How many reads `read_structure` takes if no file is missing; none are made here."""
    return 0 if holds_safetensors(ranges) else n_reads(ranges, ranges.by_file())
