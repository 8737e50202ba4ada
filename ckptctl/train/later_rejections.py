"""Reject the steps that were saved after a bad loss.

The loss of step N is computed with the weights that step N - 1 left: a step saved at
N - 1 or later is suspect. Where none was saved since, the newest one leads to the same
place again, so that one is passed over. A rejection can be taken back: `ckptctl accept`.
"""

from __future__ import annotations

import shlex

from ckptctl.errors import CkptctlError, StorageUnavailable
from ckptctl.formats.own.marks import MarkKind
from ckptctl.options import StorageOptions
from ckptctl.selection.fencing import check_token, held_token
from ckptctl.selection.marking import mark
from ckptctl.selection.roots import list_root
from ckptctl.storage.opening import join_url, open_store


def reject_since(
    root: str,
    first_bad: int,
    reason: str,
    storage: StorageOptions = StorageOptions(),
) -> tuple[str, ...]:
    """Reject the steps of `root` from `first_bad - 1` on, or else the newest; their addresses.

    Where this process has resumed from the root, only the attempt that still holds it
    rejects: the steps of an attempt that took it over hold other weights.

    Raises `StorageError` where the root cannot be listed or a mark cannot be written,
    with the command that writes it, and `Fenced`. Cost: one listing, and for each a look
    and a write.
    """
    with open_store(root, storage) as store:
        steps = list_root(store).steps
        token = held_token(root)
        tainted = [step for step in steps if step.number >= first_bad - 1] or list(steps[:1])
        addresses = [join_url(root, step.name) for step in tainted]
        for address in addresses:
            if token is not None:
                check_token(store, token)
            try:
                mark(
                    address,
                    MarkKind.REJECTED,
                    reason=reason,
                    by="ckptctl.train.LossGuard",
                    storage=storage,
                )
            except CkptctlError as error:
                words = ["reject", address, "--reason", reason]
                raise StorageUnavailable(
                    f"{address} could not be rejected ({error.message}): it is not to be resumed "
                    "from",
                    next_command=command_for(words, storage),
                ) from error
        return tuple(addresses)


def command_for(words: list[str], storage: StorageOptions) -> str:
    """A command of ckptctl as a person types it, for the same storage."""
    url = storage.endpoint_url
    endpoint = [] if url is None else ["--endpoint-url", url]
    return shlex.join(["ckptctl", *words, *endpoint])
