"""The steps beside one under the same root, with which an inspection compares it.

Many checks ask for the same steps. Each is listed once, and the last ones stay open, so that its
metadata is decoded once, however many checks and inspections of its root need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress

import msgspec

from ckptctl.errors import StorageError
from ckptctl.formats.frameworks.layouts import StepName
from ckptctl.inspection.open_step import OpenStep
from ckptctl.model import FileInfo
from ckptctl.storage.contract import Store

MAX_LISTED = 16
"""The listings of so many steps are kept: more than are beside one that is inspected."""

MAX_OPEN = 2
"""So many steps stay open, with their decoded metadata: the inspected one and the one before."""


MAX_BEFORE = 4
"""So many steps before are listed to see whether one of them lacks a file too, or has more."""


class RootSteps(msgspec.Struct):
    """Steps of one root that were listed or opened last, shared by inspections of several."""

    known_files: Mapping[str, Sequence[FileInfo]] = {}
    """The files of each step, by its name, where a listing of the whole root holds them."""
    listed: dict[str, Sequence[FileInfo]] = {}
    """The files of the `MAX_LISTED` steps that were listed last."""
    opened: dict[str, OpenStep] = {}
    """The `MAX_OPEN` steps that were opened last."""

    def files(self, name: str) -> Sequence[FileInfo] | None:
        """The files of a step as they were listed; None where they were not."""
        return self.known_files.get(name) or self.listed.get(name)

    def open(self, store: Store, named: StepName) -> OpenStep:
        """A step. Cost: its listing, unless its files are known; raises `StorageError`."""
        opened = self.opened.get(named.name)
        if opened is None:
            opened = OpenStep(store, named, self.files(named.name))
        self.add(opened)
        return opened

    def add(self, opened: OpenStep) -> None:
        """Keep a step that was opened. Cost: its listing, if it was not listed."""
        files = opened.files
        self.forget(opened.name)
        self.opened[opened.name], self.listed[opened.name] = opened, files
        for kept, at_most in ((self.opened, MAX_OPEN), (self.listed, MAX_LISTED)):
            for name in [*kept][: len(kept) - at_most]:
                del kept[name]

    def forget(self, name: str) -> None:
        """List a step anew at its next use."""
        self.listed.pop(name, None)
        self.opened.pop(name, None)


class Neighbours(msgspec.Struct, frozen=True):
    """The finished steps beside one, each side nearest first; listed when asked."""

    older: Callable[[], Sequence[StepName]]
    """Those with lower numbers."""
    newer: Callable[[], Sequence[StepName]]
    """Those with higher numbers."""
    steps: RootSteps = msgspec.field(default_factory=RootSteps)

    def open(self, store: Store, named: StepName) -> OpenStep:
        """One of them; see `RootSteps.open`."""
        return self.steps.open(store, named)


def steps_before(
    opened: OpenStep, neighbours: Neighbours | None, at_most: int
) -> Iterator[OpenStep]:
    """The nearest older steps, nearest first, without those that do not answer.

    Cost: a listing of each, unless it is known, and the first bytes of files of unknown names.
    """
    if neighbours is not None:
        yield from _opened(opened, neighbours, neighbours.older()[:at_most])


def steps_beside(
    opened: OpenStep, neighbours: Neighbours | None, at_most: int
) -> Iterator[OpenStep]:
    """The nearest older steps, then as many newer ones; see `steps_before`."""
    yield from steps_before(opened, neighbours, at_most)
    if neighbours is not None:
        yield from _opened(opened, neighbours, neighbours.newer()[:at_most])


def _opened(
    opened: OpenStep, neighbours: Neighbours, names: Sequence[StepName]
) -> Iterator[OpenStep]:
    for named in names:
        with suppress(StorageError):
            other = neighbours.open(opened.store, named)
            _ = other.step  # what a step consists of may need reads
            yield other
