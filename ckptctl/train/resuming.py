"""Resume a job from its root: decide, load, restore, take over.

In one order, on all ranks: look whether the root may be written to, decide, prove, load,
restore; then take the root over, reject what earlier attempts prove bad, and go back to
the decision where the root has changed meanwhile; last, mark what is superseded and write
the report. The root is taken over by a job that has shown that it can resume: one that
cannot must not end another that trains. What each of these does is a module of its own.

A replay goes the same way and writes nothing: it takes no root over, and leaves no mark.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from ckptctl.distributed.launcher import cluster_context
from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import (
    LoadFailed,
    NothingToResume,
    PathNotFound,
    StorageError,
    StorageUnavailable,
    UsageError,
)
from ckptctl.findings import Report
from ckptctl.resharding.advising import Advice, advise
from ckptctl.selection.branches import put_resume
from ckptctl.selection.fencing import check_token, take_token
from ckptctl.selection.history import ATTEMPTS_FOLDER, begin_run
from ckptctl.selection.roots import list_root
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import base_name, join_url, open_store, parent_url
from ckptctl.train.agreement import (
    Decision,
    Looking,
    Rejected,
    changed,
    check_roots,
    decide,
    prove_content,
    prove_seen,
    too_many,
    wanted_step,
)
from ckptctl.train.attempt import Attempt
from ckptctl.train.evidence import (
    Branch,
    Held,
    newer_steps,
    reject_proven,
    supersede,
)
from ckptctl.train.ledger import (
    Ledger,
    new_attempt,
    put_report,
    read_attempts,
    utc_now,
)
from ckptctl.train.loading import load_into, saved_metadata
from ckptctl.train.reporting import Tell, lines_of
from ckptctl.train.restoring import Inventory, Policies, Progress, progress_of, restore
from ckptctl.train.state import Parts, Place, template


@dataclass(frozen=True, slots=True)
class Start:
    """Where a job goes on: after `step`, which is 0 for a fresh run.

    `path` is the step that was loaded, None for a fresh run. `tokens` and `samples` are
    what the run had consumed, 0 where the step does not say. `rejected` are the newer steps
    that were not taken. `report` is the document that lies at `report_path`. In a replay
    `last` is the last step to train, and the report lies nowhere.
    """

    step: int
    tokens: int
    samples: int
    path: str | None
    fell_back: bool
    rejected: tuple[Rejected, ...]
    report: Mapping[str, Any]
    report_path: str | None
    last: int | None = None

    @property
    def fresh(self) -> bool:
        """The run begins here."""
        return self.path is None


@dataclass(frozen=True, slots=True)
class Job:
    """What a resume works with: the roots, the ranks, what they hold, and the caller's policies.

    `root` is the one that is held and saved to, `stores` are all roots by address, in
    order of preference. `later` opens `root` with one short try, for what is written beside
    training.
    """

    root: str
    store: Store
    group: ProcessGroup
    place: Place
    parts: Parts
    policies: Policies
    looking: Looking
    tell: Tell
    later: Store
    stores: Mapping[str, Store]


@dataclass(frozen=True, slots=True)
class Restored:
    """What was decided, and is now in the objects of the script.

    `newer` are the steps that come before it, on rank 0, as they were when it was decided.
    """

    decision: Decision
    rejected: tuple[Rejected, ...]
    saved: Progress
    inventory: Inventory
    newer: tuple[Branch, ...] = ()


def resume_job(job: Job, resume_from: str | int | None) -> tuple[Attempt, Start]:
    """Load, restore, take the root over, and write down how it went; see `Checkpointer.resume`."""
    first = job.group.from_first
    first(lambda: _check_before(job, resume_from))
    history = first(lambda: read_attempts(job.store))
    done = _resumed(job, resume_from)
    token = first(lambda: take_token(job.store, new_attempt))
    attempt = Attempt(token, Ledger(job.store, token.attempt, job.group.rank, job.later))
    anew = first(lambda: _started(job, attempt, resume_from, done))
    if anew is not None:
        done = _resumed(job, resume_from, anew)
    report = first(lambda: _reported(job, attempt, done, history[-1][0] if history else None))
    attempt.resumed_from = done.decision.step
    attempt.step = attempt.saved = done.saved.step
    path = join_url(job.store.url, f"{ATTEMPTS_FOLDER}/{token.attempt}.resume.json")
    return attempt, _start(done.saved, done.rejected, report, path)


def _resumed(job: Job, resume_from: str | int | None, bad: tuple[Rejected, ...] = ()) -> Restored:
    """Decide, load and restore; nothing is written into the root. `bad` steps are passed over."""
    decision, loaded, rejected, newer = _loaded(job, resume_from, bad, with_newer=True)
    saved, inventory = _restored(job, decision, loaded)
    return Restored(decision, rejected, saved, inventory, newer)


def replay_job(job: Job, resume_from: str | int | None, n_steps: int) -> Start:
    """Load and restore so that `n_steps` steps are trained again, and write nothing down.

    `auto` is the newest usable step that lies so many steps before the newest one. Raises
    `NothingToResume` where there is none, else as `resume_job` does.
    """
    first = job.group.from_first
    if str(resume_from if resume_from is not None else "none").strip() in ("none", ""):
        raise UsageError("a replay begins at a step; it goes with resume_from 'auto' or a step")
    if str(resume_from).strip() == "auto":
        before = first(lambda: _replay_before(job, n_steps))
        job = replace(job, looking=job.looking.older_than(before))
    decision, loaded, rejected, _ = _loaded(job, resume_from)
    saved, inventory = _restored(job, decision, loaded)
    report = first(lambda: _replay_told(job, decision, saved, inventory, rejected, n_steps))
    return replace(_start(saved, rejected, report, None), last=saved.step + n_steps)


def _replay_before(job: Job, n_steps: int) -> int:
    """What a replay's step must lie before, so that the run has trained all of its steps."""
    newest = decide("auto", job.looking).step
    if newest is None:
        raise NothingToResume(
            f"{job.root} holds no whole step, so there is nothing to train again",
            exit_code=11,
            next_command=f"ckptctl scan {job.looking.roots.words}",
        )
    before = newest - n_steps + 1
    try:
        decide("auto", job.looking.older_than(before))
    except NothingToResume as error:
        if error.exit_code != 11:
            raise
        raise NothingToResume(
            f"{job.root}: step {newest} is the newest, and no usable step lies {n_steps} steps or "
            "more before it: ask for fewer, or keep more steps",
            exit_code=11,
            next_command=error.next_command,
        ) from error
    return before


