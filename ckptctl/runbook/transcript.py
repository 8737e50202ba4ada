"""Write what happened in a run, for an incident report.

Three forms: Markdown, JSON Lines, and one self-contained HTML page. All are made from the
recorded events alone, so that they can be made again later.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ckptctl import markup
from ckptctl.errors import PathUntrusted, StorageError, UsageError
from ckptctl.formats.own.files import as_fields
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
from ckptctl.formatting import duration, seconds_of
from ckptctl.markup import as_text, page
from ckptctl.runbook.document import shown
from ckptctl.runbook.pictures import bars_of_time, documents_of, timeline_of_steps
from ckptctl.storage.local import LocalStore
from ckptctl.storage.shared_places import open_folder

SHOWN_LINES = 60


def transcript(events: Sequence[Event], step: str | None) -> dict[str, str]:
    """The three forms, by file name."""
    events = [without_secrets(event) for event in events]
    return {
        "transcript.md": as_markdown(events),
        "transcript.jsonl": as_json_lines(events),
        "transcript.html": as_html(events, step),
    }


def write_transcript(folder: Path, events: Sequence[Event], step: str | None) -> None:
    """Write the three forms into a folder, which is created if missing.

    Their owner alone can read them. Raises `UsageError` if nothing can be written there.
    """
    try:
        open_folder(str(folder), make=True).close()
    except OSError as error:
        raise UsageError(f"the transcript {folder}: {error.strerror}") from error
    except PathUntrusted as error:
        raise UsageError(f"the transcript {error.message}") from error
    try:
        with LocalStore(str(folder), private=True) as store:
            for name, text in transcript(events, step).items():
                store.put(name, text.encode("utf-8", "backslashreplace"), replace=True)
    except StorageError as error:
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


def as_json_lines(events: Sequence[Event]) -> str:
    """One event per line."""
    return "".join(f"{json.dumps(as_fields(event), ensure_ascii=False)}\n" for event in events)


def as_markdown(events: Sequence[Event]) -> str:
    """The run as Markdown."""
    return "\n".join(_markdown(events)) + "\n"


def _markdown(events: Sequence[Event]) -> Iterator[str]:
    yield f"# {_title(events)}"
    yield ""
    yield from (f"- {text}" for text in _facts(events, markup.code))
    yield ""
    yield markup.row("given", "value")
    yield markup.row("---", "---")
    for name, value in _inputs(events):
        yield markup.row(f"`{name}`", markup.code(value))
    for done in steps_of(events):
        yield ""
        yield f"## {done.name}"
        yield ""
        if done.command:
            yield from (*markup.block("sh", done.command), "")
        yield _result(done, markup.code)
        if lines := _lines(done):
            yield ""
            yield from markup.block("text", lines)


_Personal = OpenedEvent | ResumedEvent | DecidedEvent
"""The events of a person, who gives inputs."""


def _title(events: Sequence[Event]) -> str:
    opened = next(event for event in events if isinstance(event, OpenedEvent))
    return f"{opened.runbook.upper()}: {opened.title}"


_Quote = Callable[[str], str]
"""Makes text of somebody else part of a line."""


def _facts(events: Sequence[Event], quote: _Quote) -> Iterator[str]:
    first, last = events[0], events[-1]
    by = dict.fromkeys(event.by for event in events if isinstance(event, _Personal))
    people = [*map(quote, by)]
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


def _result(done: Done, quote: _Quote) -> str:
    decided = done.decided
    by = "" if decided is None else f"Decided by {quote(decided.by)} at {decided.at}. "
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


def _lines(done: Done, *, with_chart: bool = True) -> list[str]:
    lines = list((done.ended and done.ended.lines) or ())
    if not with_chart and done.ended is not None and done.ended.picture:
        lines = [*_without_chart(lines)]
    if len(lines) <= SHOWN_LINES:
        return lines
    return [f"({len(lines) - SHOWN_LINES} lines before these)", *lines[-SHOWN_LINES:]]


def _without_chart(lines: Sequence[str]) -> Iterator[str]:
    """The lines without the chart that `loss` draws in characters: the page has it as a picture."""
    is_chart = False
    for text in lines:
        is_chart = text == "loss" or (is_chart and text != "")
        if not is_chart:
            yield text


def as_html(events: Sequence[Event], step: str | None) -> str:
    """The run as one page with its images; `step` is the chosen step."""
    title = _title(events)
    parts = [
        f"<h1>{as_text(title)}</h1>",
        "<ul>",
        *(f"<li>{as_text(fact)}</li>" for fact in _facts(events, str)),
        "</ul>",
        *_pictures(events, step),
        "<h2>Given</h2><table>",
        *(
            f"<tr><th>{as_text(name)}</th><td><code>{as_text(value) or '–'}</code></td></tr>"
            for name, value in _inputs(events)
        ),
        "</table>",
        *(_section(done) for done in steps_of(events)),
    ]
    return page(title, parts)


def _pictures(events: Sequence[Event], step: str | None) -> Iterator[str]:
    *_, scan = (None, *documents_of(events, "ckptctl.scan"))
    drawn = (
        (
            "Steps under the root, newest first",
            "" if scan is None else timeline_of_steps(scan, step),
        ),
        ("Where the time went", bars_of_time(tuple(_times(events)))),
    )
    for heading, svg in drawn:
        if svg:
            yield f"<h2>{heading}</h2><figure tabindex=0>{svg}</figure>"
    for (block, _), plot in _plots(events).items():
        data = base64.b64encode(plot.encode("utf-8", "replace")).decode()
        yield (
            f"<h2>Picture of {as_text(block)}</h2><figure tabindex=0>"
            f'<img alt="plot of the loss" src="data:image/svg+xml;base64,{data}"></figure>'
        )


def _plots(events: Sequence[Event]) -> dict[tuple[str, str], str]:
    """The newest plot of the loss after each resume, by its block and the step."""
    found: dict[tuple[str, str], str] = {}
    step = ""
    for event in events:
        if isinstance(event, BeganEvent):
            step = str(event.values.get("STEP", step))
        elif isinstance(event, EndedEvent) and event.picture:
            found[event.block, step] = event.picture
    return found


def _times(events: Sequence[Event]) -> Iterator[tuple[str, float]]:
    """Seconds by block, and the time between the blocks."""
    ran = 0.0
    for done in steps_of(events):
        if done.ended is not None and done.ended.duration_s is not None:
            ran += done.ended.duration_s
            yield done.ended.block, done.ended.duration_s
    whole = _between(events[0].at, events[-1].at)
    yield "between the blocks", max(whole - ran, 0.0)


def _section(done: Done) -> str:
    command = f"<pre class=command tabindex=0>{_text(done.command)}</pre>" if done.command else ""
    lines = _lines(done, with_chart=False)
    printed = f"<pre tabindex=0>{_text(lines)}</pre>" if lines else ""
    result = as_text(_result(done, str))
    return f"<h2>{as_text(done.name)}</h2>{command}<p>{result}</p>{printed}"


def _text(lines: Sequence[str]) -> str:
    return "\n".join(map(as_text, lines))


def _between(first: str, last: str) -> float:
    return (seconds_of(last) or 0.0) - (seconds_of(first) or 0.0)
