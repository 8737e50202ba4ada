"""Choose the nodes and the world size of the next attempt.

A node is taken out of a job only if it belongs to the job, if a certain cause or three short
attempts in a row name it, and within `max_excluded`: one line in a log must not drain a
cluster. What is left of the nodes decides how many ranks can run.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from ckptctl.distributed.commands import run_bounded
from ckptctl.distributed.launcher import cluster_context, expand, is_node
from ckptctl.errors import OptionError
from ckptctl.failures.results import CLASSES, Classification
from ckptctl.formats.own.files import time_now
from ckptctl.formats.own.supervision import (
    Attempt,
    ExcludedDocument,
    SupervisorDocument,
)
from ckptctl.formatting import counted
from ckptctl.options import Parameter
from ckptctl.redaction import command_of_others
from ckptctl.storage.files import replace_file
from ckptctl.supervisor.processes import Hang
from ckptctl.supervisor.slurm import is_srun, names_in, srun_on

EXCLUDED = "CKPTCTL_EXCLUDED_NODES"
"""The variable with the excluded nodes, separated by commas."""
WORLD_SIZE = "CKPTCTL_WORLD_SIZE"
"""The variable with the number of ranks that the attempt has."""

SUSPECT = "suspect"
CAUSES = frozenset({*CLASSES, SUSPECT})
"""What can be the reason of an exclusion: no text of a log reaches a command."""

_DRAIN = "scontrol update NodeName={node} State=DRAIN Reason={cause}"

_N_SHORT = 3
_SHORT_S = 600
"""Source: `suspect_node` of nvrx_watch: in 3 or more consecutive cycles under 10 minutes."""

_COMMAND_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOptions:
    """Which nodes a job has, how one is excluded, and with how many ranks it can run."""

    nodes: Annotated[
        Sequence[str],
        Parameter(
            "--nodes NODE,...",
            "The nodes of the job; by default those that SLURM allocated, or this machine.",
        ),
    ] = ()
    exclude_command: Annotated[
        str | None,
        Parameter(
            "--exclude-command COMMAND",
            "How to exclude a node that is at fault; {node} and {cause} are filled in, and no "
            "shell runs it. An argument of the job with {excluded} gets the excluded nodes, and "
            "is left out while there are none.",
        ),
    ] = None
    max_excluded: Annotated[
        int,
        Parameter(
            "--max-excluded N",
            "Exclude at most N nodes; more need a person.",
            min=0,
            setting=True,
        ),
    ] = 1
    world_sizes: Annotated[
        Sequence[int],
        Parameter(
            "--world-sizes N,...",
            "The numbers of ranks that the job can run with, the largest for all its nodes; "
            "the one that fits is filled in for {world_size} and {nodes} of the command.",
        ),
    ] = ()
    min_world_size: Annotated[
        int,
        Parameter(
            "--min-world-size N",
            "Wait for capacity (94) rather than run with fewer ranks.",
            min=1,
            setting=True,
        ),
    ] = 1
    hosts_file: Annotated[
        str | None,
        Parameter(
            "--hosts-file FILE",
            "Write the nodes of each attempt to FILE, one a line, without the excluded ones, "
            "for a launcher such as mpirun --hostfile FILE.",
            common=False,
        ),
    ] = None

    def __post_init__(self) -> None:
        for name in self.nodes:
            if not is_node(name):
                raise OptionError("--nodes", f"names {name!r}, which is no name of a host")
        if self.exclude_command is not None:
            try:
                words = shlex.split(self.exclude_command)
            except ValueError as error:
                raise OptionError(
                    "--exclude-command", f"cannot be split into words: {error}"
                ) from None
            if not any("{node}" in word for word in words):
                raise OptionError(
                    "--exclude-command",
                    "does not say where the name of the node belongs",
                    instead="--exclude-command 'scontrol update NodeName={node} State=DRAIN "
                    "Reason={cause}'",
                )
        if any(size < 1 for size in self.world_sizes) or self.min_world_size < 1:
            raise OptionError("--world-sizes", "and --min-world-size must be 1 or more")
        if self.max_excluded < 0:
            raise OptionError("--max-excluded", "must be 0 or more")

    def without(self, nodes: Sequence[str]) -> NodeOptions:
        """The options of the same job without some of its `nodes`, and with their ranks."""
        left = [node for node in self.nodes if node not in nodes]
        per_node = -(-max(self.world_sizes, default=0) // max(len(self.nodes), 1))
        sizes = [size for size in self.world_sizes if size <= per_node * len(left)]
        return replace(self, nodes=left, world_sizes=sizes) if self.nodes else self


class Blame(NamedTuple):
    """A node that an attempt names, and for what; `certain` where it speaks against hardware."""

    node: str
    cause: str
    certain: bool


def blamed(
    hang: Hang | None, cause: Classification | None, attempts: Sequence[Attempt]
) -> list[Blame]:
    """The nodes that the last of `attempts` names.

    Certain are a node on which a rank waits in the kernel for what belongs to it, and one that
    `classify` names at confidence *high* for a failure of a node. Where a hang is in the program
    its node is named, and nothing speaks against it. A node is suspect without a cause if it was
    in each of three attempts in a row that were shorter than 10 minutes, while other nodes of the
    job were not, or if the logs of all three name it.
    """
    if hang is not None:
        return [Blame(node, "hang", node in hang.hardware) for node in hang.nodes]
    of_node = cause is not None and cause.failure == "infra-node" and cause.confidence == "high"
    if cause is not None and of_node and cause.nodes:
        return [Blame(node, cause.failure, certain=True) for node in cause.nodes]
    last = attempts[-_N_SHORT:]
    if len(last) < _N_SHORT or any(
        not attempt.exit_code or attempt.seconds >= _SHORT_S for attempt in last
    ):
        return []
    named = set.intersection(*(set(attempt.nodes) for attempt in last))
    had = [set(expand(attempt.allocation)) for attempt in last]
    common = set.intersection(*had)
    if common != had[-1]:  # the same nodes each time do not single one out
        named |= common
    return [Blame(node, SUSPECT, certain=False) for node in sorted(named)]


def exclusion(template: str, node: str, cause: str) -> list[str]:
    """The words of the command that excludes a node."""
    return [
        word.replace("{node}", node).replace("{cause}", cause) for word in shlex.split(template)
    ]


def run_exclusion(template: str, node: str, cause: str, tell: Callable[[str], None]) -> None:
    """Run the command that excludes a node; a warning where it fails."""
    if not is_node(node) or cause not in CAUSES:
        return
    words = exclusion(template, node, cause)
    try:
        code, _, stderr = run_bounded(words, _COMMAND_S)
    except OSError as error:
        tell(f"warning: {command_of_others(words)}: {error.strerror or error}")
        return
    if code:
        tell(f"warning: {command_of_others(words)} ended with {code}: {stderr.strip()[-200:]}")


class AttemptPlan(NamedTuple):
    """One attempt: its command and variables, the nodes of the job, and its ranks.

    `nodes` are those that it can have: of the job without the ones that are left out.
    `world_size` is None where the command decides how many ranks it has.
    """

    command: list[str]
    variables: dict[str, str]
    allocation: str
    world_size: int | None
    nodes: tuple[str, ...]


def fill(
    command: Sequence[str], excluded: Sequence[str], sizes: tuple[int, int] | None
) -> tuple[list[str], dict[str, str]]:
    """The command with its placeholders filled in, and the variables of its environment.

    `sizes` are the numbers of ranks and nodes, where ckptctl chooses them. Without excluded nodes
    an argument with `{excluded}` is left out.
    """
    names = ",".join(excluded)
    values, variables = {"{excluded}": names}, {EXCLUDED: names}
    if sizes is not None:
        values |= {"{world_size}": str(sizes[0]), "{nodes}": str(sizes[1])}
        variables[WORLD_SIZE] = str(sizes[0])
    words = [word for word in command if names or "{excluded}" not in word]
    for placeholder, value in values.items():
        words = [word.replace(placeholder, value) for word in words]
    return words, variables


class Nodes:
    """The nodes of one job: excludes those that are at fault, and plans each attempt."""

    def __init__(
        self, options: NodeOptions, command: Sequence[str], tell: Callable[[str], None]
    ) -> None:
        self._options = options
        self._command = command
        self._tell = tell
        place = cluster_context()
        self._allocation = ",".join(options.nodes) or place.node_list or place.node
        self._nodes = expand(self._allocation)
        self._gpus_per_node = place.gpus_per_node
        self._scheduler = place.scheduler
        of_slurm = expand(place.node_list or "") if place.scheduler == "slurm" else ()
        if options.nodes and of_slurm and not names_in(of_slurm, self._nodes):
            tell(
                f"warning: none of {self._allocation} (--nodes) is a node of the SLURM job "
                f"({place.node_list}): what Slurm knows of its nodes is not used"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The nodes of the job."""
        return self._nodes

    def plan(
        self, state: SupervisorDocument, loads: Callable[[int], bool], down: Mapping[str, str]
    ) -> AttemptPlan | None:
        """The next attempt; None where the nodes that are left can run no world size.

        `loads` is whether the step to resume from loads with so many ranks and loses nothing
        that is required; it is not asked about the largest size. `down` are nodes on which the
        scheduler can start nothing, with their states: they are left out of this attempt.
        """
        excluded = self.excluded(state)
        is_down = [node for node in self._nodes if node in down and node not in excluded]
        for node in is_down:
            self._tell(f"leaving {node} out of the attempt: {down[node]}")
        excluded = [*excluded, *is_down]
        left = [node for node in self._nodes if node not in excluded]
        usable, sizes = tuple(left), None
        if self._options.world_sizes:
            largest = max(self._options.world_sizes)
            per_node = self._gpus_per_node or -(-largest // max(len(self._nodes), 1))
            size = self._size(per_node * len(left), loads)
            if size is None:
                return None
            left = left[: -(-size // per_node)]
            sizes = size, len(left)
        elif is_down and not any("{excluded}" in word for word in self._command):
            return None  # how many ranks the job can have without them is not stated
        if self._options.hosts_file is not None:
            hosts = "".join(f"{node}\n" for node in left).encode("ascii")
            replace_file(self._options.hosts_file, hosts, "--hosts-file")
            usable = tuple(left)
        words, variables = fill(self._command, excluded, sizes)
        if is_srun(words):
            on_left = srun_on(words, len(left), excluded)
            if on_left is None:
                self._tell(
                    "the nodes of the job have different numbers of tasks, so it is not known how "
                    f"many {counted(len(left), 'node')} get: state --ntasks or "
                    "--ntasks-per-node of srun"
                )
                return None
            words = on_left
        world_size = sizes[0] if sizes else None
        return AttemptPlan(words, variables, self._allocation, world_size, usable)

    def _size(self, most: int, loads: Callable[[int], bool]) -> int | None:
        sizes = sorted(set(self._options.world_sizes), reverse=True)
        for size in sizes:
            fits = self._options.min_world_size <= size <= most
            if fits and (size == sizes[0] or loads(size)):
                return size
        return None

    def excluded(self, state: SupervisorDocument) -> list[str]:
        """The nodes of the job that were taken out of it."""
        gone = {each["node"] for each in state["excluded"]}
        return [node for node in self._nodes if node in gone]

    def exclude(
        self, state: SupervisorDocument, hang: Hang | None, cause: Classification | None
    ) -> SupervisorDocument:
        """The state with the nodes excluded that the last attempt shows to be at fault."""
        last = state["attempts"][-1]
        options = self._options
        can_exclude = (
            options.exclude_command is not None
            or options.hosts_file is not None
            or any("{excluded}" in word for word in self._command)
            or is_srun(self._command)
        )
        for blame in blamed(hang, cause, state["attempts"]):
            node, why = blame.node, blame.cause
            if node in self.excluded(state) or node not in self._nodes:
                continue
            if not blame.certain:
                self._tell_of(node, why)
            elif not can_exclude:
                self._tell(f"warning: {node} is at fault ({why}); ckptctl has no way to exclude it")
            elif len(state["excluded"]) >= options.max_excluded:
                self._tell(
                    f"warning: {node} is at fault ({why}) and stays: {len(state['excluded'])} "
                    "nodes are excluded, and more need a person (--max-excluded)"
                )
            else:
                self._tell(f"excluding {node}: {why}")
                if options.exclude_command is not None:
                    run_exclusion(options.exclude_command, node, why, self._tell)
                entry: ExcludedDocument = {
                    "node": node,
                    "cause": why,
                    "at": time_now(),
                    "attempt": last.number,
                }
                state = {**state, "excluded": [*state["excluded"], entry]}
        return state

    def _tell_of(self, node: str, why: str) -> None:
        template = self._options.exclude_command
        if template is None and self._scheduler == "slurm":
            template = _DRAIN
        by = ""
        if template is not None:
            words = exclusion(template, node, why)
            # What scontrol takes is no secret.
            is_slurm = os.path.basename(words[0]) == "scontrol"
            by = f"; to exclude it: {shlex.join(words) if is_slurm else command_of_others(words)}"
        self._tell(f"{node} is named ({why}) and stays: nothing speaks against its hardware{by}")
