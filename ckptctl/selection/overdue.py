"""Notice that a run saves no newer step that is proven, whatever its trainer reports.

Saves that fail without a message, a pointer that stays and a full disk have this in common. How
often the run saves is learned from the write times of its steps; a copied root has those of the
copy, so `run` learns from the steps that it sees appear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from statistics import median
from typing import NamedTuple

from ckptctl.errors import PathNotFound
from ckptctl.formats.frameworks.layouts import OWN_FOLDER
from ckptctl.formatting import duration
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import FileInfo
from ckptctl.selection.roots import RootListing
from ckptctl.storage.contract import Store

ALARM_AFTER = 3.0
"""After how many save intervals without a newer proven step the alarm is raised by default.

A save that is late by one interval is a slow storage or an evaluation."""
LEAST_S = 60.0
"""No alarm is raised earlier: a job that saves each second is not watched for each save."""
_N_NEWEST, _LEAST_PAUSES = 9, 3


class Overdue(NamedTuple):
    """`step` is the newest proven one; it was waited `waited_s` for a newer one."""

    step: int
    waited_s: float
    interval_s: float

    @property
    def message(self) -> str:
        """What did not happen, in one line."""
        return (
            f"no proven step newer than {self.step} for {duration(self.waited_s)}, and a step was "
            f"saved every {duration(self.interval_s)} before"
        )


def written_s(
    store: Store, listing: RootListing, trees: Mapping[str, Sequence[FileInfo]]
) -> dict[int, float]:
    """When each of the newest steps was written last, in seconds since 1970, by its number.

    Files of ckptctl are left out: a seal is written later. Without steps whose storage keeps no
    times. Cost: a listing of each step that `trees` does not hold.
    """
    times: dict[int, float] = {}
    for named in listing.steps[:_N_NEWEST]:
        with suppress(PathNotFound):  # removed since the root was listed
            files = OpenStep(store, named, trees.get(named.name)).files
            own = [
                file.mtime_s
                for file in files
                if file.mtime_s is not None and OWN_FOLDER not in file.path.split("/")
            ]
            if own:
                times[named.number] = max(own)
    return times


def pauses_s(written: Mapping[int, float]) -> list[float]:
    """The times between the writes of steps, given by number."""
    in_order = [written[number] for number in sorted(written)]
    return [later - earlier for earlier, later in pairwise(in_order) if later > earlier]


def save_interval_s(pauses: Sequence[float]) -> float | None:
    """The usual time between two saves of a run; None where too few show it."""
    return median(pauses) if len(pauses) >= _LEAST_PAUSES else None


def overdue(
    step: int | None, waited_s: float, interval_s: float | None, after: float, least_s: float
) -> Overdue | None:
    """The alarm, where no newer step came for `after` intervals and for `least_s`; else None."""
    if step is None or interval_s is None or after <= 0:
        return None
    limit_s = max(after * interval_s, least_s, LEAST_S)
    return Overdue(step, waited_s, interval_s) if waited_s > limit_s else None
