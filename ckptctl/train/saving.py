"""Save one step so that an interrupted save is recognized as one.

`StepSave.run` lists the stages in order. Shards go into a new folder, on an object store
under names that no other attempt uses; then the metadata; then the seal. Before each stage
the attempt checks that it still holds the root.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any

from ckptctl import __version__
from ckptctl.distributed.process_group import ProcessGroup, raise_interruption, ranks_lost
from ckptctl.errors import (
    AccessDenied,
    CkptctlError,
    Fenced,
    RanksLost,
    SaveFailed,
    StorageError,
    StorageFull,
    UsageError,
)
from ckptctl.findings import Finding, Severity, Verdict
from ckptctl.formats.digests import Algorithm, sha256_of
from ckptctl.formats.frameworks.layouts import (
    METADATA,
    OWN_FOLDER,
    name_of_attempt,
    shard_rank,
    step_name,
)
from ckptctl.formats.own.contract import CONTRACT_FILE, contract_bytes, terms_of
from ckptctl.formats.own.data_ledger import DATA_FILE, DataFields, data_bytes
from ckptctl.formats.own.files import time_now
from ckptctl.formats.own.marks import MarkKind
from ckptctl.formats.own.seals import SEAL, Seal, SealedFile
from ckptctl.formatting import command_line
from ckptctl.inspection.content import as_kept, best_of
from ckptctl.inspection.inspecting import inspect_step
from ckptctl.inspection.open_step import OpenStep, list_step
from ckptctl.inspection.seals import written_ms
from ckptctl.model import FileInfo, Level
from ckptctl.options import Requirements, TrainOptions
from ckptctl.records.byte_pass import Limits
from ckptctl.selection.history import check_sentinel, check_token
from ckptctl.selection.retention import abandoned_uploads, remove_step
from ckptctl.selection.roots import list_root
from ckptctl.selection.sealing import bound, digested, digests_for, identity_of, is_sealed
from ckptctl.signatures import public_key, public_key_of
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import join_url
from ckptctl.train.abandoning import HeldRoot, move_aside
from ckptctl.train.held_once import LowestRankPlanner
from ckptctl.train.ledger import RankAttempt
from ckptctl.train.writer import Writer, WrittenFile

_NO_GRACE_S = 0.0
"""The attempt holds the root, so no unfinished save can be in progress."""


@dataclass(frozen=True, slots=True)
class StateToSave:
    """What a rank saves: its state, why the weights are lost, and the names of buffers.

    `lost` is empty where they are not. `went_well`: no rank noted a failure or a loss that is not
    finite; None where no rank has a loss. Buffers are saved from the lowest rank that has them.
    `data` is the data ledger, on rank 0; None without one.
    """

    state: dict[str, Any]
    lost: str = ""
    went_well: bool | None = None
    buffers: Collection[str] = ()
    data: DataFields | None = None


def check_step_format(step_format: str) -> None:
    """Raise `UsageError` for a format of names that `pick` would not recognize as steps."""
    name = step_format
    with suppress(IndexError, KeyError, ValueError):
        name = step_format.format(1200)
    named = step_name(name)
    if named is None or named.number != 1200 or named.bare or "/" in name:
        raise UsageError(
            f"{step_format!r} makes names such as {name!r}, which are not recognized as steps; "
            "the usual format is 'step_{}'"
        )


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers that a script gives to `save` or `note`, as plain ones of Python."""

    step: int
    loss: float | None = None
    tokens: int | None = None
    samples: int | None = None

    @classmethod
    def of(cls, step: object, loss: Any, tokens: object = None, samples: object = None) -> Counts:
        """Takes numbers of NumPy and torch, too; raises `UsageError` for what is no number."""
        try:
            loss = None if loss is None else float(loss)
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise UsageError(f"loss is {_shown(loss)}: expected one number") from error
        tokens = None if tokens is None else _whole("tokens", tokens)
        samples = None if samples is None else _whole("samples", samples)
        return cls(_whole("step", step), loss, tokens, samples)


def _whole(name: str, value: Any) -> int:
    try:
        return index(value)
    except TypeError as error:
        raise UsageError(f"{name} is {_shown(value)}: expected a whole number") from error


def _shown(value: object) -> str:
    return f"{str(value)[:80]!r} ({type(value).__name__})"


