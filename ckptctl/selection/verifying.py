"""Verify one step."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ckptctl.errors import PathNotFound, UsageError
from ckptctl.findings import Report
from ckptctl.formats.frameworks.layouts import StepName, compile_pattern, is_flat_file
from ckptctl.inspection.inspecting import Inspection, inspect_step
from ckptctl.inspection.marks_file import check_marks_file
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import FileInfo, Level
from ckptctl.options import Requirements, known_level, not_negative
from ckptctl.selection.lone_files import check_no_lone_file
from ckptctl.selection.picking import pick
from ckptctl.selection.roots import list_root, older_steps
from ckptctl.selection.targets import check_is_step, named_step, parse_target
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store

if TYPE_CHECKING:
    from ckptctl.distributed.process_group import ProcessGroup
    from ckptctl.inspection.content import Asked
    from ckptctl.records.byte_pass import OnProgress, Stop


def verify(
    step: str,
    *,
    level: Level | None = None,
    require: Collection[str] = (),
    world_size: int | None = None,
    saved_world_size: int | None = None,
    pattern: str | None = None,
    grace_s: float = 600.0,
    require_seal: bool = False,
    key: bytes | None = None,
    remote_checksums: bool = False,
    marks: str | None = None,
    subset: str | None = None,
    deadline_s: float | None = None,
    jobs: int | None = None,
    nan_scan: bool = False,
    stop: Stop | None = None,
    on_progress: OnProgress | None = None,
    group: ProcessGroup | None = None,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
) -> Report:
    """Inspect one step as deep as `level` says, and report everything that is found.

    `level` None is as deep as `pick` inspects: as deep as is cheap on that storage.
    `step` is `PATH`, `ROOT@1200`, `ROOT@latest` or `ROOT@auto`, the step that `pick` takes
    under the same conditions. `require` names kinds of train state that must be there
    (exit code 23); `saved_world_size` is how many ranks wrote the step and must each have
    left a shard file; `world_size` is how many are to load it (24 where that cannot be).
    `grace_s` is how long after its last write an unfinished save counts as running, in
    seconds.

    A seal in the step is compared with it: sizes and metadata at every level, every
    byte at `content`. `require_seal` asks for one that proves the step (22 without),
    `key` is the key that it must have been made with. `marks` is a file of marks to be
    read beside those in the step.

    `remote_checksums` compares the checksums that the storage keeps of its objects with those
    in the seal, at any level, and reads nothing for it: equal ones prove that no object was
    replaced by another since the step was sealed, not what the disks hold today. Where there
    is no seal, or no checksum of the whole object, the step is `unverifiable` (22).

    The rest is for level `content`. `subset` compares a part of the records: `3/7`, or
    `10%` of the bytes. `deadline_s` seconds after the call no further byte is read;
    `stop` ends the reading from another thread or a signal handler. What was compared
    until then is in the report, whose level is then `structure`; a look that was ended
    before all that was asked for had been compared is `unverifiable` (22). `jobs` is how
    many threads read a file system. `nan_scan` looks for NaN and infinity in the values
    of floating-point tensors, in the same pass. `on_progress` is told bytes read and bytes to read.
    With a `group` (see `ckptctl.distributed`) several processes share the bytes: each calls
    this with the same arguments, and rank 0 has the report.

    A storage that fails gives the verdict `unknown`. Raises `UsageError` and
    `PathNotFound` where there is no such step, `StorageError` where the root that
    should hold it cannot be listed.

    Cost: see `looking.look`.
    """
    level = known_level(level)
    return inspect_target(
        step,
        level=level,
        asked=Requirements(
            require=require,
            world_size=world_size,
            saved_world_size=saved_world_size,
            grace_s=grace_s,
            require_seal=require_seal,
            key=key,
            marks=marks,
            remote_checksums=remote_checksums,
        ),
        pattern=pattern,
        content=_content(step, level, subset, deadline_s, jobs, nan_scan, stop, on_progress, group),
        storage_options=storage_options,
        endpoint_url=endpoint_url,
        timeout_s=timeout_s,
    ).report


def _content(
    step: str,
    level: Level | None,
    subset: str | None,
    deadline_s: float | None,
    jobs: int | None,
    nan_scan: bool,
    stop: Stop | None,
    on_progress: OnProgress | None,
    group: ProcessGroup | None,
) -> Asked | None:
    """How the bytes are to be read; raises `UsageError` where they are not to be."""
    given = {
        "subset": subset,
        "deadline": None if deadline_s is None else f"{deadline_s:g}s",
        "jobs": None if jobs is None else str(jobs),
        "nan-scan": "" if nan_scan else None,
    }
    for name, value in given.items():
        if value is not None and level is not Level.CONTENT:
            words = ["ckptctl", "verify", step, "--level", "content", f"--{name}", value]
            raise UsageError(
                f"--{name} is for level content; the other levels read no more than a little of "
                "each record",
                next_command=shlex.join(word for word in words if word),
            )
    if level is not Level.CONTENT:
        return None
    # Imported here: the other levels do not need them, and start sooner.
    from ckptctl.distributed.process_group import ProcessGroup
    from ckptctl.inspection.content import Asked
    from ckptctl.inspection.subsets import parse_subset
    from ckptctl.records.byte_pass import Limits, Stop

    until_s = None
    if deadline_s is not None:
        until_s = time.monotonic() + not_negative("deadline", deadline_s)
    if jobs is not None and jobs < 1:
        raise UsageError(f"--jobs is {jobs}; it must be 1 or more")
    limits = Limits(jobs, until_s, stop or Stop(), on_progress)
    return Asked(limits, parse_subset(subset), group or ProcessGroup(), nan_scan)


def inspect_target(
    step: str,
    *,
    level: Level | None,
    asked: Requirements,
    pattern: str | None = None,
    content: Asked | None = None,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
) -> Inspection:
    """Find the step that an argument names, and look at it."""
    with open_target(
        step,
        asked=asked,
        pattern=pattern,
        storage_options=storage_options,
        endpoint_url=endpoint_url,
        timeout_s=timeout_s,
    ) as found:
        return inspect_step(
            found,
            asked,
            level=level,
            content=content,
            older=found.older,
        )


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

    @property
    def is_file(self) -> bool:
        """The step is one file, and no folder."""
        return [file.path for file in self.files if is_flat_file(file)] == [self.name]

    def older(self) -> tuple[StepName, ...]:
        """The steps under the root that are older by their number, newest first.

        None for a folder that has no number. Cost: one listing.
        """
        if isinstance(self.named, str):
            return ()
        return older_steps(list_root(self.store, self._pattern).steps, self.named.number)


@contextmanager
def open_target(
    step: str,
    *,
    asked: Requirements,
    pattern: str | None = None,
    storage_options: Mapping[str, object] | None = None,
    endpoint_url: str | None = None,
    timeout_s: float = 30.0,
) -> Iterator[OpenTarget]:
    """Find the step that an argument names, and keep the store of its root open.

    Raises `UsageError` and `PathNotFound` where there is no such step.
    """
    check_marks_file(asked.marks)
    target = parse_target(step)
    if target.which == "auto":
        target = parse_target(
            pick(
                target.root,
                pattern=pattern,
                require=asked.require,
                world_size=asked.world_size,
                saved_world_size=asked.saved_world_size,
                grace_s=asked.grace_s,
                require_seal=asked.require_seal,
                key=asked.key,
                marks=asked.marks,
                storage_options=storage_options,
                endpoint_url=endpoint_url,
                timeout_s=timeout_s,
            ).path
        )
    compiled = compile_pattern(pattern)
    with open_store(
        target.root,
        storage_options=storage_options,
        endpoint_url=endpoint_url,
        timeout_s=timeout_s,
    ) as store:
        found = OpenTarget(store, named_step(store, target, compiled), None, compiled)
        try:
            files = found.files
        except PathNotFound as error:
            hint = "; behind an @ stands a step number, latest or auto" if "@" in step else ""
            message = f"{found.url} does not exist{hint}"
            raise PathNotFound(message, next_command=f"ckptctl scan {store.url}") from error
        if isinstance(found.named, str):
            check_no_lone_file(found.store, found.named, files)
            check_is_step(found.url, files)
        yield found
