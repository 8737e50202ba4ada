"""Inspect one part of a step: a folder of tensors.

Brings a part's metadata, its files and the checks together, first by the
listing, then by the structure of the records. The checks themselves are one
floor below.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ckptctl.checks.coverage import check_part_coverage
from ckptctl.checks.formatting import inside
from ckptctl.checks.identity import check_identity, claims_further, own_number
from ckptctl.checks.presence import check_presence
from ckptctl.checks.sizes import check_sizes
from ckptctl.checks.state import check_optimizer_steps
from ckptctl.checks.structure import RecordValue
from ckptctl.checks.times import check_times
from ckptctl.findings import Finding, Severity
from ckptctl.formats.frameworks.state_keys import entry_kinds, is_optimizer_step, optimizer_of
from ckptctl.inspection.metadata_files import PartFolder, read_metadata
from ckptctl.inspection.sidecars import read_numbers, scalar
from ckptctl.inspection.structure import n_structure_reads, read_structure
from ckptctl.model import SHARDED, Metadata, Part, PartFormat, Step
from ckptctl.records.ranges import Ranges
from ckptctl.records.reads import RecordSource, read_headers, read_indexes
from ckptctl.storage.contract import Kind, Store


@dataclass(frozen=True, slots=True)
class PartInspection:
    """What looking at one part has found so far.

    `metadata` is one, or one for each rank, or none that could be decoded.
    `numbers` are the values of the `step` and `tokens` entries that were read, by
    FQN. `ranges` are the byte ranges of all metadata, `crcs` what their records say of
    their elements, once their structure was looked at.
    """

    part: Part
    metadata: tuple[Metadata, ...] = ()
    ranges: Ranges = field(default_factory=lambda: Ranges(()))
    findings: tuple[Finding, ...] = ()
    numbers: Mapping[str, int] = field(default_factory=dict)
    crcs: Sequence[int] = field(default_factory=lambda: array("q"))
    bytes_read: int = 0

    @property
    def own_number(self) -> int | None:
        """The step that the metadata says it was written for, None where it does not say."""
        return own_number(self.metadata[0]) if self.metadata else None

    @property
    def records_by_file(self) -> Mapping[str, int]:
        """How many records lie in each shard file that the metadata names."""
        names = self.ranges.file_names
        return {
            name: len(inside) for name, inside in zip(names, self.ranges.by_file(), strict=True)
        }


def inspect_part(store: Store, step: Step, part: Part) -> PartInspection:
    """Look at a part by its listing and its metadata.

    Storage errors pass through. Cost: one read for each metadata file, or for each
    safetensors header; on file systems one more for each step and token count.
    """
    at = PartFolder(store, folder_of(step, part), part, step.url)
    if part.format is PartFormat.SAFETENSORS:
        return PartInspection(part, findings=tuple(inspect_safetensors(store, at.folder, part)))
    if part.format not in SHARDED:
        return PartInspection(part)
    metadata: list[Metadata] = []
    findings: list[Finding] = []
    for item in read_metadata(at):
        if isinstance(item, Metadata):
            metadata.append(item)
        else:
            findings.append(item)
    ranges = Ranges(metadata)
    if metadata:
        findings += check_identity(step, part, metadata[0])
        findings += check_times(step, part, ranges.file_names)
        findings += check_presence(ranges, part.files, part.path)
        findings += check_sizes(ranges, part.path)
        findings += check_part_coverage(metadata, part.path)
    looked = PartInspection(
        part,
        tuple(metadata),
        ranges,
        tuple(findings),
        bytes_read=sum(one.n_bytes for one in metadata),
    )
    # A request each on an object store: there they wait for a deeper look, or for a reason.
    if store.kind is Kind.OBJECT and not claims_further(step, looked.own_number):
        return looked
    return _with_numbers(store, at.folder, looked)


def inspect_safetensors(store: Store, folder: str, part: Part) -> Iterator[Finding]:
    """Yield what the headers and indexes of a part of safetensors say against it.

    `folder` is where the part is in the store. Storage errors pass through. Cost: one
    read for each file and each index; a second one for headers of more than 64 KiB.
    """
    from ckptctl.checks.safetensors import check_safetensors

    headers = read_headers(store, folder, part.files)
    return check_safetensors(part, headers, read_indexes(store, folder, part.files))


def _with_numbers(store: Store, folder: str, look: PartInspection) -> PartInspection:
    if not look.metadata or any(f.severity is Severity.FAULT for f in look.findings):
        return look
    metadata = look.metadata[0]
    kinds = entry_kinds(metadata, look.part.path)
    return replace(look, numbers=read_numbers(store, folder, metadata, kinds))


def folder_of(step: Step, part: Part) -> str:
    """Where in the store a part is."""
    return f"{step.name}/{part.path}" if part.path else step.name


def n_reads(look: PartInspection) -> int:
    """How many reads the structure of a part takes."""
    return n_structure_reads(look.ranges) if look.metadata else 0


def inspect_structure(store: Store, step: Step, look: PartInspection) -> PartInspection:
    """Look at the structure of each record of a part too.

    Storage errors pass through. Cost: the reads that `n_reads` counts.
    """
    if not look.metadata:
        return look
    folder = folder_of(step, look.part)
    paths = _optimizer_steps(look)
    source = RecordSource(store, folder, look.ranges)
    found = read_structure(source, look.part.files, look.part.path, wanted=paths.__contains__)
    steps = _steps_by_optimizer(paths, found.values, look.part)
    findings = (*look.findings, *found.findings, *check_optimizer_steps(steps, step.url))
    n_bytes = look.bytes_read + found.n_bytes
    deeper = replace(look, findings=findings, crcs=found.crcs, bytes_read=n_bytes)
    return _with_numbers(store, folder, deeper) if not look.numbers else deeper


def _optimizer_steps(look: PartInspection) -> Mapping[str, Sequence[str | int]]:
    """The key paths of the `step` counts that the optimizers keep, by FQN."""
    return {
        fqn: entry.path or tuple(fqn.split("."))
        for metadata in look.metadata
        for fqn, entry in metadata.tensors.items()
        if entry.shape == () and is_optimizer_step(entry.path or tuple(fqn.split(".")))
    }


def _steps_by_optimizer(
    paths: Mapping[str, Sequence[str | int]], values: Sequence[RecordValue], part: Part
) -> Mapping[str, Sequence[tuple[str, float]]]:
    """For each optimizer, the shard file and the value of each parameter's `step`."""
    steps: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for value in values:
        number = (
            scalar(value.stub, value.data, value.byte_order) if value.stub is not None else None
        )
        if number is not None:
            file = value.byte_range.file
            where = inside(part.path, file)
            steps[optimizer_of(paths[value.fqn])].append((where, number))
    return steps
