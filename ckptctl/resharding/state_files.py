"""Read the files of one save, which one process wrote, as the parts of a step.

Hugging Face's Trainer and accelerate write the model to safetensors or a `torch.save` file, each
optimizer to a `torch.save` file, and everything small to files beside them. Model and optimizers
become parts of sharded DCP, in the folders in which both programs save them with FSDP; the other
files are copied unchanged, as `reshard` does with sidecars.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from ckptctl.errors import UsageError
from ckptctl.formats.archive.safetensors import INDEX_SUFFIX, SUFFIX
from ckptctl.formats.archive.state_file import Leaf, NotPlain, flattened
from ckptctl.formats.frameworks.file_names import kind_of_file, lost_before_others
from ckptctl.formats.frameworks.layouts import is_own
from ckptctl.formats.frameworks.parts import may_be_archive
from ckptctl.formatting import command_line, some_of
from ckptctl.model import SHARDED, FileInfo, Step
from ckptctl.outside_numbers import clamped
from ckptctl.resharding.flat_files import flat_part, open_flat
from ckptctl.resharding.reading import SourceFiles
from ckptctl.resharding.sources import RankFile, SourcePart
from ckptctl.selection.verifying import OpenTarget
from ckptctl.storage.opening import join_url

MODEL_FOLDERS = "pytorch_model_fsdp_{}"
OPTIMIZER_FOLDERS = "optimizer_{}"
"""Where accelerate saves the models and optimizers of FSDP, by their numbers.

Source: accelerate 1.15 `accelerate/utils/constants.py`, `accelerate/utils/fsdp_utils.py`.
"""

_NUMBERED = re.compile(
    r"(?P<stem>(?:pytorch_)?model|optimizer)(?:_(?P<number>[1-9][0-9]{0,5}))?"
    r"(?:-[0-9]+-of-[0-9]+)?(?P<end>\.bin|\.safetensors(?:\.index\.json)?)"
)
"""How transformers and accelerate name models and optimizers: the first has no number.

Source: accelerate 1.15 `accelerate/checkpointing.py` (`save_accelerator_state`), transformers 4.57
`transformers/utils/__init__.py` (`WEIGHTS_NAME`, `SAFE_WEIGHTS_NAME`).
"""
STATE_BESIDE = frozenset({"optimizer", "scheduler", "rng"})
"""The kinds of files beside a model without which a resume is another run."""


class StateFiles(NamedTuple):
    """The files of one save: those of each model and optimizer, by its number, and the others.

    A model has one file of `torch.save`, or those of safetensors with their index. `others` are
    copied as they are. Files of ckptctl are left out.
    """

    models: Mapping[int, Sequence[FileInfo]]
    optimizers: Mapping[int, FileInfo]
    others: tuple[RankFile, ...]

    @property
    def lost(self) -> tuple[str, ...]:
        """The files that a later number shows to be lost."""
        models = (file for files in self.models.values() for file in files)
        return tuple(
            sorted(lost_before_others(f.path for f in (*models, *self.optimizers.values())))
        )


def state_files(step: Step, url: str, *, only_model: bool = False) -> StateFiles | None:
    """The files of a save with whole tensors, by their names.

    None where there is a model without train state, or none, and where files of several ranks may
    hold a tensor together. Raises `UsageError` where files of safetensors are not those of a
    model, and, unless `only_model`, where it is open which files belong together.
    """
    models: list[FileInfo] = []
    optimizers: list[FileInfo] = []
    tensors: list[FileInfo] = []
    others: list[RankFile] = []
    for file in step.files:
        if is_own(file.path):
            continue
        if file.path.endswith((SUFFIX, INDEX_SUFFIX)):
            tensors += [] if "/" in file.path else [file]
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
    state = [*optimizers, *(other.file for other in others if other.kind in STATE_BESIDE)]
    if any(part.format in SHARDED for part in step.parts):
        return None
    if not optimizers and all(other.kind is None for other in others):
        return None
    in_safetensors: dict[int, list[FileInfo]] = defaultdict(list)
    for file in tensors:
        in_safetensors[_number(url, file, is_with_state=bool(state))].append(file)
    of_optimizers, of_models = _by_number(optimizers), _by_number(models)
    if only_model:
        if len(in_safetensors) > 1:
            raise UsageError(
                f"{url} holds several models, {_paths(tensors)}: give the path of one of them"
            )
        return None
    if tensors and (models or of_optimizers is None):
        several = [*tensors, *models] if models else optimizers
        raise UsageError(
            f"{url} holds {_paths(several)}, of which it is open what belongs together: move away "
            "what is not of this save; --only model converts the safetensors alone, without "
            f"{_paths(state)}",
            instead="--only model",
        )
    if of_optimizers is None or not (tensors or of_models):
        return None
    of_models = of_models or {}
    by_number = dict(sorted(in_safetensors.items())) or {
        number: [file] for number, file in of_models.items()
    }
    return StateFiles(by_number, of_optimizers, tuple(others))


def _number(url: str, file: FileInfo, *, is_with_state: bool) -> int:
    """Which model of a save a file of safetensors is of."""
    match = _NUMBERED.fullmatch(file.path)
    if match is None and is_with_state:
        raise UsageError(
            f"{url}: {file.path} beside the train state is not named as a model "
            "(model.safetensors): move it away, or give its path to convert it alone",
            next_command=command_line("show", url),
        )
    return clamped(match["number"] or "0") if match else 0


def _by_number(files: Sequence[FileInfo]) -> dict[int, FileInfo] | None:
    """Files of one kind by their numbers; None for several that are not numbered so."""
    matches = [_NUMBERED.fullmatch(file.path) for file in files]
    if len(files) == 1 and matches[0] is None:
        return {0: files[0]}
    numbers = [clamped(match["number"] or "0") for match in matches if match]
    if len({*numbers}) < len(files):
        return None
    return dict(sorted(zip(numbers, files, strict=True)))


def _paths(files: Sequence[FileInfo]) -> str:
    return some_of([file.path for file in files])


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
