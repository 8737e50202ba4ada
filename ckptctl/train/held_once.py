"""State that a step holds once, though several ranks have it: check that they have the same.

DCP saves an entry that several ranks have from one of them: values that differ would be lost
without an error. So all that the ranks would write under one name is compared before anything is
written: its form, then a quick digest of what more than one rank has, and where one differs an
exact digest, which depends on the values alone. If nothing but states of random generators
differs, each rank saves its own; anything else is refused.

Buffers that DDP gives from its lowest rank to the others in each forward pass may differ; those
of the lowest rank are saved.
"""

from __future__ import annotations

import dataclasses
import io
import os
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.default_planner import (
    DefaultSavePlanner,
    create_default_local_save_plan,
)
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.nn.parallel import DistributedDataParallel

from ckptctl.distributed.process_group import ProcessGroup
from ckptctl.errors import UsageError
from ckptctl.formats.archive.writing import WRITABLE
from ckptctl.formatting import and_more
from ckptctl.records.slices import row_major
from ckptctl.storage.in_flight import act_in_flight
from ckptctl.train.rank_names import Path, matches, name_by_rank, rank_in, short_name, unit_of
from ckptctl.train.state import local_tensors
from ckptctl.train.tensor_copy import elements_of, is_plain, memory_of, parts_of


@dataclass(frozen=True, slots=True)
class _WriteEntry:
    """What a rank would write under one name: a value, a tensor, or a shard of one.

    `key` is equal for what DCP takes for the same. Without `compared` only the form has to agree.
    """

    name: str
    key: int
    form: str
    value: Any = None
    compared: bool = True


@dataclass(frozen=True, slots=True)
class _Exact:
    """An entry as every rank can compare it; `rest` leaves the states of generators out."""

    name: str
    unit: Path | None
    value: tuple[str, int]
    rest: tuple[str, int]


@dataclass(frozen=True, slots=True)
class Outline:
    """What a rank would write, for the other ranks: the keys and the forms of its entries.

    `unused` are the patterns of `per_rank` that match nothing on this rank.
    """

    keys: bytes
    forms: bytes
    unused: frozenset[str]


class HeldOnce:
    """The entries of a rank's state, to compare with those of other ranks.

    What matches a pattern of `per_rank` gets the number of the rank in its name at once. Of the
    names in `copied`, DCP is asked for those of the lowest rank, whatever the others have.
    """

    def __init__(
        self,
        state: dict[str, Any],
        copied: Collection[str],
        per_rank: Sequence[str],
        group: ProcessGroup,
    ) -> None:
        flat, paths = flatten_state_dict(state)
        taken = next((name for name in flat if rank_in(name) is not None), None)
        if taken is not None:
            raise UsageError(f"{taken} has the form of a name of one rank's own state: rename it")
        units = {unit_of(path) for path in paths.values()} - {None} if per_rank else set()
        own = {unit for unit in units if unit and any(matches(unit, one) for one in per_rank)}
        # Each rank saves its shards anyway, under the name that they have together.
        self._divided = {
            name
            for name, value in flat.items()
            if hasattr(value, "local_shards")
            or (hasattr(value, "to_local") and tuple(value.to_local().shape) != tuple(value.shape))
        }
        if own:
            name_by_rank(state, own - {unit_of(paths[name]) for name in self._divided}, group.rank)
            flat, paths = flatten_state_dict(state)
        self._state, self._rank, self._paths = state, group.rank, paths
        self._entries = [*_entries(flat, copied)] if group.size > 1 else []
        unused = {one for one in per_rank if not any(matches(unit, one) for unit in own)}
        self.outline = Outline(
            _packed(one.key for one in self._entries),
            _packed(number_of(one.form) for one in self._entries),
            frozenset(unused),
        )

    def agree(self, outlines: Sequence[Outline], group: ProcessGroup) -> None:
        """Compare the entries over the ranks; every rank calls it, with the outlines of all.

        Raises `UsageError`, the same on every rank, if a value differs that a step holds once.
        Where only states of generators differ, it gives their entries the number of the rank.
        """
        unused = frozenset.intersection(*(one.unused for one in outlines))
        if unused:
            raise UsageError(
                f"per_rank has {min(unused)!r}, which matches no state of this job: it takes names "
                "of parameters and buffers, of extra states, and patterns of them"
            )
        if group.size == 1:
            return
        keys = _Keys([one.keys for one in outlines], self._rank)
        different = keys.different([one.forms for one in outlines])
        digests = group.from_all(lambda: self._digests(keys.shared))
        different |= keys.different(digests)
        if not different:
            return
        wrong = [entry for entry in self._entries if entry.key in different]
        ranks = group.from_all(lambda: {one.key: self._exact(one) for one in wrong})
        held = {unit_of(path) for path in self._paths.values()}
        name_by_rank(self._state, _check(ranks) & held, self._rank)

    def _digests(self, shared: Sequence[bool]) -> bytes:
        """The quick digest of each entry that other ranks have, too; 0 of the others."""
        numbers = [0] * len(self._entries)
        tensors = []
        for place, (entry, is_shared) in enumerate(zip(self._entries, shared, strict=True)):
            if not is_shared or not entry.compared:
                continue
            if isinstance(entry.value, torch.Tensor):
                tensors.append((place, entry.value))
            else:
                numbers[place] = number_of(_text(entry.value))
        found = quick_digests([tensor for _, tensor in tensors])
        for (place, _), number in zip(tensors, found, strict=True):
            numbers[place] = number
        return _packed(numbers)

    def _exact(self, entry: _WriteEntry) -> _Exact:
        path = self._paths[entry.name]
        unit = unit_of(path)
        if path[0] == "dataloader" or entry.name in self._divided:
            unit = None  # the generators of a loader determine which samples a rank takes
        both = [
            number_of(_text(entry.value, generators=each)) if entry.compared else 0
            for each in (True, False)
        ]
        return _Exact(entry.name, unit, (entry.form, both[0]), (entry.form, both[1]))


