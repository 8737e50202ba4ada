"""Check the shape of a step directory: parts, sidecars, unfinished saves.

Answers by names alone: a name that a framework takes away when a step is whole,
a file that it writes last, a pipeline stage that is missing, a file that nobody
would write there, a format that is not sharded. What the metadata says of the
shard files is `presence`'s question.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from ckptctl.findings import Finding
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.state_keys import kind_of_file
from ckptctl.model import SHARDED, FileInfo, Part, PartFormat, Step

_WHAT_IT_IS = {
    PartFormat.FLAT: (
        "plain torch.save files",
        (
            "each holds whole objects of one rank, so another world size cannot load sharded "
            "state from them, and nothing states which of them belong together"
        ),
    ),
    PartFormat.DEEPSPEED: (
        "a DeepSpeed ZeRO checkpoint",
        (
            "its optimizer is sharded for the data-parallel size that wrote it; another size "
            "needs DeepSpeed's universal conversion first"
        ),
    ),
    PartFormat.MEGATRON_LEGACY: (
        "a legacy Megatron checkpoint (mp_rank_* folders)",
        "it loads only at the tensor- and pipeline-parallel size that wrote it",
    ),
    PartFormat.ZARR: (
        "a zarr checkpoint",
        "Megatron's zarr format is deprecated; convert it to torch_dist with Megatron itself",
    ),
    PartFormat.ORBAX: (
        "an Orbax checkpoint",
        "it is JAX's format, not torch's",
    ),
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
    """Yield what the names in a step say against it. Cost: one look at each name.

    `unfinished` says that the folder itself bears the name of a save in flight, or that a
    file beside it says so.
    Yields `step.unfinished`, `part.missing`, `file.missing`, `file.unreadable`,
    `metadata.missing`, `format.unsupported`.
    """
    if unfinished:
        yield _unfinished(step.name, "its name, or a file beside it, marks an interrupted save")
    for marker in layouts.unfinished_markers(step.files):
        yield _unfinished(marker, f"{marker} still exists: the save was interrupted")
    yield from _check_removal(step)
    yield from _check_stages(step)
    last = layouts.written_last(step.layout, step.parts, step.files)
    yield from _check_last(step, last)
    yield from _check_empty(step, last)
    if not step.parts:
        yield _no_tensors(step)
    for part in step.parts:
        if part.format not in SHARDED and part.format is not PartFormat.SAFETENSORS:
            yield _unsupported(step, part)


def _check_removal(step: Step) -> Iterator[Finding]:
    """Yield `step.unfinished` where a removal began and nothing was saved since."""
    note = next((file for file in step.files if file.path == layouts.REMOVING), None)
    if note is None:
        return
    noted_s = note.mtime_s or float("inf")
    saved = [file.mtime_s for file in step.files if not layouts.is_own(file.path)]
    if not any(at_s is not None and at_s > noted_s for at_s in saved):
        yield _unfinished(layouts.REMOVING, "its removal began and was not completed")


def _unfinished(where: str, why: str) -> Finding:
    return Finding(
        "step.unfinished",
        where,
        why,
        expected="a finished save",
        found=where,
        next_command="ckptctl explain step.unfinished",
    )


def _check_stages(step: Step) -> Iterator[Finding]:
    for stage in layouts.missing_stages(step.parts):
        held = ", ".join(part.path for part in step.parts)
        yield Finding(
            "part.missing",
            stage,
            f"pipeline stage {stage} is missing; the step holds {held}",
            expected=f"a folder {stage} with metadata and shards",
            found="nothing",
            next_command=f"ckptctl show {shlex.quote(step.url)}",
        )


def _check_last(step: Step, last: Sequence[str]) -> Iterator[Finding]:
    there = {file.path for file in step.files}
    for name in last:
        if name in there:
            continue
        yield Finding(
            "file.missing",
            name,
            f"{name} is missing, which {step.layout} writes last",
            expected=name,
            found="nothing",
            next_command="ckptctl explain file.missing",
        )


def _check_empty(step: Step, last: Sequence[str]) -> Iterator[Finding]:
    for file in sidecars_of(step):
        needed = file.path in last or kind_of_file(step.layout, file.path) is not None
        if needed and file.size == 0 and file.kind == "file":
            yield Finding(
                "file.unreadable",
                file.path,
                f"{file.path} is empty, and a resume reads it",
                expected="more than 0 bytes",
                found="0 bytes",
                next_command=f"ckptctl show {shlex.quote(step.url)}",
            )


def _no_tensors(step: Step) -> Finding:
    n_files = len(step.files)
    found = f"{n_files} other file{'s' if n_files != 1 else ''}" if n_files else "nothing"
    return Finding(
        "metadata.missing",
        layouts.METADATA,
        f"the step has no metadata and no shard file, only {found}"
        if n_files
        else "the step's folder is empty",
        expected=layouts.METADATA,
        found=found,
        next_command="ckptctl explain metadata.missing",
    )


def _unsupported(step: Step, part: Part) -> Finding:
    what, means = _WHAT_IT_IS[part.format]
    return Finding(
        "format.unsupported",
        part.path or step.name,
        f"this is {what}, not a sharded DCP checkpoint: {means}",
        expected="torch Distributed Checkpoint (DCP)",
        found=what,
        next_command="ckptctl explain format.unsupported",
    )


def check_unchanged(step: Step, now: Sequence[FileInfo]) -> Iterator[Finding]:
    """Yield one `step.changed` where a second listing differs from the first.

    Names, sizes, times and identities are compared. What ckptctl itself writes does
    not count.
    """
    before = _comparable(step.files)
    after = _comparable(now)
    differing = sorted(
        name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
    )
    if not differing:
        return
    name = differing[0]
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    yield Finding(
        "step.changed",
        name,
        f"{name}{more} changed during the inspection: another process writes or deletes files here",
        expected=_described(before.get(name)),
        found=_described(after.get(name)),
        next_command=f"ckptctl verify {shlex.quote(step.url)}",
    )


def _comparable(files: Sequence[FileInfo]) -> dict[str, FileInfo]:
    return {file.path: file for file in files if not layouts.is_own(file.path)}


def _described(file: FileInfo | None) -> str:
    return f"{file.size:,} bytes ({file.identity})" if file else "no such file"
