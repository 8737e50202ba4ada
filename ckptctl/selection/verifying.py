"""Verify one step, and describe its contents: tensors, ranks, sizes, train state."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Unpack

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import OptionError, PathNotFound, StepDamaged, StorageError
from ckptctl.findings import Finding, Report, Verdict
from ckptctl.formats.frameworks.file_names import rank_in_name
from ckptctl.formats.frameworks.layouts import StepName, compile_pattern, shard_rank, train_step_of
from ckptctl.formats.frameworks.state_keys import StateMap, entry_kinds
from ckptctl.formatting import command_line, inside
from ckptctl.inspection.inspecting import Inspection, inspect_step
from ckptctl.inspection.marks import check_marks_file
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import (
    DTYPE_SIZES,
    SHARDED,
    ExitCode,
    FileInfo,
    Level,
    Metadata,
    NextCommand,
    PartFormat,
    StepNumber,
    StepUrl,
    TrainState,
    WorldSize,
)
from ckptctl.options import (
    ContentOptions,
    PickPolicy,
    Requirements,
    StepKeywords,
    StorageOptions,
    VerifyKeywords,
    known_level,
    options_from,
)
from ckptctl.selection.candidates import CachingInspector, Candidate, candidates_of, in_order
from ckptctl.selection.picking import pick
from ckptctl.selection.roots import RootListing, list_root, neighbours_of
from ckptctl.selection.targets import (
    OpenRoot,
    check_is_step,
    check_no_lone_file,
    named_step,
    parse_target,
)
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name, open_store

if TYPE_CHECKING:
    from ckptctl.inspection.content import Asked
    from ckptctl.records.byte_pass import OnProgress, Stop


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor as `show` lists it; `n_bytes` counts its elements, not its records."""

    fqn: str
    """Its FQN."""
    dtype: str
    """The dtype by torch's name, without `torch.`."""
    shape: tuple[int, ...]
    """Elements along each dimension; empty for a scalar."""
    n_chunks: int
    """Chunks in which it is saved."""
    n_bytes: int
    """Bytes of its elements."""
    kind: str
    """The kind of train state that it belongs to."""
    file: str | None = None
    """The file that holds it, relative to the step; null where chunks of it lie in shard files."""
    whole_shape: tuple[int, ...] | None = None
    """Of a DTensor in a rank file, the shape of the whole; `shape` is then that of the part."""


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One shard file: the rank that wrote it, its size, how many records it contains."""

    path: str
    """Path relative to the step."""
    rank: int | None
    """The rank that wrote it, where its name states it."""
    n_bytes: int
    """Size in bytes."""
    n_records: int
    """Records in it."""


@dataclass(frozen=True, slots=True)
class Contents:
    """The content of a step: the result of `show`."""

    url: StepUrl
    number: StepNumber
    layout: str
    """The framework whose layout the step has."""
    exit_code: ExitCode
    tensors: tuple[TensorRow, ...]
    """Every tensor; in rank files and safetensors those of each file."""
    bytes_entries: tuple[str, ...]
    """The FQNs of entries that are not tensors."""
    shards: tuple[ShardRow, ...]
    """Every shard file."""
    state: TrainState
    """What a resume would restore."""
    world_size: WorldSize | None
    """How many ranks wrote the step; null where that is unknown."""
    n_params: int | None
    """Elements of the model's tensors; null where the files do not state which are copies."""
    n_bytes: int
    """Size of all files in bytes."""
    bytes_by_kind: tuple[tuple[str, int], ...]
    """Bytes of tensor elements by kind of train state."""
    checkpoint_id: str | None
    """The writer's name for the folder."""
    save_id: str | None
    """The writer's id of the save."""
    torch_version: str
    """The range of torch versions that write such metadata."""
    findings: tuple[Finding, ...]
    """The findings, worst first."""
    next_command: NextCommand
    unlisted: tuple[str, ...] = ()
    """Files whose tensors are not listed: damaged ones, and those after 200,000 tensors."""

    @property
    def train_step(self) -> int | None:
        """The training step of the train state; see `train_step_of`."""
        return train_step_of(self.layout, self.number, self.state.step.value)


