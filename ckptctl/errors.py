"""Every exception of the package, with its code and exit code.

Damage in a checkpoint is a `Finding`, not an exception.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ckptctl.findings import Finding


class CkptctlError(Exception):
    """Base class: `message` states what happened, `next_command` what to run next."""

    exit_code = 1
    code = "internal"

    def __init__(self, message: str, *, next_command: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.next_command = next_command


class UsageError(CkptctlError):
    """An argument or option is wrong or missing, or a name does not exist.

    The command line builds the next command from the caller's own arguments: `instead` is the
    corrected or missing option; with `instead_of` it replaces that argument. `without` lists
    options to leave out, each with its value.
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


class BinaryData(UsageError):
    """A file that was given as a log is no text."""

    code = "usage.binary-data"


class OutOfMemory(CkptctlError, MemoryError):
    """The process may not use as much memory, or as many threads, as the work needs.

    The result is then unknown, as for a storage that does not answer. Python's own
    `MemoryError` means the same and is not wrapped.
    """

    exit_code = 75
    code = "process.out-of-memory"


class StorageError(CkptctlError):
    """Base class of storage errors; never raised itself."""

    exit_code = 75
    code = "storage"


class StorageUnavailable(StorageError):
    """The storage did not answer in time; a later attempt may succeed."""

    code = "storage.unavailable"


class StorageFull(StorageUnavailable):
    """There is no space left for a write, or a quota is used up."""

    code = "storage.full"


class AccessDenied(StorageError):
    """The storage denied access."""

    exit_code = 77
    code = "storage.denied"


class ObjectArchived(StorageUnavailable):
    """The object is in an archive tier and must be restored before it can be read."""

    code = "storage.archived"


class StorageMisconfigured(StorageError):
    """The storage rejected the configuration: region, endpoint or bucket."""

    exit_code = 2
    code = "storage.misconfigured"


class PathNotFound(StorageError):
    """The storage answered that there is no such file, folder or bucket.

    Most callers turn it into a finding. It reaches the user only for a path that the user
    gave.
    """

    exit_code = 2
    code = "storage.not-found"


class PathEscape(StorageError):
    """A path or a link leads outside its folder; it was not followed."""

    exit_code = 25
    code = "path.escape"


class AlreadyExists(StorageError):
    """A write that must create a file found one already there."""

    exit_code = 1
    code = "storage.exists"


class MetadataUnsafe(CkptctlError):
    """A pickle refers to a type that metadata never contains. Nothing of it was run."""

    exit_code = 25
    code = "metadata.unsafe"


class MetadataUnreadable(CkptctlError):
    """A pickle is truncated, is not a pickle, or does not have the form of metadata."""

    exit_code = 21
    code = "metadata.unreadable"


class RecordUnreadable(CkptctlError):
    """A byte range does not contain one sound `torch.save` archive."""

    exit_code = 21
    code = "record.framing"


class StepDamaged(CkptctlError):
    """A step is found to be damaged while it is loaded; `finding` states how.

    `code` and `exit_code` are those of the finding. The exception can be pickled, because DCP
    sends what one rank raises to all other ranks.
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
    """An entry contains a type that is not loaded. Nothing of it was run.

    The storage is not at fault: older steps of the same program contain the same type.
    """

    exit_code = 25
    code = "record.unsafe"


class OwnFileUnreadable(CkptctlError):
    """A seal or a mark is damaged."""

    exit_code = 22
    code = "own-file.unreadable"


class OwnFileUnsupported(OwnFileUnreadable):
    """A seal or a mark that a newer ckptctl wrote."""

    code = "own-file.unsupported"


class LogUnreadable(CkptctlError):
    """A training log is damaged, or is not a training log."""

    exit_code = 31
    code = "loss.unreadable"


class LogWithoutLoss(LogUnreadable):
    """The logs contain no step with a loss."""

    code = "loss.no-loss"


class NothingToResume(CkptctlError):
    """No step was chosen; `exit_code` is 10 (fresh run), 11 (none usable) or 75 (unknown)."""

    code = "pick.none"

    def __init__(self, message: str, *, exit_code: int, next_command: str | None = None) -> None:
        super().__init__(message, next_command=next_command)
        self.exit_code = exit_code


class Fenced(CkptctlError):
    """A newer attempt owns the root: this one may no longer publish, seal or prune."""

    exit_code = 93
    code = "root.fenced"


class AlreadySupervised(CkptctlError):
    """Another `ckptctl run` supervises the job of this root, and is alive."""

    exit_code = 75
    code = "run.supervised"


class RanksLost(CkptctlError):
    """Another rank of the job failed, or did not answer in time."""

    exit_code = 75
    code = "ranks.lost"


class ModelDiffers(UsageError):
    """The step was saved from a different model or optimizer than it is loaded into."""

    code = "model.differs"


class StateRefused(CkptctlError):
    """The step is complete, but train state that the policy requires could not be restored."""

    exit_code = 23
    code = "state.refused"


class LoadFailed(CkptctlError):
    """A step that passed its inspection could not be loaded; an older one may load."""

    exit_code = 21
    code = "load.failed"


class SaveFailed(CkptctlError):
    """A step could not be saved or not verified after the save; older steps are unchanged."""

    exit_code = 75
    code = "save.failed"


class GpuFailed(CkptctlError):
    """A rank's GPU does not answer or computes wrong results; another node may work."""

    exit_code = 75
    code = "gpu.failed"
