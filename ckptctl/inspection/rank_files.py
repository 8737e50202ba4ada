"""Check rank files: one file of each kind for every rank.

Only names are compared, and what the content of small files states: the grid that the names
state (`formats.families`), and the files that an index lists. Whether the files are
whole is checked as for records.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from ckptctl.findings import Finding
from ckptctl.formats.families import (
    COMPOSERS_RANKS,
    FAMILY,
    MAX_STATED,
    STATED_INSIDE,
    grids_of,
)
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layout_tables import TABLES
from ckptctl.formats.frameworks.state_keys import file_holds_no_state
from ckptctl.formats.pickles.policy import Opaque
from ckptctl.formats.pickles.stubs import shown
from ckptctl.formatting import at_most_few, command_line, counted, some_of, verb
from ckptctl.inspection.safetensors import check_index, check_numbers
from ckptctl.model import FileInfo, Grid, Part, Step


def check_rank_files(
    step: Step,
    part: Part,
    archives: Collection[str],
    held: Callable[[], Collection[str]],
) -> Iterator[Finding]:
    """Yield the faults that the names in a rank-file part show. Cost: one match of each name.

    `archives` are the paths of its `torch.save` files. `held` returns the kinds of train state
    that the content of the files shows; it is called where no name shows the weights. Yields
    `file.missing` for each kind of which a rank lacks its file and where no file holds weights,
    `state.mixed` where files of several world sizes lie in one folder, and `format.unlisted`
    where nothing shows which file holds the weights. Families that no framework names are
    checked by `inspection.whole`.
    """
    lacking = (one for one in part.grids if one.missing)
    yield from at_most_few(_missing(step, one) for one in lacking)
    yield from _mixed(step, part.grids)
    indexes = (re.fullmatch(TABLES.torch_index, file.path) for file in part.files)
    indexed = {match["folder"] for match in indexes if match}
    alone = [path for path in archives if path[: path.rfind("/") + 1] not in indexed]
    yield from [*check_numbers(alone)] or _without_index(step, alone)
    kinds = [kind_of_file(step.layout, file.path) for file in part.files if file.size]
    names = {name for kind in kinds if kind for name in kind.names}
    is_one_file = [file.path for file in part.files] == [step.name]
    if "model" in names or is_one_file:
        return
    unknown = [
        path
        for path in archives
        if kind_of_file(step.layout, path) is None and not file_holds_no_state(path)
    ]
    if not unknown:
        yield _no_weights(step, names)
    elif "model" not in held():
        yield _unlisted(archives)


def _without_index(step: Step, archives: Iterable[str]) -> Iterator[Finding]:
    """Yield `file.missing` for the index of a model in several files, without which none loads."""
    found = (re.fullmatch(TABLES.torch_shard, path) for path in archives)
    for model in sorted({match["model"] for match in found if match}):
        index = f"{model}.bin.index.json"
        yield _missing_file(
            step,
            index,
            f"{index} is missing: without it no load finds the files of the model",
            index,
        )


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
            yield _missing_file(
                step,
                path,
                f"{path} names the folder {shown(named)}, which holds no file: DeepSpeed loads "
                "from it",
                f"the files of {shown(named)}",
            )


def check_parameters(step: Step, part: Part, contents: Mapping[str, object]) -> Iterator[Finding]:
    """Yield `file.missing` for each parameter of the model that lacks a file.

    nanotron and DeepSpeed's universal checkpoints keep files for each parameter. `contents`
    are the decoded top levels of files, by path, and name the parameters.
    """
    for name, missing in _files_of_parameters(step.layout, part.files, contents):
        yield _missing_file(
            step,
            missing[0],
            f"{counted(len(missing), 'file')} of the parameter {shown(name)} "
            f"{verb(len(missing), 'is', 'are')} missing: {some_of(missing)}",
            "the files of each parameter",
            f"none of {some_of(missing)}",
        )


def _files_of_parameters(
    layout: str, files: Iterable[FileInfo], contents: Mapping[str, object]
) -> Iterator[tuple[str, Sequence[str]]]:
    """The parameters without a file that they need, each with the paths of those."""
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


def check_stated_ranks(step: Step, part: Part, contents: Mapping[str, object]) -> Iterator[Finding]:
    """Yield `file.missing` where the content of a file states more ranks than left one.

    `contents` are the decoded top levels of files, by path.
    """
    yield from at_most_few(check_parameters(step, part, contents))
    stated = stated_ranks(step, contents)
    if stated:
        found = grids_of(part.files, step.layout, stated)
        yield from at_most_few(_missing(step, one) for one in found if one.missing)


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


def _missing(step: Step, grid: Grid) -> Finding:
    n_missing = grid.n_files - grid.n_present
    of_ranks = f" of {grid.n_ranks} ranks" if grid.n_ranks else ""
    return _missing_file(
        step,
        grid.missing[0],
        f"{n_missing:,} of {counted(grid.n_files, 'file')} with the {grid.what}{of_ranks} "
        f"{verb(n_missing, 'is', 'are')} missing: {some_of(grid.missing)}",
        counted(grid.n_files, "file"),
        counted(grid.n_present, "file"),
    )


def _missing_file(
    step: Step, where: str, message: str, expected: str, found: str = "nothing"
) -> Finding:
    show = command_line("show", step.url)
    return Finding("file.missing", where, message, expected, found, show)


def _mixed(step: Step, found: Sequence[Grid]) -> Iterator[Finding]:
    sizes: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for one in found:
        if one.framework != FAMILY and one.stated and one.n_ranks is not None:
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
        expected="files of one world size",
        found=f"files of {listed} ranks",
        next_command=command_line("show", step.url),
    )


def _no_weights(step: Step, names: Collection[str]) -> Finding:
    return _missing_file(
        step,
        "",
        "no file of the step holds the model's weights",
        "a file with the weights",
        f"files with {some_of(sorted(names))}" if names else "none",
    )


def _unlisted(archives: Collection[str]) -> Finding:
    return Finding(
        "format.unlisted",
        "",
        f"{counted(len(archives), 'file')} of torch.save ({some_of(sorted(archives))}), and "
        "nothing states which files belong to the step: one that was never written is not missed",
        expected="file names of a known layout, with the weights among them",
        found=some_of(sorted(archives)),
        next_command="ckptctl explain format.unlisted",
    )