def _start(
    saved: Progress, rejected: tuple[Rejected, ...], report: Mapping[str, Any], path: str | None
) -> Start:
    return Start(
        step=saved.step,
        tokens=saved.tokens or 0,
        samples=saved.samples or 0,
        path=report["path"],
        fell_back=report["fell_back"],
        rejected=rejected,
        report=report,
        report_path=path,
    )


def _check_before(job: Job, resume_from: str | int | None) -> None:
    wanted = wanted_step(resume_from, job.looking.roots)
    steps = check_roots(job.looking)
    if wanted == "none" and steps:
        urls = job.looking.roots.urls
        raise UsageError(
            f"{', '.join(urls)} {'holds' if len(urls) == 1 else 'hold'} {len(steps)} steps, "
            f"{steps[0].name} the newest; a run from the beginning needs a root of its own",
            next_command=f"ckptctl scan {job.looking.roots.words}",
        )


def _started(
    job: Job, attempt: Attempt, resume_from: str | int | None, done: Restored
) -> tuple[Rejected, ...] | None:
    """Begin the record of this attempt; None where the decision stands.

    The step is decided anew where the one that was loaded is gone, where the attempt before
    has saved on until the root was taken over, where somebody has marked a step, and where a
    step is rejected now. The steps are returned that are to be passed over then, since their
    root cannot be marked.
    """
    cluster = cluster_context().placed(job.group.rank, job.group.size)
    attempt.cluster = cluster.document()
    attempt.ledger.add(
        "started",
        token=attempt.token.number,
        resume_from=str(resume_from),
        world_size=job.group.size,
        cluster=attempt.cluster,
    )
    for one in done.rejected:
        if one.not_loaded:
            attempt.ledger.add("failed", step=one.step, reason=one.reason, phase="loading")
    # Read again: the attempt before may have failed or ended since.
    attempts = read_attempts(job.store)
    held = Held(job.store, attempt.token)
    rejected: list[tuple[Report, bool]] = []
    for url, store in job.stores.items():
        with suppress(*_tolerated(job, url)):
            rejected += reject_proven(held, store, attempts)
    if rejected:
        why = "two attempts that resumed from it failed alike, and its root cannot be written to"
        unmarked = [report for report, marked in rejected if not marked]
        return tuple(Rejected(one.number, one.url, "rejected", why) for one in unmarked)
    if changed(done.decision, job.looking) is not None:
        return ()
    now = [branch.states for branch in _abandoned(job, done.decision)]
    return None if now == [branch.states for branch in done.newer] else ()


