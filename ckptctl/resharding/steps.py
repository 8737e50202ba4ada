"""Reshard a step for another world size: `plan_reshard` and `reshard`.

Finds and inspects the step, plans the new one, and writes it if requested; other modules do
each of these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import OptionError, UsageError
from ckptctl.findings import Report, Severity
from ckptctl.formats.frameworks.layouts import compile_pattern, shard_rank, step_name
from ckptctl.formatting import command_line
from ckptctl.inspection.content import Asked
from ckptctl.inspection.inspecting import Inspection, inspect_step
from ckptctl.inspection.seals import is_unwritten
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import Level
from ckptctl.options import Requirements, StorageKeywords, StorageOptions, options_from
from ckptctl.records.byte_pass import Limits, OnProgress
from ckptctl.records.slices import TensorSlice
from ckptctl.resharding.executing import Place, WriteOptions, write
from ckptctl.resharding.mesh import (
    Mesh,
    RankSlice,
    check_mesh,
    check_world_size,
    parse_mesh,
    parse_rules,
)
from ckptctl.resharding.planning import PerRank, Plan, Wanted, plan, shares
from ckptctl.resharding.results import Reshard
from ckptctl.resharding.sources import (
    Source,
    SourceDamaged,
    check_format,
    needs_content,
    refusal,
    source_of,
)
from ckptctl.resharding.writing import DEFAULT_MEMORY
from ckptctl.selection.targets import parse_target
from ckptctl.selection.verifying import OpenTarget, open_target
from ckptctl.storage.opening import (
    absolute_url,
    base_name,
    is_local,
    join_url,
    open_store,
    parent_url,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


def plan_reshard(
    source: str,
    target: str,
    *,
    world_size: int | None = None,
    mesh: str | None = None,
    shard: Sequence[str] = (),
    like: str | None = None,
    per_rank: str = "keep",
    only_model: bool = False,
    accept_unverifiable: bool = False,
    memory: int = DEFAULT_MEMORY,
    pattern: str | None = None,
    grace_s: float = 600.0,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> Reshard:
    """Plan how the step `source` would be resharded; nothing is written.

    `source` is named as for `verify`, `target` is the path of the new step. Either
    `world_size` is the number of ranks, or `mesh` (`dp=4,tp=2`) how they are arranged,
    or `like` names a step that has the wanted layout. `shard` are rules
    `PATTERN=DIM` for tensors that are not sharded along dimension 0. `per_rank` is what
    to do with state that exists once per rank: `keep`, `drop` or `refuse`. `only_model`
    leaves out all but the model. `memory` is what `reshard` may use, in bytes.

    A step that is not complete is refused: the result holds its report and exit code.
    Raises `UsageError` for options that do not fit the step, and `StorageError`.

    Cost: inspection at level `structure`; at `content` if records have no checksums.
    """
    return _reshard(
        source,
        target,
        _asked(world_size, mesh, shard, like, per_rank, only_model),
        Requirements(pattern=pattern, grace_s=grace_s),
        options_from(keywords, storage),
        WriteOptions(accept_unverifiable, memory),
        write_it=False,
    )


def reshard(
    source: str,
    target: str,
    *,
    world_size: int | None = None,
    mesh: str | None = None,
    shard: Sequence[str] = (),
    like: str | None = None,
    per_rank: str = "keep",
    only_model: bool = False,
    accept_unverifiable: bool = False,
    memory: int = DEFAULT_MEMORY,
    jobs: int | None = None,
    key: bytes | None = None,
    group: ProcessGroup | None = None,
    on_progress: OnProgress | None = None,
    pattern: str | None = None,
    grace_s: float = 600.0,
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StorageKeywords],
) -> Reshard:
    """Write the step `source` at `target`, sharded for another world size.

    The arguments are those of `plan_reshard`. The new step is verified at level
    `content`, sealed (with `key` if one is given) and only then published; the
    source is never written to. `memory` bounds what is held, whatever the size of a
    tensor; `jobs` is how many files are written at once. With a `group` (see
    `ckptctl.distributed`) several processes share the files: each calls this with the same
    arguments, and rank 0 publishes. Called again after an interruption, it continues
    with what was written.

    Damage in the source ends it: the result then holds the finding, and nothing is
    published. Raises `UsageError` if `target` exists already, `StorageError` if a storage
    fails or has too little space.

    Cost: every byte of the source read once, twice if tensors are sharded across rows;
    every byte of the new step written once and read twice.
    """
    return _reshard(
        source,
        target,
        _asked(world_size, mesh, shard, like, per_rank, only_model),
        Requirements(pattern=pattern, grace_s=grace_s),
        options_from(keywords, storage),
        WriteOptions(accept_unverifiable, memory, jobs, key, group or ProcessGroup(), on_progress),
        write_it=True,
    )


class _Asked:
    """The requested layout; `like` is not read yet."""

    def __init__(self, wanted: Wanted | None, like: str | None, per_rank: PerRank, only: bool):
        self.wanted = wanted
        self.like = like
        self.per_rank = per_rank
        self.only_model = only


def _asked(
    world_size: int | None,
    mesh: str | None,
    shard: Sequence[str],
    like: str | None,
    per_rank: str,
    only_model: bool,
) -> _Asked:
    given = {"--world-size": world_size, "--mesh": mesh, "--like": like}
    named = [name for name, value in given.items() if value is not None]
    if like is not None and (len(named) > 1 or shard):
        raise OptionError(
            "--like",
            "defines the whole layout; do not combine it with other layout options",
            without=("--world-size", "--mesh", "--shard"),
        )
    if not named:
        raise UsageError(
            "the layout of the new step is missing; give --world-size N, --mesh dp=4,tp=2 or "
            "--like STEP",
            instead="--world-size 8",
        )
    try:
        action = PerRank(per_rank)
    except ValueError:
        words = ", ".join(one.value for one in PerRank)
        raise OptionError("--per-rank", f"{per_rank!r} is not one of {words}") from None
    if like is not None:
        return _Asked(None, like, action, only_model)
    check_world_size(world_size)
    arranged = Mesh((("dp", world_size or 1),)) if mesh is None else parse_mesh(mesh)
    if world_size is not None and arranged.world_size != world_size:
        raise OptionError(
            "--mesh",
            f"{mesh} has {arranged.world_size} ranks, but --world-size is {world_size}",
            without=("--world-size",),
        )
    wanted = Wanted(arranged, parse_rules(shard), None, action, only_model)
    return _Asked(wanted, None, action, only_model)


def _reshard(
    source: str,
    target: str,
    asked: _Asked,
    requirements: Requirements,
    storage: StorageOptions,
    options: WriteOptions,
    *,
    write_it: bool,
) -> Reshard:
    jobs, accept_unverifiable = options.jobs, options.accept_unverifiable
    if jobs is not None and jobs < 1:
        raise OptionError("--jobs", f"is {jobs}; it must be 1 or more")
    with (
        options.group.sharing(),
        opened_step(source, requirements, storage) as found,
        target_place(target, storage, source=found.url) as place,
    ):
        _same_number(found, place, target, requirements.pattern)
        inspected = inspect_whole(found, requirements, accept_unverifiable=accept_unverifiable)
        check_format(inspected)
        if refusal(inspected.report, accept_unverifiable=accept_unverifiable):
            return _refused(found.url, place.url, asked, inspected.report)
        wanted = asked.wanted or _like(asked, requirements, storage)
        source_step = source_of(inspected)
        if wanted.like is None:
            check_mesh(wanted.mesh, wanted.rules, _shapes(source_step))
        planned = plan(source_step, wanted)
        room = options.budget(found.store, place.store)
        if not write_it:
            return _answer(planned, place.url)
        try:
            written = write(planned, found, place, room, options)
        except SourceDamaged as damage:
            return _refused(found.url, place.url, asked, source_step.with_damage(damage))
        if isinstance(written, Report):
            return _refused(found.url, place.url, asked, written)
        answer = _answer(planned, place.url)
        return replace(
            answer,
            written=True,
            report=written.report,
            continued=written.continued,
            message=f"resharded for {answer.world_size} ranks: verified at level content, sealed",
            next_command=command_line("diff", found.url, place.url, "--values"),
        )


def _shapes(source: Source) -> dict[str, tuple[int, ...]]:
    """The shapes of the model's tensors, or of all tensors if there is no model."""
    tensors = [tensor for part in source.parts for tensor in part.tensors]
    model = [tensor for tensor in tensors if tensor.kind == "model"]
    return {tensor.entry.fqn: tensor.entry.shape for tensor in model or tensors}


