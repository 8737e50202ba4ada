"""Collect the state of a training script, and give it back.

Model and optimizer go through `torch.distributed.checkpoint.state_dict`, sharded as they
are. Small plain values (scheduler, random numbers, the position in the data) are one entry
each, so that not even an empty dict is lost; what exists once per rank has its own key.

    model.*                optimizer.*              sharded tensors
    scheduler, grad_scaler                          one value each
    rng.rank_0 …           dataloader.dp_rank_0 …   one value for each rank
    dataloader.global                               the position of a `GlobalLoader`
    extra.NAME, extra_tensors.NAME.*                whatever else is `Stateful`
    train_state.step, .tokens, .samples, .world_size, .dp_size, .seed
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from ckptctl.errors import UsageError
from ckptctl.formats.frameworks.state_keys import CPU_RNG_BYTES, CUDA_RNG_BYTES
from ckptctl.model import Metadata
from ckptctl.train.optimizers import fit_state, without_a_step
from ckptctl.train.rank_names import plain_name, rank_in
from ckptctl.train.samples import GlobalLoader


class Stateful(Protocol):
    """Any object that returns its state as a dict and can restore it."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


_STATEFUL = ("state_dict", "load_state_dict")

PARTS = ("model", "optimizer", "scheduler", "grad_scaler", "dataloader")
"""The kinds of state of which a script has one part each; those of `extra` have names."""

PLAIN = ("scheduler", "grad_scaler")
"""Those of them whose state is one value."""


def part_of(name: str) -> str | None:
    """The part that an entry of a step belongs to, as messages name it.

    None for what belongs to each rank or to the run, and for the tensors of an `extra`.
    """
    kind, _, rest = plain_name(name).partition(".")
    if kind in ("train_state", "rng", "extra_tensors"):
        return None
    return kind if kind in PARTS else f"extra {rest if kind == 'extra' else kind}"


def _listed(part: Any) -> tuple[Any, ...]:
    if part is None:
        return ()
    return tuple(part) if isinstance(part, list | tuple) else (part,)


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of a training script whose state is saved; None for those it lacks."""

    model: Any = None
    optimizer: Any = None
    scheduler: Any = None
    dataloader: Any = None
    grad_scaler: Stateful | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The optimizers; torch takes several of one model as a list."""
        return _listed(self.optimizer)

    def check(self) -> None:
        """Raise `UsageError` for an object whose state cannot be saved and restored."""
        # torch warns about the module, so it is not imported where the script did not.
        module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
        sharing: Any = getattr(module, "ZeroRedundancyOptimizer", ())
        for name, optimizer in self.named_optimizers():
            if isinstance(optimizer, sharing):
                raise UsageError(
                    f"{name.replace('.', ' ')} is a {type(optimizer).__name__}, of which each rank "
                    "holds the state of some parameters only, and does not say of which: use the "
                    "optimizer that it wraps, and fully_shard() on the model to divide its state"
                )
        stateful = [
            ("dataloader", self.dataloader),
            *((f"extra {name}", part) for name, part in self.extra.items()),
            *(("scheduler", part) for part in _listed(self.scheduler)),
            ("grad_scaler", self.grad_scaler),
        ]
        for name, part in stateful:
            if part is None or all(hasattr(part, method) for method in _STATEFUL):
                continue
            instead = "give it both methods"
            if name == "dataloader":
                instead = "use ckptctl.train.GlobalLoader or torchdata's StatefulDataLoader"
            raise UsageError(
                f"{name} is a {type(part).__name__}, which does not have state_dict and "
                f"load_state_dict, so its state would be lost: {instead}"
            )

    def named_optimizers(self) -> Iterator[tuple[str, Any]]:
        """Each optimizer, also of `extra`, with the name of its state in a step."""
        import torch

        yield from (("optimizer", one) for one in self.optimizers)
        for name, one in self.extra.items():
            if isinstance(one, torch.optim.Optimizer):
                yield f"extra.{name}", one

    @property
    def given(self) -> frozenset[str]:
        """The names of the parts that the script has."""
        held = (name for name in PARTS if getattr(self, name) is not None)
        return frozenset({*held, *(f"extra {name}" for name in self.extra)})

    @property
    def has_global_loader(self) -> bool:
        """Whether the data position is valid for any number of ranks."""
        return isinstance(self.dataloader, GlobalLoader)


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The rank whose state this is, among all ranks and among the data-parallel ones."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int

    @property
    def rng_key(self) -> str:
        return f"rank_{self.rank}"

    @property
    def data_key(self) -> str:
        return f"dp_rank_{self.dp_rank}"


