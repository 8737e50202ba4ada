"""Convert a step to files of another format, or such files to a step of sharded DCP.

What SRC is and how DST's name ends choose the direction:

- A step of sharded DCP becomes one `torch.save` file if DST ends in `.pt`, `.pth`, `.bin`
  or `.ckpt`, one safetensors file if it ends in `.safetensors`, and otherwise a folder of
  safetensors. `exporting` does that.
- A `torch.save` file, a safetensors file, an index of such files, or a folder that holds
  them and no DCP, becomes a step of sharded DCP called DST. It is planned, written, verified,
  sealed and published like a reshard. `reading` reads the files, and no code from them runs.

Hugging Face's Trainer and accelerate write the model to safetensors or a `torch.save` file, each
optimizer to a `torch.save` file, and everything small to files beside them. Model and optimizers
become parts of sharded DCP, in the folders in which both programs save them with FSDP; the other
files are copied unchanged, as `reshard` does with sidecars.

Shards of other frameworks, and ambiguous names, are refused with the command that puts them
together or states the intent.
"""

from __future__ import annotations

import re
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple, Unpack

from ckptctl.errors import OptionError, RecordUnreadable, UsageError
from ckptctl.findings import Finding, Report, Verdict
from ckptctl.formats.archive.safetensors import INDEX_SUFFIX, SUFFIX
from ckptctl.formats.families import CONVERSIONS
from ckptctl.formats.frameworks.file_names import kind_of_file, lost_before_others
from ckptctl.formats.frameworks.layouts import (
    FLAT_SUFFIXES,
    METADATA,
    counts_training_steps,
    is_own,
    shard_rank,
    step_name,
)
from ckptctl.formats.frameworks.parts import may_be_archive
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.inspection.content import Asked
from ckptctl.inspection.inspecting import Inspection, inspect_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.shape import check_unchanged
from ckptctl.inspection.stages import inspect_safetensors
from ckptctl.inspection.train_state import NO_STATE
from ckptctl.model import SHARDED, FileInfo, Level, Part, PartFormat, Step
from ckptctl.options import Requirements, StorageKeywords, StorageOptions, options_from
from ckptctl.outside_numbers import clamped
from ckptctl.records.byte_pass import Limits, OnProgress
from ckptctl.resharding.executing import DEFAULT_MEMORY, Place, WriteOptions, write
from ckptctl.resharding.exporting import Export, to_flat, to_safetensors, write_export
from ckptctl.resharding.planning import TargetLayout, check_world_size, plan
from ckptctl.resharding.reading import files_of_index, open_flat, read_safetensors
from ckptctl.resharding.results import Converted, left_out, not_converted
from ckptctl.resharding.sources import (
    RankFile,
    Source,
    SourceDamaged,
    SourcePart,
    check_format,
    check_is_copied,
    refusal,
    source_in,
    source_of,
)
from ckptctl.resharding.steps import check_is_path, inspect_whole, target_place
from ckptctl.selection.verifying import OpenTarget, open_target
from ckptctl.storage.contract import ShortRead, Store, list_if_there
from ckptctl.storage.opening import base_name, join_url, open_store, parent_url


