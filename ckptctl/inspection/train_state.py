"""Find the train state of a step, and check that a resume has what it needs.

What an entry or a file is decides `formats.frameworks.state_keys`. Where someone has read
the small values, they are shown; a missing value never makes a step worse. Whether the
optimizer's shards belong to one save is checked here too: it is the only trace that a save over
an older step leaves in the values.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from ckptctl.findings import Finding
from ckptctl.formats.families import files_by_kind
from ckptctl.formats.frameworks.file_names import is_adapter_file, kind_of_file
from ckptctl.formats.frameworks.parts import may_be_archive
from ckptctl.formats.frameworks.state_keys import (
    Leaf,
    Shapes,
    StateKind,
    StateMap,
    entries_of,
    entry_kinds,
    file_holds_no_state,
    holds_output,
    is_count_of_one_rank,
    is_of_adapter,
    kinds_in_file,
    leaves_of,
    mapped_file,
    optimizer_is_hollow,
    optimizer_steps,
    outermost_key,
    weights_of,
)
from ckptctl.formatting import command_line, counted, inside, listed, some_of, verb
from ckptctl.inspection.sidecars import scalar, steps_inside
from ckptctl.inspection.structure import Structure
from ckptctl.model import STATE_KINDS, FileInfo, Metadata, StatePart, TrainState, UnrecognizedEntry
from ckptctl.outside_numbers import MOST

if TYPE_CHECKING:
    from ckptctl.inspection.open_step import OpenPart

_EXAMPLES = 3


_COUNTED = ("step", "tokens")


@dataclass(frozen=True, slots=True)
class Sources:
    """Where train state can be: metadata by part, files beside the shards, and values read.

    `sidecars` are files outside the tensor parts. `contents` are the decoded contents
    of those sidecars that were read, `numbers` the values of scalar entries
    by (part, FQN). `number` is the training step in the step's name, where it has one, and
    `mapped` what a person states about entries and files. `copies` are files whose counts are
    those of the weights in them: they may be of another step.
    """

    layout: str
    metadata: Sequence[tuple[str, Metadata]]
    sidecars: Sequence[FileInfo]
    contents: Mapping[str, object]
    numbers: Mapping[tuple[str, str], int]
    number: int | None = None
    mapped: StateMap = ()
    copies: Collection[str] = ()


NO_STATE = TrainState()
"""What is known of a step that could not be inspected."""


class _StateLocation(NamedTuple):
    """One place that holds a kind of train state; `rank` and `value` where it has one."""

    kind: str
    where: str
    rank: str | None = None
    value: int | None = None
    of_adapter: bool = False


def train_state(sources: Sources) -> TrainState:
    """Which kinds of train state are there, where, and for how many ranks.

    Cost: that of `kinds_of`, twice where no file alone shows an optimizer; nothing is read.
    """
    state = _state_in(sources, ())
    n_places = len(sources.metadata) + len(sources.contents)
    if state.optimizer.found or n_places < 2:
        return state
    # Averages of gradients are known by the parameters, which may lie in another file.
    parts = [
        (part, weights_of(leaf for _, leaf in entries_of(one))) for part, one in sources.metadata
    ]
    files = [(path, weights_of(leaves_of(content))) for path, content in sources.contents.items()]
    return _state_in(sources, (*parts, *files))


def _state_in(sources: Sources, weights: Sequence[tuple[str, Shapes]]) -> TrainState:
    """The train state, where `weights` are those of each metadata and each file, in order."""
    held: list[_StateLocation] = []
    unrecognized: dict[str, set[str]] = defaultdict(set)
    keys: set[str] = set()
    beside = _others(weights, len(sources.metadata) + len(sources.contents))
    for part, metadata in sources.metadata:
        entries = [*entries_of(metadata)]
        kinds = entry_kinds(metadata, part, sources.mapped, next(beside))
        places = [
            _StateLocation("", inside(part, fqn), None, sources.numbers.get((part, fqn)))
            for fqn, _ in entries
        ]
        leaves = [leaf for _, leaf in entries]
        held += _held_in(leaves, [kinds[fqn] for fqn, _ in entries], places)
        for fqn, leaf in entries:
            keys.update(_tensor_key(leaf, kinds[fqn]))
            if kinds[fqn].may_be:
                key = outermost_key(leaf)
                unrecognized[inside(part, key)].update(kinds[fqn].may_be)
    read: dict[tuple[str, ...], frozenset[str]] = {}
    unread: list[str] = []
    beside_files = {path: next(beside) for path in sources.contents}
    for file in sources.sidecars:
        by_name = kind_of_file(sources.layout, file.path)
        if file.path in sources.contents:
            weights_beside = beside_files[file.path]
            in_file = [*_held_by_file(sources, file.path, weights_beside, unrecognized, keys)]
            if by_name is not None and by_name.rank is not None:
                read.setdefault(by_name.names, frozenset(one.kind for one in in_file))
            held += in_file
        elif file.size > 0 and file.kind == "file":
            kinds_by_name: Iterable[str] = by_name.names if by_name else ()
            if by_name is not None and by_name.rank is not None:
                # Of files that exist once per rank, one is read and stands for the others.
                kinds_by_name = read.get(by_name.names) or kinds_by_name
            mapped = mapped_file(file.path, sources.mapped)
            for kind in (mapped,) if mapped else kinds_by_name:
                rank = by_name.rank if by_name else None
                held.append(
                    _StateLocation(kind, file.path, rank, of_adapter=is_adapter_file(file.path))
                )
            if not (mapped or by_name or file_holds_no_state(file.path)):
                unread += [file.path] if may_be_archive(file.path) else []
    # Of files whose names differ by numbers alone, one that was read stands for the others.
    known = {_without_numbers(path) for path in sources.contents}
    for path in unread:
        if _without_numbers(path) not in known:
            known.add(_without_numbers(path))
            unrecognized[path].update(STATE_KINDS)
            keys |= {_without_numbers(path)}
    by_kind: dict[str, list[_StateLocation]] = defaultdict(list)
    for one in held:
        if one.kind in _COUNTED and one.where.partition(": ")[0] in sources.copies:
            # No step needs the count of a copy, and one of another step is none of this.
            is_of_step = one.value is None or abs(one.value - (sources.number or 0)) <= 1
            one = one._replace(where="", value=one.value if is_of_step else None)
        by_kind[one.kind].append(one)
    state = TrainState(
        **{kind: _state_part(kind, by_kind[kind]) for kind in STATE_KINDS if by_kind[kind]},
        unrecognized=tuple(_each_key_once(unrecognized, {one.kind for one in held})),
        tensor_keys=frozenset(keys),
    )
    counts = [one.value for one in by_kind["step"] if one.value is not None]
    value = likeliest_step(counts, sources.number)
    state = replace(state, step=replace(state.step, value=value))
    if any(is_count_of_one_rank(where) for where in state.tokens.where):
        n_ranks, own = state.dataloader.n_ranks, state.tokens.value
        total = own * n_ranks if own is not None and n_ranks else None
        return replace(state, tokens=replace(state.tokens, value=total, of_each_rank=own))
    return state


def _others(weights: Sequence[tuple[str, Shapes]], n_places: int) -> Iterator[Shapes]:
    """For each place the weights in the others, but for those whose names differ by numbers alone.

    Nothing where no `weights` are given.
    """
    names = [_without_numbers(name) for name, _ in weights] or [""] * n_places
    for name in names:
        others = [held for other, (_, held) in zip(names, weights, strict=False) if other != name]
        yield {path: shape for held in others for path, shape in held.items()}


def _without_numbers(text: str) -> str:
    return re.sub("[0-9]+", "#", text)


def _tensor_key(leaf: Leaf, kind: StateKind) -> Iterator[str]:
    """The outermost key of a tensor, or of what may hold some."""
    if (leaf.shape and kind.names != ("rng",)) or (leaf.content == "unread" and kind.may_be):
        yield _without_numbers(outermost_key(leaf))


def _each_key_once(
    unrecognized: Mapping[str, Collection[str]], held: Collection[str]
) -> Iterator[UnrecognizedEntry]:
    """The entries that are not recognized; of those that each rank has, the first.

    What can only be the optimizer is not listed where one of the kinds that are `held` is it.
    """
    keys: set[str] = set()
    for where, may_be in sorted(unrecognized.items()):
        if {*may_be} == {"optimizer"} and "optimizer" in held:
            continue
        entry = UnrecognizedEntry(where, tuple(kind for kind in STATE_KINDS if kind in may_be))
        if entry.key not in keys:
            keys.add(entry.key)
            yield entry


def likeliest_step(counts: Iterable[int], number: int | None) -> int | None:
    """The count that agrees with the step's name; without one, the furthest.

    Trainers count within an epoch or a phase too.
    """
    values = sorted({*counts}, reverse=True)
    if number is not None:
        values.sort(key=lambda value: (abs(value - number) > 1, abs(value - number) > 0))
    return values[0] if values else None


def _state_part(kind: str, held: Sequence[_StateLocation]) -> StatePart:
    ranks = {one.rank for one in held if one.rank is not None}
    counts = held if kind in _COUNTED else ()
    values = [one.value for one in counts if one.value is not None]
    where = tuple(sorted({one.where for one in held if one.where})[:_EXAMPLES])
    return StatePart(
        True,
        where,
        len(ranks) or None,
        max(values, default=None),
        of_adapter=kind == "model" and all(one.of_adapter for one in held),
    )


def _held_in(
    leaves: Sequence[Leaf], kinds: Sequence[StateKind], places: Sequence[_StateLocation]
) -> Iterator[_StateLocation]:
    """The places that hold state; not those of an optimizer without state.

    Of LitGPT's two counts `step_count` is that of steps.
    Source: LitGPT 0.5 `pretrain.py` (`iter_num` counts micro-batches).
    """
    names = {leaf.path[-1:] for leaf in leaves}
    is_of_litgpt = names >= {("step_count",), ("iter_num",)}
    optimizers = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if _is_optimizer(kind)]
    is_hollow = optimizer_is_hollow(optimizers)
    for leaf, kind, place in zip(leaves, kinds, places, strict=True):
        if kind.names[0] in STATE_KINDS and not (is_hollow and _is_optimizer(kind)):
            of_adapter = place.of_adapter or is_of_adapter(leaf)
            rank = place.rank or kind.rank
            if is_of_litgpt and leaf.path[-1:] == ("iter_num",):
                place = place._replace(value=None)
            yield place._replace(kind=kind.names[0], rank=rank, of_adapter=of_adapter)


def _is_optimizer(kind: StateKind) -> bool:
    return kind.names == ("optimizer",)


def _held_by_file(
    sources: Sources, path: str, beside: Shapes, unrecognized: dict[str, set[str]], keys: set[str]
) -> Iterator[_StateLocation]:
    """What a decoded file holds; what is not recognized goes to `unrecognized`.

    `beside` are the weights in the other files.
    """
    by_name = kind_of_file(sources.layout, path)
    leaves = [*leaves_of(sources.contents[path])]
    if by_name is None and not sources.mapped and holds_output(path, leaves):
        return
    kinds = kinds_in_file(leaves, by_name, sources.mapped, path, beside)
    rank = by_name.rank if by_name else None
    names = by_name.names if by_name else ()
    is_named = len(names) == 1
    # Beside its RNG states accelerate counts the batches of the epoch, not training steps.
    counts = names != ("rng",)
    places = []
    for leaf, kind in zip(leaves, kinds, strict=True):
        key = outermost_key(leaf)
        where = path if is_named or not leaf.path else f"{path}: {key}"
        value = leaf.value if counts else None
        places.append(_StateLocation("", where, rank, value, is_adapter_file(path)))
        keys.update(_tensor_key(leaf, kind))
        if kind.may_be:
            unrecognized[where].update(kind.may_be)
    yield from _held_in(leaves, kinds, places)
    for always in by_name.always if by_name else ():
        yield _StateLocation(always, path, rank)


def check_required(state: TrainState, require: Iterable[str], url: str) -> Iterator[Finding]:
    """Yield what a resume would not restore, and what it may, if it is recognized.

    `require` are the kinds that the caller asked for; a finding that lacks one of them is
    `unmet`. Yields `state.adapter` for an adapter without a base model, one `state.missing`
    for the kinds that are absent, and one `state.unrecognized` for the entries that may be the
    others.
    """
    require = [*require]
    show = command_line("show", url)
    if state.model.of_adapter:
        yield Finding(
            "state.adapter",
            state.model.where[0],
            "the weights are those of an adapter alone: no base model, which a resume needs as it "
            "was, is recognized in the step, and none is checked",
            next_command=show,
        )
    if state.absent:
        required = [kind for kind in require if kind in state.absent]
        message = f"a resume from here does not restore {listed(state.absent)}"
        if required:
            message += f"; {listed(required)} is required"
        yield Finding(
            "state.missing",
            ", ".join(state.absent),
            message,
            expected=listed(require) if required else listed(STATE_KINDS),
            found=listed(state.held) or "nothing",
            next_command=show,
            unmet=bool(required),
        )
    if state.unrecognized:
        required = [kind for kind in require if kind in state.unknown]
        kind = (required or state.unknown or state.unrecognized[0].may_be)[0]
        entry = next(one for one in state.unrecognized if kind in one.may_be)
        keys = [one.key for one in state.unrecognized]
        message = f"not recognized: {some_of(keys)}"
        if state.unknown:
            message += f"; whether a resume restores {listed(state.unknown, 'or')} is unknown"
        message += f"; map it with --state {kind}={entry.key}"
        if required:
            message += f"; {listed(required)} is required"
        yield Finding(
            "state.unrecognized",
            state.unrecognized[0].where,
            message,
            next_command=show,
            unmet=bool(required),
        )


Shape = tuple[str, tuple[int, ...]]
"""The dtype and the shape of a tensor."""


_WRAPPERS_OF_MODULES = frozenset(
    {"_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
)
"""What wrappers add to the names of parameters.