GLOBAL_DATA = "global"


def collect(parts: Parts, position: RankPosition, progress: Mapping[str, int]) -> dict[str, Any]:
    """The state of this rank, in the form that DCP takes. Every rank calls it."""
    state = sharded(parts, ("model", "optimizer"))
    for name in PLAIN:
        part = getattr(parts, name)
        if part is not None:
            state[name] = _kept(state_of(part))
    if parts.dataloader is not None:
        key = GLOBAL_DATA if parts.has_global_loader else position.data_key
        state["dataloader"] = {key: _kept(parts.dataloader.state_dict())}
    for name, one in parts.extra.items():
        values, tensors = split(one.state_dict(), name)
        state.setdefault("extra", {})[name] = _kept(values)
        if tensors:
            state.setdefault("extra_tensors", {})[name] = tensors
    # Last: a loader whose first pass has not begun draws random numbers as its state is taken.
    own: dict[str, Any] = {"state": rng_state()}
    generator = loader_generator(parts)
    if generator is not None:
        own["dataloader"] = generator.get_state()
    state["rng"] = {position.rng_key: _kept(own)}
    sizes = {"world_size": position.world_size, "dp_size": position.dp_size}
    state["train_state"] = {**progress, **sizes}
    return state


def sharded(parts: Parts, kinds: Collection[str]) -> dict[str, Any]:
    """The state of model and optimizer, as far as they are among the `kinds`."""
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    state: dict[str, Any] = {}
    if parts.model is not None and "model" in kinds:
        for name, parameter in parts.model.named_parameters():
            check_has_memory(f"model.{name}", parameter)  # torch 2.4 leaves those without it out
        state["model"] = get_model_state_dict(parts.model)
    if parts.optimizer is not None and "optimizer" in kinds:
        with without_a_step(parts.optimizers):
            state["optimizer"] = get_optimizer_state_dict(parts.model, parts.optimizer)
    return state


def loader_generator(parts: Parts) -> Any:
    """The dataloader's own generator; None for a loader without one."""
    if parts.dataloader is None or parts.has_global_loader:
        return None
    return getattr(parts.dataloader, "generator", None)


def give_generator(parts: Parts, position: RankPosition, seed: int) -> None:
    """Give a dataloader its own generator if it has none.

    `iter(loader)` draws a seed for its workers. Drawn from the global generator, this would
    shift the random numbers of the training by one at every resume.
    """
    loader = parts.dataloader
    if parts.has_global_loader or getattr(loader, "generator", True) is not None:
        return
    import torch

    loader.generator = torch.Generator()
    loader.generator.manual_seed((seed * 1_000_003 + position.dp_rank) % 2**63)


def state_of(part: Any) -> Any:
    """The state of a part; of a list of several, that of each."""
    if isinstance(part, list | tuple):
        return [one.state_dict() for one in part]
    return part.state_dict()


def _kept(value: Any) -> tuple[Any]:
    # DCP splits dicts and lists, loses empty ones and turns keys into text; a tuple is one
    # entry, and loads as it was.
    return (value,)


TENSOR = "ckptctl: tensor"
"""The key of what stands for a tensor in the values of an `extra`."""