def verify(
    step: str,
    *,
    level: Level | str | None = None,
    content: ContentOptions = ContentOptions(),
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    stop: Stop | None = None,
    on_progress: OnProgress | None = None,
    group: ProcessGroup | None = None,
    **keywords: Unpack[VerifyKeywords],
) -> Report:
    """Inspect one step as deep as `level`, and report everything that is found.

    `level` None is as deep as `pick` inspects: as deep as is cheap on that storage.
    `step` is `PATH`, `ROOT@1200`, `ROOT@latest` or `ROOT@auto`, the step that `pick` takes
    under the same requirements. Train state that is required and missing gives exit code
    23, a world size that cannot load the step 24, a required seal that is missing 22.

    A seal in the step is compared with it: sizes and metadata at every level, every
    byte at `content`. `remote_checksums` reads nothing for its comparison, at any level:
    equal checksums prove that no object was replaced by another since the step was sealed,
    not what the disks hold today. Where there is no seal, or no checksum of the whole
    object, the step is `unverifiable` (22).

    The rest is for level `content`. `stop` ends the reading from another thread or a signal
    handler, as the deadline of `content` does. What was compared until then is in the
    report, whose level is then `structure`; an inspection that was ended before all that was
    asked for had been compared is `unverifiable` (22). `on_progress` gets bytes read and
    bytes to read. With a `group` (see `ckptctl.distributed`) several processes share the
    bytes: each calls this with the same arguments, and rank 0 has the report.

    Each field of the three options objects is a keyword of this function, too.

    A storage that fails gives the verdict `unknown`. Raises `UsageError` and
    `PathNotFound` where there is no such step, `StorageError` where the root that
    should hold it cannot be listed.

    Cost: see `inspecting.inspect_step`, and for the claim about its branch `branches.branch_of`.
    """
    level = known_level(level)
    content, requirements, storage = options_from(keywords, content, requirements, storage)
    reading = None
    group = group or ProcessGroup()
    if requirements.reads_every_byte(level):
        reading = content_asked(content, group, stop, on_progress)
    else:
        _check_no_content(step, content)
    if reading is not None and group.size > 1:  # the others read their shares without a report
        level = Level.CONTENT
    with ExitStack() as stack:
        opened: list[OpenTarget] = []
        # A process that does not find the step must not leave the others waiting for its share.
        group.from_all(
            lambda: opened.append(stack.enter_context(open_target(step, requirements, storage)))
        )
        report = opened[0].inspect(requirements, level, reading)
        return _with_branch(opened[0], report, requirements)


def _with_branch(found: OpenTarget, inspection: Inspection, requirements: Requirements) -> Report:
    """The report, with the claim that the step is on the branch of the run; see `branch_of`."""
    report, named = inspection.report, found.named
    if isinstance(named, str) or report.verdict is Verdict.UNKNOWN:
        return report
    try:
        root = OpenRoot(found.store, found.root_listing)
        candidate = Candidate(0, named)
        inspector = CachingInspector((root,), requirements, Level.LISTING)
        inspector.inspected[candidate] = inspection
        inspector.claim_branch(candidate, in_order(candidates_of((root,)), PickPolicy()))
        return inspector.inspected[candidate].report
    except StorageError:
        return report


def _check_no_content(step: str, content: ContentOptions) -> None:
    """Raise `UsageError` where an option for level `content` was given without that level."""
    given = {
        "subset": content.subset,
        "deadline": None if content.deadline_s is None else f"{content.deadline_s:g}s",
        "jobs": None if content.jobs is None else str(content.jobs),
        "nan-scan": "" if content.nan_scan else None,
        "state-check": "" if content.state_check else None,
    }
    for name, value in given.items():
        if value is not None:
            words = ["verify", step, "--level", "content", f"--{name}", value]
            raise OptionError(
                f"--{name}",
                "is for level content; the other levels read no more than a little of each record",
                next_command=command_line(*filter(None, words)),
            )


