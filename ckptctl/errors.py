"""Every exception, with its code and exit code.

Every exception of the package, with its exit code. Damage in a checkpoint is
not an exception but a `Finding`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptctl.findings import Finding


class CkptctlError(Exception):
    """Base of all: `message` says what happened, `next_command` what to run next."""

    exit_code = 1
    code = "internal"

    def __init__(self, message: str, *, next_command: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next_command = next_command


class UsageError(CkptctlError):
    """An argument, an option, or a name that does not exist.

    `instead` is the option that was wrong or is lacking, as it can be written: the command line
    puts it into the words of its caller. With `instead_of` it is the word that stands for that
    one, an argument. `without` are options with values that are better left out.
    """

    exit_code = 2
    code = "usage"

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


class MissingExtra(UsageError):
    """A dependency that is an extra is not installed; the message names the extra."""

    code = "usage.missing-extra"


class OutOfMemory(CkptctlError, MemoryError):
    """The process may not have the memory, or the threads, that the work takes.

    Nothing is known then, as where a storage does not answer. Python's own `MemoryError`
    means the same wherever it comes from, and passes through as it is.
    """

    exit_code = 75
    code = "process.out-of-memory"


class StorageError(CkptctlError):
    """A store could not do what was asked. Not raised itself: one of those below is."""

    exit_code = 75
    code = "storage"


class StorageUnavailable(StorageError):
    """The storage did not answer, or not in time; trying again later may help."""

    code = "storage.unavailable"


class AccessDenied(StorageError):
    """The storage answered that we may not."""

    exit_code = 77
    code = "storage.denied"


class ObjectArchived(StorageUnavailable):
    """The object lies in an archive, and cannot be read before it is restored from there."""

    code = "storage.archived"


class StorageMisconfigured(StorageError):
    """The storage answered that the request is set up wrongly: region, endpoint, bucket."""

    exit_code = 2
    code = "storage.misconfigured"


class PathNotFound(StorageError):
    """The storage answered that there is no such file, folder or bucket.

    Most callers turn it into a finding; it reaches the user only where a path
    that the user gave does not exist.
    """

    exit_code = 2
    code = "storage.not-found"


class PathEscape(StorageError):
    """A path or a link leads outside the folder it was given for; it was not followed."""

    exit_code = 25
    code = "path.escape"


class AlreadyExists(StorageError):
    """A write that must create found something there already."""

    exit_code = 1
    code = "storage.exists"


class MetadataUnsafe(CkptctlError):
    """A pickle asks for something that metadata never holds. Nothing of it has run."""

    exit_code = 25
    code = "metadata.unsafe"


class MetadataUnreadable(CkptctlError):
    """A pickle is damaged: cut short, not a pickle, or not in the form metadata has."""

    exit_code = 21
    code = "metadata.unreadable"


class RecordUnreadable(CkptctlError):
    """A byte range does not hold one archive as `torch.save` writes it, or its header lies."""

    exit_code = 21
    code = "record.framing"


class StepDamaged(CkptctlError):
    """A step that is being loaded turns out to be bad: `finding` says what, `url` is the step's.

    Its exit code and its `code` are those of the finding. It survives being pickled: DCP
    sends what a rank raises to all other ranks, and shows it by `str`.
    """

    exit_code = 21
    code = "step.damaged"

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


class RecordUnsafe(CkptctlError):
    """An entry holds something of a type that is not loaded. Nothing of it has run.

    No fault of the storage: an older step of the same program holds the same.
    """

    exit_code = 25
    code = "record.unsafe"


class OwnFileUnreadable(CkptctlError):
    """A seal or a mark is damaged, or is not one."""

    exit_code = 22
    code = "own-file.unreadable"


class OwnFileUnsupported(OwnFileUnreadable):
    """A seal or a mark that a newer ckptctl wrote."""

    code = "own-file.unsupported"


class LogUnreadable(CkptctlError):
    """A training log is damaged, or is none: nothing can be said of the loss."""

    exit_code = 31
    code = "loss.unreadable"


class LogWithoutLoss(LogUnreadable):
    """The logs were read, and no step with a loss is in them."""

    code = "loss.no-loss"


class NothingToResume(CkptctlError):
    """No step was chosen; `exit_code` (10, 11 or 75) says which of the three answers it is."""

    code = "pick.none"

    def __init__(self, message: str, *, exit_code: int, next_command: str | None = None) -> None:
        super().__init__(message, next_command=next_command)
        self.exit_code = exit_code


class Fenced(CkptctlError):
    """A newer attempt has taken the root over: this one may not publish, seal or prune any more."""

    exit_code = 93
    code = "root.fenced"


class RanksLost(CkptctlError):
    """Another rank of the job is gone, or did not come in time."""

    exit_code = 75
    code = "ranks.lost"


class ModelDiffers(UsageError):
    """The step was saved by another model, or another optimizer, than it is to be loaded into."""

    code = "model.differs"


class StateRefused(CkptctlError):
    """The step is whole, but state that the policy asks for could not be restored from it."""

    exit_code = 23
    code = "state.refused"


class LoadFailed(CkptctlError):
    """The bytes of a step that looked whole could not be loaded: a reason to take an older one."""

    exit_code = 21
    code = "load.failed"


class SaveFailed(CkptctlError):
    """A step could not be saved, or not proven whole after it was; older steps are as they were."""

    exit_code = 75
    code = "save.failed"


class GpuFailed(CkptctlError):
    """The GPU of a rank does not answer, or computes wrongly; another node may do."""

    exit_code = 75
    code = "gpu.failed"
