"""How does a training script save, and go on from what it saved?

The one object a script holds. It keeps what outlives a call: the root and who holds it,
the record of this attempt, the save in flight. Choosing, loading, restoring and writing
are modules of their own.
"""

from __future__ import annotations

import atexit
import math
import sys
import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from ckptctl.errors import (
    CkptctlError,
    LoadFailed,
    PathNotFound,
    StorageError,
    UsageError,
)
from ckptctl.formats.seals import Origin
from ckptctl.judge.fencing import Token, check_token, take_token
from ckptctl.judge.pruning import remove_step, surplus
from ckptctl.judge.roots import list_root
from ckptctl.model import Level
from ckptctl.storage.opening import is_local, join_url, open_store
from ckptctl.train.cluster import cluster_context
from ckptctl.train.deciding import (
    SETTLE_S,
    Decision,
    Looking,
    Rejected,
    check_root,
    decide,
    prove_content,
    prove_seen,
    too_many,
)
from ckptctl.train.evidence import NOT_FINITE, reject_proven, signature_of, supersede_newer
from ckptctl.train.group import PATIENCE_S, Group, make_group
from ckptctl.train.ledger import (
    ATTEMPTS_FOLDER,
    MAX_ATTEMPTS,
    Ledger,
    new_attempt,
    put_report,
    read_attempts,
    utc_now,
)
from ckptctl.train.loading import load_into, saved_metadata
from ckptctl.train.restoring import Inventory, Policies, Progress, progress_of, restore
from ckptctl.train.saving import (
    Saver,
    check_step_format,
    clear_aside,
    make_place,
    seal_step,
    write_step,
)
from ckptctl.train.staging import Stager
from ckptctl.train.state import (
    Parts,
    Place,
    Stateful,
    check_readable,
    collect,
    give_generator,
    template,
)
from ckptctl.train.telling import Tell, lines_of, to_stderr

_PROGRESS_EVERY_S = 30.0


@dataclass(frozen=True, slots=True)
class Start:
    """Where a job goes on: after `step`, which is 0 for a fresh run.

    `path` is the step that was loaded, None for a fresh run. `tokens` and `samples` are
    what the run had consumed, 0 where the step does not say. `rejected` are the newer steps
    that were not taken. `report` is the document that lies at `report_path`.
    """

    step: int
    tokens: int
    samples: int
    path: str | None
    fell_back: bool
    rejected: tuple[Rejected, ...]
    report: Mapping[str, Any]
    report_path: str

    @property
    def fresh(self) -> bool:
        """The run begins here."""
        return self.path is None