def convert(
    source: str,
    target: str,
    *,
    world_size: int | None = None,
    only_model: bool = False,
    strip: str = "",
    under: str = "",
    file_bytes: int | None = None,
    accept_unverifiable: bool = False,
    memory: int = DEFAULT_MEMORY,
    jobs: int | None = None,
    key: bytes | None = None,
    on_progress: OnProgress | None = None,
    pattern: str | None = None,
    grace_s: float = 600.0,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> Converted:
    """Write a step in another format, or make a step of sharded DCP from another format.

    Where `source` is a step of sharded DCP, named as for `verify`, the end of `target`
    selects the format: a file of `torch.save` (`.pt`, `.pth`, `.bin`, `.ckpt`) with the
    nested state, which `torch.load(weights_only=True)` reads; a file of safetensors
    (`.safetensors`); else a folder of safetensors, begun anew before a file has more than
    `file_bytes` (default `FILE_BYTES`). `strip` is taken away from the beginning of
    names in safetensors. What has no place in the format is left out, counted, and named
    in the findings.

    Where `source` is a file of `torch.save`, of safetensors, an index of them, or a folder
    of safetensors, `target` is the path of the new step, and `world_size` how many ranks
    it is sharded for (default 1). Dicts in a file of `torch.save` are flattened as in
    torch's own checkpoints; what is neither a tensor nor plain is refused by its key;
    tensors of safetensors are put below the key `under`. Nothing in a file runs. The step
    is verified, sealed (with `key` if one is given) and published as by `reshard`.

    `only_model` leaves out all but the model. Safetensors have no checksums: without a
    seal they are taken with `accept_unverifiable` only.

    A source that is not complete is refused, and damage ends it: the result has the report,
    and nothing is published. Raises `UsageError` where `target` is there, where a tensor
    has a dtype that the format lacks, a value is not plain, or the names could mean
    something else; `StorageError`.

    Cost: every byte of the source read once, twice where records are cut across rows; of
    the result, written once and read once.
    """
    (storage,) = options_from(keywords, storage)
    check_world_size(world_size)
    asked = Conversion(
        source,
        target,
        world_size,
        only_model,
        strip,
        under,
        file_bytes,
        WriteOptions(accept_unverifiable, memory, jobs, key, on_progress=on_progress),
    )
    check_is_path(target, "the target")
    with one_file(source, storage) as file:
        if file is not None:
            return _from_file(asked, file, storage)
    checked = Requirements(grace_s=grace_s, pattern=pattern)
    with open_target(source, checked, storage) as found:
        if found.is_file:
            return _from_file(asked, OneFile(found.store, found.files[0]), storage)
        inspected = inspect_whole(found, checked, accept_unverifiable=accept_unverifiable)
        formats = {part.format for part in inspected.step.parts}
        is_safetensors = formats == {PartFormat.SAFETENSORS} or any(
            part.safetensors for part in inspected.parts
        )
        save = state_files(inspected.step, found.url, only_model=only_model)
        if not formats & SHARDED and (is_safetensors or save is not None):
            _check_number(asked, found, inspected)
            _check_makes_step(asked, "a folder of files that hold whole tensors")
            if not asked.refuses(inspected.report):
                # Only a seal can verify them, and that takes reading every byte.
                level = Level.CONTENT
                inspected = inspect_step(found, checked, level=level, content=Asked(Limits()))
            with target_place(asked.target, storage, source=found.url) as place:
                return import_folder(inspected, save, asked, place)
        if formats == {PartFormat.RANK_FILES}:
            raise _not_one_file(asked, inspected)
        check_format(inspected)
        _check_makes_files(asked)
        return _from_step(asked, found, inspected, storage)


def _from_file(asked: Conversion, file: OneFile, storage: StorageOptions) -> Converted:
    """Make a step from a file."""
    name = file.file.path
    if name == METADATA or shard_rank(name) is not None:
        step = parent_url(asked.source)
        raise UsageError(
            f"{asked.source} is a part of the step {step}", instead_of=asked.source, instead=step
        )
    is_safetensors = name.endswith((SUFFIX, INDEX_SUFFIX))
    _check_makes_step(asked, "one of safetensors" if is_safetensors else "one of torch.save")
    if asked.under and not is_safetensors:
        raise OptionError(
            "--under",
            f"{asked.under}: {asked.source} is a torch.save file, whose keys already "
            "define the nesting",
            without=("--under",),
        )
    make = import_file if is_safetensors else import_flat
    with target_place(asked.target, storage) as place:
        return make(file, asked, place)


def _check_number(asked: Conversion, found: OpenTarget, inspected: Inspection) -> None:
    """Raise `UsageError` for a target named as another step than the train state counts."""
    count, named = inspected.report.state.step.value, step_name(asked.name)
    if (
        asked.only_model
        or count is None
        or named is None
        or not counts_training_steps(named.layout)
    ):
        return
    # The name of the source contradicts the count no less than the same name of the target.
    own = None if isinstance(found.named, str) else found.named
    is_own = own is not None and counts_training_steps(own.layout) and own.number == named.number
    if named.number == count or is_own:
        return
    better = asked.name.replace(str(named.number), str(count))
    target = join_url(parent_url(asked.target.rstrip("/")), better)
    raise UsageError(
        f"{asked.target} is a name for step {named.number}, and the train state of {asked.source} "
        f"counts {count}: name it {target}",
        instead_of=asked.target,
        instead=target,
    )


def _not_one_file(asked: Conversion, inspected: Inspection) -> UsageError:
    """The error for a folder that holds files of `torch.save`, or shards of several ranks."""
    grids = [grid for part in inspected.step.parts for grid in part.grids if grid.sharded]
    if grids:
        url, framework = inspected.step.url, grids[0].framework
        command = CONVERSIONS[framework].format(step=url, root=url.rpartition("/")[0])
        return UsageError(
            f"{url} holds shards of each rank ({framework}), which are not put together here",
            next_command=command,
        )
    held = [file.path for file in inspected.step.files if file.path.endswith(FLAT_SUFFIXES)]
    kinds = {path: kind_of_file(inspected.step.layout, path) for path in held}
    whole = [
        path
        for path, kind in kinds.items()
        if kind is None or "model" in kind.names or STATE_BESIDE.isdisjoint(kind.names)
    ]
    files = counted(len(held), "file")
    message = (
        f"{asked.source} holds {files} of torch.save: one that has the whole state becomes a step; "
        "give its path"
    )
    if len(whole) < len(held):
        return UsageError(message, next_command=command_line("show", asked.source))
    return UsageError(
        message, instead_of=asked.source, instead=join_url(asked.source.rstrip("/"), whole[0])
    )


def _check_makes_step(asked: Conversion, what: str) -> None:
    """Raise `UsageError` if the target's name or the options do not fit a step."""
    subject = f"{asked.source} is {what}, which becomes a step of sharded DCP"
    if asked.is_file:
        ending = next(end for end in (*FLAT_SUFFIXES, SUFFIX) if asked.name.endswith(end))
        step = asked.target.removesuffix(ending)
        raise UsageError(
            f"{subject}: {asked.name} is not a name for one; create the step first, then "
            f"{asked.name} of that",
            instead_of=asked.target,
            instead=step,
        )
    if asked.strip or asked.file_bytes is not None:
        raise UsageError(
            f"{subject}: --strip and --file-size are for a step that becomes safetensors",
            without=("--strip", "--file-size"),
        )


def _from_step(
    asked: Conversion, found: OpenTarget, inspected: Inspection, storage: StorageOptions
) -> Converted:
    """Write a step as files of another format."""
    with target_place(asked.target, storage, source=found.url) as place:
        if asked.refuses(inspected.report):
            return not_converted(found.url, place.url, inspected.report)
        try:
            source = source_of(inspected)
            if asked.is_flat:
                export = to_flat(source, only_model=asked.only_model)
            else:
                export = to_safetensors(
                    source,
                    only_model=asked.only_model,
                    strip=asked.strip,
                    file_bytes=asked.file_bytes,
                    alone=asked.is_file,
                )
            room = asked.options.budget(found.store, place.store)
            write_export(source, export, place, room, asked.options.on_progress)
            return _written(asked, found.url, place.url, export, inspected.report)
        except (SourceDamaged, ShortRead) as error:
            report = source_in(inspected, ()).report_after(error)
            return not_converted(found.url, place.url, report)


def _check_makes_files(asked: Conversion) -> None:
    """Raise `UsageError` if the target's name or the options do not fit the format."""
    subject = f"{asked.source} is a step of sharded DCP"
    named = step_name(asked.name)
    if not asked.is_file and named is not None and not named.bare:
        raise UsageError(
            f"{subject}, and {asked.name} is a step's name: a folder of safetensors with that name "
            "would be taken for the step; choose another name, or use reshard",
            instead_of=asked.target,
            instead=f"{asked.target.rstrip('/')}-safetensors",
            without=("--world-size",),
        )
    if asked.world_size is not None:
        raise UsageError(
            f"{subject}, which becomes whole tensors; use reshard for another world size",
            without=("--world-size",) if asked.is_file else (),
            instead_of=None if asked.is_file else "convert",
            instead=None if asked.is_file else "reshard",
        )
    if asked.under:
        raise UsageError(
            f"{subject}, whose keys already define the nesting: --under is for safetensors that "
            "become a step",
            without=("--under",),
        )
    if asked.is_flat and (asked.strip or asked.file_bytes is not None):
        raise UsageError(
            f"{asked.name} is named as a file of torch.save: --strip and --file-size are for "
            "safetensors",
            without=("--strip", "--file-size"),
        )
    if asked.is_file and asked.file_bytes is not None:
        raise UsageError(
            f"{asked.name} is named as one file: --file-size is for a folder of them",
            without=("--file-size",),
        )


def _written(
    asked: Conversion, source: str, target: str, export: Export, report: Report
) -> Converted:
    what = counted(export.n_tensors, "tensor")
    n_values = export.n_values
    message = f"{what} written as safetensors, every byte read again"
    if asked.is_flat:
        what += f" and {counted(n_values, 'value')}" if n_values else ""
        message = f"{what} as one file of torch.save, every byte read again"
    return Converted(
        source=source,
        target=target,
        format="flat" if asked.is_flat else "safetensors",
        written=True,
        n_tensors=export.n_tensors,
        n_left_out=export.n_left_out,
        n_files=len(export.files),
        n_bytes=export.n_bytes,
        findings=export.findings,
        report=report,
        message=message,
    )


MODEL_FOLDERS = "pytorch_model_fsdp_{}"
OPTIMIZER_FOLDERS = "optimizer_{}"
"""Where accelerate saves the models and optimizers of FSDP, by their numbers.

Source: accelerate 1.15 `accelerate/utils/constants.py`, `accelerate/utils/fsdp_utils.py`.
"""

_NUMBERED = re.compile(
    r"(?P<stem>(?:pytorch_)?model|optimizer)(?:_(?P<number>[1-9][0-9]{0,5}))?"
    r"(?:-[0-9]+-of-[0-9]+)?(?P<end>\.bin|\.safetensors(?:\.index\.json)?)"
)
"""How transformers and accelerate name models and optimizers: the first has no number.

Source: accelerate 1.15 `accelerate/checkpointing.py` (`save_accelerator_state`), transformers 4.57
`transformers/utils/__init__.py` (`WEIGHTS_NAME`, `SAFE_WEIGHTS_NAME`).
"""

STATE_BESIDE = frozenset({"optimizer", "scheduler", "rng"})
"""The kinds of files beside a model without which a resume is another run."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """The arguments of `convert`.

    `world_size` None is the number of ranks that the source has files of, or 1.
    """

    source: str
    target: str
    world_size: int | None
    only_model: bool
    strip: str
    under: str
    file_bytes: int | None
    options: WriteOptions

    @property
    def name(self) -> str:
        """The last name of the target."""
        return base_name(self.target)

    @property
    def is_flat(self) -> bool:
        """Whether the target is named as a file of `torch.save`."""
        return self.name.endswith(FLAT_SUFFIXES)

    @property
    def is_file(self) -> bool:
        """Whether the target is named as one file."""
        return self.is_flat or self.name.endswith(SUFFIX)

    @property
    def anyway(self) -> str:
        """The same command with `--accept-unverifiable`."""
        words = ["convert", self.source, self.target]
        words += [] if self.world_size is None else ["--world-size", str(self.world_size)]
        words += ["--only", "model"] if self.only_model else []
        words += ["--under", self.under] if self.under else []
        return command_line(*words, "--accept-unverifiable")

    def refuses(self, report: Report) -> bool:
        """Whether the source must be refused because it is not complete."""
        return refusal(report, accept_unverifiable=self.options.accept_unverifiable)


# From one file


@dataclass(frozen=True, slots=True)
class OneFile:
    """A file that an argument names, and the store of the folder that holds it."""

    store: Store
    file: FileInfo

    @property
    def url(self) -> str:
        """The address of the file."""
        return join_url(self.store.url, self.file.path)

    def source(self, report: Report, part: SourcePart, files: Sequence[FileInfo]) -> Source:
        """The source that `files` of the folder make: the file, or those that it names."""
        names = {file.path for file in files}

        def changes() -> Iterator[Finding]:
            listed = list_if_there(self.store, "")
            return check_unchanged(self.url, files, [file for file in listed if file.path in names])

        return Source(self.url, report, (part,), (), changes)


@contextmanager
def one_file(source: str, storage: StorageOptions) -> Iterator[OneFile | None]:
    """The file at an address; None if there is none or it is a folder."""
    name = base_name(source)
    if not name or source.endswith("/"):
        yield None
        return
    with open_store(parent_url(source), storage) as store:
        listed = (file for file in list_if_there(store, "") if file.path == name)
        file = next((file for file in listed if file.kind == "file"), None)
        yield None if file is None else OneFile(store, file)


def import_flat(source: OneFile, asked: Conversion, place: Place) -> Converted:
    """Write a step from a file of `torch.save`; see `converting.convert`."""
    report = _report(source, "flat")
    try:
        flat = open_flat(source.store, source.file, source.url)
        part = flat.part(only_model=asked.only_model)
    except SourceDamaged as damage:
        return not_converted(source.url, place.url, report.with_findings(damage.finding))
    if not flat.directory.has_crcs:
        why = "was saved without checksums: its bytes cannot be verified"
        report = report.with_findings(_unproven(source.file.path, why, asked))
    return _import(source.source(report, part, [source.file]), (), asked, place)


def import_file(source: OneFile, asked: Conversion, place: Place) -> Converted:
    """Write a step from one file of safetensors, or from those that an index names."""
    report = _report(source, "safetensors")
    files: Sequence[FileInfo] = (source.file,)
    try:
        if source.file.path.endswith(INDEX_SUFFIX):
            files = files_of_index(source.store, source.file, source.url)
    except RecordUnreadable as error:
        finding = Finding(error.code, source.file.path, error.message)
        return not_converted(source.url, place.url, report.with_findings(finding))
    part = Part("", PartFormat.SAFETENSORS, tuple(files))
    for finding in inspect_safetensors(source.store, "", part):
        report = report.with_findings(finding)
    why = "is a safetensors file, which carries no checksums: its bytes cannot be verified"
    report = report.with_findings(_unproven(source.file.path, why, asked))
    if asked.refuses(report):
        return not_converted(source.url, place.url, report)
    read = read_safetensors(source.store, "", source.url, part, under=asked.under)
    return _import(source.source(report, read.part, files), (), asked, place)


def _report(source: OneFile, layout: str) -> Report:
    """The report on a file of which nothing has been compared yet."""
    return Report(
        url=source.url,
        number=None,
        layout=layout,
        verdict=Verdict.COMPLETE,
        exit_code=0,
        level=Level.STRUCTURE,
        findings=(),
        state=NO_STATE,
        world_size=None,
        n_bytes=source.file.size,
        n_files=1,
        n_tensors=0,
        n_records=0,
        bytes_read=0,
        written_s=source.file.mtime_s,
        parts=(),
        digests=(),
    )


def _unproven(path: str, why: str, asked: Conversion) -> Finding:
    return Finding(
        "record.unverifiable",
        path,
        f"{path} {why}",
        expected="a checksum for each tensor",
        found="none",
        next_command=asked.anyway,
    )


# From the files of a folder


def import_folder(
    inspected: Inspection, save: StateFiles | None, asked: Conversion, place: Place
) -> Converted:
    """Write a step from the files of one `save`, or from the folders of safetensors in a folder."""
    report = inspected.report
    if asked.refuses(report):
        copied = ["cp", "-rL", report.url, f"{report.url}-copy"]
        helps = {"record.unverifiable": asked.anyway, "step.linked": shlex.join(copied)}
        findings = (
            replace(finding, next_command=helps.get(finding.code, finding.next_command))
            for finding in report.findings
        )
        return not_converted(report.url, place.url, replace(report, findings=tuple(findings)))
    if save is not None:
        return _import_save(inspected, save, asked, place)
    opened = inspected.opened
    folders = [folder for part in inspected.parts for folder in part.safetensors]
    # If the folder holds a model, folders below hold its shards again, or another model.
    model = [folder for folder in folders if not folder.path] or folders
    below = [folder.path for folder in folders if folder not in model]
    read = [
        read_safetensors(opened.store, folder.folder, opened.url, folder.part, under=asked.under)
        for folder in model
    ]
    unnamed = [name for part in read for name in part.unnamed]
    kinds = {
        file.path: kind
        for file in inspected.step.files
        if (kind := kind_of_file(inspected.step.layout, file.path))
        and not file.path.endswith(SUFFIX)
    }
    state = [path for path, kind in kinds.items() if not STATE_BESIDE.isdisjoint(kind.names)]
    if state and not asked.only_model:
        raise UsageError(
            f"{report.url}: {some_of(state)} beside the safetensors would be left out; --only "
            "model converts the model alone",
            instead="--only model",
        )
    notes = [
        *left_out(unnamed, "of safetensors that the index does not name"),
        *left_out(below, "of safetensors below", "folder"),
        *left_out([*kinds], "of train state beside the safetensors"),
    ]
    return _import(source_in(inspected, [folder.part for folder in read]), notes, asked, place)


def _import_save(
    inspected: Inspection, save: StateFiles, asked: Conversion, place: Place
) -> Converted:
    """Write a step with a part for the model and for each optimizer of one save."""
    opened, url = inspected.opened, inspected.step.url
    parts: list[SourcePart] = []
    for other in save.others:
        check_is_copied(url, other.file)
    if save.lost:
        path = save.lost[0]
        message = f"{path} is not there, and a file of a later number is"
        report = inspected.report.with_findings(
            Finding("file.missing", path, message, next_command="ckptctl explain file.missing")
        )
        return not_converted(url, place.url, report)
    folders = [folder for part in inspected.parts for folder in part.safetensors]
    below = [folder.path for folder in folders if folder.path]
    notes = [*left_out(below, "of safetensors below", "folder")]
    try:
        for number, files in save.models.items():
            path = MODEL_FOLDERS.format(number)
            if not files[0].path.endswith((SUFFIX, INDEX_SUFFIX)):
                parts.append(_flat_part(opened, files[0], path, "model"))
                continue
            top = next(folder for folder in folders if not folder.path)
            of_model = replace(top.part, files=tuple(files))
            under = asked.under or "model"
            model = read_safetensors(opened.store, top.folder, url, of_model, under=under)
            if model.unnamed:
                raise UsageError(
                    f"{url}: {model.unnamed[0]} is not in the index of the model: move it "
                    "away, or the index and the files that it names",
                    next_command=command_line("show", url),
                )
            parts.append(replace(model.part, path=path))
        for number, file in save.optimizers.items():
            path = OPTIMIZER_FOLDERS.format(number)
            parts.append(_flat_part(opened, file, path, "optimizer"))
    except SourceDamaged as damage:
        return not_converted(url, place.url, inspected.report.with_findings(damage.finding))
    ranks = {file.rank for file in save.others if file.rank is not None}
    for_ranks = replace(asked, world_size=asked.world_size or len(ranks) or 1)
    return _import(source_in(inspected, parts, save.others), notes, for_ranks, place)


def _flat_part(opened: OpenStep, file: FileInfo, path: str, key: str) -> SourcePart:
    """The part at `path` that a `torch.save` file of a step makes, below `key`."""
    there = replace(file, path=opened.in_store(file.path))
    return open_flat(opened.store, there, join_url(opened.url, file.path)).part(path, key)


def _import(source: Source, notes: Sequence[Finding], asked: Conversion, place: Place) -> Converted:
    if asked.refuses(source.report):
        return not_converted(source.url, place.url, source.report)
    planned = plan(source, TargetLayout(asked.world_size or 1, asked.only_model))
    if not any(part.entries for part in planned.parts):
        what = "no model" if asked.only_model else "no entries"
        raise UsageError(
            f"{source.url} holds {what}, so a step cannot be made",
            without=("--only",) if asked.only_model else (),
        )
    stores = [part.source.files.store for part in planned.parts]
    try:
        made = write(planned, place, asked.options.budget(stores[0], place.store), asked.options)
    except SourceDamaged as damage:
        return not_converted(source.url, place.url, source.report_after(damage))
    if isinstance(made, Report):
        return not_converted(source.url, place.url, made)
    n_others = planned.n_values
    what = counted(planned.n_tensors, "tensor")
    if n_others:
        what += f" and {counted(n_others, 'value')}"
    proof = "verified at level content, sealed"
    if source.report.verdict is Verdict.UNVERIFIABLE:
        proof = "used without verification; the seal of the new step verifies them from now on"
    return Converted(
        source=source.url,
        target=place.url,
        format="dcp",
        written=True,
        n_tensors=planned.n_tensors,
        n_files=len(planned.shards) + len(planned.parts),
        n_bytes=planned.n_bytes,
        findings=tuple(notes),
        report=made.report,
        message=f"{what} as sharded DCP for {counted(asked.world_size or 1, 'rank')}: {proof}",
        next_command=command_line("verify", place.url, "--level", "content", "--require-seal"),
    )


# The files of one save


class StateFiles(NamedTuple):
    """The files of one save: those of each model and optimizer, by its number, and the others.

    A model has one file of `torch.save`, or those of safetensors with their index. `others` are
    copied as they are. Files of ckptctl are left out.
    """

    models: Mapping[int, Sequence[FileInfo]]
    optimizers: Mapping[int, FileInfo]
    others: tuple[RankFile, ...]

    @property
    def lost(self) -> tuple[str, ...]:
        """The files that a later number shows to be lost."""
        models = (file for files in self.models.values() for file in files)
        numbered = (*models, *self.optimizers.values())
        return tuple(sorted(lost_before_others(file.path for file in numbered)))


def state_files(step: Step, url: str, *, only_model: bool = False) -> StateFiles | None:
    """The files of a save with whole tensors, by their names.

    None where there is a model without train state, or none, and where files of several ranks may
    hold a tensor together. Raises `UsageError` where files of safetensors are not those of a
    model, and, unless `only_model`, where it is open which files belong together.
    """
    models: list[FileInfo] = []
    optimizers: list[FileInfo] = []
    tensors: list[FileInfo] = []
    others: list[RankFile] = []
    for file in step.files:
        if is_own(file.path):
            continue
        if file.path.endswith((SUFFIX, INDEX_SUFFIX)):
            tensors += [] if "/" in file.path else [file]
            continue
        kind = kind_of_file(step.layout, file.path)
        is_archive = kind is not None and may_be_archive(file.path)
        if kind is not None and is_archive and kind.names[0] == "model":
            models.append(file)
        elif kind is not None and is_archive and kind.names[0] == "optimizer":
            optimizers.append(file)
        else:
            name, rank = (None, None) if kind is None else (kind.names[0], kind.rank)
            others.append(RankFile(file, name, rank))
    state = [*optimizers, *(other.file for other in others if other.kind in STATE_BESIDE)]
    if any(part.format in SHARDED for part in step.parts):
        return None
    if not optimizers and all(other.kind is None for other in others):
        return None
    in_safetensors: dict[int, list[FileInfo]] = defaultdict(list)
    for file in tensors:
        in_safetensors[_number(url, file, is_with_state=bool(state))].append(file)
    of_optimizers, of_models = _by_number(optimizers), _by_number(models)
    if only_model:
        if len(in_safetensors) > 1:
            raise UsageError(
                f"{url} holds several models, {_paths(tensors)}: give the path of one of them"
            )
        return None
    if tensors and (models or of_optimizers is None):
        several = [*tensors, *models] if models else optimizers
        raise UsageError(
            f"{url} holds {_paths(several)}, of which it is open what belongs together: move away "
            "what is not of this save; --only model converts the safetensors alone, without "
            f"{_paths(state)}",
            instead="--only model",
        )
    if of_optimizers is None or not (tensors or of_models):
        return None
    of_models = of_models or {}
    by_number = dict(sorted(in_safetensors.items())) or {
        number: [file] for number, file in of_models.items()
    }
    return StateFiles(by_number, of_optimizers, tuple(others))


def _number(url: str, file: FileInfo, *, is_with_state: bool) -> int:
    """Which model of a save a file of safetensors is of."""
    match = _NUMBERED.fullmatch(file.path)
    if match is None and is_with_state:
        raise UsageError(
            f"{url}: {file.path} beside the train state is not named as a model "
            "(model.safetensors): move it away, or give its path to convert it alone",
            next_command=command_line("show", url),
        )
    return clamped(match["number"] or "0") if match else 0


def _by_number(files: Sequence[FileInfo]) -> dict[int, FileInfo] | None:
    """Files of one kind by their numbers; None for several that are not numbered so."""
    matches = [_NUMBERED.fullmatch(file.path) for file in files]
    if len(files) == 1 and matches[0] is None:
        return {0: files[0]}
    numbers = [clamped(match["number"] or "0") for match in matches if match]
    if len({*numbers}) < len(files):
        return None
    return dict(sorted(zip(numbers, files, strict=True)))


def _paths(files: Sequence[FileInfo]) -> str:
    return some_of([file.path for file in files])
