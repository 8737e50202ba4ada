"""Decide whether a step is whole: what its save consists of is known, and all of it is there.

Metadata, an index, a seal and counts in the names state what a save consists of. Where nothing
does, the files of one kind are compared with each other, with those of the other kinds, and with
the steps beside this one: a family of files (`formats.families`) whose size nothing states and no
other step confirms is unknown, however sound its files are. After a job went on with another number
of ranks every family has another size, as if files were missing: the tensors in them decide.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, pairwise
from math import prod

import msgspec

from ckptctl.errors import StorageError
from ckptctl.findings import Claim, ClaimName, Finding, explained
from ckptctl.formats.families import key_of, named_families
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.manifest import MANIFEST, Manifest
from ckptctl.formatting import command_line, counted, some_of, verb
from ckptctl.inspection.file_kinds import (
    SIMILAR,
    ComparedStep,
    are_alike,
    are_copies,
    is_of_evaluation,
    is_redistributed,
    kinds_of_files,
    lost_first,
    lost_index,
    lost_words,
    open_families,
    ranks_inside,
    resized_in_part,
    shapes_by_key,
    sizes_in_families,
)
from ckptctl.inspection.open_step import MAX_BEFORE, OpenStep, steps_before, steps_beside
from ckptctl.inspection.rank_files import check_manifest, manifest_of, ranks_in, several_worlds
from ckptctl.inspection.shape import empty_file, missing_file
from ckptctl.inspection.sidecars import TensorSizes, split_tensors
from ckptctl.model import SHARDED, Family, Level, Part, PartFormat, Step

MAX_COMPARED = 2
"""So many steps on each side are compared until one decides."""


class Wholeness(msgspec.Struct, frozen=True):
    """What is known of the files of a step."""

    findings: tuple[Finding, ...] = ()
    """Files that are missing, and families of unknown size."""
    by: str = ""
    """What proves that all files are there; empty where nothing does."""
    n_ranks: int | None = None
    """How many ranks wrote the step, by its manifest."""

    def claim(self, opened: OpenStep, *, ranks_counted: bool) -> Claim:
        """The claim of a step without a seal, as if no finding spoke against it.

        `ranks_counted`: the number of ranks was compared with what the files state.
        """
        formats = {part.part.format for part in opened.parts}
        if formats & SHARDED and formats <= SHARDED | {PartFormat.SAFETENSORS}:
            return Claim.proven(ClaimName.WHOLE, "metadata")
        grids = [grid for part in opened.step.parts for grid in part.grids if grid.sharded]
        if not ranks_counted and not all(grid.stated for grid in grids):
            deeper = command_line("verify", opened.url, "--level", Level.STRUCTURE.value)
            why = "how many ranks wrote it was compared with no file of it"
            return Claim.unknown(ClaimName.WHOLE, why, deeper)
        if self.by:
            return Claim.proven(ClaimName.WHOLE, self.by)
        why = "nothing states which files belong to the step"
        return Claim.unknown(ClaimName.WHOLE, why, "--saved-world-size N, or a seal")


class Gap(msgspec.Struct, frozen=True):
    """Files of one family that are missing, and what shows it."""

    family: Family
    n_files: int
    """How many files there must be."""
    why: str
    """What shows it."""


class _Beside(msgspec.Struct, frozen=True):
    """The families of a step beside the inspected one."""

    opened: OpenStep
    families: Mapping[str, Family]
    is_newer: bool

    @property
    def name(self) -> str:
        return self.opened.name


def decide_whole(
    opened: OpenStep, saved_world_size: int | None, *, is_deep: bool = False
) -> Wholeness:
    """Compare the families of a step with each other and with those of the steps beside it.

    Yields `file.missing` for a hole in a numbering, for fewer files than the names state, than
    another kind of the same step has, or than the same kind has in a step of the same world;
    `state.mixed` for files of two worlds; `format.unlisted` for a family whose size nothing
    confirms; `file.fewer` for one that had more files, or grew until the step before. Storage
    errors of other steps are passed over: they confirm nothing. Of a step of torch_checkpointing
    the files that its manifest names are compared with those that are there, and with `is_deep`
    the parts of each tensor with its whole.

    Cost: none for a step without such families; else the listings of `MAX_BEFORE` steps before,
    and where these do not decide, of at most `MAX_COMPARED` on each side; where all sizes differ,
    one read of the pickle or header of each file of two steps.
    """
    if opened.is_file:
        return Wholeness(by="one file")
    plain = ComparedStep(opened)
    manifest: Manifest | None = None
    if any(file.path == MANIFEST for file in opened.files):
        decoded = manifest_of(opened)
        if isinstance(decoded, Finding):
            return Wholeness((decoded,))
        manifest = decoded
        findings = [*check_manifest(opened, manifest, is_deep=is_deep)]
        if findings:
            return Wholeness(tuple(findings))
    checked = _check_unlisted(plain, manifest, saved_world_size, is_deep=is_deep)
    is_sparse = any(not family.is_numbered for family in plain.families(opened.step))
    if checked.findings or is_sparse:
        closer = plain.closer()
        if closer.windows or closer.outputs:
            return _check_unlisted(closer, manifest, saved_world_size, is_deep=is_deep)
    return checked


def _check_unlisted(
    compared: ComparedStep,
    manifest: Manifest | None,
    saved_world_size: int | None,
    *,
    is_deep: bool,
) -> Wholeness:
    """What is known of all files: those that a `manifest` lists are there."""
    families = compared.families(compared.opened.step)
    families = (*families, *_left_of_lines(compared, families))
    if manifest is None:
        stated_by = f"--saved-world-size {saved_world_size}"
        return _check_families(compared, families, saved_world_size, stated_by, is_deep=is_deep)
    listed = {path for item in manifest.items for path in item.files.values()}
    keys = {key_of(path) for path in listed}
    families = tuple(family for family in families if key_of(family.example) not in keys)
    if not families:
        return Wholeness(by=MANIFEST, n_ranks=manifest.world_size)
    checked = _check_families(compared, families, manifest.world_size, MANIFEST, is_deep=is_deep)
    return msgspec.structs.replace(checked, n_ranks=manifest.world_size)


def _check_families(
    compared: ComparedStep,
    families: Sequence[Family],
    saved_world_size: int | None,
    stated_by: str,
    *,
    is_deep: bool,
) -> Wholeness:
    """What is known of the families of files that no manifest lists."""
    opened = compared.opened
    lost = (
        _emptied(compared, families)
        or lost_first(opened)
        or lost_index(compared, families)
        or lost_words(opened)
    )
    if lost is not None:
        return Wholeness((lost,))
    if not families:
        return Wholeness(by=_known_or_beside(compared))
    mixed = _mixed(opened.step, families) or resized_in_part(compared, families)
    if mixed is not None:
        return Wholeness((mixed,))
    numbered = [family for family in families if family.is_numbered]
    sparse = [family for family in families if not family.is_numbered]
    gaps = [
        Gap(family, family.n_files, "their names state how many there are")
        for family in numbered
        if family.stated and family.n_present < family.n_files
    ]
    gaps += _left_of_numbered(compared, sparse)
    unstated = [family for family in numbered if _is_open(family)]
    if saved_world_size is not None:
        more = _more_than_ranks(opened, numbered, saved_world_size, stated_by)
        if more is not None:
            return Wholeness((more,))
    if not unstated:
        # Numbers with more holes than files prove nothing.
        by = "the counts in the names" if numbered else ""
        return _result(opened.step, gaps, by if not sparse else "")
    beside = [*_beside(compared, {family.key: family for family in unstated})]
    if any(_confirms(unstated, other) for other in beside):
        fuller = _fuller_before(compared, unstated)
        beside = beside if fuller is None else [fuller]
    unstated = [family for family in unstated if not _is_lone(family, beside)]
    if not unstated:
        return _result(opened.step, gaps, "one file of each kind")
    unstated = [family for family in unstated if not _grows(opened.step, family, beside)]
    if not unstated:
        return _result(opened.step, gaps, "files that grow in number with the steps")
    confirmed = next((other for other in beside if _confirms(unstated, other)), None)
    unstated = [_counted_as_beside(family, beside, saved_world_size) for family in unstated]
    gaps += _holes(unstated, confirmed)
    # What is stated counts more than another step, which may lack the same files.
    if saved_world_size is not None:
        gaps += _fewer_than_ranks(unstated, saved_world_size, beside)
        if gaps or confirmed is None:
            return _result(opened.step, gaps, stated_by)
    if confirmed is not None:
        gaps += _fewer_of_equal_parts(opened, unstated)
        gaps += _lacking_parts(opened, unstated) if is_deep else []
        stopped = next(_no_longer_growing(compared, unstated), None)
        if stopped is not None and not gaps:
            return Wholeness((stopped,))
        return _result(opened.step, gaps, f"{confirmed.name}, which has the same files")
    same_world = next((other for other in beside if _is_same_world(unstated, other)), None)
    if same_world is not None:
        added = [family for family in unstated if family.key not in same_world.families]
        lines = [family for family in unstated if family.is_line]
        gaps += [gap for gap, _ in _lost_since(opened, lines, same_world)]
        gaps += _fewer_than_others(added, unstated, beside)
        return _result(opened.step, gaps, f"{same_world.name}, which as many ranks wrote")
    gaps += _fewer_than_others(unstated, unstated, beside)
    if gaps:
        return _result(opened.step, gaps, "")
    if not beside and len({family.n_files for family in unstated if family.is_line}) > 1:
        return Wholeness((_unlisted(unstated, beside),))
    return _by_content(compared, unstated, beside)


def _known_or_beside(compared: ComparedStep) -> str:
    """What proves that a step without families has all its files; empty where nothing does.

    One file is all that there is unless each step beside has others. Cost: none where a framework
    names the files; else the listings of `MAX_BEFORE` steps before, and of two on each side.
    """
    opened = compared.opened
    is_of_framework = opened.step.layout not in layouts.OF_NO_FRAMEWORK
    if is_of_framework and any(part.grids for part in opened.step.parts):
        return f"files as {opened.step.layout} names them"
    kinds = kinds_of_files(opened.step).keys()
    if not kinds:
        return "no name of a rank"
    is_only = True
    for other in steps_beside(compared.opened, MAX_COMPARED):
        is_only = False
        if not _has_more_kinds(other, kinds):
            if any(
                _has_more_kinds(step, kinds) for step in steps_before(compared.opened, MAX_BEFORE)
            ):
                return ""  # both may lack a file that earlier steps have
            return "one file" if len(kinds) == 1 else f"{other.name}, which has the same files"
    return "one file" if is_only and len(kinds) == 1 else ""


def _has_more_kinds(other: OpenStep, kinds: Collection[str]) -> bool:
    """Whether a step has a kind of file that is not among `kinds`, and that no evaluation wrote."""
    return any(
        kind not in kinds and not is_of_evaluation(other, path)
        for kind, path in kinds_of_files(other.step).items()
    )


def _result(step: Step, gaps: Sequence[Gap], by: str) -> Wholeness:
    seen: dict[str, Finding] = {}
    for gap in gaps:
        seen.setdefault(gap.family.key, _missing(step, gap))
    return Wholeness(tuple(seen.values()), "" if seen else by)


def _mixed(step: Step, families: Sequence[Family]) -> Finding | None:
    """The finding for files of one kind whose names state several counts."""
    stated: dict[str, list[Family]] = defaultdict(list)
    for family in families:
        if family.stated:
            stated[family.key].append(family)
    for key, alike in stated.items():
        if len(alike) > 1:
            return several_worlds(step, alike[0].example, key, [family.n_files for family in alike])
    return None


def _emptied(compared: ComparedStep, families: Sequence[Family]) -> Finding | None:
    """The finding for a file without a byte that has some in the nearest step; None without one.

    Cost: none without an empty file in a family; else the listing of the nearest step.
    """
    opened = compared.opened
    keys = {family.key for family in families}
    files = [file for file in opened.files if file.kind == "file" and not file.size]
    empty = [file.path for file in files if key_of(file.path) in keys]
    for other in islice(steps_beside(compared.opened, 1), 1 if empty else 0):
        held = {file.path for file in other.files if file.size}
        numbers = (opened.step.number or 0, other.step.number or 0)
        empty = [path for path in empty if layouts.path_in_step(path, *numbers) in held]
    return empty_file(opened.step, empty[0]) if empty else None


def _left_of_lines(compared: ComparedStep, families: Sequence[Family]) -> Iterator[Family]:
    """The families of which one file is left, that of a rank which is not the first.

    By its name alone it is no rank's; the step beside has several, and one of that rank. Cost: none
    without such a name; else the listing of the nearest step.
    """
    step, keys = compared.opened.step, {family.key for family in families}
    single = {key: path for key, path in kinds_of_files(step).items() if key != path}
    for other in steps_beside(compared.opened, 1) if single.keys() - keys else ():
        for held in compared.families(other.step):
            path = single.get(held.key) if held.key not in keys else None
            if path is not None and held.is_line and held.n_present > 1:
                family = held.with_only(path)
                if family.members <= held.members:
                    yield family


def _left_of_numbered(compared: ComparedStep, sparse: Sequence[Family]) -> Iterator[Gap]:
    """Families with more holes than files of which a step beside has all numbers."""
    for family in sparse:
        for other in _beside(compared, {family.key: family}):
            held = other.families.get(family.key)
            if held is not None and held.is_numbered and family.members < held.members:
                yield Gap(family, held.n_files, f"{other.name} has {held.n_present:,}")
                break


def _holes(families: Iterable[Family], confirmed: _Beside | None) -> Iterator[Gap]:
    """Numbers that are missing; a grid need not be full if that of another step is not either."""
    for family in families:
        full = family.n_files if family.is_line else prod(map(len, family.values))
        held = confirmed.families.get(family.key) if confirmed is not None else None
        is_as_before = held is not None and held.members == family.members
        if confirmed is not None and (not family.is_line or (is_as_before and _is_spaced(family))):
            continue
        if family.n_present < full:
            yield Gap(family, full, "their numbers have a hole")


def _is_spaced(family: Family) -> bool:
    """Whether the numbers of a line are equally far apart: one rank of each node writes it."""
    numbers = [number for (number,) in sorted(family.members)]
    return len({later - number for number, later in pairwise(numbers)}) == 1


def _beside(compared: ComparedStep, families: Mapping[str, Family]) -> Iterator[_Beside]:
    """The steps beside this one with their families, nearest first, until one has the same."""
    for other in steps_beside(compared.opened, MAX_COMPARED):
        held = {family.key: family for family in compared.families(other.step)}
        if held:
            is_newer = (other.step.number or 0) > (compared.opened.step.number or 0)
            yield (found := _Beside(other, held, is_newer=is_newer))
            if _confirms(families.values(), found):
                return


def _confirms(families: Iterable[Family], other: _Beside) -> bool:
    """Whether another step shows that none of the families lacks a file.

    It has the same files of each kind, in about the same size, so as many ranks wrote both. Both
    may lack the same ranks: see `_fuller_before`. A newer step that only lacks files of the same
    size was cut short itself.
    """
    found = {family.key: family for family in families}
    held = {key: family for key, family in other.families.items() if _is_open(family)}
    if held.keys() - found.keys() or (found.keys() != held.keys() and not other.is_newer):
        return False
    both = [(found[key], family) for key, family in held.items()]
    return bool(both) and (
        all(
            family.members <= mine.members if other.is_newer else family.members == mine.members
            for mine, family in both
        )
        and any(
            are_alike(mine.n_bytes / mine.n_present, family.n_bytes / family.n_present)
            for mine, family in both
        )
    )


def _fuller_before(compared: ComparedStep, families: Iterable[Family]) -> _Beside | None:
    """The nearest step before that has more files of a kind, each about as large; None without.

    A dead node, or a disk that is not mounted, takes the files of the same ranks from every save
    that follows. Files of fewer ranks are larger. Cost: the listings of `MAX_BEFORE` steps.
    """
    present = {family.key: family for family in families}
    for other in steps_before(compared.opened, MAX_BEFORE):
        held = {family.key: family for family in compared.families(other.step)}
        for key in held.keys() & present.keys():
            now, then = present[key], held[key]
            alike = are_alike(now.n_bytes / now.n_present, then.n_bytes / then.n_present)
            # A grid of which one column is left is a line.
            is_part = now.members < then.members or len(now.values) < len(then.values)
            if is_part and now.n_present < then.n_present and alike:
                return _Beside(other, held, is_newer=False)
    return None


def _is_open(family: Family) -> bool:
    """Whether the numbers of a family are those of ranks, and nothing states how many."""
    return family.is_numbered and not family.stated


def _is_lone(family: Family, beside: Iterable[_Beside]) -> bool:
    """Whether a single file with a 1 in its name is no rank's: no other step has more of them."""
    if layouts.hugging_face_rank(family.example.rpartition("/")[2]) is not None:
        return False
    return family.n_present == 1 and family.base == 1 and not _had_more(family, beside)


