"""The object with which a training script saves and resumes.

It holds the state that outlives a call: the job, the record of this attempt, the save in
flight. `resuming` holds the stages of a resume, `saving` those of a save.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from ckptctl.distributed.process_group import make_group
from ckptctl.errors import CkptctlError, StorageError, UsageError
from ckptctl.formats.frameworks.layouts import step_name
from ckptctl.formats.own.contract import terms_of
from ckptctl.formats.own.ledger import RemovingLine, SavedLine, SavingLine
from ckptctl.formatting import and_more
from ckptctl.inspection.inspecting import Inspection
from ckptctl.inspection.stages import SealBytes
from ckptctl.model import STATE_KINDS, Level
from ckptctl.options import (
    PickPolicy,
    Requirements,
    StorageOptions,
    TrainKeywords,
    TrainOptions,
    options_from,
)
from ckptctl.selection.branches import read_resumes
from ckptctl.selection.history import check_token
from ckptctl.selection.retention import NotCounted, RetentionPlan, Rules, remove_step
from ckptctl.selection.roots import list_all, list_root
from ckptctl.selection.targets import OpenRoot, roots_in
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import SharedStores, join_url, open_store
from ckptctl.storage.waiting import SAVE_RETRY_S, start_daemon
from ckptctl.train.abandoning import confirm
from ckptctl.train.data_ledger import DataLedger
from ckptctl.train.heartbeats import heartbeat, inside, report_saving
from ckptctl.train.held_once import HeldOnce, Outline, copied_buffers
from ckptctl.train.ledger import RECORD_TIMEOUT_S, RankAttempt, to_stderr
from ckptctl.train.loss_guard import why_lost
from ckptctl.train.moving import check_names
from ckptctl.train.passes import follow_all
from ckptctl.train.resolving import Selection
from ckptctl.train.restoring import Job, Start, Tell
from ckptctl.train.resuming import Resume
from ckptctl.train.samples import check_order
from ckptctl.train.saving import (
    Counts,
    Stager,
    StateToSave,
    StepSave,
    check_seals,
    check_step_format,
)
from ckptctl.train.state import (
    Parts,
    RankPosition,
    Stateful,
    check_readable,
    collect,
    give_generator,
)


class Checkpointer:
    """Saves steps under a root, and resumes from the newest complete one.

    Every rank of the job creates one and calls its methods at the same points. Call
    `resume` once, before the first step. Use it with `with`, or call `close`; a save in
    flight is also completed when the process ends.

    `root` may be several roots of one run in order of preference, such as a local disk and
    shared storage: `resume` decides over all of them, as `pick` does. Steps are saved to
    the first that is not optional; `keep` and seals concern that root only.
    `optional_roots` may be absent.

    `optimizer` belongs to `model`; several of one model are given as a list, and so are several
    schedulers. `dataloader` is a `GlobalLoader`, a torchdata `StatefulDataLoader`, or any object
    with `state_dict` and `load_state_dict`. `extra` are other such objects, by name. `keep` is
    how many complete and sealed steps stay, of those that `resume` would use; older ones are
    removed in the background. None removes nothing. `data_ledger` records the samples of each
    step; loaders whose samples have ids have one by default. `tell` prints a message.

    `options` states how steps are named and sealed, how long ranks wait, and which state
    may be lost; see `docs/train.md`. `policy`, `requirements` and `storage` are those of
    `pick`. Each field of the four options objects is also a keyword: `seed=1`,
    `accept_lost=["rng"]`, `level="content"`.
    """

    def __init__(
        self,
        root: str | Sequence[str],
        *,
        optional_roots: Collection[str] = (),
        model: Any = None,
        optimizer: Any = None,
        scheduler: Any = None,
        dataloader: Any = None,
        grad_scaler: Stateful | None = None,
        extra: Mapping[str, Stateful] | None = None,
        keep: int | None = None,
        data_ledger: DataLedger | None = None,
        tell: Tell = to_stderr,
        options: TrainOptions = TrainOptions(),
        policy: PickPolicy = PickPolicy(),
        requirements: Requirements = Requirements(),
        storage: StorageOptions = StorageOptions(),
        **keywords: Unpack[TrainKeywords],
    ) -> None:
        heartbeat("setup")
        if optimizer is not None and model is None:
            raise UsageError("optimizer requires model")
        if keep is not None and keep < 1:
            raise UsageError(f"keep is {keep}; it must be at least 1")
        options, policy, requirements, storage = options_from(
            keywords, options, policy, requirements, storage
        )
        check_step_format(options.step_format)
        if requirements.pattern is not None:
            raise UsageError(
                "a Checkpointer names its steps by step_format; pattern is for resolve"
            )
        # An earlier attempt can no longer publish, so an unfinished save is not in progress.
        requirements = replace(requirements, grace_s=0.0)
        parts = Parts(model, optimizer, scheduler, dataloader, grad_scaler, extra or {})
        parts.check()
        names = {**dict(requirements.state_map), **options.names}
        check_names(names, parts)
        options = replace(options, names=names, contract=terms_of(options.contract))
        keys = [f"{kind}={key}" for kind, key in names.items() if kind in STATE_KINDS]
        requirements = replace(requirements, state_keys=keys)
        if not options.accept_repetition:
            check_order(dataloader)
        group = make_group(options.patience_s)
        roots = roots_in(root, optional_roots)
        shared = self._shared = SharedStores.of(storage)
        selection = Selection(roots, policy, requirements, shared, options.settle_s)
        stores = {url: open_store(url, shared) for url in roots.urls}
        dp_rank = group.rank if options.dp_rank is None else options.dp_rank
        dp_size = group.size if options.dp_size is None else options.dp_size
        self._job = Job(
            roots.first,
            stores[roots.first],
            group,
            RankPosition(group.rank, group.size, dp_rank, dp_size),
            parts,
            options,
            selection,
            tell,
            open_store(roots.first, replace(shared, timeout_s=RECORD_TIMEOUT_S, retries=0)),
            stores,
        )
        # An outage of a minute must not end a run that could save afterwards.
        self._save_store = open_store(roots.first, replace(shared, retry_for_s=SAVE_RETRY_S))
        # For asynchronous saves, whose collectives overlap with those of the training.
        self._later = make_group(options.patience_s)
        self._keep = keep
        self._attempt: RankAttempt | None = None
        self._replay: Start | None = None
        self._confirmed = False
        self._closed = False
        self._flight: Future[None] | None = None
        self._retention: Retention | None = None
        self._pool = ThreadPoolExecutor(1, "ckptctl-save")
        self._stager = Stager()
        give_generator(parts, self._job.position, options.seed)
        follow_all(dataloader, parts.extra, group, dp_rank, options, tell)
        ledger = data_ledger or DataLedger()
        is_followed = ledger.follow(dataloader, dp_size)
        self._data_ledger = ledger if is_followed else data_ledger

    # Resuming

    def resume(self, resume_from: str | int | None = "auto", *, replay: int | None = None) -> Start:
        """Resume from the newest usable step, or from a given one; the same on every rank.

        `resume_from` is `auto`, `none`, a step number, or the path of a step. A step that
        does not load on one rank is skipped on all. Newer steps than the resumed one are
        marked superseded, so that no later resume uses them.

        `replay` is a number of steps to train again, to prove the resume: `auto` then means
        the newest usable step at least that many before the newest one. Nothing is written
        to the root, which another attempt may hold; train up to `Start.last`, log to
        another file, and compare with `ckptctl loss --canary`.

        Raises `NothingToResume` if steps exist but none is usable (exit code 11) or one
        could not be inspected (75), `StorageError` if the storage or one rank's view of it
        fails, `StateRefused` if state would be lost that no policy allows, `ModelDiffers`
        if the step belongs to another model, `RanksLost` if a rank dies.
        """
        if self._attempt is not None or self._replay is not None:
            raise UsageError("resume was called before; a Checkpointer resumes once")
        if replay is not None and replay < 1:
            raise UsageError(f"replay is {replay}; it must be at least 1")
        try:
            heartbeat("setup")
            if replay is not None:
                self._replay = Resume(self._job, resume_from).replay(replay)
                heartbeat("first-step", step=self._replay.step)
                return self._replay
            check_seals(self._job.options, self._job.selection.requirements)
            attempt, start, (data, why) = Resume(self._job, resume_from).run()
        except CkptctlError as error:
            if self._job.group.is_first and error.next_command:
                self._job.tell(f"next: {error.next_command}")
            raise
        attempt.watch()
        self._attempt = attempt
        if self._data_ledger is not None:
            is_continued = self._data_ledger.begin(start.step, data)
            if self._job.group.is_first and not start.fresh and not is_continued:
                why = why or "the data set or its order differs from that of the step"
                self._job.tell(f"note: the data ledger begins after step {start.step}: {why}")
        _complete_at_exit(self)
        heartbeat("first-step", step=start.step)
        return start

    # Saving

    def save(
        self,
        step: int,
        *,
        tokens: int | None = None,
        samples: int | None = None,
        loss: float | None = None,
    ) -> str:
        """Save everything as `step` and seal it; returns its address. Every rank calls it.

        `tokens` and `samples` count from the beginning of the run, over all ranks. If `loss`,
        or without it the last one that was noted, is not finite, and a parameter of the model
        holds NaN or infinity, the step is marked rejected before it is published, so that no
        resume uses it. Returns when the step is durable; failed requests to an object store are
        retried for two minutes (storage option `retry_for_s`).

        Raises `SaveFailed` with the cause if the step could not be saved, `Fenced` if another
        attempt has taken the root over, `UsageError` if a complete step of that number exists or
        if a value that a step holds once differs between ranks, `RanksLost`; older steps are never
        changed. A replay saves nothing, and raises `UsageError` after its last step.
        """
        return self._save(step, loss, tokens, samples, later=False)

    def save_async(
        self,
        step: int,
        *,
        tokens: int | None = None,
        samples: int | None = None,
        loss: float | None = None,
    ) -> str:
        """Like `save`, in the background: the state is copied to memory, and a thread writes it.

        One save is in flight at a time: a second call waits for the first. An error is
        raised at the next call of `save`, `save_async`, `flush` or `close`, and at the end of
        `with` unless another error ends it; a call that raises the error of an earlier save
        saves nothing itself. The step is complete and sealed once `flush` has
        returned. Costs one copy of this rank's state in memory, which the next save reuses.
        """
        return self._save(step, loss, tokens, samples, later=True)

    def flush(self) -> None:
        """Wait for the save in flight, and raise its error.

        Then wait for the removal of older steps, for at most half a minute.
        """
        flight, self._flight = self._flight, None
        try:
            if flight is not None:
                with self._stalled():
                    flight.result()
        finally:
            if self._retention is not None:
                self._retention.wait()

    def _save(self, *numbers: Any, later: bool) -> str:
        job = self._job

        def checked() -> Counts:
            counts = Counts.of(*numbers)
            name = job.options.step_format.format(counts.step)
            named = step_name(name)
            if named is None or named.number != counts.step:
                raise UsageError(
                    f"step {counts.step} cannot be saved: no resume would recognize "
                    f"{name[:100]!r} as that step"
                )
            return counts

        counts = job.group.on_all(checked)  # an error of one rank is one of all
        if self._replay is not None:
            return self._not_saved(self._replay, counts.step)
        with self._stalled():
            self.flush()
            attempt, requirements = self._begun(), job.selection.requirements
            if self._closed:
                raise UsageError(f"step {counts.step} cannot be saved: close was called before")
            if job.group.is_first and counts.step > attempt.saved:
                attempt.record(SavingLine(step=counts.step))
            group = self._later if later else job.group
            save = StepSave(
                self._save_store, group, counts.step, attempt, job.options, requirements
            )
            taken = self._state(counts, self._stager.staged if later else None)
            if later:
                self._flight = self._pool.submit(self._run_later, save, taken, counts)
            else:
                self._run(save, taken, counts)
            return save.url

    def _not_saved(self, replay: Start, step: int) -> str:
        if replay.last is not None and step > replay.last:
            raise UsageError(
                f"the replay ends after step {replay.last}, so step {step} is not saved: stop "
                "there (Start.last), and continue with resume() without replay"
            )
        if self._job.group.is_first:
            self._job.tell(f"replay: step {step} is not saved")
        return join_url(self._job.store.url, self._job.options.step_format.format(step))

    @contextmanager
    def _stalled(self) -> Iterator[None]:
        """Report that training waits for a save, and count how long."""
        counted = nullcontext() if self._attempt is None else self._attempt.stalled()
        with inside("checkpoint"), counted:
            yield

    def _begun(self) -> RankAttempt:
        if self._attempt is None:
            raise UsageError("call resume() first, also for a fresh run")
        return self._attempt

    def _state(
        self, counts: Counts, staged: Callable[[dict[str, Any]], dict[str, Any]] | None
    ) -> StateToSave:
        """What is saved as `step`, compared over the ranks, and its state as `staged` returns it.

        An error of one rank is one of all, and so are lost weights.
        """
        step, samples = counts.step, counts.samples
        parts, group, position = self._job.parts, self._job.group, self._job.position
        if samples is None and parts.has_global_loader:
            samples = parts.dataloader.position
        progress = {"step": step, "seed": self._job.options.seed}
        progress |= {} if counts.tokens is None else {"tokens": counts.tokens}
        progress |= {} if samples is None else {"samples": samples}
        attempt = self._begun()
        loss, saved = attempt.loss if counts.loss is None else counts.loss, attempt.saved

        def collected() -> tuple[
            tuple[str, float | None, bool, Outline], tuple[StateToSave, HeldOnce]
        ]:
            if step <= saved:
                raise UsageError(f"step {step} cannot be saved: the run is already at step {saved}")
            state = collect(parts, position, progress)
            # At every save, because any step may introduce a value that cannot be loaded.
            check_readable(state)
            copied = copied_buffers(parts.model, state)
            held = HeldOnce(state, copied, tuple(self._job.options.per_rank), group)
            why = why_lost(parts.model, loss)
            taken = StateToSave(state, buffers=copied)
            return (why, loss, attempt.is_sound, held.outline), (taken, held)

        ranks, (taken, held) = group.from_all_keeping(collected)
        reasons, losses, sound, outlines = zip(*ranks, strict=True)
        held.agree(outlines, group)
        known = [loss for loss in losses if loss is not None]
        well = all(map(math.isfinite, known)) and all(sound)
        went_well = None if well and not known else well
        data = None
        if self._data_ledger is not None:
            data = self._data_ledger.collect(step, group, position.dp_rank, position.dp_size)
        state = taken.state if staged is None else group.on_all(lambda: staged(taken.state))
        lost = next(filter(None, reasons), "")
        return replace(taken, state=state, lost=lost, went_well=went_well, data=data)

    def _run_later(self, save: StepSave, taken: StateToSave, counts: Counts) -> None:
        """Save in the thread of `save_async`, and report that a save is in flight meanwhile."""
        report_saving(save.number)
        try:
            self._run(save, taken, counts)
        finally:
            report_saving(None)

    def _run(self, save: StepSave, taken: StateToSave, counts: Counts) -> None:
        """Save, record it, and start to remove older steps."""
        began_s, loss = time.monotonic(), counts.loss
        save.run(taken)
        attempt = self._begun()
        attempt.saved = save.number
        if self._data_ledger is not None:
            self._data_ledger.saved(taken.data)
        if not self._job.group.is_first:
            return
        if taken.lost:
            self._job.tell(
                f"{save.url} is saved and rejected: {taken.lost}; no later step of this attempt "
                "can be used"
            )
        line = SavedLine(
            step=save.number,
            path=save.url,
            tokens=counts.tokens,
            loss=loss if loss is not None and math.isfinite(loss) else None,
            took_s=round(time.monotonic() - began_s, 3),
            moved_aside=save.moved_aside,
        )
        attempt.record(line)
        attempt.ledger.drain(RECORD_TIMEOUT_S)
        self._confirm(attempt, save.number, went_well=taken.went_well)
        if self._keep is None:
            return
        if self._retention is None:
            self._retention = Retention(self._job, attempt, self._keep)
        protected = {save.number: "it was saved just now"}
        if attempt.resumed_from is not None:
            protected[attempt.resumed_from] = "this attempt resumed from it"
        self._retention.begin(protected)

    def _confirm(self, attempt: RankAttempt, step: int, *, went_well: bool | None) -> None:
        """Confirm the resumed step once training has gone well for long enough; on rank 0 only.

        The save has succeeded, so a mark that cannot be written is reported, not raised.
        """
        after, resumed = self._job.options.confirm_after, attempt.resumed
        if self._confirmed or not after or resumed is None or went_well is False:
            return
        n_steps = step - (resumed.number or 0)
        if n_steps < after:
            return
        self._confirmed = True
        reason = (
            f"{n_steps:,} steps after a resume from it, step {step} was saved; all losses finite"
        )
        why_not = "" if went_well else "no loss was given to note or save"
        try:
            if went_well:
                confirm(self._job, attempt.token, resumed, reason)
        except CkptctlError as error:
            why_not = error.message
        if why_not:
            self._job.tell(f"note: step {resumed.number} is not confirmed: {why_not}")

    # The record of this attempt

    def note(self, step: int, *, loss: float | None = None) -> None:
        """Record the training progress; call it after each step, on every rank.

        Writes a line at most every 30 s, and one for the first non-finite loss. A later
        resume reads from it how soon a failure followed the loaded step. Under `ckptctl run` it
        is the heartbeat of this rank, too.
        """
        counts = Counts.of(step, loss)
        heartbeat("step", step=counts.step)
        if self._data_ledger is not None:
            self._data_ledger.note(counts.step)
        if self._replay is None:
            self._begun().note(counts.step, counts.loss)

    def failed(self, evidence: str) -> None:
        """Record that this attempt failed at the current step; only the first call counts.

        After two attempts that resumed from one step and failed with the same evidence
        within 20 steps, the step is skipped. An exception that ends the process is recorded
        without a call.
        """
        if self._replay is None:
            self._begun().failed(evidence)

    # The end

    def close(self) -> None:
        """Wait for the save in flight, raise its error, and end the record."""
        try:
            self.flush()
        finally:
            self._leave("closed")

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        # An exit that reports success must not hide that the last save is lost.
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
            return
        if self._attempt is not None:
            self._attempt.ended_by(error)
        self._end("exception")

    def _end(self, how: str = "exit") -> None:
        """Complete the save in flight, and end the record, as the process ends without `close`."""
        try:
            self.flush()
        except CkptctlError as lost:
            self._job.tell(f"the save in flight is lost: {lost.message}")
        finally:
            self._leave(how)

    def _leave(self, how: str) -> None:
        self._closed = True
        heartbeat("outside")
        _open.get(os.getpid(), set()).discard(self)
        self._pool.shutdown(wait=False)
        self._stager.close()
        if self._attempt is not None:
            self._attempt.leave(how)
        self._shared.close()


_open: dict[int, set[Checkpointer]] = {}
"""What is not closed, by process: a fork does not end the checkpointers of its parent."""


def _complete_at_exit(checkpointer: Checkpointer) -> None:
    """End a checkpointer with this process, if it was not closed before.

    `atexit` calls too late: `concurrent.futures` has refused new work of any pool by then, and a
    child of `multiprocessing` does not call it. Threads register their end in this way.
    """
    if os.getpid() not in _open:
        getattr(threading, "_register_atexit")(_end_all)  # noqa: B009 - unknown to type checkers
    _open.setdefault(os.getpid(), set()).add(checkpointer)


def _end_all() -> None:
    for one in tuple(_open.get(os.getpid(), ())):
        one._end()


_PATIENCE_S = 30.0
"""How long a save, or the end of the process, waits for the previous removal."""


@dataclass(slots=True)
class Retention:
    """Keeps the newest `keep` steps of the root that an attempt holds, and removes older ones.

    Only steps that a resume of the job would use count; they are selected over all its
    roots, and removed from the first. While the files of a step do not change, a later save
    lists them and reads nothing.

    Runs on rank 0 only, in a daemon thread: a hung removal delays neither a save nor the end of
    the process, and an interrupted one leaves an interrupted save, which the next one removes.
    """

    _job: Job
    _attempt: RankAttempt
    _keep: int
    _memory: dict[str, Inspection] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    def begin(self, protected: Mapping[int, str]) -> None:
        """Start a removal, unless the previous one is still running.

        `protected` maps steps that stay to the reason.
        """
        if self._thread is None or not self._thread.is_alive():
            self._thread = start_daemon("ckptctl-retention", self._run, dict(protected))

    def wait(self) -> None:
        """Wait until the removal ends, for half a minute at most."""
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)

    def _run(self, protected: Mapping[int, str]) -> None:
        selection = self._job.selection
        policy = replace(selection.policy, level=Level.LISTING)
        # Bytes are not read during training: a resume or `prune` compares them with the seals.
        requirements, later = selection.requirements, SealBytes.LATER
        rules = Rules(self._keep, requirements, policy, protected=protected, seal_bytes=later)
        own, optional = self._job.store, selection.roots.optional
        stores = self._job.stores.items()
        others = [(store, url in optional) for url, store in stores if store is not own]
        failures: Sequence[CkptctlError] = ()
        try:
            plan = RetentionPlan(
                OpenRoot(own, list_all(own)),
                rules,
                # Proving a step's bytes is left to `prune` and `seal`.
                prove=lambda *_: NotCounted("written to since it was sealed"),
                others=[root for other in others for root in _listed(*other)],
                memory=self._memory,
            )
            plan.carry_out(self._remove)
            failures = plan.failures
        except CkptctlError as error:
            failures = [error]
        if failures:
            why = f"{failures[0].message}{and_more(failures)}"
            self._job.tell(f"older steps were not removed: {why}")

    def _remove(self, inspected: Inspection) -> bool:
        store, name = self._job.store, inspected.step.name
        check_token(store, self._attempt.token)
        path = join_url(store.url, name)
        # Before it goes: a signal may end this process at any moment.
        self._attempt.record(RemovingLine(step=inspected.report.number, path=path))
        self._attempt.ledger.drain(RECORD_TIMEOUT_S)
        return remove_step(store, name, seen=inspected.step.files)


def _listed(store: Store, optional: bool) -> Iterator[OpenRoot]:
    """Another root, unless it is optional and absent or unavailable."""
    try:
        listing = list_root(store)
        if listing.exists:
            yield OpenRoot(store, listing, optional, resumes=read_resumes(store))
    except StorageError:
        if not optional:
            raise