Source: torch 2.13 `_dynamo/eval_frame.py` (`OptimizedModule`), `nn/parallel/distributed.py`,
`distributed/fsdp/_common_utils.py`, `distributed/algorithms/_checkpoint/checkpoint_wrapper.py`.
"""


def check_names(
    now: Mapping[str, Shape], then: Mapping[str, Shape], before: str, url: str
) -> Iterator[Finding]:
    """Yield one `state.renamed` where tensors of the step `before` have other names now.

    A tensor that is gone and a new one of the same dtype and shape are taken for the same if
    their names differ in the words of wrappers, or if they end with the same word and as many
    are gone as are new. Cost: one comparison per name.
    """
    gone = {name: then[name] for name in then if name not in now}
    new = {name: now[name] for name in now if name not in then}
    pairs = _pairs(gone, new, without_wrappers)
    if not pairs and len(gone) == len(new):
        pairs = _pairs(gone, new, lambda name: (name.rpartition(".")[2],))
        pairs = pairs if len(pairs) == len(gone) else []
    if not pairs:
        return
    examples = ", ".join(f"{old} is now {name}" for old, name in pairs[:2])
    yield Finding(
        "state.renamed",
        pairs[0][1],
        f"{counted(len(pairs), 'tensor')} of {len(now):,} "
        f"{verb(len(pairs), 'has another name', 'have other names')} than in {before}: {examples}; "
        "a job that does not expect the new names cannot load this step",
        next_command=command_line("show", url, "--tensors"),
    )


def _pairs(
    gone: Mapping[str, Shape], new: Mapping[str, Shape], ending: Callable[[str], Sequence[str]]
) -> list[tuple[str, str]]:
    """Names that are gone and new ones of the same ending and shape, in order."""
    left: dict[tuple[Sequence[str], Shape], list[str]] = defaultdict(list)
    for name, shape in gone.items():
        left[ending(name), shape].append(name)
    found = ((left[ending(name), shape], name) for name, shape in new.items())
    return [(names.pop(0), name) for names, name in found if names]


def without_wrappers(name: str) -> Sequence[str]:
    """The words of a parameter's name but for those that wrappers of modules add."""
    return tuple(word for word in name.split(".") if word not in _WRAPPERS_OF_MODULES)