def _tolerated(job: Job, url: str) -> tuple[type[StorageError], ...]:
    """The errors of a root that do not stop a resume: all of an optional one."""
    return (StorageError,) if url in job.looking.roots.optional else ()


def _abandoned(job: Job, decision: Decision) -> tuple[Branch, ...]:
    """The steps that come before the one decided on, in each root."""
    found = []
    preferred = True
    path = decision.path
    for url, store in job.stores.items():
        preferred = preferred and (path is None or join_url(url, base_name(path)) != path)
        try:
            if url in job.looking.roots.optional and not list_root(store).exists:
                found.append(Branch(store, (), f"{url} does not exist"))
                continue
            newer = newer_steps(store, decision.step, path, decision.digests, preferred=preferred)
        except _tolerated(job, url) as error:
            found.append(Branch(store, (), error.message))
        else:
            found.append(Branch(store, newer))
    return tuple(found)


def _superseded(job: Job, held: Held, done: Restored) -> tuple[list[int], list[str]]:
    """Record the resume, and rule the abandoned branch out in each root; numbers and warnings.

    The record comes first: it rules out the steps of the other roots for whoever picks over
    all of them, where a mark cannot be written, and where this process is killed before
    the last mark.
    """
    decision, name = done.decision, held.token.attempt
    if len(job.stores) > 1:
        others = (branch for branch in done.newer if branch.store is not job.store)
        left = [one.report for branch in others for one in branch.steps]
        put_resume(job.store, name, decision.step, decision.digests, left)
    numbers: set[int] = set()
    warnings = []
    for branch in done.newer:
        why = branch.warning
        try:
            numbers.update(supersede(held, branch, decision.step))
        except StorageError as error:
            if branch.store is job.store:
                raise
            why = error.message
        if why is not None:
            warnings.append(
                f"{branch.store.url}: steps that this resume abandons were not marked there "
                f"({why}); {job.root} records them, and pick over these roots passes over them"
            )
    return sorted(numbers), warnings


def _loaded(
    job: Job,
    resume_from: str | int | None,
    bad: tuple[Rejected, ...] = (),
    *,
    with_newer: bool = False,
) -> tuple[Decision, dict[str, Any], tuple[Rejected, ...], tuple[Branch, ...]]:
    """Decide and load until a step loads on every rank; what it holds, and what did not."""
    failed = {one.step: one for one in bad if one.step is not None}
    newer: tuple[Branch, ...] = ()

    def decided() -> Decision:
        nonlocal newer
        found = decide(resume_from, job.looking, skip=tuple(failed))
        newer = _abandoned(job, found) if with_newer else ()
        return found

    while True:
        decision = job.group.from_first(decided)
        if decision.path is None or decision.step is None:
            return decision, {}, decision.rejected, newer
        prove_seen(decision, job.group, job.looking)
        error = prove_content(decision, job.group, job.looking)
        loaded: dict[str, Any] = {}
        if error is None:
            error, loaded = _try_to_load(job, decision)
        if error is None:
            return decision, loaded, (*failed.values(), *decision.rejected), newer
        step = decision.step
        failed[step] = Rejected(step, decision.path, "corrupt", error.message, not_loaded=True)
        if len(failed) - len(bad) > job.looking.policy.max_fallback:
            raise too_many(failed, job.looking.roots)


def _try_to_load(job: Job, decision: Decision) -> tuple[LoadFailed | None, dict[str, Any]]:
    """Load on all ranks; the failure that all agree on, or what was loaded here."""
    made: dict[str, Any] = {}

    def prepare() -> None:
        try:
            saved = saved_metadata(decision, job.looking)
        except PathNotFound as error:  # somebody removed it since rank 0 looked
            raise LoadFailed(error.message) from error
        made.update(template(job.parts, job.place, saved))

    try:
        job.group.from_all(prepare)
        job.group.from_all(lambda: load_into(made, decision, job.group, job.looking))
    except LoadFailed as error:
        return error, {}
    return None, made


