"""Remove older steps beside the training, after each save.

On rank 0 alone, in a daemon thread that takes part in no collective: a removal that
hangs delays neither a save nor the end of the process, and one that is cut short leaves an
interrupted save, which the next one removes. What may go is decided in
`selection.retention`; nothing is read but listings, metadata and ckptctl's own notes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.errors import CkptctlError, StorageError
from ckptctl.inspection.inspecting import Inspection
from ckptctl.model import Level
from ckptctl.options import PickPolicy, Requirements
from ckptctl.selection.branches import read_resumes
from ckptctl.selection.choosing import Candidate
from ckptctl.selection.fencing import Token, check_token
from ckptctl.selection.removing import remove_step
from ckptctl.selection.retention import Rules, retain
from ckptctl.selection.roots import list_all, list_root
from ckptctl.selection.searching import CachingInspector
from ckptctl.selection.tiers import Tier
from ckptctl.storage.contract import Store
from ckptctl.storage.threads import start_daemon
from ckptctl.train.job import Tell

PATIENCE_S = 30.0
"""How long a save, or the end, waits for the removal before it."""


class Retention:
    """Keeps the newest `keep` steps of a root that `token` holds.

    `requirements` and `policy` are those of a resume, so that only what a resume would take
    counts. `others` are the further roots of the run, each with whether it is optional.
    What was seen of a step is remembered: as long as its files are the same, a
    later save lists it and reads nothing of it.
    """

    def __init__(
        self,
        store: Store,
        token: Token,
        keep: int,
        requirements: Requirements,
        policy: PickPolicy,
        tell: Tell,
        others: Sequence[tuple[Store, bool]],
    ) -> None:
        self._store = store
        self._token = token
        self._keep = keep
        self._requirements = requirements
        self._policy = replace(policy, level=Level.LISTING)
        self._tell = tell
        self._others = others
        self._memory: dict[str, Inspection] = {}
        self._thread: threading.Thread | None = None

    def begin(self, protected: Mapping[int, str]) -> None:
        """Start to remove what may go, unless the removal before is still under way.

        `protected` are steps that stay, each with the reason.
        """
        if self._thread is None or not self._thread.is_alive():
            self._thread = start_daemon("ckptctl-retention", self._run, dict(protected))

    def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the removal is over, and no longer than `timeout_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, protected: Mapping[int, str]) -> None:
        rules = Rules(self._keep, self._requirements, self._policy, protected=protected)
        try:
            listing, trees = list_all(self._store)
            failures: Sequence[CkptctlError] = retain(
                Tier(self._store, listing, trees=trees),
                rules,
                prove=_not_now,
                remove=self._remove,
                others=[tier for other in self._others for tier in _listed(*other)],
                memory=self._memory,
            ).failures
        except CkptctlError as error:
            failures = [error]
        if failures:
            more = f" (and {len(failures) - 1} more)" if len(failures) > 1 else ""
            self._tell(f"older steps were not removed: {failures[0].message}{more}")

    def _remove(self, looked: Inspection) -> bool:
        check_token(self._store, self._token)
        return remove_step(self._store, looked.step.name, seen=looked.step.files)


def _listed(store: Store, optional: bool) -> Iterator[Tier]:
    """A further root, unless it is optional and absent or does not answer."""
    try:
        listing = list_root(store)
        if listing.exists:
            yield Tier(store, listing, optional, resumes=read_resumes(store))
    except StorageError:
        if not optional:
            raise


def _not_now(_: Inspection, __: CachingInspector, ___: Candidate) -> str:
    """Training reads no bytes to prove a step: `prune` and `seal` do."""
    return "written to since it was sealed"
