"""Steps without a folder of their own: which files of a root make one step.

The files of such a step lie side by side in the root, or in a folder for each rank. Only names
are compared.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from ckptctl.data_classes import replace
from ckptctl.formats.frameworks import layout_tables as tables
from ckptctl.formats.frameworks.file_names import BY_RANK, full_match, rank_file
from ckptctl.formats.frameworks.layouts import StepName, by_epochs, named_by, stem_of
from ckptctl.model import FileInfo

BESIDE_SUFFIXES = (".pt", ".pth", ".ckpt", ".pth.tar")
"""How files of a step side by side are called. Those of accelerate, `optimizer_1.bin`, are not."""


def scattered_name(number: int) -> str:
    """The name of a step whose files lie in several folders, as it follows its root."""
    return f"@{number}"


def is_scattered(name: str) -> bool:
    """Whether a step's name is that of one whose files lie in several folders."""
    return re.fullmatch(r"@[0-9]{1,19}", name) is not None


def scattered_steps(files: Iterable[FileInfo]) -> Mapping[StepName, tuple[FileInfo, ...]]:
    """The steps without a folder among the files below a root, and the files of each.

    Where every step is a single file directly below the root, the file is the step: one file
    beside steps of several is what is left of such a step, or the first of it. Folders of
    NVRx's sessions are those of different jobs: where there are several, there is no step.
    """
    found: dict[StepName, list[FileInfo]] = {}
    others: _Beside = {}
    for file in files:
        for layout, expression in tables.SCATTERED:
            match = full_match(expression, file.path)
            named = named_by("", layout, match) if match and file.kind == "file" else None
            if named is not None:
                name = scattered_name(named.number)
                found.setdefault(replace(named, name=name), []).append(file)
                break
        else:
            rest, kind, named = _name_beside(file)
            if named is not None:
                others.setdefault((rest, named), {}).setdefault(kind, []).append(file)
    others = _by_epochs_beside(others)
    kinds_of: dict[str, set[str]] = {}
    for (rest, _), kinds in others.items():
        if len(kinds) > 1:
            kinds_of.setdefault(_unnumbered(rest), set()).update(kinds)
    for (rest, named), kinds in others.items():
        if not kinds.keys().isdisjoint(kinds_of.get(_unnumbered(rest), ())):
            found.setdefault(named, []).extend(file for held in kinds.values() for file in held)
    sessions = {_session(file.path) for held in found.values() for file in held}
    if len(sessions) > 1:
        return {}
    several = {named.layout for named, held in found.items() if len(held) > 1}
    return {
        named: tuple(held)
        for named, held in found.items()
        if named.layout in several or "/" in held[0].path
    }


def _unnumbered(rest: str) -> str:
    """What the files of all steps of a run share in their names."""
    return re.sub(r"[0-9]+", "", rest)


def _name_beside(file: FileInfo) -> tuple[str, str, StepName | None]:
    """What the files of one step share in their names, the kind of this one, and the step.

    `model_epoch_3.pt` and `optimizer_epoch_3.pt` share `epoch_3`. Those of frameworks whose
    ranks write into a folder of the step are none.
    """
    stem = stem_of(file.path)
    if file.kind != "file" or "/" in stem or not file.path.endswith(BESIDE_SUFFIXES):
        return "", "", None
    kind = "".join(re.findall(tables.KIND_BESIDE, stem))
    rest = re.sub(tables.KIND_BESIDE, "", stem)
    match = full_match(tables.NAME_BESIDE, rest)
    row = rank_file(file.path) if match else None
    if match is None or (row is not None and row[0].grid != BY_RANK):
        return "", "", None
    named = named_by("", "by-kind-epochs" if match["epochs"] else "by-kind", match)
    epoch = None if match["epochs"] else re.search(tables.EPOCH_BEFORE, rest)
    if named is not None:
        name = scattered_name(named.number)
        named = replace(named, name=name, epoch=int(epoch["epoch"]) if epoch else None)
    return rest, kind, named


_Beside = dict[tuple[str, StepName], dict[str, list[FileInfo]]]


def _by_epochs_beside(others: _Beside) -> _Beside:
    """Files side by side, numbered as `by_epochs` does; of each epoch, those of the last step."""
    numbered = by_epochs([named for _, named in others])
    last: dict[int, int] = {}
    for named in numbered:
        last[named.number] = max(named.attempt, last.get(named.number, 0))
    found: _Beside = {}
    for ((rest, named), kinds), then in zip(others.items(), numbered, strict=True):
        if then is named:
            found[rest, named] = kinds
        elif then.attempt == last[then.number]:
            name = scattered_name(then.number)
            found[rest, replace(then, name=name, layout="by-kind-epochs", attempt=0)] = kinds
    return found


def _session(path: str) -> str:
    """The folder above those of the ranks; empty where there is none."""
    return path.rsplit("/", 2)[0] if path.count("/") > 1 else ""


def ranks_beside(entries: Iterable[FileInfo], number: int) -> int:
    """How many ranks the folders of a session of NVRx are for, at the step `number`.

    A rank without a file of that step counts if its folder is empty, or holds a step that is
    no older than all that the ranks with a file have: NVRx removes what is older after each
    save, so that the folders of a job that ran on more ranks keep older steps.
    """
    layout, expression = tables.SCATTERED[0]
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
    return max((int(re.sub(r"[^/]*/|r", "", folder)) + 1 for folder in ranks), default=0)


def may_hold_scattered(folder: str) -> bool:
    """Whether a folder in a session may hold files of steps without a folder."""
    return full_match(tables.HOLDS_SCATTERED, folder) is not None
