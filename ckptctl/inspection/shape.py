"""Check a step directory by its names: parts, sidecars, unfinished saves, write times, its number.

Another name in the metadata is a suspicion only: a writer notes there what it called the folder,
and a folder may be copied or renamed. Where the train state's own count of steps agrees with that
name, the folder claims to be further, and a step that is further is beside it, it is a copy that
stands in the way. Only a seal proves that shards belong together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptctl.findings import Finding, explained
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.file_names import is_named_as_weights, kind_of_file
from ckptctl.formats.frameworks.layouts import METADATA
from ckptctl.formats.frameworks.parts import is_archive
from ckptctl.formatting import command_line, counted, inside, some_of
from ckptctl.model import FileInfo, Metadata, Part, PartFormat, Step

_WHAT_IT_IS = {
    PartFormat.ZARR: (
        "a zarr checkpoint",
        "T5X and Levanter of JAX write it, and Megatron did, which can convert it to torch_dist",
    ),
    PartFormat.ORBAX: ("an Orbax checkpoint", "it is JAX's format, not torch's"),
    PartFormat.TORCHSNAPSHOT: (
        "a torchsnapshot checkpoint",
        "its predecessor format is not DCP; load it with torchsnapshot",
    ),
    PartFormat.UNKNOWN: ("files of an unknown format", "nothing can be said about it"),
}


def sidecars_of(step: Step) -> tuple[FileInfo, ...]:
    """The files of a step that are neither shards nor metadata of its parts."""
    return tuple(file for file in step.files if not layouts.belongs_to_shards(file.path))


def check_shape(step: Step, *, unfinished: bool) -> Iterator[Finding]:
    """Yield faults that the names in a step show. Cost: one comparison per name.

    `unfinished` means that the folder itself has the name of a save in flight, or that a
    file beside it marks it so.
    Yields `step.unfinished`, `step.nested`, `part.missing`, `file.missing`, `file.unreadable`,
    `metadata.missing`, `format.unsupported`.
    """
    if unfinished:
        yield _unfinished(step.name, "its name, or a file beside it, marks an interrupted save")
    for marker in layouts.unfinished_markers(step.files):
        yield _unfinished(marker, f"{marker} still exists: the save was interrupted")
    yield from _check_removal(step)
    yield from _check_nested(step)
    for stage in layouts.missing_stages(step.parts):
        held = ", ".join(part.path for part in step.parts)
        message = f"pipeline stage {stage} is missing; the step holds {held}"
        show = command_line("show", step.url)
        yield Finding("part.missing", stage, message, next_command=show)
    last = layouts.written_last(step.layout, step.parts, step.files)
    there = {file.path for file in step.files}
    for name in last:
        if name not in there:
            message = f"{name} is missing, which {step.layout} writes last"
            yield explained("file.missing", name, message)
    yield from _check_empty(step, last)
    if not step.parts:
        message = "the step's folder is empty"
        if step.files:
            found = counted(len(step.files), "other file")
            message = f"the step has no metadata and no shard file, only {found}"
        yield explained("metadata.missing", METADATA, message)
    for part in step.parts:
        if part.format in _WHAT_IT_IS:
            what, means = _WHAT_IT_IS[part.format]
            message = f"this is {what}, not a sharded DCP checkpoint: {means}"
            yield explained("format.unsupported", part.path or step.name, message)


def _check_removal(step: Step) -> Iterator[Finding]:
    """Yield `step.unfinished` where a removal began and nothing was saved since."""
    note = next((file for file in step.files if file.path == layouts.REMOVING), None)
    if note is None:
        return
    noted_s = note.mtime_s or float("inf")
    saved = [file.mtime_s for file in step.files if not layouts.is_own(file.path)]
    if not any(at_s is not None and at_s > noted_s for at_s in saved):
        yield _unfinished(layouts.REMOVING, "its removal began and was not completed")


def _check_nested(step: Step) -> Iterator[Finding]:
    """Yield `step.nested` for a folder of several saves: it is a root that is named as a step.

    A step of transformers or Lightning may hold a folder of DeepSpeed, which has a number too.
    """
    if step.number is None:
        return
    folders = {name for file in step.files for name in file.path.split("/")[:-1]}
    held = [
        named for name in sorted(folders) if (named := layouts.step_name(name)) and not named.bare
    ]
    others = [named.name for named in held if named.number != step.number]
    if not others or [named.layout for named in held] == ["deepspeed"]:
        return
    weights = (file.path.split("/")[:-1] for file in weights_in(step))
    if not {folder for above in weights for folder in above}.intersection(others):
        return
    yield Finding(
        "step.nested",
        others[0],
        f"the folder holds {counted(len(held), 'step')} itself ({some_of(others)}): it is the "
        "root of a run, or saves were moved into this one",
        next_command=command_line("scan", step.url),
    )


def weights_in(step: Step) -> Iterator[FileInfo]:
    """The files of a step that are metadata or saved weights, by their names."""
    for file in step.files:
        if layouts.is_saved(file.path) and is_named_as_weights(file.path.rpartition("/")[2]):
            yield file


def _unfinished(where: str, why: str) -> Finding:
    return explained("step.unfinished", where, why)


def _check_empty(step: Step, last: Sequence[str]) -> Iterator[Finding]:
    for file in sidecars_of(step):
        is_needed = file.path in last or kind_of_file(step.layout, file.path) is not None
        is_needed |= step.has_rank_files and is_archive(file.path)
        if is_needed and file.size == 0 and file.kind == "file":
            yield empty_file(step, file.path)


def empty_file(step: Step, path: str) -> Finding:
    """The finding for a file with state that has not a byte."""
    return Finding(
        "file.unreadable",
        path,
        f"{path} is empty: the save was interrupted, or the storage was full",
        next_command=command_line("show", step.url),
    )


def missing_file(
    step: Step, where: str, message: str, *, expected: str | None = None, found: str | None = None
) -> Finding:
    """The finding for files that belong to a step and are not there."""
    return Finding("file.missing", where, message, expected, found, command_line("show", step.url))


def check_unchanged(
    url: str, first: Sequence[FileInfo], now: Sequence[FileInfo]
) -> Iterator[Finding]:
    """Yield one `step.changed` where a second listing of what is at `url` differs from the first.

    Names, sizes, times and identities are compared. What ckptctl itself writes does
    not count.
    """
    before, after = (
        {file.path: file for file in files if layouts.is_saved(file.path)} for files in (first, now)
    )
    differing = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    if not differing:
        return
    name = differing[0]
    yield Finding(
        "step.changed",
        name,
        f"{some_of(differing, 1)} changed while it was read: another process writes or deletes "
        "files here",
        expected=_described(before.get(name)),
        found=_described(after.get(name)),
        next_command=command_line("verify", url),
    )


def _described(file: FileInfo | None) -> str:
    return f"{file.size:,} bytes ({file.identity})" if file else "no such file"


_NEAR = 1
"""Some trainers count a step when it begins, others when it is done."""


def own_number(metadata: Metadata) -> int | None:
    """The step that the writer named the folder after, None where the metadata does not name it."""
    if metadata.checkpoint_id is None:
        return None
    numbers = [
        named.number
        for word in metadata.checkpoint_id.replace("\\", "/").split("/")
        if (named := layouts.step_name(word)) is not None and not named.bare
    ]
    return numbers[-1] if numbers else None


def check_own_number(step: Step, part: Part, metadata: Metadata) -> Iterator[Finding]:
    """Yield `metadata.foreign` where the writer called the folder another step."""
    number = own_number(metadata)
    if number is None or step.number in (None, number):
        return
    where = inside(part.path, METADATA)
    yield Finding(
        "metadata.foreign",
        where,
        f"{where} was written for step {number} ({metadata.checkpoint_id}), but is in step "
        f"{step.number}: the folder was renamed, or the metadata belongs to another step",
        next_command=command_line("show", step.url),
    )


def claims_further(step: Step, number: int | None) -> bool:
    """Whether the folder is named after a step further than `number`, as the writer called it."""
    return step.number is not None and number is not None and step.number > number + _NEAR
