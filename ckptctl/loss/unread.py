"""Which part of the logs could not be read, and what does that leave open?

A log that is damaged in the middle is read up to the damage. Where a later log goes on,
the resume is likely in what was read; where nothing follows, it may be in what was not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from ckptctl.findings import Finding
from ckptctl.loss.rows import Marker, Row


@dataclass(slots=True)
class Unread:
    """The damage that a reader tells of, in order, and whether any row came after the last."""

    messages: list[str] = field(default_factory=list)
    ends_so: bool = False

    def told(self, message: str) -> None:
        """Take what the reader says of one log: its name, and why nothing more is read."""
        self.messages.append(message)
        self.ends_so = True

    def watch(self, items: Iterable[Row | Marker]) -> Iterator[Row | Marker]:
        """The same rows and markers; to be read while `told` is called."""
        for item in items:
            if isinstance(item, Row):
                self.ends_so = False
            yield item

    def findings(self, *, end_matters: bool = True) -> tuple[Finding, ...]:
        """`loss.damaged` for each damage, `loss.unread` for one at the end, if that matters."""
        last = len(self.messages) - 1 if self.ends_so and end_matters else None
        return tuple(
            Finding(
                "loss.unread" if i == last else "loss.damaged",
                "",
                f"{message}, and no row follows: the resume may lie behind it"
                if i == last
                else message,
                expected="a log that can be read to its end",
            )
            for i, message in enumerate(self.messages)
        )
