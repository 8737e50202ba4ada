"""What does the memo of a pickle hold?

Slots are filled one after the other and never again. The slots that a hot shape
skipped cost nothing but their `Run`: what they hold is worked out when, and if,
the pickle asks for it.
"""

from __future__ import annotations

from bisect import bisect_right

from ckptctl.formats.inert import Inert


class Run(Inert):
    """Values that a hot shape took in one go; on the stack it stands for all of them.

    They are written in the bytes from `start` to `end` and fill `n_slots` slots of
    the memo, from `first_slot` on. `kind` is the kind of the first of them.
    `in_pairs` says that they are keys and values by turns. `values` and `slots` are
    only there once somebody needed the values one by one.
    """

    __slots__ = ("end", "first_slot", "in_pairs", "n_slots", "slots", "start", "values")

    def __init__(
        self, kind: str, start: int, end: int, first_slot: int, n_slots: int, *, in_pairs: bool
    ) -> None:
        super().__init__(kind)
        self.start = start
        self.end = end
        self.first_slot = first_slot
        self.n_slots = n_slots
        self.in_pairs = in_pairs
        self.values: list[object] = []
        self.slots: list[object] = []

    def text_at(self, slot: int) -> str | None:  # noqa: ARG002
        """The string in one of its slots, where it is known without reading all values."""
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
        self._first_slots: list[int] = []
        self._n_skipped = [0]

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
