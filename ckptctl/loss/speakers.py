"""Which of several ranks' rows are taken, where all of them write to one log?

One rank speaks for a leg: the first that printed a row. The others repeat it, and
are taken only once the speaker is silent: when one of them has printed three steps in
which the speaker printed none, it speaks from then on, and nothing of it is lost. A
marker lets anybody speak. Ranks are known by the launcher's prefix; where lines have
none, a log in which every step stands several times from its first row on is read
as if it had, and the first of each step counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from ckptctl.loss.rows import Marker, Row

_SILENT_STEPS = 3
_MAX_HELD = 64


class Speakers:
    """Chooses rows and markers of one log; ranks are None where lines have no prefix."""

    def __init__(self) -> None:
        self._speaker: int | None = None
        self._spoken = False
        self._last_step: int | None = None
        self._n_steps = 0
        self._in_chorus = False
        self._held: dict[int | None, list[Row]] = {}
        self._marker: Marker | None = None
        self._marked_by: set[int | None] = set()

    def row(self, rank: int | None, row: Row) -> Iterator[Row]:
        """The rows to take, now that `rank` has printed this one."""
        if not self._spoken:
            self._speaker, self._spoken = rank, True
        if rank == self._speaker:
            self._held.clear()
            yield from self._taken(row)
            return
        held = self._held.setdefault(rank, [])
        if len(held) < _MAX_HELD:
            held.append(row)
        if len({each.step for each in held}) < _SILENT_STEPS:
            return
        self._held.clear()
        self._speaker = rank
        for each in held:
            yield from self._taken(each)

    def marker(self, rank: int | None, marker: Marker) -> Marker | None:
        """The marker, unless another rank already printed the same one."""
        same = (
            self._marker is not None
            and (self._marker.step, self._marker.fresh) == (marker.step, marker.fresh)
            and rank not in self._marked_by
        )
        if same:
            self._marked_by.add(rank)
            return None
        self._marker, self._marked_by = marker, {rank}
        self._spoken, self._last_step, self._n_steps, self._in_chorus = False, None, 0, False
        self._held.clear()
        return marker

    def end(self) -> Iterator[Row]:
        """What a rank printed after the last word of the speaker, and nobody repeated."""
        for rows in self._held.values():
            newer = [row for row in rows if self._last_step is None or row.step > self._last_step]
            if newer:
                self._held.clear()
                yield from newer
                return

    def _taken(self, row: Row) -> Iterator[Row]:
        if row.step == self._last_step:
            # The first step of all stands twice: a chorus. Later, it is a resume.
            if self._n_steps == 1:
                self._in_chorus = True
            if self._in_chorus:
                return
        else:
            self._n_steps += 1
        self._last_step = row.step
        yield row