def _same_number(found: OpenTarget, place: Place, given: str, pattern: str | None) -> None:
    """Refuse a target name with another step number, which `pick` would order by."""
    named = step_name(base_name(place.url), compile_pattern(pattern))
    if isinstance(found.named, str) or named is None or named.number == found.named.number:
        return
    number = found.named.number
    better = join_url(parent_url(place.url), base_name(found.url))
    raise UsageError(
        f"{place.url} is a name for step {named.number}, and {found.url} is step {number}: pick "
        f"would treat it as step {named.number}; name it {better}",
        instead_of=given,
        instead=better,
    )


@contextmanager
def opened_step(
    step: str, requirements: Requirements, storage: StorageOptions
) -> Iterator[OpenTarget]:
    """The step that an argument names, open; raises `UsageError` where it is one file."""
    with open_target(step, requirements, storage) as found:
        if found.is_file:
            raise UsageError(
                f"{found.url} is one file, not a step of sharded DCP that can be resharded",
                next_command=command_line("show", found.url),
            )
        yield found


def inspect_whole(
    found: OpenTarget, checked: Requirements, *, accept_unverifiable: bool
) -> Inspection:
    """Inspect a step as deep as needed to trust all but its elements.

    Their checksums are compared while copying, unless there are none: then only a seal
    can verify the step, and that takes reading every byte. So does a seal that may be older
    than a file: what was written since may be sound, and of another save.
    """
    inspected = inspect_step(found, checked, level=Level.STRUCTURE, seal_bytes=SealBytes.LATER)
    whole = not refusal(inspected.report, accept_unverifiable=accept_unverifiable)
    seal = inspected.notes.seal
    is_older = seal is not None and not is_unwritten(seal, inspected.step)
    faults = {finding.code for finding in inspected.report.with_severity(Severity.FAULT)}
    # The bytes of a sealed file that was written again may be the sealed ones.
    whole = whole or (is_older and faults == {"step.two-saves"})
    if whole and (checked.require_seal or is_older or needs_content(inspected.report)):
        return inspect_step(found, checked, level=Level.CONTENT, content=Asked(Limits()))
    return inspected


