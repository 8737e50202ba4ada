"""The names of files and folders under a checkpoint root, by framework.

Every framework names its steps, pointers, parts and markers in its own way, and some give a step no
folder. `layout_tables` holds those names and this module looks them up; neither opens a file.
Patterns are anchored: `old-step-100.bak` is not step 100.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ckptctl.errors import OptionError
from ckptctl.formats.frameworks.file_names import is_named_as_weights, rank_file
from ckptctl.formats.frameworks.layout_tables import TABLES, full_match
from ckptctl.model import FileInfo, Part, PartFormat
from ckptctl.outside_numbers import clamped, whole

MAX_STEP = 2**63 - 1
_MOST_RANKS = 10**9
_MOST_STAGES = 100_000

OWN_FOLDER = ".ckptctl"
"""What ckptctl writes itself: under a root and under a step."""

REMOVING = f"{OWN_FOLDER}/removing"
"""A note in a step that is being removed."""

FLAT_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin", ".pth.tar", ".tar")
"""How files of `torch.save` that are whole steps are called."""

WEIGHTS_ALONE = ".safetensors"

STEP_SUFFIXES = (*FLAT_SUFFIXES, WEIGHTS_ALONE)
"""How files that are whole steps are called."""

_MAX_WRAPPERS = 4
"""How often such marks are taken off one name: `tmp-step_100.tmp` has two."""

_MAX_NAME = 1024
"""Characters of a name; object stores have the longest, and a pointer file may hold anything."""


@dataclass(frozen=True, slots=True)
class StepName:
    """What a name under the root states: the step's number, and whose naming it is.

    `unfinished` names are those that a framework gives a step while it is being
    saved and takes away when it is whole. `bare` is a name of digits alone, which
    is a step only if its content confirms it. `attempt` is which attempt saved it, where
    the name states it (`step_1200.attempt-7`, and Lightning's versions, `step=200-v2.ckpt`):
    of one number, the last attempt's counts. `lone` is the name of a file that is a step only
    in a root without others, `epoch` the epoch that is stated beside its step, and `run` what
    the name shares with those of the other steps of its run.
    """

    name: str
    number: int
    layout: str
    unfinished: bool = False
    bare: bool = False
    attempt: int = 0
    lone: bool = False
    epoch: int | None = None
    run: str = ""


def counted_by(layout: str) -> str:
    """What the number in a step's name counts: `steps`, `epochs`, `saves` or `samples`."""
    return TABLES.counts_of_other_things.get(layout, "steps")


def counts_training_steps(layout: str) -> bool:
    """Whether the number in a step's name is the training step, and not a count of saves."""
    return counted_by(layout) == "steps"


def train_step_of(layout: str, number: int | None, saved: int | None) -> int | None:
    """The training step of a save, which may differ from the number in its name.

    `saved` is the step of its train state. Without one `number` is used if the layout counts
    training steps; None if only a count of saves or epochs is known.
    """
    return saved if saved is not None or not counts_training_steps(layout) else number


def name_of_attempt(name: str, attempt: int) -> str:
    """The name of a step where every attempt writes under names of its own."""
    return f"{name}.attempt-{attempt}"


def is_of_one_attempt(name: str) -> bool:
    """Whether only one attempt ever writes a step of this name, and only once."""
    return full_match(TABLES.of_attempt, name) is not None


_PATTERN = "--pattern 'save-(?P<step>[0-9]+)'"


def compile_pattern(pattern: str | None) -> re.Pattern[str] | None:
    """The user's own pattern for step names; it must have a group named `step`.

    Raises `UsageError` for a pattern that does not compile or has no such group.
    """
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise OptionError(
            "--pattern", f"{pattern!r} is not a regular expression: {error}", instead=_PATTERN
        ) from error
    if "step" not in compiled.groupindex:
        raise OptionError(
            "--pattern",
            f"{pattern!r} has no group named step, which is the number",
            instead=_PATTERN,
        )
    return compiled


def step_name(name: str, pattern: re.Pattern[str] | None = None) -> StepName | None:
    """What `name` states about a step, or None for a name that is none.

    With `pattern`, only names that match the whole of it are steps.
    """
    if len(name) > _MAX_NAME:
        return None
    if pattern is not None:
        match = pattern.fullmatch(name)
        return named_by(name, "dcp", match) if match else None
    inside, unfinished = _finished(name)
    saved = full_match(TABLES.of_attempt, inside)
    plain, cut = _finished(saved["rest"]) if saved else (inside, False)
    found = _plain_step(plain)
    if found is None or (saved and found.bare):
        return None
    attempt = found.attempt
    if saved:
        attempt = 0 if unfinished else clamped(saved["attempt"])
    return replace(found, name=name, unfinished=unfinished or cut, attempt=attempt)


def path_in_step(path: str, number: int, other: int) -> str:
    """Where step `other` has the file that step `number` has at `path`; folders may be numbered."""
    *folders, name = path.split("/")
    named = [(folder, step_name(folder)) for folder in folders]
    then = (f.replace(str(number), str(other)) if n and n.number == number else f for f, n in named)
    return "/".join((*then, name))


def by_epochs(steps: Sequence[StepName]) -> list[StepName]:
    """The steps, numbered by their epochs where a later epoch has a step that is not later.

    A step in a name is that of the run or of its epoch: `ep2-iter5.pt` follows `ep1-iter9.pt`.
    Within an epoch, the step is then the attempt.
    """
    by_epoch: dict[int, list[int]] = {}
    for step in steps:
        if step.epoch is not None:
            by_epoch.setdefault(step.epoch, []).append(step.number)
    numbers = [by_epoch[epoch] for epoch in sorted(by_epoch)]
    if all(max(earlier) < min(later) for earlier, later in pairwise(numbers)):
        return list(steps)
    return [
        step
        if step.epoch is None
        else replace(step, number=step.epoch, attempt=step.number, layout="epochs")
        for step in steps
    ]


def _finished(name: str) -> tuple[str, bool]:
    """The name that a step has once it is saved, and whether `name` is that of one being saved."""
    inside = name
    for _ in range(_MAX_WRAPPERS):
        wrapped = full_match(TABLES.unfinished, inside)
        if wrapped is None:
            break
        inside = wrapped["after"] or wrapped["before"]
    return inside, inside != name


def _plain_step(name: str) -> StepName | None:
    if name.startswith("."):
        return None
    stem = stem_of(name)
    for layout, expression in TABLES.step_names:
        match = full_match(expression, name) or full_match(expression, stem)
        named = named_by(name, layout, match) if match else None
        if match:
            return named and replace(named, lone=name.endswith(WEIGHTS_ALONE))
    if stem != name:
        match = full_match(TABLES.flat_number, stem)
        if match:
            return named_by(name, "dcp", match)
        for layout, expression in TABLES.lone_names:
            match = full_match(expression, name)
            found = named_by(name, layout, match) if match else None
            if found is not None:
                epoch = re.search(TABLES.epoch_before, name) if layout == "dcp" else None
                return replace(found, lone=True, epoch=whole(epoch["epoch"]) if epoch else None)
    match = full_match(TABLES.bare_number, name)
    return named_by(name, "dcp", match, bare=True) if match else None


def named_by(
    name: str, layout: str, match: re.Match[str], *, bare: bool = False
) -> StepName | None:
    """The step that a match of a table states; None for a number that is none."""
    digits = (match["step"] or "").lstrip("0") or (match["step"] or "")[:1]
    if not (digits.isascii() and digits.isdigit()):
        return None
    number = whole(digits, MAX_STEP)
    if number is None:
        return None
    version = full_match(TABLES.lightning_version, name) if layout in TABLES.with_versions else None
    run = match.groupdict().get("run") or ""
    run = re.sub(TABLES.same_run, "", run).strip("-_.") if run else ""
    return StepName(
        name, number, layout, bare=bare, attempt=clamped(version[1] if version else "0"), run=run
    )


def counted_name(name: str) -> StepName | None:
    """The step that a file is if it counts the number in its name: `12.pt`; None for others."""
    match = full_match(TABLES.counted_name, name)
    named = named_by(name, "lone", match) if match else None
    return named and replace(named, lone=True)


def is_of_a_step(name: str) -> bool:
    """Whether a file of this name lies in steps, and never directly under a root."""
    return full_match(TABLES.of_one_step, name) is not None


def run_of(step: StepName) -> tuple[str, str]:
    """What the name shares with those of its run: a text, and what the number counts."""
    return step.run, counted_by(step.layout)


def may_be_shards(names: Iterable[str], numbers: Collection[int]) -> bool:
    """Whether numbered files may be the shards of one save: no word explains the numbers.

    Shards are numbered from 0 or 1, and few numbers are missing among them.
    """
    is_dense = min(numbers) <= 1 and max(numbers) < 2 * len(numbers)
    return len(numbers) > 1 and is_dense and not any(re.search(TABLES.labelled, n) for n in names)


def has_too_large_a_number(name: str) -> bool:
    """Whether a name is that of a step, but for a number that no counter of steps reaches."""
    digits = re.findall(r"[0-9]+", name)
    longest = max(digits, key=lambda one: len(one.lstrip("0")), default="")
    if len(longest.lstrip("0")) < len(str(MAX_STEP)) or step_name(name) is not None:
        return False
    named = step_name(name.replace(longest, "1"))
    return named is not None and not named.bare


def stem_of(name: str) -> str:
    """A name without the suffix of a file that is a whole step."""
    for suffix in STEP_SUFFIXES:
        if name.endswith(suffix):
            return name[: -len(suffix)]
    return name


def unfinished_beside(file: FileInfo) -> str | None:
    """The step that a file beside it (`NAME-unfinished`) marks as being saved; else None."""
    is_marker = file.kind == "file" and file.path.endswith(TABLES.unfinished_beside)
    return file.path.removesuffix(TABLES.unfinished_beside) if is_marker else None


def is_flat_file(file: FileInfo) -> bool:
    """Whether a file directly under the root may be a whole step, by its suffix."""
    return file.kind == "file" and file.path.endswith(STEP_SUFFIXES)


def is_saved_weights(file: FileInfo) -> bool:
    """Whether a file under a root is named as saved weights without a step: `last.ckpt`."""
    return file.kind == "file" and file.path != TABLES.tracker and is_named_as_weights(file.path)


NO_RUN_BELOW = frozenset({"lost+found"})
"""Folders of a file system itself, which often may not be listed."""


# Pointer files. A pointer is a hint, never the truth.


MAX_POINTER_BYTES = 4096


def is_pointer(file: FileInfo) -> bool:
    """Whether a file directly under the root is a pointer that can be read as text or link."""
    if file.kind == "dir" or is_flat_file(file):
        return False
    return file.path in TABLES.pointers or bool(full_match(TABLES.rank_pointer, file.path))


def pointed_step(
    content: str, names: Mapping[str, int], pattern: re.Pattern[str] | None = None
) -> int | None:
    """The step number that a pointer's content or link target names, None if it names none.

    `names` are the steps under the root by folder name.
    """
    target = content.strip().rstrip("/").rsplit("/", 1)[-1]
    if target in names:
        return names[target]
    if target.isascii() and target.isdigit() and len(target) < 20:
        return whole(target)
    named = step_name(target, pattern)
    return named.number if named else None


STATE_BESIDE = "recipe_state/recipe_state.pt"
"""torchtune's optimizer and count of epochs, of the last save that was not the end of the run.

Source: torchtune 0.6 `training/checkpointing/_checkpointer.py`, `recipes/`.
"""


def is_beside(folder: str) -> bool:
    """Whether a folder of a root holds state of its steps, and is none itself."""
    return STATE_BESIDE.startswith(f"{folder}/")


def number_beside(content: object, newest: int) -> int:
    """The number of the step that a file at `STATE_BESIDE` is of, by its content.

    It counts the epochs that were run. One whose content is not known counts for the `newest`.
    """
    epochs = content.get("epochs_run") if isinstance(content, Mapping) else None
    return epochs - 1 if type(epochs) is int else newest


# Parts: the folders of tensors in a step.

METADATA = ".metadata"
METADATA_TMP = ".metadata.tmp"


def shard_rank(file_name: str) -> int | None:
    """The rank in the name of a shard file (`__3_0.distcp`), None for another name."""
    match = full_match(TABLES.shard, file_name)
    return whole(match["rank"], _MOST_RANKS) if match else None


def hugging_face_rank(file_name: str) -> int | None:
    """The rank in the name of a shard of DCP's Hugging Face writer, which counts from 1."""
    match = full_match(TABLES.hugging_face_shard, file_name)
    number = whole(match["number"], _MOST_RANKS) if match else None
    return number - 1 if number else None


def rank_local_rank(file_name: str) -> int | None:
    """The rank in the name of rank-local metadata (`__3.metadata`), None for another name."""
    match = full_match(TABLES.rank_local, file_name)
    return whole(match["rank"], _MOST_RANKS) if match else None


def belongs_to_shards(path: str) -> bool:
    """Whether a file of a step is a shard, metadata, or ckptctl's own: not a sidecar."""
    name = path.rsplit("/", 1)[-1]
    return name.endswith((".distcp", ".metadata", METADATA_TMP)) or not is_saved(path)


def is_own(path: str) -> bool:
    """Whether a file below a root or a step is one that ckptctl wrote itself."""
    return path.split("/", 1)[0] == OWN_FOLDER


def is_saved(path: str) -> bool:
    """Whether a file below a step may be of the save: neither ckptctl nor a tool left it there."""
    return not is_own(path) and full_match(TABLES.left_by_tools, path) is None


def last_written_s(files: Iterable[FileInfo]) -> float | None:
    """When a save was written last, in seconds since 1970; None where the storage keeps no times.

    Files of ckptctl do not count: a seal is written later.
    """
    times = (file.mtime_s for file in files if not is_own(file.path))
    return max((at_s for at_s in times if at_s is not None), default=None)


def own_file_of_lone(name: str, path: str) -> str:
    """Where a root holds what ckptctl writes into a step, for the step that is the file `name`."""
    return f"{OWN_FOLDER}/steps/{name}{path.removeprefix(OWN_FOLDER)}"


# The framework of a step, and the files that it writes last.


PLAIN_FILES = "plain-files"
"""The layout of a step without shards of DCP, and without anything of a framework."""

OF_NO_FRAMEWORK = frozenset({"dcp", PLAIN_FILES})


def layout_of(named: StepName | None, files: Iterable[FileInfo]) -> str:
    """The framework whose step this is, by its name and by the files in it.

    A name that anybody may give a step proves no layout: without shards or metadata of DCP it is
    the other format that its files show, or `plain-files`.
    """
    paths = [file.path for file in files if is_saved(file.path)]
    by_name = named.layout if named else "dcp"
    if named and paths == [named.name]:
        by_name = TABLES.of_one_file.get(by_name, by_name)
    lacks_shards = bool(paths) and not any(
        belongs_to_shards(path) or hugging_face_rank(path.rpartition("/")[2]) is not None
        for path in paths
    )
    for layout, names, sign in TABLES.signatures:
        if by_name not in names.split() or (lacks_shards and layout in TABLES.signs_beside_shards):
            continue
        if any(full_match(sign, path) for path in paths):
            return layout
    by_name = "dcp" if by_name in TABLES.needs_signature else by_name
    if by_name not in TABLES.needs_shards or not lacks_shards:
        return by_name
    for other, expression in TABLES.other_formats:
        if any(full_match(expression, path) for path in paths):
            return other.value
    return PLAIN_FILES


def written_last(layout: str, parts: Sequence[Part], files: Iterable[FileInfo]) -> tuple[str, ...]:
    """The files that the framework writes after the shards, and needs to load the step.

    OLMo-core also saves weights alone, as bare DCP, and Lightning also saves a step as one
    file: then there are none.
    """
    if layout in TABLES.lightning and not any(part.format is PartFormat.DCP for part in parts):
        return ()
    if layout == "olmo-core" and any(part.path == "" for part in parts):
        return ()
    last = TABLES.written_last.get(layout, ())
    beside, needed = TABLES.needed_beside.get(layout, ("", ""))
    if beside and any(full_match(beside, file.path) for file in files):
        return (*last, needed)
    return last


def documents_parsed(
    layout: str, parts: Sequence[Part], files: Iterable[FileInfo]
) -> frozenset[str]:
    """The documents in JSON that a load of the step parses: damage to one ends it."""
    last = written_last(layout, parts, files)
    return frozenset((*last, *TABLES.parsed.get(layout, ())))


def unfinished_markers(files: Iterable[FileInfo]) -> tuple[str, ...]:
    """Marker files that a framework keeps in a step until it is whole."""
    return tuple(f.path for f in files if full_match(TABLES.unfinished_markers, f.path))


def missing_stages(parts: Sequence[Part]) -> tuple[str, ...]:
    """Pipeline stages (`pp{K}`) that are missing below the highest one that is there."""
    matches = (full_match(TABLES.stage, part.path) for part in parts)
    numbers = (whole(match["stage"], _MOST_STAGES) for match in matches if match)
    stages = {number for number in numbers if number is not None}
    return tuple(f"pp{k}" for k in range(max(stages, default=-1)) if k not in stages)


def is_stage(path: str) -> bool:
    """Whether a part is a pipeline stage, whose ranks are numbered from 0 again."""
    return full_match(TABLES.stage, path) is not None


# Steps without a folder of their own: their files lie side by side in the root, or in a folder for
# each rank.

BESIDE_SUFFIXES = (".pt", ".pth", ".ckpt", ".pth.tar")
"""How files of a step side by side are called. Those of accelerate, `optimizer_1.bin`, are not."""


def scattered_name(number: int) -> str:
    """The name of a step whose files lie in several folders, as it follows its root."""
    return f"@{number}"


def is_scattered(name: str) -> bool:
    """Whether a step's name is that of one whose files lie in several folders."""
    return re.fullmatch(r"@[0-9]{1,19}", name) is not None


@dataclass(frozen=True, slots=True)
class _FileBeside:
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
    beside: list[_FileBeside] = []
    for file in files:
        named = _named_by_framework(file)
        other = _named_by_kind(file) if named is None else None
        if named is not None:
            found[named].append(file)
        elif other is not None:
            beside.append(other)
    for one in _with_other_kinds([*_last_of_epochs(beside)]):
        found[one.named].append(one.file)
    paths = [file.path for held in found.values() for file in held]
    sessions = {path.rsplit("/", 2)[0] if path.count("/") > 1 else "" for path in paths}
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


def _named_by_kind(file: FileInfo) -> _FileBeside | None:
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
    return _FileBeside(file, "".join(re.findall(TABLES.kind_beside, stem)), named)


def _last_of_epochs(beside: Sequence[_FileBeside]) -> Iterator[_FileBeside]:
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


def _with_other_kinds(beside: Iterable[_FileBeside]) -> Iterator[_FileBeside]:
    """The files of a kind that its run saves beside others at a step."""
    steps: dict[StepName, list[_FileBeside]] = defaultdict(list)
    for one in beside:
        steps[one.named].append(one)
    kinds: dict[str, set[str]] = defaultdict(set)
    for named, held in steps.items():
        if len({one.kind for one in held}) > 1:
            kinds[named.run].update(one.kind for one in held)
    for named, held in steps.items():
        if any(one.kind in kinds[named.run] for one in held):
            yield from held


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
