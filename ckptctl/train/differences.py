"""Compare the state in a step with that of the job, before anything is loaded.

What both hold is restored. What one of them alone holds is lost: the step's entries would be
dropped, and the job's would keep the values that they begin with. It is refused unless the options
of the job accept that. The ranks are compared together: each may hold a part of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ckptctl.errors import StateRefused
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.model import Metadata
from ckptctl.options import TrainOptions
from ckptctl.train.rank_names import Path, plain_name, rank_in
from ckptctl.train.state import part_of


@dataclass(frozen=True, slots=True)
class RankEntries:
    """What one rank loads of the step, and what it holds of which the step has nothing.

    `used` has a binary digit for each entry of the step, 1 where the rank loads it. `parts` are
    the kinds of state that it was given, `n_groups` counts the groups of its optimizers. `casts`
    are the dtypes that differ: the kind of state, that in the step, that of the job.
    """

    used: int
    missing: tuple[str, ...]
    parts: frozenset[str]
    n_groups: int
    casts: frozenset[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Differences:
    """What a load loses, each with its kind as the first word, and notes about the rest.

    Where not `keeps_optimizer`, the optimizer begins without state. Where not `keeps_options`,
    the options of its groups are those of this job.
    """

    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    keeps_optimizer: bool = True
    keeps_options: bool = True


def names_in(saved: Metadata) -> Iterator[str]:
    """The names of all entries of a step, in one order on every rank."""
    yield from saved.tensors
    yield from saved.bytes_entries


@dataclass(slots=True)
class StateComparison:
    """What all ranks together would lose by a load of the step; the same on every rank."""

    ranks: Sequence[RankEntries]
    saved: Metadata
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self) -> Differences:
        names = list(names_in(self.saved))
        used = 0
        for rank in self.ranks:
            used |= rank.used
        digits = f"{used:0{len(names)}b}" if names else ""
        unused = [name for name, digit in zip(names, digits, strict=True) if digit == "0"]
        missing = sorted({name for rank in self.ranks for name in rank.missing})
        given = {part for rank in self.ranks for part in rank.parts}
        saved = {part for name in names if (part := part_of(name)) is not None}
        self.lost += sorted(given - saved - {"dataloader"})
        self.lost += [
            f"{part} (the step has it, and the script gives none)" for part in sorted(saved - given)
        ]
        for part in sorted((given & saved) - {"model", "optimizer"}):
            self._own_entries(part, names, unused)
        keeps = (True, True)
        for part in sorted(given & saved):
            if part == "model":
                self._entries(part, _of("model", unused), _of("model", missing))
            elif part == "optimizer":
                keeps = self._optimizer(set(names).difference(unused), unused, missing)
            elif part != "dataloader":
                name = part.removeprefix("extra ")
                self._entries(part, [], _of(f"extra_tensors.{name}", missing))
        for kind, there, here in sorted({cast for rank in self.ranks for cast in rank.casts}):
            self.notes.append(f"{kind}: {there} in the step is {here} in this job, and was cast")
        return Differences(tuple(self.lost), tuple(self.notes), *keeps)

    def _own_entries(self, part: str, names: Sequence[str], unused: Sequence[str]) -> None:
        """The entries of a part of which each rank saved its own, for ranks that differ now."""
        whole, tensors = part.replace(" ", ".", 1), f"extra_tensors.{part.partition(' ')[2]}."
        ranks = {rank_in(name) for name in names if plain_name(name) == whole}
        lacking = [rank for rank, one in enumerate(self.ranks) if part in one.parts]
        lacking = [rank for rank in lacking if ranks and not ranks & {None, rank}]
        if lacking:
            self.lost.append(f"{part} (the step has that of each rank, and none of {lacking[0]})")
        beyond = [name for name in unused if rank_in(name) is not None]
        beyond = [name for name in beyond if part_of(name) == part or name.startswith(tensors)]
        self._entries(part, beyond, [])

    def _entries(self, part: str, unused: Sequence[str], missing: Sequence[str]) -> None:
        sides = ((unused, "the step", "this job"), (missing, "this job", "the step"))
        for names, whose, other in sides:
            if names:
                what = counted(len(names), "entry", "entries")
                self.lost.append(
                    f"{part} ({what} of {whose} that {other} does not have, such as {names[0]})"
                )

    def _optimizer(
        self, used: Collection[str], unused: Sequence[str], missing: Sequence[str]
    ) -> tuple[bool, bool]:
        """Compare the optimizers; whether their state is restored, and the options of groups."""
        paths = {name: one.path for name, one in self.saved.tensors.items()}
        paths |= {name: one.path for name, one in self.saved.bytes_entries.items()}
        state = [paths[name][2:] for name in unused if name.startswith("optimizer.state.")]
        lacking = [name for name in missing if name.startswith("optimizer.state.")]
        restored = {paths[name][2] for name in used if name.startswith("optimizer.state.")}
        if lacking:
            what = lacking[0].removeprefix("optimizer.state.")
            self.lost.append(f"optimizer (the step's has no {what})")
            return False, False
        if state and (not restored or any(path[0] in restored for path in state)):
            value = ".".join(map(str, state[0][1:]))
            self.lost.append(f"optimizer (this job's has no {value} of {state[0][0]})")
            return False, False
        if state:
            parameters = sorted({str(path[0]) for path in state})
            what = counted(len(parameters), "parameter")
            self.lost.append(f"optimizer state of {what}, such as {parameters[0]}")
        return True, self._options(paths, unused, missing)

    def _options(
        self, paths: Mapping[str, Path], unused: Sequence[str], missing: Sequence[str]
    ) -> bool:
        """Compare the groups of parameters and their options; whether those are restored."""
        start = "optimizer.param_groups."
        groups = {path[2] for name, path in paths.items() if name.startswith(start)}
        for n_groups in sorted({rank.n_groups for rank in self.ranks} - {len(groups)}):
            self.lost.append(
                f"optimizer options (the step has {counted(len(groups), 'group')} of parameters, "
                f"and this job {n_groups})"
            )
            return False
        for names, what in (
            (unused, "the step has an option of the optimizer that this job's has not"),
            (
                missing,
                "this job's optimizer has an option that the step's has not, and keeps its value",
            ),
        ):
            options = {name.split(".", 3)[3] for name in names if name.startswith(start)}
            if options:
                self.notes.append(f"{what}: {some_of(sorted(options))}")
        return True


def _of(kind: str, names: Sequence[str]) -> list[str]:
    """The names of one kind of state, without it."""
    return [name[len(kind) + 1 :] for name in names if name.startswith(f"{kind}.")]


def accepted_losses(options: TrainOptions) -> frozenset[str]:
    """The kinds of state that the options of a job accept to lose."""
    return frozenset(
        {*options.accept_lost, *(("dataloader",) if options.accept_repetition else ())}
    )


def refuse_lost(lost: Sequence[str], step: int, path: str | None, options: TrainOptions) -> None:
    """Raise `StateRefused` for what is lost and the options do not accept."""
    accepted = accepted_losses(options)
    refused = [name for name in lost if name.split()[0] not in accepted]
    if refused:
        kinds = tuple(sorted({name.split()[0] for name in refused}))
        raise StateRefused(
            f"step {step} cannot restore {', '.join(refused)}: a resume would silently lose it. "
            f"accept_lost={kinds} allows this",
            next_command=None if path is None else command_line("show", path),
        )
