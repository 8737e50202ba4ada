"""Seal steps.

The step is inspected first, at the deepest level: an incomplete step is not sealed. Then
every byte is read and digested, the folder is listed again to detect changes, and the seal
is written whole. Nothing else in the step changes. `inspection.seals` defines what a seal
proves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Unpack

from ckptctl import __version__
from ckptctl.errors import AccessDenied, AlreadyExists, OptionError, PathNotFound, UsageError
from ckptctl.findings import ClaimName, Finding, Report, Severity, Verdict
from ckptctl.formats.digests import Algorithm, can_compute, checksumming
from ckptctl.formats.frameworks.layouts import is_saved
from ckptctl.formats.own.files import MAX_STRING, time_now
from ckptctl.formats.own.seals import (
    MAX_SEAL_BYTES,
    SEAL,
    Adoption,
    Identity,
    Seal,
    SealedFile,
    parse_seal,
    seal_bytes,
    seal_digest,
)
from ckptctl.formatting import command_line, counted, inside
from ckptctl.inspection.content import Asked, as_kept, best_of
from ckptctl.inspection.inspecting import Inspection, inspection_failed
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.seals import (
    PROVES_NOTHING,
    is_trusted,
    next_place,
    seals_beside,
    written_ms,
)
from ckptctl.inspection.stages import contradicted
from ckptctl.model import ExitCode, FileInfo, Level, Message, NextCommand, StepNumber, StepUrl
from ckptctl.options import Requirements, StepKeywords, StorageOptions, options_from
from ckptctl.records.byte_pass import DigestRun, Limits, OnProgress, Stretch, read_runs
from ckptctl.selection.history import run_for_seal
from ckptctl.selection.marking import user_name
from ckptctl.selection.verifying import OpenTarget, open_target
from ckptctl.signatures import public_key_of
from ckptctl.storage.contract import ShortRead, Store
from ckptctl.storage.opening import join_url


@dataclass(frozen=True, slots=True)
class Sealed:
    """The result of `seal`: a seal was written, or the step cannot be sealed."""

    url: StepUrl
    number: StepNumber
    path: str | None
    """The address of the seal; null where the step was refused."""
    replaced: bool
    """The seal replaced another one."""
    kind: str
    """`xxh3-128`, or `sha256 with a signature`; empty where the step was refused."""
    n_files: int
    """Files that were digested."""
    n_bytes: int
    """Bytes that were digested."""
    report: Report
    """The report of the step before it was sealed."""
    message: Message
    exit_code: ExitCode
    next_command: NextCommand
    n_stored: int = 0
    """Files for which the seal also has the store's own checksum."""
    run: str = ""
    """The id of the run that the seal is of; empty where the step was refused."""
    sequence: int = 0
    """The place of the seal in the order of the root's seals; 0 where the step was refused."""
    signer: str | None = None
    """The fingerprint of the key that signed the seal; null without a signature."""


def seal(
    step: str,
    *,
    replace: bool = False,
    adopt: str | None = None,
    accept_unverifiable: bool = False,
    jobs: int | None = None,
    on_progress: OnProgress | None = None,
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[StepKeywords],
) -> Sealed:
    """Write the digests of a complete step to `.ckptctl/seal.json` in it.

    `step` is named as for `verify`. Without `key` the digests are xxh3-128 and detect
    damage; with one they are SHA-256, and the seal cannot be made without the key. With
    `signing_key` they are SHA-256, and whoever verifies the signature cannot make one.
    `replace` replaces an existing seal. `adopt` is the reason why a step that was sealed for
    another root, or under another name, belongs to this one: its bytes are compared with that
    seal, and the new one records who decided it, when and why. `accept_unverifiable` seals
    content that nothing in the step can prove. `saved_world_size` is how many ranks wrote the
    step; it is checked, and recorded in the seal. `jobs` is how many threads read.

    A step that is not complete is refused: the result has its report and exit code. Raises
    `UsageError` if a seal exists, `StorageError` if the storage fails.

    If the storage keeps checksums of whole objects, the seal records them too: those that
    can be computed here are first compared with the bytes.

    Cost: an inspection at `content`, every byte read once more, one write; on an object
    store one HEAD per file.
    """
    if jobs is not None and jobs < 1:
        raise OptionError("--jobs", f"is {jobs}; it must be 1 or more")
    if adopt is not None and not (adopt.strip() and len(adopt) <= MAX_STRING):
        raise OptionError("--adopt", f"needs a reason, of at most {MAX_STRING:,} characters")
    requirements, storage = options_from(keywords, requirements, storage)
    with open_target(step, requirements, storage) as found:
        return seal_found(
            found,
            requirements,
            Limits(jobs, on_progress=on_progress),
            replace=replace,
            adopt=adopt,
            accept_unverifiable=accept_unverifiable,
        )


