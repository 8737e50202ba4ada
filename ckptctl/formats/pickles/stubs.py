"""What an interpreted pickle builds: stand-ins and a memo; nothing in it is executed.

Functions are our own, objects have a class's name and a state and do nothing, and a
`Grammar` lists the names that a pickle may ask for. The memo's slots are filled one after
the other and never again. Slots that a fast path skipped cost nothing but their `StubRun`:
what they hold is computed when the pickle needs it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import NoneType, UnionType

from ckptctl.model import DTYPE_SIZES


class Malformed(Exception):
    """Values that do not fit what they are used for; becomes `MetadataUnreadable`."""


class Acts(Exception):
    """A pickle would run code where it is loaded; becomes `MetadataUnsafe`."""


class Callee(ABC):
    """What a pickle may call: what comes of it is our own affair."""

    __slots__ = ()

    @abstractmethod
    def call(self, args: tuple[object, ...]) -> object:
        """What stands for the result. Raises `Malformed` and `Acts`."""

    def make(self, args: tuple[object, ...]) -> object:
        """What stands for a new object, where a pickle states that this is a class."""
        return self.call(args)


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
    """An object of a class of the grammar: which class, and its state.

    `owns_state` means that a dict it is given may not be changed any more, nor given
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

    def fill(self, values: Iterable[object]) -> None:  # noqa: ARG002
        """Take values that are appended, added or set; raises `Malformed` where none may be."""
        raise Malformed(f"a {self.kind} holds no values")


