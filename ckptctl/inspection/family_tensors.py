"""What the tensors in families of files show of the ranks that wrote them.

Names and counts come first (`whole`). Where they do not decide, the tensors of the files do: they
add up to those of another step, are copies of each other, or those of several numbers of ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import prod

from ckptctl.errors import StorageError
from ckptctl.findings import Finding
from ckptctl.formats.families import key_of, kind_key
from ckptctl.formatting import command_line
from ckptctl.inspection.file_kinds import SIMILAR, ComparedStep, are_alike
from ckptctl.inspection.identity import path_then
from ckptctl.inspection.open_step import OpenStep, steps_beside
from ckptctl.inspection.sidecars import (
    HeldTensor,
    TensorSizes,
    checksums_in,
    leaves_at,
    tensor_sizes,
)
from ckptctl.model import Family

_COUNTS_OF_RANKS = frozenset({"world_size", "num_ranks", "n_ranks", "num_processes", "nprocs"})
"""Keys of the number of ranks in a saved state."""

_WEIGHTS_AND_MOMENTS = ("model", "optimizer")
"""The kinds of tensors that ranks share out among them."""


def resized_in_part(compared: ComparedStep, families: Sequence[Family]) -> Finding | None:
    """The finding for a save by other ranks over a step of which files of the first are left.

    Two files of a kind were as large as each other in the nearest step. One still is, the other is
    not, and most of its tensors have another shape or are new. Together the files hold more of the
    optimizer than then: parts of it are there twice. In a save by other ranks alone all change.

    Cost: the listing of the nearest step; where sizes of files show this, the pickles of both.
    """
    opened, keys = compared.opened, {family.key for family in families if family.n_present > 1}
    for other in steps_beside(opened, 1) if keys else ():
        pairs = _resized_beside(opened, other, keys)
        if not pairs:
            continue
        held = [family for family in families if family.key in pairs]
        now, then = (_elements_by_key(step, held, ("optimizer",)) for step in (opened, other))
        weights = [
            sum(_elements_by_key(step, families, ("model",)).values()) for step in (opened, other)
        ]
        # Of a pipeline, a stage of other ranks holds other layers; a moment may come later.
        counts_new = weights[0] > SIMILAR * weights[1]
        for key in sorted(now.keys() & then.keys()):
            path, same = pairs[key]
            if now[key] > SIMILAR * then[key] and _is_of_other_parts(
                opened, path, other, counts_new=counts_new
            ):
                return Finding(
                    "state.mixed",
                    path,
                    f"{path} holds other parts of the tensors than in {other.name}, and {same} "
                    "those that it held there: files of two saves, by different numbers of ranks, "
                    "lie in one folder",
                    next_command=command_line("show", opened.url),
                )
    return None


def _resized_beside(
    opened: OpenStep, other: OpenStep, keys: Collection[str]
) -> Mapping[str, tuple[str, str]]:
    """By key a file of another size than in another step, and one of the same size as there."""
    sizes = {file.path: file.size for file in other.files}
    files: dict[str, list[tuple[str, int, int]]] = defaultdict(list)
    for file in opened.files:
        key = key_of(file.path)
        if file.kind == "file" and key in keys:
            then = sizes.get(path_then(opened, other, file.path, other.step.number or 0))
            if then:
                files[key].append((file.path, file.size, then))
    pairs: dict[str, tuple[str, str]] = {}
    for key, of_key in files.items():
        resized = next((one for one in of_key if not are_alike(one[1], one[2])), None)
        if resized is not None:
            same = (p for p, now, then in of_key if are_alike(now, then))
            alike = {p for p, _, then in of_key if are_alike(then, resized[2])}
            path = next((p for p in same if p in alike), None)
            if path is not None:
                pairs[key] = (resized[0], path)
    return pairs


def _is_of_other_parts(opened: OpenStep, path: str, other: OpenStep, *, counts_new: bool) -> bool:
    """Whether most tensors of a file have another shape than in another step, or are new."""
    path_before = path_then(opened, other, path, other.step.number or 0)
    with suppress(StorageError):
        now, then = (
            {
                ".".join(map(str, leaf.path)): leaf.local or leaf.shape
                for leaf in leaves
                if leaf.shape
            }
            for leaves in (leaves_at(opened, path), leaves_at(other, path_before))
        )
        changed = [
            fqn
            for fqn, shape in now.items()
            if (counts_new if fqn not in then else then[fqn] != shape)
        ]
        return 2 * len(changed) >= len(now) > 0
    return False


def is_redistributed(
    opened: OpenStep,
    families: Sequence[Family],
    other: OpenStep,
    other_families: Iterable[Family],
) -> bool:
    """Whether the files of each kind together hold as many weights and moments as in another step.

    So do those of other ranks: of a pipeline, each holds other tensors then. In both steps each
    file of such a kind must hold some: one without would not be missed. Kinds without tensors must
    have as many files as one that has them.
    Cost: the pickle of each file, which are known by then.
    """
    before = [*other_families]
    now, then = _elements_by_key(opened, families), _elements_by_key(other, before)
    if not now or now != then:
        return False
    n_files = {family.n_files for family in families if family.key in now}
    return (
        all(family.n_files in n_files for family in families)
        and _each_file_holds_some(opened, [one for one in families if one.key in now])
        and _each_file_holds_some(other, [one for one in before if one.key in then])
    )


def _each_file_holds_some(opened: OpenStep, families: Sequence[Family]) -> bool:
    """Whether each file of the families holds weights or moments."""
    files: dict[str, set[str]] = defaultdict(set)
    for key, tensor in _tensors_of(opened, families, _WEIGHTS_AND_MOMENTS):
        files[key].add(tensor.file)
    return all(len(files[family.key]) == family.n_present for family in families)


def _elements_by_key(
    opened: OpenStep, families: Iterable[Family], kinds: Sequence[str] = _WEIGHTS_AND_MOMENTS
) -> Mapping[str, int]:
    """The elements of tensors of `kinds` in the files of each family; none where one is unread."""
    elements: dict[str, int] = defaultdict(int)
    for key, tensor in _tensors_of(opened, families, kinds):
        elements[key] += prod(tensor.shape)
    return elements


def _tensors_of(
    opened: OpenStep, families: Iterable[Family], kinds: Sequence[str]
) -> Iterator[tuple[str, HeldTensor]]:
    """The tensors of `kinds` in the files of each family; none where a file is unread."""
    keys, layout = {family.key for family in families}, opened.step.layout
    with suppress(StorageError):
        tensors, unlisted = opened.tensors_in_files
        for tensor in () if unlisted else tensors:
            key = kind_key(tensor.file, layout)
            # Each rank has the counts and random states of its own.
            if prod(tensor.shape) > 1 and key in keys and tensor.kind in kinds:
                yield key, tensor


def ranks_inside(opened: OpenStep, families: Sequence[Family]) -> int | None:
    """How many ranks wrote the step, by the counts in its files; None where none or several do.

    Cost: the pickle of each file, which are known by then.
    """
    files = [file for file in opened.files if file.kind == "file"]
    keys = {family.key for family in families}
    examples = {key_of(file.path): file.path for file in files if key_of(file.path) in keys}
    with suppress(StorageError):
        counts = {
            leaf.value
            for path in examples.values()
            for leaf in leaves_at(opened, path)
            if leaf.value and str(leaf.path[-1] if leaf.path else "").lower() in _COUNTS_OF_RANKS
        }
        return counts.pop() if len(counts) == 1 else None
    return None


def are_copies(opened: OpenStep, families: Iterable[Family]) -> bool:
    """Whether the files of each family are several, and copies of each other.

    Cost: two short reads of each file.
    """
    for family in families:
        paths = [file.path for file in opened.files if key_of(file.path) == family.key]
        with suppress(StorageError):
            checksums = {checksums_in(opened, path) for path in paths}
            if len(paths) > 1 and len(checksums) == 1 and None not in checksums:
                continue
        return False
    return True


def sizes_in_families(opened: OpenStep, families: Sequence[Family]) -> TensorSizes:
    """The size of each tensor over the files of each family; of files that cannot be read, none."""
    layout = opened.step.layout
    return tensor_sizes(opened, {f.key for f in families}, lambda path: kind_key(path, layout))


def shapes_by_key(
    opened: OpenStep, families: Iterable[Family]
) -> Mapping[str, set[tuple[int, ...]]]:
    """The shapes of the tensors of several elements in the files of each family."""
    shapes: dict[str, set[tuple[int, ...]]] = {family.key: set() for family in families}
    tensors, unlisted = opened.tensors_in_files
    for tensor in () if unlisted else tensors:
        if prod(tensor.shape) > 1 and key_of(tensor.file) in shapes:
            shapes[key_of(tensor.file)].add(tensor.shape)
    return shapes
