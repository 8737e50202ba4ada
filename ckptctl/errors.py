"""Every exception of the package, with its code and exit code.

Damage in a checkpoint is a `Finding`, not an exception. Work that must never fail is called through
`guarded`, the one place of the package that catches every exception: `ckptctl run` must restart a
job whatever its logs hold, and a notification that cannot be made must end nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ckptctl.redaction import redacted

if TYPE_CHECKING:
    from ckptctl.findings import Finding

T = TypeVar("T")

_MAX_TEXT = 300


class CkptctlError(Exception):
    """Base class: `message` states what happened, `next_command` what to run next.

    A subclass states its `code` and `exit_code`, or has those of its base.
    """

    exit_code = 1
    code = "internal"

    def __init_subclass__(cls, *, code: str | None = None, exit_code: int | None = None) -> None:
        cls.code = code or cls.code
        cls.exit_code = cls.exit_code if exit_code is None else exit_code

    def __init__(self, message: str, *, next_command: str | None = None) -> None:
        # Whoever catches it may print it: the program that uses the library as well as ours.
        message = redacted(message)
        super().__init__(message)
        self.message = message
        self.next_command = next_command


class UsageError(CkptctlError, code="usage", exit_code=2):
    """An argument or option is wrong or missing, or a name does not exist.

    The command line builds the next command from the caller's own arguments: `instead` is the
    corrected or missing option; with `instead_of` it replaces that argument. `without` lists
    options to leave out, each with its value.
    """

    def __init__(
        self,
        message: str,
        *,
        next_command: str | None = None,
        instead: str | None = None,
        instead_of: str | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message, next_command=next_command)
        self.instead = instead
        self.instead_of = instead_of
        self.without = without


class OptionError(UsageError, code="usage"):
    """The value of an option is wrong, or its combination with another.

    `option` is its name on the command line (`--level`), with which the message begins; the
    command line puts the name of the variable or of the key in its place that has set it.
    """

    def __init__(
        self,
        option: str,
        problem: str,
        *,
        next_command: str | None = None,
        instead: str | None = None,
        without: tuple[str, ...] = (),
    ) -> None:
        self.option = option
        self._problem = problem
        message = self._named(option)
        super().__init__(message, next_command=next_command, instead=instead, without=without)

    def blame(self, name: str) -> None:
        """Begin the message with another name of the option."""
        self.message = redacted(self._named(name))

    def _named(self, name: str) -> str:
        space = "" if self._problem.startswith((":", ",")) else " "
        return f"{name}{space}{self._problem}"


class MissingExtra(UsageError, code="usage.missing-extra"):
    """A dependency that is an extra is not installed; the message names the extra."""


class BinaryData(UsageError, code="usage.binary-data"):
    """A file that was given as a log is no text."""


class OutOfMemory(CkptctlError, MemoryError, code="process.out-of-memory", exit_code=75):
    """The process may not use as much memory, or as many threads, as the work needs.

    The result is then unknown, as for a storage that does not answer. Python's own
    `MemoryError` means the same and is not wrapped.
    """


class StorageError(CkptctlError, code="storage", exit_code=75):
    """Base class of storage errors; never raised itself."""


class StorageUnavailable(StorageError, code="storage.unavailable"):
    """The storage did not answer in time; a later attempt may succeed."""


class StorageFull(StorageUnavailable, code="storage.full"):
    """There is no space left for a write, or a quota is used up."""


class AccessDenied(StorageError, code="storage.denied", exit_code=77):
    """The storage denied access."""


class ObjectArchived(StorageUnavailable, code="storage.archived"):
    """The object is in an archive tier and must be restored before it can be read."""


class StorageMisconfigured(StorageError, code="storage.misconfigured", exit_code=2):
    """The storage rejected the configuration: region, endpoint or bucket."""


class PathNotFound(StorageError, code="storage.not-found", exit_code=2):
    """The storage answered that there is no such file, folder or bucket.

    Most callers turn it into a finding. It reaches the user only for a path that the user
    gave.
    """


class PathEscape(StorageError, code="path.escape", exit_code=25):
    """A path or a link leads outside its folder; it was not followed."""


class PathUntrusted(StorageError, code="path.untrusted", exit_code=2):
    """Another user could have put a file, a link or a folder there; it was not used."""


class LinkNotFollowed(PathEscape, code="step.linked", exit_code=2):
    """A link was not followed: what it leads to is unknown."""


class AlreadyExists(StorageError, code="storage.exists", exit_code=1):
    """A write that must create a file found one already there."""


class MetadataUnsafe(CkptctlError, code="metadata.unsafe", exit_code=25):
    """A pickle refers to a type that metadata never contains. Nothing of it was run."""


class MetadataUnreadable(CkptctlError, code="metadata.unreadable", exit_code=21):
    """A pickle is truncated, is not a pickle, or does not have the form of metadata."""


class RecordUnreadable(CkptctlError, code="record.framing", exit_code=21):
    """A byte range does not contain one sound `torch.save` archive."""


class StepDamaged(CkptctlError, code="step.damaged", exit_code=21):
    """A step is found to be damaged while it is loaded; `finding` states how.

    `code` and `exit_code` are those of the finding. The exception can be pickled, because DCP
    sends what one rank raises to all other ranks.
    """

    def __init__(self, url: str, finding: Finding) -> None:
        where = f"{finding.where}: " if finding.where and finding.where not in url else ""
        super().__init__(f"{url}: {where}{finding.message}", next_command=finding.next_command)
        self.url = url
        self.finding = finding
        self.code = finding.code
        if finding.verdict is not None:
            self.exit_code = finding.verdict.exit_code

    def __str__(self) -> str:
        return self.message + (f"\nnext: {self.next_command}" if self.next_command else "")

    def __reduce__(self) -> tuple[type[StepDamaged], tuple[str, Finding]]:
        return type(self), (self.url, self.finding)


class RecordUnsafe(CkptctlError, code="record.unsafe", exit_code=25):
    """An entry contains a type that is not loaded. Nothing of it was run.

    The storage is not at fault: older steps of the same program contain the same type.
    """


class OwnFileUnreadable(CkptctlError, code="own-file.unreadable", exit_code=22):
    """A seal or a mark is damaged."""


class OwnFileUnsupported(OwnFileUnreadable, code="own-file.unsupported"):
    """A seal or a mark that a newer ckptctl wrote."""


class LogUnreadable(CkptctlError, code="loss.unreadable", exit_code=31):
    """A training log is damaged, or is not a training log."""


class LogWithoutLoss(LogUnreadable, code="loss.no-loss"):
    """The logs contain no step with a loss."""


class NothingToResume(CkptctlError, code="pick.none"):
    """No step was chosen; `exit_code` is 10 (fresh run), 11 (none usable) or 75 (unknown).

    `reason` is a word of `NoStepReason`; empty for a step that was named.
    """

    def __init__(
        self, message: str, *, exit_code: int, next_command: str | None = None, reason: str = ""
    ) -> None:
        super().__init__(message, next_command=next_command)
        self.exit_code = exit_code
        self.reason = reason


class Fenced(CkptctlError, code="root.fenced", exit_code=93):
    """A newer attempt owns the root: this one may no longer publish, seal or prune."""


class AlreadySupervised(CkptctlError, code="run.supervised", exit_code=75):
    """Another `ckptctl run` supervises the job of this root, and is alive."""


class RanksLost(CkptctlError, code="ranks.lost", exit_code=75):
    """Another rank of the job failed, or did not answer in time."""


class ModelDiffers(UsageError, code="model.differs"):
    """The step was saved from a different model or optimizer than it is loaded into."""


class StateRefused(CkptctlError, code="state.refused", exit_code=23):
    """The step is complete, but train state that the policy requires could not be restored."""


class LoadFailed(CkptctlError, code="load.failed", exit_code=21):
    """A step that passed its inspection could not be loaded; an older one may load."""


class SaveFailed(CkptctlError, code="save.failed", exit_code=75):
    """A step could not be saved or not verified after the save; older steps are unchanged."""


class GpuFailed(CkptctlError, code="gpu.failed", exit_code=75):
    """A rank's GPU does not answer or computes wrong results; another node may work."""


@dataclass(frozen=True, slots=True)
class Unknown:
    """An answer that could not be had: what failed, and why, in one line."""

    message: str


def guarded(
    what: str, work: Callable[[], T], *, raises: type[Exception] | tuple[type[Exception], ...] = ()
) -> T | Unknown:
    """The result of `work`; `Unknown` for any exception but those that end the process.

    `what` is the work in words, such as `reading job.log`. Exceptions of `raises` are the caller's
    to handle.
    """
    try:
        return work()
    except raises:
        raise
    except Exception as error:  # noqa: BLE001 - the place that stands between a fault and a job
        return Unknown(f"{what} failed: {described(error)}")


def described(error: BaseException) -> str:
    """The type of an exception, its message and its place, as `KeyError: 'a' (rows.py:12)`."""
    text = str(error).strip().partition("\n")[0]
    trace, place = error.__traceback__, ""
    while trace is not None:
        file = os.path.basename(trace.tb_frame.f_code.co_filename)
        place = f"{file}:{trace.tb_lineno}"
        trace = trace.tb_next
    about = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if len(about) > _MAX_TEXT:
        about = f"{about[:_MAX_TEXT]}…"
    return f"{about} ({place})" if place else about
