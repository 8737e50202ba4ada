"""Steps without a folder of their own: which files of a root make one step.

The files of such a step lie side by side in the root, or in a folder for each rank. Only names
are compared.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ckptctl.formats.frameworks.file_names import rank_file
from ckptctl.formats.frameworks.layout_tables import TABLES, full_match
from ckptctl.formats.frameworks.layouts import StepName, by_epochs, named_by, stem_of
from ckptctl.model import FileInfo
from ckptctl.outside_numbers import clamped, whole

BESIDE_SUFFIXES = (".pt", ".pth", ".ckpt", ".pth.tar")
"""How files of a step side by side are called. Those of accelerate, `optimizer_1.bin`, are not."""


def scattered_name(number: int) -> str:
    """The name of a step whose files lie in several folders, as it follows its root."""
    return f"@{number}"


def is_scattered(name: str) -> bool:
    """Whether a step's name is that of one whose files lie in several folders."""
    return re.fullmatch(r"@[0-9]{1,19}", name) is not None


@dataclass(frozen=True, slots=True)
class _Beside:
    """A file of a step that has others beside it, of other kinds or ranks."""

    file: FileInfo
    kind: str
    named: StepName


def scattered_steps(files: Iterable[FileInfo]) -> Mapping[StepName, tuple[FileInfo, ...]]:
    """The steps without a folder among the files below a root, and the files of each.

    Where every step is a single file directly below the root, the file is the step: one file
    beside steps of several is what is left of such a step, or the first of it. Folders of
    NVRx's sessions are those of different jobs: where there are several, there is no step.
    """
    found: dict[StepName, list[FileInfo]] = defaultdict(list)
    beside: list[_Beside] = []
    for file in files:
        named = _named_by_framework(file)
        other = _named_by_kind(file) if named is None else None
        if named is not None:
            found[named].append(file)
        elif other is not None:
            beside.append(other)
    for one in _with_other_kinds([*_last_of_epochs(beside)]):
        found[one.named].append(one.file)
    sessions = {_session(file.path) for held in found.values() for file in held}
    if len(sessions) > 1:
        return {}
    several = {named.layout for named, held in found.items() if len(held) > 1}
    return {
        named: tuple(held)
        for named, held in found.items()
        if named.layout in several or "/" in held[0].path
    }


def _named_by_framework(file: FileInfo) -> StepName | None:
    for layout, expression in TABLES.scattered:
        match = full_match(expression, file.path)
        named = named_by("", layout, match) if match and file.kind == "file" else None
        if named is not None:
            return replace(named, name=scattered_name(named.number))
    return None


def _named_by_kind(file: FileInfo) -> _Beside | None:
    """A file whose name is that of a step but for its kind: `model_epoch_3.pt`.

    Those of frameworks whose ranks write into a folder of the step are none.
    """
    stem = stem_of(file.path)
    if file.kind != "file" or "/" in stem or not file.path.endswith(BESIDE_SUFFIXES):
        return None
    rest = re.sub(TABLES.kind_beside, "", stem)
    match = full_match(TABLES.name_beside, rest)
    row = rank_file(file.path) if match else None
    if match is None or row is not None:
        return None
    named = named_by("", "by-kind-epochs" if match["epochs"] else "by-kind", match)
    if named is None:
        return None
    epoch = None if match["epochs"] else re.search(TABLES.epoch_before, rest)
    name = scattered_name(named.number)
    named = replace(named, name=name, epoch=whole(epoch["epoch"]) if epoch else None)
    return _Beside(file, "".join(re.findall(TABLES.kind_beside, stem)), named)


def _last_of_epochs(beside: Sequence[_Beside]) -> Iterator[_Beside]:
    """Files side by side, numbered as `by_epochs` does; of each epoch, those of the last step."""
    numbered = by_epochs([one.named for one in beside])
    last: dict[tuple[str, int], int] = defaultdict(int)
    for named in numbered:
        last[named.run, named.number] = max(named.attempt, last[named.run, named.number])
    for one, then in zip(beside, numbered, strict=True):
        if then is one.named:
            yield one
        elif then.attempt == last[then.run, then.number]:
            name = scattered_name(then.number)
            named = replace(then, name=name, layout="by-kind-epochs", attempt=0)
            yield replace(one, named=named)


def _with_other_kinds(beside: Iterable[_Beside]) -> Iterator[_Beside]:
    """The files of a kind that its run saves beside others at a step."""
    steps: dict[StepName, list[_Beside]] = defaultdict(list)
    for one in beside:
        steps[one.named].append(one)
    kinds: dict[str, set[str]] = defaultdict(set)
    for named, held in steps.items():
        if len({one.kind for one in held}) > 1:
            kinds[named.run].update(one.kind for one in held)
    for named, held in steps.items():
        if any(one.kind in kinds[named.run] for one in held):
            yield from held


def _session(path: str) -> str:
    """The folder above those of the ranks; empty where there is none."""
    return path.rsplit("/", 2)[0] if path.count("/") > 1 else ""


def ranks_beside(entries: Iterable[FileInfo], number: int) -> int:
    """How many ranks the folders of a session of NVRx are for, at the step `number`.

    A rank without a file of that step counts if its folder is empty, or holds a step that is
    no older than all that the ranks with a file have: NVRx removes what is older after each
    save, so that the folders of a job that ran on more ranks keep older steps.
    """
    layout, expression = TABLES.scattered[0]
    held: dict[str, set[int]] = {}
    for entry in entries:
        folder, _, name = entry.path.rpartition("/")
        if entry.kind == "dir" and may_hold_scattered(name):
            held.setdefault(entry.path, set())
        match = full_match(expression, entry.path) if entry.kind == "file" else None
        named = named_by("", layout, match) if match else None
        if named is not None:
            held.setdefault(folder, set()).add(named.number)
    kept = min((step for steps in held.values() if number in steps for step in steps), default=0)
    ranks = [folder for folder, steps in held.items() if max(steps, default=kept) >= kept]
    return max((clamped(re.sub(r"[^/]*/|r", "", folder)) + 1 for folder in ranks), default=0)


def may_hold_scattered(folder: str) -> bool:
    """Whether a folder in a session may hold files of steps without a folder."""
    return full_match(TABLES.holds_scattered, folder) is not None