def _grows(step: Step, family: Family, beside: Iterable[_Beside]) -> bool:
    """Whether a family has as many files more than in steps before as the steps are apart.

    So does a replay buffer in parts. One that lost a file is not in line with two other steps.
    """
    counts = {
        other.opened.step.number: other.families[family.key].n_files
        for other in beside
        if family.key in other.families
    }
    is_full = family.n_present == family.n_files
    return is_full and _are_in_line({**counts, step.number: family.n_files})


def _are_in_line(counts: Mapping[int | None, int]) -> bool:
    """Whether the numbers of files in three steps or more grow as the numbers of the steps do."""
    in_order = sorted((number, count) for number, count in counts.items() if number)
    if len(in_order) < 3:
        return False
    (first, least), (last, most) = in_order[0], in_order[-1]
    return most > least and all(
        (count - least) * (last - first) == (most - least) * (n - first) for n, count in in_order
    )


def _no_longer_growing(compared: ComparedStep, families: Sequence[Family]) -> Iterator[Finding]:
    """Yield `file.fewer` for families that grew from step to step until the step before.

    Cost: none for a family that has as many files as another, as those of ranks have; else the
    listing of a second step before, and of a third where that has fewer files.
    """
    counts = [family.n_files for family in families]
    for family in families:
        if not family.is_line or family.n_files < 3 or counts.count(family.n_files) > 1:
            continue
        before: dict[int | None, int] = {}
        for other in steps_before(compared.opened, 3):
            there = compared.families(other.step)
            held = [older for older in there if older.key == family.key]
            before[other.step.number] = held[0].n_files if held else 0
            if len(before) == 2 and max(before.values()) == min(before.values()):
                break
        if _are_in_line(before) and max(before.values()) == family.n_files:
            yield Finding(
                "file.fewer",
                family.example,
                f"{counted(family.n_files, 'file')} {family.key}, as many as the step before has, "
                "and each of the steps before has more than the one before it: the last file is "
                "missing, or their number no longer grows; a seal proves which",
                next_command=command_line("show", compared.opened.url),
            )


