"""Which step of the run is one that is counted anew in each round?

A round is an epoch, or a progress bar from its beginning to its end. The steps of the
rounds of one log are put one after another; in which round a log begins, nobody says.
"""

from __future__ import annotations


class Rounds:
    """Counts on where a log begins anew; every step is handed in, in the log's order."""

    def __init__(self) -> None:
        self._before: dict[int | None, int] = {}
        self._epoch: int | None = None
        self._last = 0
        self._per: int | None = None

    def step(self, step: int, per: int | None, epoch: int | None) -> int:
        """The step of the run; `per` is how many a round has, where the log says so.

        Steps that go on over the end of an epoch are those of the run. Without `epoch` a
        round is over when its last step was there; a process that ended and came back
        begins in the round that it left.
        """
        if self._begins(step, per, epoch):
            self._before[epoch] = self._before[self._epoch] + (self._per or self._last)
        before = self._before.setdefault(epoch, self._before.get(self._epoch, 0))
        self._epoch, self._last, self._per = epoch, step, per
        return before + step

    def _begins(self, step: int, per: int | None, epoch: int | None) -> bool:
        if step > self._last or self._epoch not in self._before:
            return False
        if epoch is None or self._epoch is None:
            return epoch is None and self._last == per and step < self._last
        return epoch > self._epoch and epoch not in self._before