class Checkpointer:
    """Saves steps under a root, and resumes from the newest one that is whole.

    Every rank of the job makes one and calls its methods at the same places. Call
    `resume` once, before the first step. Used with `with`, or closed with `close`; what is
    in flight is waited for when the process ends, too.

    `optimizer` belongs to `model`. `dataloader` is a `GlobalLoader`, a torchdata
    `StatefulDataLoader`, or anything with `state_dict`. `extra` are other objects with
    `state_dict` and `load_state_dict`, by name. `keep` is how many whole and sealed steps
    stay; None removes nothing. `seed` is the run's, from which random numbers are derived
    at another number of ranks. `dp_rank` and `dp_size` are this rank's place among the
    data-parallel ones, by default among all. `rng`, `accept_repetition` and `accept_lost`
    say what may be lost; see `docs/train.md`.
    """

    def __init__(
        self,
        root: str,
        *,
        model: Any = None,
        optimizer: Any = None,
        scheduler: Stateful | None = None,
        dataloader: Any = None,
        grad_scaler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        keep: int | None = None,
        seed: int = 0,
        seal: bool = True,
        key: bytes | None = None,
        step_format: str = "step_{}",
        dp_rank: int | None = None,
        dp_size: int | None = None,
        rng: str = "reseed",
        accept_repetition: bool = False,
        accept_lost: Collection[str] = (),
        level: Level | str | None = None,
        require: Collection[str] = (),
        max_fallback: int = 2,
        storage_options: Mapping[str, object] | None = None,
        endpoint_url: str | None = None,
        timeout_s: float = 30.0,
        settle_s: float = SETTLE_S,
        patience_s: float = PATIENCE_S,
        tell: Tell = to_stderr,
    ) -> None:
        if optimizer is not None and model is None:
            raise UsageError("an optimizer was given without its model")
        if keep is not None and keep < 1:
            raise UsageError(f"keep is {keep}; at least 1 step must stay")
        if not is_local(root):
            raise UsageError(
                f"{root}: Checkpointer saves to file systems; `resolve` and `Reader` go on from "
                "object stores"
            )
        check_step_format(step_format)
        self.root = root
        self.group: Group = make_group(patience_s)
        self._later: Group = make_group(patience_s)  # for what runs beside the training
        self.parts = Parts(model, optimizer, scheduler, dataloader, grad_scaler, extra or {})
        rank, size = self.group.rank, self.group.size
        self.place = Place(
            rank,
            size,
            rank if dp_rank is None else dp_rank,
            size if dp_size is None else dp_size,
        )
        self.policies = Policies(rng, accept_repetition, tuple(accept_lost))
        self._looking = Looking(
            level=level,
            require=require,
            max_fallback=max_fallback,
            key=key,
            grace_s=0.0,  # whoever was saving here cannot publish any more
            storage_options=storage_options,
            endpoint_url=endpoint_url,
            timeout_s=timeout_s,
            settle_s=settle_s,
        )
        self._store = open_store(root, **self._looking.storage)
        self._keep, self._seed, self._seal, self._key = keep, seed, seal, key
        self._step_format = step_format
        self._tell = tell
        self._attempt: _Attempt | None = None
        self._flight: Future[None] | None = None
        self._pool = ThreadPoolExecutor(1, "ckptctl-save")
        self._stager = Stager()
        self._readable = False
        self._hooks: tuple[Callable[..., Any], Callable[..., Any]] | None = None
        give_generator(self.parts, self.place, seed)

    # Resuming

    def resume(self, resume_from: str | int | None = "auto") -> Start:
        """Go on from the newest usable step, or from a named one; the same on every rank.

        `resume_from` is `auto`, `none`, a step number, or the path of a step. A step that
        turns out not to load is passed over by all ranks together. Newer steps than the one
        resumed from are marked superseded: they are never taken again.

        Raises `NothingToResume` where steps are there and none is usable (exit code 11) or
        one could not be looked at (75), `StorageError` where the storage or one rank's view
        of it fails, `StateRefused` where state would be lost that no policy lets go,
        `ModelDiffers` where the step is of another model, `RanksLost` where a rank dies.
        """
        if self._attempt is not None:
            raise UsageError("resume was called before; a Checkpointer resumes once")
        try:
            return self._resume(resume_from)
        except CkptctlError as error:
            if self.group.is_first and error.next_command:
                self._tell(f"next: {error.next_command}")
            raise

    def _resume(self, resume_from: str | int | None) -> Start:
        first = self.group.from_first
        first(lambda: self._check_before(resume_from))
        token = first(lambda: take_token(self._store, new_attempt()))
        attempt = _Attempt(token, Ledger(self._store, token.attempt, self.group.rank))
        earlier = first(lambda: self._started(attempt, resume_from))
        decision, loaded, rejected = self._loaded(resume_from, attempt)
        saved, inventory = self._restored(decision, loaded)
        report = first(
            lambda: self._reported(attempt, decision, saved, inventory, rejected, earlier)
        )
        attempt.resumed_from = decision.step
        attempt.step = attempt.saved = saved.step
        self._attempt = attempt
        self._watch()
        return Start(
            step=saved.step,
            tokens=saved.tokens or 0,
            samples=saved.samples or 0,
            path=decision.path,
            fell_back=report["fell_back"],
            rejected=rejected,
            report=report,
            report_path=join_url(self._store.url, f"{ATTEMPTS_FOLDER}/{token.attempt}.resume.json"),
        )

    def _check_before(self, resume_from: str | int | None) -> None:
        check_root(self.root, self._looking)
        if resume_from is None or str(resume_from).strip() in ("none", ""):
            steps = list_root(self._store).steps
            if steps:
                raise UsageError(
                    f"{self.root} holds {len(steps)} steps, {steps[0].name} the newest: a run "
                    "from the beginning needs a root of its own",
                    next_command=f"ckptctl scan {self.root}",
                )

    def _started(self, attempt: _Attempt, resume_from: str | int | None) -> str | None:
        earlier = read_attempts(self._store)
        events = [event.get("event") for _, events in earlier for event in events]
        # Older records than these are not read, and may have it.
        attempt.never_saved = 0 < len(earlier) < MAX_ATTEMPTS and "saved" not in events
        cluster = cluster_context().placed(self.group.rank, self.group.size)
        attempt.cluster = cluster.document()
        attempt.ledger.add(
            "started",
            token=attempt.token.number,
            resume_from=str(resume_from),
            world_size=self.group.size,
            cluster=attempt.cluster,
        )
        reject_proven(self._store, self._looking.storage, f"attempt {attempt.token.attempt}")
        return earlier[-1][0] if earlier else None

    def _loaded(
        self, resume_from: str | int | None, attempt: _Attempt
    ) -> tuple[Decision, dict[str, Any], tuple[Rejected, ...]]:
        """Decide and load until a step loads on every rank; what it holds, and what did not."""
        failed: dict[int, Rejected] = {}
        while True:
            decision = self.group.from_first(
                lambda: decide(
                    resume_from,
                    self.root,
                    self._looking,
                    skip=tuple(failed),
                    never_saved=attempt.never_saved,
                )
            )
            if decision.path is None or decision.step is None:
                return decision, {}, decision.rejected
            prove_seen(decision, self.group, self._looking)
            error = prove_content(decision, self.group, self._looking)
            loaded: dict[str, Any] = {}
            if error is None:
                error, loaded = self._try_to_load(decision)
            if error is None:
                return decision, loaded, (*failed.values(), *decision.rejected)
            step = decision.step
            failed[step] = Rejected(step, decision.path, "corrupt", error.message)
            if self.group.is_first:
                attempt.ledger.add("failed", step=step, reason=error.message, while_="loading")
            if len(failed) > self._looking.max_fallback:
                raise too_many(failed, self.root)

    def _try_to_load(self, decision: Decision) -> tuple[LoadFailed | None, dict[str, Any]]:
        """Load on all ranks; the failure that all agree on, or what was loaded here."""
        made: dict[str, Any] = {}

        def prepare() -> None:
            try:
                saved = saved_metadata(decision, self._looking)
            except PathNotFound as error:  # somebody removed it since rank 0 looked
                raise LoadFailed(error.message) from error
            made.update(template(self.parts, self.place, saved))

        try:
            self.group.from_all(prepare)
            self.group.from_all(lambda: load_into(made, decision, self.group, self._looking))
        except LoadFailed as error:
            return error, {}
        return None, made

    def _restored(self, decision: Decision, loaded: dict[str, Any]) -> tuple[Progress, Inventory]:
        if decision.step is None:
            return Progress(0), Inventory()
        saved = progress_of(loaded, decision.step)
        told = self.group.from_all(
            lambda: restore(loaded, self.parts, self.place, saved, self.policies)
        )
        inventory = told[0]
        for other in told[1:]:
            for mine, theirs in zip(inventory.lists, other.lists, strict=True):
                mine += [each for each in theirs if each not in mine]
        return saved, inventory

    def _reported(
        self,
        attempt: _Attempt,
        decision: Decision,
        saved: Progress,
        inventory: Inventory,
        rejected: tuple[Rejected, ...],
        earlier: str | None,
    ) -> dict[str, Any]:
        """Write down and tell how the resume went; on rank 0 alone."""
        name = attempt.token.attempt
        superseded: tuple[int, ...] = ()
        if decision.step is not None:
            superseded = supersede_newer(
                self._store, decision.step, self._looking.storage, f"attempt {name}"
            )
        report = {
            "schema": "ckptctl.resume/1",
            "attempt": name,
            "at": utc_now(),
            "root": self.root,
            "step": decision.step,
            "path": decision.path,
            "tokens": saved.tokens,
            "fell_back": decision.step is not None and (decision.fell_back or bool(rejected)),
            "rejected": [
                {"step": one.step, "path": one.path, "verdict": one.verdict, "reason": one.reason}
                for one in rejected
            ],
            "superseded": list(superseded),
            "world_size": self.group.size,
            "saved_world_size": saved.world_size,
            "previous_attempt": earlier,
            "state": inventory.document(),
            "cluster": attempt.cluster,
        }
        put_report(self._store, name, report)
        attempt.ledger.add(
            "resumed",
            step=decision.step,
            path=decision.path,
            tokens=saved.tokens,
            rejected=[one.step for one in rejected],
            previous=earlier,
        )
        age_s = None if decision.written_s is None else time.time() - decision.written_s
        for line in lines_of(report, inventory.notes, age_s):
            self._tell(line)
        return report

    # Saving

    def save(
        self,
        step: int,
        *,
        tokens: int | None = None,
        samples: int | None = None,
        loss: float | None = None,
    ) -> str:
        """Save everything as `step`, and seal it; its address. Every rank calls it.

        `tokens` and `samples` count from the beginning of the run, over all ranks. Returns
        when the step is durable. Raises `SaveFailed` where it could not be saved, `Fenced`
        where another attempt has taken the root over, `UsageError` where a whole step of
        that number is there; older steps are as they were, whatever happens.
        """
        self.flush()
        attempt, saver = self._ready(self.group)
        self._check_next(attempt, step)
        state = self._state(step, tokens, samples)
        self._write(saver, attempt, step, state, tokens=tokens, loss=loss)
        attempt.saved = step
        return saver.url_of(step)

    def save_async(
        self,
        step: int,
        *,
        tokens: int | None = None,
        samples: int | None = None,
        loss: float | None = None,
    ) -> str:
        """The same beside the training: the state is copied to memory, and written by a thread.

        One save is in flight at a time: a second call waits for the first. What goes wrong is
        raised at the next call of `save`, `save_async`, `flush` or `close`. The step is there
        and sealed once `flush` has returned. Costs one copy of this rank's state in memory,
        which the next save uses again.
        """
        self.flush()
        attempt, saver = self._ready(self._later)
        self._check_next(attempt, step)
        state = self._stager.staged(self._state(step, tokens, samples))
        self._flight = self._pool.submit(
            self._write, saver, attempt, step, state, tokens=tokens, loss=loss
        )
        attempt.saved = step
        return saver.url_of(step)

    def flush(self) -> None:
        """Wait for the save in flight, and raise what went wrong with it."""
        flight, self._flight = self._flight, None
        if flight is not None:
            flight.result()

    def _ready(self, group: Group) -> tuple[_Attempt, Saver]:
        if self._attempt is None:
            raise UsageError("call resume() before the first save, also for a fresh run")
        attempt = self._attempt
        origin = Origin(
            attempt.token.attempt,
            attempt.resumed_from,
            str(attempt.cluster.get("job") or ""),
            str(attempt.cluster.get("node") or ""),
        )
        saver = Saver(self._store, group, attempt.token, self._step_format, self._key, origin)
        return attempt, saver

    def _check_next(self, attempt: _Attempt, step: int) -> None:
        if step <= attempt.saved:
            raise UsageError(
                f"step {step} cannot be saved: the run is at step {attempt.saved} already"
            )

    def _state(self, step: int, tokens: int | None, samples: int | None) -> dict[str, Any]:
        if samples is None and self.parts.has_global_loader:
            samples = self.parts.dataloader.position
        progress = {"step": step, "seed": self._seed}
        progress |= {} if tokens is None else {"tokens": tokens}
        progress |= {} if samples is None else {"samples": samples}
        state = collect(self.parts, self.place, progress)
        if not self._readable:
            self.group.from_all(lambda: check_readable(state))
            self._readable = True
        return state

    def _write(
        self,
        saver: Saver,
        attempt: _Attempt,
        step: int,
        state: dict[str, Any],
        *,
        tokens: int | None,
        loss: float | None,
    ) -> None:
        began_s = time.monotonic()
        group = saver.group
        moved = group.from_first(lambda: make_place(saver, step))
        write_step(saver, step, state)
        seal_step(saver, step, seal=self._seal)
        if not group.is_first:
            return
        finite = loss is not None and math.isfinite(loss)
        self._record(
            "saved",
            step=step,
            path=saver.url_of(step),
            tokens=tokens,
            loss=loss if finite else None,
            took_s=round(time.monotonic() - began_s, 3),
            moved_aside=moved,
        )
        if self._keep is not None:
            self._prune(saver, {step, attempt.resumed_from or 0}, self._keep)

    def _prune(self, saver: Saver, protected: Collection[int], keep: int) -> None:
        """Remove what is older than the steps that are kept; on rank 0 alone.

        The save has succeeded by now: what cannot be removed is told, and ends nothing.
        """
        for old in surplus(self._store, keep, protected):
            check_token(self._store, saver.token)
            try:
                remove_step(self._store, old.named.name)
            except StorageError as error:
                self._tell(f"step {old.named.number} was not removed: {error.message}")
        clear_aside(saver, keep)

    # The record of this attempt

    def note(self, step: int, *, loss: float | None = None) -> None:
        """Say how far the training has come; call it after each step, on every rank.

        Writes a line at most every 30 s, and one for the first loss that is not finite. By
        it a later resume knows how soon a failure followed the step that was loaded.
        """
        attempt, _ = self._ready(self.group)
        attempt.step = step
        if not self.group.is_first:
            return
        if loss is not None and not math.isfinite(loss):
            self.failed(NOT_FINITE)
        elif time.monotonic() - attempt.noted_s > _PROGRESS_EVERY_S:
            attempt.noted_s = time.monotonic()
            self._record("progress", step=step, loss=loss)

    def failed(self, evidence: str) -> None:
        """Record that this attempt failed at the step it is at; only the first one counts.

        Two attempts that resumed from one step and failed with the same evidence within
        20 steps have the step passed over from then on. What ends the process as an
        exception is recorded by itself.
        """
        attempt, _ = self._ready(self.group)
        if attempt.has_failed:
            return
        attempt.has_failed = True
        self._record("failed", step=attempt.step, evidence=evidence)

    def _record(self, event: str, **fields: object) -> None:
        """A line of the ledger that nothing depends on: a storage that refuses ends no training."""
        assert self._attempt is not None  # noqa: S101 - asked by the callers
        with suppress(StorageError):
            self._attempt.ledger.add(event, rank=self.group.rank, **fields)

    # The end

    def close(self) -> None:
        """Wait for the save in flight, raise what went wrong with it, and end the record."""
        try:
            self.flush()
        finally:
            self._leave("closed")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
            return
        self._note_exception(error)
        try:
            self.flush()
        except CkptctlError as lost:
            self._tell(f"the save in flight is lost: {lost.message}")
        finally:
            self._leave("exception")

    def _watch(self) -> None:
        """See how the process ends: an exception that nobody catches is kept in the record."""
        before = sys.excepthook

        def seen(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self._note_exception(error)
            before(kind, error, trace)

        sys.excepthook = seen
        self._hooks = (before, seen)
        atexit.register(self._at_exit)

    def _note_exception(self, error: BaseException) -> None:
        evidence = signature_of(error)
        if self._attempt is None or self._attempt.has_failed:
            return
        if evidence is not None:
            self.failed(evidence)
        self._attempt.has_failed = True

    def _at_exit(self) -> None:
        try:
            self.flush()
        except CkptctlError as lost:
            self._tell(f"the save in flight is lost: {lost.message}")
        self._leave("exit")

    def _leave(self, how: str) -> None:
        atexit.unregister(self._at_exit)
        if self._hooks is not None and sys.excepthook is self._hooks[1]:
            sys.excepthook = self._hooks[0]
        self._hooks = None
        self._pool.shutdown(wait=False)
        self._stager.close()
        attempt = self._attempt
        if attempt is None or attempt.over:
            return
        attempt.over = True
        if self.group.is_first:
            how = "exception" if attempt.has_failed else how
            self._record("ended", step=attempt.step, how=how)
        self._store.close()


@dataclass(slots=True)
class _Attempt:
    """One life of the job; `saved` is the newest step that is on its way or there."""

    token: Token
    ledger: Ledger
    resumed_from: int | None = None
    step: int = 0
    saved: int = 0
    noted_s: float = 0.0
    has_failed: bool = False
    over: bool = False
    never_saved: bool = False
    cluster: dict[str, Any] = field(default_factory=dict)