def _counted_as_beside(
    family: Family, beside: Iterable[_Beside], saved_world_size: int | None
) -> Family:
    """A family that counts from 0 or from 1 as the same one of another step shows.

    Without one, the last of as many ranks as wrote the step has its number where they count from 1.
    """
    held = _in_steps(family, beside)
    if any(other.has_zero for other in held):
        return family.from_base(0)
    if family.is_line and any(other.values[0][:1] == (1,) for other in held):
        return family.from_base(1)
    is_last = not held and family.is_line and family.values[0][-1] == saved_world_size
    is_from_one = is_last or any(other.base == 1 for other in held)
    return family.from_base(1) if is_from_one and not family.names_rank else family


def _fewer_of_equal_parts(opened: OpenStep, families: Sequence[Family]) -> Iterator[Gap]:
    """Kinds of which fewer ranks have a file than of another that is split as they are.

    A step beside this one may lack the same files. Cost: none where the number of files of each
    kind divides that of each other, as it does in a mesh; else the pickle of each file.
    """
    for family in families:
        others = [other for other in families if other.n_present > family.n_present]
        grid = next(
            (one for one in others if len(one.values) > 1 and one.values == family.values), None
        )
        if grid is not None:
            yield Gap(family, grid.n_present, f"there are {grid.n_present:,} files {grid.key}")
            continue
        odd = [
            other
            for other in others
            if family.is_line and other.is_line and other.n_files % family.n_files
        ]
        if odd:
            shapes = shapes_by_key(opened, [family, *odd])
            for other in odd:
                if shapes[family.key] and shapes[family.key] == shapes[other.key]:
                    why = f"there are {other.n_files:,} files {other.key} of equal parts"
                    yield Gap(family, other.n_files, why)
                    break