def check_optimizer_steps(
    steps: Mapping[str, Sequence[tuple[str, float]]], url: str
) -> Iterator[Finding]:
    """Yield `state.mixed` where the shard files were written at different steps.

    `steps` holds, for each optimizer, the `step` value of each parameter with the
    shard file that holds it. An optimizer counts every parameter alike, but for
    those that got no gradient for a while: their counts differ inside a file too.
    A finding therefore needs two files, each of one mind in two values or more,
    that disagree.
    """
    for optimizer, values in sorted(steps.items()):
        by_file: dict[str, list[float]] = defaultdict(list)
        for file, value in values:
            by_file[file].append(value)
        firm = {
            file: found[0]
            for file, found in by_file.items()
            if len(found) >= 2 and len(set(found)) == 1
        }
        agreed = all(len(set(found)) == 1 for found in by_file.values())
        if not agreed or len(set(firm.values())) < 2:
            continue
        # Of as many files on either side, the older ones were left by an earlier save.
        usual, _ = max(Counter(firm.values()).items(), key=lambda one: (one[1], one[0]))
        odd = {file: value for file, value in sorted(firm.items()) if value != usual}
        file, value = next(iter(odd.items()))
        yield Finding(
            "state.mixed",
            file,
            f"{optimizer} was at step {value:g} when {file} was written, and at step "
            f"{usual:g} when the others were: a save over an older step was interrupted",
            expected=f"step {usual:g} in every shard file",
            found=", ".join(f"{name}: {step:g}" for name, step in list(odd.items())[:_EXAMPLES]),
            next_command=command_line("show", url),
        )


