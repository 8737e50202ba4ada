"""Flatten and nest states, and pickle them as `torch.save` would.

A nested state becomes entries whose keys are joined with dots, as in torch's own
checkpoints; entries are put back by their key paths. A value that is neither a tensor
nor plain is refused by its key: what it was is not known, because nothing of a pickle
runs. `torch.load(weights_only=True)` reads the pickles: they call only what rebuilds tensors
and ordered dicts.

Source: torch 2.13 `torch/distributed/checkpoint/_traverse.py`, `_nested_dict.py`,
`torch/serialization.py`, `torch/_utils.py`, `torch/_weights_only_unpickler.py`;
CPython 3.11 `Lib/pickle.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from struct import pack
from types import NoneType
from typing import Any, NamedTuple

from ckptctl.formats.archive.writing import pickled_integer, tensor_value
from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.stubs import Dtype, OrderedDictStub
from ckptctl.formats.pickles.values import FREE_NODES, MAX_DEPTH, TensorStub, TimeDelta


def pickled_state(state: object) -> bytes:
    """The pickle at protocol 2 of nested dicts and lists, `TensorStub` and `PickledValue`.

    Anything else stands for an item of a list whose value is unknown: it becomes None.
    """
    return b"\x80\x02" + b"".join(_state(state)) + b"."


def _state(value: object) -> Iterator[bytes]:
    if isinstance(value, PickledValue):
        yield value.pickled
    elif isinstance(value, TensorStub):
        yield tensor_value(value.dtype, value.shape, value.storage_key)
    elif isinstance(value, dict):
        yield b"}("
        for key, item in value.items():
            yield text(key)
            yield from _state(item)
        yield b"u"
    elif isinstance(value, list):
        yield b"]("
        for item in value:
            yield from _state(item)
        yield b"e"
    else:
        yield b"N"


Path = tuple[str | int, ...]


class NotPlain(Exception):
    """A value cannot be an entry; the message states which, and why."""


class FlatEntry(NamedTuple):
    """An entry: its key path, and what is there."""

    path: Path
    value: object

    @property
    def fqn(self) -> str:
        """The path joined with dots."""
        return ".".join(map(str, self.path))


def flattened(state: object) -> tuple[FlatEntry, ...]:
    """The entries of a state dict, in its order.

    Dicts come apart, and lists that hold tensors or dicts; an empty dict leaves nothing.
    Raises `NotPlain` for a state that is no dict, and where two keys come to one name.
    """
    if not isinstance(state, dict):
        raise NotPlain(f"it holds {_called(state)}, and no dict with named entries")
    leaves = tuple(_leaves((), state))
    names: set[str] = set()
    for leaf in leaves:
        if leaf.fqn in names:
            raise NotPlain(f"two of its entries would be called {leaf.fqn!r}")
        names.add(leaf.fqn)
    return leaves


def _leaves(path: Path, value: object) -> Iterator[FlatEntry]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int | float | NoneType):
                raise NotPlain(f"a key below {'.'.join(map(str, path)) or 'it'!r} is no plain one")
            yield from _leaves((*path, str(key)), item)
    elif isinstance(value, list) and _comes_apart(value):
        for number, item in enumerate(value):
            yield from _leaves((*path, number), item)
    else:
        yield FlatEntry(path, value)


def _comes_apart(value: list[object]) -> bool:
    return any(
        isinstance(item, dict | TensorStub) or (isinstance(item, list) and _comes_apart(item))
        for item in value
    )


class PickledValue(NamedTuple):
    """A plain value, as a pickle at protocol 2 has it, without what begins and ends that."""

    pickled: bytes


def nested(leaves: Iterable[FlatEntry]) -> dict[str, object]:
    """The state dict that comes apart into these entries, in their order.

    A number in a key path counts items of a list; items that no entry is for become
    None. Raises `NotPlain` where paths contradict each other, or go too deep.
    """
    root: dict[str, object] = {}
    n_missing = 0
    for leaf in leaves:
        if len(leaf.path) > MAX_DEPTH:
            raise NotPlain(f"the keys of {leaf.fqn} are nested deeper than {MAX_DEPTH} levels")
        holder: object = root
        for key, following in zip(leaf.path, (*leaf.path[1:], None), strict=True):
            if isinstance(holder, list) and isinstance(key, int) and key >= 0:
                n_missing += max(0, key - len(holder))
                if n_missing > FREE_NODES:
                    raise NotPlain(f"{leaf.fqn} is item {key:,} of a list that is not there")
                holder.extend([None] * (key + 1 - len(holder)))
                known = holder[key]
            elif isinstance(holder, dict) and isinstance(key, str):
                known = holder.get(key)
            else:
                raise NotPlain(f"the keys of {leaf.fqn} contradict those of another entry")
            if following is None:
                if known is not None:
                    raise NotPlain(f"{leaf.fqn} is there twice, or has entries below it")
                known = leaf.value
            elif known is None:
                known = [] if isinstance(following, int) else {}
            holder[key] = known  # type: ignore[index]
            holder = known
    return root


def written(leaf: FlatEntry) -> PickledValue:
    """A plain value; raises `NotPlain` for any other."""
    return PickledValue(b"".join(_written(leaf.value, leaf.fqn)))


def pickled_value(leaf: FlatEntry) -> bytes:
    """The pickle of a plain value, at protocol 2; raises `NotPlain` for any other."""
    return b"\x80\x02" + written(leaf).pickled + b"."


def _written(value: Any, fqn: str) -> Iterator[bytes]:
    kind = type(value)
    if kind in _SIMPLE:
        yield _SIMPLE[kind](value)
    elif kind is list:
        yield b"](" + b"".join(_all(value, fqn)) + b"e"
    elif kind is tuple:
        yield b"(" + b"".join(_all(value, fqn)) + b"t"
    elif isinstance(value, dict):
        begun = b"ccollections\nOrderedDict\n)R" if isinstance(value, OrderedDictStub) else b"}"
        pairs = [one for pair in value.items() for one in pair]
        yield begun + b"(" + b"".join(_all(pairs, fqn)) + b"u"
    else:
        raise NotPlain(f"{fqn} holds {_called(value)}, which cannot be carried over")


def _all(values: Sequence[object], fqn: str) -> Iterator[bytes]:
    for value in values:
        yield from _written(value, fqn)


def text(value: str) -> bytes:
    """A string, as a pickle has it."""
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + pack("<I", len(data)) + data


def _bytes(value: bytes) -> bytes:
    # Without this, protocol 2 has no bytes.
    return b"c_codecs\nencode\n" + text(value.decode("latin-1")) + text("latin1") + b"\x86R"


_SIMPLE: Mapping[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: pickled_integer,
    float: lambda value: b"G" + pack(">d", value),
    str: text,
    bytes: _bytes,
    Dtype: lambda value: f"ctorch\n{value.name}\n".encode(),
    TimeDelta: lambda value: (
        b"cdatetime\ntimedelta\n(" + b"".join(map(pickled_integer, value)) + b"tR"
    ),
}


def _called(value: object) -> str:
    if isinstance(value, Opaque):
        return value.name if " " in value.name else f"an object of {value.name}"
    if isinstance(value, TensorStub):
        return "a tensor inside a value"
    return f"a {type(value).__name__}"