def _is_same_world(families: Iterable[Family], other: _Beside) -> bool:
    """Whether some kind of which several ranks have a file has as many as in another step."""
    return any(
        family.n_present > 1 and any(_is_as(family, held) for held in _in_steps(family, [other]))
        for family in families
    )


def _is_as(family: Family, held: Family) -> bool:
    """Whether as many ranks wrote a family as the same one in another step.

    Smaller files are those of more ranks; larger ones, as where the other step is damaged.
    """
    return held.members == family.members and family.n_bytes * SIMILAR >= held.n_bytes


def _lost_since(
    opened: OpenStep, families: Iterable[Family], other: _Beside
) -> Iterator[tuple[Gap, bool]]:
    """The families with fewer files than in another step, and whether their tensors are smaller.

    Without those whose tensors show that fewer ranks wrote them, or do so of as many files.
    """
    fewer = [
        family
        for family in families
        if (held := other.families.get(family.key)) is not None
        and held.n_present > family.n_present
    ]
    if not fewer:
        return
    now = sizes_in_families(opened, fewer)
    then = _sizes_beside(other, [other.families[family.key] for family in fewer])
    is_less: dict[str, bool] = {}
    for name in {*split_tensors(now, then), *(name for name in now if now[name].is_part)}:
        size, key = now[name], name[1]
        # A shard that states the shape of its whole tensor shows by itself what is missing.
        is_smaller = size.lacks_parts if size.is_part else size.n_elements < then[name].n_elements
        is_less[key] = is_less.get(key, False) or is_smaller
    # A model of as many parts does not show that as many ranks wrote the optimizer.
    resized = {family.n_present for family in fewer if is_less.get(family.key) is False}
    for family in fewer:
        held = other.families[family.key]
        if is_less.get(family.key, family.n_present not in resized):
            shown_by = (
                "its tensors are larger" if family.key in is_less else "as many ranks wrote it"
            )
            why = f"{other.name} has {held.n_present:,}, and {shown_by}"
            yield Gap(family, held.n_files, why), family.key in is_less


