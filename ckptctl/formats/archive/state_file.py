"""Flatten and nest states, and write a whole file of `torch.save` a piece at a time.

A nested state becomes entries whose keys are joined with dots, as in torch's own
checkpoints; entries are put back by their key paths. A value that is neither a tensor
nor plain is refused by its key: what it was is not known, because nothing of a pickle
runs.

A file is one archive: the pickle of a nested state dict, and the storage of each tensor
as a member. All but the elements and their checksums is known beforehand, and with it the
position of every byte. `torch.load(weights_only=True)` reads the file: the pickle calls
only what rebuilds tensors and ordered dicts.

Source: torch 2.13 `torch/distributed/checkpoint/_traverse.py`, `_nested_dict.py`,
`torch/serialization.py`, `torch/_utils.py`, `torch/_weights_only_unpickler.py`;
CPython 3.11 `Lib/pickle.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from struct import pack
from types import NoneType
from typing import Any, NamedTuple

from zlib_ng.zlib_ng import crc32

from ckptctl.formats.archive.writing import (
    ID,
    SMALL_MEMBERS,
    VERSION,
    Placed,
    end,
    folded,
    pickled_integer,
    place,
    tensor_value,
)
from ckptctl.formats.pickles.stubs import Dtype, Ordered
from ckptctl.formats.pickles.values import FREE_NODES, MAX_DEPTH, Opaque, TensorStub, TimeDelta

_ID_DIGITS = 20


class _Member(NamedTuple):
    placed: Placed
    crc: int


def pickled_state(state: object) -> bytes:
    """The pickle of a nested state of dicts and lists, `TensorStub` and `Written`, at protocol 2.

    Anything else stands for an item of a list whose value is unknown: it becomes None.
    """
    return b"\x80\x02" + b"".join(_state(state)) + b"."


def _state(value: object) -> Iterator[bytes]:
    if isinstance(value, Written):
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


class FlatArchive:
    """A file of `torch.save` but for its elements: what comes before, between and behind them.

    `sizes` are the bytes of each storage, in the order of their keys `0`, `1`, …;
    `n_bytes` those of the whole file.
    """

    def __init__(self, pickle: bytes, sizes: Sequence[int]) -> None:
        self._front: list[_Member] = []
        at = 0
        for name, data in ((b"data.pkl", pickle), *SMALL_MEMBERS):
            placed = place(at, name, data, len(data))
            self._front.append(_Member(placed, crc32(data)))
            at = placed.following
        self._storages: list[Placed] = []
        for key, size in enumerate(sizes):
            self._storages.append(place(at, b"data/%d" % key, b"", size))
            at = self._storages[-1].following
        self._version = _Member(place(at, *VERSION, len(VERSION[1])), crc32(VERSION[1]))
        self._last = place(self._version.placed.following, ID, b"", 2 * _ID_DIGITS)
        members = [member.placed for member in self._front]
        self._members = (*members, *self._storages, self._version.placed, self._last)
        n_directory = sum(len(member.entry(0)) for member in self._members)
        self.n_bytes = self._last.following + n_directory + len(end(0, 0, 0))

    def between(self, crcs: Sequence[int]) -> bytes:
        """What stands behind the first storages, whose checksums are `crcs`, up to the next."""
        n = len(crcs)
        if n:
            before = self._storages[n - 1].descriptor(crcs[-1])
        else:
            before = b"".join(member.placed.whole(member.crc) for member in self._front)
        if n < len(self._storages):
            return before + self._storages[n].header
        return before + self._end(crcs)

    def _end(self, crcs: Sequence[int]) -> bytes:
        version = self._version
        every = [*(member.crc for member in self._front), *crcs, version.crc]
        identity = self._of_names() + folded(every)
        every.append(crc32(identity))
        directory = b"".join(
            member.entry(crc) for member, crc in zip(self._members, every, strict=True)
        )
        return (
            version.placed.whole(version.crc)
            + self._last.header
            + identity
            + self._last.descriptor(every[-1])
            + directory
            + end(len(every), len(directory), self._last.following)
        )

    def _of_names(self) -> bytes:
        """The first half of `serialization_id`: torch, too, makes it of the members' names."""
        digest = hashlib.sha256(b"\0".join(member.path for member in self._members)).digest()
        return b"%020d" % int.from_bytes(digest[:8], "little")


Path = tuple[str | int, ...]


class NotPlain(Exception):
    """A value cannot be an entry; the message states which, and why."""


class Leaf(NamedTuple):
    """An entry: its key path, and what is there."""

    path: Path
    value: object

    @property
    def fqn(self) -> str:
        """The path joined with dots."""
        return ".".join(map(str, self.path))


def flattened(state: object) -> tuple[Leaf, ...]:
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


def _leaves(path: Path, value: object) -> Iterator[Leaf]:
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str | int | float | NoneType):
                raise NotPlain(f"a key below {'.'.join(map(str, path)) or 'it'!r} is no plain one")
            yield from _leaves((*path, str(key)), item)
    elif isinstance(value, list) and _comes_apart(value):
        for number, item in enumerate(value):
            yield from _leaves((*path, number), item)
    else:
        yield Leaf(path, value)


def _comes_apart(value: list[object]) -> bool:
    return any(
        isinstance(item, dict | TensorStub) or (isinstance(item, list) and _comes_apart(item))
        for item in value
    )


class Written(NamedTuple):
    """A plain value, as a pickle at protocol 2 has it, without what begins and ends that."""

    pickled: bytes


def nested(leaves: Iterable[Leaf]) -> dict[str, object]:
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


def written(leaf: Leaf) -> Written:
    """A plain value; raises `NotPlain` for any other."""
    return Written(b"".join(_written(leaf.value, leaf.fqn)))


def pickled_value(leaf: Leaf) -> bytes:
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
        begun = b"ccollections\nOrderedDict\n)R" if isinstance(value, Ordered) else b"}"
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
