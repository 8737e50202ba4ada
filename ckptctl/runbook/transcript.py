"""Write what happened in a run as Markdown, for an incident report.

It is made from the recorded events alone, so that it can be made again later.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptctl.errors import PathUntrusted, StorageError, UsageError
from ckptctl.formats.own.run_events import (
    BeganEvent,
    DecidedEvent,
    EndedEvent,
    Event,
    FinishedEvent,
    OpenedEvent,
    ResumedEvent,
    without_secrets,
)
from ckptctl.formatting import duration, markdown_block, markdown_code, markdown_row, seconds_of
from ckptctl.runbook.document import shown
from ckptctl.storage.local import LocalStore
from ckptctl.storage.shared_places import open_folder

TRANSCRIPT = "transcript.md"
"""Its name, beside the record and in the folder that a person names."""
SHOWN_LINES = 60


def transcript(events: Sequence[Event]) -> str:
    """The run as Markdown, without secrets."""
    return "\n".join(_markdown([without_secrets(event) for event in events])) + "\n"


def write_transcript(folder: Path, events: Sequence[Event]) -> None:
    """Write the transcript into a folder, which is created if missing.

    Its owner alone can read it. Raises `UsageError` if nothing can be written there.
    """
    try:
        open_folder(str(folder), make=True).close()
        with LocalStore(str(folder), private=True) as store:
            text = transcript(events).encode("utf-8", "backslashreplace")
            store.put(TRANSCRIPT, text, replace=True)
    except OSError as error:
        raise UsageError(f"the transcript {folder}: {error.strerror}") from error
    except (PathUntrusted, StorageError) as error:
        raise UsageError(f"the transcript {error.message}") from error


@dataclass(frozen=True, slots=True)
class Done:
    """One block of a run: `began` is None if it did not run, `ended` if its end is unknown.

    `decided` is the decision that a person made before it.
    """

    began: BeganEvent | None
    ended: EndedEvent | None
    decided: DecidedEvent | None = None

    @property
    def name(self) -> str:
        """State and block."""
        event = self.ended or self.began
        return "" if event is None else f"{event.state}: {event.block}"

    @property
    def command(self) -> tuple[str, ...]:
        """The lines of the command that ran, with values filled in; none if none ran."""
        if self.began is None:
            return ()
        values = (f"# {name}={shown(value)}" for name, value in self.began.values.items())
        return (*self.began.command.split("\n"), *values)


def steps_of(events: Sequence[Event]) -> Iterator[Done]:
    """The blocks of a run, in order."""
    began: BeganEvent | None = None
    decided: DecidedEvent | None = None
    for event in events:
        if isinstance(event, DecidedEvent):
            decided = event
        elif isinstance(event, BeganEvent):
            if began is not None:
                yield Done(began, None, decided)
            began = event
        elif isinstance(event, EndedEvent):
            yield Done(began, event, decided)
            began = decided = None
    if began is not None:
        yield Done(began, None, decided)


def _markdown(events: Sequence[Event]) -> Iterator[str]:
    yield f"# {_title(events)}"
    yield ""
    yield from (f"- {text}" for text in _facts(events))
    yield ""
    yield markdown_row("given", "value")
    yield markdown_row("---", "---")
    for name, value in _inputs(events):
        yield markdown_row(f"`{name}`", markdown_code(value))
    for done in steps_of(events):
        yield ""
        yield f"## {done.name}"
        yield ""
        if done.command:
            yield from (*markdown_block("sh", done.command), "")
        yield _result(done)
        if lines := _lines(done):
            yield ""
            yield from markdown_block("text", lines)


_Personal = OpenedEvent | ResumedEvent | DecidedEvent
"""The events of a person, who gives inputs."""


def _title(events: Sequence[Event]) -> str:
    opened = next(event for event in events if isinstance(event, OpenedEvent))
    return f"{opened.runbook.upper()}: {opened.title}"


def _facts(events: Sequence[Event]) -> Iterator[str]:
    first, last = events[0], events[-1]
    by = dict.fromkeys(event.by for event in events if isinstance(event, _Personal))
    people = [*map(markdown_code, by)]
    yield f"started {first.at} by {people[0]}" + (
        f"; continued by {', '.join(people[1:])}" if people[1:] else ""
    )
    if isinstance(last, FinishedEvent):
        yield f"ended {last.at} with exit code {last.exit_code}: {last.because}"
    else:
        yield f"not ended; last entry {last.at}"
    yield f"took {duration(_between(first.at, last.at), digits=3)}"


def _inputs(events: Sequence[Event]) -> Iterator[tuple[str, str]]:
    given: dict[str, str | Sequence[str]] = {}
    for event in events:
        if isinstance(event, _Personal):
            given.update(event.inputs)
    for name, value in given.items():
        yield name, shown(value)


def _result(done: Done) -> str:
    decided = done.decided
    by = "" if decided is None else f"Decided by {markdown_code(decided.by)} at {decided.at}. "
    return by + _ended(done)


def _ended(done: Done) -> str:
    began = "" if done.began is None else f"Started {done.began.at}"
    ended = done.ended
    if ended is None:
        return f"{began}; its end is unknown."
    follows = f"{ended.because}. Then: {ended.then}."
    if ended.exit_code is None:
        return f"{(ended.not_run or '').capitalize()}: {follows}"
    took = duration(ended.duration_s or 0.0, digits=3)
    return f"{began}, exit code {ended.exit_code} after {took}: {follows}"


def _lines(done: Done) -> Sequence[str]:
    lines = (done.ended and done.ended.lines) or ()
    if len(lines) <= SHOWN_LINES:
        return lines
    return [f"({len(lines) - SHOWN_LINES} lines before these)", *lines[-SHOWN_LINES:]]


def _between(first: str, last: str) -> float:
    return (seconds_of(last) or 0.0) - (seconds_of(first) or 0.0)
