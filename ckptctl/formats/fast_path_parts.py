"""The parts of a fast path: names, sizes and numbers.

Patterns for each kind of part, and `Parts`, which decodes them. In half a
million objects most parts come again and again, so each is decoded when it is
first met and looked up from then on.

How the objects around the parts are found is `fast_path_shapes`' question.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Generic, TypeVar

from ckptctl.formats.pickle_machine import Machine
from ckptctl.formats.pickle_stubs import Malformed
from ckptctl.formats.torch_names import MAX_DIMS, checked_dims

REFERENCE = r"(?:h.|j.{4})"
"""BINGET or LONG_BINGET."""

INT = (
    r"(?:K.|M..|J...[\x00-\x7f]"
    r"|\x8a(?:\x05.{4}|\x06.{5}|\x07.{6}|\x08.{7})[\x00-\x7f])"
)
"""An integer from 0 to 2**63: BININT1, BININT2, BININT or LONG1."""

TEXT = rf"(?:{REFERENCE}|\x8c.[^\x94]*\x94)"
"""A string that is referred to, or SHORT_BINUNICODE and MEMOIZE."""

DIMS = rf"(?:\)|{INT}(?:\x85|{INT}(?:\x86|{INT}\x87))\x94|\({INT}{{4,{MAX_DIMS}}}t\x94)"
"""A tuple of integers; all but the empty one are memoized."""

MAX_KNOWN = 65_536

_BINGET, _LONG1, _MARK, _SHORT_BINUNICODE = 0x68, 0x8A, 0x28, 0x8C
_INT_BYTES = {0x4B: 1, 0x4D: 2, 0x4A: 4}

_DIMENSIONLESS = len(b")\x85\x94R\x94")

Dims = tuple[int, ...]
Meaning = TypeVar("Meaning")


class Unfit(Exception):
    """A part that only looks as if it were of its kind."""


class Known(dict[bytes, Meaning], Generic[Meaning]):
    """What parts mean; at most `MAX_KNOWN` of them are remembered."""

    def __init__(self, decode: Callable[[bytes], Meaning]) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, part: bytes) -> Meaning:
        meaning = self._decode(part)
        if len(self) >= MAX_KNOWN:
            self.clear()
        self[part] = meaning
        return meaning

    def extend(self, column: list[Meaning], parts: Sequence[bytes]) -> None:
        """Add to `column` what the parts behind it mean, up to one that is unfit."""
        # What was appended before the exception stays in the list.
        try:
            column.extend(map(self.__getitem__, islice(parts, len(column), None)))
        except Unfit:
            return


class Parts:
    """The parts of one reading."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.texts = Known(self._text)
        self.sizes = Known(self._size)
        self.optional_sizes = Known(self._optional_size)
        self.ints = Known(_int)
        self.optional_ints = Known(self._optional_int)
        self.slots = Known(_slot_read)

    def _text(self, part: bytes) -> str:
        if is_new_text(part):
            return _new_text(part)
        text = self.referred(part)
        if not isinstance(text, str):
            raise Unfit
        return text

    def _size(self, part: bytes) -> Dims:
        if not is_new_size(part):
            return _checked(self.referred(part))
        return dims_of(part, 2 if part[0] == _BINGET else 5)

    def _optional_size(self, part: bytes) -> Dims | None:
        """None for a part that is empty, because there is no size."""
        return self.sizes[part] if part else None

    def _optional_int(self, part: bytes) -> int | None:
        return None if part == b"N" else self.ints[part]

    def referred(self, reference: bytes) -> object:
        """What the memo holds for the argument of BINGET or LONG_BINGET."""
        slot = slot_of(reference)
        if slot >= self._machine.memo.n_slots:
            raise Unfit
        return self._machine.recall(slot)


def slot_of(reference: bytes) -> int:
    """The memo slot that BINGET or LONG_BINGET reads."""
    return int.from_bytes(reference[1:], "little")


def is_new_text(part: bytes) -> bool:
    """Whether a text is written here, and put into the memo."""
    return part[0] == _SHORT_BINUNICODE


def is_new_size(part: bytes) -> bool:
    """Whether a size is made here, and not referred to or missing."""
    return len(part) > 5


def n_size_slots(part: bytes, size_reference: bytes) -> int:
    """How many slots of the memo a size fills: three, or two without a dimension.

    One that is referred to, or missing, fills none. `size_reference` is what refers
    to `torch.Size` in it.
    """
    if not is_new_size(part):
        return 0
    return 2 if len(part) == len(size_reference) + _DIMENSIONLESS else 3


def n_size_slots_of(parts: Sequence[bytes], size_reference: bytes) -> int:
    """The sum of `n_size_slots` over a column."""
    lengths = list(map(len, parts))
    n_new = len(lengths) - lengths.count(0) - lengths.count(2) - lengths.count(5)
    if not n_new:
        return 0
    return 3 * n_new - lengths.count(len(size_reference) + _DIMENSIONLESS)


def _slot_read(part: bytes) -> int:
    """The memo slot that a part reads: -1 for a text or a size that is made here, or missing."""
    if part and is_new_text(part):
        _new_text(part)
        return -1
    return slot_of(part) if part and not is_new_size(part) else -1


def _new_text(part: bytes) -> str:
    # The pattern ends a text at the first byte that can be MEMOIZE; the length decides.
    if part[1] != len(part) - 3:
        raise Unfit
    try:
        return str(part[2:-1], "utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise Unfit from None


def _checked(value: object) -> Dims:
    if not isinstance(value, tuple):
        raise Unfit
    try:
        return checked_dims(value, "a size")
    except Malformed:
        raise Unfit from None


def _int(part: bytes) -> int:
    return int.from_bytes(part[2 if part[0] == _LONG1 else 1 :], "little")


def dims_of(part: bytes, position: int = 0) -> Dims:
    """The integers of a tuple that is written from `position` on."""
    dims: list[int] = []
    if part[position] == _MARK:
        position += 1
    while part[position] == _LONG1 or part[position] in _INT_BYTES:
        is_long = part[position] == _LONG1
        begin = position + (2 if is_long else 1)
        position = begin + (part[position + 1] if is_long else _INT_BYTES[part[position]])
        dims.append(int.from_bytes(part[begin:position], "little"))
    return tuple(dims)
