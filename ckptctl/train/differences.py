"""Compare the state in a step with that of the job, before anything is loaded.

Both hold entries by name. What both hold is restored. What one of them alone holds would be lost
without an error: the step's entries would be dropped, and the job's would keep the values that
they begin with. So one rule applies to every kind of state, in both directions: it is lost, and
refused unless the options of the job accept that. The ranks are compared together, because each
may hold a part of the model.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ckptctl.data_classes import dataclass, field
from ckptctl.errors import ModelDiffers, StateRefused, UsageError
from ckptctl.formatting import command_line, counted, some_of
from ckptctl.model import Metadata
from ckptctl.options import TrainOptions
from ckptctl.train.state import Parts, local_tensors

_WITHOUT_NAMES = frozenset({"train_state", "rng", "dataloader"})
"""Kinds of which each rank takes its own values, and `restoring` knows what is missing."""


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


class Wanted:
    """The state that a load fills on this rank, by the names of the entries of the step."""

    def __init__(self, state: dict[str, Any], saved: Metadata) -> None:
        from torch.distributed.checkpoint._nested_dict import flatten_state_dict

        self.state = state
        self._saved = saved
        self._flat, self._paths = flatten_state_dict(state)

    def entries(self, parts: Parts) -> RankEntries:
        """What this rank loads.

        Raises `ModelDiffers` if the step was saved by another model or optimizer, and
        `UsageError` for a tensor that nothing can be loaded into: no older step avoids that.
        """
        self._check_fits(parts)
        tensors = self._saved.tensors
        digits = "".join("01"[name in self._flat] for name in _names(self._saved))
        casts = {
            (name.partition(".")[0], tensors[name].dtype, str(tensor.dtype).removeprefix("torch."))
            for name, tensor in self._tensors()
            if name in tensors
        }
        return RankEntries(
            int(digits or "0", 2),
            tuple(name for name in self._flat if not self._is_saved(name)),
            frozenset(_given(parts)),
            len(self.state.get("optimizer", {}).get("param_groups", ())),
            frozenset(one for one in casts if one[1] != one[2]),
        )

    def request(self, differences: Differences) -> dict[str, Any]:
        """What the load reads: a dict for each kind of state, by the rest of the name.

        Kinds of state rather than names are the keys, because torch gathers the keys of all ranks.
        """
        left_out: tuple[str, ...] = ()
        if not differences.keeps_options:
            left_out = ("optimizer.param_groups." if differences.keeps_optimizer else "optimizer.",)
        request: dict[str, Any] = {}
        for name, value in self._flat.items():
            if not self._is_saved(name) or name.startswith(left_out):
                continue
            kind, _, rest = name.partition(".")
            if rest:
                request.setdefault(kind, {})[rest] = value
            else:
                request[kind] = value
        return request

    def put(self, loaded: Mapping[str, Any]) -> None:
        """Put the values of a request that was loaded into the state; tensors are there already."""
        for kind, values in loaded.items():
            for rest, value in values.items() if isinstance(values, dict) else (("", values),):
                path = self._paths[f"{kind}.{rest}" if rest else kind]
                container: Any = self.state
                for part in path[:-1]:
                    container = container[_key(container, part)]
                container[_key(container, path[-1])] = value

    def _is_saved(self, name: str) -> bool:
        return name in self._saved.tensors or name in self._saved.bytes_entries

    def _tensors(self) -> Iterator[tuple[str, Any]]:
        import torch

        for name, value in self._flat.items():
            if isinstance(value, torch.Tensor):
                yield name, value

    def _check_fits(self, parts: Parts) -> None:
        differing = []
        for name, tensor in self._tensors():
            for local in local_tensors(tensor):
                _check_can_be_written(name, local)
            entry = self._saved.tensors.get(name)
            if entry is not None and entry.shape != tuple(tensor.shape):
                differing.append(
                    f"{name} is {tuple(tensor.shape)} here and {entry.shape} in the step"
                )
        if differing:
            raise ModelDiffers(
                f"{counted(len(differing), 'tensor')} of this job have another shape in the step: "
                f"{differing[0]}; it was saved by a different model"
            )
        if parts.model is not None:
            self._check_naming("model", list(self.state.get("model", ())), 1)
        groups = self.state.get("optimizer", {}).get("param_groups", ())
        self._check_naming("optimizer", [fqn for one in groups for fqn in one["params"]], 2)

    def _check_naming(self, kind: str, own: Sequence[str], depth: int) -> None:
        """Raise `ModelDiffers` if the step has state of other parameters only."""
        saved = {
            str(entry.path[depth])
            for entry in self._saved.tensors.values()
            if entry.path[0] == kind and (depth == 1 or entry.path[1:2] == ("state",))
        }
        if own and saved and not saved.intersection(own):
            raise ModelDiffers(
                f"the step holds {kind} state of other names: {own[0]} of this job is not in it; "
                f"{_naming(kind, self._saved)}"
            )


def _key(container: Any, part: str | int) -> Any:
    """The key of a container that DCP names by `part`: it makes text of the keys of a dict."""
    if not isinstance(container, dict) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)


def _names(saved: Metadata) -> Iterator[str]:
    yield from saved.tensors
    yield from saved.bytes_entries


def _given(parts: Parts) -> Iterator[str]:
    for name in ("model", "optimizer", "scheduler", "grad_scaler", "dataloader"):
        if getattr(parts, name) is not None:
            yield name
    yield from (f"extra {name}" for name in parts.extra)


def _check_can_be_written(name: str, tensor: Any) -> None:
    """Raise `UsageError` for a tensor without memory, or of which elements share their memory."""
    if tensor.is_meta:
        raise UsageError(
            f"{name} is on the meta device, which has no memory to load into: materialize the "
            "model before resume(), as with model.to_empty(device=...)"
        )
    is_strided = str(tensor.layout) == "torch.strided"
    steps = zip(tensor.shape, tensor.stride(), strict=True) if is_strided else ()
    if tensor.numel() and any(n > 1 and step == 0 for n, step in steps):
        raise UsageError(
            f"{name} is an expanded view, whose elements share their memory, so it cannot be "
            "loaded into: clone() it, or register it with persistent=False"
        )


def _naming(kind: str, saved: Metadata) -> str:
    """How the step names the tensors of this kind, as the reason why a name is not in it."""
    names = [name for name in saved.tensors if name.startswith(f"{kind}.")]
    by_number = next((name for name in names if re.match(r"optimizer\.state\.\d+\.", name)), None)
    if by_number is not None:
        return (
            f"it holds the optimizer's state by number ({by_number}), as `optimizer.state_dict()` "
            "names it, and not by parameter: load it with `resolve` and `dcp.load`"
        )
    return f"it holds {names[0]}, and was saved by a different model or optimizer"


def kinds_in(saved: Metadata) -> frozenset[str]:
    """The kinds of state that a step contains: the first names of its entries."""
    return frozenset(name.partition(".")[0] for name in _names(saved))


def compare(ranks: Sequence[RankEntries], saved: Metadata) -> Differences:
    """What all ranks together would lose by a load of the step; the same on every rank."""
    return _Comparison(ranks, saved).run()


@dataclass(slots=True)
class _Comparison:
    ranks: Sequence[RankEntries]
    saved: Metadata
    lost: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def run(self) -> Differences:
        names = list(_names(self.saved))
        used = 0
        for rank in self.ranks:
            used |= rank.used
        digits = f"{used:0{len(names)}b}" if names else ""
        unused = [name for name, digit in zip(names, digits, strict=True) if digit == "0"]
        missing = sorted({name for rank in self.ranks for name in rank.missing})
        given = {part for rank in self.ranks for part in rank.parts}
        self._whole_parts(given)
        if "model" in given and "model" in kinds_in(self.saved):
            self._entries("model", "", _of("model", unused), _of("model", missing))
        keeps = (True, True)
        if "optimizer" in given and "optimizer" in kinds_in(self.saved):
            keeps = self._optimizer(set(names).difference(unused), unused, missing)
        for name in sorted(one.removeprefix("extra ") for one in given if one.startswith("extra ")):
            self._entries("extra", f" {name}", [], _of(f"extra_tensors.{name}", missing))
        for kind, there, here in sorted({cast for rank in self.ranks for cast in rank.casts}):
            self.notes.append(f"{kind}: {there} in the step is {here} in this job, and was cast")
        return Differences(tuple(self.lost), tuple(self.notes), *keeps)

    def _whole_parts(self, given: set[str]) -> None:
        """What one side has nothing of."""
        saved = {
            f"extra {name.removeprefix('extra.')}" if name.startswith("extra.") else kind
            for name in _names(self.saved)
            if (kind := name.partition(".")[0]) not in ("train_state", "rng", "extra_tensors")
        }
        known = ("model", "optimizer", "scheduler", "grad_scaler", "dataloader")
        for part in sorted(given - saved - {"dataloader"}):
            self.lost.append(part)
        for part in sorted(saved - given):
            kind = "" if part in known or part.startswith("extra ") else "extra "
            self.lost.append(f"{kind}{part} (the step has it, and the script gives none)")

    def _entries(self, kind: str, name: str, unused: Sequence[str], missing: Sequence[str]) -> None:
        if unused:
            self.lost.append(
                f"{kind}{name} ({counted(len(unused), 'entry', 'entries')} of the step that this "
                f"job does not have, such as {unused[0]})"
            )
        if missing:
            self.lost.append(
                f"{kind}{name} ({counted(len(missing), 'entry', 'entries')} of this job that the "
                f"step does not have, such as {missing[0]})"
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
        self,
        paths: Mapping[str, tuple[str | int, ...]],
        unused: Sequence[str],
        missing: Sequence[str],
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
        dropped = {name.split(".", 3)[3] for name in unused if name.startswith(start)}
        if dropped:
            self.notes.append(
                f"the step has an option of the optimizer that this job's has not: "
                f"{some_of(sorted(dropped))}"
            )
        kept = {name.split(".", 3)[3] for name in missing if name.startswith(start)}
        if kept:
            self.notes.append(
                f"this job's optimizer has an option that the step's has not, and keeps its "
                f"value: {some_of(sorted(kept))}"
            )
        return True


def _of(kind: str, names: Sequence[str]) -> list[str]:
    """The names of one kind of state, without it."""
    return [name[len(kind) + 1 :] for name in names if name.startswith(f"{kind}.")]


def refuse_lost(lost: Sequence[str], step: int, path: str | None, options: TrainOptions) -> None:
    """Raise `StateRefused` for what is lost and the options do not accept."""
    accepted = {*options.accept_lost, *(("dataloader",) if options.accept_repetition else ())}
    refused = [name for name in lost if name.split()[0] not in accepted]
    if refused:
        kinds = tuple(sorted({name.split()[0] for name in refused}))
        raise StateRefused(
            f"step {step} cannot restore {', '.join(refused)}: a resume would silently lose it. "
            f"accept_lost={kinds} allows this",
            next_command=None if path is None else command_line("show", path),
        )