class OrderedDictStub(dict[object, object]):
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

    A grammar that is `lenient` reads what Python's unpickler reads and no writer of metadata
    writes: all protocols, keys of any kind, values put into what a call returned. With it, bytes
    that are pickles themselves are read too: a framework may unpickle them.
    """

    names: Mapping[tuple[str, str], object]
    other: Callable[[str, str], object] | None = None
    persistent: Callable[[object], object] | None = None
    hashable: type | UnionType = NoneType
    max_int_bytes: int = 16
    lenient: bool = False


def shown(text: str) -> str:
    """A string out of a pickle, safe to print: escaped, and cut after 100 characters."""
    return ascii(text if len(text) <= 100 else text[:100] + "...")


@dataclass(frozen=True, slots=True)
class Rows:
    """Where each row of a run is: in the bytes, and in the memo.

    Row n fills the slots from `first_slots[n]` up to `first_slots[n + 1]`.
    """

    starts: array[int]
    ends: array[int]
    first_slots: array[int]


@dataclass(frozen=True, slots=True)
class InterpretedRow:
    """One row of a run, interpreted after all: what it leaves on the stack and in the memo."""

    values: list[object]
    slots: list[object]


class StubRun(Stub):
    """Values that a hot shape took in one go; on the stack it stands for all of them.

    It fills `n_slots` slots of the memo from `first_slot` on. `kind` is the kind of
    the first value; `in_pairs` means that the values are keys and what they lead to,
    by turns. `find_rows` returns where each row is; it is called once a caller needs a
    value by itself.
    """

    __slots__ = ("_rows", "find_rows", "first_slot", "in_pairs", "n_slots", "replayed")

    def __init__(
        self,
        kind: str,
        first_slot: int,
        n_slots: int,
        find_rows: Callable[[], Rows],
        *,
        in_pairs: bool = False,
    ) -> None:
        super().__init__(kind)
        self.first_slot = first_slot
        self.n_slots = n_slots
        self.find_rows = find_rows
        self.in_pairs = in_pairs
        self.replayed: dict[int, InterpretedRow] = {}
        self._rows: Rows | None = None

    @property
    def rows(self) -> Rows:
        """Where the rows are."""
        if self._rows is None:
            self._rows = self.find_rows()
        return self._rows

    def row_of(self, slot: int) -> int:
        """The row that fills a slot of the memo."""
        return bisect_right(self.rows.first_slots, slot) - 1

    def known_at(self, slot: int) -> object:  # noqa: ARG002
        """What one of its slots holds, a run in it that does, or None: only a replay decides."""
        return None


class Memo:
    """The memo from slot `first` on; `outer` has the slots before."""

    __slots__ = ("_first_slots", "_n_skipped", "_runs", "first", "n_slots", "outer", "values")

    def __init__(self, outer: Memo | None = None, first: int = 0) -> None:
        self.outer = outer
        self.first = first
        self.n_slots = first
        self.values: list[object] = []
        self._runs: list[StubRun] = []
        self._first_slots = array("q")
        self._n_skipped = array("q", [0])

    def put(self, value: object) -> None:
        """Fill the next slot."""
        self.values.append(value)
        self.n_slots += 1

    def skip(self, run: StubRun) -> None:
        """Leave the next slots to `run`."""
        self._runs.append(run)
        self._first_slots.append(run.first_slot)
        self._n_skipped.append(self._n_skipped[-1] + run.n_slots)
        self.n_slots += run.n_slots

    def get(self, slot: int) -> object:
        """What a filled slot holds, or the `StubRun` that it was left to."""
        if slot < self.first and self.outer is not None:
            return self.outer.get(slot)
        n_before = bisect_right(self._first_slots, slot)
        if n_before:
            run = self._runs[n_before - 1]
            if slot < run.first_slot + run.n_slots:
                return run
        return self.values[slot - self.first - self._n_skipped[n_before]]


MAX_DIMS = 64
"""More dimensions than torch itself allows: `c10/core/TensorImpl.h` has no tensor above 64."""

MAX_PATH_CHARS = 65_536


@dataclass(frozen=True, slots=True)
class Dtype:
    """A torch dtype, by its name without `torch.`."""

    name: str


# Beside those whose size is known: the rest of torch 2.13's dtypes, all a byte but the last.
_OTHER_DTYPES = (
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)),
    *("quint4x2", "quint2x4", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
)

DTYPES: Mapping[tuple[str, str], object] = {
    ("torch", name): Dtype(name) for name in (*DTYPE_SIZES, *_OTHER_DTYPES)
}


def size_of(args: tuple[object, ...]) -> tuple[int, ...]:
    """`torch.Size(dims)` as a tuple of integers, none of them negative."""
    dims = args[0] if len(args) == 1 else None
    if not isinstance(dims, tuple):
        raise Malformed("a torch.Size is not made of a tuple")
    return checked_dims(dims, "a torch.Size")


def checked_dims(dims: object, what: str) -> tuple[int, ...]:
    """`dims`, if it is a tuple or a list of 64-bit integers that a tensor can have."""
    if not isinstance(dims, tuple | list) or len(dims) > MAX_DIMS:
        raise Malformed(f"{what} is no tuple of at most {MAX_DIMS} dimensions")
    for dim in dims:
        if type(dim) is not int or not 0 <= dim < 1 << 63:
            raise Malformed(f"{what} has a dimension that is no size")
    return tuple(dims)


def _ordered(args: tuple[object, ...]) -> OrderedDictStub:
    if args:
        raise Malformed("an OrderedDict is made of arguments")
    return OrderedDictStub()


def _path_joined_by(separator: str) -> Callable[[tuple[object, ...]], str]:
    def path(args: tuple[object, ...]) -> str:
        # Python 3.13 and later give the whole path, earlier ones its parts.
        parts = [part for part in args if isinstance(part, str)]
        if len(parts) != len(args) or sum(map(len, parts)) + len(parts) > MAX_PATH_CHARS:
            raise Malformed("a path is not made of a few short strings")
        if parts and parts[0].endswith(separator):
            return parts[0] + separator.join(parts[1:])
        return separator.join(parts) or "."

    return path


SIZE = Function("torch.Size", size_of)

COMMON: Mapping[tuple[str, str], object] = {
    **DTYPES,
    ("torch", "Size"): SIZE,
    ("collections", "OrderedDict"): Function("collections.OrderedDict", _ordered),
    **{
        (module, name): Function(f"{module}.{name}", _path_joined_by(separator))
        for module in ("pathlib", "pathlib._local")
        for separator, names in (
            ("/", ("Path", "PurePath", "PosixPath", "PurePosixPath")),
            ("\\", ("WindowsPath", "PureWindowsPath")),
        )
        for name in names
    },
}