def split(state: Any, part: str) -> tuple[Any, dict[str, Any]]:
    """The values of an `extra` with names in place of its tensors, and the tensors by name.

    The tensors are entries of their own, and can be sharded. DCP would split the values as well:
    it turns the keys of a dict into text, and loses what is empty. Raises `UsageError` for a state
    that would not be loaded as it is.
    """
    tensors: dict[str, Any] = {}
    try:
        return _without_tensors(state, "", tensors), tensors
    except RecursionError as error:
        raise UsageError(f"extra {part} contains itself, or is nested too deep") from error
    except _NotKept as error:
        raise UsageError(f"extra {part} has {error}") from error


class _NotKept(Exception):
    """What a state has that could not be loaded as it was."""


def _without_tensors(value: Any, name: str, tensors: dict[str, Any]) -> Any:
    import torch

    if isinstance(value, torch.Tensor):
        if name in tensors:
            raise _NotKept(f"two tensors of the name {name!r}: rename one")
        tensors[name] = value
        return {TENSOR: name}
    if not isinstance(value, Mapping | list | tuple):
        return value
    n_before = len(tensors)
    dot = "." if name else ""
    copied: Any = {
        key: _without_tensors(inner, f"{name}{dot}{key}", tensors)
        for key, inner in (value.items() if isinstance(value, Mapping) else enumerate(value))
    }
    if isinstance(value, Mapping) and TENSOR in value:
        raise _NotKept(f"the key {TENSOR!r} ({name or 'in the state itself'}): rename it")
    if len(tensors) == n_before:
        return value
    kind: Any = type(value)
    if kind not in (dict, OrderedDict, list, tuple):
        raise _NotKept(
            f"a {kind.__name__} with tensors in it ({name or 'the state itself'}), which would be "
            "loaded as another value: return a plain dict, list or tuple"
        )
    return kind(copied if isinstance(value, dict) else copied.values())


def joined(values: Any, tensors: Mapping[str, Any]) -> Any:
    """The state that `split` has split."""
    if not tensors:
        return values
    if isinstance(values, Mapping):
        if values.keys() == {TENSOR}:
            return tensors[values[TENSOR]]
        found = {key: joined(one, tensors) for key, one in values.items()}
        if all(found[key] is one for key, one in values.items()):
            return values
        return OrderedDict(found) if type(values) is OrderedDict else found
    if isinstance(values, list | tuple):
        items = [joined(one, tensors) for one in values]
        if all(item is one for item, one in zip(items, values, strict=True)):
            return values
        return type(values)(items)
    return values


