"""Collect the state of a training script, and give it back.

Model and optimizer go through `torch.distributed.checkpoint.state_dict`, sharded as they
are. Small plain values (scheduler, random numbers, the position in the data) are one entry
each, so that not even an empty dict is lost; what exists once per rank has its own key.

    model.*                optimizer.*              sharded tensors
    scheduler, grad_scaler                          one value each
    rng.rank_0 …           dataloader.dp_rank_0 …   one value for each rank
    dataloader.global                               the position of a `GlobalLoader`
    extra.NAME                                      whatever else is `Stateful`
    train_state.step, .tokens, .samples, .world_size, .dp_size, .seed
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, cast

from ckptctl.data_classes import dataclass, field
from ckptctl.errors import ModelDiffers, UsageError
from ckptctl.formatting import counted
from ckptctl.model import Metadata
from ckptctl.train.samples import GlobalLoader


class Stateful(Protocol):
    """Any object that returns its state as a dict and can restore it."""

    def state_dict(self) -> dict[str, Any]:
        """The state, in plain values and tensors."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Restore a state."""
        ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of a training script whose state is saved; None for those it lacks."""

    model: Any = None
    optimizer: Any = None
    scheduler: Stateful | None = None
    dataloader: Any = None
    grad_scaler: Stateful | None = None
    extra: Mapping[str, Stateful] = field(default_factory=dict)

    @property
    def optimizers(self) -> tuple[Any, ...]:
        """The optimizers; torch takes several of one model as a list."""
        held = () if self.optimizer is None else self.optimizer
        return tuple(held) if isinstance(held, list | tuple) else (held,)

    @property
    def has_global_loader(self) -> bool:
        """Whether the data position is valid for any number of ranks."""
        return isinstance(self.dataloader, GlobalLoader)

    @property
    def keeps_data(self) -> bool:
        """Whether the dataloader can report its position."""
        return hasattr(self.dataloader, "state_dict")


@dataclass(frozen=True, slots=True)
class RankPosition:
    """The rank whose state this is, among all ranks and among the data-parallel ones."""

    rank: int
    world_size: int
    dp_rank: int
    dp_size: int

    @property
    def rng_key(self) -> str:
        """The key of this rank's random numbers."""
        return f"rank_{self.rank}"

    @property
    def data_key(self) -> str:
        """The key of this data-parallel rank's position in the data."""
        return f"dp_rank_{self.dp_rank}"


GLOBAL_DATA = "global"


def collect(parts: Parts, position: RankPosition, progress: Mapping[str, int]) -> dict[str, Any]:
    """The state of this rank, in the form that DCP takes. Every rank calls it."""
    state = _sharded(parts, ("model", "optimizer"))
    for name in ("scheduler", "grad_scaler"):
        part = getattr(parts, name)
        if part is not None:
            state[name] = _kept(part.state_dict())
    own: dict[str, Any] = {"state": rng_state()}
    generator = loader_generator(parts)
    if generator is not None:
        own["dataloader"] = generator.get_state()
    state["rng"] = {position.rng_key: _kept(own)}
    if parts.has_global_loader:
        state["dataloader"] = {GLOBAL_DATA: _kept(parts.dataloader.state_dict())}
    elif parts.keeps_data:
        state["dataloader"] = {position.data_key: _kept(parts.dataloader.state_dict())}
    if parts.extra:
        state["extra"] = {name: _extra(one.state_dict()) for name, one in parts.extra.items()}
    state["train_state"] = {
        **progress,
        "world_size": position.world_size,
        "dp_size": position.dp_size,
    }
    return state


def _sharded(parts: Parts, kinds: Collection[str]) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        get_optimizer_state_dict,
    )

    state: dict[str, Any] = {}
    if parts.model is not None and "model" in kinds:
        state["model"] = get_model_state_dict(parts.model)
    if parts.optimizer is not None and "optimizer" in kinds:
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


def _kept(value: Any) -> tuple[Any]:
    # DCP splits dicts and lists, loses empty ones and turns keys into text; a tuple is one
    # entry, and loads as it was.
    return (value,)


def _extra(state: dict[str, Any]) -> Any:
    """The state unchanged if it contains tensors, else as one value."""
    return state if any(True for _ in _tensors(state, "")) else _kept(state)


def check_readable(state: Mapping[str, Any]) -> None:
    """Raise `UsageError` for a value or tensor that `Reader` could not load again.

    `Reader` loads plain values and tensors, and runs no code from a checkpoint. Cost: a
    copy of the small entries in memory, and of tensors of an unusual class.
    """
    import io

    import torch

    for name, value in _values(state, ""):
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:
            raise UsageError(
                f"the state of {name} cannot be saved: it would not load again with "
                f"weights_only=True ({str(error).splitlines()[0][:160]}); use plain values"
            ) from error
    for name in ("model", "optimizer", "extra"):
        for fqn, leaf in _leaves(state.get(name, {}), name):
            _check_leaf(fqn, leaf)