def _restored(job: Job, decision: Decision, loaded: dict[str, Any]) -> tuple[Progress, Inventory]:
    if decision.step is None:
        return Progress(0), Inventory()
    saved = progress_of(loaded, decision.step)
    told = job.group.from_all(lambda: restore(loaded, job.parts, job.place, saved, job.policies))
    inventory = told[0]
    for other in told[1:]:
        for mine, theirs in zip(inventory.lists, other.lists, strict=True):
            mine += [each for each in theirs if each not in mine]
    return saved, inventory


def _reported(job: Job, attempt: Attempt, done: Restored, earlier: str | None) -> dict[str, Any]:
    """Write down and tell how the resume went; on rank 0 alone. Raises `Fenced`."""
    name = attempt.token.attempt
    decision, saved, inventory, rejected = (
        *(done.decision, done.saved),
        *(done.inventory, done.rejected),
    )
    check_token(job.store, attempt.token)
    # Ruled out for a step that is gone, the newer ones would leave none to resume from.
    wrong = changed(decision, job.looking)
    if wrong is not None:
        raise StorageUnavailable(
            f"{decision.path} was removed or saved anew while it was loaded: {wrong}; no step "
            "was marked",
            next_command=f"ckptctl pick {job.looking.roots.words}",
        )
    superseded, warnings = _superseded(job, Held(job.store, attempt.token), done)
    report = _document(job, decision, saved, inventory, rejected) | {
        "attempt": name,
        "superseded": superseded,
        "warnings": warnings,
        "previous_attempt": earlier,
        "cluster": attempt.cluster,
    }
    put_report(job.store, name, report)
    # The ledger names the step too.
    mandatory = [job.stores[url] for url in job.looking.roots.mandatory]
    begin_run(mandatory, decision.step)
    attempt.ledger.add(
        "resumed",
        step=decision.step,
        path=decision.path,
        metadata=dict(decision.digests),
        tokens=saved.tokens,
        rejected=[one.step for one in rejected],
        previous=earlier,
    )
    _tell(job, decision, report, inventory)
    return report


def _replay_told(
    job: Job,
    decision: Decision,
    saved: Progress,
    inventory: Inventory,
    rejected: tuple[Rejected, ...],
    n_steps: int,
) -> dict[str, Any]:
    """Tell how the replay begins; on rank 0 alone. Its report is handed back and not kept."""
    cluster = cluster_context().placed(job.group.rank, job.group.size)
    report = _document(job, decision, saved, inventory, rejected) | {
        "attempt": new_attempt(),
        "cluster": cluster.document(),
    }
    _tell(job, decision, report, inventory)
    job.tell(
        f"replay: steps {saved.step + 1} to {saved.step + n_steps} are trained again; "
        f"nothing is saved, marked or recorded in {job.root}"
    )
    return report


def _document(
    job: Job,
    decision: Decision,
    saved: Progress,
    inventory: Inventory,
    rejected: tuple[Rejected, ...],
) -> dict[str, Any]:
    """The report (schema `ckptctl.resume/1`), but for what the attempt fills in."""
    advice = _advice(job, decision, saved)
    return {
        "schema": "ckptctl.resume/1",
        "attempt": None,
        "at": utc_now(),
        "root": job.root,
        "step": decision.step,
        "path": decision.path,
        "tokens": saved.tokens,
        "fell_back": decision.step is not None and (decision.fell_back or bool(rejected)),
        "rejected": [
            {"step": one.step, "path": one.path, "verdict": one.verdict, "reason": one.reason}
            for one in rejected
        ],
        "superseded": [],
        "warnings": [],
        "world_size": job.group.size,
        "saved_world_size": saved.world_size,
        "resharding": None if advice is None else advice.document(),
        "previous_attempt": None,
        "state": inventory.document(),
        "cluster": None,
    }


def _advice(job: Job, decision: Decision, saved: Progress) -> Advice | None:
    """What a load of this step reads, where the ranks are not those that saved it."""
    if decision.path is None or saved.world_size in (None, job.group.size):
        return None
    with open_store(parent_url(decision.path), job.looking.storage) as store:
        return advise(store, base_name(decision.path), job.group.size)


def _tell(job: Job, decision: Decision, report: dict[str, Any], inventory: Inventory) -> None:
    age_s = None if decision.written_s is None else time.time() - decision.written_s
    for line in lines_of(report, inventory.notes, age_s):
        job.tell(line)
