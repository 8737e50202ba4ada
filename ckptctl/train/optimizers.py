"""The state of optimizers: what a load fills, and what the step does not hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from ckptctl.formatting import counted
from ckptctl.model import Metadata
from ckptctl.train.rank_names import Path, plain_name


def allocate_state(optimizer: Any) -> bool:
    """Give an optimizer without state the tensors to load into; False if it cannot be made to.

    Their content is undefined until the load has filled them. torch (2.13, `_init_optim_state`)
    makes them by a step with gradients of 0, which takes more time than the load, and the memory
    of the gradients. An Adam or AdamW makes the state of one element here for each dtype and
    device; that of a parameter differs only in its shape. Of other optimizers that is not known:
    they take the step. One that demands a closure, as LBFGS does, makes no state.
    """
    import torch
    from torch.distributed.checkpoint.state_dict import _init_optim_state

    if optimizer.state:
        return True
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        rates = [group.get("lr") for group in optimizer.param_groups]
        try:
            _init_optim_state(optimizer)
        except Exception:  # noqa: BLE001 - the optimizer's own code, without a closure
            optimizer.state.clear()
            optimizer.zero_grad()
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                if "lr" in group:
                    group["lr"] = rate
            return False
        return True
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
    return True


@contextmanager
def without_a_step(optimizers: Sequence[Any]) -> Iterator[None]:
    """Keep torch from taking a step of an optimizer that has no state, to make some.

    torch (2.13, `_init_optim_state`) does so also where it collects the state for a save: the
    moments of an optimizer that starts later would then count a step more, and one that ignores
    `lr` would change the parameters. State of one parameter, also if it is empty, prevents that.
    """
    firsts = []
    for optimizer in optimizers:
        parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        if parameters and not optimizer.state:
            firsts.append((optimizer, parameters[0]))
            optimizer.state[parameters[0]] = {}
    try:
        yield
    finally:
        for optimizer, parameter in firsts:
            if not optimizer.state.get(parameter, True):
                del optimizer.state[parameter]


@contextmanager
def loaded_as_saved(optimizers: Iterable[Any]) -> Iterator[None]:
    """Keep torch from changing the state of optimizers that is loaded inside.

    torch (2.13, `Optimizer.load_state_dict`) casts each tensor to the dtype of its parameter: the
    float32 weights that an optimizer keeps of bfloat16 parameters would lose their low bits. It
    also makes text anew, as any value that can be iterated, and gets the name of a generator.
    """
    import torch

    with ExitStack() as hooks:
        for one in optimizers:
            inner = getattr(one, "optimizer", None)  # that of accelerate wraps another
            _register(inner if isinstance(inner, torch.optim.Optimizer) else one, hooks)
        yield


def _register(optimizer: Any, hooks: ExitStack) -> None:
    given: dict[Any, Any] = {}
    own: dict[Any, Any] = {}

    def before(one: Any, loaded: Mapping[str, Any]) -> None:
        numbers = [number for group in loaded["param_groups"] for number in group["params"]]
        parameters = [parameter for group in one.param_groups for parameter in group["params"]]
        # torch reports groups of other sizes after this.
        for number, parameter in zip(numbers, parameters, strict=False):
            given[parameter] = loaded["state"].get(number)
        own.update(one.state)

    def after(one: Any) -> None:
        for parameter, state in one.state.items():
            if given.get(parameter) is not None:
                one.state[parameter] = _as_saved(given[parameter], state, own.get(parameter))

    hooks.callback(optimizer.register_load_state_dict_pre_hook(before).remove)
    hooks.callback(optimizer.register_load_state_dict_post_hook(after).remove)


def _as_saved(saved: Any, loaded: Any, own: Any) -> Any:
    """A value of optimizer state as it was saved, on the device on which torch loaded it.

    A tensor has the dtype of the optimizer's own one, which another dtype of the model changes,
    and that of torch where it has none.
    """
    import torch

    if isinstance(saved, torch.Tensor):
        if not isinstance(own, torch.Tensor) or own.dtype == loaded.dtype:
            return loaded
        return saved.to(loaded.device, own.dtype)
    if isinstance(saved, dict):
        own = own if isinstance(own, dict) else {}
        return {key: _as_saved(one, loaded[key], own.get(key)) for key, one in saved.items()}
    if type(saved) in (list, tuple):
        held = [*own] if isinstance(own, list | tuple) else []
        both = zip(saved, loaded, [*held, *[None] * len(saved)], strict=False)
        return type(saved)(_as_saved(*each) for each in both)
    return saved


_Leaf = tuple[tuple[int, ...], str] | None
"""Shape and dtype of a tensor; None of any other value."""

_Form = dict[Path, _Leaf]
"""What a value of optimizer state consists of, by path."""


def fit_state(optimizer: Mapping[str, Any], saved: Metadata, *, formless: bool) -> None:
    """Give the state of an optimizer the form that it has in the step, as far as it may vary.

    A parameter that had no gradient before the save, or was frozen, has no state in the step, and
    gets none. Of a step without state of any parameter, it is left out if the groups have the same
    options: the optimizer had taken no step. Otherwise the step was saved by another optimizer, or
    names the state by number.

    A value of the same name may have another form after some steps: a tensor in place of None, a
    longer list. It gets that of the step, and so does all state if the optimizer is `formless`.
    """
    there: dict[Any, dict[Any, _Form]] = {}
    options: dict[Any, set[Any]] = {}
    entries: list[tuple[Path, _Leaf]]
    entries = [(one.path, (one.shape, one.dtype)) for one in saved.tensors.values()]
    entries += [(one.path, None) for one in saved.bytes_entries.values()]
    for path, leaf in entries:
        if path[:2] == ("optimizer", "state") and path[3:]:
            there.setdefault(path[2], {}).setdefault(path[3], {})[path[4:]] = leaf
        elif path[:2] == ("optimizer", "param_groups") and path[3:]:
            options.setdefault(path[2], set()).add(path[3])
    own = [_named(group) for group in optimizer["param_groups"]]
    same = bool(own) and sorted(map(sorted, own)) == sorted(map(sorted, options.values()))
    held = optimizer["state"]
    if formless and same and not any(held.values()):
        held.update((fqn, dict.fromkeys(names)) for fqn, names in there.items())
    if held.keys() & there.keys() or (same and not there):
        for fqn in held.keys() - {plain_name(str(fqn)) for fqn in there}:
            if held[fqn]:
                held[fqn] = {}
            else:  # an optimizer that keeps no state, as SGD without momentum, lacks none
                del held[fqn]
    for fqn, names in there.items() if same else ():
        state = held.get(fqn, {})
        for name, form in names.items() if names.keys() == _named(state) else ():
            if form != _form_of(state[name]):
                state[name] = _of_form(form, state[name])


def _named(values: Mapping[Any, Any]) -> set[Any]:
    """The names of the values that a step holds: not those of empty dicts."""
    return {name for name, value in values.items() if _form_of(value)}


def _form_of(value: Any) -> _Form:
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    flat, paths = flatten_state_dict({"": value})
    return {
        paths[name][1:]: (tuple(one.shape), str(one.dtype).removeprefix("torch."))
        if isinstance(one, torch.Tensor)
        else None
        for name, one in flat.items()
    }


def _of_form(form: _Form, own: Any) -> Any:
    """A value of a form, with tensors to load into; `own` where a dict or shards are in it."""
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict, unflatten_state_dict

    flat, _ = flatten_state_dict({"": own})
    in_dict = any(isinstance(part, str) for path in form for part in path)
    if in_dict or any(hasattr(one, "to_local") for one in flat.values()):
        return own
    made = {
        str(path): None if leaf is None else torch.empty(leaf[0], dtype=getattr(torch, leaf[1]))
        for path, leaf in form.items()
    }
    return unflatten_state_dict(made, {str(path): ("", *path) for path in form})[""]


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