def _check_leaf(fqn: str, leaf: Any) -> None:
    """Raise `UsageError` where `Reader` would refuse the record that DCP writes of a leaf."""
    import io

    import torch

    from ckptctl.formats.archive.directory import parse_record
    from ckptctl.records.opening import Unfit, tensor_in
    from ckptctl.train.safe_values import safe_copy

    if isinstance(leaf, torch.Tensor):
        for tensor in _local_tensors(leaf):
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
            if plain and tensor.layout is torch.strided and not tensor.is_meta:
                continue
            buffer = io.BytesIO()
            try:
                torch.save(tensor, buffer)
                tensor_in(*parse_record(buffer.getvalue()))
            except Exception as error:
                why = error.message if isinstance(error, Unfit) else str(error).splitlines()[0]
                raise UsageError(
                    f"{fqn} is a {type(tensor).__name__} of layout {tensor.layout}, which can be "
                    f"saved but not loaded ({why[:160]}): use a plain tensor, or register it with "
                    "persistent=False"
                ) from error
    elif leaf is not None and type(leaf) not in (bool, int, float, str):
        buffer = io.BytesIO()
        try:
            torch.save(leaf, buffer)
            safe_copy(buffer.getvalue(), fqn)
        except Exception as error:
            why = (str(error).splitlines() or [""])[0]
            raise UsageError(
                f"{fqn} is a {type(leaf).__name__}, which can be saved but not loaded "
                f"({why[:160]}); use plain values and tensors"
            ) from error


def _local_tensors(tensor: Any) -> Iterator[Any]:
    """The parts of a tensor on this rank, which it writes."""
    if hasattr(tensor, "local_shards"):  # ShardedTensor of FSDP1
        for shard in tensor.local_shards():
            yield from _local_tensors(shard.tensor)
    elif hasattr(tensor, "to_local"):
        yield from _local_tensors(tensor.to_local())
    else:
        yield tensor


def _leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Each value that DCP writes as one entry: what is neither a dict nor a list."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _leaves(one, f"{name}.{key}")
    elif isinstance(value, list):
        for key, one in enumerate(value):
            yield from _leaves(one, f"{name}.{key}")
    else:
        yield name, value


