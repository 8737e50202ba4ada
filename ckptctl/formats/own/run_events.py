"""The events of a run of a runbook.

A run is a folder of `.ckptctl/runbooks/NAME/` in a root, with one file for each event, numbered
from 1 and never changed. Each is one JSON object, whose kind is the word in `event`.

Whoever can write to the root can write such a file, so each value is checked before use: it has
the type and the bounds that stand here, or the event is refused.
"""

# Annotations stay objects, so that reading an event evaluates no string as code.
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Annotated, Literal, TypeVar

from msgspec import Meta

from ckptctl.errors import OwnFileUnreadable
from ckptctl.formats.own.files import as_fields, classes_by_event, made_of, parsed
from ckptctl.formatting import seconds_of
from ckptctl.model import ExitCode, Time
from ckptctl.redaction import HIDDEN, redacted_values

MAX_EVENT_BYTES = 8 << 20
MAX_TEXT = 32 << 10
"""The most characters of one text in an event, except for output: Linux passes 128 KiB."""

_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")

Text = Annotated[str, Meta(max_length=MAX_TEXT)]
"""Without a NUL; no pattern, which msgspec 0.21 reads out of bounds in a union with a list."""
Output = Annotated[str, Meta(max_length=MAX_EVENT_BYTES)]
Values = Mapping[str, Text | Sequence[Text]]
"""Values by name: one text, or the items of a list."""
Duration = Annotated[float, Meta(ge=0, le=1e9)]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """What every event has; the record sets time and writer when it writes the event."""

    event: str = ""
    """The kind of event."""
    at: Time = ""
    """When it was written."""
    writer: str = ""
    """The call that wrote it: two calls never write the same bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedEvent(RunEvent):
    """A run begins; always the first event."""

    event: Literal["opened"] = "opened"
    by: Text
    """The user and the host."""
    runbook: Text
    """The name of the runbook."""
    title: Text
    """Its title."""
    page: Text
    """The SHA-256 of its page."""
    inputs: Values
    """The inputs that were given, and the defaults of the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumedEvent(RunEvent):
    """The run is continued."""

    event: Literal["resumed"] = "resumed"
    by: Text
    """The user and the host."""
    inputs: Values
    """The inputs that were given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecidedEvent(RunEvent):
    """A person has decided."""

    event: Literal["decided"] = "decided"
    by: Text
    """The user and the host."""
    inputs: Values
    """The decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackEvent(RunEvent):
    """The run returns to an earlier block."""

    event: Literal["back"] = "back"
    state: Text
    """The state."""
    block: Text | None = None
    """The block in it; null for the first."""
    because: Text
    """Why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeganEvent(RunEvent):
    """The command of a block is about to run."""

    event: Literal["began"] = "began"
    state: Text
    """The state."""
    block: Text
    """The block."""
    command: Text
    """The command, as the page has it."""
    values: Values
    """The values of the names in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedEvent(RunEvent):
    """A block ended, or was not run."""

    event: Literal["ended"] = "ended"
    state: Text
    """The state."""
    block: Text
    """The block."""
    then: Text
    """What follows: `next`, `done`, `stop` or a state."""
    because: Text
    """Why."""
    not_run: Text | None = None
    """Why it was not run; null if it was."""
    exit_code: ExitCode | None = None
    """The exit code of the command; null if it was not run."""
    printed: Text | Sequence[Text] | None = None
    """The lines of standard output that are not empty."""
    lines: Sequence[Output] | None = None
    """The last lines of both streams, in order of arrival."""
    duration_s: Duration | None = None
    """How long the command ran."""
    report: Mapping[str, object] | None = None
    """The document of a ckptctl command in the block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedEvent(RunEvent):
    """The run has ended."""

    event: Literal["finished"] = "finished"
    exit_code: ExitCode
    """The exit code of the run."""
    because: Text
    """Why it ended."""


Event = (
    OpenedEvent | ResumedEvent | DecidedEvent | BackEvent | BeganEvent | EndedEvent | FinishedEvent
)
"""An event of any kind."""

AnEvent = TypeVar("AnEvent", bound=RunEvent)

_WRITTEN_BY_OTHERS = frozenset(
    {"inputs", "values", "command", "printed", "lines", "report", "because"}
)
"""The fields whose texts come from the operator, the page or the commands of blocks."""


def without_secrets(event: AnEvent) -> AnEvent:
    """The event without secrets, as it is recorded: an input with one has to be given again."""
    fields = (name for name in as_fields(event) if name in _WRITTEN_BY_OTHERS)
    return replace(event, **{name: redacted_values(getattr(event, name)) for name in fields})


def is_complete(value: str | Sequence[str]) -> bool:
    """Whether a recorded value is the one that was given, and held no secret."""
    return not any(HIDDEN in item for item in ((value,) if isinstance(value, str) else value))


_KINDS = classes_by_event(Event)
_WITHOUT_NUL = frozenset({field.name for kind in _KINDS.values() for field in fields_of(kind)}) - {
    *("lines", "report")
}


def _texts(value: object) -> Iterator[str]:
    """The texts in a value: itself, or those of a list or of an object."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def read_event(data: bytes, *, first: bool) -> Event:
    """One event; `first` where it must be the first of its run. Raises `OwnFileUnreadable`."""
    fields = parsed(data, MAX_EVENT_BYTES, numbers="finite", unique_keys=False)
    kind = _KINDS.get(str(fields.get("event")))
    if kind is None or (kind is OpenedEvent) is not first:
        raise OwnFileUnreadable("the kind of event is unknown, or not possible here")
    event: Event = made_of(kind, fields)
    if any("\0" in text for name in _WITHOUT_NUL for text in _texts(fields.get(name))):
        raise OwnFileUnreadable("a text holds a NUL")
    if _TIME.fullmatch(event.at) is None or seconds_of(event.at) is None:
        raise OwnFileUnreadable("the field 'at' is not a time in UTC")
    if isinstance(event, EndedEvent):
        needed = event.duration_s if event.exit_code is not None else event.not_run
        if needed is None:
            raise OwnFileUnreadable(
                "a block needs either a duration or a reason why it did not run"
            )
    return event