def check_uncounted(opened: OpenStep, part: Part, *, reads_only_step: bool) -> Iterator[Finding]:
    """Yield a finding for files that a framework names without how many ranks wrote them.

    `file.missing` for fewer files than in a step before where their tensors are smaller, or where
    another kind has as many files as then; `file.fewer` where nothing decides: the job may have got
    fewer ranks. With `reads_only_step`, the shards in the only step of a root are `file.missing`
    where they lack parts of their tensors, and `format.unlisted` where nothing decides. Storage
    errors of other steps are passed over.

    Cost: the listings of `MAX_BEFORE` steps; where a kind has fewer files, or in an only step, the
    pickle of each file of the steps.
    """
    compared, layout = ComparedStep(opened), opened.step.layout
    named = named_families(part.files, layout)
    uncounted = [family for family in named.values() if not family.stated]
    others = [family for family in open_families(opened.step) if family.is_line]
    if not uncounted or any(family.lost for family in part.grids):
        return
    neighbours = opened.neighbours
    is_only = reads_only_step and neighbours.are_known and not neighbours.newer()
    # A dead node takes the same ranks from each later save: the nearest step may lack them, too.
    for older in steps_before(compared.opened, MAX_BEFORE):
        is_only = False
        files = [file for other in older.step.parts for file in other.files]
        held = {family.key: family for family in open_families(older.step)}
        other = _Beside(older, {**held, **named_families(files, layout)}, is_newer=False)
        with suppress(StorageError):
            # The tensors in the files of other kinds may show that fewer ranks wrote all of them.
            found = _lost_since(opened, [*uncounted, *others], other)
            lost = [(gap, is_smaller) for gap, is_smaller in found if gap.family in uncounted]
            for gap, is_smaller in lost:
                # Files of fewer ranks, as of model parallelism alone, do not count all of them.
                of_all = [family for family in named.values() if family.n_files >= gap.n_files]
                is_missing = is_smaller or _is_same_world(of_all, other)
                yield _missing(opened.step, gap) if is_missing else _unlisted([gap.family], [other])
            if lost:
                return
    # The folders of the ranks of NVRx state how many there are.
    for family in uncounted if is_only and layout != "nvrx" else ():
        if family.sharded and family.n_present > 1:
            findings = _by_content(compared, [family], []).findings
            yield from findings
            if findings:
                return