def _values(state: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        here = f"{name}.{key}" if name else str(key)
        if isinstance(value, tuple):
            yield here, value
        elif isinstance(value, Mapping) and here not in ("model", "optimizer"):
            yield from _values(value, here)


def template(
    parts: Parts, position: RankPosition, saved: Metadata, kinds: Collection[str]
) -> dict[str, Any]:
    """The state that DCP loads into on this rank: the tensors, and a placeholder per value.

    It names only what the step contains; `kinds` are those of `kinds_in`. Raises `ModelDiffers`
    if a tensor of the model or the optimizer is not in the step, or has another shape there.
    """
    state = _sharded(parts, kinds)
    _leave_out_unsaved(state, saved)
    check_fits(state, saved)
    held = saved.bytes_entries
    for name in ("scheduler", "grad_scaler"):
        if getattr(parts, name) is not None and name in held:
            state[name] = _kept(None)
    if f"rng.{position.rng_key}" in held:
        state["rng"] = {position.rng_key: _kept(None)}
    for key in (GLOBAL_DATA, position.data_key):
        if f"dataloader.{key}" in held:
            state.setdefault("dataloader", {})[key] = _kept(None)
    extra = {
        name: _kept(None) if f"extra.{name}" in held else one.state_dict()
        for name, one in parts.extra.items()
        if any(_belongs(fqn, f"extra.{name}") for fqn in (*saved.tensors, *held))
    }
    if extra:
        state["extra"] = extra
    numbers = [fqn.partition(".")[2] for fqn in held if fqn.startswith("train_state.")]
    state["train_state"] = dict.fromkeys(numbers, 0)
    return state


def _leave_out_unsaved(state: Mapping[str, Any], saved: Metadata) -> None:
    """Empty the optimizer state of each parameter of which the step has none.

    A parameter that had no gradient before the save, or was frozen, has no state; torch makes
    one for every parameter before a load. Nothing is left out of a step that has none of any
    parameter by its name: it was saved by another optimizer, or names the state by number.
    """
    paths = [entry.path for entry in saved.tensors.values()]
    paths += [entry.path for entry in saved.bytes_entries.values()]
    known = {path[2] for path in paths if path[:2] == ("optimizer", "state") and len(path) > 2}
    held = state.get("optimizer", {}).get("state", {})
    for fqn in held.keys() - known if held.keys() & known else ():
        held[fqn] = {}


@dataclass(frozen=True, slots=True)
class Unused:
    """Tensors of the step's optimizer that the optimizer of a rank has no place for.

    `names` are by parameter, and then of its state. The options of a step that `fits` are those
    of this optimizer, which lacks state of whole parameters only: it trains fewer of them.
    """

    names: tuple[tuple[str, str], ...]
    fits: bool


def unused_state(state: Mapping[str, Any], saved: Metadata) -> Unused:
    """What a load into `state` would leave out of the optimizer's state in the step.

    Only parameters of this rank's model count: the others are those of other ranks.
    """
    optimizer = state.get("optimizer", {})
    held = optimizer.get("state", {})
    loaded = {fqn for fqn, _ in _tensors(optimizer, "optimizer")}
    own = held.keys() | state.get("model", {}).keys()
    paths = [entry.path for fqn, entry in saved.tensors.items() if fqn not in loaded]
    names = [
        (str(path[2]), ".".join(map(str, path[3:])))
        for path in paths
        if path[:2] == ("optimizer", "state") and len(path) > 3 and path[2] in own
    ]
    fits = any(held.values()) and not any(held.get(fqn) for fqn, _ in names)
    return Unused(tuple(names) if "optimizer" in state else (), fits or not names)


def describe_unused(found: Sequence[Unused]) -> str:
    """What the ranks found together, to follow the word "optimizer"; empty where it is nothing."""
    names = sorted({name for one in found for name in one.names})
    if not names:
        return ""
    fqn, value = names[0]
    if not all(one.fits for one in found):
        return f" (this job's has no {value} of {fqn})"
    n_parameters = len({each for each, _ in names})
    return f" state of {counted(n_parameters, 'parameter')}, such as {fqn}"


def kinds_in(saved: Metadata) -> frozenset[str]:
    """The kinds of state that a step contains: the first names of its entries."""
    return frozenset(fqn.partition(".")[0] for fqn in (*saved.tensors, *saved.bytes_entries))


def _belongs(fqn: str, name: str) -> bool:
    return fqn == name or fqn.startswith(f"{name}.")


def check_fits(state: Mapping[str, Any], saved: Metadata) -> None:
    """Raise `ModelDiffers` unless every tensor is in the step, with the same global shape.

    Raises `UsageError` for a tensor that nothing can be loaded into: no older step avoids that.
    """
    missing, differing = [], []
    for fqn, tensor in _tensors(state, ""):
        for local in _local_tensors(tensor):
            _check_can_be_written(fqn, local)
        entry = saved.tensors.get(fqn)
        if entry is None:
            missing.append(fqn)
        elif entry.shape != tuple(tensor.shape):
            differing.append(f"{fqn} is {tuple(tensor.shape)} here and {entry.shape} in the step")
    if differing:
        raise ModelDiffers(
            f"{len(differing)} tensors have another shape in the step: {differing[0]}; it was "
            "saved by a different model"
        )
    if missing:
        raise ModelDiffers(
            f"{len(missing)} tensors of this job are not in the step, such as {missing[0]}; "
            f"{_naming(missing[0].partition('.')[0], saved)}"
        )


def _check_can_be_written(fqn: str, tensor: Any) -> None:
    """Raise `UsageError` for a tensor without memory, or of which elements share their memory."""
    if tensor.is_meta:
        raise UsageError(
            f"{fqn} is on the meta device, which has no memory to load into: materialize the model "
            "before resume(), as with model.to_empty(device=...)"
        )
    is_strided = str(tensor.layout) == "torch.strided"
    steps = zip(tensor.shape, tensor.stride(), strict=True) if is_strided else ()
    if tensor.numel() and any(n > 1 and step == 0 for n, step in steps):
        raise UsageError(
            f"{fqn} is an expanded view, whose elements share their memory, so it cannot be loaded "
            "into: clone() it, or register it with persistent=False"
        )


def _naming(kind: str, saved: Metadata) -> str:
    """How the step names the tensors of this kind, as the reason why a name is not in it."""
    names = [fqn for fqn in saved.tensors if _belongs(fqn, kind)]
    by_number = next((fqn for fqn in names if re.match(r"optimizer\.state\.\d+\.", fqn)), None)
    if by_number is not None:
        return (
            f"it holds the optimizer's state by number ({by_number}), as `optimizer.state_dict()` "
            "names it, and not by parameter: load it with `resolve` and `dcp.load`"
        )
    held = f"it holds {names[0]}, and" if names else "it"
    return f"{held} was saved by a different model or optimizer"


def _tensors(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    import torch

    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from _tensors(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for key, one in enumerate(value):
            yield from _tensors(one, f"{name}.{key}")


def rng_state() -> dict[str, Any]:
    """The states of all generators of this process."""
    import torch

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = tuple(torch.cuda.get_rng_state_all())
    if "numpy" in sys.modules:
        state["numpy"] = _numpy_state()
    return state


def _numpy_state() -> tuple[Any, ...]:
    import numpy as np
    import torch

    name, key, place, has_gauss, gauss = cast("tuple[Any, ...]", np.random.get_state())
    return (str(name), torch.from_numpy(key.astype("int64")), int(place), int(has_gauss), gauss)


def restore_rng(state: dict[str, Any]) -> tuple[str, ...]:
    """Set all generators to a saved state; returns what could not be set."""
    import torch

    lost: list[str] = []
    random.setstate(_as_tuples(state["python"]))
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


def _as_tuples(value: Any) -> Any:
    # `random.setstate` accepts tuples only; a load may give lists.
    return tuple(_as_tuples(item) for item in value) if isinstance(value, (list, tuple)) else value


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