def seal_found(
    found: OpenTarget,
    requirements: Requirements,
    limits: Limits,
    *,
    replace: bool = False,
    adopt: str | None = None,
    accept_unverifiable: bool = False,
    root: Store | None = None,
    state_check: bool = False,
) -> Sealed:
    """Seal a step whose store is open; see `seal`. `limits` apply to each of its two passes.

    `root` is where the step will be, if it is not published yet. With `state_check` the report
    says whether the state of the optimizer is real.
    """
    had_one = found.has_seal
    if had_one and not replace and adopt is None:
        raise _sealed_already(found)
    first, second = _halves(limits)
    inspected = found.inspect(requirements, Level.CONTENT, Asked(first, state_check=state_check))
    # What is not published yet was written by ckptctl, however long that took.
    report = _with_doubts(inspected.report) if root is None else inspected.report
    unproven = report.verdict is Verdict.UNVERIFIABLE
    if not (report.usable or (accept_unverifiable and unproven)):
        return _refused(report)
    adopted = None if adopt is None else _adopted(inspected, adopt)
    algorithm = digests_for(requirements)
    sealed = [file for file in found.files if is_sealed(file)]
    try:
        files, unequal = digested(found.store, found.folder, sealed, algorithm, second)
    except (PathNotFound, ShortRead) as error:
        gone = inspection_failed(found, error)
        return _refused(inspected.report.with_findings(gone))
    # List again: the digested step must be the inspected one, or nothing is sealed.
    unlike = [*found.changes()]
    contradiction = contradicted(found, unlike)
    changed = unlike if contradiction is None else [contradiction]
    if changed or unequal:
        return _refused(inspected.report.with_findings(*changed, *unequal))
    made = Seal(
        algorithm,
        identity_of(inspected, requirements.saved_world_size),
        files,
        time_now(),
        f"ckptctl {__version__}",
        adopted=adopted,
    )
    try:
        data = bound(found, made, requirements, root)
        _write(found, data, replace=had_one)
    except AccessDenied as error:
        raise AccessDenied(
            f"{error.message}; the seal was not written, and the step is unchanged",
            next_command=command_line("verify", found.url),
        ) from error
    path = join_url(found.store.url, found.in_store(SEAL))
    return _sealed(inspected.report, parse_seal(data), path, replaced=had_one)


_ADOPTABLE = frozenset({"seal.other-run", "seal.renamed", "seal.rolled-back"})
"""What an adoption decides: the bytes are those that were sealed, and only the place differs."""


def _adopted(inspected: Inspection, reason: str) -> Adoption:
    """The decision on a step that was inspected with its seal; raises where there is none."""
    report, seal = inspected.report, inspected.notes.seal
    codes = {one.code for one in report.findings} & PROVES_NOTHING
    if seal is None or codes - _ADOPTABLE:
        why = ", ".join(sorted(codes - _ADOPTABLE)) or "it has no seal of this save"
        raise UsageError(
            f"{report.url} cannot be adopted: {why}. Only a step that matches its seal can be",
            next_command=command_line("verify", report.url, "--level", "content"),
        )
    if not codes:
        raise UsageError(
            f"{report.url} is already sealed for this root: there is nothing to adopt",
            next_command=command_line("verify", report.url, "--require-seal"),
        )
    return Adoption(seal.run, seal_digest(seal), user_name(), time_now(), reason)


def digests_for(requirements: Requirements) -> Algorithm:
    """How files are digested for a seal that is made with the keys of the requirements."""
    is_plain = requirements.key is None and requirements.signing_key is None
    return Algorithm.XXH3 if is_plain else Algorithm.SHA256


def bound(
    opened: OpenStep, made: Seal, requirements: Requirements, root: Store | None = None
) -> bytes:
    """The seal as it is stored, bound to its root: with run, place in the order, and seals there.

    `root` is where the step will be, if it is not published yet. Two that are made at once may
    get the same place, and do not name each other. Only seals with the same key and signer count:
    what somebody else wrote is not signed. Raises `StorageError`: without what was sealed before,
    a place might be lower than it has to be.
    """
    run = run_for_seal(root or opened.store)
    signing_key = requirements.signing_key
    signers = None if signing_key is None else (public_key_of(signing_key).line,)
    same = replace(requirements, require_signature=signers)
    own, _ = opened.seal
    known = own if own is not None and own.run == run and is_trusted(own, same) else None
    sequence, earlier = next_place(seals_beside(opened, run, same, root=root), known)
    seal = replace(made, run=run, sequence=sequence, earlier=tuple(earlier))
    return seal_bytes(seal, requirements.key, signing_key)


def _sealed_already(found: OpenTarget) -> UsageError:
    return UsageError(
        f"{found.url} is already sealed; --replace makes a new seal of its current content",
        next_command=command_line("verify", found.url, "--require-seal"),
    )


def _halves(limits: Limits) -> tuple[Limits, Limits]:
    """The limits of the first and of the second of two passes, with their progress as one."""
    on_progress = limits.on_progress
    if on_progress is None:
        return limits, limits
    return (
        replace(limits, on_progress=lambda done, total: on_progress(done, 2 * total)),
        replace(limits, on_progress=lambda done, total: on_progress(total + done, 2 * total)),
    )


