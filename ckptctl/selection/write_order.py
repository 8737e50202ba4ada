"""Decide by write times whether a step is on the branch that the run is on now.

A run that goes back saves again under smaller numbers than those of the branch that it left. Marks
and resume records state that; a stock writer leaves neither. Then only the times of the writes do:
a step with a lower number was written later. They are evidence as far as they are times of
training, with more time between two saves than a save takes. A copy has times of its own, in any
order, and without training in between. See docs/decisions/branches.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import pairwise

import msgspec

from ckptctl.claims import Claim, ClaimName, ClaimState
from ckptctl.formatting import counted, rfc3339, some_of
from ckptctl.inspection.one_save import LEAST_WINDOW_S, SaveTimes, are_apart, is_of_training


class Order(Enum):
    """What the write times of the steps of a root show about one of them."""

    CURRENT = "current"
    """No step with a lower number was written after it."""
    WENT_BACK = "went back"
    """The run trained and saved steps with lower numbers afterwards."""
    DOUBTFUL = "doubtful"
    """Steps with lower numbers were written afterwards, by training or by a copy."""
    COPIED = "copied"
    """The times are those of a copy, which prove nothing."""


class WriteOrder(msgspec.Struct, frozen=True):
    """What the write times of the steps of a root show about one of them."""

    order: Order
    claim: Claim
    own: SaveTimes | None = None
    """When the step was written; None where the storage keeps no times."""
    later: tuple[SaveTimes, ...] = ()
    """Steps with lower numbers that were written after it, in the order of their writes."""

    @property
    def last(self) -> SaveTimes:
        """The step that was written last."""
        return self.later[-1]

    @property
    def why(self) -> str:
        """What was written after what, in one line."""
        if self.own is None or not self.later:
            return self.claim.by
        numbers = [times.number for times in self.later]
        return (
            f"{counted(len(numbers), 'step')} with lower numbers ({some_of(numbers)}) were written "
            f"after step {self.own.number}: step {self.last.number} at "
            f"{rfc3339(self.last.first_s, 'seconds')}, step {self.own.number} at "
            f"{rfc3339(self.own.weights_s, 'seconds')}"
        )


def write_order(
    own: SaveTimes | None, others: Iterable[SaveTimes], n_not_compared: int = 0
) -> WriteOrder:
    """Whether the step with the times `own` is on the branch that was written last.

    `others` are steps of the same root without those that a mark or a record excludes;
    `n_not_compared` is how many more there are with lower numbers. Cost: nothing is read.
    """
    if own is None:
        return WriteOrder(Order.COPIED, _unknown("the storage keeps no write times"))
    lower = sorted((one for one in others if one.number < own.number), key=_written)
    later = tuple(one for one in lower if one.first_s > own.weights_s)
    if not later:
        return WriteOrder(Order.CURRENT, _in_order(own, lower, n_not_compared), own)
    order = _order_of(own, lower, later)
    made = WriteOrder(order, _unknown(""), own, later)
    if order is Order.WENT_BACK:
        return msgspec.structs.replace(
            made, claim=Claim(ClaimName.BRANCH, ClaimState.CONTRADICTED, made.why)
        )
    return msgspec.structs.replace(made, claim=_unknown(f"{made.why}; a copy may have done so"))


def _order_of(own: SaveTimes, lower: Sequence[SaveTimes], later: Sequence[SaveTimes]) -> Order:
    if not are_apart(own, later[0]):
        return Order.COPIED
    if len(later) > 1:
        # A copy that was interrupted and continued has one gap; a run has one before each save.
        if not is_of_training([own, *later], by_number=False):
            return Order.DOUBTFUL
    else:
        earlier = [one for one in lower if one.first_s <= own.weights_s]
        if not is_of_training([*earlier, own], by_number=False):
            return Order.DOUBTFUL
    if _n_turns([*lower, own]) > max(1, len(lower) // 4):
        return Order.DOUBTFUL  # a copy in any order; a run seldom goes back so often
    is_soon = later[-1].first_s - own.weights_s <= LEAST_WINDOW_S
    return Order.DOUBTFUL if is_soon else Order.WENT_BACK


def _n_turns(times: Sequence[SaveTimes]) -> int:
    """How often a step with a lower number was written after one with a higher number."""
    numbers = [one.number for one in sorted(times, key=_written)]
    return sum(later < earlier for earlier, later in pairwise(numbers))


def _written(times: SaveTimes) -> tuple[float, float]:
    return times.first_s, times.last_s


def _in_order(own: SaveTimes, lower: Sequence[SaveTimes], n_not_compared: int) -> Claim:
    if n_not_compared:
        return _unknown(f"{counted(n_not_compared, 'older step')} were not compared")
    if not lower:
        return _proven("no older step was written later")
    before = max(lower, key=lambda one: one.weights_s)
    if are_apart(before, own):
        return _proven("steps written in the order of their numbers")
    return _unknown(f"written as soon after step {before.number} as by a copy")


def _proven(by: str) -> Claim:
    return Claim.proven(ClaimName.BRANCH, by)


def _unknown(why: str) -> Claim:
    return Claim.unknown(ClaimName.BRANCH, why, "the times of the next save")


def accepted() -> WriteOrder:
    """The order of a step that a person accepted: the step to go on from."""
    return WriteOrder(Order.CURRENT, _proven("accepted by a person"))


MAX_NEAREST = 4
"""So many of the next older steps are compared where a listing is a round trip."""

MAX_LOCAL = 50
"""So many older steps at most are compared on a file system."""

MAX_LOCAL_FILES = 4000
"""Listing the steps that are compared on a file system takes the attributes of so many files."""

MAX_TOUCHED = 4
"""So many of the older steps whose folders changed last are compared."""


def to_compare(
    older: Sequence[str],
    folder_times: Mapping[str, float],
    written_s: float,
    *,
    known: Collection[str] = (),
    n_local_files: int | None = None,
) -> tuple[list[str], int]:
    """The older steps whose files are listed, of names nearest first; how many say nothing.

    `folder_times` are the times of the steps' folders, as far as the listing of the root shows
    them: a folder changes when a file is created in it, so one that did not change after
    `written_s` holds no step that was written later. `known` are steps that are listed already.
    `n_local_files` is how many files a step has on a file system; None in an object store, where
    a listing is a round trip. Without these times, steps far away are compared at distances of
    8, 16, 32, …: a branch of many steps is found.
    """
    n_nearest = MAX_NEAREST
    if n_local_files is not None:
        n_nearest = max(MAX_NEAREST, min(MAX_LOCAL, MAX_LOCAL_FILES // max(1, n_local_files)))
    chosen = {*older[:n_nearest], *known} & {*older}
    changed = [name for name in older if folder_times.get(name, 0.0) > written_s]
    changed.sort(key=lambda name: -folder_times[name])
    chosen.update(changed[:MAX_TOUCHED])
    if not folder_times:
        chosen.update(_far(older))
    silent = [
        name
        for name in older
        if name not in chosen and not folder_times.get(name, written_s + 1) <= written_s
    ]
    return [name for name in older if name in chosen], len(silent)


def _far(names: Sequence[str]) -> Iterator[str]:
    place = 2 * MAX_NEAREST
    while place <= len(names):
        yield names[place - 1]
        place *= 2


def written_after_all(times: SaveTimes | None, others: Sequence[SaveTimes | None]) -> bool:
    """Whether weights of a step were written after those of all others."""
    known = [one.weights_s for one in others if one is not None]
    return times is not None and len(known) == len(others) and times.weights_s > max(known)