def content_asked(
    content: ContentOptions,
    group: ProcessGroup,
    stop: Stop | None = None,
    on_progress: OnProgress | None = None,
) -> Asked:
    """What an inspection at level `content` is asked for; its deadline begins now."""
    # Imported here: the other levels do not need them, and start sooner.
    from ckptctl.inspection.content import Asked, parse_subset
    from ckptctl.records.byte_pass import Limits, Stop

    until_s = None if content.deadline_s is None else time.monotonic() + content.deadline_s
    limits = Limits(content.jobs, until_s, stop or Stop(), on_progress)
    subset = parse_subset(content.subset)
    return Asked(limits, subset, group, content.nan_scan, content.state_check)


class OpenTarget(OpenStep):
    """A step that an argument names, in the store of its root; `pattern` finds older ones."""

    def __init__(
        self,
        store: Store,
        named: StepName | str,
        files: Sequence[FileInfo] | None = None,
        pattern: re.Pattern[str] | None = None,
    ) -> None:
        super().__init__(store, named, files)
        self._pattern = pattern

    def inspect(
        self,
        requirements: Requirements,
        level: Level | None,
        content: Asked | None = None,
        seal_bytes: SealBytes | None = None,
    ) -> Inspection:
        """Inspect the step, with those beside it if it has a number; see `inspect_step`."""
        neighbours = None
        if not isinstance(self.named, str):
            neighbours = neighbours_of(lambda: self.root_listing.steps, self.named.number)
        return inspect_step(
            self,
            requirements,
            level=level,
            content=content,
            neighbours=neighbours,
            seal_bytes=seal_bytes,
        )

    @cached_property
    def root_listing(self) -> RootListing:
        """The steps of its root. Cost: one listing."""
        return list_root(self.store, self._pattern)


@contextmanager
def open_target(
    step: str, requirements: Requirements, storage: StorageOptions
) -> Iterator[OpenTarget]:
    """Find the step that an argument names, and keep the store of its root open.

    Raises `UsageError` and `PathNotFound` where there is no such step, and `StepDamaged`
    (`step.changed`) where the work on it misses a file that was listed.
    """
    check_marks_file(requirements.marks)
    target = parse_target(step)
    if target.which == "auto":
        # `pick` compares no checksums of the store, and `auto` is what it takes.
        of_pick = replace(requirements, remote_checksums=False)
        chosen = pick(target.root, requirements=of_pick, storage=storage)
        target = parse_target(chosen.path)
    compiled = compile_pattern(requirements.pattern)
    with open_store(target.root, storage) as store:
        found = OpenTarget(store, named_step(store, target, compiled), None, compiled)
        try:
            files = found.files
        except PathNotFound as error:
            root, hint = store.url, ""
            if "@" in base_name(step):
                above, _, _ = step.rpartition("@")
                root = above or "."
                hint = "; after an @ comes a step number, latest or auto"
                hint += "" if above else f", and before it the root: .{step}"
            message = f"{found.url} does not exist{hint}"
            scan = command_line("scan", root)
            raise PathNotFound(message, next_command=scan) from error
        check_no_lone_file(found.store, found.named, files)
        if isinstance(found.named, str):
            check_is_step(found.url, files)
        try:
            yield found
        except PathNotFound as error:
            for finding in found.changes():
                raise StepDamaged(found.url, finding) from error
            raise


def show(
    step: str,
    *,
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StepKeywords],
) -> Contents:
    """List what a step holds, by its metadata, or by the pickles and headers of its files.

    `step` is named as for `verify`, and the same is raised. The step is inspected at
    `listing`: what is wrong with it is in `findings`. Cost: that of `listing`, and of
    `held_tensors` for rank files and safetensors.
    """
    requirements, storage = options_from(keywords, requirements, storage)
    with open_target(step, requirements, storage) as found:
        return _contents(found.inspect(requirements, Level.LISTING), requirements.state_map)