def check_readable(state: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a value or tensor that `Reader` could not load again.

    `Reader` loads plain values and tensors, and runs no code from a checkpoint. Cost: a
    copy of the small entries in memory, and of tensors of an unusual class.
    """
    import torch

    for kind, part in state.items():
        for fqn, leaf in leaves(part, kind):
            if isinstance(leaf, torch.Tensor):
                for tensor in local_tensors(leaf):
                    _check_tensor(fqn, tensor)
                    if kind == "model":  # an `extra` takes what is loaded
                        check_can_be_written(fqn, tensor)
            elif kind not in ("model", "optimizer", "extra_tensors") and isinstance(leaf, tuple):
                _check_value(fqn, *leaf)
            elif leaf is not None and type(leaf) not in (bool, int, float, str):
                _check_value(fqn, leaf)


def _check_value(name: str, value: Any) -> None:
    from ckptctl.train.safe_values import safe_copy

    instead = "; use plain values and tensors"
    _check_loads(name, value, lambda data: safe_copy(data, name), "", instead)


def _check_tensor(fqn: str, tensor: Any) -> None:
    import torch

    from ckptctl.formats.archive.directory import parse_record
    from ckptctl.records.opening import tensor_in

    check_has_memory(fqn, tensor)
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    if not plain or tensor.layout is not torch.strided:
        form = f" of layout {tensor.layout}"
        instead = ": use a plain tensor, or register it with persistent=False"
        _check_loads(fqn, tensor, lambda data: tensor_in(*parse_record(data)), form, instead)


def _check_loads(
    name: str, value: Any, load: Callable[[bytes], object], form: str, instead: str
) -> None:
    """Raise `UsageError` for what can be saved, and what `load` refuses as `Reader` would."""
    import io

    import torch

    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        load(buffer.getvalue())
    except Exception as error:
        why = (str(error).splitlines() or [""])[0].partition(", so it was not loaded")[0]
        raise UsageError(
            f"{name} is a {type(value).__name__}{form}, which can be saved but not loaded "
            f"({why[:160]}){instead}"
        ) from error


def check_has_memory(name: str, tensor: Any) -> None:
    """Raise `UsageError` for a tensor of a model that is not materialized."""
    if tensor.is_meta:
        raise UsageError(
            f"{name} is on the meta device, which has no memory: materialize the model before "
            "resume() and save(), as with model.to_empty(device=...)"
        )


def shares_elements(tensor: Any) -> bool:
    """Whether elements of a tensor share their memory, as those of an expanded view do."""
    if str(tensor.layout) != "torch.strided" or not tensor.numel():
        return False
    return any(n > 1 and step == 0 for n, step in zip(tensor.shape, tensor.stride(), strict=True))


def check_can_be_written(name: str, tensor: Any) -> None:
    """Raise `UsageError` for a tensor without memory, or of which elements share their memory."""
    check_has_memory(name, tensor)
    if shares_elements(tensor):
        raise UsageError(
            f"{name} is an expanded view, whose elements share their memory, so it cannot be "
            "loaded into: clone() it, or register it with persistent=False"
        )


def local_tensors(tensor: Any) -> Iterator[Any]:
    """The parts of a tensor on this rank, which it writes."""
    if hasattr(tensor, "local_shards"):  # ShardedTensor of FSDP1
        for shard in tensor.local_shards():
            yield from local_tensors(shard.tensor)
    elif hasattr(tensor, "to_local"):
        yield from local_tensors(tensor.to_local())
    else:
        yield tensor


def leaves(value: Any, name: str, *, in_tuples: bool = False) -> Iterator[tuple[str, Any]]:
    """Each value that DCP writes as one entry: what is neither a dict nor a list."""
    if isinstance(value, Mapping | list) or (in_tuples and isinstance(value, tuple)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from leaves(inner, f"{name}.{key}", in_tuples=in_tuples)
    else:
        yield name, value


def template(
    parts: Parts,
    position: RankPosition,
    saved: Metadata,
    kinds: Collection[str],
    *,
    formless: bool = False,
) -> dict[str, Any]:
    """The state that a load fills on this rank: the tensors, and a placeholder for each value.

    What the step lacks is in it as well, except state of the optimizer that no parameter had;
    `differences` finds it. `kinds` are the kinds of state in the step; an optimizer is `formless`
    if its state could not be made before.
    """
    state = sharded(parts, kinds)
    if "optimizer" in state:
        fit_state(state["optimizer"], saved, formless=formless)
    held = saved.bytes_entries
    for name in PLAIN:
        if getattr(parts, name) is not None and name in held:
            state[name] = _kept(None)
    if f"rng.{position.rng_key}" in held:
        state["rng"] = {position.rng_key: _kept(None)}
    for key in (GLOBAL_DATA, position.data_key):
        if f"dataloader.{key}" in held:
            state.setdefault("dataloader", {})[key] = _kept(None)
    for name, one in parts.extra.items():
        if f"extra.{name}" in held:
            state.setdefault("extra", {})[name] = _kept(None)
            state.setdefault("extra_tensors", {})[name] = _extra_tensors(name, one, saved)
    numbers = [fqn.partition(".")[2] for fqn in held if fqn.startswith("train_state.")]
    state["train_state"] = dict.fromkeys(numbers, 0)
    return state


def _extra_tensors(name: str, part: Stateful, saved: Metadata) -> dict[str, Any]:
    """The tensors to load of an `extra`: its own, or new ones where they have another form.

    An object may have no tensors before its first step, as most optimizers, or others by then.
    """
    import torch

    _, tensors = split(part.state_dict(), name)
    if isinstance(part, torch.optim.Optimizer):  # a parameter without a gradient so far has none
        start = f"extra_tensors.{name}."
        tensors = {key: one for key, one in tensors.items() if start + key in saved.tensors}
    for entry in saved.tensors.values():
        if entry.path[:2] != ("extra_tensors", name) or not entry.path[2:]:
            continue
        key, dtype = str(entry.path[2]), getattr(torch, entry.dtype)
        if rank_in(key) is not None:
            continue  # that of another rank
        own = tensors.get(key)
        form = None if own is None else (tuple(own.shape), own.dtype)
        if form != (entry.shape, dtype) or shares_elements(own):
            tensors[key] = torch.empty(entry.shape, dtype=dtype)
    return tensors


# The states of random number generators


def rng_state() -> dict[str, Any]:
    """The states of all generators of this process."""
    import torch

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = tuple(torch.cuda.get_rng_state_all())
    if "numpy" in sys.modules:
        import numpy as np

        name, key, place, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state())
        keys = torch.from_numpy(key.astype("int64"))
        state["numpy"] = (str(name), keys, int(place), int(has_gauss), gauss)
    return state


def restore_rng(state: dict[str, Any]) -> tuple[str, ...]:
    """Set all generators to a saved state; returns what could not be set."""
    import torch

    lost: list[str] = []
    if "python" in state:
        random.setstate(_as_tuples(state["python"]))
    if "torch" in state:
        torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy as np

        name, key, place, has_gauss, gauss = state["numpy"]
        np.random.set_state((name, key.numpy().astype("uint32"), place, has_gauss, gauss))
    saved = state.get("cuda", ())
    n_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for device, one in enumerate(saved[:n_devices]):
        torch.cuda.set_rng_state(one, device)
    if n_devices < len(saved):
        lost.append(f"rng of {len(saved) - n_devices} of {len(saved)} CUDA devices")
    return tuple(lost)


@contextmanager
def kept_random_states() -> Iterator[None]:
    """Leave all generators as they were before."""
    state = rng_state()
    try:
        yield
    finally:
        restore_rng(state)


def states_in(values: Iterable[tuple[str, Any]]) -> tuple[dict[str, Any], list[str]]:
    """The states of generators among the values of another program, in the form of `rng_state`.

    Also returns the names of the values that are none.
    """
    import torch

    state: dict[str, Any] = {}
    unknown: list[str] = []
    for name, value in values:
        for held in value.values() if isinstance(value, Mapping) else [value]:
            match held:
                case torch.Tensor() if held.numel() == CPU_RNG_BYTES and "torch" not in state:
                    state["torch"] = held.cpu()
                case torch.Tensor() if held.numel() == CUDA_RNG_BYTES:
                    state["cuda"] = (*state.get("cuda", ()), held.cpu())
                case [torch.Tensor(), *_] if all(one.numel() == CUDA_RNG_BYTES for one in held):
                    state["cuda"] = tuple(one.cpu() for one in held)
                case [3, [*_], _] if "python" not in state:
                    state["python"] = held
                case ["MT19937", key, place, has_gauss, gauss] if "numpy" not in state:
                    keys = torch.as_tensor([int(each) for each in key])
                    state["numpy"] = ("MT19937", keys, int(place), int(has_gauss), gauss)
                case []:
                    pass  # of no devices
                case _:
                    unknown.append(name)
    return state, unknown


def _as_tuples(value: Any) -> Any:
    # `random.setstate` accepts tuples only; a load may give lists.
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


def reseed(seed: int, step: int, rank: int) -> None:
    """Set all generators to a state derived from the run's seed, the step and the rank.

    Equal arguments give equal numbers; other ranks and steps get others.
    """
    import torch

    words = hashlib.sha256(f"ckptctl {seed} {step} {rank}".encode()).digest()
    derived = int.from_bytes(words[:8], "big")
    random.seed(derived)
    torch.manual_seed(derived % 2**63)  # also seeds every CUDA device
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(derived % 2**32)
