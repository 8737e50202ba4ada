"""Reshard a step for another world size.

Finds and inspects the step, plans the new one, and writes it if requested; other modules do
each of these.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Unpack

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import OptionError, UsageError
from ckptctl.findings import Report, Severity
from ckptctl.formats.frameworks.layouts import compile_pattern, step_name
from ckptctl.formatting import command_line
from ckptctl.inspection.content import Asked
from ckptctl.inspection.inspecting import Inspection, inspect_step
from ckptctl.inspection.seals import is_unwritten
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import Level
from ckptctl.options import Requirements, StorageKeywords, StorageOptions, options_from
from ckptctl.records.byte_pass import Limits, OnProgress
from ckptctl.resharding.executing import DEFAULT_MEMORY, Place, WriteOptions, write
from ckptctl.resharding.planning import Plan, TargetLayout, check_world_size, plan, shares
from ckptctl.resharding.results import Reshard
from ckptctl.resharding.sources import SourceDamaged, check_format, refusal, source_of
from ckptctl.selection.targets import parse_target
from ckptctl.selection.verifying import OpenTarget, open_target
from ckptctl.storage.contract import ShortRead
from ckptctl.storage.opening import (
    absolute_url,
    base_name,
    is_local,
    join_url,
    open_store,
    parent_url,
)


def reshard(
    source: str,
    target: str,
    *,
    world_size: int | None = None,
    only_model: bool = False,
    apply: bool = True,
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

    `source` is named as for `verify`, `target` is the path of the new step, and `world_size` the
    number of ranks. `only_model` leaves out all but the model. Without `apply` the plan is
    returned, and nothing is written.

    The new step is verified at level `content`, sealed (with `key` if one is given) and only then
    published; the source is never written to. `memory` bounds what is held in bytes, whatever
    the size of a tensor; `jobs` is how many files are written at once. With a `group` (see
    `ckptctl.distributed`) several processes share the files: each calls this with the same
    arguments, and rank 0 publishes. Called again after an interruption, it continues
    with what was written.

    A step that is not complete is refused, and damage in the source ends it: the result then
    holds the report, and nothing is published. Raises `UsageError` for options that do not fit
    and if `target` exists already, `StorageError` if a storage fails or has too little
    space.

    Cost: inspection at level `structure`; at `content` if records have no checksums. Every byte
    of the source read once, twice if tensors are sharded across rows; every byte of the new step
    written once and read twice.
    """
    if world_size is None:
        raise UsageError(
            "the number of ranks of the new step is missing; give --world-size N",
            instead="--world-size 8",
        )
    check_world_size(world_size)
    wanted = TargetLayout(world_size, only_model)
    requirements = Requirements(pattern=pattern, grace_s=grace_s)
    (storage,) = options_from(keywords, storage)
    if jobs is not None and jobs < 1:
        raise OptionError("--jobs", f"is {jobs}; it must be 1 or more")
    options = WriteOptions(
        accept_unverifiable, memory, jobs, key, group or ProcessGroup(), on_progress
    )
    with (
        options.group.sharing(),
        open_target(source, requirements, storage) as found,
        target_place(target, storage, source=found.url) as place,
    ):
        if found.is_file:
            raise UsageError(
                f"{found.url} is one file, not a step of sharded DCP that can be resharded",
                next_command=command_line("show", found.url),
            )
        _same_number(found, place, target, requirements.pattern)
        inspected = inspect_whole(found, requirements, accept_unverifiable=accept_unverifiable)
        check_format(inspected)
        if refusal(inspected.report, accept_unverifiable=accept_unverifiable):
            return _refused(found.url, place.url, wanted, inspected.report)
        whole = source_of(inspected)
        planned = plan(whole, wanted)
        room = options.budget(found.store, place.store)
        answer = _answer(planned, place.url)
        if not apply:
            return answer
        try:
            written = write(planned, place, room, options)
        except (SourceDamaged, ShortRead) as error:
            return _refused(found.url, place.url, wanted, whole.report_after(error))
        if isinstance(written, Report):
            return _refused(found.url, place.url, wanted, written)
        return replace(
            answer,
            written=True,
            report=written.report,
            continued=written.continued,
            message=f"resharded for {answer.world_size} ranks: verified at level content, sealed",
            next_command=command_line("diff", found.url, place.url, "--values"),
        )


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
    codes = {finding.code for finding in inspected.report.findings}
    has_no_checksums = not codes.isdisjoint({"record.no-crc", "record.transformed"})
    if whole and (checked.require_seal or is_older or has_no_checksums):
        return inspect_step(found, checked, level=Level.CONTENT, content=Asked(Limits()))
    return inspected


def check_is_path(target: str, what: str) -> None:
    """Raise `UsageError` for a target that is named as an existing step is, as `ROOT@1200`."""
    named = parse_target(target)
    if named.name is None:
        path = join_url(named.root, "step_1200")
        raise UsageError(
            f"{target}: give {what} as a path, such as {path}", instead_of=target, instead=path
        )


@contextmanager
def target_place(
    target: str, storage: StorageOptions, *, source: str | None = None
) -> Iterator[Place]:
    """The place of the new step; its root is created if its parent folder exists.

    Raises `UsageError` for a place inside the step `source`, which is never written to.
    """
    check_is_path(target, "the new step")
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


def _answer(planned: Plan, url: str) -> Reshard:
    source, report = planned.source, planned.source.report
    of_ranks = tuple(shares(planned))
    n_ranks = planned.wanted.world_size
    named = step_name(base_name(url))
    saved = report.world_size
    n_others = len(planned.files) + len(planned.parts)
    return Reshard(
        source=source.url,
        target=url,
        number=named.number if named else None,
        saved_world_size=saved.size if saved else None,
        world_size=n_ranks,
        n_tensors=planned.n_tensors,
        n_cut=planned.n_cut,
        n_whole=planned.n_tensors - planned.n_cut,
        n_bytes_entries=planned.n_values,
        n_files=len(of_ranks) + n_others,
        n_bytes=planned.n_bytes,
        shares=of_ranks,
        findings=planned.findings,
        report=report,
        message=f"would be resharded for {n_ranks} ranks; nothing is written yet",
    )


def _refused(source: str, target: str, wanted: TargetLayout, report: Report) -> Reshard:
    verdict = report.verdict.value
    return Reshard(
        source=source,
        target=target,
        saved_world_size=report.world_size.size if report.world_size else None,
        world_size=wanted.world_size,
        report=report,
        message=f"not resharded: {report.url} is {verdict}; nothing was published",
        exit_code=report.exit_code,
        next_command=command_line("verify", report.url, "--level", "content"),
    )
