"""Into which entries does a nested state come apart, and how is a value of them pickled?

Keys are joined with dots, as torch's own checkpoints have them. A value that is
neither a tensor nor plain is refused by its key: what it was is not known, because
nothing of a pickle runs.

Source: torch 2.13 `torch/distributed/checkpoint/_traverse.py`, `_nested_dict.py`;
CPython 3.11 `Lib/pickle.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import pack
from types import NoneType
from typing import Any, NamedTuple

from ckptctl.formats.inert import Ordered
from ckptctl.formats.torch_names import Dtype
from ckptctl.formats.values import Opaque, TensorStub

Path = tuple[str | int, ...]


class NotPlain(Exception):
    """A value cannot be an entry; the message says which, and why."""


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


def pickled_value(leaf: Leaf) -> bytes:
    """The pickle of a plain value, at protocol 2; raises `NotPlain` for any other."""
    return b"\x80\x02" + b"".join(_written(leaf.value, leaf.fqn)) + b"."


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


def _text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + pack("<I", len(data)) + data


def _bytes(value: bytes) -> bytes:
    # Without this, protocol 2 has no bytes.
    return b"c_codecs\nencode\n" + _text(value.decode("latin-1")) + _text("latin1") + b"\x86R"


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return b"J" + pack("<i", value)
    n_bytes = value.bit_length() // 8 + 1
    return b"\x8a" + bytes((n_bytes,)) + value.to_bytes(n_bytes, "little", signed=True)


_SIMPLE: Mapping[type, Callable[[Any], bytes]] = {
    type(None): lambda _: b"N",
    bool: lambda value: b"\x88" if value else b"\x89",
    int: _integer,
    float: lambda value: b"G" + pack(">d", value),
    str: _text,
    bytes: _bytes,
    Dtype: lambda value: f"ctorch\n{value.name}\n".encode(),
}


def _called(value: object) -> str:
    if isinstance(value, Opaque):
        return value.name if " " in value.name else f"an object of {value.name}"
    if isinstance(value, TensorStub):
        return "a tensor inside a tuple"
    return f"a {type(value).__name__}"