@contextmanager
def target_place(
    target: str, storage: StorageOptions, *, source: str | None = None
) -> Iterator[Place]:
    """The place of the new step; its root is created if its parent folder exists.

    Raises `UsageError` for a place inside the step `source`, which is never written to.
    """
    named = parse_target(target)
    if named.name is None:
        path = join_url(named.root, "step_1200")
        raise UsageError(
            f"{target}: give the new step as a path, such as {path}",
            instead_of=target,
            instead=path,
        )
    url = target.rstrip("/") or target
    if base_name(url) in (".", ".."):
        raise UsageError(f"{target} already exists; name a step that does not exist")
    if source is not None and _is_inside(parent_url(url), source):
        better = f"{source}-{base_name(url)}"
        raise UsageError(
            f"{target} is inside the step {source}, which is not written to",
            instead_of=target,
            instead=better,
        )
    with open_store(parent_url(url), storage) as store:
        yield Place(store, base_name(url))


def _is_inside(folder: str, step: str) -> bool:
    """Whether a folder is the one of a step, or below it; links are followed."""
    paths = [absolute_url(url).rstrip("/") for url in (folder, step)]
    inner, outer = map(os.path.realpath, paths) if all(map(is_local, paths)) else paths
    return f"{inner}/".startswith(f"{outer}/")


