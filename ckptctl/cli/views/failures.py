"""Render the result of `classify`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ckptctl.cli.formatting import count
from ckptctl.cli.text import EMPTY, Line, Span, Style, line, padded
from ckptctl.cli.views.common import next_line, section
from ckptctl.failures.classes import Domain
from ckptctl.failures.evidence import Evidence, Role
from ckptctl.failures.results import Classification, Suspect
from ckptctl.failures.stalled_collectives import described, listed

_STYLES: dict[Domain, Style] = {
    Domain.INFRASTRUCTURE: "bad",
    Domain.JOB: "bad",
    Domain.STOPPED: "warn",
    Domain.UNKNOWN: "warn",
    Domain.NONE: "good",
}
_FEW = 4


def classification_lines(answer: Classification) -> list[Line]:
    """The class, what was decisive, what followed from it, and what to do."""
    head = [Span(answer.domain.value, _STYLES[answer.domain])]
    if answer.failure != answer.domain.value:
        head.append(Span(f"  {answer.failure}", "strong"))
    return [
        line(*head, f"  (confidence {answer.confidence})"),
        line(f"  {answer.message}", hang=4),
        EMPTY,
        *section(_listed("", answer.evidence)),
        *section(_listed("what followed", answer.consequences)),
        *section(_listed("other evidence", answer.others)),
        *section(_listed("training went on after", answer.survived)),
        *section(_stalled(answer)),
        *_suspected(answer.suspects),
        line("do: ", Span(answer.action.value, "strong"), f". {answer.advice}", hang=4),
        line(f"restart: {_RESTART[answer.restart.value]}", hang=4),
        line(_read(answer)),
        *next_line(answer.next_command),
    ]


def _read(answer: Classification) -> str:
    dumps = f" and {count(answer.n_dumps, 'dump')}" if answer.n_dumps else ""
    if not answer.n_files:
        return f"no log was read{f', only {dumps[5:]}' if dumps else ''}"
    end = "; the deadline was reached, and the rest was not read" if answer.deadline_reached else ""
    return f"read {count(answer.n_lines, 'line')} from {count(answer.n_files, 'log')}{dumps}{end}"


def _stalled(answer: Classification) -> Iterator[Line]:
    if answer.collectives:
        yield line("collectives that did not complete:")
    for each in answer.collectives[:_FEW]:
        yield line(f"  {described(each)}", hang=4)
    if len(answer.collectives) > _FEW:
        yield line(f"  and {len(answer.collectives) - _FEW:,} more (--json has them)")
    if answer.ranks_without_dump:
        yield line(f"  ranks without a dump: {listed(answer.ranks_without_dump)}", hang=4)
    for message in answer.not_dumps[:_FEW]:
        yield line(f"  {message}", hang=4)


_RESTART = {
    "free": "yes, and not counted against a budget",
    "yes": "yes, within the budget",
    "once": "once; when the same comes again, stop",
    "no": "no, not before a person has looked",
}


def _suspected(suspects: Sequence[Suspect]) -> Iterator[Line]:
    for each in suspects:
        parts = [*each.devices, *(f"rank {rank}" for rank in each.ranks)]
        inside = f" ({', '.join(parts)})" if parts else ""
        node = each.node or "a node that the logs do not name"
        yield line("suspected: ", Span(node, "bad"), inside, hang=4)


def _listed(title: str, evidence: Sequence[Evidence]) -> Iterator[Line]:
    if title and evidence:
        yield line(f"{title}:")
    for each in evidence[:_FEW]:
        yield from _shown(each)
    if len(evidence) > _FEW:
        yield line(f"  and {len(evidence) - _FEW:,} more (--json has them)")


def _shown(each: Evidence) -> Iterator[Line]:
    style: Style = "bad" if each.role in (Role.CAUSE, Role.ROOT) and not each.survived else ""
    times = f" ({each.count:,} times)" if each.count > 1 else ""
    place = f"{each.file}:{each.line}" if each.line else f"{each.file} {each.text}"
    yield line("  ", padded(each.role.value, 7, style), f"  {each.says}{times}", hang=11)
    yield line("           ", Span(place, "name"), solid=True)
    if each.line:
        yield line(f"           {each.text}", hang=13)
