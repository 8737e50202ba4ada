"""Check that a job can start here and now, and choose its step.

Everything that can be known before a GPU is warm: `pick`'s choice, the storage as each
node sees it, ranks against those that saved, saves against failures. Where several
processes were started (srun, torchrun), rank 0 chooses, all look, and all come to the
same answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from ckptctl.data_classes import replace
from ckptctl.distributed.launcher import cluster_context
from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import LogWithoutLoss, UsageError
from ckptctl.findings import Report
from ckptctl.formats.frameworks.layouts import parts_of
from ckptctl.goodput.measuring import Measured, measured_in
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import Level
from ckptctl.options import PickKeywords, PickPolicy, Requirements, StorageOptions, options_from
from ckptctl.preflight_checks.launching import Launcher, NodeReport, arguments, holds
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
    check_resharding,
    check_sizes,
    check_writers,
    ranks_in,
    sized,
)
from ckptctl.resharding.advising import ReadAdvice, command, countable
from ckptctl.selection.picking import pick
from ckptctl.selection.results import Answer, Pick
from ckptctl.selection.scanning import scan
from ckptctl.selection.targets import Roots, roots_in
from ckptctl.storage.contract import Store
from ckptctl.storage.opening import name_below, open_store

if TYPE_CHECKING:
    from typing_extensions import Unpack


_DEEP_STEPS = 20


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

    The required `world_size` is how many ranks will load; None takes what torchrun or SLURM say.
    `world_sizes` are other numbers of ranks to say the cost of. `mtbf_s`
    is the mean time between failures, in seconds. There must be room for `room_for` more
    steps as large as the chosen one. `probe_storage` writes up to 64 MiB, reads them back
    and compares, and searches the newest 20 steps for what damaged ones share. `logs`
    are those of the job that died: the work behind the chosen step is counted. `launchers`
    start the same look on other nodes, and what they see is compared. `group` are
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
    if mtbf_s is not None and not 0 < mtbf_s < float("inf"):
        raise UsageError(f"--mtbf is {mtbf_s}; it must be above 0")
    if any(size < 1 for size in world_sizes):
        raise UsageError(f"--world-sizes is {min(world_sizes)}; a job has at least 1 rank")
    if launchers and group.size > 1:
        raise UsageError("--launcher is for one process: this is started on every node already")
    if room_for < 0:
        raise UsageError(f"--room-for is {room_for}; it must be 0 or more")
    cluster = cluster_context()
    launched = ranks_in(cluster)
    source = ""
    if requirements.world_size is None and launched is not None:
        requirements = replace(requirements, world_size=launched[0])
        source = f" ({launched[1]})"
    n_ranks = requirements.world_size

    def choose() -> Pick:
        return pick(
            *roots,
            optional_roots=optional_roots,
            allow_fresh=allow_fresh,
            create=create,
            policy=policy,
            requirements=requirements,
            storage=storage,
        )

    picked = group.from_first(choose)
    step = picked.chosen.url if picked.chosen else ""
    named = roots_in(roots, optional_roots)
    with ExitStack() as stack:
        # Steps are saved into the first root; the chosen step may be in an optional one.
        opened = {
            url: stack.enter_context(open_store(url, storage))
            for url in dict.fromkeys((named.first, *named.urls))
        }
        stores = {
            url: one for url, one in opened.items() if url not in named.optional or holds(one, step)
        }
        store = stores[named.first]
        nodes = {
            url: group.gather(
                facts_of_this_node(
                    one, name_below(one.url, step) if holds(one, step) else None, group.rank
                )
            )
            for url, one in stores.items()
        }

        def launch(probe: Written | None) -> tuple[NodeReport, ...]:
            words = arguments(list(stores), step, probe, storage)
            return tuple(
                one for launcher in launchers for one in launcher.reports(words, len(stores))
            )

        probe: Check | None = None
        reports_there: tuple[NodeReport, ...] = ()
        if probe_storage:
            probe, reports_there = _probed(store, group, launch)
        elif launchers:
            reports_there = launch(None)
        for place, url in enumerate(stores):
            nodes[url] += tuple(one.facts[place] for one in reports_there)

        def examine() -> tuple[tuple[Check, ...], ReadAdvice | None, tuple[Sized, ...]]:
            step_bytes = picked.chosen.n_bytes if picked.chosen else 0
            room = room_for * step_bytes if room_for else None
            reports = _reports(picked)
            if probe_storage and reports:
                # The policy decides which step is taken, not which ones are damaged.
                deep = scan(
                    *roots,
                    optional_roots=optional_roots,
                    last=_DEEP_STEPS,
                    policy=PickPolicy(level=Level.LISTING),
                    requirements=requirements,
                    storage=storage,
                )
                known = {one.url for one in reports}
                reports += tuple(one for one in deep.reports if one.url not in known)
            seen = measured_in(store, requirements.pattern) if picked.chosen else Measured(0)
            sizes = _sizes(stores, picked.chosen, (n_ranks, *world_sizes), seen)
            advice = next((one.resharding for one in sizes if one.world_size == n_ranks), None)
            checks = [
                _check_pick(picked),
                _check_state(picked),
                *_check_roots(named, nodes, room),
                probe,
                check_damage(store, reports, f"ckptctl scan {named.words} --level content"),
                check_writers(store, picked.chosen)
                if requirements.saved_world_size is None
                else None,
                check_capacity(n_ranks, source, picked.chosen, seen),
                *(check_sizes(sizes) if world_sizes else ()),
                _check_resharding(stores, picked.chosen, advice, storage),
                _check_recomputed(logs, picked.chosen, storage) if logs else None,
                check_cadence(named.first, mtbf_s, seen) if picked.chosen else None,
            ]
            return tuple(one for one in checks if one is not None), advice, sizes

        checks, advice, sizes = group.from_first(examine)
    everyone = tuple(one for each in nodes.values() for one in each)
    answer = _answer(named.first, picked, checks, everyone, advice)
    return replace(answer, capacity=capacity_of(n_ranks, picked.chosen), sizes=sizes)


def _check_roots(
    named: Roots, nodes: Mapping[str, tuple[NodeFacts, ...]], room: int | None
) -> Iterator[Check]:
    """What all processes see of each root, and whether the next saves fit into the first."""
    for url, facts in nodes.items():
        if url in named.optional:  # a local disk holds other steps on each node
            facts = tuple(replace(one, listing="") for one in facts)
        for check in check_nodes(url, facts, room if url == named.first else None):
            several = len(nodes) > 1
            yield replace(check, message=f"{url}: {check.message}") if several else check


def _probed(
    store: Store, group: ProcessGroup, launch: Callable[[Written | None], tuple[NodeReport, ...]]
) -> tuple[Check, tuple[NodeReport, ...]]:
    """Every process writes, reads its own files, and those of the next process.

    What launchers start elsewhere reads the files of this one, which reads theirs.
    """
    with StorageProbe(store) as probe:
        group.gather(None)  # each has seen what was there before anyone wrote
        written = group.gather(probe.write())
        compared = [probe.compare(written[group.rank])]
        if group.size > 1:
            compared.append(probe.compare(written[(group.rank + 1) % group.size]))
        # Nobody removes what another still reads.
        gathered = [one for each in group.gather(tuple(compared)) for one in each]
        reports = launch(written[group.rank])
        for report in reports:
            gathered += [report.compared] if report.compared else []
            if report.written is not None:
                written += (report.written,)
                gathered.append(probe.compare(report.written))
                probe.remove(report.written)
    return check_probe(written, gathered), reports


def _reports(picked: Pick) -> tuple[Report, ...]:
    over = tuple(one.report for one in picked.passed_over)
    return over if picked.chosen is None else (*over, picked.chosen)


def _check_pick(picked: Pick) -> Check:
    outcome = CheckOutcome.OK
    absent = [one for one in picked.findings if one.code == "root.unavailable"]
    if picked.answer is Answer.FELL_BACK or absent:
        outcome = CheckOutcome.WARNING
    if picked.exit_code:
        outcome = CheckOutcome.FAILED
    inspected = f" (checked: {picked.level.value})" if picked.level else ""
    next_command = picked.next_command
    if picked.answer is Answer.FRESH and next_command:
        next_command = next_command.replace("ckptctl pick ", "ckptctl preflight ", 1)
    message = "; ".join([picked.message + inspected, *(one.message for one in absent)])
    return Check("step", outcome, message, picked.exit_code, next_command)


_CORRECT_RESUME = {"model", "optimizer", "rng", "dataloader"}


def _check_state(picked: Pick) -> Check | None:
    """What the chosen step restores. What no step holds is worth a look, and stops nothing."""
    if picked.chosen is None:
        return None
    short = _CORRECT_RESUME.intersection(picked.absent)
    return Check("state", CheckOutcome.WARNING if short else CheckOutcome.OK, picked.about_state)


def _sizes(
    stores: Mapping[str, Store],
    chosen: Report | None,
    sizes: Collection[int | None],
    seen: Measured,
) -> tuple[Sized, ...]:
    """What a load of the chosen step means at each number of ranks that is known."""
    asked = tuple(dict.fromkeys(one for one in sizes if one is not None))
    if chosen is None or not asked:
        return ()
    root = _root_of(stores, chosen)
    opened = OpenStep(stores[root], name_below(root, chosen.url))
    as_saved = chosen.world_size is not None and set(asked) == {chosen.world_size.size}
    source = None if as_saved else countable(opened)
    return tuple(sized(asked, chosen, parts_of(opened.files, chosen.layout), source, seen))


def _root_of(stores: Mapping[str, Store], chosen: Report) -> str:
    return next(url for url, one in stores.items() if holds(one, chosen.url))


def _check_resharding(
    stores: Mapping[str, Store],
    chosen: Report | None,
    advice: ReadAdvice | None,
    storage: StorageOptions,
) -> Check | None:
    """Whether resharding first would pay, where the ranks are not those that saved."""
    if chosen is None or advice is None:
        return None
    root = _root_of(stores, chosen)
    name = name_below(root, chosen.url)
    return check_resharding(advice, command(root, name, advice.world_size, storage))


def _check_recomputed(
    logs: Sequence[str], chosen: Report | None, storage: StorageOptions
) -> Check | None:
    """The work that is done again from the chosen step, by the logs of the job that died."""
    if chosen is None or chosen.number is None:
        return None
    from ckptctl.loss.reading import read_logs
    from ckptctl.loss.resumes import recomputed_from
    from ckptctl.loss.segments import split

    try:
        parts = split(read_logs(logs, storage=storage), around=chosen.number)
    except LogWithoutLoss as error:
        return Check("recompute", CheckOutcome.WARNING, error.message)
    again = recomputed_from(chosen.number, parts.segments[-1].rows) if parts.segments else None
    if again is None:
        return Check(
            "recompute", CheckOutcome.WARNING, "the logs hold no step: nothing can be counted"
        )
    if not again.steps and again.to_step < chosen.number:
        words = f"the logs end at step {again.to_step:,}, before the step that is loaded"
        return Check("recompute", CheckOutcome.WARNING, words)
    return Check("recompute", CheckOutcome.OK, f"computed again: {again.message}")


def _answer(
    root: str,
    picked: Pick,
    checks: tuple[Check, ...],
    nodes: tuple[NodeFacts, ...],
    advice: ReadAdvice | None,
) -> Preflight:
    # A storage that nodes see differently makes `pick`'s word worthless: it comes first.
    failed = [one for one in checks if one.outcome is CheckOutcome.FAILED]
    worst = next((one for one in failed if one.name != "step"), failed[0] if failed else None)
    chosen = picked.chosen if worst is None else None
    return Preflight(
        root=root,
        path=None if chosen is None else chosen.url,
        step=None if chosen is None else chosen.number,
        checks=checks,
        nodes=nodes,
        pick=picked,
        resharding=advice,
        message=picked.message if worst is None else worst.message,
        exit_code=0 if worst is None else worst.exit_code,
        next_command=None if worst is None else worst.next_command,
    )