def _fewer_than_ranks(
    families: Sequence[Family], n_ranks: int, beside: Sequence[_Beside]
) -> Iterator[Gap]:
    lines = [family for family in families if family.is_line]
    most = max((family.n_files for family in lines), default=0)
    for family in lines:
        if family.n_files == most < n_ranks:
            why = f"{n_ranks:,} ranks wrote the step"
            is_counted = any(family.key in other.families for other in beside)
            if family.base == 1 and not (family.has_zero or is_counted):
                why += f" ({some_of(family.missing(n_ranks))}, if they count from 1)"
                family = family.from_base(0)
            yield Gap(family, n_ranks, why)


def _more_than_ranks(
    opened: OpenStep, families: Sequence[Family], n_ranks: int, stated_by: str
) -> Finding | None:
    """The finding for files of more ranks than wrote the step; None where none need be.

    Files of which there are more than ranks may be something else, such as the parts of a replay
    buffer, if another kind is left for the ranks.
    """
    of_several = [
        family
        for family in families
        if family.n_present > 1 and (family.names_rank or not family.stated)
    ]
    sizes = {family.key: _least_size(family) for family in of_several}
    named = [family for family in of_several if family.names_rank]
    kinds = kinds_of_files(opened.step).keys() - sizes.keys()
    if not named and any(not kind.endswith(".json") for kind in kinds):
        return None
    most = max(named, key=lambda family: sizes[family.key], default=None)
    most = most or min(of_several, key=lambda family: sizes[family.key], default=None)
    if most is None or sizes[most.key] <= n_ranks:
        return None
    n_files = counted(most.n_files, "file")
    return Finding(
        "state.mixed",
        most.example,
        f"{n_files} {most.key} are of more than {n_ranks:,} ranks, which wrote the step by "
        f"{stated_by}: files of another save lie among them, or another number of ranks wrote it",
        next_command=command_line("show", opened.url),
    )


