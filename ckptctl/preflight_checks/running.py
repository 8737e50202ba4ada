"""Check that a job can start here and now, and choose its step.

Everything that can be known before a GPU is warm: `pick`'s choice, the storage as each
node sees it, ranks against those that saved, saves against failures. Where several
processes were started (srun, torchrun), rank 0 chooses, every process inspects the storage,
and all return the same answer.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from ckptctl.distributed.launcher import cluster_context
from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import LogWithoutLoss, OptionError
from ckptctl.findings import Report
from ckptctl.formats.frameworks.layouts import train_step_of
from ckptctl.formats.frameworks.parts import parts_of
from ckptctl.formatting import command_line
from ckptctl.goodput.measuring import Measured, measured_in
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Level
from ckptctl.options import PickKeywords, PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.preflight_checks.launching import Launcher, NodeReport, arguments, holds, step_in
from ckptctl.preflight_checks.nodes import (
    StorageProbe,
    Written,
    check_nodes,
    check_probe,
    facts_of_this_node,
)
from ckptctl.preflight_checks.results import Check, CheckOutcome, NodeFacts, Preflight, Sized
from ckptctl.preflight_checks.sizing import (
    capacity_of,
    check_cadence,
    check_capacity,
    check_damage,
    check_sizes,
    check_writers,
    ranks_in,
    sized,
)
from ckptctl.selection.choosing import Answer, search
from ckptctl.selection.picking import Pick, answer_of, check_create, scan
from ckptctl.selection.targets import Roots, roots_in
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import name_below, open_store

if TYPE_CHECKING:
    from typing_extensions import Unpack


_DEEP_STEPS = 20

_Nodes = Mapping[str, tuple[NodeFacts, ...]]
"""What each process found in each root, by the address of the root."""


def preflight(
    *roots: str,
    optional_roots: Collection[str] = (),
    allow_fresh: bool = False,
    create: bool = False,
    world_sizes: Collection[int] = (),
    mtbf_s: float | None = None,
    room_for: int = 1,
    probe_storage: bool = False,
    logs: Sequence[str] = (),
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
    SLURM.
    `world_sizes` are other possible numbers of ranks. `mtbf_s`
    is the mean time between failures, in seconds. There must be room for `room_for` more
    steps as large as the chosen one. `probe_storage` writes up to 64 MiB, reads them back
    and compares, and searches the newest 20 steps for what damaged ones share. `logs`
    are those of the job that died: the work behind the chosen step is counted. `launchers`
    inspect the storage from other nodes, and the results are compared. `group` are
    the processes of the job, each of which must call this. The rest is `pick`'s; each field of
    the three options objects is a keyword of this function, too.

    The exit code is that of the first check that failed, else `pick`'s; only with 0 is
    there a path. Raises `UsageError`, and `StorageError` where the root cannot be listed.

    Cost: `pick`, and on each process one listing, the chosen step's metadata, 16 MiB of one
    shard file; on rank 0 one listing for each of the newest 11 steps, and the metadata once
    more where the ranks are not those that saved.
    """
    group = group or ProcessGroup()
    policy, requirements, storage = options_from(keywords, policy, requirements, storage)
    asked = _Asked(
        tuple(world_sizes), mtbf_s, room_for, probe_storage, tuple(logs), tuple(launchers)
    )
    asked.check(group)
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
        job = _Job(named, picked, stores, asked, requirements, storage)
        nodes, probe = job.inspect_storage(group)
        source = f" ({launched[1]})" if launched is not None else ""
        checks, sizes = group.from_first(lambda: job.checks(nodes, probe, source))
    return _answer(job, nodes, checks, sizes)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The arguments of `preflight` that `pick` does not take."""

    world_sizes: tuple[int, ...]
    mtbf_s: float | None
    room_for: int
    probe_storage: bool
    logs: tuple[str, ...]
    launchers: tuple[Launcher, ...]

    def check(self, group: ProcessGroup) -> None:
        """Raise `UsageError` for values without a meaning."""
        if self.mtbf_s is not None and not 0 < self.mtbf_s < float("inf"):
            raise OptionError("--mtbf", f"is {self.mtbf_s}; it must be above 0")
        if any(size < 1 for size in self.world_sizes):
            raise OptionError(
                "--world-sizes", f"is {min(self.world_sizes)}; a job has at least 1 rank"
            )
        if self.launchers and group.size > 1:
            raise OptionError(
                "--launcher", "is for one process: this is started on every node already"
            )
        if self.room_for < 0:
            raise OptionError("--room-for", f"is {self.room_for}; it must be 0 or more")


def _open_roots(
    stack: ExitStack, roots: Roots, picked: Pick, storage: StorageOptions
) -> dict[str, Store]:
    """The mandatory roots, the first one first, and the one that holds the chosen step."""
    opened = {
        url: stack.enter_context(open_store(url, storage))
        for url in dict.fromkeys((roots.first, *roots.urls))
    }
    step = picked.chosen.url if picked.chosen else ""
    return {
        url: one for url, one in opened.items() if url not in roots.optional or holds(one, step)
    }


@dataclass(frozen=True, slots=True)
class _Job:
    """The job that is to start: its roots, the chosen step, and what the caller wants checked.

    Steps are saved into the first root; the chosen one may be in another.
    """

    roots: Roots
    picked: Pick
    stores: Mapping[str, Store]
    asked: _Asked
    requirements: Requirements
    storage: StorageOptions

    def inspect_storage(self, group: ProcessGroup) -> tuple[_Nodes, Check | None]:
        """What every process sees of each root, and what a probe came to; the same on all."""
        step = self.picked.chosen.url if self.picked.chosen else ""
        nodes = {
            url: group.gather(facts_of_this_node(store, step_in(store, step), group.rank))
            for url, store in self.stores.items()
        }
        probe: Check | None = None
        reports: tuple[NodeReport, ...] = ()
        if self.asked.probe_storage:
            probe, reports = self._probe(group)
        elif self.asked.launchers:
            reports = self._launch(None)
        for place, url in enumerate(self.stores):
            nodes[url] += tuple(one.facts[place] for one in reports)
        return nodes, probe

    def _launch(self, probe: Written | None) -> tuple[NodeReport, ...]:
        """What the processes report that the launchers start on other nodes."""
        step = self.picked.chosen.url if self.picked.chosen else ""
        words = arguments(list(self.stores), step, probe, self.storage)
        secrets, n_roots = self.storage.secrets(), len(self.stores)
        launched = (each.reports(words, secrets, n_roots) for each in self.asked.launchers)
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

    def checks(
        self, nodes: _Nodes, probe: Check | None, ranks_from: str
    ) -> tuple[tuple[Check, ...], tuple[Sized, ...]]:
        """Every check, and what a load means at each number of ranks.

        `ranks_from` is where the number of ranks is from, for a message.
        """
        asked, chosen, n_ranks = self.asked, self.picked.chosen, self.requirements.world_size
        store = self.stores[self.roots.first]
        room = asked.room_for * (chosen.n_bytes if chosen else 0) if asked.room_for else None
        reports = self._reports()
        scan_again = command_line("scan", *self.roots.words, "--level", "content")
        seen = measured_in(store, self.requirements.pattern) if chosen else Measured(0)
        sizes = self._sizes(seen)
        checks = [
            _check_pick(self.picked),
            _check_state(self.picked),
            *_check_roots(self.roots, nodes, room),
            probe,
            check_damage(store, reports, scan_again),
            check_writers(store, chosen) if self.requirements.saved_world_size is None else None,
            check_capacity(n_ranks, ranks_from, chosen, seen),
            *(check_sizes(sizes) if asked.world_sizes else ()),
            _check_recomputed(asked.logs, chosen, self.storage) if asked.logs else None,
            check_cadence(self.roots.first, asked.mtbf_s, seen) if chosen else None,
        ]
        return tuple(one for one in checks if one is not None), sizes

    def _reports(self) -> tuple[Report, ...]:
        """The reports of `pick`, and with a probe those of the newest steps besides."""
        over = tuple(one.report for one in self.picked.passed_over)
        reports = over if self.picked.chosen is None else (*over, self.picked.chosen)
        if not (self.asked.probe_storage and reports):
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

    def _sizes(self, seen: Measured) -> tuple[Sized, ...]:
        """What a load of the chosen step means at each number of ranks that is asked for."""
        chosen = self.picked.chosen
        asked = (self.requirements.world_size, *self.asked.world_sizes)
        sizes = tuple(dict.fromkeys(one for one in asked if one is not None))
        if chosen is None or not sizes:
            return ()
        root = self._root_of(chosen)
        opened = OpenStep(self.stores[root], name_below(root, chosen.url))
        return tuple(sized(sizes, chosen, parts_of(opened.files, chosen.layout), seen))

    def _root_of(self, chosen: Report) -> str:
        return next(url for url, store in self.stores.items() if holds(store, chosen.url))


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


def _check_state(picked: Pick) -> Check | None:
    """What the chosen step restores. What no step holds is a warning, and stops nothing."""
    if picked.chosen is None:
        return None
    short = _CORRECT_RESUME.intersection(picked.absent)
    return Check("state", CheckOutcome.WARNING if short else CheckOutcome.OK, picked.about_state)


def _check_recomputed(
    logs: Sequence[str], chosen: Report | None, storage: StorageOptions
) -> Check | None:
    """The work that is done again from the chosen step, by the logs of the job that died."""
    if chosen is None:
        return None
    step = train_step_of(chosen.layout, chosen.number, chosen.state.step.value)
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


def _answer(
    job: _Job, nodes: _Nodes, checks: tuple[Check, ...], sizes: tuple[Sized, ...]
) -> Preflight:
    # A choice from a storage that nodes see differently proves nothing: that comes first.
    failed = [one for one in checks if one.outcome is CheckOutcome.FAILED]
    worst = next((one for one in failed if one.name != "step"), failed[0] if failed else None)
    picked, n_ranks = job.picked, job.requirements.world_size
    chosen = picked.chosen if worst is None else None
    return Preflight(
        root=job.roots.first,
        path=None if chosen is None else chosen.url,
        step=None if chosen is None else chosen.number,
        checks=checks,
        nodes=tuple(one for each in nodes.values() for one in each),
        pick=picked,
        message=picked.message if worst is None else worst.message,
        exit_code=0 if worst is None else worst.exit_code,
        next_command=None if worst is None else worst.next_command,
        capacity=capacity_of(n_ranks, picked.chosen),
        sizes=sizes,
        reason=picked.reason,
    )
