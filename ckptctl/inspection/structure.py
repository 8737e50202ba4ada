"""Read the heads and tails of a part's records, and check their structure."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ckptctl.checks.sizes import holds_safetensors
from ckptctl.checks.structure import RecordValue, StructureCheck, readable_ranges
from ckptctl.findings import Finding
from ckptctl.formats.frameworks.state_keys import is_optimizer_step, optimizer_of
from ckptctl.formatting import inside
from ckptctl.inspection.sidecars import scalar
from ckptctl.model import FileInfo, Metadata
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


def optimizer_steps(metadatas: Sequence[Metadata]) -> Mapping[str, Sequence[str | int]]:
    """The key paths of the `step` counts that the optimizers keep, by FQN."""
    return {
        fqn: entry.path or tuple(fqn.split("."))
        for metadata in metadatas
        for fqn, entry in metadata.tensors.items()
        if entry.shape == () and is_optimizer_step(entry.path or tuple(fqn.split(".")))
    }


def steps_by_optimizer(
    metadatas: Sequence[Metadata], structure: Structure, part_path: str
) -> Mapping[str, Sequence[tuple[str, float]]]:
    """For each optimizer, the shard file and the value of each parameter's `step`."""
    paths = optimizer_steps(metadatas)
    steps: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for value in structure.values:
        stub = value.stub
        number = None if stub is None else scalar(stub, value.data, value.byte_order)
        if number is not None:
            where = inside(part_path, value.byte_range.file)
            steps[optimizer_of(paths[value.fqn])].append((where, number))
    return steps
