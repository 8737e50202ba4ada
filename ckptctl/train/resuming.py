"""Resume a job from its root.

`Resume.run` lists the stages in order; every rank calls them. First the step is chosen,
proven, loaded and restored, and nothing is written. Only then does the job take the root
over: a job that cannot resume must not end another that trains. If the root changed in the
meantime, the decision is repeated. A replay goes through the same stages but writes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

from ckptctl.distributed.launcher import ATTEMPT, cluster_context
from ckptctl.errors import LoadFailed, NothingToResume, PathNotFound, StorageUnavailable, UsageError
from ckptctl.findings import Report, Verdict
from ckptctl.formats.own.contract import Drift
from ckptctl.formats.own.data_ledger import DataFields
from ckptctl.formats.own.ledger import FailedLine, ResumedLine, StartedLine
from ckptctl.formatting import command_line, counted, some_of, verb
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Metadata
from ckptctl.redaction import redacted
from ckptctl.selection.choosing import NoStepReason, PassedOver
from ckptctl.selection.history import Token, begin_run, check_token, take_token
from ckptctl.selection.picking import Pick
from ckptctl.train.abandoning import Branch, HeldRoot, abandoned_branches, supersede_all
from ckptctl.train.differences import (
    Differences,
    RankEntries,
    StateComparison,
    names_in,
    refuse_lost,
)
from ckptctl.train.ledger import (
    Ledger,
    RankAttempt,
    clock_s,
    new_attempt,
    put_report,
    read_failures,
    reject_proven,
    resume_document,
    resume_lines,
)
from ckptctl.train.moving import (
    Move,
    ParameterNames,
    StepView,
    is_of_another_program,
    read_files_beside,
)
from ckptctl.train.optimizers import allocate_state
from ckptctl.train.rank_names import seen_by
from ckptctl.train.resolving import (
    changed,
    check_roots,
    decide,
    not_loaded,
    open_on_all,
    prove_content,
    too_many,
    wanted_step,
)
from ckptctl.train.restoring import (
    Inventory,
    Job,
    LoadTarget,
    Restore,
    Restored,
    SavedProgress,
    Start,
    progress_of,
    read_into,
    saved_metadata,
)
from ckptctl.train.state import sharded, template

_SAME_ON_ALL = (
    *("step_format", "seal", "seed", "dp_size", "rng", "accept_lost", "names", "per_rank"),
    "contract",
)
"""The options that every rank of a job acts upon."""


class Resume:
    """One resume of a job, from `auto`, `none`, a step number or the path of a step."""

    def __init__(self, job: Job, resume_from: str | int | None) -> None:
        self._job = job
        self._resume_from = resume_from
        self._replays = False
        self._began_s = clock_s()

    def run(self) -> tuple[RankAttempt, Start, tuple[DataFields | None, str | None]]:
        """Load, restore, take the root over, and record it; see `Checkpointer.resume`.

        Returns also the data ledger of the step, or why there is none, on rank 0.
        """
        job, first = self._job, self._job.group.from_first
        self._check_same(None)
        first(self._check_before)
        history = first(lambda: read_failures(job.store))
        restored = self._load_and_restore()
        token = first(lambda: self._take_over(restored))
        attempt = RankAttempt(token, Ledger(job.store, token.attempt, job.group.rank, job.later))
        first(lambda: self._record_start(attempt, restored))
        passed_over = first(lambda: self._check_after(attempt, restored))
        if passed_over is not None:
            restored = self._load_and_restore(passed_over)
        previous = history[-1][0] if history else None
        report, path = first(lambda: self._complete(attempt, restored, previous))
        # Rank 0 alone continues the data ledger, which may be long.
        opened = restored.opened
        _, data = job.group.from_first_keeping(
            lambda: (None, None if opened is None else opened.read_data_ledger())
        )
        attempt.resumed = restored.decision.chosen
        attempt.step = attempt.saved = restored.saved.step
        return attempt, _start(restored, report, path), data or (None, None)

    def replay(self, n_steps: int) -> Start:
        """Load and restore so that `n_steps` steps can be trained again; write nothing.

        `auto` is the newest usable step at least that many steps before the newest one.
        Raises `NothingToResume` if there is none, else as `run` does.
        """
        job, self._replays = self._job, True
        self._check_same(n_steps)
        if str(self._resume_from if self._resume_from is not None else "").strip() in ("none", ""):
            raise UsageError("a replay starts from a step; resume_from must be 'auto' or a step")
        if str(self._resume_from).strip() == "auto":
            before = job.group.from_first(lambda: self._replay_before(n_steps))
            self._job = job = replace(job, selection=job.selection.older_than(before))
        restored = self._load_and_restore()
        report = job.group.from_first(lambda: self._report_replay(restored, n_steps))
        return replace(_start(restored, report, None), last=restored.saved.step + n_steps)

    def _check_same(self, replay: int | None) -> None:
        """Raise `UsageError` if the ranks were told different things: rank 0 decides for all."""
        options = self._job.options
        own = {"resume_from": str(self._resume_from), "replay": replay} | {
            name: getattr(options, name) for name in _SAME_ON_ALL
        }
        own |= {name: sorted(one) for name, one in own.items() if isinstance(one, tuple)}
        ranks = self._job.group.gather(own)
        for rank, other in enumerate(ranks):
            for name, value in other.items():
                first = ranks[0][name]
                if value == first:
                    continue
                what = f"{name} is {first} on rank 0 and {value} on rank {rank}"
                if name == "contract":
                    terms = sorted(dict({*value.items()} ^ {*first.items()}))
                    what = f"rank {rank} states {some_of(terms)} of the contract as rank 0 does not"
                raise UsageError(f"{what}: it must be the same on every rank")

    def _take_over(self, restored: Restored) -> Token:
        """Take the root over; the missing root of a fresh run is created. On rank 0 only."""
        store = self._job.store
        if restored.decision.chosen is None and store.folders is not None:
            store.folders.create_root()
        return take_token(store, new_attempt)

    def _check_before(self) -> None:
        selection = self._job.selection
        wanted = wanted_step(self._resume_from, selection.roots)
        steps = check_roots(selection)
        if wanted == "none" and steps:
            urls = selection.roots.urls
            raise UsageError(
                f"{', '.join(urls)} {verb(len(urls), 'holds', 'hold')} "
                f"{counted(len(steps), 'step')}, {steps[0].name} the newest; "
                "a run from step 0 needs its own root",
                next_command=command_line("scan", *selection.roots.words),
            )

    # Deciding, loading and restoring

    def _load_and_restore(self, passed_over: Sequence[PassedOver] = ()) -> Restored:
        """Choose and load until a step loads on every rank, and restore it."""
        job = self._job
        failed: list[PassedOver] = []
        while True:
            decision, kept = job.group.from_first_keeping(
                lambda: self._decide((*passed_over, *failed))
            )
            inspected, branches = (None, ()) if kept is None else kept
            chosen = decision.chosen
            if chosen is None:
                return Restored(decision, SavedProgress(0), Inventory(), None, branches)
            opened = open_on_all(chosen, job.group, job.selection, inspected)
            error = prove_content(chosen, job.group, job.selection, opened)
            if error is None:
                loaded = self._load(chosen, opened)
                if not isinstance(loaded, LoadFailed):
                    saved, inventory = self._restore(chosen, *loaded)
                    return Restored(decision, saved, inventory, opened, branches, tuple(failed))
                error = loaded
            failed.append(not_loaded(chosen, error))
            if len(failed) > job.selection.policy.max_fallback:
                raise too_many((*passed_over, *failed), job.selection.roots)

    def _decide(
        self, failed: Sequence[PassedOver]
    ) -> tuple[Pick, tuple[OpenStep | None, tuple[Branch, ...]]]:
        """The step to load, as it was inspected, and what a resume from it abandons; on rank 0."""
        decision, inspected = decide(self._resume_from, self._job.selection, failed)
        branches = () if self._replays else abandoned_branches(self._job, decision.chosen)
        return decision, (inspected, branches)

    def _load(
        self, chosen: Report, opened: OpenStep
    ) -> tuple[LoadTarget, Differences] | LoadFailed:
        """The state loaded on this rank, and what is lost; or the failure that all ranks agree on.

        Raises `StateRefused` before anything is loaded if the step and the job do not hold the
        same state, and the options do not accept that.
        """
        job, group = self._job, self._job.group
        step, path = chosen.number or 0, chosen.url
        try:
            view, whole = self._view(chosen, opened)
            with ExitStack() as undo:
                # A different model must fail on every rank before any tensor is written to.
                entries, wanted = group.from_all_keeping(lambda: self._wanted(view, undo))
                differences = StateComparison(entries, view.shared).run()
                refuse_lost(differences.lost, step, path, job.options)

                def read(values: dict[str, Any]) -> dict[str, Any]:
                    return read_into(values, group, opened, whole)

                lost = group.from_all(lambda: wanted.fill(differences, read))
                more = sorted({one for rank in lost for one in rank})
                refuse_lost(more, step, path, job.options)
                if differences.keeps_optimizer:
                    undo.pop_all()
        except LoadFailed as error:
            return error
        left = {one.split()[0] for one in view.lost}
        return wanted, replace(
            differences,
            lost=(*view.lost, *(one for one in differences.lost if one not in left), *more),
            notes=(*view.notes, *differences.notes),
        )

    def _wanted(self, view: StepView, undo: ExitStack) -> tuple[RankEntries, LoadTarget]:
        """What this rank loads; `undo` takes back the state that its optimizers get for it."""
        parts, saved = self._job.parts, view.saved
        kinds = {name.partition(".")[0] for name in names_in(saved)}
        formless = False
        for name, optimizer in parts.named_optimizers():
            if name in kinds or name in saved.bytes_entries:
                if not optimizer.state:
                    undo.callback(optimizer.state.clear)
                formless |= not allocate_state(optimizer) and name == "optimizer"
        held = template(parts, self._job.position, saved, kinds, formless=formless)
        wanted = LoadTarget(held, saved, view.names, view.values)
        names = (view.names.get(name, name) for name in names_in(view.shared))
        return wanted.entries(parts, list(names)), wanted

    def _view(self, chosen: Report, opened: OpenStep) -> tuple[StepView, Metadata]:
        """The step in the names of this job, as this rank sees it; and its metadata.

        Raises `StateRefused` for state of another program that this job would not load.
        """
        job, group = self._job, self._job.group
        outlines, whole = group.from_all_keeping(lambda: self._metadata(chosen, opened))
        if not is_of_another_program(whole):
            return StepView(*seen_by(whole, group.rank), whole), whole
        names = job.options.names

        def moved() -> Move:
            beside = read_files_beside(opened, group.rank)
            return Move(whole, outlines, job.parts, job.position, names, beside)

        move = group.on_all(moved)
        read = group.on_all(lambda: read_into(move.request(), group, opened, whole))
        return group.on_all(lambda: move.view(read, chosen, job.options)), whole

    def _metadata(self, chosen: Report, opened: OpenStep) -> tuple[ParameterNames, Metadata]:
        """The metadata of the step, and for that of another program the names of this job."""
        try:
            whole = saved_metadata(chosen, opened)
        except PathNotFound as error:  # removed since rank 0 inspected it
            raise LoadFailed(error.message) from error
        if not is_of_another_program(whole):
            return ParameterNames(frozenset(), ()), whole
        return ParameterNames.of(sharded(self._job.parts, ("model", "optimizer"))), whole

    def _restore(
        self, chosen: Report, wanted: LoadTarget, differences: Differences
    ) -> tuple[SavedProgress, Inventory]:
        job = self._job
        saved = progress_of(wanted.state, chosen.number or 0)
        inventory, *others = job.group.from_all(
            lambda: Restore(wanted, differences, saved, job).run(chosen.url)
        )
        for other in others:
            inventory.add(other)
        return saved, inventory

    # Taking the root over

    def _record_start(self, attempt: RankAttempt, restored: Restored) -> None:
        group = self._job.group
        attempt.cluster = cluster_context().placed(group.rank, group.size)
        started = StartedLine(
            token=attempt.token.number,
            resume_from=str(self._resume_from),
            world_size=group.size,
            cluster=attempt.cluster,
            supervised=os.environ.get(ATTEMPT),
        )
        attempt.ledger.add(started)
        for over in restored.not_loaded:
            line = FailedLine(step=over.step, reason=redacted(over.reason), phase="loading")
            attempt.ledger.add(line)

    def _check_after(
        self, attempt: RankAttempt, restored: Restored
    ) -> tuple[PassedOver, ...] | None:
        """None if the decision still holds, now that no other attempt writes to the root.

        It must be repeated if the loaded step is gone, if the earlier attempt saved before
        its root was taken over, or if a step was marked or is rejected now. Returns the
        rejected steps that could not be marked; they are skipped then.
        """
        job = self._job
        # Read again: the earlier attempt may have failed or ended since.
        attempts = read_failures(job.store)
        held = HeldRoot(job.store, attempt.token)
        rejected: list[tuple[Report, bool]] = []
        for url, store in job.stores.items():
            with suppress(*job.tolerated(url)):
                rejected += reject_proven(held, store, attempts)
        if rejected:
            why = (
                "two attempts that resumed from it failed in the same way, and its root is not "
                "writable"
            )
            verdict = Verdict.REJECTED
            reports = [
                replace(report, verdict=verdict, exit_code=verdict.exit_code)
                for report, is_marked in rejected
                if not is_marked
            ]
            return tuple(PassedOver(report, why, NoStepReason.REJECTED) for report in reports)
        chosen = restored.decision.chosen
        if changed(chosen, job.selection) is not None:
            return ()
        now = [branch.states for branch in abandoned_branches(job, chosen)]
        return None if now == [branch.states for branch in restored.branches] else ()

    def _complete(
        self, attempt: RankAttempt, restored: Restored, previous: str | None
    ) -> tuple[dict[str, Any], str]:
        """Supersede the abandoned steps, and write and print the report; on rank 0 only.

        Returns the report, and its address.
        """
        job, chosen = self._job, restored.decision.chosen
        check_token(job.store, attempt.token)
        # Otherwise newer steps would be superseded in favour of one that is gone, and no
        # step would be left to resume from.
        difference = changed(chosen, job.selection)
        if chosen is not None and difference is not None:
            raise StorageUnavailable(
                f"{chosen.url} was removed or overwritten while it was loaded: {difference}; no "
                "step was marked",
                next_command=command_line("pick", *job.selection.roots.words),
            )
        held = HeldRoot(job.store, attempt.token)
        superseded, warnings = supersede_all(job, held, chosen, restored.branches)
        report = resume_document(job, restored) | {
            "attempt": attempt.token.attempt,
            "superseded": superseded,
            "warnings": warnings,
            "previous_attempt": previous,
            "cluster": None if attempt.cluster is None else attempt.cluster.document(),
        }
        path = put_report(job.store, attempt.token.attempt, report)
        # The sentinel before the ledger, which also names the step.
        begin_run([job.stores[url] for url in job.selection.roots.mandatory], report["step"])
        # The report and the sentinel already name the step, so no reader needs this line before
        # the first step; a failure is written behind it, by the same thread.
        digests = {} if chosen is None else dict(chosen.digests)
        load_s = round(clock_s() - self._began_s, 3)
        line = ResumedLine(step=report["step"], metadata=digests, load_s=load_s)
        attempt.ledger.add_later(line)
        self._print(report, restored)
        return report, path

    # Replaying

    def _replay_before(self, n_steps: int) -> int:
        """The upper bound for a replay's step, so that the run has all of its steps."""
        selection = self._job.selection
        newest, _ = decide("auto", selection)
        if newest.chosen is None:
            raise NothingToResume(
                f"{self._job.root} contains no complete step, so no steps can be replayed",
                exit_code=11,
                next_command=command_line("scan", *selection.roots.words),
            )
        before = newest.step - n_steps + 1
        try:
            decide("auto", selection.older_than(before))
        except NothingToResume as error:
            if error.exit_code != 11:
                raise
            raise NothingToResume(
                f"{self._job.root}: no usable step lies {n_steps} or more steps before step "
                f"{newest.step}, the newest; request fewer, or keep more steps",
                exit_code=11,
                next_command=error.next_command,
            ) from error
        return before

    def _report_replay(self, restored: Restored, n_steps: int) -> dict[str, Any]:
        """Print how the replay begins; on rank 0 only. Its report is returned, not stored."""
        job = self._job
        cluster = cluster_context().placed(job.group.rank, job.group.size)
        own = {"attempt": new_attempt(), "cluster": cluster.document()}
        report = resume_document(job, restored) | own
        self._print(report, restored)
        step = restored.saved.step
        job.tell(
            f"replay: steps {step + 1} to {step + n_steps} are trained again; nothing is saved, "
            f"marked or recorded in {job.root}"
        )
        return report

    def _print(self, report: dict[str, Any], restored: Restored) -> None:
        for line in resume_lines(report, restored):
            self._job.tell(line)


def _start(restored: Restored, report: Mapping[str, Any], path: str | None) -> Start:
    return Start(
        step=restored.saved.step,
        tokens=restored.saved.tokens or 0,
        samples=restored.saved.samples or 0,
        path=report["path"],
        fell_back=report["fell_back"],
        rejected=restored.decision.passed_over,
        report=report,
        report_path=path,
        drift=tuple(Drift(**each) for each in report["drift"]),
    )
