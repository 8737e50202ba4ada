"""Write a step into the root, so that an interrupted save is recognised.

Into a folder that did not exist, on an object store under names that no other attempt
uses: shards first, digested on their way, the metadata after all of them, then, with the
folders flushed, the seal. Right before each of them the attempt proves that
the root is still its own. What is written is the question of `state`, when it is
written that of `checkpointer`.
"""

from __future__ import annotations

import os
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from ckptctl import __version__
from ckptctl.checks.seals import written_ms
from ckptctl.checks.store_checksums import as_kept, best_of
from ckptctl.distributed.process_group import ProcessGroup, ranks_lost
from ckptctl.errors import (
    AccessDenied,
    CkptctlError,
    Fenced,
    RanksLost,
    SaveFailed,
    StorageError,
    UsageError,
)
from ckptctl.findings import Finding, Severity, Verdict
from ckptctl.formats.digests import Algorithm
from ckptctl.formats.frameworks.layouts import name_of_attempt, shard_rank, step_name
from ckptctl.formats.own.files import time_now
from ckptctl.formats.own.seals import SEAL, Origin, Seal, SealedFile, seal_bytes
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.step_listing import list_step
from ckptctl.model import FileInfo, Level
from ckptctl.options import Requirements
from ckptctl.records.byte_pass import Limits
from ckptctl.selection.fencing import Token, check_token
from ckptctl.selection.leftovers import abandoned_uploads
from ckptctl.selection.removing import remove_step
from ckptctl.selection.roots import list_root
from ckptctl.selection.sealing import digested, identity_of, is_sealed
from ckptctl.storage.contract import Store
from ckptctl.storage.local import LocalStore
from ckptctl.storage.opening import absolute_url, is_local, join_url
from ckptctl.storage.publishing import sync_folder
from ckptctl.storage.room import FULL, free_bytes
from ckptctl.train.digesting import DigestedFiles, WrittenFile
from ckptctl.train.evidence import move_aside
from ckptctl.train.one_process import alone_arguments
from ckptctl.train.uploading import Uploads

if TYPE_CHECKING:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

Written = Mapping[str, WrittenFile]
"""Files of a step, by path, as they were written."""

BESIDE = "crc32"
"""What is computed beside the digests on the way to an object store."""

_GRACE_S = 0.0  # our own save is over when it is looked at


@dataclass(frozen=True, slots=True)
class Saver:
    """What a save needs to know: the root, whose it is, and how steps are named there."""

    store: Store
    group: ProcessGroup
    token: Token
    step_format: str
    key: bytes | None = None
    origin: Origin | None = None

    @property
    def algorithm(self) -> Algorithm:
        """How its files are digested."""
        return Algorithm.XXH3 if self.key is None else Algorithm.SHA256

    def url_of(self, step: int) -> str:
        """The address of a step of this root."""
        return join_url(self.store.url, self.name_of(step))

    def name_of(self, step: int) -> str:
        """The folder of a step; on an object store it bears the number of the attempt.

        There nothing can be renamed aside, and a write of an older attempt that arrives late
        would replace what lies under its name.
        """
        name = self.step_format.format(step)
        return name if is_local(self.store.url) else name_of_attempt(name, self.token.number)


def check_step_format(step_format: str) -> None:
    """Raise `UsageError` for a form of names that `pick` would not take for steps."""
    try:
        name = step_format.format(1200)
    except (IndexError, KeyError, ValueError):
        name = step_format
    named = step_name(name)
    if named is None or named.number != 1200 or named.bare or "/" in name:
        raise UsageError(
            f"{step_format!r} makes names such as {name!r}, which are no steps; "
            "'step_{}' is the usual form"
        )