def _least_size(family: Family) -> int:
    """How many ranks there are at least, whether their numbers count from 0 or from 1."""
    is_from_zero = family.has_zero or family.names_rank or not family.is_line
    return family.n_files if is_from_zero else family.values[0][-1]


def _fewer_than_others(
    families: Sequence[Family], others: Sequence[Family], beside: Sequence[_Beside]
) -> Iterator[Gap]:
    """Those of `families` of which fewer ranks have a file than of one of `others`."""
    lines = [family for family in others if family.is_line]
    largest = max(lines, key=lambda family: family.n_files, default=None)
    for family in families if largest is not None else ():
        if not family.is_line or largest is None or family.n_files == largest.n_files:
            continue
        is_as_before = any(_is_as(family, held) for held in _in_steps(family, beside))
        if is_as_before or _is_in_proportion(family, largest, beside):
            continue
        if family.ranks == {0} and largest.n_files > 2 and not _had_more(family, beside):
            continue  # rank 0 alone writes this kind
        yield Gap(family, largest.n_files, f"there are {largest.n_files:,} files {largest.key}")


def _in_steps(family: Family, beside: Iterable[_Beside]) -> list[Family]:
    """The same family in the steps beside that have it."""
    return [other.families[family.key] for other in beside if family.key in other.families]


def _is_in_proportion(family: Family, largest: Family, beside: Sequence[_Beside]) -> bool:
    """Whether the same part of the ranks writes a kind as in another step, or may, without one."""
    pairs = [
        (other.families[family.key].n_files, other.families[largest.key].n_files)
        for other in beside
        if {family.key, largest.key} <= other.families.keys()
        and other.families[largest.key].n_files > 1
    ]
    if not pairs:
        may_be_one = family.n_files > 1 or not beside
        return may_be_one and largest.n_files % family.n_files == 0
    return any(few * largest.n_files == many * family.n_files for few, many in pairs)


def _had_more(family: Family, beside: Iterable[_Beside]) -> bool:
    return any(held.n_present > family.n_present for held in _in_steps(family, beside))


def _by_content(
    compared: ComparedStep, families: Sequence[Family], beside: Sequence[_Beside]
) -> Wholeness:
    """Decide by the tensors in the files, where no name does."""
    opened = compared.opened
    now = sizes_in_families(opened, families)
    largest = max(families, key=lambda family: family.n_files)
    if lacking := _lacking_parts(opened, families, now):
        return _result(opened.step, lacking, "")
    parts = {name for name, size in now.items() if size.is_part}
    if parts and not any(_has_more_copies(now, other, parts) for other in beside):
        return Wholeness(by="the shapes of the whole tensors, which the files state")
    for other in beside if not parts else ():
        then = _sizes_beside(other, [*other.families.values()])
        split = split_tensors(now, then)
        if split and all(now[name].n_elements == then[name].n_elements for name in split):
            n_ranks = counted(largest.n_files, "rank")
            by = f"the tensors of {n_ranks}, which together are as large as in {other.name}"
            return Wholeness(by=by)
        smaller = [n for n in split if now[n].n_elements < then[n].n_elements]
        if smaller:
            why = f"{_listed(smaller)} are smaller than in {other.name}"
            held = other.families.get(largest.key)
            n_files = held.n_files if held is not None else largest.n_files + 1
            return _result(opened.step, [Gap(largest, n_files, why)], "")
    for other in beside if not parts else ():
        if is_redistributed(opened, families, other.opened, other.families.values()):
            by = f"as many weights and moments in the files of each kind as in {other.name}"
            return Wholeness(by=by)
    stated, why = ranks_inside(opened, families), "a file states that {:,} ranks wrote the step"
    if stated is None:
        stated, why = _ranks_of_shards(opened, families, beside), "{:,} ranks left shards"
    if stated is not None and stated < largest.n_files:
        return Wholeness((_unlisted(families, beside),))
    if stated is not None:
        why = why.format(stated)
        gaps = [*_fewer_than_ranks(families, stated, beside)]
        return _result(opened.step, gaps, why)
    alike = _as_many_copies(compared, families)
    if alike is not None:
        return Wholeness(by=f"files that are copies of each other, as many as in {alike.name}")
    return Wholeness((_unlisted(families, beside),))