def _entries(flat: dict[str, Any], copied: Collection[str]) -> Iterator[_WriteEntry]:
    """What DCP would write of a flattened state; of a sharded tensor also its global form."""
    sharded = set()
    for item in create_default_local_save_plan(flat, is_coordinator=True).items:
        name, about = item.index.fqn, item.tensor_data
        value = flat[name]
        if about is None:
            yield _WriteEntry(name, number_of(name), "a value", value)
            continue
        form = f"{about.properties.dtype} {tuple(about.size)}"
        if not hasattr(value, "to_local") and not hasattr(value, "local_shards"):
            yield _WriteEntry(name, number_of(name), form, value, name not in copied)
            continue
        if name not in sharded:
            sharded.add(name)
            yield _WriteEntry(name, number_of(name), f"shards of {form}", compared=False)
        (shard,) = local_tensors(find_state_dict_object(flat, item.index))
        place = f"{name} at {tuple(about.chunk.offsets)}"
        yield _WriteEntry(name, number_of(place), str(tuple(about.chunk.sizes)), shard)


def _packed(numbers: Iterator[int] | Sequence[int]) -> bytes:
    return array("q", numbers).tobytes()


class _Keys:
    """The keys of all ranks. `shared` tells of each key of this rank whether others have it."""

    def __init__(self, keys: Sequence[bytes], rank: int) -> None:
        self._keys = _joined(keys)
        _, self._groups, counts = torch.unique(self._keys, return_inverse=True, return_counts=True)
        self._n_groups = len(counts)
        at = sum(len(one) for one in keys[:rank]) // 8
        own = self._groups[at : at + len(keys[rank]) // 8]
        self.shared: list[bool] = (counts[own] > 1).tolist()

    def different(self, numbers: Sequence[bytes]) -> set[int]:
        """The keys under which the ranks have several numbers."""
        each = _joined(numbers)
        one_of = torch.zeros(self._n_groups, dtype=torch.int64)
        one_of[self._groups] = each
        return set(self._keys[each != one_of[self._groups]].tolist())


def _joined(numbers: Sequence[bytes]) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(numbers)), dtype=torch.int64)


def _text(value: Any, *, generators: bool = True) -> str:
    """A text that is equal for equal values, with or without the states of generators."""
    if not generators and _is_generator(value):
        return "the state of a generator"
    if isinstance(value, Mapping):
        pairs = sorted((repr(key), _text(one, generators=generators)) for key, one in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(one, generators=generators) for one in value)}]"
    if isinstance(value, set | frozenset):
        return f"<{sorted(map(_text, value))}>"
    if isinstance(value, torch.Tensor):
        digests = [exact_digest(one) for one in local_tensors(value)]
        return f"{value.dtype} {tuple(value.shape)} {digests}"
    return f"{value.dtype} {value.tolist()!r}" if hasattr(value, "tolist") else repr(value)


