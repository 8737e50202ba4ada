"""Read the files of one save, which one process wrote, as the parts of a step.

Hugging Face's Trainer and accelerate write the model to safetensors or a `torch.save` file, each
optimizer to a `torch.save` file, and everything small to files beside them. Model and optimizers
become parts of sharded DCP, in the folders in which both programs save them with FSDP; the other
files are copied unchanged, as `reshard` does with sidecars.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ckptctl.errors import UsageError
from ckptctl.formats.archive.safetensors import INDEX_SUFFIX, SUFFIX
from ckptctl.formats.archive.state_file import Leaf, NotPlain, flattened
from ckptctl.formats.frameworks.file_names import kind_of_file
from ckptctl.formats.frameworks.layouts import is_own
from ckptctl.formats.frameworks.parts import may_be_archive
from ckptctl.model import SHARDED, FileInfo, Step
from ckptctl.resharding.flat_files import flat_part, open_flat
from ckptctl.resharding.reading import SourceFiles
from ckptctl.resharding.sources import RankFile, SourcePart
from ckptctl.selection.verifying import OpenTarget
from ckptctl.storage.opening import join_url

MODEL_FOLDER = "pytorch_model_fsdp_0"
"""Where accelerate saves the model of FSDP.

Source: accelerate 1.15 `accelerate/utils/constants.py`, `accelerate/utils/fsdp_utils.py`.
"""


class StateFiles(NamedTuple):
    """The files of one save: those of `torch.save` with a model, with optimizers, and the others.

    `others` are copied as they are. Files of ckptctl and of safetensors are left out.
    """

    models: tuple[FileInfo, ...]
    optimizers: tuple[FileInfo, ...]
    others: tuple[RankFile, ...]


def state_files(step: Step) -> StateFiles | None:
    """The files of a save with whole tensors, by their names.

    None where there is a model without train state, or none, and where files of several ranks may
    hold a tensor together: only accelerate has a file for each of several optimizers.
    """
    models: list[FileInfo] = []
    optimizers: list[FileInfo] = []
    others: list[RankFile] = []
    for file in step.files:
        if is_own(file.path) or file.path.endswith((SUFFIX, INDEX_SUFFIX)):
            continue
        kind = kind_of_file(step.layout, file.path)
        is_archive = kind is not None and may_be_archive(file.path)
        if kind is not None and is_archive and kind.names[0] == "model":
            models.append(file)
        elif kind is not None and is_archive and kind.names[0] == "optimizer":
            optimizers.append(file)
        else:
            name, rank = (None, None) if kind is None else (kind.names[0], kind.rank)
            others.append(RankFile(file, name, rank))
    in_safetensors = any("/" not in f.path and f.path.endswith(SUFFIX) for f in step.files)
    if len(models) + in_safetensors != 1 or any(part.format in SHARDED for part in step.parts):
        return None
    if len(optimizers) > 1 and not step.layout.startswith("accelerate"):
        return None
    if not optimizers and all(file.kind is None for file in others):
        return None
    return StateFiles(tuple(models), tuple(optimizers), tuple(others))


class FilePart(NamedTuple):
    """A part of the new step, and the file of the source that holds its elements."""

    part: SourcePart
    files: SourceFiles


def read_state_file(found: OpenTarget, file: FileInfo, part_path: str, key: str) -> FilePart:
    """The part at `part_path` of the new step that a `torch.save` file of a step makes.

    Its entries are put below `key`. Raises `SourceDamaged`, and `UsageError` for content that a
    step cannot hold. Cost: as for `flat_files.open_flat`.
    """
    url = join_url(found.url, file.path)
    opened = open_flat(found.store, replace(file, path=f"{found.name}/{file.path}"), url)
    try:
        leaves = [Leaf((key, *leaf.path), leaf.value) for leaf in flattened(opened.state)]
        part, files = flat_part(leaves, opened, found.store, url)
    except NotPlain as error:
        raise UsageError(f"{url}: {error}") from error
    return FilePart(replace(part, path=part_path), files)