def is_sealed(file: FileInfo) -> bool:
    """Whether a seal covers a file of a step."""
    return file.kind == "file" and is_saved(file.path)


def digested(
    store: Store, folder: str, files: Sequence[FileInfo], algorithm: Algorithm, limits: Limits
) -> tuple[tuple[SealedFile, ...], tuple[Finding, ...]]:
    """Some files of a step in `folder` with their digests, and what the store keeps of them.

    The findings are files whose bytes do not match the checksum that the store keeps. Cost:
    every byte of them, and on an object store one HEAD per file.
    """
    paths = [inside(folder, file.path) for file in files]
    kept = [*store.kept(paths)]
    best = [best_of(answer, can_compute) for answer in kept]
    beside = [checksumming(checksum.algorithm) if checksum else None for checksum in best]
    runs = [
        DigestRun(Stretch(path, 0, file.size), algorithm, beside=computing)
        for path, file, computing in zip(paths, files, beside, strict=True)
    ]
    n_bytes = read_runs(store, runs, limits)
    if limits.on_progress is not None:
        limits.on_progress(n_bytes, n_bytes)
    sealed: list[SealedFile] = []
    found: list[Finding] = []
    for file, run, answer, checksum in zip(files, runs, kept, best, strict=True):
        computed = run.beside.hexdigest() if run.beside else None
        of_store, wrong = as_kept(file.path, answer, checksum, computed)
        digests = run.digests
        assert digests is not None  # noqa: S101 - a pass that nobody stops reads all of it
        sealed.append(SealedFile(file.path, file.size, written_ms(file), digests, of_store))
        found += wrong
    return tuple(sealed), tuple(found)


def identity_of(inspected: Inspection, saved_world_size: int | None) -> Identity:
    """The identity of an inspected step, as its seal records it."""
    report, stated = inspected.report, inspected.report.world_size
    is_certain = stated is not None and not stated.at_least
    save_ids = {one.save_id for part in inspected.parts for one in part.metadata if one.save_id}
    return Identity(
        number=report.number,
        name=inspected.step.name,
        layout=report.layout,
        level=report.level.value,
        metadata=dict(sorted(report.digests)),
        save_ids=tuple(sorted(save_ids)),
        world_size=saved_world_size or (stated.size if stated and is_certain else None),
        state=report.state.held,
        tokens=report.state.tokens.value,
    )


def _write(found: OpenTarget, data: bytes, *, replace: bool) -> None:
    if len(data) > MAX_SEAL_BYTES:
        raise UsageError(
            f"the seal of {found.url} would have {len(data):,} bytes, more than "
            f"{MAX_SEAL_BYTES:,}; the step has too many files"
        )
    try:
        found.store.put(found.in_store(SEAL), data, replace=replace)
    except AlreadyExists as error:
        raise _sealed_already(found) from error


def _with_doubts(report: Report) -> Report:
    """The report, unverifiable where a finding leaves open what a seal would call proven."""
    codes = {report.claim(name).finding for name in (ClaimName.WHOLE, ClaimName.ONE_SAVE)}
    if report.verdict is Verdict.COMPLETE and codes - {None, "seal.outdated", "file.gone"}:
        verdict = Verdict.UNVERIFIABLE
        return replace(report, verdict=verdict, exit_code=verdict.exit_code)
    return report


def _refused(report: Report) -> Sealed:
    next_command = next((one.next_command for one in report.with_severity(Severity.FAULT)), None)
    state = report.verdict.value
    if report.verdict is Verdict.COMPLETE:
        state = "complete, but does not meet the requirements"
    if report.verdict is Verdict.UNVERIFIABLE:
        next_command = command_line("seal", report.url, "--accept-unverifiable")
    return Sealed(
        url=report.url,
        number=report.number,
        path=None,
        replaced=False,
        kind="",
        n_files=0,
        n_bytes=0,
        report=report,
        message=f"not sealed: the step is {state}",
        exit_code=report.exit_code,
        next_command=next_command
        or command_line("verify", report.url, "--level", report.level.value),
    )


def _sealed(report: Report, made: Seal, path: str, *, replaced: bool) -> Sealed:
    n_files = len(made.files)
    proof = "proven whole" if report.usable else "without proof that it is complete,"
    return Sealed(
        url=report.url,
        number=report.number,
        path=path,
        replaced=replaced,
        kind=made.kind,
        n_files=n_files,
        n_bytes=made.n_bytes,
        report=report,
        message=f"sealed: {counted(n_files, 'file')} with "
        f"{made.n_bytes:,} bytes, {proof} at level {report.level.value}",
        exit_code=0,
        next_command=command_line("verify", report.url, "--require-seal"),
        n_stored=sum(bool(file.stored and file.stored.checksum) for file in made.files),
        run=made.run,
        sequence=made.sequence,
        signer=made.signature.signer if made.signature else None,
    )
