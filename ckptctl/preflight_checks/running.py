"""Check that a job can start here and now, and choose its step.

Everything that can be known before a GPU is warm: `pick`'s choice, the storage as each
node sees it, ranks against those that saved. Where several processes were started (srun,
torchrun), rank 0 chooses, every process inspects the storage, and all return the same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import chain
from typing import Unpack

from ckptctl.distributed.launcher import Cluster, cluster_context
from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import (
    LogWithoutLoss,
    OptionError,
    OwnFileUnreadable,
    StorageError,
)
from ckptctl.findings import EXIT_NONE_USABLE, Report, Severity
from ckptctl.formats.frameworks.layouts import shard_rank
from ckptctl.formats.own.contract import Drift, Terms, drift, stated_by_one, terms_of
from ckptctl.formats.own.files import ATTEMPTS_FOLDER
from ckptctl.formats.own.ledger import ResumeFields, read_report, report_paths
from ckptctl.formatting import command_line, counted, percent, some_of, utc
from ckptctl.inspection.inspecting import train_step
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Level
from ckptctl.options import PickKeywords, PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.preflight_checks.nodes import (
    Launcher,
    NodeReport,
    StorageProbe,
    Written,
    arguments,
    check_nodes,
    check_probe,
    facts_of_this_node,
    holds,
    step_in,
)
from ckptctl.preflight_checks.results import Capacity, Check, CheckOutcome, NodeFacts, Preflight
from ckptctl.selection.choosing import Answer, search
from ckptctl.selection.picking import Pick, answer_of, check_create, scan
from ckptctl.selection.targets import Roots, roots_in
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import open_store

_DEEP_STEPS = 20
_SHOWN_TERMS = 8
"""How many terms of a contract a message names."""

_Nodes = Mapping[str, tuple[NodeFacts, ...]]
"""What each process found in each root, by the address of the root."""


def preflight(
    *roots: str,
    optional_roots: Collection[str] = (),
    allow_fresh: bool = False,
    create: bool = False,
    room_for: int = 1,
    probe_storage: bool = False,
    logs: Sequence[str] = (),
    contract: Mapping[str, object] | None = None,
    accept_drift: Collection[str] = (),
    launchers: Sequence[Launcher] = (),
    group: ProcessGroup | None = None,
    policy: PickPolicy = PickPolicy(),
    requirements: Requirements = Requirements(),
    storage: StorageOptions = StorageOptions(),
    **keywords: Unpack[PickKeywords],
) -> Preflight:
    """Check everything that a job needs from its storage before it starts.

    Several roots, and `optional_roots`, are those of `pick`. Each mandatory one is inspected
    on every node, and the one that holds the chosen step; saves go into the first, so that is
    where there must be room and what a probe writes to.

    The required `world_size` is how many ranks will load; None takes that of torchrun or
    SLURM. There must be room for `room_for` more steps as large as the chosen one.
    `probe_storage` writes up to 64 MiB, reads them back and compares, and searches the newest 20
    steps for what damaged ones share. `logs` are those of the job that died: the work behind the
    chosen step is counted. `contract` is what the job states of itself, and is compared with
    that of the chosen step; a term that differs and is not in `accept_drift` stops the job.
    `launchers` inspect the storage from other nodes, and the results are compared. `group` are
    the processes of the job, each of which must call this. The rest is `pick`'s; each field of
    the three options objects is a keyword of this function, too.

    The exit code is that of the first check that failed, else `pick`'s; only with 0 is
    there a path. Raises `UsageError`, and `StorageError` where the root cannot be listed.

    Cost: `pick`, and on each process one listing, the chosen step's metadata, 16 MiB of one
    shard file; on rank 0 the metadata once more where the ranks are not those that saved.
    """
    group = group or ProcessGroup()
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
    if launchers and group.size > 1:
        raise OptionError("--launcher", "is for one process: this is started on every node already")
    if room_for < 0:
        raise OptionError("--room-for", f"is {room_for}; it must be 0 or more")
    if accept_drift and contract is None:
        raise OptionError("--accept-drift", "needs --contract FILE, with which steps are compared")
    check_create(allow_fresh=allow_fresh, create=create)
    named = roots_in(roots, optional_roots)
    launched = ranks_in(cluster_context()) if requirements.world_size is None else None
    if launched is not None:
        requirements = replace(requirements, world_size=launched[0])

    def choose() -> Pick:
        with ExitStack() as stack:
            done = search(stack, named, policy, requirements, storage)
            return answer_of(
                done, requirements, "preflight", allow_fresh=allow_fresh, create=create
            )

    picked = group.from_first(choose)
    with ExitStack() as stack:
        stores = _open_roots(stack, named, picked, storage)
        job = _PreflightJob(
            roots=named,
            picked=picked,
            stores=stores,
            requirements=requirements,
            storage=storage,
            room_for=room_for,
            probe_storage=probe_storage,
            logs=logs,
            contract=None if contract is None else terms_of(contract),
            accept_drift=accept_drift,
            launchers=launchers,
        )
        nodes, probe = job.inspect_storage(group)
        source = f" ({launched[1]})" if launched is not None else ""
        checks = group.from_first(lambda: job.checks(nodes, probe, source))
    return _answer(job, nodes, checks)


def _open_roots(
    stack: ExitStack, roots: Roots, picked: Pick, storage: StorageOptions
) -> dict[str, Store]:
    opened = {
        url: stack.enter_context(open_store(url, storage))
        for url in dict.fromkeys((roots.first, *roots.urls))
    }
    step = picked.chosen.url if picked.chosen else ""
    return {
        url: one for url, one in opened.items() if url not in roots.optional or holds(one, step)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _PreflightJob:
    """The job that is to start: its roots, the chosen step, and what the caller wants checked.

    Steps are saved into the first root; the chosen one may be in another.
    """

    roots: Roots
    picked: Pick
    stores: Mapping[str, Store]
    requirements: Requirements
    storage: StorageOptions
    room_for: int
    probe_storage: bool
    logs: Sequence[str]
    contract: Terms | None
    accept_drift: Collection[str]
    launchers: Sequence[Launcher]

    def inspect_storage(self, group: ProcessGroup) -> tuple[_Nodes, Check | None]:
        """What every process sees of each root, and what a probe came to; the same on all."""
        step = self.picked.chosen.url if self.picked.chosen else ""
        nodes = {
            url: group.gather(facts_of_this_node(store, step_in(store, step), group.rank))
            for url, store in self.stores.items()
        }
        probe: Check | None = None
        reports: tuple[NodeReport, ...] = ()
        if self.probe_storage:
            probe, reports = self._probe(group)
        elif self.launchers:
            reports = self._launch(None)
        for place, url in enumerate(self.stores):
            nodes[url] += tuple(report.roots[place] for report in reports)
        return nodes, probe

    def _launch(self, probe: Written | None) -> tuple[NodeReport, ...]:
        step = self.picked.chosen.url if self.picked.chosen else ""
        words = arguments(list(self.stores), step, probe, self.storage)
        variables, n_roots = self.storage.variables(), len(self.stores)
        launched = (each.reports(words, variables, n_roots) for each in self.launchers)
        return tuple(chain.from_iterable(launched))

    def _probe(self, group: ProcessGroup) -> tuple[Check, tuple[NodeReport, ...]]:
        """Every process writes, reads its own files, and those of the next process.

        What launchers start elsewhere reads the files of this one, which reads theirs.
        """
        with StorageProbe(self.stores[self.roots.first]) as probe:
            group.gather(None)  # each has seen what was there before anyone wrote
            written = group.gather(probe.write())
            compared = [probe.compare(written[group.rank])]
            if group.size > 1:
                compared.append(probe.compare(written[(group.rank + 1) % group.size]))
            # Nobody removes what another still reads.
            gathered = [one for each in group.gather(tuple(compared)) for one in each]
            reports = self._launch(written[group.rank])
            for report in reports:
                gathered += [report.compared] if report.compared else []
                if report.written is not None:
                    written += (report.written,)
                    gathered.append(probe.compare(report.written))
                    probe.remove(report.written)
        return check_probe(written, gathered), reports

    def checks(self, nodes: _Nodes, probe: Check | None, ranks_from: str) -> tuple[Check, ...]:
        """Every check; `ranks_from` is where the number of ranks is from, for a message."""
        chosen, n_ranks = self.picked.chosen, self.requirements.world_size
        store = self.stores[self.roots.first]
        room = self.room_for * (chosen.n_bytes if chosen else 0) if self.room_for else None
        reports = self._reports()
        scan_again = command_line("scan", *self.roots.words, "--level", "content")
        # What no step holds is a warning, and stops nothing.
        lacks = _CORRECT_RESUME.intersection(self.picked.absent)
        outcome = CheckOutcome.WARNING if lacks else CheckOutcome.OK
        checks = [
            _check_pick(self.picked),
            Check("state", outcome, self.picked.about_state) if chosen else None,
            *_check_roots(self.roots, nodes, room),
            probe,
            check_damage(store, reports, scan_again),
            check_writers(store, chosen) if self.requirements.saved_world_size is None else None,
            check_capacity(n_ranks, ranks_from, chosen),
            _check_recomputed(self.logs, chosen, self.storage) if self.logs else None,
            self._check_contract(chosen),
        ]
        return tuple(check for check in checks if check is not None)

    def _check_contract(self, chosen: Report | None) -> Check | None:
        """Whether the job is the one that saved the chosen step, as far as both state it."""
        if self.contract is None or chosen is None:
            return None
        store, name = next(
            (store, name)
            for store in self.stores.values()
            if (name := step_in(store, chosen.url)) is not None
        )
        try:
            saved = OpenStep(store, name).read_contract()
        except OwnFileUnreadable as error:
            words = f"{error.message}; without --contract nothing is compared"
            return Check("contract", CheckOutcome.FAILED, words, EXIT_NONE_USABLE)
        if saved is None:
            words = f"{name} has no contract, so nothing is compared"
            return Check("contract", CheckOutcome.WARNING, words)
        found = drift(saved, self.contract)
        refused = [each for each in found if each.term not in self.accept_drift]
        if refused:
            words = f"the job differs from the step: {_listed(refused)}"
            accept = [f"--accept-drift={term}" for term in sorted({each.term for each in found})]
            again = command_line("preflight", *self.roots.words, *accept)
            return Check("contract", CheckOutcome.FAILED, words, EXIT_NONE_USABLE, again)
        both = {*saved} & {*self.contract}
        alone = stated_by_one(saved, self.contract)
        unknown = sorted({*self.accept_drift} - {*saved} - {*self.contract})
        notes = [
            f"accepted: {_listed(found)}" if found else "",
            alone,
            f"no such term: {some_of(unknown)}" if unknown else "",
        ]
        same = f"as the step: {counted(len(both) - len(found), 'term')}"
        words = "; ".join(filter(None, [same, *notes]))
        return Check("contract", CheckOutcome.WARNING if any(notes) else CheckOutcome.OK, words)

    def _reports(self) -> tuple[Report, ...]:
        """The reports of `pick`, and with a probe those of the newest steps besides."""
        over = tuple(one.report for one in self.picked.passed_over)
        reports = over if self.picked.chosen is None else (*over, self.picked.chosen)
        if not (self.probe_storage and reports):
            return reports
        # The policy decides which step is taken, not which ones are damaged.
        deep = scan(
            *self.roots.urls,
            optional_roots=self.roots.optional,
            last=_DEEP_STEPS,
            policy=PickPolicy(level=Level.LISTING),
            requirements=self.requirements,
            storage=self.storage,
        )
        known = {one.url for one in reports}
        return (*reports, *(one for one in deep.reports if one.url not in known))


def _listed(found: Sequence[Drift]) -> str:
    more = [f"{len(found) - _SHOWN_TERMS} more"] if len(found) > _SHOWN_TERMS else []
    return "; ".join([*map(str, found[:_SHOWN_TERMS]), *more])


def _check_roots(named: Roots, nodes: _Nodes, room: int | None) -> Iterator[Check]:
    """What all processes see of each root, and whether the next saves fit into the first."""
    for url, facts in nodes.items():
        if url in named.optional:  # a local disk holds other steps on each node
            facts = tuple(replace(one, listing="") for one in facts)
        for check in check_nodes(url, facts, room if url == named.first else None):
            several = len(nodes) > 1
            yield replace(check, message=f"{url}: {check.message}") if several else check


def _check_pick(picked: Pick) -> Check:
    outcome = CheckOutcome.OK
    absent = [one for one in picked.findings if one.code == "root.unavailable"]
    if picked.answer is Answer.FELL_BACK or absent:
        outcome = CheckOutcome.WARNING
    if picked.exit_code:
        outcome = CheckOutcome.FAILED
    inspected = f" (checked: {picked.level.value})" if picked.level else ""
    message = "; ".join([picked.message + inspected, *(one.message for one in absent)])
    return Check("step", outcome, message, picked.exit_code, picked.next_command)


_CORRECT_RESUME = {"model", "optimizer", "rng", "dataloader"}


def _check_recomputed(
    logs: Sequence[str], chosen: Report | None, storage: StorageOptions
) -> Check | None:
    """The work that is done again from the chosen step, by the logs of the job that died."""
    if chosen is None:
        return None
    step = train_step(chosen)
    if step is None:
        words = "the training step of the chosen step is not known: nothing can be counted"
        return Check("recompute", CheckOutcome.WARNING, words)
    from ckptctl.logs.reading import read_logs
    from ckptctl.loss.resumes import recomputed_from
    from ckptctl.loss.segments import split

    try:
        parts = split(read_logs(logs, storage=storage), around=step)
    except LogWithoutLoss as error:
        return Check("recompute", CheckOutcome.WARNING, error.message)
    again = recomputed_from(step, parts.segments[-1].rows) if parts.segments else None
    if again is None:
        return Check(
            "recompute", CheckOutcome.WARNING, "the logs hold no step: nothing can be counted"
        )
    if not again.steps and again.to_step < step:
        words = f"the logs end at step {again.to_step:,}, before the step that is loaded"
        return Check("recompute", CheckOutcome.WARNING, words)
    return Check("recompute", CheckOutcome.OK, f"computed again: {again.message}")


def _answer(job: _PreflightJob, nodes: _Nodes, checks: tuple[Check, ...]) -> Preflight:
    # A choice from a storage that nodes see differently proves nothing: that comes first.
    failed = [one for one in checks if one.outcome is CheckOutcome.FAILED]
    worst = next((one for one in failed if one.name != "step"), failed[0] if failed else None)
    picked, n_ranks = job.picked, job.requirements.world_size
    return Preflight(
        root=job.roots.first,
        checks=checks,
        nodes=tuple(one for each in nodes.values() for one in each),
        pick=picked,
        message=picked.message if worst is None else worst.message,
        exit_code=0 if worst is None else worst.exit_code,
        next_command=None if worst is None else worst.next_command,
        capacity=capacity_of(n_ranks, picked.chosen),
    )


# Ranks, and what damaged steps have in common. One damaged step is an accident. Two or more that
# the same rank, node or hour wrote point at something that will damage the next one.


def ranks_in(cluster: Cluster) -> tuple[int, str] | None:
    """How many ranks the job will have by the environment, and its source; None if unknown.

    Processes of torchrun know it. A batch script, and what it starts on each node, know
    the nodes and the GPUs of one: a rank for each GPU.
    """
    if cluster.launcher == "torchrun" and cluster.world_size:
        return cluster.world_size, "torchrun"
    if cluster.nodes and cluster.gpus_per_node:
        source = f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs"
        return cluster.nodes * cluster.gpus_per_node, source
    return None


def capacity_of(world_size: int | None, chosen: Report | None) -> Capacity:
    """Whether there are as many ranks as saved the step, fewer or more."""
    saved = chosen.world_size if chosen else None
    if world_size is None or saved is None:
        return Capacity.UNKNOWN
    if world_size < saved.size:
        return Capacity.SMALLER
    if saved.at_least:
        return Capacity.UNKNOWN
    return Capacity.AS_SAVED if world_size == saved.size else Capacity.LARGER


def check_capacity(world_size: int | None, source: str, chosen: Report | None) -> Check | None:
    """As saved, reshard on load, or wait: what each would mean. None where there is no step."""
    if chosen is None:
        return None
    saved, capacity = chosen.world_size, capacity_of(world_size, chosen)
    if saved is None:
        return Check("capacity", CheckOutcome.OK, "how many ranks saved it is unknown")
    least, more = ("at least ", " or more") if saved.at_least else ("", "")
    if world_size is None:
        words = f"saved by {least}{counted(saved.size, 'rank')}; compare with --world-size N"
        return Check("capacity", CheckOutcome.OK, words)
    ranks = f"{counted(world_size, 'rank')}{source}"
    if capacity is Capacity.AS_SAVED:
        return Check("capacity", CheckOutcome.OK, f"{ranks}, as saved")
    words = f"{ranks}, saved by {saved.size}{more}"
    if capacity is Capacity.UNKNOWN:
        return Check("capacity", CheckOutcome.OK, words)
    words += ": reshard on load"
    lost = [one for one in chosen.findings if one.code == "state.lost"]
    if lost:
        words += f", lose {', '.join(sorted({one.where or one.message for one in lost}))}"
    words += f"; {percent(world_size / saved.size, 0)} of the ranks"
    if world_size < saved.size:
        words += f"; or wait for {least}{saved.size - world_size} more"
    return Check("capacity", CheckOutcome.WARNING, words)


_MOST_RECORDS = 20
_MOST_RANKS = 1 << 20


def check_damage(store: Store, reports: Sequence[Report], next_command: str) -> Check | None:
    """What the damaged ones of `reports` share; None where fewer than two are damaged."""
    damaged = [one for one in reports if one.damaged]
    if len(damaged) < 2:
        return None
    steps = ", ".join(str(one.number) for one in damaged)
    # By the newest resume on record.
    newest = next((record for _, record in _resumes(store) if record is not None), None)
    cluster = (None if newest is None else newest.cluster) or {}
    per_node = cluster.get("local_world_size")
    per_node = per_node if isinstance(per_node, int) and per_node > 0 else None
    shared = _writers(damaged, per_node) + _times(damaged, reports)
    words = f"steps {steps} are damaged: "
    words += "; ".join(shared) if shared else "they have no writer and no time in common"
    return Check("damage", CheckOutcome.WARNING, words, next_command=next_command)


def check_writers(store: Store, chosen: Report | None) -> Check | None:
    """Whether every rank of the attempt that wrote the chosen step left a shard file.

    The attempt is the newest on record that resumed from an older step; its ranks leave a
    file each, since each has random numbers of its own to save. None where no record or a
    seal states how many ranks wrote: a resharded step is sealed with its own number.
    """
    if chosen is None or chosen.number is None or not chosen.ranks:
        return None
    if chosen.world_size is not None and chosen.world_size.source == "seal":
        return None
    for name, record in _resumes(store):
        if record is None:
            # It may be the report of the attempt that wrote the step; an older one is not.
            return Check(
                "writers",
                CheckOutcome.WARNING,
                f"{name} cannot be read, so how many ranks wrote step {chosen.number} is not "
                "known; --saved-world-size N checks that each left a shard file",
                next_command=command_line("show", chosen.url),
            )
        step, wrote = record.step, record.world_size or 0
        if step is not None and step >= chosen.number:
            continue
        there = {rank for _, ranks in chosen.ranks for rank in ranks}
        missing = sorted(set(range(min(wrote, _MOST_RANKS))) - there)
        if not missing:
            return Check(
                "writers", CheckOutcome.OK, f"shard files of all {wrote} ranks that wrote it"
            )
        return Check(
            "writers",
            CheckOutcome.FAILED,
            f"step {chosen.number}: {wrote} ranks wrote it by the record of the resume before it, "
            f"but there is no shard file of rank {some_of(missing, 8)}; --saved-world-size "
            f"{len(there)} states that this is right",
            EXIT_NONE_USABLE,
            command_line("show", chosen.url),
        )
    return None


def _resumes(store: Store) -> Iterator[tuple[str, ResumeFields | None]]:
    """The newest resume reports, newest first, by path; None for one that cannot be read."""
    try:
        paths = report_paths(store)
    except StorageError:
        yield ATTEMPTS_FOLDER, None
        return
    for path in paths[:_MOST_RECORDS]:
        record = None
        with suppress(StorageError, OwnFileUnreadable):
            record = read_report(store, path)
        yield path, record if record is not None and record.world_size is not None else None


def _writers(damaged: Sequence[Report], per_node: int | None) -> list[str]:
    ranks = [_ranks_of(one) for one in damaged]
    if not all(ranks):
        return []
    common = set.intersection(*ranks)
    if common:
        return [f"all have damage in files of rank {', '.join(map(str, sorted(common)))}"]
    if per_node is None:
        return []
    nodes = set.intersection(*({rank // per_node for rank in each} for each in ranks))
    return [
        f"all have damage in files of node {node} (ranks {node * per_node} to "
        f"{(node + 1) * per_node - 1})"
        for node in sorted(nodes)
    ]


def _ranks_of(report: Report) -> set[int]:
    words = [
        word.strip(" :,").rsplit("/", 1)[-1]
        for one in report.with_severity(Severity.FAULT)
        for word in one.where.split(",")
    ]
    return {rank for word in words if (rank := shard_rank(word)) is not None}


def _times(damaged: Sequence[Report], reports: Sequence[Report]) -> list[str]:
    times = [one.written_s for one in damaged if one.written_s is not None]
    if len(times) < len(damaged):
        return []
    first_s, last_s = min(times), max(times)
    if any(report.usable and first_s < (report.written_s or 0.0) < last_s for report in reports):
        return []
    first, last = (f"{utc(at_s)[:16]} UTC" for at_s in (first_s, last_s))
    when = f"at {first}" if first == last else f"between {first} and {last}"
    return [f"all were written {when}, and no good one then"]
