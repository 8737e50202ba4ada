"""Decide whether all files of a step were written by one save, and whether it is that step's.

A run that goes back saves its steps again in place. Where it is killed meanwhile, the folder holds
files of two saves, each of them sound. What tells them apart are the times of their writes: the
files of one save are written within a window, whose length the other steps of the root show, and
DCP writes its metadata last. A copy has times of its own: then the steps follow each other as fast
as the files of one step do, and no time proves anything.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice, pairwise

import msgspec

from ckptctl.findings import Claim, ClaimName, Finding, explained
from ckptctl.formats.families import key_of
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.file_names import may_hold_state
from ckptctl.formats.frameworks.layouts import METADATA
from ckptctl.formats.frameworks.state_keys import is_named_as_output
from ckptctl.formats.own.seals import Seal
from ckptctl.formatting import command_line, counted, duration, inside, some_of, verb
from ckptctl.inspection.file_kinds import is_of_evaluation
from ckptctl.inspection.identity import counts_beside, number_in_metadata
from ckptctl.inspection.open_step import OpenStep, steps_beside
from ckptctl.inspection.seals import is_unwritten, written_again
from ckptctl.inspection.shape import weights_in
from ckptctl.model import SHARDED, Step

LEAST_WINDOW_S = 120.0
"""A step is not refused for less: clocks of nodes differ, and a slow rank ends late."""

MOST_S = 300.0
"""Files further apart than the window are those of two saves, where they are also further apart
than two saves beside, or than this: a run saves a step again only after it trained up to it, and
may have removed steps between."""

LAST_WINDOW_S = 30.0
"""The same for a shard that was written after its metadata, where other steps show that the
metadata is written last."""

USUAL_S = 10.0
"""Files that were written within less need no comparison with other steps."""

TIMES_LONGEST = 3.0
"""The window is so many times as long as the longest save beside the step took."""

SUCCESSION_S = 2.0
"""Steps that follow each other in less are those of a copy, or of a test."""

COPIED_PER_S = 50_000_000
"""Bytes. A slower copy of steps of one file each looks like training between them."""

MAX_COMPARED = 3
"""So many steps on each side are compared."""


class SaveTimes(msgspec.Struct, frozen=True):
    """When the files of one step were written."""

    name: str
    number: int
    first_s: float
    last_s: float
    late_s: float
    """How long after its metadata the last shard of a part was written; 0 if none was."""
    largest: int
    """Bytes of its largest file."""
    weights_s: float
    """When the last of its metadata and weights was written, and what followed as closely; other
    files may be added later."""
    apart_s: float = 0.0
    """How far apart its files were written, where a part with metadata counts as its metadata: a
    shard that is slow is waited for."""


def check_one_save(
    opened: OpenStep, counted_steps: int | None, seal: Seal | None, *, is_proven: bool
) -> tuple[list[Finding], Claim]:
    """Compare the write times of a step's files with each other and with those of other steps.

    `is_proven`: every byte was compared with the `seal`, which proves the save whatever its times
    are. Without that, so does a seal after which no file was written.
    Yields `step.two-saves` where files were written by a later save than the others, and
    `step.times` where they may have been: they are further apart than the saves beside it took,
    or no other step shows how long a save takes.

    Cost: the listing of the nearest older step; where files were written further apart than in
    that, of `MAX_COMPARED` steps on each side.
    """
    foreign = _part_of_another_step(opened, counted_steps)
    if foreign is not None:
        return [foreign], _unknown("the parts differ", opened)
    if seal is not None and (is_proven or is_unwritten(seal, opened.step)):
        return [], _proven("seal")
    if layouts.is_of_one_attempt(opened.name):
        return [], _proven("its name, which one attempt uses once")
    files = _timed_state(opened)
    if files is None:
        return [], _unknown("the storage keeps no write times", opened)
    if len(files) <= 1:
        return [], _proven("one file")
    again = written_again(seal, opened.step) & files.keys() if seal is not None else frozenset()
    if again:
        finding = _two_saves(files, again, "the seal", "files that nobody wrote since")
        return [finding], _unknown(finding.message, opened)
    own = _times(opened.step, files)
    others: list[tuple[SaveTimes, frozenset[str]]] = []
    for times, keys in _times_beside(opened):
        if _is_usual(own, [times for times, _ in others]):
            break
        others.append((times, keys))
    known = {key for _, keys in others for key in keys}
    alike = {path: at_s for path, at_s in files.items() if key_of(path) in known}
    if len(alike) > 1:
        files, own = alike, _times(opened.step, alike)
    beside = [times for times, _ in others]
    if _is_usual(own, beside):
        return [], _by_order(opened, own, beside)
    # A file from before the step makes it look as if no time had passed since the step before.
    is_trained = is_of_training(beside if len(beside) > 1 else [*beside, own])
    is_known = is_trained and len(beside) > 1
    apart_s, window_s, is_between = _furthest(own, beside, is_known=is_known)
    is_over = apart_s > window_s
    if not is_over and not is_trained:
        why = f"files written {duration(max(_span_s(own), 1.0))} apart"
        return [], _unknown(f"{why}, and no other step shows how long a save takes", opened)
    later = {path for path, at_s in files.items() if own.last_s - at_s <= apart_s / 2}
    expected = f"files written within {duration(window_s)}"
    # One other step shows neither how long a save takes nor how far apart two are.
    is_shown = is_over and (is_known or (is_trained and is_between))
    finding = _two_saves(files, later, duration(apart_s), expected, is_shown=is_shown)
    return [finding], _unknown(finding.message, opened)


def _is_between(other: SaveTimes, own: SaveTimes) -> bool:
    """Whether an older step was written after some files of a step and before others."""
    is_older = other.number < own.number
    return is_older and own.first_s <= other.last_s < own.last_s and _span_s(own) > LEAST_WINDOW_S


def _span_s(times: SaveTimes) -> float:
    return times.last_s - times.first_s


def _is_usual(own: SaveTimes, beside: Sequence[SaveTimes]) -> bool:
    """Whether the files of a step were written as close together as those of steps beside it."""
    late_s = max([USUAL_S, *(TIMES_LONGEST * one.late_s for one in beside)])
    apart_s = max([USUAL_S, *(TIMES_LONGEST * one.apart_s for one in beside)])
    span_s = max([LEAST_WINDOW_S, *(TIMES_LONGEST * _span_s(one) for one in beside)])
    return own.late_s <= late_s and own.apart_s <= apart_s and _span_s(own) <= span_s


def _furthest(
    own: SaveTimes, beside: Sequence[SaveTimes], *, is_known: bool
) -> tuple[float, float, bool]:
    """How far apart files of the step were written, and how far those of one save may be.

    True as well where another step was written between them. `is_known`: the steps beside were
    written with training between them, and are several. A run saves a step again only after it
    trained up to it: files that are closer together than two saves may be those of one slow save.
    """
    in_order = sorted(times.first_s for times in beside)
    intervals = [later_s - earlier_s for earlier_s, later_s in pairwise(in_order)]
    is_last = is_known and all(times.late_s <= SUCCESSION_S for times in beside)
    least_s = LEAST_WINDOW_S
    if is_known:
        least_s = max(USUAL_S, min(MOST_S, *intervals))
    late_s = max(
        [min(least_s, LEAST_WINDOW_S), *(TIMES_LONGEST * times.late_s for times in beside)]
    )
    apart_s = max([least_s, *(TIMES_LONGEST * times.apart_s for times in beside)])
    before_others = [times for times in beside if _is_between(times, own)]
    found = [
        *((_span_s(own), own.last_s - times.last_s) for times in before_others),
        (own.late_s, LAST_WINDOW_S if is_last else late_s),
        (own.apart_s, apart_s),
    ]
    furthest_s, window_s = max(found, key=lambda pair: pair[0] / pair[1])
    return furthest_s, window_s, bool(before_others)


def _proven(by: str) -> Claim:
    return Claim.proven(ClaimName.ONE_SAVE, by)


def _unknown(why: str, opened: OpenStep) -> Claim:
    return Claim.unknown(ClaimName.ONE_SAVE, why, command_line("seal", opened.url))


def _timed(step: Step) -> Mapping[str, float] | None:
    """The write time of each file of the save that may hold state; None without times."""
    held = [
        file
        for file in step.files
        if file.kind == "file"
        and file.size
        and layouts.is_saved(file.path)
        and may_hold_state(file.path)
        # A report of an evaluation is added later; a configuration may be.
        and not file.path.endswith(".json")
    ]
    times = {file.path: file.mtime_s for file in held}
    known = {path: at_s for path, at_s in times.items() if at_s is not None}
    return known if len(known) == len(times) else None


def _timed_state(opened: OpenStep) -> Mapping[str, float] | None:
    """See `_timed`; without what evaluations wrote, however long they took.

    Cost: the pickles of files that are named as outputs.
    """
    files = _timed(opened.step)
    return files and {
        path: at_s
        for path, at_s in files.items()
        if not (is_named_as_output(path) and is_of_evaluation(opened, path))
    }


def times_of(step: Step) -> SaveTimes | None:
    """When the files of a step that may hold state were written; None where that is unknown."""
    files = _timed(step)
    return _times(step, files) if files else None


def _times(step: Step, files: Mapping[str, float]) -> SaveTimes:
    first_s, last_s = min(files.values()), max(files.values())
    late_s, single = 0.0, dict(files)
    for part in step.parts:
        metadata_s = files.get(inside(part.path, METADATA))
        if part.format not in SHARDED or metadata_s is None:
            continue
        for file in part.files:
            path = inside(part.path, file.path)
            if layouts.belongs_to_shards(path) and path in single:
                at_s = single.pop(path)
                late_s = max(late_s, at_s - metadata_s)
        single[inside(part.path, METADATA)] = metadata_s
    apart_s = max(single.values()) - min(single.values())
    largest = max(file.size for file in step.files if file.path in files)
    weights_s = max((files[f.path] for f in weights_in(step) if f.path in files), default=last_s)
    took_s = max(weights_s - first_s, SUCCESSION_S)
    for at_s in sorted(at_s for at_s in files.values() if at_s > weights_s):
        weights_s = at_s if at_s - weights_s <= took_s else weights_s
    number = step.number or 0
    return SaveTimes(step.name, number, first_s, last_s, late_s, largest, weights_s, apart_s)


def _times_beside(opened: OpenStep) -> Iterator[tuple[SaveTimes, frozenset[str]]]:
    """The times of the steps beside this one, each with the kinds of its files."""
    for other in steps_beside(opened, MAX_COMPARED):
        files = _timed_state(other)
        if files:
            yield _times(other.step, files), frozenset(map(key_of, files))


def _by_order(opened: OpenStep, own: SaveTimes, beside: Sequence[SaveTimes]) -> Claim:
    """Whether times within the usual window are those of a save, and not of a copy of it."""
    taken = f"files written within {duration(max(_span_s(own), 1.0))}"
    if own.late_s > SUCCESSION_S:
        return _unknown(f"{taken}, shards after the metadata: it may be a copy", opened)
    older = [one for one in beside if one.number < own.number]
    if not older:
        older = [times for times, _ in islice(_times_beside(opened), 1)]
    if not older or older[0].number > own.number:
        return _unknown(f"{taken}, and no older step shows that it was no copy", opened)
    if are_apart(older[0], own):
        return _proven(taken)
    return _unknown(f"{taken}, and as soon after {older[0].name}: it may be a copy", opened)


def is_of_training(times: Sequence[SaveTimes], *, by_number: bool = True) -> bool:
    """Whether most steps were written one after the other, with training between them.

    They follow each other by their numbers, or by the times of their writes.
    """
    in_order = sorted(times, key=lambda one: one.number if by_number else one.first_s)
    pairs = [*pairwise(in_order)]
    apart = sum(are_apart(older, newer) for older, newer in pairs)
    return 2 * apart > len(pairs)


def are_apart(older: SaveTimes, newer: SaveTimes) -> bool:
    """Whether more time passed between two saves than a copy of them would take."""
    first_file_s = newer.largest / COPIED_PER_S
    longest_s = max(older.weights_s - older.first_s, SUCCESSION_S, first_file_s)
    return newer.first_s - older.weights_s > longest_s


def _two_saves(
    files: Mapping[str, float],
    later: Collection[str],
    after: str,
    expected: str,
    *,
    is_shown: bool = True,
) -> Finding:
    """The finding for files of a later save; a suspicion unless other steps have shown it."""
    code = "step.two-saves" if is_shown else "step.times"
    why = "or a copy was; no other step shows which"
    if is_shown:
        why = "and a load would mix the two"
    is_late = sorted(later)
    n_others = len(files) - len(is_late)
    verb_of_late = verb(len(is_late), "was", "were")
    return explained(
        code,
        is_late[0],
        f"{some_of(is_late)} {verb_of_late} written {after} after "
        f"{counted(n_others, 'other file')} of the step: a later save over it was interrupted, "
        f"{why}",
        expected=expected,
        found=f"files written {after} apart",
    )


def _part_of_another_step(opened: OpenStep, counted_steps: int | None) -> Finding | None:
    """The finding for a part whose metadata names another step than the rest of the step does.

    Where all parts name one other step, the train state and that step itself decide.
    """
    named = {
        part.path: part.own_number
        for part in opened.parts
        if part.part.format in SHARDED and part.own_number is not None
    }
    number = opened.step.number
    others = {path: own for path, own in named.items() if number and abs(own - number) > 1}
    if number is None or not others:
        return None
    path, own = min(others.items())
    if len(set(named.values())) < 2:
        is_counted = counted_steps is not None and abs(counted_steps - number) <= 1
        there = dict(counts_beside(opened, number_in_metadata, {own}))
        if not is_counted or there.get(own) != own:
            return None
    rest = min(set(named.values()) - {own}, default=number)
    return Finding(
        "state.mixed",
        inside(path, METADATA),
        f"{inside(path, METADATA)} was written for step {own}, and other parts of "
        f"{opened.step.name} for step {rest}: a part of another step lies in this one",
        next_command=command_line("show", opened.url),
    )