def steps_by_optimizer(
    metadatas: Sequence[Metadata], structure: Structure, part_path: str
) -> Mapping[str, Sequence[tuple[str, float]]]:
    """For each optimizer, the shard file and the value of each parameter's `step`."""
    optimizers = {k: v for metadata in metadatas for k, v in optimizer_steps(metadata).items()}
    steps: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for value in structure.values:
        stub = value.stub
        number = None if stub is None else scalar(stub, value.data, value.byte_order)
        if number is not None:
            where = inside(part_path, value.byte_range.file)
            steps[optimizers[value.fqn]].append((where, number))
    return steps


MAX_COMPARED = 512
"""So many files of a kind are opened for the steps that they count."""


def steps_by_rank(part: OpenPart) -> Mapping[str, Sequence[tuple[str, float]]]:
    """For each kind of rank file, each file and the steps that it counts.

    A file of a known kind that has one count has it twice. Cost: as `steps_inside` for each file
    that holds an optimizer or a count, of kinds with several.
    """
    layout = part.opened.step.layout
    sizes = {file.path: file.size for file in part.part.files}
    found: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for kind, paths in files_by_kind(part.part.files, layout).items():
        held = kind_of_file(layout, paths[0])
        is_counted = held is None or not {"optimizer", "step"}.isdisjoint(
            {*held.names} - {*held.always}
        )
        for path in paths[:MAX_COMPARED] if is_counted and len(paths) > 1 else ():
            steps = steps_inside(part.store, part.in_store(path), sizes[path])
            # One count is all that a file of a known kind may have; of other files it may be
            # a count of the rank's own.
            steps = steps if held is None or len(steps) > 1 else steps * 2
            found[kind] += [(path, float(n)) for n in steps if abs(n) <= MOST]
    return found