def _is_generator(value: Any) -> bool:
    """Whether a value is the state of a generator of NumPy, of Python, or of torch."""
    if isinstance(value, Mapping):
        return {"bit_generator", "state"} <= value.keys()
    if isinstance(value, list | tuple):
        kinds = [one for one in value if isinstance(one, int | str)][:1]
        lengths = [len(one) for one in value if isinstance(one, list | tuple | torch.Tensor)]
        return (kinds, lengths) in (([3], [625]), (["MT19937"], [624]))
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.dim() != 1:
        return False
    for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
        generator = torch.Generator(device)
        if value.numel() == generator.get_state().numel():
            with suppress(RuntimeError):
                generator.set_state(value.cpu())
                return True
    return False


def _check(ranks: Sequence[Mapping[int, _Exact]]) -> set[Path]:
    """The units of which only generators differ; raises `UsageError` if anything else does."""
    held: dict[int, dict[int, _Exact]] = {}
    for rank, own in enumerate(ranks):
        for key, exact in own.items():
            held.setdefault(key, {})[rank] = exact
    generators: set[Path] = set()
    refused: dict[str, dict[int, _Exact]] = {}
    for by_rank in held.values():
        (first, *others) = by_rank.values()
        if all(one.value == first.value for one in others):
            continue  # equal, on other devices or in another order of memory
        if first.unit is not None and all(one.rest == first.rest for one in others):
            generators.add(first.unit)
        else:
            refused.setdefault(first.name, by_rank)
    if refused:
        raise UsageError(_refusal(refused))
    return generators


def _refusal(refused: Mapping[str, Mapping[int, _Exact]]) -> str:
    """What differs, between which ranks, and what to do about it."""
    kinds = ("train_state", "model")  # causes come before what follows from them
    name = min(refused, key=lambda name: (*(not name.startswith(kind) for kind in kinds), name))
    by_rank = refused[name]
    others = sorted(refused.keys() - {name})
    ranks: dict[object, list[int]] = {}
    for rank, exact in by_rank.items():
        ranks.setdefault(exact.value, []).append(rank)
    between = " and ".join(f"{alike[0]}{and_more(alike)}" for alike in list(ranks.values())[:2])
    more = f"; so do {len(others)} more, such as {others[0]}" if others else ""
    unit = next(iter(by_rank.values())).unit
    kind, _, rest = name.partition(".")
    if name.startswith("optimizer.param_groups"):
        return (
            f"the options of the optimizer differ between ranks {between}, as those of pipeline "
            "stages do, and a step holds them once: save with `Writer` what "
            "get_optimizer_state_dict returns with flatten_optimizer_state_dict=True"
        )
    if kind == "train_state":
        what, then = rest, "give save() the same on all ranks"
    elif kind == "dataloader":
        what = f"the state of the dataloader ({rest})"
        then = "ranks that share a dp_rank must take the same samples"
        if rest == "global":
            then = "give all ranks the same data set, seed and global batch"
    else:
        shown = name.replace("extra_tensors.", "extra ").replace("extra.", "extra ")
        what, then = f"the state of {shown}", "make it equal on all ranks"
        then += "" if unit is None else f", or pass per_rank=[{short_name(unit)!r}]"
    return f"{what} differs between ranks {between}, and a step holds it once: {then}{more}"


def copied_buffers(model: Any, state: Mapping[str, Any]) -> frozenset[str]:
    """The names in a step of the buffers that DDP copies to all ranks before each forward pass."""
    copied = {
        buffer.data_ptr()
        for module in (() if model is None else model.modules())
        if isinstance(module, DistributedDataParallel) and module.broadcast_buffers
        for buffer in module.modules_buffers
        if buffer.numel()
    }
    return frozenset(
        f"model.{name}"
        for name, value in (state["model"].items() if copied else ())
        if isinstance(value, torch.Tensor)
        and not hasattr(value, "to_local")
        and not hasattr(value, "local_shards")
        and value.data_ptr() in copied
    )


class LowestRankPlanner(DefaultSavePlanner):
    """Saves the tensors of some names from the lowest rank that has them."""

    def __init__(self, names: Collection[str] = ()) -> None:
        super().__init__()
        self._names = names

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        seen: set[MetadataIndex] = set()
        plans = []
        for plan in all_plans:
            items = [one for one in plan.items if one.index not in seen]
            plans.append(dataclasses.replace(plan, items=items))
            seen.update(one.index for one in items if one.index.fqn in self._names)
        return super().create_global_plan(plans)


# Digests of tensors where they lie


_PIECE_BYTES = 16 << 20
"""Bytes that one thread digests at once."""

_N_THREADS = 4