def _like(asked: _Asked, requirements: Requirements, storage: StorageOptions) -> Wanted:
    """The layout of the step that `--like` names: its slices, and the ranks that wrote them."""
    assert asked.like is not None  # noqa: S101 - asked for where there is no mesh
    with opened_step(asked.like, requirements, storage) as found:
        inspected = inspect_step(
            found, requirements, level=Level.LISTING, seal_bytes=SealBytes.LATER
        )
        if refusal(inspected.report, accept_unverifiable=True):
            raise OptionError(
                "--like",
                f"{found.url}: the step is {inspected.report.verdict.value}",
                next_command=command_line("verify", found.url),
            )
        slices: dict[tuple[str, str], tuple[RankSlice, ...]] = {}
        n_ranks = 0
        for opened in inspected.parts:
            ranks = [shard_rank(file.path) for file in opened.part.files]
            n_ranks = max([n_ranks, *(rank + 1 for rank in ranks if rank is not None)])
            for metadata in opened.metadata:
                for fqn, tensor in metadata.tensors.items():
                    held = [
                        RankSlice(
                            TensorSlice(chunk.offsets, chunk.sizes),
                            (shard_rank(chunk.byte_range.file) or 0,),
                        )
                        for chunk in tensor.chunks
                        if chunk.byte_range is not None
                        and (0 not in chunk.sizes or 0 in tensor.shape)
                    ]
                    key = (opened.part.path, fqn)
                    known = {one.elements.offsets for one in slices.get(key, ())}
                    more = tuple(one for one in held if one.elements.offsets not in known)
                    slices[key] = (*slices.get(key, ()), *more)
    if not n_ranks:
        raise OptionError("--like", f"{found.url} has no shard files to take a layout from")
    mesh = Mesh((("dp", n_ranks),))
    return Wanted(mesh, (), slices, asked.per_rank, asked.only_model)


def _answer(planned: Plan, url: str) -> Reshard:
    source, report = planned.source, planned.source.report
    of_ranks = tuple(shares(planned))
    n_ranks = planned.wanted.mesh.world_size
    named = step_name(base_name(url))
    saved = report.world_size
    n_others = len(planned.files) + len(planned.parts)
    return Reshard(
        source=source.url,
        target=url,
        number=named.number if named else None,
        saved_world_size=saved.size if saved else None,
        world_size=n_ranks,
        mesh=str(planned.wanted.mesh),
        n_tensors=sum(part.n_cut + part.n_whole for part in planned.parts),
        n_cut=sum(part.n_cut for part in planned.parts),
        n_whole=sum(part.n_whole for part in planned.parts),
        n_bytes_entries=sum(
            len(part.entries) - part.n_cut - part.n_whole for part in planned.parts
        ),
        n_files=len(of_ranks) + n_others,
        n_bytes=planned.n_bytes,
        shares=of_ranks,
        findings=planned.findings,
        report=report,
        message=f"would be resharded for {n_ranks} ranks; nothing is written yet",
    )


def _refused(source: str, target: str, asked: _Asked, report: Report) -> Reshard:
    verdict = report.verdict.value
    return Reshard(
        source=source,
        target=target,
        saved_world_size=report.world_size.size if report.world_size else None,
        world_size=asked.wanted.mesh.world_size if asked.wanted else 0,
        mesh=str(asked.wanted.mesh) if asked.wanted else "",
        report=report,
        message=f"not resharded: {report.url} is {verdict}; nothing was published",
        exit_code=report.exit_code,
        next_command=command_line("verify", report.url, "--level", "content"),
    )