def make_place(saver: Saver, step: int) -> str | None:
    """Make the folder of a step that was not there; on rank 0 alone.

    What lies there unfinished, rejected or superseded is moved aside; its new address. On an
    object store it stays where it is, and the step of this attempt counts from then on.
    Raises `UsageError` where a whole step of that number is there, `Fenced`.
    """
    name = saver.name_of(step)
    check_token(saver.store, saver.token)
    taken = [one for one in list_root(saver.store).steps if one.number == step]
    moved = None
    for one in taken:
        looked = inspect_step(saver.store, one, Requirements(grace_s=_GRACE_S))
        report = looked.report
        if report.verdict is Verdict.COMPLETE or report.verdict is Verdict.UNVERIFIABLE:
            raise UsageError(
                f"{report.url} is there already, and it is {report.verdict.value}: it is not "
                "written over",
                next_command=f"ckptctl verify {shlex.quote(report.url)}",
            )
        if report.verdict is Verdict.UNKNOWN:
            raise SaveFailed(
                f"step {step} was not saved: {report.url} is there, and could not be looked at",
                next_command=f"ckptctl verify {shlex.quote(report.url)}",
            )
        if is_local(saver.store.url):
            moved = _move_aside(saver, one.name)
        elif one.name == name and report.digests:
            raise SaveFailed(
                f"step {step} was not saved: {report.url} is there from this attempt, and it is "
                f"{report.verdict.value}",
                next_command=f"ckptctl verify {shlex.quote(report.url)}",
            )
    if not is_local(saver.store.url):
        # What cannot be aborted now is aborted by `prune`, or by a rule of the bucket.
        with suppress(StorageError):
            for upload in abandoned_uploads(saver.store, number=step):
                saver.store.abort_upload(upload)
        return None
    folder = _local_path(saver, name)
    try:
        os.mkdir(folder)
    except OSError as error:
        raise SaveFailed(f"step {step} was not saved: {folder}: {error.strerror}") from error
    return moved


def _move_aside(saver: Saver, name: str) -> str:
    """Rename a folder of the root into `.ckptctl/aside/`, durably; its new address."""
    store = saver.store
    assert isinstance(store, LocalStore)  # noqa: S101 - nothing else has a rename
    try:
        target = move_aside(store, saver.token, name)
    except StorageError as error:
        raise SaveFailed(f"{error.message}: it could not be moved aside") from error
    return _local_path(saver, target)


def _local_path(saver: Saver, path: str) -> str:
    return join_url(absolute_url(saver.store.url), path)