def check_seals(options: TrainOptions, requirements: Requirements) -> None:
    """Raise `UsageError` where the job would not resume from its own steps: nobody signs them.

    Each restart would go back to the step that somebody else signed. Without seals of the job
    another program may sign its steps.
    """
    signers, private = requirements.require_signature, requirements.signing_key
    if not (signers and options.seal):
        return
    if private is None or public_key_of(private).fingerprint not in {
        public_key(signer).fingerprint for signer in signers
    }:
        what = "no signing_key" if private is None else "a signing_key of another signer"
        raise UsageError(
            f"require_signature with {what}: this job would not resume from the steps that it "
            "saves; give the signing_key, or seal=False where `ckptctl watch --sign` signs them"
        )


class StepSave:
    """One save of one step. Every rank creates one and calls `run`.

    `moved_aside` is the new address of an unfinished or rejected step of the same name.
    """

    def __init__(
        self,
        store: Store,
        group: ProcessGroup,
        number: int,
        attempt: RankAttempt,
        options: TrainOptions,
        requirements: Requirements,
    ) -> None:
        self.number = number
        self.name = options.step_format.format(number)
        if store.folders is None:
            # An object store cannot rename existing objects, and an upload of an older attempt that
            # arrives late would replace them: each attempt writes under its own names.
            self.name = name_of_attempt(self.name, attempt.token.number)
        self.moved_aside: str | None = None
        self.digests: tuple[tuple[str, str], ...] = ()
        self._store = store
        self._group = group
        self._attempt = attempt
        self._seals = options.seal
        self._contract = terms_of(options.contract)
        self._requirements = requirements

    @property
    def url(self) -> str:
        return join_url(self._store.url, self.name)

    def run(self, taken: StateToSave) -> None:
        """Write the state that was taken as this step, durably, and seal it.

        A step whose weights are lost is rejected before its metadata is published: a job that is
        killed at any moment leaves no step that a resume would use. Raises `SaveFailed`, `Fenced`
        if another attempt holds the root, `UsageError` if a complete step of that number exists,
        `RanksLost`.
        """
        with self._failing("was not saved", "older steps are unchanged"):
            self.moved_aside = self._group.from_first(self._make_place)
            written = self._write(taken)
        with self._failing("was written but not sealed", "it may be complete"):
            if self._seals:
                self._seal(written)

    # Making room

    def _make_place(self) -> str | None:
        """Create the step directory; returns what was moved aside for it. On rank 0 only."""
        check_sentinel(self._store)
        self._check_token()
        moved = None
        folders = self._store.folders
        for found in list_root(self._store).steps:
            if found.number != self.number:
                continue
            asked = Requirements(grace_s=_NO_GRACE_S)
            report = inspect_step(OpenStep(self._store, found), asked).report
            verify = command_line("verify", report.url)
            if report.verdict in (Verdict.COMPLETE, Verdict.UNVERIFIABLE):
                raise UsageError(
                    f"{report.url} already exists and is {report.verdict.value}: it is not "
                    "overwritten",
                    next_command=verify,
                )
            if report.verdict is Verdict.UNKNOWN:
                raise SaveFailed(
                    f"step {self.number} was not saved: {report.url} exists and could not be "
                    "inspected",
                    next_command=verify,
                )
            if folders is not None:
                try:
                    moved = folders.path_of(move_aside(folders, self._attempt.token, found.name))
                except StorageError as error:
                    raise SaveFailed(f"{error.message}: it could not be moved aside") from error
            elif found.name == self.name and report.digests:
                raise SaveFailed(
                    f"step {self.number} was not saved: {report.url} exists from this attempt and "
                    f"is {report.verdict.value}",
                    next_command=verify,
                )
        # Uploads that cannot be aborted now are left to `prune` or a bucket rule.
        with suppress(StorageError):
            for upload in abandoned_uploads(self._store, number=self.number):
                self._store.abort_upload(upload)
        if folders is not None:
            folders.make_folder(self.name)
        return moved

    # Writing

    def _write(self, taken: StateToSave) -> Mapping[str, WrittenFile]:
        """Write shard files and metadata; returns the files of this rank, digested."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_saver import save

        before = partial(self._before_metadata, taken)
        writer = Writer.of(
            self._store, self.name, algorithm=self._algorithm, before_metadata=before
        )
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns about a save without a process group
                planner = LowestRankPlanner(taken.buffers)
                arguments = self._group.dcp_arguments(save)
                save(taken.state, storage_writer=writer, planner=planner, **arguments)
        except CheckpointException as error:  # a BaseException, which no other clause catches
            raise self._write_failed(error) from error
        except RuntimeError as error:
            if self._group.size > 1:
                raise ranks_lost(error) from error
            first, *_ = str(error).splitlines() or [type(error).__name__]
            raise SaveFailed(f"step {self.number} was not saved: {first[:300]}") from error

        return writer.written

    def _before_metadata(self, taken: StateToSave, metadata: bytes) -> None:
        """Reject a step of lost weights, and check that the root is still held; on rank 0 only.

        Data ledger and contract are written before: a step that is complete has them.
        """
        self.digests = ((METADATA, sha256_of(metadata)),)
        of_save = self.digests[0][1]
        own: dict[str, bytes] = {}
        if taken.data is not None:
            own[DATA_FILE] = data_bytes({**taken.data, "metadata": of_save})
        if self._contract:
            own[CONTRACT_FILE] = contract_bytes(self._contract, of_save)
        if own and self._store.folders is not None:
            # Unlike `put`, this fails if a newer attempt has moved the step aside.
            self._store.folders.make_folder(f"{self.name}/{OWN_FOLDER}")
        for path, data in own.items():
            self._store.put(f"{self.name}/{path}", data)
        if taken.lost:
            held = HeldRoot(self._store, self._attempt.token)
            held.mark(self._store, self.name, self, MarkKind.REJECTED, reason=taken.lost)
        self._check_token()

    def _write_failed(self, error: BaseException) -> CkptctlError:
        """The meaning of a `CheckpointException`, which is raised on every rank alike."""

        def check_still_held() -> None:
            # A step that another attempt moved aside fails with a missing file. If the storage
            # does not answer, the failure of the save is reported.
            with suppress(StorageError):
                self._check_token()

        self._group.from_first(check_still_held)
        failures: Mapping[int, Any] = getattr(error, "failures", {})
        raise_interruption(failures, self._group.rank)
        causes = [cause for _, (cause, _) in sorted(failures.items())]
        for cause in causes:
            if isinstance(cause, CkptctlError) and not isinstance(cause, StorageError):
                return cause
        described = []
        for rank, cause in zip(sorted(failures), causes, strict=True):
            first, *_ = str(cause).splitlines() or [""]
            described.append(f"rank {rank}: {type(cause).__name__}: {first}")
        more = f" (and {len(described) - 2} more ranks)" if len(described) > 2 else ""
        why = ("; ".join(described[:2]) + more)[:600] or type(error).__name__
        full = next((cause for cause in causes if isinstance(cause, StorageFull)), None)
        if full is not None:
            return self._disk_full(why, full.next_command)
        failed = SaveFailed(
            f"step {self.number} was not saved: {why}; older steps are unchanged",
            next_command=command_line("scan", self._store.url),
        )
        if any(isinstance(cause, AccessDenied) for cause in causes):
            failed.exit_code = AccessDenied.exit_code
        return failed

    def _disk_full(self, why: str, shows_use: str | None) -> SaveFailed:
        """Remove what was written: a retry would have even less space.

        `shows_use` is the command that shows what is used up: a disk, its inodes, or a quota.
        """

        def clear() -> str:
            try:
                n_bytes = sum(file.size for file in list_step(self._store, self.name))
                self._check_token()
                remove_step(self._store, self.name)
            except StorageError as error:
                return f"what was written of it could not be removed ({error.message})"
            return f"{n_bytes:,} written bytes were removed"

        cleared = self._group.from_first(clear)
        return SaveFailed(
            f"step {self.number} was not saved: {why}: {cleared}; older steps are as they were",
            next_command=shows_use or command_line("scan", self._store.url),
        )

    # Sealing

    def _seal(self, written: Mapping[str, WrittenFile]) -> None:
        """Inspect the step and seal it. Each rank contributes the digests of what it wrote."""
        files = self._group.from_first(
            lambda: [file for file in list_step(self._store, self.name) if is_sealed(file)]
        )
        # Each digests what it wrote, and rank 0 the files of no rank.
        rank, size = self._group.rank, self._group.size
        own = [file for file in files if (shard_rank(file.path) or 0) % size == rank]
        shares = self._group.from_all(lambda: self._digests_of(own, written))
        sealed = sorted((file for files, _ in shares for file in files), key=lambda one: one.path)
        damaged = [finding for _, findings in shares for finding in findings]
        self._group.from_first(lambda: self._put_seal(tuple(sealed), damaged))

    def _digests_of(
        self, files: Sequence[FileInfo], written: Mapping[str, WrittenFile]
    ) -> tuple[tuple[SealedFile, ...], tuple[Finding, ...]]:
        """The digests of some files; those that were not digested while written are read."""
        digested_here = [file for file in files if file.path in written]
        answers = self._store.kept(f"{self.name}/{file.path}" for file in digested_here)
        ours = self._store.upload_checksum
        sealed: list[SealedFile] = []
        damaged: list[Finding] = []
        for file, kept in zip(digested_here, answers, strict=True):
            one = written[file.path]
            if file.size != one.size:
                raise SaveFailed(
                    f"step {self.number} was not saved: {file.path} is {file.size:,} bytes, but "
                    f"{one.size:,} were written to it; older steps are unchanged",
                    next_command=command_line("verify", self.url),
                )
            checksum = best_of(kept, lambda algorithm: algorithm == ours)
            is_ours = checksum is not None and checksum.algorithm == ours
            stored, wrong = as_kept(file.path, kept, checksum, one.checksum if is_ours else None)
            sealed.append(SealedFile(file.path, one.size, written_ms(file), one.digests, stored))
            damaged += wrong
        others = [file for file in files if file.path not in written]
        if others:
            more, wrong = digested(self._store, self.name, others, self._algorithm, Limits())
            sealed += more
            damaged += wrong
        return tuple(sealed), tuple(damaged)

    def _put_seal(self, sealed: tuple[SealedFile, ...], damaged: Sequence[Finding]) -> None:
        """Write the seal of a complete step; on rank 0 only."""
        if damaged:
            raise SaveFailed(
                f"step {self.number} was written but not sealed: {damaged[0].message}",
                next_command=command_line("verify", self.url, "--level", "content"),
            )
        # Level `listing`: the bytes were digested while they were written, and all ranks wait.
        inspected = inspect_step(
            OpenStep(self._store, step_name(self.name) or self.name),
            Requirements(saved_world_size=self._group.size, grace_s=_NO_GRACE_S),
            level=Level.LISTING,
        )
        report = inspected.report
        # A rejection is the mildest fault: the step is complete.
        if report.verdict not in (Verdict.COMPLETE, Verdict.UNVERIFIABLE, Verdict.REJECTED):
            faults = report.with_severity(Severity.FAULT)
            raise SaveFailed(
                f"step {self.number} was written but is {report.verdict.value}: "
                f"{faults[0].message}; it is not sealed, and no resume will use it",
                next_command=command_line("verify", report.url),
            )
        made = Seal(
            self._algorithm,
            identity_of(inspected, self._group.size),
            sealed,
            time_now(),
            f"ckptctl {__version__}",
            origin=self._attempt.origin,
        )
        self._check_token()
        try:
            data = bound(inspected.opened, made, self._requirements)
            self._store.put(f"{self.name}/{SEAL}", data)
        except StorageError as error:
            raise SaveFailed(
                f"step {self.number} is complete but was not sealed: {error.message}",
                next_command=command_line("seal", report.url),
            ) from error

    # In every stage

    @property
    def _algorithm(self) -> Algorithm:
        return digests_for(self._requirements)

    def _check_token(self) -> None:
        check_token(self._store, self._attempt.token)

    @contextmanager
    def _failing(self, what: str, left: str) -> Iterator[None]:
        """Turn errors of the storage and of files into a `SaveFailed` with its cause.

        The message ends with `left`, the state of the step. `Fenced`, `RanksLost` and
        `UsageError` pass unchanged, because they mean something else.
        """
        try:
            yield
        except (SaveFailed, Fenced, RanksLost, UsageError):
            raise
        except (CkptctlError, OSError) as error:
            message = error.message if isinstance(error, CkptctlError) else str(error)
            own = error.next_command if isinstance(error, CkptctlError) else None
            failed = SaveFailed(
                f"step {self.number} {what}: {message}; {left}",
                next_command=own or command_line("scan", self._store.url),
            )
            if isinstance(error, AccessDenied):  # no retry changes that
                failed.exit_code = error.exit_code
            raise failed from error


class Stager:
    """Copies states of the same structure; a copy is valid until the next one is made."""

    def __init__(self) -> None:
        self._stager: Any = None

    def staged(self, state: dict[str, Any]) -> dict[str, Any]:
        """A copy that shares no memory with the objects of the training."""
        import torch
        from torch.distributed.checkpoint import staging

        copied: dict[str, Any]
        if not hasattr(staging, "DefaultStager"):  # torch before 2.9
            copied = _copied(state)
            return copied
        if self._stager is None:
            on_gpu = torch.cuda.is_available()
            options = staging.StagingOptions(
                use_pinned_memory=on_gpu,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=on_gpu,
            )
            self._stager = staging.DefaultStager(options)
        copied = self._stager.stage(state)
        return copied

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        self._stager = None


def _copied(state: Any) -> Any:
    """A new copy of a state. DTensors keep their position in the mesh, not their device."""
    import torch

    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(map(_copied, state))
    return deepcopy(state)