_PIECE_ELEMENTS = 2 << 20
"""Elements that a device digests at once: some 64 MiB of its memory."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_FACTORS = (-0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15)
"""Odd numbers of splitmix64, as signed ones."""


def number_of(data: bytes | memoryview | str) -> int:
    """The digest of bytes or of a text, as a signed number of 64 bits."""
    encoded = data.encode() if isinstance(data, str) else data
    found: int = xxhash.xxh3_64_intdigest(encoded)
    return found - (found >> 63 << 64)


def quick_digests(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The quick digest of each tensor, in their order.

    It depends on the device and on the order of the elements in memory. NaN is equal to itself.
    Memory of this machine is read in place; one number a tensor is copied from another device.
    """
    known: dict[int, list[int]] = {}
    long: dict[int, memoryview] = {}
    on_devices: dict[torch.device, dict[int, torch.Tensor]] = {}
    with torch.no_grad():
        for place, tensor in enumerate(tensors):
            tensor = tensor.detach()
            if not _has_plain_memory(tensor):
                known[place] = [exact_digest(tensor)]
                continue
            order = sorted(range(tensor.dim()), key=[-step for step in tensor.stride()].__getitem__)
            layout = number_of(str([dim for dim in order if tensor.shape[dim] > 1]))
            inner = tensor.permute(order)
            memory = memory_of(inner)
            if memory is not None:
                is_long = len(memory) > _PIECE_BYTES
                known[place] = [layout] if is_long else [layout, number_of(memory)]
                long |= {place: memory} if is_long else {}
            elif tensor.device.type == "cpu":
                known[place] = [exact_digest(tensor)]
            else:
                digests = on_devices.setdefault(tensor.device, {})
                digests[place] = device_digest(inner).add_(layout)
    pieces = [
        (place, memory[at : at + _PIECE_BYTES])
        for place, memory in long.items()
        for at in range(0, len(memory), _PIECE_BYTES)
    ]
    n_threads = min(_N_THREADS, os.cpu_count() or 1)
    digested = act_in_flight(lambda piece: number_of(piece[1]), pieces, width=n_threads)
    for (place, _), number in zip(pieces, digested, strict=True):
        known[place].append(number)
    found = [0] * len(tensors)
    for place, numbers in known.items():
        found[place] = number_of(str(numbers))
    for digests in on_devices.values():  # one copy from each device
        for place, number in zip(digests, torch.stack([*digests.values()]).tolist(), strict=True):
            found[place] = number
    return found


def device_digest(tensor: torch.Tensor) -> torch.Tensor:
    """The quick digest of a plain tensor on its device: the sum of a hash of each element.

    The hash is of the element's bits and of its position, mixed as by splitmix64.
    """
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.numel():
        return total
    if tensor.itemsize == 16:
        tensor = torch.view_as_real(tensor)
    bits = tensor.view(_WORDS[tensor.itemsize])
    n_most = min(bits.numel(), _PIECE_ELEMENTS)
    places = torch.arange(n_most, dtype=torch.int64, device=bits.device).mul_(_FACTORS[0])
    at = 0
    for part in parts_of(bits, n_most):
        words = part.reshape(-1).to(torch.int64, copy=True)
        # A difference of positions is one of hashes, also where all elements are 0.
        first = (at * _FACTORS[0] + 2**63) % 2**64 - 2**63
        words.mul_(_FACTORS[1]).add_(places[: len(words)]).add_(first)
        for shift, factor in zip((30, 27), _FACTORS[1:], strict=True):
            words.bitwise_xor_(words >> shift).mul_(factor)
        total += words.bitwise_xor_(words >> 31).sum()
        at += len(words)
    return total


def exact_digest(tensor: torch.Tensor) -> int:
    """A digest that equal values have, wherever and in whatever order they lie in memory."""
    tensor = tensor.detach()
    if not _has_plain_memory(tensor) and type(tensor) is torch.Tensor:
        tensor = tensor.resolve_conj().resolve_neg()
    digest = xxhash.xxh3_64()
    if _has_plain_memory(tensor):
        for piece in elements_of(tensor, row_major(tuple(tensor.shape))):
            digest.update(piece)
    else:  # a quantized tensor, or one of another class, which is written in this form
        saved = io.BytesIO()
        torch.save(tensor, saved)
        digest.update(saved.getbuffer())
    return number_of(digest.digest())


def _has_plain_memory(tensor: torch.Tensor) -> bool:
    return is_plain(tensor) and str(tensor.dtype).removeprefix("torch.") in WRITABLE
