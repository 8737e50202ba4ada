"""Derive how many ranks wrote a step, and check what a load at another world size needs.

The metadata does not state the world size that wrote a step. The names of the shard files do
in a clean folder, where every rank leaves a file even if it had nothing to write; elsewhere
they give a lower bound. No check here calls a step damaged for its number of files, unless
the caller states how many ranks wrote it, or the tensors in rank files or the step before do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress

from ckptctl.errors import StorageError
from ckptctl.findings import Finding
from ckptctl.formats.families import CONVERSIONS, FAMILY, files_by_kind
from ckptctl.formats.frameworks.layouts import (
    hugging_face_rank,
    is_stage,
    rank_local_rank,
    shard_rank,
)
from ckptctl.formatting import command_line, counted, listed, some_of, verb
from ckptctl.inspection.beside import MAX_BEFORE, Neighbours, steps_before
from ckptctl.inspection.open_step import OpenPart, OpenStep
from ckptctl.inspection.stored_tensors import is_split, tensor_sizes
from ckptctl.model import (
    SHARDED,
    FileInfo,
    Grid,
    Part,
    PartFormat,
    TrainState,
    WorldSize,
)

_WITH_RANKS = SHARDED | {PartFormat.SAFETENSORS}
_RANK_READERS = (shard_rank, rank_local_rank, hugging_face_rank)


def ranks_in(part: Part, named: Collection[str] | None = None) -> frozenset[int]:
    """The ranks that left a shard file or rank-local metadata in a part, or all their rank files.

    `named` are the shard files that the part's metadata names. A file with bytes
    that it does not name was left by another save, and does not count for this one.
    """
    if part.grids:
        counted_all = [one for one in part.grids if one.n_ranks is not None]
        lacking = [one for one in counted_all if one.n_present < one.n_files]
        return frozenset(
            rank
            for one in counted_all
            for rank in one.ranks
            if all(rank in other.ranks or rank >= other.n_files for other in lacking)
        )
    names = {file.path for file in part.files if not _is_left_over(file, named)}
    names |= {*(named or ())}  # a file that is missing was written by someone too
    found = (read(name) for name in names for read in _RANK_READERS)
    return frozenset(rank for rank in found if rank is not None)


def _is_left_over(file: FileInfo, named: Collection[str] | None) -> bool:
    if named is None or file.path in named or not file.size:
        return False
    return shard_rank(file.path) is not None


def saved_world_size(
    parts: Sequence[Part], named: Mapping[str, Collection[str]], state: TrainState
) -> WorldSize | None:
    """How many ranks wrote the step, and where that was read from; None where nothing states it.

    `named` are the shard files that the metadata of each part names, by its path,
    without the parts whose metadata does not state it. Pipeline stages number their
    ranks from 0 each, so they add up; other parts are written by the same ranks.
    State that exists once per rank can show more ranks than the shard files do.
    """
    sharded = [part for part in parts if part.format in _WITH_RANKS]
    ranks = {part.path: ranks_in(part, named.get(part.path)) for part in sharded}
    stages = [found for path, found in ranks.items() if is_stage(path)]
    others = [found for path, found in ranks.items() if not is_stage(path)]
    by_files = max(
        sum(len(found) for found in stages),
        max((max(found, default=-1) + 1 for found in others), default=0),
    )
    # A rank with nothing to write leaves no safetensors file: such a part states the size
    # only where no other does, and not for sure.
    telling = [part for part in sharded if part.format is not PartFormat.SAFETENSORS]
    of_rank_files = {part.path: n for part in parts if (n := _rank_files(part))}
    telling += [part for part in parts if part.path in of_rank_files]
    unclear = not telling or any(
        len(ranks.get(part.path, ())) <= max(ranks.get(part.path, ()), default=-1)
        or any(_is_left_over(file, named.get(part.path)) for file in part.files)
        for part in telling
    )
    by_files = max(by_files, *of_rank_files.values(), 0)
    by_state = max(state.rng.n_ranks or 0, state.dataloader.n_ranks or 0)
    if by_state > by_files:
        return WorldSize(by_state, "train-state", at_least=True)
    if by_files == 0:
        return None
    return WorldSize(by_files, "shard-files", at_least=unclear)


def _rank_files(part: Part) -> int:
    """How many ranks the names of rank files state; 0 for none."""
    return max((one.n_ranks or 0 for one in part.grids), default=0)


def check_saved_world_size(
    parts: Sequence[Part], named: Mapping[str, Collection[str]], expected: int, url: str
) -> Iterator[Finding]:
    """Compare the shard files and rank files with those of `expected` ranks.

    `named` are the shard files that the metadata of each part names. Yields `shard.missing` for
    each part that lacks a shard file of one of them, and `state.mixed` for files of further ranks.
    Pipeline stages share the ranks among them and are counted together. Families of files that no
    framework names are checked by `inspection.whole`.
    """
    for part in parts:
        counts = [grid.n_ranks or 0 for grid in part.grids if grid.framework != FAMILY]
        n_ranks = max(counts, default=0)
        if 0 < n_ranks < expected:
            yield _too_few("the step", f"files of {n_ranks} ranks", expected, part.path, url)
        elif n_ranks > expected:
            yield _too_many(n_ranks, expected, part.path, url)
    sharded = [part for part in parts if part.format in _WITH_RANKS]
    stages = [part for part in sharded if is_stage(part.path)]
    n_in_stages = sum(len(ranks_in(part)) for part in stages)
    if stages and n_in_stages < expected:
        yield _too_few("the stages", f"{n_in_stages} ranks", expected, "", url)
    for part in sharded:
        if is_stage(part.path):
            continue
        there = ranks_in(part)
        missing = [rank for rank in range(expected) if rank not in there]
        if missing and (there or part.format is not PartFormat.SAFETENSORS):
            what = f"no shard file of rank {some_of(missing, 8)}"
            yield _too_few(part.path or "the step", what, expected, part.path, url)
        last = max(ranks_in(part, named[part.path]), default=-1) if part.path in named else -1
        if last >= expected:
            yield _too_many(last + 1, expected, part.path, url)


def _too_many(n_ranks: int, expected: int, where: str, url: str) -> Finding:
    return Finding(
        "state.mixed",
        where,
        f"{expected} ranks wrote the step, and there are files of {n_ranks}: those of another save "
        "lie among them, or another number of ranks wrote it",
        expected=f"files of {expected} ranks",
        found=f"files of {n_ranks} ranks",
        next_command=command_line("verify", url),
    )


def _too_few(what: str, found: str, expected: int, where: str, url: str) -> Finding:
    return Finding(
        "shard.missing",
        where,
        f"{expected} ranks wrote the step, but in {what} there is {found}",
        expected=f"shard files of {expected} ranks",
        found=found,
        next_command=command_line("verify", url),
    )


def check_fewer_ranks(
    opened: OpenStep, part: OpenPart, neighbours: Neighbours, *, reads_only_step: bool
) -> Iterator[Finding]:
    """Yield a finding for a kind of which nothing states how many ranks wrote it.

    The names of some frameworks do not state it: the files of the last ranks can be missing without
    a trace. The job may also have got fewer ranks. Of a kind with more files in a step before it
    yields `file.missing` where its tensors are smaller now, or where all ranks wrote another kind
    as well, and that has as many files as before; `file.fewer` where nothing decides. With
    `reads_only_step`, the files of the only step of a root are `file.missing` where they lack parts
    of their tensors, and `format.unlisted` where nothing decides. Storage errors of other steps are
    passed over.

    Cost: the listings of `MAX_BEFORE` steps; where a kind has fewer files, or in an only step, the
    pickle of each file of the steps.
    """
    uncounted = [
        grid
        for grid in part.part.grids
        if grid.framework != FAMILY and not (grid.stated or grid.missing)
    ]
    has_older = False
    # A dead node takes the same ranks from each later save: the nearest step may lack them, too.
    for other in steps_before(opened, neighbours, MAX_BEFORE if uncounted else 1):
        with suppress(StorageError):
            found = [*_fewer_than_before(opened, part.part.grids, uncounted, other)]
            has_older = True
            if found:
                yield from found
                return
    if has_older:
        return
    uncounted = [grid for grid in uncounted if grid.sharded and grid.n_present > 1]
    # The folders of the ranks of NVRx state how many there are.
    is_only = reads_only_step and not neighbours.newer() and opened.step.layout != "nvrx"
    lacks_parts = _smaller_kinds(opened, opened) if uncounted and is_only else {}
    for grid in uncounted if is_only else ():
        lacking = lacks_parts.get(f"{grid.folder} {grid.what}")
        if lacking is not False:
            code = "file.missing" if lacking else "format.unlisted"
            why = (
                "they hold less than the whole of the tensors that they are parts of: those of the "
                "last ranks are missing"
                if lacking
                else "nothing states how many ranks wrote them, and no other step confirms it. "
                "--saved-world-size N, a seal, or another step with the same files proves that "
                "none is missing"
            )
            files = counted(grid.n_present, "file")
            yield Finding(
                code,
                grid.folder.rstrip("/"),
                f"{files} with the {grid.what}: {why}",
                "files of all ranks" if lacking else "a stated number of files",
                files,
                command_line("explain", code),
            )
            return


def _fewer_than_before(
    opened: OpenStep, grids: Sequence[Grid], uncounted: Sequence[Grid], other: OpenStep
) -> Iterator[Finding]:
    n_before: dict[tuple[str, str], int] = defaultdict(int)
    for part in other.step.parts:
        n_before |= {_kind(grid): grid.n_present for grid in part.grids}
    unchanged = {
        grid.n_present for grid in grids if grid.n_ranks == grid.n_present == n_before[_kind(grid)]
    }
    fewer = [grid for grid in uncounted if n_before[_kind(grid)] > grid.n_present]
    smaller = _smaller_kinds(opened, other) if fewer else {}
    is_smaller = [smaller.get(f"{grid.folder} {grid.what}") for grid in fewer]
    resized = {
        grid.n_present for grid, less in zip(fewer, is_smaller, strict=True) if less is False
    }
    for grid, less in zip(fewer, is_smaller, strict=True):
        if less is False or (less is None and grid.n_present in resized):
            continue
        is_missing = less or (grid.n_ranks == grid.n_present and n_before[_kind(grid)] in unchanged)
        why = (
            "the job ran on fewer ranks, or the files of the last ranks are missing; "
            "--saved-world-size N states which"
        )
        if is_missing:
            shown_by = "its tensors are smaller" if less else "as many ranks wrote other files"
            why = f"{shown_by}: those of the last ranks are missing"
        files = counted(grid.n_present, "file")
        yield Finding(
            "file.missing" if is_missing else "file.fewer",
            grid.folder.rstrip("/"),
            f"{files} with the {grid.what}, where {other.name} has {n_before[_kind(grid)]:,}"
            f"{'; ' if is_missing else ': '}{why}",
            expected=counted(n_before[_kind(grid)], "file"),
            found=files,
            next_command=command_line("show", opened.url),
        )


def _kind(grid: Grid) -> tuple[str, str]:
    return grid.framework, grid.what


def _smaller_kinds(opened: OpenStep, other: OpenStep) -> Mapping[str, bool]:
    """Of each kind of rank file with split tensors: whether these are smaller than in `other`."""
    sizes = []
    for step in (opened, other):
        files = [file for part in step.step.parts for file in part.files]
        kinds = files_by_kind(files, step.step.layout)
        kind_in = {path: kind for kind, paths in kinds.items() for path in paths}
        sizes.append(tensor_sizes(step, kinds, defaultdict(str, kind_in).__getitem__))
    now, then = sizes
    smaller: dict[str, bool] = {}
    for name, size in now.items():
        if size.is_part or (name in then and is_split(size, then[name])):
            less = size.lacks_parts if size.is_part else size.n_elements < then[name].n_elements
            smaller[name[1]] = less or smaller.get(name[1], False)
    return smaller


def check_world_size(
    parts: Sequence[Part], state: TrainState, saved: WorldSize | None, wanted: int, url: str
) -> Iterator[Finding]:
    """Yield what loading at `wanted` ranks needs, or what it would lose.

    `world-size.fixed` where it cannot be loaded, `state.lost` for state that exists
    once per rank, `world-size.differs` where DCP reshards while loading. Nothing
    where the step was written by as many ranks.
    """
    if saved is not None and saved.size == wanted and not saved.at_least:
        return
    fixed = [part for part in parts if _is_fixed(part, wanted)]
    if fixed:
        yield _fixed(fixed[0], saved, wanted, url)
        return
    lost = [
        kind
        for kind in ("rng", "dataloader")
        if (n_ranks := state.part(kind).n_ranks) is not None and n_ranks != wanted
    ]
    if lost:
        counts = ", ".join(f"{kind} for {state.part(kind).n_ranks} ranks" for kind in lost)
        yield Finding(
            "state.lost",
            ", ".join(lost),
            f"{listed(lost)} {verb(len(lost), 'exists', 'exist')} once per rank ({counts}) and "
            f"cannot be restored on {wanted} ranks: data would be repeated or skipped",
            expected=f"one copy for each of {wanted} ranks",
            found=counts,
            next_command=command_line("show", url),
        )
    written = _count(saved)
    yield Finding(
        "world-size.differs",
        "",
        f"written by {written}, to be loaded by {wanted} ranks: {_how_it_loads(parts, saved)}",
        expected=f"{wanted} ranks",
        found=written,
    )


def _how_it_loads(parts: Sequence[Part], saved: WorldSize | None) -> str:
    if any(part.format in SHARDED for part in parts):
        return "DCP reshards while loading"
    if saved is not None and saved.source == "manifest":
        return "metadata.pkl states how its files are resharded"
    if any(grid.sharded for part in parts for grid in part.grids):
        return "there are as many files of each rank's own"
    return "no file holds a shard"


def check_bound(parts: Sequence[Part], url: str) -> Iterator[Finding]:
    """Yield `world-size.bound` where nothing in a step says how other ranks could load its files.

    A note: each rank wrote files of its own, whose names no framework gives, and there is no
    manifest such as `metadata.pkl` of torch_checkpointing, by which they could be resharded.
    """
    for part in parts:
        grid = next((one for one in part.grids if one.sharded and one.framework == FAMILY), None)
        if grid is not None:
            yield Finding(
                "world-size.bound",
                part.path,
                f"{grid.n_present:,} ranks wrote files of their own ({grid.what}), and without a "
                "manifest (metadata.pkl) nothing says how another number of ranks could load them",
                expected="a manifest, or as many ranks as wrote the step",
                found="none",
                next_command=command_line("show", url),
            )


def _is_fixed(part: Part, wanted: int) -> bool:
    """Whether only as many ranks can load a part as wrote it.

    Names that count model-parallel ranks alone leave the data-parallel size free.
    """
    if part.format is PartFormat.RANK_FILES:
        sharded = (one for one in part.grids if one.sharded)
        return any(
            (one.n_ranks or one.n_files) != wanted
            if one.n_ranks or one.framework == FAMILY
            else wanted % one.n_files
            for one in sharded
        )
    return part.format not in (PartFormat.DCP, PartFormat.SAFETENSORS)


def _fixed(part: Part, saved: WorldSize | None, wanted: int, url: str) -> Finding:
    next_command = command_line("show", url)
    if part.format is PartFormat.DCP_RANK_LOCAL:
        why = (
            "every rank wrote its own metadata, and a load at another world size gives "
            "wrong values without an error"
        )
    elif part.format is PartFormat.RANK_FILES:
        layout = next(one.framework for one in part.grids if one.sharded)
        why = f"each rank has shards of its own ({layout})"
        if layout == FAMILY:
            why = "each rank wrote files of its own, and no manifest (metadata.pkl) describes them"
        next_command = CONVERSIONS[layout].format(step=url, root=url.rpartition("/")[0])
    else:
        why = f"{part.format.value} checkpoints cannot be resharded while loading"
    return Finding(
        "world-size.fixed",
        part.path,
        f"cannot be loaded on {wanted} ranks: {why}",
        expected=f"{wanted} ranks",
        found=_count(saved),
        next_command=next_command,
    )


def _count(saved: WorldSize | None) -> str:
    if saved is None:
        return "an unknown number of ranks"
    return f"{'at least ' if saved.at_least else ''}{saved.size} ranks"