def _as_many_copies(compared: ComparedStep, families: Sequence[Family]) -> OpenStep | None:
    """A step beside with as many files of each family, the tensors in which are copies.

    A rank that holds no tensor of its own loses none, and two saves lack no file by chance.
    """
    if not are_copies(compared.opened, families):
        return None
    members = {family.key: family.members for family in families}
    for other in steps_beside(compared.opened, MAX_COMPARED):
        held = {family.key: family.members for family in compared.families(other.step)}
        if held == members:
            return other
    return None


def _ranks_of_shards(
    opened: OpenStep, families: Sequence[Family], beside: Iterable[_Beside]
) -> int | None:
    """How many ranks left shards of DCP; None unless as many wrote each family in a step beside.

    A rank without a tensor of its own leaves no shard.
    """
    now = _n_with_shards(opened.step)
    for other in beside:
        then = _n_with_shards(other.opened.step)
        held = [other.families.get(family.key) for family in families]
        if now and then and all(one is not None and one.n_files == then for one in held):
            return now
    return None


def _n_with_shards(step: Step) -> int:
    return max((len(ranks_in(part)) for part in step.parts if part.format in SHARDED), default=0)


def _lacking_parts(
    opened: OpenStep, families: Sequence[Family], sizes: TensorSizes | None = None
) -> list[Gap]:
    """The gap where tensors state a whole of which the files here do not hold every part."""
    now = sizes_in_families(opened, families) if sizes is None else sizes
    lacking = [name for name, size in now.items() if size.lacks_parts]
    if not lacking:
        return []
    largest = max(families, key=lambda family: family.n_files)
    why = f"{_listed(lacking)} lack parts of the tensor that they are parts of"
    return [Gap(largest, largest.n_files + 1, why)]


def _listed(names: Iterable[tuple[str, str]]) -> str:
    return some_of([f"{fqn} in {key}" for fqn, key in names])


def _has_more_copies(now: TensorSizes, other: _Beside, names: Iterable[tuple[str, str]]) -> bool:
    """Whether the parts of a tensor in another step are more elements: copies of it are gone."""
    then = _sizes_beside(other, [*other.families.values()])
    return any(name in then and then[name].n_elements > now[name].n_elements for name in names)


def _sizes_beside(other: _Beside, families: Sequence[Family]) -> TensorSizes:
    """Those of a step beside; of one that cannot be read, none."""
    with suppress(StorageError):
        return sizes_in_families(other.opened, families)
    return {}


def _missing(step: Step, gap: Gap) -> Finding:
    family = gap.family
    names = family.missing(gap.n_files)
    n_missing = max(gap.n_files - family.n_present, len(names))
    what = f"files {family.key} of ranks are missing"
    if names:
        of_all = f"{n_missing:,} of {counted(gap.n_files, 'file')} {family.key}"
        what = f"{of_all} {verb(n_missing, 'is', 'are')} missing: {some_of(names)}"
    return missing_file(
        step,
        names[0] if names else family.example,
        f"{what}; {gap.why}",
        expected=counted(gap.n_files, "file"),
        found=counted(family.n_present, "file"),
    )


def _unlisted(families: Sequence[Family], beside: Sequence[_Beside]) -> Finding:
    largest = max(families, key=lambda family: family.n_files)
    before = next((other for other in beside if largest.key in other.families), None)
    n_files, code = counted(largest.n_files, "file"), "format.unlisted"
    if before is not None:
        n_before = before.families[largest.key].from_base(largest.base).n_files
        code = "file.fewer" if n_before > largest.n_files else code
        why = (
            f"{before.name} has {n_before:,}, and nothing in this step states how many ranks "
            "wrote it: their number changed, or the files of the last ranks are missing"
        )
    else:
        why = "nothing states how many ranks wrote them, and no other step confirms it"
    return explained(
        code,
        largest.example,
        f"{n_files} {largest.key}: {why}. --saved-world-size N, a seal, or another step with the "
        "same files proves that none is missing",
    )