def write_step(saver: Saver, step: int, state: dict[str, Any], *, digest: bool = True) -> Written:
    """Write shards and metadata; every rank calls it. Raises `SaveFailed`, `Fenced`.

    The metadata is published by rank 0, after all ranks have written and flushed theirs.
    What this rank wrote, for `seal_step`; nothing of it without `digest`.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    alone = saver.group.size == 1
    writer = _writer(saver, saver.name_of(step))
    # What the store keeps is compared with it; CRC-32 is what botocore sends.
    beside = None if is_local(saver.store.url) else BESIDE
    files = DigestedFiles(writer.fs, saver.algorithm, beside)
    if digest:
        writer.fs = cast("Any", files)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch remarks on saving without a process group
            save(
                state,
                storage_writer=writer,
                process_group=saver.group.handle,
                **alone_arguments(save, alone=alone),
            )
    except CheckpointException as error:  # no Exception: it would pass by every other clause
        _check_still_held(saver)
        for cause, _ in error.failures.values():
            if isinstance(cause, CkptctlError) and not isinstance(cause, StorageError):
                raise cause from error
        causes = [cause for cause, _ in error.failures.values()]
        if any(isinstance(cause, OSError) and cause.errno in FULL for cause in causes):
            raise _disk_full(saver, step, failures_of(error)) from error
        failed = SaveFailed(
            f"step {step} was not saved: {failures_of(error)}; older steps are as they were",
            next_command=f"ckptctl scan {shlex.quote(saver.store.url)}",
        )
        if any(isinstance(cause, AccessDenied) for cause in causes):
            failed.exit_code = AccessDenied.exit_code
        raise failed from error
    except RuntimeError as error:
        if alone:
            first, *_ = str(error).splitlines() or [type(error).__name__]
            raise SaveFailed(f"step {step} was not saved: {first[:300]}") from error
        raise ranks_lost(error) from error
    return files.written


@contextmanager
def failing(saver: Saver, what: str, left: str) -> Iterator[None]:
    """Turn what a storage or a file does to a save into a `SaveFailed`, with its cause.

    `what` begins the message and `left` ends it. `Fenced`, `RanksLost` and `UsageError`
    say something else, and pass.
    """
    try:
        yield
    except (SaveFailed, Fenced, RanksLost, UsageError):
        raise
    except (CkptctlError, OSError) as error:
        message = error.message if isinstance(error, CkptctlError) else str(error)
        own = error.next_command if isinstance(error, CkptctlError) else None
        failed = SaveFailed(
            f"{what}: {message}; {left}",
            next_command=own or f"ckptctl scan {shlex.quote(saver.store.url)}",
        )
        if isinstance(error, AccessDenied):  # no retry changes that
            failed.exit_code = error.exit_code
        raise failed from error


def _check_still_held(saver: Saver) -> None:
    """Raise `Fenced` where a save failed because another attempt moved it aside.

    Every rank calls it. A storage that does not answer leaves the failure of the save.
    """

    def check() -> None:
        with suppress(StorageError):
            check_token(saver.store, saver.token)

    saver.group.from_first(check)


def _disk_full(saver: Saver, step: int, why: str) -> SaveFailed:
    """What is raised then; every rank calls it.

    What was written of the step goes: with each further try there would be less room.
    """

    def clear() -> str:
        try:
            n_bytes = sum(file.size for file in list_step(saver.store, saver.name_of(step)))
            check_token(saver.store, saver.token)
            remove_step(saver.store, saver.name_of(step))
        except StorageError as error:
            return f"what was written of it is still there ({error.message})"
        return f"{n_bytes:,} bytes of it were written, and are removed again"

    told = saver.group.from_first(clear)
    free = free_bytes(absolute_url(saver.store.url))
    return SaveFailed(
        f"step {step} was not saved: {why}: {told}; {free:,} bytes are free now; older steps are "
        "as they were",
        next_command=f"df -h {shlex.quote(saver.store.url)}",
    )


def _writer(saver: Saver, name: str) -> FileSystemWriter:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    class FencedWriter(FileSystemWriter):
        """Publishes metadata only for the attempt that holds the root."""

        def finish(self, metadata: Any, results: Any) -> None:
            """Runs on rank 0, when every rank has reported what it wrote."""
            check_token(saver.store, saver.token)
            super().finish(metadata, results)

    if is_local(saver.store.url):
        return FencedWriter(_local_path(saver, name))
    writer = FencedWriter(name, sync_files=False)
    writer.fs, writer.path = cast("Any", Uploads(saver.store)), cast("Any", name)
    return writer


def failures_of(error: BaseException) -> str:
    """What went wrong on which ranks, in one line."""
    failures: Mapping[int, Any] = getattr(error, "failures", {})
    told = [
        f"rank {rank}: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}"
        for rank, (cause, _) in sorted(failures.items())
    ]
    more = f" (and {len(told) - 2} more ranks)" if len(told) > 2 else ""
    return ("; ".join(told[:2]) + more)[:600] or type(error).__name__


def seal_step(saver: Saver, step: int, written: Written) -> None:
    """Look at the step, and seal it; every rank calls it, after `flush_step`.

    Each rank gives the digests of the files that it wrote; what it cannot vouch for it
    reads back. Raises `SaveFailed` where what was written is not a whole step, `Fenced`,
    `StorageError`.
    """
    name = saver.name_of(step)
    files = saver.group.from_first(
        lambda: [file for file in list_step(saver.store, name) if is_sealed(file)]
    )
    own = [file for file in files if _digester(file, saver.group.size) == saver.group.rank]
    shares = saver.group.from_all(lambda: _digests_of(saver, step, own, written))
    sealed = sorted((file for files, _ in shares for file in files), key=lambda file: file.path)
    damaged = [finding for _, findings in shares for finding in findings]
    saver.group.from_first(lambda: _put_seal(saver, step, tuple(sealed), damaged))


def flush_step(saver: Saver, step: int) -> None:
    """Make the names of a step durable; every rank calls it."""

    def flush() -> None:
        for folder in (saver.name_of(step), ""):
            sync_folder(_local_path(saver, folder))

    if is_local(saver.store.url):
        saver.group.from_first(flush)


def _digests_of(
    saver: Saver, step: int, files: Sequence[FileInfo], written: Written
) -> tuple[tuple[SealedFile, ...], tuple[Finding, ...]]:
    name = saver.name_of(step)
    known = [file for file in files if file.path in written]
    sealed: list[SealedFile] = []
    damaged: list[Finding] = []
    answers = saver.store.kept(f"{name}/{file.path}" for file in known)
    for file, kept in zip(known, answers, strict=True):
        one = written[file.path]
        if file.size != one.size:
            raise SaveFailed(
                f"step {step} was not saved: {file.path} is {file.size:,} bytes, and "
                f"{one.size:,} were written to it; older steps are as they were",
                next_command=f"ckptctl verify {shlex.quote(saver.url_of(step))}",
            )
        checksum = best_of(kept, lambda algorithm: algorithm == BESIDE)
        known_by_us = checksum is not None and checksum.algorithm == BESIDE
        stored, wrong = as_kept(file.path, kept, checksum, one.beside if known_by_us else None)
        sealed.append(SealedFile(file.path, one.size, written_ms(file), one.digests, stored))
        damaged += wrong
    unknown = [file for file in files if file.path not in written]
    more, wrong = digested(saver.store, name, unknown, saver.algorithm, Limits())
    return (*sealed, *more), (*damaged, *wrong)


def _digester(file: FileInfo, n_ranks: int) -> int:
    """The rank that digests a file: the one that wrote it."""
    rank = shard_rank(file.path)
    return 0 if rank is None else rank % n_ranks


def _put_seal(
    saver: Saver, step: int, sealed: tuple[SealedFile, ...], damaged: Sequence[Finding]
) -> None:
    name = saver.name_of(step)
    if damaged:
        raise SaveFailed(
            f"step {step} was written, and is not sealed: {damaged[0].message}",
            next_command=f"ckptctl verify {shlex.quote(saver.url_of(step))} --level content",
        )
    named = step_name(name)
    # No deeper: what is in the shards was digested on its way, and all ranks wait for this.
    looked = inspect_step(
        saver.store,
        named or name,
        Requirements(saved_world_size=saver.group.size, grace_s=_GRACE_S),
        level=Level.LISTING,
    )
    report = looked.report
    if report.verdict not in (Verdict.COMPLETE, Verdict.UNVERIFIABLE):
        faults = report.with_severity(Severity.FAULT)
        raise SaveFailed(
            f"step {step} was written, and is {report.verdict.value}: {faults[0].message}; it is "
            "not sealed, and will not be taken",
            next_command=f"ckptctl verify {shlex.quote(report.url)}",
        )
    made = Seal(
        saver.algorithm,
        identity_of(looked, saver.group.size),
        sealed,
        time_now(),
        f"ckptctl {__version__}",
        origin=saver.origin,
    )
    check_token(saver.store, saver.token)
    try:
        saver.store.put(f"{name}/{SEAL}", seal_bytes(made, saver.key))
    except StorageError as error:
        raise SaveFailed(
            f"step {step} is whole and was not sealed: {error.message}",
            next_command=f"ckptctl seal {shlex.quote(report.url)}",
        ) from error