def _contents(inspected: Inspection, mapped: StateMap) -> Contents:
    # Imported here: no other command lists the tensors of files.
    from ckptctl.inspection.sidecars import held_tensors

    report = inspected.report
    tensors = [row for part in inspected.parts for row in _tensors(part, mapped)]
    beside = inspected.opened.beside if inspected.parts else None
    parts = [*inspected.parts, *([] if beside is None else [beside])]
    held, unlisted = held_tensors(parts, mapped)
    tensors += [
        TensorRow(one.fqn, one.dtype, one.shape, 1, one.n_bytes, one.kind, one.file, one.whole)
        for one in held
    ]
    sharded = [part for part in inspected.parts if part.part.format in SHARDED]
    metadata = [one for part in sharded for one in part.metadata]
    by_kind: Counter[str] = Counter()
    for row in tensors:
        by_kind[row.kind] += row.n_bytes
    return Contents(
        url=report.url,
        number=report.number,
        layout=report.layout,
        exit_code=report.exit_code,
        tensors=tuple(tensors),
        unlisted=tuple(unlisted),
        bytes_entries=tuple(fqn for one in metadata for fqn in one.bytes_entries),
        shards=tuple(row for part in inspected.parts for row in _shards(part)),
        state=report.state,
        world_size=report.world_size,
        n_params=None if unlisted else _n_params(tensors),
        n_bytes=report.n_bytes,
        bytes_by_kind=tuple(by_kind.most_common()),
        checkpoint_id=next((one.checkpoint_id for one in metadata if one.checkpoint_id), None),
        save_id=next((one.save_id for one in metadata if one.save_id), None),
        torch_version=_torch_version(metadata[0]) if metadata else "unknown",
        findings=report.findings,
        next_command=command_line("verify", report.url, "--level", "structure"),
    )


def _tensors(part: OpenPart, mapped: StateMap) -> Iterator[TensorRow]:
    seen: set[str] = set()
    for metadata in part.metadata:
        kinds = entry_kinds(metadata, part.part.path, mapped)
        for fqn, entry in metadata.tensors.items():
            if fqn not in seen:
                seen.add(fqn)
                n_bytes = prod(entry.shape) * DTYPE_SIZES.get(entry.dtype, 1)
                kind, n_chunks = kinds[fqn].names[0], len(entry.chunks)
                yield TensorRow(fqn, entry.dtype, entry.shape, n_chunks, n_bytes, kind)


def _n_params(tensors: Sequence[TensorRow]) -> int | None:
    """Elements of the model; None where several files hold what may be copies or parts.

    Files whose paths differ in numbers alone are those of several ranks.
    """
    shapes: dict[tuple[str, str], tuple[int, ...]] = {}
    for row in tensors:
        key = (re.sub("[0-9]+", "N", row.file or ""), row.fqn)
        if row.kind == "model" and key in shapes and row.whole_shape is None:
            return None
        if row.kind == "model":
            shapes[key] = row.whole_shape or row.shape
    return sum(map(prod, shapes.values()))


def _shards(part: OpenPart) -> Iterator[ShardRow]:
    names, by_file = part.ranges.file_names, part.ranges.by_file
    records = {name: len(numbers) for name, numbers in zip(names, by_file, strict=True)}
    for file in part.part.files:
        path = inside(part.part.path, file.path)
        if file.path in records or file.path.endswith((".distcp", ".safetensors")):
            rank = shard_rank(file.path)
            if part.part.format is PartFormat.RANK_FILES:
                rank = rank_in_name(file.path)
            yield ShardRow(path, rank, file.size, records.get(file.path, 0))


def _torch_version(metadata: Metadata) -> str:
    """Which torch wrote metadata of this form.

    Source: `torch/distributed/checkpoint/metadata.py` of 2.1 to 2.15.
    """
    if any(entry.strides is not None for entry in metadata.tensors.values()):
        return "2.15 or newer"
    if metadata.version is not None:
        return "2.9 or newer"
    return "2.4 to 2.8" if metadata.save_id is not None else "2.1 to 2.3"
