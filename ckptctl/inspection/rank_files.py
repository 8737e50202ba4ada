"""Check which ranks wrote a step, and what a load at another world size needs.

Rank files: one file of each kind for every rank, by the grid that the names state
(`formats.families`), the files that an index lists and what the content of small files states.
Whether the files are whole is checked as for records.

The metadata of DCP does not state the world size that wrote a step. The names of the shard files
do in a clean folder, where every rank leaves a file even if it had nothing to write; elsewhere they
give a lower bound.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.errors import MetadataUnreadable, MetadataUnsafe
from ckptctl.findings import Finding, at_most_few, explained
from ckptctl.formats.families import (
    COMPOSERS_RANKS,
    CONVERSIONS,
    MAX_STATED,
    STATED_INSIDE,
    grids_of,
    key_of,
)
from ckptctl.formats.frameworks import layouts
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layout_tables import TABLES
from ckptctl.formats.frameworks.state_keys import file_holds_no_state
from ckptctl.formats.manifest import MANIFEST, MAX_BYTES, Manifest, ManifestItem, read_manifest
from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.stubs import shown
from ckptctl.formatting import command_line, counted, listed, some_of, verb
from ckptctl.inspection.open_step import OpenStep
from ckptctl.inspection.safetensors import check_index, check_numbers
from ckptctl.inspection.shape import missing_file
from ckptctl.inspection.sidecars import tensor_sizes
from ckptctl.model import (
    FAMILY,
    SHARDED,
    Family,
    FileInfo,
    Part,
    PartFormat,
    Step,
    TrainState,
    WorldSize,
)


def check_rank_files(step: Step, part: Part, archives: Collection[str]) -> Iterator[Finding]:
    """Yield the faults that the names in a rank-file part show. Cost: one match of each name.

    `archives` are the paths of its `torch.save` files. Yields `file.missing` for each kind of
    which a rank lacks its file and where no file holds weights, and `state.mixed` where files of
    several world sizes lie in one folder. Families that no framework names are checked by
    `inspection.whole`.
    """
    lacking = (family for family in part.grids if family.lost)
    yield from at_most_few(_missing(step, one) for one in lacking)
    yield from _mixed(step, part.grids)
    indexes = (re.fullmatch(TABLES.torch_index, file.path) for file in part.files)
    indexed = {match["folder"] for match in indexes if match}
    alone = [path for path in archives if path[: path.rfind("/") + 1] not in indexed]
    yield from [*check_numbers(alone)] or _without_index(step, alone)
    if not (_names_weights(step, part) or _unknown_archives(step, archives)):
        yield missing_file(step, "", "no file of the step holds the model's weights")


def may_hold_weights(step: Step, part: Part, archives: Collection[str]) -> bool:
    """Whether no name shows the weights, and a file of an unknown name may hold them."""
    return not _names_weights(step, part) and bool(_unknown_archives(step, archives))


def _names_weights(step: Step, part: Part) -> bool:
    """Whether the name of a file shows that it holds the weights, or the step is one file."""
    kinds = [kind_of_file(step.layout, file.path) for file in part.files if file.size]
    is_named = any("model" in kind.names for kind in kinds if kind)
    return is_named or [file.path for file in part.files] == [step.name]


def _unknown_archives(step: Step, archives: Iterable[str]) -> list[str]:
    """The files of `torch.save` whose names do not show what they hold."""
    return [
        path
        for path in archives
        if kind_of_file(step.layout, path) is None and not file_holds_no_state(path)
    ]


def _without_index(step: Step, archives: Iterable[str]) -> Iterator[Finding]:
    """Yield `file.missing` for the index of a model in several files, without which none loads."""
    found = (re.fullmatch(TABLES.torch_shard, path) for path in archives)
    for model in sorted({match["model"] for match in found if match}):
        index = f"{model}.bin.index.json"
        message = f"{index} is missing: without it no load finds the files of the model"
        yield missing_file(step, index, message)


def check_named(step: Step, part: Part, documents: Mapping[str, bytes]) -> Iterator[Finding]:
    """Yield what files that name others name, and what is not there.

    `documents` are the contents of DeepSpeed's `latest` and of the indexes of a model in
    files of `torch.save`, by path. Yields `file.missing`, and as `check_index`.
    """
    paths = [file.path for file in part.files if file.kind == "file"]
    for path, content in documents.items():
        folder = path[: path.rfind("/") + 1]
        tag = re.fullmatch(TABLES.tag, path)
        if tag is None:
            below = [one.removeprefix(folder) for one in paths if one.startswith(folder)]
            for finding in check_index(FileInfo(path, len(content)), content, {}, below):
                yield replace(finding, where=finding.where and f"{folder}{finding.where}")
            continue
        named = content.decode("utf-8", "replace").strip()
        if not any(one.startswith(f"{folder}{named}/") for one in paths):
            folder = f"the folder {shown(named)}, which holds no file: DeepSpeed loads from it"
            yield missing_file(step, path, f"{path} names {folder}")


def _files_of_parameters(
    layout: str, files: Iterable[FileInfo], contents: Mapping[str, object]
) -> Iterator[tuple[str, Sequence[str]]]:
    """The parameters without a file that they need, each with the paths of those.

    nanotron and DeepSpeed's universal checkpoints keep files for each parameter. `contents`
    are the decoded top levels of files, by path, and name the parameters.
    """
    held: dict[str, set[str]] = defaultdict(set)
    tops = [content for content in contents.values() if isinstance(content, Mapping)]
    if layout == "deepspeed-universal":
        # A folder for each parameter, with a file for the weight and for each optimizer state.
        for file in files:
            top, _, name = file.path.rpartition("/")
            if top.startswith("zero/"):
                held[top.removeprefix("zero/")].add(name)
        for group in (one for top in tops for one in _listed(top.get("param_shapes"))):
            for name in group if isinstance(group, Mapping) else ():
                held.setdefault(str(name), set())
        wanted = frozenset().union(*held.values())
        for name, there in sorted(held.items()):
            if wanted - there:
                yield name, [f"zero/{name}/{kind}" for kind in sorted(wanted - there)]
    elif layout == "nanotron":
        # `model/a/b/model_weight.safetensors`, and one for each rank of a tensor that is split.
        there = {re.sub(r"(?:_pp-rank-.*)?\.safetensors", "", file.path) for file in files}
        names = (name for top in tops for name in _listed(top.get("names")))
        for name in dict.fromkeys(str(name) for name in names):
            folder, _, leaf = f"model.{name}".rpartition(".")
            path = f"{folder.replace('.', '/')}/model_{leaf}"
            if path not in there:
                yield name, [f"{path}.safetensors"]


def _listed(value: object) -> Iterable[object]:
    """The values of a list or a dictionary that a file may hold; nothing of anything else."""
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def manifest_of(opened: OpenStep) -> Manifest | Finding:
    """The manifest of a step of torch_checkpointing, or what is wrong with it. Cost: one read."""
    try:
        return read_manifest(opened.store.read(opened.in_store(MANIFEST), limit=MAX_BYTES))
    except (MetadataUnreadable, MetadataUnsafe) as error:
        is_unsafe = isinstance(error, MetadataUnsafe)
        code = "metadata.unsafe" if is_unsafe else "metadata.unreadable"
        return explained(
            code,
            MANIFEST,
            f"{MANIFEST} {'' if is_unsafe else 'cannot be decoded: '}{error.message}",
        )


def check_manifest(opened: OpenStep, manifest: Manifest, *, is_deep: bool) -> Iterator[Finding]:
    """Yield `file.missing` and `coverage.gap` for what the manifest names and no file holds."""
    there = {file.path for file in opened.files if file.size}
    named = {path: item for item in manifest.items for path in item.files.values()}
    missing = sorted(named.keys() - there)
    if missing:
        yield missing_file(
            opened.step,
            missing[0],
            f"{len(missing):,} of {counted(len(named), 'file')} that {MANIFEST} names "
            f"{verb(len(missing), 'is', 'are')} missing: {some_of(missing)}",
        )
        return
    for item in manifest.items:
        without = sorted({rank for t in item.tensors for rank in t.ranks} - item.files.keys())
        if without:
            yield _gap_in(opened, item.name, f"rank {without[0]} has no file")
        elif is_deep:
            yield from _parts_missing(opened, item)


def _parts_missing(opened: OpenStep, item: ManifestItem) -> Iterator[Finding]:
    """Yield `coverage.gap` for tensors whose parts in the files are less than the whole."""
    keys = frozenset(map(key_of, item.files.values()))
    sizes = tensor_sizes(opened, keys, key_of)
    by_fqn: dict[str, int] = defaultdict(int)
    for (fqn, _), size in sizes.items():
        by_fqn[fqn] += size.n_elements
    for tensor in item.tensors:
        held = by_fqn.get(tensor.fqn)
        if held is not None and tensor.n_copies and held < tensor.n_elements * tensor.n_copies:
            whole = f"{tensor.n_elements * tensor.n_copies:,} elements"
            yield _gap_in(opened, f"{item.name} {tensor.fqn}", f"{held:,} of {whole} are there")
            return


def _gap_in(opened: OpenStep, where: str, why: str) -> Finding:
    return Finding(
        "coverage.gap",
        where,
        f"{where}: {why}, by {MANIFEST} and the files",
        next_command=command_line("show", opened.url),
    )


def check_stated_ranks(step: Step, part: Part, contents: Mapping[str, object]) -> Iterator[Finding]:
    """Yield `file.missing` where files state more ranks, or more parameters, than have one.

    `contents` are the decoded top levels of files, by path.
    """
    yield from at_most_few(
        missing_file(
            step,
            missing[0],
            f"{counted(len(missing), 'file')} of the parameter {shown(name)} "
            f"{verb(len(missing), 'is', 'are')} missing: {some_of(missing)}",
        )
        for name, missing in _files_of_parameters(step.layout, part.files, contents)
    )
    stated = stated_ranks(step, contents)
    if stated:
        found = grids_of(part.files, step.layout, stated)
        yield from at_most_few(_missing(step, family) for family in found if family.lost)


def stated_ranks(step: Step, contents: Mapping[str, object]) -> Mapping[str, int]:
    """The lengths of axes that the content of the files of a step states."""
    stated: dict[str, int] = {}
    for content in contents.values():
        for path, axis in STATED_INSIDE.items():
            value = _value_at(content, path)
            if type(value) is int and 0 < value <= MAX_STATED:
                stated[axis] = max(value, stated.get(axis, 0))
        if step.layout == "composer-ranks":
            states = _value_at(content, (COMPOSERS_RANKS,))
            stated["rank"] = max(len([*_listed(states)]), stated.get("rank", 0))
    return {axis: n for axis, n in stated.items() if n}


def _value_at(content: object, path: Iterable[str]) -> object:
    """What a file holds under keys or attributes; None where it lacks one."""
    for key in path:
        inside = content.state if isinstance(content, Opaque) else content
        content = inside.get(key) if isinstance(inside, Mapping) else None
    return content


def _missing(step: Step, grid: Family) -> Finding:
    n_missing, lost = grid.n_files - grid.n_present, grid.lost
    of_ranks = f" of {grid.n_ranks} ranks" if grid.n_ranks else ""
    return missing_file(
        step,
        lost[0],
        f"{n_missing:,} of {counted(grid.n_files, 'file')} with the {grid.what}{of_ranks} "
        f"{verb(n_missing, 'is', 'are')} missing: {some_of(lost)}",
    )


def _mixed(step: Step, found: Sequence[Family]) -> Iterator[Finding]:
    sizes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for one in found:
        if one.is_named and one.stated and one.n_ranks is not None:
            sizes[one.folder, one.framework, one.what].append(one.n_ranks)
    for (folder, _, what), ranks in sizes.items():
        if len(ranks) > 1:
            yield several_worlds(step, folder.rstrip("/"), f"with the {what}", ranks)
            return


def several_worlds(step: Step, where: str, what: str, sizes: Iterable[int]) -> Finding:
    """The finding for files of one kind whose names state several numbers of ranks."""
    listed = " and ".join(f"{size:,}" for size in sorted(sizes))
    return Finding(
        "state.mixed",
        where,
        f"the files {what} are those of several saves, by {listed} ranks: which of them is loaded "
        "depends on the number of ranks that load",
        next_command=command_line("show", step.url),
    )


def unlisted(archives: Collection[str]) -> Finding:
    """The finding for files of which nothing shows that one holds the weights."""
    return explained(
        "format.unlisted",
        "",
        f"{counted(len(archives), 'file')} of torch.save ({some_of(sorted(archives))}), and "
        "nothing states which files belong to the step: one that was never written is not missed",
    )


_WITH_RANKS = SHARDED | {PartFormat.SAFETENSORS}
_RANK_READERS = (layouts.shard_rank, layouts.rank_local_rank, layouts.hugging_face_rank)


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
    return layouts.shard_rank(file.path) is not None


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
    stages = [found for path, found in ranks.items() if layouts.is_stage(path)]
    others = [found for path, found in ranks.items() if not layouts.is_stage(path)]
    by_files = max(
        sum(len(found) for found in stages),
        max((max(found, default=-1) + 1 for found in others), default=0),
    )
    # A rank with nothing to write leaves no safetensors file: such a part states the size
    # only where no other does, and not for sure.
    telling = [part for part in sharded if part.format is not PartFormat.SAFETENSORS]
    of_rank_files = {
        part.path: max(counts)
        for part in parts
        if (counts := [grid.n_ranks for grid in part.grids if grid.n_ranks])
    }
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
        n_ranks = max((grid.n_ranks or 0 for grid in part.grids if grid.is_named), default=0)
        if 0 < n_ranks < expected:
            yield _too_few("the step", f"files of {n_ranks} ranks", expected, part.path, url)
        elif n_ranks > expected:
            yield _too_many(n_ranks, expected, part.path, url)
    sharded = [part for part in parts if part.format in _WITH_RANKS]
    stages = [part for part in sharded if layouts.is_stage(part.path)]
    n_in_stages = sum(len(ranks_in(part)) for part in stages)
    if stages and n_in_stages < expected:
        yield _too_few("the stages", f"{n_in_stages} ranks", expected, "", url)
    for part in sharded:
        if layouts.is_stage(part.path):
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
        next_command=command_line("verify", url),
    )


def _too_few(what: str, found: str, expected: int, where: str, url: str) -> Finding:
    message = f"{expected} ranks wrote the step, but in {what} there is {found}"
    return Finding("shard.missing", where, message, next_command=command_line("verify", url))


def check_world_size(
    parts: Sequence[Part],
    state: TrainState,
    saved: WorldSize | None,
    wanted: int,
    url: str,
    require: Collection[str] = (),
) -> Iterator[Finding]:
    """Yield what loading at `wanted` ranks needs, or what it would lose.

    `world-size.fixed` where it cannot be loaded, `state.lost` for state that exists
    once per rank, `world-size.differs` where DCP reshards while loading. What is lost of the
    kinds in `require` is `unmet`. Nothing where the step was written by as many ranks.
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
            next_command=command_line("show", url),
            unmet=not set(lost).isdisjoint(require),
        )
    written = _count(saved)
    yield Finding(
        "world-size.differs",
        "",
        f"written by {written}, to be loaded by {wanted} ranks: {_how_it_loads(parts, saved)}",
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
        grid = next((one for one in part.grids if one.sharded and not one.is_named), None)
        if grid is not None:
            yield Finding(
                "world-size.bound",
                part.path,
                f"{grid.n_present:,} ranks wrote files of their own ({grid.holds}), and without a "
                "manifest (metadata.pkl) nothing says how another number of ranks could load them",
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
            if one.n_ranks or not one.is_named
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
        unmet=True,
    )


def _count(saved: WorldSize | None) -> str:
    if saved is None:
        return "an unknown number of ranks"
    return f"{'at least ' if saved.at_least else ''}{saved.size} ranks"
