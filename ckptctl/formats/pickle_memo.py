"""The memo of the pickle interpreter.

Slots are filled one after the other and never again. The slots that a hot shape
skipped cost nothing but their `Run`: what they hold is worked out when, and if,
the pickle asks for it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from ckptctl.formats.pickle_stubs import Stub


@dataclass(frozen=True, slots=True)
class Rows:
    """Where each row of a run is: in the bytes, and in the memo.

    Row n fills the slots from `first_slots[n]` up to `first_slots[n + 1]`.
    """

    starts: array[int]
    ends: array[int]
    first_slots: array[int]


@dataclass(frozen=True, slots=True)
class Replayed:
    """One row of a run, interpreted after all: what it leaves on the stack and in the memo."""

    values: list[object]
    slots: list[object]


class Run(Stub):
    """Values that a hot shape took in one go; on the stack it stands for all of them.

    It fills `n_slots` slots of the memo from `first_slot` on. `kind` is the kind of
    the first value; `in_pairs` says that the values are keys and what they lead to,
    by turns. `find_rows` says where each row is; it is asked once somebody needs a
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
        self.replayed: dict[int, Replayed] = {}
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
        """What one of its slots holds, a run in it that knows, or None: only a replay can tell."""
        return None


class Memo:
    """The memo from slot `first` on; `outer` has the slots before."""

    __slots__ = ("_first_slots", "_n_skipped", "_runs", "first", "n_slots", "outer", "values")

    def __init__(self, outer: Memo | None = None, first: int = 0) -> None:
        self.outer = outer
        self.first = first
        self.n_slots = first
        self.values: list[object] = []
        self._runs: list[Run] = []
        self._first_slots = array("q")
        self._n_skipped = array("q", [0])

    def put(self, value: object) -> None:
        """Fill the next slot."""
        self.values.append(value)
        self.n_slots += 1

    def skip(self, run: Run) -> None:
        """Leave the next slots to `run`."""
        self._runs.append(run)
        self._first_slots.append(run.first_slot)
        self._n_skipped.append(self._n_skipped[-1] + run.n_slots)
        self.n_slots += run.n_slots

    def get(self, slot: int) -> object:
        """What a filled slot holds, or the `Run` that it was left to."""
        if slot < self.first and self.outer is not None:
            return self.outer.get(slot)
        n_before = bisect_right(self._first_slots, slot)
        if n_before:
            run = self._runs[n_before - 1]
            if slot < run.first_slot + run.n_slots:
                return run
        return self.values[slot - self.first - self._n_skipped[n_before]]
