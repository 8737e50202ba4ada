"""Stand-ins for the objects of a pickle; nothing in it is executed.

The things an interpreted pickle builds: functions that are our own, objects
that have a class's name and a state and do nothing, and the `Grammar` that says
which names there are. How a pickle is read is `pickles`' question.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType


class Malformed(Exception):
    """Values that do not fit what they are used for; becomes `MetadataUnreadable`."""


class Callee(ABC):
    """What a pickle may call: what comes of it is our own affair."""

    __slots__ = ()

    @abstractmethod
    def call(self, args: tuple[object, ...]) -> object:
        """What stands for the result."""


class Function(Callee):
    """A global that the pickle may call, and our own stand-in for it."""

    __slots__ = ("_stand_in", "name")

    def __init__(self, name: str, stand_in: Callable[[tuple[object, ...]], object]) -> None:
        self.name = name
        self._stand_in = stand_in

    def call(self, args: tuple[object, ...]) -> object:
        """What the stand-in makes of the arguments."""
        return self._stand_in(args)


class Stub:
    """An object of a class that the grammar knows: which class, and its state.

    `owns_state` says that a dict it is given may not be changed any more, nor given
    to another: Python copies it, and copies without end could be asked for.
    """

    __slots__ = ("kind", "state")

    owns_state = True

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: object = None

    def build(self, state: object) -> None:
        """Take the state that the pickle gives to the object."""
        if self.state is not None:
            raise Malformed(f"a {self.kind} is given its state twice")
        self.state = state


class Ordered(dict[object, object]):
    """A `collections.OrderedDict`. Attributes set on it are dropped."""

    __slots__ = ()

    def build(self, state: object) -> None:
        """Drop the attributes: torch puts its `_metadata` there."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """What the names in a pickle stand for.

    `names` maps (module, name) to a `Function` or to a plain value. `other` makes
    something of a name that is not there; without it such a name is unsafe.
    `persistent` does the same for persistent ids. `hashable` are the types that
    may be a dict's key beside str, bytes, int, bool, None and flat tuples of them.
    """

    names: Mapping[tuple[str, str], object]
    other: Callable[[str, str], object] | None = None
    persistent: Callable[[object], object] | None = None
    hashable: type | UnionType = NoneType
    max_int_bytes: int = 16


def shown(text: str) -> str:
    """A string out of a pickle, safe to print: escaped, and cut after 100 characters."""
    return ascii(text if len(text) <= 100 else text[:100] + "...")
