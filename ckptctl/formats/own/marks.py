"""Read and write marks, and decide which of several apply.

A mark is one decision about a step, with author, time and reason: one small file under
`.ckptctl/marks/` of the step, or one line of a file of marks. It is never changed or
removed: a later mark that names it lifts it. It applies to one save of the step, identified
by the digest of its metadata, and becomes outdated when the step is saved again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ckptctl.formats.digests import sha256_of
from ckptctl.formats.frameworks.layouts import OWN_FOLDER, is_of_one_attempt
from ckptctl.formats.own.files import as_stored, canonical, read_back
from ckptctl.model import Sha256, StepNumber, Time

MARKS_FOLDER = f"{OWN_FOLDER}/marks"
"""Where the marks of a step lie in it."""

SCHEMA = "ckptctl.mark/1"

MAX_MARK_BYTES = 256 << 10

_MAX_OBJECTS = 64


class MarkKind(StrEnum):
    """The decision of a mark. `accepted`, `unpinned` and `unconfirmed` lift earlier ones."""

    REJECTED = "rejected"
    SUPERSEDED = "superseded"
    ACCEPTED = "accepted"
    PINNED = "pinned"
    UNPINNED = "unpinned"
    CONFIRMED = "confirmed"
    UNCONFIRMED = "unconfirmed"

    @property
    def lifts(self) -> frozenset[MarkKind]:
        """The words that this one takes back."""
        return _LIFTS.get(self, frozenset())


_LIFTS = {
    MarkKind.ACCEPTED: frozenset({MarkKind.REJECTED, MarkKind.SUPERSEDED}),
    MarkKind.UNPINNED: frozenset({MarkKind.PINNED}),
    MarkKind.UNCONFIRMED: frozenset({MarkKind.CONFIRMED}),
}


@dataclass(frozen=True, slots=True)
class Mark:
    """One decision about a step; `at` is RFC 3339, `evidence` names the sources of the reasons."""

    id: str
    """Its identifier, unique among marks."""
    word: MarkKind
    """The kind of mark."""
    by: str
    """Who made it."""
    at: Time
    """When it was made."""
    reason: str
    """Why; may be empty."""
    url: str
    """The address of the step at that time."""
    number: StepNumber
    metadata: Sha256 | None
    """A SHA-256 over the metadata of the save that is meant; null where it could not be read."""
    evidence: tuple[str, ...] = ()
    """Where the reasons can be read."""
    lifts: tuple[str, ...] = ()
    """The ids of the marks that it lifts."""

    @property
    def because(self) -> str:
        """The reason and the evidence, as the end of a sentence; empty without either."""
        reason = f": {self.reason}" if self.reason else ""
        return reason + (f"; see {', '.join(self.evidence)}" if self.evidence else "")

    def applies_to(self, number: int | None, metadata: str | None) -> bool:
        """Whether it is about this save of this step; the path of the step may have changed.

        A mark on an interrupted save holds when its metadata arrives later, where one
        attempt alone writes under that name: there is no other save that it could mean.
        """
        if self.metadata is None and is_of_one_attempt(self.url.rpartition("/")[2]):
            return self.number == number
        return (self.number, self.metadata) == (number, metadata)


def named_word(path: str) -> MarkKind | None:
    """The decision in the name of a mark's file (`…Z-rejected-….json`); None for another name.

    Known where the file itself cannot be read.
    """
    match = _FILE_NAME.fullmatch(path.rpartition("/")[2])
    return None if match is None else MarkKind(match["word"])


_WORDS = "|".join(word.value for word in MarkKind)
_FILE_NAME = re.compile(rf"[0-9TZ]+-(?P<word>{_WORDS})-[0-9a-f]+\.json")


def metadata_digest(digests: Sequence[tuple[str, str]]) -> str | None:
    """One digest for all metadata files of a step, each given by path and SHA-256."""
    if not digests:
        return None
    return sha256_of(canonical(dict(digests)))


def mark_bytes(mark: Mark) -> bytes:
    """The mark as it is stored, one line."""
    return as_stored(SCHEMA, mark)


def parse_mark(data: bytes) -> Mark:
    """The mark that a file or a line holds; raises `OwnFileUnreadable`."""
    return read_back(data, SCHEMA, Mark, max_objects=_MAX_OBJECTS)


def in_force(marks: Iterable[Mark]) -> tuple[Mark, ...]:
    """The marks that no other one has lifted, oldest first.

    A mark is lifted only by one that names it: what two writers decide in the same
    moment, with clocks that differ, is all kept.
    """
    known = sorted(marks, key=lambda mark: (mark.at, mark.id))
    words = {mark.id: mark.word for mark in known}
    lifted = {gone for mark in known for gone in mark.lifts if words.get(gone) in mark.word.lifts}
    return tuple(mark for mark in known if mark.id not in lifted)
