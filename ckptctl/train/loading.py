"""Load the chosen step, and check that every rank succeeded.

Reads into the existing tensors of the job. Bytes that do not load are a reason to try an
older step (`LoadFailed`). An unresponsive storage, lack of memory and a different model are
errors that an older step would not avoid.
"""

from __future__ import annotations

import errno
import shlex
import warnings
from typing import Any

from ckptctl.distributed.process_group import ProcessGroup, ranks_lost
from ckptctl.errors import (
    CkptctlError,
    LoadFailed,
    ModelDiffers,
    PathNotFound,
    StepDamaged,
    StorageUnavailable,
)
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Metadata
from ckptctl.storage.contract import ShortRead
from ckptctl.train.agreement import Decision, check_one_metadata

_STORAGE_ERRNOS = frozenset(
    {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EACCES, errno.EPERM, errno.EHOSTDOWN}
    | {errno.ENETDOWN, errno.ENETUNREACH, errno.ENOTCONN, errno.EMFILE, errno.ENFILE}
)

_OTHER_MODEL = ("Missing key in checkpoint", "Size mismatch between saved")
"""Messages of torch's planner for a step that does not match the state."""


def saved_metadata(decision: Decision, opened: OpenStep) -> Metadata:
    """The decoded metadata of the step. Cost: one read, or none if it was read before."""
    check_one_metadata(decision)
    return opened.metadata


def load_into(
    state: dict[str, Any], decision: Decision, group: ProcessGroup, opened: OpenStep
) -> None:
    """Read the step into `state`; every rank calls it, with what it holds itself.

    Raises `LoadFailed` where the bytes do not load on this rank or another, and another
    `CkptctlError` for what no older step would mend. Every rank raises, not all the same.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    from ckptctl.train.reader import Reader

    reader = Reader.of(opened)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns about a load without a process group
            load(state, storage_reader=reader, **group.dcp_arguments(load))
    except CheckpointException as error:  # not an Exception, so no other clause would catch it
        raise _meaning(error, decision) from error
    except RuntimeError as error:
        if group.size == 1:
            raise LoadFailed(_words(error, decision)) from error
        raise ranks_lost(error) from error
    finally:
        reader.close()


def _meaning(error: BaseException, decision: Decision) -> CkptctlError:
    failures: dict[int, Any] = getattr(error, "failures", {})
    kinds = [_meaning_of_one(rank, one[0], decision) for rank, one in sorted(failures.items())]
    # An error that an older step would not avoid takes precedence.
    kinds.sort(key=lambda one: isinstance(one, LoadFailed))
    return kinds[0] if kinds else LoadFailed(_words(error, decision))


def _meaning_of_one(rank: int, cause: BaseException, decision: Decision) -> CkptctlError:
    words = f"rank {rank}: {_words(cause, decision)}"
    verify = f"ckptctl verify {shlex.quote(decision.path or '')} --level content"
    if isinstance(cause, (StepDamaged, PathNotFound, ShortRead)):
        return LoadFailed(f"rank {rank}: {cause.message}", next_command=verify)
    if isinstance(cause, CkptctlError):
        return cause
    if isinstance(cause, MemoryError) or type(cause).__name__ == "OutOfMemoryError":
        return ModelDiffers(f"{words}; there is not enough memory to load it")
    if any(mark in words for mark in _OTHER_MODEL):
        return ModelDiffers(f"{words}; it was saved by a different model or optimizer")
    if isinstance(cause, OSError) and cause.errno in _STORAGE_ERRNOS:
        return StorageUnavailable(f"{words}; the state of the step is unknown", next_command=verify)
    if isinstance(cause, (TimeoutError, ConnectionError)):
        return StorageUnavailable(words, next_command=verify)
    return LoadFailed(words, next_command=verify)


def _words(cause: BaseException, decision: Decision) -> str:
    first = (str(cause).splitlines() or [""])[0][:300]
    return f"{decision.path} could not be loaded ({type(cause).__name__}: {first})"
