"""Choose the direction of a conversion from what SRC is and how DST's name ends.

- A step of sharded DCP becomes one `torch.save` file if DST ends in `.pt`, `.pth`, `.bin`
  or `.ckpt`, one safetensors file if it ends in `.safetensors`, and otherwise a folder of
  safetensors.
- A `torch.save` file, a safetensors file, an index of such files, or a folder that holds
  them and no DCP, becomes a step of sharded DCP called DST.

Shards of other frameworks, and ambiguous names, are refused with the command that puts them
together or states the intent. `importing` and `exporting` do the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckptctl.errors import OptionError, UsageError
from ckptctl.findings import Report
from ckptctl.formats.archive.safetensors import INDEX_SUFFIX, SUFFIX
from ckptctl.formats.families import CONVERSIONS
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layouts import (
    FLAT_SUFFIXES,
    METADATA,
    counts_training_steps,
    shard_rank,
    step_name,
)
from ckptctl.formatting import command_line, counted
from ckptctl.inspection.content import Asked
from ckptctl.inspection.inspecting import Inspection, inspect_step, inspection_failed
from ckptctl.model import SHARDED, Level, PartFormat
from ckptctl.options import Requirements, StorageKeywords, StorageOptions, options_from
from ckptctl.records.byte_pass import Limits, OnProgress
from ckptctl.resharding.executing import WriteOptions
from ckptctl.resharding.exporting import (
    Export,
    to_flat,
    to_safetensors,
    write_export,
)
from ckptctl.resharding.importing import (
    STATE_BESIDE,
    Conversion,
    OneFile,
    StateFiles,
    import_file,
    import_flat,
    import_folder,
    one_file,
    state_files,
)
from ckptctl.resharding.planning import check_world_size
from ckptctl.resharding.results import Converted, not_converted
from ckptctl.resharding.sources import (
    SourceDamaged,
    check_format,
    source_in,
    source_of,
)
from ckptctl.resharding.steps import (
    inspect_whole,
    target_place,
)
from ckptctl.resharding.writing import DEFAULT_MEMORY
from ckptctl.selection.targets import parse_target
from ckptctl.selection.verifying import OpenTarget, open_target
from ckptctl.storage.contract import ShortRead
from ckptctl.storage.opening import join_url, parent_url

if TYPE_CHECKING:
    from typing_extensions import Unpack


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
    if parse_target(target).name is None:
        path = join_url(parse_target(target).root, "step_1200")
        raise UsageError(
            f"{target}: give the target as a path, such as {path}",
            instead_of=target,
            instead=path,
        )
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
            return _from_folder(asked, found, inspected, save, checked, storage)
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
            f"{asked.source} is a part of the step {step}",
            instead_of=asked.source,
            instead=step,
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
        message,
        instead_of=asked.source,
        instead=join_url(asked.source.rstrip("/"), whole[0]),
    )


def _from_folder(
    asked: Conversion,
    found: OpenTarget,
    inspected: Inspection,
    save: StateFiles | None,
    checked: Requirements,
    storage: StorageOptions,
) -> Converted:
    """Make a step from a folder of safetensors, or from the files of one save."""
    _check_makes_step(asked, "a folder of files that hold whole tensors")
    if not asked.refuses(inspected.report):
        # Only a seal can verify them, and that takes reading every byte.
        inspected = inspect_step(found, checked, level=Level.CONTENT, content=Asked(Limits()))
    with target_place(asked.target, storage, source=found.url) as place:
        return import_folder(inspected, save, asked, place)


def _check_makes_step(asked: Conversion, what: str) -> None:
    """Raise `UsageError` if the target's name or the options do not fit a step."""
    subject = f"{asked.source} is {what}, which becomes a step of sharded DCP"
    if asked.is_file:
        step = asked.target[: -len(_ending(asked.name))]
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


def _ending(name: str) -> str:
    return next(end for end in (*FLAT_SUFFIXES, SUFFIX) if name.endswith(end))


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
        except SourceDamaged as error:
            report = source_in(inspected, ()).with_damage(error.finding)
            return not_converted(found.url, place.url, report)
        except ShortRead as error:
            report = source_in(inspected, ()).with_damage(inspection_failed(found, error))
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
