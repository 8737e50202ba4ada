"""The state of optimizers: what a load fills, and what the step does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ckptctl.formatting import counted
from ckptctl.model import Metadata


def allocate_state(optimizer: Any) -> Callable[[], None]:
    """Give an Adam or AdamW without state the tensors to load into.

    Returns how to remove the state of an optimizer that had none, whoever made it.

    Their content is undefined until the load has filled them. torch (2.13, `_init_optim_state`)
    makes them by a step with gradients of 0, which takes more time than the load, and the memory
    of the gradients. Here the optimizer makes the state of one element for each dtype and device;
    that of a parameter differs only in its shape. Of other optimizers that is not known: they are
    left to torch.
    """
    import torch

    if optimizer.state:
        return lambda: None
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return optimizer.state.clear  # type: ignore[no-any-return]
    for group in optimizer.param_groups:
        options = {name: group[name] for name in optimizer.defaults if name in group}
        alike: dict[object, Mapping[str, Any]] = {}
        for parameter in group["params"]:
            kind = parameter.dtype, parameter.device
            if not parameter.requires_grad:
                continue
            if kind not in alike:
                element = torch.zeros(1, dtype=kind[0], device=kind[1], requires_grad=True)
                element.grad = torch.zeros_like(element)
                small = type(optimizer)([{**options, "params": [element]}])
                small.step()
                alike[kind] = small.state[element]
            optimizer.state[parameter] = {
                name: torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                if value.dim()
                else value.clone()
                for name, value in alike[kind].items()
            }
    return optimizer.state.clear  # type: ignore[no-any-return]


def allocate_extra_state(part: Any) -> Callable[[], None]:
    """The same for an object of `extra`, of which torch makes no state by itself.

    Nothing is done for what is no optimizer, or has state already.
    """
    import torch
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    if not isinstance(part, torch.optim.Optimizer):
        return lambda: None
    undo = allocate_state(part)
    _init_optim_state(part)
    return undo


@contextmanager
def without_a_step(optimizers: Sequence[Any]) -> Iterator[None]:
    """Keep torch from taking a step of an optimizer that has no state, to make some.

    torch (2.13, `_init_optim_state`) does so also where it collects the state for a save: the
    moments of an optimizer that starts later would then count a step more, and one that ignores
    `lr` would change the parameters. State of one parameter, also if it is empty, prevents that.
    """
    firsts = [
        (optimizer, parameter)
        for optimizer in optimizers
        for parameter in [one for group in optimizer.param_groups for one in group["params"]][:1]
        if not optimizer.state
    ]
    for optimizer, parameter in firsts:
        optimizer.state[parameter] = {}
    try:
        yield
    finally:
        for optimizer, parameter in firsts:
            if not optimizer.state.get(parameter, True):
                del optimizer.state[parameter]


def leave_out_unsaved(state: Mapping[str, Any], saved: Metadata) -> None:
    """Empty the optimizer state of each parameter of which the step has none.

    A parameter that had no gradient before the save, or was frozen, has no state; torch makes
    one for every parameter before a load. Of a step without state of any parameter, it is left
    out if the groups have the same options: the optimizer had taken no step. Otherwise the step
    was saved by another optimizer, or names the state by number.
    """
    paths = [entry.path for entry in saved.tensors.values()]
    paths += [entry.path for entry in saved.bytes_entries.values()]
    known = {path[2] for path in paths if path[:2] == ("optimizer", "state") and path[2:]}
    optimizer = state.get("optimizer", {})
    held = optimizer.get("state", {})
    if held.keys() & known or (not known and _has_options(optimizer, paths)):
        for fqn in held.keys() - known:
            held[fqn] = {}


def _has_options(optimizer: Mapping[str, Any], paths: Sequence[tuple[str | int, ...]]) -> bool:
    """Whether the groups of an optimizer have options of the same names as those of the step."""
    saved: dict[str | int, set[str | int]] = {}
    for path in paths:
        if path[:2] == ("optimizer", "param_groups"):
            saved.setdefault(path[2], set()).add(path[3])
    own = [set(group) for group in optimizer.get("param_groups", ())]
    return bool(own) and sorted(map(sorted, own)) == sorted(map(sorted, saved.values()))


def forget_unsaved(optimizers: Sequence[Any], state: Mapping[str, Any]) -> str | None:
    """Leave parameters without the state that the step does not have; a note about them."""
    unsaved = [fqn for fqn, held in state.items() if not held]
    if not unsaved:
        return None
    for optimizer in optimizers:
        for parameter in [one for one, held in optimizer.state.items() if not held]:
            del optimizer.state[parameter]
    return (
        f"the step has no optimizer state of {counted(len(unsaved), 'parameter')}, such as "
        f"{unsaved[0]}: they begin without it, as if they had no gradient before it was saved"
    )


def same_groups(own: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> bool:
    """Whether each group of parameters of this job takes its options from one group of the step.

    torch (2.13, `_split_optim_state_dict`) finds the groups of the step by their parameters. If
    a parameter was moved to another group, it restores the options of either group, or of none.
    """
    group_of = {fqn: number for number, group in enumerate(saved) for fqn in group["params"]}
    sources = [{group_of[fqn] for fqn in group["params"] if fqn in group_of} for group in own]
    if not all(group["params"] for group in own):
        return True  # torch accepts one empty group, and no other differences then
    return all(len(one) == 1 for one in sources) and len(set.union(*sources)) == len(own)
