"""Decide whether a step is the one that its name says, and whether its files are of that step.

The steps that a train state counts tell whose step it is. A counter may begin at any number, and
count batches instead of steps; the steps beside show how it relates to the numbers in their names.
An optimizer counts steps too; it may be younger than the run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice, pairwise
from math import gcd
from typing import NamedTuple

from ckptctl.errors import StorageError
from ckptctl.findings import Claim, ClaimName, Finding
from ckptctl.formats.families import key_of
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layouts import StepName
from ckptctl.formats.frameworks.parts import is_archive
from ckptctl.formatting import command_line
from ckptctl.inspection.open_step import OpenStep, end_of_file
from ckptctl.inspection.sidecars import optimizer_steps_inside, steps_counted
from ckptctl.model import SHARDED, FileInfo, StatePart

MAX_COMPARED = 3
"""So many steps on each side are compared."""

MAX_OPTIMIZERS = 8
"""So many files, each of another kind, are opened to find those that hold an optimizer."""


CountOf = Callable[[OpenStep], int | None]
"""What returns the steps that a step counts."""


class Counter(NamedTuple):
    """What counts the steps of a step: its train state, or the optimizer in the file at `path`."""

    n_steps: int
    count_in: CountOf
    """What the same counter counts in another step."""
    path: str = ""


def decide_identity(
    opened: OpenStep, state: StatePart, count_of: CountOf, *, reads_optimizer: bool
) -> tuple[list[Finding], Claim]:
    """Compare the counts of the train state, the metadata and the optimizer with the name.

    `state` is the count of the train state of this step, `count_of` returns that of another. Where
    there is none, or several of which one may be that of batches, the optimizer's is compared.

    Yields `step.wrong-step` and `state.mixed`. Cost: see `check_identity`; with `reads_optimizer`,
    three short reads for each of `MAX_OPTIMIZERS` files at most.
    """
    of_state = None if state.value is None else Counter(state.value, count_of)
    found, claim = check_identity(opened, of_state)
    optimizers = counting_optimizers(opened) if reads_optimizer and not found else []
    if not optimizers:
        return found, claim
    first, *others = optimizers
    if of_state is None or len(state.where) > 1:
        found, of_optimizer = check_identity(opened, first)
        if found and _is_alone(opened, first):
            found = [_mixed(opened, first, "the name", opened.step.number or 0)]
        claim = of_optimizer if of_state is None or found else claim
    # Each may be that of another save: a GAN has two, and they may count at another pace.
    pairs = [(other, first) for other in others] + [(first, other) for other in others]
    if of_state is not None:
        pairs = [(optimizer, of_state) for optimizer in optimizers]
    doubt: Claim | None = None
    for optimizer, counter in pairs if not found else ():
        found, unknown = check_optimizer_count(opened, optimizer, counter)
        doubt = doubt or unknown
        if found:
            break
    return found, doubt or claim


def number_in_metadata(opened: OpenStep) -> int | None:
    """The step that the metadata of all parts was written for; None where they name none."""
    named = {part.own_number for part in opened.parts if part.part.format in SHARDED}
    return next(iter(named)) if len(named) == 1 else None


def check_identity(opened: OpenStep, counter: Counter | None) -> tuple[list[Finding], Claim]:
    """Compare the steps that a step counts with the number in its name.

    A counter that differs from the name is compared with those of the steps beside: where they
    agree with their names, or differ by the same amount or ratio, and this one does not, it is
    another step. Where the counts are those of the names in another order, folders were swapped.
    Without a counter, the step that the metadata was written for is compared instead. That of an
    optimizer, which may begin later than the run, contradicts a name where folders were swapped, or
    where its file was saved as the step that it counts.

    Yields `step.wrong-step`. Cost: none where name and counter agree; else the listing and the
    train state of `MAX_COMPARED` steps on each side at most.
    """
    number, counted_steps = opened.step.number, counter.n_steps if counter else None
    counts_steps = layouts.counts_training_steps(opened.step.layout)
    in_metadata = number_in_metadata(opened)
    # What the writer called the folder states the number in its name, whatever that counts.
    is_named = in_metadata is not None and (counter is None or not counts_steps)
    if in_metadata is not None and is_named:
        counter = Counter(in_metadata, number_in_metadata, counter.path if counter else "")
    if number is None or counter is None:
        return [], _of_name("no file states the step, or its name does not", opened)
    count = counter.n_steps
    if opened.step.layout in _NUMBERED_BY_RECORD:
        return [], _of_name("a record of the run gives its number", opened)
    further = _further_than(opened, in_metadata, counted_steps)
    if further is not None:
        return [_wrong_step(opened, count, (further, further))], _of_name("", opened)
    if count == number or (in_metadata is None and counts_steps and abs(count - number) <= 1):
        by = "metadata" if is_named else f"step count {count:,}"
        return [], Claim.proven(ClaimName.IDENTITY, by)
    counts = [*counts_beside(opened, counter.count_in)]
    if _is_swapped(number, count, counts):
        return [_wrong_step(opened, count, counts[0])], _of_name("", opened)
    if _fits(number, count, counts) or (counts_steps and abs(count - number) <= 1):
        by = f"step count {count:,}, as far from the name as in the steps beside"
        return [], Claim.proven(ClaimName.IDENTITY, by)
    agreeing = [(n, other) for n, other in counts if abs(other - n) <= 1]
    is_regular = len(agreeing) > 1 or opened.step.layout in _NAMED_BY_COUNT
    if agreeing and is_regular and len(agreeing) == len(counts):
        is_other = is_named or (counts_steps and _is_a_step(number, count, counts))
        if counter.path:
            is_other = _is_file_of_step(opened, counter.path, count)
        if is_other:
            return [_wrong_step(opened, count, counts[0])], _of_name("", opened)
    return [], _of_name(f"its train state counts {count:,} steps, and its name {number:,}", opened)


def _further_than(opened: OpenStep, named: int | None, counted: int | None) -> int | None:
    """A step beside that is at least as far as what metadata and train state both call this one.

    None where they do not agree, or the folder claims to be an earlier step: as the beginning of
    another run it is named so on purpose.
    """
    number = opened.step.number
    if named is None or counted is None or number is None or abs(counted - named) > 1:
        return None
    if number <= max(counted, named) + 1:
        return None
    wanted = [one.number for one in opened.neighbours.older() if one.number >= named][:MAX_COMPARED]
    beside = counts_beside(opened, number_in_metadata, wanted)
    return next((n for n, own in beside if n == own and n in wanted), None)


def check_optimizer_count(
    opened: OpenStep, optimizer: Counter, counter: Counter
) -> tuple[list[Finding], Claim | None]:
    """Compare the steps that the train state counts with those that the optimizer counts.

    Where both counts are equal in the steps beside, or have one ratio, and differ here, the
    optimizer began anew, or the two are not of one save. It is so if the file with the optimizer
    was saved as the step that it counts. Otherwise it is not known which step this is.

    Yields `state.mixed`, and a claim where the identity is unknown. Cost: none where the counts
    agree; else as `check_identity`.
    """
    of_state, of_optimizer = counter.n_steps, optimizer.n_steps
    if abs(of_state - of_optimizer) <= 1:
        return [], None
    states = dict(counts_beside(opened, counter.count_in))
    optimizers = dict(counts_beside(opened, optimizer.count_in))
    both = states.keys() & optimizers.keys()
    pairs = [(states[n], optimizers[n]) for n in sorted(both)]
    is_equal = all(abs(state - count) <= 1 for state, count in pairs)
    # Of two optimizers, one may count several steps where the other counts one.
    is_regular = len(pairs) > 1 and all(
        _fits(*pair, [other for other in pairs if other != pair]) for pair in pairs
    )
    if not pairs or not (is_equal or is_regular) or _fits(of_state, of_optimizer, pairs):
        return [], None
    beside = f"in step {max(both)} beside it they agree"
    saved_as = next((n for n in both if optimizers[n] == of_optimizer), of_optimizer)
    if not _is_file_of_step(opened, optimizer.path, saved_as):
        what = f"the train state counts {of_state:,} steps, and the optimizer {of_optimizer:,}"
        return [], _of_name(f"{what}; {beside}", opened)
    return [_mixed(opened, optimizer, "the train state", of_state)], None


def _mixed(opened: OpenStep, optimizer: Counter, what: str, number: int) -> Finding:
    n_steps = optimizer.n_steps
    return Finding(
        "state.mixed",
        optimizer.path,
        f"{what} counts {number:,} steps, and the optimizer {n_steps:,} in {optimizer.path}: a "
        "file of another step lies in this one",
        next_command=command_line("show", opened.url),
    )


def _is_alone(opened: OpenStep, optimizer: Counter) -> bool:
    """Whether the file of the step that an optimizer counts lies among files that are not of it.

    Cost: none where that step is gone; else four short reads, of it and of the largest other file.
    """
    named = opened.neighbours.numbered(optimizer.n_steps)
    key = key_of(optimizer.path)
    others = [file for file in opened.files if file.size and key_of(file.path) != key]
    others = [file for file in others if layouts.is_saved(file.path)]
    largest = max(others, key=lambda file: file.size, default=None)
    if named is None or largest is None:
        return False
    with suppress(StorageError):
        paths = (optimizer.path, largest.path)
        is_of_step = [_is_file_in(opened, path, named) for path in paths]
        return is_of_step == [True, False]
    return False


def _is_file_in(opened: OpenStep, path: str, named: StepName) -> bool:
    """Whether a file ends with the same bytes as that of another step.

    An archive ends with the checksums of all that it holds. Raises `StorageError`. Cost: two short
    reads.
    """
    other = opened.neighbours.open(opened.store, named)
    then = path_then(opened, other, path, named.number)
    return end_of_file(opened, path) == end_of_file(other, then)


_NUMBERED_BY_RECORD = frozenset({"ray-train"})
"""Layouts whose names have no number: after a run went back, a later report counts fewer steps."""

_NAMED_BY_COUNT = frozenset({"transformers"})
"""Layouts whose writer takes the number in the name from the counter in the train state."""


def _of_name(why: str, opened: OpenStep) -> Claim:
    return Claim.unknown(ClaimName.IDENTITY, why, command_line("seal", opened.url))


def counts_beside(
    opened: OpenStep, count_of: CountOf, numbers: Collection[int] | None = None
) -> Iterator[tuple[int, int]]:
    """What the steps beside count, by their numbers: of all that are compared, or of `numbers`."""
    for names in (opened.neighbours.older, opened.neighbours.newer):
        wanted = (one for one in names() if numbers is None or one.number in numbers)
        for named in islice(wanted, MAX_COMPARED):
            with suppress(StorageError):
                count = count_of(opened.neighbours.open(opened.store, named))
                if count is not None:
                    yield named.number, count


def _fits(number: int, count: int, beside: Sequence[tuple[int, int]]) -> bool:
    """Whether a counter relates to its name as those of most steps beside do."""
    if all(other == count for _, other in beside):
        return False  # it counts nothing
    by_offset = sum(abs((other - n) - (count - number)) <= 1 for n, other in beside)
    by_ratio = sum(abs(other * number - count * n) <= max(n, number) for n, other in beside)
    return 2 * max(by_offset, by_ratio) > len(beside)


def _is_a_step(number: int, count: int, beside: Sequence[tuple[int, int]]) -> bool:
    """Whether a counter may be that of another step: the steps are saved at multiples of a number.

    A counter within an epoch passes them by.
    """
    apart = gcd(number, *(n for n, _ in beside))
    return any((count + off) % apart == 0 for off in (-1, 0, 1))


def _is_swapped(number: int, count: int, beside: Sequence[tuple[int, int]]) -> bool:
    """Whether the counts are those of the names in another order, and this one is displaced.

    The counts in order are the numbers in order, or of three steps and more a multiple of them.
    """
    numbers = sorted([number, *(n for n, _ in beside)])
    counts = sorted([count, *(other for _, other in beside)])
    in_order = dict(zip(numbers, counts, strict=True))
    offsets = {other - n for n, other in in_order.items()}
    ratio = sum(counts) / max(sum(numbers), 1)
    # Several that count their own names show that the ratio is a coincidence.
    by_name = sum(abs(other - n) <= 1 for n, other in beside)
    is_multiple = len(counts) > 2 and by_name < 2
    is_multiple &= all(abs(c - ratio * n) <= 1 for n, c in in_order.items())
    is_equal = offsets in ({-1}, {0}, {1})
    is_displaced = abs(count - in_order[number]) > (0 if is_equal else 1)
    return counts[0] > 0 and (is_equal or is_multiple) and is_displaced


def _wrong_step(opened: OpenStep, count: int, beside: tuple[int, int]) -> Finding:
    name = opened.step.name
    number, other = beside
    return Finding(
        "step.wrong-step",
        name,
        f"{name} holds another step: its train state or metadata counts {count:,} steps, and that "
        f"of step {number} beside it {other:,}. A resume from here would start at step {count}",
        next_command=command_line("show", opened.url),
    )


def counting_optimizers(opened: OpenStep) -> list[Counter]:
    """The files of `torch.save` with an optimizer that counts steps, one of each kind.

    Cost: three short reads for each of `MAX_OPTIMIZERS` files at most.
    """
    counts = [(file.path, _steps_in(opened, file)) for file in _optimizer_files(opened)]
    return [
        Counter(n_steps, partial(_steps_of_kind, key_of(path)), path)
        for path, n_steps in counts
        if n_steps is not None
    ]


def _steps_of_kind(key: str, opened: OpenStep) -> int | None:
    """The steps that the optimizer of a kind counts in another step. Cost: three short reads."""
    alike = [file for file in _optimizer_files(opened) if key_of(file.path) == key]
    return _steps_in(opened, alike[0]) if alike else None


def _optimizer_files(opened: OpenStep) -> list[FileInfo]:
    """The files that may hold an optimizer, one of each kind, `MAX_OPTIMIZERS` at most."""
    layout = opened.step.layout
    files = [file for file in opened.files if file.size and _may_be_optimizer(opened, file.path)]
    files.sort(key=lambda file: kind_of_file(layout, file.path) is None)
    of_kinds = {key_of(file.path): file for file in reversed(files)}
    return [file for file in files if of_kinds[key_of(file.path)] is file][:MAX_OPTIMIZERS]


def _steps_in(opened: OpenStep, file: FileInfo) -> int | None:
    """The steps that the optimizer in a file counts; None where it counts none."""
    path = opened.name if opened.is_file else opened.in_store(file.path)
    counts = [n for n in optimizer_steps_inside(opened.store, path, file.size) if n > 0]
    return int(max(counts)) if counts else None


def _may_be_optimizer(opened: OpenStep, path: str) -> bool:
    """Whether a file of `torch.save` may hold an optimizer, by its name."""
    layout = opened.step.layout
    is_known = is_archive(path, layout) or any(path in part.archives for part in opened.step.parts)
    if not (layouts.is_saved(path) and is_known):
        return False
    kind = kind_of_file(layout, path)
    return kind is None or "optimizer" in kind.names


def check_counts(opened: OpenStep, contents: Mapping[str, object]) -> Iterator[Finding]:
    """Yield `state.mixed` for each file of a rank-file step that is that of an older step.

    `contents` are decoded files by path. One that counts as many steps as an older step has in
    its name, and no more, and ends with the same bytes as the file of that step, was not
    written by this save: an archive ends with the checksums of all that it holds. Cost: none
    where all counts are those of the step; else a listing and two short reads for each file.
    """
    number = opened.step.number
    if number is None or not layouts.counts_training_steps(opened.step.layout):
        return
    for path, content in contents.items():
        count = steps_counted(content)
        if count is None or count >= number:
            continue
        for named in (one for one in opened.neighbours.older() if one.number == count):
            with suppress(StorageError):
                if _is_file_in(opened, path, named):
                    yield Finding(
                        "state.mixed",
                        path,
                        f"{path} counts {count:,} steps and is the file of {named.name}: the step, "
                        "or a part of it, is a copy of that one",
                    )


def _is_file_of_step(opened: OpenStep, path: str, count: int) -> bool:
    """Whether a file that counts `count` steps was saved as step `count`, and not as this one.

    It ends with the same bytes as the file of that step, or that step alone is gone from among
    steps that are equally far apart: its folder was renamed. An optimizer that is younger than the
    run counts fewer steps too. Cost: two short reads where that step exists.
    """
    named = opened.neighbours.numbered(count)
    if named is not None:
        with suppress(StorageError):
            return _is_file_in(opened, path, named)
        return False
    numbers = sorted(
        {one.number for one in (*opened.neighbours.older(), *opened.neighbours.newer())} - {0}
    )
    number = opened.step.number or 0
    apart = {later - number for number, later in pairwise(sorted({*numbers, count}))}
    last = max([*numbers, number])
    return len(apart) == 1 and len(numbers) > 1 and numbers[0] < count < last


def path_then(opened: OpenStep, before: OpenStep, path: str, count: int) -> str:
    """The path in step `count` of the file that the open step has at `path`."""
    number = opened.step.number or 0
    if opened.is_file:
        return before.name
    if not layouts.is_scattered(opened.name):
        return layouts.path_in_step(path, number, count)
    then = re.sub(rf"(?<![0-9])0*{number}(?![0-9])", f"0*{count}", re.escape(path))
    return next((file.path for file in before.files if re.fullmatch(then, file.path)), path)
