"""Remove older steps during training, after each save.

Runs on rank 0 only, in a daemon thread that takes part in no collective: a hung removal
delays neither a save nor the end of the process, and an interrupted one leaves an
interrupted save, which the next one removes. `selection.retention` decides which steps to
remove; only listings, metadata and ckptctl's own files are read.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.errors import CkptctlError, StorageError
from ckptctl.formats.own.ledger import RemovingLine
from ckptctl.formatting import and_more
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import Level
from ckptctl.selection.branches import read_resumes
from ckptctl.selection.choosing import Candidate
from ckptctl.selection.fencing import check_token
from ckptctl.selection.removing import remove_step
from ckptctl.selection.retention import RetentionPlan, Rules
from ckptctl.selection.roots import list_all, list_root
from ckptctl.selection.searching import CachingInspector
from ckptctl.selection.targets import OpenRoot
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import join_url
from ckptctl.storage.waiting import start_daemon
from ckptctl.train.attempt import RECORD_TIMEOUT_S, RankAttempt
from ckptctl.train.job import Job

PATIENCE_S = 30.0
"""How long a save, or the end of the process, waits for the previous removal."""


class Retention:
    """Keeps the newest `keep` steps of the root that an attempt holds by `token`.

    Only steps that a resume of the job would use count; they are selected over all its
    roots, and removed from the first. Inspections are cached: while the files of a step do
    not change, a later save lists them and reads nothing.
    """

    def __init__(self, job: Job, attempt: RankAttempt, keep: int) -> None:
        self._job = job
        self._store = job.store
        self._attempt = attempt
        self._keep = keep
        self._memory: dict[str, Inspection] = {}
        self._thread: threading.Thread | None = None

    def begin(self, protected: Mapping[int, str]) -> None:
        """Start a removal, unless the previous one is still running.

        `protected` maps steps that stay to the reason.
        """
        if self._thread is None or not self._thread.is_alive():
            self._thread = start_daemon("ckptctl-retention", self._run, dict(protected))

    def wait(self, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the removal ends, at most `timeout_s` seconds."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _run(self, protected: Mapping[int, str]) -> None:
        selection = self._job.selection
        policy = replace(selection.policy, level=Level.LISTING)
        # Bytes are not read during training: a resume or `prune` compares them with the seals.
        rules = Rules(
            self._keep,
            selection.requirements,
            policy,
            protected=protected,
            seal_bytes=SealBytes.LATER,
        )
        others = [
            (store, url in selection.roots.optional)
            for url, store in self._job.stores.items()
            if store is not self._store
        ]
        try:
            listing, trees = list_all(self._store)
            plan = RetentionPlan(
                OpenRoot(self._store, listing, trees=trees),
                rules,
                prove=_not_now,
                others=[root for other in others for root in _listed(*other)],
                memory=self._memory,
            )
            plan.carry_out(self._remove)
            failures: Sequence[CkptctlError] = plan.retained().failures
        except CkptctlError as error:
            failures = [error]
        if failures:
            self._job.tell(
                f"older steps were not removed: {failures[0].message}{and_more(failures)}"
            )

    def _remove(self, inspected: Inspection) -> bool:
        check_token(self._store, self._attempt.token)
        # Before it goes: a signal may end this process at any moment.
        name = inspected.step.name
        number = inspected.report.number
        self._attempt.record(RemovingLine(step=number, path=join_url(self._store.url, name)))
        self._attempt.ledger.drain(RECORD_TIMEOUT_S)
        return remove_step(self._store, name, seen=inspected.step.files)


def _listed(store: Store, optional: bool) -> Iterator[OpenRoot]:
    """Another root, unless it is optional and absent or unavailable."""
    try:
        listing = list_root(store)
        if listing.exists:
            yield OpenRoot(store, listing, optional, resumes=read_resumes(store))
    except StorageError:
        if not optional:
            raise


def _not_now(_: Inspection, __: CachingInspector, ___: Candidate) -> str:
    """Not during training: proving a step's bytes is left to `prune` and `seal`."""
    return "written to since it was sealed"
