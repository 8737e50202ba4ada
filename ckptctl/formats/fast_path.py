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

Here is what all shapes share. What a part means is in `hot_parts`; the shapes
are `hot_tensors`, `hot_chunks`, `hot_storage` and `hot_plans`.

Source: CPython 3.14 `Modules/_pickle.c`, `save_reduce` and `store_tuple_elements`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, islice

from ckptctl.formats.fast_path_parts import DIMS, REFERENCE, slot_of
from ckptctl.formats.pickle_machine import Machine
from ckptctl.formats.pickle_memo import Rows
from ckptctl.formats.pickle_stubs import Function
from ckptctl.formats.torch_names import SIZE

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

    def matched_again(self) -> Window:
        """The same with its rows."""
        return replace(self, rows=self.pattern.findall(self.data, self.start, self.end))

    def matches(self) -> Iterator[re.Match[bytes]]:
        """Where each object is, and its parts."""
        return self.pattern.finditer(self.data, self.start, self.end)

    def find_rows(self, n_slots: Callable[[Row], int]) -> Rows:
        """Where each object is; `n_slots` says how many slots of the memo one fills."""
        matches = list(self.matches())
        filled = (n_slots(match.groups(b"")) for match in matches)
        return Rows(
            array("q", [match.start() for match in matches]),
            array("q", [match.end() for match in matches]),
            array("q", accumulate(filled, initial=self.first_slot)),
        )


def literal(references: Mapping[str, bytes]) -> Hole:
    """Holes that match what was learned; one that is not known yet matches nothing."""

    def hole(name: str) -> str:
        return re.escape(references[name]).decode("latin-1") if references[name] else "(?!)"

    return hole


class FastPathShape:
    """One shape in one reading: what was learned of it so far.

    `template` is the pattern of one object, its groups the parts that differ;
    `expects` says for each hole in it what the reference must stand for. `push`
    makes a `Run` of a window, pushes it, and says how many rows are in it. `begins`
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
