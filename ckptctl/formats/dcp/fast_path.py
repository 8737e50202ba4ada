"""Decode runs of pickled objects of one form at once, without interpreting each opcode.

A chunk of a tensor is some twenty opcodes, a key with its byte range some
thirty, and a step of 256 ranks holds half a million of each: most of a minute.
But a pickler writes every chunk alike. From the second one on, its class and
the names of its fields are references into the memo, which are the same bytes
each time; only numbers and names differ. So:

- *Learn.* After the machine has interpreted such an object, a pattern with
  holes for the references is matched against the next. What the references
  stand for is looked up in the memo. If it is what the shape needs, the
  pattern is compiled again with those very bytes in place of the holes.
- *Take.* That pattern is matched as often as it fits, one object right behind
  the other, within a window of 64 KiB. Between its literal bytes are the parts
  that differ, and each distinct part is decoded once. The objects become a
  `Run`: columns, and the place in the bytes where they are.
- *Never differ.* A shape takes an object only when each of its bytes is
  accounted for. Whatever does not fit (another field, a longer name, a frame
  that begins in the middle) is left to the machine, and the shape is tried
  again behind it. A run stands on the stack for all its values and counts in
  the memo for all its slots; when the pickle refers to one of them, the bytes
  of the run are interpreted after all.

Here is what all shapes share, and `Parts`, which decodes names, sizes and numbers: in
half a million objects most of them come again and again, so each is decoded when it is
first met and looked up from then on. The shapes themselves are in `fast_path_tensors`
and `fast_path_storage`.

Source: CPython 3.14 `Modules/_pickle.c`, `save_reduce` and `store_tuple_elements`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, islice
from typing import Generic, TypeVar

from ckptctl.formats.dcp.chunk_table import NO_HINT, Span, packed
from ckptctl.formats.pickles.machine import Machine
from ckptctl.formats.pickles.stubs import MAX_DIMS, SIZE, Function, Malformed, Rows, checked_dims

MIN_WINDOW, MAX_WINDOW = 1_024, 65_536
"""How many bytes are matched at once. A window that fits only to some point is followed
by a smaller one: a file made to disappoint then costs little more than without shapes."""

MAX_LEARNED = 8
"""How many sets of references one shape is compiled for; torch needs one."""

NEW = r"\)\x81\x94\}\x94\("
"""EMPTY_TUPLE NEWOBJ MEMOIZE EMPTY_DICT MEMOIZE MARK: an object, and its state begins."""

SET = "ub"
"""SETITEMS BUILD: the state ends, and is given to the object."""

Row = tuple[bytes, ...]
Hole = Callable[[str], str]
"""The pattern for the reference that a hole is named after."""

Test = Callable[[object], bool]


def is_class(kind: str) -> Test:
    """Whether a global is the class of that kind."""
    return lambda value: isinstance(value, Function) and value.name == kind


def is_text(text: str) -> Test:
    """Whether a value is this string."""
    return lambda value: value == text


def is_size(value: object) -> bool:
    """Whether a global is `torch.Size`."""
    return value is SIZE


def size_pattern(hole: Hole) -> str:
    """The pattern of a `torch.Size`: made here, or referred to."""
    return rf"(?:{hole('Size')}{DIMS}\x85\x94R\x94|{REFERENCE})"


def slice_pattern(hole: Hole, group: str = "?:") -> str:
    """The pattern of where a chunk begins and its size; with "" for `group`, each is a group."""
    return f"({group}{size_pattern(hole)}){hole('sizes')}({group}{size_pattern(hole)})"


def key_pattern(hole: Hole, group: str = "?:") -> str:
    """The pattern of the hint and the offset in a key; an entry of bytes has no offset."""
    return f"({group}{INT}|N)(?:{hole('offset')}({group}{size_pattern(hole)}))?"


def span_pattern(hole: Hole, group: str = "?:") -> str:
    """The pattern of where a record begins, and of its length."""
    return f"({group}{INT}){hole('length')}({group}{INT})"


@dataclass(frozen=True, slots=True)
class Window:
    """Objects of one shape, one behind the other, from `start` to `end`.

    `rows` has one row for each, of the parts that differ; `first_slot` is the memo
    slot that the first object fills.
    """

    data: bytes
    pattern: re.Pattern[bytes]
    rows: list[Row]
    start: int
    end: int
    first_slot: int

    def first(self, n_rows: int) -> Window:
        """Its first `n_rows` objects, at least one."""
        if n_rows == len(self.rows):
            return self
        end = next(islice(self.matches(), n_rows - 1, None)).end()
        return replace(self, rows=self.rows[:n_rows], end=end)

    def without_rows(self) -> Window:
        """Where the objects are, and nothing else."""
        return replace(self, rows=[])

    def matches(self) -> Iterator[re.Match[bytes]]:
        """Where each object is, and its parts."""
        return self.pattern.finditer(self.data, self.start, self.end)

    def parts(self) -> Iterator[Row]:
        """The rows, matched again."""
        return (match.groups(b"") for match in self.matches())

    def find_rows(self, n_slots: Iterable[int]) -> Rows:
        """Where each object is; `n_slots` are how many slots of the memo each fills."""
        spans = [match.span() for match in self.matches()]
        starts, ends = zip(*spans, strict=True)
        first_slots = array("q", accumulate(n_slots, initial=self.first_slot))
        return Rows(array("q", starts), array("q", ends), first_slots)


def literal(references: Mapping[str, bytes]) -> Hole:
    """Holes that match what was learned; one that is not known yet matches nothing."""

    def hole(name: str) -> str:
        return re.escape(references[name]).decode("latin-1") if references[name] else "(?!)"

    return hole


class FastPathShape:
    """One shape in one reading: what was learned of it so far.

    `template` is the pattern of one object, its groups the parts that differ;
    `expects` states for each hole in it what the reference must stand for. `push`
    makes a `Run` of a window, pushes it, and returns how many rows are in it. `begins`
    are the opcodes that an object of the shape can begin with.
    """

    def __init__(
        self,
        template: Callable[[Hole], str],
        expects: Mapping[str, Test],
        push: Callable[[Machine, Window, Mapping[str, bytes]], int],
        begins: tuple[bytes, ...] = (b"h", b"j"),
    ) -> None:
        self._begins = begins
        self._template = template
        self._expects = expects
        self._push = push
        self._generic = _compiled(template(_open_holes()))
        self._learned: dict[Row, re.Pattern[bytes]] = {}
        self._references: Row = (b"",) * len(expects)
        self._n_bytes = MAX_WINDOW

    def take(self, machine: Machine) -> None:
        """Take as many objects of the shape as follow, or none."""
        while machine.data[machine.pos : machine.pos + 1] in self._begins:
            window = self._window(machine)
            if window is None and self._learn(machine):
                window = self._window(machine)
            if window is None:
                return
            holes = dict(zip(self._expects, self._references, strict=True))
            n_rows = self._push(machine, window, holes)
            fits = n_rows == len(window.rows)
            self._n_bytes = (
                min(2 * self._n_bytes, MAX_WINDOW) if fits else max(self._n_bytes // 2, MIN_WINDOW)
            )
            if not n_rows:
                return

    def _window(self, machine: Machine) -> Window | None:
        pattern = self._learned.get(self._references)
        if pattern is None:
            return None
        start, end = machine.pos, min(machine.pos + self._n_bytes, machine.end)
        rows: list[Row] = pattern.findall(machine.data, start, end)
        rest = rows[-1][-1]
        if rest:
            rows.pop()
            end -= len(rest)
        if not rows:
            return None
        return Window(machine.data, pattern, rows, start, end, machine.memo.n_slots)

    def _learn(self, machine: Machine) -> bool:
        """Take over the references of the object that follows; False where that is no news.

        An object may lack some of them: no offset, for a bytes entry. Those that
        are known from before are kept.
        """
        match = self._generic.match(machine.data, machine.pos, machine.pos + MAX_WINDOW)
        if match is None or match[match.re.groups] is not None:
            return False
        references = tuple(
            match[name] or known
            for name, known in zip(self._expects, self._references, strict=True)
        )
        if references == self._references:
            return False
        if references not in self._learned:
            if len(self._learned) == MAX_LEARNED or not self._is_meant(references, machine):
                return False
            holes = literal(dict(zip(self._expects, references, strict=True)))
            self._learned[references] = _compiled(self._template(holes))
        self._references = references
        return True

    def _is_meant(self, references: Row, machine: Machine) -> bool:
        n_slots = machine.memo.n_slots
        return all(
            not reference
            or (slot_of(reference) < n_slots and test(machine.recall(slot_of(reference))))
            for reference, test in zip(references, self._expects.values(), strict=True)
        )


def _compiled(template: str) -> re.Pattern[bytes]:
    # The last alternative eats what does not fit: `findall` never skips a byte.
    return re.compile(f"{template}|(.+)".encode("latin-1"), re.DOTALL)


def _open_holes() -> Hole:
    """Holes that match any reference, the same one wherever a name comes again."""
    seen: set[str] = set()

    def hole(name: str) -> str:
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>{REFERENCE})"

    return hole


REFERENCE = r"(?:h.|j.{4})"
"""BINGET or LONG_BINGET."""

REFERENCE_BYTES = 5
"""The length of a reference at most."""

INT = (
    r"(?:K.|M..|J...[\x00-\x7f]"
    r"|\x8a(?:\x05.{4}|\x06.{5}|\x07.{6}|\x08.{7})[\x00-\x7f])"
)
"""An integer from 0 to 2**63: BININT1, BININT2, BININT or LONG1."""

TEXT = rf"(?:{REFERENCE}|\x8c.[^\x94]*\x94)"
"""A string that is referred to, or SHORT_BINUNICODE and MEMOIZE."""

DIMS = rf"(?:\)|{INT}(?:\x85|{INT}(?:\x86|{INT}\x87))\x94|\({INT}{{4,{MAX_DIMS}}}t\x94)"
"""A tuple of integers; all but the empty one are memoized."""

MAX_KNOWN = 262_144
"""How many parts of one kind are remembered: more than 16,384 ranks have places in tensors."""

_BINGET, _LONG1, _MARK, _EMPTY_TUPLE = 0x68, 0x8A, 0x28, 0x29
NEW_TEXT = 0x8C
"""SHORT_BINUNICODE: a text begins with it that is written here."""

_INT_BYTES = {0x4B: 1, 0x4D: 2, 0x4A: 4}

Dims = tuple[int, ...]
ChunkSlice = tuple[bytes, bytes, int]
"""Where a chunk begins, its size, both `packed`, and the memo slots that they fill."""

Key = tuple[int, bytes | None, int]
"""The hint and the `packed` offset in a key, and the memo slots that the offset fills."""

Meaning = TypeVar("Meaning")


class Unfit(Exception):
    """A part that has the form of its kind but is none."""


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

    def column(self, parts: Sequence[bytes]) -> list[Meaning]:
        """What the parts mean, up to one that is unfit."""
        column: list[Meaning] = []
        self.extend(column, parts)
        return column


class Parts:
    """The parts of one reading."""

    # The decoders refer to the machine and not to the parts: no cycle keeps either in memory.
    def __init__(self, machine: Machine) -> None:
        sizes = Known(partial(_size, machine))
        self.sizes = sizes
        self.slices = Known(partial(_slice, _groups(slice_pattern), sizes))
        self.keys = Known(partial(_key, _groups(key_pattern), sizes))
        self.spans = Known(partial(_span, _groups(span_pattern)))
        self.texts = Known(partial(_text, machine))
        self.slots = Known(_slot_read)
        self.referred = partial(_referred, machine)


def _text(machine: Machine, part: bytes) -> str:
    if is_new_text(part):
        return _new_text(part)
    text = _referred(machine, part)
    if not isinstance(text, str):
        raise Unfit
    return text


def _size(machine: Machine, part: bytes) -> bytes:
    if not is_new_size(part):
        return packed(_checked(_referred(machine, part)))
    return packed(dims_of(part, _reference_bytes(part)))


Groups = Callable[[bytes], Row]


@cache
def _groups(pattern: Callable[[Hole, str], str]) -> Groups:
    """Splits a part; its references were compared when the object was matched."""
    compiled = re.compile(pattern(lambda _: REFERENCE, "").encode("latin-1"), re.DOTALL)

    def split(part: bytes) -> Row:
        match = compiled.fullmatch(part)
        if match is None:
            raise Unfit
        return match.groups(b"")

    return split


def _slice(split: Groups, sizes: Known[bytes], part: bytes) -> ChunkSlice:
    offset, size = split(part)
    return sizes[offset], sizes[size], n_size_slots(offset) + n_size_slots(size)


def _key(split: Groups, sizes: Known[bytes], part: bytes) -> Key:
    hint, offset = split(part)
    return (
        NO_HINT if hint == b"N" else _int(hint),
        sizes[offset] if offset else None,
        n_size_slots(offset),
    )


def _span(split: Groups, part: bytes) -> Span:
    start, length = split(part)
    return _int(start), _int(length), ()


def _referred(machine: Machine, reference: bytes) -> object:
    """What the memo holds for the argument of BINGET or LONG_BINGET."""
    slot = slot_of(reference)
    if slot >= machine.memo.n_slots:
        raise Unfit
    return machine.recall(slot)


def slot_of(reference: bytes) -> int:
    """The memo slot that BINGET or LONG_BINGET reads."""
    return int.from_bytes(reference[1:], "little")


def is_new_text(part: bytes) -> bool:
    """Whether a text is written here, and put into the memo."""
    return part[0] == NEW_TEXT


def is_new_size(part: bytes) -> bool:
    """Whether a size is made here, and not referred to or missing."""
    return len(part) > REFERENCE_BYTES


def n_size_slots(part: bytes) -> int:
    """How many slots of the memo a size fills: three, or two without a dimension.

    One that is referred to, or missing, fills none.
    """
    if not is_new_size(part):
        return 0
    return 2 if part[_reference_bytes(part)] == _EMPTY_TUPLE else 3


def n_key_slots(part: bytes) -> int:
    """How many slots of the memo the offset in a key fills."""
    return n_size_slots(_groups(key_pattern)(part)[1])


def _reference_bytes(part: bytes) -> int:
    return 2 if part[0] == _BINGET else REFERENCE_BYTES


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
