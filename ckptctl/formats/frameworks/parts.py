"""The parts of a step: the folders of tensors among its files.

Which names are those of shards, metadata and rank files is looked up in `layouts`; nothing is
opened.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ckptctl.formats.families import grids_of, key_of
from ckptctl.formats.frameworks.file_names import kind_of_file, may_hold_state
from ckptctl.formats.frameworks.layout_tables import TABLES, full_match
from ckptctl.formats.frameworks.layouts import (
    METADATA,
    METADATA_TMP,
    hugging_face_rank,
    is_saved,
    rank_local_rank,
    shard_rank,
)
from ckptctl.model import FileInfo, Part, PartFormat

MAX_PART_DEPTH = 3
"""How many folders down a part may be. Folders below that are those of single tensors."""


def parts_of(
    files: Sequence[FileInfo], layout: str = "", *, stated: Mapping[str, int] | None = None
) -> tuple[Part, ...]:
    """The folders of tensors among the files of a step of `layout`, by path.

    `stated` are lengths of the axes of rank files, as for `grids_of`.

    A folder with DCP metadata or shard files is a DCP part, at most `MAX_PART_DEPTH` folders
    down; beside such folders, the shards of DCP's Hugging Face writer and a model in
    safetensors are parts too. Only where there is no DCP part, the signs of other formats are
    looked for. Cost: one pass over the files.
    """
    folders: dict[str, list[FileInfo]] = {}
    for file in files:
        folder, _, name = file.path.rpartition("/")
        if is_saved(file.path):
            folders.setdefault(folder, []).append(file.at(name))
    formats = {
        folder: _dcp_format(inside)
        for folder, inside in folders.items()
        if folder.count("/") < MAX_PART_DEPTH
    }
    if not any(formats.values()):
        return _other_parts(folders, layout, stated)
    return tuple(
        Part(folder, found, tuple(inside))
        for folder, inside in sorted(folders.items())
        if folder in formats
        if (found := formats[folder] or _safetensors_beside(folder, inside)) is not None
    )


def _safetensors_beside(folder: str, files: Iterable[FileInfo]) -> PartFormat | None:
    """A folder of safetensors that a resume reads: exports for others are not parts."""
    is_model = folder in TABLES.model_folders
    found = any(
        hugging_face_rank(file.path) is not None
        or (is_model and file.path.endswith(".safetensors"))
        for file in files
    )
    return PartFormat.SAFETENSORS if found else None


def _dcp_format(files: Iterable[FileInfo]) -> PartFormat | None:
    found: PartFormat | None = None
    for file in files:
        if file.path in (METADATA, METADATA_TMP):
            return PartFormat.DCP
        if rank_local_rank(file.path) is not None:
            found = PartFormat.DCP_RANK_LOCAL
        elif shard_rank(file.path) is not None and found is None:
            found = PartFormat.DCP
    return found


def _other_parts(
    folders: Mapping[str, Sequence[FileInfo]], layout: str, stated: Mapping[str, int] | None
) -> tuple[Part, ...]:
    paths = [
        (f"{folder}/{file.path}" if folder else file.path)
        for folder in folders
        for file in folders[folder]
    ]
    for kind, expression in TABLES.other_formats:
        if any(full_match(expression, path) for path in paths):
            return (Part("", kind, _flattened(folders)),)
    files = _flattened(folders)
    if any(is_archive(path, layout) for path in paths):
        return (Part("", PartFormat.RANK_FILES, files, grids_of(files, layout, stated)),)
    parts = tuple(
        part
        for part in in_parts(files, PartFormat.SAFETENSORS)
        if any(file.path.endswith(".safetensors") for file in part.files)
    )
    may_be_weights = (
        file.size and may_hold_state(file.path) and not file.path.endswith(".json")
        for file in files
    )
    if not parts and any(may_be_weights):
        return (Part("", PartFormat.UNKNOWN, files),)
    return parts


def in_parts(files: Iterable[FileInfo], kind: PartFormat) -> Iterator[Part]:
    """The files of a step by folder, each folder as a part.

    Deeper than `MAX_PART_DEPTH` nanotron has a folder for each tensor: together they are one
    part, the folder above them all.
    """
    folders: dict[str, list[FileInfo]] = {}
    for file in files:
        folder, _, _ = file.path.rpartition("/")
        top = folder.partition("/")[0] if folder.count("/") >= MAX_PART_DEPTH else folder
        name = file.path.removeprefix(f"{top}/") if top else file.path
        folders.setdefault(top, []).append(file.at(name))
    for folder, inside in sorted(folders.items()):
        yield Part(folder, kind, tuple(inside))


def is_archive(path: str, layout: str = "") -> bool:
    """Whether a file of a rank-file step is one of `torch.save`, by its name."""
    if full_match(TABLES.archive, path):
        return True
    return bool(full_match(TABLES.perhaps_archive, path)) and kind_of_file(layout, path) is not None


def is_empty_archive(file: FileInfo) -> bool:
    """Whether a file without a byte is named as one of `torch.save`, which never writes such."""
    return not file.size and is_archive(file.path)


def archives_in(part: Part, layout: str) -> list[FileInfo]:
    """The files of `torch.save` in a part, by name or first bytes; without empty ones."""
    return [
        file
        for file in part.files
        if file.size and (file.path in part.archives or is_archive(file.path, layout))
    ]


def unnamed_archives(part: Part, layout: str) -> Mapping[str, list[str]]:
    """Files that may be of `torch.save` although no name shows it, by their names without numbers.

    The first bytes of one of each kind show whether they are.
    """
    found: dict[str, list[str]] = defaultdict(list)
    if part.format in (PartFormat.RANK_FILES, PartFormat.UNKNOWN):
        for file in part.files:
            is_perhaps = (
                file.kind == "file" and file.size and full_match(TABLES.perhaps_archive, file.path)
            )
            if is_perhaps and not is_archive(file.path, layout):
                found[key_of(file.path)].append(file.path)
    return found


def with_archives(
    part: Part, archives: Iterable[str], layout: str, stated: Mapping[str, int] | None = None
) -> Part:
    """The part with files that their first bytes show to be of `torch.save`."""
    held = frozenset(archives)
    grids = part.grids if part.grids or not held else grids_of(part.files, layout, stated)
    kind = PartFormat.RANK_FILES if held else part.format
    return Part(part.path, kind, part.files, grids, held)


def may_be_archive(path: str) -> bool:
    """Whether a file may be one of `torch.save`, by the end of its name."""
    return is_archive(path) or bool(full_match(TABLES.perhaps_archive, path))


def _flattened(folders: Mapping[str, Sequence[FileInfo]]) -> tuple[FileInfo, ...]:
    return tuple(
        file.at(f"{folder}/{file.path}" if folder else file.path)
        for folder in sorted(folders)
        for file in folders[folder]
    )
